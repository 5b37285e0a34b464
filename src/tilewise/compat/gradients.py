"""Attention with gradients: forward by the public calls, backward by torch operations over one sequence at a time.

The public calls have no backward pass. Where an input requires gradients, the same kernels make the output, so that a
value never depends on whether somebody differentiates it, and `attend_by_torch` is differentiated in the backward pass.
That costs the memory of one sequence's scores in float32, heads · seqlen_q · seqlen_k: right, and fit for tests and
short sequences; it is not a fast way to train.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tilewise import api
from tilewise.plan.tiles import window_band
from tilewise.scores import ScoreOptions


class Inputs(NamedTuple):
    """The tensors of a call: dense, q (B, Nq, Hq, D) and k, v (B, Nk, Hkv, D); or packed as in `attention_varlen`.

    starts: cu_seqlens of q and of k, None if dense. page_table: None if k and v are not paged.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    starts_q: torch.Tensor | None = None
    starts_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None

    @property
    def differentiable(self) -> tuple[torch.Tensor | None, ...]:
        return self[:5]


def attend(inputs: Inputs, asked: ScoreOptions, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o, and the LSE if asked for, with gradients wherever torch would give them."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs.differentiable):
        o, lse = _Attention.apply(asked, return_lse, *inputs)  # type: ignore[no-untyped-call]
        return o, lse
    return forward(inputs, asked, return_lse)


def forward(inputs: Inputs, asked: ScoreOptions, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same without gradients: one public call."""
    q, k, v, slopes, sinks, starts_q, starts_k, page_table = inputs
    options: dict[str, Any] = {**asked, "alibi_slopes": slopes, "sinks": sinks, "return_lse": return_lse}
    if starts_q is None or starts_k is None:
        result = api.attention(q, k, v, **options)
    else:
        result = api.attention_varlen(q, k, v, starts_q, starts_k, page_table=page_table, **options)
    return (result, None) if isinstance(result, torch.Tensor) else result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, asked: ScoreOptions, return_lse: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.asked = asked
        ctx.save_for_backward(*tensors)
        return forward(Inputs(*tensors), asked, return_lse)

    @staticmethod
    def backward(ctx: Any, d_o: torch.Tensor, d_lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True; going on would leave its graph without what happens here
            raise NotImplementedError(
                "attention with gradients has no second derivatives; use create_graph=False here, or "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        inputs = Inputs(*ctx.saved_tensors)
        wanted = ctx.needs_input_grad[2 : 2 + len(inputs.differentiable)]
        # Sums over sequences (of slopes, of sinks, of shared pages) are float32 too.
        sums = [
            torch.zeros_like(x, dtype=torch.float32) if want and x is not None else None
            for x, want in zip(inputs.differentiable, wanted, strict=True)
        ]
        for places, lse_place in _sequences(inputs):
            parts: list[Any] = [
                None if x is None else x[place].detach().requires_grad_(want)
                for x, place, want in zip(inputs.differentiable, places, wanted, strict=True)
            ]
            with torch.autocast(d_o.device.type, enabled=False):
                with torch.enable_grad():
                    o, lse = attend_by_torch(*parts, asked=ctx.asked)
                if not o.requires_grad:  # a sequence without keys
                    continue
                outputs, given = [o], [d_o[places[0]]]
                if d_lse is not None:
                    outputs, given = [o, lse], [*given, d_lse[lse_place]]
                leaves = [x for x in parts if x is not None and x.requires_grad]
                grads = iter(torch.autograd.grad(outputs, leaves, given, allow_unused=True))
            for total, place in zip(sums, places, strict=True):
                grad = None if total is None else next(grads)
                if total is not None and grad is not None:
                    if isinstance(place, tuple) and place:  # a page may stand in a table twice
                        total.index_put_(place, grad.float(), accumulate=True)
                    else:
                        total[place] += grad
        grads_out = [
            None if total is None or x is None else total.to(x.dtype)
            for total, x in zip(sums, inputs.differentiable, strict=True)
        ]
        return (None, None, *grads_out, None, None, None)


def _sequences(inputs: Inputs) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """For each sequence, where its part of q, k, v, slopes and sinks is, and its part of the LSE."""
    every: tuple[Any, ...] = ()  # x[()] is x
    per_sequence = inputs.slopes is not None and inputs.slopes.dim() == 2
    if inputs.starts_q is None or inputs.starts_k is None:
        for b in range(inputs.q.shape[0]):
            yield (b, b, b, b if per_sequence else every, every), b
        return
    bounds = zip(pairwise(inputs.starts_q.tolist()), pairwise(inputs.starts_k.tolist()), strict=True)
    for b, ((q0, q1), (k0, k1)) in enumerate(bounds):
        rows = slice(q0, q1)
        keys: Any = slice(k0, k1)
        if inputs.page_table is not None:
            page_size = inputs.k.shape[1]
            token = torch.arange(k1 - k0, device=inputs.k.device)
            keys = (inputs.page_table[b].long()[token // page_size], token % page_size)
        yield (rows, keys, keys, b if per_sequence else every, every), (slice(None), rows)


def attend_by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    asked: ScoreOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence by differentiable torch operations, all in float32, with the meaning of `tilewise.attention`.

    q: (Nq, Hq, D); k, v: (Nk, Hkv, D); slopes, sinks: (Hq,) or None -> o (Nq, Hq, D) in q's dtype, lse (Hq, Nq). A row
    with no visible key gives 0 and −inf, and gradients of 0.
    """
    (seqlen_q, heads, head_dim), (seqlen_k, heads_kv) = q.shape, k.shape[:2]
    wide = q.float().reshape(seqlen_q, heads_kv, heads // heads_kv, head_dim)
    scores = torch.einsum("ihgd,jhd->hgij", wide, k.float()).flatten(0, 1)
    scale, softcap = asked.get("scale"), asked.get("softcap", 0.0)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    with torch.device(q.device):
        offset = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    if slopes is not None:
        scores = scores - slopes.float()[:, None, None] * offset.abs()
    band = window_band(asked.get("window"), asked.get("causal", False))
    scores = scores.masked_fill(~band.allows(offset), -math.inf)
    if sinks is not None:  # one more key, whose value is 0
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, seqlen_q, 1)), -1)
    if scores.shape[-1] == 0:
        return torch.zeros_like(q), q.new_full((heads, seqlen_q), -math.inf, dtype=torch.float32)
    top = scores.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)  # before it is divided by and its log taken: both would give NaN gradients
    lse = torch.where(empty, -math.inf, top + torch.log(total))[..., 0]
    weights = (weights / total)[..., :seqlen_k].unflatten(0, (heads_kv, heads // heads_kv))
    o = torch.einsum("hgij,jhd->ihgd", weights, v.float()).reshape(q.shape)
    return o.to(q.dtype), lse
