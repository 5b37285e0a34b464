"""Packages that only some of Tilewise needs, and what to install where one is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def extra(module: str) -> Iterator[None]:
    """Import a package, and whatever of it is imported within.

    Where it is not installed, or too old to have what is imported, the ImportError says how to get it: by the extra
    of Tilewise's that has its name. An error of what the package itself imports is passed on.
    """
    try:
        import_module(module)
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != module:
            raise
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        what = "which is not installed" if missing else f"and the one installed does not serve: {error}"
        kind = ModuleNotFoundError if missing else ImportError
        raise kind(
            f"this needs {module}, {what}; pip install {'' if missing else '-U '}'tilewise[{module}]'",
            name=error.name,
            path=error.path,
        ) from error
