"""Kernels that `attention(..., backend="emulator:NAME")` runs by name. Who has some (learn/) registers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

State = tuple[torch.Tensor, torch.Tensor]


class NamedKernel(NamedTuple):
    """A kernel that knows plain and causal problems only: run(q, k, v, causal, scale) -> o (B, Nq, Hq, D), lse."""

    name: str
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], State]


_kernels: dict[str, NamedKernel] = {}


def register(kernel: NamedKernel) -> None:
    _kernels[kernel.name] = kernel


def find(backend: str) -> NamedKernel | None:
    """The kernel that "emulator:NAME" names; None for "emulator" alone, which is the product's."""
    _, _, name = backend.partition(":")
    if name and name not in _kernels:
        raise ValueError(f"backend must name a rung after the colon, one of {', '.join(_kernels)}, got {name!r}")
    return _kernels.get(name)


def run(
    kernel: NamedKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Mapping[str, Any],
    scale: float,
) -> State:
    """The state before sinks join. NotImplementedError for an option that such a kernel does not know."""
    known = ("causal", "scale", "sinks")
    more = [name for name, value in options.items() if name not in known and not _unset(value)]
    if v.shape[-1] != q.shape[-1]:
        more.append("v of another head_dim")
    if more or scale <= 0:
        what = ", ".join(more) or "a scale that is not positive"
        raise NotImplementedError(f'rung {kernel.name} of the ladder has no {what}; use backend="cpu"')
    return kernel.run(q, k, v, options.get("causal", False), scale)


def _unset(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and value == 0)
