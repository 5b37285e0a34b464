"""The training table: backward passes beside cuDNN and FlashAttention, and steps over trees of tokens beside the same
sequences unshared and beside FlexAttention. On a CPU beside torch's own.

All kernels of a row alternate in one timing loop, each with its gradients checked first. `tilewise bench train` shows
it. TFLOP/s are over the pairs that are seen: five products per pair in a backward pass, seven in a step over a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from tilewise import arch
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu import backward
from tilewise.gpu.abi import score_rule
from tilewise.gpu.prefill import Forward, tma_can
from tilewise.scores import Scores

from . import flex, peers, prefill, train_problems, warm
from .measure import Result, measure
from .prefill import Goal, Row
from .sweep import Sheet
from .train_problems import BESIDE, CUDNN_ROWS, Problem, answers
from .workloads import DTYPES, TRAIN, Point, complete, problem_of

COLUMNS = ("ours", "beside", "cuDNN", "torch", "FA3", "Flex")
TOKENS, WIDTH = 16384, 2048  # of the dense rows: batch × N and heads × D
LENGTHS = (512, 2048, 8192, 16384)
BUDGET = 1.2  # seconds per row, after the warm-up
# At least so many times cuDNN at each of LENGTHS, by head dimension: without and with the causal mask.
BARS: dict[int, tuple[tuple[float | None, ...], ...]] = {
    64: ((1.15, 1.12, 1.13, 1.13), (1.20, 1.20, 1.25, 1.25)),
    128: ((1.12, 1.14, 1.18, 1.18), (1.15, 1.18, 1.24, 1.24)),
    256: ((None, 1.0, 1.0, 1.0), (None, 1.0, 1.05, 1.05)),
}
OLDER = "as sm_80"
DROPOUT = 0.1


@dataclass(frozen=True)
class Outcome(prefill.Outcome):
    """A row with what was measured of it."""

    @property
    def rates(self) -> list[float | None]:
        """The TFLOP/s of COLUMNS; of cuDNN's two layouts the faster, of torch's what is measured of FA2 and SDPA."""
        names = ((self.ours,), (f"{self.ours}, {BESIDE}",), CUDNN, (peers.FA2, peers.SDPA), (peers.FA3,), (flex.FLEX,))
        return [max((r for r in map(self._rate, some) if r is not None), default=None) for some in names]

    def _rate(self, kernel: str) -> float | None:
        result = self.of(kernel)
        return None if result is None else result.tflops


CUDNN = (peers.CUDNN, CUDNN_ROWS)

# ---- what bars are set on ---------------------------------------------------------------------------------------


def over_cudnn(outcome: prefill.Outcome) -> float | None:
    """Tilewise's speed over cuDNN's in the layout that suits it better."""
    ours = outcome.of(outcome.ours)
    if ours is None:
        return None
    return min((ours.ratio_to[name] for name in CUDNN if name in ours.ratio_to), default=None)


def over_peer(outcome: prefill.Outcome, peer: str) -> float | None:
    """Tilewise's speed over one peer's."""
    ours = outcome.of(outcome.ours)
    return None if ours is None else ours.ratio_to.get(peer)


def speed_over(outcome: prefill.Outcome, label: str = BESIDE) -> float | None:
    """How often the time of Tilewise's other kernel holds that of the first."""
    ours, other = outcome.of(outcome.ours), outcome.of(f"{outcome.ours}, {label}")
    if ours is None or other is None or ours.timing is None or other.timing is None:
        return None
    return other.timing.median / ours.timing.median


def rate_over(outcome: prefill.Outcome, label: str = BESIDE) -> float | None:
    """Tilewise's TFLOP/s over those of its other kernel."""
    ours, other = outcome.of(outcome.ours), outcome.of(f"{outcome.ours}, {label}")
    if ours is None or other is None or ours.tflops is None or other.tflops is None:
        return None
    return ours.tflops / other.tflops


# ---- the rows ---------------------------------------------------------------------------------------------------


def rows(device: str) -> list[Row]:
    """The whole table; a CPU has rows of its own."""
    chosen = list(_card_rows(device) if torch.device(device).type == "cuda" else _cpu_rows(device))
    return [replace(row, point=complete(row.point)) for row in chosen]


def _row(name: str, point: Point, make: Callable[[Point], Problem], *goals: Goal) -> Row:
    """The name tells rows with the same sizes apart, in a CSV too."""
    return Row(name, replace(point, workload=TRAIN + name), goals, measure=partial(_measure, make=make))


