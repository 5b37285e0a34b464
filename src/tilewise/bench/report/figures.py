"""The figures of a report: lines over length and batch, ratios section by section, the roofline, the ladder, plans."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..measure import OK
from .charts import Frame, Scale, Series, axes, line_chart, log_ticks, marker, scale, spread
from .markup import Html, tag
from .model import Ladder, Line, Picture, Report, Row
from .rows import BATCH, DECODE, LENGTH

# Sections that are drawn over an axis: the axis, its name, and whether their rate or their time is shown.
OVER = {LENGTH: ("seq", "sequence length (tokens)", True), BATCH: ("batch", "sequences", True),
        DECODE: ("batch", "sequences", False)}  # fmt: skip


def slots(report: Report) -> dict[str, int]:
    """A colour for each kernel by its name, the same in the whole report: Tilewise's own first."""
    found = [line for _, line in report.lines]
    names = [line.kernel for line in found if line.ours] + [line.kernel for line in found if not line.ours]
    return {name: slot for slot, name in enumerate(dict.fromkeys(names))}


def figure(caption: object, svg: Html, *, wide: bool = False) -> Html:
    """A picture under its caption; a wide one scrolls in itself where there is no room."""
    inner = tag("div", svg, class_="scroll", tabindex="0") if wide else svg
    return tag("figure", tag("figcaption", caption), inner, class_="wide" if wide else None)


def geomean(values: Sequence[float]) -> float:
    """The geometric mean: of ratios, the one that does not care which side is called 1."""
    return math.exp(sum(map(math.log, values)) / len(values))


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
    """Every row's speed beside its best peer: a strip per section, its geometric mean in figures."""
    strips: dict[str, list[tuple[float, str]]] = {}
    for row in report.rows:
        if row.ratio:
            strips.setdefault(row.section, []).append((row.ratio, row.name))
    if not strips:
        return None
    found = [ratio for strip in strips.values() for ratio, _ in strip]
    low, high = min(0.8, *found) / 1.08, max(1.25, *found) * 1.08
    frame = Frame(720, 58.0 + 30 * len(strips), left=156, right=64, top=20, bottom=40)
    x = scale((low, high), frame.x, log=True)
    bottom, top = frame.y
    drawn = []
    for tick in log_ticks(low, high, 9):
        drawn.append(tag("line", class_="grid", x1=x(tick), x2=x(tick), y1=top, y2=bottom))
        drawn.append(tag("text", f"{tick:g}×", class_="tick", x=x(tick), y=bottom + 16, text_anchor="middle"))
    drawn.append(tag("line", class_="one", x1=x(1), x2=x(1), y1=top - 6, y2=bottom))
    drawn.append(tag("text", "← best peer is faster", class_="unit", x=x(1) - 8, y=top - 8, text_anchor="end"))
    drawn.append(tag("text", "Tilewise is faster →", class_="unit", x=x(1) + 8, y=top - 8))
    for number, (section, strip) in enumerate(strips.items()):
        y = top + 16 + 30.0 * number
        drawn.append(tag("text", section, class_="label", x=frame.left - 12, y=y + 4, text_anchor="end"))
        drawn.append(tag("line", class_="grid", x1=frame.x[0], x2=frame.x[1], y1=y, y2=y))
        drawn += [marker(0, x(ratio), y, f"{name}: {ratio:.2f}×", 4.2) for ratio, name in strip]
        mean = geomean([ratio for ratio, _ in strip])
        drawn.append(tag("text", f"{mean:.2f}×", class_="value", x=frame.width - 4, y=y + 4, text_anchor="end"))
    label = "times as fast as the best peer on the row; right: geometric mean"
    drawn.append(tag("text", label, class_="unit", x=sum(frame.x) / 2, y=frame.height - 6, text_anchor="middle"))
    return frame.svg("Speed beside the best peer", *drawn)


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
    frame = Frame(760, 400, right=150, top=26)
    across = [intensity for _, intensity, _ in dots]
    ridges = [ceiling.flops / ceiling.bandwidth for ceiling in report.ceilings]
    low_x, high_x = min(across) / 2, max(*across, 1.5 * max(ridges)) * 1.5
    top_y = max(ceiling.flops for ceiling in report.ceilings) / 1e12 * 1.6
    low_y = min(*(rate for _, _, rate in dots), *(c.bandwidth * low_x / 1e12 for c in report.ceilings)) / 1.6
    x, y = scale((low_x, high_x), frame.x, log=True), scale((low_y, top_y), frame.y, log=True)
    x_ticks, y_ticks = log_ticks(low_x, high_x, 9), log_ticks(low_y, top_y, 9)
    drawn = axes(frame, x, y, x_ticks, y_ticks, "FLOP per byte that the kernel cannot avoid", "TFLOP/s")
    drawn += _roofs(report, frame, x, y, low_x)
    order = [section for section in sections if any(row.section == section for row, _, _ in dots)]
    best: dict[str, float] = {}
    for row, intensity, rate in dots:
        title = f"{row.section}, {row.name}: {rate:.3g} TFLOP/s at {intensity:.3g} FLOP/byte"
        drawn.append(marker(order.index(row.section), x(intensity), y(rate), title, 4.2))
        best[row.section] = min(best.get(row.section, math.inf), y(rate))
    wanted = [best[section] for section in order]
    places = spread(wanted, 15, low=frame.top + 34, high=frame.height - frame.bottom - 4)
    for slot, (section, place) in enumerate(zip(order, places, strict=True)):
        left = frame.width - frame.right + 18
        drawn.append(marker(slot, left, place - 4, "", 4.2))
        drawn.append(tag("text", section, class_="label", x=left + 10, y=place))
    return frame.svg("Roofline", *drawn)


