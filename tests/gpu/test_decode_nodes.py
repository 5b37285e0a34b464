"""Shared nodes on cards without wgmma: tiles by mma.sync, in the emulator and on a GPU that behaves as such a card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from decode_cases import BF16, FP16, MODES, SMALL, check, decode, empty_cache, grow, make_cache, make_tree, queries

from tilewise import PagedKVCache, arch, compiler, plan_decode
from tilewise.formats import KVFormat
from tilewise.gpu import decode as decoding
from tilewise.gpu import decode_kernels
from tilewise.gpu.abi import DECODE_RULES
from tilewise.gpu.decode_kernels import BLOCK_OVERHEAD, HEAD_DIMS, choose_tiling, decode_spec, shared_bytes
from tilewise.plan.items import Word
from tilewise.plan.worklist import FAR, TILE_ROWS, Splitting
from tilewise.scores import Scores

EVERY = Splitting(pieces=((150, 1024), (FAR, 64)), shared=64, tile_rows=1, whole=False)  # every node through tiles
WHOLE = Splitting(pieces=((FAR, 64),), shared=4096, tile_rows=1)  # and a node in one piece
OTHERS = [card for card in arch.ARCHS if not arch.hopper(card)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where cases run, as an A100 unless they choose another card."""
    with arch.as_card("sm_80"):
        yield request.param


def by_tiles(cache: PagedKVCache, seqs: list[int], *, group: int = 4, tokens: int = 1, **options: Any) -> Any:
    """(o, lse), judged by the oracle, of a plan that shares whatever can be shared; the kernel with tiles made them."""
    plan = plan_decode(
        cache, seqs, num_heads=group * cache.num_kv_heads, tokens_per_seq=tokens, share_prefix=True,
        window=options.get("window"),
    )  # fmt: skip
    assert plan.shared_nodes > 0
    got = check(cache, seqs, group=group, tokens=tokens, plan=plan, **{"splitting": EVERY, **options})
    (bound,) = decoding.kept(plan).bound.values()
    assert bound.spec.entry == "decode_tree_mma"
    tiled = bound.listed.tile_items.reshape(-1, bound.listed.tile_items.shape[-1])
    assert tiled[:, Word.ROWS].max() > 0
    return got


def forks(length: int, count: int, **options: Any) -> tuple[PagedKVCache, list[int]]:
    """Sequences that share every token."""
    cache, (seq,) = make_cache((length,), **options)
    return cache, [seq, *(cache.fork(seq) for _ in range(count - 1))]


# ---- rows and tokens -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("sequences", "group"), [(2, 1), (15, 1), (4, 4), (17, 1), (16, 4), (13, 5), (75, 4)])
def test_so_many_rows(device, sequences, group):
    """Fewer than a warp's sixteen, just as many and one more; a block's; three items."""
    cache, seqs = make_tree([1, sequences], [70, 3], kv_heads=1)
    by_tiles(cache, seqs, group=group, device=device, mode=MODES[sequences % 4])


@pytest.mark.parametrize("length", [1, 63, 65, 130])
def test_so_many_tokens_and_none_of_their_own(device, length):
    cache, seqs = forks(length, 6)
    by_tiles(cache, seqs, device=device, mode=MODES[length % 4])
    by_tiles(cache, seqs, device=device, tokens=1 + (length > 2), group=3, splitting=WHOLE)


def test_a_node_that_laps_the_ring(device):
    cache, seqs = make_tree([1, 35], [707, 3], kv_heads=1)
    for count, tokens in ((35, 1), (17, 1), (4, 3)):
        got = by_tiles(cache, seqs[:count], tokens=tokens, splitting=WHOLE, device=device, mode=MODES[tokens])
        q = queries(cache, seqs[:count], tokens=tokens)
        streamed = decode(cache, seqs[:count], q, share=True, tiles=False, device=device)
        assert torch.allclose(got[0].float(), streamed[0].float(), atol=2e-2)


