"""What tests of the command line share: the form of an error, and the rows of a CSV."""

from __future__ import annotations

import csv


def assert_one_line_and_hint(err):
    lines = err.strip().splitlines()
    assert len(lines) == 2, err
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    assert "Traceback" not in err


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
