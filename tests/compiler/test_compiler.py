"""Compiling, the disk cache, launching, tensor maps: what needs no GPU first, then what does."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise import compiler
from tilewise.compiler.spec import PACKAGE, Constant, KernelSpec

KERNELS = Path(__file__).parents[1] / "kernels"
REPOSITORY = Path(__file__).parents[2]


def spec(file: str, entry: str | None = None, threads: int = 128, shared: int = 0, **constants: Constant) -> KernelSpec:
    return KernelSpec(file, str(KERNELS / f"{file}.cu"), entry or file, tuple(constants.items()), threads, shared)


AXPY = spec("axpy", kThreads=128)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a process that remembers nothing."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_memory", {})
    monkeypatch.setattr(compiler.cache, "_warned", threading.Lock())
    monkeypatch.setattr(compiler.cache, "_unchecked", None)
    return tmp_path / "cache" / "cubin"


def forget() -> None:
    """As a new process would find it: only the disk remembers."""
    compiler._memory.clear()


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    lines = ["import sys", f"sys.path[:0] = [{str(Path(__file__).parent)!r}]", textwrap.dedent(code)]
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], go: str = "") -> str:
    out, err = process.communicate(go, timeout=120)
    assert process.returncode == 0, err
    return out


# Compiling


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
    monkeypatch.setattr(compiler, "_include_candidates", lambda: iter(folders))
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


def test_resource_table() -> None:
    shared = spec("dynamic_shared", "reverse", shared=120 << 10, kThreads=128, kSharedBytes=120 << 10)
    rows = compiler.resource_table([AXPY, shared, spec("tma_copy", kBoxBytes=4096)])
    assert [(r.kernel.split()[0], r.arch) for r in rows] == [
        (name, arch) for name in ("axpy", "dynamic_shared", "tma_copy") for arch in compiler.ARCHS
    ]
    assert [r.occupancy for r in rows[:4]] == [1.0, 1.0, 1.0, 1.0]
    assert [r.shared_bytes > r.shared_limit for r in rows[4:8]] == [False, True, True, False]
    assert [r.blocks_per_sm for r in rows[4:8]] == [1, 0, 0, 1]
    assert ["requires .target sm_90" in (r.error or "") for r in rows[8:]] == [True, True, True, False]


def test_architecture_of_a_device() -> None:
    expected = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a"}
    assert {capability: compiler.arch_of(*capability) for capability in expected} == expected
    for capability in ((7, 5), (9, 1), (10, 0), (12, 0)):
        with pytest.raises(NotImplementedError, match=f"compute capability {capability[0]}.{capability[1]}.*emulator"):
            compiler.arch_of(*capability)


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


# The disk cache


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.startswith("."))


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.name.startswith(".")]


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
    flags = compiler._flags
    monkeypatch.setattr(compiler, "_flags", lambda arch: (*flags(arch), "-DMORE"))
    build()
    monkeypatch.setattr(compiler, "_compiler", lambda: ("nvrtc 99.0", "other headers"))
    build()
    monkeypatch.setattr(compiler, "_FORMAT", "another")
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
            from test_compiler import AXPY, compiler, spec
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
    from test_compiler import AXPY, compiler
    compiler._compiler()
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
        from test_compiler import AXPY, compiler
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
    early, read = [None], compiler.cache.read
    monkeypatch.setattr(compiler.cache, "read", lambda *args: early.pop() if early else read(*args))
    assert not compiler.compile(AXPY, "sm_80").from_cache  # it looked before the other was done
    assert (cache / name).stat().st_ino == stamp
    assert leftovers(cache) == []


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", "~/kernels")
    assert compiler.cache.root() == Path.home() / "kernels"
    monkeypatch.delenv("TILEWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert compiler.cache.root() == Path("/var/cache/me/tilewise")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard says to ignore
    assert compiler.cache.root() == Path.home() / ".cache" / "tilewise"
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert compiler.cache.root() is None
    with pytest.warns(RuntimeWarning, match="no home folder"):
        compiler.compile(AXPY, "sm_80")


def test_wheel_carries_the_kernels(tmp_path: Path) -> None:
    """Built from a copy of the sources, installed alone into a folder: what is carried compiles there."""
    tree, wheels, installed = tmp_path / "tree", tmp_path / "wheels", tmp_path / "installed"
    shutil.copytree(REPOSITORY / "src", tree / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, tree)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(wheels), str(tree)], check=True
    )
    (wheel,) = wheels.iterdir()
    carried = set(zipfile.ZipFile(wheel).namelist())
    ours = {
        f"tilewise/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert ours - carried == set()
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(installed), str(wheel)], check=True)
    code = """
    import tilewise
    from tilewise import compiler
    from tilewise.compiler import spec
    constants = (("Element", "bf16"), ("kHeadDim", 64), ("kTile", 64))
    unit = spec.KernelSpec("rung", "learn/kernels/04_flash_naive.cu", "flash_naive", constants, 64, 0)
    print(tilewise.__file__, spec.KERNELS_ROOT, len(compiler.compile(unit, "sm_90a").cubin), sep="\\n")
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(installed)},  # ahead of the repository's editable install
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    module, root, size = process.stdout.split()
    assert Path(module).is_relative_to(installed)
    assert Path(root).is_relative_to(installed)
    assert int(size) > 1000


