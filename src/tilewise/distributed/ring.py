"""How keys come to the rows of a rank: round a ring, or all at once; and how the gradients of keys come home."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .peers import Message, Peers, Transfer
from .pieces import ContextPlan, Step
from .shards import gather_parts, merge_shards, shard_size, sum_parts

KV = tuple[torch.Tensor, torch.Tensor]


class Block(NamedTuple):
    """A step of a rank's plan and the keys of it, k, v (B, keys, Hkv, D)."""

    step: Step
    k: torch.Tensor
    v: torch.Tensor


def blocks(peers: Peers, plan: ContextPlan, k: torch.Tensor, v: torch.Tensor) -> Iterator[Block]:
    """Every block of keys that the plan names, k, v being this rank's own."""
    if plan.method == "ring":
        yield from _around(peers, plan, k, v)
    else:
        yield _gathered(peers, plan, k, v)


def _around(peers: Peers, plan: ContextPlan, k: torch.Tensor, v: torch.Tensor) -> Iterator[Block]:
    """One block of keys after the other: while a block is here, it goes to the next rank, and another comes."""

    def message(keys: int) -> Message:
        shape = (k.shape[0], keys, *k.shape[2:])
        return Message([(shape, k.dtype), (shape, v.dtype)])

    after, before = (peers.rank + 1) % peers.world, (peers.rank - 1) % peers.world
    moves = any(step.sends or step.receives for step in plan.steps)
    largest = message(max(step.keys for step in plan.steps))
    # Two buffers: what is computed on and sent, and what comes meanwhile. They change places after each step.
    here, coming = (peers.buffer(largest.nbytes if moves else 0) for _ in range(2))
    if plan.steps[0].sends:
        message(k.shape[1]).pack((k, v), here)
    for n, step in enumerate(plan.steps):
        size = message(step.keys).nbytes
        following = message(plan.steps[n + 1].keys).nbytes if step.receives else 0
        transfer = peers.start(
            f"keys and values in step {n + 1} of {len(plan.steps)} of the ring",
            (here[:size], after) if step.sends else None,
            (coming[:following], before) if step.receives else None,
        )
        block = (k, v) if n == 0 else message(step.keys).views(here) if step.pieces else (k[:, :0], v[:, :0])
        yield Block(step, *block)
        transfer.wait()
        here, coming = coming, here


def _gathered(peers: Peers, plan: ContextPlan, k: torch.Tensor, v: torch.Tensor) -> Block:
    """All keys on every rank, in order; then each chunk of rows is one call."""
    parts = gather_parts(peers, "keys and values", (k, v), (1, 1), _sizes(plan))
    return Block(plan.steps[0], *(merge_shards(x, plan.layout, 1) for x in parts))


def _sizes(plan: ContextPlan) -> list[int]:
    return [shard_size(plan.layout, plan.seqlen_k, rank, plan.world) for rank in range(plan.world)]


# ---- gradients -------------------------------------------------------------------------------------------------------


def key_gradients(
    peers: Peers, plan: ContextPlan, k: torch.Tensor, v: torch.Tensor, share: Callable[[Block], KV]
) -> KV:
    """dK and dV of this rank's keys k, v (B, keys, Hkv, D), float32, summed over the rows of all ranks.

    The keys travel once more. share: float32 dK and dV of a block by this rank's rows alone.
    """
    if plan.method == "ring":
        sums = Sums(peers, plan, k)
        for n, block in enumerate(blocks(peers, plan, k, v)):
            sums.add(n, share(block) if n == 0 or block.step.pieces else None)
        return sums.home()
    (block,) = blocks(peers, plan, k, v)
    d_k, d_v = sum_parts(peers, "gradients of keys and values", share(block), (1, 1), plan.layout)
    return d_k, d_v


class Sums:
    """Gradients of blocks of keys on their way round the ring: they follow their keys one step behind, every rank adds
    its share, and the last one sends them home. k (B, keys, Hkv, D): this rank's own, of which v has the shape."""

    def __init__(self, peers: Peers, plan: ContextPlan, k: torch.Tensor) -> None:
        self._peers, self._plan, self._shape = peers, plan, k.shape
        largest = self._message(max(step.keys for step in plan.steps)).nbytes
        self._outgoing, self._incoming = (peers.buffer(largest) for _ in range(2))
        self._own = peers.buffer(self._message(k.shape[1]).nbytes)
        self._moving: list[Transfer] = []

    def _message(self, keys: int) -> Message:
        batch, _, *rest = self._shape
        return Message([((batch, keys, *rest), torch.float32)] * 2)

    def add(self, n: int, share: KV | None) -> None:
        """Add this rank's share of the block of step n, None for nothing, and pass the sums on."""
        steps, message = self._plan.steps, self._message(self._plan.steps[n].keys)
        came = n > 0 and steps[n - 1].receives
        self._wait()
        if n == 0 and share is not None:
            message.pack(share, self._own)
        elif came and share is not None:
            for total, more in zip(message.views(self._incoming), share, strict=True):
                total += more
        if n == 0 or came:
            sums = self._own if n == 0 else self._incoming
            self._outgoing[: message.nbytes].copy_(sums[: message.nbytes])
        self._pass_on(n, self._outgoing[: message.nbytes], came)

    def _pass_on(self, n: int, sums: torch.Tensor, came: bool) -> None:
        """To the next rank as the keys go, and home from the last one: two transfers, in one order on all ranks."""
        peers, steps, step = self._peers, self._plan.steps, self._plan.steps[n]
        after, before, last = ((peers.rank + d) % peers.world for d in (1, -1, n))
        what = f"gradients of keys and values in step {n + 1} of {len(steps)} of the ring"
        following = None
        if step.receives:
            following = self._incoming[: self._message(steps[n + 1].keys).nbytes], before
        onward = peers.start(what, (sums, after) if step.sends else None, following)
        source = peers.rank if step.source is None else step.source
        homeward = peers.start(
            what,
            (sums, source) if came and not step.sends else None,
            (self._own, last) if n == self._plan.hops > 0 else None,
        )
        self._moving = [onward, homeward]

    def _wait(self) -> None:
        for transfer in self._moving:
            transfer.wait()

    def home(self) -> KV:
        """dK and dV of this rank's own keys, when all steps are done."""
        self._wait()
        d_k, d_v = self._message(self._shape[1]).views(self._own)
        return d_k, d_v
