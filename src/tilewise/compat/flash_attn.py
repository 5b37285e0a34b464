"""The calls of flash_attn 2.8, served by Tilewise: same names, arguments, order, defaults and shapes.

    from tilewise.compat.flash_attn import flash_attn_func  # was: from flash_attn import flash_attn_func

They run on CUDA tensors (head_dim up to 256, every card since Ampere) and on CPU tensors. q, k, v and learnable_sink
get gradients, from out and from softmax_lse. What differs:

- float32 is taken as well as bfloat16 and float16;
- dropout_p > 0 drops other weights for the same seed of torch's generator. S_dmask is flash_attn's (dropped.py), with 0
  where memory stays uninitialised there;
- pages may have any size, and every call takes `learnable_sink` (heads,), a logit that joins the softmax's
  denominator only;
- alibi_slopes that require gradients raise NotImplementedError, where flash_attn gives them none without a word;
- the LSE counts the ALiBi bias as it is documented, −slope · |i + seqlen_k − seqlen_q − j|, also under `causal`.

Meaning: causal and window_size align bottom-right. A row with no visible key gives output 0 and, as in flash_attn, an
LSE of +inf, where the other calls of Tilewise say −inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewise import checks
from tilewise.cpu import dropout
from tilewise.scores import ScoreOptions

from .dropped import dropped_weights
from .flash_options import NO_WINDOW, as_flash_attn, asked_of, check_sink, rows
from .inputs import Inputs, attend
from .kvcache import flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Result:
    """Attention over a batch of equally long sequences.

    q: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, heads_k, head_dim), heads a multiple of heads_k.
    softmax_scale: `head_dim ** -0.5` if None. window_size: (left, right) keys seen to either side, −1 for no limit.
    softcap c > 0: scores become c · tanh(scores / c). alibi_slopes: (heads,) or (batch, heads), adds
    −slope · |i + seqlen_k − seqlen_q − j|. learnable_sink: (heads,). deterministic: gradients have the same bits in
    every run, as the output always has; on the CPU they always do.

    Returns out (batch, seqlen_q, heads, head_dim); with return_attn_probs (out, softmax_lse, S_dmask), softmax_lse
    (batch, heads, seqlen_q) float32 and S_dmask empty, or with dropout_p (batch, heads, seqlen_q, seqlen_k), both
    lengths rounded up to multiples of 128, in q's dtype: weights before normalisation, the sign bit of those that were
    dropped being set, so that S_dmask.signbit() tells which these are.
    """
    asked = asked_of(softmax_scale, causal, window_size, softcap)
    shape = ("batch", "seqlen", "heads", "head_dim")
    q, k, v = (rows(name, x, shape) for name, x in (("q", q), ("k", k), ("v", v)))
    check_sink(learnable_sink, q)
    return _attend(Inputs(q, k, v, alibi_slopes, learnable_sink), asked, dropout_p, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Result:
    """`flash_attn_func` with K and V in one tensor: kv (batch, seqlen_k, 2, heads_k, head_dim)."""
    k, v = _unpacked("kv", kv, ("batch", "seqlen", 2, "heads", "head_dim"))
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options, learnable_sink=learnable_sink)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Result:
    """`flash_attn_func` with Q, K and V in one tensor: qkv (batch, seqlen, 3, heads, head_dim)."""
    q, k, v = _unpacked("qkv", qkv, ("batch", "seqlen", 3, "heads", "head_dim"))
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options, learnable_sink=learnable_sink)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Result:
    """Attention over sequences packed end to end; empty ones are allowed.

    q: (total_q, heads, head_dim); k, v: (total_k, heads_k, head_dim), or with block_table (batch, blocks a sequence)
    int32 the pages (blocks, page_size, heads_k, head_dim). cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 or int64,
    where each sequence starts; rows after the last one belong to nobody, and what stands in their output is not told
    (compiled code on a CPU takes no such rows).
    max_seqlen_q, max_seqlen_k: accepted, and not needed: cu_seqlens has the lengths. Everything else as in
    `flash_attn_func`; alibi_slopes (heads,) or (batch, heads).

    Returns out (total_q, heads, head_dim); with return_attn_probs (out, softmax_lse, S_dmask), softmax_lse
    (heads, total_q) float32 and S_dmask empty, or with dropout_p as there, (batch, heads, max_seqlen_q, max_seqlen_k)
    rounded up.
    """
    asked = asked_of(softmax_scale, causal, window_size, softcap)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(longest, torch.Tensor):  # one on a GPU stays unread: looking would make the CPU wait
            checks.integer(name, longest, 0)
    packed = ("total", "heads", "head_dim")
    shape = packed if block_table is None else ("blocks", "page_size", "heads", "head_dim")
    q, k, v = rows("q", q, packed), rows("k", k, shape), rows("v", v, shape)
    check_sink(learnable_sink, q)
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.tensor(name, starts, shape=("batch + 1",), dtypes=checks.INTEGERS)
    if block_table is not None:
        block_table = rows("block_table", block_table, ("batch", "blocks a sequence"))
    inputs = Inputs(q, k, v, alibi_slopes, learnable_sink, cu_seqlens_q, cu_seqlens_k, block_table)
    return _attend(inputs, asked, dropout_p, deterministic, return_attn_probs, (max_seqlen_q, max_seqlen_k))


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Result:
    """`flash_attn_varlen_func` with K and V in one tensor: kv (total_k, 2, heads_k, head_dim)."""
    k, v = _unpacked("kv", kv, ("total", 2, "heads", "head_dim"))
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)
    return flash_attn_varlen_func(q, k, v, *given, learnable_sink=learnable_sink)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
) -> Result:
    """`flash_attn_varlen_func` with Q, K and V in one tensor: qkv (total, 3, heads, head_dim)."""
    q, k, v = _unpacked("qkv", qkv, ("total", 3, "heads", "head_dim"))
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    given = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)
    return flash_attn_varlen_func(q, k, v, *given, learnable_sink=learnable_sink)


def _unpacked(name: str, x: Any, shape: tuple[int | str, ...]) -> tuple[torch.Tensor, ...]:
    """The tensors that are stacked three dimensions from the end."""
    return checks.tensor(name, x, shape=shape).unbind(-3)


def _attend(
    inputs: Inputs,
    asked: ScoreOptions,
    dropout_p: float,
    deterministic: bool,
    return_attn_probs: bool,
    longest: tuple[int, int] = (0, 0),
) -> Result:
    """The result in flash_attn's form. longest: of packed sequences, as the caller says."""
    checks.flag("deterministic", deterministic)
    checks.flag("return_attn_probs", return_attn_probs)
    seed = dropout.drawn(checks.number("dropout_p", dropout_p, 0.0), None, inputs.q)
    rest = {"dropout_p": dropout_p, "dropout_seed": seed, "deterministic": deterministic}
    o, lse = attend(inputs, asked, return_attn_probs, **rest)
    if lse is None:
        return o
    if seed is None:
        return o, as_flash_attn(lse), o.new_empty(0)
    said = int(longest[0]), int(longest[1])  # torch's products wait, too
    weights = dropped_weights(inputs, asked, dropout.Dropout(dropout_p, int(seed)), said)
    return o, as_flash_attn(lse), weights
