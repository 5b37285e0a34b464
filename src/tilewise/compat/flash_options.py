"""Arguments of flash_attn's calls, checked and in the form of Tilewise's; results in the form of flash_attn's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tilewise import checks
from tilewise.scores import ScoreOptions, Window

NO_WINDOW = (-1, -1)


def asked_of(softmax_scale: Any, causal: Any, window_size: Any, softcap: Any) -> ScoreOptions:
    """Under the names of `tilewise.attention`. window_size: (left, right), −1 for no limit, a tensor too. softcap: 0 or
    less for none."""
    scale = None if softmax_scale is None else checks.number("softmax_scale", softmax_scale)
    capped = max(0.0, checks.number("softcap", softcap))
    return {
        "causal": checks.flag("causal", causal), "window": _window(window_size), "scale": scale, "softcap": capped,
    }  # fmt: skip


def _window(window_size: Any) -> Window | None:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be (left, right), −1 for no limit, got {window_size!r}") from None
    sides = [checks.integer("window_size", side) for side in (left, right)]
    left, right = (None if side < 0 else side for side in sides)
    return None if left is None and right is None else (left, right)


def check_sink(learnable_sink: Any, q: torch.Tensor) -> None:
    if learnable_sink is not None:
        shape = (q.shape[-2],)
        checks.tensor("learnable_sink", learnable_sink, shape=shape, dtypes=checks.FLOATS, device=q.device)


def rows(name: str, x: Any, shape: Sequence[int | str]) -> torch.Tensor:
    """x of this shape with its last stride 1, copied if it has another: flash_attn takes any."""
    given = checks.tensor(name, x, shape=shape)
    # Not contiguous(): that leaves an empty tensor its strides, whatever they are.
    return given if given.stride(-1) == 1 else given.clone(memory_format=torch.contiguous_format)


def as_flash_attn(lse: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of the LSE with +inf, flash_attn's value, where a row has no visible key."""
    return lse.masked_fill(lse == -math.inf, math.inf)
