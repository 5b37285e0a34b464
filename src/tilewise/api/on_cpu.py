"""Dense and packed calls on the CPU, and their plans, which the backward walks again."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from tilewise import arguments, checks, cpu
from tilewise.api.schedules import past_lengths, together, together_packed
from tilewise.cpu.scoring import Scoring
from tilewise.gpu.abi import FP8
from tilewise.plan import Plan, plan_dense, plan_varlen


def plan_on_cpu(call: arguments.Call, io_bytes: int) -> Plan:
    """The plan of `attention` on the CPU."""
    batch, seqlen_q, seqlen_k, heads_q = call.sizes[:4]
    pattern = together(call.schedule, call.function, batch, heads_q, seqlen_q, seqlen_k)
    scores = call.scores
    return plan_dense(*call.sizes, window=scores.window, chunk=scores.chunk, schedule=pattern, io_bytes=io_bytes)


def packed_plan_on_cpu(call: arguments.Call, starts_q: list[int], starts_k: list[int], io_bytes: int) -> Plan:
    """The plan of `attention_varlen` on the CPU."""
    heads_q, heads_kv, *dims = call.sizes[3:]
    schedules = together_packed(call.schedule, call.function, starts_q, starts_k, heads_q)
    rules: dict[str, Any] = {"window": call.scores.window, "chunk": call.scores.chunk}
    return plan_varlen(starts_q, starts_k, heads_q, heads_kv, *dims, **rules, schedules=schedules, io_bytes=io_bytes)


def full_precision() -> AbstractContextManager[Any]:
    """Autocast switched off: it would turn our float32 products into bfloat16 ones."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return nullcontext()
    off = ExitStack()
    for kind in kinds:
        off.enter_context(torch.autocast(kind, enabled=False))
    return off


def dense_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: arguments.Call,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` on the CPU: o (B, Nq, Hq, Dv) like q (bfloat16 for FP8), lse (B, Hq, Nq)."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = call.sizes[:5]
    fp8 = q.dtype == FP8
    if fp8:
        q, k, v = (arguments.widened(x, by, heads_kv) for x, by in zip((q, k, v), call.descales, strict=True))
    plan = plan_on_cpu(call, q.element_size())
    starts_q, starts_k = ([b * n for b in range(batch + 1)] for n in (seqlen_q, seqlen_k))
    if (missing := past_lengths(call.schedule, starts_k)) is not None:
        k, v = (x.masked_fill(missing.view(batch, seqlen_k, 1, 1), 0.0) for x in (k, v))
    scoring = Scoring.of(call.scores, starts_q, starts_k, call.function, call.dropout)
    with full_precision():
        place = None if fp8 else checks.place(out, q, k, v)
        o, lse = cpu.run(plan, q, [(k, v)], scoring, place)
    return o.bfloat16() if fp8 else o, lse.view(batch, seqlen_q, heads_q).transpose(1, 2)


def packed_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: arguments.Call,
    starts_q: list[int],
    starts_k: list[int],
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_varlen` on the CPU, k and v packed: o (total_q, Hq, Dv) like q (bfloat16 for FP8), lse (Hq,
    total_q)."""
    heads_kv = call.sizes.heads_kv
    fp8 = q.dtype == FP8
    if fp8:
        counts = [torch.tensor(starts).diff() for starts in (starts_q, starts_k, starts_k)]
        q, k, v = (
            arguments.widened(x, None if descale is None else descale.repeat_interleave(count, 0), heads_kv)
            for x, descale, count in zip((q, k, v), call.descales, counts, strict=True)
        )
    if (missing := past_lengths(call.schedule, starts_k)) is not None:
        k, v = (x.masked_fill(missing[:, None, None], 0.0) for x in (k, v))
    plan = packed_plan_on_cpu(call, starts_q, starts_k, q.element_size())
    scoring = Scoring.of(call.scores, starts_q, starts_k, call.function, call.dropout)
    with full_precision():
        place = None if fp8 else checks.place(out, q, k, v)
        o, lse = cpu.run(plan, q, [(k, v)], scoring, place)
    return o.bfloat16() if fp8 else o, lse.transpose(0, 1)
