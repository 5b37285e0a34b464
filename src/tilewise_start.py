"""Where the `tilewise` command starts: help is there at once, because torch is imported by what needs it.

A module of a package cannot be imported before the package itself, and `import tilewise` imports torch, which takes
seconds. So the package stands here unexecuted at first: it knows where its modules are, and the parser's own are
imported. The first other module, or the first name that is asked of the package, has all of it imported first, as
`import tilewise` does it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "tilewise"
PARSER = ("tilewise.cli", "tilewise.bench")  # with what is under them


class Unexecuted(ModuleType):
    """A package whose __init__ runs when somebody asks for a name that is not there."""

    def __getattr__(self, name: str) -> Any:
        execute(self)
        return getattr(self, name)


class Others(MetaPathFinder):
    """Finds nothing; executes the package when a module is looked for that is none of the parser's."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.startswith(f"{PACKAGE}.") and ".".join(name.split(".")[:2]) not in PARSER:
            execute(sys.modules[PACKAGE])
        return None


def execute(package: ModuleType) -> None:
    """Run the package's __init__, once."""
    if isinstance(package, Unexecuted):
        package.__class__ = ModuleType  # type: ignore[assignment]  # names are as they are from here on
        spec = package.__spec__
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(package)


def defer() -> None:
    """Put the package in its place unexecuted, unless it was imported already."""
    spec = None if PACKAGE in sys.modules else importlib.util.find_spec(PACKAGE)
    if spec is not None:
        package = importlib.util.module_from_spec(spec)
        package.__class__ = Unexecuted
        sys.modules[PACKAGE] = package
        sys.meta_path.insert(0, Others())


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    defer()
    from tilewise.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
