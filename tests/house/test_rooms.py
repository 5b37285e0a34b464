"""What the architecture promises beside the direction of imports, which import-linter holds: one place per concern."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "tilewise"
# Rooms that speak in other libraries' names have these libraries' options, and no others. bench/variants.py measures
# options by the names that users call them by, beside the same written as a function.
OTHERS_NAMES = ("compat/", "integrations/transformers", "serving/hf.py", "bench/variants.py")


def files_with(pattern: str) -> list[str]:
    """Source files in which the pattern stands, but for comments and docstrings of CUDA and Python alike."""
    found = []
    for path in sorted(p for p in SOURCE.rglob("*") if p.suffix in (".py", ".cu", ".cuh")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(OTHERS_NAMES) and re.search(pattern, path.read_text()):
            found.append(name)
    return found


def test_an_option_of_the_scores_touches_few_files():
    """Where one of them is named is where the next one would have to be: the calls that take it, and six files."""
    named = files_with("(?i)softcap")
    calls = {f"api/{name}.py" for name in ("prefill", "shared_prefix", "tree", "decoding", "step")}
    assert len(set(named) - calls) <= 6, named


def test_one_place_asks_what_a_card_can_do():
    asked = files_with(r"get_device_capability|get_device_properties|multi_processor_count|COMPUTE_CAPABILITY")
    # The compiler asks the driver for the architecture to compile for; doctor shows names and memory.
    assert set(asked) <= {"arch.py", "compiler/launch.py", "doctor.py", "bench/records.py"}


def test_one_place_says_which_keys_a_row_sees():
    """In Python the band, and the oracle's own rule; in CUDA tile/keys.cuh."""
    compared = r"(offset|distance)\s*(<=|>=)\s*(self\.|band\.|left|right|0)"
    assert files_with(compared) == ["plan/tiles.py"]
    assert "tile/keys.cuh" in [name.removeprefix("kernels/") for name in files_with(r"struct Keys\b")]
    assert len(files_with(r"struct (Keys|KeyTiles|Seen)\b.*\{")) <= 2


def test_plans_keep_nothing_of_a_device():
    assert files_with(r"plan\.__dict__") == []


def test_the_product_does_not_know_its_own_teaching():
    for name in files_with(r"tilewise\.learn|from \.+learn"):
        assert name.startswith(("learn/", "bench/", "cli.py", "__init__.py", "doctor.py")), name
