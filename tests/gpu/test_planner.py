"""The planner's kernel in the emulator: the list of a step, item by item."""

from __future__ import annotations

import random

import numpy as np
import pytest
from planner_cases import FAR, check, expected, listed_for, random_batch, standing_plan

from tilewise.gpu import mla_kernels
from tilewise.gpu.mla_kernels import KEYS, LONGEST, WEIGHTS
from tilewise.gpu.plan_step import Batch
from tilewise.plan.items import GOES_ON, Word
from tilewise.plan.ranges import Shape

PLAIN, QUANTISED, WIDE = Shape(8, 4, 3, False), Shape(16, 8, 2, False, chunk=32), Shape(16, 4, 3, False)
TILES, MMA = Shape(8, 4, 5, True, joiners=8), Shape(8, 2, 4, True, tile_rows=64, in_turn=True)


@pytest.mark.parametrize(
    ("shape", "heads", "group", "page_size", "options"),
    [
        (PLAIN, 4, 2, 16, {"share": False}),
        (PLAIN._replace(blocks=300), 3, 2, 16, {"share": False, "rows": 600}),  # more bins than threads
        (QUANTISED, 8, 2, 32, {"tokens_per_seq": 5}),
        (WIDE, 2, 4, 24, {"window": (100, 0), "share": False}),
        (PLAIN, 2, 4, 8, {"window": (200, 0)}),
        (TILES, 4, 4, 16, {}),
        (TILES, 4, 4, 16, {"rows": 300}),
        (TILES, 1, 8, 64, {"window": (150, 0), "tokens_per_seq": 2}),
        (MMA, 2, 4, 16, {}),
        (WIDE, 2, 4, 24, {"chunk": 64, "share": False, "tokens_per_seq": 3}),
        (PLAIN, 2, 4, 8, {"chunk": 17}),
        (TILES, 4, 4, 16, {"chunk": 200}),
        (TILES, 1, 8, 64, {"chunk": 128, "window": (150, 0), "tokens_per_seq": 2}),
        (TILES, 1, 8, 16, {"chunk": 1}),
    ],
)
def test_list_is_the_one_that_python_makes(shape, heads, group, page_size, options):
    """By as many threads as the rows ask for."""
    options = dict(options)
    r = random.Random(heads)
    plan = standing_plan(options.pop("rows", 20), 600, heads, group, page_size, **options)
    listed = listed_for(plan, shape)
    for count in (20, 0, 13):
        batch = random_batch(r, plan, count, tree=options.get("share", True))
        listed.renew(batch)
        listed.make()
        check(listed, expected(plan, batch, listed, batch.nodes))


@pytest.mark.parametrize(("rows", "splitting"), [(16, mla_kernels.NARROW), (64, mla_kernels.WIDE)])
def test_groups_of_pieces_are_those_that_python_makes(rows, splitting):
    """For latent rows: pieces, groups of four, whole ranges, and ranges of too many pieces for groups."""
    shape, found = Shape(rows, 1, 7, False, longest=LONGEST, chunk=KEYS, weights=WEIGHTS[rows]), set()
    plan = standing_plan(20, 300_000, 1, rows, 64)
    listed = listed_for(plan, shape, splitting)
    r = random.Random(rows)
    sizes = [(20, 3000, False), (7, 9000, False), (13, 20_000, True), (2, 300_000, False), (0, 1, False)]
    batches = [random_batch(r, plan, count, tree=tree, longest=longest) for count, longest, tree in sizes]
    made = [tree_of([], lengths, page_size=64) for lengths in ([4096] * 3, [270_000, *[32_768] * 6])]
    for listed, batch in [*((listed, b) for b in batches), *((listed_for(plan, shape, splitting), b) for b in made)]:
        listed.renew(batch)
        listed.make()
        wanted = expected(plan, batch, listed, batch.nodes, splitting)
        check(listed, wanted)
        for item in (unit[0] for units in wanted.bins for unit in units):
            fold, tokens = KEYS * (item[Word.STATE_FOLD] & 0xFFFF), item[Word.STOP] - item[Word.START]
            found.add("piece" if not fold else "group" if tokens <= 4 * fold and item[Word.PIECE] < FAR else "whole")
    assert found == {"piece", "group", "whole"}


def tree_of(nodes: list[tuple[int, ...]], lengths: list[int], page_size: int = 16) -> Batch:
    """Sequences with pages of their own below these nodes."""
    count, width = len(lengths), -(-max(lengths) // page_size)
    table = np.arange(count * width, dtype=np.int32).reshape(count, width)
    rows, length = np.arange(count), np.array(lengths, np.int64)
    found = np.array(nodes, np.int64).reshape(-1, 5)
    return Batch(rows, length, np.arange(count, dtype=np.int32), found, table, -(-length // page_size), rows + 1, count)


def test_tiles_of_a_node_go_on_with_those_of_its_children():
    plan = standing_plan(32, 3000, 2, 8, 16)
    listed = listed_for(plan, TILES._replace(blocks=4))
    nodes = [(0, 32, 0, 1024, -1), (0, 16, 1024, 1200, 0), (16, 16, 1024, 1100, 0), (16, 16, 1100, 1200, 2)]
    batch = tree_of(nodes, [1300 + n for n in range(32)])
    listed.renew(batch)
    listed.make()
    found = expected(plan, batch, listed, batch.nodes)
    assert sum(bool(item[Word.KIND] & GOES_ON) for items in found.rounds for item in items) >= 4
    check(listed, found)


BUSY = tree_of([(0, 24, 0, 512, -1)], [520 + (3000 if n == 0 else n) for n in range(24)])


@pytest.mark.parametrize(
    ("shape", "limit"),
    [(PLAIN, {"max_states": 30}), (PLAIN, {"max_pieces": 24}), (TILES, {"max_tiles": 0}), (TILES, {"tile_rounds": 1})],
)
def test_nothing_is_shared_where_nodes_take_too_much(shape, limit):
    plan = standing_plan(24, 4000, 2, 4, 16)
    listed = listed_for(plan, shape._replace(blocks=1 if shape.tiles else 3))
    for name, most in limit.items():
        setattr(listed._args, name, most)
    listed.renew(BUSY)
    listed.make()
    assert listed.made[4:6].tolist() == [0, 0]
    check(listed, expected(plan, BUSY, listed, BUSY.nodes[:0]))


def test_units_are_dealt_in_turn_where_a_balanced_deal_does_not_fit():
    plan, uneven = standing_plan(24, 4000, 2, 4, 16), tree_of([], [3000] * 4 + [5] * 20)
    listed = listed_for(plan, PLAIN)
    listed.renew(uneven)
    listed.make()
    found = expected(plan, uneven, listed, uneven.nodes)
    counts = [len(units) for units in found.bins]
    least = -(-sum(counts) // len(counts))
    assert max(counts) > least
    listed = listed_for(plan, PLAIN)
    listed._args.slots = least
    listed.renew(uneven)
    listed.make()
    assert listed.made[4:6].tolist() == [0, 1]
    items = listed.items.numpy().reshape(-1, 16)
    wanted = [tuple(item) for units in found.bins for unit in units for item in unit.tolist()]
    assert sorted(map(tuple, items[items[:, Word.ROWS] > 0].tolist())) == sorted(wanted)
