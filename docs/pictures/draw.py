"""Draws the pictures of the guide to masks from the guide's own code: python docs/pictures/draw.py"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

import tilewise

HERE = Path(__file__).parent
GUIDE = HERE.parent / "guide-masks.md"
SHADES = matplotlib.colormaps["Blues"]
BLOCK = 32


def examples() -> list[str]:
    """The guide's blocks of Python."""
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)


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


def blocks(call: dict[str, Any], block: int) -> torch.Tensor:
    """(queries, keys): 1 in blocks that are seen whole, 1/2 in those seen in part, 0 in the others."""
    lengths = call["seqlen_q"], call["seqlen_k"]
    schedule = tilewise.schedule_of(call["mask"], 1, call["heads"], *lengths, block_q=block, block_k=block)
    sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "block_q": block, "block_k": block}
    whole = tilewise.BlockSchedule.from_bits(schedule.whole, **sizes)
    return (schedule.to_mask().float() + whole.to_mask().float()) / 2


def draw_mask(axes: Any, call: dict[str, Any]) -> None:
    few = call["seqlen_q"] < call["seqlen_k"]
    block = 16 if few else BLOCK
    shades = blocks(call, block)
    extent = (0, call["seqlen_k"], call["seqlen_q"], 0)
    axes.imshow(shades, cmap=SHADES, vmin=0, vmax=1, interpolation="nearest", extent=extent, aspect="auto")
    if few:  # what is interesting lies at the end
        axes.set_xlim(call["seqlen_k"] - 2 * call["seqlen_q"], call["seqlen_k"])
        axes.set_xticks([call["seqlen_k"] - n for n in (2 * call["seqlen_q"], call["seqlen_q"], 0)])
    axes.set_xlabel("key")
    axes.set_ylabel("query")


def draw_score(axes: Any, call: dict[str, Any]) -> None:
    """A curve where the score alone counts; what is added to it, of the second head, where places count."""
    function = call["score"]
    index = torch.arange(call["seqlen_q"])
    added = function(torch.zeros(()), 0, torch.tensor(1), index[:, None], index[None, :])
    if added.dim() == 0 or not added.any():
        s = torch.linspace(-20, 20, 401)
        axes.plot(s, s, color="0.75", linewidth=1)
        axes.plot(s, function(s, 0, 0, 0, 0), color=SHADES(0.9), linewidth=2)
        axes.set(xlim=(-20, 20), ylim=(-12, 12), xlabel="score", ylabel="becomes")
        axes.grid(color="0.92")
        return
    middle = call["seqlen_q"] // 2
    zoom = slice(middle - 24, middle + 24)
    limit = float(added[zoom, zoom].abs().max())
    extent = (zoom.start, zoom.stop, zoom.stop, zoom.start)
    axes.imshow(added[zoom, zoom], cmap="PuOr_r", vmin=-limit, vmax=limit, extent=extent, aspect="auto")
    axes.set(xlabel="key", ylabel="query", xticks=(zoom.start, middle, zoom.stop), yticks=(zoom.start, middle, zoom.stop))


def draw_ten(path: Path) -> None:
    figure = Figure(figsize=(15.5, 7.4), dpi=110, layout="constrained")
    panels = figure.subplots(2, 5).flat
    for axes, call in zip(panels, calls(examples()[0]), strict=True):
        axes.set_title(call["name"], fontsize=13, fontweight="bold", loc="left")
        axes.tick_params(labelsize=8)
        if call["mask"] is None:
            draw_score(axes, call)
            what = "softcap" if call["name"] == "softcap" else "added to the score"
            axes.text(1, 1.02, f"every block; {what}" if what != "softcap" else "every block", transform=axes.transAxes, ha="right", fontsize=9, color="0.35")
        else:
            draw_mask(axes, call)
            shades = blocks(call, 16 if call["seqlen_q"] < call["seqlen_k"] else BLOCK)
            share = (shades > 0).float().mean()
            axes.text(1, 1.02, f"{share:.0%} of blocks", transform=axes.transAxes, ha="right", fontsize=9, color="0.35")
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


if __name__ == "__main__":
    draw_ten(HERE / "ten-variants.png")
    draw_documents(HERE / "documents.png")
