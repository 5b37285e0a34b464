"""Builds of the emulator: one shared object per kernel, and one with the runtime that all of them call.

Each is an entry of the cache (compiler/cache.py), keyed by its whole source, every header, the flags, the compiler and
the CPU that -march=native means. Where the cache cannot be written, builds live in a temporary folder of this process.

What every kernel includes first is compiled once, into an entry of its own: g++ then saves some 60 ms of
each build. The code is the same, so it is no part of a key, and a build that fails with it is tried without.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tilewise.compiler import cache
from tilewise.compiler.spec import INCLUDE_ROOTS, KernelSpec, headers

FLAGS = (
    "-march=native",
    "-std=c++20",
    "-fPIC",
    "-g1",
    "-DTILEWISE_EMULATOR=1",
    "-ftls-model=initial-exec",  # one variable of one library for all kernels: the thread that runs
)
# Most of a launch goes to the runtime, so kernels are as fast by -Og as by -O1 and built in two thirds of the time. Nor
# does -Og let several lines share their code, so that a report names the line it happened on. The second flag has every
# compiler fuse a product with a sum only where the source says so: the bits do not depend on what it inlines.
KERNEL_FLAGS = ("-Og", "-ffp-contract=off")
RUNTIME_FLAGS = ("-O3",)
FIRST = '#include "tile/types.cuh"\n'  # how every kernel's unit begins: what is precompiled
RUNTIME = ("fibers", "sync", "memory", "counters", "lanes", "async", "wgmma", "races")  # runtime/*.cpp


class EmulatorError(RuntimeError):
    """The kernel did what a card would not forgive: the report says what, which thread, and where in the source."""


@functools.cache
def compiler() -> str:
    """A C++ compiler: $CXX, g++, clang++, or the ziglang wheel's."""
    if sys.platform != "linux":  # libraries that find each other by name, as its linker has them
        raise RuntimeError(f"the emulator runs on Linux, not on {sys.platform}; backend='cpu' serves the same calls")
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    try:
        import ziglang  # type: ignore[import-not-found]
    except ImportError:
        raise RuntimeError(
            "the emulator needs a C++ compiler: install g++ or clang++, or `pip install ziglang`"
        ) from None
    return f"{Path(ziglang.__file__).parent / 'zig'} c++"


def build(spec: KernelSpec) -> ctypes.CDLL:
    """The spec's shared object, from the cache or freshly compiled."""
    unit = f'{spec.translation_unit()}\n#define TILEWISE_ENTRY {spec.entry}\n#include "emulator/entry.h"\n'
    return _load(unit, str(spec))


@functools.lru_cache(maxsize=512)
def _load(unit: str, name: str) -> ctypes.CDLL:
    runtime = Path(_runtime()._name)
    return _shared_object(unit, KERNEL_FLAGS, (str(runtime),), name, runtime.parent.name)


@functools.cache
def _runtime() -> ctypes.CDLL:
    """What kernels call. Kernels ask for it by the name it is given here, under which this process has loaded it."""
    unit = "".join(f'#include "emulator/runtime/{name}.cpp"\n' for name in RUNTIME)
    return _shared_object(unit, RUNTIME_FLAGS, ("-lpthread",), "the emulator's runtime")


def _shared_object(unit: str, flags: Sequence[str], libraries: Sequence[str], name: str, *more: str) -> ctypes.CDLL:
    """The library that a translation unit makes. more: what else its key must hold."""
    command = (*compiler().split(), *FLAGS, *flags, *(f"-I{root}" for root in INCLUDE_ROOTS))
    texts = (part for path_and_text in sorted(headers(unit).items()) for part in path_and_text)
    key = cache.digest(_target(), *command, *more, unit, *texts)
    for _ in range(3):
        entry = cache.find("emulator", key) or _found_here(key) or _compiled(unit, command, libraries, key, name)
        try:
            return ctypes.CDLL(str(entry / f"{key}.so"))
        except OSError as error:  # another process made room in the cache: the entry is built anew
            problem = error
    raise EmulatorError(f"{name} was compiled but cannot be loaded: {problem}")


