"""Context-parallel attention: each rank has a part of the queries and of the keys, and keys travel.

pieces.py says which rows meet which keys when; here the keys are moved, `attention` runs the pieces, and states meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist

from tilewise import checks
from tilewise.api import Result, State, attention
from tilewise.scores import ScoreOptions
from tilewise.state import Accumulator, add_sinks

from .asked import SplitOptions, check_asked, sequence_lengths, without_mask
from .peers import Message, Peers
from .pieces import METHODS, ContextPlan, Method, Piece, planned
from .shards import Layout, gather_parts, merge_shards, shard_size

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ContextOptions(SplitOptions, total=False):
    """Keyword arguments of `context_attention` beside return_lse."""

    method: Method


@overload
def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ContextOptions],
) -> torch.Tensor: ...
@overload
def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[ContextOptions],
) -> State: ...
@overload
def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    **options: Unpack[ContextOptions],
) -> Result: ...
def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    method: Method = "ring",
    layout: Layout = "zigzag",
    seqlen: int | tuple[int, int] | None = None,
    return_lse: bool = False,
    timeout: float | None = None,
    backend: str = "auto",
    **options: Unpack[ScoreOptions],
) -> Result:
    """`attention` over a sequence that is split over the ranks of a process group; every rank makes the same call.

    q: (B, nq, Hq, D), k, v: (B, nk, Hkv, D), this rank's part of the sequence as `layout` splits it: "zigzag" by
    `zigzag_split`, which balances causal work; "contiguous" by `x.tensor_split(world, 1)[rank]`, for windows and for no
    mask. Any lengths: the parts may differ by rank, and may be empty. options (causal, window, scale, sinks and so on;
    the same on every rank, sinks counted once), return_lse, backend: as in `attention` over the whole sequence,
    bottom-right; alibi_slopes are not served.

    method: "ring", in which a rank computes on one part of the keys while it passes that on and receives the next, and
    holds two parts at a time; no part goes further than to the last rank that sees it. "all_gather", in which every
    rank gets all keys first: one collective and no merging, for the memory of the whole K and V.
    seqlen: of the whole sequence, or (of the queries, of the keys). Without it the ranks first exchange what they were
    called with: ValueError on all of them if they differ. That costs a small collective and, on a card, a wait of the
    CPU. With it that is saved, and calls that differ are the caller's to avoid: they may wait until the timeout.
    timeout: seconds that this rank waits for another, None for the group's own. On a card, with a timeout the CPU waits
    for each transfer; without, nothing waits but the stream, and errors come from nccl's watchdog.

    group: None for the default one. CUDA tensors go by nccl, CPU tensors by gloo. With nccl, give init_process_group
    its device_id, so that ranks with nothing to send are part of the group from the beginning.

    Returns o (B, nq, Hq, D), with return_lse also the LSE (B, Hq, nq) float32, both of this rank's rows. Raises
    TilewiseDistributedError when another rank dies or does not come in time.
    """
    asked = check_asked(q, k, v, layout, return_lse, backend, options)
    checks.choice("method", method, METHODS)
    peers = Peers("context_attention", group, timeout, q.device)
    lengths = sequence_lengths(peers, q, k, seqlen, asked, method)
    plan = planned(*lengths, peers.rank, peers.world, method, layout, False, asked.scores.window)

    pieces = Pieces(q, without_mask(options), backend, exclusive=plan.exclusive)
    if method == "ring":
        _ring(peers, plan, pieces, k, v)
    else:
        _gathered(peers, plan, pieces, k, v)
    o, lse = pieces.result(asked.scores.sinks)
    return (o, lse) if return_lse else o


@dataclass
class Pieces:
    """A rank's rows while pieces of keys come to them: q (B, n, Hq, D) and the states of its rows.

    exclusive: every row gets at most one state, kept as it comes; otherwise they meet in float32.
    """

    q: torch.Tensor
    options: dict[str, Any]  # of the scores, but for the mask and the sinks
    backend: str
    exclusive: bool

    def __post_init__(self) -> None:
        batch, rows, heads, head_dim = self.q.shape
        dtype = self.q.dtype if self.exclusive else torch.float32
        packed = (batch * rows, heads, head_dim)
        # Zeros: no row has to be looked at afterwards, which would make the CPU wait for a card.
        zeros = torch.zeros(packed, dtype=dtype, device=self.q.device)
        self._states = Accumulator(packed, dtype, exclusive=self.exclusive, o=zeros)
        self.o, self.lse = zeros.view(self.q.shape), self._states.lse.view(batch, rows, heads)

    def add(self, k: torch.Tensor, v: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Let the rows see the pieces of a block of keys, k, v (B, keys, Hkv, D)."""
        for row, rows, key, keys, window in pieces:
            these, those = slice(row, row + rows), slice(key, key + keys)
            o, lse = attention(
                self.q[:, these],
                k[:, those],
                v[:, those],
                window=None if window == (None, None) else window,
                return_lse=True,
                backend=self.backend,
                **self.options,
            )
            self._states.put(self.o[:, these], self.lse[:, these], o, lse.transpose(1, 2))

    def result(self, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """o (B, n, Hq, D) like q, lse (B, Hq, n); the sinks join here, once, when all keys were there."""
        o, lse = self.o, self.lse.transpose(1, 2)
        if sinks is not None:
            o, lse = add_sinks(o, lse, sinks)
        return o.to(self.q.dtype), lse.contiguous()


def _ring(peers: Peers, plan: ContextPlan, pieces: Pieces, k: torch.Tensor, v: torch.Tensor) -> None:
    """Compute on one block of keys while it goes to the next rank and another comes from the one before."""

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
        if step.pieces:
            block_k, block_v = (k, v) if n == 0 else message(step.keys).views(here)
            pieces.add(block_k, block_v, step.pieces)
        transfer.wait()
        here, coming = coming, here


def _gathered(peers: Peers, plan: ContextPlan, pieces: Pieces, k: torch.Tensor, v: torch.Tensor) -> None:
    """All keys on every rank, in order; then each chunk of rows is one call."""
    sizes = [shard_size(plan.layout, plan.seqlen_k, rank, plan.world) for rank in range(plan.world)]
    parts = gather_parts(peers, "keys and values", (k, v), (1, 1), sizes)
    whole_k, whole_v = (merge_shards(x, plan.layout, 1) for x in parts)
    pieces.add(whole_k, whole_v, plan.pieces)
