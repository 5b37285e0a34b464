"""KernelSpec -> source -> NVRTC -> cubin -> disk cache -> launch; tensor maps. Alone in knowing NVRTC and the driver.

`compile` needs neither a GPU nor libcuda, and gives what ptxas says about the kernel beside the cubin. `load` makes it
a `Kernel` of one device; `Kernel.launch` puts it on the current stream, never waits, and can be captured in a graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tilewise.arch import ARCHS as ARCHS
from tilewise.arch import LIMITS as LIMITS
from tilewise.arch import arch_of as arch_of
from tilewise.arch import limits_of
from tilewise.arch import occupancy as occupancy
from tilewise.compiler import cache
from tilewise.compiler.spec import KernelSpec, headers
from tilewise.compiler.tensor_maps import MAP_TYPES, TensorMapSpec

# --------------------------------------------------------------------------------------------------------------------
# Compiling
# --------------------------------------------------------------------------------------------------------------------


class KernelCompileError(RuntimeError):
    """NVRTC or ptxas refused a kernel; the message has the spec, the architecture and the lines at fault."""


@dataclass(frozen=True)
class ResourceReport:
    """What ptxas says a kernel costs. Spills and stack are bytes per thread, spills those of all functions it calls."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    static_shared: int
    barriers: int
    warnings: tuple[str, ...]
    compile_seconds: float

    @property
    def spills(self) -> bool:
        return self.spill_stores + self.spill_loads > 0

    @property
    def serialised(self) -> tuple[str, ...]:
        """The warnings that say wgmma lost its overlap."""
        return tuple(w for w in self.warnings if "(C75" in w and "serialized" in w)


@dataclass(frozen=True)
class Binary:
    """A compiled kernel. from_cache: it was read from disk, and compile_seconds is what it once took."""

    spec: KernelSpec
    arch: str
    cubin: bytes
    report: ResourceReport
    from_cache: bool


def compile(spec: KernelSpec, arch: str) -> Binary:
    """`spec` for `arch`, from memory, from the disk cache or from NVRTC. Needs no GPU."""
    limits_of(arch)
    unit = spec.translation_unit()
    sources = headers(unit)
    flags = _flags(arch)
    key = cache.digest(
        _FORMAT, spec.entry, unit, *(part for item in sorted(sources.items()) for part in item), *flags, *_compiler()
    )
    folder = cache.root()
    binary = _memory.get((folder, key))
    if binary is None:
        kept = _read(key)
        cubin, report = kept or _build(spec, arch, unit, sources, flags)
        binary = Binary(spec, arch, cubin, report, from_cache=kept is not None)
        _memory[folder, key] = binary
        if kept is None:
            cache.keep("cubin", key, {"kernel.cubin": cubin, "report.json": json.dumps(asdict(report)).encode()})
    return binary if binary.spec == spec else Binary(spec, arch, binary.cubin, binary.report, binary.from_cache)


def _flags(arch: str) -> tuple[str, ...]:
    # A real architecture makes NVRTC run ptxas too, so that no driver has to. -default-device is for lambdas.
    return (
        f"--gpu-architecture={arch}",
        "-std=c++17",
        "-default-device",
        "-lineinfo",
        "--no-cache",  # NVRTC's own cache returns no log, and so no report; ours keeps both
        "--ptxas-options=-v",
        "--ptxas-options=--warn-on-spills",
    )


def _build(
    spec: KernelSpec, arch: str, unit: str, sources: dict[str, str], flags: tuple[str, ...]
) -> tuple[bytes, ResourceReport]:
    options = [*flags, *(f"-I{folder}" for folder in include_folders())]
    start = time.perf_counter()
    ok, log, cubin = _nvrtc(unit, sources, options, "CUBIN")
    seconds = time.perf_counter() - start
    if not ok:
        ptx = ""
        if "ptx input, line" in log:
            # ptxas speaks of lines of PTX, which a failed build does not leave behind: made once more, to be quoted.
            ptx = _nvrtc(unit, sources, [options[0].replace("=sm_", "=compute_"), *options[1:]], "PTX")[2].decode()
        raise KernelCompileError(_explain(spec, arch, log, {_UNIT: unit, **sources}, ptx))
    return cubin, _parse(spec, arch, log, seconds)


