"""Head-parallel attention: the sequence is split outside, the heads inside; two all-to-alls turn one into the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
import torch.distributed as dist

from tilewise.api import Result, State, attention
from tilewise.scores import ScoreOptions

from .asked import SplitOptions, check_asked, sequence_lengths
from .peers import Message, Peers
from .shards import Layout, chunks_of, merge_shards, shard_size

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def head_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[SplitOptions],
) -> torch.Tensor: ...
@overload
def head_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[SplitOptions],
) -> State: ...
@overload
def head_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    **options: Unpack[SplitOptions],
) -> Result: ...
def head_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "contiguous",
    seqlen: int | tuple[int, int] | None = None,
    return_lse: bool = False,
    timeout: float | None = None,
    backend: str = "auto",
    **options: Unpack[ScoreOptions],
) -> Result:
    """`attention` over a sequence that is split over ranks, computed by heads; every rank makes the same call.

    q: (B, nq, Hq, D), k, v: (B, nk, Hkv, D), this rank's part of the sequence, all heads. An all-to-all gives rank r
    the whole sequence of query heads [r · Hq / W, (r + 1) · Hq / W) and of the KV heads that they read; one call of
    `attention`; an all-to-all back. Hq is a multiple of the W ranks; Hkv is too, or W is a multiple of Hkv and a KV
    head goes to several ranks. sinks: (Hq,), all of them on every rank.

    Every head costs the same, so the work is even in any layout and no states are merged. `context_attention` has the
    other arguments, and does not depend on the number of heads.

    Returns o (B, nq, Hq, D), with return_lse also the LSE (B, Hq, nq) float32, both of this rank's rows.
    """
    asked = check_asked(q, k, v, layout, return_lse, backend, options)
    heads_q, heads_kv = q.shape[2], k.shape[2]
    peers = Peers("head_attention", group, timeout, q.device)
    rank, world = peers.rank, peers.world
    if heads_q % world or (heads_kv % world and world % heads_kv):
        raise NotImplementedError(
            f"head_attention deals whole heads to {world} ranks: it takes q with a multiple of {world} heads, and k "
            f"with a multiple or a divisor of {world}; got {heads_q} and {heads_kv}; use context_attention"
        )
    lengths = sequence_lengths(peers, q, k, seqlen, asked)
    whole_q, whole_k, whole_v = _to_heads(peers, q, k, v, layout, lengths)
    heads, sinks = heads_q // world, asked.scores.sinks
    if sinks is not None:
        options["sinks"] = sinks[rank * heads : (rank + 1) * heads]
    result = attention(whole_q, whole_k, whole_v, return_lse=asked.return_lse, backend=backend, **options)
    if isinstance(result, torch.Tensor):
        return _to_rows(peers, [result], layout)[0]
    o, lse = _to_rows(peers, result, layout)
    return o, lse


def _to_heads(
    peers: Peers, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, seqlens: tuple[int, int]
) -> list[torch.Tensor]:
    """Rows of all heads -> all rows of this rank's heads: q (B, Nq, Hq / W, D), k, v (B, Nk, Hkv / W or 1, D)."""
    world, heads_kv = peers.world, k.shape[2]
    each_q, each_kv = q.shape[2] // world, max(1, heads_kv // world)

    def message(rank: int) -> Message:
        """What any rank gets from this one."""
        rows, keys = (shard_size(layout, n, rank, world) for n in seqlens)
        sizes = ((rows, each_q), (keys, each_kv), (keys, each_kv))
        return Message([((q.shape[0], n, heads, q.shape[3]), q.dtype) for n, heads in sizes])

    mine = message(peers.rank)
    outgoing = peers.buffer(world * mine.nbytes)
    for rank, into in enumerate(outgoing.split([mine.nbytes] * world)):
        first = rank * heads_kv // world  # with fewer KV heads than ranks, the one that the rank shares
        of_q, of_kv = slice(rank * each_q, (rank + 1) * each_q), slice(first, first + each_kv)
        mine.pack((q[:, :, of_q], k[:, :, of_kv], v[:, :, of_kv]), into)
    messages = [message(rank) for rank in range(world)]
    found = peers.all_to_all(
        "dealing out heads of q, k and v", outgoing, [mine.nbytes] * world, [m.nbytes for m in messages]
    )
    by_rank = [m.views(buffer) for m, buffer in zip(messages, found, strict=True)]
    return [merge_shards(parts, layout, 1) for parts in zip(*by_rank, strict=True)]


def _to_rows(peers: Peers, result: Sequence[torch.Tensor], layout: str) -> list[torch.Tensor]:
    """All rows of some heads -> some rows of all heads. result: o (B, Nq, heads, D), perhaps lse (B, heads, Nq)."""
    seqlen = result[0].shape[1]
    row_dims, head_dims = (1, 2), (2, 1)  # of o, of lse
    shards = []
    for rank in range(peers.world):
        chunks = chunks_of(layout, seqlen, rank, peers.world)
        shards.append(
            [
                torch.cat([x.narrow(d, c.start, c.size) for c in chunks], d)
                for x, d in zip(result, row_dims, strict=False)
            ]
        )
    messages = [Message([(x.shape, x.dtype) for x in shard]) for shard in shards]
    sizes = [m.nbytes for m in messages]
    outgoing = peers.buffer(sum(sizes))
    for m, shard, into in zip(messages, shards, outgoing.split(sizes), strict=True):
        m.pack(shard, into)
    mine = messages[peers.rank]
    found = peers.all_to_all("collecting the rows of o", outgoing, sizes, [mine.nbytes] * peers.world)
    by_rank = [mine.views(buffer) for buffer in found]
    return [torch.cat(parts, d) for parts, d in zip(zip(*by_rank, strict=True), head_dims, strict=False)]
