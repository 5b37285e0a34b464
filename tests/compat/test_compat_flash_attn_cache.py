"""flash_attn_with_kvcache against the oracle: rows and pages, appended to in place, turned, padded, refused."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from flash_attn_cases import COS, DIM, HEADS, INF, KV_HEADS, LAYOUTS, SIN, SLOPES, CacheCase, K, Q, V, lengths, tables
from oracle import DTYPES, randn

from tilewise import api
from tilewise.compat import flash_attn as fa


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_is_read(layout, dtype):
    CacheCase(48, [1, 33], layout=layout, seqlen_q=3, dtype=dtype).check(causal=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("new", [1, 17])
def test_cache_is_appended_to(layout, new):
    case = CacheCase(64, [0, 31], layout=layout, new=new, seqlen_q=new)
    before = [x.data_ptr() for x in case.caches]
    case.check(causal=True)
    assert [x.data_ptr() for x in case.caches] == before


@pytest.mark.parametrize("capacity", [35, 63, 65])
def test_capacities_that_no_page_divides(capacity):
    CacheCase(capacity, [5, capacity - 2], new=2, seqlen_q=2).check(causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [16, DIM])
@pytest.mark.parametrize("layout", ["rows", 16])
def test_rotary(layout, rotary, interleaved, dtype):
    def case():
        return CacheCase(
            48, [3, 30], new=4, seqlen_q=4, layout=layout, rotary=rotary, interleaved=interleaved, dtype=dtype
        )

    case().check(causal=True)
    case().check()  # all queries at one position
    case().check(given={"window_size": (7, 2)}, window=(7, 2))


def test_more_queries_than_new_keys():
    CacheCase(48, [3, 30], new=2, seqlen_q=5, rotary=16).check(causal=True)


@pytest.mark.parametrize("capacity", [48, 35])
def test_leftpad(capacity):
    CacheCase(capacity, [9, 30], leftpad=[5, 17], seqlen_q=2).check(causal=True)
    CacheCase(capacity, [9, 30], leftpad=[9, 0], new=3, seqlen_q=3, rotary=16).check(causal=True)
    slopes = randn(2, HEADS, seed=9).abs()
    CacheCase(capacity, [9, 30], leftpad=[5, 17], layout="slice").check(alibi_slopes=slopes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_idx(layout):
    CacheCase(48, [9, 30], batch_idx=[4, 1], new=3, seqlen_q=3, layout=layout).check(causal=True)
    CacheCase(48 if layout in (4, 16) else 35, [9, 30], batch_idx=[0, 3], leftpad=[2, 1], layout=layout).check()
    CacheCase(48, [9, 30], leftpad=[9, 5], new=3, seqlen_q=3, layout=layout).check(causal=True)


@pytest.mark.parametrize("layout", ["rows", 16])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"window_size": (3, 1)}, {"window": (3, 1)}),
        ({"window_size": (3, -1), "causal": True}, {"window": (3, 0), "causal": True}),
        ({"softmax_scale": 0.7, "softcap": 2.0}, {"scale": 0.7, "softcap": 2.0}),
        ({"alibi_slopes": SLOPES, "num_splits": 3}, {"alibi_slopes": SLOPES}),
        ({"alibi_slopes": SLOPES[1], "causal": True}, {"alibi_slopes": SLOPES[1], "causal": True}),
        ({"learnable_sink": randn(HEADS, seed=5)}, {"sinks": randn(HEADS, seed=5)}),
    ],
)
def test_cache_options(layout, given, meant):
    CacheCase(48, [9, 30], new=3, seqlen_q=5, layout=layout).check(given=given, **meant)


@pytest.mark.parametrize("layout", ["rows", 16])
def test_one_length_for_all(layout):
    CacheCase(35 if layout == "rows" else 48, [7, 7], new=3, seqlen_q=3, layout=layout, uniform=True).check(causal=True)


def test_no_lengths_is_the_whole_cache():
    case = CacheCase(20, [20, 20])
    case.given = {}
    case.check()
    assert fa.flash_attn_with_kvcache(case.q, *case.caches).shape == case.q.shape


def test_sequences_of_the_cache_at_any_distance():
    """One that is no multiple of a row's length, so that no page table can tell it."""
    rows, lengths = randn(2, 2, 32 * 2 * 16 + 8), torch.tensor([5, 32], dtype=torch.int32)
    k_cache, v_cache = rows[..., :-8].unflatten(-1, (32, 2, 16)).unbind()
    assert k_cache.stride(0) % k_cache.stride(1)
    q = randn(2, 1, 4, 16, seed=1)
    apart = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)
    dense = fa.flash_attn_with_kvcache(q, k_cache.contiguous(), v_cache.contiguous(), cache_seqlens=lengths)
    assert torch.equal(apart, dense)


