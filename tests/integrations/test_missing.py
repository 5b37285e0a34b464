"""Importing an integration whose package is not there, or too old: an ImportError that says what to install."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

MODULES = {
    "tilewise.integrations.transformers": "transformers",
    "tilewise.integrations.transformers_flex": "transformers",
    "tilewise.integrations.transformers_mask": "transformers",
    "tilewise.integrations.thunder": "thunder",
}


@pytest.fixture
def imported_anew(monkeypatch):
    """Import a module as for the first time, with another module in a package's place."""

    def load(module, package, stand_in):
        for name in list(sys.modules):
            if name in MODULES or name.partition(".")[0] == package:
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, stand_in)
        return importlib.import_module(module)

    return load


@pytest.mark.parametrize("module", MODULES)
def test_a_package_that_is_not_installed(imported_anew, module):
    package = MODULES[module]
    with pytest.raises(ModuleNotFoundError) as caught:
        imported_anew(module, package, None)
    assert str(caught.value) == (f"this needs {package}, which is not installed; pip install 'tilewise[{package}]'")
    assert caught.value.name == package


@pytest.mark.parametrize("module", MODULES)
def test_a_package_that_is_too_old(imported_anew, module):
    package = MODULES[module]
    with pytest.raises(ImportError) as caught:
        imported_anew(module, package, types.ModuleType(package))
    assert f"this needs {package}, and the one installed does not serve: " in str(caught.value)
    assert str(caught.value).endswith(f"pip install -U 'tilewise[{package}]'")


def test_an_error_of_the_packages_own_imports_is_passed_on():
    from tilewise.integrations.extras import extra

    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'nothing_of_the_kind'$"), extra("json"):
        import nothing_of_the_kind  # noqa: F401


def test_the_extras_are_those_of_the_package():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for package in set(MODULES.values()):
        assert f"\n{package} = [" in project
