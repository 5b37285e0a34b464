"""Which problems a report has: by device, and fewer with --quick. Each is measured as one of the bench tables does it.

Plain points are what `tilewise bench` measures, beside every peer that takes them; decode on a card, schedules and
functions are rows of the tables of `serve`, `sparse` and `variants`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from types import ModuleType

import torch

from .. import prefill, serve, sparse, variants
from ..measure import Result, measure
from ..prefill import Row
from ..trees import Levels
from ..workloads import FLOAT8, Point, build, complete

# Title of each section, in order, and what its rows are about.
LENGTH, BATCH, KINDS, SPARSE = "Prefill over length", "Prefill over batch", "Masks, shapes, dtypes", "Block-sparse"
FUNCTIONS, DECODE, FORMATS, SHARED = "Functions", "Decode over batch", "KV formats", "Shared prefixes"
ABOUT = {
    LENGTH: "Dense attention as the sequence grows.",
    BATCH: "The same causal problem, more and more of it at once.",
    KINDS: "Windows, ragged batches, grouped heads and the other dtypes.",
    SPARSE: "A share of the blocks is left out; rates are over what is kept. Dense attention stands beside it: it "
    "computes something else, and is what one pays without a schedule.",
    FUNCTIONS: "Masks and scores written in Python, beside the same built in and beside FlexAttention.",
    DECODE: "One token per sequence over a paged cache, nothing shared.",
    FORMATS: "The same decode step over caches that hold keys and values in fewer bits. Where peers stand beside it, "
    "they read plain tensors of the same values.",
    SHARED: "Sequences that share their first tokens, or a tree of them: read once for all, or once for each.",
}
BUDGET, QUICK_BUDGET = 1.2, 0.5  # seconds of timing per plain row, after the warm-up
TREE = ((1, 512), (4, 128), (16, 64))  # on a CPU: a system prompt, four questions, four samples of each


@dataclass(frozen=True)
class Entry:
    """A row of the report, the table that measures it, and the command that does so again."""

    section: str
    row: Row
    table: ModuleType
    command: str

    def measure(self, loops: int | None) -> list[Result]:
        """Check and time its kernels; a problem that cannot be built is one failed result."""
        (outcome,) = self.table.run([self.row], None, loops)
        results: list[Result] = outcome.results
        return results


def entries(device: str, quick: bool) -> list[Entry]:
    """The rows of a report, in order. Those of --quick are among those without it."""
    return list(_on_card(device, quick) if torch.device(device).type == "cuda" else _on_cpu(device, quick))


# ---- plain points -----------------------------------------------------------------------------------------------


def command_of(point: Point) -> str:
    """`tilewise bench …` of a plain point: what says as much as the defaults do is left out, but for the length.

    Without any option the command would be another one.
    """
    implied = {"workload", "causal"} if point.window or point.kv_format else {"workload"}
    implied |= {"seq"} if point.lengths else set()
    defaults = {f.name: f.default for f in fields(Point)} | {"kv_heads": point.heads, "seq": 0}
    words = ["tilewise", "bench"]
    for name, default in defaults.items():
        value = getattr(point, name)
        if name not in implied and value != default:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)


def _plain(section: str, name: str, point: Point, budget: float) -> Entry:
    point = complete(point)

    def timed(row: Row, loops: int | None) -> list[Result]:
        return measure(build(row.point), loops=loops, budget=budget)

    return Entry(section, Row(name, point, (), measure=timed), prefill, command_of(point))


def _dense_name(point: Point, what: str) -> str:
    return f"{what}, D {point.hdim}, N {point.seq}" + ("" if point.batch == 1 else f", batch {point.batch}")


def _full_and_causal(points: Sequence[Point], budget: float) -> Iterator[Entry]:
    for causal in (False, True):
        for point in points:
            name = _dense_name(replace(point, batch=1), "causal" if causal else "full")
            yield _plain(LENGTH, name, replace(point, causal=causal), budget)


# ---- rows of tables ---------------------------------------------------------------------------------------------


def _from_table(section: str, table: ModuleType, row: Row) -> Entry:
    """A row of a bench table under its own command; the names of variants and sparse tell what they are."""
    words = ["tilewise", "bench", table.__name__.rpartition(".")[2], "--only", row.name, "--device", row.point.device]
    return Entry(section, row, table, shlex.join(words))


def _served(section: str, name: str, row: serve.Row) -> Entry:
    """A decode step that no row of `bench serve` is: the report measures it again by its name."""
    words = ["tilewise", "report", "--only", name, "--device", row.point.device]
    return Entry(section, replace(row, name=name, point=complete(row.point)), serve, shlex.join(words))


# ---- on a CPU ---------------------------------------------------------------------------------------------------


def _on_cpu(device: str, quick: bool) -> Iterator[Entry]:
    """Under a minute on two cores with `quick`, some three without."""
    budget = QUICK_BUDGET if quick else BUDGET
    lengths = (256, 1024, 2048) if quick else (256, 512, 1024, 2048, 4096)
    for hdim, some in ((64, lengths),) if quick else ((64, lengths), (128, lengths[:-1])):
        yield from _full_and_causal([Point(seq=n, hdim=hdim, device=device) for n in some], budget)
    for batch in (1, 4, 16) if quick else (1, 2, 4, 8, 16, 32):
        point = Point(batch=batch, seq=256, hdim=64, causal=True, device=device)
        yield _plain(BATCH, f"{batch} × 256, causal, D 64", point, budget)
    long, short = Point(seq=2048, hdim=64, device=device), Point(seq=1024, hdim=64, causal=True, device=device)
    yield _plain(KINDS, "window 256, D 64, N 2048", replace(long, window=256), budget)
    ragged = replace(short, workload="varlen", batch=8, lengths="50-1024")
    yield _plain(KINDS, "8 ragged, 50 to 1024 tokens, causal, D 64", ragged, budget)
    yield _plain(KINDS, "8/2 heads, causal, D 64, N 1024", replace(short, kv_heads=2), budget)
    for dtype in ("bfloat16",) if quick else ("bfloat16", "float16", FLOAT8):
        yield _plain(KINDS, f"{dtype}, causal, D 64, N 1024", replace(short, dtype=dtype), budget)
    for sparsity in (0.9,) if quick else (0.5, 0.9):
        point = replace(long, workload="sparse", sparsity=sparsity)
        yield _plain(SPARSE, f"{1 - sparsity:.0%} of 64 × 64 blocks, D 64, N 2048", point, budget)
    for row in () if quick else variants.rows(device):
        if row.name.startswith(("ALiBi", "documents")):
            yield _from_table(FUNCTIONS, variants, row)
    yield from _decode_on_cpu(device, quick, budget)


def _decode_on_cpu(device: str, quick: bool, budget: float) -> Iterator[Entry]:
    step = Point("decode", seq=1024, heads=32, kv_heads=8, kv_format="fp32", device=device)
    for batch in (1, 4, 16) if quick else (1, 2, 4, 8, 16, 32):
        yield _plain(DECODE, f"decode {batch} × 1024, 32/8 heads", replace(step, batch=batch), budget)
    for name in ("int8",) if quick else ("bf16", "fp8", "int8", "int4"):
        yield _plain(FORMATS, f"{name}, 8 × 1024", replace(step, batch=8, kv_format=name), budget)
    for batch, prefix, own in ((16, 1024, 64),) if quick else ((4, 1024, 64), (16, 1024, 64), (16, 2048, 128)):
        point = replace(step, workload="prefix", batch=batch, prefix=prefix, seq=own)
        yield _plain(SHARED, f"{batch} × ({prefix} + {own})", point, budget)
    yield _tree(replace(step, heads=8, kv_heads=2, kv_format="bf16", dtype="bfloat16"), TREE)


def _tree(step: Point, levels: Levels) -> Entry:
    batch, (_, prefix), own = levels[-1][0], levels[0], sum(tokens for _, tokens in levels[1:])
    name = "tree: " + ", ".join(f"{nodes} × {tokens}" if nodes > 1 else f"{tokens}" for nodes, tokens in levels)
    point = replace(step, workload="prefix", batch=batch, prefix=prefix, seq=own)
    return _served(SHARED, name, serve.Row(name, point, (), levels=levels))


# ---- on a card --------------------------------------------------------------------------------------------------


def _on_card(device: str, quick: bool) -> Iterator[Entry]:
    """The sizes of the bench tables, beside every peer."""
    budget = QUICK_BUDGET if quick else BUDGET
    base = Point(dtype="bfloat16", device=device)
    for hdim in (128,) if quick else prefill.DENSE_BARS:
        heads = prefill.WIDTH // hdim
        wide = replace(base, heads=heads, kv_heads=heads, hdim=hdim)
        points = [replace(wide, batch=prefill.TOKENS // n, seq=n) for n in prefill.LENGTHS]
        yield from _full_and_causal(points, budget)
    usual = replace(base, heads=16, kv_heads=16, causal=True)
    for batch in (1, 4, 16) if quick else (1, 2, 4, 8, 16, 32):
        yield _plain(BATCH, f"{batch} × 2048, causal, D 128", replace(usual, batch=batch, seq=2048), budget)
    long = replace(usual, seq=prefill.TOKENS)
    yield _plain(KINDS, f"window 1024, D 128, N {long.seq}", replace(long, window=1024), budget)
    ragged = replace(long, workload="varlen", batch=16, lengths="100-16384")
    yield _plain(KINDS, "16 ragged, 100 to 16384 tokens, causal, D 128", ragged, budget)
    grouped = replace(long, seq=8192, heads=64, kv_heads=8)
    yield _plain(KINDS, "64/8 heads, causal, D 128, N 8192", grouped, budget)
    for dtype in ("float16", "float32", FLOAT8):
        point = replace(usual, seq=8192, dtype=dtype)
        yield _plain(KINDS, f"{dtype}, causal, D 128, N 8192", point, budget)
    for number, row in enumerate(sparse.rows(device)):
        if number in (1, 2) or not quick:
            yield _from_table(SPARSE, sparse, row)
    for row in () if quick else variants.rows(device):
        yield _from_table(FUNCTIONS, variants, row)
    yield from _decode_on_card(device, quick)


def _decode_on_card(device: str, quick: bool) -> Iterator[Entry]:
    step = Point("decode", seq=4096, heads=32, kv_heads=8, dtype="bfloat16", kv_format="bf16", device=device)
    for batch in (1, 8, 64) if quick else (1, 2, 4, 8, 16, 32, 64, 128):
        name = f"decode {batch} × 4096, 32/8 heads"
        yield _served(DECODE, name, serve.Row(name, replace(step, batch=batch), ()))
    table = {row.name: row for row in serve.rows(device)}
    for name in serve.FORMATS if not quick else ("int8",):
        yield _from_table(FORMATS, serve, table[f"{name}, 64 × 16384, page 16"])
    sizes = [key for key in serve.PREFIX if key[0] * sum(key[1:]) <= 1 << 20]  # what fits a card of 24 GB whole
    for batch, prefix, own in sizes[1:2] if quick else sizes:
        yield _from_table(SHARED, serve, table[f"{batch} × ({prefix} + {own}), page 16"])
    if not quick:
        yield _from_table(SHARED, serve, table["tree of three levels, page 16"])
