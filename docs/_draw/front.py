"""The chart of README.md: prefill and decode on an H200 beside their peers, from docs/results."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

from canvas import BLUE, DEEP, LINE, ORANGE
from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[1] / "results"
KERNELS = {
    "tilewise cuda": ("Tilewise", DEEP),
    "cuDNN": ("cuDNN", LINE),
    "FlashAttention-3": ("FlashAttention-3", ORANGE),
}
STEPS = ("32 × (4096 + 128)", "64 × (8192 + 256)", "512 × (1024 + 64)", "64 × 4096")


def measured(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["status"] == "ok"]


def prefill(axes: Any) -> None:
    """TFLOP/s by head_dim, 8192 tokens, full and causal."""
    problems = [(d, causal) for d in ("64", "128", "256") for causal in ("False", "True")]
    rows = [r for r in measured("prefill-h200.csv") if r["workload"] in ("dense", "causal") and r["seq"] == "8192"]
    rows = [r for r in rows if r["dtype"] == "bfloat16" and r["heads"] == r["kv_heads"]]
    for number, (kernel, (label, colour)) in enumerate(KERNELS.items()):
        found = {(r["hdim"], r["causal"]): float(r["tflops"]) for r in rows if r["kernel"] == kernel}
        at = [x + 0.27 * (number - 1) for x in range(len(problems))]
        bars = axes.bar(at, [found[p] for p in problems], 0.25, label=label, color=colour)
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    names = [f"D {d}\n{'causal' if causal == 'True' else 'full'}" for d, causal in problems]
    axes.set_xticks(range(len(problems)), names, fontsize=8)
    axes.set_title("Prefill, N 8192, bfloat16: TFLOP/s", fontsize=10)
    axes.set_ylim(0, 950)
    axes.legend(fontsize=8, loc="upper left", ncols=3)


def decode(axes: Any) -> None:
    """Microseconds of a step of some sequences × (shared + own tokens)."""
    text = (RESULTS / "serve-h200.txt").read_text(encoding="utf-8")
    found: dict[tuple[str, str], float] = {}
    for step in STEPS:
        line = next(x for x in text.splitlines() if x.startswith(f"{step}, page 16: "))
        for name, value in re.findall(r"(ours|unshared|cuDNN) ([\d.,]+)", line):
            found[step, name] = float(value.strip(",").replace(",", ""))
    labels = {
        "ours": ("Tilewise", DEEP),
        "unshared": ("Tilewise, not sharing", BLUE),
        "cuDNN": ("cuDNN, whole KV each", LINE),
    }
    for number, (kernel, (label, colour)) in enumerate(labels.items()):
        at = [x + 0.27 * (number - 1) for x in range(len(STEPS))]
        bars = axes.bar(at, [found.get((s, kernel), 0.0) for s in STEPS], 0.25, label=label, color=colour)
        shown = [f"{found[s, kernel]:.0f}" if (s, kernel) in found else "" for s in STEPS]
        axes.bar_label(bars, shown, fontsize=7, padding=1)
    axes.set_xticks(range(len(STEPS)), [s.replace(" × ", " ×\n") for s in STEPS], fontsize=8)
    axes.set_title("A decode step, sequences × (shared + own tokens): µs", fontsize=10)
    axes.legend(fontsize=8)


def chart() -> Figure:
    figure = Figure(figsize=(10.5, 3.2), layout="constrained")
    for axes, draw in zip(figure.subplots(1, 2), (prefill, decode), strict=True):
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", labelsize=8)
    return figure


DRAWN = {"front": chart}
