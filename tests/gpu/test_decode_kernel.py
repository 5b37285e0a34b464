"""The decode kernel in the emulator: formats, heads, pages, trees, splits and masks against the oracle."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from decode_cases import (
    BF16,
    FOLDED,
    FORMATS,
    FP16,
    MODES,
    SMALL,
    UNCUT,
    chance,
    check,
    decode,
    grow,
    make_cache,
    make_tree,
    queries,
    stored,
)
from oracle import assert_state

import tilewise
from tilewise import PagedKVCache, compiler, plan_decode, reference
from tilewise.arch import LIMITS, occupancy
from tilewise.formats import KVFormat
from tilewise.gpu import decode as decoding
from tilewise.gpu import decode_kernels
from tilewise.plan.worklist import FAR, Shape, Splitting, work_list

LENGTHS = (1, 63, 65, 127, 0, 129, 300)


def dtype_of(kv_format: str) -> torch.dtype:
    return FP16 if kv_format == "fp16" else BF16


# ---- formats, head dimensions, heads, pages --------------------------------------------------------------------------
@pytest.mark.parametrize("kv_format", FORMATS)
def test_formats(kv_format):
    """Every length around a chunk, a page and a piece; scales as they lie on a CPU and as on a card."""
    cache, seqs = make_cache(LENGTHS, kv_format=kv_format, head_dim=128)
    for mode in MODES:
        o, lse = check(cache, seqs, dtype=dtype_of(kv_format), mode=mode)
        assert not o[4].any()
        assert (lse[4] == -math.inf).all()
    if kv_format not in ("bf16", "fp16"):
        check(cache, seqs, runs=True, mode=MODES[2])
        for runs in (False, True):
            check(cache, seqs, runs=runs, tma=False, mode=MODES[2])


@pytest.mark.parametrize(
    ("head_dim", "kv_format", "group_size"),
    [
        *((64, "int4", 32), (64, "int4", 128), (96, "bf16", 64), (96, "int8", 64), (96, "int4", 64)),
        *((192, "bf16", 64), (192, "int4", 128), (256, "bf16", 64), (256, "fp8", 64), (256, "int4", 32)),
    ],
)
def test_head_dims(head_dim, kv_format, group_size):
    cache, seqs = make_cache((129, 7, 200), kv_format=kv_format, head_dim=head_dim, group_size=group_size)
    check(cache, seqs)
    check(cache, seqs, tokens=2, group=2, mode=MODES[1])


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kv_format", ["fp16", "int8"])
def test_queries_of_another_type_than_the_cache(dtype, kv_format):
    cache, seqs = make_cache((33, 100), kv_format=kv_format)
    check(cache, seqs, dtype=dtype)


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 1), (1, 5), (3, 2), (8, 1), (16, 1), (64, 1)])
@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
def test_heads_and_tokens(group, kv_heads, tokens):
    """Up to 1024 rows a sequence; its last tokens see each other causally, and some nothing where there are fewer."""
    cache, seqs = make_cache((70, 1, 9, 0, 160), kv_heads=kv_heads)
    o, lse = check(cache, seqs, group=group, tokens=tokens, mode=MODES[tokens % 4])
    blind = max(0, tokens - 9)
    assert not o[2, :blind].any()
    assert (lse[2, :, :blind] == -math.inf).all()


@pytest.mark.parametrize("page_size", [1, 3, 24, 32, 64, 256])
def test_page_sizes(page_size):
    cache, seqs = make_cache((1, 63, 0, 65, 300), page_size=page_size)
    for mode in MODES:
        check(cache, seqs, mode=mode)


@pytest.mark.parametrize("page_size", [1, 64])
def test_quantised_pages_of_any_size(page_size):
    for kv_format in ("fp8", "int4"):
        cache, seqs = make_cache((1, 63, 65, 200), page_size=page_size, kv_format=kv_format)
        check(cache, seqs, mode=MODES[3])


def test_pages_by_copies_as_on_cards_without_tma():
    """The same kernel loads by cp.async: for older cards, and where a box of sixteen tokens does not fit a page."""
    cache, seqs = make_cache(LENGTHS)
    for mode in MODES:
        check(cache, seqs, tma=False, mode=mode)


def test_layouts_of_pages_and_queries():
    """Strided pages, queries and outputs; an output whose rows are off 8 bytes goes by way of another."""
    cache, seqs = make_cache((100, 31), kv_heads=2)
    k_parts, v_parts = stored(cache)
    heads_first = [[x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts] for parts in (k_parts, v_parts)]
    q = queries(cache, seqs)
    plain, _ = decode(cache, seqs, q)
    for parts in ((k_parts, heads_first[1]), heads_first):
        assert torch.equal(decode(cache, seqs, q, parts=parts)[0], plain)
    wide = torch.full((2, 3, 9, 72), math.nan, dtype=BF16)[:, 1:2, :8, 3:67].copy_(q)
    assert torch.equal(decode(cache, seqs, wide)[0], plain)


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
    assert_state(first, *(reference.decode(q, cache, 0, seqs, dtype=d) for d in (torch.float64, BF16)))


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
def test_a_node_that_continues_the_rows_above_is_no_state_more(levels, tokens, states):
    """128 rows under the root and under its child are the same tiles: 64 rows are not."""
    cache, seqs = make_tree(levels, tokens)
    for window in (None, (10_000, 0)):
        q = queries(cache, seqs)
        plan = plan_decode(cache, seqs, num_heads=q.shape[2], share_prefix=True, window=window)
        splitting = Splitting(shared=512, tile_rows=16)
        got = decode(cache, seqs, q, plan=plan, splitting=splitting, window=window)
        assert_state(got, *(reference.decode(q, cache, 0, seqs, dtype=d) for d in (torch.float64, BF16)))
        (listed,) = decoding.kept(plan).lists.values()
        assert listed.total_states == len(seqs) * (states if window is None else 3)


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "rows"),
    [((700,), 1, 2, 1), ((700, 300), 1, 4, 2), ((700, 30, 300, 20), 2, 4, 4)],
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
    assert space.meeting.tolist() == [bound[0].grid[0] * len(MODES)]  # every block comes once a launch


# ---- masks and scores ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("window", [(0, 0), (5, 0), (30, None), (100, 0), (1000, 0)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_windows(window, tokens):
    cache, seqs = make_cache((1, 63, 0, 129, 300))
    check(cache, seqs, window=window, tokens=tokens)
    cache, seqs = make_tree([1, 4], [90, 30])
    check(cache, seqs, window=window, tokens=tokens, share=True, mode=MODES[1])


def test_what_a_window_hides_may_be_anything():
    """Pages that no row looks at any more may be gone: others' numbers, NaN in their keys and values."""
    for kv_format in ("bf16", "int8", "int4"):
        cache, (seq,) = make_cache((200,), kv_format=kv_format)
        q = queries(cache, [seq])
        k_parts, v_parts = stored(cache)
        clean = decode(cache, [seq], q, window=(40, 0))
        gone = cache.page_list(seq)[: (200 - 1 - 40) // 16]
        first = cache.page_list(seq)[len(gone)]
        for x in (*k_parts, *v_parts):
            at = x if x.dtype.is_floating_point and x.element_size() > 1 else x.view(torch.uint8)
            bad = math.nan if at is x else 0x7F
            at[torch.from_numpy(gone.astype(np.int64))] = bad
            at[first, : (200 - 1 - 40) % 16] = bad
        for tma in (True, False):
            assert torch.equal(decode(cache, [seq], q, window=(40, 0), parts=(k_parts, v_parts), tma=tma)[0], clean[0])


@pytest.mark.parametrize("kv_format", ["bf16", "int4"])
def test_softcap_sinks_and_scale(kv_format):
    cache, seqs = make_tree([1, 3], [100, 20], kv_format=kv_format)
    sinks = torch.linspace(-3, 4, 8)
    check(cache, seqs, softcap=2.0, share=True)
    check(cache, seqs, softcap=1e8, sinks=sinks, size=5.0)
    for scale in (0.0, -0.3, 1.0):
        check(cache, seqs, scale=scale, sinks=sinks, share=True, mode=MODES[1])
    empty, (seq,) = make_cache((0,), kv_format=kv_format)
    _, lse = check(empty, [seq], sinks=sinks)
    assert torch.allclose(lse[0, :, 0], sinks)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_large_logits(kv_format):
    """Logits of ±1e4; queries that a half cannot hold, and such that it would lose."""
    cache, seqs = make_cache((200, 33), kv_format=kv_format)
    for size in (300.0, 1e4) if kv_format == "fp16" else (300.0, 3e5, 1e-7):
        for splitting in (SMALL, UNCUT):
            check(cache, seqs, size=size, scale=300.0 / size, dtype=dtype_of(kv_format), splitting=splitting)


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("factor", [2.0**-40, 1.0, 2.0**40])
def test_values_of_any_size(kv_format, factor):
    """Values far outside of what a half holds, and that differ by 2^30 from token to token."""
    generator = torch.Generator().manual_seed(0)
    cache = PagedKVCache(30, 16, 2, 64, kv_format=kv_format)
    seq = cache.allocate()
    slots = cache.extend([seq], [200])
    k, v = (torch.randn(200, 2, 64, generator=generator) for _ in range(2))
    grades = 2.0 ** torch.randint(-15, 16, (200, 1, 1), generator=generator)
    cache.write(0, slots, k, v * grades * factor)
    for size, splitting in product((1.0, 20.0), (SMALL, UNCUT)):
        check(cache, [seq], size=size, splitting=splitting)


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4"])
def test_values_that_rise_and_fall(kv_format):
    """By 2^60 along the sequence, under equal weights and under weights that make up for it."""
    place = torch.linspace(0, 1, 208)[:, None, None]
    for rise, size in product((60.0, -60.0), (0.0, 1.0)):
        cache = PagedKVCache(30, 16, 1, 64, kv_format=kv_format)
        seq = cache.allocate()
        slots = cache.extend([seq], [208])
        k = torch.ones(208, 1, 64) * place * -rise * math.log(2) / 8
        cache.write(
            0, slots, k, torch.randn(208, 1, 64, generator=torch.Generator().manual_seed(0)) * 2.0 ** (rise * place)
        )
        q = torch.full((1, 1, 4, 64), size, dtype=BF16)
        got = decode(cache, [seq], q, splitting=UNCUT)
        assert_state(got, *(reference.decode(q, cache, 0, [seq], dtype=d) for d in (torch.float64, BF16)))


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int8", "int4"])
def test_weights_that_outgrow_what_they_weigh(kv_format):
    """Zeros, whose scales are the smallest there are, under logits that rise by 300; then values, at any height."""
    for after in (300.0, 280.0, 200.0, 0.0):
        cache = PagedKVCache(30, 16, 1, 64, kv_format=kv_format)
        seq = cache.allocate()
        slots = cache.extend([seq], [208])
        logits = torch.cat([torch.linspace(0, 300, 150), torch.full((58,), after)])
        v = torch.randn(208, 1, 64, generator=torch.Generator().manual_seed(0))
        v[:150] = 0
        cache.write(0, slots, torch.ones(208, 1, 64) * logits[:, None, None] / 8, v)
        q = torch.ones(1, 1, 4, 64, dtype=BF16)
        cut, whole = (decode(cache, [seq], q, splitting=Splitting(((FAR, 64),), whole=one)) for one in (False, True))
        assert torch.equal(cut[0], whole[0])
        assert_state(cut, *(reference.decode(q, cache, 0, [seq], dtype=d) for d in (torch.float64, BF16)))


def test_a_broken_token_shows_where_it_is_seen_and_nowhere_else():
    for kv_format in ("int8", "int4", "fp8"):
        cache, seqs = make_cache((40, 40), kv_format=kv_format)
        slots = cache.extend([seqs[0]], [1])
        k = torch.ones(1, 2, 64)
        k[0, 0, 3] = math.nan
        cache.write(0, slots, k, torch.ones(1, 2, 64))
        o, _ = check(cache, seqs)
        assert o[0, :, :4].isnan().all()
        assert o[0, :, 4:].isfinite().all()


def trees(count: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """(count, tokens, tokens) bool: token t > 0 hangs below one before it, and sees its ancestors and itself."""
    rng = np.random.default_rng(seed)
    mask = torch.eye(tokens, dtype=torch.bool).repeat(count, 1, 1)
    for one in mask:
        for t in range(1, tokens):
            one[t] |= one[int(rng.integers(0, t))]
    return mask


@pytest.mark.parametrize(
    ("kv_format", "group", "tokens"), [("bf16", 4, 7), ("bf16", 1, 16), ("int4", 2, 5), ("bf16", 2, 1)]
)
def test_a_tree_of_speculated_tokens(kv_format, group, tokens):
    """Shared prefixes above, tails that are cut anywhere, sequences shorter than the tree; the CPU says the same."""
    cache, seqs = make_tree([1, 3, 2], [100, 20, 40], kv_format=kv_format)
    short, more = make_cache((tokens, max(1, tokens - 2), 70, 0), kv_format=kv_format)
    for one, of, share in ((cache, seqs, True), (cache, seqs, False), (short, more, False)):
        mask = trees(len(of), tokens, seed=len(of))
        for splitting in (SMALL, UNCUT, Splitting(((FAR, 16),))):
            check(one, of, group=group, tokens=tokens, share=share, tree=mask, splitting=splitting)
        q = queries(one, of, group=group, tokens=tokens)
        plan = plan_decode(one, of, num_heads=q.shape[2], tokens_per_seq=tokens, share_prefix=share)
        exact = reference.decode(q, one, 0, of, tree_mask=mask)
        honest = reference.decode(q, one, 0, of, tree_mask=mask, dtype=BF16)
        for backend in ("cpu", "emulator"):
            assert_state(
                tilewise.decode(q, one, 0, plan, tree_mask=mask, return_lse=True, backend=backend), exact, honest
            )


def test_a_lower_triangle_is_causal():
    cache, seqs = make_cache((70, 33))
    q = queries(cache, seqs, tokens=6)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    plan = plan_decode(cache, seqs, num_heads=q.shape[2], tokens_per_seq=6)
    for backend in ("cpu", "emulator"):
        got = tilewise.decode(q, cache, 0, plan, tree_mask=mask, backend=backend)
        assert (got.float() - tilewise.decode(q, cache, 0, plan, backend=backend).float()).abs().max() <= 0.01
    with pytest.raises(ValueError, match=r"tree_mask must be \(6, 6\) or \(2, 6, 6\), got \(5, 6\)"):
        tilewise.decode(q, cache, 0, plan, tree_mask=mask[1:])
    windowed = plan_decode(cache, seqs, num_heads=q.shape[2], tokens_per_seq=6, window=(9, 0))
    with pytest.raises(ValueError, match="without a window"):
        tilewise.decode(q, cache, 0, windowed, tree_mask=mask)


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
        assert_state(got, *(reference.decode(q, cache, 0, seqs, dtype=d) for d in (torch.float64, BF16)))
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


# ---- random problems -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_chance(first):
    for seed in range(first, first + 10):
        chance(seed)


# ---- other cards -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])  # sm_86 has the shared memory of sm_89
@pytest.mark.parametrize(("kv_format", "head_dim"), [("bf16", 128), ("bf16", 256), ("int4", 128)])
def test_ampere_and_ada_have_kernels_that_fit(kv_format, head_dim, arch):
    """Copies in place of TMA, streams in place of tiles: what the emulator runs with pages that TMA cannot take."""
    fmt = KVFormat(kv_format, head_dim)
    for rows in (4, 16):
        tiling = decode_kernels.choose_tiling(fmt, rows, tma=False, arch=arch)
        spec = decode_kernels.decode_spec(torch.bfloat16, fmt, 16, tiling, tma=False)
        assert spec.shared_bytes <= LIMITS[arch].shared_block
        report = compiler.compile(spec, arch).report
        assert report.spill_stores == report.spill_loads == 0
        assert occupancy(arch, report.registers, spec.threads, spec.shared_bytes) >= tiling.blocks


# ---- what is refused -------------------------------------------------------------------------------------------------
def test_what_is_not_served_says_so():
    cache, seqs = make_cache((20,))
    q = queries(cache, seqs)
    with pytest.raises(NotImplementedError, match="bfloat16 queries"):
        decode(cache, seqs, q.half())
    with pytest.raises(NotImplementedError, match=r"torch\.float32"):
        decode(cache, seqs, q.float())
    with pytest.raises(NotImplementedError, match="16 tokens a sequence"):
        decode(cache, seqs, q.expand(-1, 17, -1, -1))
    k_parts, v_parts = stored(cache)
    odd = torch.empty(k_parts[0].numel() + 1, dtype=BF16)[1:].view(k_parts[0].shape)
    with pytest.raises(NotImplementedError, match="multiples of 16 bytes"):
        decode(cache, seqs, q, parts=([odd], v_parts))
    wide, (seq,) = make_cache((20,), head_dim=80)
    with pytest.raises(NotImplementedError, match="head_dim"):
        decode(wide, [seq], queries(wide, [seq]))


def test_no_sequences():
    cache, _ = make_cache((20,))
    o, lse = decode(cache, [], torch.empty(0, 1, 8, 64, dtype=BF16))
    assert o.shape == (0, 1, 8, 64)
    assert lse.shape == (0, 8, 1)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int8", "int4"])
def test_shared_memory_is_what_the_kernel_lays_out(kv_format):
    """The emulator refuses what lies beyond: every tiling has just enough, and two blocks fit where it says so."""
    for head_dim, rows in product(decode_kernels.HEAD_DIMS, (4, 16)):
        fmt = KVFormat(kv_format, head_dim)
        tiling = decode_kernels.choose_tiling(fmt, rows)
        assert tiling.blocks * (decode_kernels.shared_bytes(fmt, tiling) + 1024) <= 228 << 10
