"""The one measuring loop: every number Tilewise prints about speed comes from here.

`measure` takes a `Problem` (see `workloads`), checks each kernel's answer first, and only then times the kernels that
passed. Kernels alternate, A B A B, so a machine that slows down or speeds up meanwhile favours none of them. A GPU is
warmed up first: cold, it runs at clocks that its power limit does not allow for long, which flatters the first kernel.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch

OK, WRONG, FAILED = "ok", "WRONG", "failed"
HEAT = 1.0  # seconds of work after which a GPU's clocks have settled at its power limit
FLUSH_BYTES = 256 << 20  # twice the largest L2 there is
BURST, COLD = 8, 2  # replays of a graph per turn, and how many of them, the first, do not count


@dataclass(frozen=True)
class Timing:
    """Seconds a call takes: the median, the 20th and 80th percentile and the fastest of `loops` calls."""

    median: float
    p20: float
    p80: float
    fastest: float
    loops: int


@dataclass(frozen=True)
class Ceiling:
    """What a device can do at best: `flops` per second in a large matrix product, `bandwidth` bytes per second."""

    flops: float
    bandwidth: float

    def floor(self, flops: int, nbytes: int) -> float:
        """The least seconds this much work can take there: whichever of arithmetic and memory takes longer."""
        return max(flops / self.flops, nbytes / self.bandwidth)


@dataclass(frozen=True)
class Kernel:
    """Something that can be timed on a problem. `run(out)` returns o, (B, N, H, D) or packed, in `out` unless None.

    `flops` and `bytes` are what this kernel cannot avoid, given the layout it is handed. `same_answer` is False for a
    peer that computes something else for comparison, such as dense attention beside a block-sparse problem. `check`
    judges a kernel whose data is not the problem's.
    """

    name: str
    run: Callable[[torch.Tensor | None], torch.Tensor]
    ours: bool
    flops: int
    bytes: int
    same_answer: bool = True
    check: Callable[[torch.Tensor], Check] | None = None


@dataclass(frozen=True)
class Check:
    """How far an answer is from float64 (`error`), and how far PyTorch's own math in the same dtype is (`baseline`).

    allowed: the largest error that passes, None if it came to no comparison.
    """

    ok: bool
    error: float
    baseline: float
    reason: str = ""
    allowed: float | None = None


@dataclass(frozen=True)
class Problem:
    """One problem with its data: the kernels that serve it and the oracle that judges their answers."""

    title: str
    device: torch.device
    dtype: torch.dtype
    kernels: list[Kernel]
    check: Callable[[torch.Tensor], Check]
    output_shape: tuple[int, ...]
    token_heads: int
    ceiling: Ceiling
    absent: str = ""  # which peers were looked for and why they are not here, one line


@dataclass(frozen=True)
class Result:
    """What was found out about one kernel on one problem."""

    kernel: str
    ours: bool
    status: str
    reason: str = ""
    error: float | None = None
    baseline: float | None = None
    timing: Timing | None = None
    tflops: float | None = None
    gbps: float | None = None
    us_per_token_head: float | None = None
    pct_of_ceiling: float | None = None
    ratio_to_best_peer: float | None = None
    # The ratio to each peer by name: a bar may be set against one that is not the best.
    ratio_to: Mapping[str, float] = field(default_factory=dict)
    allowed: float | None = None  # the largest error that passes


def time_calls(
    calls: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    loops: int | None = None,
    budget: float = 4.0,
    heat: float = HEAT,
) -> dict[str, Timing]:
    """Time each call `loops` times, alternated, or as often as `budget` seconds allow (5 to 200 times).

    On a GPU: CUDA events, after `heat` seconds of warm-up by the calls, and the L2 cache is flushed before every call,
    since a kernel that finds its input there looks faster than it will be in a model. On a CPU the other calls' turns
    do that as well as they can.
    """
    cuda = device.type == "cuda"
    for call in calls.values():  # page in, compile, fill the allocator's pools
        call()
    _synchronize(device)
    end = time.perf_counter() + heat
    while cuda and time.perf_counter() < end:
        _round(calls, device)
    if loops is None:
        loops = max(5, min(200, int(budget / max(_round(calls, device), 1e-9))))
    seconds = _loop_cuda(calls, loops, device) if cuda else _loop_cpu(calls, loops)
    return {name: timing_of(values) for name, values in seconds.items()}


def time_replays(
    calls: Mapping[str, Callable[[], object]], *, device: torch.device, loops: int | None = None, budget: float = 0.3
) -> dict[str, Timing]:
    """Time each call as a CUDA graph, `loops` times or as often as `budget` seconds allow (15 to 60 times), alternated.

    For kernels of microseconds, which are served from graphs: neither the host nor torch's dispatch is in the time. The
    L2 cache is flushed before every replay by reading and writing a buffer, as the layers between two attentions do.
    A turn is some replays, the first of which do not count: after another kernel has been through gigabytes it finds
    the translations of its addresses gone, which cost kernels of 30 µs up to 6.
    A call that cannot be captured is left out, with a warning. Without a GPU there are no graphs, and the calls are
    timed as they are.
    """
    if device.type != "cuda":
        return time_calls(calls, device=device, loops=loops or 15)
    replays = {}
    for name, call in calls.items():
        try:
            replays[name] = _captured(call, device)
        except Exception as error:  # it may be a peer's: the others still get measured
            warnings.warn(f"{name} is not captured in a graph: {error}", stacklevel=2)
    buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def flush() -> None:
        buffer.add_(1)

    _turns(replays, 3, flush, device)  # the clocks of a card that has waited for its host rise first
    if loops is None:
        start = time.perf_counter()
        _turns(replays, 2, flush, device)
        loops = max(15, min(60, int(2 * budget / (time.perf_counter() - start))))
    turns = -(-loops // (BURST - COLD))
    return {name: timing_of(values) for name, values in _turns(replays, turns, flush, device, BURST, COLD).items()}


def _captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The call as a graph's replay. Not by torch.cuda.graph(), which collects garbage first: 0.1 s per capture."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()  # what is made at the first call is made on this stream
        _synchronize(device)
        graph.capture_begin()
        try:
            held = call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)

    def replay(_held: object = held) -> None:  # what the graph writes stays allocated as long as it can be replayed
        graph.replay()

    return replay


def host_cost(call: Callable[[], object], device: torch.device, *, batches: int = 20, calls: int = 100) -> Timing:
    """Seconds of host time that one call takes: means over batches short enough for a GPU's queue to hold them."""
    seconds = []
    for _ in range(batches + 1):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - start) / calls)
    return timing_of(seconds[1:])  # the first batch is the warm-up


