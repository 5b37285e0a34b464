"""Pictures of the two forward kernels: docs/inside/hopper-forward.md and mma-forward.md."""

from __future__ import annotations

from typing import Any

import numpy as np
from canvas import BLUE, DEEP, DIM, GREEN, GREY, INK, ORANGE, PALE, RED, VIOLET, YELLOW, Canvas
from matplotlib.figure import Figure


def roles() -> Any:
    """Who does what in a thread block of the Hopper forward, and what lies between them."""
    c = Canvas(92, 52)
    c.title("A thread block of the Hopper forward (D 128, bfloat16): 384 threads, one block per multiprocessor")
    c.box(2, 6, 26, 43, "", "#f6f8fa")
    c.words(15, 8, "warpgroup 0: producers", weight="bold")
    c.words(15, 10.2, "40 registers per thread", size=8.5, color=DIM)
    c.box(4, 12.5, 22, 7, "planner, one thread\ntakes the next tile number\nfrom a counter", VIOLET)
    c.box(4, 23, 22, 7, "loader, one warp\nasks TMA for Q, K, V", ORANGE)
    c.box(4, 40, 22, 7, "storer, one warp\nwrites O by TMA", GREEN)
    c.arrow(15, 19.5, 15, 23)
    c.left(16, 21.2, "WorkTile", size=8, color=DIM)

    c.box(33, 6, 24, 43, "", "#f6f8fa")
    c.words(45, 8, "shared memory, 225 KB", weight="bold")
    for n in range(2):
        c.box(35 + 10 * n, 12, 10, 5.5, f"Q {n}\n32 KB", PALE, size=8.5)
    for n in range(3):
        c.box(35 + 6.7 * n, 21, 6.7, 5.5, f"K {n}\n32 KB", BLUE, size=8.5)
    for n in range(2):
        c.box(35 + 10 * n, 30, 10, 5.5, f"V {n}\n32 KB", BLUE, size=8.5)
    c.words(45, 19.2, "ring of 3", size=8, color=DIM)
    c.words(45, 28.2, "ring of 2", size=8, color=DIM)
    c.box(35, 38.5, 20, 5, "O, in the stage\nof the Q it came from", GREEN, size=8.5)
    c.words(45, 46.2, "a full and an empty mbarrier\nper stage of each ring", size=8, color=DIM)
    c.arrow(26, 25, 35, 15)
    c.arrow(26, 26, 35, 24)
    c.arrow(26, 27, 35, 32.5)
    c.arrow(35, 41, 26, 41)
    for n in range(2):
        y = 6 + 22 * n
        c.box(62, y, 28, 21, "", "#f6f8fa")
        c.words(76, y + 2, f"warpgroup {n + 1}: consumer", weight="bold")
        c.words(76, y + 4.2, "232 registers per thread, 64 query rows", size=8.5, color=DIM)
        c.box(64, y + 6, 24, 4, "S = Q Kᵀ: wgmma, Q in registers", YELLOW, size=8.5)
        c.box(64, y + 10.5, 24, 4, "softmax on the accumulators", RED, size=8.5)
        c.box(64, y + 15, 24, 4, "O += P V: wgmma, P in registers", YELLOW, size=8.5)
        c.arrow(55, 24, 64, y + 8)
        c.arrow(55, 32.5, 64, y + 16)
        c.arrow(64, y + 18, 55, 41 + (n - 0.5) * 2, color=DEEP, dashed=True)
    return c.figure