def _roofs(report: Report, frame: Frame, x: Scale, y: Scale, low_x: float) -> list[Html]:
    """The slope of the memory and the flat of the arithmetic of each ceiling; equal ones share a line."""
    names: dict[tuple[float, float, bool], list[str]] = {}
    for c in report.ceilings:
        names.setdefault((c.flops, c.bandwidth, c.measured), []).append(f"{c.dtype}, {c.name}")
    drawn = []
    right = frame.x[1]
    wanted = [y(flops / 1e12) for flops, _, _ in names]
    places = spread(wanted, 12, low=10)
    for (flops, bandwidth, measured), place in zip(names, places, strict=True):
        ridge = flops / bandwidth
        start, corner = (x(low_x), y(bandwidth * low_x / 1e12)), (x(ridge), y(flops / 1e12))
        path = f"M{start[0]:.2f},{start[1]:.2f}L{corner[0]:.2f},{corner[1]:.2f}L{right:.2f},{corner[1]:.2f}"
        drawn.append(tag("path", class_="roof" if measured else "roof known", d=path))
        text = f"{flops / 1e12:.3g} TFLOP/s, {', '.join(names[flops, bandwidth, measured])}"
        drawn.append(tag("text", text, class_="unit", x=right - 4, y=place - 5, text_anchor="end"))
        half = math.sqrt(low_x * ridge)
        drawn.append(tag("text", f"{bandwidth / 1e9:.3g} GB/s", class_="unit", x=x(half) - 6,
                         y=y(bandwidth * half / 1e12) - 6, text_anchor="end"))  # fmt: skip
    return drawn


# ---- the ladder -------------------------------------------------------------------------------------------------


def ladder_bars(ladder: Ladder) -> Html | None:
    """A bar per timed rung: TFLOP/s, its milliseconds at the end; torch's are hollow."""
    rungs = [rung for rung in ladder.rungs if rung.get("tflops")]
    if not rungs:
        return None
    frame = Frame(720, 30.0 + 20 * len(rungs), left=150, right=110, top=6, bottom=24)
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