def time_waits(
    calls: Mapping[str, Callable[[], object]], *, device: torch.device, loops: int | None = None, budget: float = 1.0
) -> dict[str, Timing]:
    """Seconds from the start of a call until the device is done with it, alternated, each on a device that was idle.

    For what a caller waits for as a whole, host and device together. `loops` as in `time_calls`.
    """
    for _ in range(3):
        round_ = _round(calls, device)
    loops = loops or max(5, min(200, int(budget / max(round_, 1e-9))))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(loops):
        for name, call in calls.items():
            seconds[name].append(_round({name: call}, device))
    return {name: timing_of(values) for name, values in seconds.items()}


def device_cost(name: str, call: Callable[[], object], *, without: str = "", calls: int = 20) -> Result:
    """What a call's kernels take on a GPU, but for the one `without`, as the profiler tells; by name in the reason."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):  # the profiler, too, starts up in its first run
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(calls):
                call()
            torch.cuda.synchronize()
    seconds: dict[str, list[float]] = {}
    for event in profiled.events() or ():
        kernel = event.name.partition("(")[0].strip()
        if event.device_type.name == "CUDA" and kernel != without:
            seconds.setdefault(kernel, []).append(event.time_range.elapsed_us() / 1e6)
    if not seconds:
        return Result(name, True, FAILED, "the profiler tells of no kernels here")
    each = {kernel: float(np.median(values)) * len(values) / calls for kernel, values in seconds.items()}
    reason = " + ".join(f"{kernel} {spent * 1e6:.3g} µs" for kernel, spent in each.items())
    return Result(name, True, OK, reason, timing=timing_of([sum(each.values())]))


def timing_of(seconds: Sequence[float]) -> Timing:
    """Its median and spread."""
    p20, median, p80 = np.percentile(seconds, (20, 50, 80))
    return Timing(float(median), float(p20), float(p80), min(seconds), len(seconds))


def _round(calls: Mapping[str, Callable[[], object]], device: torch.device) -> float:
    """Run each call once; the seconds until all of them are done."""
    start = time.perf_counter()
    for call in calls.values():
        call()
    _synchronize(device)
    return time.perf_counter() - start


def _loop_cpu(calls: Mapping[str, Callable[[], object]], loops: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(loops):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _loop_cuda(calls: Mapping[str, Callable[[], object]], loops: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds by CUDA events. The card must not rest, or it cools: the host stays a round ahead of it all the time.

    Who follows whom changes from round to round, since a kernel leaves its successor a warmer or a cooler card.
    """
    return _turns(calls, loops, _flusher(calls.values(), device), device)


