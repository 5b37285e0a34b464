"""Arguments, a machine without a driver, a driver that only writes down what it is asked, and launches on a card."""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler_cases import AXPY, KERNELS, MAP, AxpyArgs, finish, hopper, python, spec

from tilewise import arch, compiler
from tilewise.compiler import driver


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


def test_no_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "missing", lambda: "the NVIDIA driver is not installed")
    assert not compiler.driver_available()
    for call in (lambda: compiler.load(AXPY), lambda: compiler.tensor_map(0x1000, **MAP)):
        with pytest.raises(RuntimeError, match=r"^no GPU: the NVIDIA driver is not installed; .*emulator"):
            call()
    assert compiler.compile(AXPY, "sm_80").cubin


STUBBED = """
    import ctypes, torch
    from compiler_cases import AXPY, MAP, AxpyArgs
    from tilewise import compiler
    from tilewise.compiler.spec import KernelSpec
    torch.cuda.is_available, torch.cuda.init, torch.cuda.current_device = lambda: True, lambda: None, lambda: 0
    compiler.launch.raw_stream = lambda ordinal: 77
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
@pytest.mark.skipif(arch.chosen is not None, reason="speed is asked of a card as it is: leave out TILEWISE_CARD")
def test_gpu_host_cost_of_a_planned_launch(capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own: once one has captured a graph, every launch in it costs some 2 µs more."""
    code = "import torch; from tilewise.bench.rungs import launch_cost; print(launch_cost(torch.device('cuda', 0)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with capsys.disabled():
        print(f"\nhost cost of a planned launch: {float(done.stdout):.2f} µs")
    assert float(done.stdout) <= 6


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
