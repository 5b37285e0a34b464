"""plan_decode() and decode(): any tree of shared pages equals every sequence alone, in every format and page size."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from decode_tree_cases import grow, make_cache, tree
from hypothesis import given
from hypothesis import strategies as st
from oracle import DTYPES, assert_state, poison, randn

from tilewise import CostModel, PagedKVCache, PrefixCache, decode, plan_decode, reference

SHARE = (False, True, "auto")
FREE = CostModel(item_us=0.0, kv_bytes_per_us=1.0, flops_per_us=1e12, row_state_us=0.0)  # sharing always pays
DEAR = CostModel(item_us=1e9, kv_bytes_per_us=1.0, flops_per_us=1.0, row_state_us=1.0)  # and never


def assert_decode(
    cache, seqs, *, heads=4, tokens=1, layer=0, dtype=torch.float32, seed=7, plan_options=None, **options
):
    """Every way of sharing against the oracle; returns the plans."""
    head_dim = getattr(cache, "cache", cache).head_dim
    q = randn(len(seqs), tokens, heads, head_dim, dtype=dtype, seed=seed)
    window = (plan_options or {}).get("window")
    exact = reference.decode(q, cache, layer, seqs, window=window, **options)
    honest = reference.decode(q, cache, layer, seqs, window=window, dtype=dtype, **options)
    plans = []
    for share in SHARE:
        plan = plan_decode(
            cache, seqs, num_heads=heads, tokens_per_seq=tokens, share_prefix=share, **(plan_options or {})
        )
        got = decode(q, cache, layer, plan, return_lse=True, out=poison(q), **options)
        assert_state(got, exact, honest)
        plans.append(plan)
    return plans


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unshared_sequences(page_size, dtype):
    cache = make_cache(
        page_size=page_size, pages=1200 // page_size + 10, kv_format={4: "fp32", 2: "bf16"}[dtype.itemsize]
    )
    seqs = [cache.allocate() for _ in range(6)]
    grow(cache, seqs, [1, 63, 64, 65, 129, 257])
    unshared, _, auto = assert_decode(cache, seqs, dtype=dtype)
    assert unshared.shared_nodes == auto.shared_nodes == 0


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (16, 1)])
def test_two_level_tree(tokens, heads):
    cache = make_cache(kv_heads=heads[1])
    seqs = tree(cache, [1, 7], [50, 9])
    _, shared, _ = assert_decode(cache, seqs, heads=heads[0], tokens=tokens)
    assert shared.shared_nodes == 1
    assert shared.work[0].rows == 7 * tokens


def test_three_level_tree_reads_each_node_once():
    cache = make_cache(pages=600)
    seqs = tree(cache, [1, 3, 4], [40, 16, 8])
    unshared, shared, _ = assert_decode(cache, seqs)
    assert shared.shared_nodes == 4  # the root and three groups
    assert shared.summary.keys_read == 40 + 3 * 16 + 12 * 8
    assert unshared.summary.keys_read == 12 * 64
    assert shared.bytes < unshared.bytes


@pytest.mark.parametrize("count", [1, 2, 33, 65, 80, 97, 112])
def test_any_number_of_sequences(count):
    cache = make_cache(pages=300, head_dim=8)
    seqs = tree(cache, [1, count], [32, 3])
    assert_decode(cache, seqs)


def test_a_shared_prefix_whose_first_sequence_is_not_the_first():
    """Rows of a node start anywhere in the batch; sequences come in any order, more than one tree, some alone."""
    cache = make_cache(pages=600)
    alone = [cache.allocate() for _ in range(3)]
    grow(cache, alone, [5, 40, 1], seed=50)
    first, second = tree(cache, [1, 5], [20, 6], seed=60), tree(cache, [1, 4], [33, 2], seed=70)
    seqs = [alone[0], *second[:2], first[0], alone[1], *first[1:], *second[2:], alone[2]]
    _, shared, _ = assert_decode(cache, seqs)
    assert shared.shared_nodes == 2
    assert_decode(cache, list(reversed(seqs)))


def test_permuting_sequences_permutes_outputs():
    cache = make_cache()
    seqs = tree(cache, [1, 6], [21, 5])
    q = randn(6, 1, 4, 16)
    order = [3, 0, 5, 1, 4, 2]
    o = decode(q, cache, 0, plan_decode(cache, seqs, num_heads=4, share_prefix=True))
    plan = plan_decode(cache, [seqs[n] for n in order], num_heads=4, share_prefix=True)
    assert torch.allclose(decode(q[order], cache, 0, plan), o[order], atol=1e-6)


def test_unshared_results_do_not_depend_on_the_batch():
    cache = make_cache()
    seqs = tree(cache, [1, 5], [21, 5])
    q = randn(5, 1, 4, 16)
    together = decode(q, cache, 0, plan_decode(cache, seqs, num_heads=4, share_prefix=False))
    for n, seq in enumerate(seqs):
        alone = decode(q[n : n + 1], cache, 0, plan_decode(cache, [seq], num_heads=4))
        assert torch.equal(alone[0], together[n])


def test_forks_that_share_everything():
    cache = make_cache(page_size=16)
    seq = cache.allocate()
    grow(cache, [seq], [37])
    seqs = [seq, *(cache.fork(seq) for _ in range(4))]
    for tokens in (1, 3):
        _, shared, _ = assert_decode(cache, seqs, tokens=tokens)
        assert shared.work[0].stop == 37 - tokens + 1  # what every row sees; the causal rest is each row's own


@pytest.mark.parametrize("window", [(0, 0), (5, 0), (30, None), (1000, 0)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_windows(window, tokens):
    cache = make_cache()
    seqs = tree(cache, [1, 4], [48, 11])
    grow(cache, seqs[:2], [3, 9], seed=5)  # different lengths under one node
    assert_decode(cache, seqs, tokens=tokens, plan_options={"window": window})


def test_window_reads_only_what_it_sees():
    cache = make_cache()
    seq = cache.allocate()
    grow(cache, [seq], [200])
    plan = plan_decode(cache, [seq], num_heads=4, window=(15, 0))
    assert plan.summary.keys_read == 16


def test_softcap_sinks_scale():
    cache = make_cache()
    seqs = tree(cache, [1, 5], [30, 7])
    assert_decode(cache, seqs, softcap=2.0, sinks=randn(4, seed=3), scale=0.7)
    assert_decode(cache, seqs, tokens=3, sinks=randn(4, seed=3))


def test_empty_and_short_sequences():
    cache = make_cache()
    seqs = [cache.allocate() for _ in range(3)]
    grow(cache, seqs[1:], [2, 9])
    q = randn(3, 4, 4, 16)
    plan = plan_decode(cache, seqs, num_heads=4, tokens_per_seq=4)
    o, lse = decode(q, cache, 0, plan, return_lse=True)
    assert (o[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    assert (lse[1, :, :2] == -math.inf).all()  # two cached tokens, four queries: the first two see nothing
    assert torch.isfinite(lse[1, :, 2:]).all()
    assert_decode(cache, seqs[1:], tokens=4)
    empty = plan_decode(cache, [], num_heads=4)
    assert decode(q[:0, :1], cache, 0, empty).shape == (0, 1, 4, 16)


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_formats(kv_format, dtype, monkeypatch):
    """The oracle reads the same quantised values: what is judged here is the arithmetic, not the format."""
    cache = make_cache(kv_format=kv_format, head_dim=64, num_layers=2)
    seqs = tree(cache, [1, 4], [40, 6])
    assert_decode(cache, seqs, dtype=dtype, layer=1)
    monkeypatch.setattr("tilewise.cpu.LOAD_BYTES", 4 * 2 * 64 * 7)  # seven tokens at a time
    assert_decode(cache, seqs, dtype=dtype, layer=1, tokens=3)


def test_nan_in_unused_memory():
    cache = make_cache(page_size=16)
    for name in ("_k", "_v"):
        for part in getattr(cache, name):
            part.fill_(float("nan"))
    seqs = tree(cache, [1, 3], [37, 5])
    assert_decode(cache, seqs)


def test_scattered_pages():
    """Pages out of order, as a cache looks after a day: gathered, not viewed."""
    pages = randn(50, 4, 2, 16), randn(50, 4, 2, 16, seed=1)
    table = torch.from_numpy(np.random.default_rng(0).permutation(50)[:36].reshape(3, 12).astype(np.int32))
    table[1, :5] = table[0, :5]  # a shared prefix of twenty tokens
    table[2, 9:] = 10**6  # garbage beyond the length
    cache = PagedKVCache.from_pages(*pages, table, torch.tensor([48, 41, 33]))
    _, shared, _ = assert_decode(cache, [0, 1, 2], tokens=2)
    assert shared.shared_nodes == 1
    assert shared.work[0].stop == 20


def test_sequences_of_different_length_over_one_partial_page():
    table = torch.tensor([[3, 1, 7], [3, 1, 7]], dtype=torch.int32)
    cache = PagedKVCache.from_pages(randn(9, 4, 2, 16), randn(9, 4, 2, 16, seed=1), table, torch.tensor([9, 12]))
    _, shared, _ = assert_decode(cache, [0, 1])
    assert shared.work[0].stop == 9


def test_prefix_cache_plans_like_its_pages():
    prefix = PrefixCache(make_cache())
    seqs = []
    for n in range(4):
        seq, reused, slots = prefix.insert([*range(24), 100 + n, 200 + n])
        assert reused == (24 if n else 0)
        k = randn(len(slots), 2, 16, seed=n)
        prefix.cache.write(0, slots, k, k)
        seqs.append(seq)
    _, shared, _ = assert_decode(prefix, seqs)
    assert shared.shared_nodes == 1


def test_auto_follows_the_cost_model():
    cache = make_cache()
    seqs = tree(cache, [1, 8], [40, 4])
    assert plan_decode(cache, seqs, num_heads=4, cost=FREE).shared_nodes == 1
    assert plan_decode(cache, seqs, num_heads=4, cost=DEAR).shared_nodes == 0
    assert plan_decode(cache, seqs, num_heads=4, cost=DEAR, share_prefix=True).shared_nodes == 1


def test_sharing_must_save_more_than_the_plan_itself_costs():
    cache = make_cache()
    seqs = tree(cache, [1, 8], [40, 4])
    saves = replace(FREE, margin=1.0)
    plan = plan_decode(cache, seqs, num_heads=4, cost=saves)
    assert plan.shared_nodes > 0
    assert plan_decode(cache, seqs, num_heads=4, cost=replace(saves, floor_us=1e12)).shared_nodes == 0
    slow = replace(saves, own_bytes_per_us=1e3, own_share=1e12)
    assert plan_decode(cache, seqs, num_heads=4, cost=slow).shared_nodes == 0
    # Both are paid only from so many rows a KV head on.
    rows = 8 * 4 // cache.num_kv_heads
    for cost in (replace(saves, floor_us=1e12), slow):
        assert plan_decode(cache, seqs, num_heads=4, cost=replace(cost, wide_rows=rows)).shared_nodes == 0
        assert plan_decode(cache, seqs, num_heads=4, cost=replace(cost, wide_rows=rows + 1)).shared_nodes > 0
    asked = plan_decode(cache, seqs, num_heads=4, cost=replace(saves, floor_us=1e12), share_prefix=True)
    assert asked.shared_nodes == plan.shared_nodes


def test_auto_shares_long_prefixes_and_leaves_short_ones():
    cache = make_cache(pages=500, page_size=16, kv_heads=8, head_dim=128, kv_format="fp32")
    long, short = tree(cache, [1, 8], [2048, 16]), tree(cache, [1, 2], [16, 16], seed=9)
    assert plan_decode(cache, long, num_heads=32).shared_nodes == 1
    assert plan_decode(cache, short, num_heads=32).shared_nodes == 0


def test_an_unshared_parent_is_shared_by_its_children():
    """Tokens above a node that was not worth sharing belong to the nodes below it."""
    cache = make_cache(page_size=4)
    seqs = tree(cache, [1, 2, 8], [4, 40, 4])
    # Two groups of eight below a short root: a model that shares 44 tokens of eight, but not 4 tokens of sixteen.
    cost = CostModel(item_us=1000.0, kv_bytes_per_us=64.0, flops_per_us=1e12, row_state_us=0.0)
    plan = plan_decode(cache, seqs, num_heads=4, cost=cost)
    assert plan.shared_nodes == 2
    assert sorted((w.start, w.stop) for w in plan.work if w.rows == 8) == [(0, 44), (0, 44)]


trees = st.recursive(
    st.integers(1, 9),
    lambda child: st.tuples(st.integers(1, 20), st.lists(child, min_size=1, max_size=3)),
    max_leaves=9,
)


@given(trees, st.sampled_from([1, 2, 16]), st.sampled_from([1, 3]), st.integers(0, 99))
def test_any_tree_equals_every_sequence_alone(shape, page_size, tokens, seed):
    cache = make_cache(pages=400, page_size=page_size, kv_heads=1, head_dim=8)
    leaves = []

    def build(seq, node, depth):
        count, children = node if isinstance(node, tuple) else (node, [])
        grow(cache, [seq], [count], seed=seed + 7 * depth + seq)
        forks = [cache.fork(seq) for _ in children[1:]]
        if not children:
            leaves.append(seq)
            return
        for child, own in zip(children, [seq, *forks], strict=True):
            build(own, child, depth + 1)

    build(cache.allocate(), shape, 0)
    assert_decode(cache, leaves, heads=2, tokens=tokens, seed=seed)


def test_one_plan_serves_all_layers_and_goes_out_of_date():
    cache = make_cache(num_layers=3)
    seqs = tree(cache, [1, 3], [20, 5])
    plan = plan_decode(cache, seqs, num_heads=4)
    q = randn(3, 1, 4, 16)
    for layer in range(3):
        exact = reference.decode(q, cache, layer, seqs)
        assert_state(decode(q, cache, layer, plan, return_lse=True), exact, [x.float() for x in exact])
    grow(cache, seqs[1:2], [1])
    with pytest.raises(ValueError, match="out of date"):
        decode(q, cache, 0, plan)
    cache.free(seqs[1])
    with pytest.raises(ValueError, match="freed"):
        decode(q, cache, 0, plan)


def test_a_plan_belongs_to_its_cache():
    first, second = make_cache(), make_cache()
    plans = [plan_decode(cache, tree(cache, [1, 3], [9, 2]), num_heads=4) for cache in (first, second)]
    with pytest.raises(ValueError, match="plan was made for another cache"):
        decode(randn(3, 1, 4, 16), second, 0, plans[0])


def test_another_default_dtype():
    cache = make_cache()
    seqs = tree(cache, [1, 3], [9, 2])
    plan, q = plan_decode(cache, np.array(seqs), num_heads=4), randn(3, 1, 4, 16)
    expected = decode(q, cache, 0, plan)
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert torch.equal(decode(q, cache, 0, plan), expected)
    finally:
        torch.set_default_dtype(torch.float32)
