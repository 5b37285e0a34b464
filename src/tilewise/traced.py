"""What the public calls become while code is traced: operators of `torch.ops.tilewise`, which a graph can hold.

integrations/torch_ops.py registers those operators over the public calls; this file only names them, so that api/
needs to know nothing that is built on top of it. Graphs hold neither plans nor caches: `remember` lets the operator
find both by the plan's number, and keeps neither alive. Nor do they hold schedules and functions: a call with one of
those breaks the graph (`outside`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from tilewise import arguments, graphs
from tilewise.kvcache import PagedKVCache
from tilewise.plan import DecodePlan

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tilewise.arguments import Descales
    from tilewise.kvcache import PrefixCache
    from tilewise.scores import ScoreOptions

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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: Descales,
    *,
    out: Any,
    exact: bool,
    return_lse: bool,
    backend: str,
    **options: Unpack[ScoreOptions],
) -> Result:
    """attention() in a graph."""
    _refuse(out=out)
    rest = {"exact": exact, "return_lse": return_lse, "backend": backend}
    result = torch.ops.tilewise.attention(q, k, v, **_named(descales), **_by_sides(options), **rest)
    return _asked(result, return_lse)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    page_table: torch.Tensor | None,
    descales: Descales,
    *,
    out: Any,
    exact: bool,
    return_lse: bool,
    backend: str,
    **options: Unpack[ScoreOptions],
) -> Result:
    """attention_varlen() in a graph."""
    _refuse(out=out)
    rest = {"exact": exact, "return_lse": return_lse, "backend": backend}
    result = torch.ops.tilewise.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, page_table, **_named(descales), **_by_sides(options), **rest
    )
    return _asked(result, return_lse)


def outside(call: Callable[..., Result], tensors: tuple[torch.Tensor, ...], descales: Descales, **given: Any) -> Result:
    """The call itself, between two graphs: no graph holds a schedule or a function of the user's."""
    names = [name for name in ("schedule", "mask", "score") if given[name] is not None]
    return graphs.outside(call, " and ".join(names))(*tensors, **_named(descales), **given)


def _named(descales: Descales) -> dict[str, torch.Tensor | None]:
    return {f"{name}_descale": x for name, x in zip("qkv", descales, strict=True)}


def _by_sides(options: ScoreOptions) -> dict[str, Any]:
    """The options as an operator takes them: a window is two numbers."""
    left, right = options.get("window") or (None, None)
    return {**{n: x for n, x in options.items() if n != "window"}, "window_left": left, "window_right": right}


def decode(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: DecodePlan,
    *,
    schedule: Any,
    out: Any,
    **options: Any,
) -> Result:
    """decode() in a graph, which holds neither cache nor plan: each call brings its own."""
    _refuse(schedule=schedule, out=out)
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
