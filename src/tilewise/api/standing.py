"""Standing plans: decode steps in which sequences come, go and grow, over memory that stays where it is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from tilewise import arguments, checks, traced
from tilewise.api.choice import renew_choice
from tilewise.gpu import decode as kernel
from tilewise.gpu.plan_step import Batch
from tilewise.kvcache import PagedKVCache, PrefixCache
from tilewise.kvcache.lineage import Lineage
from tilewise.kvcache.slots import late_places
from tilewise.plan import DecodePlan
from tilewise.plan.choice import StandingChoice
from tilewise.plan.flat import Judge
from tilewise.plan.standing import StandingPlan
from tilewise.scores import Window

MOST_ROWS = 1024  # gpu/planner.py: what one block of the planner takes


def make(
    pages: PagedKVCache,
    seqs: Sequence[int],
    plan_once: Callable[[PagedKVCache, list[int]], DecodePlan],
    *,
    rows: Any,
    max_length: Any,
    judge: Judge,
    heads_q: int,
    tokens_per_seq: int,
    window: Window | None,
    chunk: int,
    share: bool | None,
) -> StandingPlan:
    """plan_decode(..., rows=, max_length=). plan_once: makes the plan of sequences as they are."""
    rows = checks.integer("rows", rows, 1, MOST_ROWS)
    if max_length is None:
        raise ValueError("max_length must be given with rows: the most tokens that a sequence will have")
    max_length = checks.integer("max_length", max_length, 1, 2**24)
    of = weakref.ref(pages)

    def plan_now(now: list[int]) -> DecodePlan:
        cache = of()
        if cache is None:
            raise ValueError("plan outlived its cache; keep the cache while the plan is used")
        return plan_once(cache, now)

    plan = StandingPlan(
        rows=rows,
        max_length=max_length,
        heads_q=heads_q,
        heads_kv=pages.num_kv_heads,
        head_dim=pages.head_dim,
        page_size=pages.page_size,
        tokens_per_seq=tokens_per_seq,
        window=window,
        chunk=chunk,
        share=share,
        judge=judge,
        cache_serial=pages.serial,
        plan_once=plan_now,
        tree=None if share is False else Lineage(pages),
    )
    renew_plan(plan, pages, seqs)
    traced.remember(plan, pages)
    return plan


Standing = TypeVar("Standing", StandingPlan, StandingChoice)


def renew_plan(plan: Standing, cache: PagedKVCache | PrefixCache, seqs: Sequence[int]) -> Standing:
    """Make a standing plan the plan of `seqs` as they are now: after sequences came, went, forked or grew.

    plan: of plan_decode or plan_choice(..., rows=, max_length=); the same object is returned. seqs: up to `rows`
    sequences of up to `max_length` tokens, in the order in which q and o have them from now on.

    On a GPU the host looks only at what changed, and sends it by one launch that it does not wait for. The first
    decode() after that makes the work list where the last one was, for all layers; a graph that captures decode() makes
    it in every replay, before its first layer. So a captured decode() replays over sequences that come and go. On a
    CPU, where a plan costs little, the next call makes a new one. What a plan of plan_choice says is sent whole.
    """
    pages = arguments.check_cache(cache)
    if isinstance(plan, StandingChoice):
        return renew_choice(plan, pages, seqs)
    if not isinstance(plan, StandingPlan):
        raise TypeError(
            f"plan must come from tilewise.plan_decode(..., rows=, max_length=), got {type(plan).__name__}; "
            "grow_plan takes other plans"
        )
    arguments.check_plan(plan, pages)
    named, at = pages.sequences.batch(seqs)
    if len(named) > plan.rows:
        raise ValueError(f"seqs must be at most the plan's {plan.rows} rows, got {len(named)}")
    lengths, longest = pages.sequences.lengths_now(at)
    if longest > plan.max_length and lengths[long := int(lengths.argmax())] > plan.max_length:
        raise ValueError(
            f"seqs must have at most the plan's max_length of {plan.max_length} tokens, but sequence {named[long]} has "
            f"{lengths[long]}"
        )
    plan.hold(named, at, lengths)
    kernel.renew(plan, partial(batch_of, plan, pages))
    if pages._late is not None:  # no list took them along
        pages._late.settle()
        pages._late = None
    return plan


def batch_of(plan: StandingPlan, pages: PagedKVCache) -> Batch:
    """The plan's sequences as the planner takes them."""
    of, arranged = pages.sequences, plan.arrange()
    known = of.last_batch(plan.rows_of)
    return Batch(
        plan.rows_of,
        plan.lengths,
        arranged.order,
        arranged.nodes,
        of.table,
        of.counts,
        of.stamps,
        of.last_stamp,
        of.grown(plan.rows_of),
        None if pages._late is None else late_places(pages, plan.seqs),
        None if known is None else (known.before, known.at),
    )
