"""Lists of the decode kernel in the emulator: trees, pieces and how they merge, growth, who gets what."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from decode_cases import (
    BF16,
    FOLDED,
    FP16,
    MODES,
    SMALL,
    UNCUT,
    assert_decoded,
    check,
    decode,
    grow,
    make_cache,
    make_tree,
    queries,
)

from tilewise import arch, plan_decode
from tilewise.gpu import decode as decoding
from tilewise.gpu import decode_kernels
from tilewise.plan.ranges import Cutter, Own
from tilewise.plan.worklist import FAR, Shape, Splitting, work_list


# ---- trees -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_two_levels(tokens, group):
    cache, seqs = make_tree([1, 7], [90, 19])
    for share in (False, True):
        check(cache, seqs, share=share, tokens=tokens, group=group, mode=MODES[tokens])


@pytest.mark.parametrize("tiles", [False, True])
def test_rows_of_a_node_have_windows_of_their_own(tiles):
    """Eight rows a sequence, so that a pass has one sequence's; the one whose pages are read is the longest."""
    cache, seqs = make_tree([1, 3], [120, 9])
    grow(cache, seqs[:1], 60)
    for window in ((70, 0), (100, 0), (150, 0)):
        check(cache, seqs, share=True, group=8, window=window, tiles=tiles)


@pytest.mark.parametrize("kv_format", ["bf16", "int4"])
def test_three_levels(kv_format):
    cache, seqs = make_tree([1, 3, 4], [150, 33, 9], kv_format=kv_format)
    for mode in MODES:
        check(cache, seqs, share=True, mode=mode)
    check(cache, list(reversed(seqs)), share=True)
    check(cache, [seqs[n] for n in (5, 0, 7, 2, 11)], share=True)


@pytest.mark.parametrize(("head_dim", "page_size", "dtype"), [(64, 16, BF16), (96, 32, BF16), (128, 64, FP16)])
@arch.as_card("sm_90a")
def test_tiles_of_many_rows(head_dim, page_size, dtype):
    """A node that laps the ring of tiles, of which warpgroups have all rows, some and none, up to within a tile."""
    kv_format = "bf16" if dtype == BF16 else "fp16"
    cache, seqs = make_tree([1, 35], [707, 3], head_dim=head_dim, page_size=page_size, kv_heads=1, kv_format=kv_format)
    for count, tokens in ((35, 1), (17, 1), (4, 3)):
        plan = plan_decode(cache, seqs[:count], num_heads=4, tokens_per_seq=tokens, share_prefix=True)
        whole = Splitting(((FAR, 64),), shared=4096)
        got = check(cache, seqs[:count], tokens=tokens, plan=plan, splitting=whole, dtype=dtype, mode=MODES[tokens])
        (bound,) = decoding.kept(plan).bound.values()
        assert bound.spec.entry == "decode_tree"
        assert (bound.listed.tile_items[..., 6] - bound.listed.tile_items[..., 5]).max() > 512
        streamed = decode(
            cache, seqs[:count], queries(cache, seqs[:count], tokens=tokens, dtype=dtype), share=True, tiles=False
        )
        assert torch.allclose(got[0].float(), streamed[0].float(), atol=2e-2)


def test_a_tree_beside_sequences_of_their_own():
    cache, seqs = make_tree([1, 5], [70, 6])
    alone = [cache.allocate() for _ in range(3)]
    grow(cache, alone, [5, 0, 1], seed=50)
    check(cache, [alone[0], seqs[3], seqs[0], alone[1], *seqs[1:3], alone[2]], share=True)


def test_forks_that_share_everything():
    """No row has anything of its own."""
    cache, (seq,) = make_cache((37,))
    seqs = [seq, *(cache.fork(seq) for _ in range(4))]
    for tokens in (1, 3):
        check(cache, seqs, share=True, tokens=tokens)


@pytest.mark.parametrize("count", [2, 65])
def test_many_sequences(count):
    cache, seqs = make_tree([1, count], [40, 3], kv_heads=1)
    for share in (False, True):
        check(cache, seqs, share=share, mode=MODES[share])


