"""FlashMLA's calls over packed sequences whose heads have keys and values of their own: prefill, not absorbed.

tilewise.compat.flash_mla has them too. As `tilewise.attention_varlen`, whose gradients they have, and on every card.
What differs: deterministic gradients are there, gradients of the LSE as well, and is_varlen changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewise import checks

from .flash_options import rows
from .inputs import Inputs, attend

__all__ = ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over sequences packed end to end; empty ones are allowed.

    q: (total_q, heads, head_dim); k: (total_k, heads_k, head_dim); v: (total_k, heads_k, value_dim), heads a multiple
    of heads_k. cu_seqlens_qo, cu_seqlens_kv: (batch + 1,) int32 or int64, where each sequence starts. max_seqlen_qo,
    max_seqlen_kv: accepted, and not needed. dropout_p: 0. softmax_scale: `head_dim ** -0.5` if None. deterministic:
    gradients have the same bits in every run.

    Returns out (total_q, heads, value_dim) and the LSE (total_q, heads) float32, −inf where a row sees no key.
    """
    if checks.number("dropout_p", dropout_p, 0) != 0.0:
        raise NotImplementedError(f"dropout_p must be 0 here, got {dropout_p}; compat.flash_attn's calls take it")
    checks.flag("is_varlen", is_varlen)
    for name, longest in (("max_seqlen_qo", max_seqlen_qo), ("max_seqlen_kv", max_seqlen_kv)):
        if not isinstance(longest, torch.Tensor):
            checks.integer(name, longest, 0)
    q, k, v = (rows(name, x, ("total", "heads", "head_dim")) for name, x in (("q", q), ("k", k), ("v", v)))
    for name, starts in (("cu_seqlens_qo", cu_seqlens_qo), ("cu_seqlens_kv", cu_seqlens_kv)):
        checks.tensor(name, starts, shape=("batch + 1",), dtypes=checks.INTEGERS)
    asked: Any = {"causal": checks.flag("causal", causal), "scale": softmax_scale}
    inputs = Inputs(q, k, v, starts_q=cu_seqlens_qo, starts_k=cu_seqlens_kv)
    o, lse = attend(inputs, asked, True, deterministic=checks.flag("deterministic", deterministic))
    assert lse is not None
    return o, lse.T


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn_varlen_func` with q, k and v in one tensor (total, heads, 2 · head_dim_qk + value_dim), one after the
    other in its last dimension."""
    width = checks.tensor("qkv", qkv, shape=("total", "heads", "channels")).shape[-1]
    first = checks.integer("head_dim_qk", head_dim_qk, 1, (width - 1) // 2)
    q, k, v = qkv.split([first, first, width - 2 * first], -1)
    options = (dropout_p, softmax_scale, causal, deterministic, is_varlen)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn_varlen_func` with k and v in one tensor (total_k, heads_k, head_dim_qk + value_dim)."""
    width = checks.tensor("kv", kv, shape=("total", "heads", "channels")).shape[-1]
    first = checks.integer("head_dim_qk", head_dim_qk, 1, width - 1)
    k, v = kv.split([first, width - first], -1)
    starts = (cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv)
    return flash_attn_varlen_func(q, k, v, *starts, dropout_p, softmax_scale, causal, deterministic, is_varlen)
