"""The emulator's Python side: builds a kernel's source with a C++ compiler and runs it on CPU memory.

What it promises and how it works stands in emulator/runtime.h. A kernel is compiled once into the cache folder
that cubins go to as well, keyed by its whole source, the emulator's own and the compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from tilewise.compiler.spec import INCLUDE_ROOTS, PACKAGE, KernelSpec, headers
from tilewise.compiler.tensor_maps import TensorMapSpec

# Cold paths are kept apart, so that a report names the line it happened on and not one that shares its code.
FLAGS = (
    "-O2",
    "-march=native",
    "-fno-crossjumping",
    "-fno-tree-tail-merge",
    "-std=c++20",
    "-fPIC",
    "-g1",
    "-DTILEWISE_EMULATOR=1",
)
RUNTIME = "emulator/runtime.cpp"
REPORT_BYTES = 16384


class EmulatorError(RuntimeError):
    """The kernel did what a card would not forgive: the report says what, which thread, and where in the source."""


@dataclass(frozen=True)
class Counters:
    """What hardware would have paid for, counted over the whole launch; see emulator/runtime.h."""

    global_requests: int
    global_sectors: int
    global_bytes: int
    shared_requests: int
    shared_wavefronts: int
    matrix_requests: int
    matrix_wavefronts: int
    async_bytes: int
    tensor_flops: int
    scalar_flops: int
    exponentials: int
    barriers: int
    mbarrier_waits: int

    @property
    def sectors_per_request(self) -> float:
        """32-byte sectors a warp's global access touches: 4 is best for 4-byte values, 32 is a sector a lane."""
        return self.global_sectors / self.global_requests if self.global_requests else 0.0

    @property
    def bank_conflicts(self) -> int:
        """Extra passes of ordinary shared-memory accesses over the banks."""
        return self.shared_wavefronts - self.shared_requests

    @property
    def matrix_conflicts(self) -> int:
        """Extra passes of ldmatrix and stmatrix over the banks."""
        return self.matrix_wavefronts - self.matrix_requests


class _Counters(ctypes.Structure):
    _fields_ = [(f.name, ctypes.c_uint64) for f in fields(Counters)]


class _Range(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("name", ctypes.c_char_p)]


class _Options(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("late", ctypes.c_uint32),
        ("os_threads", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("num_ranges", ctypes.c_uint32),
        ("ranges", ctypes.POINTER(_Range)),
    ]


def launch(
    spec: KernelSpec,
    grid: Sequence[int],
    args: Sequence[Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    late: bool = True,
    seed: int = 0,
    count: bool = False,
    resident: int = 1,
    os_threads: int | None = None,
) -> Counters | None:
    """Run a kernel over CPU memory. args: its parameters, ctypes objects by value. tensors: what it may touch, by name.

    late: asynchronous work lands as late as the program allows, or at once. seed: of the order threads run in, 0 for
    round robin. resident: blocks in flight together, for kernels whose blocks wait for each other. Raises
    EmulatorError with a report; returns the counters if `count`.
    """
    library = build(spec)
    ranges = (_Range * max(1, len(tensors)))()
    for entry, (name, x) in zip(ranges, tensors.items(), strict=False):
        begin, end = _extent(x)
        entry.begin, entry.end, entry.name = begin, end, name.encode()
    options = _Options(
        (ctypes.c_uint32 * 3)(*grid),
        (ctypes.c_uint32 * 3)(spec.threads, 1, 1),
        spec.shared_bytes,
        late,
        os_threads or os.cpu_count() or 1,
        resident,
        seed,
        count,
        len(tensors),
        ranges,
    )
    pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(a) for a in args))
    report, counters = ctypes.create_string_buffer(REPORT_BYTES), _Counters()
    if library.tilewise_emulate(ctypes.byref(options), pointers, report, REPORT_BYTES, ctypes.byref(counters)):
        raise EmulatorError(f"{spec}: {_with_lines(report.value.decode(errors='replace'), library._name)}")
    return Counters(*(getattr(counters, f.name) for f in fields(Counters))) if count else None


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to past its last, whatever its strides."""
    if not x.numel():
        return x.data_ptr(), x.data_ptr()
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


@functools.cache
def compiler() -> str:
    """A C++ compiler: $CXX, g++, clang++, or the ziglang wheel's."""
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
    command, runtime = _runtime()
    key = hashlib.sha256()
    for part in (*command, runtime.name, unit, *(x for pair in sorted(headers(unit).items()) for x in pair)):
        key.update(part.encode() + b"\0")
    target = _cache() / f"{key.hexdigest()[:32]}.so"
    if not target.exists():
        _compile([*command, "-shared", "-x", "c++", "-", "-x", "none", str(runtime), "-lpthread"], target, unit, name)
    library = ctypes.CDLL(str(target))
    library.tilewise_emulate.argtypes = [
        ctypes.POINTER(_Options),
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.POINTER(_Counters),
    ]
    return library


