"""The table of functions: masks and scores that users write, beside the same built in and beside FlexAttention.

TFLOP/s are over the pairs that are seen. All kernels of a row alternate in one timing loop, each checked first.
`tilewise bench variants` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, pairwise
from typing import Any

import torch

from tilewise.compiler import cache
from tilewise.plan.blocks import kept_blocks
from tilewise.plan.schedule import BlockSchedule

from .. import api
from . import flex, peers, prefill
from .judge import by_functions, row_check
from .measure import FAILED, OK, WRONG, Kernel, Result, Timing, device_cost, host_cost, measure, time_waits
from .prefill import Goal, Row
from .sweep import Sheet
from .workloads import FUNCTION, Point, backends, complete, problem_of, random_like, tensor_of

COLUMNS = ("function", "built in", "Flex", "of built in", "of Flex")
BUILT_IN, COMPILES, HOST, DEVICE = "built in", "compiles", "host", "device"
TORCH_MASK = "create_block_mask"
BUDGET = 1.2  # seconds per row, after the warm-up
WINDOW, DOCUMENTS = "preparing a window", "preparing documents"
COUNT = 16  # documents
SOFTCAP = 30.0
Function = Callable[..., Any]
BuiltIn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Any]


@dataclass(frozen=True)
class Outcome(prefill.Outcome):
    """A row with what was measured of it."""

    @property
    def rates(self) -> list[float | None]:
        """The TFLOP/s and ratios of COLUMNS; nothing for masks that are prepared: notes() has their times."""
        found = map(self.of, (self.ours, f"{self.ours}, {BUILT_IN}", flex.FLEX))
        rates = [None if result is None else result.tflops for result in found]
        return [*rates, over_built_in(self), over_flex(self)]


# ---- what bars are set on ---------------------------------------------------------------------------------------


def over_built_in(outcome: prefill.Outcome) -> float | None:
    """TFLOP/s of the function over those of the same built in."""
    ours, built_in = (outcome.of(name) for name in (outcome.ours, f"{outcome.ours}, {BUILT_IN}"))
    if ours is None or built_in is None or ours.tflops is None or built_in.tflops is None:
        return None
    return ours.tflops / built_in.tflops


def over_flex(outcome: prefill.Outcome) -> float | None:
    """The function's speed over FlexAttention's."""
    ours = outcome.of(outcome.ours)
    return None if ours is None else ours.ratio_to.get(flex.FLEX)


def microseconds(outcome: prefill.Outcome) -> float | None:
    """Tilewise's time."""
    ours = outcome.of(outcome.ours)
    return None if ours is None or ours.timing is None else ours.timing.median * 1e6


def without_compiling(outcome: prefill.Outcome) -> float | None:
    """1 where masks of a known text were prepared without a compile, 0 where not."""
    result = outcome.of(f"{outcome.ours}, {COMPILES}")
    return None if result is None else float(result.status == OK)


# ---- the functions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A mask or a score, and `built_in(q, k, v, out)`, Tilewise's option for it. pairs: that a head sees.

    same_answer: False where there is no such option, and it is plain attention.
    """

    mask: Function | None
    score: Function | None
    built_in: BuiltIn
    pairs: int
    same_answer: bool = True


def window_of(width: int) -> Function:
    """Causal, with so many keys before a query's own."""
    return lambda b, h, q, k: (q >= k) & (q - k <= width)


