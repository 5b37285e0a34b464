"""Draws the pictures of README, docs/concepts and docs/inside: `python docs/_draw [NAME …] [--png FOLDER]`.

Each goes to docs/pictures/NAME.svg; with --png also into a folder as a PNG, to look at.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import concepts
import decode
import forward
import front
import house
import ladder

from tilewise.plan import pictures

PICTURES = Path(__file__).parents[1] / "pictures"
DRAWN = {**concepts.DRAWN, **forward.DRAWN, **decode.DRAWN, **ladder.DRAWN, **house.DRAWN, **front.DRAWN}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(DRAWN))
    parser.add_argument("--png", type=Path)
    given = parser.parse_args()
    for name in given.names or DRAWN:
        figure = DRAWN[name]()
        pictures.save(figure, PICTURES / f"{name}.svg")
        print(f"{name}.svg: {(PICTURES / f'{name}.svg').stat().st_size >> 10} KB")
        if given.png is not None:
            given.png.mkdir(parents=True, exist_ok=True)
            pictures.save(figure, given.png / f"{name}.png")


if __name__ == "__main__":
    main()
