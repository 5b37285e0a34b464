"""Measure a report: the machine, the rows one after the other, the ladder. Ctrl-C keeps what is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone

import torch

from .. import ladder_commands, rungs, tables
from ..records import Record
from ..workloads import dimensions
from . import machine, plans
from .model import Ladder, Report, Row, lines_of
from .rows import Entry

LADDER = "the ladder"
# With --quick: the steps that change most.
QUICK_RUNGS = ("flash_naive", "flash_2d", "warp_wmma", "mma_swizzle", "mma_qreg_async", "hopper_ring")
Told = Callable[[str], None]


def start(device: torch.device, command: str, quick: bool, only: str = "") -> Report:
    """A report with nothing measured yet."""
    notes = [tables.busy_note()]
    notes += [f"Only the rows with {only!r} in their names were asked for."] if only else []
    return Report(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        device=str(device),
        quick=quick,
        machine=machine.describe(device),
        versions=machine.versions(),
        peers=machine.peer_versions(device),
        notes=[note for note in notes if note],
    )


def gather(
    report: Report,
    chosen: Sequence[Entry],
    device: torch.device,
    loops: int | None,
    before: Told = lambda name: None,
    after: Told = lambda name: None,
    *,
    ladder: bool = True,
) -> Report:
    """The report with the rows chosen and the rest. `before` and `after` each part are for showing progress."""
    done: list[Row] = []
    parts: list[str] = [entry.row.name for entry in chosen] + ([LADDER] if ladder else [])
    try:
        before("the machine's ceilings")
        dtypes = list(dict.fromkeys(entry.row.point.dtype for entry in chosen))
        report = replace(report, ceilings=machine.ceilings_of(device, dtypes))
        best = next(iter(report.ceilings), None)
        report = replace(report, pictures=plans.pictures(device, best))
        for entry in chosen:
            before(entry.row.name)
            point = entry.row.point
            found = lines_of(point, entry.measure(loops))
            place: Record = {**dimensions(point)}
            done.append(Row(entry.section, entry.row.name, entry.command, place, found, machine.sample(device)))
            after(parts.pop(0))
        if ladder:
            before(LADDER)
            report = replace(report, ladder=climb(device, report.quick, loops, before))
            after(parts.pop(0))
    except KeyboardInterrupt:
        left = f"{len(parts)} of {len(chosen) + ladder} parts were not measured: {'; '.join(parts)}"
        skipped = replace(report.ladder, skipped="stopped before it was reached") if LADDER in parts else report.ladder
        report = replace(report, stopped=f"Stopped by Ctrl-C; {left}.", ladder=skipped)
    return replace(report, rows=done)


def climb(device: torch.device, quick: bool, loops: int | None, before: Told = lambda name: None) -> Ladder:
    """The ladder timed on a card, or counted in the emulator; why not where neither is possible."""
    counted = device.type != "cuda"
    sizes = ladder_commands.EMULATED if counted else ladder_commands.ON_CARD
    shape = rungs.Shape(**sizes, dtype="bfloat16", causal=False)
    steps = [step for step in rungs.steps() if not quick or step.name in QUICK_RUNGS]
    command = "tilewise ladder" + (" --emulate" if counted else "")
    made = Ladder(title=shape.title, counted=counted, command=command)
    try:
        if counted:
            found = rungs.count([step for step in steps if step.rung is not None], shape, before)
        else:
            found = rungs.measure(steps, shape, device, loops, before)
    except RuntimeError as error:  # no C++ compiler; no memory
        return replace(made, skipped=" ".join(str(error).split()))
    return replace(made, rungs=[ladder_commands._record(row, shape) | {"peer": row.peer} for row in found])
