"""A measurement as one flat row of plain values: the same for the CSV of a sweep and for `--json`."""

from __future__ import annotations

import csv
import math
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path

import torch

from .. import __version__
from .measure import Result, Timing
from .workloads import Point, dimensions

Value = str | int | float | bool | None
Record = dict[str, Value]

DIMENSIONS = tuple(dimensions(Point()))
# A point is done when as many rows stand in the CSV as its `kernel_count` says.
COLUMNS = (
    *("date", "tilewise", "torch", "python", "machine", "threads"),
    *DIMENSIONS,
    *("kernel", "kernel_count", "median_ms", "p20_ms", "p80_ms", "loops", "tflops", "gbps", "us_per_token_head"),
    *("pct_of_ceiling", "ratio_to_best_peer", "error", "error_baseline", "status"),
)


def records(point: Point, results: list[Result]) -> list[Record]:
    """One row per result, keys in the order of COLUMNS; what was not measured is None."""
    where: Record = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **here(point.device)}
    rows = []
    for result in results:
        row: Record = {
            **where,
            **dimensions(point),
            "kernel": result.kernel,
            "kernel_count": len(results),
            **_times(result.timing),
            "tflops": _digits(result.tflops),
            "gbps": _digits(result.gbps),
            "us_per_token_head": _digits(result.us_per_token_head),
            "pct_of_ceiling": _digits(result.pct_of_ceiling),
            "ratio_to_best_peer": _digits(result.ratio_to_best_peer),
            "error": _digits(result.error),
            "error_baseline": _digits(result.baseline),
            "status": result.status + (f": {result.reason}" if result.reason else ""),
        }
        rows.append(row)
    return rows


@cache
def here(device: str) -> dict[str, Value]:
    """The versions and the machine that a number belongs to."""
    return {
        "tilewise": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": machine(device),
        "threads": torch.get_num_threads(),
    }


def package_version(name: str) -> str:
    """The installed version of a package, "" when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def machine(device: str = "cpu") -> str:
    """The name of the processor that runs there."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def _times(timing: Timing | None) -> Record:
    if timing is None:
        return {"median_ms": None, "p20_ms": None, "p80_ms": None, "loops": None}
    seconds = {"median_ms": timing.median, "p20_ms": timing.p20, "p80_ms": timing.p80}
    return {**{name: _digits(value * 1e3) for name, value in seconds.items()}, "loops": timing.loops}


def _digits(value: float | None) -> float | None:
    """Six significant digits, more than any measurement has. An infinite error is left to the status to tell."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def save(name: str, device: str, rows: Sequence[Mapping[str, Value]], text: str, folder: Path) -> list[Path]:
    """Rows as a CSV and a text beside it, `name` and the machine's name in `folder`: their paths."""
    place = machine(device).split()[-1].lower() if device.startswith("cuda") else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    sheet = StringIO()
    writer = csv.DictWriter(sheet, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    paths = [folder / f"{name}-{place}{ending}" for ending in (".csv", ".txt")]
    for path, content in zip(paths, (sheet.getvalue(), text + "\n"), strict=True):
        path.write_text(content, encoding="utf-8")
    return paths
