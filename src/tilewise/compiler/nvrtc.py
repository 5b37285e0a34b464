"""KernelSpec -> source -> NVRTC -> cubin, through the disk cache. Needs neither a GPU nor libcuda."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tilewise.arch import limits_of
from tilewise.compiler import cache
from tilewise.compiler.diagnostics import KernelCompileError, ResourceReport, explain, parse
from tilewise.compiler.driver import BINDINGS
from tilewise.compiler.spec import KernelSpec, headers

_FORMAT = "tilewise cubin 2"  # of an entry's files; in its key, so that no version reads another's
_UNIT = "translation_unit.cu"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel. from_cache: it was read from disk, and compile_seconds is what it once took."""

    spec: KernelSpec
    arch: str
    cubin: bytes
    report: ResourceReport
    from_cache: bool


_memory: dict[tuple[Path | None, str], Binary] = {}  # by the cache's folder and the key


def compile(spec: KernelSpec, arch: str) -> Binary:
    """`spec` for `arch`, from memory, from the disk cache or from NVRTC. Needs no GPU."""
    limits_of(arch)
    unit = spec.translation_unit()
    sources = headers(unit, emulator=False)
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


def _flags(arch: str) -> tuple[str, ...]:
    # A real architecture makes NVRTC run ptxas too, so that no driver has to. -default-device is for lambdas.
    return (
        f"--gpu-architecture={arch}",
        "-std=c++17",
        "-default-device",
        "-lineinfo",
        "--minimal",  # without textures, device launches and the runtime's types, none of which a kernel here uses
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
        raise KernelCompileError(explain(spec, arch, log, {_UNIT: unit, **sources}, ptx))
    return cubin, parse(spec, arch, log, seconds)


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
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ImportError(f"{BINDINGS} ({error})") from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the binding is there, the library is not
        raise RuntimeError(f"NVRTC not found; pip install nvidia-cuda-nvrtc ({error})") from error
    return nvrtc


@lru_cache(maxsize=1)
def _compiler() -> tuple[str, ...]:
    """What besides our own sources makes a cubin: NVRTC itself, and CUDA's headers."""
    _, major, minor = _load_nvrtc().nvrtcVersion()
    from cuda.pathfinder import load_nvidia_dynamic_lib  # comes with the bindings

    # Patch releases have one version number between them, but not one size.
    size = os.path.getsize(path) if (path := load_nvidia_dynamic_lib("nvrtc").abs_path) else 0
    texts = []
    for stem in ("cuda_fp16", "cuda_bf16", "cuda_fp8", "crt/mma"):
        found = [f / (stem + end) for f in include_folders() for end in (".h", ".hpp")]
        texts += [path.read_text(encoding="utf-8", errors="replace") for path in found if path.is_file()]
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


def version() -> tuple[int, int]:
    """NVRTC's: (13, 0); ImportError without its bindings, RuntimeError without its library."""
    _, major, minor = _load_nvrtc().nvrtcVersion()
    return major, minor
