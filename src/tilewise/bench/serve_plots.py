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
    (UNSHARED, "Tilewise, sharing nothing: each sequence reads its whole prefix", "#6fa8dc", "s"),
    (TWO_LEVELS, "Tilewise, sharing one level of the tree only, a mark for each level", "#38761d", "^"),
    (BF16, "Tilewise over bf16 pages, beside a quantised cache", "#6fa8dc", "D"),
    (SHARED, "Tilewise, sharing every node", "#8e7cc3", "v"),
    ("tilewise", 'Tilewise as it comes: share_prefix="auto"', "#0b5394", "o"),
    ("cuDNN", "cuDNN: each sequence has its whole keys, without pages", "#cc4125", "x"),
    ("cascade", "FlashInfer's cascade over the same pages", "#bf9000", "+"),
    ("FlashInfer", "FlashInfer over the same pages", "#bf9000", "*"),
)
ROWS = (
    "A row is a decode step: sequences × (shared + own) tokens,\n"
    "or sequences × tokens where nothing is shared; query/KV heads; tokens per page."
)
BETTER, WORSE, EVEN = "#d9ead3", "#f4cccc", "white"
CELLS = {  # colour -> what a figure on it means
    BETTER: "auto shares the prefix, and the step is that many times as fast as without sharing",
    EVEN: 'as fast as without sharing; "(0.85)": auto does not share, and a plan that did would have run at 0.85',
    WORSE: "auto is slower than without sharing",
}


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
    figure = Figure(figsize=(9.0, 0.28 * len(names) + 3.0), layout="constrained")
    axes = figure.subplots()
    machines = ", ".join(sorted({row["machine"] for row in rows}))
    axes.set_title(f"Decode step, median time: further left is faster\n{machines}", fontsize=11)
    for end, label, color, marker in reversed(STYLES):  # ours on top
        chosen = [row for row in rows if _style(row["kernel"]) == end]
        if chosen:
            times = [float(row["median_ms"]) * 1e3 for row in chosen]
            lines = [names.index(_name(row)) for row in chosen]
            axes.scatter(times, lines, color=color, marker=marker, label=label, zorder=3)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(f"µs, a log scale\n{ROWS}", fontsize=8.5)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(True, alpha=0.3)
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=8.5)
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
    figure = Figure(figsize=(max(8.0, 3.6 * len(owns) + 1.0), 0.6 * len(batches) + 2.3), layout="constrained")
    machines = ", ".join(sorted({row["machine"] for row in rows}))
    figure.suptitle(f'Speed of share_prefix="auto" over that without sharing\n{machines}', fontsize=11)
    for axes, own in zip(figure.subplots(1, len(owns), squeeze=False)[0], owns, strict=True):
        for y, batch in enumerate(batches):
            for x, prefix in enumerate(prefixes):
                if found := times.get((batch, prefix, own)):
                    speed, text = _gain(found)
                    color = WORSE if speed < 0.97 else BETTER if speed > 1 else EVEN
                    axes.text(x, y, text, ha="center", va="center", fontsize=8, backgroundcolor=color)
        axes.set_title(f"{own} own tokens", fontsize=10)
        axes.set_xticks(range(len(prefixes)), [str(n) for n in prefixes])
        axes.set_yticks(range(len(batches)), [str(n) for n in batches])
        axes.set_xlim(-0.6, len(prefixes) - 0.4)
        axes.set_ylim(len(batches) - 0.4, -0.6)
        axes.set_xlabel("shared tokens")
    figure.axes[0].set_ylabel("sequences")
    for color, meaning in CELLS.items():
        figure.axes[0].fill([], [], facecolor=color, edgecolor="0.6", label=meaning)
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    return figure


def _gain(found: Mapping[str, float]) -> tuple[float, str]:
    """Auto's speed over unshared, and how it is written. Without a time of its own, unshared is what auto is."""
    ours = found.get("tilewise", float("nan"))
    speed = found.get(UNSHARED, ours) / ours
    return speed, f"({ours / found[SHARED]:.2f})" if SHARED in found else f"{speed:.2f}"
