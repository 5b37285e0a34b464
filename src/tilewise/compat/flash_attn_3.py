"""The calls of FlashAttention-3's `flash_attn_interface`, served by Tilewise: same names, arguments and defaults.

    from tilewise.compat.flash_attn_3 import flash_attn_func  # was: from flash_attn_interface import flash_attn_func

They run on CUDA tensors, on every card since Ampere, and on CPU tensors. As there, v may have another head_dim than q
and k, `qv` is a second query that meets v in the scores, `attention_chunk` keeps attention inside blocks of positions,
and float8_e4m3fn inputs come with descales, give bfloat16, and have no gradients. What differs:

- float32 is taken, too, head dimensions need not be multiples of 8, and pages may have any size;
- `num_splits`, `pack_gqa`, `sm_margin` and `scheduler_metadata` are taken and change nothing: how work is cut is
  Tilewise's matter, and is the same whatever stands beside it in the batch;
- calls with `attention_chunk` or `qv` have gradients; rows that `seqused_q` leaves out give 0 and an LSE of −inf;
- descales of inputs that are not FP8 are left unread, as there.

causal and window_size align bottom-right. A row with no visible key gives output 0 and an LSE of −inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tilewise import checks, state
from tilewise.gpu.abi import FP8

from .flash_attn_3_cache import flash_attn_with_kvcache, get_scheduler_metadata
from .flash_options import NO_WINDOW, asked_of, check_tuning, more_asked_of, rows, rows_of_qv
from .inputs import Inputs, attend, end_of, sequence_of

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Sequence[int] | torch.Tensor = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over a batch of equally long sequences.

    q: (batch, seqlen_q, heads, head_dim); k: (batch, seqlen_k, heads_k, head_dim); v: (batch, seqlen_k, heads_k,
    value_dim), heads a multiple of heads_k. qv: (batch, seqlen_q, heads, value_dim); scores are then q · k + qv · v.
    softmax_scale: `head_dim ** -0.5` if None, with qv `(head_dim + value_dim) ** -0.5`. q_descale, k_descale,
    v_descale: (batch, heads_k) float32, what FP8 values are to be multiplied with. window_size: (left, right) keys seen
    to either side, −1 for no limit. attention_chunk: a query sees keys of its own block of so many positions alone, 0
    for no blocks. softcap c > 0: scores become c · tanh(scores / c). deterministic: gradients have the same bits in
    every run.

    Returns out (batch, seqlen_q, heads, value_dim), with return_attn_probs also the LSE (batch, heads, seqlen_q).
    """
    asked = asked_of(softmax_scale, causal, window_size, softcap)
    check_tuning(num_splits, pack_gqa, sm_margin)
    shape = ("batch", "seqlen", "heads", "head_dim")
    q, k, v = (_rows(name, x, shape) for name, x in (("q", q), ("k", k), ("v", v)))
    more = more_asked_of(q, attention_chunk, (q_descale, k_descale, v_descale))
    checks.flag("return_attn_probs", return_attn_probs)
    o, lse = attend(
        Inputs(q, k, v, qv=rows_of_qv(qv, q, v)), asked, return_attn_probs, deterministic=deterministic, **more
    )
    return o if lse is None else (o, lse)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Sequence[int] | torch.Tensor = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with Q, K and V in one tensor.

    qkv: (batch, seqlen, 3, heads, head_dim), or with num_heads_q (batch, seqlen, heads + 2 · heads_k, head_dim): first
    the query heads, then those of K, then those of V.
    """
    checks.tensor("qkv", qkv)
    if qkv.dim() == 5:
        q, k, v = checks.tensor("qkv", qkv, shape=("batch", "seqlen", 3, "heads", "head_dim")).unbind(-3)
    else:
        checks.tensor("qkv", qkv, shape=("batch", "seqlen", "heads + 2 · heads_k", "head_dim"))
        if num_heads_q is None:
            raise ValueError("num_heads_q must tell how many heads of a qkv of four dimensions are queries, got None")
        heads = checks.integer("num_heads_q", num_heads_q, 1, qkv.shape[2])
        if (qkv.shape[2] - heads) % 2:
            raise ValueError(f"qkv must have as many heads of K as of V, got {qkv.shape[2]} heads, {heads} of Q")
        heads_k = (qkv.shape[2] - heads) // 2
        q, k, v = qkv.split([heads, heads_k, heads_k], -2)
    scoring = (softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap)
    tail = (1, None, deterministic, sm_margin, return_attn_probs)
    return flash_attn_func(q, k, v, *scoring, *tail)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Sequence[int] | torch.Tensor = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over sequences packed end to end; empty ones are allowed.

    q: (total_q, heads, head_dim); k: (total_k, heads_k, head_dim); v: (total_k, heads_k, value_dim); qv: (total_q,
    heads, value_dim). cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 or int64, where each sequence starts; rows after
    the last one belong to nobody, and what stands in their output is not told. seqused_q, seqused_k: (batch,), how many
    of a sequence's first rows there are; the others are skipped, for which the rows are copied together.
    max_seqlen_q, max_seqlen_k: accepted, and not needed: cu_seqlens has the lengths. The rest as in `flash_attn_func`.

    Returns out (total_q, heads, value_dim), with return_attn_probs also the LSE (heads, total_q).
    """
    asked = asked_of(softmax_scale, causal, window_size, softcap)
    check_tuning(num_splits, pack_gqa, sm_margin)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(longest, torch.Tensor):  # one on a GPU stays unread: looking would make the CPU wait
            checks.integer(name, longest, 0)
    q, k, v = (_rows(name, x, ("total", "heads", "head_dim")) for name, x in (("q", q), ("k", k), ("v", v)))
    qv = rows_of_qv(qv, q, v)
    more = more_asked_of(q, attention_chunk, (q_descale, k_descale, v_descale))
    checks.flag("return_attn_probs", return_attn_probs)
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.tensor(name, starts, shape=("batch + 1",), dtypes=checks.INTEGERS)
    of_q = Used.of("seqused_q", seqused_q, cu_seqlens_q, q)
    of_k = Used.of("seqused_k", seqused_k, cu_seqlens_k, k)
    if of_q is not None:
        q, cu_seqlens_q = of_q.taken(q), of_q.packed
        qv = None if qv is None else of_q.taken(qv)
    if of_k is not None:
        k, v, cu_seqlens_k = of_k.taken(k), of_k.taken(v), of_k.packed
    inputs = Inputs(q, k, v, starts_q=cu_seqlens_q, starts_k=cu_seqlens_k, qv=qv)
    o, lse = attend(inputs, asked, return_attn_probs, deterministic=deterministic, **more)
    if of_q is not None:
        o = of_q.put_back(o, 0.0)
        lse = None if lse is None else of_q.put_back(lse.T, -math.inf).T.contiguous()
    return o if lse is None else (o, lse)


