"""The cost model: each of its terms decides, just on this side of a bound and just on the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tree_cases import make_plan, tree_lists

from tilewise.plan.cost import CPU_COST, GPU_COST, MMA_COST, PLAN_MARGIN, WIDE_ROWS, CostModel, streamed
from tilewise.plan.worklist import Splitting

# Sharing costs nothing but the bytes, one per microsecond.
FREE = CostModel(item_us=0.0, kv_bytes_per_us=1.0, flops_per_us=1e12, row_state_us=0.0, margin=1.0)
# A node of 100 tokens of 10 bytes, 4 sequences of 8 rows each, head_dim 16: 1000 µs per reading
NODE: dict[str, Any] = {"sequences": 4, "tokens": 100, "rows_each": 8, "head_dim": 16, "kv_bytes": 10.0}


# ---- one node --------------------------------------------------------------------------------------------------------
def test_a_node_is_read_once_instead_of_once_per_sequence() -> None:
    assert FREE.alone_us(**NODE) == 4000.0
    assert FREE.saving_us(**NODE) == 3000.0


def test_the_slower_of_bytes_and_products_counts() -> None:
    # 4 · tokens · rows · head_dim operations: 51200 per sequence, 204800 for the four together
    slow = replace(FREE, flops_per_us=51.2)
    assert slow.alone_us(**NODE) == 4000.0
    assert slow.saving_us(**NODE) == 0.0
    assert not slow.shares(**NODE)
    assert replace(FREE, flops_per_us=52.0).shares(**NODE)
    assert replace(FREE, flops_per_us=25.6).alone_us(**NODE) == 8000.0


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("item_us", 3000.0),  # all that sharing saves
        ("row_state_us", 3000.0 / 32),  # 4 sequences of 8 rows
        ("margin", 4.0),  # 4000 µs alone against 1000 together
    ],
)
def test_each_term_alone_decides_about_a_node(field: str, most: float) -> None:
    assert replace(FREE, **{field: most * 0.999}).shares(**NODE)
    assert not replace(FREE, **{field: most * 1.001}).shares(**NODE)
    assert replace(FREE, **{field: most}).saving_us(**NODE) == pytest.approx(0.0)


def test_the_margin_multiplies_items_and_states_too() -> None:
    cost = replace(FREE, margin=2.0, item_us=10.0, row_state_us=1.0)
    assert cost.saving_us(**NODE) == 4000.0 - 2.0 * (1000.0 + 10.0 + 32.0)


def test_no_saving_is_no_sharing() -> None:
    assert not FREE.shares(**NODE | {"sequences": 1})
    assert FREE.shares(**NODE | {"sequences": 2})


# ---- the whole plan --------------------------------------------------------------------------------------------------
def pays(cost: CostModel, *, alone: float = 1000.0, saved: float, own: float = 0.0, rows: int = 0) -> bool:
    return cost.pays(alone, saved, own, rows)


def test_a_plan_must_be_faster_by_its_margin() -> None:
    least = 1000.0 - 1000.0 / PLAN_MARGIN
    assert PLAN_MARGIN > 1
    assert pays(FREE, saved=least + 0.01)
    assert not pays(FREE, saved=least - 0.01)
    assert not pays(FREE, alone=0.0, saved=0.0), "nothing saved is not faster"


@pytest.mark.parametrize(
    ("cost", "own"),
    [(replace(FREE, launch_us=9000.0), 0.0), (replace(FREE, own_bytes_per_us=2.0), 18_000.0)],
    ids=["launch", "own"],
)
def test_the_margin_is_of_the_whole_step(cost: CostModel, own: float) -> None:
    """The launch and the sequences' own tokens take 9000 µs in both plans: 5% of them must be saved too."""
    least = 10_000.0 - 10_000.0 / PLAN_MARGIN
    assert pays(cost, saved=least + 0.1, own=own)
    assert not pays(cost, saved=least - 0.1, own=own)


def test_own_tokens_take_longer_beside_tiles() -> None:
    cost = replace(FREE, own_bytes_per_us=2.0, own_share=0.5, wide_rows=32)
    # 100 µs of own tokens: 150 beside tiles
    least = 1150.0 - 1100.0 / PLAN_MARGIN
    assert pays(cost, saved=least + 0.01, own=200.0, rows=32)
    assert not pays(cost, saved=least - 0.01, own=200.0, rows=32)
    assert pays(cost, saved=least - 0.01, own=200.0, rows=31), "without tiles they do not"


def test_a_step_with_tiles_has_a_floor() -> None:
    cost = replace(FREE, floor_us=500.0, wide_rows=32)
    for rows, floor in ((32, True), (33, True), (31, False)):
        assert pays(cost, alone=499.0, saved=400.0, rows=rows) != floor
        assert pays(cost, alone=501.0, saved=400.0, rows=rows)


# ---- the models ------------------------------------------------------------------------------------------------------
def test_tiles_begin_where_the_cost_model_takes_them_to_begin() -> None:
    assert GPU_COST.wide_rows == MMA_COST.wide_rows == Splitting().tile_rows == WIDE_ROWS
    assert CPU_COST.wide_rows == CPU_COST.floor_us == CPU_COST.launch_us == CPU_COST.own_share == 0