def test_more_sequences_in_the_cache_than_in_the_batch():
    case = CacheCase(20, [20, 20], uniform=True)
    wider = [torch.cat((x, torch.full_like(x, math.nan))) for x in case.caches]
    expected = fa.flash_attn_with_kvcache(case.q, *case.caches)
    for seqlens in (20, torch.tensor([20, 20])):
        torch.testing.assert_close(fa.flash_attn_with_kvcache(case.q, *wider, cache_seqlens=seqlens), expected)


def test_an_empty_cache_gives_zero_and_plus_infinity():
    case = CacheCase(16, [0, 3])
    out, lse = case.check(causal=True)
    assert (out[0] == 0).all()
    assert (lse[0] == INF).all()


def test_a_shared_page_stays_as_it_is():
    """Two sequences with one first page; what they append goes to pages of their own."""
    caches = [randn(6, 16, KV_HEADS, DIM, seed=s) for s in (1, 2)]
    before = [x.clone() for x in caches]
    table = torch.tensor([[3, 5, 99], [3, 0, -1]], dtype=torch.int32)
    new = [randn(2, 2, KV_HEADS, DIM, seed=s) for s in (3, 4)]
    lengths = torch.tensor([16, 18], dtype=torch.int32)
    fa.flash_attn_with_kvcache(
        randn(2, 2, HEADS, DIM), *caches, *new, cache_seqlens=lengths, block_table=table, causal=True
    )
    for cache, old, rows in zip(caches, before, new, strict=True):
        old[5, 0:2], old[0, 2:4] = rows[0], rows[1]
        assert torch.equal(cache, old)


@pytest.mark.parametrize(
    ("capacity", "layout", "leftpad"),
    [(32, "rows", None), (64, "slice", None), (19, "rows", None), (32, "heads", [3, 6])],
)
def test_the_kernels_read_the_same_pages(capacity, layout, leftpad, monkeypatch):
    """The GPU kernels' source over the views of a contiguous cache, with NaN in every row that no token has."""
    monkeypatch.setattr(api, "attention_varlen", partial(api.attention_varlen, backend="emulator"))
    case = CacheCase(capacity, [4, 17], new=2, seqlen_q=2, layout=layout, leftpad=leftpad, dtype=torch.bfloat16)
    case.check(causal=True)


