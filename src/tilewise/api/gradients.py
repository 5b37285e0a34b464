"""Gradients of the public calls: the forward is the call itself, the backward walks the same plan once more.

A call whose tensors require gradients becomes one node of autograd's graph. The node keeps its inputs, o and the LSE,
and nothing as large as the scores. Gradients flow from o and from the LSE to q, k, v and sinks; `alibi_slopes` and
tensors that a mask or score function captures are constants here. There are no second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from tilewise import arguments, functions
from tilewise.api.on_cpu import full_precision, packed_plan_on_cpu, plan_on_cpu
from tilewise.api.schedules import past_lengths
from tilewise.cpu import backward
from tilewise.cpu.scoring import Scoring
from tilewise.gpu.abi import FP8
from tilewise.plan import Plan, plan_shared_prefix
from tilewise.scores import ScoreOptions

Grads = Sequence[torch.Tensor | None]
State = tuple[torch.Tensor, torch.Tensor]
KV = tuple[torch.Tensor, torch.Tensor]


def kept(rest: dict[str, Any]) -> dict[str, Any]:
    """Of a call's other options those that its node keeps: the node returns the LSE, and owns its output."""
    return {name: value for name, value in rest.items() if name not in ("return_lse", "out")}


def asked(state: State, return_lse: bool) -> torch.Tensor | State:
    """What the caller gets."""
    return state if return_lse else state[0]


class Call(Protocol):
    """A call as a node of autograd's graph."""

    def forward(self, *tensors: Any) -> State:
        """(o, lse), of the node's tensors."""

    def backward(self, tensors: Sequence[Any], state: State, grads: Grads) -> Grads:
        """A gradient, or None, for each of the tensors; state: what forward returned; grads: of o and of the LSE."""


class Node(torch.autograd.Function):
    """A call and its tensors, of which some may be None."""

    @staticmethod
    def forward(call: Call, *tensors: Any) -> State:
        return call.forward(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: State) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        *tensors, o, lse = ctx.saved_tensors
        given = (ctx.call, len(tensors), *tensors, o, lse, *grads)
        return None, *NodeBackward.apply(*given)  # type: ignore[no-untyped-call]


class NodeBackward(torch.autograd.Function):
    """The backward pass as a node of its own, for whoever keeps its graph (torch.func.grad always does)."""

    @staticmethod
    def forward(call: Call, count: int, *given: Any) -> tuple[torch.Tensor | None, ...]:
        return found(call, given[:count], given[count : count + 2], given[count + 2 :])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        refuse_second()


def found(call: Call, tensors: Sequence[Any], state: Any, grads: Grads) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the call's tensors, each of its tensor's dtype and contiguous."""
    with full_precision():
        made = zip(call.backward(tensors, state, grads), tensors, strict=True)
        return tuple(None if grad is None else grad.to(x.dtype).contiguous() for grad, x in made)


def refuse_second() -> NoReturn:
    raise NotImplementedError(
        "attention has no second derivatives; use torch.nn.functional.scaled_dot_product_attention with "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for them"
    )


def apply(call: Call, *tensors: Any) -> State:
    """The node's (o, lse)."""
    o, lse = Node.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return o, lse


def check(q: Any, out: Any, backend: Any, slopes: Any = None, mask: Any = None, score: Any = None) -> None:
    """Refuse what has no gradients; the call that the node makes checks everything else."""
    if isinstance(q, torch.Tensor) and q.dtype == FP8:
        raise NotImplementedError("FP8 inputs have no gradients; use bfloat16 inputs, or call it under torch.no_grad()")
    if out is not None:
        raise ValueError("out must be None where an input requires gradients: autograd keeps the output itself")
    if isinstance(slopes, torch.Tensor) and slopes.requires_grad:
        raise NotImplementedError("alibi_slopes have no gradients; use alibi_slopes.detach()")
    if backend not in ("auto", "cpu") or (isinstance(q, torch.Tensor) and q.device.type != "cpu"):
        raise NotImplementedError(
            "an input requires gradients, and GPU kernels have no backward pass; use CPU tensors, or call it under "
            "torch.no_grad()"
        )
    if isinstance(q, torch.Tensor) and not (mask is None and score is None):
        functions.of(mask, score).check(q.device)  # what they capture


# ---- the calls -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dense:
    """attention(q, k, v, sinks). scores: options of the scores; rest: functions, schedule, exact, deterministic, …"""

    run: Callable[..., Any]
    scores: ScoreOptions
    rest: dict[str, Any]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> State:
        o, lse = self.run(q, k, v, return_lse=True, **{**self.scores, "sinks": sinks}, **self.rest)
        return o, lse

    def backward(self, tensors: Sequence[Any], state: State, grads: Grads) -> Grads:
        q, k, v, sinks = tensors
        call = checked(self, q, k, v, sinks)
        plan = plan_on_cpu(call, q.element_size())
        batch, seqlen_q, seqlen_k = call.sizes[:3]
        starts_q, starts_k = ([b * n for b in range(batch + 1)] for n in (seqlen_q, seqlen_k))
        if (missing := past_lengths(call.schedule, starts_k)) is not None:
            k, v = (x.masked_fill(missing.view(batch, seqlen_k, 1, 1), 0.0) for x in (k, v))
        scoring = Scoring.of(call.scores, starts_q, starts_k, call.function)
        made = walk(plan, q, [(k, v)], scoring, sinks, by_rows(state), by_rows(grads))
        return made.d_q, *made.d_sources[0], made.d_sinks