def _turns(
    calls: Mapping[str, Callable[[], object]],
    loops: int,
    flush: Callable[[], object],
    device: torch.device,
    burst: int = 1,
    cold: int = 0,
) -> dict[str, list[float]]:
    """Seconds of `loops` turns of each call. A turn is `burst` calls, of which the first `cold` do not count."""
    order, shuffle = list(calls), random.Random(0).shuffle
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    last: torch.cuda.Event | None = None
    for _ in range(loops):
        shuffle(order)
        for name, number in product(order, range(burst)):
            start, end = _event(), _event()
            flush()  # also keeps the GPU busy while Python launches, so launch overhead is not timed
            start.record()
            calls[name]()
            end.record()
            if number >= cold:
                events[name].append((start, end))
        if last is not None:
            last.synchronize()
        last = events[order[-1]][-1][1]
    _synchronize(device)
    return {name: [start.elapsed_time(end) / 1e3 for start, end in pairs] for name, pairs in events.items()}


def _flusher(calls: Iterable[Callable[[], object]], device: torch.device) -> Callable[[], object]:
    """Evicts what the L2 cache holds. By reading: what a write leaves there is written back at the next one's cost.

    As often as it takes the host to make the slowest of the calls, twice over: a peer whose call costs more on the host
    than its kernel on the card must not be timed by its host.
    """
    buffer = torch.zeros(FLUSH_BYTES // 4, device=device)
    start, end = _event(), _event()
    start.record()
    for _ in range(4):
        buffer.sum()
    end.record()
    _synchronize(device)
    each = max(start.elapsed_time(end) / 4e3, 1e-6)
    host = 0.0
    for call in calls:
        began = time.perf_counter()
        call()
        host = max(host, time.perf_counter() - began)
        _synchronize(device)
    times = min(100, 1 + int(2 * host / each))

    def flush() -> None:
        for _ in range(times):
            buffer.sum()

    return flush


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    problem: Problem,
    *,
    loops: int | None = None,
    budget: float = 4.0,
    timer: Callable[..., dict[str, Timing]] = time_calls,
) -> list[Result]:
    """Check every kernel of the problem, then time those that passed. One Result per kernel, in the problem's order.

    timer: `time_calls` or `time_replays`.

    A kernel whose answer is wrong is reported WRONG and never timed; one that raises is reported with its reason.
    """
    results = {kernel.name: _check(problem, kernel) for kernel in problem.kernels}
    passed = [kernel for kernel in problem.kernels if results[kernel.name].status == OK]
    if problem.device.type == "cuda":
        torch.cuda.empty_cache()  # the oracle's float64 buffers in the allocator's pools once slowed what came after
    calls = {kernel.name: _call(kernel) for kernel in passed}
    timings = timer(calls, device=problem.device, loops=loops, budget=budget) if calls else {}
    peers = {k.name: timings[k.name].median for k in passed if not k.ours and k.name in timings}
    for kernel in passed:
        if kernel.name not in timings:
            results[kernel.name] = replace(results[kernel.name], status=FAILED, reason="no CUDA graph can capture it")
            continue
        timing = timings[kernel.name]
        ratios = {name: median / timing.median for name, median in peers.items()}
        floor = problem.ceiling.floor(kernel.flops, kernel.bytes)
        results[kernel.name] = replace(
            results[kernel.name],
            timing=timing,
            tflops=kernel.flops / timing.median / 1e12,
            gbps=kernel.bytes / timing.median / 1e9,
            us_per_token_head=timing.median / problem.token_heads * 1e6,
            pct_of_ceiling=100 * floor / timing.median,
            ratio_to_best_peer=min(ratios.values(), default=None),
            ratio_to=ratios,
        )
    return list(results.values())


def _call(kernel: Kernel) -> Callable[[], object]:
    return lambda: kernel.run(None)


def _check(problem: Problem, kernel: Kernel) -> Result:
    # Tilewise writes into NaN, so an element it forgets cannot pass by what the memory held before.
    out = (
        torch.full(problem.output_shape, torch.nan, dtype=problem.dtype, device=problem.device) if kernel.ours else None
    )
    try:
        answer = kernel.run(out)
        if not kernel.same_answer:
            return Result(kernel.name, kernel.ours, OK)
        check = (kernel.check or problem.check)(answer)
    # Whatever a peer or kernel raises is its result on this point; the others still get measured.
    except Exception as error:
        return Result(kernel.name, kernel.ours, FAILED, " ".join(f"{type(error).__name__}: {error}".split()))
    status = OK if check.ok else WRONG
    return Result(kernel.name, kernel.ours, status, check.reason, check.error, check.baseline, allowed=check.allowed)
