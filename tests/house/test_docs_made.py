"""What of the site is made while it is built: tables of docs/results, docstrings, parts of pages."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def extension(monkeypatch):
    """A module of docs/extensions by its name."""
    monkeypatch.syspath_prepend(str(DOCS / "extensions"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in ("pages", "results", "commands", "docstrings"):
        if name not in before:
            sys.modules.pop(name, None)


PRINTED = """\
64 × 4096: ours 259, cuDNN 256; 0.986× ≥ 1× no
Decode on a card: µs

 problem        ours  cuDNN  FlashInfer        reached  bar     met
 ──────────────────────────────────────────────────────────────────
 64 × 4096       259    256                     0.986×  ≥ 1×     no
 fp8, 64 × 16  1,537                     1.83× of bf16  ≥ 1.8×  yes

 Hydragen       27.5

FlashInfer: not installed
drew /root/out/plot.png
"""


def test_a_printed_table_is_read_cell_by_cell(extension):
    table = extension("results").parse(PRINTED)
    assert table.title == "Decode on a card: µs"
    assert table.heads == ["problem", "ours", "cuDNN", "reached", "bar", "met"]  # without the peer that was not there
    assert table.rows == [
        ["64 × 4096", "259", "256", "0.986×", "≥ 1×", "no"],
        ["fp8, 64 × 16", "1,537", "", "1.83× of bf16", "≥ 1.8×", "yes"],
        ["Hydragen", "27.5", "", "", "", ""],
    ]
    assert table.notes == ["FlashInfer: not installed"]
    assert extension("results").bars(table) == "1 of 2 bars were met, 1 missed."


@pytest.mark.parametrize("path", sorted((DOCS / "results").glob("*.txt")), ids=lambda path: path.stem)
def test_nothing_of_a_table_is_lost(extension, path):
    table = extension("results").parse(path.read_text())
    if table is None:
        assert path.read_text().rstrip() in extension("results").markdown(path)
        return
    printed = path.read_text().partition("──")[2].split()
    cells = " ".join(" ".join(row) for row in table.rows).split()
    assert cells == printed[1 : 1 + len(cells)], "row by row, in their order"
    assert len({len(row) for row in table.rows} | {len(table.heads)}) == 1


def test_docstrings(extension):
    lines = [
        "Plan `seqs` for all layers, see docs/guides/serving.md.",
        "",
        "num_heads: query heads. window: (left, right) as in `attention`; k, v: *not* taken.",
        "The plan `x[i]` holds a_ while.",
        "room: tokens",
        "v: the others",
        "",
        "    plan = plan_decode(cache)",
        "",
        "    decode(q)",
        "",
        "Returns |o|.",
    ]
    link = {"attention": "tilewise.attention"}.get
    made = extension("docstrings").restructured(lines, ["num_heads", "window", "k", "v", "room"], link)
    assert [line.replace("\\ ", "") for line in made if line] == [
        "Plan ``seqs`` for all layers, see :doc:`/guides/serving`.",
        "- **num_heads**: query heads.",
        "- **window**: (left, right) as in :py:obj:`attention <tilewise.attention>`",
        "- **k**, **v**: \\*not\\* taken. The plan ``x[i]`` holds a\\_ while.",
        "- **room**: tokens",
        "- **v**: the others",
        ".. code-block:: python",
        "    plan = plan_decode(cache)",
        "    decode(q)",
        "Returns \\|o\\|.",
    ]


def test_pages_that_are_not_there_are_left_out(extension):
    contents = extension("pages").contents
    assert contents("Guides: guides/masks guides/missing guides/mask* start").split() == [
        *("```{toctree}", ":caption:", "Guides", ":hidden:", "guides/masks", "start", "```")
    ]
    assert contents("Missing: missing/*") == ""


def test_files_that_no_page_names_are_shown_as_others(extension, tmp_path, monkeypatch):
    pages = extension("pages")
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    for name in ("results", "performance"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        (tmp_path / "results" / f"{name}.txt").write_text(PRINTED)
    (tmp_path / "performance" / "one.md").write_text("<!-- results: a.txt -->\n")
    text, shown = pages.filled("Before\n\n<!-- results: others -->\n")
    assert shown == [tmp_path / "results" / "b.txt"]
    assert text.startswith("Before\n\n## b\n\n**Decode on a card: µs**")
