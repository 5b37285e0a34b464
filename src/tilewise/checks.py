"""Argument checks with one voice: every message names the argument, what was given and what is taken.

`TypeError` for the wrong kind of thing, `ValueError` for the wrong shape, dtype, device, layout or value,
`NotImplementedError` for what makes sense but is not served, with what to use instead. Nothing here changes anything,
so a public call that checks first leaves the world as it was when it raises.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
MAX_HEAD_DIM = 576


def _names(dtypes: Collection[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def _spelt(shape: Sequence[int | str | None]) -> str:
    return "(" + ", ".join("*" if s is None else str(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"


def tensor(
    name: str,
    x: Any,
    *,
    shape: Sequence[int | str | None] | None = None,
    dtypes: Collection[torch.dtype] | None = None,
    device: torch.device | None = None,
    unit_last_stride: bool = False,
    like: str | None = None,
) -> torch.Tensor:
    """`x` as a tensor of the given `shape`: an int is a fixed size, a string names a free one, None is free.

    like: the argument whose dtype, the one in `dtypes`, and whose device it must have.
    """
    if not isinstance(x, torch.Tensor):
        instead = "; use torch.from_numpy" if isinstance(x, np.ndarray) else ""
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}{instead}")
    if shape is not None and x.dim() != len(shape):
        raise ValueError(f"{name} must have {len(shape)} dimensions {_spelt(shape)}, got shape {tuple(x.shape)}")
    if shape is not None and any(isinstance(s, int) and s != n for s, n in zip(shape, x.shape, strict=True)):
        raise ValueError(f"{name} must have shape {_spelt(shape)}, got {tuple(x.shape)}")
    if dtypes is not None and x.dtype not in dtypes:
        if like is not None:
            same = f"{like}'s dtype {_names(dtypes)}, got {_names([x.dtype])}; use {name}.to({like}.dtype)"
            raise ValueError(f"{name} must have {same}")
        raise ValueError(f"{name} must be one of {_names(dtypes)}, got {_names([x.dtype])}")
    if device is not None and x.device != device:
        other, instead = ("the other tensors", f'"{device}"') if like is None else (like, f"{like}.device")
        raise ValueError(f"{name} must be on {device} like {other}, got {x.device}; use {name}.to({instead})")
    if unit_last_stride and x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"{name} must have stride 1 in its last dimension, got strides {x.stride()}; use {name}.contiguous()"
        )
    return x


def not_float64(name: str, x: Any) -> None:
    """Refuse a tensor in float64: it means something, but no kernel computes in it."""
    if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
        raise NotImplementedError(
            f"{name} is float64, in which no kernel computes; use {name}.float(), or tilewise.reference, the oracle, "
            "which does"
        )


def head_dim(name: str, x: Any) -> int:
    """`x` as a head dimension that kernels have room for."""
    value = integer(name, x, 1)
    if value > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"{name} is {value}, and kernels take at most {MAX_HEAD_DIM}; use "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    return value


def integer(name: str, x: Any, low: int | None = None, high: int | None = None, hint: str = "") -> int:
    """`x` as an int in [low, high]. hint: what to give instead of another one."""
    hint = hint and f"; {hint}"
    try:
        value = operator.index(x)
    except (TypeError, RuntimeError):
        value = None
    if value is None or isinstance(x, (bool, np.bool_)) or (isinstance(x, torch.Tensor) and x.dtype == torch.bool):
        raise TypeError(f"{name} must be an int, got {type(x).__name__}{hint}")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = [f"at least {low}"] * (low is not None) + [f"at most {high}"] * (high is not None)
        raise ValueError(f"{name} must be {' and '.join(bounds)}, got {value}{hint}")
    return value


def number(name: str, x: Any, low: float | None = None, hint: str = "") -> float:
    """`x` as a finite float, at least `low`. hint: what to give instead of another one."""
    hint = hint and f"; {hint}"
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name} must be a float, got {type(x).__name__}{hint}")
    try:
        value = float(x)
    except OverflowError:  # an int too long for a float
        value = math.inf
    if not math.isfinite(value) or (low is not None and value < low):
        least = "" if low is None else f" and at least {low}"
        raise ValueError(f"{name} must be finite{least}, got {x}{hint}")
    return value


def choice(name: str, x: Any, options: Collection[Any]) -> Any:
    """`x`, which must be one of `options`."""
    if x not in options:
        raise ValueError(f"{name} must be one of {', '.join(repr(o) for o in options)}, got {x!r}")
    return x


def flag(name: str, x: Any) -> bool:
    """`x` as a bool; 0 and 1 are refused because they are usually a misplaced argument."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {x!r} ({type(x).__name__})")
    return bool(x)


def place(out: torch.Tensor | None, *inputs: torch.Tensor) -> torch.Tensor | None:
    """Where states may be built: `out`, unless it may overlap an input that is still to be read."""
    if out is None:
        return None
    shared = any(x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() for x in inputs)
    return None if shared else out