@pytest.mark.parametrize(
    ("sequences", "prefix", "own", "shared"),
    [(64, 256, 256, True), (64, 256, 16, False), (64, 64, 256, False), (2, 256, 64, False), (64, 8192, 256, True)],
)
def test_what_a_gpu_shares(sequences: int, prefix: int, own: int, shared: bool) -> None:
    """As measured on an H200: 32 query heads, 8 KV heads, head_dim 128, bfloat16."""
    lists = tree_lists([1, sequences], [prefix // 16, own // 16])
    sizes = {"heads": (32, 8), "head_dim": 128, "kv_row_bytes": 512.0}
    plan = make_plan(lists, [prefix + own] * sequences, **sizes, share=None, cost=GPU_COST)
    assert plan.shared_nodes == shared


@pytest.mark.parametrize(
    ("sequences", "prefix", "own", "shared"),
    [(64, 8192, 256, True), (16, 2048, 256, True), (64, 64, 256, False), (2, 256, 64, False), (64, 128, 16, False)],
)
def test_what_a_card_without_wgmma_shares(sequences: int, prefix: int, own: int, shared: bool) -> None:
    """Long prefixes of many sequences by tiles; where streaming warps compute nodes, the same are read one by one."""
    lists = tree_lists([1, sequences], [prefix // 16, own // 16])
    sizes = {"heads": (32, 8), "head_dim": 128, "share": None}
    for cost, kv_row_bytes, wanted in ((MMA_COST, 512.0, shared), (streamed(MMA_COST), 264.0, False)):
        plan = make_plan(lists, [prefix + own] * sequences, kv_row_bytes=kv_row_bytes, cost=cost, **sizes)
        assert plan.shared_nodes == wanted


# ---- what the planner asks -------------------------------------------------------------------------------------------
def test_the_planner_asks_with_all_heads_tokens_and_the_bytes_that_are_streamed() -> None:
    """4 sequences over a node of 8 pages of 4 tokens. One token is 2 KV heads of 10 bytes: 640 µs per reading."""
    lists = tree_lists([1, 4], [8, 1])
    lengths = [36] * 4
    options = {"heads": (8, 2), "share": None, "stream_row_bytes": 10.0, "kv_row_bytes": 1e9}

    def shared(cost: CostModel, **more: Any) -> bool:
        return make_plan(lists, lengths, 4, **{**options, "cost": cost, **more}).shared_nodes > 0

    assert shared(FREE)
    # Sharing saves 3 · 640 = 1920 µs less the item's and the rows' costs; 1440 µs per reading without heads.
    assert shared(replace(FREE, item_us=1500.0))
    assert not shared(replace(FREE, item_us=1921.0))
    assert shared(replace(FREE, row_state_us=1500.0 / 32))
    assert not shared(replace(FREE, row_state_us=1921.0 / 32)), "4 sequences of 8 query heads"
    # Three query tokens: a node of 32 tokens still, three times the rows.
    assert shared(replace(FREE, row_state_us=1500.0 / 96), tokens_per_seq=3)
    assert not shared(replace(FREE, row_state_us=1921.0 / 96), tokens_per_seq=3)
    assert not shared(replace(FREE, item_us=1921.0), stream_row_bytes=None, kv_row_bytes=10.0)
    assert shared(replace(FREE, item_us=1500.0), stream_row_bytes=None, kv_row_bytes=10.0)


def test_the_planner_compares_whole_plans() -> None:
    """640 µs alone per sequence; 4 sequences have 4 tokens each of their own."""
    lists = tree_lists([1, 4], [8, 1])
    lengths = [36] * 4
    options = {"heads": (8, 2), "share": None, "stream_row_bytes": 10.0}

    def shared(cost: CostModel) -> bool:
        return make_plan(lists, lengths, 4, **options, cost=cost).shared_nodes > 0

    # 16 own tokens of 20 bytes. Alone: 2560 + own; shared: (640 + own · (1 + own_share)) · PLAN_MARGIN
    own = replace(FREE, own_bytes_per_us=0.32)  # 1000 µs
    least = 3560.0 / PLAN_MARGIN - 1640.0
    assert shared(replace(own, own_share=least / 1000 * 0.999))
    assert not shared(replace(own, own_share=least / 1000 * 1.001))
    # The widest node has 4 sequences of 4 rows per KV head.
    far = replace(own, own_share=1e9)
    assert shared(replace(far, wide_rows=17))
    assert not shared(replace(far, wide_rows=16))
    assert shared(replace(FREE, floor_us=2559.0))
    assert not shared(replace(FREE, floor_us=2561.0))


@pytest.mark.parametrize("groups", [(2, 6), (6, 2)])
def test_the_widest_node_counts_and_all_savings_add_up(groups: tuple[int, int]) -> None:
    """Groups of 2 and of 6 sequences, 4 pages of 4 tokens each: 160 µs per reading of a node."""
    lists = [*tree_lists([1, groups[0]], [4, 1]), *(x + 200 for x in tree_lists([1, groups[1]], [4, 1]))]
    lengths = [20] * 8

    def nodes(cost: CostModel) -> int:
        return make_plan(lists, lengths, 4, heads=(2, 1), share=None, stream_row_bytes=10.0, cost=cost).shared_nodes

    assert nodes(FREE) == 2
    far = replace(FREE, floor_us=1e9)
    assert nodes(replace(far, wide_rows=12)) == 0, "6 sequences of 2 rows"
    assert nodes(replace(far, wide_rows=13)) == 2
    # 8 · 160 = 1280 µs alone. Shared 320; each alone would leave a plan of 1120 or 480 µs.
    assert nodes(replace(FREE, floor_us=1279.0)) == 2
    assert nodes(replace(FREE, floor_us=1281.0)) == 0
    launch = 1280.0 - 320.0 * PLAN_MARGIN
    assert nodes(replace(FREE, launch_us=0.99 * launch / (PLAN_MARGIN - 1))) == 2
    assert nodes(replace(FREE, launch_us=1.01 * launch / (PLAN_MARGIN - 1))) == 0
