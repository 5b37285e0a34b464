"""decode() and attend() over rows that are keys and values at once (MLA, absorbed), over V of another width than K, and
over lists of tokens."""

from __future__ import annotations

import pytest
import torch
from decode_tree_cases import grow, make_cache, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_state, poison, randn
from step_cases import assert_step, mixed

import tilewise as tw
from tilewise import reference

DEEPSEEK = {"kv_heads": 1, "head_dim": 576, "value_dim": 512, "shared_kv": True}
SMALL = {"kv_heads": 1, "head_dim": 24, "value_dim": 16, "shared_kv": True}
APART = {"kv_heads": 2, "head_dim": 24, "value_dim": 40}
CACHES = pytest.mark.parametrize("sizes", [SMALL, APART], ids=["shared", "apart"])


def check(cache, seqs, *, heads=4, tokens=1, dtype=torch.float32, share="auto", window=None, seed=7, **options):
    """One decode against the oracle; returns the plan."""
    pages = getattr(cache, "cache", cache)
    q = randn(len(seqs), tokens, heads, pages.head_dim, dtype=dtype, seed=seed, size=options.pop("size", 1.0))
    asked = (q, cache, pages.num_layers - 1, seqs)
    exact = reference.decode(*asked, window=window, **options)
    honest = reference.decode(*asked, window=window, dtype=dtype, **options)
    plan = tw.plan_decode(cache, seqs, num_heads=heads, tokens_per_seq=tokens, share_prefix=share, window=window)
    out = poison(q.new_empty(*q.shape[:3], pages.value_dim))
    got = tw.decode(*asked[:3], plan, return_lse=True, out=out, **options)
    assert got[0] is out
    assert_state(got, exact, honest)
    return plan


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "fp8", "int8"])
def test_deepseeks_rows_under_a_shared_prefix(name):
    cache = make_cache(pages=60, page_size=16, kv_format=name, **DEEPSEEK)
    alone = cache.allocate()
    grow(cache, [alone], [65], seed=9)
    seqs = [*tree(cache, [1, 2], [127, 2]), alone]
    for share in (True, False):
        plan = check(cache, seqs, heads=8, tokens=2, share=share, scale=192**-0.5)
        assert plan.shared_nodes == share
    assert plan.head_dim == 576
    assert plan.value_dim == 512
    assert plan.kv_row_bytes == {"fp32": 2304, "fp16": 1152, "bf16": 1152, "fp8": 656, "int8": 656}[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_deepseeks_rows_in_16_bits(dtype):
    cache = make_cache(
        pages=30, page_size=64, kv_format={torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype], **DEEPSEEK
    )
    seqs = tree(cache, [1, 2], [63, 2])
    check(cache, seqs, heads=128, dtype=dtype, share=True)


@CACHES
@pytest.mark.parametrize("share", [True, False])
def test_every_option(sizes, share):
    cache = make_cache(num_layers=2, **sizes)
    seqs = [*tree(cache, [1, 2, 3], [30, 5, 3]), *tree(cache, [1], [1], seed=5)]
    seqs = seqs[3:] + seqs[:3]  # a prefix whose first sequence is not the first
    check(cache, seqs, share=share)
    check(cache, seqs, share=share, softcap=5.0, tokens=3)
    check(cache, seqs, share=share, sinks=randn(4, seed=3), scale=-0.3)
    check(cache, seqs, share=share, window=(7, 0), tokens=2)
    check(cache, seqs, share=share, size=1e4)
    tokens = torch.rand(7, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    check(cache, seqs, share=share, tokens=4, tree_mask=tokens)


@CACHES
@pytest.mark.parametrize("length", [1, 3, 63, 65, 129])
def test_lengths_and_pages_that_hold_nan(sizes, length):
    cache = make_cache(page_size=16, **sizes)
    for x in (*cache._k, *cache._v):
        x.fill_(torch.nan)
    seqs = cache.allocate(3)
    grow(cache, seqs, [length, 1, 2])
    check(cache, seqs, tokens=2)


def test_no_sequence_and_no_token():
    cache = make_cache(**SMALL)
    check_empty = tw.plan_decode(cache, [], num_heads=4)
    assert tw.decode(torch.empty(0, 1, 4, 24), cache, 0, check_empty).shape == (0, 1, 4, 16)
    (seq,) = cache.allocate(1)
    plan = tw.plan_decode(cache, [seq], num_heads=4)
    o, lse = tw.decode(torch.ones(1, 1, 4, 24), cache, 0, plan, return_lse=True)
    assert o.shape == (1, 1, 4, 16)
    assert not o.any()
    assert (lse == -torch.inf).all()


def test_65_sequences_under_one_prefix():
    cache = make_cache(pages=300, **SMALL)
    plan = check(cache, tree(cache, [1, 65], [32, 3]), share=True)
    assert plan.shared_nodes == 1


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 80), st.integers(1, 80), st.booleans(), st.sampled_from([1, 2, 3]), st.integers(1, 3),
    st.sampled_from(["fp32", "bf16", "fp8", "int8"]), st.integers(0, 99),
)  # fmt: skip
def test_random_widths(head_dim, value_dim, shared, kv_heads, tokens, name, seed):
    if shared:
        head_dim, value_dim, kv_heads = max(head_dim, value_dim), min(head_dim, value_dim), 1
    sizes = {"head_dim": head_dim, "value_dim": value_dim, "shared_kv": shared, "kv_heads": kv_heads}
    cache = make_cache(page_size=1 + seed % 5, kv_format=name, **sizes)
    seqs = tree(cache, [1, 2], [1 + seed, 2], seed=seed)
    check(cache, seqs, heads=2 * kv_heads, tokens=tokens, share=seed % 2 == 0)


