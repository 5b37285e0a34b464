"""What the public calls become while code is traced: operators of `torch.ops.tilewise`, which a graph can hold.

integrations/torch_ops.py registers those operators over the public calls; this file only names them, so that api.py
needs to know nothing that is built on top of it. Graphs hold neither plans nor caches: `remember` lets the operator
find both by the plan's number, and keeps neither alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from tilewise import arguments
from tilewise.kvcache import PagedKVCache
from tilewise.plan import DecodePlan

if TYPE_CHECKING:
    from tilewise.kvcache import PrefixCache

State = tuple[torch.Tensor, torch.Tensor]
Result = torch.Tensor | State

_plans: WeakValueDictionary[int, DecodePlan] = WeakValueDictionary()
_caches: WeakValueDictionary[int, PagedKVCache] = WeakValueDictionary()


def remember(plan: DecodePlan, cache: PagedKVCache) -> DecodePlan:
    """The plan itself, which `recall` now finds by its serial number, as long as the caller keeps both."""
    _plans[plan.serial] = plan
    _caches[cache.serial] = cache
    return plan


def recall(serial: int) -> tuple[DecodePlan, PagedKVCache]:
    """The plan of that number and its cache; ValueError if one of them is gone."""
    plan = _plans.get(serial)
    cache = None if plan is None else _caches.get(plan.cache_serial)
    if plan is None or cache is None:
        lost = "plan" if plan is None else "the cache of plan"
        raise ValueError(f"{lost} {serial} is not there any more; keep plans and caches while compiled code uses them")
    return plan, cache


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: Any, schedule: Any, out: Any, **options: Any
) -> Result:
    """attention() in a graph."""
    _refuse(schedule=schedule, out=out)
    left, right = window or (None, None)
    result = torch.ops.tilewise.attention(q, k, v, window_left=left, window_right=right, **options)
    return _asked(result, options["return_lse"])


def attention_varlen(*tensors: torch.Tensor, window: Any, schedule: Any, out: Any, **options: Any) -> Result:
    """attention_varlen() in a graph; tensors: q, k, v, cu_seqlens_q, cu_seqlens_k."""
    _refuse(schedule=schedule, out=out)
    left, right = window or (None, None)
    result = torch.ops.tilewise.attention_varlen(*tensors, window_left=left, window_right=right, **options)
    return _asked(result, options["return_lse"])


def decode(
    q: torch.Tensor, cache: PagedKVCache | PrefixCache, layer: int, plan: DecodePlan, *, out: Any, **options: Any
) -> Result:
    """decode() in a graph, which holds neither cache nor plan: each call brings its own."""
    _refuse(out=out)
    pages = arguments.check_cache(cache)
    arguments.check_plan(plan, pages)
    result = torch.ops.tilewise.decode(q, pages._k, pages._v, layer, plan.serial, **options)
    return _asked(result, options["return_lse"])


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} cannot be part of a compiled graph; leave it out, or call from a function under "
                "torch.compiler.disable"
            )


def _asked(result: State, return_lse: bool) -> Result:
    return result if return_lse else result[0]
