"""The plans of calls that run on the CPU: the forward walks them, and the backward walks them again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tilewise import arguments
from tilewise.api.schedules import together, together_packed
from tilewise.plan import Plan, plan_dense, plan_varlen


def plan_on_cpu(call: arguments.Call, io_bytes: int) -> Plan:
    """The plan of `attention` on the CPU."""
    batch, seqlen_q, seqlen_k, heads_q = call.sizes[:4]
    pattern = together(call.schedule, call.function, batch, heads_q, seqlen_q, seqlen_k)
    return plan_dense(*call.sizes, window=call.scores.window, schedule=pattern, io_bytes=io_bytes)


def packed_plan_on_cpu(call: arguments.Call, starts_q: list[int], starts_k: list[int], io_bytes: int) -> Plan:
    """The plan of `attention_varlen` on the CPU."""
    heads_q, heads_kv, head_dim = call.sizes[3:]
    schedules = together_packed(call.schedule, call.function, starts_q, starts_k, heads_q)
    window = call.scores.window
    return plan_varlen(
        starts_q, starts_k, heads_q, heads_kv, head_dim, window=window, schedules=schedules, io_bytes=io_bytes
    )


def full_precision() -> AbstractContextManager[Any]:
    """Autocast switched off: it would turn our float32 products into bfloat16 ones."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
