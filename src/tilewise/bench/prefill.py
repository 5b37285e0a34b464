"""The prefill table: Tilewise beside cuDNN and FlashAttention-3 on one GPU, row by row with what each row must reach.

All kernels that are compared alternate in one timing loop: the peers, and Tilewise's own rate on another problem where
a bar is set against that. `tilewise bench prefill` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .. import api
from . import peers
from .measure import OK, WRONG, Kernel, Result, host_cost, measure
from .records import records
from .sweep import Sheet, attempt
from .workloads import DTYPES, FLOAT8, VALUES, Point, backends, build, complete

PEERS = (peers.CUDNN, peers.FA3)
COLUMNS = ("ours", "exact", "cuDNN", "FA3")
TOKENS, WIDTH = 16384, 2048  # of the dense rows: batch × N and heads × D
LENGTHS = (512, 2048, 8192, 16384)
TILE = 128  # rows and keys of the tiles by which a window's work is counted
BUDGET = 1.2  # seconds per row, after the warm-up: the whole table is measured on a rented card
# At least so many times the better peer at each of LENGTHS, by head dimension: without and with the causal mask.
DENSE_BARS = {
    64: ((1.10, 1.03, 1.07, 1.07), (1.10, 1.03, 1.07, 1.07)),
    128: ((1.10, 1.03, 1.10, 1.10), (1.10, 1.03, 1.05, 1.05)),
    256: ((1.10, 1.00, 1.00, 1.00), (1.10, 1.00, 1.00, 1.00)),
}


@dataclass(frozen=True)
class Goal:
    """A bar: what `measure` makes of a row's results must be at least `limit`, or at most. `what` says what of."""

    measure: Callable[[Outcome], float | None]
    limit: float
    unit: str = "×"
    what: str = ""
    at_most: bool = False

    @property
    def text(self) -> str:
        """The bar as it is shown."""
        return f"{'≤' if self.at_most else '≥'} {self.limit:g}{self.unit}"

    def value_text(self, outcome: Outcome) -> str:
        """What was reached: three digits, or as many as it takes to stand on the right side of the bar."""
        value = self.measure(outcome)
        if value is None:
            return ""
        texts = (f"{value:.{digits}g}" for digits in range(3, 18))
        text = next(text for text in texts if self._holds(float(text)) == self._holds(value))
        return f"{text}{self.unit} {self.what}".rstrip()

    def met_by(self, outcome: Outcome) -> bool | None:
        """Is the bar met? None where a peer that it is set against is not here. A kernel of ours that fails misses."""
        value = self.measure(outcome)
        if value is None:
            return False if outcome.broken else None
        return self._holds(value)

    def _holds(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit


@dataclass(frozen=True)
class Row:
    """A row of the table: a problem and its bars. On the problem `beside` Tilewise is timed in the same loop.

    `measure` is for a row that is not timed as the others are.
    """

    name: str
    point: Point
    goals: tuple[Goal, ...]
    beside: tuple[str, Point] | None = None
    measure: Callable[[Row, int | None], list[Result]] | None = None


@dataclass(frozen=True)
class Outcome:
    """A row with what was measured of it."""

    row: Row
    results: list[Result]

    @property
    def ours(self) -> str:
        """The name of Tilewise's kernel as people call it by default."""
        return next(iter(backends(self.row.point)))

    @property
    def exact(self) -> str:
        """The name of the same with the standard softmax."""
        return f"{self.ours}, exact"

    @property
    def beside(self) -> Result | None:
        """Tilewise on the row's other problem."""
        return self.of(f"{self.ours}, {self.row.beside[0]}") if self.row.beside else None

    @property
    def broken(self) -> bool:
        """Is one of Tilewise's kernels wrong, or did it fail?"""
        return any(result.ours and result.status != OK for result in self.results)

    @property
    def rates(self) -> list[float | None]:
        """The TFLOP/s of COLUMNS, over the work that is useful; a ragged batch is padded for cuDNN."""
        names = (self.ours, self.exact, *PEERS)
        found = [self.of(name) or (self.of(peers.CUDNN_PADDED) if name == peers.CUDNN else None) for name in names]
        return [None if result is None else result.tflops for result in found]

    def of(self, kernel: str) -> Result | None:
        """The result of a kernel by its name."""
        return next((result for result in self.results if result.kernel == kernel), None)


def rows(device: str) -> list[Row]:
    """The whole table. The host's cost stands first: once a process has captured a graph, launches cost it more."""
    dense = Point(dtype="bfloat16", device=device)
    chosen = [_host_row(dense)]
    for hdim, bars in DENSE_BARS.items():
        heads = WIDTH // hdim
        for causal in (False, True):
            for n, bar in zip(LENGTHS, bars[causal], strict=True):
                point = replace(dense, batch=TOKENS // n, seq=n, heads=heads, kv_heads=heads, hdim=hdim, causal=causal)
                name = f"D {hdim}, N {n}, {'causal' if causal else 'full'}"
                chosen.append(Row(name, point, (Goal(over_best, bar), Goal(exact_over_best, 0.97, what="exact"))))
    for n in (4096, 16384, 32768):
        point = replace(dense, seq=n, heads=64, kv_heads=8, causal=True)
        chosen.append(Row(f"64/8 heads, N {n}, causal", point, (Goal(over_best, 1.04),)))
    chosen += _wide_rows(dense)
    long = replace(dense, seq=TOKENS, heads=16, kv_heads=16)
    for causal in (False, True):
        point = replace(long, workload="varlen", batch=16, lengths="100-16384", causal=causal)
        goals = (Goal(over_padded, 1.15, what="padded"), Goal(over_beside, 0.9, what="of dense"))
        name = f"varlen {point.lengths}, {'causal' if causal else 'full'}"
        chosen.append(Row(name, point, goals, ("dense", replace(long, causal=causal))))
    whole = replace(long, causal=True)
    goal = Goal(over_tiles, 1.3, what="of tiles", at_most=True)
    chosen.append(Row("window 1024, N 16384, causal", replace(whole, window=1024), (goal,), ("causal", whole)))
    fp8 = replace(long, dtype=FLOAT8)
    chosen.append(Row("FP8, D 128, N 16384, full", fp8, (Goal(rate, 900, unit=" TFLOP/s"),)))
    chosen.append(Row("FP8, D 128, N 16384, causal", replace(fp8, causal=True), ()))
    return [replace(row, point=complete(row.point)) for row in chosen]


def _wide_rows(dense: Point) -> list[Row]:
    """V of fewer columns than Q and K, as DeepSeek's prefill has it, and heads of 512, which no peer has."""
    chosen = []
    for causal in (False, True):
        how = "causal" if causal else "full"
        for n in (2048, 8192):
            point = replace(dense, batch=TOKENS // n, seq=n, heads=16, kv_heads=16, hdim=192, causal=causal)
            goals = (Goal(over_best, 1.05), Goal(exact_over_best, 0.97, what="exact"))
            chosen.append(Row(f"D 192 and 128, N {n}, {how}", replace(point, workload=f"{VALUES}128"), goals))
        point = replace(dense, batch=TOKENS // 8192, seq=8192, heads=8, kv_heads=8, hdim=512, causal=causal)
        chosen.append(Row(f"D 512, N 8192, {how}", point, (Goal(rate, 450, unit=" TFLOP/s"),)))
    return chosen


def _host_row(dense: Point) -> Row:
    point = replace(dense, seq=128, heads=16, kv_heads=16)
    goals = (
        Goal(host_microseconds, 15, unit=" µs", at_most=True),
        Goal(graph_replays, 1, unit="", what="graph replay"),
    )
    return Row("host cost, CUDA graph", point, goals, measure=_host)


def run(
    chosen: Sequence[Row],
    sheet: Sheet | None = None,
    loops: int | None = None,
    outcome_of: Callable[[Row, list[Result]], Outcome] = Outcome,
) -> Iterator[Outcome]:
    """Measure the rows one after the other, those that the sheet does not have; it gets each as soon as it is done."""
    for row in chosen:
        if sheet is not None and sheet.has(row.point):
            continue
        outcome = outcome_of(row, attempt(row.measure or _time, row, loops))
        if sheet is not None:
            sheet.append(records(row.point, outcome.results))
        yield outcome


def _time(row: Row, loops: int | None) -> list[Result]:
    """Time Tilewise, the two peers and the problem beside, alternated. Other peers would only cost time on the card."""
    problem = build(row.point)
    kernels = [k for k in problem.kernels if k.ours or k.name in (*PEERS, peers.CUDNN_PADDED)]
    if row.beside is not None:
        label, point = row.beside
        kernels.append(_beside(f"{kernels[0].name}, {label}", build(point).kernels[0]))
    return measure(replace(problem, kernels=kernels), loops=loops, budget=BUDGET)


def _beside(name: str, kernel: Kernel) -> Kernel:
    """A kernel of another problem as one of this: it answers something else, into memory of its own."""
    return replace(kernel, name=name, run=lambda _: kernel.run(None), same_answer=False)


# ---- what bars are set on ---------------------------------------------------------------------------------------


def over_best(outcome: Outcome) -> float | None:
    """Tilewise's speed over the better of the two peers'; one that fails here is not the better one."""
    return _over_best(outcome, outcome.ours)


def exact_over_best(outcome: Outcome) -> float | None:
    """The same with the standard softmax."""
    return _over_best(outcome, outcome.exact)


def _over_best(outcome: Outcome, kernel: str) -> float | None:
    ours = outcome.of(kernel)
    if ours is None or any(outcome.of(name) is None for name in PEERS):
        return None  # against one of them alone the bar would be another, lower one
    return min((ours.ratio_to[name] for name in PEERS if name in ours.ratio_to), default=None)


def rate(outcome: Outcome) -> float | None:
    """Tilewise's TFLOP/s."""
    ours = outcome.of(outcome.ours)
    return None if ours is None else ours.tflops


def over_padded(outcome: Outcome) -> float | None:
    """Tilewise's speed over that of the whole padded batch."""
    ours = outcome.of(outcome.ours)
    return None if ours is None else ours.ratio_to.get(peers.CUDNN_PADDED)


def over_beside(outcome: Outcome) -> float | None:
    """Tilewise's useful FLOP/s over those on the problem beside."""
    ours, beside = outcome.of(outcome.ours), outcome.beside
    if ours is None or beside is None or ours.tflops is None or beside.tflops is None:
        return None
    return ours.tflops / beside.tflops


def over_tiles(outcome: Outcome) -> float | None:
    """The window's time over the share of the causal time that its share of tiles should take."""
    ours, beside = outcome.of(outcome.ours), outcome.beside
    if ours is None or beside is None or ours.timing is None or beside.timing is None:
        return None
    point = outcome.row.point
    return ours.timing.median / (beside.timing.median * tile_share(point.seq, point.window))


def tile_share(n: int, window: int) -> float:
    """Of the TILE × TILE tiles on and below the diagonal of n tokens, the share that hold keys inside the window."""
    tiles = -(-n // TILE)
    visited = sum(i - max(0, i * TILE - window) // TILE + 1 for i in range(tiles))
    return visited / (tiles * (tiles + 1) // 2)


# ---- the host's side --------------------------------------------------------------------------------------------

HOST, GRAPH = "host", "graph"


def host_microseconds(outcome: Outcome) -> float | None:
    """The host's time for a call."""
    result = outcome.of(f"{outcome.ours}, {HOST}")
    return None if result is None or result.timing is None else result.timing.median * 1e6


def graph_replays(outcome: Outcome) -> float | None:
    """1 where a captured call replays on new data as a call computes it, 0 where not."""
    result = outcome.of(f"{outcome.ours}, {GRAPH}")
    return None if result is None else float(result.status == OK)


def _host(row: Row, loops: int | None) -> list[Result]:
    point, device = row.point, torch.device(row.point.device)
    shape, dtype = (point.batch, point.seq, point.heads, point.hdim), DTYPES[point.dtype]
    q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    name = next(iter(backends(point)))
    cost = host_cost(lambda: api.attention(q, k, v), device, batches=loops or 20)
    results = [Result(f"{name}, {HOST}", True, OK, timing=cost)]
    if device.type == "cuda":
        results += attempt(_replay, f"{name}, {GRAPH}", q, k, v)
    return results


def _replay(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Result]:
    """Capture a call, change its input, and compare a replay with a call. The kernel is loaded: host_cost called it."""
    out, expected = torch.full_like(q, torch.nan), torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        api.attention(q, k, v, out=out)
    q.normal_()
    graph.replay()
    api.attention(q, k, v, out=expected)
    if torch.equal(out, expected):
        return [Result(name, True, OK)]
    return [Result(name, True, WRONG, "a replay differs from a call on the same data")]
