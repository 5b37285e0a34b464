"""Pictures of the decode kernels: docs/inside/tree-decode.md."""

from __future__ import annotations

from typing import Any

import numpy as np
from canvas import BLUE, DEEP, DIM, GREEN, GREY, ORANGE, VIOLET, YELLOW, Canvas
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import tilewise
from tilewise.plan.items import Word
from tilewise.plan.worklist import Shape, work_list

HEADS, KV_HEADS, PAGE = 8, 2, 16
SHARED, BRANCH, OWN, SEQUENCES, GROUPS = 4096, 1024, (600, 2400), 16, 2


def batch() -> tuple[Any, list[int]]:
    """Sixteen sequences: a prompt that all share, a document that eight share, and 600 to 2400 tokens of their own."""
    cache = tilewise.PagedKVCache(4096, PAGE, KV_HEADS, 128)
    root = cache.allocate()
    cache.extend([root], [SHARED])
    branches = [root, cache.fork(root)]
    cache.extend(branches, [BRANCH] * GROUPS)
    each = SEQUENCES // GROUPS
    seqs = [seq for branch in branches for seq in (branch, *(cache.fork(branch) for _ in range(each - 1)))]
    cache.extend(seqs, np.linspace(*OWN, SEQUENCES).astype(int).tolist())
    return cache, seqs


