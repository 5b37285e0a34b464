"""The teaching ladder as tables and as a picture: times of a card, or counts of the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from tilewise.emulator import Counters

    from .rungs import Row, Shape

BLUE, RED, GREY = "#0b5394", "#cc4125", "#666666"


def plain_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _what(row: Row, shape: Shape) -> list[Any]:
    """Name, dtype, head dimension and verdict; what is not as asked for stands out."""
    from rich.text import Text

    styles = {"ok": "", "skipped": "dim", "failed": "yellow", "WRONG": "bold red"}
    return [
        Text(row.name, style="dim" if row.peer else ""),
        Text(row.dtype, style="" if row.dtype == shape.dtype else "yellow"),
        Text(str(row.hdim), style="" if row.hdim == shape.hdim else "yellow"),
        Text("–" if row.peer else row.status, style=styles[row.status]),
    ]


def times_table(rows: Sequence[Row], shape: Shape, where: str) -> Table:
    columns = ("median ms", "p20–p80", "TFLOP/s", "× before", "× SDPA", "× FA2")
    title = f"The ladder on {where}: {shape.title}"
    table = plain_table(title, ("rung", "dtype", "D", "check"), columns)
    for i, row in enumerate(rows):
        if i and (row.peer, row.line) != (rows[i - 1].peer, rows[i - 1].line):
            table.add_section()  # another story: nothing here is compared with the rung above
        cells = [""] * 6
        if row.timing is not None:
            t = row.timing
            ratios = (row.over_previous, row.over_sdpa, row.over_fa2)
            cells = [_digits(t.median * 1e3), f"{_digits(t.p20 * 1e3)}–{_digits(t.p80 * 1e3)}", _digits(row.tflops),
                     *("" if x is None else f"{_digits(x)}×" for x in ratios)]  # fmt: skip
        table.add_row(*_what(row, shape), *cells)
    return table


def counters_table(rows: Sequence[Row], shape: Shape) -> Table:
    columns = ("sectors\n/request", "sectors\nused", "bank\nconflicts", "ldmatrix\nconflicts", "tensor\nMFLOP",
               "scalar\nMFLOP", "exps", "global\nKB", "async\nKB", "barriers")  # fmt: skip
    table = plain_table(f"The ladder in the emulator: {shape.title}", ("rung", "dtype", "D", "check"), columns)
    for row in rows:
        cells = [""] * len(columns)
        if (c := row.counters) is not None:
            cells = [
                f"{c.sectors_per_request:.1f}", f"{used_share(c):.0%}", _short(c.bank_conflicts),
                _short(c.matrix_conflicts), _digits(c.tensor_flops / 1e6), _digits(c.scalar_flops / 1e6),
                _short(c.exponentials),
                _digits(c.global_bytes / 1024), _digits(c.async_bytes / 1024), _short(c.barriers),
            ]  # fmt: skip
        table.add_row(*_what(row, shape), *cells)
    return table


def used_share(c: Counters) -> float:
    """The share of the bytes moved from and to global memory that was asked for.

    Sectors of a request alone do not tell: 16 bytes per thread are 16 sectors per warp, and all of them are needed.
    """
    # Threads that read the same address are counted one by one, hence the limit.
    return min(1.0, c.global_bytes / (32 * c.global_sectors)) if c.global_sectors else 0.0


def _short(number: int) -> str:
    """A count: exact while it is short."""
    return (
        f"{number:,}"
        if number < 100_000
        else f"{number / 1e3:,.0f}k"
        if number < 10_000_000
        else f"{number / 1e6:,.0f}M"
    )


def _digits(value: float | None) -> str:
    """Three digits, without scientific notation."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 or not value else f"{value:.4f}"


