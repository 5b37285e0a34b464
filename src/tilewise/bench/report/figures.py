"""The figures of a report: lines over length and batch, ratios section by section, the roofline, the ladder, plans."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..measure import OK
from ..tables import _number
from .charts import Frame, Scale, Series, axes, line_chart, log_ticks, marker, scale, spread
from .markup import Html, tag
from .model import Ladder, Line, Picture, Report, Row, geomean
from .rows import BATCH, DECODE, LENGTH

# Sections that are drawn over an axis: the axis, its name, and whether their rate or their time is shown.
OVER = {LENGTH: ("seq", "sequence length (tokens)", True), BATCH: ("batch", "sequences", True),
        DECODE: ("batch", "sequences", False)}  # fmt: skip
# Of the axis of ratios, the most telling first: those that have room are shown.
TICKS = (1.0, 2.0, 0.5, 5.0, 0.2, 10.0, 0.1, 20.0, 50.0, 0.05, 1.5, 0.75, 1.25, 0.9, 1.1, 3.0, 0.3, 4.0, 0.4, 0.6)


def slots(report: Report) -> dict[str, int]:
    """A colour for each kernel by its name, the same in the whole report: Tilewise's first, its peers, its others."""
    first = dict.fromkeys(row.ours.kernel for row in report.rows if row.ours)
    found = [line for _, line in report.lines]
    peers = dict.fromkeys(line.kernel for line in found if not line.ours)
    others = dict.fromkeys(line.kernel for line in found)
    return {name: slot for slot, name in enumerate(first | peers | others)}


def figure(caption: object, svg: Html, *, note: bool = False, wide: bool = False) -> Html:
    """A picture under its caption, a title or a note; a wide one scrolls in itself where there is no room."""
    inner = tag("div", svg, class_="scroll", tabindex="0", role="region", aria_label="chart") if wide else svg
    return tag(
        "figure", tag("figcaption", caption, class_="note" if note else None), inner, class_="wide" if wide else None
    )


# ---- lines ------------------------------------------------------------------------------------------------------


def over_axis(section: str, rows: Sequence[Row], colours: dict[str, int]) -> list[Html]:
    """A panel for each head dimension and mask of a section, where two values of its axis were measured."""
    if section not in OVER:
        return []
    axis, x_label, rate = OVER[section]
    panels: dict[str, list[Row]] = {}
    for row in rows:
        mask = "causal" if row.point.get("causal") else "full"
        title = f"D {row.point.get('hdim')}" + (f", {mask}" if section == LENGTH else "")
        panels.setdefault(title, []).append(row)
    made = []
    for title, group in panels.items():
        series = _series(group, axis, rate, colours)
        if series:
            y_label = "TFLOP/s" if rate else "ms per step"
            svg = line_chart(f"{section}, {title}", series, x_label=x_label, y_label=y_label, log_y=not rate)
            made.append(figure(title, svg))
    return made


def _series(rows: Sequence[Row], axis: str, rate: bool, colours: dict[str, int]) -> list[Series]:
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        for line in row.lines:
            value = row.point.get(axis)
            if isinstance(value, int) and (of := _range(line, rate)) is not None:
                points.setdefault(line.kernel, []).append((float(value), *of))
    found = [Series(name, colours[name], sorted(at)) for name, at in points.items()]
    several = len({point[0] for one in found for point in one.points}) > 1
    return sorted(found, key=lambda one: one.slot) if several else []


def _range(line: Line, rate: bool) -> tuple[float, float, float] | None:
    """The median of a rate or a time, and the ends of p20 to p80."""
    if not (line.median_ms and line.p20_ms and line.p80_ms):
        return None
    if not rate:
        return line.median_ms, line.p20_ms, line.p80_ms
    if not line.tflops:
        return None
    return line.tflops, line.tflops * line.median_ms / line.p80_ms, line.tflops * line.median_ms / line.p20_ms


# ---- ratios -----------------------------------------------------------------------------------------------------


