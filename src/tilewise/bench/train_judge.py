"""How gradients are judged: by the tolerance rule, for some heads of some sequences, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import reference
from ..plan import Window
from ..plan.tiles import window_band
from .measure import Check

PAIRS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 25}
Gradients = Sequence[torch.Tensor]  # of q, k and v
Seen = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (rows, 1) and (1, keys) of a sequence -> which are seen
# What dropout multiplies weights with: sequence, query head, rows and keys as above -> (rows, keys)
Factors = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


def banded(causal: bool, window: Window | None) -> Seen:
    """The rows of a sequence under its window, or all in view."""
    return lambda q, k: window_band(window, causal).allows(k - q)


def gradient_check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_o: torch.Tensor,
    starts: Sequence[int],
    seen: Seen,
    factors: Factors | None = None,
) -> Callable[..., Check]:
    """q, d_o (total, Hq, D), k and v (total, Hkv, D), packed; sequence b has rows and keys starts[b] … starts[b + 1].

    The answer is the gradients of q, k and v, of these shapes or with the batch apart. Looked at are the first KV head
    of the first sequence and the last one of the last, with the query heads that read them.
    leeway, of the judge: how often its error may be what the rule allows; peers are timed here, and not tested.
    """
    heads_kv = k.shape[1]
    group = q.shape[1] // heads_kv
    places = sorted({(0, 0), (len(starts) - 2, heads_kv - 1)})
    expected: dict[tuple[int, int], tuple[Gradients, Gradients]] = {}

    def expect(b: int, head: int) -> tuple[Gradients, Gradients]:
        rows, heads = slice(starts[b], starts[b + 1]), slice(head * group, (head + 1) * group)
        given = [x[rows, h].detach() for x, h in ((q, heads), (k, slice(head, head + 1)), (v, slice(head, head + 1)))]
        of_o = d_o[rows, heads]
        dropped = None if factors is None else lambda h, rows, keys: factors(b, head * group + h, rows, keys)
        return (
            _gradients(given, of_o, seen, dropped, torch.float64),
            _gradients(given, of_o, seen, dropped, q.dtype),
        )

    def check(answer: Any, leeway: float = 1.0) -> Check:
        worst = Check(True, 0.0, 0.0)
        got = [x.detach().flatten(0, -3) for x in answer]
        for name, x, like in zip(("dq", "dk", "dv"), got, (q, k, v), strict=True):
            if x.shape != like.shape:
                return Check(False, math.inf, 0.0, f"{name} has shape {tuple(x.shape)} instead of {tuple(like.shape)}")
            if not torch.isfinite(x).all():
                return Check(False, math.inf, 0.0, f"NaN or infinity in {name}")
        for b, head in places:
            if (b, head) not in expected:  # each kernel of the problem is judged by the same answers
                expected[b, head] = expect(b, head)
            rows, heads = slice(starts[b], starts[b + 1]), slice(head * group, (head + 1) * group)
            mine = [x[rows, h] for x, h in zip(got, (heads, *[slice(head, head + 1)] * 2), strict=True)]
            for name, x, exact, honest in zip(("dq", "dk", "dv"), mine, *expected[b, head], strict=True):
                verdict = reference.judge(x, exact, honest)
                baseline = (honest.double() - exact).abs().max().item()
                found = Check(
                    verdict.error <= leeway * verdict.allowed, verdict.error, baseline, verdict.reason, verdict.allowed
                )
                if not found.ok:
                    return Check(False, found.error, baseline, f"{name}: {found.reason}", found.allowed)
                worst = max(worst, found, key=lambda one: one.error)
        return worst

    return check


def _gradients(
    given: Gradients,
    d_o: torch.Tensor,
    seen: Seen,
    dropped: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] | None,
    dtype: torch.dtype,
) -> Gradients:
    """Of one sequence's q (N, group, D) and k, v (N, 1, D), by autograd through plain mathematics in `dtype`, some rows
    at a time; sums over rows and query heads are float64."""
    q, k, v = (x.to(dtype) for x in given)
    scale, rows = q.shape[-1] ** -0.5, max(1, PAIRS_AT_ONCE[q.device.type] // len(k))
    place = torch.arange(len(k), device=q.device)
    d_q = torch.empty_like(q)
    d_k, d_v = (torch.zeros_like(x, dtype=torch.float64) for x in (k, v))
    for head in range(q.shape[1]):
        for start in range(0, len(q), rows):
            some = slice(start, start + rows)
            leaves = [x.detach().requires_grad_() for x in (q[some, head], k[:, 0], v[:, 0])]
            with torch.enable_grad():
                s = (leaves[0] @ leaves[1].T * scale).masked_fill(~seen(place[some, None], place[None]), -math.inf)
                p = s.softmax(-1)
                if dropped is not None:
                    p = p * dropped(head, place[some, None], place[None]).to(dtype)
                o = p @ leaves[2]
                found = torch.autograd.grad(o, leaves, d_o[some, head].to(dtype))
            d_q[some, head] = found[0]
            d_k[:, 0] += found[1]
            d_v[:, 0] += found[2]
    return d_q, d_k.to(dtype), d_v.to(dtype)
