"""The tensors of a call under another package's names, and the public call that they make."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewise import api
from tilewise.scores import ScoreOptions


class Inputs(NamedTuple):
    """The tensors of a call: dense, q (B, Nq, Hq, D) and k, v (B, Nk, Hkv, D); or packed as in `attention_varlen`.

    starts: cu_seqlens of q and of k, None if dense. page_table: None if k and v are not paged.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    starts_q: torch.Tensor | None = None
    starts_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None


def attend(
    inputs: Inputs, asked: ScoreOptions, return_lse: bool, deterministic: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o, and the LSE if asked for, of the one public call that these are; its gradients are that call's."""
    q, k, v, slopes, sinks, starts_q, starts_k, page_table = inputs
    options: dict[str, Any] = {
        **asked, "alibi_slopes": slopes, "sinks": sinks, "return_lse": return_lse, "deterministic": deterministic,
    }  # fmt: skip
    if starts_q is None or starts_k is None:
        result = api.attention(q, k, v, **options)
    else:
        result = api.attention_varlen(q, k, v, starts_q, starts_k, page_table=page_table, **options)
    return (result, None) if isinstance(result, torch.Tensor) else result
