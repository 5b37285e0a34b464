"""The tables of a report: numbers that a reader can sort, each cell with the value it is sorted by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..measure import FAILED, OK, WRONG
from ..tables import _number, _percent, _ratio
from .charts import SLOTS
from .compare import BETTER, GONE, NEW, SAME, WORSE, Comparison
from .markup import Html, tag
from .model import NOT_SERVED, Ladder, Line, Report, Row

WORDS = {OK: "ok", WRONG: "wrong", FAILED: "failed", NOT_SERVED: "unserved"}  # classes of page.css
VERDICTS = {BETTER: "ok", WORSE: "wrong", SAME: "same", NEW: "unserved", GONE: "failed"}
# What the emulator counts of a rung, by its name there, and what it is shown in.
COUNTED = {
    "bank_conflicts": 1.0, "matrix_conflicts": 1.0, "tensor_flops": 1e-6, "scalar_flops": 1e-6, "exponentials": 1.0,
    "global_bytes": 1 / 1024, "async_bytes": 1 / 1024, "barriers": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """What a cell shows and, if that is not what it is sorted by, a value. A `share` in percent is a bar under it."""

    shown: object
    value: float | str | None = None
    number: bool = True
    share: float | None = None

    def html(self, *, heading: bool = False) -> Html:
        style = None if self.share is None else f"--share:{max(0.0, min(100.0, self.share)):.0f}%"
        names = [*(["n"] if self.number else []), *(["share"] if style else [])]
        value = None if self.value is None else f"{self.value:.10g}" if isinstance(self.value, float) else self.value
        scope = "row" if heading else None
        return tag(
            "th" if heading else "td",
            self.shown,
            class_=" ".join(names) or None,
            style=style,
            data_v=value,
            scope=scope,
        )


def text(shown: object, value: str | None = None) -> Cell:
    """A cell of words."""
    return Cell(shown, value, number=False)


def number(value: float | None, scale: float = 1.0) -> Cell:
    """A cell of a number, three digits."""
    return Cell(_number(None if value is None else value * scale), value)


def table(
    heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[Cell]], label: str, *, sortable: bool = True
) -> Html:
    """A table that scrolls in itself; heads: each column's name and what it means. The first column names the row."""
    top = [
        tag("th", name, scope="col", title=meaning or None, class_="n" if rows and rows[0][i].number else None)
        for i, (name, meaning) in enumerate(heads)
    ]
    body, before = [], None
    for row in rows:
        first = row[0].value or row[0].shown
        cells = [cell.html(heading=i == 0) for i, cell in enumerate(row)]
        body.append(tag("tr", *cells, class_="again" if first == before else None))
        before = first
    made = tag("table", tag("thead", tag("tr", *top)), tag("tbody", *body), class_="sortable" if sortable else None)
    return tag("div", made, class_="scroll", tabindex="0", role="region", aria_label=label)


def pill(status: str, word: str, title: str = "") -> Html:
    """A short word in the colour of what it says."""
    return tag("span", status, class_=f"pill {word}", title=title or None)


def kernel_name(name: str, ours: bool, colours: dict[str, int]) -> Html:
    """A kernel beside the colour that it has in the charts."""
    dot = tag("span", class_=f"swatch s{colours.get(name, 0) % SLOTS}")
    return tag("span", dot, name, class_="kernel" + (" ours" if ours else ""))


def check(line: Line) -> Cell:
    """The verdict on an answer."""
    if line.status == OK and line.error is None:
        return text(tag("span", "–", title="it computes something else, or nothing that is judged"), "–")
    return text(pill(line.status, WORDS.get(line.status, "failed"), line.reason), line.status)


# ---- results ----------------------------------------------------------------------------------------------------


def results(rows: Sequence[tuple[int, Row]], colours: dict[str, int], label: str) -> Html:
    """Every kernel of a section's rows; rows: with their numbers in the list of commands."""
    lines = [line for _, row in rows for line in row.lines]
    names = list(dict.fromkeys(name for line in lines for name in line.ratio_to))
    medians = sorted(line.median_ms for line in lines if line.median_ms)
    unit, size = ("µs", 1e3) if medians and medians[len(medians) // 2] < 0.5 else ("ms", 1.0)
    heads = [
        ("problem", "its name leads to the command that measures it again"),
        ("kernel", "Tilewise's are bold"),
        ("check", "against float64, by the tolerance rule"),
        ("error", "the largest of any element, against float64"),
        ("allowed", "twice the error of PyTorch's own mathematics in the same dtype, and what rounding adds"),
        (f"median {unit}", "of all calls, kernels taking turns"),
        (f"p20–p80 {unit}", "the middle three fifths of the calls"),
        ("TFLOP/s", "over what has to be computed"),
        ("GB/s", "over what has to be moved"),
        ("of ceiling", "share of what the machine's measured ceiling allows for this work"),
        *((f"×\u00a0{name}", f"times as fast as {name}") for name in names),
    ]
    body = []
    for at, row in rows:
        for line in row.lines:
            body.append([
                text(tag("a", row.name, href=f"#command-{at}", title=row.command), row.name),
                text(kernel_name(line.kernel, line.ours, colours), line.kernel),
                check(line),
                *_errors(line.error, line.allowed),
                *_times(line, size),
                number(line.tflops),
                number(line.gbps),
                Cell(_percent(line.pct_of_ceiling), line.pct_of_ceiling, share=line.pct_of_ceiling),
                *(Cell(_ratio(line.ratio_to.get(name)), line.ratio_to.get(name)) for name in names),
            ])  # fmt: skip
    return table(heads, body, label)


def _errors(*errors: float | None) -> list[Cell]:
    return [Cell("" if error is None else f"{error:.1e}", error) for error in errors]


def _times(line: Line, size: float) -> list[Cell]:
    if line.median_ms is None or line.p20_ms is None or line.p80_ms is None:
        return [Cell(""), Cell("")]
    spread = f"{_number(line.p20_ms * size)}–{_number(line.p80_ms * size)}"
    return [number(line.median_ms, size), Cell(spread, line.p80_ms - line.p20_ms)]


def troubles(report: Report) -> Html | None:
    """What failed, is wrong or is not served, of every kernel and rung, with why."""
    body = [
        [
            text(row.name),
            text(line.kernel),
            text(pill(line.status, WORDS.get(line.status, "failed")), line.status),
            text(line.reason),
        ]
        for row, line in report.lines
        if line.status != OK
    ]
    for rung in report.ladder.rungs:
        status = str(rung.get("status"))
        if status != OK:
            shown = text(pill(status, WORDS.get(status, "unserved")), status)
            body.append([text("the ladder"), text(rung.get("rung")), shown, text(rung.get("reason"))])
    heads = [("problem", ""), ("kernel", ""), ("what", ""), ("why", "")]
    return table(heads, body, "What failed or is not served") if body else None


def commands(rows: Sequence[tuple[int, Row]], ladder: Ladder) -> Html:
    """The command that measures each row again."""
    body = [
        [text(tag("span", row.name, id=f"command-{at}"), row.name), text(tag("code", row.command), row.command)]
        for at, row in rows
    ]
    if ladder.command:
        body.append([text("the ladder"), text(tag("code", ladder.command), ladder.command)])
    return table([("problem", ""), ("command", "")], body, "Commands", sortable=False)


def facts(pairs: dict[str, str], label: str) -> Html:
    """Names and what they are."""
    body = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in pairs.items()]
    return tag("div", tag("table", tag("tbody", *body), class_="facts"), class_="scroll", tabindex="0", role="region",
               aria_label=label)  # fmt: skip


