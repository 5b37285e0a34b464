"""What kernels cost: registers, spills, shared memory and occupancy of every spec on every architecture."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tilewise.arch import ARCHS, limits_of, occupancy
from tilewise.compiler.diagnostics import KernelCompileError
from tilewise.compiler.nvrtc import compile
from tilewise.compiler.spec import KernelSpec


@dataclass(frozen=True)
class ResourceRow:
    """One kernel on one architecture. error: why it does not compile there, and then the figures are zeros."""

    kernel: str
    arch: str
    product: bool
    threads: int
    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    shared_limit: int = 0
    blocks_per_sm: int = 0
    occupancy: float = 0.0
    compile_seconds: float = 0.0
    from_cache: bool = False
    serialised: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    error: str | None = None


def resource_table(specs: Iterable[KernelSpec], archs: Sequence[str] = ARCHS) -> list[ResourceRow]:
    """A row for every spec and architecture. shared_bytes: static and dynamic. occupancy: a share of the SM's warps."""
    return resource_rows([(spec, arch) for spec in specs for arch in archs])


def resource_rows(
    pairs: Iterable[tuple[KernelSpec, str]], done: Callable[[], object] = lambda: None
) -> list[ResourceRow]:
    """A row for each spec and architecture, on all cores; done: called after each."""

    def row(pair: tuple[KernelSpec, str]) -> ResourceRow:
        found = _row(*pair)
        done()
        return found

    pool = ThreadPoolExecutor(os.cpu_count())  # NVRTC compiles outside the GIL
    try:
        return list(pool.map(row, pairs))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C nothing more is begun


def _row(spec: KernelSpec, arch: str) -> ResourceRow:
    limits = limits_of(arch)
    try:
        binary = compile(spec, arch)
    except KernelCompileError as error:
        return ResourceRow(str(spec), arch, spec.product, spec.threads, error=str(error))
    report = binary.report
    shared = spec.shared_bytes + report.static_shared
    blocks = occupancy(arch, report.registers, spec.threads, shared)
    return ResourceRow(
        kernel=str(spec),
        arch=arch,
        product=spec.product,
        threads=spec.threads,
        registers=report.registers,
        spill_stores=report.spill_stores,
        spill_loads=report.spill_loads,
        stack_bytes=report.stack_bytes,
        shared_bytes=shared,
        shared_limit=limits.shared_block,
        blocks_per_sm=blocks,
        occupancy=blocks * -(-spec.threads // 32) / limits.warps,
        compile_seconds=report.compile_seconds,
        from_cache=binary.from_cache,
        serialised=report.serialised,
        warnings=report.warnings,
    )