_UNIT = "translation_unit.cu"


def _nvrtc(unit: str, sources: dict[str, str], options: Sequence[str], product: str) -> tuple[bool, str, bytes]:
    """Success, log, and the CUBIN or PTX."""
    nvrtc = _load_nvrtc()

    def check(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(result[0])[1].decode()}")
        return result[1] if len(result) > 1 else None

    texts, names = [t.encode() for t in sources.values()], [n.encode() for n in sources]
    program = check(nvrtc.nvrtcCreateProgram(unit.encode(), _UNIT.encode(), len(names), texts, names))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = bytes(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0").decode(errors="replace")
        if result == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            return False, text, b""
        check((result,))
        made = bytes(check(getattr(nvrtc, f"nvrtcGet{product}Size")(program)))
        check(getattr(nvrtc, f"nvrtcGet{product}")(program, made))
        return True, text, made
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@lru_cache(maxsize=1)
def _load_nvrtc() -> Any:
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the binding is there, the library is not
        raise RuntimeError(f"NVRTC not found; pip install nvidia-cuda-nvrtc ({error})") from error
    return nvrtc


@lru_cache(maxsize=1)
def _compiler() -> tuple[str, ...]:
    """What besides our own sources makes a cubin: NVRTC itself, and CUDA's headers."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    _, major, minor = _load_nvrtc().nvrtcVersion()
    # Patch releases have one version number between them, but not one size.
    size = os.path.getsize(path) if (path := load_nvidia_dynamic_lib("nvrtc").abs_path) else 0
    texts = []
    for stem in ("cuda_fp16", "cuda_bf16", "cuda_fp8", "crt/mma"):
        found = [f / (stem + end) for f in include_folders() for end in (".h", ".hpp")]
        texts += [path.read_text(errors="replace") for path in found if path.is_file()]
    return f"nvrtc {major}.{minor}, {size} bytes", cache.digest(*texts)


@lru_cache(maxsize=1)
def include_folders() -> tuple[Path, ...]:
    """The folders of CUDA's own headers: one that has them all if there is one, else those that have some."""
    looked = list(dict.fromkeys(_include_candidates()))
    needed = ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "vector_types.h", "mma.h", "crt/mma.h")
    for folder in looked:
        if all((folder / name).is_file() for name in needed):
            return (folder,)
    some = tuple(f for f in looked if any((f / name).is_file() for name in needed))
    # Without crt/mma.h only the wmma kernels cannot be compiled.
    if not all(any((f / name).is_file() for f in some) for name in needed[:4]):
        raise RuntimeError(
            "CUDA's headers (cuda_fp16.h, cuda_bf16.h, cuda_fp8.h) not found; "
            f"pip install nvidia-cuda-runtime nvidia-cuda-crt. Looked in {', '.join(str(f) for f in looked)}"
        )
    return some


def _include_candidates() -> Iterator[Path]:
    wheels = importlib.util.find_spec("nvidia")
    for location in (wheels.submodule_search_locations or []) if wheels else []:
        yield Path(location) / "cu13" / "include"
    yield Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "include"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            yield Path(value) / "include"
    yield Path("/usr/local/cuda/include")


_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_WARNING = re.compile(r"^(?:ptxas warning|ptxas .*\(C75\d\d\)|.+\(\d+\): warning).*$", re.M)


