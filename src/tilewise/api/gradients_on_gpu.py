"""Gradients on a card or in the emulator: what the nodes of gradients.py ask `gpu.backward` for.

Functions and schedules that a card has no kernel for, with dropout all of them, go by torch's products there,
cpu/anywhere.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from tilewise import arguments
from tilewise.api.on_cpu import full_precision
from tilewise.api.schedules import past_lengths
from tilewise.arch import serves_prefill
from tilewise.cpu.anywhere import Problem
from tilewise.cpu.backward import Rows, by_rows, of_sinks
from tilewise.cpu.scoring import Scoring
from tilewise.gpu import backward, calls
from tilewise.gpu.backward_call import GradientCall, Gradients
from tilewise.gpu.pattern import AnySchedule, stacked
from tilewise.plan.schedule import BlockSchedule
from tilewise.scores import Scores

State = tuple[torch.Tensor, torch.Tensor]
Grads = Sequence[torch.Tensor | None]
KV = tuple[torch.Tensor, torch.Tensor]
Starts = tuple[torch.Tensor, torch.Tensor]


def by_kernels(
    call: arguments.Call,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    state: State,
    grads: Grads,
    *,
    deterministic: bool,
    starts: Starts | None = None,
    longest: tuple[int, int] | None = None,
) -> Gradients:
    """Of q, k and v, dense or packed, and of sinks. state: o and lse; grads: of both, or None.

    starts: where packed sequences start, on the device of q; longest: of their queries and of their keys, at most.
    """
    scores = call.scores
    if scores.sinks is not None:
        scores = replace(scores, sinks=scores.sinks.float().contiguous())
    if call.dropout is not None:
        if not kernels_drop(call, tensors[0]):
            return _by_products(call, tensors, state, grads, starts)
        scores = dropping(call, scores, tensors[0])
    schedule = _stacked(call.schedule, tensors)
    given = (tensors, scores, state, grads, deterministic, starts, longest)
    return _of(*given, function=call.function, schedule=schedule)


def _stacked(schedule: Any, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> AnySchedule | None:
    """Schedules of packed sequences as one."""
    if schedule is None or isinstance(schedule, BlockSchedule):
        return schedule
    return stacked(schedule, tensors[0].shape[0], tensors[1].shape[0])


def kernels_drop(call: arguments.Call, q: torch.Tensor) -> bool:
    """Do kernels serve a call with dropout? They do unless there is a schedule, a function, FP8 or a wide head."""
    if call.function is not None or call.schedule is not None or not serves_prefill(q.device):
        return False
    dims = call.sizes.head_dim, call.sizes.value_dim
    return backward.kernel_of(q.device, q.dtype, *dims, dropout=True) is not None


def dropping(call: arguments.Call, scores: Scores, q: torch.Tensor) -> Scores:
    """The scores with what the call drops of their weights."""
    assert call.dropout is not None
    seed = calls.on_device(torch.as_tensor(call.dropout.seed), q)
    return replace(scores, dropout=call.dropout.p, seed=seed)


def dropped(call: arguments.Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: Any = None) -> State:
    """The state of a call with dropout that no forward kernel does: o, lse (B, Hq, Nq) or (Hq, total_q)."""
    with full_precision():
        o, lse = _problem(call, (q, k, v), starts).state()
    return o.view(*q.shape[:-1], v.shape[-1]), _as_lse(lse, q)


def _by_products(
    call: arguments.Call, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], state: Any, grads: Any, starts: Any
) -> Gradients:
    """By torch's products on the device; where sequences start has to be known here, which makes the CPU wait."""
    (o, lse), (d_o, d_lse) = by_rows(state), by_rows(grads)
    found = _problem(call, tensors, starts).gradients(o, lse, d_o, d_lse)
    d_q, d_k, d_v = (made.view(x.shape).to(x.dtype) for made, x in zip(found, tensors, strict=True))
    rows = Rows.of(tensors[0].flatten(0, -3), o, lse, d_o, d_lse)
    return Gradients(d_q, d_k, d_v, of_sinks(call.scores.sinks, rows))


def _problem(call: arguments.Call, tensors: Any, starts: Any) -> Problem:
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in tensors)
    if starts is None:
        batch, seqlen_q, seqlen_k = call.sizes[:3]
        starts_q, starts_k = ([b * n for b in range(batch + 1)] for n in (seqlen_q, seqlen_k))
    else:
        starts_q, starts_k = (x.tolist() for x in starts)
    dropout = call.dropout
    if dropout is not None:  # which waits, once
        dropout = dropout._replace(seed=int(dropout.seed))
    scoring = Scoring.of(call.scores, starts_q, starts_k, call.function, dropout)
    schedule = call.schedule
    on_host = [None if x is None else x.cpu() for x in schedule] if isinstance(schedule, (list, tuple)) else schedule
    if isinstance(on_host, BlockSchedule):
        on_host = on_host.cpu()
    if (missing := past_lengths(on_host, starts_k)) is not None:
        k, v = (x.masked_fill(missing.to(x.device)[:, None, None], 0.0) for x in (k, v))
    return Problem(q, k, v, starts_q, starts_k, scoring, call.scores.window, schedule)


