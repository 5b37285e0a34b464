"""Where pictures are written, and the picture of a plan: which rows meet which keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.plan.schedule_files import AnyPath, check_path, replacing

if TYPE_CHECKING:
    from tilewise.plan.tiles import Plan, Rectangle

MOST_DRAWN = 200_000  # rectangles; past it a picture is one blur and takes minutes
WHOLE, SEEN, HIDDEN, ASKED, EDGE = "#2171b5", "#6baed6", "#dce9f5", "#b5a1d2", "#1b3a57"
LEGEND = {
    WHOLE: "whole tile: every row sees every key",
    SEEN: "masked tile: pairs that are seen",
    HIDDEN: "masked tile: pairs that are computed and hidden",
    ASKED: "masked tile: the mask function decides",
}


def picture_path(path: AnyPath) -> Path:
    """`path`, which must end in .png or .svg: ValueError for others."""
    return check_path(path, ".png", ".svg")


def save(figure: Any, path: AnyPath) -> None:
    """Writes a figure of matplotlib's as PNG or SVG, by the path's ending, on a white ground.

    The same figure gives the same file, so that pictures can be kept under version control.
    """
    import matplotlib

    target = picture_path(path)
    kind = target.suffix[1:]
    with matplotlib.rc_context({"svg.hashsalt": "tilewise"}), replacing(target) as file:
        figure.savefig(file, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else None)


def draw_plan(plan: Plan, path: AnyPath) -> None:
    """Writes the picture of a work list."""
    picture_path(path)
    save(plan_figure(plan), path)


def plan_figure(plan: Plan) -> Any:
    """The work list: rows down, keys across, one rectangle per tile, and in a masked tile the part that is seen."""
    from matplotlib.collections import PatchCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Polygon
    from matplotlib.patches import Rectangle as Box

    offsets = [sum(plan.keys[:source]) for source in range(len(plan.keys))]
    tiles = _tiles(plan)
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    axes = figure.add_subplot()
    boxes, ground, parts = [], [], []
    for r in tiles:
        x = offsets[r.source] + r.key
        boxes.append(Box((x, r.row), r.keys, r.rows))
        whole = r.pairs == r.rows * r.keys
        ground.append(ASKED if r.partial else WHOLE if whole else HIDDEN)
        if not whole and not r.partial and r.pairs:
            parts.append(Polygon(seen_part(r) + np.array([x, r.row])))
    line = 0.5 if len(boxes) < 2000 else 0.0
    axes.add_collection(PatchCollection(boxes, facecolor=ground, linewidth=0))
    axes.add_collection(PatchCollection(parts, facecolor=SEEN, linewidth=0))
    axes.add_collection(PatchCollection(boxes, facecolor="none", edgecolor=EDGE, linewidth=line))
    for offset in offsets[1:]:
        axes.axvline(offset, color="#b04a2f", linewidth=1, linestyle="--")
    axes.set_xlim(0, max(1, sum(plan.keys)))
    axes.set_ylim(max(1, plan.rows), 0)
    axes.set_xlabel("key rows" + (" (dashed: next source)" if len(offsets) > 1 else ""))
    axes.set_ylabel("query rows")
    axes.set_title(plan.summary.title, fontsize=11)
    shown = {*ground, *([SEEN] if parts else [])}
    marks = [Patch(facecolor=color, edgecolor=EDGE, linewidth=0.5, label=LEGEND[color]) for color in LEGEND]
    marks = [mark for mark, color in zip(marks, LEGEND, strict=True) if color in shown]
    if marks:
        marks.append(Patch(facecolor="white", edgecolor="0.6", linewidth=0.5, label="not in the list: not visited"))
        figure.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _tiles(plan: Plan) -> list[Rectangle]:
    """The plan's tiles. Per-head patterns lie over one another; the first head's stands for them."""
    found: dict[tuple[int, int, int], Rectangle] = {}
    for r in plan.rectangles():
        found.setdefault((r.row, r.source, r.key), r)
        if len(found) > MOST_DRAWN:
            raise ValueError(f"path: the plan has over {MOST_DRAWN:,} tiles, too many to draw; plan a smaller problem")
    return list(found.values())


def seen_part(r: Rectangle) -> Any:
    """(points, 2): the outline, key then row, of what a tile's band leaves visible, counted from its first key and
    row."""
    low, high = r.band
    bends = [0, r.rows]
    bends += [] if low is None else [-low, r.keys - low]
    bends += [] if high is None else [-high - 1, r.keys - high - 1]
    at = np.unique(np.clip(bends, 0, r.rows))
    first = np.zeros(len(at)) if low is None else np.clip(at + low, 0, r.keys)
    end = np.full(len(at), r.keys) if high is None else np.clip(at + high + 1, 0, r.keys)
    end = np.maximum(first, end)
    return np.concatenate([np.stack([first, at], 1), np.stack([end, at], 1)[::-1]])