# Arguments and tensor maps


class AxpyArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("bias", ctypes.c_float),
    )


def pointed(args: compiler.Args, index: int, kind: Any) -> Any:
    """What the driver would read as argument `index`."""
    address = (ctypes.c_void_p * (index + 1)).from_address(args.address)[index]
    return kind.from_address(address)


def test_args_are_packed_in_place() -> None:
    tensor = torch.arange(4.0)
    structure = AxpyArgs(1, 2, 3, 4, 5.0)
    args = compiler.Args(structure, -7, 0.5, tensor, None, ctypes.c_int64(1 << 40))
    assert args.sizes == (32, 4, 4, 8, 8, 8)
    assert pointed(args, 0, AxpyArgs).count == 4
    assert pointed(args, 1, ctypes.c_int32).value == -7
    assert pointed(args, 2, ctypes.c_float).value == 0.5
    assert pointed(args, 3, ctypes.c_void_p).value == tensor.data_ptr()
    assert pointed(args, 4, ctypes.c_void_p).value is None
    assert pointed(args, 5, ctypes.c_int64).value == 1 << 40
    structure.count = 9
    args.values[1].value = 8
    assert (pointed(args, 0, AxpyArgs).count, pointed(args, 1, ctypes.c_int32).value) == (9, 8)
    assert compiler.Args().sizes == ()


def test_args_keep_what_they_point_at() -> None:
    first, second = torch.zeros(4), torch.zeros(4)
    alive = [weakref.ref(first), weakref.ref(second)]
    args = compiler.Args(first, AxpyArgs(x=second.data_ptr()), keep=[second])
    del first, second
    gc.collect()
    assert all(r() is not None for r in alive)
    del args
    gc.collect()
    assert all(r() is None for r in alive)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (1 << 31, ValueError, "argument 1 must fit int32, got 2147483648; ctypes.c_int64 or ctypes.c_void_p"),
        (True, TypeError, "argument 1 must be .*, got bool"),
        ("x", TypeError, "got str"),
        ([1], TypeError, "got list"),
    ],
)
def test_args_refuse(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        compiler.Args(0, value)


MAP: dict[str, Any] = {"dtype": "bf16", "sizes": (96, 20), "strides": (192,), "box": (64, 8), "swizzle": 128}


def test_tensor_map_spec() -> None:
    made = compiler.TensorMapSpec(**MAP)
    assert (made.rank, made.item_bytes, made.box_bytes) == (2, 2, 1024)
    assert made == compiler.TensorMapSpec(**MAP)
    assert len({made, compiler.TensorMapSpec(**{**MAP, "swizzle": 0}), compiler.TensorMapSpec(**MAP)}) == 2


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"dtype": "fp4"}, "dtype must be one of uint8, .*got 'fp4'"),
        ({"sizes": (), "strides": (), "box": ()}, "rank must be 1 to 5"),
        ({"sizes": (8,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, "rank must be 1 to 5"),
        ({"strides": (192, 192)}, "strides must be those of dimensions 1 to 1, in bytes"),
        ({"box": (64,)}, "box must have 2 sizes"),
        ({"sizes": (96, 0)}, "sizes must be 1 to 2\\^32, got 0 in dimension 1"),
        ({"sizes": (2**32 + 1, 2)}, "sizes must be 1 to 2\\^32, got 4294967297 in dimension 0"),
        ({"strides": (200,)}, "strides must be multiples of 16 bytes, got 200 in dimension 1"),
        ({"strides": (-192,)}, "strides must be at least 0 and less than 2\\^40 bytes, got -192"),
        ({"strides": (2**40,)}, "strides must be at least 0 and less than 2\\^40"),
        ({"box": (64, 257)}, "box sizes must be 1 to 256, got 257 in dimension 1"),
        ({"box": (0, 8)}, "box sizes must be 1 to 256, got 0 in dimension 0"),
        ({"box": (60, 8)}, "inner row must be a multiple of 16 bytes, got 120"),
        ({"box": (72, 8)}, "inner row must be at most the swizzle's 128 bytes, got 144"),
        ({"swizzle": 64}, "inner row must be at most the swizzle's 64 bytes, got 128"),
        ({"swizzle": 16}, "swizzle must be 0, 32, 64 or 128 bytes, got 16"),
        ({"l2_promotion": 32}, "l2_promotion must be"),
        ({"dtype": "int8", "oob_nan": True}, "oob_nan needs a float dtype"),
    ],
)
def test_tensor_map_rules(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"tensor map: .*{rule}"):
        compiler.TensorMapSpec(**{**MAP, **change})


