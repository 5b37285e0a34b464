"""The block-sparse table: Tilewise under schedules beside its own dense forward, FlexAttention and FlashInfer on a GPU.

TFLOP/s are over the blocks that are kept. All kernels of a row alternate in one timing loop, each checked first.
`tilewise bench sparse` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tilewise.plan.blocks import kept_blocks
from tilewise.plan.schedule import BlockSchedule

from .. import api
from . import flex, peers, prefill
from .judge import in_blocks, row_check
from .measure import FAILED, OK, Check, Kernel, Result, Timing, device_cost, host_cost, measure
from .prefill import Goal, Row
from .sweep import Sheet
from .workloads import Point, backends, complete, problem_of, random_like, tensor_of

COLUMNS = ("ours", "by head", "dense", "Flex", "by head", "FlashInfer")
PER_HEAD, DENSE, KEPT, HOST, DEVICE = "by head", "dense", "schedule kept", "host", "device"
FLEX_PER_HEAD = f"{flex.FLEX}, {PER_HEAD}"
BUDGET = 1.2  # seconds per row, after the warm-up
FORWARD = "forward"  # the kernel that is not part of making a schedule
# Density by block size, and the TFLOP/s to reach; None: a share of the dense forward's.
RANDOM: dict[tuple[int, float], float | None] = {
    (128, 1.0): None,
    (128, 0.5): 700,
    (128, 0.1): 640,
    (64, 0.5): 640,
    (64, 0.1): 560,
}


@dataclass(frozen=True)
class Outcome(prefill.Outcome):
    """A row with what was measured of it."""

    @property
    def rates(self) -> list[float | None]:
        """The TFLOP/s of COLUMNS."""
        names = (self.ours, f"{self.ours}, {PER_HEAD}", f"{self.ours}, {DENSE}")
        found = map(self.of, (*names, flex.FLEX, FLEX_PER_HEAD, peers.FLASHINFER))
        return [None if result is None else result.tflops for result in found]


# ---- what bars are set on ---------------------------------------------------------------------------------------


def rate_over_dense(outcome: prefill.Outcome) -> float | None:
    """TFLOP/s under the schedule over those of the dense forward."""
    return _over(outcome, outcome.ours, f"{outcome.ours}, {DENSE}", _rate)


def speed_over_dense(outcome: prefill.Outcome) -> float | None:
    """How often the dense forward's time holds the time that this takes."""
    return _over(outcome, f"{outcome.ours}, {DENSE}", outcome.ours, _seconds)


def per_head_over_shared(outcome: prefill.Outcome) -> float | None:
    """TFLOP/s with a pattern for each head over those with one for all."""
    return _over(outcome, f"{outcome.ours}, {PER_HEAD}", outcome.ours, _rate)


def device_microseconds(outcome: prefill.Outcome) -> float | None:
    """Of the kernels that make a schedule and the lists that the forward walks."""
    return _microseconds(outcome, DEVICE)


def host_microseconds(outcome: prefill.Outcome) -> float | None:
    """Until a call that makes its schedule has returned."""
    return _microseconds(outcome, HOST)


def _microseconds(outcome: prefill.Outcome, what: str) -> float | None:
    result = outcome.of(f"{outcome.ours}, {what}")
    return None if result is None or result.timing is None else result.timing.median * 1e6


def _over(
    outcome: prefill.Outcome, above: str, below: str, of: Callable[[Result | None], float | None]
) -> float | None:
    one, other = of(outcome.of(above)), of(outcome.of(below))
    return None if one is None or other is None else one / other


def _rate(result: Result | None) -> float | None:
    return None if result is None else result.tflops


def _seconds(result: Result | None) -> float | None:
    return None if result is None or result.timing is None else result.timing.median


# ---- the rows ---------------------------------------------------------------------------------------------------