def documents_of(ids: torch.Tensor) -> Function:
    """Causal within documents; ids: (N,), of each token's."""
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def cuts(tokens: int, seed: int = 0) -> list[int]:
    """Where COUNT documents of random lengths start, and the end."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randperm(tokens - 1, generator=generator)[: min(COUNT, tokens) - 1] + 1
    return [0, *sorted(inner.tolist()), tokens]


def ids_of(starts: Sequence[int], device: torch.device) -> torch.Tensor:
    """The document of each token, int32 (N,)."""
    lengths = torch.tensor([stop - start for start, stop in pairwise(starts)])
    return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths).to(device)


def _option(**options: Any) -> BuiltIn:
    return lambda q, k, v, out: api.attention(q, k, v, out=out, **options)


def _causal(point: Point, device: torch.device) -> Variant:
    n = point.seq
    return Variant(lambda b, h, q, k: q >= k, None, _option(causal=True), n * (n + 1) // 2)


def _window(point: Point, device: torch.device) -> Variant:
    n, width = point.seq, min(point.window, point.seq - 1)
    pairs = n * (n + 1) // 2 - (n - width - 1) * (n - width) // 2
    return Variant(window_of(point.window), None, _option(causal=True, window=(point.window, 0)), pairs)


def _documents(point: Point, device: torch.device) -> Variant:
    starts = cuts(point.seq)
    lengths = [stop - start for start, stop in pairwise(starts)]
    at = peers.starts_of(lengths, device)

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Any:
        return api.attention_varlen(q[0], k[0], v[0], at, at, causal=True, out=None if out is None else out[0])

    return Variant(documents_of(ids_of(starts, device)), None, packed, sum(n * (n + 1) // 2 for n in lengths))


def _alibi(point: Point, device: torch.device) -> Variant:
    slopes = 2.0 ** (-8.0 * torch.arange(1, point.heads + 1, device=device) / point.heads)
    built_in = _option(alibi_slopes=slopes)
    return Variant(None, lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), built_in, point.seq**2)


def _softcap(point: Point, device: torch.device) -> Variant:
    built_in = _option(softcap=SOFTCAP)
    return Variant(None, lambda s, b, h, q, k: SOFTCAP * torch.tanh(s / SOFTCAP), built_in, point.seq**2)


def _bias_table(point: Point, device: torch.device) -> Variant:
    last = point.seq - 1
    table = torch.randn(point.heads, 2 * last + 1, generator=torch.Generator().manual_seed(2)).to(device)
    return Variant(None, lambda s, b, h, q, k: s + table[h, q - k + last], _option(), point.seq**2, same_answer=False)


MAKERS = {
    "causal": _causal,
    "window": _window,
    "documents": _documents,
    "ALiBi": _alibi,
    "softcap": _softcap,
    "bias table": _bias_table,
}

# ---- the rows ---------------------------------------------------------------------------------------------------

# What each is measured against, the share of it to reach, and times the speed of FlexAttention, if a bar is set.
BARS = {
    "causal": ("causal=True", 0.97, None),
    "window": ("window=", 0.90, None),
    "documents": ("varlen", 0.90, None),
    "ALiBi": ("alibi_slopes=", 0.95, 1.6),
    "softcap": ("softcap=", 0.97, 1.6),
    "bias table": ("plain", 0.88, 1.6),
}


def rows(device: str) -> list[Row]:
    """The whole table; on a CPU smaller problems, and bars on nothing."""
    cuda = torch.device(device).type == "cuda"
    sizes: dict[str, Any] = {"seq": 16384, "heads": 16, "kv_heads": 16, "dtype": "bfloat16"}
    if not cuda:
        sizes = {"seq": 2048, "hdim": 64}
    base, width = Point(device=device, **sizes), 1024 if cuda else 256
    chosen = []
    for name, (what, bar, flex_bar) in BARS.items():
        point = replace(
            base, workload=FUNCTION + name, causal=name == "causal", window=width if name == "window" else 0
        )
        goals = [Goal(over_built_in, bar, what=f"of {what}")]
        goals += [] if flex_bar is None else [Goal(over_flex, flex_bar, what="of Flex")]
        chosen.append(Row(f"{name}, N {point.seq}", point, tuple(goals) if cuda else (), measure=_time))
    goals = [
        Goal(microseconds, 100, " µs", at_most=True),
        Goal(without_compiling, 1, "", "without compiling"),
    ]
    for name in (WINDOW, DOCUMENTS):
        point = replace(base, workload=FUNCTION + name, seq=32768 if cuda else 2048, heads=8, kv_heads=8)
        chosen.append(Row(f"{name}, H 8, N {point.seq}", point, tuple(goals) if cuda else (), measure=_prepare))
    return [replace(row, point=complete(row.point)) for row in chosen]


def run(chosen: Sequence[Row], sheet: Sheet | None = None, loops: int | None = None) -> Iterator[prefill.Outcome]:
    """Measure the rows one after the other, those that the sheet does not have; it gets each as soon as it is done."""
    return prefill.run(chosen, sheet, loops, Outcome)


def notes(outcomes: Sequence[prefill.Outcome]) -> list[str]:
    """What the table's numbers do not say: how FlexAttention ran, and how long masks take to prepare."""
    lines = []
    if outcomes:
        device = torch.device(outcomes[0].row.point.device)
        lines.append(f"{flex.FLEX}: torch {torch.__version__}, {flex.how(device)}")
    for outcome in outcomes:
        if outcome.row.measure is _prepare:
            timed = [(r.kernel, r.timing.median) for r in outcome.results if r.timing is not None]
            times = ", ".join(f"{name} {_time_text(seconds)}" for name, seconds in timed)
            lines.append(f"{outcome.row.name}, until it is done: {times}")
    return lines


def _time_text(seconds: float) -> str:
    unit, size = next((u for u in (("µs", 1e-6), ("ms", 1e-3)) if seconds < 999 * u[1]), ("s", 1.0))
    return f"{seconds / size:.3g} {unit}"


