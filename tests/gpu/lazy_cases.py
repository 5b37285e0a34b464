"""Problems for the lazy softmax in which every score is known, and patterns of scores that jump."""

from __future__ import annotations

from itertools import product

import torch
from forward_cases import BF16, FP16, normal

# Natural logarithms, each exact in 8 bits: 2^1 … 2^13; about 2^50; around 2^99 … 2^101, 2^126 … 2^128, 2^149; 2^200
JUMPS = (
    *(0.6875, 1.375, 2.0, 2.75, 3.5, 4.125, 4.875, 5.5, 5.75, 6.25, 7.0, 7.5, 8.25, 9.0, 34.5),
    *(68.5, 69.0, 69.5, 70.0, 87.0, 87.5, 88.0, 88.5, 89.0, 103.0, 104.0, 110.0, 139.0),
)


# What is compiled: head_dim, dtype, how `attention` is called. Queries up to tilings.SHORT rows.
KINDS = {
    "64": (64, BF16, {}),
    "64 causal": (64, BF16, {"causal": True}),
    "64 exact": (64, BF16, {"exact": True}),
    "128": (128, BF16, {}),
    "128 fp16": (128, FP16, {}),
    "128 exact": (128, BF16, {"exact": True}),
    "256": (256, BF16, {}),
    "scaled": (64, BF16, {"scale": -1.0}),
}


def known_scores(kind: str, patterns: torch.Tensor, *, factor=1.0, offset=0.0, seed=0):
    """q, k, v and options of a problem in which row i of head h meets the scores patterns[h, :, i] · factor + offset.

    patterns: (heads, keys, rows), rows up to the head dimension less one.
    """
    head_dim, dtype, options = KINDS[kind]
    heads, keys, rows = patterns.shape
    assert rows < head_dim
    q, k = torch.zeros(1, rows, heads, head_dim), torch.zeros(1, keys, heads, head_dim)
    q[0, :, :, :rows] = factor * torch.eye(rows)[:, None]
    q[..., -1] = 1.0
    k[0, :, :, :rows] = patterns.transpose(0, 1)
    k[..., -1] = offset
    scale = options.get("scale", 1.0)
    q, k = (q * scale).to(dtype), k.to(dtype)
    assert torch.equal(k[0, :, :, :rows].float(), patterns.transpose(0, 1)), "a score is not exact"
    return q, k, normal(1, keys, heads, head_dim, dtype=dtype, seed=seed), {"scale": 1.0, **options}


def jumps_at(positions, keys: int, rows: int, values=JUMPS) -> torch.Tensor:
    """A pattern for each jump and position, of zeros but for the jump: as many heads as they take."""
    cases = list(product(values, positions))
    heads = -(-len(cases) // rows)
    patterns = torch.zeros(heads, keys, rows)
    for number, (jump, position) in enumerate(cases):
        patterns[number // rows, position, number % rows] = jump
    return patterns


def shapes(keys: int, block: int) -> torch.Tensor:
    """(keys, rows): rising, falling, sawtooth, random, one key a block that rules."""
    at = torch.arange(keys, dtype=torch.float32)
    patterns = []
    for step in (0.0625, 0.125, 0.25):
        patterns += [at * step % 32, 32 - at * step % 32, -(at * step % 16)]
    for top in (4.0, 60.0, 100.0):
        saw = (at % 7) / 8 * top
        patterns += [saw, saw.flip(0), (at % 2) * top, (at % block == 0) * top]
    generator = torch.Generator().manual_seed(keys)
    for size in (1, 8, 64, 127):
        patterns += [torch.randint(-size, size + 1, (keys,), generator=generator).float() for _ in range(3)]
    for step in (0.5, 2.75, 5.5, 5.75, 8.0, 30.0, 34.5):  # a stair of one key a block, up and down
        for place in (0, block // 2, block - 1):
            stair = torch.where(at % block == place, at.div(block, rounding_mode="floor") * step, torch.zeros(()))
            patterns += [stair, stair.flip(0), -stair]
    cliff = torch.where(at < keys // 2, -120.0, 0.0)
    patterns += [cliff, cliff.flip(0), cliff + 120, torch.where(at == 3, 0.0, -127.0)]
    return torch.stack(patterns, dim=1).to(BF16).float()


def in_heads(patterns: torch.Tensor) -> torch.Tensor:
    """(keys, many) -> (heads, keys, 60), filled up with zeros."""
    keys, many = patterns.shape
    return torch.nn.functional.pad(patterns, (0, -many % 60)).view(keys, -1, 60).transpose(0, 1)