def rows(device: str) -> list[Row]:
    """The whole table. What needs the profiler stands last: it may cost launches something ever after."""
    base = Point("sparse", heads=16, kv_heads=16, dtype="bfloat16", device=device)
    per_head = Goal(per_head_over_shared, 0.97, what="by head")
    chosen = []
    for (block, density), bar in RANDOM.items():
        goal = Goal(rate_over_dense, 0.97, what="of dense") if bar is None else Goal(prefill.rate, bar, unit="")
        point = replace(base, seq=16384, sparsity=round(1 - density, 3), block=block)
        chosen.append(Row(f"{block} × {block}, {density:.0%} kept", point, (goal, per_head), measure=_random))
    point = replace(base, seq=40960, sparsity=0.9, block=64)
    goal = Goal(speed_over_dense, 7, what="dense's speed")
    chosen.append(Row("top 10% of scores, N 40960", point, (goal,), measure=_from_scores))
    point = replace(base, seq=32768, sparsity=0.9, block=128)
    goals = (
        Goal(device_microseconds, 30, " µs", "device", at_most=True),
        Goal(host_microseconds, 60, " µs", "host", at_most=True),
    )
    chosen.append(Row("from blocks, N 32768", point, goals, measure=_from_blocks))
    return [replace(row, point=complete(row.point)) for row in chosen]


def run(chosen: Sequence[Row], sheet: Sheet | None = None, loops: int | None = None) -> Iterator[prefill.Outcome]:
    """Measure the rows one after the other, those that the sheet does not have; it gets each as soon as it is done."""
    return prefill.run(chosen, sheet, loops, Outcome)


def notes(outcomes: Sequence[prefill.Outcome]) -> list[str]:
    """What the table's numbers do not say."""
    lines = []
    for outcome in outcomes:
        made = outcome.of(f"{outcome.ours}, {DEVICE}")
        if made is not None and made.status == OK:
            lines.append(f"{outcome.row.name}: {made.reason}")
        kept = outcome.of(f"{outcome.ours}, {KEPT}")
        if kept is not None and kept.timing is not None and (speed := speed_over_dense(outcome)) is not None:
            alone = _over(outcome, f"{outcome.ours}, {DENSE}", kept.kernel, _seconds)
            lines.append(f"{outcome.row.name}: {speed:.3g}× the speed of dense, with a schedule kept {alone:.3g}×")
    if isinstance(missing := peers.find(peers.FLASHINFER), str):
        lines.append(f"{peers.FLASHINFER}: {missing}")
    return lines