# ---- trees -----------------------------------------------------------------------------------------------------------
def test_three_levels(device):
    """Items of a child that go on with its parent's rows, too; sequences in any order, and some of them."""
    cache, seqs = make_tree([1, 2, 8], [150, 33, 9], kv_heads=1)
    for mode in MODES if device == "cpu" else MODES[:1]:
        by_tiles(cache, seqs, device=device, mode=mode)
    by_tiles(cache, list(reversed(seqs)), device=device)
    by_tiles(cache, [seqs[n] for n in (5, 0, 7, 2, 11, 9)], device=device)
    chain, below = make_tree([1, 1, 32], [96, 64, 5], kv_heads=1)
    fresh = chain.allocate()
    grow(chain, [fresh], 20)
    by_tiles(chain, [fresh, *below], device=device, splitting=WHOLE)


def test_a_prefix_whose_first_sequence_is_not_the_first(device):
    """Sequences of their own before and behind it; one without a token."""
    cache, seqs = make_tree([1, 9], [70, 6])
    alone = [cache.allocate() for _ in range(3)]
    grow(cache, alone, [5, 0, 300], seed=50)
    by_tiles(cache, [alone[0], *seqs[5:], alone[1], *seqs[:5], alone[2]], device=device)


def test_a_batch_of_65_that_grows(device):
    """The list stays while sequences grow."""
    cache, seqs = make_tree([1, 65], [48, 17], kv_heads=1)
    plan = plan_decode(cache, seqs, num_heads=4, share_prefix=True, room=40)
    for step in range(2):
        check(cache, seqs, plan=plan, room=40, splitting=SMALL, device=device)
        grow(cache, seqs, 20 if step == 0 else 0)
        (listed,) = decoding.kept(plan).lists.values()
        listed.grow([cache.length(s) for s in seqs], [cache.page_list(s) for s in seqs])


# ---- options ---------------------------------------------------------------------------------------------------------
def test_scores_and_windows(device):
    cache, seqs = make_tree([1, 12], [120, 9])
    grow(cache, seqs[:1], 30)
    for number, options in enumerate((
        {"window": (100, 0), "group": 8},
        {"window": (150, 0), "tokens": 3},
        {"sinks": torch.linspace(-2, 3, 8)},
        {"scale": -0.2},
        {"scale": 0.0},
        {"size": 30.0},
    )):  # fmt: skip
        by_tiles(cache, seqs, device=device, mode=MODES[number % 4], **options)


def test_references_that_move(device):
    """Keys that grow from tile to tile: the lazy softmax has to raise its references, by little and by much."""
    cache = empty_cache(60, kv_heads=1)
    seq = cache.allocate()
    for n, size in enumerate((0.01, 1.0, 5.0, 200.0, 1.0, 1000.0)):
        grow(cache, [seq], 64, seed=n, size=size)
    seqs = [seq, *(cache.fork(seq) for _ in range(19))]
    by_tiles(cache, seqs, splitting=WHOLE, device=device)


@pytest.mark.parametrize(
    ("card", "head_dim", "page_size", "dtype"),
    [
        ("sm_89", 128, 64, FP16),
        ("sm_120", 96, 3, BF16),
        ("sm_80", 256, 16, BF16),
        pytest.param("sm_80", 128, 16, BF16, marks=pytest.mark.gpu),
        pytest.param("sm_89", 192, 24, BF16, marks=pytest.mark.gpu),
        pytest.param("sm_86", 256, 48, FP16, marks=pytest.mark.gpu),
    ],
)
def test_head_dimensions_pages_and_cards(device, card, head_dim, page_size, dtype):
    kv_format = "bf16" if dtype == BF16 else "fp16"
    cache, seqs = make_tree([1, 20], [100, 5], head_dim=head_dim, page_size=page_size, kv_heads=2, kv_format=kv_format)
    with arch.as_card(card):
        by_tiles(cache, seqs, dtype=dtype, device=device)
        by_tiles(cache, seqs, dtype=dtype, device=device, tokens=2, softcap=20.0 if device == "cuda" else 0.0)


