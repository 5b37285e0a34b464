"""Measuring what is fastest on a card, into the table that tuned.py looks up. `tilewise tune` shows it.

A `Problem` is a key of the table with the tiling that is chosen without one and the tilings beside it. Those that
compile without spills and fit are timed in turns with the chosen one; a faster one must be faster again when the two
run alone. The table is written after every problem, so that whatever ends the run leaves what is done.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch

from tilewise import __version__, arch, compiler, tuned
from tilewise.compiler.spec import KernelSpec
from tilewise.tuned import Section, Tuned, Value

from . import smi
from .measure import HEAT, Timing, time_calls, time_replays
from .records import package_version

GAIN = 0.01  # share of the time by which another tiling must be faster, twice, to be taken
CHOSEN = "as chosen"
Call = Callable[[], object]
Record = dict[str, Any]


class Machine(Protocol):
    """A card that can be measured; tests have one whose clock they set."""

    card: str
    target: str

    def faults(self, specs: Sequence[KernelSpec]) -> list[str]:
        """Of each kernel why it is not to be used: it does not compile, spills or does not fit; "" if it is."""

    def times(self, calls: Mapping[str, Call], budget: float, *, replay: bool = False) -> dict[str, Timing]:
        """The calls in turns, in about so many seconds; replay: as CUDA graphs, for kernels of microseconds."""

    def state(self) -> Record:
        """Clocks, driver and versions, as a table keeps them."""


@dataclass(frozen=True)
class Problem:
    """One key of the table.

    tiling: as it is chosen without a table. others: those beside it, of the same class. specs: the kernels that a
    tiling of this key may have to be, of which the first is the one that is measured. bind: a call of this problem
    where this is the table, which is that kernel. same: does a call of another tiling give what the chosen one gives?
    """

    family: str
    key: str
    name: str
    tiling: Any
    others: tuple[Any, ...]
    specs: Callable[[Any], list[KernelSpec]]
    bind: Callable[[Tuned, KernelSpec], Call]
    same: Callable[[Call, Call], bool]
    replay: bool = False  # timed as a graph


def difference(tiling: Any, other: Any) -> dict[str, Value]:
    """What `other` has differently, by field."""
    names = [f.name for f in fields(tiling)]
    return {n: getattr(other, n) for n in names if getattr(other, n) != getattr(tiling, n)}


def entry_of(family: str, tiling: Any) -> dict[str, Value]:
    """A tiling as a table has it: all that it may have from there, so that it is taken as it was measured."""
    names = tuned.DECODE_FREE if family == "decode" else [f.name for f in fields(tiling)]
    return {name: getattr(tiling, name) for name in names if name not in tuned.FIXED.get(family, ())}


def words(entry: Mapping[str, Value]) -> str:
    return ", ".join(f"{name} {value}" for name, value in entry.items()) or CHOSEN


def holding(family: str, key: str, entry: Mapping[str, Value]) -> Tuned:
    """A table that has nothing but this entry."""
    return Tuned({family: Section("", "", {key: entry})})


def solve(problem: Problem, machine: Machine, seconds: float) -> tuple[dict[str, Value], list[Record]]:
    """The entry of the fastest tiling, empty for the one that is chosen anyway, and a record of every tiling."""
    tilings = {words(difference(problem.tiling, other)): other for other in (problem.tiling, *problem.others)}
    specs = [problem.specs(tiling)[0] for tiling in tilings.values()]
    faults = dict(zip(tilings, machine.faults(specs), strict=True))
    records = {name: _record(problem, tiling, faults[name]) for name, tiling in tilings.items()}
    calls: dict[str, Call] = {}
    for (name, tiling), spec in zip(tilings.items(), specs, strict=True):
        if not faults[name]:
            call = problem.bind(holding(problem.family, problem.key, entry_of(problem.family, tiling)), spec)
            if CHOSEN in calls and not problem.same(calls[CHOSEN], call):
                records[name]["status"] = "another result"
                continue
            calls[name] = call
    if CHOSEN not in calls:
        return {}, list(records.values())
    timings = machine.times(calls, seconds * 2 / 3, replay=problem.replay) if len(calls) > 1 else {}
    for name, timing in timings.items():
        records[name] |= times_record(timing)
    for name in sorted(timings, key=lambda name: timings[name].median):
        if not _faster(timings[name], timings[CHOSEN]):
            break
        if any(machine.faults(problem.specs(tilings[name]))):
            records[name]["status"] = "spills in another kernel of this key"
            continue
        pair = {name: calls[name], CHOSEN: calls[CHOSEN]}
        again = machine.times(pair, seconds / 3, replay=problem.replay)
        if _faster(again[name], again[CHOSEN]):
            records[name]["taken"] = True
            return entry_of(problem.family, tilings[name]), list(records.values())
    records[CHOSEN]["taken"] = True
    return {}, list(records.values())


def _faster(timing: Timing, chosen: Timing) -> bool:
    return timing.median < (1 - GAIN) * chosen.median


def _record(problem: Problem, tiling: Any, fault: str) -> Record:
    """tiling: what differs from the chosen one."""
    differs = difference(problem.tiling, tiling)
    return {"key": problem.key, "problem": problem.name, "tiling": differs, "status": fault or "ok", "taken": False}


def times_record(timing: Timing) -> Record:
    seconds = {"median_us": timing.median, "p20_us": timing.p20, "p80_us": timing.p80}
    return {**{name: round(1e6 * value, 4) for name, value in seconds.items()}, "loops": timing.loops}


# ---- the table --------------------------------------------------------------------------------------------------


class Book:
    """The user's table of a card, which every problem that is solved is written into at once."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine, self.path = machine, folder / tuned.file_name(machine.card, machine.target)
        self.record: Record = {
            "format": tuned.FORMAT, "card": machine.card, "target": machine.target, "families": {},
        }  # fmt: skip
        try:  # what stands there stays, but for families whose kernels are others now
            kept = tuned.read(self.path)
        except (OSError, ValueError):
            return
        for family, section in kept.families.items():
            if not tuned.refusal(kept, family, machine.card, machine.target):
                self.record["families"][family] = dict(section.record)

    def add(
        self,
        family: str,
        timings: Sequence[Record],
        *,
        tilings: Mapping[str, Mapping[str, Value]] | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        """Take what was found about a family in place of what stood there of the same keys, and write the file."""
        section: Record = self.record["families"].setdefault(family, {})
        section |= {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "source": tuned.source(family)}
        section.pop("carried", None)
        section |= self.machine.state()
        section["tilings"] = {**section.get("tilings", {}), **(tilings or {})}
        section["constants"] = {**section.get("constants", {}), **(constants or {})}
        keys = {timing["key"] for timing in timings}
        section["timings"] = [t for t in section.get("timings", []) if t["key"] not in keys] + list(timings)
        self.write()

    def write(self) -> None:
        """Beside its place first, then into it: a reader finds the old table or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(f".{self.path.name}-{os.getpid()}")
        try:
            aside.write_text(json.dumps(self.record, indent=1) + "\n")
            os.replace(aside, self.path)
        finally:
            aside.unlink(missing_ok=True)


@dataclass
class Outcome:
    """What a run has done so far: problems solved and asked for, and those for which another tiling was taken."""

    asked: int
    solved: int = 0
    taken: int = 0
    out_of_time: bool = False


def tune(
    problems: Iterable[Problem],
    machine: Machine,
    book: Book,
    outcome: Outcome,
    *,
    count: int,
    budget: float,
    before: Callable[[Problem], None] = lambda problem: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Solve the `count` problems within about `budget` seconds, each with an even share of what is left of them."""
    end = clock() + budget
    for number, problem in enumerate(problems):
        left = end - clock()
        if left <= 0:
            outcome.out_of_time = True
            return
        before(problem)
        entry, records = solve(problem, machine, left / max(1, count - number))
        book.add(problem.family, records, tilings={problem.key: entry})
        outcome.solved += 1
        outcome.taken += bool(entry)


# ---- a card -----------------------------------------------------------------------------------------------------


class Card:
    """The CUDA device at hand, as a Machine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.card, self.target = torch.cuda.get_device_name(device), arch.card_of(device)

    def faults(self, specs: Sequence[KernelSpec]) -> list[str]:
        rows = compiler.resource_table(specs, [arch.arch_of_device(self.device)])
        return [_fault(row, arch.shared_block(self.target)) for row in rows]

    def times(self, calls: Mapping[str, Call], budget: float, *, replay: bool = False) -> dict[str, Timing]:
        if replay:
            return time_replays(calls, device=self.device, budget=budget)
        heat = min(HEAT, budget / 3)
        return time_calls(calls, device=self.device, budget=budget - heat, heat=heat)

    def state(self) -> Record:
        versions = {"tilewise": __version__, "torch": torch.__version__, "cuda": torch.version.cuda}
        versions |= {name: package_version(name) for name in ("cuda-bindings", "nvidia-cuda-nvrtc")}
        capability = ".".join(map(str, arch.capability(self.device)))
        return {"capability": capability, "versions": versions, **_told(self.device)}


def _fault(row: compiler.ResourceRow, most: int) -> str:
    if row.error is not None:
        return f"does not compile: {row.error.strip().splitlines()[0]}"
    if row.spill_stores or row.spill_loads:
        return f"spills {row.spill_stores + row.spill_loads} bytes"
    if row.serialised:
        return "wgmma is serialised"
    return f"needs {row.shared_bytes} bytes of shared memory, there are {most}" if row.shared_bytes > most else ""


SAID = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")


def _told(device: torch.device) -> Record:
    """The driver, and clocks (MHz) and power limit (W) as they are now, by nvidia-smi; nothing where there is none."""
    told = smi.ask(device, ("driver_version", *SAID))
    return {"driver": told.pop("driver_version", None), "clocks": told}
