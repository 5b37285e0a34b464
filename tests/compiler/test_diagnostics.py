"""What ptxas reports of a kernel, and what is said of one that does not compile."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiler_cases import KERNELS, spec

from tilewise import compiler
from tilewise.compiler.spec import KernelSpec


def test_report_shows_spills() -> None:
    report = compiler.compile(spec("spills", threads=1024), "sm_80").report
    assert report.registers == 32
    assert report.spills
    assert report.spill_stores > 0
    assert report.spill_loads > 0
    assert report.stack_bytes > 0
    assert report.barriers == 1
    assert any("spilled" in w for w in report.warnings)


def test_report_shows_serialised_wgmma() -> None:
    report = compiler.compile(spec("serialised"), "sm_90a").report
    assert len(report.serialised) == 1
    assert "(C7511)" in report.serialised[0]
    assert len(report.warnings) > 1  # where ptxas put in waits of its own


def test_report_shows_static_shared_memory_and_source_warnings(tmp_path: Path) -> None:
    source = tmp_path / "static.cu"
    source.write_text(
        'extern "C" __global__ void k(float* y) {\n  int unused;\n  __shared__ float s[100];\n'
        "  s[threadIdx.x] = y[0];\n  __syncthreads();\n  y[1] = s[99 - threadIdx.x];\n}\n"
    )
    report = compiler.compile(KernelSpec("static", str(source), "k", (), 100, 0), "sm_86").report
    assert report.static_shared == 400
    assert [w for w in report.warnings if "static.cu(2): warning" in w and "unused" in w] == list(report.warnings)


def test_compile_error_has_the_lines() -> None:
    with pytest.raises(compiler.KernelCompileError) as caught:
        compiler.compile(spec("broken", kTile=7), "sm_86")
    source = KERNELS / "broken.cu"
    assert str(caught.value).splitlines() == [
        "broken [kTile=7] does not compile for sm_86:",
        f'  {source}:8: identifier "missing_name" is undefined',
        "    y[0] = missing_name;",
        f'  {source}:4: identifier "not_there" is undefined',
        "    return x * N + not_there<N>(x);",
    ]


def test_ptxas_error_has_the_lines() -> None:
    with pytest.raises(compiler.KernelCompileError) as caught:
        compiler.compile(spec("bad_ptx"), "sm_90a")
    source = KERNELS / "bad_ptx.cu"
    assert str(caught.value).splitlines() == [
        "bad_ptx does not compile for sm_90a:",
        f"  {source}:3: Not a name of any known instruction: 'no_such_instruction'",
        '    asm volatile("no_such_instruction.u32 0;");',
        "      PTX: no_such_instruction.u32 0;",
        f"      inlined at {source}:8",
    ]
