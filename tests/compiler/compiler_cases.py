"""What the compiler's tests share: small kernels, a process of their own, the cache's entries."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

from tilewise.compiler import nvrtc
from tilewise.compiler.spec import Constant, KernelSpec

KERNELS = Path(__file__).parents[1] / "kernels"


def spec(file: str, entry: str | None = None, threads: int = 128, shared: int = 0, **constants: Constant) -> KernelSpec:
    return KernelSpec(file, str(KERNELS / f"{file}.cu"), entry or file, tuple(constants.items()), threads, shared)


AXPY = spec("axpy", kThreads=128)


MAP: dict[str, Any] = {"dtype": "bf16", "sizes": (96, 20), "strides": (192,), "box": (64, 8), "swizzle": 128}


class AxpyArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("bias", ctypes.c_float),
    )


def forget() -> None:
    """As a new process would find it: only the disk remembers."""
    nvrtc._memory.clear()


def python(code: str, **environment: str | None) -> subprocess.Popen[str]:
    """A process that runs the code with these variables, and without those that are None."""
    lines = ["import sys", f"sys.path[:0] = [{str(Path(__file__).parent)!r}]", textwrap.dedent(code)]
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        env={name: value for name, value in {**os.environ, **environment}.items() if value is not None},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], go: str = "") -> str:
    out, err = process.communicate(go, timeout=120)
    assert process.returncode == 0, err
    return out


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.startswith("."))


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.name.startswith(".")]


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
