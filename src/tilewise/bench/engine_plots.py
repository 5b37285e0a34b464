"""Latencies over load: time to the first token and between tokens, a line for each server and percentile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .engine import Load, Outcome
from .plots import STYLES
from .records import machine

PANELS = (("first", "Time to the first token (ms)"), ("between", "Time between tokens (ms)"))
PERCENTILES = (("p50", "-", 1.0), ("p95", "--", 0.75), ("p99", ":", 0.75))  # dash and opacity


def draw(outcome: Outcome, stem: Path) -> list[Path]:
    """`stem`.png and .svg, if at least two loads were measured; their paths."""
    loads = [one for one in outcome.loads if one.share is not None]
    if len({one.share for one in loads}) < 2:
        return []
    figure = _figure(outcome, loads)
    paths = [stem.with_name(stem.name + ending) for ending in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=120)
    return paths


def _figure(outcome: Outcome, loads: list[Load]) -> Any:
    from matplotlib.figure import Figure  # slow to import, and only drawing needs it
    from matplotlib.ticker import FuncFormatter, LogLocator

    problem = outcome.case
    figure = Figure(figsize=(10.0, 5.2), layout="constrained")
    figure.suptitle(
        f"Latency under load: {problem.title}\n"
        f"{machine(problem.device)}, Poisson arrivals, {problem.requests} requests at each load",
        fontsize=11,
    )
    names = list(dict.fromkeys(one.server for one in loads))
    for axes, (measure, label) in zip(figure.subplots(1, 2), PANELS, strict=True):
        for name, (color, marker, _) in zip(names, STYLES, strict=False):
            for n, (percent, dash, opacity) in enumerate(PERCENTILES):
                points = sorted((one.rate, 1e3 * getattr(one, measure)[n]) for one in loads if one.server == name)
                axes.plot(
                    *zip(*points, strict=True),
                    color=color, marker=marker, linestyle=dash, alpha=opacity, label=f"{name}, {percent}",
                )  # fmt: skip
        rates = sorted({(one.rate, one.share) for one in loads})
        axes.set_xticks([rate for rate, _ in rates], [f"{rate:.3g}\n{share:.0%}" for rate, share in rates])
        axes.minorticks_off()
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if high > 10 * low else range(1, 10)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        axes.set_title(label, fontsize=10)
        axes.set_xlabel("requests per second, and their share of Tilewise's capacity", fontsize=9)
        axes.grid(True, which="both", alpha=0.25)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure
