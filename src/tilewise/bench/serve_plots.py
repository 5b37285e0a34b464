"""Pictures of the serving table's CSV: every row's times side by side, and what "auto" gains over the grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .sweep import read
from .trees import BF16, SHARED, TWO_LEVELS, UNSHARED

Row = Mapping[str, str]
Sizes = tuple[int, int, int]  # sequences, shared tokens, own tokens

# By the end of a kernel's name: label, colour, marker. Distinguishable in grey too. The first that fits is taken.
STYLES = (
    (UNSHARED, "ours, unshared", "#6fa8dc", "s"),
    (TWO_LEVELS, "ours, two levels", "#38761d", "^"),
    (BF16, "ours, bf16 pages", "#6fa8dc", "D"),
    (SHARED, "ours, shared", "#8e7cc3", "v"),
    ("tilewise", "ours", "#0b5394", "o"),
    ("cuDNN", "cuDNN, whole KV each", "#cc4125", "x"),
    ("cascade", "FlashInfer cascade", "#bf9000", "+"),
    ("FlashInfer", "FlashInfer", "#bf9000", "*"),
)


def draw(csv_path: Path, skipped: Callable[[str], None] = lambda reason: None) -> list[Path]:
    """PNGs beside the CSV, `_times` and `_auto`; their paths. `skipped` is told what the CSV has nothing of."""
    rows = [row for row in read(csv_path)[0] if row["status"] == "ok" and row["median_ms"]]
    table = [row for row in rows if row["backend"] == "auto"]
    grid = [row for row in rows if row["backend"] != "auto"]  # the table's points of the same sizes say "auto"
    written = []
    for name, chosen, figure in (("times", table, _times), ("auto", grid, _auto)):
        if not chosen:
            skipped(f"nothing to draw of {name}: the CSV has none of those rows")
            continue
        written.append(csv_path.with_name(f"{csv_path.stem}_{name}.png"))
        figure(chosen).savefig(written[-1], dpi=120)
    return written


def _times(rows: Sequence[Row]) -> Any:
    """One line per point, one mark per kernel, microseconds across."""
    from matplotlib.figure import Figure  # slow to import, and only drawing needs it
    from matplotlib.ticker import FuncFormatter

    names = list(dict.fromkeys(_name(row) for row in rows))
    figure = Figure(figsize=(9.0, 0.28 * len(names) + 1.8), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"Decode step, median time\n{', '.join(sorted({row['machine'] for row in rows}))}", fontsize=11)
    for end, label, color, marker in reversed(STYLES):  # ours on top
        chosen = [row for row in rows if _style(row["kernel"]) == end]
        if chosen:
            times = [float(row["median_ms"]) * 1e3 for row in chosen]
            lines = [names.index(_name(row)) for row in chosen]
            axes.scatter(times, lines, color=color, marker=marker, label=label, zorder=3)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("µs")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _style(kernel: str) -> str:
    return next((end for end, *_ in STYLES if end in kernel), "")


def _name(row: Row) -> str:
    sizes = f"({row['prefix']} + {row['seq']})" if row["prefix"] != "0" else row["seq"]
    kind = "" if row["kv_format"] == "bf16" else f"{row['kv_format']}, "
    return f"{kind}{row['batch']} × {sizes}, {row['heads']}/{row['kv_heads']} heads, page {row['page_size']}"


def _auto(rows: Sequence[Row]) -> Any:
    """A panel for each own length: the speed of auto over unshared; in brackets that of sharing where auto does not."""
    from matplotlib.figure import Figure

    times: dict[Sizes, dict[str, float]] = {}
    for row in rows:
        sizes = (int(row["batch"]), int(row["prefix"]), int(row["seq"]))
        times.setdefault(sizes, {})[_style(row["kernel"])] = float(row["median_ms"])
    batches, prefixes, owns = (sorted(set(column)) for column in zip(*times, strict=True))
    figure = Figure(figsize=(3.6 * len(owns) + 1.0, 0.6 * len(batches) + 1.6), layout="constrained")
    machines = ", ".join(sorted({row["machine"] for row in rows}))
    figure.suptitle(f'"auto" over unshared decode; in brackets what sharing would be\n{machines}', fontsize=11)
    for axes, own in zip(figure.subplots(1, len(owns), squeeze=False)[0], owns, strict=True):
        for y, batch in enumerate(batches):
            for x, prefix in enumerate(prefixes):
                if found := times.get((batch, prefix, own)):
                    speed, text = _gain(found)
                    color = "#f4cccc" if speed < 0.97 else "#d9ead3" if speed > 1 else "white"
                    axes.text(x, y, text, ha="center", va="center", fontsize=8, backgroundcolor=color)
        axes.set_title(f"{own} own tokens", fontsize=10)
        axes.set_xticks(range(len(prefixes)), [str(n) for n in prefixes])
        axes.set_yticks(range(len(batches)), [str(n) for n in batches])
        axes.set_xlim(-0.6, len(prefixes) - 0.4)
        axes.set_ylim(len(batches) - 0.4, -0.6)
        axes.set_xlabel("shared tokens")
    figure.axes[0].set_ylabel("sequences")
    return figure


def _gain(found: Mapping[str, float]) -> tuple[float, str]:
    """Auto's speed over unshared, and how it is written. Without a time of its own, unshared is what auto is."""
    ours = found.get("tilewise", float("nan"))
    speed = found.get(UNSHARED, ours) / ours
    return speed, f"({ours / found[SHARED]:.2f})" if SHARED in found else f"{speed:.2f}"
