"""Padded batches packed end to end and back, as `flash_attn.bert_padding` calls it. Differentiable, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilewise import checks

MASKS = (torch.bool, torch.uint8, torch.int32, torch.int64)


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` (n,) of x (rows, ...): (n, ...)."""
    checks.tensor("x", x)
    checks.tensor("indices", indices, shape=("n",), dtypes=checks.INTEGERS, device=x.device)
    return x.index_select(0, indices)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens that a mask names, packed end to end.

    hidden_states: (batch, seqlen, ...). attention_mask: (batch, seqlen), bool or int, nonzero for a token that counts.
    unused_mask: (batch, seqlen), tokens that get a place in the packed tensor but do not count.

    Returns the tokens (total, ...); their indices among batch · seqlen (total,); cu_seqlens (batch + 1,) int32; the
    length of the longest sequence, which makes the CPU wait for a GPU; and how many tokens of each sequence count
    (batch,) int32.
    """
    checks.tensor("hidden_states", hidden_states)
    if hidden_states.dim() < 2:
        raise ValueError(f"hidden_states must be (batch, seqlen, ...), got shape {tuple(hidden_states.shape)}")
    shape, device = tuple(hidden_states.shape[:2]), hidden_states.device
    counts = checks.tensor("attention_mask", attention_mask, shape=shape, dtypes=MASKS, device=device) != 0
    placed = counts
    if unused_mask is not None:
        placed = counts | (checks.tensor("unused_mask", unused_mask, shape=shape, dtypes=MASKS, device=device) != 0)
    lengths = placed.sum(-1, dtype=torch.int32)
    indices = placed.flatten().nonzero().flatten()
    longest = int(lengths.max()) if len(lengths) else 0
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    packed = hidden_states.flatten(0, 1).index_select(0, indices)
    return packed, indices, cu_seqlens, longest, counts.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse of `unpad_input`: tokens (total, ...) at their indices (total,) of (batch, seqlen, ...), else 0."""
    checks.tensor("hidden_states", hidden_states)
    shape = (hidden_states.shape[0],)
    checks.tensor("indices", indices, shape=shape, dtypes=checks.INTEGERS, device=hidden_states.device)
    batch, seqlen = checks.integer("batch", batch, 0), checks.integer("seqlen", seqlen, 0)
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    padded = padded.index_copy(0, indices.long(), hidden_states)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])
