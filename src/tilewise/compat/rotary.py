"""Rotary position embedding as in `flash_attn.layers.rotary`, by differentiable torch operations on any device."""

from __future__ import annotations

import torch

from tilewise import checks

from .inputs import sequence_of


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Turn the first rotary_dim channels of x by the angles of the tokens' positions; the others stay as they are.

    x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens (batch + 1,).
    cos, sin: (positions, rotary_dim / 2). interleaved: pairs of channels are 2i and 2i + 1 (GPT-J) instead of i and
    i + rotary_dim / 2 (GPT-NeoX). inplace: x itself is changed and returned. seqlen_offsets: the position of each
    sequence's first token, an int or (batch,). max_seqlen: not needed here, the lengths are in cu_seqlens.

    float32 inside, x's dtype out. Positions beyond the tables are an error: ValueError on the CPU, a device-side
    assertion on a GPU, where they are not looked at.
    """
    packed = cu_seqlens is not None
    lead = ("total",) if packed else ("batch", "seqlen")
    checks.tensor("x", x, shape=(*lead, "heads", "head_dim"), dtypes=checks.FLOATS)
    check_tables("cos", cos, "sin", sin, x)
    checks.flag("interleaved", interleaved)
    checks.flag("inplace", inplace)
    if cu_seqlens is not None:
        checks.tensor("cu_seqlens", cu_seqlens, shape=("batch + 1",), dtypes=checks.INTEGERS, device=x.device)
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if isinstance(seqlen_offsets, torch.Tensor):
        checks.tensor("seqlen_offsets", seqlen_offsets, shape=(batch,), dtypes=checks.INTEGERS, device=x.device)
        offsets = seqlen_offsets.long()
    else:
        offsets = torch.full((batch,), checks.integer("seqlen_offsets", seqlen_offsets, 0), device=x.device)
    if cu_seqlens is None:
        positions = offsets[:, None] + torch.arange(x.shape[1], device=x.device)
    else:
        sequence = sequence_of(cu_seqlens, x.shape[0])
        positions = torch.arange(x.shape[0], device=x.device) - cu_seqlens.long()[sequence] + offsets[sequence]
    check_positions("cos", cos, positions)
    turned = turn(x, cos[positions], sin[positions], interleaved)
    return x.copy_(turned) if inplace else turned


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x (..., tokens, heads, head_dim) by cos and sin (..., tokens, rotary_dim / 2) of each token."""
    half = cos.shape[-1]
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = turned.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turned.split(half, -1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((joined.to(x.dtype), rest), -1)


def check_tables(cos_name: str, cos: torch.Tensor, sin_name: str, sin: torch.Tensor, x: torch.Tensor) -> None:
    """Tables (positions, rotary_dim / 2) for x (..., head_dim), whose dtype, FP8 too, they may have."""
    shape = ("positions", "rotary_dim / 2")
    dtypes = (*checks.FLOATS, x.dtype)
    checks.tensor(cos_name, cos, shape=shape, dtypes=dtypes, device=x.device)
    checks.tensor(sin_name, sin, shape=tuple(cos.shape), dtypes=dtypes, device=x.device)
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(f"{cos_name} must turn at most head_dim {x.shape[-1]} channels, got {2 * cos.shape[1]}")


def check_positions(cos_name: str, cos: torch.Tensor, positions: torch.Tensor) -> None:
    """On the CPU, where looking costs nothing: the table has every position."""
    if positions.device.type == "cpu" and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= len(cos):
            raise ValueError(f"{cos_name} must have a row for each position, {low} to {high}, got {len(cos)} rows")
