"""What the public calls become while code is traced: operators of `torch.ops.tilewise`, which a graph can hold.

integrations/torch_ops.py registers those operators over the public calls; this file only names them, so that api/
needs to know nothing that is built on top of it. Graphs hold neither plans nor caches: `remember` lets the operator
find both by the plan's number, and keeps neither alive. Nor do they hold schedules and functions: a call with one of
those breaks the graph (`outside`).

Arguments are checked by the call that the operator makes when the graph runs. What an operator does not take at all
raises here, while the code is traced: then torch runs the call as it is, which says what is wrong in its own words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import torch

from tilewise import arguments, graphs
from tilewise.kvcache import PagedKVCache
from tilewise.plan import DecodePlan, StepPlan
from tilewise.plan.standing import StandingPlan
from tilewise.plan.standing_step import StandingStep
from tilewise.scores import SCHEMA_OPTIONS, SCHEMA_TENSORS

if TYPE_CHECKING:
    from tilewise.arguments import Descales
    from tilewise.kvcache import PrefixCache

State = tuple[torch.Tensor, torch.Tensor]
Result = torch.Tensor | State

# What each argument is declared as in an operator's schema, and what that means in Python; bools are no numbers here.
_DECLARED = f"""{SCHEMA_TENSORS}, {SCHEMA_OPTIONS}, bool exact, bool deterministic, bool return_lse, str backend,
Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,
Tensor? dropout_seed, float dropout_p,
Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? page_table, Tensor? tree_mask, SymInt layer"""
_KINDS = {name: kind for kind, name in (one.partition("=")[0].split() for one in _DECLARED.split(","))}
_TAKEN: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((torch.Tensor,), "a torch.Tensor"),
    "bool": ((bool,), "True or False"),
    "float": ((int, float), "a float"),
    "SymInt": ((int,), "an int"),
    "str": ((str,), "a str"),
}

AnyPlan = TypeVar("AnyPlan", DecodePlan, StandingPlan, StepPlan, StandingStep)
_plans: WeakValueDictionary[int, DecodePlan | StandingPlan | StepPlan | StandingStep] = WeakValueDictionary()
_caches: WeakValueDictionary[int, PagedKVCache] = WeakValueDictionary()


def remember(plan: AnyPlan, cache: PagedKVCache) -> AnyPlan:
    """The plan itself, which `recall` now finds by its serial number, as long as the caller keeps both."""
    _plans[plan.serial] = plan
    _caches[cache.serial] = cache
    return plan


def recall(serial: int) -> tuple[Any, PagedKVCache]:
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
    return_lse: bool,
    **options: Any,
) -> Result:
    """attention() in a graph; options: those of the scores, exact, deterministic, backend."""
    _refuse(out=out)
    given = _checked(return_lse=return_lse, **_named(descales), **_by_sides(options))
    given["return_lse"] |= arguments.wants_gradients(q, k, v, options["sinks"])  # the backward pass reads it
    result = torch.ops.tilewise.attention(**_checked(q=q, k=k, v=v), **given)
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
    return_lse: bool,
    **options: Any,
) -> Result:
    """attention_varlen() in a graph; options: as of attention()."""
    _refuse(out=out)
    given = _checked(return_lse=return_lse, **_named(descales), **_by_sides(options))
    given["return_lse"] |= arguments.wants_gradients(q, k, v, options["sinks"])
    packed = _checked(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, page_table=page_table)
    result = torch.ops.tilewise.attention_varlen(**packed, **given)
    return _asked(result, return_lse)


def shared_prefix_attention(
    q: torch.Tensor, levels: Any, k: torch.Tensor, v: torch.Tensor, lengths: Any, *, out: Any, **options: Any
) -> Result:
    """shared_prefix_attention() in a graph; options: those of the scores, deterministic, return_lse, backend."""
    _refuse(out=out)
    if not isinstance(levels, (list, tuple)) or any(len(level) not in (2, 3) for level in levels):
        raise TypeError("levels must be a list of (k, v) or (k, v, lengths)")
    _checked(q=q, k=k, v=v, **options)
    of_levels = [x for level in levels for x in level[:2]]
    valid = [*((level[0], level[2] if len(level) == 3 else None) for level in levels), (k, lengths)]
    counts = None
    if any(n is not None for _, n in valid):
        counts = torch.cat([_counts(n, x) for x, n in valid])
    sinks, return_lse = options.pop("sinks"), options.pop("return_lse")
    with_lse = return_lse or arguments.wants_gradients(q, k, v, sinks, *of_levels)
    given = (q, k, v, sinks, of_levels, counts)
    return _asked(torch.ops.tilewise.shared_prefix_attention(*given, return_lse=with_lse, **options), return_lse)


def _counts(lengths: Any, keys: torch.Tensor) -> torch.Tensor:
    """(B,) int64 on the CPU: how many of keys (B, N, Hkv, D) are valid."""
    if isinstance(lengths, torch.Tensor):
        return lengths.to("cpu", torch.int64)
    return torch.tensor(
        [keys.shape[1]] * len(keys) if lengths is None else list(lengths), dtype=torch.int64, device="cpu"
    )


def outside(call: Callable[..., Result], tensors: tuple[torch.Tensor, ...], descales: Descales, **given: Any) -> Result:
    """The call itself, between two graphs: no graph holds a schedule or a function of the user's."""
    names = [name for name in ("schedule", "mask", "score") if given[name] is not None]
    return graphs.outside(call, " and ".join(names))(*tensors, **_named(descales), **given)


