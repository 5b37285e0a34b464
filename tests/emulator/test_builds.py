"""Builds of the emulator: in the cache, keyed by all that makes them, or in a temporary folder."""

from __future__ import annotations

import ctypes
import multiprocessing
import subprocess
import sys
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
CLANG = b"__clang__" in builder._macros()


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A cache of its own, empty but for the runtime that this process already has; what is built is forgotten after."""
    builder._runtime()
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builder, "_unusable", set())
    builder._private_folder.cache_clear()  # another is made when it is asked for
    forget()
    yield tmp_path / "cache" / "emulator"
    forget()


def forget() -> None:
    """What a process remembers of kernels: the next build looks into the cache."""
    builder._load.cache_clear()
    builder._precompiled_as.cache_clear()


def builds(folder: Path) -> list[Path]:
    """The entries with a kernel's library."""
    return [library.parent for library in folder.glob("*/*.so")]


def precompiled(folder: Path) -> list[Path]:
    """What was precompiled, of the entries that have it."""
    return list(folder.glob("*/first.h.gch"))


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
    (entry,) = builds(fresh)
    builder._load.cache_clear()
    monkeypatch.setattr(builder, "_compiled", lambda *_: pytest.fail("compiled again"))
    assert value_of(tmp_path, 1.5) == 1.5
    assert [entry] == builds(fresh)


def test_a_build_for_another_cpu_or_flags_is_another(fresh, tmp_path, monkeypatch):
    value_of(tmp_path, 1.5)
    for number, (name, change) in enumerate((("_target", lambda: "another CPU"), ("KERNEL_FLAGS", ("-O0",))), 2):
        monkeypatch.setattr(builder, name, change)
        builder._load.cache_clear()
        assert value_of(tmp_path, 1.5) == 1.5
        assert len(builds(fresh)) == number


def test_the_target_names_the_compiler_and_the_cpu():
    assert builder._target() == builder._target()
    assert len(builder._target()) == 64


def test_a_damaged_build_is_made_anew(fresh, tmp_path):
    value_of(tmp_path, 2.5)
    (entry,) = builds(fresh)
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
        forget()
        assert value_of(tmp_path, 3.5) == 3.5
    assert builds(builder._private_folder())
    assert len(precompiled(builder._private_folder())) == (0 if CLANG else 1)


gcc_alone = pytest.mark.skipif(CLANG, reason="g++ alone precompiles")


@pytest.fixture
def commands(monkeypatch):
    """The compiler's command lines, as they are run."""
    seen, run = [], builder._run
    monkeypatch.setattr(builder, "_run", lambda command, unit: seen.append(command) or run(command, unit))
    return seen


def listed(command) -> str:
    """The files that a build of no more than FIRST reads, after a "!" those that were precompiled."""
    whole = [*command, "-fsyntax-only", "-H", "-Winvalid-pch"]
    return subprocess.run(whole, input=builder.FIRST, capture_output=True, text=True, check=True).stderr


@gcc_alone
def test_what_all_kernels_include_is_compiled_once(fresh, tmp_path, commands):
    assert [value_of(tmp_path, value) for value in (1.5, 2.5)] == [1.5, 2.5]
    (made,) = precompiled(fresh)
    header = str(made.with_suffix(""))
    assert ["c++-header" in command for command in commands] == [True, False, False]
    assert all(header in command for command in commands[1:])
    told = listed(commands[1])
    assert f"! {made}" in told
    assert "runtime.h" not in told
    forget()  # as a process that comes later
    assert value_of(tmp_path, 3.5) == 3.5
    assert len(commands) == 4
    assert precompiled(fresh) == [made]


@gcc_alone
def test_what_is_precompiled_is_in_no_key(fresh, tmp_path, monkeypatch):
    value_of(tmp_path, 1.5)
    (entry,) = builds(fresh)
    monkeypatch.setattr(builder, "_precompiled", lambda command: None)
    entry.rename(tmp_path / "aside")
    builder._load.cache_clear()
    assert value_of(tmp_path, 1.5) == 1.5
    assert builds(fresh) == [entry]


