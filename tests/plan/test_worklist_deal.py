"""Dealing items out to blocks and warps: the longest first, to whoever is done first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tree_cases import make_plan, tree_lists

from tilewise.plan.cost import ITEM_CHUNKS, MMA_STEP_CHUNKS, Weights
from tilewise.plan.deal import deal_beside_tiles, deal_chains, deal_streams, stream_chunks
from tilewise.plan.items import ALL_SEE, GOES_ON, ITEM_WORDS, Word
from tilewise.plan.tiles import Ints
from tilewise.plan.worklist import Shape, Splitting, WorkList, work_list


def items_of(tokens: list[int]) -> np.ndarray:
    """(n, 16): items over so many tokens; the sequence's number tells which item it is."""
    items = np.zeros((len(tokens), ITEM_WORDS), np.int32)
    items[:, Word.SEQUENCE] = np.arange(len(tokens))
    items[:, Word.ROWS] = 1
    items[:, Word.STOP] = tokens
    return items


def numbers(slots: Ints) -> list[int]:
    """Which items stand in these slots, the empty ones left out."""
    return [int(item[Word.SEQUENCE]) for item in slots.reshape(-1, ITEM_WORDS) if item[Word.ROWS]]


def by_warp(dealt: Ints, warps: int) -> list[list[int]]:
    return [numbers(block[warp::warps]) for block in dealt for warp in range(warps)]


