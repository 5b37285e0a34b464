"""How a sequence is split over ranks: which positions a rank holds, in which order, for any length.

A sequence of N positions is cut into chunks as `torch.tensor_split` cuts: the first N mod C of C chunks have one
position more, and with N < C the last ones are empty.

    "contiguous"    W chunks, rank r holds chunk r: `x.tensor_split(W, dim)[r]`, joined again by `torch.cat`
    "zigzag"        2W chunks, rank r holds chunk r, then chunk 2W − 1 − r: `zigzag_split` and `zigzag_merge`

Under a causal mask the late positions see most keys. Zig-zag gives each rank an early chunk and a late one, which
together see as many keys as any other rank's two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from tilewise import arguments, checks

from .peers import Message, Peers, check_group

Layout = Literal["zigzag", "contiguous"]
LAYOUTS = ("zigzag", "contiguous")


class Chunk(NamedTuple):
    """Positions [start, stop) of the whole sequence."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def chunks_of(layout: str, seqlen: int, rank: int, world: int) -> tuple[Chunk, ...]:
    """The chunks that a rank holds, in the order in which it holds them."""
    count = world if layout == "contiguous" else 2 * world
    least, larger = divmod(seqlen, count)

    def chunk(c: int) -> Chunk:
        start = c * least + min(c, larger)
        return Chunk(start, start + least + (c < larger))

    return (chunk(rank),) if layout == "contiguous" else (chunk(rank), chunk(count - 1 - rank))


def shard_size(layout: str, seqlen: int, rank: int, world: int) -> int:
    """How many positions of a sequence a rank holds."""
    return sum(chunk.size for chunk in chunks_of(layout, seqlen, rank, world))


def check_sizes(name: str, layout: str, seqlen: int, sizes: Sequence[int | None]) -> None:
    """ValueError unless each rank's shard has the size that the layout gives it; None is not looked at."""
    for rank, size in enumerate(sizes):
        wanted = shard_size(layout, seqlen, rank, len(sizes))
        if size not in (None, wanted):
            by = "tilewise.distributed.zigzag_split" if layout == "zigzag" else "torch.tensor_split"
            raise ValueError(
                f"{name} must hold {wanted} of the {seqlen} positions on rank {rank} of {len(sizes)} in layout "
                f"{layout!r}, got {size}; split with {by}"
            )


def merge_shards(shards: Sequence[torch.Tensor], layout: str, dim: int) -> torch.Tensor:
    """All ranks' shards, in the order of ranks, as the whole sequence."""
    if layout == "contiguous":
        return torch.cat(list(shards), dim)
    seqlen, world = sum(x.shape[dim] for x in shards), len(shards)
    early, late = [], []
    for rank, x in enumerate(shards):
        first, second = chunks_of(layout, seqlen, rank, world)
        early.append(x.narrow(dim, 0, first.size))
        late.append(x.narrow(dim, first.size, second.size))
    return torch.cat(early + late[::-1], dim)


def rank_part(x: torch.Tensor, layout: str, rank: int, world: int, dim: int) -> torch.Tensor:
    """A rank's shard of a whole sequence."""
    chunks = chunks_of(layout, x.shape[dim], rank, world)
    return torch.cat([x.narrow(dim, c.start, c.size) for c in chunks], dim)


def zigzag_split(
    x: torch.Tensor,
    *,
    rank: int | None = None,
    world: int | None = None,
    group: dist.ProcessGroup | None = None,
    dim: int = 1,
) -> torch.Tensor:
    """A rank's part of a whole sequence, for layout "zigzag": chunks r and 2W − 1 − r of 2W, along `dim`.

    x: (..., N, ...), the same on every rank; any N. rank, world: of the process group if not given. The positions that
    a rank holds, for rotary embeddings, are `zigzag_split(torch.arange(N), dim=0)`. No communication.
    """
    axis = _check_axis("x", x, dim)
    if (rank is None) != (world is None):
        raise ValueError(f"rank and world go together, got rank={rank} and world={world}")
    if rank is None or world is None:
        members = check_group(group)
        rank, world = dist.get_rank(members), dist.get_world_size(members)
    checks.integer("world", world, 1)
    checks.integer("rank", rank, 0, world - 1)
    return rank_part(x, "zigzag", rank, world, axis)