@functools.cache
def _macros() -> bytes:
    """What the compiler predefines: its name and version, and the CPU that -march=native means to it."""
    command = [*compiler().split(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=True).stdout


def _target() -> str:
    """The compiler's version and the CPU, as a part of keys."""
    return cache.digest(_macros())


def _compiled(unit: str, command: Sequence[str], libraries: Sequence[str], key: str, name: str) -> Path:
    """The folder of a fresh build, <key>.so in it: of the cache, or where that cannot be written a temporary one."""
    with tempfile.TemporaryDirectory(prefix="tilewise-emulator-") as folder:
        target = Path(folder) / f"{key}.so"
        # Its own name is by which kernels find the runtime, wherever the cache's folder lies.
        rest = ["-shared", f"-Wl,-soname,{target.name}", "-x", "c++", "-", "-x", "none", *libraries, "-o", str(target)]
        first = _precompiled(command) if unit.startswith(FIRST) else None
        done = _run([*command, *(("-include", str(first)) if first else ()), *rest], unit)
        if done.returncode and first:  # for its sake, or the unit's: the compiler's messages are those without it
            done = _run([*command, *rest], unit)
            if not done.returncode:
                _unusable.add(first)
        if done.returncode:
            errors = "\n".join(line for line in done.stderr.splitlines() if "error" in line)[:4000]
            raise EmulatorError(f"{name} does not compile:\n{errors or done.stderr[:4000]}")
        files = {target.name: target.read_bytes()}
    return cache.keep("emulator", key, files) or _kept_here(key, files)


def _run(command: Sequence[str], unit: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=unit, capture_output=True, text=True)


_unusable: set[Path] = set()  # with which a build failed in this process, and without which it did not


def _precompiled(command: Sequence[str]) -> Path | None:
    """The header of FIRST with g++'s reading of it beside; None where there is none, which costs nothing but time."""
    if b"__clang__" in _macros():  # which would take it in another way
        return None
    texts = (part for path_and_text in sorted(headers(FIRST).items()) for part in path_and_text)
    key = cache.digest("precompiled", _target(), *command, FIRST, *texts)
    header = _precompiled_as(tuple(command), key)
    if header and not header.is_file():  # another process made room in the cache
        _precompiled_as.cache_clear()
        header = _precompiled_as(tuple(command), key)
    return None if header in _unusable else header


@functools.lru_cache(maxsize=8)  # an entry's checksum takes as long as is won, so it is looked at once in a process
def _precompiled_as(command: tuple[str, ...], key: str) -> Path | None:
    if entry := cache.find("emulator", key) or _found_here(key):
        return entry / "first.h"
    with tempfile.TemporaryDirectory(prefix="tilewise-emulator-") as folder:
        header, made = Path(folder) / "first.h", Path(folder) / "first.h.gch"
        header.write_text(FIRST)
        if _run([*command, "-x", "c++-header", str(header), "-o", str(made)], "").returncode or not made.is_file():
            return None
        files = {path.name: path.read_bytes() for path in (header, made)}
    try:
        entry = cache.put("emulator", key, files)
    except OSError:  # of which the kernel's own build warns
        entry = _kept_here(key, files)
    return entry / header.name


def _kept_here(key: str, files: Mapping[str, bytes]) -> Path:
    """Writes what the cache could not take; its folder, which goes with this process."""
    entry = _private_folder() / key
    aside = Path(tempfile.mkdtemp(dir=entry.parent))
    for name, data in files.items():
        (aside / name).write_bytes(data)
    with contextlib.suppress(OSError):  # another thread was first; a library that is mapped must not be written to
        aside.rename(entry)
    return entry


@functools.cache
def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tilewise-emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _found_here(key: str) -> Path | None:
    """The folder of a build that the cache could not take."""
    if not _private_folder.cache_info().currsize:
        return None
    entry = _private_folder() / key
    return entry if entry.is_dir() else None
