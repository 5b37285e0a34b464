"""Scores up to the bound that tile/lazy.cuh states, 2^24 in base 2: there results are as good as around 0.

A row's reference is a float32. Beyond the bound it can stand more than half a power of two away from the exact product
of score and scale that the exponential's multiply-add takes, and no reference serves.
"""

from __future__ import annotations

import math

import pytest
import torch
from decode_cases import decode, empty_cache
from forward_cases import MODES, emulated
from lazy_cases import known_scores

from tilewise import attention

LOG2E = math.log2(math.e)
BOUND = 2.0**24


def softmax_of(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """scores (heads, keys, rows) in float64, v (1, keys, heads, D) -> o (1, rows, heads, D), lse (1, heads, rows)."""
    weights = torch.softmax(scores.double(), 1)
    return torch.einsum("hkr,bkhd->brhd", weights, v.double()), torch.logsumexp(scores.double(), 1)[None]


def patterns(keys: int, rows: int) -> torch.Tensor:
    """Small whole numbers, a key that rules its row early or late in the kernel's order, and a slow rise."""
    made = torch.randint(0, 4, (2, keys, rows), generator=torch.Generator().manual_seed(0)).float()
    made[0, 3, ::2] = 24.0  # the first keys come last: the reference has to move, and P is still finite
    made[0, keys - 2, 1::4] = 24.0
    made[1] += (torch.arange(keys, 0, -1) // 64).float()[:, None]
    return made


@pytest.mark.parametrize("kind", ["64", "64 exact", "128", "128 fp16", "128 exact", "256"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_forward_at_its_bound(kind, sign):
    made = patterns(300, 20)
    errors = []
    for offset in (0.0, sign * 2.0**23):
        q, k, v, options = known_scores(kind, made, offset=offset / 2.0**12)
        q[..., -1] = 2.0**12
        with emulated(*MODES[2]):
            o, lse = attention(q, k, v, return_lse=True, backend="emulator", **options)
        exact_o, exact_lse = softmax_of(made + offset, v)
        assert float(exact_lse.abs().max()) * LOG2E < BOUND
        errors.append(float((o.double() - exact_o).abs().max()))
        assert float((lse.double() - exact_lse).abs().max()) <= (2.0 if offset else 1e-4)  # 1: float32's last place
    assert abs(offset) * LOG2E > BOUND / 2
    assert errors[1] <= 2 * errors[0] + torch.finfo(v.dtype).eps * float(exact_o.abs().max())


@pytest.mark.parametrize("fmt", ["bf16", "int8"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_decode_at_its_bound(fmt, sign):
    """One key's channel lifts all scores of a sequence alike; what is left of the others is as around 0."""
    made = patterns(300, 1)[0, :, 0]
    errors = []
    for offset in (0.0, sign * 2.0**23):
        cache = empty_cache(32, kv_heads=1, kv_format=fmt)
        seq = cache.allocate()
        k, v = torch.zeros(300, 1, 64), torch.randn(300, 1, 64, generator=torch.Generator().manual_seed(1))
        # Codes of int8 keep small whole numbers: one scale per token, 127 in the channel that lifts.
        k[:, 0, 0], k[:, 0, 1] = 127.0, made
        cache.write(0, cache.extend([seq], 300), k.bfloat16(), v.bfloat16())
        stored_k, stored_v = cache.gather(0, seq)
        q = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
        lift = 2.0**16 if offset else 0.0  # 127 · 2^16 is 0.99 · 2^23
        q[..., 0], q[..., 1] = sign * lift, 1.0
        o, _ = decode(cache, [seq], q, scale=1.0)
        scores = torch.einsum("hd,kd->hk", q[0, 0].double(), stored_k[:, 0].double())
        exact = torch.softmax(scores, -1) @ stored_v[:, 0].double()
        errors.append(float((o[0, 0].double() - exact).abs().max()))
    assert errors[1] <= 2 * errors[0] + torch.finfo(torch.bfloat16).eps * float(exact.abs().max())
