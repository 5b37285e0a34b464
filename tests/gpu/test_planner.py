"""The planner's kernel in the emulator: the list of a step, item by item."""

from __future__ import annotations

import random

import pytest
from planner_cases import check, expected, listed_for, random_batch, standing_plan

from tilewise.plan.ranges import Shape

PLAIN, QUANTISED, WIDE = Shape(8, 4, 3, False), Shape(16, 8, 2, False, chunk=32), Shape(16, 4, 3, False)
TILES, MMA = Shape(8, 4, 5, True, joiners=8), Shape(8, 2, 4, True, tile_rows=64, in_turn=True)


@pytest.mark.parametrize(
    ("shape", "heads", "group", "page_size", "options"),
    [
        (PLAIN, 4, 2, 16, {"share": False}),
        (PLAIN, 3, 2, 16, {"share": False}),
        (PLAIN, 4, 2, 16, {}),
        (QUANTISED, 8, 2, 32, {"tokens_per_seq": 5}),
        (WIDE, 2, 4, 24, {"tokens_per_seq": 3}),
        (WIDE, 2, 4, 24, {"window": (100, 0), "share": False}),
        (PLAIN, 2, 4, 8, {"window": (200, 0)}),
        (TILES, 4, 4, 16, {}),
        (TILES, 2, 4, 64, {"tokens_per_seq": 2}),
        (TILES, 1, 8, 16, {"window": (150, 0), "tokens_per_seq": 2}),
        (MMA, 2, 4, 16, {}),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_list_is_the_one_that_python_makes(seed, shape, heads, group, page_size, options):
    r = random.Random(seed)
    plan = standing_plan(20, 600, heads, group, page_size, **options)
    listed = listed_for(plan, shape)
    for count in (20, 13, 0, 17):
        batch = random_batch(r, plan, count, tree=options.get("share", True) and count != 13)
        listed.renew(batch)
        check(listed, expected(plan, batch, listed, batch.nodes))
