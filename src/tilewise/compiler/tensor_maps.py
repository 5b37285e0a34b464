"""Tensor maps: what TMA is told of a tensor, checked against the hardware's rules."""

from __future__ import annotations

from dataclasses import dataclass

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
        def rule(holds: bool, text: str) -> None:
            if not holds:
                raise ValueError(f"tensor map: {text}")

        rule(self.dtype in MAP_TYPES, f"dtype must be one of {', '.join(MAP_TYPES)}, got {self.dtype!r}")
        rank = len(self.sizes)
        rule(1 <= rank <= 5, f"rank must be 1 to 5, got {rank} sizes {self.sizes}")
        rule(
            len(self.strides) == rank - 1,
            f"strides must be those of dimensions 1 to {rank - 1}, in bytes, got {self.strides}",
        )
        rule(len(self.box) == rank, f"box must have {rank} sizes as the tensor has, got {self.box}")
        for i, size in enumerate(self.sizes):
            rule(1 <= size <= 2**32, f"sizes must be 1 to 2^32, got {size} in dimension {i}")
        for i, stride in enumerate(self.strides, 1):
            rule(stride % 16 == 0, f"strides must be multiples of 16 bytes, got {stride} in dimension {i}")
            rule(
                0 <= stride < 2**40,
                f"strides must be at least 0 and less than 2^40 bytes, got {stride} in dimension {i}",
            )
        for i, size in enumerate(self.box):
            rule(1 <= size <= 256, f"box sizes must be 1 to 256, got {size} in dimension {i}")
        inner = self.box[0] * self.item_bytes
        rule(inner % 16 == 0, f"the box's inner row must be a multiple of 16 bytes, got {inner}")
        rule(self.swizzle in (0, 32, 64, 128), f"swizzle must be 0, 32, 64 or 128 bytes, got {self.swizzle}")
        rule(
            self.swizzle == 0 or inner <= self.swizzle,
            f"the box's inner row must be at most the swizzle's {self.swizzle} bytes, got {inner}",
        )
        rule(
            self.l2_promotion in (0, 64, 128, 256),
            f"l2_promotion must be 0, 64, 128 or 256 bytes, got {self.l2_promotion}",
        )
        rule(not self.oob_nan or "FLOAT" in MAP_TYPES[self.dtype][1], f"oob_nan needs a float dtype, got {self.dtype}")

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