def draw(rows: Sequence[Row], shape: Shape, path: Path) -> None:
    """A PNG or an SVG, by the path's ending: TFLOP/s of a card, or what the emulator counted."""
    from matplotlib.figure import Figure  # slow to import, and only drawing needs it

    from tilewise.plan.pictures import save

    shown = [row for row in rows if row.timing is not None or row.counters is not None]
    ours = [row for row in shown if not row.peer]
    height = 1.6 + 0.3 * max(1, len(ours))
    if any(row.counters for row in ours):
        figure = Figure(figsize=(15, 2 * height + 0.8), layout="constrained")
        for axes, (title, parts) in zip(figure.subplots(2, 3).flat, _panels(ours).items(), strict=True):
            _bars(axes, ours, title, parts)
            if title == "MFLOP":
                _mark_padding(axes, ours, shape)
        figure.supxlabel(PADDING, fontsize=9)
    else:
        figure = Figure(figsize=(9, height + 0.6), layout="constrained")
        axes = figure.subplots()
        _bars(axes, ours, "TFLOP/s", {"": [row.tflops or 0.0 for row in ours]})
        for row, place in zip(ours, range(len(ours)), strict=True):
            assert row.timing is not None
            axes.annotate(
                f" {_digits(row.timing.median * 1e3)} ms", (row.tflops or 0.0, place), va="center", fontsize=8
            )
        dashes = {"torch SDPA": "--", "torch FA2": ":"}
        for row in shown:
            if row.peer and row.dtype == shape.dtype:
                axes.axvline(
                    row.tflops or 0.0, color=GREY, linestyle=dashes[row.name], label=f"{row.name}, {row.dtype}"
                )
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(f"The ladder: {shape.title}", fontsize=11)
    save(figure, path)


PADDING = (
    "Padding: a rung computes whole tiles, so operations and exponentials also count the rows and keys past the end of "
    "a sequence, and pairs that a causal mask hides.\n"
    "The grey line is what the problem's two products need; a bar beyond it is padding, whose share shrinks as "
    "sequences grow, or other arithmetic.\n"
    "Rows of shared memory that are padded (flash_2d) or swizzled (mma_swizzle) have no bank conflicts."
)


def _mark_padding(axes: Any, rows: Sequence[Row], shape: Shape) -> None:
    """What each rung's head dimension makes of the problem's FLOPs, over the visible pairs alone."""
    for place, row in enumerate(rows):
        needed = shape.flops(row.hdim) / 1e6
        label = "what the problem needs" if not place else None
        axes.plot([needed, needed], [place - 0.5, place + 0.5], color=GREY, linewidth=2, label=label)
    axes.legend(fontsize=8)


def _panels(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """Title -> what is stacked in it, one value per rung."""
    counted = [row.counters for row in rows if row.counters is not None]
    return {
        "32-byte sectors moved, % used": {"": [100 * used_share(c) for c in counted]},
        "bank conflicts": {
            "shared memory": [c.bank_conflicts for c in counted],
            "ldmatrix": [c.matrix_conflicts for c in counted],
        },
        "MFLOP": {
            "tensor": [c.tensor_flops / 1e6 for c in counted],
            "scalar": [c.scalar_flops / 1e6 for c in counted],
        },
        "exponentials": {"": [c.exponentials for c in counted]},
        "global memory, KB": {
            "loads and stores": [c.global_bytes / 1024 for c in counted],
            "asynchronous": [c.async_bytes / 1024 for c in counted],
        },
        "barriers": {"": [c.barriers for c in counted]},
    }


def _bars(axes: Any, rows: Sequence[Row], title: str, parts: dict[str, list[float]]) -> None:
    left = [0.0] * len(rows)
    for (name, values), color in zip(parts.items(), (BLUE, RED), strict=False):
        axes.barh(range(len(rows)), values, left=left, color=color, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    if title == "bank conflicts":  # from none to millions, and none is the point
        axes.set_xscale("symlog", linthresh=100)
    axes.grid(True, axis="x", alpha=0.3)
    if len(parts) > 1:
        axes.legend(fontsize=8)
