"""Pictures of docs/concepts: tiles, states, plans, trees."""

from __future__ import annotations

from typing import Any

import torch
from canvas import BLUE, DEEP, DIM, GREEN, GREY, INK, ORANGE, PALE, RED, VIOLET, YELLOW, Canvas
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import tilewise
from tilewise import reference
from tilewise.plan.pictures import HIDDEN, SEEN, WHOLE, plan_figure

TOKENS, BLOCK = 512, 64


def tiles_lists() -> Any:
    """Five problems over the same 512 tokens, and which of the 64 × 64 tiles each has in its list."""
    document = torch.arange(4).repeat_interleave(torch.tensor([90, 200, 62, 160]))
    causal = reference.visible(TOKENS, TOKENS, causal=True)
    sizes = {"block_q": BLOCK, "block_k": BLOCK}
    sparse = tilewise.BlockSchedule.random(TOKENS, TOKENS, **sizes, sparsity=0.6, seed=3).to_mask()
    problems = {
        "full": torch.ones_like(causal),
        "causal": causal,
        "window of 128": reference.visible(TOKENS, TOKENS, causal=True, window=(127, 0)),
        "four documents, causal": causal & (document[:, None] == document),
        "block-sparse, causal": causal & (sparse.squeeze() > 0),
    }
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, (name, seen) in zip(figure.subplots(1, 5, sharey=True), problems.items(), strict=True):
        blocks = seen.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        some, every = blocks.any(3).any(1), blocks.all(3).all(1)
        kept, whole = (x.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1) for x in (some, every))
        image = torch.ones(TOKENS, TOKENS, 3)
        for part, color in ((kept, HIDDEN), (kept & seen, SEEN), (whole, WHOLE)):
            image[part] = torch.tensor(to_rgb(color))
        axes.imshow(image, extent=(0, TOKENS, TOKENS, 0), interpolation="nearest")
        for at in range(0, TOKENS, BLOCK):
            axes.axhline(at, color="0.75", linewidth=0.4)
            axes.axvline(at, color="0.75", linewidth=0.4)
        count = int(some.sum())
        axes.set_title(f"{name}\n{count} of {some.numel()} tiles", fontsize=10)
        axes.set(xlim=(0, TOKENS), ylim=(TOKENS, 0), xticks=(0, 256, 512), xlabel="keys", aspect="equal")
    figure.axes[0].set(ylabel="query rows", yticks=(0, 256, 512))
    words = {WHOLE: "whole tile: no mask", HIDDEN: "masked tile: computed, then hidden", SEEN: "masked tile: seen"}
    marks = [Patch(facecolor=color, edgecolor=INK, linewidth=0.5, label=text) for color, text in words.items()]
    marks.append(Patch(facecolor="white", edgecolor="0.6", label="not in the list"))
    figure.legend(handles=marks, loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    return figure


def tile_loop() -> Any:
    """What happens in one tile of query rows: key blocks pass, and a state stays."""
    c = Canvas(88, 42)
    c.title("One tile of query rows walks along its key blocks")
    c.box(3, 9, 14, 8, "Q\n128 rows × D\nstays", GREEN)
    for n, (color, when) in enumerate(((GREY, "passed"), (GREY, "passed"), (ORANGE, "at hand"), (PALE, "to come"))):
        x = 26 + 15 * n
        c.words(x + 6, 5.6, when, size=8.5, color=DIM)
        c.box(x, 7, 12, 5, f"K block {n}", color)
        c.box(x, 13, 12, 5, f"V block {n}", color)
    c.arrow(10, 17, 10, 24)
    c.line(56, 9.5, 54.5, 9.5, color=INK)
    c.line(54.5, 9.5, 54.5, 20, color=INK)
    c.line(54.5, 20, 15, 20, color=INK)
    c.arrow(15, 20, 15, 24)
    c.words(34, 21, "K", size=8.5, color=DIM)
    c.arrow(62, 18, 77, 24)
    c.words(72, 20.4, "V", size=8.5, color=DIM)
    c.box(3, 24, 15, 6, "S = Q Kᵀ · scale\n(masked if cut)", YELLOW)
    c.arrow(18, 27, 22, 27)
    c.box(22, 24, 21, 6, "m′ = max(m, max of S)\nP = exp(S − m′)", YELLOW)
    c.arrow(43, 27, 47, 27)
    c.box(47, 24, 19, 6, "c = exp(m − m′)\nl = c · l + sum of P", YELLOW)
    c.arrow(66, 27, 70, 27)
    c.box(70, 24, 15, 6, "O = c · O + P V", YELLOW)
    c.box(
        22, 35, 44, 5, "state in registers, from block to block:\nm and l of each row, O of each row and channel", BLUE
    )
    c.arrow(56, 30, 56, 35)
    c.arrow(30, 35, 30, 30)
    c.arrow(66, 37.5, 70, 37.5)
    c.box(70, 35, 15, 5, "o = O / l\nlse = m + log l", GREEN)
    c.words(77.5, 33.6, "after the last block", size=8.5, color=DIM)
    return c.figure


def states_merge() -> Any:
    """One row over 12 keys, in one go and in three pieces, with the numbers that come out."""
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 1, 1, 8), torch.randn(1, 12, 1, 8), torch.randn(1, 12, 1, 8)
    cuts = [(0, 5), (5, 8), (8, 12)]
    states = [tilewise.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in cuts]
    _, lse = tilewise.attention(q, k, v, return_lse=True)
    total = float(lse)
    c = Canvas(80, 34)
    c.title("One query row over 12 keys: in three pieces, merged")
    colors = (BLUE, GREEN, ORANGE)
    for n, (a, b) in enumerate(cuts):
        for key in range(a, b):
            c.box(8 + 5.3 * key, 6, 5.3, 4, f"k{key}", colors[n], size=8)
        middle, each = 8 + 5.3 * (a + b) / 2, float(states[n][1])
        c.arrow(middle, 10.2, middle, 13.5)
        c.box(middle - 7, 13.5, 14, 6, f"state {n}\no$_{n}$,  lse$_{n}$ = {each:.2f}", colors[n], round=True)
        share = float(torch.tensor(each - total).exp())
        c.arrow(middle, 19.5, 40 + 6 * (n - 1), 25)
        c.words((middle + 40 + 6 * (n - 1)) / 2 + (-6, 6, 6)[n], 22, f"weight {share:.2f}", size=8.5, color=DIM)
    c.box(17, 25, 46, 6, "", VIOLET, round=True)
    c.words(40, 26.9, f"lse = log(Σ exp lse$_n$) = {total:.2f}")
    c.words(40, 29.2, "o = Σ o$_n$ · exp(lse$_n$ − lse)")
    return c.figure


