"""What no compiled graph holds: schedules, and functions of the user's. Code that makes or reads them is called as it
is, and a graph that is being compiled is broken there.

`torch.compiler.disable` alone says the same, but it imports torch's compiler, which takes longer than the rest of the
package together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
Class = TypeVar("Class", bound=type)


def outside(call: Callable[P, R], what: str = "") -> Callable[P, R]:
    """The call, at which a graph is broken. what: cannot be part of it, if not the call itself."""
    broken = f"{what or call.__qualname__} cannot be part of a compiled graph; leave fullgraph=True out"

    @functools.wraps(call)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=broken)
            made: R = torch.compiler.disable(call)(*args, **kwargs)
            return made
        return call(*args, **kwargs)

    return plain


def methods_outside(made: Class) -> Class:
    """A class whose makers and public methods are all called so."""
    for name, member in list(vars(made).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, classmethod):
            setattr(made, name, classmethod(outside(member.__func__)))
        elif callable(member):
            setattr(made, name, outside(member))
    return made
