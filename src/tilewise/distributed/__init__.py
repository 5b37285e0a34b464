"""Attention over several processes: the sequence, the heads or the cache split over the ranks of a process group.

    context_attention   the sequence split over ranks; keys and values go round a ring, or are gathered
    head_attention      the same shards in and out; in between each rank has the whole sequence of some heads
    decode_split        decode over a cache of which each rank holds a part of every sequence

Nothing here is new mathematics: states over disjoint keys merge exactly (state.py), so a split is a question of who
computes which tiles and what travels. Transport is torch.distributed's: nccl for CUDA tensors, gloo for CPU tensors. A
rank that dies or does not come makes the others raise `TilewiseDistributedError` within the timeout.
"""

from .context import context_attention
from .decode import decode_split
from .heads import head_attention
from .peers import TilewiseDistributedError
from .pieces import ContextPlan, Piece, Step, plan_context
from .shards import zigzag_gather, zigzag_merge, zigzag_split

__all__ = [
    "ContextPlan",
    "Piece",
    "Step",
    "TilewiseDistributedError",
    "context_attention",
    "decode_split",
    "head_attention",
    "plan_context",
    "zigzag_gather",
    "zigzag_merge",
    "zigzag_split",
]