def ratios(report: Report) -> Html | None:
    """Every row's speed beside its best peer: a strip per section, its geometric mean in figures.

    Places are shares of the width, so that it is as wide as there is room and its words keep their size.
    """
    strips: dict[str, list[tuple[float, str]]] = {}
    for row in report.rows:
        if row.ratio:
            strips.setdefault(row.section, []).append((row.ratio, row.name))
    if not strips:
        return None
    found = [ratio for strip in strips.values() for ratio, _ in strip]
    low, high = min(0.8, *found) / 1.08, max(1.25, *found) * 1.08
    percent = scale((low, high), (1.5, 98.5), log=True)
    ticks: dict[float, str] = {}
    for tick in TICKS:
        if low <= tick <= high and all(abs(percent(tick) - percent(other)) > 9 for other in ticks):
            ticks[tick] = f"{percent(tick):.2f}%"

    def strip_of(name: str, value: str, height: int, *drawn: Html) -> Html:
        lines = [
            tag("line", class_="one" if tick == 1 else "grid", x1=x, x2=x, y1=0, y2=height if name else 4)
            for tick, x in ticks.items()
        ]
        svg = tag("svg", *lines, *drawn, width="100%", height=height, role="img", aria_label=name or "the scale")
        return tag("div", tag("span", name), svg, tag("strong", value), class_="strip")

    made = []
    for section, strip in strips.items():
        dots = [
            tag(
                "circle",
                tag("title", f"{name}: {ratio:.2f}×"),
                class_="s0 dot",
                cx=f"{percent(ratio):.2f}%",
                cy=14,
                r=5,
            )
            for ratio, name in strip
        ]
        made.append(strip_of(section, f"{geomean([ratio for ratio, _ in strip]):.2f}×", 28, *dots))
    words = [tag("text", f"{tick:g}×", class_="tick", x=x, y=17, text_anchor="middle") for tick, x in ticks.items()]
    return tag("div", *made, strip_of("", "", 24, *words), class_="strips")


# ---- the roofline -----------------------------------------------------------------------------------------------


def roofline(report: Report, sections: Sequence[str]) -> Html | None:
    """Tilewise's rows over arithmetic intensity, under what the machine can do; a colour per section."""
    dots = [
        (row, line.intensity, line.tflops)
        for row in report.rows
        if (line := row.ours) is not None and line.intensity and line.tflops and line.status == OK
    ]
    if not dots or not report.ceilings:
        return None
    frame = Frame(960, 440, left=54, right=216, top=26)
    across = [intensity for _, intensity, _ in dots]
    ridges = [ceiling.flops / ceiling.bandwidth for ceiling in report.ceilings]
    low_x, high_x = min(across) / 2, max(*across, 1.5 * max(ridges)) * 1.5
    top_y = max(ceiling.flops for ceiling in report.ceilings) / 1e12 * 1.6
    low_y = min(*(rate for _, _, rate in dots), *(c.bandwidth * low_x / 1e12 for c in report.ceilings)) / 1.6
    x, y = scale((low_x, high_x), frame.x, log=True), scale((low_y, top_y), frame.y, log=True)
    x_ticks, y_ticks = log_ticks(low_x, high_x, 9), log_ticks(low_y, top_y, 9)
    drawn = axes(frame, x, y, x_ticks, y_ticks, "FLOP per byte that the kernel cannot avoid", "TFLOP/s")
    lines, labels = _roofs(report, frame, x, y, low_x)
    drawn += lines
    order = [section for section in sections if any(row.section == section for row, _, _ in dots)]
    best: dict[str, float] = {}
    for row, intensity, rate in dots:
        title = f"{row.section}, {row.name}: {rate:.3g} TFLOP/s at {intensity:.3g} FLOP/byte"
        drawn.append(marker(order.index(row.section), x(intensity), y(rate), title, 4.2))
        best[row.section] = min(best.get(row.section, math.inf), y(rate))
    left = frame.width - frame.right + 14
    labels += [(best[section], section, marker(slot, left, 0.0, "", 4.2)) for slot, section in enumerate(order)]
    places = spread([label[0] for label in labels], 15, low=frame.top, high=frame.height - frame.bottom - 4)
    for place, (_, text, sign) in zip(places, labels, strict=True):
        shown = tag("text", text, class_="label", x=left + 12, y=4.0)
        drawn.append(tag("g", sign, shown, transform=f"translate(0 {place:.2f})"))
    return frame.svg("Roofline", *drawn)


