"""Settings and fixtures of the whole suite: the same examples everywhere, no time limit a slow machine trips over."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tilewise", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tilewise")
torch.manual_seed(0)

# Workers share the cores, one each. With more threads they wait for each other, spinning: six times the CPU time.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start

# What tests share stands in modules that are no tests; their assertions tell as much when they fail.
SHARED = (path for path in Path(__file__).parent.rglob("*.py") if not path.name.startswith(("test_", "conftest")))
pytest.register_assert_rewrite(*(path.stem for path in SHARED))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="run the I-th of N parts of the tests, the same ones every time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not in the shard: for a card that is only lent for minutes."""
    if not config.getoption("--shard"):
        return
    part, parts = map(int, config.getoption("--shard").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--shard takes I/N with I from 1 to N, got {part}/{parts}")
    mine = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part - 1]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(mine)])
    items[:] = mine


@pytest.fixture
def own_card() -> Iterator[None]:
    """For tests about the kernels of the device at hand, the emulator's being Hopper: whatever TILEWISE_CARD says."""
    from tilewise import arch

    with arch.as_card(None):
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: on a busy machine two wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fixed_ceiling(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ceiling for benchmarks, made up: the real one takes seconds, and one test measures it."""
    from tilewise.bench import ceilings
    from tilewise.bench.measure import Ceiling

    monkeypatch.setattr(ceilings, "of", lambda device, dtype: Ceiling(flops=1e11, bandwidth=1e10))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run a command line in this process and a folder of its own: (exit code, stdout, stderr)."""
    from tilewise import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TILEWISE_DEBUG", raising=False)

    def run(*words: Any) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run