def _time(row: Row, loops: int | None) -> list[Result]:
    """The function, the same built in, and FlexAttention."""
    point, device = row.point, torch.device(row.point.device)
    generator, n = torch.Generator(device).manual_seed(0), point.seq
    q, k, v = (random_like(point, generator, 1, n, point.heads, point.hdim) for _ in range(3))
    variant = MAKERS[point.workload.removeprefix(FUNCTION)](point, device)
    functions: dict[str, Any] = {"mask": variant.mask, "score": variant.score}
    flops, nbytes = 4 * point.hdim * point.heads * variant.pairs, 4 * q.numel() * q.element_size()
    ours = next(iter(backends(point)))

    def function(out: torch.Tensor | None) -> torch.Tensor:
        return tensor_of(api.attention(q, k, v, out=out, **functions))

    def built_in(out: torch.Tensor | None) -> torch.Tensor:
        return tensor_of(variant.built_in(q, k, v, out))

    kernels = [
        Kernel(ours, function, True, flops, nbytes),
        Kernel(f"{ours}, {BUILT_IN}", built_in, True, flops, nbytes, same_answer=variant.same_answer),
        Kernel(flex.FLEX, flex.attention(q, k, v, **functions), False, flops, nbytes),
    ]
    check = row_check(q, k, v, [(n, n)], more=by_functions(**functions))
    return measure(problem_of(point, kernels, check, tuple(q.shape)), loops=loops, budget=BUDGET)


# ---- masks before a call ----------------------------------------------------------------------------------------


def _prepare(row: Row, loops: int | None) -> list[Result]:
    """What a mask costs before it can be used: ours with another value in every call, torch's with the same."""
    point, device = row.point, torch.device(row.point.device)
    n, heads, ours = point.seq, point.heads, next(iter(backends(point)))
    if point.workload == FUNCTION + WINDOW:
        values = count(max(1, n // 32))
        new: Callable[[], Function] = lambda: window_of(next(values))  # noqa: E731 - one of two
        compiled = flex.how(device) == flex.COMPILED
    else:
        pool = cycle([documents_of(ids_of(cuts(n, seed), device)) for seed in range(8)])
        new, compiled = lambda: next(pool), False  # compiling takes it seconds, and shows nothing new
    mask = new()
    results = [_sound(ours, api.schedule_of(mask, 1, heads, n, n, device=device), mask)]
    if results[0].status != OK:
        return results
    calls: dict[str, Callable[[], object]] = {ours: lambda: api.schedule_of(new(), 1, heads, n, n, device=device)}
    for name, make in _torch_masks(compiled).items():

        def call(make: Function = make) -> object:
            return make(mask, 1, heads, n, n, device=device)

        try:
            call()
        except Exception as error:  # whatever a peer raises is its result: ours still gets measured
            results.append(Result(name, False, FAILED, " ".join(f"{type(error).__name__}: {error}".split())))
        else:
            results.append(Result(name, False, OK))
            calls[name] = call
    calls[ours]()
    before = cache.built()
    # Not in turns: after a peer that fills the card's memory with masks, the allocator is all that a call would time.
    prepare = calls.pop(ours)
    timings = time_waits({ours: prepare}, device=device, loops=loops)
    made = cache.built() - before
    timings |= time_waits(calls, device=device, loops=loops)
    status, reason = (OK, "") if made == 0 else (FAILED, f"{made} kernels were compiled for masks of a known text")
    results = [replace(r, timing=timings.get(r.kernel), ratio_to=_ratios(ours, r, timings)) for r in results]
    results.append(Result(f"{ours}, {COMPILES}", True, status, reason))
    if device.type == "cuda":
        results.append(Result(f"{ours}, {HOST}", True, OK, timing=host_cost(prepare, device)))
        results.append(device_cost(f"{ours}, {DEVICE}", prepare))
    return results


def _torch_masks(compiled: bool) -> dict[str, Function]:
    from torch.nn.attention.flex_attention import create_block_mask

    eager = {f"{TORCH_MASK}, {flex.EAGER}": create_block_mask}
    return {f"{TORCH_MASK}, {flex.COMPILED}": flex.compiled(create_block_mask), **eager} if compiled else eager


def _ratios(ours: str, result: Result, timings: dict[str, Timing]) -> dict[str, float]:
    if result.kernel != ours:
        return {}
    return {name: timing.median / timings[ours].median for name, timing in timings.items() if name != ours}


def _sound(name: str, schedule: BlockSchedule, mask: Function) -> Result:
    """Are all blocks kept of which something is seen, and those called whole seen whole? Each pair is looked at."""
    here = schedule.cpu()
    kept = kept_blocks(here)[0]
    assert here.whole is not None
    sizes = (here.seqlen_q, here.seqlen_k, here.block_q, here.block_k)
    names: dict[str, Any] = dict(zip(("seqlen_q", "seqlen_k", "block_q", "block_k"), sizes, strict=True))
    whole = kept_blocks(BlockSchedule.from_bits(here.whole, **names))[0]
    device = schedule.device
    keys = torch.arange(here.seqlen_k, device=device)
    padding = -here.seqlen_k % here.block_k
    for block in range(here.num_q_blocks):
        rows = torch.arange(block * here.block_q, min(here.seqlen_q, (block + 1) * here.block_q), device=device)
        seen = mask(0, 0, rows[:, None], keys)
        some, hidden = (
            torch.nn.functional.pad(x.any(0), (0, padding)).view(here.num_k_blocks, -1).any(1).cpu()
            for x in (seen, ~seen)
        )
        if (some & ~kept[:, block]).any() or (hidden & whole[:, block]).any():
            return Result(name, True, WRONG, f"of the keys that queries {block * here.block_q} and after it see")
    return Result(name, True, OK)