# ---- cutting and merging ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kv_format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("window", [None, (70, 0)])
def test_a_warp_that_folds_pieces_and_many_that_have_one_give_the_same_bits(kv_format, window):
    cache, seqs = make_cache((333, 64, 65, 1, 0, 128), kv_format=kv_format)
    q = queries(cache, seqs, tokens=3)
    cut, whole = (
        decode(cache, seqs, q, window=window, splitting=Splitting(pieces=((FAR, 32),), whole=one))
        for one in (False, True)
    )
    assert torch.equal(cut[0], whole[0])
    assert torch.equal(cut[1], whole[1])


@pytest.mark.parametrize(
    ("kv_format", "page_size"), [("bf16", 16), ("fp8", 64), ("int4", 16), ("int4", 48), ("int4", 64)]
)
def test_ranges_that_begin_and_end_between_chunks(kv_format, page_size):
    """Own tokens after a shared prefix of an odd number of sixteens; what stands after the last page is not read."""
    tree, seqs = make_tree([1, 3], [5 * page_size + 3, 70], page_size=page_size, kv_format=kv_format)
    for whole, runs in product((False, True), (False, True)):
        splitting = Splitting(pieces=((FAR, 64),), shared=64, whole=whole)
        check(tree, seqs, tokens=2, share=True, runs=runs, splitting=splitting)
    cache, seqs = make_cache((333,), page_size=page_size, kv_format=kv_format)
    q = queries(cache, seqs, tokens=2)
    cut, uncut = (
        decode(cache, seqs, q, runs=True, splitting=Splitting(pieces=((FAR, 64),), whole=one)) for one in (False, True)
    )
    assert torch.equal(cut[0], uncut[0])
    assert torch.equal(cut[1], uncut[1])


@pytest.mark.parametrize("splitting", [UNCUT, FOLDED, SMALL, Splitting(((FAR, 16),)), None])
def test_every_way_to_cut(splitting):
    cache, seqs = make_cache((1, 300, 64, 0, 65))
    for sinks in (None, torch.linspace(-2, 3, 8)):
        check(cache, seqs, splitting=splitting, sinks=sinks, mode=MODES[2])


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "int4"])
def test_alone_and_in_a_batch_are_the_same_bits(kv_format):
    cache, seqs = make_cache((300, 17, 129, 1, 600, 64), kv_format=kv_format)
    q = queries(cache, seqs)
    for splitting in (SMALL, None):
        together = decode(cache, seqs, q, splitting=splitting)
        backwards = decode(cache, seqs[::-1], q.flip(0), splitting=splitting, mode=MODES[3])
        for n, seq in enumerate(seqs):
            alone = decode(cache, [seq], q[n : n + 1], splitting=splitting, mode=MODES[2])
            for x, y, z in zip(alone, together, backwards, strict=True):
                assert torch.equal(x[0], y[n])
                assert torch.equal(x[0], z[len(seqs) - 1 - n])


@pytest.mark.parametrize("share", [False, True])
def test_the_same_bits_whoever_comes_last(share, monkeypatch):
    """States merge in their own order, whatever the order of blocks, warps and copies."""
    cache, seqs = make_tree([1, 5], [200, 90])
    q = queries(cache, seqs)
    first = None
    for blocks, (late, seed) in product((3,) if share else (1, 2, 40), product((True, False), range(3))):
        monkeypatch.setattr(
            decoding, "multiprocessors", lambda device, blocks=blocks: blocks
        )  # a node is cut for as many as there are
        got = decode(cache, seqs, q, share=share, mode=(late, seed))
        first = first or got
        assert torch.equal(got[0], first[0])
        assert torch.equal(got[1], first[1])
    assert_decoded(first, q, cache, seqs)