def timeline() -> Any:
    """Two consumer warpgroups over time: one's softmax under the other's products."""
    c = Canvas(96, 33)
    c.title("Two consumer warpgroups take turns at the tensor cores")
    c.right(17, 8, "TMA", size=9)
    c.right(17, 14, "tensor cores", size=9)
    c.right(17, 20.5, "consumer 1, softmax", size=9)
    c.right(17, 26.5, "consumer 2, softmax", size=9)
    unit, start = 4.7, 18.0
    for n in range(4):
        c.box(start + 4 * unit * n, 6, 4 * unit - 0.4, 4, f"K{7 - n}, V{8 - n}", ORANGE, size=8.5)
    for n in range(4):
        at = start + 4 * unit * n
        for group, color in ((0, BLUE), (1, VIOLET)):
            x = at + 2 * unit * group
            c.box(x, 12, unit, 4, f"S{8 - n}", color, size=8.5)
            c.box(x + unit, 12, unit, 4, f"P{9 - n} V", color, size=8.5)
            width = min(2.6 * unit, start + 16 * unit - x - unit)
            y = 18.5 + 6 * group
            c.box(x + unit, y, width, 4, f"softmax {8 - n}" if width > 2 * unit else "", color, size=8.5)
            if n == 0:
                c.line(x + unit, 16, x + unit, y, color=DIM, linestyle=":")
    c.arrow(start, 30.4, start + 16 * unit, 30.4, color=DIM)
    c.right(start + 16 * unit, 31.8, "time", color=DIM, size=8.5)
    c.left(start, 31.8, "S8: Q Kᵀ of key block 8.  P9 V: O += P V of block 9, the one before.", size=8.5, color=DIM)
    return c.figure


def blocks() -> Any:
    """Which blocks a causal tile visits, in which order, and which of them it masks."""
    c = Canvas(88, 40)
    c.title("A tile of 128 query rows of a causal problem: key blocks from the last one down")
    left, top, step = 12, 8, 6
    for row in range(4):
        for key in range(8):
            number = 4 + row
            color = "white"
            if key < number:
                color = BLUE
            elif key == number:
                color = YELLOW
            c.box(left + step * key, top + step * row, step, step, color=color, line=0.6)
    y = top + 3 * step
    c.box(left, y, step * 8, step, color="none", line=2.2, edge=DEEP)
    for n, key in enumerate(range(7, -1, -1)):
        c.words(left + step * key + step / 2, y + step / 2, str(n + 1), weight="bold")
    c.right(left - 1, y + step / 2, "this tile", size=8.5)
    c.words(left + 24, top - 1.4, "key blocks of 128 →", size=8.5, color=DIM)
    c.arrow(left + 48, y + step + 2, left, y + step + 2, color=DEEP)
    c.words(left + 24, y + step + 4, "order of visits", size=8.5, color=DIM)
    c.left(64, 11, "masked, standard softmax", size=8.5)
    c.box(61, 10, 2.2, 2, color=YELLOW)
    c.left(64, 15, "whole, lazy softmax", size=8.5)
    c.box(61, 14, 2.2, 2, color=BLUE)
    c.left(64, 19, "not visited", size=8.5)
    c.box(61, 18, 2.2, 2, color="white")
    return c.figure


