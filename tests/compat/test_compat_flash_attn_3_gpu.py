"""tilewise.compat.flash_attn_3 and flash_mla on a card: like the CPU's results, and without waiting for the card."""

from __future__ import annotations

import pytest
import torch
from flash_attn_cases import lengths, paged, starts_of
from oracle import randn

from tilewise import reference
from tilewise.compat import flash_attn_3 as fa3
from tilewise.compat import flash_mla

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def on_card(given):
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def assert_like_the_cpu(call, **given):
    """Once to compile, then with waits forbidden; judged against the CPU's call in float32 beside that in bfloat16."""
    card = on_card(given)
    call(**card)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = call(**card)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wide = {n: x.float() if isinstance(x, torch.Tensor) and x.dtype == BF16 else x for n, x in given.items()}
    exact, honest = call(**wide), call(**given)
    for mine, right, base in zip(found[:2], exact[:2], honest[:2], strict=True):
        assert mine.is_cuda
        verdict = reference.judge(mine.cpu(), right.double(), base)
        assert verdict.ok, verdict.reason


def unequal(seqlen_q, seqlen_k, head_dim, value_dim):
    q = randn(2, seqlen_q, 8, head_dim, dtype=BF16)
    return q, randn(2, seqlen_k, 2, head_dim, dtype=BF16, seed=1), randn(2, seqlen_k, 2, value_dim, dtype=BF16, seed=2)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 512), (64, 256), (512, 512), (40, 24)])
def test_values_of_another_head_dim(head_dim, value_dim):
    q, k, v = unequal(129, 257, head_dim, value_dim)
    assert_like_the_cpu(fa3.flash_attn_func, q=q, k=k, v=v, causal=True, return_attn_probs=True)


@pytest.mark.parametrize("options", [{"attention_chunk": 33}, {"attention_chunk": 64, "window_size": (40, 3)}])
def test_chunks(options):
    q, k, v = unequal(129, 257, 64, 64)
    assert_like_the_cpu(fa3.flash_attn_func, q=q, k=k, v=v, causal=True, return_attn_probs=True, **options)


def test_a_second_query():
    q, k, v = unequal(65, 129, 64, 256)
    qv = randn(2, 65, 8, 256, dtype=BF16, seed=3)
    assert_like_the_cpu(fa3.flash_attn_func, q=q, k=k, v=v, qv=qv, causal=True, return_attn_probs=True)


def test_rows_that_are_not_used():
    counts_q, counts_k = [70, 1, 129], [80, 63, 200]
    given = {
        "q": randn(200, 8, 64, dtype=BF16), "k": randn(343, 2, 64, dtype=BF16, seed=1),
        "v": randn(343, 2, 64, dtype=BF16, seed=2), "cu_seqlens_q": starts_of(counts_q),
        "cu_seqlens_k": starts_of(counts_k), "max_seqlen_q": 129, "max_seqlen_k": 200,
        "seqused_q": lengths(65, 0, 129), "seqused_k": lengths(80, 1, 129),
    }  # fmt: skip
    assert_like_the_cpu(fa3.flash_attn_varlen_func, causal=True, return_attn_probs=True, **given)


@pytest.mark.parametrize("leftpad", [None, [5, 0]])
def test_packed_queries_over_pages(leftpad):
    k, v = randn(230, 2, 128, dtype=BF16, seed=1), randn(230, 2, 128, dtype=BF16, seed=2)
    k_cache, v_cache, table = paged(k, v, [100, 130], 16)
    given = {
        "q": randn(9, 8, 128, dtype=BF16), "k_cache": k_cache, "v_cache": v_cache, "page_table": table.clamp(0),
        "cache_seqlens": lengths(100, 130), "cu_seqlens_q": starts_of([4, 5]), "max_seqlen_q": 5,
    }  # fmt: skip
    if leftpad is not None:
        given["cache_leftpad"] = lengths(*leftpad)
    assert_like_the_cpu(fa3.flash_attn_with_kvcache, causal=True, return_softmax_lse=True, **given)


def test_combine():
    o, lse = randn(5, 2, 65, 8, 64), randn(5, 2, 65, 8, seed=1)
    found = fa3.flash_attn_combine(o.cuda(), lse.cuda())
    torch.testing.assert_close([x.cpu() for x in found], list(fa3.flash_attn_combine(o, lse)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_latent_rows(heads, causal):
    rows = randn(20, 64, 1, 576, dtype=BF16, seed=1)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(1)).int().view(4, 5)
    q, counts = randn(4, 2, heads, 576, dtype=BF16), lengths(1, 63, 65, 300)

    def call(*tensors):
        return flash_mla.flash_mla_with_kvcache(*tensors, 512, flash_mla.get_mla_metadata()[0], causal=causal)

    found = call(*(x.cuda() for x in (q, rows, table, counts)))
    exact, honest = (call(q.to(t), rows.to(t), table, counts) for t in (torch.float32, BF16))
    for mine, right, base in zip(found, exact, honest, strict=True):
        verdict = reference.judge(mine.cpu(), right.double(), base)
        assert verdict.ok, verdict.reason
