"""What `tilewise tune decode` measures: what a decode step's parts cost on a card, and how deep its rings should be.

The constants of the cost model and of the work list (plan/cost.py) come from the times of a few steps that differ in
one thing each: `constants` says which. Those of the cost model are kept only if "auto", asked with them about a grid of
steps that were timed shared and unshared, chooses no worse than with the constants that hold without a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from tilewise import api, arch, arguments, tuned
from tilewise.compiler.spec import KernelSpec
from tilewise.formats import KVFormat
from tilewise.gpu import decode as kernel
from tilewise.gpu.decode_kernels import DecodeTiling, choose_tiling, decode_spec, fits
from tilewise.kvcache import PagedKVCache
from tilewise.plan.cost import GPU_COST, CostModel, Weights
from tilewise.plan.ranges import CHUNK, FAR, Splitting
from tilewise.plan.tiles import DecodePlan
from tilewise.scores import Scores
from tilewise.tuned import COSTS, Section, Tuned

from .trees import lay_out
from .tune import Call, Machine, Problem, Record, times_record
from .tune_prefill import Shape

PAGE = 16
# How many times more or less than without a table a constant may be; what lies beyond was not measured well. Cards
# differ much in what they do per second, and little in how their warps share it.
PLAUSIBLE_COST, PLAUSIBLE_WEIGHT = 64.0, 8.0
STAGES = (2, 3, 4, 5, 6, 8)
COSTS_KEY = "constants"


@dataclass(frozen=True)
class Model:
    """The heads of the steps: those of the most common models."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def token_bytes(self) -> int:
        """Of one token's K and V over all KV heads, in bfloat16."""
        return 2 * 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Step:
    """One decode step: `sequences` of `own` tokens each, behind `nodes` nodes of `shared` tokens.

    share: whether nodes are read once. pieces: tokens that own ranges are cut into, 0 for ranges that one warp takes
    whole, None for whatever is chosen.
    """

    sequences: int
    own: int
    shared: int = 0
    nodes: int = 1
    share: bool = False
    pieces: int | None = None

    def __str__(self) -> str:
        tokens = f"({self.shared} + {self.own})" if self.shared else str(self.own)
        nodes = f", {self.nodes} nodes" if self.nodes > 1 else ""
        cut = "" if self.pieces is None else ", whole" if self.pieces == 0 else f", pieces of {self.pieces}"
        return f"{self.sequences} × {tokens}{nodes}{', shared' if self.share else ''}{cut}"

    @property
    def splitting(self) -> Splitting | None:
        if self.pieces is None:
            return None
        return Splitting(pieces=((FAR, self.pieces),), whole=False) if self.pieces else Splitting(whole=True)


EMPTY = Step(1, 16)
OWN = Step(64, 1024), Step(64, 4096)
ALONE = Step(64, 64, 2048), Step(64, 64, 8192)
TOGETHER = Step(256, 64, 4096, share=True), Step(256, 64, 16384, share=True)
FLOOR = Step(64, 16, 64, share=True)
BESIDE = Step(64, 256, 1024, share=True), Step(64, 1024, 1024, share=True)
ROWS = Step(512, 16, 64, share=True), Step(2048, 16, 64, share=True)
NODES = Step(256, 64, 256, nodes=16, share=True), Step(256, 64, 256, nodes=64, share=True)
WHOLE = Step(512, 512, pieces=0), Step(2048, 128, pieces=0)
CUT = Step(128, 4096, pieces=0), Step(128, 4096, pieces=256)
SPRINT = Step(1, 8192, pieces=0)
STEPS = (EMPTY, *OWN, *ALONE, *TOGETHER, FLOOR, *BESIDE, *ROWS, *NODES, *WHOLE, *CUT, SPRINT)
GRID = tuple(
    Step(sequences, own, shared, share=share)
    for sequences, shared, own in product((16, 64, 256), (256, 1024, 4096), (64, 512))
    for share in (False, True)
)


