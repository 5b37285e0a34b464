"""The tensors of a call under another package's names, and the public call that they make."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tilewise import api
from tilewise.scores import ScoreOptions


class Inputs(NamedTuple):
    """The tensors of a call: dense, q (B, Nq, Hq, D), k (B, Nk, Hkv, D), v (B, Nk, Hkv, Dv); or packed as in
    `attention_varlen`, where rows after the last sequence belong to nobody.

    starts: cu_seqlens of q and of k, None if dense. page_table: None if k and v are not paged. qv: as q, Dv channels.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    starts_q: torch.Tensor | None = None
    starts_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    qv: torch.Tensor | None = None


def attend(
    inputs: Inputs, asked: ScoreOptions, return_lse: bool, **rest: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o, and the LSE if asked for, of the one public call that these are; its gradients are that call's.

    rest: other options that both calls have.
    """
    q, k, v, slopes, sinks, starts_q, starts_k, page_table, qv = inputs
    options: dict[str, Any] = {**asked, "alibi_slopes": slopes, "sinks": sinks, "return_lse": return_lse, **rest}
    if starts_q is None or starts_k is None:
        result = api.attention(q, k, v, qv=qv, **options)
        return (result, None) if isinstance(result, torch.Tensor) else result
    # `attention_varlen` takes rows after the last sequence where it does not see the lengths, and nowhere else.
    nobodys = q.shape[0] - end_of(starts_q, q)
    if page_table is None:
        used = end_of(starts_k, k)
        k, v = k[:used], v[:used]
    q = q[: q.shape[0] - nobodys]
    qv = None if qv is None else qv[: q.shape[0]]
    result = api.attention_varlen(q, k, v, starts_q, starts_k, page_table=page_table, qv=qv, **options)
    o, lse = (result, None) if isinstance(result, torch.Tensor) else result
    if nobodys:
        o = F.pad(o, (0, 0, 0, 0, 0, nobodys))
        lse = None if lse is None else F.pad(lse, (0, nobodys))
    return o, lse


def end_of(starts: torch.Tensor, x: torch.Tensor) -> int:
    """Where the last sequence ends, as far as that is known without waiting; else all of x."""
    known = starts.device.type == "cpu" and len(starts) > 0 and not torch.compiler.is_compiling()
    return min(max(0, int(starts[-1])), x.shape[0]) if known else x.shape[0]


def sequence_of(starts: torch.Tensor, rows: int) -> torch.Tensor:
    """(rows,) int64: the sequence of each packed row; rows after the last one count as its."""
    row = torch.arange(rows, device=starts.device)
    found = torch.searchsorted(starts.long(), row, right=True) - 1
    return found.clamp_max(max(0, len(starts) - 2))
