"""Batches for the planner, and the list that it should make of one, item by item: what plan/ranges.py and plan/items.py
say, dealt by a heap."""

from __future__ import annotations

import heapq
import random
from fractions import Fraction
from itertools import count as count_from
from typing import NamedTuple

import numpy as np
import torch

from tilewise.gpu.plan_step import Batch
from tilewise.gpu.planner import PlannedList
from tilewise.plan.cost import CPU_COST, MMA_STEP_CHUNKS
from tilewise.plan.flat import Judge, choose_nodes, tree_order
from tilewise.plan.items import GOES_ON, STATE_WORDS, Sequences, Word, cut_plan, items_of_heads
from tilewise.plan.ranges import CHUNK, TILE_TOKENS, Cutter, Own, Shape, Splitting
from tilewise.plan.standing import StandingPlan

FAR = 1 << 30
STAMPS = count_from(1)
USUAL = Splitting()


def standing_plan(rows: int, max_length: int, heads: int, group: int, page_size: int, **options) -> StandingPlan:
    given = {"tokens_per_seq": 1, "window": None, "chunk": 0, "share": True, **options}
    judge = Judge(CPU_COST, 1, heads, 64, 256.0)
    return StandingPlan(
        rows=rows, max_length=max_length, heads_q=heads * group, heads_kv=heads, head_dim=64, page_size=page_size,
        judge=judge, cache_serial=0, plan_once=lambda seqs: None, tree=None, **given,
    )  # fmt: skip


