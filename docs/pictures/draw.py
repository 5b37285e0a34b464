"""Draws the pictures of the guides to masks and to training from their own code: python docs/pictures/draw.py"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

import tilewise

HERE = Path(__file__).parent
GUIDE, TRAINING = (HERE.parent / "guides" / name for name in ("masks.md", "training.md"))
SHADES = matplotlib.colormaps["Blues"]
BLOCK = 32


def examples(guide: Path = GUIDE) -> list[str]:
    """A guide's blocks of Python."""
    return re.findall(r"```python\n(.*?)```", guide.read_text(), re.S)


def calls(example: str) -> list[dict[str, Any]]:
    """The calls of attention in an example: name (the comment behind it), line, lengths, heads, mask and score."""
    lines = re.findall(r"^o = attention\(.*\)  # .*$", example, re.M)
    found: list[dict[str, Any]] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
        line, _, name = lines[len(found)].rpartition("  # ")
        sizes = {"seqlen_q": q.shape[1], "seqlen_k": k.shape[1], "heads": q.shape[2]}
        found.append({"name": name, "line": line, **sizes, "mask": None, "score": None, **given})
        return q

    real, tilewise.attention = tilewise.attention, attention
    try:
        exec(example, {})
    finally:
        tilewise.attention = real
    return found


def shades_of(call: dict[str, Any]) -> torch.Tensor:
    """(queries, keys): 1 in blocks that are seen whole, 1/2 in those seen in part, 0 in the others."""
    lengths, block = (call["seqlen_q"], call["seqlen_k"]), BLOCK if call["seqlen_q"] == call["seqlen_k"] else BLOCK // 2
    schedule = tilewise.schedule_of(call["mask"], 1, call["heads"], *lengths, block_q=block, block_k=block)
    sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "block_q": block, "block_k": block}
    whole = tilewise.BlockSchedule.from_bits(schedule.whole, **sizes)
    return (schedule.to_mask().float() + whole.to_mask().float()) / 2


def draw_mask(axes: Any, call: dict[str, Any]) -> str:
    queries, keys = call["seqlen_q"], call["seqlen_k"]
    shades = shades_of(call)
    axes.imshow(
        shades, cmap=SHADES, vmin=0, vmax=1, interpolation="nearest", extent=(0, keys, queries, 0), aspect="auto"
    )
    axes.set(xlabel="key", ylabel="query")
    if queries < keys:  # what is interesting lies at the end
        axes.set(xlim=(keys - 2 * queries, keys), xticks=[keys - n * queries for n in (2, 1, 0)])
    return f"{(shades > 0).float().mean():.0%} of blocks are visited"


def draw_score(axes: Any, call: dict[str, Any]) -> str:
    """What is added to the score, of the second head, where places count; else a curve."""
    index = torch.arange(call["seqlen_q"])
    added = call["score"](torch.zeros(()), 0, torch.tensor(1), index[:, None], index[None, :])
    if not added.any():
        s = torch.linspace(-20, 20, 401)
        axes.plot(s, s, color="0.75", linewidth=1.5)
        axes.plot(s, call["score"](s, 0, 0, 0, 0), color=SHADES(0.95), linewidth=2.5)
        axes.set(xlim=(-20, 20), ylim=(-10, 10), xlabel="score", ylabel="score that counts")
        axes.grid(color="0.92")
        return "every block; the score becomes"
    first, last = index[len(index) // 2 - 24].item(), index[len(index) // 2 + 24].item()
    part = added[first:last, first:last]
    limit = float(part.abs().max())
    image = axes.imshow(part, cmap="PuOr", vmin=-limit, vmax=limit, extent=(first, last, last, first), aspect="auto")
    ticks = (first, (first + last) // 2, last)
    axes.set(xlabel="key", ylabel="query", xticks=ticks, yticks=ticks)
    axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03).ax.tick_params(labelsize=8)
    return "every block; added to the score"


def draw_ten(path: Path) -> None:
    figure = Figure(figsize=(16, 7.8), dpi=110, layout="constrained")
    figure.get_layout_engine().set(wspace=0.04, hspace=0.06)
    panels = figure.subplots(2, 5).flat
    for axes, call in zip(panels, calls(examples()[0]), strict=True):
        told = draw_score(axes, call) if call["mask"] is None else draw_mask(axes, call)
        axes.set_title(call["name"], fontsize=13, fontweight="bold", loc="left", pad=20)
        axes.text(0, 1.025, told, fontsize=9.5, color="0.35", transform=axes.transAxes)
        axes.tick_params(labelsize=8)
    for name, shade in (("seen whole", 1.0), ("seen in part: the function is evaluated", 0.5), ("not visited", 0.0)):
        panels[0].fill([], [], facecolor=SHADES(shade), edgecolor="0.6", label=name)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=12)
    figure.savefig(path)


def draw_documents(path: Path) -> None:
    example = next(text for text in examples() if "documents.png" in text)
    namespace: dict[str, Any] = {}
    exec(example.partition("schedule = ")[0], namespace)
    tokens = namespace["tokens"]
    tilewise.schedule_of(namespace["mask"], 1, 1, tokens, tokens).draw(path)


def draw_tree(path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(examples(TRAINING)[0].partition("print")[0], namespace)
    namespace["tree"].draw(path)


if __name__ == "__main__":
    torch.manual_seed(0)
    draw_ten(HERE / "ten-variants.png")
    draw_documents(HERE / "documents.png")
    draw_tree(HERE / "training-tree.png")