def constants(times: Mapping[Step, float], model: Model, warps: int, base: CostModel = GPU_COST) -> dict[str, float]:
    """The constants that follow from the steps' times in µs; those that come out absurd beside `base` are left out.

    warps: that stream on the whole card at once. Each is a difference over what differs between two steps; of what the
    cost model adds up, the parts that are known already are taken off first.
    """

    def took(pair: tuple[Step, Step]) -> float:
        return times[pair[1]] - times[pair[0]]

    def over(amount: float, pair: tuple[Step, Step]) -> float:
        return amount / took(pair) if took(pair) > 0 else 0.0

    token = model.token_bytes
    found: dict[str, float] = {"launch_us": times[EMPTY], "floor_us": times[FLOOR]}
    found["own_bytes_per_us"] = own = over(64 * 3072 * token, OWN)
    found["kv_bytes_per_us"] = over(64 * 6144 * token, ALONE)
    found["flops_per_us"] = flops = over(4.0 * 12288 * 256 * model.heads * model.head_dim, TOGETHER)
    if own and flops:
        found["own_share"] = took(BESIDE) / (64 * 768 * token / own) - 1
        rows = 1536 * model.heads
        known = 1536 * 16 * token / own + 4.0 * 64 * rows * model.head_dim / flops
        found["row_state_us"] = (took(ROWS) - known) / rows
        # 16 nodes of 16 sequences, and 64 of 4: the products are the same, and each node is read once.
        found["item_us"] = (took(NODES) - 48 * 256 * token / own) / 48
        # In chunks. One chunk of every warp, over all of them, is what 16 tokens of a head take of the bandwidth.
        chunk = CHUNK * token / model.kv_heads / own
        found["item_chunks"] = took(WHOLE) / ((2048 - 512) * model.kv_heads) / chunk
        pieces = 128 * model.kv_heads * 16
        items = pieces - 128 * model.kv_heads
        found["state_chunks"] = (took(CUT) / chunk - items * max(0.0, found["item_chunks"])) / pieces
        alone = times[SPRINT] - times[EMPTY]
        found["sprint"] = 8192 / CHUNK * chunk * warps / alone if alone > 0 else 0.0
    return {name: value for name, value in found.items() if _plausible(name, value, base)}


def _plausible(name: str, value: float, base: CostModel) -> bool:
    if name in COSTS:
        now, most = float(getattr(base, name)), PLAUSIBLE_COST
    else:
        now, most = float(getattr(Weights(), name)), PLAUSIBLE_WEIGHT
    return now / most <= value <= now * most


def chosen_us(cost: CostModel, times: Mapping[Step, float], model: Model) -> float:
    """What the steps of the grid take together if `cost` says which of them share."""
    total = 0.0
    for step in (step for step in GRID if step.share):
        asked = (step.sequences, step.shared, model.heads, model.head_dim, float(model.token_bytes))
        rows = step.sequences * model.heads // model.kv_heads
        shares = cost.shares(*asked) and cost.pays(
            cost.alone_us(*asked), cost.saving_us(*asked), float(step.sequences * step.own * model.token_bytes), rows
        )
        total += times[replace(step, share=shares)]
    return total


def judged(
    found: Mapping[str, float], times: Mapping[Step, float], model: Model, base: CostModel = GPU_COST
) -> tuple[dict[str, float], Record]:
    """The constants without those of the cost model, if "auto" chooses worse with them; and a record of both."""
    cost = Tuned({"decode": Section("", "", {}, found)}).cost_over(base)
    before, after = chosen_us(base, times, model), chosen_us(cost, times, model)
    kept = {name: value for name, value in found.items() if after <= before or name not in COSTS}
    said: Record = {"key": COSTS_KEY, "problem": "the grid as auto shares it", "status": "ok", "taken": after <= before}
    return kept, {**said, "without_table_us": round(before, 4), "with_table_us": round(after, 4)}


# ---- on a device ------------------------------------------------------------------------------------------------