# ---- the ladder -------------------------------------------------------------------------------------------------


def rungs(ladder: Ladder) -> Html:
    """The rungs with their times, or with what the emulator counted."""
    heads = [("rung", ""), ("dtype", ""), ("D", "head dimension"), ("check", "against float64, by the tolerance rule"),
             ("error", "the largest of any element of o"), ("allowed", "by the tolerance rule")]  # fmt: skip
    counted = [("sectors / request", "32 bytes each, per request of a warp"), ("sectors used", "share of their bytes"),
               ("bank conflicts", ""), ("ldmatrix conflicts", ""), ("tensor MFLOP", ""), ("scalar MFLOP", ""),
               ("exponentials", ""), ("global KB", ""), ("async KB", ""), ("barriers", "")]  # fmt: skip
    timed = [("median ms", ""), ("p20–p80 ms", ""), ("TFLOP/s", ""), ("× before", "times as fast as the rung before"),
             ("× SDPA", ""), ("× FA2", "")]  # fmt: skip
    body = []
    for rung in ladder.rungs:
        status = str(rung.get("status"))
        shown = (
            text("–")
            if rung.get("peer")
            else text(pill(status, WORDS.get(status, "unserved"), str(rung.get("reason", ""))), status)
        )
        name = tag("span", rung.get("rung"), title=rung.get("idea") or None)
        first = [text(name, str(rung.get("rung"))), text(rung.get("dtype")), number(rung.get("hdim")), shown]
        cells = _counts(rung) if ladder.counted else _rung_times(rung)
        body.append([*first, *_errors(rung.get("error"), rung.get("allowed")), *cells])
    return table([*heads, *(counted if ladder.counted else timed)], body, "The ladder")


def _counts(rung: dict[str, Any]) -> list[Cell]:
    if "global_bytes" not in rung:
        return [Cell("")] * 10
    used = 100 * rung["sectors_used"]
    plain = [(rung[name], size) for name, size in COUNTED.items()]
    first = [number(rung["sectors_per_request"]), Cell(_percent(used), used, share=used)]
    return [*first, *(Cell(_number(value * size) if value else "0", float(value)) for value, size in plain)]


def _rung_times(rung: dict[str, Any]) -> list[Cell]:
    if "median_ms" not in rung:
        return [Cell("")] * 6
    spread = Cell(f"{_number(rung['p20_ms'])}–{_number(rung['p80_ms'])}", rung["p80_ms"] - rung["p20_ms"])
    over = [Cell(_ratio(rung[name]), rung[name]) for name in ("over_previous", "over_sdpa", "over_fa2")]
    return [number(rung["median_ms"]), spread, number(rung["tflops"]), *over]


# ---- two reports ------------------------------------------------------------------------------------------------


def changes(comparison: Comparison, colours: dict[str, int]) -> Html:
    """Tilewise's kernels in the two reports: before, now, how much faster, and how they stood to the best peer."""
    heads = [("problem", ""), ("kernel", ""), ("before ms", "median"), ("now ms", "median"),
             ("now is", "times as fast as before"), ("verdict", "a change over 3% that leaves the other's p20–p80"),
             ("× best peer then", "times as fast"), ("× best peer now", "times as fast")]  # fmt: skip
    body = []
    for change in comparison.changes:
        if not change.ours:
            continue
        verdict, sides = change.verdict, (change.before, change.now)
        best = [None if line is None else min(line.ratio_to.values(), default=None) for line in sides]
        body.append([
            text(change.name),
            text(kernel_name(change.kernel, True, colours), change.kernel),
            *(number(None if line is None else line.median_ms) for line in sides),
            Cell(_ratio(change.ratio), change.ratio),
            text(pill(verdict, VERDICTS[verdict]), verdict),
            *(Cell(_ratio(ratio), ratio) for ratio in best),
        ])  # fmt: skip
    return table(heads, body, "Before and now")