def listed_of(lengths: list[int], *, heads: int = 1, warps: int = 4, blocks: int = 1, room: int = 0) -> WorkList:
    """Sequences without a common page, each of which one warp takes whole, in the caller's order."""
    lists = [np.arange(1000 * n, 1000 * n + -(-tokens // 16), dtype=np.int32) for n, tokens in enumerate(lengths)]
    plan = make_plan(lists, lengths, heads=(4 * heads, heads))
    shape = Shape(8, warps, blocks, False)
    return work_list(plan, lists, lengths, 16, shape, splitting=Splitting(whole=True), room=room)


# ---- streams ---------------------------------------------------------------------------------------------------------
def test_the_warp_of_a_long_item_gets_nothing_else() -> None:
    listed = listed_of([640] + [16] * 40)
    tokens = (listed.items[..., Word.STOP] - listed.items[..., Word.START]).reshape(-1, 4)  # rounds, warps
    (warp,) = np.flatnonzero(tokens.max(0) == 640)
    assert tokens[:, warp].tolist() == [640] + [0] * (len(tokens) - 1)
    assert sorted(tokens.sum(0).tolist()) == [13 * 16, 13 * 16, 14 * 16, 640]


def test_an_item_costs_more_than_its_chunks() -> None:
    """Three chunks in one item against one each in three: the second warp has as much to do after two of them."""
    assert ITEM_CHUNKS == 1.0
    dealt = deal_streams(items_of([48, 16, 16, 16]), np.array([3, 1, 1, 1]), 1, 1, 2)
    assert by_warp(dealt, 2) == [[0, 3], [1, 2]]


def test_the_longest_item_comes_first_and_each_goes_to_who_is_done_first() -> None:
    chunks = [1, 9, 2, 7, 5, 3]
    dealt = deal_streams(items_of([16 * n for n in chunks]), np.array(chunks), 3, 2, 1)
    # With ITEM_CHUNKS: 10 | 8, then 8 + 6 and 10 + 4; both are done at 14, the lower number takes the next.
    assert by_warp(dealt, 1) == [[1, 5, 2], [3, 4, 0]]


def test_equal_items_go_to_different_blocks_first() -> None:
    dealt = deal_streams(items_of([16] * 5), np.ones(5, np.int64), 1, 4, 2)
    assert by_warp(dealt, 2) == [[0], [4], [1], [], [2], [], [3], []]


def test_the_room_to_grow_is_no_work_yet() -> None:
    items = items_of([100, 40])
    items[:, Word.TABLE] = [0, 1]
    items[:, Word.START] = [17, 0]
    assert stream_chunks(items, np.array([49, 30])).tolist() == [3, 2]
    assert stream_chunks(items, np.array([17, 0])).tolist() == [1, 0]
    assert stream_chunks(items, np.array([0, 0])).tolist() == [0, 0]
    tight, roomy = (listed_of([640, 16, 16, 30, 200, 100], room=room) for room in (0, 500))
    assert (tight.items[..., Word.SEQUENCE] == roomy.items[..., Word.SEQUENCE]).all()


@pytest.mark.parametrize(("sequences", "heads", "blocks", "in_step"), [
    (3, 4, 11, True), (3, 4, 12, False), (3, 8, 5, True), (6, 2, 5, False), (6, 6, 5, False),
])  # fmt: skip
def test_neighbouring_heads_of_many_items_go_to_one_block(
    sequences: int, heads: int, blocks: int, in_step: bool
) -> None:
    listed = listed_of([64, 80, 16, 40, 33, 7][:sequences], heads=heads, blocks=blocks)
    assert listed.in_step == in_step
    assert listed.blocks == blocks
    if in_step:
        for four in listed.items.reshape(-1, 4, ITEM_WORDS):
            if four[0, Word.ROWS]:
                assert len({(int(x[Word.SEQUENCE]), int(x[Word.START])) for x in four}) == 1
                head = four[:, Word.CALLER_HEAD] & 0xFFF
                assert (np.diff(head) == 1).all()
                assert head[0] % 4 == 0


def test_there_are_no_more_blocks_than_items() -> None:
    assert listed_of([64, 80], heads=3, blocks=100).blocks == 6
    assert listed_of([], blocks=100).blocks == 1


def one_by_one(costs: list[float], after: list[float], done: Callable[[float, float], float]) -> list[int]:
    """Who takes each unit: the one that is done first, of equals the one whose tiles end first, then the one with less
    to do, then the first. after: when the tiles of each taker end."""
    work, ends, found = [0.0] * len(after), [0.0] * len(after), []
    for cost in costs:
        t = min(range(len(after)), key=lambda t: (ends[t], after[t], work[t], t))
        work[t] += cost
        ends[t] = done(work[t], after[t])
        found.append(t)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_dealing_many_at_a_time_is_dealing_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks, warps, joiners, count = (int(rng.integers(*span)) for span in ((1, 9), (2, 4), (0, 4), (1, 150)))
    chunks = rng.integers(0, int(rng.choice([2, 12, 400])), count)
    weights = Weights(item_chunks=float(rng.choice([1.0, 1.37])), step_chunks=0.75)
    by_length = sorted(range(count), key=lambda n: -chunks[n])
    costs = [chunks[n] + weights.item_chunks for n in by_length]
    items = items_of([16 * n for n in chunks.tolist()])

    def lists(takers: list[int], number: int) -> list[list[int]]:
        return [[n for n, t in zip(by_length, takers, strict=True) if t == taker] for taker in range(number)]

    dealt = deal_streams(items, chunks, 7, blocks, warps, weights.item_chunks)
    found = lists(one_by_one(costs, [0.0] * (blocks * warps), lambda work, _: work), blocks * warps)
    assert by_warp(dealt, warps) == [found[w * blocks + b] for b in range(blocks) for w in range(warps)]
    for in_turn in (False, True):
        tiles = tiles_of(*rng.integers(0, 900, (blocks, 2)).tolist())
        shape = Shape(8, warps, blocks, True, joiners=joiners, weights=weights, in_turn=in_turn)
        step = MMA_STEP_CHUNKS if in_turn else weights.step_chunks
        after = [sum(-(-int(x) // 64) * step for x in tiles[:, b, Word.STOP]) for b in range(blocks)]

        def done(work: float, after: float, in_turn: bool = in_turn) -> float:
            alone = 0 if in_turn else warps * after  # chunks until the joiners start
            helped = after + (work - alone) / (warps if in_turn else warps + joiners)
            return helped if in_turn or work > alone else work / warps

        dealt = deal_beside_tiles(items, chunks, 7, shape, tiles)
        assert [numbers(block) for block in dealt] == lists(one_by_one(costs, after, done), blocks)


# ---- beside tiles ----------------------------------------------------------------------------------------------------
def tiles_of(*tokens: list[int]) -> Ints:
    """(rounds, blocks, 16): tile items of so many tokens, one list per block."""
    rounds = max(map(len, tokens))
    tiles = np.zeros((rounds, len(tokens), ITEM_WORDS), np.int32)
    for block, each in enumerate(tokens):
        tiles[: len(each), block, Word.STOP] = each
    return tiles


def counts(dealt: Ints) -> list[int]:
    return [len(numbers(block)) for block in dealt]


def test_a_block_without_tiles_has_more_warps_for_its_items() -> None:
    """One warp per block, and three joiners: the second block streams with four warps at once, the first with one until
    its ten steps of tiles are done."""
    items, chunks = items_of([16] * 20), np.ones(20, np.int64)  # two chunks each, with ITEM_CHUNKS
    shape = Shape(8, 1, 2, True, joiners=3)
    busy = tiles_of([640], [])
    assert counts(deal_beside_tiles(items, chunks, 3, shape, busy)) == [4, 16]  # both are done after 8 chunks
    assert counts(deal_beside_tiles(items, chunks, 3, shape, tiles_of([640], [640]))) == [10, 10]
    assert counts(deal_beside_tiles(items, chunks, 3, shape._replace(joiners=0), busy)) == [10, 10]
    # After two steps of tiles the joiners help the first block too: 8.5 against 11.5 items would be even.
    assert counts(deal_beside_tiles(items, chunks, 3, shape, tiles_of([128], []))) == [8, 12]
    assert counts(deal_beside_tiles(items, chunks, 3, shape, tiles_of([64, 1], []))) == [8, 12]


def test_of_idle_blocks_the_one_whose_tiles_are_done_first_gets_the_first_item() -> None:
    shape = Shape(8, 4, 3, True, joiners=2)
    dealt = deal_beside_tiles(items_of([64, 160]), np.array([4, 10]), 3, shape, tiles_of([640], [128], [64]))
    assert [numbers(block) for block in dealt] == [[], [0], [1]]


def test_beside_tiles_neighbouring_heads_go_to_one_block_too() -> None:
    shape = Shape(8, 2, 2, True, joiners=2)
    dealt = deal_beside_tiles(items_of([16] * 8), np.ones(8, np.int64), 2, shape, tiles_of([], []))
    assert [numbers(block) for block in dealt] == [[0, 1, 4, 5], [2, 3, 6, 7]]


# ---- tiles -----------------------------------------------------------------------------------------------------------
def test_chains_stay_together_and_the_longest_comes_first() -> None:
    items = items_of([64, 65, 320, 64, 128])
    items[:, Word.KIND] = ALL_SEE
    dealt = deal_chains(items, np.array([0, 1, 2, 1, 4]), 2)
    # In steps: 1, 2 + 1, 5, 2. Five to the first block; three, two and one to the second.
    assert [numbers(block) for block in np.swapaxes(dealt, 0, 1)] == [[2, 0], [1, 3, 4]]
    kinds = {int(x[Word.SEQUENCE]): int(x[Word.KIND]) for x in dealt.reshape(-1, ITEM_WORDS) if x[Word.ROWS]}
    assert kinds == {0: ALL_SEE, 1: ALL_SEE | GOES_ON, 2: ALL_SEE, 3: ALL_SEE, 4: ALL_SEE}


def test_a_chain_of_each_head_goes_to_a_block_of_its_own() -> None:
    """Three pieces in two heads; the second piece continues the first."""
    items = items_of([64, 64, 128, 128, 64, 64])
    dealt = deal_chains(items, np.array([0, 0, 2]), 2)
    assert [numbers(block) for block in np.swapaxes(dealt, 0, 1)] == [[0, 2, 4], [1, 3, 5]]
    assert (items[:, Word.KIND] == [GOES_ON, GOES_ON, 0, 0, 0, 0]).all()


def test_a_list_without_tiles_has_no_rounds() -> None:
    assert deal_chains(items_of([]), np.zeros(0, np.int64), 7).shape == (0, 7, ITEM_WORDS)


def test_a_list_deals_its_streams_beside_its_tiles() -> None:
    """One node in one block, and a short range per sequence: the other blocks get more of them."""
    lists = tree_lists([1, 24], [64, 1])
    lengths = [len(x) * 16 for x in lists]
    plan = make_plan(lists, lengths, heads=(4, 1))
    listed = work_list(plan, lists, lengths, 16, Shape(8, 4, 8, True, joiners=2), splitting=Splitting(shared=4096))
    (block,) = np.flatnonzero(listed.tile_items[0, :, Word.ROWS])
    found = counts(listed.items)
    assert found.pop(block) == 2
    assert sorted(found) == [3] * 6 + [4]