def _parse(spec: KernelSpec, arch: str, log: str, seconds: float) -> ResourceReport:
    """The report from ptxas -v: a section for each entry, with the functions it calls and could not inline."""
    sections = re.split(r"Compiling entry function '([^']+)'", log)[1:]
    entries = dict(zip(sections[::2], sections[1::2], strict=True))
    if spec.entry not in entries:
        raise KernelCompileError(
            f'{spec} ({arch}): {spec.source} has no extern "C" __global__ {spec.entry}; '
            f"it has {', '.join(entries) or 'none'}"
        )
    section = entries[spec.entry]
    frames = [tuple(map(int, found)) for found in _SPILLS.findall(section)]

    def count(pattern: str) -> int:
        found = re.search(pattern, section)
        return int(found[1]) if found else 0

    return ResourceReport(
        registers=count(r"Used (\d+) registers"),
        spill_stores=sum(f[1] for f in frames),
        spill_loads=sum(f[2] for f in frames),
        stack_bytes=count(r"(\d+) bytes cumulative stack size") or max((f[0] for f in frames), default=0),
        static_shared=count(r"(\d+) bytes smem"),
        barriers=count(r"used (\d+) barriers"),
        warnings=tuple(dict.fromkeys(re.sub(r"\s+", " ", w.strip()) for w in _WARNING.findall(log))),
        compile_seconds=seconds,
    )


_ERROR = re.compile(r"^(?P<file>.+?)\((?P<line>\d+)\): (?:catastrophic )?error(?: \S+)?: (?P<what>.*)$")
_PTX_ERROR = re.compile(r"^ptxas .*ptx input, line (?P<line>\d+); (?:error|fatal)\s*: (?P<what>.*)$")


def _explain(spec: KernelSpec, arch: str, log: str, sources: dict[str, str], ptx: str) -> str:
    """The errors of a log, each with file, line and the text of that line."""
    errors: dict[str, str] = {}  # an unrolled loop repeats itself
    lines = log.splitlines()
    for number, text in enumerate(lines):
        if found := _ERROR.match(text):
            said = _quote(found["file"], int(found["line"]), found["what"], sources)
            for later in lines[number + 1 :]:
                if not later.strip() or _ERROR.match(later):
                    break
                if "detected during" in later or re.search(r" at line \d+", later):
                    said += f"\n      {later.strip()}"
            errors[said] = ""
        elif found := _PTX_ERROR.match(text):
            said, instruction = _quote_ptx(ptx, int(found["line"]), found["what"], sources)
            errors.setdefault(said, instruction)
        elif text.startswith("ptxas fatal") and "aborted due to errors" not in text:
            errors[text] = ""
    if not errors:
        errors[log.strip() or "NVRTC gave no reason"] = ""
    shown = [f"  {said}{instruction}" for said, instruction in errors.items()]
    if len(shown) > 10:
        shown[10:] = [f"  and {len(shown) - 10} more errors"]
    if re.search(r'"(crt/)?mma\.h"', log):
        shown.append("  wmma needs CUDA's crt headers: pip install nvidia-cuda-crt")
    return "\n".join([f"{spec} does not compile for {arch}:", *shown])


def _quote(file: str, line: int, what: str, sources: dict[str, str]) -> str:
    try:
        text = sources[file] if file in sources else Path(file).read_text(errors="replace")
        return f"{file}:{line}: {what}\n    {text.splitlines()[line - 1].strip()}"
    except (OSError, IndexError):
        return f"{file}:{line}: {what}"


def _quote_ptx(ptx: str, line: int, what: str, sources: dict[str, str]) -> tuple[str, str]:
    """An error at a line of PTX: where in the source it comes from, and the instruction."""
    lines = ptx.splitlines()[:line]
    if len(lines) < line:
        return f"PTX line {line}: {what}", ""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, re.M))
    # NVRTC writes a file given in memory as if it lay in the working folder.
    files = {n: next((s for s in sources if file == s or file.endswith("/" + s)), file) for n, file in files.items()}
    places = re.findall(r"^\s*\.loc\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+))?", "\n".join(lines), re.M)
    instruction = f"\n      PTX: {lines[-1].strip()}"
    if not places or places[-1][0] not in files:
        return what, instruction
    file, number, caller, caller_number = places[-1]
    if caller in files:
        instruction += f"\n      inlined at {files[caller]}:{caller_number}"
    return _quote(files[file], int(number), what, sources), instruction