@gcc_alone
def test_flags_and_headers_make_another_precompiled(fresh, tmp_path, monkeypatch):
    value_of(tmp_path, 1.5)
    monkeypatch.setattr(builder, "KERNEL_FLAGS", ("-O0",))
    assert value_of(tmp_path, 2.5) == 2.5
    assert len(precompiled(fresh)) == 2
    edited = {**builder.headers(builder.FIRST), "emulator/types.h": "// edited"}
    headers = builder.headers
    monkeypatch.setattr(builder, "headers", lambda unit: edited if unit == builder.FIRST else headers(unit))
    assert value_of(tmp_path, 3.5) == 3.5
    assert len(precompiled(fresh)) == 3


@gcc_alone
@pytest.mark.parametrize("damage", ["rubbish", "half", "gone", "all gone"])
def test_a_damaged_precompiled_breaks_no_build(fresh, tmp_path, commands, damage):
    value_of(tmp_path, 1.5)
    (made,) = precompiled(fresh)
    data = made.read_bytes()
    damaged = {"rubbish": b"gpch" + b"no header" * 999, "half": data[: len(data) // 2]}
    if damage in damaged:
        made.write_bytes(damaged[damage])
    for path in {"gone": [made], "all gone": list(made.parent.iterdir())}.get(damage, []):
        path.unlink()
    assert [value_of(tmp_path, value) for value in (2.5, 3.5)] == [2.5, 3.5]  # this process believes it whole
    assert len(commands) < 7  # one build was tried twice, not the other
    forget()
    assert value_of(tmp_path, 4.5) == 4.5
    assert precompiled(fresh) == [made]
    assert made.stat().st_size == pytest.approx(len(data), rel=0.1)


@gcc_alone
def test_a_compiler_that_cannot_precompile_builds_all_the_same(fresh, tmp_path, monkeypatch):
    run = builder._run
    fails = subprocess.CompletedProcess([], 1, "", "cannot")
    monkeypatch.setattr(builder, "_run", lambda command, unit: fails if "c++-header" in command else run(command, unit))
    assert value_of(tmp_path, 1.5) == 1.5
    assert not precompiled(fresh)


def test_messages_are_the_compilers_own(fresh, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", SOURCE.replace("kValue", "kNothing"))
    for _ in range(2):
        with pytest.raises(builder.EmulatorError, match="does not compile") as caught:
            value_of(tmp_path, 1.5)
        told.append(str(caught.value))
        monkeypatch.setattr(builder, "_precompiled", lambda command: None)
    assert told[0] == told[1]
    assert "fill.cu:2" in told[0]
    assert not builder._unusable


def at_once(barrier, command, results) -> None:
    barrier.wait()
    header = builder._precompiled(command)
    barrier.wait()  # both have written, or found what the other wrote
    results.put((str(header), listed([*command, "-include", str(header), "-x", "c++", "-"])))


@gcc_alone
def test_two_processes_precompile_at_once(fresh):
    command = (*builder.compiler().split(), *builder.FLAGS, *(f"-I{root}" for root in builder.INCLUDE_ROOTS))
    context = multiprocessing.get_context("fork")  # they inherit what is imported, which takes seconds
    barrier, results = context.Barrier(2), context.Queue()
    both = [context.Process(target=at_once, args=(barrier, command, results)) for _ in range(2)]
    for process in both:
        process.start()
    told = [results.get(timeout=120) for _ in both]
    for process in both:
        process.join()
    (made,) = precompiled(fresh)
    assert [header for header, _ in told] == [str(made.with_suffix(""))] * 2
    assert all(f"! {made}" in files for _, files in told)
    assert list(fresh.iterdir()) == [made.parent]