@dataclass(frozen=True)
class Packed:
    """attention_varlen(q, k, v, starts_q, starts_k, page_table, sinks), the starts and the table being constants."""

    run: Callable[..., Any]
    scores: ScoreOptions
    rest: dict[str, Any]

    def forward(self, q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, page_table: Any, sinks: Any) -> State:
        given = {**self.scores, "sinks": sinks, "page_table": page_table, "return_lse": True}
        o, lse = self.run(q, k, v, starts_q, starts_k, **given, **self.rest)
        return o, lse

    def backward(self, tensors: Sequence[Any], state: State, grads: Grads) -> Grads:
        q, k, v, cu_q, cu_k, page_table, sinks = tensors
        starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
        paged = page_table is not None
        call = checked(self, q, k, v, sinks, batch=len(starts_q) - 1, paged=paged)
        keys, values = (arguments.gather(x, page_table, starts_k) if paged else x for x in (k, v))
        if (missing := past_lengths(call.schedule, starts_k)) is not None:
            keys, values = (x.masked_fill(missing[:, None, None], 0.0) for x in (keys, values))
        plan = packed_plan_on_cpu(call, starts_q, starts_k, q.element_size())
        scoring = Scoring.of(call.scores, starts_q, starts_k, call.function)
        made = walk(plan, q, [(keys, values)], scoring, sinks, by_rows(state), by_rows(grads))
        d_k, d_v = made.d_sources[0]
        if paged:
            index = arguments.places_in_pages(page_table, starts_k, k.shape[1])
            d_k, d_v = (_onto_pages(x, index, k.shape) for x in (d_k, d_v))
        return made.d_q, d_k, d_v, None, None, None, made.d_sinks


@dataclass(frozen=True)
class SharedPrefix:
    """shared_prefix_attention(q, k, v, sinks, k and v of each level …). lengths: of each level, and of the own keys."""

    run: Callable[..., Any]
    scores: dict[str, Any]
    rest: dict[str, Any]
    lengths: Sequence[Any]

    def forward(self, q: Any, k: Any, v: Any, sinks: Any, *of_levels: torch.Tensor) -> State:
        pairs = zip(of_levels[::2], of_levels[1::2], self.lengths, strict=False)
        levels = [(a, b) if n is None else (a, b, n) for a, b, n in pairs]
        given = {"sinks": sinks, "lengths": self.lengths[-1], "return_lse": True}
        o, lse = self.run(q, levels, k, v, **given, **self.scores, **self.rest)
        return o, lse

    def backward(self, tensors: Sequence[Any], state: State, grads: Grads) -> Grads:
        q, k, v, sinks, *of_levels = tensors
        sources = [*zip(of_levels[::2], of_levels[1::2], strict=True), (k, v)]
        shapes = [
            (len(x), x.shape[1], None if n is None else arguments.check_lengths("lengths", n, *x.shape[:2]))
            for (x, _), n in zip(sources, self.lengths, strict=True)
        ]
        scores = arguments.check_scores(q, len(q), sinks=sinks, **self.scores)
        (batch, seqlen_q, heads_q, head_dim), heads_kv = q.shape, k.shape[2]
        options = {"causal": self.scores["causal"], "io_bytes": q.element_size()}
        plan = plan_shared_prefix(batch, seqlen_q, shapes, heads_q, heads_kv, head_dim, **options)
        made = walk(plan, q, sources, Scoring.of(scores), sinks, by_rows(state), by_rows(grads))
        *levels, own = made.d_sources
        return made.d_q, *own, made.d_sinks, *(x for level in levels for x in level)


# ---- what they have in common ----------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Gradients, float32: of q, of each source's k and v, of sinks."""

    d_q: torch.Tensor
    d_sources: list[KV]
    d_sinks: torch.Tensor | None


def walk(
    plan: Plan,
    q: torch.Tensor,
    sources: Sequence[KV],
    scoring: Scoring,
    sinks: torch.Tensor | None,
    state: State,
    grads: Grads,
) -> Found:
    """state: o (rows, Hq, D) and lse (rows, Hq) with sinks in it; grads: of both, or None."""
    (o, lse), (d_o, d_lse) = state, grads
    d_o = torch.zeros_like(o) if d_o is None else d_o
    rows = backward.Rows.of(q.reshape(o.shape), o, lse, d_o, d_lse)
    d_q, d_sources = backward.gradients(plan, rows, sources, scoring)
    d_sinks = None
    if sinks is not None:  # one more key per row, whose value is 0: dP = 0
        d_sinks = -(torch.exp(sinks.float() - rows.lse) * rows.delta).sum(0)
    return Found(d_q.view(q.shape), d_sources, d_sinks)


def by_rows(given: Any) -> Any:
    """o and lse, or their gradients, dense or packed, as (rows, Hq, D) and (rows, Hq)."""
    o, lse = given
    if o is not None:
        o = o.reshape(-1, *o.shape[-2:])
    if lse is not None:
        lse = lse.transpose(-1, -2).reshape(-1, lse.shape[-2])
    return o, lse


def checked(of: Dense | Packed, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, **packed: Any) -> Any:
    """The call as the checks describe it."""
    scores: ScoreOptions = {**of.scores, "sinks": sinks}
    none: dict[str, Any] = {"descales": (None, None, None), "return_lse": True, "out": None}
    return arguments.check_call(q, k, v, scores, **of.rest, **none, **packed)


def _onto_pages(x: torch.Tensor, index: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Gradients of gathered tokens (tokens, heads, D) as those of the pages; a page may stand in the table twice."""
    return x.new_zeros(shape).flatten(0, 1).index_add_(0, index, x).view(shape)
