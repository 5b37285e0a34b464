"""The command `tilewise report`. What is slow to import is imported when it runs."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import AnyDevice, Loops, Only, usage

if TYPE_CHECKING:
    from .compare import Comparison
    from .model import Report
    from .rows import Entry


def report(
    output: Annotated[Path, typer.Option("-o", "--output", help="The page; its JSON goes beside it.")] = Path(
        "report.html"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rows: under a minute on a CPU.")] = False,
    against: Annotated[
        Path | None, typer.Option(help="The JSON of an earlier report to compare with.", show_default=False)
    ] = None,
    only: Only = "",
    device: AnyDevice = None,
    loops: Loops = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a report that is there.")] = False,
) -> None:
    """Measure this machine, and write a page to look at and to send: tilewise report -o report.html

    Speed beside every peer, whether the answers are right, a roofline, plans and the ladder, in one file that needs no
    network. Some three minutes on a CPU. Ctrl-C keeps what is done.
    """
    from . import page
    from .compare import compare
    from .model import dump, load, save

    where, chosen, ladder = _chosen(device, quick, only)
    old = None if against is None else load(against)
    data = _paths(output, force)
    found = _measure(chosen, where, quick, only, loops, ladder)
    comparison = None if old is None else compare(old, found)
    save(dump(found), data)
    save(page.render(found, comparison), output)
    _tell(found, comparison, output, data)
    if found.stopped:
        raise typer.Exit(130)
    if found.broken:
        raise typer.Exit(1)


def _paths(output: Path, force: bool) -> Path:
    """Where the JSON goes, in a folder that is there now. What cannot be written is said before it is measured."""
    if output.suffix not in (".html", ".htm"):
        raise typer.BadParameter(f"must end in .html, got {str(output)!r}", param_hint="--output")
    data = output.with_suffix(".json")
    for path in (output, data):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if path.exists() and not force:
            raise FileExistsError(f"{path} exists: --force overwrites it")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output.parent):
        return data


def _chosen(device: str | None, quick: bool, only: str) -> tuple[str, list[Entry], bool]:
    """The device, the rows asked for, and whether the ladder is."""
    from ..commands import _device
    from ..workloads import check_device
    from .gather import LADDER
    from .rows import entries

    where = _device(device)
    with usage():
        check_device(where)
        rows = entries(where, quick)
    chosen = [entry for entry in rows if only.lower() in entry.row.name.lower()]
    ladder = only.lower() in LADDER
    if not chosen and not ladder:
        names = "; ".join([*(entry.row.name for entry in rows), LADDER])
        raise typer.BadParameter(f"{only!r} is in none of: {names}", param_hint="--only")
    return where, chosen, ladder


def _measure(chosen: Sequence[Entry], where: str, quick: bool, only: str, loops: int | None, ladder: bool) -> Report:
    """Measure with a progress bar on stderr."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from .. import tables
    from .gather import gather, start

    device = torch.device(where)
    begun = start(device, shlex.join(["tilewise", *sys.argv[1:]]), quick, only)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=tables.console(stderr=True)) as progress:
        task = progress.add_task("starting", total=len(chosen) + ladder)
        return gather(
            begun,
            chosen,
            device,
            loops,
            before=lambda name: progress.update(task, description=name),
            after=lambda name: progress.advance(task),
            ladder=ladder,
        )


def _tell(found: Report, comparison: Comparison | None, output: Path, data: Path) -> None:
    """What was measured and where it went."""
    from ..measure import OK
    from .model import NOT_SERVED

    ours = [line.status for _, line in found.lines if line.ours]
    words = [f"{ours.count(OK)} of {len(ours)} kernels of Tilewise ran and are right"]
    words += [f"{ours.count(NOT_SERVED)} not served here"] if NOT_SERVED in ours else []
    typer.echo(f"{len(found.rows)} rows, {', '.join(words)}: {output} and {data}")
    if comparison is not None:
        typer.echo(f"against the report of {comparison.created}: {comparison.text}")
        for difference in comparison.differences:
            typer.echo(f"not the same as then: {difference}", err=True)
    for row, line in found.lines:
        if line.ours and line.status not in (OK, NOT_SERVED):
            typer.echo(f"{row.name}: {line.kernel}: {line.status}, {line.reason}", err=True)
    if found.stopped:
        typer.echo(found.stopped, err=True)