def test_tensor_map_address_is_checked_first() -> None:
    with pytest.raises(ValueError, match="address must be a multiple of 16 bytes, got 0x1008"):
        compiler.encode(compiler.TensorMapSpec(**MAP), 0x1008)


# No driver, and a driver that is none


def test_no_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_driver_missing", lambda: "the NVIDIA driver is not installed")
    assert not compiler.driver_available()
    for call in (lambda: compiler.load(AXPY), lambda: compiler.tensor_map(0x1000, **MAP)):
        with pytest.raises(RuntimeError, match=r"^no GPU: the NVIDIA driver is not installed; .*emulator"):
            call()
    assert compiler.compile(AXPY, "sm_80").cubin


STUBBED = """
    import ctypes, torch
    from test_compiler import AXPY, MAP, AxpyArgs, compiler
    from tilewise.compiler.spec import KernelSpec
    torch.cuda.is_available, torch.cuda.init, torch.cuda.current_device = lambda: True, lambda: None, lambda: 0
    compiler.raw_stream = lambda ordinal: 77
    kernel = compiler.load(AXPY)
    assert compiler.load(AXPY, "cuda:0") is kernel is compiler.load(AXPY, 0) is not compiler.load(AXPY, 1)
    assert kernel.arg_sizes == (32, 4, 4, 8) and kernel.occupancy() == 3
    structure = AxpyArgs(0x10, 0x20, 3, 4, 5.0)
    args = compiler.Args(structure, 0.5, -7, ctypes.c_void_p(0x30))
    kernel.launch((6, 2, 1), args)
    structure.count = 99
    kernel.launch((6, 2, 1), args, stream=3, cluster=(2, 1, 1), pdl=True)
    compiler.load(AXPY, 1).launch((1, 1, 1), args)

    def refused(kind, call):
        try:
            call()
        except kind as error:
            print("refused", error)

    refused(RuntimeError, lambda: kernel.launch((1, 1, 13), args))
    refused(ValueError, lambda: kernel.launch((0, 1, 1), args))
    refused(ValueError, lambda: kernel.launch((3, 1, 1), args, cluster=(2, 1, 1)))
    refused(TypeError, lambda: kernel.launch((1, 1, 1), compiler.Args(1, 2)))
    refused(RuntimeError, lambda: compiler.load(AXPY, 2))
    refused(ValueError, lambda: compiler.load(AXPY, "cpu"))
    refused(ValueError, lambda: compiler.load(KernelSpec("axpy", AXPY.source, "axpy", AXPY.constants, 128, 232449)))
    made = compiler.tensor_map(0x1000, **MAP)
    assert made is compiler.tensor_map(0x1000, **MAP) is not compiler.tensor_map(0x2000, **MAP, oob_nan=True)
    assert bytes(made) == bytes([7] * 128) and made.address % 64 == 0
    args = compiler.Args(made)
    assert args.sizes == (128,) and ctypes.c_void_p.from_address(args.address).value == made.address
"""


