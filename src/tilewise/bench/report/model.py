"""A report as plain values: what the JSON beside the page holds, and all that the page is made of."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ...plan.schedule_files import replacing
from ..measure import FAILED, OK, WRONG, Result
from ..records import Value, records
from ..workloads import Point

FORMAT, VERSION = "tilewise report", 1
NOT_SERVED = "not served"  # valid, and no kernel here does it: what a call raises NotImplementedError for
_REFUSED = "NotImplementedError: "

Made = TypeVar("Made")


@dataclass(frozen=True)
class Line:
    """What was found out about one kernel on one problem; what was not measured is None.

    error: the largest, against float64; baseline: that of PyTorch's own mathematics in the same dtype; allowed: the
    largest that passes by the tolerance rule.
    """

    kernel: str
    ours: bool
    status: str
    reason: str = ""
    error: float | None = None
    baseline: float | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    loops: int | None = None
    tflops: float | None = None
    gbps: float | None = None
    pct_of_ceiling: float | None = None
    ratio_to: dict[str, float] = field(default_factory=dict)
    allowed: float | None = None

    @property
    def intensity(self) -> float | None:
        """FLOP per byte that this kernel cannot avoid."""
        return 1e3 * self.tflops / self.gbps if self.tflops and self.gbps else None


@dataclass(frozen=True)
class Row:
    """A problem with what was measured of it, and the command that measures it again.

    sample: clocks, power and temperature right after it, as far as the machine tells.
    """

    section: str
    name: str
    command: str
    point: dict[str, Value]
    lines: list[Line]
    sample: dict[str, float] = field(default_factory=dict)

    @property
    def ours(self) -> Line | None:
        """Tilewise as people call it by default: the first of its kernels."""
        return next((line for line in self.lines if line.ours), None)

    @property
    def ratio(self) -> float | None:
        """Tilewise's speed over that of the best peer."""
        return min(self.ours.ratio_to.values(), default=None) if self.ours else None


@dataclass(frozen=True)
class Ceiling:
    """What a device can do at best: FLOP/s and bytes/s; measured here, or known of the card."""

    name: str
    dtype: str
    flops: float
    bandwidth: float
    measured: bool = True


@dataclass(frozen=True)
class Picture:
    """A plan: rows meet keys. rectangles: [key, row, keys, rows, share of its pairs that are seen]."""

    title: str
    note: str
    text: str
    rows: int
    keys: int
    rectangles: list[list[float]]


@dataclass(frozen=True)
class Ladder:
    """The rungs, timed or counted, as `tilewise ladder --json` has them; skipped: why there are none."""

    title: str = ""
    counted: bool = False
    skipped: str = ""
    command: str = ""
    rungs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """One run. peers: the version of each, or why it is not here. stopped: what Ctrl-C left out, "" if nothing."""

    created: str
    command: str
    device: str
    quick: bool
    machine: dict[str, str]
    versions: dict[str, str]
    peers: dict[str, str]
    ceilings: list[Ceiling] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    ladder: Ladder = field(default_factory=Ladder)
    notes: list[str] = field(default_factory=list)
    stopped: str = ""

    @property
    def lines(self) -> list[tuple[Row, Line]]:
        """Every kernel of every row."""
        return [(row, line) for row in self.rows for line in row.lines]

    @property
    def broken(self) -> bool:
        """Is one of Tilewise's kernels wrong, or did it fail? What is not served is neither."""
        ours = [line.status for _, line in self.lines if line.ours]
        rungs = [rung.get("status") for rung in self.ladder.rungs]
        return any(status in (WRONG, FAILED) for status in (*ours, *rungs))


def lines_of(point: Point, results: list[Result]) -> list[Line]:
    """The results of a problem, with the digits that records have."""
    made = []
    for result, record in zip(results, records(point, results), strict=True):
        status, reason = result.status, result.reason
        if status == FAILED and reason.startswith(_REFUSED):
            status, reason = NOT_SERVED, reason.removeprefix(_REFUSED)
        same: dict[str, Any] = {f.name: record[f.name] for f in fields(Line) if f.name in record}
        same |= {"status": status, "reason": reason, "baseline": record["error_baseline"]}
        same["allowed"] = None if result.allowed is None else float(f"{result.allowed:.6g}")
        ratios = {name: float(f"{ratio:.6g}") for name, ratio in result.ratio_to.items()}
        made.append(Line(ours=result.ours, ratio_to=ratios if status == OK else {}, **same))
    return made


def geomean(values: Sequence[float]) -> float:
    """The geometric mean: of ratios, the one that does not care which side is called 1."""
    return math.exp(sum(map(math.log, values)) / len(values))


# ---- files ------------------------------------------------------------------------------------------------------


def dump(report: Report) -> str:
    """The report as JSON."""
    return json.dumps({"format": FORMAT, "version": VERSION, **asdict(report)}, indent=1, ensure_ascii=False) + "\n"


def save(text: str, path: Path) -> None:
    """Write a file in one step: being stopped meanwhile leaves the old one."""
    with replacing(path) as file:
        file.write(text.encode())


def load(path: Path) -> Report:
    """The report in a file; ValueError that names the file if it holds none, or one of another version."""
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:  # of the decoder, or of what should be UTF-8
        raise ValueError(f"{path} is not a report: it is no JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path} is not a report: it is no JSON that `tilewise report` wrote")
    if data.get("version") != VERSION:
        raise ValueError(f"{path} is a report of version {data.get('version')!r}, this Tilewise reads {VERSION}")
    try:
        return _of(Report, {key: value for key, value in data.items() if key not in ("format", "version")})
    except ValueError as error:
        raise ValueError(f"{path} is a damaged report: {error}") from None


def _of(kind: type[Made], data: object, name: str = "the report") -> Made:
    """`data` as the dataclass, each value of the kind that it is declared to be."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} must be an object")
    hints = get_type_hints(kind)
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for key in data:
        if key not in names:
            raise ValueError(f"{name} has a {key!r} that no report has")
    try:
        return kind(**{key: _value(hints[key], value, key) for key, value in data.items()})
    except TypeError as error:  # one is missing
        raise ValueError(f"{name}: {error}") from None


def _value(hint: Any, value: Any, name: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for one in inner:
            try:
                return _value(one, value, name)
            except ValueError:
                continue
    elif origin is list and isinstance(value, list):
        return [_value(inner[0], item, name) for item in value]
    elif origin is dict and isinstance(value, dict):
        return {key: _value(inner[1], item, key) for key, item in value.items()}
    elif is_dataclass(hint) and isinstance(hint, type):
        return _of(hint, value, name)
    elif hint is Any:
        return value
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    raise ValueError(f"{name} must be {getattr(hint, '__name__', hint)}, got {value!r:.80}")