# --------------------------------------------------------------------------------------------------------------------
# The cache's entries
# --------------------------------------------------------------------------------------------------------------------

_FORMAT = "tilewise cubin 2"
_memory: dict[tuple[Path | None, str], Binary] = {}


def _read(key: str) -> tuple[bytes, ResourceReport] | None:
    """The entry, or None if there is none that is whole."""
    files = cache.read("cubin", key)
    try:
        if files is None:
            return None
        report = json.loads(files["report.json"])
        return files["kernel.cubin"], ResourceReport(**{**report, "warnings": tuple(report["warnings"])})
    except (ValueError, KeyError, TypeError):
        return None


# --------------------------------------------------------------------------------------------------------------------
# The driver
# --------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _driver_missing() -> str | None:
    """Why there is no driver to talk to. Asked without cuda.bindings, which may hang when libcuda is not there."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the NVIDIA driver is not installed ({error})"
    if code := library.cuInit(0):
        return f"the NVIDIA driver does not start (cuInit gives {code})"
    count = ctypes.c_int(0)
    if library.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver sees no device"
    return None


def driver_available() -> bool:
    """True if there is a driver with a device; what needs one raises RuntimeError otherwise."""
    return _driver_missing() is None


def _driver() -> Any:
    if reason := _driver_missing():
        raise RuntimeError(f"no GPU: {reason}; backend='emulator' runs the same kernels on CPU tensors")
    return _bindings()


@lru_cache(maxsize=1)
def _bindings() -> Any:
    from cuda.bindings import driver

    return driver


def _check(result: tuple[Any, ...], what: str) -> Any:
    if result[0] != 0:
        raise RuntimeError(f"{what}: {_error_text(result[0])}")
    return result[1] if len(result) == 2 else result[1:]


def _error_text(error: Any) -> str:
    code, text = _driver().cuGetErrorString(error)
    return f"{getattr(error, 'name', error)}" + (f" ({text.decode()})" if code == 0 and text else "")


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
        driver = self._driver = _driver()
        self.spec, self.binary, self.ordinal = binary.spec, binary, ordinal
        self.device = torch.device("cuda", ordinal)
        name = f"{binary.spec} on {self.device}"
        attribute = driver.CUdevice_attribute
        device = _check(driver.cuDeviceGet(ordinal), name)
        limit = _check(
            driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device),
            name,
        )
        shared = binary.spec.shared_bytes + binary.report.static_shared
        if shared > limit:
            raise ValueError(f"{name} needs {shared} bytes of shared memory per block, the device has {limit}")
        self._context = _check(driver.cuDevicePrimaryCtxRetain(device), name)
        self._context_value = int(self._context)
        with self._current():
            self._module = _check(driver.cuModuleLoadData(binary.cubin), name)
            self._function = _check(driver.cuModuleGetFunction(self._module, binary.spec.entry.encode()), name)
            names = driver.CUfunction_attribute
            dynamic = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(self._function, dynamic, binary.spec.shared_bytes), name)
            if binary.arch == "sm_90a":
                large = names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                _check(driver.cuFuncSetAttribute(self._function, large, 1), name)
            # Loaded now: the lazy way would load it at its first launch, which may be inside a graph capture.
            _check(driver.cuFuncLoad(self._function), name)
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
                f"shared memory on {self.device}: {_error_text(error)}"
            )

    def occupancy(self) -> int:
        """Blocks of this kernel that an SM holds at once, as the driver sees it."""
        with self._current():
            found = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._function, self.spec.threads, self.spec.shared_bytes
            )
        return int(_check(found, str(self.spec)))

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
        _check(self._driver.cuCtxPushCurrent(self._context), str(self.device))
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
    driver = _driver()
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
                handle = _check(driver.cuDeviceGet(ordinal), f"cuda:{ordinal}")
                capability = [
                    _check(driver.cuDeviceGetAttribute(which, handle), f"cuda:{ordinal}")
                    for which in (
                        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                    )
                ]
                _kernels[spec, ordinal] = Kernel(compile(spec, arch_of(*capability)), ordinal)
    return _kernels[spec, ordinal]


# --------------------------------------------------------------------------------------------------------------------
# Tensor maps
# --------------------------------------------------------------------------------------------------------------------


class TensorMap:
    """A tensor map as the driver encodes it: 128 bytes, aligned to 64. Made by `encode`."""

    __slots__ = ("_memory", "address", "pointer", "spec")

    def __init__(self, spec: TensorMapSpec, pointer: int) -> None:
        self.spec, self.pointer = spec, pointer
        self._memory = ctypes.create_string_buffer(128 + 63)
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64

    def __bytes__(self) -> bytes:
        return ctypes.string_at(self.address, 128)

    @classmethod
    def blank(cls) -> TensorMap:
        """Zeros: for a kernel that takes a map and does not use it, or before `Args.point` puts in another."""
        return cls(TensorMapSpec("uint8", (16,), (), (16,), 0), 0)


@lru_cache(maxsize=4096)
def encode(spec: TensorMapSpec, pointer: int) -> TensorMap:
    """The tensor map of what `spec` describes at the device address `pointer`.

    Remembered: a map says only where and what shape, so none goes stale.
    """
    if pointer % 16:
        raise ValueError(f"tensor map: the tensor's address must be a multiple of 16 bytes, got {pointer:#x}")
    driver = _driver()
    made = TensorMap(spec, pointer)
    swizzle = f"{spec.swizzle}B" if spec.swizzle else "NONE"
    promotion = f"L2_{spec.l2_promotion}B" if spec.l2_promotion else "NONE"
    fill = "NAN_REQUEST_ZERO_FMA" if spec.oob_nan else "NONE"
    wide, narrow = ctypes.c_uint64 * spec.rank, ctypes.c_uint32 * spec.rank
    # By ctypes: the binding's own CUtensorMap was seen at an address that is no multiple of 64, as the driver asks for.
    asked = (
        ctypes.c_void_p(made.address),
        int(getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{MAP_TYPES[spec.dtype][1]}")),
        spec.rank,
        ctypes.c_void_p(pointer),
        wide(*spec.sizes),
        wide(*spec.strides),
        narrow(*spec.box),
        narrow(*[1] * spec.rank),
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}")),
        int(getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}")),
        int(getattr(driver.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}")),
    )
    encode_tiled = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    code = driver.CUresult(encode_tiled(*asked))
    if code == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # this thread has not used CUDA yet
        device = _check(driver.cuDeviceGet(torch.cuda.current_device()), str(spec))
        _check(driver.cuCtxSetCurrent(_check(driver.cuDevicePrimaryCtxRetain(device), str(spec))), str(spec))
        code = driver.CUresult(encode_tiled(*asked))
    _check((code,), f"tensor map of {spec}")
    return made


def tensor_map(
    pointer: int,
    dtype: str,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
    *,
    l2_promotion: int = 128,
    oob_nan: bool = False,
) -> TensorMap:
    """`encode` of a `TensorMapSpec` of these."""
    spec = TensorMapSpec(dtype, tuple(sizes), tuple(strides), tuple(box), swizzle, l2_promotion, oob_nan)
    return encode(spec, pointer)


# --------------------------------------------------------------------------------------------------------------------
# What kernels cost
# --------------------------------------------------------------------------------------------------------------------


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
    pairs = [(spec, arch) for spec in specs for arch in archs]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles outside the GIL
        return list(pool.map(lambda pair: _row(*pair), pairs))


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