def test_launch_as_the_driver_sees_it(tmp_path: Path) -> None:
    """Against a libcuda that only writes down what it is asked: packing, attributes, contexts, refusals."""
    cc = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if cc is None or torch.version.cuda is not None:
        pytest.skip("needs a C compiler, and a torch that does not look for libcuda itself")
    library = str(tmp_path / "libcuda.so.1")
    subprocess.run([cc, "-shared", "-fPIC", "-o", library, str(KERNELS / "stub_driver.c"), "-ldl"], check=True)
    compiler.compile(
        AXPY, "sm_90a"
    )  # to be read from the cache there: NVRTC asks the driver what the stub does not know
    out = finish(python(STUBBED, LD_LIBRARY_PATH=str(tmp_path), PYTHONUNBUFFERED="1")).splitlines()
    said = {kind: [line for line in out if line.startswith(kind)] for kind in ("launch", "refused", "map")}
    first = "launch grid 6 2 1 block 128 shared 0 stream 77 context 1000 args 10 20 3 4 5 | 0.5 -7 30"
    second = "launch grid 6 2 1 block 128 shared 0 stream 3 context 1000 attribute 4=2 attribute 6=1"
    second += " args 10 20 3 99 5 | 0.5 -7 30"
    third = "launch grid 1 1 1 block 128 shared 0 stream 77 context 1001 args 10 20 3 99 5 | 0.5 -7 30"
    assert said["launch"][:3] == [first, second, third]
    assert len(said["launch"]) == 4  # the fourth is the one that the driver refused; the others never came to it
    assert [line.split(" ", 1)[1] for line in said["refused"]] == [
        "axpy [kThreads=128]: launch of grid (1, 1, 13), 128 threads, 0 bytes of shared memory on cuda:0: "
        "CUDA_ERROR_INVALID_VALUE (as the stub was told)",
        "grid must be three sizes from 1 to (2^31 − 1, 65535, 65535), got (0, 1, 1)",
        "cluster must be three sizes that divide the grid (3, 1, 1), got (2, 1, 1)",
        "axpy [kThreads=128] takes arguments of (32, 4, 4, 8) bytes, got (4, 4)",
        "cuda:2: CUDA_ERROR_INVALID_DEVICE (as the stub was told)",
        "device must be a CUDA device, got cpu",
        "axpy [kThreads=128] on cuda:0 needs 232449 bytes of shared memory per block, the device has 232448",
    ]
    assert said["map"] == [
        "map type 9 rank 2 at 1000 sizes 96 20 stride 192 box 64 8 steps 1 1 swizzle 3 l2 2 fill 0 off 0",
        "map type 9 rank 2 at 2000 sizes 96 20 stride 192 box 64 8 steps 1 1 swizzle 3 l2 2 fill 1 off 0",
    ]


# On a card


def axpy_args(count: int, x: torch.Tensor, bias: float = 1.0) -> tuple[compiler.Args, torch.Tensor, torch.Tensor]:
    y, shadow = torch.full((count + 2,), float("nan"), device="cuda"), torch.full((count,), float("nan"), device="cuda")
    structure = AxpyArgs(x.data_ptr(), y.data_ptr(), 1, count, bias)
    return compiler.Args(structure, 3.0, 2, shadow, keep=[x, y]), y, shadow


@pytest.mark.gpu
def test_gpu_launch() -> None:
    kernel = compiler.load(AXPY)
    assert kernel.arg_sizes == (32, 4, 4, 8)
    x = torch.randn(1000, device="cuda")
    args, y, shadow = axpy_args(1000, x)
    kernel.launch((8, 1, 1), args)
    expected = torch.addcmul(torch.ones_like(x), x, torch.full_like(x, 3.0))
    torch.testing.assert_close(y[2:], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shadow, y[2:], rtol=0, atol=0)
    assert y[:2].isnan().all()
    with pytest.raises(TypeError, match="takes arguments of"):
        kernel.launch((1, 1, 1), compiler.Args(1))
    with pytest.raises(ValueError, match="grid must be"):
        kernel.launch((0, 1, 1), args)


