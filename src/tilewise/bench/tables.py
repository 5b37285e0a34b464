"""Measurements as tables for a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from . import peers
from .bars import Bar, PlanBar
from .measure import FAILED, OK, WRONG, Result, Timing
from .prefill import Outcome
from .terminal import FULL_WIDTH, console

__all__ = [
    "FULL_WIDTH",
    "BarsTable",
    "busy_note",
    "console",
    "notes",
    "peers_note",
    "point_table",
    "row_line",
    "rows_table",
]

Cell = str | Text


def _table(title: str, left: Iterable[str], right: Iterable[str]) -> Table:
    """An empty table with left- and right-aligned columns."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def point_table(title: str, results: list[Result], width: int) -> Table:
    """Everything that was measured at one point, one row per kernel; `width` is the console's."""
    wide = width >= FULL_WIDTH
    times = ("median ms", "p20–p80") if wide else ("ms",)
    rates = ("TFLOP/s", "GB/s", "µs/tok·head", "of ceiling", "vs best")
    table = _table(title, ("kernel", "error / torch's" if wide else "check"), (*times, *rates))
    for result in results:
        cells = [_name(result), _check(result, wide), *_time_cells(result.timing)[: len(times)]]
        cells += [_number(result.tflops), _number(result.gbps), _number(result.us_per_token_head)]
        table.add_row(*cells, _percent(result.pct_of_ceiling), _ratio(result.ratio_to_best_peer))
    return table


class BarsTable:
    """The table of bars, section by section; `width` is the console's."""

    def __init__(self, width: int) -> None:
        self._wide = width >= FULL_WIDTH
        columns = ("median ms", "p20–p80", "TFLOP/s", "GB/s", "of ceiling") if self._wide else ("ms",)
        title = "Tilewise beside torch SDPA: one run, taking turns, float32"
        self.table = _table(title, ("problem", "kernel", "check"), (*columns, "vs SDPA", "bar", "met"))

    def add(self, bar: Bar, results: list[Result]) -> None:
        """A section: the bar's problem, every kernel on it, and whether the bar is met."""
        point = bar.point
        heads = f"{point.heads}" if point.heads == point.kv_heads else f"{point.heads}/{point.kv_heads}"
        name, sizes = {
            "dense": ("causal" if point.causal else "dense", f"N {point.seq}"),
            "sparse": (f"{point.sparsity:.0%} sparse", f"N {point.seq}, blocks {point.block}"),
            "prefix": ("shared prefix", f"{point.batch} × ({point.prefix} + {point.seq})"),
            "decode": ("decode", f"{point.batch} × {point.seq}"),
        }[point.workload]
        rows: list[list[Cell]] = []
        for result in results:
            met = bar.met_by(result)
            ratio = _ratio(result.ratio_to.get(bar.peer))
            rows.append([*self._measured(result), ratio, "" if met is None else bar.text, _met(met)])
        self._section([name, sizes, f"{heads} heads, D {point.hdim}"], rows)

    def add_plan(self, bar: PlanBar, result: Result) -> None:
        """The section of the planning time."""
        row = [*self._measured(result), "", bar.text, _met(bar.met_by(result))]
        self._section(["planning", f"{bar.seqs} sequences", f"{bar.tokens} tokens"], [row])

    def _section(self, lines: list[str], rows: list[list[Cell]]) -> None:
        for i in range(max(len(lines), len(rows))):
            label = Text(lines[i] if i < len(lines) else "", style="bold" if i == 0 else "dim")
            self.table.add_row(label, *(rows[i] if i < len(rows) else []))
        self.table.add_section()

    def _measured(self, result: Result) -> list[Cell]:
        times = _time_cells(result.timing)
        rates = [_number(result.tflops), _number(result.gbps), _percent(result.pct_of_ceiling)]
        numbers = [*times, *rates] if self._wide else times[:1]
        return [_name(result), _check(result, wide=False), *numbers]


def rows_table(title: str, outcomes: Sequence[Outcome], columns: Sequence[str]) -> Table:
    """The rows of the prefill or serving table with their bars; `columns` are what the outcomes' rates are of."""
    bars = max((len(outcome.row.goals) for outcome in outcomes), default=1)
    table = _table(title, ("problem",), (*columns, *("reached", "bar", "met") * bars))
    for outcome in outcomes:
        rates = [_number(rate) for rate in outcome.rates]
        table.add_row(outcome.row.name, *rates, *(cell for bar in _reached(outcome) for cell in bar))
    return table


def row_line(outcome: Outcome, columns: Sequence[str]) -> str:
    """The same in one line, to be shown as soon as the row is measured."""
    rates = [f"{name} {_number(rate)}" for name, rate in zip(columns, outcome.rates, strict=True) if rate is not None]
    bars = [" ".join(str(cell) for cell in bar) for bar in _reached(outcome)]
    return f"{outcome.row.name}: " + "; ".join([*([", ".join(rates)] if rates else []), *bars])


def _reached(outcome: Outcome) -> list[tuple[Cell, ...]]:
    return [(goal.value_text(outcome), goal.text, _met(goal.met_by(outcome))) for goal in outcome.row.goals]


def notes(results: Iterable[Result]) -> list[str]:
    """A line for each kernel that failed or is wrong, with the reason."""
    return [f"{result.kernel}: {result.status}, {result.reason}" for result in results if result.status != OK]


def peers_note(absent: str) -> str:
    """The footnote on the peers: always torch's SDPA, and why the others are not there."""
    return f"peers: {peers.SDPA} is measured; {absent}" if absent else ""


def busy_note() -> str:
    """A warning if other programs keep this machine's cores busy; ask before measuring, which does so too.

    A thread that waits for a core holds up all others at every step, and many small steps suffer more than one large
    one: not even ratios are to be trusted then.
    """
    load, cores = (os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0), os.cpu_count() or 1
    if load < 0.5 * cores:
        return ""
    return f"other programs were running (load {load:.1f} on {cores} cores): measure again when the machine is quiet"


def _name(result: Result) -> Cell:
    return result.kernel if result.ours else Text(result.kernel, style="dim")


def _check(result: Result, wide: bool) -> Cell:
    if result.status == WRONG:
        return Text("WRONG", style="bold red")
    if result.status == FAILED:
        return Text("failed", style="yellow")
    if result.error is None:  # a peer that computes something else, or nothing to check
        return Text("–", style="dim")
    return f"{result.error:.1e} / {result.baseline:.1e}" if wide else "ok"


def _time_cells(timing: Timing | None) -> list[str]:
    if timing is None:
        return ["", ""]
    return [_number(timing.median * 1e3), f"{_number(timing.p20 * 1e3)}–{_number(timing.p80 * 1e3)}"]


def _number(value: float | None) -> str:
    """Three digits, never in scientific notation for what a table usually holds."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.1e}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}%"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def _met(met: bool | None) -> Cell:
    if met is None:
        return ""
    return Text("yes", style="green") if met else Text("no", style="bold red")
