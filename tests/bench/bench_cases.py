"""What the tests of the benchmarks share: tiny points, sweeps of them, results made by hand."""

from __future__ import annotations

import torch

from tilewise.bench import measure, sweep
from tilewise.bench.measure import OK, Result
from tilewise.bench.workloads import Point, complete

CPU = torch.device("cpu")
TINY = {
    "dense": Point(seq=48, heads=4, kv_heads=2, hdim=16),
    "causal": Point(batch=2, seq=40, heads=2, kv_heads=2, hdim=16, causal=True, dtype="bfloat16"),
    "window": complete(Point(batch=2, seq=70, heads=4, kv_heads=2, hdim=16, window=9)),
    "varlen": complete(Point("varlen", batch=4, lengths="3-60", heads=4, kv_heads=2, hdim=16)),
    "varlen causal": complete(Point("varlen", batch=3, lengths="5-40", heads=2, kv_heads=2, hdim=16, causal=True)),
    "varlen window": complete(Point("varlen", batch=3, lengths="5-40", heads=2, kv_heads=2, hdim=16, window=4)),
    "sparse": complete(Point("sparse", seq=96, heads=2, kv_heads=2, hdim=16, sparsity=0.5, block=16)),
    "sparse causal": complete(
        Point("sparse", seq=96, heads=2, kv_heads=1, hdim=16, sparsity=0.3, block=16, causal=True)
    ),
    "sparse window": complete(Point("sparse", seq=96, heads=2, kv_heads=2, hdim=16, sparsity=0.3, block=16, window=30)),
    "decode": complete(Point("decode", batch=3, seq=37, heads=4, kv_heads=2, hdim=16)),
    "decode int8": complete(Point("decode", batch=2, seq=33, heads=4, kv_heads=2, hdim=32, kv_format="int8", tokens=3)),
    "prefix": complete(Point("prefix", batch=4, seq=9, prefix=50, heads=4, kv_heads=2, hdim=16)),
    "prefix int4": complete(Point("prefix", batch=2, seq=9, prefix=20, heads=2, kv_heads=2, hdim=32, kv_format="int4")),
}

# The serving table in small: a batch that shares nothing, and the levels of a tree (nodes, tokens of each).
BASE = complete(Point("decode", batch=4, seq=40, heads=4, kv_heads=2, hdim=32, dtype="bfloat16", page_size=8))
TREE = ((1, 32), (2, 16), (4, 8), (12, 5))


class Event:
    """A CUDA event on the fake clock; `log` has what happened in order."""

    log: list = []  # noqa: RUF012 - emptied by the fixture

    def record(self):
        self.at = measure.time.perf_counter()
        self.log.append("event")

    def synchronize(self):
        self.log.append(("waits for", self.at))

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


def points_of(**lists):
    return sweep.combinations(lists, Point(heads=2, kv_heads=2, hdim=16))[0]


def run_sweep(path, points, **options):
    with sweep.Sheet(path, **options) as sheet:
        return sweep.run(points, sheet, loops=1)


def timed(kernel, seconds=1.0, *, tflops=None, ours=True, **ratios):
    return Result(kernel, ours, OK, timing=measure.Timing(seconds, 0, 0, 0, 1), tflops=tflops, ratio_to=ratios)
