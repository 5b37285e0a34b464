"""Compiling through the disk cache: keys, damaged entries, full disks, processes at once."""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from compiler_cases import AXPY, entries, finish, forget, leftovers, python, spec

from tilewise import compiler
from tilewise.compiler import cache as cache_module
from tilewise.compiler import nvrtc
from tilewise.compiler.spec import KernelSpec, headers


def test_cached_binary_is_the_same(cache: Path) -> None:
    built = compiler.compile(AXPY, "sm_80")
    assert compiler.compile(AXPY, "sm_80") is built
    forget()
    read = compiler.compile(AXPY, "sm_80")
    assert read.from_cache
    assert (read.cubin, read.report, read.spec) == (built.cubin, built.report, built.spec)
    assert len(entries(cache)) == 1
    assert leftovers(cache) == []


def test_key_covers_everything_that_makes_a_cubin(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, header = tmp_path / "k.cu", tmp_path / "h.cuh"
    source.write_text(f'#include "{header}"\nextern "C" __global__ void k(int* y) {{ *y = kAnswer; }}\n')
    header.write_text("constexpr int kAnswer = 1;\n")
    kernel = KernelSpec("k", str(source), "k", (), 32, 0)
    seen = []

    def build(arch: str = "sm_80") -> None:
        forget()
        assert not compiler.compile(kernel, arch).from_cache
        assert len(entries(cache)) == len(seen) + 1
        seen.append(arch)

    build()
    header.write_text("constexpr int kAnswer = 2;\n")
    build()
    source.write_text(source.read_text() + "// more\n")
    build()
    build("sm_86")
    flags = nvrtc._flags
    monkeypatch.setattr(nvrtc, "_flags", lambda arch: (*flags(arch), "-DMORE"))
    build()
    monkeypatch.setattr(nvrtc, "_compiler", lambda: ("nvrtc 99.0", "other headers"))
    build()
    monkeypatch.setattr(nvrtc, "_FORMAT", "another")
    build()
    forget()
    assert compiler.compile(kernel, "sm_80").from_cache


def cut(entry: Path) -> None:
    path = entry / "kernel.cubin"
    path.write_bytes(path.read_bytes()[:100])


def flip(entry: Path) -> None:
    path = entry / "kernel.cubin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lie(entry: Path) -> None:
    path = entry / "report.json"
    record = json.loads(path.read_text())
    record["registers"] += 1
    path.write_text(json.dumps(record))


def not_json(entry: Path) -> None:
    (entry / "report.json").write_bytes(b"\xff{")


def not_a_record(entry: Path) -> None:
    (entry / "report.json").write_text("[1, 2]")


def no_report(entry: Path) -> None:
    (entry / "report.json").unlink()


def empty(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.mkdir()


def unreadable(entry: Path) -> None:
    (entry / "kernel.cubin").unlink()
    (entry / "kernel.cubin").mkdir()  # which not even root can read


def a_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("not ours")


def a_dead_link(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.symlink_to(entry.parent / "nowhere")


def another(entry: Path) -> None:
    """A whole entry, of another kernel."""
    compiler.compile(spec("spin", threads=1), "sm_80")
    (other,) = (path for path in entry.parent.iterdir() if path != entry)
    shutil.rmtree(entry)
    shutil.copytree(other, entry)
    shutil.rmtree(other)


DAMAGES = (cut, flip, lie, not_json, not_a_record, no_report, empty, unreadable, a_file, a_dead_link, another)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_or_foreign_entry_is_rebuilt_and_replaced(cache: Path, damage: Any) -> None:
    built = compiler.compile(AXPY, "sm_80")
    (name,) = entries(cache)
    damage(cache / name)
    forget()
    again = compiler.compile(AXPY, "sm_80")
    assert not again.from_cache
    assert again.cubin == built.cubin
    forget()
    assert compiler.compile(AXPY, "sm_80").from_cache
    assert entries(cache) == [name]
    assert leftovers(cache) == []


def test_folder_that_cannot_be_written_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match=r"kept in memory only.*file/cache.*set TILEWISE_CACHE"):
        first = compiler.compile(AXPY, "sm_80")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.compile(AXPY, "sm_80") is first
        compiler.compile(AXPY, "sm_86")


def test_full_disk_degrades_to_memory(cache: Path) -> None:
    """A limit on file sizes makes real writes fail half way, as a full disk does."""
    out = finish(
        python(
            """
            import resource, warnings
            from compiler_cases import AXPY
            from tilewise import compiler
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                binary = compiler.compile(AXPY, "sm_80")
                assert compiler.compile(AXPY, "sm_80") is binary
                compiler.compile(AXPY, "sm_86")
            print(len(binary.cubin) > 1000, [w.category.__name__ for w in caught])
            """
        )
    )
    assert out.strip() == "True ['RuntimeWarning']"
    assert list(cache.iterdir()) == []


COMPILE = """
    from compiler_cases import AXPY
    from tilewise import compiler
    from tilewise.compiler import nvrtc
    nvrtc._compiler()
    print("ready", flush=True)
    sys.stdin.readline()
    binary = compiler.compile(AXPY, "sm_80")
    print(binary.from_cache, len(binary.cubin))
"""


def test_processes_at_once(cache: Path) -> None:
    workers = [python(COMPILE) for _ in range(2)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:  # all wait at the same line for this
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    sizes = {finish(worker).split()[1] for worker in workers}
    assert sizes == {str(len(compiler.compile(AXPY, "sm_80").cubin))}
    assert compiler.compile(AXPY, "sm_80").from_cache
    assert len(entries(cache)) == 1
    assert leftovers(cache) == []


def test_process_killed_while_writing(cache: Path) -> None:
    worker = python(
        """
        import os, signal
        from compiler_cases import AXPY
        from tilewise import compiler
        os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        compiler.compile(AXPY, "sm_80")
        """
    )
    worker.communicate(timeout=120)
    assert worker.returncode == -9
    assert entries(cache) == []
    (left,) = leftovers(cache)
    assert not compiler.compile(AXPY, "sm_80").from_cache
    forget()
    assert compiler.compile(AXPY, "sm_80").from_cache
    assert left.exists()  # it may still be somebody's
    os.utime(left, (time.time() - 4000,) * 2)
    compiler.compile(AXPY, "sm_86")
    assert leftovers(cache) == []


def test_losing_the_race_keeps_what_is_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.compile(AXPY, "sm_80")
    (name,) = entries(cache)
    stamp = (cache / name).stat().st_ino
    forget()
    early, read = [None], cache_module.read
    monkeypatch.setattr(cache_module, "read", lambda *args: early.pop() if early else read(*args))
    assert not compiler.compile(AXPY, "sm_80").from_cache  # it looked before the other was done
    assert (cache / name).stat().st_ino == stamp
    assert leftovers(cache) == []


def test_memory_knows_the_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another folder does not have what this process compiled into the first, and gets it."""
    first = compiler.compile(AXPY, "sm_80")
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "other"))
    second = compiler.compile(AXPY, "sm_80")
    assert not second.from_cache
    assert second.cubin == first.cubin
    assert entries(tmp_path / "other" / "cubin") == entries(cache)
    monkeypatch.setenv("TILEWISE_CACHE", str(cache.parent))
    assert compiler.compile(AXPY, "sm_80") is first


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "root", lambda: None)
    with pytest.warns(RuntimeWarning, match="kept in memory only.*no home folder"):
        first = compiler.compile(AXPY, "sm_80")
    assert compiler.compile(AXPY, "sm_80") is first


def test_the_emulators_headers_are_in_no_cubins_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC never sees them: a change to the emulator leaves every cubin where it is."""
    unit = AXPY.translation_unit()
    ours, all_of_them = set(headers(unit, emulator=False)), set(headers(unit))
    assert all_of_them - ours == {path for path in all_of_them if path.startswith("emulator/")} != set()
    assert set(headers(unit, emulator=True)) == all_of_them
    compiler.compile(AXPY, "sm_80")
    forget()
    monkeypatch.setattr(Path, "read_text", _changed_emulator(Path.read_text))
    assert headers(unit)["emulator/types.h"].endswith("// changed\n")
    assert compiler.compile(AXPY, "sm_80").from_cache


def _changed_emulator(read_text: Any) -> Any:
    def read(path: Path, *args: Any, **kwargs: Any) -> str:
        return str(read_text(path, *args, **kwargs)) + ("// changed\n" if path.parent.name == "emulator" else "")

    return read
