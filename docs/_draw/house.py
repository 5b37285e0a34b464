"""The picture of docs/inside/map.md: the rooms and who may import whom, read from pyproject.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomllib
from canvas import DIM, GREEN, GREY, ORANGE, PALE, VIOLET, YELLOW, Canvas

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
WORDS = {
    "cli": "commands",
    "doctor": "what is here",
    "bench": "measuring",
    "learn": "the ladder",
    "serving": "generate, Engine",
    "distributed": "several processes",
    "integrations": "torch, transformers, Thunder",
    "compat": "flash_attn's and flex_attention's names",
    "reference": "the float64 oracle",
    "api": "attention(), decode()",
    "traced": "calls in compiled graphs",
    "arguments": "checked arguments",
    "kvcache": "pages, prefix tree",
    "cpu": "walks plans with torch",
    "gpu": "chooses and launches kernels",
    "emulator": "kernels on a CPU",
    "tuned": "measured tables",
    "compiler": "NVRTC, cache, driver",
    "plan": "lists of tiles",
    "formats": "how K, V are stored",
    "arch": "what cards can do",
    "state": "(o, lse), merge",
    "scores": "what is done to scores",
    "functions": "users' masks and scores",
    "checks": "one voice for errors",
    "graphs": "outside of graphs",
}


def layers() -> list[list[str]]:
    """From the top down; rooms of a layer do not import each other."""
    contracts = tomllib.loads(PROJECT.read_text())["tool"]["importlinter"]["contracts"]
    found = next(contract for contract in contracts if contract["type"] == "layers")["layers"]
    return [[room.strip() for room in layer.split("|")] for layer in found]


def rooms() -> Any:
    stack = layers()
    c = Canvas(92, 3.6 * len(stack) + 6)
    c.title("Rooms of src/tilewise: each may import those below it")
    groups = (
        (GREY, ("cli", "doctor", "bench", "learn")),
        (ORANGE, ("serving", "distributed", "integrations", "compat")),
        (YELLOW, ("reference", "api", "traced", "arguments")),
        (GREEN, ("kvcache", "cpu", "gpu", "emulator", "tuned", "compiler")),
        (VIOLET, ("plan", "formats", "arch", "state", "scores", "functions")),
    )
    for n, layer in enumerate(stack):
        width = 88 / len(layer)
        for m, room in enumerate(layer):
            color = next((color for color, members in groups if room in members), PALE)
            x, y = 2 + width * m, 4.5 + 3.6 * n
            c.box(x, y, width, 3.6, color=color, line=0.6)
            words = WORDS.get(room, "")
            if len(layer) < 3:
                c.left(x + 1.2, y + 1.8, room, size=9, weight="bold")
                c.right(x + width - 1.2, y + 1.8, words, size=8.5, color=DIM)
            else:
                c.words(x + width / 2, y + 1.1, room, size=9, weight="bold")
                c.words(x + width / 2, y + 2.6, words, size=8, color=DIM)
    return c.figure


DRAWN = {"rooms": rooms}
