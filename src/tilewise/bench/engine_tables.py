"""What `tilewise bench engine` prints, and what it writes: rows for CSV and JSON, the table, the plot."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from . import engine_plots
from .engine import Figure, Load, Outcome, Percentiles
from .records import Record, here, machine, package_version
from .records import save as save_rows

HEAD = (
    "server", "load", "requests/s", "tokens/s", "first token ms p50/p95/p99", "between tokens ms p50/p95/p99", "KV",
    "host ms/step",
)  # fmt: skip


def records(outcome: Outcome) -> list[Record]:
    """Figures and loads as flat rows of the same columns; what a row has nothing of is None."""
    problem = outcome.case
    common: Record = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **here(problem.device),
        "transformers": package_version("transformers"),
        "config": problem.config,
        "dtype": problem.dtype,
        "compile": problem.compile,
    }
    rows = [*map(_figure_record, outcome.figures), *map(_load_record, outcome.loads)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{**common, **{name: row.get(name) for name in columns}} for row in rows]


def _figure_record(one: Figure) -> Record:
    return {
        "row": one.row, "value": round(one.value, 4), "unit": one.unit, "bar": one.bar, "met": one.met,
        "detail": one.detail,
    }  # fmt: skip


def _load_record(one: Load) -> Record:
    latencies = {
        f"{name}_p{percent}_ms": round(value * 1e3, 3)
        for name, values in (("first_token", one.first), ("between_tokens", one.between))
        for percent, value in zip((50, 95, 99), values, strict=True)
    }
    return {
        "row": "load",
        "server": one.server,
        "load": one.share,
        "offered_per_s": None if one.share is None else round(one.rate, 3),
        "requests": one.requests,
        "seconds": round(one.seconds, 4),
        "requests_per_s": round(one.requests_per_s, 3),
        "tokens_per_s": round(one.tokens_per_s, 1),
        **latencies,
        "kv_bytes": one.kv_bytes,
        "host_ms_per_step": None if one.host_seconds is None else round(one.host_seconds * 1e3, 4),
    }


def text(outcome: Outcome) -> str:
    """The tables, for a terminal and for the results' folder."""
    problem = outcome.case
    lines = [f"{problem.title}, {machine(problem.device)}"]
    if outcome.figures:
        lines += _aligned([("", "", "bar", "met", ""), *map(_figure_cells, outcome.figures)], "<><<<")
    if outcome.loads:
        lines += [
            "",
            f"requests: {problem.mix}",
            f"drawn, of one run: {outcome.drawn}",
            f"Poisson arrivals at shares of {outcome.capacity:.3g} requests/s, {problem.max_sequences} sequences at "
            f"most, {problem.token_budget} tokens a step",
            *_aligned([HEAD, *map(_load_cells, outcome.loads)], "<" + ">" * (len(HEAD) - 1)),
        ]
    lines += [f"{name}: {reason}" for name, reason in outcome.missing.items()]
    lines.append(f"torch {torch.__version__}, transformers {package_version('transformers')}")
    return "\n".join(lines)


def _figure_cells(one: Figure) -> tuple[str, ...]:
    bar = "" if one.bar is None else f"{'≤' if one.most else '≥'} {one.bar:g} {one.unit}"
    met = {None: "", True: "yes", False: "no"}[one.met]
    return one.row, f"{one.value:.3g} {one.unit}", bar, met, one.detail


def _load_cells(one: Load) -> tuple[str, ...]:
    return (
        one.server,
        "all at once" if one.share is None else f"{one.share:.0%}",
        f"{one.requests_per_s:.3g}",
        f"{one.tokens_per_s:.0f}",
        _milliseconds(one.first),
        _milliseconds(one.between),
        "" if one.kv_bytes is None else f"{one.kv_bytes / 1e6:.0f} MB",
        "" if one.host_seconds is None else f"{one.host_seconds * 1e3:.3g}",
    )


def _milliseconds(values: Percentiles) -> str:
    return " / ".join(f"{value * 1e3:.0f}" if value >= 0.1 else f"{value * 1e3:.3g}" for value in values)


def _aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    widths = [max(len(row[n]) for row in rows) for n in range(len(sides))]
    cells = [[f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]


def save(outcome: Outcome, folder: Path) -> list[Path]:
    """CSV, table and plots, into `folder`; what was there under these names is replaced."""
    name = f"engine-{outcome.case.config}"
    paths = save_rows(name, outcome.case.device, records(outcome), text(outcome), folder)
    return [*paths, *engine_plots.draw(outcome, paths[0].with_suffix(""))]
