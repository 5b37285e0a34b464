"""Fixtures of the tests of the command line."""

from __future__ import annotations

import pytest


@pytest.fixture
def quick(fixed_ceiling, monkeypatch, tmp_path):
    """In a folder of its own, on one thread, with a ceiling ready."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TILEWISE_DEBUG", raising=False)