def random_batch(r: random.Random, plan: StandingPlan, count: int, *, tree: bool, longest: int | None = None) -> Batch:
    """Sequences in rows of a table of their own, below a random tree of a few levels if asked for."""
    size, most = plan.page_size, longest or plan.max_length
    used = 0

    def pages(n: int) -> list[int]:
        nonlocal used
        used += n
        return list(range(used - n, used))

    lists: list[list[int]] = []
    lengths = []
    stems: list[list[int]] = [[]]
    if tree:
        stems = [pages(r.randrange(1, max(2, most // size // 2)))]
        for _ in range(r.randrange(0, 4)):
            stem = r.choice(stems)
            stems.append(stem + pages(r.randrange(1, max(2, most // size // 4))))
    for _ in range(count):
        stem = r.choice(stems)
        length = r.choice([r.randrange(0, most + 1), r.randrange(0, 40), len(stem) * size])
        length = min(most, max(length, len(stem) * size if r.random() < 0.9 else 0))
        have = -(-length // size)
        lists.append((stem + pages(max(0, have - len(stem))))[:have])
        lengths.append(length)
    table = np.zeros((count + 3, max(1, max(map(len, lists), default=1))), np.int32)
    rows = np.array(r.sample(range(count + 3), count), np.int64)
    counts = np.zeros(len(table), np.int64)
    for row, of in zip(rows.tolist(), lists, strict=True):
        table[row, : len(of)], counts[row] = of, len(of)
    length = np.array(lengths, np.int64)
    order, nodes = np.arange(count, dtype=np.int32), np.zeros((0, 5), np.int64)
    if plan.share is not False:
        order, common = tree_order(table[rows], counts[rows])
        nodes = choose_nodes(common, length[order], size, plan.tokens_per_seq, plan.reach, None)
    stamps = np.array([next(STAMPS) for _ in table], np.int64)
    return Batch(rows, length, order, nodes, table, counts, stamps, int(stamps[-1]))


class Expected(NamedTuple):
    bins: list[list[np.ndarray]]  # items of each bin in their order, (together, 16) each
    rounds: list[list[np.ndarray]]  # tile items of each block
    order: np.ndarray
    lengths: np.ndarray
    states: np.ndarray
    total_states: int


def expected(
    plan: StandingPlan, batch: Batch, listed: PlannedList, nodes: np.ndarray, splitting: Splitting = USUAL
) -> Expected:
    shape, together, rows = listed.shape, listed.room.together, plan.rows
    heads, count = plan.heads_kv, len(batch.rows)
    rows_each = plan.tokens_per_seq * (plan.heads_q // heads)
    order = np.concatenate([batch.order, np.arange(count, rows)]).astype(np.int32)
    length = np.concatenate([batch.lengths[batch.order], np.zeros(rows - count, np.int64)])
    cutter = Cutter(rows_each, heads, shape, splitting)
    cut = cut_plan(nodes, own_ranges(plan, length, nodes), cutter, length, chaining=plan.reach.whole)
    states = cut.states.table()
    zeros = np.zeros(rows, np.int32)
    of = Sequences(order, states, np.zeros((rows, 1), np.int32), zeros, plan.page_size, shape.chunk)
    lists = [batch.table[row, : batch.counts[row]] for row in batch.rows[batch.order].tolist()]
    lists += [np.zeros(0, np.int32)] * (rows - count)
    places = listed.stage.mirror._place[batch.rows[batch.order]].tolist() + [0] * (rows - count)

    def finished(items: np.ndarray) -> np.ndarray:
        for item in items:
            mine, begin = lists[item[Word.TABLE]], item[Word.START] // shape.chunk * shape.chunk
            item[Word.TAIL_FROM] = FAR
            if item[Word.STOP] > item[Word.START]:
                second = min(begin + shape.chunk - CHUNK, item[Word.STOP] - 1)
                second = second if second >= begin + CHUNK else begin
                item[Word.PAGE], item[Word.SECOND_PAGE] = mine[begin // plan.page_size], mine[second // plan.page_size]
            item[Word.TABLE] = places[item[Word.TABLE]]
        return items

    tiles = items_of_heads(cut.tiled, heads, rows_each, of)
    box = next((n for n in (64, 32, 16) if plan.page_size % n == 0), CHUNK)
    for item in tiles:
        mine, first = lists[item[Word.TABLE]], item[Word.START] // TILE_TOKENS * TILE_TOKENS
        numbers = [(first + box * b) // plan.page_size for b in range(4)]
        item[STATE_WORDS] = [mine[n] if n < len(mine) else -1 for n in numbers]
    tiles, starts = finished(tiles), np.unique(cut.chains)
    chains = [np.flatnonzero(cut.chains == n) * heads + h for n in starts for h in range(heads)]
    for chain in chains:
        tiles[chain[:-1], Word.KIND] |= GOES_ON
    rounds = deal_tiles(tiles, chains, shape.blocks)
    items = items_of_heads(cut.streamed, heads, rows_each, of)
    stop, start = items[:, Word.STOP], items[:, Word.START]
    chunks = np.maximum(0, -(-(stop - start // CHUNK * CHUNK) // CHUNK)).reshape(-1, together)[:, 0].tolist()
    units = finished(items).reshape(-1, together, 16)
    bins = deal_streams(units, chunks, rounds, listed)
    return Expected(bins, rounds, order, length, states, cut.total_states)


def own_ranges(plan: StandingPlan, length: np.ndarray, nodes: np.ndarray) -> Own:
    """By sequence, ascending."""
    found = []
    for n, end in enumerate(length.tolist()):
        first = max(0, end - plan.tokens_per_seq)  # the position of the first row
        at = 0 if plan.window is None else max(0, first - plan.window[0])
        at = max(at, first - first % plan.chunk) if plan.chunk else at
        above = [node for node in nodes.tolist() if node[0] <= n < node[0] + node[1]]
        for _, _, start, stop, _ in above:
            if start > at:
                found.append((n, at, start))
            at = stop
        if end > at:
            found.append((n, at, end))
        elif not above:
            found.append((n, end, end))
    sequence, start, stop = np.array(found, np.int64).reshape(-1, 3).T
    return Own(sequence, start, stop, stop)


def deal_tiles(tiles: np.ndarray, chains: list[np.ndarray], blocks: int) -> list[list[np.ndarray]]:
    steps = -(-(tiles[:, Word.STOP] - tiles[:, Word.START]) // TILE_TOKENS)
    loads, rounds = [(0, b) for b in range(blocks)], [[] for _ in range(blocks)]
    for cost, chain in sorted(((int(steps[c].sum()), c) for c in chains), key=lambda pair: -pair[0]):
        load, b = loads[0]
        rounds[b] += [tiles[n] for n in chain]
        heapq.heapreplace(loads, (load + cost, b))
    return rounds


def deal_streams(units: np.ndarray, chunks: list[int], rounds: list[list[np.ndarray]], listed: PlannedList) -> list:
    shape, bins = listed.shape, [[] for _ in range(listed.room.bins)]
    step = MMA_STEP_CHUNKS if shape.in_turn else shape.weights.step_chunks
    ranked = sorted(range(len(units)), key=lambda n: -chunks[n])
    work, warps, all_warps = [Fraction(0)] * len(bins), shape.warps, shape.warps + shape.joiners
    after = [Fraction(0)] * len(bins)
    for b, of in enumerate(rounds):
        after[b] = sum((Fraction(step) * -(-int(i[Word.STOP] - i[Word.START]) // TILE_TOKENS) for i in of), Fraction(0))

    def done(b: int) -> Fraction:
        if not shape.tiles:
            return work[b]
        if shape.in_turn:
            return after[b] + work[b] / warps
        return work[b] / warps if work[b] <= warps * after[b] else after[b] + (work[b] - warps * after[b]) / all_warps

    loads = [(done(b), after[b], b) for b in range(len(bins))]
    heapq.heapify(loads)
    for n in ranked:
        b = loads[0][2]
        bins[b].append(units[n])
        work[b] += Fraction(chunks[n] + shape.weights.item_chunks) * (len(units[n]) if shape.tiles else 1)
        heapq.heapreplace(loads, (done(b), after[b], b))
    return bins


def check(listed: PlannedList, of: Expected) -> None:
    shape, room = listed.shape, listed.room
    assert np.array_equal(listed.order, of.order)
    assert np.array_equal(listed.live, of.lengths)
    assert np.array_equal(listed.states, of.states)
    assert int(listed.made[1]) == of.total_states
    got, per = listed.items.numpy(), room.together if shape.tiles else shape.warps
    got = got.reshape(shape.blocks, room.slots, per, 16)
    for b, units in enumerate(of.bins):
        of_bin = got[b % shape.blocks]
        if room.together == 1 and not shape.tiles:
            of_bin = of_bin[:, b // shape.blocks : b // shape.blocks + 1]
        for turn, unit in enumerate(units):
            assert np.array_equal(of_bin[turn], unit), (b, turn, of_bin[turn], unit)
        assert not of_bin[len(units) :].any()
    assert int(listed.made[2]) == max(map(len, of.bins))
    tiles = listed.tile_items.numpy()
    for b, items in enumerate(of.rounds if room.tile_rounds else []):
        for turn, item in enumerate(items):
            assert np.array_equal(tiles[turn, b], item), (b, turn, tiles[turn, b], item)
        assert not tiles[len(items) :, b].any()


def listed_for(plan: StandingPlan, shape: Shape, splitting: Splitting = USUAL) -> PlannedList:
    return PlannedList(plan, shape, splitting, torch.device("cpu"))
