"""The page of a report: one file of HTML with its style and its script inside, and nothing from anywhere else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from importlib.resources import files

from ..measure import OK, WRONG
from . import figures, tables
from .compare import BETTER, WORSE, Comparison
from .machine import SAMPLED
from .markup import Html, tag
from .model import Report, Row, geomean
from .rows import ABOUT, DECODE, LENGTH, SHARED

SLUGS = {section: section.lower().replace(",", "").replace(" ", "-") for section in ABOUT}
RULE = (
    "An answer is right if its largest error against float64 is at most twice the error that PyTorch's own mathematics "
    "makes in the same dtype, plus the rounding that even a perfect kernel pays. A kernel that is wrong is not timed."
)
METHOD = (
    "All kernels of a row take turns in one timing loop, so that a machine that slows down favours none of them; a "
    "card is warmed up first, and its L2 cache is flushed before every call. The median counts; p20–p80 are the middle "
    "three fifths of the calls. The share of the ceiling is the least time that the machine's measured matrix product "
    "and memory allow for this work, over the time it took."
)


def render(report: Report, comparison: Comparison | None = None) -> str:
    """The page, whole. What the report says is escaped, whoever wrote it."""
    here = files(__package__)
    style, script = (Html((here / name).read_text("utf-8")) for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    parts = list(_sections(report, comparison))
    links = [tag("a", title, href=f"#{slug}") for slug, title, _ in parts]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"Tilewise on {report.machine.get('name', 'this machine')}"),
        tag("style", style),
    )
    sections = [tag("section", tag("h2", title), body, id=slug) for slug, title, body in parts]
    body = tag(
        "body",
        _header(report),
        tag("main", _cards(report, comparison), tag("nav", links, aria_label="Sections"), *sections),
        tag(
            "footer", f"tilewise {report.versions.get('tilewise', '')}, {report.created}. ", tag("code", report.command)
        ),
        tag("script", script),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _header(report: Report) -> Html:
    kind = "Quick report" if report.quick else "Report"
    facts = [report.created.replace("T", " ").replace("+00:00", " UTC"), f"torch {report.versions.get('torch', '?')}"]
    facts += [f"driver {report.machine['driver']}"] if "driver" in report.machine else []
    facts += [f"behaving as {report.machine['behaves as']}"] if "behaves as" in report.machine else []
    notes = [tag("p", text, class_="banner") for text in (report.stopped, *report.notes) if text]
    title = report.machine.get("name", report.device)
    return tag(
        "header", tag("p", f"Tilewise · {kind}", class_="kind"), tag("h1", title), tag("p", " · ".join(facts)), notes
    )


# ---- the cards on top -------------------------------------------------------------------------------------------


def _cards(report: Report, comparison: Comparison | None) -> Html:
    cards = [_machine_card(report), _right_card(report)]
    for title, section in (("Prefill", LENGTH), ("Decode", DECODE), ("Shared prefixes", SHARED)):
        found = [row.ratio for row in report.rows if row.section == section and row.ratio]
        if found:
            span = f"{min(found):.2f}–{max(found):.2f}× over {len(found)} rows" if len(found) > 1 else "one row"
            cards.append(_card(title, f"{geomean(found):.2f}×", "the best peer's speed", span))
    if comparison is not None:
        count = comparison.count()
        shown = Html(_figure(f"{count[BETTER]}", "better") + _figure(f"{count[WORSE]}", "worse"))
        about = f"of {sum(count.values())} kernels of Tilewise"
        cards.append(_card("Since then", shown, about, comparison.created.partition("T")[0]))
    return tag("div", *cards, class_="cards")


def _figure(number: str, unit: str) -> Html:
    return Html(tag("span", number) + tag("small", f" {unit}"))


def _card(title: str, figure: str, *lines: str, bad: bool = False) -> Html:
    shown = tag("p", figure, class_="figure" + (" bad" if bad else ""))
    return tag("div", tag("h3", title), shown, *(tag("p", line) for line in lines if line), class_="card")


def _machine_card(report: Report) -> Html:
    facts = report.machine
    parts = [f"{facts[name]} {name}" for name in ("multiprocessors", "cores", "memory") if name in facts]
    best = next((c for c in report.ceilings if c.measured), None)
    figure = "no ceiling" if best is None else _figure(f"{best.flops / 1e12:.3g}", "TFLOP/s")
    rate = "" if best is None else f"{best.dtype}, {best.bandwidth / 1e9:.4g} GB/s: measured ceiling"
    return _card("Machine", figure, rate, " · ".join(parts))


def _right_card(report: Report) -> Html:
    judged = [line for _, line in report.lines if line.ours and (line.error is not None or line.status == WRONG)]
    right = sum(line.status == OK for line in judged)
    others = [line.status for _, line in report.lines if line.ours and line.status not in (OK, WRONG)]
    rest = ", ".join(f"{others.count(word)} {word}" for word in dict.fromkeys(others))
    return _card(
        "Correct", f"{right} of {len(judged)}", "kernels of Tilewise, against float64", rest, bad=right < len(judged)
    )


# ---- the sections -----------------------------------------------------------------------------------------------


def _sections(report: Report, comparison: Comparison | None) -> Iterator[tuple[str, str, Html]]:
    """Where a link finds it, title and content of each section that there is something to say in."""
    colours, rows = figures.slots(report), list(enumerate(report.rows))
    if (svg := figures.ratios(report)) is not None:
        note = (
            "Each dot is a row: how many times as fast Tilewise is as the fastest peer measured with it. Left of the "
            "dashed line the peer is faster. On the right, the geometric mean."
        )
        yield "ratios", "Beside the best peer", figures.figure(note, svg, note=True)
    if comparison is not None:
        yield "against", "Against the earlier report", _against(comparison, colours)
    for section in dict.fromkeys(row.section for row in report.rows):
        mine = [(at, row) for at, row in rows if row.section == section]
        yield SLUGS.get(section, "rows"), section, _section(section, mine, colours)
    if (svg := figures.roofline(report, list(ABOUT))) is not None:
        note = "Tilewise's kernels under the machine's ceilings: a dot on the line does all that the machine can."
        yield "roofline", "Roofline", figures.figure(note, svg, note=True, wide=True)
    if report.pictures:
        yield "plans", "Plans", _plans(report)
    yield "ladder", "The ladder", _ladder(report)
    yield "troubles", "Not served, failed, absent", _troubles(report)
    yield "machine", "Machine and versions", _machine(report)
    yield "method", "How it was measured", Html(tag("p", METHOD) + tag("p", RULE))
    if report.rows:
        note = tag("p", "Each of these measures its row again, on the machine that it is run on.")
        yield "commands", "Commands", Html(note + tables.commands(rows, report.ladder))


def _section(section: str, rows: list[tuple[int, Row]], colours: dict[str, int]) -> Html:
    panels = figures.over_axis(section, [row for _, row in rows], colours)
    charts = tag("div", *panels, class_="panels") if panels else Html("")
    about = tag("p", ABOUT[section]) if section in ABOUT else Html("")
    return Html(about + charts + tables.results(rows, colours, section))


def _against(comparison: Comparison, colours: dict[str, int]) -> Html:
    where = f"The earlier report is of {comparison.created.replace('T', ' ')}, on {comparison.machine}."
    made = [tag("p", where, " Of Tilewise's kernels: ", tag("strong", comparison.text), ".")]
    if (moved := comparison.peers_moved) is not None:
        made.append(tag("p", f"The peers, which are the same code, are {moved:.2f}× as fast as then on average."))
    if comparison.differences:
        items = [tag("li", line) for line in comparison.differences]
        made.append(tag("p", "Not all else is the same, so times may differ for these reasons:", class_="banner"))
        made.append(tag("ul", *items))
    else:
        made.append(tag("p", "Machine, versions and peers are the same as then."))
    return Html("".join([*made, tables.changes(comparison, colours)]))


def _plans(report: Report) -> Html:
    note = "Which query rows meet which keys, tile by tile; a tile is paler where a mask hides some of its pairs."
    made = []
    for picture in report.pictures:
        about = (tag("figcaption", picture.title), tag("p", picture.note), figures.plan_picture(picture))
        lines = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in picture.text.splitlines()]
        facts = {name: value for name, *rest in lines for value in rest}
        made.append(tag("figure", *about, tables.facts(facts, f"{picture.title}: the plan in numbers")))
    return Html(tag("p", note) + tag("div", *made, class_="panels three"))


def _ladder(report: Report) -> Html:
    ladder = report.ladder
    if not ladder.rungs:
        return tag("p", f"No rung was run: {ladder.skipped or 'it was not asked for'}.")
    what = "Counted in the emulator, which runs the same sources on a CPU" if ladder.counted else "Timed on this card"
    made = [tag("p", f"Attention one idea at a time. {what}: {ladder.title}.")]
    if (svg := figures.ladder_bars(ladder)) is not None:
        made.append(figures.figure("Filled: rungs. Hollow: torch's kernels.", svg, note=True, wide=True))
    return Html("".join([*made, tables.rungs(ladder)]))


def _troubles(report: Report) -> Html:
    found = tables.troubles(report)
    made = [found if found is not None else tag("p", "Every kernel that was asked for ran, and every answer is right.")]
    if report.ladder.skipped:
        made.append(tag("p", f"The ladder: {report.ladder.skipped}."))
    made += [tag("h3", "Peers"), tables.facts(report.peers, "Peers")]
    return Html("".join(made))


def _machine(report: Report) -> Html:
    facts = dict(report.machine)
    for name in dict.fromkeys(key for row in report.rows for key in row.sample):
        values = [row.sample[name] for row in report.rows if name in row.sample]
        unit = SAMPLED.get(name, ("MHz", ""))[0]
        low, high = min(values), max(values)
        span = f"{low:,.0f}" if f"{low:.0f}" == f"{high:.0f}" else f"{low:,.0f}–{high:,.0f}"
        facts[f"{name} after each row"] = f"{span} {unit}"
    for ceiling in report.ceilings:
        facts[f"ceiling, {ceiling.dtype}, {ceiling.name}"] = (
            f"{ceiling.flops / 1e12:.4g} TFLOP/s, {ceiling.bandwidth / 1e9:.4g} GB/s"
        )
    halves = (tables.facts(facts, "Machine"), tables.facts(report.versions, "Versions"))
    return tag("div", *halves, class_="halves")
