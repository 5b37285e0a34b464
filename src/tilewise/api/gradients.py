"""Gradients of the public calls: the forward is the call itself, the backward walks the same plan once more.

A call whose tensors require gradients becomes one node of autograd's graph. The node keeps its inputs, o and the LSE,
and nothing as large as the scores. Gradients flow from o and from the LSE to q, k, v and sinks; `alibi_slopes` and
tensors that a mask or score function captures are constants here. There are no second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from tilewise import arguments, functions
from tilewise.api.on_cpu import full_precision, packed_plan_on_cpu, plan_on_cpu
from tilewise.cpu import backward
from tilewise.cpu.scoring import Scoring
from tilewise.gpu.abi import FP8
from tilewise.plan import Plan, plan_shared_prefix
from tilewise.scores import ScoreOptions

Grads = Sequence[torch.Tensor | None]
State = tuple[torch.Tensor, torch.Tensor]
KV = tuple[torch.Tensor, torch.Tensor]


def on_cpu(q: Any, *others: Any) -> bool:
    """Is q on the CPU, and does autograd ask for gradients of one of the tensors?"""
    tensors = [x for x in (q, *others) if isinstance(x, torch.Tensor)]
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors) and tensors[0].device.type == "cpu"


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
        found = NodeBackward.apply(ctx.call, len(tensors), *tensors, o, lse, *grads)  # type: ignore[no-untyped-call]
        return None, *found


class NodeBackward(torch.autograd.Function):
    """The backward pass as a node of its own, for whoever keeps its graph (torch.func.grad always does)."""

    @staticmethod
    def forward(call: Call, count: int, *given: Any) -> tuple[torch.Tensor | None, ...]:
        tensors, (o, lse, *grads) = given[:count], given[count:]
        with full_precision():
            found = call.backward(tensors, (o, lse), grads)
        pairs = zip(found, tensors, strict=True)
        return tuple(None if grad is None else grad.to(x.dtype) for grad, x in pairs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        raise NotImplementedError(
            "attention has no second derivatives; use torch.nn.functional.scaled_dot_product_attention with "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for them"
        )


def apply(call: Call, *tensors: Any) -> State:
    """The node's (o, lse)."""
    o, lse = Node.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return o, lse


def check(q: Any, out: Any, backend: Any, options: dict[str, Any]) -> None:
    """Refuse what has no gradients."""
    if isinstance(q, torch.Tensor) and q.dtype == FP8:
        raise NotImplementedError("FP8 inputs have no gradients; use bfloat16 inputs, or call it under torch.no_grad()")
    if out is not None:
        raise ValueError("out must be None where an input requires gradients: autograd keeps the output itself")
    if backend not in ("auto", "cpu"):
        raise NotImplementedError(f'backend "{backend}" has no backward pass; use backend="cpu" and CPU tensors')
    slopes = options.get("alibi_slopes")
    if isinstance(slopes, torch.Tensor) and slopes.requires_grad:
        raise NotImplementedError("alibi_slopes have no gradients here; detach() them, or write them as a score of ops")
    if options.get("mask") is not None or options.get("score") is not None:
        functions.of(options.get("mask"), options.get("score")).check(q.device)


# ---- the calls -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dense:
    """attention(q, k, v, sinks). scores: options of the scores; rest: functions, schedule, exact."""

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
        starts = ([b * n for b in range(batch + 1)] for n in (seqlen_q, seqlen_k))
        scoring = Scoring.of(call.scores, *starts, call.function)
        found = walk(plan, q, [(k, v)], scoring, sinks, by_rows(state), by_rows(grads))
        return found.d_q, *found.d_sources[0], found.d_sinks


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
        sources = k, v
        if paged:
            sources = tuple(arguments.gather(x, page_table, starts_k) for x in sources)
        plan = packed_plan_on_cpu(call, starts_q, starts_k, q.element_size())
        scoring = Scoring.of(call.scores, starts_q, starts_k, call.function)
        found = walk(plan, q, [sources], scoring, sinks, by_rows(state), by_rows(grads))
        d_k, d_v = found.d_sources[0]
        if paged:
            index = arguments.places_in_pages(page_table, starts_k, k.shape[1])
            d_k, d_v = (_onto_pages(x, index, k.shape) for x in (d_k, d_v))
        return found.d_q, d_k, d_v, None, None, None, found.d_sinks


@dataclass(frozen=True)
class SharedPrefix:
    """shared_prefix_attention(q, k, v, sinks, k and v of each level …). lengths: of each level, and of the own keys."""

    run: Callable[..., Any]
    options: dict[str, Any]
    lengths: Sequence[Any]

    def forward(self, q: Any, k: Any, v: Any, sinks: Any, *of_levels: torch.Tensor) -> State:
        levels = list(zip(of_levels[::2], of_levels[1::2], self.lengths, strict=False))
        kept = [(a, b) if n is None else (a, b, n) for a, b, n in levels]
        given = {"sinks": sinks, "lengths": self.lengths[-1], "return_lse": True}
        o, lse = self.run(q, kept, k, v, **given, **self.options)
        return o, lse

    def backward(self, tensors: Sequence[Any], state: State, grads: Grads) -> Grads:
        q, k, v, sinks, *of_levels = tensors
        sources = [*zip(of_levels[::2], of_levels[1::2], strict=True), (k, v)]
        shapes = [
            (len(x), x.shape[1], None if n is None else arguments.check_lengths("lengths", n, *x.shape[:2]))
            for (x, _), n in zip(sources, self.lengths, strict=True)
        ]
        scores = arguments.check_scores(q, len(q), sinks=sinks, **self.options)
        heads, causal = (q.shape[2], k.shape[2], q.shape[3]), self.options["causal"]
        plan = plan_shared_prefix(*q.shape[:2], shapes, *heads, causal=causal, io_bytes=q.element_size())
        found = walk(plan, q, sources, Scoring.of(scores), sinks, by_rows(state), by_rows(grads))
        *levels, own = found.d_sources
        return found.d_q, *own, found.d_sinks, *(x for level in levels for x in level)


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
    d_sources = backward.gradients(plan, rows, sources, scoring, flash=d_lse is None)
    d_sinks = None
    if sinks is not None:  # one more key per row, whose value is 0: dP = 0
        d_sinks = -(torch.exp(sinks.float() - rows.lse) * rows.delta).sum(0)
    return Found(rows.d_q.view(q.shape), d_sources, d_sinks)


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
    none: dict[str, Any] = {"descales": (None, None, None), "return_lse": True, "out": None, "backend": "auto"}
    return arguments.check_call(q, k, v, scores, **of.rest, **none, **packed)


def _onto_pages(x: torch.Tensor, index: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Gradients of gathered tokens (tokens, heads, D) as those of the pages; a page may stand in the table twice."""
    return x.new_zeros(shape).flatten(0, 1).index_add_(0, index, x).view(shape)
