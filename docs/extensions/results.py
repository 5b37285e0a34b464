"""The tables of docs/results as Markdown: what `tilewise bench …` and `tilewise ladder` printed, cell by cell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Table(NamedTuple):
    """title: the line over it. notes: the lines under it, and those before the title that are no rows."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    notes: list[str]


def markdown(path: Path) -> str:
    """A table with its title, what was met and missed of the bars, its notes, and a link to the file.

    A file without a table's rule is shown as it is.
    """
    text = path.read_text()
    link = f"[{path.name}](../results/{path.name})"
    if (raw := path.with_suffix(".csv")).exists():
        link += f", every measurement in [{raw.name}](../results/{raw.name})"
    table = parse(text)
    if table is None:
        return f"```text\n{text.rstrip()}\n```\n\nThe file: {link}."
    lines = [f"**{table.title}**", ""] if table.title else []
    lines += [":::{container} results", "", "| " + " | ".join(table.heads) + " |", _rule(table)]
    lines += ["| " + " | ".join("**no**" if cell == "no" else _cell(cell) for cell in row) + " |" for row in table.rows]
    lines += ["", ":::"]
    if verdict := bars(table):
        lines += ["", verdict]
    lines += ["", *(f"- {_cell(note)}" for note in table.notes)]
    return "\n".join([*lines, "", f"The file: {link}."])


def parse(text: str) -> Table | None:
    """The table in a printed text: under its heads stands a line of ─, under its rows an empty line or the end."""
    lines = [line.rstrip() for line in text.splitlines()]
    rules = [n for n, line in enumerate(lines) if line.strip() and not line.strip(" ─")]
    if not rules:
        return None
    at = rules[0]
    end = at + 1
    while end < len(lines) and (not lines[end] or lines[end].startswith(" ")):
        end += 1
    body = [line for line in lines[at + 1 : end] if line.strip()]
    columns = _columns([lines[at - 1], *body])
    columns = [(a, b) for a, b in columns if any(line[a:b].strip() for line in body)]  # of a peer that was not there
    heads, *rows = [[line[a:b].strip() for a, b in columns] for line in (lines[at - 1], *body)]
    above = [line for line in lines[: at - 1] if line.strip()]
    title = above[-1].strip() if above else ""
    progress = {row[0] for row in rows}  # before the title, each row was printed as soon as it was measured
    before = [line for line in above[:-1] if line.partition(": ")[0] not in progress]
    after = [line for line in lines[end:] if line.strip() and not line.startswith("drew ")]
    return Table(title, heads, rows, _joined(before) + after)


def bars(table: Table) -> str:
    """How many of the bars were met; empty for a table without bars."""
    columns = [n for n, head in enumerate(table.heads) if head == "met"]
    met = sum(row[n] == "yes" for row in table.rows for n in columns)
    missed = sum(row[n] == "no" for row in table.rows for n in columns)
    return f"{met} of {met + missed} bars were met, {missed} missed." if columns else ""


def _columns(lines: list[str]) -> list[tuple[int, int]]:
    """Where columns begin and end: two or more places that are blank in every line stand between them."""
    width = max(map(len, lines))
    used = [any(line[n : n + 1].strip() for line in lines) for n in range(width)]
    marks = "".join("x" if place else " " for place in used)
    return [(m.start(), m.end()) for m in re.finditer(r"x(?:.?x)*", marks)]


def _rule(table: Table) -> str:
    """Left for words, right for numbers."""
    sides = []
    for n in range(len(table.heads)):
        cells = [row[n] for row in table.rows if row[n]]
        sides.append("---:" if cells and all(re.match(r"[\d.,]+", cell) for cell in cells) else ":---")
    return "| " + " | ".join(sides) + " |"


def _cell(text: str) -> str:
    return re.sub(r"([|*_`<$])", r"\\\1", text)


def _joined(lines: list[str]) -> list[str]:
    return [" ".join(lines)] if lines else []
