"""Decode inside blocks of positions, in the emulator: rows on both sides of a boundary, shared nodes that lie partly
before it, lists that grow across it, plans that stand over it, latent rows. test_planner.py has the planner's lists."""

from __future__ import annotations

import pytest
import torch
from decode_cases import (
    BF16,
    FOLDED,
    MODES,
    SMALL,
    UNCUT,
    assert_decoded,
    check,
    check_growth,
    decode,
    grow,
    make_cache,
    make_tree,
    queries,
    stored,
)
from mla_cases import Problem
from oracle import assert_state, randn
from standing_step_cases import asked, judge, room_for, small, standing, steps_of
from standing_step_cases import queries as step_queries

import tilewise as tw
from tilewise import PagedKVCache, arch, attend, compiler, plan_decode, reference, renew_plan, renew_step
from tilewise.arguments import PageListsOf
from tilewise.formats import KVFormat
from tilewise.gpu import decode as decoding
from tilewise.gpu import mla_kernels
from tilewise.gpu.abi import decode_score_rule
from tilewise.gpu.decode_kernels import choose_tiling, decode_spec
from tilewise.plan.worklist import FAR, Splitting
from tilewise.scores import Scores

pytestmark = pytest.mark.usefixtures("one_thread")

EDGES = (1, 63, 64, 65, 127, 129, 0, 16, 17)  # at, before and after a boundary of blocks of 1, 16, 17 and 64


@pytest.mark.parametrize("chunk", [1, 16, 17, 64, 1000])
def test_lengths_around_a_boundary(chunk):
    """One token, and several with boundaries between them, which are more than some sequences have."""
    cache, seqs = make_cache(EDGES)
    for n, tokens in enumerate((1, 5, 16)):
        check(cache, seqs, chunk=chunk, tokens=tokens, mode=MODES[n], splitting=(SMALL, FOLDED, UNCUT)[n])


def test_a_chunk_beside_a_window_sinks_and_a_softcap():
    cache, seqs = make_cache(EDGES)
    check(cache, seqs, chunk=64, window=(20, 0), tokens=5, sinks=torch.linspace(-2, 3, 8))
    check(cache, seqs, chunk=17, window=(40, 0), tokens=2, size=3e3)  # logits of up to 1e4


def test_what_comes_before_the_block_may_be_anything():
    """A sequence of two blocks and a token, whose first two blocks are NaN."""
    cache, (seq,) = make_cache([65])
    q = queries(cache, [seq])
    clean = decode(cache, [seq], q, chunk=32)
    parts = stored(cache)
    for of in parts:
        of[0][cache.page_list(seq)[:4].tolist()] = torch.nan
    for tma in (True, False):
        got = decode(cache, [seq], q, chunk=32, parts=parts, tma=tma)
        assert torch.equal(got[0], clean[0])
        assert torch.equal(got[1], clean[1])


@pytest.mark.parametrize("tiles", [None, False])
def test_a_prefix_is_shared_from_the_boundary_on(tiles):
    """Sequences of 129 and 138 tokens under a prefix of 120, of which blocks of 100 leave 20 to be seen."""
    for group, tokens in ((8, 1), (4, 3)):
        cache, seqs = make_tree([1, 3], [120, 9])
        grow(cache, seqs[:1], 9, seed=5)
        plan = plan_decode(cache, seqs, num_heads=2 * group, tokens_per_seq=tokens, chunk=100, share_prefix=True)
        assert plan.arrays.nodes[:, 2:4].tolist() == [[100, 112]]
        check(cache, seqs, chunk=100, share=True, group=group, tokens=tokens, tiles=tiles)


# ---- lists that grow -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("splitting", [SMALL, UNCUT, FOLDED], ids=["cut", "uncut", "folded"])
def test_a_sequence_grows_across_a_boundary(splitting):
    """By one token to it, by one past it, and over several; what the list began with is hidden then."""
    for chunk, tokens in ((64, 1), (16, 3), (17, 1)):
        cache, seqs = make_cache((1, 16, 63, 0, 190), spare=40)
        check_growth(cache, seqs, (1, 1, 20, 15), chunk=chunk, tokens=tokens, splitting=splitting)


def test_a_list_that_has_grown_has_the_same_bits_folded_and_cut():
    states = []
    for whole in (False, True):
        cache, seqs = make_cache((90, 64, 200), spare=40)
        splitting = Splitting(((FAR, 64),), whole=whole)
        states.append(check_growth(cache, seqs, (17, 20), chunk=100, tokens=2, splitting=splitting))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


@pytest.mark.parametrize("tiles", [None, False])
def test_rows_of_a_shared_node_leave_it_behind_one_after_another(tiles):
    """Three sequences in one block; the longest comes to the next one first, and then sees nothing of the node."""
    for group, tokens in ((8, 1), (4, 3)):
        cache, seqs = make_tree([1, 3], [120, 9])
        grow(cache, seqs[:1], 9, seed=5)
        options = {"share": True, "chunk": 140, "group": group, "tokens": tokens, "tiles": tiles}
        check_growth(cache, seqs, (1, 3, 20), **options, splitting=SMALL)


def test_other_cards_and_formats():
    """Tiles by mma.sync, quantised pages and float32 ones."""
    with arch.as_card("sm_80"):
        cache, seqs = make_tree([1, 3], [120, 9])
        grow(cache, seqs[:1], 9, seed=5)
        check_growth(cache, seqs, (1, 3, 20), share=True, chunk=140, group=8, tokens=2, splitting=SMALL)
    for kv_format, dtype in (("int8", BF16), ("fp32", torch.float32)):
        cache, seqs = make_cache((1, 16, 63, 0, 190), kv_format=kv_format, spare=40)
        check(cache, seqs, chunk=64, tokens=3, dtype=dtype)
        check(cache, seqs, chunk=17, tokens=3, dtype=dtype)


