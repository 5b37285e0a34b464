"""Kernels on a device: loading, arguments, launching on the current stream. Nothing here ever waits."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tilewise.arch import arch_of
from tilewise.compiler.driver import check, error_text, require
from tilewise.compiler.nvrtc import Binary, compile
from tilewise.compiler.spec import KernelSpec
from tilewise.compiler.tensor_maps import TensorMap


class Args:
    """A kernel's arguments, packed once: a relaunch hands the driver one address.

    Values: a ctypes Structure or scalar (c_int64, c_void_p, …) by value; int as int32; float as float32; a tensor as
    the pointer to its first element; None as the null pointer; a TensorMap. ctypes objects are used in place: change
    their fields and the next launch sees it. Everything given, and `keep`, stays alive as long as this does.
    """

    __slots__ = ("_kept", "_pointers", "address", "sizes", "values")

    def __init__(self, *values: Any, keep: Iterable[Any] = ()) -> None:
        packed = [_pack(i, value) for i, value in enumerate(values)]
        self.values = tuple(packed)
        self.sizes = tuple(128 if isinstance(p, TensorMap) else ctypes.sizeof(p) for p in packed)
        addresses = [p.address if isinstance(p, TensorMap) else ctypes.addressof(p) for p in packed]
        self._pointers = (ctypes.c_void_p * max(1, len(packed)))(*addresses)
        self.address = ctypes.addressof(self._pointers)
        self._kept = (values, tuple(keep))

    def point(self, index: int, tensor_map: TensorMap) -> None:
        """Take another tensor map as argument `index`, where there was one; the caller keeps it alive."""
        self._pointers[index] = tensor_map.address


def _pack(index: int, value: Any) -> Any:
    if isinstance(value, (TensorMap, ctypes.Structure, ctypes.Union, ctypes._SimpleCData)):
        return value
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**31) <= value < 2**31:
            raise ValueError(
                f"argument {index} must fit int32, got {value}; ctypes.c_int64 or ctypes.c_void_p says what else it is"
            )
        return ctypes.c_int32(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    raise TypeError(
        f"argument {index} must be a ctypes object, TensorMap, Tensor, int, float or None, got {type(value).__name__}"
    )


class Kernel:
    """A compiled kernel on one device. Made by `load`."""

    def __init__(self, binary: Binary, ordinal: int) -> None:
        driver = self._driver = require()
        self.spec, self.binary, self.ordinal = binary.spec, binary, ordinal
        self.device = torch.device("cuda", ordinal)
        name = f"{binary.spec} on {self.device}"
        attribute = driver.CUdevice_attribute
        device = check(driver.cuDeviceGet(ordinal), name)
        limit = check(
            driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device),
            name,
        )
        shared = binary.spec.shared_bytes + binary.report.static_shared
        if shared > limit:
            raise ValueError(f"{name} needs {shared} bytes of shared memory per block, the device has {limit}")
        self._context = check(driver.cuDevicePrimaryCtxRetain(device), name)
        self._context_value = int(self._context)
        with self._current():
            self._module = check(driver.cuModuleLoadData(binary.cubin), name)
            self._function = check(driver.cuModuleGetFunction(self._module, binary.spec.entry.encode()), name)
            names = driver.CUfunction_attribute
            dynamic = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(self._function, dynamic, binary.spec.shared_bytes), name)
            if binary.arch == "sm_90a":
                large = names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                check(driver.cuFuncSetAttribute(self._function, large, 1), name)
            # Loaded now: the lazy way would load it at its first launch, which may be inside a graph capture.
            check(driver.cuFuncLoad(self._function), name)
            self.arg_sizes = _arg_sizes(driver, self._function)
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._launch, self._get_context = driver.cuLaunchKernelEx, driver.cuCtxGetCurrent

    def launch(
        self,
        grid: tuple[int, int, int],
        args: Args,
        *,
        stream: Any = None,
        cluster: tuple[int, int, int] | None = None,
        pdl: bool = False,
        cooperative: bool = False,
    ) -> None:
        """Puts one launch on torch's current stream of this device, or on `stream` (torch's or a raw handle).

        Never waits. cluster: blocks per cluster. pdl: may start before the kernel ahead of it on the stream is done
        (griddepcontrol in the source waits for that one). cooperative: all blocks are on the card together, or the
        launch fails, so that they may wait for each other.
        """
        if args.sizes != self.arg_sizes:
            raise TypeError(f"{self.spec} takes arguments of {self.arg_sizes} bytes, got {args.sizes}")
        handle = raw_stream(self.ordinal) if stream is None else getattr(stream, "cuda_stream", stream)
        key = (grid, handle, cluster, pdl, cooperative)
        config = self._configs.get(key) or self._configure(key)
        if int(self._get_context()[1]) == self._context_value:
            (error,) = self._launch(config, self._function, args.address, 0)
        else:  # another device is current, or this thread has not used CUDA yet
            with self._current():
                (error,) = self._launch(config, self._function, args.address, 0)
        if error:
            raise RuntimeError(
                f"{self.spec}: launch of grid {grid}, {self.spec.threads} threads, {self.spec.shared_bytes} bytes of "
                f"shared memory on {self.device}: {error_text(error)}"
            )

    def occupancy(self) -> int:
        """Blocks of this kernel that an SM holds at once, as the driver sees it."""
        with self._current():
            found = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._function, self.spec.threads, self.spec.shared_bytes
            )
        return int(check(found, str(self.spec)))

    def _configure(self, key: tuple[Any, ...]) -> Any:
        """The launch configuration, kept because making one costs more than the launch. Never changed once made."""
        grid, stream, cluster, pdl, cooperative = key
        driver = self._driver
        if len(grid) != 3 or not all(1 <= n <= most for n, most in zip(grid, (2**31 - 1, 65535, 65535), strict=True)):
            raise ValueError(f"grid must be three sizes from 1 to (2^31 − 1, 65535, 65535), got {grid}")
        if (cluster or pdl) and self.binary.arch != "sm_90a":
            raise ValueError(
                f"{self.spec}: clusters and dependent launches need compute capability 9.0, not {self.device}"
            )
        if cluster and (len(cluster) != 3 or any(c < 1 or g % c for g, c in zip(grid, cluster, strict=True))):
            raise ValueError(f"cluster must be three sizes that divide the grid {grid}, got {cluster}")
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.spec.threads, 1, 1
        config.sharedMemBytes = self.spec.shared_bytes
        config.hStream = driver.CUstream(stream)
        attributes = []
        if cluster:
            value = driver.CUlaunchAttributeValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster
            attributes.append(_attribute(driver, "CLUSTER_DIMENSION", value))
        if pdl:
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            attributes.append(_attribute(driver, "PROGRAMMATIC_STREAM_SERIALIZATION", value))
        if cooperative:
            value = driver.CUlaunchAttributeValue()
            value.cooperative = 1
            attributes.append(_attribute(driver, "COOPERATIVE", value))
        config.attrs, config.numAttrs = attributes, len(attributes)
        if len(self._configs) >= 512:
            self._configs.clear()
        self._configs[key] = config
        return config

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        check(self._driver.cuCtxPushCurrent(self._context), str(self.device))
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent()


def _attribute(driver: Any, name: str, value: Any) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    attribute.value = value
    return attribute


def _arg_sizes(driver: Any, function: Any) -> tuple[int, ...]:
    """The sizes of a kernel's parameters: a wrong count would make the driver read past the arguments."""
    try:
        error, count = driver.cuFuncGetParamCount(function)
    except RuntimeError:  # a driver from before it
        error, count = 1, None
    sizes: list[int] = []
    while error or len(sizes) < count:
        failed, _, size = driver.cuFuncGetParamInfo(function, len(sizes))
        if failed:
            break
        sizes.append(int(size))
    return tuple(sizes)


# torch.cuda.current_stream builds a Python object each time, which costs as much as the launch itself.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream
)

_kernels: dict[tuple[KernelSpec, int], Kernel] = {}
_loading = threading.Lock()


def load(spec: KernelSpec, device: torch.device | int | str | None = None) -> Kernel:
    """`spec` compiled for `device` (the current one if None) and loaded there, once per process."""
    driver = require()
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"no GPU: torch {torch.__version__} cannot use the one there is (torch.cuda.is_available() is False)"
        )
    where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    if where.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")
    ordinal = torch.cuda.current_device() if where.index is None else where.index
    if (spec, ordinal) not in _kernels:
        with _loading:
            if (spec, ordinal) not in _kernels:
                torch.cuda.init()
                attribute = driver.CUdevice_attribute
                handle = check(driver.cuDeviceGet(ordinal), f"cuda:{ordinal}")
                capability = [
                    check(driver.cuDeviceGetAttribute(which, handle), f"cuda:{ordinal}")
                    for which in (
                        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                    )
                ]
                _kernels[spec, ordinal] = Kernel(compile(spec, arch_of(*capability)), ordinal)
    return _kernels[spec, ordinal]