def lazy() -> Any:
    """A row's maximum over key blocks, and the reference of the lazy softmax, on random scores that drift."""
    rng = np.random.default_rng(4)
    blocks, keys = 64, 128
    scores = rng.normal(0, 2.2, (blocks, keys)) + np.interp(np.arange(blocks), [0, 22, 23, 63], [0, 2, 13, 14])[:, None]
    top = scores.max(1)
    running = np.maximum.accumulate(top)
    reference, moved = [running[0]], [0]
    lanes = scores.reshape(blocks, 4, keys // 4)  # a row's keys lie in four lanes
    for n in range(1, blocks):
        m = reference[-1]
        if (2.0 ** (lanes[n] - m)).sum(1).max() > 2**8:
            m = running[n]
            moved.append(n)
        reference.append(m)
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    at = np.arange(blocks)
    axes.plot(at, top, ".", color="0.6", label="largest score of the block")
    axes.plot(at, running, color=RED, linewidth=1.5, label=f"running maximum: moves {len(set(running)) - 1} times")
    axes.plot(at, reference, color=DEEP, linewidth=2.5, drawstyle="steps-post",
              label=f"the lazy softmax's reference: moves {len(moved) - 1} time")  # fmt: skip
    axes.fill_between(at, reference, np.array(reference) + 8, color=BLUE, alpha=0.25, linewidth=0, step="post",
                      label="P up to 2$^8$: the reference may stand")  # fmt: skip
    axes.set(xlabel="key block", ylabel="score, base 2", xlim=(0, blocks - 1), ylim=(-2, None))
    axes.legend(fontsize=8.5, loc="upper left")
    axes.grid(alpha=0.25)
    return figure


def tiles_order() -> Any:
    """Tiles of a causal problem on five multiprocessors: by number and heaviest first."""
    weights = [8, 7, 6, 5, 4, 3, 2, 1]
    figure = Figure(figsize=(9, 3.0), layout="constrained")
    colors = [DEEP, "#4292c6", BLUE, "#9ecae1", "#c6dbef", PALE, GREY, "#f3f5f7"]
    panels = figure.subplots(1, 2, sharey=True)
    for axes, order, title in (
        (panels[0], sorted(weights), "lightest first"),
        (panels[1], weights, "heaviest first, as Tilewise takes them"),
    ):
        free = [0.0] * 5
        for w in [w for w in order for _ in range(2)]:
            n = int(np.argmin(free))
            axes.barh(n, w, left=free[n], color=colors[8 - w], edgecolor=INK, linewidth=0.5)
            axes.text(free[n] + w / 2, n, str(w), ha="center", va="center", fontsize=8, color="white" if w > 6 else INK)
            free[n] += w
        axes.axvline(max(free), color=RED, linewidth=2)
        axes.set_title(f"{title}: done at {max(free):.0f}", fontsize=10)
        axes.set(xlabel="time, in key blocks", xlim=(0, 22), yticks=range(5))
    panels[0].set_ylabel("multiprocessor")
    return figure


def mma_steps() -> Any:
    """forward_mma with one place for K and one for V: what travels under which product."""
    c = Canvas(90, 31)
    c.title("forward_mma at D 128: one place for K, one for V, two barriers per key block")
    c.right(16, 9, "cp.async")
    c.right(16, 16, "all warps")
    x = 18.0
    c.box(x, 7, 7, 4, "K(n)", ORANGE, size=8.5)
    x += 7
    for name in ("n", "n − 1"):
        c.line(x, 5.5, x, 22, color=DEEP, linewidth=2)
        c.words(x, 23.4, "barrier 1", size=8, color=DIM)
        c.box(x, 7, 17, 4, f"V({name}) travels", ORANGE, size=8.5)
        c.box(x, 14, 7, 4, "S = Q Kᵀ", YELLOW, size=8.5)
        c.box(x + 7, 14, 10, 4, "softmax, P", RED, size=8.5)
        x += 17
        c.line(x, 5.5, x, 22, color=DEEP, linewidth=2)
        c.words(x, 23.4, "barrier 2", size=8, color=DIM)
        following = "n − 1" if name == "n" else "n − 2"
        c.box(x, 7, 13, 4, f"K({following}) travels", ORANGE, size=8.5)
        c.box(x, 14, 9, 4, "O += P V", GREEN, size=8.5)
        x += 13
    c.left(18, 27, "K(n) stays until the softmax is done: the lazy softmax may need S once more.", size=8.5, color=DIM)
    return c.figure


def mma_registers() -> Any:
    """Where a thread's registers go at D 128: 32 rows per warp, blocks of 64 keys."""
    c = Canvas(84, 22)
    c.title("Registers of a thread of forward_mma (D 128, 32 rows per warp, 64 keys)")
    scale = 0.235
    for y, when, parts in (
        (6, "during S and softmax", (("O: 128", 128, GREEN), ("S: 64", 64, YELLOW), ("fragments, m, l, …", 50, GREY))),
        (13, "during P V", (("O: 128", 128, GREEN), ("P: 32", 32, RED), ("fragments, m, l, …", 50, GREY))),
    ):
        x = 20.0
        c.right(19, y + 2.5, when, size=8.5)
        for words, count, color in parts:
            c.box(x, y, count * scale, 5, words, color, size=8)
            x += count * scale
    limit = 20 + 255 * scale
    c.line(limit, 5, limit, 20, color="#b04a2f", linewidth=1.5, linestyle="--")
    c.words(limit, 20.8, "255", size=8, color="#b04a2f")
    return c.figure


DRAWN = {
    "forward-roles": roles,
    "forward-timeline": timeline,
    "forward-blocks": blocks,
    "forward-lazy": lazy,
    "forward-order": tiles_order,
    "mma-steps": mma_steps,
    "mma-registers": mma_registers,
}
