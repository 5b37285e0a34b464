"""What makes and turns schedules on a device. Who has kernels for it (gpu/schedules.py) registers them: plans know no
card.

Tensors have up to two leading dimensions, (batch or 1, heads or 1) or fewer. Nothing here waits for a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Tensors = tuple[torch.Tensor, torch.Tensor | None]


class Kernels(NamedTuple):
    """pack(blocks, whole) of bools (…, nq, nk) -> bits, whole
    scatter(counts, indices, full_counts, full_indices, num_k_blocks) -> bits, whole, faults
    select(scores, top_k, threshold, causal) -> bits, faults; causal: (seqlen_q, seqlen_k, block_q, block_k) or None
    transpose(bits, whole, num_k_blocks) -> bits, whole of keys × queries
    lists(bits, num_k_blocks, width) -> counts (batch or 1, heads or 1, nq), indices (…, width) or None without width

    bits, whole: int32 (batch or 1, heads or 1, nq, words). faults: int32 (batch or 1, heads or 1, nq), bits as FAULTS
    names them.
    """

    pack: Callable[[torch.Tensor, torch.Tensor | None], Tensors]
    scatter: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int],
        tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    ]
    select: Callable[[torch.Tensor, int | None, float | None, tuple[int, int, int, int] | None], Tensors]
    transpose: Callable[[torch.Tensor, torch.Tensor | None, int], Tensors]
    lists: Callable[[torch.Tensor, int, int | None], Tensors]


# What is wrong with a row of lists or scores: bit n of its fault word is entry n.
FAULTS = (
    "key blocks that are out of range",
    "key blocks that are repeated",
    "key blocks that are not ascending",
    "a count that is negative or more than the width",
    "negative scores",
)

_registered: list[Kernels] = []


def register(kernels: Kernels) -> None:
    _registered[:] = [kernels]


def kernels() -> Kernels:
    if not _registered:
        raise RuntimeError("no kernels for schedules on a device: import tilewise, which registers them")
    return _registered[0]