@pytest.mark.gpu
def test_gpu_launch_goes_on_the_current_stream_and_never_waits() -> None:
    spin, kernel = compiler.load(spec("spin", threads=1)), compiler.load(AXPY)
    done = torch.zeros(1, dtype=torch.int32, device="cuda")
    x = torch.randn(1000, device="cuda")
    args, y, _ = axpy_args(1000, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.cuda.stream(stream):
        spin.launch((1, 1, 1), compiler.Args(done, 400_000_000))  # 0.2 s and more
        kernel.launch((8, 1, 1), args)
    kernel.launch((8, 1, 1), args, stream=stream)
    issued = time.perf_counter() - start
    assert not stream.query()
    assert torch.cuda.current_stream().query()
    stream.synchronize()
    assert time.perf_counter() - start > issued + 0.05
    assert done.item() == 1
    assert y[2:].isfinite().all()


@pytest.mark.gpu
def test_gpu_graph_capture() -> None:
    x = torch.randn(1000, device="cuda")
    args, y, _ = axpy_args(1000, x)
    graph = torch.cuda.CUDAGraph()
    kernel = compiler.load(AXPY)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kernel.launch((8, 1, 1), args)
    assert y.isnan().all()
    for _ in range(2):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y[2:], 3 * x + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_gpu_launch_from_a_fresh_thread() -> None:
    kernel = compiler.load(AXPY)
    x = torch.randn(1000, device="cuda")
    args, y, _ = axpy_args(1000, x)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            kernel.launch((8, 1, 1), args)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert failures == []
    torch.testing.assert_close(y[2:], 3 * x + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_gpu_shared_memory_past_48_kb_and_past_the_limit() -> None:
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    kernel = compiler.load(spec("dynamic_shared", "reverse", shared=limit, kThreads=128, kSharedBytes=limit))
    x, y = torch.randn(128, device="cuda"), torch.empty(128, device="cuda")
    kernel.launch((1, 1, 1), compiler.Args(y, x))
    assert torch.equal(y, x.flip(0))
    more = limit + 128
    with pytest.raises(ValueError, match=f"needs {more} bytes of shared memory per block, the device has {limit}"):
        compiler.load(spec("dynamic_shared", "reverse", shared=more, kThreads=128, kSharedBytes=more))


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [0, 5000, 40_000, 99_000])
def test_gpu_occupancy_is_the_drivers(shared: int) -> None:
    for threads in (64, 128, 1024):
        kernel = compiler.load(
            spec("dynamic_shared", "reverse", threads, shared, kThreads=threads, kSharedBytes=shared)
        )
        registers = kernel.binary.report.registers
        assert kernel.occupancy() == compiler.occupancy(kernel.binary.arch, registers, threads, shared)


@pytest.mark.gpu
def test_gpu_host_cost_of_a_planned_launch(capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own: once one has captured a graph, every launch in it costs some 2 µs more."""
    code = "import torch; from tilewise.bench.rungs import launch_cost; print(launch_cost(torch.device('cuda', 0)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with capsys.disabled():
        print(f"\nhost cost of a planned launch: {float(done.stdout):.2f} µs")
    assert float(done.stdout) <= 6


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
def test_gpu_cluster_and_dependent_launch() -> None:
    if not hopper():
        pytest.skip("needs compute capability 9.0")
    kernel = compiler.load(AXPY)
    x = torch.randn(1024, device="cuda")
    for options in ({"cluster": (2, 1, 1)}, {"pdl": True}, {"cluster": (4, 1, 1), "pdl": True}):
        args, y, _ = axpy_args(1024, x)
        torch.cuda.synchronize()  # a dependent launch may run ahead of what fills y
        kernel.launch((8, 1, 1), args, **options)
        torch.testing.assert_close(y[2:], 3 * x + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("corner", [(0, 0), (8, 5), (64, 16), (-8, -3), (200, 0)])
@pytest.mark.parametrize("oob_nan", [False, True])
def test_gpu_tensor_map(swizzle: int, corner: tuple[int, int], oob_nan: bool) -> None:
    """A box by TMA, against the same box cut out, filled and swizzled here."""
    if not hopper():
        pytest.skip("needs compute capability 9.0")
    width, height, rows = 96, 20, 16
    inner = (swizzle or 128) // 2
    x = torch.randn(height, 104, device="cuda").to(torch.bfloat16)[:, :width]  # rows of 208 bytes
    made = compiler.tensor_map(x.data_ptr(), "bf16", (width, height), (208,), (inner, rows), swizzle, oob_nan=oob_nan)
    size = made.spec.box_bytes
    kernel = compiler.load(spec("tma_copy", shared=size + 8, kBoxBytes=size))
    out = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda")
    kernel.launch((1, 1, 1), compiler.Args(made, out, *corner, keep=[x]))
    host = x.cpu()
    expected = torch.full((rows, inner), float("nan") if oob_nan else 0.0, dtype=torch.bfloat16)
    for r in range(rows):
        for c in range(inner):
            across, down = corner[0] + c, corner[1] + r
            if 0 <= across < width and 0 <= down < height:
                expected[r, c] = host[down, across]
    flat = expected.flatten()
    offsets = torch.arange(size // 2) * 2
    # The 16-byte chunks of a row change places by the number of their 128-byte line.
    moved = offsets ^ (((offsets >> 7) & (max(swizzle, 16) // 16 - 1)) << 4)
    swizzled = torch.empty_like(flat)
    swizzled[moved // 2] = flat
    torch.testing.assert_close(out.cpu(), swizzled, rtol=0, atol=0, equal_nan=True)