def dealt() -> Any:
    """The work list of that batch, dealt to eight blocks: made by plan_decode and work_list, as for a card."""
    cache, seqs = batch()
    plan = tilewise.plan_decode(cache, seqs, num_heads=HEADS, share_prefix=True)
    shape = Shape(rows=8, warps=4, blocks=8, tiles=True, joiners=6)
    lengths = [cache.length(s) for s in seqs]
    work = work_list(plan, [cache.page_list(s) for s in seqs], lengths, PAGE, shape)
    figure = Figure(figsize=(9.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for b in range(work.blocks):
        at = 0.0
        for item in work.tile_items[:, b]:
            if item[Word.ROWS]:
                tokens = int(item[Word.STOP] - item[Word.START])
                root = int(item[Word.START]) < SHARED
                axes.barh(b - 0.19, tokens, 0.36, left=at, color=DEEP if root else VIOLET, edgecolor="white")
                at += tokens
        at = 0.0
        for item in work.items[b]:
            if item[Word.ROWS]:
                length = int(work.lengths[item[Word.TABLE]])
                tokens = (min(int(item[Word.STOP]), length) - int(item[Word.START])) / shape.warps
                axes.barh(b + 0.19, tokens, 0.36, left=at, color=ORANGE, edgecolor="white", linewidth=0.6)
                at += tokens
    axes.set(yticks=range(work.blocks), ylim=(work.blocks - 0.5, -0.5), ylabel="thread block")
    axes.set_xlabel("tokens of K and V that pass; what the block's four streaming warps take is shown divided by four")
    marks = ((DEEP, "tile items: rows of all 16 sequences over the root, cut into pieces"),
             (VIOLET, "tile items: rows of 8 sequences over a branch"),
             (ORANGE, "stream items: a sequence over its own tokens"))  # fmt: skip
    handles = [Patch(facecolor=color, label=words) for color, words in marks]
    figure.legend(handles=handles, loc="outside upper center", ncols=1, frameon=False, fontsize=9)
    return figure


def block() -> Any:
    """The sixteen warps of a block of decode_tree over one launch."""
    c = Canvas(92, 38)
    c.title("A thread block of decode_tree over one launch: 16 warps")
    rows = (
        (6, 6, "warps 0–3\ntile warpgroup 0"),
        (13, 6, "warps 4–7\ntile warpgroup 1"),
        (20, 4, "warp 8\ntile loader"),
        (25, 6, "warps 12–15\nstreaming"),
    )
    for y, h, words in rows:
        c.right(19, y + h / 2, words, size=8.5)
    for n, (y, h, _) in enumerate(rows[:2]):
        c.box(20, y, 34, h, "64 rows of a node, 64 tokens at a time", DEEP, size=8.5)
        c.axes.texts[-1].set_color("white")
        words = "join: stream too" if n == 0 else "2 of 4 join"
        c.box(54, y, 16, h, words, ORANGE, size=8.5)
    c.box(20, 20, 32, 4, "TMA: K and V of the node, page by page, into a ring", YELLOW, size=8.5)
    c.box(20, 25, 50, 6, "each warp: item after item, 16 tokens at a time by its own ring; mma.sync", ORANGE, size=8.5)
    c.line(72, 5, 72, 32, color="#b04a2f", linewidth=2.5)
    c.words(72, 33.6, "grid barrier", size=8.5, color="#b04a2f")
    for y, h in ((6, 6), (13, 6), (25, 6)):
        c.box(74, y, 16, h, "merge states\nof some rows", GREEN, size=8.5)
    c.arrow(20, 36, 90, 36, color=DIM)
    c.right(90, 34.8, "time", size=8.5, color=DIM)
    return c.figure


def transposed() -> Any:
    """Why the streaming body multiplies K by Qᵀ and not Q by Kᵀ."""
    c = Canvas(88, 33)
    c.title("Few query rows: tokens fill the sixteen rows of the product")
    c.words(21, 6, "Q Kᵀ: 4 of 16 rows have work", size=9)
    c.box(6, 9, 14, 16, "", GREY)
    c.box(6, 9, 14, 4, "4 query rows", GREEN, size=8.5)
    c.words(13, 19, "empty", size=8.5, color=DIM)
    c.words(13, 26.6, "A operand:\n16 rows", size=8.5, color=DIM)
    c.words(22, 17, "×", size=14)
    c.box(24, 9, 9, 16, "Kᵀ\n8 tokens", BLUE, size=8.5)
    c.words(28.5, 26.6, "B operand:\n8 columns", size=8.5, color=DIM)
    c.line(43, 5, 43, 31)
    c.words(66, 6, "K Qᵀ, as the kernel has it", size=9)
    c.box(49, 9, 14, 16, "K\n16 tokens", BLUE, size=9)
    c.words(56, 26.6, "A operand:\n16 rows", size=8.5, color=DIM)
    c.words(65, 17, "×", size=14)
    c.box(67, 9, 9, 16, "", GREY)
    c.box(67, 9, 4.5, 16, "Qᵀ\n4 rows", GREEN, size=8.5)
    c.words(71.5, 26.6, "B operand:\n8 columns", size=8.5, color=DIM)
    c.left(78, 17, "half full\ninstead of\na quarter", size=8.5, color=DIM)
    return c.figure


def pieces() -> Any:
    """A sequence's own tokens, whole or cut: the same fold, the same bits."""
    c = Canvas(88, 34)
    c.title("A range of 2048 tokens in pieces of 128: one warp or many, the same fold")
    c.left(3, 8, "many warps:", size=9, weight="bold")
    c.left(3, 22.5, "one warp:", size=9, weight="bold")
    for n in range(5):
        x = 17 + 13 * n
        last = n == 4
        name = "…" if n == 3 else f"piece {15 if last else n}"
        c.box(x, 6, 12, 4, name, BLUE, size=8.5)
        c.arrow(x + 6, 10, x + 6, 12.5)
        c.box(x + 1, 12.5, 10, 3.6, "…" if n == 3 else "state", VIOLET, size=8.5)
        if n:
            c.arrow(x - 2, 14.3, x + 1, 14.3, color=DEEP)
        c.box(x, 20.5, 12, 4, name, BLUE, size=8.5)
        if n:
            c.arrow(x - 1, 22.5, x, 22.5, color=DEEP)
        c.words(x + 6, 26.4, "fold in\nshared memory" if n < 3 else "", size=8, color=DIM)
    c.left(82, 14.3, "→ o", size=10)
    c.left(82, 22.5, "→ o", size=10)
    c.left(
        17,
        17.8,
        "written to scratch; after the grid barrier some warp folds them from first to last",
        size=8.5,
        color=DIM,
    )
    c.left(
        17, 31.4, "The size of a piece depends on the range's length alone, never on the batch.", size=8.5, color=DIM
    )
    return c.figure


DRAWN = {
    "decode-dealt": dealt,
    "decode-block": block,
    "decode-transposed": transposed,
    "decode-pieces": pieces,
}
