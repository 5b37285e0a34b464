"""The pages about concepts and insides: their pictures, the ladder's figures, and the map."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*(DOCS / "concepts").glob("*.md"), *(DOCS / "inside").glob("*.md")])
SHOWN = {name for page in PAGES for name in re.findall(r"!\[.+?\]\(\.\./pictures/(.+?)\)", page.read_text())}


@pytest.fixture
def drawn(monkeypatch):
    """The pictures that docs/_draw draws: name -> a function that makes the figure."""
    monkeypatch.syspath_prepend(str(DOCS / "_draw"))
    for name in ("canvas", "concepts", "decode", "forward", "house", "ladder"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import concepts
    import decode
    import forward
    import house
    import ladder

    return {k: v for module in (concepts, decode, forward, house, ladder) for k, v in module.DRAWN.items()}


def test_there_are_pages():
    assert len(PAGES) >= 13
    assert len(SHOWN) >= 25


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_pictures_are_there_small_and_on_white(name):
    """Small enough for git, and with a ground of their own, so that they can be read in a dark theme."""
    path = DOCS / "pictures" / name
    assert 2_000 < path.stat().st_size < 150_000
    text = path.read_text()
    assert re.search(r'<g id="patch_1">\s*<path [^>]*style="fill: #ffffff', text), "matplotlib's white ground"


def test_every_picture_is_drawn_by_the_script_and_shown(drawn):
    assert {f"{name}.svg" for name in drawn} == SHOWN


@pytest.mark.parametrize("name", ["plan-causal", "decode-dealt", "ladder-times", "rooms"])
def test_pictures_made_from_the_package_can_still_be_drawn(drawn, name):
    figure = drawn[name]()
    assert figure.axes


def test_the_ladder_tells_the_figures_of_the_table():
    told = {}
    page = (DOCS / "inside" / "ladder.md").read_text()
    for name, ms in re.findall(r"^(?:### |\*\*)(\w+)(?:\*\*)? · ([\d.,]+) ms", page, re.M):
        told[name] = ms
    table = (DOCS / "results" / "ladder-h200.txt").read_text()
    measured = dict(re.findall(r"^ (\w+) +(?:float32|bfloat16) +128 +ok +([\d.,]+) ", table, re.M))
    assert len(measured) == 21
    assert told == measured


def test_the_map_names_every_room():
    page, sources = (DOCS / "inside" / "map.md").read_text(), ROOT / "src" / "tilewise"
    rooms = {p.name for p in sources.iterdir() if p.suffix == ".py"}
    rooms |= {f"{p.name}/" for p in sources.iterdir() if (p / "__init__.py").exists()}
    rooms |= {p.name for p in (sources / "kvcache").glob("*.py") if p.name != "__init__.py"}
    assert not [room for room in rooms if room not in page]


def test_sources_that_pages_name_are_there():
    for page in PAGES:
        for link in re.findall(r"\]\((\.\./\.\./[^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)
