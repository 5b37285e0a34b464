"""Compiling without a GPU: what makes a cubin, where CUDA's headers are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiler_cases import AXPY, spec

from tilewise import compiler
from tilewise.compiler import nvrtc
from tilewise.compiler.spec import KernelSpec


@pytest.mark.parametrize("arch", compiler.ARCHS)
def test_compiles_without_a_gpu(arch: str) -> None:
    binary = compiler.compile(AXPY, arch)
    assert binary.cubin.startswith(b"\x7fELF")
    assert (binary.spec, binary.arch, binary.from_cache) == (AXPY, arch, False)
    assert 4 <= binary.report.registers <= 32
    assert binary.report.compile_seconds > 0
    assert (binary.report.spills, binary.report.warnings, binary.report.stack_bytes) == (False, (), 0)


def test_constants_and_entry_make_the_binary() -> None:
    assert compiler.compile(AXPY, "sm_80").cubin != compiler.compile(spec("axpy", kThreads=256), "sm_80").cubin
    with pytest.raises(compiler.KernelCompileError, match=r'axpy .*no extern "C" __global__ other; it has axpy'):
        compiler.compile(spec("axpy", "other", kThreads=128), "sm_80")
    with pytest.raises(ValueError, match=r"arch must be one of sm_80, .*got 'sm_75'"):
        compiler.compile(AXPY, "sm_75")


def test_two_specs_of_one_source_share_the_work_but_not_the_name() -> None:
    other = KernelSpec("other name", AXPY.source, AXPY.entry, AXPY.constants, 64, 1024)
    assert compiler.compile(AXPY, "sm_80").cubin is compiler.compile(other, "sm_80").cubin
    assert compiler.compile(other, "sm_80").spec == other


def test_wmma_header_is_found(tmp_path: Path) -> None:
    source = tmp_path / "wmma.cu"
    source.write_text(
        "#include <cuda_bf16.h>\n#include <cuda_fp8.h>\n#include <mma.h>\n"
        'extern "C" __global__ void k(float* y, const half* x) {\n  using namespace nvcuda::wmma;\n'
        "  fragment<matrix_a, 16, 16, 16, half, row_major> a;\n  fragment<matrix_b, 16, 16, 16, half, col_major> b;\n"
        "  fragment<accumulator, 16, 16, 16, float> c;\n  fill_fragment(c, 0.0f);\n  load_matrix_sync(a, x, 16);\n"
        "  load_matrix_sync(b, x, 16);\n  mma_sync(c, a, b, c);\n  store_matrix_sync(y, c, 16, mem_row_major);\n}\n"
    )
    assert compiler.compile(KernelSpec("wmma", str(source), "k", (), 32, 0), "sm_80").report.registers > 0


def test_missing_headers_say_where_was_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setattr(nvrtc, "_include_candidates", lambda: iter(folders))
    compiler.include_folders.cache_clear()
    with pytest.raises(RuntimeError, match=r"pip install nvidia-cuda-runtime nvidia-cuda-crt.*Looked in .*a, .*b"):
        compiler.include_folders()
    runtime = ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "vector_types.h")
    for folder, names in zip(folders, (runtime, ("mma.h",)), strict=True):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    assert compiler.include_folders() == tuple(folders)  # in pieces, and without crt/mma.h, which only wmma needs
    compiler.include_folders.cache_clear()
