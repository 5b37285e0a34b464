"""The one measuring loop: every number Tilewise prints about speed comes from here.

`measure` takes a `Problem` (see `workloads`), checks each kernel's answer first, and only then times the kernels that
passed. Kernels take turns, A B A B, so a machine that slows down or speeds up meanwhile favours none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

OK, WRONG, FAILED = "ok", "WRONG", "failed"


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
    """Something that can be timed on a problem. `run(out)` returns o (B, N, H, D); `out` is None or where to write it.

    `flops` and `bytes` are what this kernel cannot avoid, given the layout it is handed. `same_answer` is False for a
    peer that computes something else for comparison, such as dense attention beside a block-sparse problem.
    """

    name: str
    run: Callable[[torch.Tensor | None], torch.Tensor]
    ours: bool
    flops: int
    bytes: int
    same_answer: bool = True


@dataclass(frozen=True)
class Check:
    """How far an answer is from float64 (`error`), and how far PyTorch's own math in the same dtype is (`baseline`)."""

    ok: bool
    error: float
    baseline: float
    reason: str = ""


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


def time_calls(
    calls: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    loops: int | None = None,
    budget: float = 4.0,
) -> dict[str, Timing]:
    """Time each call `loops` times in turns, or as often as `budget` seconds allow (5 to 200 times).

    On a GPU: CUDA events, and the L2 cache is overwritten before every call, since a kernel that finds its input
    there looks faster than it will be in a model. On a CPU the other calls' turns do that as well as they can.
    """
    cuda = device.type == "cuda"
    for call in calls.values():  # page in, compile, fill the allocator's pools
        call()
    if loops is None:
        _synchronize(device)
        start = time.perf_counter()
        for call in calls.values():
            call()
        _synchronize(device)
        loops = max(5, min(200, int(budget / max(time.perf_counter() - start, 1e-9))))
    seconds = _loop_cuda(calls, loops, device) if cuda else _loop_cpu(calls, loops)
    timings = {}
    for name, values in seconds.items():
        p20, median, p80 = np.percentile(values, (20, 50, 80))
        timings[name] = Timing(float(median), float(p20), float(p80), min(values), loops)
    return timings


def _loop_cpu(calls: Mapping[str, Callable[[], object]], loops: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(loops):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _loop_cuda(calls: Mapping[str, Callable[[], object]], loops: int, device: torch.device) -> dict[str, list[float]]:
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(max(2 * l2_bytes, 64 << 20), dtype=torch.uint8, device=device)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(loops):
        for name, call in calls.items():
            start, end = _event(), _event()
            flush.zero_()  # also keeps the GPU busy while Python launches, so launch overhead is not timed
            start.record()
            call()
            end.record()
            events[name].append((start, end))
        _synchronize(device)
    return {name: [start.elapsed_time(end) / 1e3 for start, end in pairs] for name, pairs in events.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(problem: Problem, *, loops: int | None = None, budget: float = 4.0) -> list[Result]:
    """Check every kernel of the problem, then time those that passed. One Result per kernel, in the problem's order.

    A kernel whose answer is wrong is reported WRONG and never timed; one that raises is reported with its reason.
    """
    results = {kernel.name: _check(problem, kernel) for kernel in problem.kernels}
    passed = [kernel for kernel in problem.kernels if results[kernel.name].status == OK]
    calls = {kernel.name: _call(kernel) for kernel in passed}
    timings = time_calls(calls, device=problem.device, loops=loops, budget=budget) if calls else {}
    peers = {kernel.name: timings[kernel.name].median for kernel in passed if not kernel.ours}
    for kernel in passed:
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
        check = problem.check(answer)
    # Whatever a peer or kernel raises is its result on this point; the others still get measured.
    except Exception as error:
        return Result(kernel.name, kernel.ours, FAILED, " ".join(f"{type(error).__name__}: {error}".split()))
    status = OK if check.ok else WRONG
    return Result(kernel.name, kernel.ours, status, check.reason, check.error, check.baseline)