@functools.cache
def _runtime() -> tuple[tuple[str, ...], Path]:
    """The compile command, and the engine as an object file whose name tells the compiler's version too."""
    base = compiler().split()
    version = subprocess.run([*base, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    command = (*base, *FLAGS, *(f"-I{root}" for root in INCLUDE_ROOTS))
    source = (PACKAGE / RUNTIME).read_text()
    texts = [version, *command, source, *(x for pair in sorted(headers(source).items()) for x in pair)]
    target = _cache() / f"runtime-{hashlib.sha256(chr(0).join(texts).encode()).hexdigest()[:32]}.o"
    if not target.exists():
        _compile([*command, "-c", str(PACKAGE / RUNTIME)], target, "", "the emulator's runtime")
    return command, target


def _cache() -> Path:
    root = os.environ.get("TILEWISE_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tilewise"
    folder = base / "emulator"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _private_folder()


@functools.cache
def _private_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="tilewise-emulator-"))


def _compile(command: Sequence[str], target: Path, unit: str, name: str) -> None:
    """Compile into a temporary file and rename it into place, so that two processes cannot hurt each other."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=target.suffix)
    os.close(handle)
    done = subprocess.run([*command, "-o", temporary], input=unit, capture_output=True, text=True)
    if done.returncode:
        os.unlink(temporary)
        errors = "\n".join(line for line in done.stderr.splitlines() if "error" in line)[:4000]
        raise EmulatorError(f"{name} does not compile:\n{errors or done.stderr[:4000]}")
    os.replace(temporary, target)


def _with_lines(report: str, library: str) -> str:
    """The report with its line of addresses turned into places in the kernels' sources."""
    found = re.search(r"\n  at((?: 0x[0-9a-f]+)+)", report)
    if not found:
        return report
    places = []
    base = _load_address(library)
    offsets = [hex(int(a, 16) - base - 1) for a in found[1].split() if int(a, 16) > base]
    try:
        command = ["addr2line", "-i", "-e", library, *offsets]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        lines = []
    for line in lines:
        path, _, number = line.split(" ")[0].rpartition(":")
        root = next((root for root in INCLUDE_ROOTS if Path(path).is_relative_to(root)), None)
        name = Path(path).name if root is None else str(Path(path).relative_to(root))
        generated = path.startswith("/usr") or "<stdin>" in path or name.startswith(("emulator", "tile/memory"))
        if number.isdigit() and not generated:
            places.append(f"{name}:{number}")
    where = ", called from ".join(dict.fromkeys(places)) or "an unknown line (addr2line from binutils would tell)"
    return report.replace(found[0], f"\n  at {where}")


def _load_address(library: str) -> int:
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith(library):
                return int(line.split("-")[0], 16)
    return 0


class TensorMap(ctypes.Structure):
    """emulator/types.h: the description a card's tensor map would encode."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_uint32) for name in ("element_bytes", "rank", "swizzle", "pad")),
        ("size", ctypes.c_uint64 * 5),
        ("stride", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 5),
        ("pad2", ctypes.c_uint32 * 3),
    ]


def tensor_map(spec: TensorMapSpec, pointer: int) -> TensorMap:
    """The emulator's map of what `spec` describes at `pointer`."""
    if pointer % 16:
        raise ValueError(f"tensor map: the tensor's address must be a multiple of 16 bytes, got {pointer:#x}")
    if spec.oob_nan:
        raise NotImplementedError("the emulator fills what lies outside a tensor with 0 only")
    return TensorMap(
        pointer, spec.item_bytes, spec.rank, spec.swizzle, 0, (*spec.sizes,), (*spec.strides,), (*spec.box,)
    )
