"""What meets what: an attention problem as a list of tiles. No GPU, no tensors read, no I/O.

tiles.py has the vocabulary (bands, tiles, Plan), dense.py and tree.py (with flat.py) make plans, cost.py says what
sharing costs, schedule.py (with schedule_*.py) holds block-sparse patterns, blocks.py makes work of them and of the
blocks of mask functions, worklist.py (with ranges.py, items.py and deal.py) lays a decode plan out for a kernel,
standing.py keeps one while sequences come and go, step.py puts chunks of prompts beside a decode plan, show.py is for
people.
"""

from tilewise.plan.cost import CPU_COST, CostModel
from tilewise.plan.dense import cut, plan_dense, plan_shared_prefix, plan_varlen
from tilewise.plan.flat import PageTable
from tilewise.plan.schedule import BlockSchedule
from tilewise.plan.step import ChunkPlan, StepPlan
from tilewise.plan.tiles import (
    OPEN,
    Band,
    BlockTiles,
    DecodePlan,
    Ints,
    PagedTiles,
    PagedWork,
    Plan,
    Rectangle,
    Tiles,
    Window,
    Work,
    band_of,
    visible_pairs,
)
from tilewise.plan.tree import plan_tree

__all__ = [
    "CPU_COST",
    "OPEN",
    "Band",
    "BlockSchedule",
    "BlockTiles",
    "ChunkPlan",
    "CostModel",
    "DecodePlan",
    "Ints",
    "PageTable",
    "PagedTiles",
    "PagedWork",
    "Plan",
    "Rectangle",
    "StepPlan",
    "Tiles",
    "Window",
    "Work",
    "band_of",
    "cut",
    "plan_dense",
    "plan_shared_prefix",
    "plan_tree",
    "plan_varlen",
    "visible_pairs",
]
