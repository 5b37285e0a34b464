"""Pictures of a sweep: latency, throughput and speed-up over sequence length and over sparsity, one line per kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .records import DIMENSIONS
from .sweep import PLACE, read

Row = Mapping[str, str]

# What is drawn over what: column, axis label, title.
MEASURES = {
    "latency": ("median_ms", "median time (ms)", "Latency"),
    "throughput": ("tflops", "TFLOP/s", "Throughput"),
    "speedup": ("ratio_to_best_peer", "times as fast as the best peer", "Speed-up"),
}
AXES = {"seq": "sequence length (tokens)", "sparsity": "sparsity (share of blocks left out)"}
NAMES = {"hdim": "D", "seq": "N", "kv_heads": "KV heads", "kv_format": "KV format", "page_size": "page size"}
# Distinguishable in grey and to colour-blind eyes: colour, marker and dash change together.
STYLES = (
    ("#0b5394", "o", "-"),
    ("#cc4125", "s", "--"),
    ("#38761d", "^", "-."),
    ("#8e7cc3", "D", ":"),
    ("#666666", "v", "-"),
)
MAX_PANELS = 12


def draw(csv_path: Path, skipped: Callable[[str], None] = lambda reason: None) -> list[Path]:
    """Draw what the CSV has more than one x value of, as PNGs beside it; their paths. `skipped` is told what cannot."""
    rows = [row for row in read(csv_path)[0] if row["status"] == "ok" and row["tflops"]]
    written = []
    for axis in AXES:
        if len({row[axis] for row in rows}) < 2:
            continue
        if not _panels(rows, axis)[1]:
            skipped(f"nothing to draw over {axis}: no two points differ in it and are the same in all else")
            continue
        for measure in MEASURES:
            path = csv_path.with_name(f"{csv_path.stem}_{measure}_over_{axis}.png")
            _figure(rows, axis, measure).savefig(path, dpi=120)
            written.append(path)
    return written


def _panels(rows: Sequence[Row], axis: str) -> tuple[list[str], list[tuple[tuple[str, ...], list[Row]]]]:
    """The other columns that vary, and for each combination of their values that has two x values or more its rows.

    So a panel has one line per kernel, of one machine and version. The workload follows from the dimensions: a sparsity
    of 0 is the dense problem, on the same line as the sparse ones. Points that no panel has and that are as many tokens
    in all, longer sequences in smaller batches, are joined too.
    """
    columns = [c for c in (*PLACE, *DIMENSIONS) if c not in (axis, "workload", "sched")]
    panels, alone = _joined(rows, columns, axis)
    if axis == "seq":
        tokens = ({**row, "batch": f"{int(row['batch']) * int(row['seq'])}/N"} for row in alone)
        panels += _joined(tokens, columns, axis)[0]
    drawn = [row for panel in panels for row in panel]
    others = [c for c in columns if len({row[c] for row in drawn}) > 1]
    return others, [(tuple(panel[0][c] for c in others), panel) for panel in panels]


def _joined(rows: Iterable[Row], columns: Sequence[str], axis: str) -> tuple[list[list[Row]], list[Row]]:
    """The rows that are the same in all `columns`, group by group where they have two x values; the rest."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[c] for c in columns), []).append(row)
    lines = {key: group for key, group in groups.items() if len({row[axis] for row in group}) > 1}
    return list(lines.values()), [row for key, group in groups.items() if key not in lines for row in group]


def _figure(rows: Sequence[Row], axis: str, measure: str) -> Any:
    from matplotlib.figure import Figure  # slow to import, and only drawing needs it

    column, label, title = MEASURES[measure]
    others, panels = _panels(rows, axis)
    rows = [row for _, panel in panels for row in panel]
    left_out = len(panels) - MAX_PANELS
    panels = panels[:MAX_PANELS]
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(max(6.4, 4.6 * columns), 4.0 * lines + 0.9), layout="constrained")
    same = {row["machine"] for row in rows}
    figure.suptitle(
        f"{title} over {AXES[axis].partition(' (')[0]}, {_fixed(rows, axis, others)}\n{', '.join(sorted(same))}"
        + (f"; {left_out} more panels are not drawn" if left_out > 0 else ""),
        fontsize=11,
    )
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (key, group) in zip(grid.flat, panels, strict=False):
        for i, kernel in enumerate(kernels):
            values = sorted(
                (float(row[axis]), float(row[column])) for row in group if row["kernel"] == kernel and row[column]
            )
            if values:
                color, marker, dash = STYLES[i % len(STYLES)]
                axes.plot(*zip(*values, strict=True), color=color, marker=marker, linestyle=dash, label=kernel)
        _dress(axes, group, axis, measure)
        axes.set_ylabel(label)
        axes.set_title(
            ", ".join(f"{NAMES.get(d, d)} {value}" for d, value in zip(others, key, strict=True)), fontsize=10
        )
        axes.legend(fontsize=8)
    return figure


def _dress(axes: Any, group: Sequence[Row], axis: str, measure: str) -> None:
    """Scales, ticks and grid: powers of two across, a log scale for times, plain numbers everywhere."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_xlabel(AXES[axis])
    axes.grid(True, alpha=0.3)
    if axis == "seq":
        axes.set_xscale("log", base=2)
        ticks = sorted({int(row[axis]) for row in group})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
    if measure == "latency" and axis == "seq":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        return
    axes.set_ylim(bottom=0)
    if measure == "speedup":
        axes.axhline(1.0, color="black", linewidth=0.8)


def _fixed(rows: Sequence[Row], axis: str, others: Sequence[str]) -> str:
    """The dimensions that are the same in the whole figure and worth a word."""
    first = rows[0]
    words = {
        "seq": f"N {first['seq']}",
        "batch": f"batch {first['batch']}" if first["batch"] != "1" else "",
        "heads": f"{first['heads']} heads",
        "kv_heads": f"{first['kv_heads']} KV heads" if first["kv_heads"] != first["heads"] else "",
        "hdim": f"D {first['hdim']}",
        "dtype": first["dtype"],
        "causal": "causal" if first["causal"] == "True" else "",
        "window": f"window {first['window']}" if first["window"] != "0" else "",
        "prefix": f"{first['prefix']} shared tokens" if first["prefix"] != "0" else "",
        "kv_format": f"{first['kv_format']} KV" if first["kv_format"] else "",
    }
    return ", ".join(word for name, word in words.items() if word and name not in (axis, *others))
