"""Decode over a cache that is split across ranks: each holds some tokens of every sequence, and states are merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import numpy as np
import torch
import torch.distributed as dist

from tilewise import arguments, checks
from tilewise.api import Result, State, decode
from tilewise.kvcache import PagedKVCache, PrefixCache
from tilewise.plan import DecodePlan
from tilewise.scores import DecodeOptions
from tilewise.state import add_sinks, merge_states

from .asked import Asked
from .peers import Message, Peers

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SplitCacheOptions(DecodeOptions, total=False):
    """Keyword arguments of `decode_split` beside return_lse, which decides what it returns; for type checkers."""

    group: dist.ProcessGroup | None
    tails: Sequence[bool] | None
    timeout: float | None
    check: bool
    backend: str


@overload
def decode_split(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: DecodePlan,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[SplitCacheOptions],
) -> torch.Tensor: ...
@overload
def decode_split(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: DecodePlan,
    *,
    return_lse: Literal[True],
    **options: Unpack[SplitCacheOptions],
) -> State: ...
@overload
def decode_split(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: DecodePlan,
    *,
    return_lse: bool,
    **options: Unpack[SplitCacheOptions],
) -> Result: ...
def decode_split(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: DecodePlan,
    *,
    group: dist.ProcessGroup | None = None,
    tails: Sequence[bool] | None = None,
    return_lse: bool = False,
    timeout: float | None = None,
    check: bool = False,
    backend: str = "auto",
    **options: Unpack[DecodeOptions],
) -> Result:
    """`decode` over sequences of which every rank's own cache holds a part; every rank makes the same call.

    q: (num_seqs, tokens_per_seq, Hq, D), the same on every rank, its sequences in the same order. cache, plan: this
    rank's own; `plan_decode` over the tokens that it holds, without window and chunk. Which rank holds which tokens
    does not matter, as long as one of them holds each: the queries see all of them. A rank that holds none of a
    sequence has it in its cache with no tokens.
    tails: with more than one query token a sequence, whether this rank holds the last tokens of each sequence, which
    are the queries' own: one rank holds all of them, and there they see each other causally.
    options: what is done to scores, as in `decode`; the same on every rank, sinks (Hq,) counted once.
    timeout: as in `context_attention`. check: compare the ranks' arguments first, for a collective more.

    Returns o (num_seqs, tokens_per_seq, Hq, D), with return_lse also the LSE (num_seqs, Hq, tokens_per_seq) float32:
    on every rank all of it, with the same bits. The states travel, not the keys: one all-gather of o and LSE.
    """
    pages = arguments.check_cache(cache)
    arguments.check_plan(plan, pages)
    count, tokens = len(plan.seqs), plan.tokens_per_seq
    checks.tensor(
        "q", q, shape=(count, tokens, plan.heads_q, pages.head_dim), dtypes=checks.FLOATS, device=pages.device
    )
    if plan.window is not None or plan.chunk:
        raise NotImplementedError(
            "a window or a chunk over a cache that is split across ranks: a rank does not know where in a sequence its "
            "tokens are; plan without, over a cache that holds those tokens alone that the queries see"
        )
    mask = _mask(tails, count, tokens, q.device)
    checks.integer("layer", layer, 0, pages.num_layers - 1)
    scores = arguments.check_scores(q, count, **options)
    checks.flag("return_lse", return_lse)
    peers = Peers("decode_split", group, timeout, q.device)
    if checks.flag("check", check):
        same = {"shape of q": list(q.shape), "dtype": str(q.dtype), "layer": int(layer)}
        same |= Asked("", False, scores, bool(return_lse), gradients=False).told
        _check_tails(peers.agree(same, {"tails": None if tails is None else _bits(tails)}), count, tokens)

    sinks = options.pop("sinks", None)
    o, lse = decode(q, cache, layer, plan, tree_mask=mask, return_lse=True, backend=backend, **options)
    message = Message([(o.shape, o.dtype), (lse.shape, lse.dtype)])
    found = peers.gather("gathering the states of all ranks", message.pack((o, lse), peers.buffer(message.nbytes)))
    states = [message.views(buffer) for buffer in found]
    # Widened first: rounded once, after the last thing that is done to it.
    o, lse = merge_states(torch.stack([x[0].float() for x in states]), torch.stack([x[1] for x in states]))
    if sinks is not None:
        o, lse = add_sinks(o, lse, sinks)
    o = o.to(q.dtype)
    return (o, lse.contiguous()) if return_lse else o


def _mask(tails: Sequence[bool] | None, count: int, tokens: int, device: torch.device) -> torch.Tensor | None:
    """Which of a rank's last tokens each query sees, (count, tokens, tokens): causal at a tail, all of them elsewhere.

    None where one token is asked with: it sees everything.
    """
    if tails is not None:
        if not isinstance(tails, (Sequence, np.ndarray)):
            raise TypeError(f"tails must be a list of bools, one for each sequence, got {type(tails).__name__}")
        if len(tails) != count:
            raise ValueError(f"tails must have one entry for each of the plan's {count} sequences, got {len(tails)}")
        tails = [checks.flag("tails", x) for x in tails]
    if tokens == 1:
        return None
    if tails is None:
        raise ValueError(
            f"tails must say which sequences' last tokens lie on this rank: with {tokens} query tokens a sequence they "
            "see each other causally there, and everything elsewhere; got None"
        )
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril_()
    elsewhere = torch.tensor([not x for x in tails], dtype=torch.bool).to(device)
    return causal | elsewhere[:, None, None]


def _bits(tails: Sequence[bool]) -> str:
    return np.packbits(np.asarray(tails, bool)).tobytes().hex()


def _check_tails(told: Sequence[dict[str, str | None]], count: int, tokens: int) -> None:
    """One rank, and no more, holds the last tokens of each sequence."""
    if tokens == 1:
        return
    given = [np.unpackbits(np.frombuffer(bytes.fromhex(one["tails"] or ""), np.uint8), count=count) for one in told]
    for seq, holders in enumerate(np.stack(given).sum(0).tolist()):
        if holders != 1:
            raise ValueError(f"tails must be True on one rank for sequence {seq} of the plan, got {holders} ranks")