def test_alone_and_beside_a_tree_are_the_same_bits():
    """The kernel with tiles is another one; what it does to a sequence of its own is not."""
    cache, seqs = make_tree([1, 5], [200, 20])
    alone = [cache.allocate() for _ in range(3)]
    grow(cache, alone, [300, 17, 129], seed=50)
    for tokens in (1, 3):
        q = queries(cache, [*seqs, *alone], tokens=tokens)
        together = decode(cache, [*seqs, *alone], q, share=True)
        for n, seq in enumerate(alone, len(seqs)):
            for x, y in zip(decode(cache, [seq], q[n : n + 1]), together, strict=True):
                assert torch.equal(x[0], y[n])


@arch.as_card("sm_90a")
def test_ranges_that_fill_one_block_get_deeper_rings_and_the_same_bits():
    """Six sequences of two KV heads on the emulator's three multiprocessors: a warp each of one block of four."""
    cache, seqs = make_cache((300, 257, 90, 16, 65, 1), kv_heads=2)
    plan = plan_decode(cache, seqs, num_heads=8, share_prefix=False)
    q = queries(cache, seqs)
    together = decode(cache, seqs, q, plan=plan)
    (bound,) = decoding.kept(plan).bound.values()
    usual = decode_kernels.choose_tiling(cache.format, 4)
    constants = dict(bound.spec.constants)
    assert (constants["kBlocksPerSm"], constants["kStages"]) == (1, 2 * usual.stages)
    for n, seq in enumerate(seqs):
        for x, y in zip(decode(cache, [seq], q[n : n + 1]), together, strict=True):
            assert torch.equal(x[0], y[n])


@pytest.mark.parametrize(
    ("kv_format", "kv_heads", "page_size", "head_dim"),
    [
        ("bf16", 4, 16, 64),
        ("fp8", 8, 16, 64),
        ("int4", 8, 16, 128),
        ("int4", 8, 64, 64),
        ("int4", 16, 48, 96),
    ],
)
@arch.as_card("sm_90a")
def test_warps_in_step_have_one_copy_for_all_and_the_same_bits(kv_format, kv_heads, page_size, head_dim):
    """Neighbouring heads of many pieces in one block: boxes of several heads; alone a sequence's heads stand apart."""
    options = {"kv_format": kv_format, "kv_heads": kv_heads, "page_size": page_size, "head_dim": head_dim}
    cache, seqs = make_cache((300, 0, 64, 17, 129), **options)
    for window, tokens in ((None, 1), ((40, 0), 3)):
        q = queries(cache, seqs, group=2, tokens=tokens)
        plan = plan_decode(cache, seqs, num_heads=q.shape[2], tokens_per_seq=tokens, share_prefix=False, window=window)
        together = decode(cache, seqs, q, plan=plan, splitting=SMALL, window=window)
        (bound,) = decoding.kept(plan).bound.values()
        constants = dict(bound.spec.constants)
        assert constants["kInStep"]
        assert constants["kLineHeads"] == {("fp8", 64): 2, ("int4", 128): 2, ("int4", 64): 4}.get(
            (kv_format, head_dim), 1
        )
        for n, seq in enumerate(seqs[:3]):
            for x, y in zip(
                decode(cache, [seq], q[n : n + 1], splitting=SMALL, window=window, room=1), together, strict=True
            ):
                assert torch.equal(x[0], y[n])
    for mode in MODES:
        check(cache, seqs, group=2, mode=mode, splitting=SMALL)


@arch.as_card("sm_90a")
def test_warps_that_join_take_what_is_left():
    """More items than warps beside one short tile, some of them without a token, in every order of threads."""
    cache, seqs = make_tree([1, 9], [80, 33], kv_heads=4)
    empty, alone = [cache.allocate() for _ in range(3)], [cache.allocate() for _ in range(8)]
    grow(cache, alone, [20 * n + 1 for n in range(8)], seed=3)
    mixed = [*empty[:2], *alone, *seqs, empty[2]]
    for mode in MODES:
        check(cache, mixed, share=True, mode=mode, splitting=SMALL)
    q = queries(cache, mixed)
    plan = plan_decode(cache, mixed, num_heads=q.shape[2], share_prefix=True)
    decode(cache, mixed, q, plan=plan, splitting=SMALL)
    (listed,) = decoding.kept(plan).lists.values()
    (bound,) = decoding.kept(plan).bound.values()
    constants = dict(bound.spec.constants)
    assert (listed.items[..., 2] > 0).sum(1).min() > constants["kWarps"] + constants["kJoiners"]