@CACHES
def test_a_selection_of_pages(sizes):
    cache = make_cache(page_size=16, **sizes)
    seqs = cache.allocate(2)
    grow(cache, seqs, [90, 160])
    keep = torch.rand(2, cache.num_kv_heads, 10, generator=torch.Generator().manual_seed(1)) < 0.5
    blocks = {"seqlen_q": 1, "seqlen_k": 160, "block_q": 16, "block_k": 16}
    schedule = tw.BlockSchedule.from_blocks(keep[:, :, None], **blocks)
    plan = tw.plan_decode(cache, seqs, num_heads=4, pages_per_seq=10)
    q = randn(2, 1, 4, 24, seed=3)
    got = tw.decode(q, cache, 0, plan, schedule=schedule, return_lse=True)
    exact, honest = (reference.decode(q, cache, 0, seqs, selected=keep, dtype=t) for t in (torch.float64, q.dtype))
    assert_state(got, exact, honest)


# ---- the row is read once --------------------------------------------------------------------------------------------


def test_plans_count_a_row_once():
    cache = make_cache(pages=40, page_size=16, kv_format="bf16", **DEEPSEEK)
    (seq,) = cache.allocate(1)
    grow(cache, [seq], [100])
    plan = tw.plan_decode(cache, [seq], num_heads=16)
    q_and_o = 16 * (576 + 512) * 2
    assert plan.bytes == 100 * 1152 + q_and_o
    assert plan.flops == 2 * 16 * 100 * (576 + 512)
    standing = tw.plan_decode(cache, [seq], num_heads=16, rows=2, max_length=200)
    assert standing.judge.kv_bytes == 4 * 576  # on a CPU, as float32
    assert standing.judge.head_dim == (576 + 512) // 2


def test_plans_that_grow_and_a_prefix_cache():
    prefix = tw.PrefixCache(make_cache(kv_format="int8", **SMALL))
    seqs = []
    for last in range(3):
        seq, reused, slots = prefix.insert([*range(30), 100 + last])
        prefix.cache.write(0, slots, randn(len(slots), 1, 24, seed=last))
        assert reused == (30 if last else 0)
        seqs.append(seq)
    plan = check(prefix, seqs, share=True)
    assert plan.shared_nodes == 1
    slots = prefix.extend(seqs, [1, 2, 3])
    prefix.cache.write(0, slots, randn(3, 1, 24, seed=9))
    grown = tw.grow_plan(plan, prefix)
    q = randn(3, 1, 4, 24)
    exact, honest = (reference.decode(q, prefix, 0, seqs, dtype=t) for t in (torch.float64, torch.float32))
    assert_state(tw.decode(q, prefix, 0, grown, return_lse=True), exact, honest)


