"""An empty cache for every test of the compiler."""

import threading
from pathlib import Path

import pytest

from tilewise.compiler import cache as cache_module
from tilewise.compiler import nvrtc


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cubins in an empty cache, and a process that remembers nothing."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TILEWISE_CACHE_LIMIT", raising=False)
    monkeypatch.setattr(nvrtc, "_memory", {})
    for lock in ("_warned", "_warned_of_limit"):
        monkeypatch.setattr(cache_module, lock, threading.Lock())
    monkeypatch.setattr(cache_module, "_unchecked", None)
    return tmp_path / "cache" / "cubin"
