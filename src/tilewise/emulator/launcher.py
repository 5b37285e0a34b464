"""Runs of kernels in the emulator: a launch and its options, the report of what went wrong, counters, tensor maps."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from tilewise.compiler.spec import INCLUDE_ROOTS, KernelSpec
from tilewise.compiler.tensor_maps import TensorMapSpec
from tilewise.emulator.builder import EmulatorError, build

REPORT_BYTES = 16384


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
        """32-byte sectors a warp's global access touches: 4 is best for 4-byte values, 32 is one per lane."""
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
        ("cluster", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("races", ctypes.c_uint32),
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
    cluster: int = 1,
    os_threads: int | None = None,
    races: bool | None = None,
) -> Counters | None:
    """Run a kernel over CPU memory. args: its parameters, ctypes objects by value. tensors: what it may touch, by name.

    late: asynchronous work lands as late as the program allows, or at once. seed: of the order threads run in, 0 for
    round robin. resident: blocks in flight together, for kernels whose blocks wait for each other. cluster: blocks per
    cluster, which see each other's shared memory. races: look for accesses to shared memory that nothing orders, which
    takes several times as long; None: if within `watching_races()`. Raises EmulatorError with a report; returns the
    counters if `count`.
    """
    if cluster < 1 or grid[0] % cluster:
        raise ValueError(f"cluster must be a size that divides the first of the grid {tuple(grid)}, got {cluster}")
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
        cluster,
        seed,
        count,
        _watching.get() if races is None else races,
        len(tensors),
        ranges,
    )
    pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(a) for a in args))
    report, counters = ctypes.create_string_buffer(REPORT_BYTES), _Counters()
    room = ctypes.c_size_t(REPORT_BYTES)
    if library.tilewise_emulate(ctypes.byref(options), pointers, report, room, ctypes.byref(counters)):
        raise EmulatorError(f"{spec}: {_with_lines(report.value.decode(errors='replace'), library._name)}")
    return Counters(*(getattr(counters, f.name) for f in fields(Counters))) if count else None


_watching: ContextVar[bool] = ContextVar("watching", default=os.environ.get("TILEWISE_RACES") == "1")


@contextmanager
def watching_races() -> Iterator[None]:
    """Within it, every launch looks for races in shared memory."""
    before = _watching.set(True)
    try:
        yield
    finally:
        _watching.reset(before)


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to past its last, whatever its strides."""
    if not x.numel():
        return x.data_ptr(), x.data_ptr()
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _with_lines(report: str, library: str) -> str:
    """The report with its lines of addresses turned into places in the kernels' sources."""
    mapped = _mapped(library)
    return re.sub(r"at((?: 0x[0-9a-f]+)+)", lambda found: f"at {_lines_of(found[1].split(), library, mapped)}", report)


def _lines_of(addresses: Sequence[str], library: str, mapped: tuple[int, int]) -> str:
    """The places in the kernels' sources of return addresses, innermost first."""
    places = []
    begin, end = mapped
    # The kernel's own frames; a return address stands behind its call.
    offsets = [hex(int(a, 16) - begin - 1) for a in addresses if begin < int(a, 16) < end]
    try:
        command = ["addr2line", "-i", "-e", library, *offsets]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines() if offsets else []
    except OSError:
        lines = []
    for line in lines:
        path, _, number = line.split(" ")[0].rpartition(":")
        root = next((root for root in INCLUDE_ROOTS if Path(path).is_relative_to(root)), None)
        name = Path(path).name if root is None else str(Path(path).relative_to(root))
        generated = path.startswith("/usr") or "<stdin>" in path or name.startswith(("emulator", "tile/memory"))
        if number.isdigit() and not generated:
            places.append(f"{name}:{number}")
    return ", called from ".join(dict.fromkeys(places)) or "an unknown line (addr2line from binutils would tell)"


def _mapped(library: str) -> tuple[int, int]:
    """The addresses from which to which a library is mapped into this process."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(library)]
    return (int(ranges[0][0], 16), int(ranges[-1][1], 16)) if ranges else (0, 0)


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
