"""What this device can do at best, measured once per process: matrix-product FLOP/s and memory bytes/s.

The fastest of the calls counts, not the median as for kernels, and a GPU is not warmed up: a ceiling is what the
machine can do when nothing else runs on it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from .measure import Ceiling, time_calls


@cache
def of(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """The ceiling of `device` for inputs of `dtype`; of FP8 that torch does not multiply there, of bfloat16."""
    if device.type == "cuda":
        return Ceiling(_matmul(device, dtype, 8192), _bandwidth(device, 1 << 30))
    flops = _matmul(device, torch.float32, 1536)
    if dtype not in (torch.float32, torch.float8_e4m3fn):
        # Without bf16/fp16 instructions torch multiplies these far slower than float32, and whoever computes in float32
        # instead is right to: the better of the two is the ceiling. Small, because the slow case takes a second.
        flops = max(flops, _matmul(device, dtype, 512))
    return Ceiling(flops, _bandwidth(device, 1 << 27))


@cache
def _matmul(device: torch.device, dtype: torch.dtype, n: int) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product: Callable[[], torch.Tensor] = lambda: a @ b  # noqa: E731
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        product = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
        try:
            product()
        except (RuntimeError, ValueError):  # the card has no such products
            return _matmul(device, torch.bfloat16, n)
    return 2 * n**3 / time_calls({"matmul": product}, device=device, budget=0.4, heat=0.0)["matmul"].fastest


@cache
def _bandwidth(device: torch.device, nbytes: int) -> float:
    """The better of reading a large buffer and copying it (which moves every byte twice)."""
    source = torch.rand(nbytes // 4, device=device)
    target = torch.empty_like(source)
    calls = {"read": lambda: source.sum(), "copy": lambda: target.copy_(source)}
    timings = time_calls(calls, device=device, budget=0.4, heat=0.0)
    return max(nbytes / timings["read"].fastest, 2 * nbytes / timings["copy"].fastest)
