"""Tensor maps: what TMA is told of a tensor, checked against the hardware's rules and encoded by the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from tilewise.compiler.driver import LIBRARY, check, require

# name -> (bytes, the driver's name). TMA moves bits, so int8 and fp8 are its uint8.
MAP_TYPES = {
    "uint8": (1, "UINT8"),
    "int8": (1, "UINT8"),
    "fp8": (1, "UINT8"),
    "uint16": (2, "UINT16"),
    "fp16": (2, "FLOAT16"),
    "bf16": (2, "BFLOAT16"),
    "int32": (4, "INT32"),
    "uint32": (4, "UINT32"),
    "fp32": (4, "FLOAT32"),
    "tf32": (4, "TFLOAT32"),
    "int64": (8, "INT64"),
    "fp64": (8, "FLOAT64"),
}


@dataclass(frozen=True)
class TensorMapSpec:
    """What a tensor map says, checked against the hardware's rules. Dimensions stand innermost first, as TMA has them.

    sizes: of the tensor, in elements. strides: of dimensions 1, 2, …, in bytes; dimension 0 is dense. box: what one
    copy moves, in elements. swizzle: 0, 32, 64 or 128 bytes. Outside the tensor all is 0, or NaN with oob_nan.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    l2_promotion: int = 128
    oob_nan: bool = False

    def __post_init__(self) -> None:
        if broken := self._broken():
            raise ValueError(f"tensor map: {broken}")

    def _broken(self) -> str:
        """The first of the hardware's rules that is broken, "" if none is. A text is made for that one alone: every
        plan makes its maps anew."""
        rank, box, swizzle = len(self.sizes), self.box, self.swizzle
        if self.dtype not in MAP_TYPES:
            return f"dtype must be one of {', '.join(MAP_TYPES)}, got {self.dtype!r}"
        if not 1 <= rank <= 5:
            return f"rank must be 1 to 5, got {rank} sizes {self.sizes}"
        if len(self.strides) != rank - 1:
            return f"strides must be those of dimensions 1 to {rank - 1}, in bytes, got {self.strides}"
        if len(box) != rank:
            return f"box must have {rank} sizes as the tensor has, got {box}"
        for i, size in enumerate(self.sizes):
            if not 1 <= size <= 2**32:
                return f"sizes must be 1 to 2^32, got {size} in dimension {i}"
        for i, stride in enumerate(self.strides, 1):
            if stride % 16:
                return f"strides must be multiples of 16 bytes, got {stride} in dimension {i}"
            if not 0 <= stride < 2**40:
                return f"strides must be at least 0 and less than 2^40 bytes, got {stride} in dimension {i}"
        for i, size in enumerate(box):
            if not 1 <= size <= 256:
                return f"box sizes must be 1 to 256, got {size} in dimension {i}"
        inner = box[0] * self.item_bytes
        if inner % 16:
            return f"the box's inner row must be a multiple of 16 bytes, got {inner}"
        if swizzle not in (0, 32, 64, 128):
            return f"swizzle must be 0, 32, 64 or 128 bytes, got {swizzle}"
        if swizzle and inner > swizzle:
            return f"the box's inner row must be at most the swizzle's {swizzle} bytes, got {inner}"
        if self.l2_promotion not in (0, 64, 128, 256):
            return f"l2_promotion must be 0, 64, 128 or 256 bytes, got {self.l2_promotion}"
        if self.oob_nan and "FLOAT" not in MAP_TYPES[self.dtype][1]:
            return f"oob_nan needs a float dtype, got {self.dtype}"
        return ""

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def item_bytes(self) -> int:
        return MAP_TYPES[self.dtype][0]

    @property
    def box_bytes(self) -> int:
        """What one whole box brings: the bytes that its barrier must expect, past the tensor's edge or not."""
        total = self.item_bytes
        for size in self.box:
            total *= size
        return total


_BLANK = TensorMapSpec("uint8", (16,), (), (16,), 0)


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
        return cls(_BLANK, 0)


@lru_cache(maxsize=4096)
def encode(spec: TensorMapSpec, pointer: int) -> TensorMap:
    """The tensor map of what `spec` describes at the device address `pointer`.

    Remembered: a map says only where and what shape, so none goes stale.
    """
    if pointer % 16:
        raise ValueError(f"tensor map: the tensor's address must be a multiple of 16 bytes, got {pointer:#x}")
    driver = require()
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
    encode_tiled = ctypes.CDLL(LIBRARY).cuTensorMapEncodeTiled
    code = driver.CUresult(encode_tiled(*asked))
    if code == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # this thread has not used CUDA yet
        device = check(driver.cuDeviceGet(torch.cuda.current_device()), str(spec))
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device), str(spec))), str(spec))
        code = driver.CUresult(encode_tiled(*asked))
    check((code,), f"tensor map of {spec}")
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
