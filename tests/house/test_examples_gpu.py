"""Examples on a card, where they do what a CPU cannot show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def test_a_graph_is_replayed():
    """40 steps, three plans: the first step of each runs call by call, the others are replays of its graph."""
    words = [sys.executable, "examples/decode_graph.py", "--sequences", "4"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "There is no GPU" not in done.stdout
    assert "3 plans, 3 captures, 37 replays, 3 steps call by call" in done.stdout
