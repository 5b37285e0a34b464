"""The CUDA driver: whether there is one, its bindings, its errors."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# What to do where cuda.bindings cannot be imported, of which the driver's and NVRTC's are parts.
BINDINGS = (
    "CUDA's bindings are missing: pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt on "
    "Linux or Windows; there are none for other systems, where the CPU backend serves the same calls"
)


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why there is no driver to talk to. Asked without cuda.bindings, which may hang when libcuda is not there."""
    try:
        library = ctypes.CDLL(LIBRARY)
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
    return missing() is None


def require() -> Any:
    """The driver's bindings; RuntimeError where there is no device, ImportError where they are not installed."""
    if reason := missing():
        raise RuntimeError(f"no GPU: {reason}; backend='emulator' runs the same kernels on CPU tensors")
    return _bindings()


@lru_cache(maxsize=1)
def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError(f"{BINDINGS} ({error})") from error
    return driver


def check(result: tuple[Any, ...], what: str) -> Any:
    """What a call of the driver returned beside its error code; RuntimeError if it failed, with `what` it was about."""
    if result[0] != 0:
        raise RuntimeError(f"{what}: {error_text(result[0])}")
    return result[1] if len(result) == 2 else result[1:]


def error_text(error: Any) -> str:
    code, text = require().cuGetErrorString(error)
    return f"{getattr(error, 'name', error)}" + (f" ({text.decode()})" if code == 0 and text else "")


def capture_of(stream: int) -> int:
    """Which capture into a graph the stream, a raw handle, is part of: a number that no other one has; 0 for none.

    Asked without cuda.bindings, which ask for the graph's edges, too: a driver refuses that where some have data.
    """
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    found = ctypes.byref(status), ctypes.byref(number)
    if code := ctypes.CDLL(LIBRARY).cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *found, None, None, None):
        raise RuntimeError(f"the capture of a stream: {error_text(require().CUresult(code))}")
    return number.value if status.value else 0


def version() -> tuple[int, int]:
    """The newest CUDA that the driver serves: (13, 0); RuntimeError or ImportError where it cannot be asked."""
    number = check(require().cuDriverGetVersion(), "the driver's version")
    return number // 1000, number % 1000 // 10
