"""Head-parallel attention: the sequence is split outside, the heads inside; two all-to-alls turn one into the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from tilewise.api import Result, State, attention
from tilewise.scores import ScoreOptions

from .asked import SplitOptions, check_asked, sequence_lengths
from .peers import Message, Peers
from .shards import Layout, deal_parts, merge_shards, shard_size

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
    deterministic: bool = False,
    backend: str = "auto",
    **options: Unpack[ScoreOptions],
) -> Result:
    """`attention` over a sequence that is split over ranks, computed by heads; every rank makes the same call.

    q: (B, nq, Hq, D), k, v: (B, nk, Hkv, D), this rank's part of the sequence, all heads. An all-to-all gives rank r
    the whole sequence of query heads [r · Hq / W, (r + 1) · Hq / W) and of the KV heads that they read; one call of
    `attention`; an all-to-all back. Hq is a multiple of the W ranks; Hkv is too, or W is a multiple of Hkv and a KV
    head goes to several ranks. sinks: (Hq,), all of them on every rank.

    Every head costs the same, so the work is even in any layout and no states are merged. `context_attention` has the
    other arguments, and does not depend on the number of heads. Gradients take two all-to-alls more, and mean what they
    mean there; each rank's share of those of sinks is that of its heads.

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
    whole_q, whole_k, whole_v = _ToHeads.apply(peers, layout, lengths, q, k, v)  # type: ignore[no-untyped-call]
    heads, sinks = heads_q // world, asked.scores.sinks
    if sinks is not None:
        options["sinks"] = sinks[rank * heads : (rank + 1) * heads]
    rest: dict[str, Any] = {"deterministic": deterministic, "backend": backend}
    result = attention(whole_q, whole_k, whole_v, return_lse=asked.return_lse, **rest, **options)
    given = (result,) if isinstance(result, torch.Tensor) else result
    o, *lse = _ToRows.apply(peers, layout, *given)  # type: ignore[no-untyped-call]
    return (o, lse[0]) if asked.return_lse else o


# ---- as nodes of autograd's graph: each is the other's backward pass -------------------------------------------------


class _ToHeads(torch.autograd.Function):
    """q, k, v: rows of all heads -> all rows of this rank's heads."""

    @staticmethod
    def forward(
        ctx: Any, peers: Peers, layout: str, lengths: tuple[int, int], *qkv: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.peers, ctx.layout, ctx.heads = peers, layout, [x.shape[2] for x in qkv]
        seqlen_q, seqlen_k = lengths
        dealt = zip(qkv, (OF_O,) * 3, (seqlen_q, seqlen_k, seqlen_k), strict=True)
        return tuple(_to_heads(peers, "dealing out heads of q, k and v", list(dealt), layout))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = deal_parts(ctx.peers, "collecting the gradients of q, k and v", grads, [OF_O.rows] * 3, ctx.layout)
        summed = []
        for by_rank, heads in zip(parts, ctx.heads, strict=True):
            each = by_rank[0].shape[2]
            batch, rows, _, head_dim = by_rank[0].shape
            total = torch.zeros((batch, rows, heads, head_dim), dtype=torch.float32, device=by_rank[0].device)
            for rank, part in enumerate(by_rank):  # a KV head that several ranks share gets the gradients of all
                first = _first_head(heads, rank, ctx.peers.world)
                total[:, :, first : first + each] += part
            summed.append(total.to(by_rank[0].dtype))
        return None, None, None, *summed


class _ToRows(torch.autograd.Function):
    """o and perhaps the LSE: all rows of this rank's heads -> this rank's rows of all heads."""

    @staticmethod
    def forward(ctx: Any, peers: Peers, layout: str, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.peers, ctx.layout, ctx.seqlen = peers, layout, state[0].shape[1]
        axes = (OF_O, OF_LSE)[: len(state)]
        parts = deal_parts(peers, "collecting the rows of o", state, [at.rows for at in axes], layout)
        return tuple(torch.cat(by_rank, at.heads) for by_rank, at in zip(parts, axes, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dealt = [(x, at, ctx.seqlen) for x, at in zip(grads, (OF_O, OF_LSE), strict=False)]
        return None, None, *_to_heads(ctx.peers, "dealing out the gradients of o", dealt, ctx.layout)


# ---- what travels ----------------------------------------------------------------------------------------------------


class Axes(NamedTuple):
    """Which dimension of a tensor is which."""

    rows: int
    heads: int


OF_O, OF_LSE = Axes(1, 2), Axes(2, 1)  # (B, N, heads, D) and (B, heads, N)


def _first_head(heads: int, rank: int, world: int) -> int:
    """Of those that go to a rank; with fewer heads than ranks, the one that it shares."""
    return rank * heads // world


def _to_heads(
    peers: Peers, what: str, tensors: Sequence[tuple[torch.Tensor, Axes, int]], layout: str
) -> list[torch.Tensor]:
    """Rows of all heads -> all rows of this rank's heads. tensors: each with its axes and the length of the whole."""
    world = peers.world
    each = [max(1, x.shape[at.heads] // world) for x, at, _ in tensors]

    def message(rank: int) -> Message:
        """What any rank gets from this one."""
        parts = []
        for (x, at, seqlen), heads in zip(tensors, each, strict=True):
            shape = list(x.shape)
            shape[at.rows], shape[at.heads] = shard_size(layout, seqlen, rank, world), heads
            parts.append((shape, x.dtype))
        return Message(parts)

    mine = message(peers.rank)
    outgoing = peers.buffer(world * mine.nbytes)
    for rank, into in enumerate(outgoing.split([mine.nbytes] * world)):
        parts = [
            x.narrow(at.heads, _first_head(x.shape[at.heads], rank, world), heads)
            for (x, at, _), heads in zip(tensors, each, strict=True)
        ]
        mine.pack(parts, into)
    messages = [message(rank) for rank in range(world)]
    found = peers.all_to_all(what, outgoing, [mine.nbytes] * world, [m.nbytes for m in messages])
    by_rank = [m.views(buffer) for m, buffer in zip(messages, found, strict=True)]
    return [
        merge_shards(parts, layout, at.rows)
        for parts, (_, at, _) in zip(zip(*by_rank, strict=True), tensors, strict=True)
    ]
