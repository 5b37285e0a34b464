"""Sources stay readable: no CUDA line over 120 columns, no file over 500 lines and no Python function over 80.

A file or a function that is longer says why, and names the limit: a file in its first lines ("More than 500 lines,
because …"), a function in a comment above it or in its first lines ("80 lines").
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = sorted(p for folder in ("src", "tests", "examples") for p in (ROOT / folder).rglob("*.py"))
NATIVE = sorted(p for p in (ROOT / "src").rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".cpp"))
CUDA = sorted(p for folder in ("src", "tests") for p in (ROOT / folder).rglob("*") if p.suffix in (".cu", ".cuh"))
COLUMNS, FILE_LINES, FUNCTION_LINES = 120, 500, 80


def test_there_are_sources():
    assert len(PYTHON) > 50
    assert len(CUDA) > 40


def test_no_cuda_line_is_too_wide():
    found = [
        f"{path.relative_to(ROOT)}:{n}: {len(line)} columns"
        for path in CUDA
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > COLUMNS
    ]
    assert not found, "\n".join(found)


def test_no_file_is_too_long():
    found = []
    for path in (*PYTHON, *NATIVE):
        lines = path.read_text().splitlines()
        if len(lines) > FILE_LINES and f"{FILE_LINES} lines" not in "\n".join(lines[:20]):
            found.append(f"{path.relative_to(ROOT)}: {len(lines)} lines")
    assert not found, "\n".join(found)


def long_functions(path: Path) -> list[str]:
    """Functions of more than FUNCTION_LINES lines that do not say why, as path:line: name, lines."""
    text = path.read_text()
    lines, found = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        near = "\n".join(lines[max(0, node.lineno - 6) : node.lineno + 20])
        if length > FUNCTION_LINES and f"{FUNCTION_LINES} lines" not in near:
            found.append(f"{path.name}:{node.lineno}: {node.name}, {length} lines")
    return found


def test_no_function_is_too_long():
    found = [entry for path in PYTHON for entry in long_functions(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("why", ["", "    # More than 80 lines: a table.\n"])
def test_a_long_function_is_found(tmp_path, why):
    path = tmp_path / "long.py"
    path.write_text("def long():\n" + why + "    pass\n" * 90)
    assert bool(long_functions(path)) == (not why)
