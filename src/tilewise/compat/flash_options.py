"""Arguments of flash_attn's calls, checked and in the form of Tilewise's; results in the form of flash_attn's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tilewise import checks
from tilewise.gpu.abi import FP8
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


def more_asked_of(q: torch.Tensor, attention_chunk: Any, descales: Sequence[torch.Tensor | None]) -> dict[str, Any]:
    """What FlashAttention-3's calls take beyond flash_attn 2's, under the names of `tilewise.attention`.

    attention_chunk: 0 for none. descales: of q, k and v, left unread where these are not FP8.
    """
    given = zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)
    chunk = checks.integer("attention_chunk", attention_chunk, 0) or None
    return {"chunk": chunk, **(dict(given) if q.dtype == FP8 else {})}


def rows_of_qv(qv: Any, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """The second query: as q, with v's head_dim."""
    return None if qv is None else rows("qv", qv, (*q.shape[:-1], v.shape[-1]))


def check_tuning(num_splits: Any, pack_gqa: Any, sm_margin: Any) -> None:
    """How FlashAttention-3 is to cut its work: nothing that changes a result."""
    checks.integer("num_splits", num_splits, 0)
    checks.integer("sm_margin", sm_margin, 0)
    if pack_gqa is not None:
        checks.flag("pack_gqa", pack_gqa)


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