def zigzag_merge(shards: Sequence[torch.Tensor], *, dim: int = 1) -> torch.Tensor:
    """The whole sequence from every rank's `zigzag_split`, in the order of ranks. No communication.

    An LSE (B, H, N) has its positions on dim 2.
    """
    if not isinstance(shards, (list, tuple)) or not shards:
        raise TypeError(f"shards must be a list of every rank's tensor, got {type(shards).__name__} of {shards!r:.40}")
    axis = _check_axis("shards[0]", shards[0], dim)
    for rank, x in enumerate(shards):
        shape: list[int | str] = [*shards[0].shape]
        shape[axis] = "seqlen"
        checks.tensor(f"shards[{rank}]", x, shape=shape, dtypes=(shards[0].dtype,), device=shards[0].device)
    sizes = [x.shape[axis] for x in shards]
    check_sizes("shards", "zigzag", sum(sizes), sizes)
    return merge_shards(shards, "zigzag", axis)


def zigzag_gather(
    x: torch.Tensor, *, group: dist.ProcessGroup | None = None, dim: int = 1, timeout: float | None = None
) -> torch.Tensor:
    """The whole sequence, on every rank, from this rank's part of it.

    x: (..., n, ...), what `zigzag_split` gave or what `context_attention` made of it (an LSE with dim=2). Waits for the
    other ranks: see `context_attention` about timeout. The gradient of x is the sum of what all ranks' losses say of
    it, so every rank has to run its backward pass.
    """
    axis = _check_axis("x", x, dim)
    peers = Peers("zigzag_gather", group, timeout, x.device)
    rest = [n for d, n in enumerate(x.shape) if d != axis]
    same = {"shape": rest, "dtype": str(x.dtype), "dim": axis, "gradients": arguments.wants_gradients(x)}
    sizes = [one["seqlen"] for one in peers.agree(same, {"seqlen": x.shape[axis]})]
    check_sizes("x", "zigzag", sum(sizes), sizes)
    whole: torch.Tensor = _Gathered.apply(x, peers, axis, sizes)  # type: ignore[no-untyped-call]
    return whole


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peers: Peers, axis: int, sizes: Sequence[int]) -> torch.Tensor:
        ctx.peers, ctx.axis = peers, axis
        return merge_shards(gather_parts(peers, "parts of x", [x], [axis], sizes)[0], "zigzag", axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_whole: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d_x,) = sum_parts(ctx.peers, "gradients of x", [d_whole.float()], [ctx.axis], "zigzag")
        return d_x.to(d_whole.dtype), None, None, None


def gather_parts(
    peers: Peers, what: str, tensors: Sequence[torch.Tensor], dims: Sequence[int], sizes: Sequence[int]
) -> list[list[torch.Tensor]]:
    """Every rank's tensors, which differ in the size of one dimension each: for each tensor a list by rank.

    sizes: of that dimension, by rank. The messages are as long as the longest, which a collective asks for.
    """

    def message(size: int) -> Message:
        shapes = [(*x.shape[:d], size, *x.shape[d + 1 :]) for x, d in zip(tensors, dims, strict=True)]
        return Message([(shape, x.dtype) for shape, x in zip(shapes, tensors, strict=True)])

    outgoing = peers.buffer(message(max(sizes)).nbytes)
    message(sizes[peers.rank]).pack(tensors, outgoing)
    found = peers.gather(f"gathering {what} of all ranks", outgoing)
    by_rank = [message(size).views(buffer) for size, buffer in zip(sizes, found, strict=True)]
    return [list(parts) for parts in zip(*by_rank, strict=True)]


def deal_parts(
    peers: Peers, what: str, tensors: Sequence[torch.Tensor], dims: Sequence[int], layout: str
) -> list[list[torch.Tensor]]:
    """This rank's part, along one dimension each, of every rank's whole tensors: for each tensor a list by rank."""
    dealt = [
        [rank_part(x, layout, rank, peers.world, d) for x, d in zip(tensors, dims, strict=True)]
        for rank in range(peers.world)
    ]
    messages = [Message([(x.shape, x.dtype) for x in parts]) for parts in dealt]
    sizes = [m.nbytes for m in messages]
    outgoing = peers.buffer(sum(sizes))
    for m, parts, into in zip(messages, dealt, outgoing.split(sizes), strict=True):
        m.pack(parts, into)
    mine = messages[peers.rank]
    found = peers.all_to_all(what, outgoing, sizes, [mine.nbytes] * peers.world)
    return [list(parts) for parts in zip(*(mine.views(buffer) for buffer in found), strict=True)]


def sum_parts(
    peers: Peers, what: str, tensors: Sequence[torch.Tensor], dims: Sequence[int], layout: str
) -> list[torch.Tensor]:
    """This rank's part of the sums over all ranks of whole tensors, added in the order of ranks."""
    parts = deal_parts(peers, f"adding up {what} of all ranks", tensors, dims, layout)
    return [torch.stack(by_rank).sum(0) for by_rank in parts]


def _check_axis(name: str, x: Any, dim: Any) -> int:
    dims = checks.tensor(name, x).dim()
    return checks.integer("dim", dim, -dims, dims - 1) % dims
