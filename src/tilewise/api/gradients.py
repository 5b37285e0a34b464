"""Gradients of the public calls: the forward is the call itself, the backward walks the same plan once more.

A call whose tensors require gradients becomes one node of autograd's graph. The node keeps its inputs, o and the LSE,
and nothing as large as the scores. Gradients flow from o and from the LSE to q, k, v and sinks; `alibi_slopes` and
tensors that a mask or score function captures are constants here. There are no second derivatives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from tilewise import arguments, functions
from tilewise.api.gradients_on_gpu import by_kernels, by_levels
from tilewise.api.on_cpu import full_precision, packed_plan_on_cpu, plan_on_cpu
from tilewise.api.schedules import past_lengths
from tilewise.cpu import backward
from tilewise.cpu.scoring import Scoring
from tilewise.gpu import backward as gpu_backward
from tilewise.gpu.abi import FP8
from tilewise.plan import Plan, plan_shared_prefix
from tilewise.scores import ScoreOptions

Grads = Sequence[torch.Tensor | None]
State = tuple[torch.Tensor, torch.Tensor]
KV = tuple[torch.Tensor, torch.Tensor]


def kept(rest: dict[str, Any]) -> dict[str, Any]:
    """Of a call's other options those that its node keeps: the node returns the LSE, and owns its output."""
    return {name: value for name, value in rest.items() if name not in ("return_lse", "out", "dropout_seed")}


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
        o, lse = (x.data if x._is_view() else x for x in call.forward(*tensors))  # views could not be written to
        return o, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: State) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        *tensors, o, lse = ctx.saved_tensors
        if not torch.is_grad_enabled():  # nobody keeps the graph of this
            return None, *found(ctx.call, tensors, (o, lse), grads)
        given = (ctx.call, len(tensors), *tensors, o, lse, *grads)
        return None, *NodeBackward.apply(*given)  # type: ignore[no-untyped-call]


# `apply` asks for it in every call, which is a third of the time that a node takes.
Node.forward.__signature__ = inspect.signature(Node.forward)  # type: ignore[attr-defined]


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


def check(
    q: Any,
    out: Any,
    backend: Any,
    slopes: Any = None,
    mask: Any = None,
    score: Any = None,
    descales: arguments.Descales = (None, None, None),
) -> functions.Function | None:
    """Refuse what has no gradients; the call that the node makes checks everything else. The functions, traced."""
    if isinstance(q, torch.Tensor) and q.dtype == FP8:
        raise NotImplementedError("FP8 inputs have no gradients; use bfloat16 inputs, or call it under torch.no_grad()")
    if out is not None:
        raise ValueError("out must be None where an input requires gradients: autograd keeps the output itself")
    if isinstance(slopes, torch.Tensor) and slopes.requires_grad:
        raise NotImplementedError("alibi_slopes have no gradients; use alibi_slopes.detach()")
    if isinstance(backend, str) and backend.startswith(f"{arguments.EMULATOR}:"):
        raise NotImplementedError(f'backend "{backend}" has no backward pass; use backend="emulator"')
    if isinstance(q, torch.Tensor):
        arguments.check_descales(q, descales, 1, 1)  # which are for FP8 alone
    if not isinstance(q, torch.Tensor) or (mask is None and score is None):
        return None
    function = functions.of(mask, score)
    function.check(q.device)  # what they capture
    return function


def check_kernels(q: Any, v: Any, backend: Any) -> None:
    """Refuse, before the forward runs, what no kernel would give gradients of; nothing to say of tensors on the CPU."""
    if all(isinstance(x, torch.Tensor) and x.dim() for x in (q, v)) and (q.is_cuda or backend == arguments.EMULATOR):
        gpu_backward.check_served(q, v, "cuda" if q.is_cuda else backend)


# ---- the calls -------------------------------------------------------------------------------------------------------


