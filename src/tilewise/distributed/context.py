"""Context-parallel attention: each rank has a part of the queries and of the keys, and keys travel.

pieces.py says which rows meet which keys when, and ring.py moves the keys; here `attention` runs the pieces and states
meet, and in the backward pass the pieces' gradients do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist

from tilewise import checks
from tilewise.api import Result, State, attention, gradients
from tilewise.api.backward import attention_backward
from tilewise.scores import ScoreOptions
from tilewise.state import Accumulator, add_sinks

from .asked import SplitOptions, check_asked, sequence_lengths, without_mask
from .peers import Peers
from .pieces import METHODS, ContextPlan, Method, Piece, planned
from .ring import KV, Block, blocks, key_gradients
from .shards import Layout

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
    deterministic: bool = False,
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

    Gradients: of q, k and v those of the losses of all ranks together, so every rank runs its backward pass, in which
    the keys travel once more and their gradients, in float32, home. Of sinks each rank gets the share of its own rows,
    to be added up over ranks as those of a model's weights are. The LSE of every row is kept, and no key of others.
    deterministic: as in `attention`; what ranks add up is added in one order in any case.

    group: None for the default one. CUDA tensors go by nccl, CPU tensors by gloo. With nccl, give init_process_group
    its device_id, so that ranks with nothing to send are part of the group from the beginning.

    Returns o (B, nq, Hq, D), with return_lse also the LSE (B, Hq, nq) float32, both of this rank's rows. Raises
    TilewiseDistributedError when another rank dies or does not come in time.
    """
    asked = check_asked(q, k, v, layout, return_lse, backend, options)
    checks.choice("method", method, METHODS)
    checks.flag("deterministic", deterministic)
    peers = Peers("context_attention", group, timeout, q.device)
    lengths = sequence_lengths(peers, q, k, seqlen, asked, method)
    plan = planned(*lengths, peers.rank, peers.world, method, layout, False, asked.scores.window)
    call = Context(peers, plan, without_mask(options), deterministic, backend)
    given = (q, k, v, asked.scores.sinks)
    o, lse = gradients.apply(call, *given) if asked.gradients else call.forward(*given)
    return (o, lse) if return_lse else o


@dataclass(frozen=True)
class Context:
    """A rank's part in a call of `context_attention`, as a node of autograd's graph.

    options: of the scores, but for the mask and the sinks.
    """

    peers: Peers
    plan: ContextPlan
    options: dict[str, Any]
    deterministic: bool
    backend: str

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> State:
        pieces = Pieces(q, self.options, self.backend, exclusive=self.plan.exclusive)
        for step, block_k, block_v in blocks(self.peers, self.plan, k, v):
            pieces.add(block_k, block_v, step.pieces)
        return pieces.result(sinks)

    def backward(
        self, tensors: Sequence[Any], state: State, grads: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """Of q, of this rank's keys by all ranks' rows, and of sinks by this rank's rows."""
        q, k, v, sinks = tensors
        rest = {"deterministic": self.deterministic, "backend": self.backend}
        rows = RowGradients(q, state, grads, {**self.options, **rest})
        d_k, d_v = key_gradients(self.peers, self.plan, k, v, rows.share)
        return rows.d_q, d_k, d_v, None if sinks is None else rows.of_sinks(sinks)


class RowGradients:
    """Gradients that a rank's rows q (B, n, Hq, D) give, while blocks of keys come to them.

    state: the rows' o (B, n, Hq, D) and lse (B, Hq, n) over all keys, sinks in it; grads: of both, None for 0.
    options: of `attention_backward`, but for the mask.
    """

    def __init__(
        self,
        q: torch.Tensor,
        state: State,
        grads: Sequence[torch.Tensor | None],
        options: dict[str, Any],
    ) -> None:
        self.q, (self.o, self.lse), (d_o, self.d_lse) = q, state, grads
        self.d_o = torch.zeros_like(self.o) if d_o is None else d_o
        self.d_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        self._options = options

    def share(self, block: Block) -> KV:
        """dK and dV of a block, float32; dQ is added to."""
        d_k, d_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (block.k, block.v))
        for row, rows, key, keys, window in block.step.pieces:
            these, those = slice(row, row + rows), slice(key, key + keys)
            found = attention_backward(
                self.d_o[:, these],
                self.q[:, these],
                block.k[:, those],
                block.v[:, those],
                self.o[:, these],
                self.lse[:, :, these],
                d_lse=None if self.d_lse is None else self.d_lse[:, :, these],
                window=None if window == (None, None) else window,
                **self._options,
            )
            self.d_q[:, these] += found.d_q
            d_k[:, those] += found.d_k
            d_v[:, those] += found.d_v
        return d_k, d_v

    def of_sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        """A sink is one more key, whose value is 0."""
        weight = torch.exp(sinks.float()[:, None] - self.lse).masked_fill_(self.lse == -math.inf, 0.0)
        delta = (self.d_o.float() * self.o.float()).sum(-1).transpose(1, 2)
        if self.d_lse is not None:
            delta = delta - self.d_lse
        return -(weight * delta).sum((0, 2))


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