@pytest.mark.parametrize(("levels", "tokens", "states"), [([1, 2, 32], [192, 64, 9], 2), ([1, 4, 8], [192, 64, 9], 3)])
@arch.as_card("sm_90a")
def test_a_node_that_continues_the_rows_above_is_no_state_more(levels, tokens, states):
    """128 rows under the root and under its child are the same tiles: 64 rows are not."""
    cache, seqs = make_tree(levels, tokens)
    for window in (None, (10_000, 0)):
        q = queries(cache, seqs)
        plan = plan_decode(cache, seqs, num_heads=q.shape[2], share_prefix=True, window=window)
        splitting = Splitting(shared=512, tile_rows=16)
        got = decode(cache, seqs, q, plan=plan, splitting=splitting, window=window)
        assert_decoded(got, q, cache, seqs)
        (listed,) = decoding.kept(plan).lists.values()
        assert listed.total_states == len(seqs) * (states if window is None else 3)


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "rows"),
    [((700,), 1, 2, 1), ((700,), 1, 4, 2), ((700, 300), 1, 4, 2), ((700, 30, 300, 20), 2, 4, 4)],
)
def test_more_states_than_one_warp_folds_in_a_run(lengths, kv_heads, group, rows):
    """44 of a row: by four warps of a block together, by a warp that has two rows, or four, some of few states."""
    cache, seqs = make_cache(lengths, kv_heads=kv_heads)
    splitting = Splitting(pieces=((FAR, 16),), whole=False)
    for mode in MODES:
        check(cache, seqs, group=group, mode=mode, splitting=splitting)
    q = queries(cache, seqs, group=group)
    plan = plan_decode(cache, seqs, num_heads=q.shape[2], share_prefix=False)
    decode(cache, seqs, q, plan=plan, splitting=splitting)
    (bound,) = decoding.kept(plan).bound.values()
    assert bound.args.merge_rows == rows


def test_a_plan_serves_every_layer_and_counts_on():
    cache, seqs = make_tree([1, 4], [100, 20])
    plan = plan_decode(cache, seqs, num_heads=8, share_prefix=True)
    q = queries(cache, seqs)
    states = [decode(cache, seqs, q, plan=plan, mode=mode) for mode in MODES]
    for o, lse in states[1:]:
        assert torch.equal(o, states[0][0])
        assert torch.equal(lse, states[0][1])
    bound = list(decoding.kept(plan).bound.values())
    assert len(bound) == 1
    assert bound[0].listed.total_states > 0
    (space,) = bound[0].workspaces.values()
    assert space.barrier.tolist() == [bound[0].grid[0] * len(MODES)]  # every block comes once a launch


# ---- growing ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page_size", [16, 4])
def test_sequences_grow_under_the_same_list(page_size):
    """Only lengths and last pages change, on the device; the bits are those of a list made with the same room."""
    cache, seqs = make_tree([1, 3], [60, 7], page_size=page_size)
    alone, empty = cache.allocate(), cache.allocate()
    seqs = [*seqs, alone, empty]
    grow(cache, [alone], [16])
    q = queries(cache, seqs)
    plan = plan_decode(cache, seqs, num_heads=8, share_prefix=True)
    decode(cache, seqs, q, plan=plan, room=20)
    (listed,) = decoding.kept(plan).lists.values()
    items = listed.items.copy()
    for step in (1, 3, 16):
        grow(cache, seqs, step, seed=90 + step)
        listed.grow([cache.length(s) for s in seqs], [cache.page_list(s) for s in seqs])
        got = decode(cache, seqs, q, plan=plan, room=20)
        assert_decoded(got, q, cache, seqs)
    assert np.array_equal(listed.items, items)
    with pytest.raises(ValueError, match="make a new plan"):
        listed.grow([cache.length(s) + 1 for s in seqs])
    with pytest.raises(ValueError, match="make a new plan"):
        listed.grow([cache.length(s) - 1 for s in seqs])


