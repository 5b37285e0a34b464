"""Sweeps: every combination of lists of dimensions, measured one by one into a CSV that survives being interrupted."""

from __future__ import annotations

import csv
import io
import itertools
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from .measure import FAILED, Result, measure
from .records import COLUMNS, DIMENSIONS, Record, here, records
from .workloads import Point, build, infer

Key = tuple[str, ...]
# What a time depends on beside the problem: a point measured with another of these is another measurement.
VERSIONS = ("tilewise", "torch", "threads")
PLACE = ("machine", *VERSIONS)
_KEY_COLUMNS = (*PLACE, *DIMENSIONS)


def combinations(lists: Mapping[str, Sequence[object]], base: Point) -> tuple[list[Point], list[str]]:
    """Every combination of the lists, on top of `base`, and why each impossible one is left out.

    A `kv_heads` of 0 means as many as there are heads. Equal points (a dense point has no page size) are taken once.
    """
    points: dict[Point, None] = {}
    left_out = []
    for values in itertools.product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        if not chosen.get("kv_heads"):
            chosen["kv_heads"] = chosen.get("heads", base.heads)
        try:
            points[infer(**{**_as_options(base), **chosen})] = None
        except ValueError as error:
            left_out.append(str(error))
    return list(points), left_out


def _as_options(point: Point) -> dict[str, object]:
    return {name: getattr(point, name) for name in DIMENSIONS}


class Sheet:
    """The CSV of a sweep. Rows of a point are appended together and flushed at once; `has` says which points it has.

    `foreign_rows` of a resumed sheet were measured with another version or number of threads than this process has.
    What an interruption can leave behind is a torn last line or a point with some of its rows missing. Both are taken
    out when the sheet is resumed, so those points are measured again.
    """

    def __init__(self, path: Path, *, resume: bool = False, force: bool = False) -> None:
        if path.suffix != ".csv":
            raise ValueError(f"the CSV's path must end in .csv, got {str(path)!r}")
        if path.exists() and not (resume or force):
            raise FileExistsError(f"{path} exists: --resume goes on with it, --force overwrites it")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.foreign_rows = 0
        self._done: set[Key] = set()
        if resume and path.exists():
            self._restore()
        else:
            _write_whole(path, [])
        self._file = open(path, "a", newline="", encoding="utf-8")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> Sheet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def has(self, point: Point) -> bool:
        """Are all rows of this point, measured on this machine with these versions and threads, in the sheet?"""
        place = here(point.device)
        key = (*(str(place[name]) for name in PLACE), *(str(getattr(point, name)) for name in DIMENSIONS))
        return key in self._done

    def append(self, rows: list[Record]) -> None:
        """Write a point's rows in one piece and flush them."""
        self._file.write(_lines(rows))
        self._file.flush()

    def _restore(self) -> None:
        rows, torn = read(self.path)
        counts = Counter(_key(row) for row in rows)
        self._done = {_key(row) for row in rows if row["kernel_count"] == str(counts[_key(row)])}
        kept = [row for row in rows if _key(row) in self._done]
        now = here("cpu")  # versions and threads are the same for every device
        self.foreign_rows = sum(any(row[name] != str(now[name]) for name in VERSIONS) for row in kept)
        if torn or len(kept) < len(rows) or not rows:
            _write_whole(self.path, kept)


def read(path: Path) -> tuple[list[dict[str, str]], bool]:
    """The rows of a sweep's CSV by column name, and whether a torn last line was left out."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    whole, newline, rest = text.rpartition("\n")
    torn = bool(rest)
    lines = list(csv.reader(io.StringIO(whole + newline)))
    if not lines:
        return [], torn
    if tuple(lines[0]) != COLUMNS:
        raise ValueError(f"{path} is not a CSV of this version's `tilewise sweep`: its header line is another")
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(COLUMNS):
            raise ValueError(f"{path} line {number} has {len(line)} columns, a sweep's has {len(COLUMNS)}")
    return [dict(zip(COLUMNS, line, strict=True)) for line in lines[1:]], torn


def _key(row: Mapping[str, str]) -> Key:
    return tuple(row[name] for name in _KEY_COLUMNS)


def _lines(rows: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, COLUMNS, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _write_whole(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Replace the file in one step, so that being killed here loses nothing either."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writeheader()
            file.write(_lines(rows))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def attempt(measuring: Callable[..., list[Result]], *arguments: object) -> list[Result]:
    """What `measuring` finds. A problem that cannot be built (a schedule of another length, out of memory) is one
    result with its reason, not the end."""
    try:
        return measuring(*arguments)
    except (ValueError, TypeError, NotImplementedError, ImportError, OSError, RuntimeError, MemoryError) as error:
        return [Result("tilewise", True, FAILED, " ".join(f"{type(error).__name__}: {error}".split()))]


def _measure(point: Point, loops: int | None, budget: float) -> list[Result]:
    return measure(build(point), loops=loops, budget=budget)


def run(
    points: Sequence[Point],
    sheet: Sheet,
    *,
    loops: int | None = None,
    budget: float = 2.0,
    before: Callable[[Point], None] = lambda point: None,
    after: Callable[[Point, list[Result]], None] = lambda point, results: None,
) -> list[Result]:
    """Measure the points that the sheet does not have yet; `before` and `after` each are for showing progress."""
    measured = []
    for point in points:
        if sheet.has(point):
            continue
        before(point)
        results = attempt(_measure, point, loops, budget)
        sheet.append(records(point, results))
        after(point, results)
        measured += results
    return measured