def test_a_softcap(device):
    cache, seqs = make_tree([1, 9], [70, 6])
    by_tiles(cache, seqs, softcap=5.0, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("card", ["sm_80", "sm_89"])
def test_many_sequences_of_a_long_prefix(card):
    cache, seqs = make_tree([1, 64], [2048, 100], kv_heads=8, head_dim=128)
    with arch.as_card(card):
        by_tiles(cache, seqs, device="cuda", splitting=None)


# ---- which kernel ----------------------------------------------------------------------------------------------------
def test_streaming_warps_take_what_tiles_do_not():
    """Quantised codes, other queries than the cache's values, few rows; sixteen rows at a time where there are many."""
    for card in OTHERS:
        for head_dim in HEAD_DIMS:
            for name in ("fp8", "int8", "int4"):
                assert not decode_kernels.tiles_can(BF16, KVFormat(name, head_dim), False, card)
            assert not decode_kernels.tiles_can(BF16, KVFormat("fp16", head_dim), False, card)
            assert decode_kernels.tiles_can(BF16, KVFormat("bf16", head_dim), False, card)
    assert not decode_kernels.tiles_can(BF16, KVFormat("bf16", 128), False, "sm_90a"), "there tiles come by TMA"
    cache, seqs = make_tree([1, 8], [90, 20], kv_format="int8")
    with arch.as_card("sm_89"):
        plan = plan_decode(cache, seqs, num_heads=8, share_prefix=True)
        check(cache, seqs, plan=plan, splitting=SMALL)
        (bound,) = decoding.kept(plan).bound.values()
        assert bound.spec.entry == "decode"
        assert bound.listed.tile_items.shape[0] == 0 or not bound.listed.tile_items[..., Word.ROWS].any()


@pytest.mark.parametrize("card", OTHERS)
def test_shapes_within_a_card_s_limits(card):
    limits = arch.LIMITS[card]
    for head_dim in HEAD_DIMS:
        fmt = KVFormat("bf16", head_dim)
        tiling = choose_tiling(fmt, 4, tiles=True, tma=False, arch=card)
        shared = shared_bytes(fmt, tiling)
        assert tiling.mma
        assert tiling.tile_stages >= 2 <= tiling.stages
        assert shared <= limits.shared_block
        assert tiling.blocks * (shared + BLOCK_OVERHEAD) <= limits.shared_sm
        assert tiling.tile_rows == (TILE_ROWS if head_dim <= 128 else TILE_ROWS // 2)


@pytest.mark.parametrize(
    ("card", "head_dim", "dtype", "rule"),
    [("sm_90a", 128, BF16, 0), ("sm_120", 128, FP16, 1), ("sm_120", 256, BF16, 0)],
)
def test_kernels_with_tiles_do_not_spill(card, head_dim, dtype, rule):
    """Some of them; `tilewise kernels --all` compiles every one for every card. sm_90a: an H200 as an A100."""
    fmt = KVFormat("bf16" if dtype == BF16 else "fp16", head_dim)
    tiling = choose_tiling(fmt, 4, tiles=True, tma=False, arch="sm_80" if arch.hopper(card) else card)
    spec = decode_spec(dtype, fmt, 16, tiling, tma=False, rule=DECODE_RULES[rule])
    report = compiler.compile(spec, card).report
    assert not report.spills
    assert arch.occupancy(card, report.registers, spec.threads, spec.shared_bytes) >= tiling.blocks


# ---- who gets what ---------------------------------------------------------------------------------------------------
def test_items_have_a_tile_s_rows_and_blocks_with_tiles_stream_less():
    """Rows of 64 at head_dim 256; a block that has tile items gets fewer of the streams."""
    cache, seqs = make_tree([1, 40], [96, 40], head_dim=256, kv_heads=1)
    with arch.as_card("sm_80"):
        plan = plan_decode(cache, seqs, num_heads=4, share_prefix=True)
        q = queries(cache, seqs)
        parts = [[x[0] for x in of] for of in (cache._k, cache._v)]
        pages = [cache.page_list(s) for s in seqs]
        lengths = [cache.length(s) for s in seqs]
        listed, _ = decoding.bind(
            plan, q, cache.format, *parts, pages, lengths, Scores((None, 0), 1.0), splitting=EVERY, processors=4
        )
    rows = listed.tile_items[..., Word.ROWS]
    assert rows.max() == 64
    assert rows.sum() == 160 * len(np.unique(listed.tile_items[..., Word.START][rows > 0]))
    busy, streams = (rows > 0).sum(0), (listed.items[..., Word.ROWS] > 0).sum(1)
    assert streams[busy == busy.max()].mean() <= streams[busy == busy.min()].mean()