def _as_lse(lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(rows, Hq) as (B, Hq, Nq) or (Hq, rows)."""
    return lse.view(q.shape[:-1]).transpose(-1, -2)


def by_levels(
    q: torch.Tensor,
    sources: Sequence[KV],
    lengths: Sequence[Sequence[int] | None],
    scores: Scores,
    state: State,
    grads: Grads,
    deterministic: bool,
) -> tuple[torch.Tensor, list[KV]]:
    """dQ, float32, and (dK, dV) of levels of prefixes and of each sequence's own keys, one call per level.

    As gpu.calls.shared_prefix: the rows of all sequences under a member stand over its keys. Weights are taken against
    the LSE of the whole row, so that each level gives its share.
    """
    d_q, d_sources = torch.zeros(q.shape, dtype=torch.float32, device=q.device), []
    for level, ((k, v), valid) in enumerate(zip(sources, lengths, strict=True)):
        rule = scores.rule if level == len(sources) - 1 else scores.rule.unmasked
        members, packed = k.shape[0], valid is not None
        rows = q.shape[0] // max(1, members) * q.shape[1]
        starts, longest, there, (keys, values) = None, None, None, (k, v)
        if valid is not None:  # what lies beyond a length is not looked at: the rest, packed
            there = torch.cat([torch.arange(n) + m * k.shape[1] for m, n in enumerate(valid)]).to(q.device)
            keys, values = (x.flatten(0, 1).index_select(0, there) for x in (k, v))
            made = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in ([rows] * members, valid)]
            starts, longest = (made[0].to(q.device), made[1].to(q.device)), (rows, max(valid, default=0))
        (its_q, o, d_o), (lse, d_lse) = (
            [_by_member(x, members, packed) for x in those] for those in ((q, state[0], grads[0]), (state[1], grads[1]))
        )
        assert its_q is not None
        given = (its_q, keys, values), rule, (o, lse), (d_o, d_lse)
        found = _of(*given, deterministic, starts, longest)
        d_q += found.d_q.view(q.shape)
        d_k, d_v = found.d_k, found.d_v
        if there is not None:
            d_k, d_v = (
                x.new_zeros(of.shape).flatten(0, 1).index_copy_(0, there, x).view(of.shape)
                for x, of in ((d_k, k), (d_v, v))
            )
        d_sources.append((d_k, d_v))
    return d_q, d_sources


def _by_member(x: torch.Tensor | None, members: int, packed: bool) -> Any:
    """q, o or dO (B, Nq, Hq, D), the LSE or its gradient (B, Hq, Nq), with all rows of a member one after another:
    (members, rows, Hq, D) and (members, Hq, rows), or packed, (members · rows, Hq, D) and (Hq, members · rows)."""
    if x is None:
        return None
    if x.dim() == 4:
        return x.flatten(0, 1) if packed else x.reshape(members, -1, *x.shape[2:])
    by_head = x.unflatten(0, (members, -1)).transpose(1, 2).flatten(2)
    return by_head.transpose(0, 1).flatten(1) if packed else by_head


def _of(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scores: Scores,
    state: Any,
    grads: Any,
    deterministic: bool,
    starts: Starts | None,
    longest: tuple[int, int] | None,
    **rest: Any,
) -> Gradients:
    """rest: what else a GradientCall has."""
    (q, k, v), (o, lse), (d_o, d_lse) = tensors, state, grads
    d_o = torch.zeros_like(o) if d_o is None else d_o.to(o.dtype)
    if d_o.stride(-1) != 1:  # what a sum hands down is one element, seen everywhere
        d_o = d_o.contiguous()
    if d_lse is not None:
        d_lse = d_lse.float().contiguous()
    if not q.numel() or not k.numel():
        return _of_nothing(q, k, v, scores.sinks, lse, d_lse)
    starts_q, starts_k = starts or (None, None)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    given = {"d_lse": d_lse, "starts_q": starts_q, "starts_k": starts_k, "max_seqlens": longest, **rest}
    return backward.gradients(GradientCall(q, k, v, o, lse, d_o, scores, deterministic=deterministic, **given))


def _of_nothing(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    lse: torch.Tensor,
    d_lse: torch.Tensor | None,
) -> Gradients:
    """No rows, or no keys: a sink alone may make an LSE."""
    d_q, d_k, d_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    d_sinks = None
    if sinks is not None:
        d_sinks = torch.zeros_like(sinks, dtype=torch.float32)
        if d_lse is not None:
            d_sinks = (torch.exp(sinks.float()[:, None] - lse) * d_lse).transpose(0, -2).flatten(1).sum(1)
    return Gradients(d_q, d_k, d_v, d_sinks)
