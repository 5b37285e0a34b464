"""A sheet for diagrams: boxes, arrows and words in one style, on white, so that they can be read in the dark too."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK, DIM, LINE = "#1b2a3a", "#5a6b7b", "#8a99a8"
BLUE, PALE, DEEP = "#6baed6", "#dce9f5", "#2171b5"
RED, ORANGE, GREEN, VIOLET, GREY, YELLOW = "#e58a7b", "#f4b678", "#8fc79a", "#b5a1d2", "#e6e9ec", "#f7e3a1"


class Canvas:
    """A figure of `width` × `height` units, a unit being a tenth of an inch; y runs down."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width / 10, height / 10))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")

    def box(
        self, x: float, y: float, w: float, h: float, words: str = "", color: str = PALE, *, size: float = 9,
        round: bool = False, edge: str = INK, **style: Any,
    ) -> None:  # fmt: skip
        """A box with words in its middle."""
        shape: Any = Rectangle((x, y), w, h)
        if round:
            shape = FancyBboxPatch((x + 0.5, y + 0.5), w - 1, h - 1, boxstyle="round,pad=0.5")
        shape.set(facecolor=color, edgecolor=edge, linewidth=style.pop("line", 0.8), **style)
        self.axes.add_patch(shape)
        if words:
            self.words(x + w / 2, y + h / 2, words, size=size)

    def words(self, x: float, y: float, words: str, *, size: float = 9, color: str = INK, **style: Any) -> None:
        self.axes.text(x, y, words, **{"ha": "center", "va": "center", "fontsize": size, "color": color, **style})

    def left(self, x: float, y: float, words: str, **style: Any) -> None:
        self.words(x, y, words, ha="left", **style)

    def right(self, x: float, y: float, words: str, **style: Any) -> None:
        self.words(x, y, words, ha="right", **style)

    def title(self, words: str, y: float = 2.2) -> None:
        self.left(1.5, y, words, size=11, weight="bold")

    def arrow(
        self, x0: float, y0: float, x1: float, y1: float, *, color: str = INK, bend: float = 0.0, line: float = 1.1,
        style: str = "-|>", dashed: bool = False,
    ) -> None:  # fmt: skip
        connection = f"arc3,rad={bend}"
        self.axes.add_patch(
            FancyArrowPatch(
                (x0, y0), (x1, y1), arrowstyle=style, connectionstyle=connection, color=color, linewidth=line,
                mutation_scale=9, linestyle="--" if dashed else "-", shrinkA=0, shrinkB=0,
            )
        )  # fmt: skip

    def line(self, x0: float, y0: float, x1: float, y1: float, *, color: str = LINE, **style: Any) -> None:
        self.axes.plot([x0, x1], [y0, y1], color=color, **{"linewidth": 0.9, **style})

    def legend(self, x: float, y: float, entries: list[tuple[str, str]], step: float = 22, size: float = 8.5) -> None:
        """Colours and what they stand for, side by side."""
        for n, (color, words) in enumerate(entries):
            self.box(x + n * step, y - 0.8, 2.2, 1.6, color=color, line=0.6)
            self.left(x + n * step + 3, y, words, size=size)