# ---- standing plans and steps ----------------------------------------------------------------------------------------


@CACHES
def test_standing_plans(sizes):
    cache = make_cache(**sizes)
    seqs = tree(cache, [1, 3], [20, 2])
    plan = tw.plan_decode(cache, seqs, num_heads=4, rows=5, max_length=64)
    for _ in range(3):
        q = randn(5, 1, 4, 24, seed=len(seqs))
        out = poison(q.new_empty(5, 1, 4, cache.value_dim))
        o, lse = tw.decode(q, cache, 0, plan, return_lse=True, out=out)
        got = o[: len(seqs)], lse[: len(seqs)]
        asked = (q[: len(seqs)], cache, 0, seqs)
        assert_state(got, reference.decode(*asked), reference.decode(*asked, dtype=torch.float32))
        assert not o[len(seqs) :].any()
        seqs += cache.fork(seqs[0], 2)
        cache.free(seqs.pop(0))
        grow(cache, seqs, [1] * len(seqs), seed=3)
        cache.free(seqs.pop(1))
        tw.renew_plan(plan, cache, seqs)


@CACHES
@pytest.mark.parametrize("share", [True, False])
def test_steps(sizes, share):
    cache, prefill, decode = mixed(**sizes)
    plan, o, _ = assert_step(cache, prefill, decode, share=share, sinks=randn(4, seed=2))
    assert o.shape == (plan.rows, 4, cache.value_dim)
    assert_step(cache, prefill, decode, share=share, window=(9, 0), softcap=3.0)


@CACHES
def test_standing_steps(sizes):
    cache, prefill, decode = mixed(**sizes)
    decodes = tw.plan_decode(cache, decode, num_heads=4, rows=5, max_length=128)
    step = tw.plan_step(cache, prefill, decodes, num_heads=4, rows=80, max_chunks=4)
    once = tw.plan_step(cache, prefill, decode, num_heads=4)
    q = randn(80, 4, 24, seed=1)
    o = tw.attend(q, cache, 0, step)
    assert o.shape == (80, 4, cache.value_dim)
    chunks = sum(tokens for _, tokens in prefill)
    other = tw.attend(torch.cat([q[4 : 4 + chunks], q[:4]]), cache, 0, once)
    torch.testing.assert_close(o[: 4 + chunks], torch.cat([other[chunks:], other[:chunks]]))
    assert not o[4 + chunks :].any()


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8"])
def test_chunks_by_the_forward_kernel(name):
    """Rows are pages of K, and V is a part of them; quantised ones are widened first."""
    cache = make_cache(kv_heads=1, head_dim=64, value_dim=64, shared_kv=True, kv_format=name, page_size=16, pages=30)
    seqs = tree(cache, [1, 2], [40, 9])
    assert_step(cache, [(seqs[0], 12), (seqs[1], 3)], [], heads=2, dtype=torch.bfloat16, share=True, backend="emulator")


# ---- lists of tokens -------------------------------------------------------------------------------------------------