def _named(descales: Descales) -> dict[str, torch.Tensor | None]:
    return {f"{name}_descale": x for name, x in zip("qkv", descales, strict=True)}


def _by_sides(options: dict[str, Any]) -> dict[str, Any]:
    """The options as an operator takes them: a window is two numbers."""
    window = options.get("window")
    if window is not None and not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise TypeError(f"window must be (left, right) or None, got {window!r}")
    left, right = window or (None, None)
    return {**{n: x for n, x in options.items() if n != "window"}, "window_left": left, "window_right": right}


def decode(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: DecodePlan | StandingPlan,
    *,
    schedule: Any,
    indices: Any,
    out: Any,
    **options: Any,
) -> Result:
    """decode() in a graph, which holds neither cache nor plan: each call brings its own."""
    _refuse(schedule=schedule, indices=indices, out=out)
    pages = arguments.check_cache(cache)
    arguments.check_plan(plan, pages)
    _checked(q=q, layer=layer, **options)
    given = (q, pages._k, pages._v, layer, plan.serial)
    result = torch.ops.tilewise.decode(*given, value_dim=pages.value_dim, **options)
    return _asked(result, options["return_lse"])


def attend(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: StepPlan | StandingStep,
    *,
    out: Any,
    **options: Any,
) -> Result:
    """attend() in a graph, as decode() is."""
    _refuse(out=out)
    pages = arguments.check_cache(cache)
    arguments.check_step(plan, pages)
    _checked(q=q, layer=layer, **options)
    given = (q, pages._k, pages._v, layer, plan.serial)
    result = torch.ops.tilewise.attend(*given, value_dim=pages.value_dim, **options)
    return _asked(result, options["return_lse"])


def _checked(**given: Any) -> dict[str, Any]:
    """The arguments; TypeError for one that is not what the operator's schema says. Looks at no value."""
    for name, value in given.items():
        kind = _KINDS[name]
        types, words = _TAKEN[kind.removesuffix("?")]
        if value is None and kind.endswith("?"):
            continue
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            public = "window" if name.startswith("window_") else name
            raise TypeError(f"{public} must be {words}, got {type(value).__name__}")
    return given


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} cannot be part of a compiled graph; leave it out, or call from a function under "
                "torch.compiler.disable"
            )


def _asked(result: State, return_lse: bool) -> Result:
    return result if return_lse else result[0]