class _Described:
    """What `attention` and `attention_varlen` have in common. scores: options of the scores; rest: functions, schedule,
    exact, deterministic, backend. function: as it was traced in the forward: what a lambda refers to may change."""

    def __init__(
        self, run: Callable[..., Any], scores: ScoreOptions, rest: dict[str, Any], function: Any = None
    ) -> None:
        self.run, self.scores, self.rest, self.function = run, scores, rest, function
        self.captured = None if function is None else function.key

    def check_kernels(self, q: Any, v: Any) -> None:
        if not self.rest["dropout_p"]:  # what no kernel drops goes by torch's products
            check_kernels(q, v, self.rest["backend"])

    def checked(self, q: Any, k: Any, v: Any, sinks: Any, seed: Any, **packed: Any) -> arguments.Call:
        """The call as the checks describe it."""
        if self.function is not None and self.function.key != self.captured:
            raise RuntimeError(
                "a tensor that a mask or score function captures was written to after the forward, or made under "
                "torch.inference_mode(), where writes are not counted; clone() it before the call, outside of that mode"
            )
        rest = {**self.rest, "mask": None, "score": None, "descales": (None, None, None), "dropout_seed": seed}
        scores: ScoreOptions = {**self.scores, "sinks": sinks}
        call = arguments.check_call(q, k, v, scores, return_lse=True, out=None, **rest, **packed)
        return call._replace(function=self.function)


class Dense(_Described):
    """attention(q, k, v, sinks, dropout_seed)."""

    def forward(self, q: Any, k: Any, v: Any, sinks: Any, seed: Any) -> State:
        self.check_kernels(q, v)
        given = {**self.scores, "sinks": sinks, "dropout_seed": seed, "return_lse": True}
        o, lse = self.run(q, k, v, **given, **self.rest)
        return o, lse

    def backward(self, tensors: Sequence[Any], state: State, grads: Grads) -> Grads:
        q, k, v, sinks, seed = tensors
        call = self.checked(q, k, v, sinks, seed)
        if call.where != "cpu":
            return *by_kernels(call, (q, k, v), state, grads, deterministic=self.rest["deterministic"]), None
        plan = plan_on_cpu(call, q.element_size())
        batch, seqlen_q, seqlen_k = call.sizes[:3]
        starts_q, starts_k = ([b * n for b in range(batch + 1)] for n in (seqlen_q, seqlen_k))
        if (missing := past_lengths(call.schedule, starts_k)) is not None:
            k, v = (x.masked_fill(missing.view(batch, seqlen_k, 1, 1), 0.0) for x in (k, v))
        scoring = Scoring.of(call.scores, starts_q, starts_k, call.function, call.dropout)
        made = walk(plan, q, [(k, v)], scoring, sinks, backward.by_rows(state), backward.by_rows(grads))
        return made.d_q, *made.d_sources[0], made.d_sinks, None


class Packed(_Described):
    """attention_varlen(q, k, v, starts_q, starts_k, page_table, sinks, dropout_seed)."""

    def forward(self, q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, *others: Any) -> State:
        self.check_kernels(q, v)
        given = dict(zip(("page_table", "sinks", "dropout_seed"), others, strict=True))
        given = {**self.scores, **given, "return_lse": True}
        o, lse = self.run(q, k, v, starts_q, starts_k, **given, **self.rest)
        return o, lse

    def backward(self, tensors: Sequence[Any], state: State, grads: Grads) -> Grads:
        q, k, v, cu_q, cu_k, page_table, sinks, seed = tensors
        call = self.checked(q, k, v, sinks, seed, batch=len(cu_q) - 1, paged=page_table is not None)
        keys, values, of_pages = k, v, None
        if page_table is not None:  # lengths have to be known, which on a GPU makes the CPU wait
            of_pages = arguments.places_in_pages(page_table, cu_k.tolist(), k.shape[1])
            keys, values = (x.flatten(0, 1)[of_pages] for x in (k, v))
        by = self._on_cpu if call.where == "cpu" else self._by_kernels
        d_q, d_k, d_v, d_sinks = by(call, (q, keys, values), (cu_q, cu_k), sinks, state, grads)
        if of_pages is not None:  # a page may stand in the table twice
            zeros = [torch.zeros(x.flatten(0, 1).shape, dtype=torch.float32, device=x.device) for x in (k, v)]
            d_k = zeros[0].index_add_(0, of_pages, d_k.float()).view(k.shape)
            d_v = zeros[1].index_add_(0, of_pages, d_v.float()).view(v.shape)
        return d_q, d_k, d_v, None, None, None, d_sinks, None

    def _on_cpu(self, call: arguments.Call, tensors: Any, starts: Any, sinks: Any, state: State, grads: Grads) -> Any:
        q, k, v = tensors
        starts_q, starts_k = (x.tolist() for x in starts)
        if (missing := past_lengths(call.schedule, starts_k)) is not None:
            k, v = (x.masked_fill(missing[:, None, None], 0.0) for x in (k, v))
        plan = packed_plan_on_cpu(call, starts_q, starts_k, q.element_size())
        scoring = Scoring.of(call.scores, starts_q, starts_k, call.function, call.dropout)
        made = walk(plan, q, [(k, v)], scoring, sinks, backward.by_rows(state), backward.by_rows(grads))
        return made.d_q, *made.d_sources[0], made.d_sinks

    def _by_kernels(self, call: arguments.Call, tensors: Any, starts: Any, _: Any, state: State, grads: Grads) -> Any:
        q, k, _ = tensors
        longest = q.shape[0], k.shape[0]
        if len(starts[0]) > 1 and not any(x.is_cuda for x in starts):
            longest = int(starts[0].diff().max()), int(starts[1].diff().max())
        rest = {"deterministic": self.rest["deterministic"], "longest": longest}
        return by_kernels(call, tensors, state, grads, starts=arguments.starts_like(q, *starts), **rest)