class Bench:
    """Pages of random K and V for all steps, and the steps as calls."""

    def __init__(self, device: torch.device, model: Model, steps: Sequence[Step]) -> None:
        self.device, self.model = device, model
        pages = max(s.nodes * -(-s.shared // PAGE) + s.sequences * -(-s.own // PAGE) for s in steps)
        generator = torch.Generator(device).manual_seed(0)
        sizes = (pages, PAGE, model.kv_heads, model.head_dim)
        self.kv = [
            torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(generator=generator) for _ in range(2)
        ]

    def cache(self, step: Step) -> PagedKVCache:
        levels = (
            ((step.nodes, step.shared), (step.sequences, step.own)) if step.shared else ((step.sequences, step.own),)
        )
        parts = lay_out(levels, PAGE)
        table = np.concatenate([x.repeat(step.sequences // len(x), axis=0) for x in parts], axis=1)
        used = int(table.max()) + 1
        lengths = np.full(step.sequences, step.shared + step.own)
        rows, tokens = (torch.from_numpy(x).to(self.device) for x in (table, lengths))
        return PagedKVCache.from_pages(self.kv[0][:used], self.kv[1][:used], rows, tokens)

    def call(self, step: Step) -> tuple[Call, DecodePlan, torch.Tensor]:
        """The step as a call, its plan, and what the call fills."""
        cache, model = self.cache(step), self.model
        seqs = list(range(step.sequences))
        plan = api.plan_decode(cache, seqs, num_heads=model.heads, share_prefix=step.share)
        sizes = (step.sequences, 1, model.heads, model.head_dim)
        q = torch.randn(sizes, generator=torch.Generator(self.device).manual_seed(1), device=self.device)
        q = q.to(torch.bfloat16)
        o, scores = torch.empty_like(q), Scores((None, 0), scale=model.head_dim**-0.5)
        lists = arguments.PageListsOf(cache, plan.seqs)
        k_parts, v_parts = cache.parts(0)
        assert v_parts is not None  # K and V are stored apart

        def call() -> torch.Tensor:
            given = (plan, q, cache.format, k_parts, v_parts, lists, plan.lengths, o, None, scores)
            kernel.run(*given, splitting=step.splitting)
            return o

        return call, plan, o


def streaming(device: torch.device, model: Model) -> DecodeTiling:
    """The tiling of steps that fill a device, as it is chosen without a table."""
    card = arch.card_of(device)
    rows = model.heads // model.kv_heads
    return choose_tiling(KVFormat("bf16", model.head_dim), rows, False, arch.hopper(card), card)


def measure_constants(machine: Machine, bench: Bench, seconds: float) -> tuple[dict[str, float], list[Record]]:
    """The constants of the card, and a record of every step. Times are those of steps with no table."""
    model, times, records = bench.model, {}, []
    steps = list(dict.fromkeys((*STEPS, *GRID)))
    base = tuned.base_cost(arch.card_of(bench.device))
    with tuned.trying(Tuned({})):
        for step in steps:
            timing = machine.times({str(step): bench.call(step)[0]}, seconds / len(steps), replay=True)[str(step)]
            times[step] = timing.median * 1e6
            records.append({"key": COSTS_KEY, "problem": str(step), "status": "ok", **times_record(timing)})
    tiling = streaming(bench.device, model)
    warps = tiling.blocks * tiling.warps * arch.multiprocessors(bench.device)
    found, said = judged(constants(times, model, warps, base), times, model, base)
    return found, [*records, said]


def problems(shapes: Sequence[Shape], device: torch.device) -> Iterator[Problem]:
    """How deep the rings of streaming warps should be: B sequences of N tokens each, nothing shared."""
    for shape in shapes:
        model = Model(shape.heads, shape.kv_heads, shape.hdim)
        step = Step(shape.batch, shape.seq)
        yield ring_problem(step, Bench(device, model, [step]))


def defaults() -> list[Shape]:
    return [Shape(64, 4096, 32, 8, 128), Shape(256, 1024, 32, 8, 128), Shape(64, 4096, 32, 8, 64)]


def ring_problem(step: Step, bench: Bench) -> Problem:
    """The problem of one step, for the kernel that serves it."""
    device, card, model = bench.device, arch.card_of(bench.device), bench.model
    form = KVFormat("bf16", model.head_dim)
    with tuned.trying(Tuned({})):
        plan = bench.call(step)[1]
        deep = arch.hopper(card) and kernel.fills_one_block(plan, form, arch.multiprocessors(device))
        rows = model.heads // model.kv_heads
        tiling = choose_tiling(form, rows, False, arch.hopper(card), card, deep and model.head_dim <= 128)
    others = [replace(tiling, stages=n) for n in STAGES if n != tiling.stages]

    def specs(tiling: DecodeTiling) -> list[KernelSpec]:
        tma = arch.hopper(card)
        ways = (False, True) if tma else (False,)  # warps that copy for themselves, or for all of a block
        return [decode_spec(torch.bfloat16, form, PAGE, tiling, tma=tma, in_step=in_step) for in_step in ways]

    def bind(table: Tuned, spec: KernelSpec) -> Call:
        call, plan, _ = bench.call(step)
        with tuned.trying(table):
            call()

        def bound() -> object:  # the plan keeps its kernel, which another table would not be asked about
            with tuned.trying(table):
                return call()

        (made,) = kernel.kept(plan).bound.values()
        if dict(made.spec.constants)["kStages"] != dict(spec.constants)["kStages"]:
            raise RuntimeError(f"the table leads to {made.spec}, not to {spec}")
        return bound

    def same(chosen: Call, other: Call) -> bool:
        """To the bit: no depth of rings changes the result."""
        first = chosen()
        assert isinstance(first, torch.Tensor)
        first = first.clone()
        second = other()
        assert isinstance(second, torch.Tensor)
        return torch.equal(first, second)

    key, fitting = tuned.decode_key(form, tiling), tuple(t for t in others if fits(form, t, card))
    name = f"{step}, {model.heads}/{model.kv_heads} heads, D {model.head_dim}"
    return Problem("decode", key, name, tiling, fitting, specs, bind, same, replay=True)
