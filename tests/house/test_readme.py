"""The README's examples run as they stand, each alone, and the tree it shows is the tree they print."""

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


def test_there_are_six():
    assert len(EXAMPLES) == 6


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run(number, tmp_path):
    printed = run(EXAMPLES[number], tmp_path)
    if "draw(" in EXAMPLES[number]:
        assert (tmp_path / "plan.png").stat().st_size > 1000
    if "prefix.show()" in EXAMPLES[number]:
        shown = re.search(r"prints\n\n```\n(.*?)```", README, re.S)
        assert shown is not None
        assert printed.strip() == shown.group(1).strip()


def test_the_map_names_every_room():
    sources = Path(__file__).parents[2] / "src" / "tilewise"
    rooms = {p.name for p in sources.iterdir() if p.suffix == ".py"} | {
        f"{p.name}/" for p in sources.iterdir() if (p / "__init__.py").exists()
    }
    rooms |= {p.name for p in (sources / "kvcache").glob("*.py") if p.name != "__init__.py"}
    assert not [room for room in rooms if room not in README]
