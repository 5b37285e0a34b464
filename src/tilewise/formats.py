"""KV storage formats: how the channels of one token and head become bytes, and back.

| format         | stored per token and head                                                    | bytes at D = 128 |
|----------------|------------------------------------------------------------------------------|------------------|
| fp32 fp16 bf16 | D values                                                                     | 512, 256, 256    |
| fp8            | D e4m3 codes, a float32 scale = amax / 448                                   | 132              |
| int8           | D codes in [-127, 127], a float32 scale = amax / 127                         | 132              |
| int4           | D codes in [0, 15], two a byte, low nibble first; for each group of channels | 72 (groups of 64)|
|                | a bfloat16 scale and zero: x ≈ code · scale + zero                           |                  |

A plain format stores what a cast gives: infinities and NaN stay, and fp16 overflows beyond 65504. A quantised format
takes every finite float32; a token and head that holds an infinity or a NaN decodes to NaN in all its channels, so
a broken activation stays visible and never leaks into other tokens. `error_bound` states what each format promises.

The row of a latent cache (MLA) is one vector. Its first L channels (`latent`) are key and value, its last ones, the
rotary part, are key alone. Quantised it is one run of bytes, in this order:

| format | codes  | scales: one float32 per 128 latent channels  | the rotary part | bytes at D = 576, L = 512 |
|--------|--------|----------------------------------------------|-----------------|---------------------------|
| fp8    | L e4m3 | the least power of two that is >= amax / 448 | D - L bfloat16  | 512 + 16 + 128 = 656      |
| int8   | L int8 | amax / 127                                   | D - L bfloat16  | 512 + 16 + 128 = 656      |

The rotary part stays bfloat16 because its errors would reach the scores of all heads alike, and it is a ninth of the
row. The fp8 row is what DeepSeek's kernels read. Scales that are powers of two cost fp8 nothing, a float keeps its bits
under any of them, and they make every decoded channel a bfloat16 without another rounding; DeepSeek's kernels round
other scales. Any float32 scale is read. int8 would lose a bit to them, so its scales are what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch

from tilewise import checks

FORMATS = ("fp32", "fp16", "bf16", "fp8", "int8", "int4")
GROUP_SIZES = (32, 64, 128)
LATENT_FORMATS = ("fp8", "int8")  # the quantised formats that a latent row has
LATENT_GROUP = 128  # channels of a latent row that share a scale
PLAIN = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

FP8_MAX = 448.0
INT8_MAX = 127.0
INT4_MAX = 15.0

_FLOAT32_MAX = torch.finfo(torch.float32).max
# Scales stay at or above the smallest normal number. So there is no division by zero (an all-zero row has codes 0 and
# decodes to exact zeros), and a row of subnormal values keeps a scale of full precision.
_MIN_SCALE = 2.0**-126
# int4 saturates here: with |x| <= 2^126, max - min and 15 · scale are finite float32 values whatever the signs are.
_INT4_LIMIT = 2.0**126
# The largest scale of an fp8 row: 448 times it is the last such number below infinity, and there the row saturates.
_FP8_ROW_SCALE = 2.0**119


@dataclass(frozen=True)
class Component:
    """One stored tensor: `shape` and `dtype` of what it holds per token and head."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class KVFormat:
    """Encodes (..., head_dim) floats into storage components and decodes them. `group_size` concerns int4 alone.

    latent: how many channels of a latent row are quantised, for fp8 and int8; 0 for a head of K or of V.
    """

    name: str
    head_dim: int
    group_size: int = 64
    latent: int = 0

    def __post_init__(self) -> None:
        checks.choice("kv_format", self.name, FORMATS)
        checks.integer("head_dim", self.head_dim, 1, checks.MAX_HEAD_DIM)
        checks.choice("group_size", checks.integer("group_size", self.group_size), GROUP_SIZES)
        if checks.integer("latent", self.latent, 0, self.head_dim) and self.name not in LATENT_FORMATS:
            raise ValueError(f"latent goes with {' and '.join(LATENT_FORMATS)}, got {self.name!r}")

    @property
    def values(self) -> KVFormat:
        """The format of V where this is that of K: the same, unless V has another head_dim (PairFormat)."""
        return self

    @property
    def dims(self) -> str:
        """The head_dim of K and V, as tables name it: "128", or "192x128"."""
        return str(self.head_dim)

    def beside(self, values: KVFormat) -> KVFormat:
        """One format that tells of K in this one and of V in `values`, which differs in its head_dim at most."""
        return self if values.head_dim == self.head_dim else _pair(self, values.head_dim)

    @property
    def plain(self) -> bool:
        """Whether the stored bytes are the values themselves, so that attention can read them in place."""
        return self.name in PLAIN

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that a plain format stores, None for a quantised one."""
        return PLAIN.get(self.name)

    @property
    def decoded_dtype(self) -> torch.dtype:
        """What decode() gives unless told: the stored dtype of a plain format, float32 of a quantised one."""
        return PLAIN.get(self.name, torch.float32)

    @cached_property
    def components(self) -> tuple[Component, ...]:
        d = self.head_dim
        if self.latent:
            dtype = torch.float8_e4m3fn if self.name == "fp8" else torch.int8
            rotary = (Component("rotary", (d - self.latent,), torch.bfloat16),) if self.latent < d else ()
            codes = Component("codes", (self.latent,), dtype)
            return codes, Component("scale", (len(self._groups),), torch.float32), *rotary
        if self.name == "fp8":
            return Component("codes", (d,), torch.float8_e4m3fn), Component("scale", (1,), torch.float32)
        if self.name == "int8":
            return Component("codes", (d,), torch.int8), Component("scale", (1,), torch.float32)
        if self.name == "int4":
            groups = (len(self._groups),)
            return (
                Component("codes", ((d + 1) // 2,), torch.uint8),
                Component("scale", groups, torch.bfloat16),
                Component("zero", groups, torch.bfloat16),
            )
        return (Component("values", (d,), self.decoded_dtype),)

    @property
    def bytes_per_token_head(self) -> int:
        """Real bytes of K (or of V, or of a latent row) for one token and one head, scales included."""
        if self.latent:
            last = self.components[-1].nbytes
            return -(-(self.offsets[-1] + last) // 4) * 4  # or the next row's scales would not lie on four bytes
        return sum(c.nbytes for c in self.components)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each component begins in the bytes of a latent row: on a multiple of its values' size."""
        found, at = [], 0
        for c in self.components:
            at = -(-at // c.dtype.itemsize) * c.dtype.itemsize
            found.append(at)
            at += c.nbytes
        return tuple(found)

    def from_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The components of latent rows (..., bytes_per_token_head), of one-byte values: views of the same memory."""
        found = []
        for at, c in zip(self.offsets, self.components, strict=True):
            part = rows[..., at : at + c.nbytes]
            found.append(part.view(c.dtype))
        return found

    def to_rows(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """(..., bytes_per_token_head) uint8: the components of latent rows as one run of bytes, a copy."""
        size = (*parts[0].shape[:-1], self.bytes_per_token_head)
        rows = torch.zeros(size, dtype=torch.uint8, device=parts[0].device)
        for into, part in zip(self.from_rows(rows), parts, strict=True):
            into.view(torch.uint8).copy_(part.contiguous().view(torch.uint8))
        return rows

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(..., head_dim) floats -> one tensor (..., *component.shape) for each of `components`."""
        if self.plain:
            return (x.to(self.decoded_dtype),)
        x = x.float()
        if self.latent:
            return self._encode_row(x)
        if self.name == "int4":
            scale, zero = self._int4_scale_zero(x)
            return self._int4_codes(x, scale.float(), zero.float()), scale, zero
        scale = self._absmax_scale(x)
        codes = x / scale
        if self.name == "fp8":
            return codes.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale
        # NaN has no integer: any code will do, since the NaN scale makes the row NaN again.
        return codes.round_().clamp_(-INT8_MAX, INT8_MAX).nan_to_num_(0.0).to(torch.int8), scale

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The components, each (..., *component.shape) -> (..., head_dim) of `dtype`, by default `decoded_dtype`.

        A plain format whose dtype is asked for gives its own tensor back, not a copy.
        """
        dtype = dtype or self.decoded_dtype
        if self.plain:
            return parts[0].to(dtype)
        if self.latent:
            rows = parts[0].new_empty((*parts[0].shape[:-1], self.head_dim), dtype=torch.float32)
            torch.mul(parts[0].float(), self._per_channel(parts[1]), out=rows[..., : self.latent])
            if len(parts) > 2:
                rows[..., self.latent :] = parts[2]
            return rows.to(dtype)
        if self.name == "fp8":
            return _fp8_times(parts[0], parts[1]).to(dtype)
        if self.name == "int8":
            return parts[0].float().mul_(parts[1]).to(dtype)
        packed, scale, zero = parts[0], parts[1].float(), parts[2].float()
        x = _unpack_nibbles(packed, self.head_dim).float()
        for g, channels in enumerate(self._groups):
            x[..., channels].mul_(scale[..., g : g + 1]).add_(zero[..., g : g + 1])
        return x.to(dtype)

    def error_bound(self, x: torch.Tensor) -> torch.Tensor:
        """(..., head_dim) float64: no channel of decode(encode(x)) in the default dtype is further from a finite x.

        `s` is the scale as stored. Where float32 arithmetic itself rounds, the terms of 2^-21 and smaller pay for it.
        """
        exact = x.double().abs()
        if self.name == "fp32":
            return torch.zeros_like(exact)
        if self.plain:
            return _rounding(x, self.decoded_dtype)
        if self.latent:
            return torch.cat([self._latent_bound(x.float()), _rounding(x[..., self.latent :], torch.bfloat16)], -1)
        if self.name == "int4":
            # Codes are at most half a step off: s / 2. Zero is at or below min, and 15 s reaches max, so nothing clips
            # inside ±2^126; what lies beyond comes back as ±2^126. Decoding rounds the sum code · s + zero once.
            scale, _ = self._int4_scale_zero(x.float())
            s = self._per_channel(scale.double())
            return s * (0.5 + 2.0**-18) + exact * 2.0**-23 + (exact - _INT4_LIMIT).clamp(min=0)
        return self._code_bound(exact, self._absmax_scale(x.float()).double())

    def _code_bound(self, exact: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """How far fp8 and int8 codes under the scale s are off from values whose magnitude is `exact`, float64."""
        if self.name == "int8":
            # Half a step. amax / s is 127 up to rounding, so the clamp takes nothing away.
            return (s * (0.5 + 2.0**-14)).expand_as(exact)
        # e4m3 has 4 bits (3 stored): 2^-4 of the value, or half its smallest subnormal 2^-9 where that is more.
        return torch.maximum(exact * 2.0**-4, s * 2.0**-10) + exact * 2.0**-21 + s * 2.0**-30

    @cached_property
    def _groups(self) -> tuple[slice, ...]:
        """The channels that share a scale, of int4 and of latent rows; the last group may be shorter."""
        step, end = (LATENT_GROUP, self.latent) if self.latent else (self.group_size, self.head_dim)
        return tuple(slice(a, min(a + step, end)) for a in range(0, end, step))

    def _encode_row(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A latent row. Where any of its channels is not finite, all of it is NaN."""
        finite = x.isfinite().all(-1, keepdim=True)
        scale = self._row_scales(x).masked_fill_(~finite, torch.nan)
        codes = x[..., : self.latent] / self._per_channel(scale)
        rotary = (
            (x[..., self.latent :].masked_fill(~finite, torch.nan).bfloat16(),) if self.latent < self.head_dim else ()
        )
        if self.name == "fp8":
            return codes.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale, *rotary
        return codes.round_().clamp_(-INT8_MAX, INT8_MAX).nan_to_num_(0.0).to(torch.int8), scale, *rotary

    def _row_scales(self, x: torch.Tensor) -> torch.Tensor:
        """(..., groups) float32 of a latent row."""
        amax = torch.stack([x[..., g].abs().amax(-1) for g in self._groups], -1)
        scale = self._scale_of(amax)
        if self.name == "int8":
            return scale
        # The next power of two: a carry out of the mantissa, unless that is 0, into the exponent.
        power = (scale.contiguous().view(torch.int32) + 0x7FFFFF & 0x7F800000).view(torch.float32)
        return power.clamp_(max=_FP8_ROW_SCALE)

    def _latent_bound(self, x: torch.Tensor) -> torch.Tensor:
        exact = x[..., : self.latent].double().abs()
        s = self._per_channel(self._row_scales(x)).double()
        bound = self._code_bound(exact, s).contiguous()
        if self.name == "fp8":  # what saturates comes back as ±448 of the largest scale
            bound += (exact - FP8_MAX * _FP8_ROW_SCALE).clamp(min=0)
        return bound

    def _absmax_scale(self, x: torch.Tensor) -> torch.Tensor:
        """amax / top, (..., 1) float32; NaN for a row that holds anything not finite."""
        amax = x.abs().amax(-1, keepdim=True)
        return self._scale_of(amax).masked_fill_(~amax.isfinite(), torch.nan)

    def _scale_of(self, amax: torch.Tensor) -> torch.Tensor:
        top = FP8_MAX if self.name == "fp8" else INT8_MAX
        # Near the largest float32 the scale could round up so far that top · scale is inf: stay one part in 2^22 below.
        return _divided(amax, top).clamp_(_MIN_SCALE, _FLOAT32_MAX / top * (1 - 2.0**-22))

    def _int4_scale_zero(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(..., groups) bfloat16 scale and zero; both NaN for a row that holds anything not finite.

        Zero is the minimum rounded down and the scale is rounded up, so that [zero, zero + 15 · scale] always covers
        the group. bfloat16, because it has the range of float32: float16 would overflow on what float32 holds.
        """
        low = torch.stack([x[..., g].amin(-1) for g in self._groups], -1)
        high = torch.stack([x[..., g].amax(-1) for g in self._groups], -1)
        finite = (low.isfinite() & high.isfinite()).all(-1, keepdim=True)
        # + 0.0: of zeros with both signs the minimum is either, so a zero is stored as +0.
        zero = _round_to_bfloat16(low.clamp_(-_INT4_LIMIT, _INT4_LIMIT).add_(0.0), up=False)
        span = high.clamp_(-_INT4_LIMIT, _INT4_LIMIT) - zero
        scale = _round_to_bfloat16(_divided(span, INT4_MAX).clamp_(min=_MIN_SCALE), up=True)
        scale, zero = (t.masked_fill(~finite, torch.nan).bfloat16() for t in (scale, zero))
        return scale, zero

    def _int4_codes(self, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """(..., ceil(head_dim / 2)) uint8: channel 2i is the low nibble of byte i, channel 2i + 1 the high one."""
        codes = x.new_zeros((*x.shape[:-1], self.head_dim + self.head_dim % 2), dtype=torch.uint8)
        for g, channels in enumerate(self._groups):
            steps = (x[..., channels] - zero[..., g : g + 1]).div_(scale[..., g : g + 1])
            codes[..., channels] = steps.round_().clamp_(0, INT4_MAX).nan_to_num_(0.0).to(torch.uint8)
        return codes[..., 0::2] | (codes[..., 1::2] << 4)

    def _per_channel(self, per_group: torch.Tensor) -> torch.Tensor:
        step, end = (LATENT_GROUP, self.latent) if self.latent else (self.group_size, self.head_dim)
        return per_group.repeat_interleave(step, -1)[..., :end]


@dataclass(frozen=True)
class PairFormat(KVFormat):
    """The format of K, and how many channels V has, which is stored in the same way."""

    value_dim: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("value_dim", self.value_dim, 1, checks.MAX_HEAD_DIM)

    @cached_property
    def values(self) -> KVFormat:
        return KVFormat(self.name, self.value_dim, self.group_size)

    @property
    def dims(self) -> str:
        return f"{self.head_dim}x{self.value_dim}"

    def beside(self, values: KVFormat) -> KVFormat:
        return KVFormat(self.name, self.head_dim, self.group_size).beside(values)


@lru_cache(maxsize=256)
def _pair(keys: KVFormat, value_dim: int) -> PairFormat:
    return PairFormat(keys.name, keys.head_dim, keys.group_size, value_dim=value_dim)


def _rounding(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far a cast to `dtype`, float16 or bfloat16, is off at most, float64.

    Round to nearest with p bits: half a unit in the last place, 2^-p of the value for normal numbers and half the
    smallest subnormal below them. A value that rounds beyond the largest finite one becomes inf.
    """
    bits = {torch.float16: 11, torch.bfloat16: 8}[dtype]
    bound = x.double().abs() * 2.0**-bits + torch.finfo(dtype).smallest_normal * 2.0**-bits
    return torch.where(x.to(dtype).isinf(), torch.inf, bound)


def _divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """x / by, rounded once. By a Python number torch on a card multiplies with the reciprocal, which rounds twice."""
    return x / x.new_full((), by) if x.is_cuda else x / by


def _round_to_bfloat16(x: torch.Tensor, *, up: bool) -> torch.Tensor:
    """float32 values that bfloat16 holds exactly, rounded towards +inf or -inf. Takes finite values; NaN and inf pass.

    bfloat16 is the upper half of a float32, so cutting the lower half rounds towards zero, and adding one to the upper
    half is the next value away from zero, whatever the sign.
    """
    bits = x.contiguous().view(torch.int32)
    cut = bits & -0x10000
    away = (cut != bits) & ((x > 0) if up else (x < 0))
    return (cut + away.to(torch.int32) * 0x10000).view(torch.float32)


def _unpack_nibbles(packed: torch.Tensor, head_dim: int) -> torch.Tensor:
    """(..., ceil(head_dim / 2)) uint8 -> (..., head_dim) uint8 codes."""
    # One 16-bit word per byte: the low nibble into the first byte of the word, the high nibble into the second.
    # In place, because the view as bytes needs a last stride of 1, which torch gives the result of an operation on an
    # empty tensor only sometimes.
    words = packed.to(torch.int16, memory_format=torch.contiguous_format)
    words |= words << 4
    words &= 0x0F0F
    return words.view(torch.uint8)[..., :head_dim]


def _fp8_times(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3 codes times scale, float32: exactly `codes.float() * scale`, for which torch on a CPU takes twice as long.

    The exponent and mantissa of e4m3 moved to the top of float16's fields are the same number times 2^(7 - 15), for
    subnormals too. The NaN codes come out finite, but the scale of such a row is NaN.
    """
    words = codes.view(torch.int8).to(torch.int16)
    half = ((words << 7) & -0x4080).view(torch.float16)  # -0x4080 keeps bit 15, the sign, and bits 13 to 7
    return half.float().mul_(scale * 256.0)