def _qkv(tokens: int) -> torch.Tensor:
    return torch.zeros(1, tokens, 8, 128, dtype=torch.bfloat16)


def plan_causal() -> Any:
    """A causal problem as the Hopper forward takes it."""
    q = _qkv(1024)
    return plan_figure(tilewise.plan_attention(q, q, causal=True, backend="emulator"))


def plan_window() -> Any:
    """A window, and queries that are a sequence's last tokens."""
    return plan_figure(tilewise.plan_attention(_qkv(512), _qkv(1024), causal=True, window=(255, 0), backend="emulator"))


TREE = (96, 48, 32)  # tokens of the system prompt, of each question, of each answer


def tree_cache() -> tuple[Any, list[int]]:
    """A system prompt, two questions about it, three answers to each."""
    cache = tilewise.PagedKVCache(64, 16, 8, 128)
    system = cache.allocate()
    cache.extend([system], [TREE[0]])
    questions = [system, cache.fork(system)]
    cache.extend(questions, [TREE[1]] * 2)
    seqs = [seq for question in questions for seq in (question, cache.fork(question), cache.fork(question))]
    cache.extend(seqs, [TREE[2]] * len(seqs))
    return cache, seqs


def plan_of_tree(share: bool) -> Any:
    cache, seqs = tree_cache()
    return plan_figure(tilewise.plan_decode(cache, seqs, num_heads=32, share_prefix=share))


def tree_prompts() -> Any:
    """The tree as people see it: who has which pages."""
    c = Canvas(84, 36)
    c.title("Six sequences: a system prompt, two questions, three answers to each")
    c.box(4, 14, 20, 7, "system prompt\n96 tokens, 6 pages", DEEP, size=9)
    c.axes.texts[-1].set_color("white")
    for n in range(2):
        y = 7.5 + 14 * n
        c.arrow(24, 17.5, 31, y + 3)
        c.box(31, y, 18, 6, f"question {n}\n48 tokens, 3 pages", BLUE)
        for m in range(3):
            z = 4.5 + 14 * n + 4.4 * m
            c.arrow(49, y + 3, 55, z + 1.8)
            c.box(55, z, 15, 3.6, "answer, 32 tokens", ORANGE, size=8.5)
            c.left(71, z + 1.8, f"sequence {3 * n + m}", size=8.5)
    c.words(14, 24.2, "its rows: 6 sequences", size=8.5, color=DIM)
    c.words(40, 29.8, "its rows: 3 sequences each", size=8.5, color=DIM)
    c.words(62.5, 33.2, "its row: 1 sequence each", size=8.5, color=DIM)
    return c.figure


def where_bytes_go() -> Any:
    """Keys that a decode step reads, shared and not, over the number of sequences."""
    import numpy as np

    counts = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256])
    shared, own = 8192, 256
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(counts, counts * (shared + own), color=RED, marker="s", label="each sequence reads its whole prefix")
    axes.plot(counts, shared + counts * own, color=DEEP, marker="o", label="the prefix is read once")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set(xlabel="sequences, 8192 shared and 256 own tokens each", ylabel="key rows read per step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    return figure


DRAWN = {
    "tiles-lists": tiles_lists,
    "tile-loop": tile_loop,
    "states-merge": states_merge,
    "plan-causal": plan_causal,
    "plan-window": plan_window,
    "tree-prompts": tree_prompts,
    "plan-tree-unshared": lambda: plan_of_tree(False),
    "plan-tree-shared": lambda: plan_of_tree(True),
    "tree-bytes": where_bytes_go,
}
