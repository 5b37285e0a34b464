"""Builds of the emulator: in the cache, keyed by all that makes them, or in a temporary folder."""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path

import pytest
import torch

from tilewise import emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.emulator import builder

SOURCE = """#include "tile/memory.cuh"
extern "C" __global__ void fill(float* out) { Global<float>{out}[threadIdx.x] = kValue; }
"""


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A cache of its own, empty but for the runtime that this process already has; what is built is forgotten after."""
    builder._runtime()
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    builder._load.cache_clear()
    yield tmp_path / "cache" / "emulator"
    builder._load.cache_clear()


def value_of(tmp_path: Path, value: float) -> float:
    """What the kernel with this constant, built or found, writes."""
    source = tmp_path / "fill.cu"
    source.write_text(SOURCE)
    out = torch.zeros(32)
    spec = KernelSpec("fill", str(source), "fill", (("kValue", value),), 32, 0)
    emulator.launch(spec, (1, 1, 1), [ctypes.c_void_p(out.data_ptr())], {"out": out})
    assert (out == out[0]).all()
    return out[0].item()


def test_a_build_is_found_again(fresh, tmp_path, monkeypatch):
    assert value_of(tmp_path, 1.5) == 1.5
    (entry,) = fresh.iterdir()
    builder._load.cache_clear()
    monkeypatch.setattr(builder, "_compiled", lambda *_: pytest.fail("compiled again"))
    assert value_of(tmp_path, 1.5) == 1.5
    assert [entry] == list(fresh.iterdir())


def test_a_build_for_another_cpu_or_flags_is_another(fresh, tmp_path, monkeypatch):
    value_of(tmp_path, 1.5)
    for number, (name, change) in enumerate((("_target", lambda: "another CPU"), ("KERNEL_FLAGS", ("-O0",))), 2):
        monkeypatch.setattr(builder, name, change)
        builder._load.cache_clear()
        assert value_of(tmp_path, 1.5) == 1.5
        assert len(list(fresh.iterdir())) == number


def test_the_target_names_the_compiler_and_the_cpu():
    assert builder._target() == builder._target()
    assert len(builder._target()) == 64


def test_a_damaged_build_is_made_anew(fresh, tmp_path):
    value_of(tmp_path, 2.5)
    (entry,) = fresh.iterdir()
    (library,) = entry.glob("*.so")
    library.unlink()  # and not written over: this process has it mapped
    library.write_bytes(b"no library")
    builder._load.cache_clear()
    assert value_of(tmp_path, 2.5) == 2.5
    assert library.stat().st_size > 1000


def test_without_a_cache_builds_live_in_a_temporary_folder(fresh, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "file" / "beneath"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # once in a process, so perhaps not here
        assert value_of(tmp_path, 3.5) == 3.5
        builder._load.cache_clear()
        assert value_of(tmp_path, 3.5) == 3.5
    assert any(builder._private_folder().iterdir())
