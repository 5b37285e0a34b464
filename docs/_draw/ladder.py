"""Pictures of docs/inside/ladder.md and emulator.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from canvas import BLUE, DEEP, DIM, GREEN, ORANGE, PALE, RED, VIOLET, YELLOW, Canvas
from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[1] / "results" / "ladder-h200.txt"
LINES = {"torch_tiled": "lecture", "flash_naive": "raw CUDA", "pika_scalar": "persistent, 8-bit"}
COLORS = {"lecture": VIOLET, "raw CUDA": DEEP, "persistent, 8-bit": ORANGE}


def rungs() -> list[tuple[str, str, float, float]]:
    """Of each rung: its line, name, milliseconds and TFLOP/s, as docs/results/ladder-h200.txt has them."""
    found, line = [], ""
    for text in RESULTS.read_text().splitlines():
        cells = text.split()
        if len(cells) > 6 and cells[1] in ("float32", "bfloat16") and cells[3] == "ok":
            line = LINES.get(cells[0], line)
            found.append((line, cells[0], float(cells[4].replace(",", "")), float(cells[6])))
    return found


def times() -> Any:
    """Every rung's TFLOP/s on an H200, a log scale, with its time."""
    rows = rungs()
    torch = re.search(r"torch FA2 +bfloat16.* ([\d.]+)$", RESULTS.read_text(), re.M)
    assert torch is not None
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    axes = figure.subplots()
    for n, (line, _, ms, tflops) in enumerate(rows):
        axes.barh(n, tflops, left=0.1, color=COLORS[line])
        axes.text(tflops * 1.12 + 0.1, n, f"{ms:g} ms", va="center", fontsize=8.5)
    axes.axvline(float(torch[1]), color="0.4", linestyle="--", label=f"torch's FlashAttention-2: {torch[1]} TFLOP/s")
    for line, color in COLORS.items():
        axes.barh(0, 0, color=color, label=line)
    axes.set_xscale("log")
    axes.set(xlim=(0.3, 3000), xlabel="TFLOP/s on an H200, 4 × 4096 tokens, 16 heads, D 128; a log scale")
    axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    axes.set_yticks(range(len(rows)), [name for _, name, _, _ in rows], fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def coalescing() -> Any:
    """What a warp's load touches when a thread has a row, and when lanes run along a row."""
    c = Canvas(88, 30)
    c.title("One load of a warp: 32 lanes read 4 bytes each, memory moves sectors of 32 bytes")
    for left, name, told in (
        (4, "flash_naive: lane n reads row n", "32 sectors moved, 128 of 1024 bytes used"),
        (48, "flash_2d: lane n reads column n", "4 sectors moved, all bytes used"),
    ):
        c.left(left, 6, name, size=9.5, weight="bold")
        along = left > 40
        for row in range(7):
            for sector in range(4):
                x, y = left + 10 * sector, 8.5 + 2.4 * row
                touched = row == 0 if along else sector == 0
                c.box(x, y, 9.6, 2, color=PALE if touched else "white", line=0.5)
                if along and touched:
                    for n in range(8):
                        c.box(x + 1.2 * n, y, 1.2, 2, color=DEEP, line=0.3)
                elif touched:
                    c.box(x, y, 1.2, 2, color=DEEP, line=0.3)
        c.left(left, 27.4, told, size=9)
    return c.figure


def swizzle() -> Any:
    """Eight rows of eight chunks of 16 bytes: which banks ldmatrix reads for one matrix, plain and swizzled."""
    c = Canvas(84, 31)
    c.title("ldmatrix reads one chunk of 16 bytes from each of eight rows; rows of 128 bytes fill all 32 banks")
    wanted = 2
    for left, name, turn in ((6, "plain: eight passes", 0), (48, "swizzled, place = chunk XOR row: one pass", 1)):
        c.left(left, 6, name, size=9.5, weight="bold")
        for row in range(8):
            for chunk in range(8):
                x = left + 4 * (chunk ^ (row * turn))
                color = RED if chunk == wanted and not turn else GREEN if chunk == wanted else PALE
                c.box(x, 8 + 2.4 * row, 4, 2.4, str(chunk), color, size=7.5, line=0.4)
        for place in range(8):
            c.words(left + 4 * place + 2, 28.4, f"{4 * place}–{4 * place + 3}", size=7, color=DIM)
        c.words(left + 16, 30, "banks", size=8, color=DIM)
    return c.figure


def stages() -> Any:
    """mma_qreg_vld beside mma_qreg_async: a load under the products."""
    c = Canvas(88, 30)
    c.title("cp.async and a second stage: loads under products")
    c.left(3, 7, "mma_qreg_vld", size=9.5, weight="bold")
    x = 18.0
    for n in range(3):
        c.box(x, 5.5, 11, 4, f"load K{n}, V{n}", ORANGE, size=8.5)
        c.box(x + 11, 5.5, 11, 4, f"compute {n}", BLUE, size=8.5)
        x += 22
    c.left(3, 18, "mma_qreg_async", size=9.5, weight="bold")

    for n in range(4):
        c.box(18 + 11.6 * n, 14, 11, 4, f"copy K{n}, V{n}", ORANGE, size=8.5)
        c.box(18 + 11.6 * (n + 1), 18.6, 11, 4, f"compute {n}", BLUE, size=8.5)
        c.line(18 + 11.6 * (n + 1) - 0.3, 13, 18 + 11.6 * (n + 1) - 0.3, 24, color=DEEP, linewidth=1.6)
    told = "one barrier per tile: what was copied is there, and what was computed on may be overwritten"
    c.left(18, 26, told, size=8.5, color=DIM)
    return c.figure


def modes() -> Any:
    """A kernel that forgot to wait, in both modes of the emulator."""
    c = Canvas(90, 36)
    c.title("A copy that is read before it was waited for, in the emulator's two modes")
    for y, name, lands, told, color in (
        (7, "early: copies land at once", 22, "the right number: the bug hides", GREEN),
        (20, "late: copies land as late as the program allows", 66, "NaN: shared memory starts as NaN bytes", RED),
    ):
        c.left(3, y, name, size=9.5, weight="bold")
        c.box(6, y + 2, 15, 4, "cp.async issued", ORANGE, size=8.5)
        c.box(33, y + 2, 17, 4, "read without wait", color, size=8.5)
        c.box(70, y + 2, 14, 4, "next wait", PALE, size=8.5)
        c.arrow(lands, y + 9.5, lands, y + 6.2, color=DEEP)
        c.words(lands, y + 10.6, "the bytes land", size=8.5, color=DEEP)
        c.left(34 if lands < 40 else 26, y + 8, told, size=8.5)
    c.left(3, 34, "A card may do either. Tests run both, under several orders of threads.", size=9, color=DIM)
    return c.figure


def rendezvous() -> Any:
    """How threads of a warp meet in a collective."""
    c = Canvas(88, 26)
    c.title("A thread is a fiber; a collective is a meeting")
    for n in range(4):
        y = 6 + 4.2 * n
        c.right(12, y + 1.4, f"lane {n}" if n < 3 else "lane 31", size=8.5)
        width = (14, 22, 9, 46)[n]
        c.box(13, y, width, 2.8, "runs", BLUE, size=8)
        if width < 46:
            c.box(13 + width, y, 46 - width, 2.8, "waits: left its operands", PALE, size=8)
        else:
            c.words(50, y + 1.4, "arrives last", size=8)
    c.box(59, 6, 6, 15.4, "mma", YELLOW, size=9)
    for n in range(4):
        c.box(65, 6 + 4.2 * n, 14, 2.8, "runs on", BLUE, size=8)
    c.left(13, 24, "the last lane computes for all, from what each left", size=8.5, color=DIM)
    return c.figure


DRAWN = {
    "ladder-times": times,
    "ladder-coalescing": coalescing,
    "ladder-swizzle": swizzle,
    "ladder-stages": stages,
    "emulator-modes": modes,
    "emulator-meeting": rendezvous,
}
