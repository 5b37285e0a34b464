"""Deals the items of a work list out to blocks and warps, so that all of them are done at about the same time.

Each function takes items (n, 16) and returns the kernel's array, in which an item of zeros is an empty slot. The
longest item is dealt first and goes to the block or warp that has the least to do; ties go to the earlier item and to
the lower number. Many are dealt at a time: takers get one each in the order of what they have to do, up to the first of
them that has no less to do than one that was served before it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tilewise.plan.cost import ITEM_CHUNKS, MMA_STEP_CHUNKS
from tilewise.plan.items import GOES_ON, ITEM_WORDS, Ints, Word
from tilewise.plan.ranges import CHUNK, TILE_TOKENS, Longs, Shape

Floats = npt.NDArray[np.float64]


def stream_chunks(items: npt.NDArray[np.integer], length: Longs) -> Longs:
    """(n,): chunks of 16 tokens that each item has now, without the room to grow. length: (sequences,)."""
    stop = np.minimum(items[:, Word.STOP], length[items[:, Word.TABLE]])
    found: Longs = np.maximum(0, -(-(stop - items[:, Word.START] // CHUNK * CHUNK) // CHUNK))
    return found


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
    items: Ints, chunks: Longs, heads: int, blocks: int, warps: int, item_chunks: float = ITEM_CHUNKS
) -> Ints:
    """(blocks, slots, 16), for a kernel without tiles: warp w of a block takes the slots w, w + warps, …

    chunks: (n,), of each item. item_chunks: Weights.item_chunks.
    """
    in_step = are_in_step(len(items), heads, blocks, warps)
    cost = chunks[::warps] if in_step else chunks
    takers = blocks if in_step else blocks * warps
    ranked = _ranked(cost)
    numbers = np.arange(len(ranked))
    taker, turn = numbers % takers, numbers // takers
    if len(cost) > takers and cost.min() != cost.max():
        taker = _longest_first(cost[ranked], np.zeros(takers), item_chunks)
        turn = _turns(taker, takers)
    rounds = int(turn.max(initial=-1)) + 1
    dealt = np.zeros((blocks, rounds, warps, ITEM_WORDS), np.int32)
    if in_step:
        dealt[taker, turn] = items.reshape(-1, warps, ITEM_WORDS)[ranked]
    else:
        dealt[taker % blocks, turn, taker // blocks] = items[ranked]
    return dealt.reshape(blocks, -1, ITEM_WORDS)


def deal_beside_tiles(items: Ints, chunks: Longs, heads: int, shape: Shape, tile_items: Ints) -> Ints:
    """(blocks, slots, 16), for a kernel with tiles: the warps of a block take its items from a common counter.

    chunks: (n,), of each item. tile_items: (rounds, blocks, 16), already dealt. A block's joiners stream only after its
    tile items are done; of a shape whose warps do both in turn, none streams meanwhile.
    """
    step_chunks = MMA_STEP_CHUNKS if shape.in_turn else shape.weights.step_chunks
    after: Floats = (tile_steps(tile_items) * step_chunks).sum(0)
    blocks, warps, joiners = len(after), shape.warps, shape.joiners
    alone = warps * after  # what its streaming warps do before its joiners start
    together = warps if are_in_step(len(items), heads, blocks, warps) else 1
    units = chunks.reshape(-1, together)
    cost = (units + shape.weights.item_chunks).sum(1)

    def done(work: Floats, block: Longs) -> Floats:
        """When blocks are done with `work` chunks of streaming each, if their joiners start when their tiles end."""
        free = after[block]
        if shape.in_turn:
            return free + work / warps
        until = alone[block]
        return np.where(work <= until, work / warps, free + (work - until) / (warps + joiners))

    ranked = _ranked(units.sum(1))
    block = _longest_first(cost[ranked], after, 0.0, done)
    turn = _turns(block, blocks)
    dealt = np.zeros((blocks, int(turn.max(initial=-1)) + 1, together, ITEM_WORDS), np.int32)
    dealt[block, turn] = items.reshape(-1, together, ITEM_WORDS)[ranked]
    return dealt.reshape(blocks, -1, ITEM_WORDS)


def deal_chains(items: Ints, chains: Longs, blocks: int) -> Ints:
    """(rounds, blocks, 16): tile items (n · heads, 16) of n pieces, heads side by side. chains: (n,), of each piece the
    first one of its chain. The items of a chain and head go to one block, in consecutive rounds; all but the last of
    them get GOES_ON, also in `items`."""
    if not len(items):
        return np.zeros((0, blocks, ITEM_WORDS), np.int32)
    heads, numbers = len(items) // len(chains), np.arange(len(chains))
    steps = tile_steps(items[::heads]).astype(np.int64)
    roots = chains == numbers
    if np.count_nonzero(roots) == len(chains):  # none goes on: the longest first are the items as they are dealt
        cost = steps.repeat(heads)  # of each item
        by = _ranked(cost)
        block = _longest_first(cost[by], np.zeros(blocks), 0.0)
    else:
        (firsts,) = roots.nonzero()
        of = firsts.searchsorted(chains)
        goes_on, last = np.ones(len(chains), np.bool_), np.empty(len(firsts), np.int64)
        last[of] = numbers
        goes_on[last] = False
        items.reshape(-1, heads, ITEM_WORDS)[goes_on, :, Word.KIND] |= GOES_ON
        cost = np.bincount(of, steps).astype(np.int64).repeat(heads)  # of each chain and head
        ranked = _ranked(cost)
        place, block = np.empty_like(ranked), np.empty_like(ranked)
        place[ranked], block[ranked] = np.arange(len(ranked)), _longest_first(cost[ranked], np.zeros(blocks), 0.0)
        unit = (of[:, None] * heads + np.arange(heads)).ravel()  # the chain and head of each item
        by = place[unit].argsort(kind="stable")
        block = block[unit[by]]
    turn = _turns(block, blocks)
    dealt = np.zeros((int(turn.max()) + 1, blocks, ITEM_WORDS), np.int32)
    dealt[turn, block] = items[by]
    return dealt


def _ranked(cost: Longs) -> Longs:
    """(n,): the numbers of the largest first, of equal ones the first."""
    down = cost.max(initial=0) - cost
    few = down.max(initial=0) < 1 << 16  # then they are sorted in linear time
    ranked: Longs = (down.astype(np.uint16) if few else down).argsort(kind="stable")
    return ranked


def _turns(taker: Longs, takers: int) -> Longs:
    """(n,): how many went to the same taker before."""
    small = taker.astype(np.uint16) if takers <= 1 << 16 else taker  # these are sorted in linear time
    by, counts = small.argsort(kind="stable"), np.bincount(taker, minlength=takers)
    turn = np.empty_like(taker)
    turn[by] = np.arange(len(taker)) - (counts.cumsum() - counts).repeat(counts)
    return turn


def _longest_first(
    cost: npt.NDArray[np.number],
    after: Floats,
    extra: float,
    done: Callable[[Floats, Longs], Floats] | None = None,
) -> Longs:
    """(n,): who takes each of n units that cost so much, and `extra` besides, dealt in their order.

    A taker that has `work` to do is done at `done(work, taker)`, or at `work`. The one that is done first gets the next
    unit; of equals the one whose `after` is smaller, then the one that has less to do, then the lower number.
    """
    takers, count = len(after), len(cost)
    work, ends = np.zeros(takers), np.zeros(takers)
    found = np.empty(count, np.int64)
    costs = cost.astype(np.float64)
    even = not np.count_nonzero(after != after[0])
    at = 0
    while at < count:
        if not even:
            by = np.lexsort((work, after, ends))
        elif done is None:
            by = work.argsort(kind="stable")
        else:
            by = np.lexsort((work, ends))
        by = by[: count - at]
        more = work[by] + costs[at : at + len(by)]
        if extra:
            more += extra
        new = more if done is None else done(more, by)
        # Whoever would not be served before somebody who has been served already has to wait for the next round.
        late = np.minimum.accumulate(new[:-1]) <= ends[by[1:]]
        first = int(late.argmax()) if len(late) else 0
        served = first + 1 if len(late) and late[first] else len(by)
        by = by[:served]
        found[at : at + served] = by
        work[by] = more[:served]
        ends[by] = new[:served]
        at += served
    return found