TABLE = torch.tensor([[0], [1]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"q": Q[..., :8]}, ValueError, "k_cache must have shape"),
        ({"q": Q[:, :, :3]}, ValueError, "q must have a multiple of k_cache's 2 heads"),
        ({"k_cache": Q[:1, :, :2], "v_cache": Q[:1, :, :2]}, ValueError, "sequences of k_cache must be at least 2"),
        ({"v_cache": torch.zeros(2, 39, 2, 16)}, ValueError, "v_cache must have shape"),
        ({"k_cache": torch.zeros(2, 40, 16, 2).transpose(2, 3)}, ValueError, "k_cache must have stride 1"),
        ({"k_cache": torch.zeros(2, 0, 2, 16), "v_cache": torch.zeros(2, 0, 2, 16)}, ValueError, "capacity of k_cache"),
        ({"v": None}, ValueError, "k and v must be given together"),
        ({"v": V[:, :3]}, ValueError, "v must have shape"),
        ({"k": K.half()}, ValueError, "k must have q's dtype float32"),
        ({"cache_seqlens": None}, ValueError, "cache_seqlens must tell where"),
        ({"cache_seqlens": lengths(1, 33)}, ValueError, "cache_seqlens must be at least 0 and at most 32, got 33"),
        ({"cache_seqlens": 33}, ValueError, "cache_seqlens must be at least 0 and at most 32, got 33"),
        ({"cache_seqlens": lengths(-1, 3)}, ValueError, "cache_seqlens"),
        ({"cache_seqlens": lengths(1, 2, 3)}, ValueError, "cache_seqlens must have shape"),
        ({"cache_seqlens": lengths(1, 2).float()}, ValueError, "cache_seqlens must be one of int32"),
        ({"cache_seqlens": 1.5}, TypeError, "cache_seqlens must be an int"),
        ({"k": torch.zeros(2, 41, 2, 16), "v": torch.zeros(2, 41, 2, 16)}, ValueError, "room for, 40, got 41"),
        ({"cache_batch_idx": lengths(0, 2)}, ValueError, "cache_batch_idx must be at least 0 and at most 1"),
        ({"cache_batch_idx": [0, 1]}, TypeError, "cache_batch_idx"),
        ({"cache_leftpad": lengths(3, 4)}, ValueError, "cache_leftpad must be at least 0 and at most 3, got 4"),
        ({"cache_leftpad": lengths(-1, 0)}, ValueError, "cache_leftpad"),
        ({"block_table": TABLE, "cache_leftpad": lengths(3, 4)}, ValueError, "cache_leftpad must be at least 0"),
        ({"block_table": TABLE, "cache_batch_idx": lengths(0, 2)}, ValueError, "cache_batch_idx must be at least 0"),
        ({"block_table": TABLE[:1]}, ValueError, "block_table must have shape"),
        ({"block_table": TABLE.long()}, ValueError, "block_table must be one of int32"),
        ({"block_table": TABLE + 1}, ValueError, "block_table.1. must be at least 0 and at most 1, got 2"),
        ({"block_table": TABLE - 1}, ValueError, "block_table.0. must be at least 0"),
        (
            {"block_table": TABLE, "cache_seqlens": lengths(3, 33)},
            ValueError,
            "at most 32, got 33; block_table has room",
        ),
        ({"block_table": TABLE, "cache_seqlens": 33}, ValueError, "at most 32, got 33; block_table has room for 40"),
        ({"rotary_cos": COS}, ValueError, "rotary_cos and rotary_sin must be given together"),
        ({"rotary_cos": COS, "rotary_sin": SIN, "k": None, "v": None}, ValueError, "go with k and v"),
        ({"rotary_cos": COS[:39], "rotary_sin": SIN[:39]}, ValueError, "rows of rotary_cos must be at least 40"),
        ({"rotary_cos": COS, "rotary_sin": SIN[:, :4]}, ValueError, "rotary_sin must have shape"),
        (
            {"rotary_cos": tables(40, 18)[0], "rotary_sin": tables(40, 18)[1]},
            ValueError,
            "at most head_dim 16 channels",
        ),
        (
            {"rotary_cos": COS, "rotary_sin": SIN, "q": randn(2, 39, 4, 16), "causal": True},
            ValueError,
            "rotary_cos must have a row for each position, 3 to 41",
        ),
        ({"rotary_interleaved": None}, TypeError, "rotary_interleaved"),
        ({"return_softmax_lse": 1}, TypeError, "return_softmax_lse"),
        ({"num_splits": -1}, ValueError, "num_splits"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes must be"),
        ({"learnable_sink": torch.ones(3)}, ValueError, "learnable_sink must have shape"),
        ({"softcap": math.inf}, ValueError, "softcap"),
        ({"q": Q.clone().requires_grad_()}, NotImplementedError, "no backward pass"),
        ({"k": K.clone().requires_grad_()}, NotImplementedError, "no backward pass"),
    ],
)
def test_cache_refusals_change_nothing(changes, error, match):
    caches = {"k_cache": torch.zeros(2, 40, 2, 16), "v_cache": torch.zeros(2, 40, 2, 16)}
    given = {"q": Q, **caches, "k": K, "v": V, "cache_seqlens": lengths(3, 3), **changes}
    with pytest.raises(error, match=match):
        fa.flash_attn_with_kvcache(**given)
    assert not any(x.any() for x in caches.values())
