"""The README's examples run as they stand, each alone; and it stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from script_cases import run_script

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)


def run(example: str, folder: Path) -> str:
    done = run_script(example, folder=folder, environment={}, logs=folder, seconds=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_one_screen_and_a_little():
    assert len(README.splitlines()) <= 170


def test_there_are_three():
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run(number, tmp_path):
    example = EXAMPLES[number]
    if "schedule=pattern" in example:
        example += "\nassert (o != 0).any(-1).all(), 'a row without a key'\n"
    run(example, tmp_path)
    if "draw(" in example:
        assert (tmp_path / "plan.png").stat().st_size > 1000
