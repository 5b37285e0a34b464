"""`tilewise tune decode`: constants from steps' times, and that no table changes a bit of what decode gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tune_cases import tables

import tilewise
from tilewise import arch, tuned
from tilewise.bench import tune, tune_decode
from tilewise.bench.measure import Timing
from tilewise.bench.tune_decode import GRID, STEPS, Bench, Model, Step, chosen_us, constants, judged
from tilewise.formats import KVFormat
from tilewise.gpu import decode as kernel
from tilewise.plan.cost import GPU_COST, CostModel, Weights
from tilewise.tuned import WEIGHTS, Tuned

MODEL, WARPS = Model(), 1056
CPU = torch.device("cpu")


def world(cost: CostModel, weights: Weights, model: Model = MODEL) -> dict[Step, float]:
    """The steps' times in µs on a card that is just as the cost model and the work list's weights have it."""

    def streamed(tokens: float) -> float:
        return tokens * model.token_bytes / cost.own_bytes_per_us

    found = {}
    for step in dict.fromkeys((*STEPS, *GRID)):
        if step.pieces is not None:
            chunk = streamed(16) / model.kv_heads  # over all warps
            ranges = step.sequences * model.kv_heads
            items = ranges * (step.own // step.pieces if step.pieces else 1)
            work = ranges * step.own / 16 + items * weights.item_chunks
            work += items * weights.state_chunks * (step.pieces > 0)
            alone = step.sequences == 1
            found[step] = cost.launch_us + chunk * (WARPS * step.own / 16 / weights.sprint if alone else work)
            continue
        nodes, each = step.nodes, step.sequences // step.nodes
        own = streamed(step.sequences * step.own)
        asked = (each, step.shared, model.heads, model.head_dim, float(model.token_bytes))
        if not step.share:
            found[step] = cost.launch_us + own + nodes * cost.alone_us(*asked)
            continue
        rows = each * model.heads
        products = 4 * step.shared * rows * model.head_dim / cost.flops_per_us
        # A node's tokens are read from memory, not from L2 as those that many sequences read at once.
        node = cost.item_us + max(streamed(step.shared) if nodes > 1 else 0.0, products) + rows * cost.row_state_us
        found[step] = max(cost.floor_us, cost.launch_us + own * (1 + cost.own_share) + nodes * node)
    return found


# ---- constants ---------------------------------------------------------------------------------------------------
SLOWER = replace(
    GPU_COST, kv_bytes_per_us=2e6, flops_per_us=100e6, launch_us=5.0, floor_us=12.0, own_bytes_per_us=1.5e6,
    own_share=0.3, row_state_us=0.001, item_us=0.0,
)  # fmt: skip
OTHER = Weights(item_chunks=2.5, state_chunks=0.75, sprint=2.0)


def test_constants_are_those_of_the_world_that_was_timed() -> None:
    times = world(SLOWER, OTHER)
    found = constants(times, MODEL, WARPS)
    for name in ("kv_bytes_per_us", "own_bytes_per_us", "flops_per_us"):
        assert found[name] == pytest.approx(getattr(SLOWER, name)), name
    assert found["own_share"] == pytest.approx(SLOWER.own_share)
    assert found["floor_us"] == pytest.approx(times[tune_decode.FLOOR])
    assert found["launch_us"] == pytest.approx(times[tune_decode.EMPTY])
    for name in ("item_chunks", "state_chunks"):
        assert found[name] == pytest.approx(getattr(OTHER, name)), name
    assert found["sprint"] == pytest.approx(OTHER.sprint, rel=0.05)  # the empty step has tokens, too
    assert "step_chunks" not in found, "nothing measures it"


@pytest.mark.parametrize(("name", "value"), [("row_state_us", 0.001), ("item_us", 0.3)])
def test_small_costs_are_what_is_left(name: str, value: float) -> None:
    times = world(replace(SLOWER, **{"row_state_us": 0.0, "item_us": 0.0, "own_share": 0.0, name: value}), OTHER)
    assert constants(times, MODEL, WARPS)[name] == pytest.approx(value, rel=0.02)


def test_what_comes_out_absurd_is_left_out() -> None:
    times = world(SLOWER, OTHER)
    slow = {**times, tune_decode.OWN[1]: times[tune_decode.OWN[0]]}  # four times the tokens in no time at all
    found = constants(slow, MODEL, WARPS)
    assert "own_bytes_per_us" not in found
    assert not set(found) & {"own_share", "row_state_us", "item_us", "item_chunks", "state_chunks", "sprint"}
    assert "kv_bytes_per_us" in found
    far = {**times, tune_decode.EMPTY: 1000 * times[tune_decode.EMPTY]}
    assert "launch_us" not in constants(far, MODEL, WARPS)
    assert all(value > 0 for value in constants(slow, MODEL, WARPS).values())


def test_constants_are_dropped_if_auto_chooses_worse_with_them() -> None:
    times = world(SLOWER, OTHER)
    found = constants(times, MODEL, WARPS)
    kept, said = judged(found, times, MODEL)
    assert kept == found
    assert said["taken"]
    assert said["with_table_us"] <= said["without_table_us"]
    bad = {**found, "floor_us": GPU_COST.floor_us * 8, "row_state_us": GPU_COST.row_state_us * 8, "flops_per_us": 50e6}
    kept, said = judged(bad, times, MODEL)
    assert not said["taken"]
    assert said["with_table_us"] > said["without_table_us"]
    assert set(kept) == set(found) & set(WEIGHTS)


def test_the_grid_is_chosen_as_plans_are() -> None:
    """What `chosen_us` makes of a cost model is what plan_decode does with it."""
    times = world(GPU_COST, Weights())
    for step in (GRID[1], GRID[-1]):
        shared = replace(step, share=True)
        only = {s: times[s] if replace(s, share=True) == shared else 0.0 for s in times}
        took = chosen_us(GPU_COST, only, MODEL)
        bench = Bench(CPU, Model(32, 8, 16), [step])
        cache = bench.cache(step)
        # The model of the grid has head_dim 128: its bytes and products are those that the plan is told of.
        plan = tilewise.plan_decode(cache, list(range(step.sequences)), num_heads=32, cost=_Wider(**vars(GPU_COST)))
        assert took == times[replace(step, share=plan.shared_nodes > 0)]


class _Wider(CostModel):
    """Reckons a cache of head_dim 16 in float32 as one of 128 in bfloat16."""

    def _stream_us(self, tokens: int, rows: int, head_dim: int, kv_bytes: float) -> float:
        return super()._stream_us(tokens, rows, head_dim * 8, kv_bytes * 4)

    def pays(self, alone_us: float, saved_us: float, own_bytes: float, rows: int) -> bool:
        return super().pays(alone_us, saved_us, own_bytes * 4, rows)


class Machine:
    """A card on which steps take what `world` says."""

    card, target = "A Card", "sm_90a"

    def __init__(self) -> None:
        self.took = {str(step): us for step, us in world(SLOWER, OTHER).items()}

    def faults(self, specs: Any) -> list[str]:
        return ["" for _ in specs]

    def times(self, calls: Any, budget: float, *, replay: bool = False) -> dict[str, Timing]:
        assert replay, "kernels of microseconds are timed as graphs"
        return {name: Timing(us, us, us, us, 9) for name in calls for us in [self.took.get(name, 100.0) * 1e-6]}

    def state(self) -> dict[str, Any]:
        return {}


def test_steps_become_constants_of_the_table(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(Bench, "call", lambda self, step: (lambda: None, None, None))
    machine, bench = Machine(), Bench(CPU, Model(4, 1, 64), [Step(1, 16)])
    found, records = tune_decode.measure_constants(machine, replace_model(bench), 1.0)
    assert len(records) == len(set(STEPS) | set(GRID)) + 1
    assert found["own_bytes_per_us"] == pytest.approx(1.5e6)
    book = tune.Book(machine, tmp_path)
    book.add("decode", records, constants=found)
    held = tuned.held(machine.card, machine.target, tmp_path)
    assert held.cost_over(GPU_COST).own_bytes_per_us == pytest.approx(1.5e6)
    assert held.weights.item_chunks == pytest.approx(2.5)


def replace_model(bench: Bench) -> Bench:
    bench.model = MODEL  # its pages are not looked at
    return bench


# ---- the bits ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def cache() -> tuple[Any, list[int], torch.Tensor]:
    """Three sequences behind 64 common tokens, one long enough to be cut in many ways; and queries."""
    generator = torch.Generator().manual_seed(3)
    pages = tilewise.PagedKVCache(64, 16, 1, 64, kv_format="bf16")
    first = pages.allocate()

    def write(seqs: list[int], counts: list[int]) -> None:
        slots = pages.extend(seqs, counts)
        k, v = (torch.randn(sum(counts), 1, 64, generator=generator) for _ in range(2))
        pages.write(0, slots, k, v)

    write([first], [64])
    seqs = [first, pages.fork(first), pages.fork(first)]
    write(seqs, [420, 30, 100])
    return pages, seqs, torch.randn(3, 1, 2, 64, generator=generator).bfloat16()


@pytest.mark.parametrize("share", [False, True])
def test_no_table_changes_a_bit(cache: Any, share: bool) -> None:
    pages, seqs, q = cache
    lists, stages = [], []

    def run(table: Tuned | None) -> tuple[torch.Tensor, torch.Tensor]:
        with tuned.trying(table):
            plan = tilewise.plan_decode(pages, seqs, num_heads=2, share_prefix=share)
            o, lse = tilewise.decode(q, pages, 0, plan, return_lse=True, backend="emulator")
        made = kernel.kept(plan)
        lists.append({made.lists[key].items.tobytes() for key in made.lists})
        stages.extend(dict(bound.spec.constants)["kStages"] for bound in made.bound.values())
        return o, lse

    o, lse = run(None)
    for table in tables(3):
        again, lse_again = run(table)
        assert torch.equal(o, again)
        assert torch.equal(lse, lse_again)
    assert len({frozenset(found) for found in lists}) > 1, "the tables must lead to other lists"
    assert len(set(stages)) > 1, "and to other rings"


def test_no_table_changes_what_is_cut_and_merged(cache: Any) -> None:
    """The pieces of a plan with tiles and their states: only who computes them may be another."""
    pages, seqs, _ = cache

    def pieces(table: Tuned | None) -> tuple[Any, ...]:
        with tuned.trying(table):
            plan = tilewise.plan_decode(pages, seqs, num_heads=16, share_prefix=True)
            q = torch.empty(3, 1, 16, 64, dtype=torch.bfloat16)
            scores = tilewise.scores.Scores((None, 0))
            lists = tilewise.arguments.PageListsOf(pages, plan.seqs)
            listed, bound = kernel.bind(
                plan,
                q,
                pages.format,
                *pages.parts(0),
                lists,
                plan.lengths,
                scores,
                splitting=kernel.Splitting(whole=False),
            )
        assert bound is not None
        assert bound.spec.name == "decode_tree"
        items = sorted(map(bytes, listed.items.reshape(-1, 16)))
        tiles = sorted(map(bytes, listed.tile_items.reshape(-1, 16)))
        return [x for x in items if any(x)], [x for x in tiles if any(x)], listed.states.tolist()

    expected = pieces(None)
    for table in tables(5):
        assert pieces(table) == expected


def test_plans_that_say_what_is_shared_do_not_ask_a_table(cache: Any) -> None:
    pages, seqs, _ = cache
    for share in (False, True):
        plans = []
        for table in (None, *tables(3)):
            with tuned.trying(table):
                plans.append(tilewise.plan_decode(pages, seqs, num_heads=2, share_prefix=share))
        works = [[(t.row, t.rows, t.start, t.stop) for t in plan.work] for plan in plans]
        assert all(work == works[0] for work in works)


# ---- rings -------------------------------------------------------------------------------------------------------
def test_rings_are_a_problem_of_the_kernel_that_serves_the_step() -> None:
    step = Step(2, 40)
    made = tune_decode.ring_problem(step, Bench(CPU, Model(2, 1, 64), [step]))
    assert made.family == "decode"
    assert made.key == tuned.decode_key(KVFormat("bf16", 64), made.tiling)
    assert {tuple(tune.difference(made.tiling, other)) for other in made.others} == {("stages",)}
    machine = Machine()
    best = made.others[0]
    machine.took[tune.words(tune.difference(made.tiling, best))] = 50.0
    entry, records = tune.solve(made, machine, 1.0)
    assert entry == {"stages": best.stages}
    assert [record["status"] for record in records] == ["ok"] * len(records)
