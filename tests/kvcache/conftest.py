"""Fixtures of the caches' tests."""

from __future__ import annotations

import pytest

from tilewise.kvcache import storage


@pytest.fixture(params=["torch", "kernels"])
def written_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Caches on the CPU write by torch, then as on a card: its layout, its kernels, its copies of where tokens go."""
    if request.param == "kernels":
        monkeypatch.setattr(storage, "uses_kernels", lambda device: True)
    return request.param