@dataclass(frozen=True)
class Data:
    """Random q, k and v (1, N, H, D) of a point, and kernels over them."""

    point: Point
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, point: Point) -> Data:
        generator = torch.Generator(point.device).manual_seed(0)
        shape = (1, point.seq, point.heads, point.hdim)
        return cls(point, *(random_like(point, generator, *shape) for _ in range(3)))

    @property
    def sizes(self) -> dict[str, Any]:
        """What says where blocks lie."""
        n, block = self.point.seq, self.point.block
        return {"seqlen_q": n, "seqlen_k": n, "block_q": block, "block_k": block}

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of queries and of keys."""
        count = -(-self.point.seq // self.point.block)
        return count, count

    def flops(self, schedule: BlockSchedule) -> int:
        """Of the pairs in the blocks that are kept, over all heads."""
        kept = kept_blocks(schedule.cpu())[0].double()
        valid = torch.full((kept.shape[-1],), schedule.block_k, dtype=torch.float64)
        valid[-1] = schedule.seqlen_k - (len(valid) - 1) * schedule.block_k
        pairs = int((valid @ kept @ valid).sum()) * (self.point.heads // len(kept))
        return 4 * self.point.hdim * pairs

    def kernel(self, name: str, run: peers.Run, schedule: BlockSchedule, *, ours: bool = False) -> Kernel:
        """A kernel that computes the schedule's blocks; its answer is judged by them."""
        nbytes = 4 * self.q.numel() * self.q.element_size()
        return Kernel(name, run, ours, self.flops(schedule), nbytes, check=self.check(schedule))

    def check(self, schedule: BlockSchedule) -> Callable[[torch.Tensor], Check]:
        """The judge of answers under a schedule."""
        n = self.point.seq
        return row_check(self.q, self.k, self.v, [(n, n)], more=in_blocks(schedule, self.q.device))

    def attention(self, out: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        """Tilewise's forward."""
        return tensor_of(api.attention(self.q, self.k, self.v, out=out, backend=self.point.backend, **options))

    @property
    def dense(self) -> Kernel:
        """Tilewise's dense forward: what the blocks are compared with."""
        n, nbytes = self.point.seq, 4 * self.q.numel() * self.q.element_size()
        flops = 4 * self.point.hdim * self.point.heads * n * n
        return Kernel(f"{self.ours}, {DENSE}", self.attention, True, flops, nbytes, same_answer=False)

    @property
    def ours(self) -> str:
        """The name of Tilewise's kernel."""
        return next(iter(backends(self.point)))

    def measure(self, kernels: list[Kernel], loops: int | None) -> list[Result]:
        """Check the kernels and time them, alternated."""
        assert kernels[0].check is not None
        problem = problem_of(self.point, kernels, kernels[0].check, tuple(self.q.shape))
        return measure(problem, loops=loops, budget=BUDGET)


def _random(row: Row, loops: int | None) -> list[Result]:
    """A random pattern for all heads, and one for each."""
    data, point = Data.of(row.point), row.point
    kernels, others = [], []
    for name, label, heads in (
        (data.ours, flex.FLEX, None),
        (f"{data.ours}, {PER_HEAD}", FLEX_PER_HEAD, point.heads),
    ):
        schedule = BlockSchedule.random(**data.sizes, sparsity=point.sparsity, seed=0, heads=heads)
        ours = partial(data.attention, schedule=schedule.to(point.device))
        kernels.append(data.kernel(name, ours, schedule, ours=True))
        run = flex.attention(data.q, data.k, data.v, schedule=schedule)
        others.append(replace(kernels[-1], name=label, run=run, ours=False))
        module = peers.find(peers.FLASHINFER)
        if heads is None and point.device != "cpu" and not isinstance(module, str):
            run = peers.flashinfer_blocks(module, data.q, data.k, data.v, schedule)
            others.append(replace(kernels[-1], name=peers.FLASHINFER, run=run, ours=False))
    return data.measure([*kernels, data.dense, *others], loops)


def _from_scores(row: Row, loops: int | None) -> list[Result]:
    """From the scores of blocks to the output: each call chooses each head's best blocks anew."""
    data, point = Data.of(row.point), row.point
    scores = torch.rand(point.heads, *data.grid, generator=torch.Generator().manual_seed(1))
    top_k = max(1, round((1 - point.sparsity) * data.grid[1]))
    schedule = BlockSchedule.from_scores(scores, top_k=top_k, **data.sizes)
    there, kept = scores.to(point.device), schedule.to(point.device)

    def chosen(out: torch.Tensor | None) -> torch.Tensor:
        return data.attention(out, schedule=BlockSchedule.from_scores(there, top_k=top_k, **data.sizes))

    first = data.kernel(data.ours, chosen, schedule, ours=True)
    again = replace(first, name=f"{data.ours}, {KEPT}", run=partial(data.attention, schedule=kept))
    return data.measure([first, again, data.dense], loops)


def _from_blocks(row: Row, loops: int | None) -> list[Result]:
    """From a mask of blocks on the device to the launch: what making a schedule costs the device and the host."""
    data, point = Data.of(row.point), row.point
    generator = torch.Generator().manual_seed(1)
    blocks = torch.rand(point.heads, *data.grid, generator=generator) >= point.sparsity
    schedule, there = BlockSchedule.from_blocks(blocks, **data.sizes), blocks.to(point.device)

    def call(out: torch.Tensor | None = None) -> torch.Tensor:
        return data.attention(out, schedule=BlockSchedule.from_blocks(there, **data.sizes))

    results = data.measure([data.kernel(data.ours, call, schedule, ours=True), data.dense], loops)
    if results[0].status != OK:
        return results
    name = f"{data.ours}, {HOST}"
    cost = host_cost(call, data.q.device, batches=loops or 20, calls=50 if data.q.is_cuda else 2)
    if not data.q.is_cuda:
        return [*results, Result(name, True, OK, timing=cost)]
    results.append(_without_waiting(name, call, cost))
    return [*results, device_cost(f"{data.ours}, {DEVICE}", call, without=FORWARD)]


def _without_waiting(name: str, call: Callable[[], object], cost: Timing) -> Result:
    """The host's cost, if nothing in the call waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        return Result(name, True, FAILED, f"it waits for the device: {error}", timing=cost)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return Result(name, True, OK, timing=cost)