def _roofs(
    report: Report, frame: Frame, x: Scale, y: Scale, low_x: float
) -> tuple[list[Html], list[tuple[float, str, Html]]]:
    """The slope of the memory and the flat of the arithmetic of each ceiling, and the labels of the flats.

    Equal ceilings share a line. A label is its height, its text and a piece of its line.
    """
    names: dict[tuple[float, float, str], list[str]] = {}
    for c in report.ceilings:
        names.setdefault((c.flops, c.bandwidth, c.name), []).append(c.dtype)
    dashed = {c.name for c in report.ceilings if not c.measured}
    drawn, labels, slopes = [], [], list(dict.fromkeys((bandwidth, name) for _, bandwidth, name in names))
    left = frame.width - frame.right
    for (flops, bandwidth, name), dtypes in names.items():
        ridge, kind = flops / bandwidth, "roof known" if name in dashed else "roof"
        start, corner = (x(low_x), y(bandwidth * low_x / 1e12)), (x(ridge), y(flops / 1e12))
        path = f"M{start[0]:.2f},{start[1]:.2f}L{corner[0]:.2f},{corner[1]:.2f}L{frame.x[1]:.2f},{corner[1]:.2f}"
        drawn.append(tag("path", class_=kind, d=path))
        sign = tag("line", class_=kind, x1=left + 6, x2=left + 22, y1=0, y2=0)
        labels.append((corner[1], f"{_number(flops / 1e12)} {', '.join(dtypes)}, {name}", sign))
    ridge = max(flops / bandwidth for flops, bandwidth, _ in names)
    for number, (bandwidth, name) in enumerate(slopes):
        at = low_x * (ridge / low_x) ** (0.6 + 0.15 * number)
        place = {"x": x(at) - 8, "y": y(bandwidth * at / 1e12) - 4, "text_anchor": "end"}
        drawn.append(tag("text", f"{_number(bandwidth / 1e9)} GB/s, {name}", class_="unit", **place))
    return drawn, labels


# ---- the ladder -------------------------------------------------------------------------------------------------


def ladder_bars(ladder: Ladder) -> Html | None:
    """A bar per timed rung: TFLOP/s, its milliseconds at the end; torch's are hollow."""
    rungs = [rung for rung in ladder.rungs if rung.get("tflops")]
    if not rungs:
        return None
    frame = Frame(960, 30.0 + 20 * len(rungs), left=150, right=110, top=6, bottom=24)
    top = max(float(rung["tflops"]) for rung in rungs)
    x = scale((0.0, top), frame.x, log=False)
    drawn = []
    for number, rung in enumerate(rungs):
        y, rate = frame.top + 20.0 * number, float(rung["tflops"])
        kind = "bar peer" if rung.get("peer") else "bar"
        drawn.append(tag("text", rung["rung"], class_="label", x=frame.left - 8, y=y + 13, text_anchor="end"))
        drawn.append(tag("rect", class_=kind, x=frame.left, y=y + 3, width=max(1.0, x(rate) - frame.left), height=13))
        text = f"{rate:.3g}  ·  {float(rung['median_ms']):.3g} ms"
        drawn.append(tag("text", text, class_="value", x=x(rate) + 6, y=y + 13))
    drawn.append(tag("text", "TFLOP/s  ·  median time", class_="unit", x=frame.left, y=frame.height - 6))
    return frame.svg("The ladder", *drawn)


# ---- plans ------------------------------------------------------------------------------------------------------


def plan_picture(picture: Picture) -> Html:
    """Rows down, keys across, a rectangle a tile: fuller where more of its pairs are seen."""
    frame = Frame(330, 300, left=42, right=10, top=24, bottom=36)
    x = scale((0.0, float(max(1, picture.keys))), frame.x, log=False)
    y = scale((0.0, float(max(1, picture.rows))), (frame.top, frame.height - frame.bottom), log=False)
    width, height = frame.x[1] - frame.x[0], frame.y[0] - frame.y[1]
    drawn = [tag("rect", class_="ground", x=frame.left, y=frame.top, width=width, height=height)]
    for key, row, keys, rows, share in picture.rectangles:
        drawn.append(tag("rect", class_="tile", x=x(key), y=y(row), width=x(key + keys) - x(key),
                         height=y(row + rows) - y(row), fill_opacity=0.25 + 0.7 * share))  # fmt: skip
    bottom = frame.height - frame.bottom
    for value, place, anchor in ((0, frame.left, "start"), (picture.keys, frame.x[1], "end")):
        drawn.append(tag("text", value, class_="tick", x=place, y=bottom + 14, text_anchor=anchor))
    for value, place in ((0, frame.top + 8), (picture.rows, bottom)):
        drawn.append(tag("text", value, class_="tick", x=frame.left - 6, y=place, text_anchor="end"))
    drawn.append(tag("text", "keys →", class_="unit", x=sum(frame.x) / 2, y=bottom + 14, text_anchor="middle"))
    drawn.append(tag("text", "query rows ↓", class_="unit", x=2, y=frame.top - 10))
    return frame.svg(picture.title, *drawn)