def test_room_changes_no_bit():
    """Pieces beyond the end leave the empty state, which merges as nothing."""
    cache, seqs = make_cache((300, 40, 64))
    q = queries(cache, seqs)
    for sinks in (None, torch.ones(8)):
        exact = decode(cache, seqs, q, sinks=sinks)
        roomy = decode(cache, seqs, q, sinks=sinks, room=100)
        assert torch.equal(exact[0], roomy[0])
        assert torch.equal(exact[1], roomy[1])


def test_room_for_more_pieces_than_a_run():
    """Merging folds runs of sixteen states, and a warp that takes a range whole folds its pieces one after another: of
    more than seventeen the bits would tell which of the two it was."""
    planned, grown = np.array([700, 700, 200, 9000, 700]), np.array([1024, 1025, 5000, 30000, 700])
    assert Splitting().of(planned, grown).tolist() == [64, 128, 512, 1024, 64]
    assert Splitting().of(planned).tolist() == [64, 64, 256, 1024, 64]
    one, shape = np.array([0]), Shape(8, 1, 1, False)
    for planned, stop, whole in (
        (8000, 17 * 1024, True), (8000, 17 * 1024 + 1, False), (200, 17 * 1024, True), (200, 17 * 1024 + 1, False)
    ):  # fmt: skip
        own = Own(one, one, np.array([stop]), np.array([planned]))
        assert Cutter(4, 1, shape, Splitting()).cut_own(own).whole.item() is whole


# ---- the list itself -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tiles", [False, True])
def test_the_list_covers_every_row_and_token_once(tiles):
    """Counted item by item: each row meets each of its tokens once, in as many states as are said to merge."""
    cache, seqs = make_tree([1, 3, 2], [150, 70, 33], kv_heads=2)
    lists, lengths = [cache.page_list(s) for s in seqs], [cache.length(s) for s in seqs]
    for share, tokens in product((False, True), (1, 5)):
        plan = plan_decode(cache, seqs, num_heads=8, tokens_per_seq=tokens, share_prefix=share)
        listed = work_list(plan, lists, lengths, 16, Shape(8, 4, 7, tiles), splitting=SMALL)
        assert (len(listed.tile_items) > 0) == (tiles and share)
        each = 4 * tokens
        met, arrived = np.zeros((6, 2, each, 253), np.int64), np.zeros((6, 2), np.int64)
        items = np.concatenate([listed.items.reshape(-1, 16), listed.tile_items.reshape(-1, 16)])
        for sequence, row, rows, caller_head, _, start, stop, *_ in items.tolist():
            if rows == 0:
                continue
            head = caller_head & 0xFFF
            assert caller_head >> 12 == plan.order[sequence]
            for flat in range(row, row + rows):
                met[sequence + flat // each, head, flat % each, start:stop] += 1
                arrived[sequence + flat // each, head] += 1
        assert (met == 1).all()
        _, fixed, begin, piece = listed.states.T
        assert (arrived == (fixed + -(-np.maximum(0, 253 - begin) // piece))[:, None] * each).all()


def test_units_are_dealt_longest_first_and_evenly():
    cache, seqs = make_cache([700, 20, 20, 300, 40, 90, 20, 20])
    plan = plan_decode(cache, seqs, num_heads=8, share_prefix=False)
    lists = [cache.page_list(s) for s in seqs]
    listed = work_list(plan, lists, [cache.length(s) for s in seqs], 16, Shape(8, 4, 4, False), splitting=SMALL)
    spent = (listed.items[..., 6] - listed.items[..., 5]).reshape(4, -1, 4)  # blocks, rounds, warps
    assert (np.diff(spent, axis=1) <= 16).all()
    assert spent.sum(1).max() < 1.4 * spent.sum(1).mean()