@dataclass(frozen=True)
class SharedPrefix:
    """shared_prefix_attention(q, k, v, sinks, k and v of each level …). lengths: of each level, and of the own keys."""

    run: Callable[..., Any]
    scores: dict[str, Any]
    rest: dict[str, Any]
    lengths: Sequence[Any]

    def forward(self, q: Any, k: Any, v: Any, sinks: Any, *of_levels: torch.Tensor) -> State:
        check_kernels(q, v, self.rest["backend"])
        pairs = zip(of_levels[::2], of_levels[1::2], self.lengths, strict=False)
        levels = [(a, b) if n is None else (a, b, n) for a, b, n in pairs]
        given = {"sinks": sinks, "lengths": self.lengths[-1], "return_lse": True}
        o, lse = self.run(q, levels, k, v, **given, **self.scores, **self.rest)
        return o, lse

    def backward(self, tensors: Sequence[Any], state: State, grads: Grads) -> Grads:
        q, k, v, sinks, *of_levels = tensors
        sources = [*zip(of_levels[::2], of_levels[1::2], strict=True), (k, v)]
        scores = arguments.check_scores(q, len(q), sinks=sinks, **self.scores)
        if arguments.check_backend(self.rest["backend"], q, []) == "cpu":
            shapes = [(len(x), x.shape[1], n) for (x, _), n in zip(sources, self.lengths, strict=True)]
            (batch, seqlen_q, heads_q, head_dim), (heads_kv, value_dim) = q.shape, v.shape[2:]
            options = {"causal": self.scores["causal"], "io_bytes": q.element_size()}
            plan = plan_shared_prefix(batch, seqlen_q, shapes, heads_q, heads_kv, head_dim, value_dim, **options)
            made = walk(plan, q, sources, Scoring.of(scores), sinks, backward.by_rows(state), backward.by_rows(grads))
        else:
            rest = (state, grads, self.rest["deterministic"])
            d_q, d_sources = by_levels(q, sources, self.lengths, scores, *rest)
            rows = backward.Rows.of(d_q, *backward.by_rows(state), *backward.by_rows(grads))
            made = Found(d_q, d_sources, backward.of_sinks(sinks, rows))
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
    """state: o (rows, Hq, Dv) and lse (rows, Hq) with sinks in it; grads: of both, or None."""
    (o, lse), (d_o, d_lse) = state, grads
    rows = backward.Rows.of(q.reshape(*o.shape[:-1], q.shape[-1]), o, lse, d_o, d_lse)
    d_q, d_sources = backward.gradients(plan, rows, sources, scoring)
    return Found(d_q.view(q.shape), d_sources, backward.of_sinks(sinks, rows))
