"""Charts as inline SVG: scales, axes, lines with their names at the end. Colours are classes of page.css."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .markup import Html, tag

SLOTS = 8  # colours of page.css: a marker's form changes with them
LINE = 13.0  # least distance of two labels
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Series:
    """One line: (x, y, low, high) each, the last two being the ends of a whisker."""

    name: str
    slot: int
    points: list[tuple[float, float, float, float]]


@dataclass(frozen=True)
class Frame:
    """Where things are drawn: the whole size, and the margins left, right, top and bottom."""

    width: float
    height: float
    left: float = 42
    right: float = 122
    top: float = 24
    bottom: float = 40

    @property
    def x(self) -> tuple[float, float]:
        """The left and the right end."""
        return self.left, self.width - self.right

    @property
    def y(self) -> tuple[float, float]:
        """The bottom and the top."""
        return self.height - self.bottom, self.top

    def svg(self, label: str, *children: object) -> Html:
        """The picture; label: what a screen reader says of it."""
        box = f"0 0 {self.width:g} {self.height:g}"
        return tag("svg", *children, viewBox=box, width=self.width, height=self.height, role="img", aria_label=label)


def scale(values: tuple[float, float], pixels: tuple[float, float], *, log: bool) -> Scale:
    """Values to pixels, evenly or by their logarithm."""
    of: Scale = math.log2 if log else float
    low, high = of(values[0]), of(values[1])
    step = (pixels[1] - pixels[0]) / ((high - low) or 1.0)
    return lambda value: pixels[0] + (of(value) - low) * step


def nice_ticks(top: float, count: int = 4) -> list[float]:
    """From 0 to at least `top` in steps of 1, 2 or 5."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= raw * (1 - 1e-9))
    return [step * n for n in range(math.ceil(top / step * (1 - 1e-9)) + 1)]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """1, 2 and 5 of each decade between the two, or the decades alone where these are too many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [d * 10.0**e for e in decades for d in digits if low * 0.999 <= d * 10.0**e <= high * 1.001]
        if len(ticks) <= most:
            break
    return ticks


def short(value: float) -> str:
    """A tick's number: 2,048 as 2k, 0.25 as it is."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.4g}"


def axes(
    frame: Frame,
    x: Scale,
    y: Scale,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_label: str,
    y_label: str,
    text: Callable[[float], str] = short,
) -> list[Html]:
    """Grid lines, numbers at the ticks that have room, and what the axes are of."""
    (left, right), (bottom, top) = frame.x, frame.y
    made = []
    for tick in y_ticks:
        made.append(tag("line", class_="grid", x1=left, x2=right, y1=y(tick), y2=y(tick)))
        made.append(tag("text", short(tick), class_="tick", x=left - 6, y=y(tick) + 3.5, text_anchor="end"))
    last = -math.inf
    for tick in x_ticks:
        made.append(tag("line", class_="grid", x1=x(tick), x2=x(tick), y1=bottom, y2=bottom + 4))
        width = 6.5 * len(text(tick))
        if x(tick) - width / 2 > last + 4:
            made.append(tag("text", text(tick), class_="tick", x=x(tick), y=bottom + 16, text_anchor="middle"))
            last = x(tick) + width / 2
    middle = (left + right) / 2
    made.append(tag("line", class_="axis", x1=left, x2=right, y1=bottom, y2=bottom))
    made.append(tag("text", x_label, class_="unit", x=middle, y=frame.height - 6, text_anchor="middle"))
    made.append(tag("text", y_label, class_="unit", x=2.0, y=top - 12))
    return made


def marker(slot: int, x: float, y: float, title: str = "", size: float = 3.6) -> Html:
    """A dot in its colour's form; the title shows when a mouse rests on it."""
    shape = {
        0: tag("circle", _title(title), cx=x, cy=y, r=size),
        1: tag("rect", _title(title), x=x - size * 0.9, y=y - size * 0.9, width=size * 1.8, height=size * 1.8),
        2: tag(
            "path",
            _title(title),
            d=_path([(x, y - size * 1.2), (x + size * 1.15, y + size * 0.8), (x - size * 1.15, y + size * 0.8)]),
        ),
        3: tag(
            "path",
            _title(title),
            d=_path([(x, y - size * 1.3), (x + size * 1.3, y), (x, y + size * 1.3), (x - size * 1.3, y)]),
        ),
    }[slot % 4]
    return tag("g", shape, class_=f"s{slot % SLOTS} dot")


def _title(text: str) -> Html | None:
    return tag("title", text) if text else None


def _path(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.2f},{y:.2f}" for x, y in corners) + "Z"


def spread(wanted: Sequence[float], least: float = LINE, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """Places as near to those wanted as lets each stand `least` away from the next, between low and high."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [0.0] * len(wanted)
    last = -math.inf
    for i in order:
        places[i] = last = max(wanted[i], last + least, low)
    last = math.inf
    for i in reversed(order):  # what was pushed past the end comes back
        last = places[i] = min(places[i], last - least, high)
    return places


def line_chart(
    label: str, series: Sequence[Series], *, x_label: str, y_label: str, log_y: bool = False, unit: str = ""
) -> Html:
    """A line per series over x, which is spaced by its logarithm; names stand at the lines' ends."""
    frame = Frame(420, 250)
    points = [point for one in series for point in one.points]
    values = sorted({point[0] for point in points})
    low, high = min(point[2] for point in points), max(point[3] for point in points)
    x = scale((values[0], values[-1]), (frame.x[0] + 8, frame.x[1] - 8), log=True)
    if log_y:
        y_ticks = log_ticks(low / 1.15, high * 1.15)
        y = scale((low / 1.15, high * 1.15), frame.y, log=True)
    else:
        y_ticks = nice_ticks(high)
        y = scale((0.0, y_ticks[-1]), frame.y, log=False)
    drawn = axes(frame, x, y, values, y_ticks, x_label, y_label, lambda value: f"{value:g}")
    at = spread([y(one.points[-1][1]) for one in series], low=frame.top, high=frame.height - frame.bottom)
    for one, place in reversed(list(zip(series, at, strict=True))):  # ours is drawn last, over the others
        path = "M" + "L".join(f"{x(point[0]):.2f},{y(point[1]):.2f}" for point in one.points)
        parts = [tag("path", class_="line", d=path)]
        for value, middle, p20, p80 in one.points:
            parts.append(tag("line", class_="whisker", x1=x(value), x2=x(value), y1=y(p20), y2=y(p80)))
            title = f"{one.name}: {middle:.4g} {unit or y_label} at {value:g}"
            parts.append(marker(one.slot, x(value), y(middle), title))
        end = frame.width - frame.right + 10
        if abs(place - y(one.points[-1][1])) > 4:
            parts.append(tag("line", class_="leader", x1=frame.x[1] - 3, x2=end - 2, y1=y(one.points[-1][1]), y2=place))
        parts.append(tag("text", one.name, class_="name", x=end, y=place + 3.5))
        drawn.append(tag("g", *parts, class_=f"s{one.slot % SLOTS}" + (" first" if one.slot == 0 else "")))
    return frame.svg(label, *drawn)
