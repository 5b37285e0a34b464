"""The CUDA driver: whether there is one, its bindings, its errors."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def missing() -> str | None:
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
    return missing() is None


def require() -> Any:
    """The driver's bindings; RuntimeError where there is no device."""
    if reason := missing():
        raise RuntimeError(f"no GPU: {reason}; backend='emulator' runs the same kernels on CPU tensors")
    return _bindings()


@lru_cache(maxsize=1)
def _bindings() -> Any:
    from cuda.bindings import driver

    return driver


def check(result: tuple[Any, ...], what: str) -> Any:
    """What a call of the driver returned beside its error code; RuntimeError if it failed, with `what` it was about."""
    if result[0] != 0:
        raise RuntimeError(f"{what}: {error_text(result[0])}")
    return result[1] if len(result) == 2 else result[1:]


def error_text(error: Any) -> str:
    code, text = require().cuGetErrorString(error)
    return f"{getattr(error, 'name', error)}" + (f" ({text.decode()})" if code == 0 and text else "")


def version() -> tuple[int, int]:
    """The newest CUDA that the driver serves: (13, 0); RuntimeError or ImportError where it cannot be asked."""
    number = check(require().cuDriverGetVersion(), "the driver's version")
    return number // 1000, number % 1000 // 10
