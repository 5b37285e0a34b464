"""The bars of the CPU backend: each a ratio to torch's SDPA in the same run, or a time. `tilewise bench` shows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import api
from ..kvcache import PagedKVCache
from . import peers
from .measure import OK, Problem, Result, measure, time_calls
from .workloads import Point, build, complete


@dataclass(frozen=True)
class Bar:
    """At `point`, the kernels named must be at least `at_least` times as fast as the peer; `budget` is in seconds."""

    point: Point
    at_least: float
    kernels: tuple[str, ...]
    peer: str = peers.SDPA
    budget: float = 6.0

    @property
    def text(self) -> str:
        """The bar as it is shown."""
        return f"≥ {self.at_least:g}×"

    def met_by(self, result: Result) -> bool | None:
        """Does this result meet the bar? None when the bar is not about it."""
        if result.kernel not in self.kernels:
            return None
        return result.status == OK and result.ratio_to.get(self.peer, 0.0) >= self.at_least


@dataclass(frozen=True)
class PlanBar:
    """Planning a decode step of `seqs` sequences with `tokens` tokens in all must take less than `below` seconds."""

    seqs: int = 256
    prefix: int = 2048
    tokens: int = 65536
    below: float = 0.020

    @property
    def text(self) -> str:
        """The bar as it is shown."""
        return f"< {self.below * 1e3:g} ms"

    def met_by(self, result: Result) -> bool:
        """Does this result meet the bar?"""
        return result.timing is not None and result.timing.median < self.below


_PREFIX = complete(Point("prefix", batch=16, seq=128, prefix=2048, heads=32, kv_heads=8))
BARS = (
    Bar(Point(seq=2048), 0.95, ("tilewise cpu",), budget=6.0),
    Bar(Point(seq=2048, causal=True), 0.95, ("tilewise cpu",), budget=6.0),
    Bar(_PREFIX, 4.0, ("tilewise cpu", "tilewise cpu, no cache")),
    Bar(Point("sparse", seq=4096, sparsity=0.9), 5.0, ("tilewise cpu",), budget=10.0),
)
PLAN_BAR = PlanBar()


def run_bars(loops: int | None = None) -> Iterator[tuple[Bar, Problem, list[Result]]]:
    """Measure the bars one after the other."""
    for bar in BARS:
        problem = build(bar.point)
        yield bar, problem, measure(problem, loops=loops, budget=bar.budget)


def run_plan_bar(loops: int | None = None) -> Result:
    """Measure planning alone: pages are reserved as a server would have them, nothing is written into them."""
    bar = PLAN_BAR
    page_size = 16
    own = [(bar.tokens - bar.prefix) // bar.seqs] * bar.seqs
    pages = bar.prefix // page_size + sum(-(-n // page_size) + 1 for n in own) + 1
    cache = PagedKVCache(pages, page_size, 8, 128, kv_format="bf16")
    first = cache.allocate()
    cache.extend([first], [bar.prefix])
    seqs = [first, *(cache.fork(first) for _ in range(bar.seqs - 1))]
    cache.extend(seqs, own)
    calls = {"plan_decode": lambda: api.plan_decode(cache, seqs, num_heads=32)}
    timing = time_calls(calls, device=torch.device("cpu"), loops=loops, budget=1.0)["plan_decode"]
    return Result("plan_decode", True, OK, timing=timing)
