"""Deals the items of a work list out to blocks and warps, so that all of them are done at about the same time.

Each function takes items (n, 16) of int64 and returns the kernel's int32 array, in which an item of zeros is an empty
slot. The longest item is dealt first and goes to the block or warp that has the least to do; ties go to the earlier
item and to the lower number.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from tilewise.plan.cost import ITEM_CHUNKS, MMA_STEP_CHUNKS
from tilewise.plan.items import GOES_ON, ITEM_WORDS, Ints, Word
from tilewise.plan.ranges import CHUNK, TILE_TOKENS, Longs, Shape

Floats = npt.NDArray[np.float64]


def stream_chunks(items: Longs, length: Longs) -> Longs:
    """(n,): chunks of 16 tokens that each item has now, without the room to grow. length: (sequences,)."""
    stop = np.minimum(items[:, Word.STOP], length[items[:, Word.TABLE]])
    return np.maximum(0, -(-(stop - items[:, Word.START] // CHUNK * CHUNK) // CHUNK))


def tile_steps(items: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """(…, 16) → (…): steps of 64 tokens that each tile item takes."""
    return -(-(items[..., Word.STOP] - items[..., Word.START]) // TILE_TOKENS)


def are_in_step(items: int, heads: int, blocks: int, warps: int) -> bool:
    """Do the warps of a block get neighbouring heads of the same tokens?

    Such warps load neighbouring bytes at about the same time, which is worth 2 to 3% of the bandwidth. It needs heads
    that fill whole blocks, and more items than blocks: few items go to different blocks instead.
    """
    return heads % warps == 0 and items > blocks


def deal_streams(
    items: Longs, chunks: Longs, heads: int, blocks: int, warps: int, item_chunks: float = ITEM_CHUNKS
) -> Ints:
    """(blocks, slots, 16), for a kernel without tiles: warp w of a block takes the slots w, w + warps, …

    item_chunks: Weights.item_chunks.
    """
    if not are_in_step(len(items), heads, blocks, warps):
        dealt = _deal(items, chunks, blocks * warps, item_chunks)
        dealt = dealt.reshape(-1, warps, blocks, ITEM_WORDS).transpose(2, 0, 1, 3)
    else:
        together = _deal(items.reshape(-1, warps * ITEM_WORDS), chunks[::warps], blocks, item_chunks)
        dealt = together.reshape(-1, blocks, warps, ITEM_WORDS).transpose(1, 0, 2, 3)
    return np.ascontiguousarray(dealt).reshape(blocks, -1, ITEM_WORDS)


def deal_beside_tiles(items: Longs, chunks: Longs, heads: int, shape: Shape, tile_items: Ints) -> Ints:
    """(blocks, slots, 16), for a kernel with tiles: the warps of a block take its items from a common counter.

    tile_items: (rounds, blocks, 16), already dealt. A block's joiners stream only after its tile items are done; of a
    shape whose warps do both in turn, none streams meanwhile.
    """
    step_chunks = MMA_STEP_CHUNKS if shape.in_turn else shape.weights.step_chunks
    busy: Floats = (tile_steps(tile_items) * step_chunks).sum(0)
    blocks, warps, joiners = len(busy), shape.warps, shape.joiners
    together = warps if are_in_step(len(items), heads, blocks, warps) else 1
    cost = (chunks + shape.weights.item_chunks).reshape(-1, together).sum(1)

    def done(work: float, after: float) -> float:
        """When a block is done with `work` chunks of streaming, if its joiners start at time `after`."""
        if shape.in_turn:
            return after + work / warps
        return work / warps if work <= warps * after else after + (work - warps * after) / (warps + joiners)

    lists: list[list[int]] = [[] for _ in range(blocks)]
    # For each block: when it is done with the items it has, when its tiles are done, its chunks of streaming, its
    # number. Among blocks that are done at the same time, the one whose tiles are done first gets the next item.
    loads = [(0.0, after, 0.0, b) for b, after in enumerate(busy.tolist())]
    heapq.heapify(loads)
    for n in np.argsort(-cost, kind="stable").tolist():
        _, after, work, b = loads[0]
        lists[b] += range(n * together, (n + 1) * together)
        work += float(cost[n])
        heapq.heapreplace(loads, (done(work, after), after, work, b))
    dealt = np.zeros((blocks, max(map(len, lists)), ITEM_WORDS), np.int32)
    for b, own in enumerate(lists):
        dealt[b, : len(own)] = items[own]
    return dealt


def deal_chains(items: Longs, chains: list[list[int]], blocks: int) -> Ints:
    """(rounds, blocks, 16): tile items. The items of a chain go to one block, in consecutive rounds; all but the last
    of them get GOES_ON, also in `items`."""
    steps = tile_steps(items)
    cost = [int(steps[chain].sum()) for chain in chains]
    loads = [(0, b) for b in range(blocks)]
    lists: list[list[int]] = [[] for _ in range(blocks)]
    for n in sorted(range(len(chains)), key=lambda n: -cost[n]):
        load, b = loads[0]
        lists[b] += chains[n]
        items[chains[n][:-1], Word.KIND] |= GOES_ON
        heapq.heapreplace(loads, (load + cost[n], b))
    dealt = np.zeros((max(map(len, lists)), blocks, ITEM_WORDS), np.int32)
    for b, own in enumerate(lists):
        dealt[: len(own), b] = items[own]
    return dealt


def _deal(units: Longs, cost: Longs, takers: int, item_chunks: float) -> Ints:
    """(rounds, takers, words): units (n, words) that cost so many chunks each, and `item_chunks` besides, dealt to
    blocks or warps. A taker's empty slots come after its units."""
    ranked = np.argsort(-cost, kind="stable")
    taker, turn = np.arange(len(units)) % takers, np.arange(len(units)) // takers
    if len(units) and cost.min() != cost.max():
        loads, counts = [(0, t) for t in range(takers)], [0] * takers
        for n, c in enumerate(cost[ranked].tolist()):
            load, t = loads[0]
            taker[n], turn[n] = t, counts[t]
            counts[t] += 1
            heapq.heapreplace(loads, (load + c + item_chunks, t))
    dealt = np.zeros((int(turn.max(initial=-1)) + 1, takers, *units.shape[1:]), np.int32)
    dealt[turn, taker] = units[ranked]
    return dealt
