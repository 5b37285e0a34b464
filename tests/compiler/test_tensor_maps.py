"""Tensor maps: the hardware's rules, and boxes as TMA brings them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiler_cases import MAP, hopper, spec

from tilewise import compiler


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