# ---- plans that stand ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [True, False])
def test_a_standing_plan_over_many_steps(share):
    """To the bit what a plan of each step by itself gives, while sequences come to the next block and one leaves."""
    cache, seqs = make_tree([1, 3], [48, 9])
    grow(cache, seqs[:1], 5, seed=5)
    given = {"num_heads": 4, "chunk": 64, "share_prefix": share}
    plan = plan_decode(cache, seqs, rows=5, max_length=200, **given)
    for step in range(9):
        q = queries(cache, [*seqs, *range(5 - len(seqs))], group=2, seed=step)
        got = tw.decode(q, cache, 0, plan, return_lse=True, backend="emulator")
        assert_decoded([x[: len(seqs)] for x in got], q[: len(seqs)], cache, seqs, chunk=64)
        once = plan_decode(cache, seqs, **given)
        o, lse = tw.decode(q[: len(seqs)], cache, 0, once, return_lse=True, backend="emulator")
        assert torch.equal(got[0][: len(seqs)], o)
        assert torch.equal(got[1][: len(seqs)], lse)
        if step == 5:
            cache.free(seqs.pop(0))
        grow(cache, seqs, 1, seed=10 + step)
        renew_plan(plan, cache, seqs)


@pytest.mark.parametrize("chunk", [16, 48])
def test_a_standing_step_over_blocks(chunk):
    """Chunks of prompts with boundaries between their rows, beside decodes: to the bit what a step by itself gives."""
    cache, seqs = small()
    step = standing(cache, chunk=chunk)
    for prefill, decodes in steps_of(seqs):
        renew_step(step, cache, prefill, decodes)
        q = step_queries(cache, prefill, decodes)
        got = attend(q, cache, 0, step, return_lse=True, out=room_for(q, cache), backend="emulator")
        judge(cache, prefill, decodes, q, got, chunk=chunk)
        expected, used = asked(cache, prefill, decodes, q, chunk=chunk, backend="emulator"), len(decodes)
        assert torch.equal(got[0][used : len(expected[0])], expected[0][used:])


def test_a_standing_step_takes_whole_pages():
    cache, (a, b, *_) = small()
    step = standing(cache, [(a, 3)], [b], chunk=24)
    q = step_queries(cache, [(a, 3)], [b])
    with pytest.raises(NotImplementedError, match="multiple of the page size, 16, got 24"):
        attend(q, cache, 0, step, backend="emulator")
    got = attend(q, cache, 0, step, return_lse=True)
    judge(cache, [(a, 3)], [b], q, got, chunk=24)


# ---- latent rows -----------------------------------------------------------------------------------------------------
def test_latent_rows():
    Problem(EDGES, tokens=3).check(chunk=64)
    shared = Problem((150, 141, 139), prefixes=[(0, 8)] * 3)
    shared.check(chunk=100, share=True)


def test_latent_rows_of_a_node_that_is_left_behind():
    """A list that grows: one sequence, and then both, come to the next block and see nothing of the node."""
    cache = PagedKVCache(40, 16, 1, 192, value_dim=128, shared_kv=True)
    root = cache.allocate()
    write_rows(cache, [root], [32])
    seqs = [root, cache.fork(root)]
    write_rows(cache, seqs, [15, 10])
    plan = plan_decode(cache, seqs, num_heads=8, chunk=48, share_prefix=True, room=20)
    assert plan.shared_nodes == 1
    for step in (0, 2, 5):
        if step:
            write_rows(cache, seqs, [step] * 2)
            decoding.grow(plan, cache.lengths_of(seqs), PageListsOf(cache, seqs))
        q = randn(2, 1, 8, 192, dtype=BF16, seed=step)
        got = tw.decode(q, cache, 0, plan, return_lse=True, backend="emulator")
        exact, honest = (reference.decode(q, cache, 0, seqs, chunk=48, dtype=d) for d in (torch.float64, BF16))
        assert_state(got, exact, honest)


def write_rows(cache, seqs, counts):
    slots = cache.extend(seqs, counts)
    cache.write(0, slots, randn(len(slots), 1, cache.head_dim, seed=len(slots)))


def test_chosen_rows_have_no_blocks():
    shared = Problem((150, 141, 139))
    with pytest.raises(NotImplementedError, match="a window or a chunk"):
        shared.run(indices=torch.zeros(3, 1, 5, dtype=torch.int32), chunk=3)


# ---- what it costs ---------------------------------------------------------------------------------------------------
def test_kernels_keep_their_registers():
    """No form with blocks of positions spills: streams, tiles of codes, tiles by mma.sync, latent rows."""
    rule = decode_score_rule(Scores(chunk=8192))
    plain, codes = KVFormat("bf16", 128), KVFormat("int8", 128)
    mixed = KVFormat("bf16", 192).beside(plain)
    streams, tiles = choose_tiling(plain, 4), choose_tiling(codes, 4, True)
    by_mma, latent = choose_tiling(mixed, 4, True, False, "sm_80"), mla_kernels.choose_tiling(576, 512, 64)
    for spec, card in (
        (decode_spec(BF16, plain, 16, streams, rule=rule), "sm_90a"),
        (decode_spec(BF16, codes, 16, tiles, rule=rule), "sm_90a"),
        (decode_spec(BF16, mixed, 16, by_mma, tma=False, rule=rule), "sm_80"),
        (mla_kernels.mla_spec(BF16, 576, 512, 64, latent, rule=rule), "sm_90a"),
    ):
        report = compiler.compile(spec, card).report
        assert not report.spills, spec
        assert not report.serialised, spec
