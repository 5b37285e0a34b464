"""Measure what a command asked for, and show it: tables or JSON, notes below them, and the exit code."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import typer

from .options import BOTH, SheetOptions, usage

if TYPE_CHECKING:
    from rich.table import Table

    from .measure import Result
    from .prefill import Outcome
    from .workloads import Point

Draw = Callable[[Path, Callable[[str], None]], list[Path]]  # of a CSV; the second is told what cannot be drawn


def show_rows(
    table: ModuleType,
    title: str,
    notes: Callable[[Sequence[Any]], list[str]],
    draw: Draw,
    only: str,
    options: SheetOptions,
    device: str,
    loops: int | None,
    json: bool,
) -> None:
    """Measure and show the rows of a table, `prefill` or `serve`; notes: lines below it; draw: its CSV."""
    from . import tables
    from .records import machine
    from .sweep import Sheet
    from .workloads import check_device

    csv, plot, resume, force = options
    if csv is None and (plot or resume or force):
        raise typer.BadParameter("--plot, --resume and --force are about the CSV: say where it is with --csv")
    if resume and force:
        raise typer.BadParameter(BOTH)
    with usage():
        check_device(device)
        rows = table.rows(device)
    chosen = [row for row in rows if only.lower() in row.name.lower()]
    if not chosen:
        raise typer.BadParameter(f"{only!r} is in none of: {'; '.join(row.name for row in rows)}", param_hint="--only")
    errors = tables.console(stderr=True)
    outcomes: list[Outcome] = []
    stopped = False
    with Sheet(csv, resume=resume, force=force) if csv else nullcontext() as sheet:
        try:
            for outcome in table.run(chosen, sheet, loops):
                outcomes.append(outcome)
                errors.print(tables.row_line(outcome, table.COLUMNS), style="dim", soft_wrap=True, markup=False)
        except KeyboardInterrupt:
            stopped = True
    results = [result for outcome in outcomes for result in outcome.results]
    if json:
        typer.echo(jsonlib.dumps([_outcome(outcome) for outcome in outcomes], indent=1))
    else:
        lines = [f"{outcome.row.name}: {note}" for outcome in outcomes for note in tables.notes(outcome.results)]
        shown = tables.rows_table(title.format(machine=machine(device)), outcomes, table.COLUMNS)
        _print(shown, [*lines, *notes(outcomes)])
    if stopped:
        kept = f" and in {csv}: go on with --resume" if csv else ""
        errors.print(f"stopped: {len(outcomes)} of {len(chosen)} rows are measured{kept}", soft_wrap=True, markup=False)
        raise typer.Exit(130)
    if plot and csv:
        draw_csv(csv, draw)
    _fail_if_wrong(results)


def _outcome(outcome: Outcome) -> dict[str, Any]:
    from .records import records
    from .serve import Outcome as Served

    bars = [
        {"bar": goal.text, "reached": goal.measure(outcome), "of": goal.what, "met": goal.met_by(outcome)}
        for goal in outcome.row.goals
    ]
    by_point = outcome.by_point if isinstance(outcome, Served) else {}
    found = [records(*one) for one in (by_point or {outcome.row.point: outcome.results}).items()]
    return {"row": outcome.row.name, "bars": bars, "results": [record for one in found for record in one]}


def draw_csv(csv: Path, draw: Draw) -> None:
    """Draw the CSV and say what was drawn."""
    skipped: list[str] = []
    drawn = draw(csv, skipped.append)
    for path in drawn:
        typer.echo(f"drew {path}")
    for line in skipped:
        typer.echo(line)
    if not drawn and not skipped:
        typer.echo("nothing to draw: a plot needs two values or more of --seq or of --sparsity")


def show_point(point: Point, loops: int | None, json: bool) -> None:
    from . import tables
    from .measure import measure
    from .records import records
    from .workloads import build

    busy = tables.busy_note()
    with tables.console(stderr=True).status(f"measuring {point.title}"):
        problem = build(point)
        results = measure(problem, loops=loops)
    if json:
        typer.echo(jsonlib.dumps(records(point, results), indent=1))
    else:
        table = tables.point_table(point.title, results, tables.console().width)
        _print(table, [*tables.notes(results), tables.peers_note(problem.absent), busy])
    _fail_if_wrong(results)


def show_bars(loops: int | None, json: bool) -> None:
    from . import bars, tables
    from .records import here, records

    found: list[Result] = []
    rows: list[dict[str, Any]] = []
    footnotes: list[str] = []
    table = tables.BarsTable(tables.console().width)
    busy = tables.busy_note()
    with tables.console(stderr=True).status("measuring what this machine can do at best") as status:
        for bar, problem, results in bars.run_bars(loops):
            status.update(f"measured {problem.title}")
            found += results
            table.add(bar, results)
            for record, result in zip(records(bar.point, results), results, strict=True):
                met = bar.met_by(result)
                rows.append({**record, "bar": None if met is None else bar.text, "met": met})
            best, where = problem.ceiling, here(bar.point.device)
            footnotes = footnotes or [
                f"{where['machine']}, {where['threads']} threads, torch {where['torch']}; "
                f"ceiling {best.flops / 1e12:.3f} TFLOP/s, {best.bandwidth / 1e9:.1f} GB/s, measured",
                tables.peers_note(problem.absent),
            ]
        bar_of_plan, planned = bars.PLAN_BAR, bars.run_plan_bar(loops)
    table.add_plan(bar_of_plan, planned)
    assert planned.timing is not None
    median = planned.timing.median * 1e3
    met = bar_of_plan.met_by(planned)
    rows.append({"kernel": planned.kernel, "median_ms": median, "bar": bar_of_plan.text, "met": met})
    if json:
        typer.echo(jsonlib.dumps(rows, indent=1))
    else:
        _print(table.table, [*tables.notes(found), *footnotes, busy])
    _fail_if_wrong(found)


def _print(table: Table, lines: Sequence[str]) -> None:
    from . import tables

    out = tables.console()
    out.print(table)
    for line in lines:
        if line:
            out.print(line, style="dim", soft_wrap=True, markup=False)


def _fail_if_wrong(results: Sequence[Result]) -> None:
    from .measure import OK

    if any(result.ours and result.status != OK for result in results):
        raise typer.Exit(1)
