"""The one place where tests make inputs and judge results: DESIGN's tolerance rule against the float64 oracle."""

from __future__ import annotations

import torch

from tilewise import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    """Normal values times `size`, the same for the same seed."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size
    return values.to(dtype)


def qkv(batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, *, dtype=torch.float32, seed=0, size=1.0):
    """q (B, Nq, Hq, D), k and v (B, Nk, Hkv, D); `size` scales q, and so the logits."""
    q = randn(batch, seqlen_q, heads_q, head_dim, dtype=dtype, seed=3 * seed, size=size)
    k = randn(batch, seqlen_k, heads_kv, head_dim, dtype=dtype, seed=3 * seed + 1)
    v = randn(batch, seqlen_k, heads_kv, head_dim, dtype=dtype, seed=3 * seed + 2)
    return q, k, v


def poison(like: torch.Tensor) -> torch.Tensor:
    """NaN everywhere: an output element that nobody writes shows."""
    return torch.full_like(like, float("nan"))


def assert_state(got, exact, honest) -> None:
    """(o, lse) within the tolerance rule of the oracle's (o, lse)."""
    verdict = reference.judge(got[0], exact[0], honest[0], lse=exact[1])
    assert verdict.ok, f"o: {verdict.reason}"
    verdict = reference.judge(got[1], exact[1], honest[1])
    assert verdict.ok, f"lse: {verdict.reason}"


def assert_attention(got, q, k, v, **options) -> None:
    """(o, lse) of an `attention` call with these options."""
    assert_state(got, reference.attention(q, k, v, **options), reference.baseline(q, k, v, **options))
