"""The table of what kernels cost, architectures and occupancy."""

from __future__ import annotations

import pytest
from compiler_cases import AXPY, spec

from tilewise import compiler


def test_resource_table() -> None:
    shared = spec("dynamic_shared", "reverse", shared=120 << 10, kThreads=128, kSharedBytes=120 << 10)
    rows = compiler.resource_table([AXPY, shared, spec("tma_copy", kBoxBytes=4096)])
    assert [(r.kernel.split()[0], r.arch) for r in rows] == [
        (name, arch) for name in ("axpy", "dynamic_shared", "tma_copy") for arch in compiler.ARCHS
    ]
    assert [r.occupancy for r in rows[:9]] == [1.0] * 9
    small = ["sm_86", "sm_89", "sm_120", "sm_121"]
    assert [r.arch for r in rows[9:18] if r.shared_bytes > r.shared_limit] == small
    assert [r.arch for r in rows[9:18] if r.blocks_per_sm != 1] == small
    old = ["sm_80", "sm_86", "sm_87", "sm_89"]
    assert [r.arch for r in rows[18:] if "requires .target sm_90" in (r.error or "")] == old
    assert [r.arch for r in rows[18:] if r.error] == old


def test_resource_rows_tell_when_each_is_done() -> None:
    done: list[None] = []
    rows = compiler.resource_rows([(AXPY, "sm_80"), (AXPY, "sm_120")], lambda: done.append(None))
    assert [row.arch for row in rows] == ["sm_80", "sm_120"]
    assert len(done) == 2


@pytest.mark.parametrize(
    ("arch", "registers", "threads", "shared", "blocks"),
    [  # 212 480 cases agreed with CUDA's own cuda_occupancy.h when this was written; these are its corners
        ("sm_80", 32, 1024, 0, 2),
        ("sm_80", 33, 1024, 0, 1),  # the 33rd register costs each warp 256
        ("sm_80", 65, 1024, 0, 0),
        ("sm_80", 255, 256, 0, 1),
        ("sm_80", 168, 96, 0, 4),  # 12 warps fit, 3 a block
        ("sm_80", 32, 32, 0, 32),
        ("sm_86", 32, 32, 0, 16),
        ("sm_89", 32, 32, 0, 24),
        ("sm_86", 32, 1024, 0, 1),
        ("sm_80", 32, 128, 81 * 1024, 2),  # 2 × (81 + 1) KB is all there is
        ("sm_80", 32, 128, 81 * 1024 + 1, 1),
        ("sm_86", 32, 128, 99 * 1024, 1),
        ("sm_86", 32, 128, 99 * 1024 + 1, 0),
        ("sm_90a", 168, 384, 227 * 1024, 1),
        ("sm_90a", 168, 384, 113 * 1024, 1),
    ],
)
def test_occupancy(arch: str, registers: int, threads: int, shared: int, blocks: int) -> None:
    assert compiler.occupancy(arch, registers, threads, shared) == blocks
