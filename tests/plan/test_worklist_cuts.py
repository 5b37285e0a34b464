"""How ranges are cut: the size of pieces, which ranges one warp takes whole, even shares of nodes, chains of tiles."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from tree_cases import make_plan, tree_lists

from tilewise.plan.cost import (
    CHAIN_SHARE,
    DEEP_CHUNKS,
    ITEM_CHUNKS,
    SPRINT,
    STATE_CHUNKS,
    WHOLE_CHUNKS,
    WHOLE_LIMITS,
)
from tilewise.plan.items import NodeCut, Pieces, Word, cut_nodes, node_pieces, node_states
from tilewise.plan.ranges import Cutter, Own
from tilewise.plan.worklist import FAR, TILE_ROWS, Shape, Splitting, work_list


def own_ranges(tokens: list[int]) -> Own:
    stop = np.array(tokens, np.int64)
    return Own(np.arange(len(stop)), np.zeros_like(stop), stop, stop)


def nodes_of(*nodes: tuple[int, int, int, int]) -> np.ndarray:
    """(m, 5), from first, sequences, start and stop; a node stands under the last one that holds its sequences."""
    rows: list[tuple[int, ...]] = []
    for first, sequences, start, stop in nodes:
        around = [n for n, (a, count, *_) in enumerate(rows) if a <= first and first + sequences <= a + count]
        rows.append((first, sequences, start, stop, max(around, default=-1)))
    return np.array(rows, np.int64).reshape(-1, 5)


def cutter(*, blocks: int = 132, warps: int = 4, rows_each: int = 4, heads: int = 1, **options: object) -> Cutter:
    splitting = {k: options.pop(k) for k in ("pieces", "shared", "tile_rows", "whole") if k in options}
    shape = Shape(8, warps, blocks, bool(options.pop("tiles", False)), **options)  # type: ignore[arg-type]
    return Cutter(rows_each, heads, shape, Splitting(**splitting))  # type: ignore[arg-type]


# ---- own ranges ------------------------------------------------------------------------------------------------------
def test_a_piece_depends_on_the_length_alone_and_limits_count_as_within() -> None:
    tokens = np.array([1, 256, 257, 1024, 1025, 2048, 2049, 8192, 8193, 10**6])
    assert Splitting().of(tokens).tolist() == [256, 256, 64, 64, 128, 128, 512, 512, 1024, 1024]
    assert Splitting(pieces=((100, 16), (200, 32))).of(np.array([100, 101, 10**6])).tolist() == [16, 32, 32]


def test_pieces_begin_with_a_chunk_and_are_at_least_one() -> None:
    own = Own(*(np.array([x]) for x in (0, 40, 140, 100)))  # 60 tokens, and room for 40 more
    cut = cutter(pieces=((FAR, 16),), whole=False, chunk=32).cut_own(own)
    assert (cut.size.tolist(), cut.begin.tolist(), cut.parts.tolist()) == ([32], [32], [4])
    cut = cutter(pieces=((60, 64), (FAR, 16)), whole=False).cut_own(own)
    assert (cut.size.tolist(), cut.begin.tolist(), cut.parts.tolist()) == ([64], [32], [2])
    empty = Own(*(np.array([x]) for x in (0, 48, 48, 48)))
    assert cutter(whole=False).cut_own(empty).parts.tolist() == [1]


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("rows_each", [8, 9])
@pytest.mark.parametrize(("chunks", "size"), [(1024, 1024), (64, 64)])
def test_ranges_are_whole_only_if_there_are_enough_of_them(heads: int, rows_each: int, chunks: int, size: int) -> None:
    """One range of 16384 tokens over 528 warps is cut, as many as there are warps are whole; the constants say where it
    changes. Every KV head, and every eight rows, take a range once more."""
    pieces, warps = 16, 528
    cut_cost = chunks + pieces * (ITEM_CHUNKS + STATE_CHUNKS)  # per range
    fewest = (chunks + ITEM_CHUNKS) / SPRINT / (cut_cost / warps)  # items with which cutting is no faster any more
    times = heads * -(-rows_each // 8)
    cuts = cutter(heads=heads, rows_each=rows_each, longest=DEEP_CHUNKS)
    for ranges in (1, int(fewest / times), int(fewest / times) + 1, warps):
        cut = cuts.cut_own(own_ranges([16 * chunks] * ranges))
        assert cut.size.tolist() == [size] * ranges
        assert cut.whole.tolist() == [ranges * times >= fewest] * ranges
        assert cut.parts.tolist() == [1 if ranges * times >= fewest else pieces] * ranges
    assert 1 < fewest / times < warps - 1, "the case is between the two"


@pytest.mark.parametrize("longest", [WHOLE_CHUNKS, DEEP_CHUNKS])
def test_no_range_beyond_the_longest_is_whole(longest: int) -> None:
    cuts = cutter(longest=longest)
    assert cuts.cut_own(own_ranges([16 * longest] * 1056)).whole.all()
    assert not cuts.cut_own(own_ranges([16 * longest + 1] * 1056)).whole.any()
    assert cuts.cut_own(own_ranges([16 * longest, 16 * longest + 1] * 528)).whole.tolist() == [True, False] * 528


@pytest.mark.parametrize("limit", [n for n in WHOLE_LIMITS if n])
def test_short_ranges_are_whole_beside_a_long_one_that_is_cut(limit: int) -> None:
    """200 ranges keep 528 warps busy enough, while one of twice the length would keep its warp busy for too long."""
    cut = cutter(longest=DEEP_CHUNKS).cut_own(own_ranges([16 * limit] * 200 + [32 * limit]))
    assert cut.whole.tolist() == [True] * 200 + [False]


def test_a_range_of_one_piece_is_whole_and_what_was_asked_for_counts() -> None:
    one = own_ranges([256])
    assert cutter().cut_own(one).whole.tolist() == [True]
    assert cutter(whole=False).cut_own(one).whole.tolist() == [False]
    assert cutter(whole=True).cut_own(own_ranges([10**5])).whole.tolist() == [True]


# ---- nodes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tiles", "rows_each", "heads", "size"),
    [
        (True, 8, 8, 1024),  # 16384 · 8 heads / 132 blocks = 993 tokens per block: 16 pieces
        (True, 8, 16, 2048),  # twice the heads: 8 pieces
        (True, 9, 8, 2048),  # 144 rows are two passes
        (True, 8, 1, 512),  # no piece is smaller than 512
        (False, 8, 8, 16384),  # 16 passes of eight rows: 15888 tokens per block
        (False, 4, 8, 8192),
    ],
)
def test_nodes_are_cut_into_an_even_share_per_block(tiles: bool, rows_each: int, heads: int, size: int) -> None:
    cuts = cutter(tiles=tiles, rows_each=rows_each, heads=heads)
    assert cuts.node_sizes(nodes_of((0, 16, 0, 16384))).tolist() == [size]


def test_pieces_of_a_node_are_equal_and_multiples_of_64() -> None:
    cuts = cutter(tiles=True, blocks=1000)
    # 1500 tokens: two pieces of 750, rounded up; 1023: one piece; 1024: two.
    assert [cuts.node_sizes(nodes_of((0, 32, 0, n))).tolist() for n in (1500, 1023, 1024)] == [[768], [1024], [512]]


def test_streamed_and_tiled_nodes_have_shares_of_their_own() -> None:
    cuts = cutter(tiles=True, heads=8, blocks=132)
    wide, narrow = (0, 32, 0, 16384), (0, 2, 16384, 16384 + 4096)
    alone = [cuts.node_sizes(nodes_of(node)).item() for node in (wide, narrow)]
    assert cuts.node_sizes(nodes_of(wide, narrow)).tolist() == alone
    assert cuts.node_sizes(nodes_of(wide, wide)).tolist() == [2048, 2048]


@pytest.mark.parametrize(
    ("rows_each", "sequences", "tiled"), [(4, 8, True), (4, 7, False), (1, 31, False), (1, 32, True)]
)
def test_a_node_goes_through_tiles_from_32_rows_on(rows_each: int, sequences: int, tiled: bool) -> None:
    node = nodes_of((0, sequences, 0, 64))
    assert cutter(tiles=True, rows_each=rows_each).by_tiles(node).tolist() == [tiled]
    assert cutter(tiles=False, rows_each=rows_each).by_tiles(node).tolist() == [False]


# ---- chains ----------------------------------------------------------------------------------------------------------
SHARE = 512  # tokens: with a block per pass, an even share is what a piece has at least


def cut(*nodes: tuple[int, int, int, int], chaining: bool = True) -> tuple[np.ndarray, NodeCut]:
    """Four rows per sequence, and more blocks than pieces."""
    found = nodes_of(*nodes)
    return found, cut_nodes(found, cutter(tiles=True, blocks=10_000, shared=SHARE), chaining)


def chains_of(*nodes: tuple[int, int, int, int]) -> list[list[int]]:
    """The pieces of each chain."""
    found, how = cut(*nodes)
    _, chains = node_pieces(found, how, 4, TILE_ROWS, by_tiles=True)
    return [np.flatnonzero(chains == first).tolist() for first in np.unique(chains)]


def test_a_child_with_the_rows_of_its_parent_continues_it() -> None:
    tree = (0, 64, 0, 256), (0, 32, 256, 320), (32, 32, 256, 384)  # 256 rows: two passes
    nodes, how = cut(*tree)
    assert how.continues.tolist() == [-1, 0, 0]
    assert how.state.tolist() == [0, 0, 0]
    assert node_states(nodes, how, 65).tolist() == [1] * 64 + [0]
    assert chains_of(*tree) == [[0, 2], [1, 3]]
    pieces = Pieces(*node_pieces(nodes, how, 4, TILE_ROWS, by_tiles=True)[0])
    assert pieces.state.tolist() == [0, 0, 0, 0]
    assert pieces.rows.tolist() == [TILE_ROWS] * 4
    apart = cut(*tree, chaining=False)
    assert apart[1].state.tolist() == [0, 1, 1]
    assert node_states(*apart, 65).tolist() == [2] * 64 + [0]


@pytest.mark.parametrize(
    "child",
    [
        (0, 16, 256, 320),  # 64 rows of a pass of 128
        (16, 32, 256, 320),  # rows of two passes
        (0, 32, 320, 384),  # tokens between them that are in neither
        (64, 32, 256, 320),  # no child of the node
    ],
)
def test_a_node_that_does_not_continue_another(child: tuple[int, int, int, int]) -> None:
    assert cut((0, 64, 0, 256), child)[1].continues.tolist() == [-1, -1]
    assert all(len(chain) == 1 for chain in chains_of((0, 64, 0, 256), child))


def test_the_last_passes_of_a_node_may_have_fewer_rows() -> None:
    assert chains_of((0, 40, 0, 256), (32, 8, 256, 320)) == [[0], [1, 2]]  # 160 rows: passes of 128 and of 32


def test_a_chain_is_not_much_longer_than_an_even_share() -> None:
    most = int(CHAIN_SHARE * SHARE)

    def chained(*tokens: int) -> list[bool]:
        ends = np.cumsum((0, *tokens)).tolist()
        how = cut(*((0, 32, a, b) for a, b in pairwise(ends)))[1]
        return (how.continues >= 0).tolist()

    assert chained(512, most - 512) == [False, True]
    assert chained(512, most - 512 + 64) == [False, False]
    assert chained(256, 256, most - 512) == [False, True, True]
    assert chained(256, 256, most - 512 + 64) == [False, True, False], "all tokens of the chain count"
    assert chained(1024, most - 512) == [False, True], "of a parent in two pieces only the last one counts"
    assert chained(1024, most - 512 + 64) == [False, False]
    # A child in several pieces continues its parent with the first; its last piece is where the next chain begins.
    assert chained(128, 1024, most - 512) == [False, True, True]
    assert chains_of((0, 32, 0, 128), (0, 32, 128, 1152), (0, 32, 1152, 1152 + most - 512)) == [[0, 1], [2, 3]]


def test_there_are_no_chains_with_a_window() -> None:
    lists = tree_lists([1, 1, 2, 32], [8, 4, 4, 1])
    lengths = [len(x) * 16 for x in lists]
    for window, chained in ((None, True), ((10_000, 0), False)):
        plan = make_plan(lists, lengths, window=window)
        listed = work_list(plan, lists, lengths, 16, Shape(8, 4, 8, True))
        assert bool((listed.tile_items[..., Word.KIND] & 4).any()) == chained
        assert listed.total_states == len(lists) * (2 if chained else 3)