def lists(cache, seqs, tokens, k, seed=0):
    """(n, tokens, k) int32: random positions, some of them -1; the first query of all sees nothing."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([cache.length(seq) for seq in seqs])[:, None, None]
    made = (torch.rand(len(seqs), tokens, k, generator=rng) * lengths).int()
    made[torch.rand(made.shape, generator=rng) < 0.2] = -1
    made[0, 0] = -1
    return made


@CACHES
@pytest.mark.parametrize("k", [0, 1, 5, 70])
def test_lists_of_tokens(sizes, k):
    cache = make_cache(num_layers=2, **sizes)
    seqs = tree(cache, [1, 3], [40, 4])
    for tokens in (1, 3):
        indices = lists(cache, seqs, tokens, k)
        check(cache, seqs, tokens=tokens, indices=indices)
        check(cache, seqs, tokens=tokens, indices=indices, sinks=randn(4, seed=2), softcap=4.0, scale=0.2)


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8"])
def test_lists_over_deepseeks_rows(name):
    cache = make_cache(pages=30, page_size=64, kv_format=name, **DEEPSEEK)
    seqs = tree(cache, [1, 2], [200, 1])
    check(cache, seqs, heads=16, indices=lists(cache, seqs, 1, 64), dtype=torch.bfloat16)


def test_a_list_of_all_tokens_is_the_whole_sequence():
    cache = make_cache(**SMALL)
    seqs = tree(cache, [1, 2], [40, 4])
    plan = tw.plan_decode(cache, seqs, num_heads=4)
    q = randn(2, 1, 4, 24)
    everything = torch.arange(44, dtype=torch.int32).flip(0).expand(2, 1, 44).contiguous()
    listed = tw.decode(q, cache, 0, plan, indices=everything, return_lse=True)
    for got, want in zip(listed, tw.decode(q, cache, 0, plan, return_lse=True), strict=True):
        torch.testing.assert_close(got, want)


def test_lists_of_a_standing_plan():
    cache = make_cache(**SMALL)
    seqs = tree(cache, [1, 2], [40, 4])
    plan = tw.plan_decode(cache, seqs, num_heads=4, rows=3, max_length=64)
    indices = torch.full((3, 1, 8), 10**6, dtype=torch.int32)  # nobody reads those of the idle row
    indices[:2] = lists(cache, seqs, 1, 8)
    q = randn(3, 1, 4, 24)
    o = tw.decode(q, cache, 0, plan, indices=indices)
    once = tw.decode(q[:2], cache, 0, tw.plan_decode(cache, seqs, num_heads=4), indices=indices[:2])
    assert torch.equal(o[:2], once)
    assert not o[2].any()


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_bad_lists_are_named():
    cache = make_cache(**SMALL)
    seqs = tree(cache, [1, 2], [40, 4])
    q, plan = randn(2, 1, 4, 24), tw.plan_decode(cache, seqs, num_heads=4)
    good = lists(cache, seqs, 1, 8)
    late, early = good.clone(), good.clone()
    late[1, 0, 3], early[0, 0, 7] = 44, -2
    windowed = tw.plan_decode(cache, seqs, num_heads=4, window=(5, 0))
    for its, of, error, says in (
        (late, plan, ValueError, rf"got 44 at \[1, 0, 3\], where sequence {seqs[1]} has 44 tokens"),
        (early, plan, ValueError, r"got -2 at \[0, 0, 7\]"),
        (good.long(), plan, ValueError, "indices .*int32"),
        (good[:1], plan, ValueError, "indices"),
        (good[:, 0], plan, ValueError, "indices"),
        (good.tolist(), plan, TypeError, "indices"),
        (good, windowed, ValueError, "indices go with a plan without a window"),
    ):
        with pytest.raises(error, match=says):
            tw.decode(q, cache, 0, of, indices=its)
    with pytest.raises(NotImplementedError, match="tree_mask and indices"):
        tw.decode(q, cache, 0, plan, indices=good, tree_mask=torch.ones(1, 1, dtype=torch.bool))


def test_bad_shapes_are_named():
    cache = make_cache(**SMALL)
    seqs = tree(cache, [1, 2], [40, 4])
    plan = tw.plan_decode(cache, seqs, num_heads=4)
    with pytest.raises(ValueError, match=r"q .*24"):
        tw.decode(randn(2, 1, 4, 16), cache, 0, plan)
    with pytest.raises(ValueError, match=r"out .*16"):
        tw.decode(randn(2, 1, 4, 24), cache, 0, plan, out=randn(2, 1, 4, 24))


def test_what_no_kernel_serves():
    apart, shared = make_cache(**APART), make_cache(**SMALL)
    for cache, options, says in (
        (apart, {}, r"GPU decode takes head_dim \(64, 96, 128, 192, 256\), got 24"),
        (apart, {"indices": torch.zeros(2, 1, 3, dtype=torch.int32)}, "indices have a kernel over shared_kv"),
        (shared, {"tree_mask": torch.ones(1, 1, dtype=torch.bool)}, "tree_mask has no kernel over a shared_kv"),
    ):
        seqs = tree(cache, [1, 2], [40, 4])
        plan = tw.plan_decode(cache, seqs, num_heads=4)
        with pytest.raises(NotImplementedError, match=says):
            tw.decode(randn(2, 1, 4, 24), cache, 0, plan, backend="emulator", **options)