def _rows(name: str, x: Any, shape: Sequence[int | str]) -> torch.Tensor:
    """x of this shape. FP8 is taken out of autograd's sight: there is no backward pass of it, here or there, and a call
    is refused neither here nor there."""
    taken = rows(name, x, shape)
    return taken.detach() if taken.dtype == FP8 else taken


class Used(NamedTuple):
    """Sequences of which only the first rows count: where each begins, starts (batch + 1,), how many of its rows count,
    used (batch + 1,) with a 0 at its end, where they begin when those rows stand end to end, packed (batch + 1,), and
    how many rows there are in all."""

    starts: torch.Tensor
    used: torch.Tensor
    packed: torch.Tensor
    total: int

    @classmethod
    def of(cls, name: str, used: Any, starts: torch.Tensor, x: torch.Tensor) -> Used | None:
        """None if all rows of x count. On the CPU, where looking costs nothing, no more than there are."""
        if used is None:
            return None
        used = checks.tensor(name, used, shape=(len(starts) - 1,), dtypes=checks.INTEGERS, device=x.device)
        starts = starts.to(x.device)
        if x.device.type == "cpu":
            for value, length in zip(used.tolist(), starts.diff().tolist(), strict=True):
                checks.integer(name, value, 0, length)
        packed = F.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
        return cls(starts.long(), F.pad(used, (0, 1)).long(), packed, len(x))

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x that count, end to end; where their number is not known here, rows of nobody after them."""
        total = end_of(self.packed, x)
        sequence = sequence_of(self.packed, total)
        row = self.starts[sequence] + torch.arange(total, device=x.device) - self.packed.long()[sequence]
        return x.index_select(0, row.clamp(0, max(0, len(x) - 1)))

    def put_back(self, x: torch.Tensor, fill: float) -> torch.Tensor:
        """x (rows that count, …) where they came from: (all rows, …), with `fill` in the others."""
        sequence = sequence_of(self.starts, self.total)
        place = torch.arange(self.total, device=x.device) - self.starts[sequence]
        counts = place < self.used[sequence]
        row = (self.packed.long()[sequence] + place).clamp(0, max(0, len(x) - 1))
        # Of no rows, rows of nobody: an output that autograd knows, whose inputs have gradients of 0
        found = x.index_select(0, row) if len(x) else F.pad(x, (*[0, 0] * (x.dim() - 1), 0, self.total))
        return torch.where(counts.view(-1, *[1] * (x.dim() - 1)), found, fill)


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states over disjoint keys.

    out_partial: (splits, batch, seqlen, heads, head_dim) float32; lse_partial: (splits, batch, seqlen, heads) float32.
    out: (batch, seqlen, heads, head_dim), written and returned. out_dtype: float32, float16 or bfloat16; out's if
    None, else float32.

    Returns out and the LSE (batch, seqlen, heads) float32.
    """
    shape = ("splits", "batch", "seqlen", "heads", "head_dim")
    checks.tensor("out_partial", out_partial, shape=shape, dtypes=(torch.float32,))
    device = out_partial.device
    checks.tensor("lse_partial", lse_partial, shape=out_partial.shape[:-1], dtypes=(torch.float32,), device=device)
    if out_dtype is not None:
        checks.choice("out_dtype", out_dtype, checks.FLOATS)
    if out is not None:
        dtypes = checks.FLOATS if out_dtype is None else (out_dtype,)
        checks.tensor("out", out, shape=out_partial.shape[1:], dtypes=dtypes, device=device)
    o, lse = state.merge_states(out_partial, lse_partial.transpose(-1, -2))
    o = o.to(out_dtype or torch.float32) if out is None else out.copy_(o)
    return o, lse.transpose(-1, -2)