def _measure(row: Row, loops: int | None, make: Callable[[Point], Problem]) -> list[Result]:
    made = make(row.point)
    problem = problem_of(row.point, made.kernels, made.check, made.shape)
    return measure(problem, loops=loops, budget=BUDGET)


def _card_rows(device: str) -> Iterator[Row]:
    base = Point(dtype="bfloat16", device=device)
    for hdim, bars in BARS.items():
        heads = WIDTH // hdim
        for causal, of_kind in zip((False, True), bars, strict=True):
            for n, bar in zip(LENGTHS, of_kind, strict=True):
                if bar is not None:
                    point = replace(base, batch=TOKENS // n, seq=n, heads=heads, kv_heads=heads, hdim=hdim)
                    name = f"D {hdim}, N {n}, {'causal' if causal else 'full'}"
                    yield _row(name, replace(point, causal=causal), train_problems.dense, Goal(over_cudnn, bar))
    long = replace(base, seq=TOKENS, heads=16, kv_heads=16, causal=True)
    grouped = replace(long, heads=64, kv_heads=8)
    yield _row("64/8 heads, N 16384, causal", grouped, train_problems.dense, Goal(over_cudnn, 1.15))
    wide = replace(long, seq=8192, heads=8, kv_heads=8, batch=2, hdim=192)
    make = partial(train_problems.two_head_dims, value_dim=128)
    yield _row("D 192/128, N 8192, causal", wide, make, Goal(over_cudnn, 1.1))
    for causal in (False, True):
        packed = replace(long, batch=16, lengths="100-16384", causal=causal)
        name = f"varlen 100-16384, {'causal' if causal else 'full'}"
        yield _row(name, packed, train_problems.ragged, Goal(rate_over, 0.93, what="of dense"))
    make = partial(train_problems.beside_itself, ours={"deterministic": True}, beside={})
    yield _row("deterministic, N 16384, causal", long, make, Goal(speed_over, 0.85, what="of not"))
    make = partial(train_problems.beside_itself, ours={}, beside={"window": None})
    goal = Goal(speed_over, 4, what="causal's speed")
    yield _row("window 1024, N 16384, causal", replace(long, window=1024), make, goal)
    for hdim in (64, 128):
        point = replace(long, heads=WIDTH // hdim, kv_heads=WIDTH // hdim, hdim=hdim)
        make = partial(train_problems.with_dropout, p=DROPOUT)
        goal = Goal(partial(over_peer, peer=peers.FA2), 1.0, what="FA2")
        yield _row(f"dropout {DROPOUT}, D {hdim}, N {TOKENS}, causal", point, make, goal)
    blocks = replace(long, causal=False, sparsity=0.9, block=64)
    goal = Goal(speed_over, 6, what="dense's speed")
    yield _row("64 × 64 blocks, 10% kept, N 16384", blocks, train_problems.in_blocks, goal)
    for hdim, causal in ((64, False), (64, True), (128, False), (128, True)):
        point = replace(long, seq=8192, batch=2, heads=WIDTH // hdim, kv_heads=WIDTH // hdim, hdim=hdim, causal=causal)
        name = f"{OLDER}, D {hdim}, N 8192, {'causal' if causal else 'full'}"
        goal = Goal(partial(over_peer, peer=peers.FA2), 1.05, what="FA2")
        yield _row(name, point, train_problems.as_older_card, goal)
    yield from _tree_rows(replace(base, heads=32, kv_heads=8))


def _tree_rows(base: Point) -> Iterator[Row]:
    unshared = Goal(speed_over, 5, what="unshared")
    by_flex = Goal(partial(over_peer, peer=flex.FLEX), 2.5, what="Flex")
    for prompt, count, tokens in ((4096, 16, 512), (8192, 8, 1024)):
        point = replace(base, batch=count, seq=tokens, prefix=prompt)
        make = partial(_over_tree, sizes=(prompt, count, tokens))
        yield _row(f"tree, {count} × {tokens} over {prompt}", point, make, unshared, by_flex)
    point = replace(base, batch=16, seq=512, prefix=4096)
    make = partial(_over_tree, sizes=(4096, 4, 512, 4, 1024))
    of_dense = Goal(partial(rate_over, label="dense"), 0.85, what="of dense's rate")
    yield _row("tree of three levels, 4 × 4 × 512", point, make, of_dense, by_flex)


def _over_tree(point: Point, sizes: tuple[int, ...]) -> Problem:
    return train_problems.tree(point, answers(*sizes))


def _cpu_rows(device: str) -> Iterator[Row]:
    base = Point(seq=2048, heads=8, kv_heads=8, hdim=64, device=device)
    by_torch = partial(over_peer, peer=peers.SDPA)
    for dtype in ("float32", "bfloat16"):
        for causal in (False, True):
            name = f"{dtype}, N {base.seq}, {'causal' if causal else 'full'}"
            point = replace(base, dtype=dtype, causal=causal)
            yield _row(name, point, train_problems.dense, Goal(by_torch, 0.9, what="torch"))
        point = replace(base, batch=16, seq=128, prefix=1024, kv_heads=2, dtype=dtype)
        make = partial(_over_tree, sizes=(1024, 16, 128))
        yield _row(f"{dtype}, tree, 16 × 128 over 1024", point, make, Goal(by_torch, 3, what="torch"))
    if find_spec("transformers") is not None:
        point = replace(base, batch=8, seq=24, prefix=256, kv_heads=2, hdim=32)
        goal = Goal(speed_over, 2, what="unshared")
        yield _row("step of a small Llama, 8 × 24 over 256", point, train_problems.model_step, goal)


def run(chosen: Sequence[Row], sheet: Sheet | None = None, loops: int | None = None) -> Iterator[prefill.Outcome]:
    """Measure the rows one after the other, those that the sheet does not have; it gets each as soon as it is done."""
    todo = [row for row in chosen if sheet is None or not sheet.has(row.point)]
    if todo and torch.device(todo[0].point.device).type == "cuda":
        target = arch.arch_of_device(torch.device(todo[0].point.device))
        warm.compile_all((spec, target) for spec in specs(todo))  # on all cores, not one by one at the first calls
    return prefill.run(todo, sheet, loops, Outcome)


def specs(chosen: Sequence[Row]) -> list[KernelSpec]:
    """The kernels of the dense rows and of those with dropout, and all backward kernels that leave scores as they are;
    a tree's forward, which has a function in it, is compiled at its first call."""
    found: list[KernelSpec] = []
    plain, value = score_rule(Scores())
    by_card: dict[str, list[tuple[Point, float]]] = {}
    dropping = any(row.name.startswith("dropout") for row in chosen)
    for row in chosen:
        older = row.name.startswith(OLDER)
        points = by_card.setdefault("sm_80" if older else arch.card_of(torch.device(row.point.device)), [])
        if older or _make(row) is train_problems.dense:
            points.append((row.point, 0.0))
        if row.name.startswith("dropout"):
            points += [(row.point, 0.0), (row.point, DROPOUT)]
    for card, points in by_card.items():
        for spec in backward.specs(card, every=True):
            constants = dict(spec.constants)
            wanted = dropping or not constants.get("kDropout", False)
            if wanted and constants.get("Element") == "bf16" and constants.get(plain, value) == value:
                found.append(spec)
        with arch.as_card(card):
            found += [_forward(*point) for point in points]
    return list(dict.fromkeys(found))


def _make(row: Row) -> Any:
    return row.measure.keywords["make"] if isinstance(row.measure, partial) else None


def _forward(point: Point, dropout: float = 0.0) -> KernelSpec:
    """Found over tensors without contents."""
    one = torch.empty(1, dtype=DTYPES[point.dtype])
    q, k = (one.expand(point.batch, point.seq, heads, point.hdim) for heads in (point.heads, point.kv_heads))
    scores = Scores((None, 0 if point.causal else None), dropout=dropout)
    return Forward(q, k, k, q, scores, tma=tma_can(q)).spec


def notes(outcomes: Sequence[prefill.Outcome]) -> list[str]:
    """What the table's numbers do not say."""
    lines = []
    for outcome in outcomes:
        timed = [(r.kernel, r.timing.median * 1e3) for r in outcome.results if r.timing is not None]
        if any(BESIDE in kernel for kernel, _ in timed):
            lines.append(f"{outcome.row.name}: {', '.join(f'{name} {ms:.3g} ms' for name, ms in timed)}")
    if outcomes and isinstance(missing := peers.find(peers.FA3), str):
        lines.append(f"{peers.FA3}: {missing}")
    return lines
