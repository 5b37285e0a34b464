"""Two reports beside each other: which kernels got faster or slower, which came and went, and what else changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..measure import OK
from .model import Line, Report, geomean

BETTER, WORSE, SAME, NEW, GONE = "better", "worse", "same", "new", "gone"
NOISE = 0.03  # a median that moved less says nothing
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Change:
    """A kernel on a problem, before and now. ratio: times as fast as before."""

    section: str
    name: str
    kernel: str
    ours: bool
    before: Line | None
    now: Line | None

    @property
    def ratio(self) -> float | None:
        """The time before over the time now."""
        old, new = (None if line is None else line.median_ms for line in (self.before, self.now))
        return old / new if old and new else None

    @property
    def verdict(self) -> str:
        """BETTER, WORSE or SAME, or NEW or GONE.

        A time counts as another one if it moved by more than NOISE and out of the other's p20 to p80. An answer that
        was right and is not any more is worse, whatever it takes.
        """
        if self.before is None or self.now is None:
            return NEW if self.before is None else GONE
        if (self.before.status == OK) != (self.now.status == OK):
            return BETTER if self.now.status == OK else WORSE
        if self.ratio is None or abs(self.ratio - 1) <= NOISE or _overlap(self.before, self.now):
            return SAME
        return BETTER if self.ratio > 1 else WORSE


@dataclass(frozen=True)
class Comparison:
    """All kernels of two reports, and what differs between where they were made."""

    created: str
    machine: str
    differences: list[str]
    changes: list[Change]

    def count(self, *, ours: bool = True) -> Counter[str]:
        """How many of Tilewise's kernels, or of the peers', have each verdict."""
        return Counter(change.verdict for change in self.changes if change.ours == ours)

    @property
    def peers_moved(self) -> float | None:
        """How many times as fast as before the peers are, on geometric average: so far the machine itself moved."""
        found = [change.ratio for change in self.changes if not change.ours and change.ratio]
        return geomean(found) if found else None

    @property
    def text(self) -> str:
        """The counts in one line."""
        count = self.count()
        return ", ".join(f"{count[word]} {word}" for word in (BETTER, WORSE, SAME, NEW, GONE))


def compare(old: Report, new: Report) -> Comparison:
    """What changed from the old report to the new one, kernel by kernel, in the new one's order and then the old's."""
    before, now = _by_key(old), _by_key(new)
    changes = []
    for key in [*now, *(key for key in before if key not in now)]:
        section, line = (now if key in now else before)[key]
        was, is_ = (side[key][1] if key in side else None for side in (before, now))
        changes.append(Change(section, key[0], key[2], line.ours, was, is_))
    return Comparison(old.created, old.machine.get("name", ""), _differences(old, new), changes)


def _by_key(report: Report) -> dict[Key, tuple[str, Line]]:
    """A problem of the same name and other sizes is another problem; where it was measured is told apart."""
    return {
        (row.name, repr(sorted((k, v) for k, v in row.point.items() if k != "device")), line.kernel): (
            row.section,
            line,
        )
        for row, line in report.lines
    }


def _differences(old: Report, new: Report) -> list[str]:
    """Where and with what: every fact that is not the same."""
    found = []
    for what in ("machine", "versions", "peers"):
        before, now = getattr(old, what), getattr(new, what)
        for name in [*now, *(name for name in before if name not in now)]:
            was, is_ = before.get(name, "not there"), now.get(name, "not there")
            if was != is_:
                found.append(f"{name}: {was} before, {is_} now")
    if old.quick != new.quick:
        found.append(f"rows: {'--quick' if old.quick else 'all'} before, {'--quick' if new.quick else 'all'} now")
    return found


def _overlap(a: Line, b: Line) -> bool:
    """Do the two intervals from p20 to p80 touch?"""
    low = max(a.p20_ms or 0.0, b.p20_ms or 0.0)
    high = min(a.p80_ms or 0.0, b.p80_ms or 0.0)
    return low <= high
