"""Keys that an indexer chooses: plan which tokens ask, then choose layer by layer.

The keys lie in the pages of a cache that was made with index_dim (kvcache/index_keys.py), beside the latent rows that
decode and attend read of what was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import torch

from tilewise import arguments, checks, graphs
from tilewise.api.decode_checks import check_current
from tilewise.api.on_cpu import full_precision
from tilewise.cpu.choice import run_choice
from tilewise.gpu import choice as kernels
from tilewise.kvcache import PagedKVCache, PrefixCache
from tilewise.kvcache.index_keys import IndexKeys
from tilewise.kvcache.sequences import check_seqs
from tilewise.kvcache.slots import upload
from tilewise.plan.choice import ChoicePlan, StandingChoice

MOST_ROWS = 1024  # sequences of a standing plan, as of other plans
MOST_SCORES = 2**30  # that one keeps: 4 GiB


@overload
def plan_choice(
    cache: PagedKVCache | PrefixCache,
    seqs: Sequence[int],
    counts: int | Sequence[int] = 1,
    *,
    topk: int,
    rows: None = None,
    max_length: None = None,
) -> ChoicePlan: ...
@overload
def plan_choice(
    cache: PagedKVCache | PrefixCache,
    seqs: Sequence[int],
    counts: int = 1,
    *,
    topk: int,
    rows: int,
    max_length: int,
) -> StandingChoice: ...
@graphs.outside
def plan_choice(
    cache: PagedKVCache | PrefixCache,
    seqs: Sequence[int],
    counts: int | Sequence[int] = 1,
    *,
    topk: int,
    rows: int | None = None,
    max_length: int | None = None,
) -> ChoicePlan | StandingChoice:
    """Plan, for all layers, what tokens of `seqs` choose among: `choose_keys` runs it.

    counts: how many query tokens a sequence has (one number, or one for each), which are its last cached ones; each
    chooses among the tokens up to itself. topk: the keys that a token takes, all of them where it sees no more. The
    plan holds until one of its sequences changes.

    rows, max_length: make a StandingChoice instead, for up to `rows` sequences of up to max_length tokens, each of
    which has `counts` query tokens, one number. `renew_plan` brings it up to date after sequences came, went or grew:
    what it says stays in one place on a GPU, so that one captured choose_keys() is replayed over them. A call takes 4
    bytes per query token and token of max_length there, up to 4 GiB. q and weights then have rows · counts rows; those
    past the sequences are idle: they are not read, and choose nothing.
    """
    pages = arguments.check_cache(cache)
    _index_keys(pages)
    topk = checks.integer("topk", topk, 1)
    if rows is None and max_length is None:
        return _plan_now(pages, seqs, counts, topk)
    if rows is None or max_length is None:
        raise ValueError("rows and max_length go together: of sequences, and the most tokens that one will have")
    rows = checks.integer("rows", rows, 1, MOST_ROWS)
    max_length = checks.integer("max_length", max_length, 1, 2**24)
    each = checks.integer("counts", counts, 1, max_length, "with rows it is one number for all sequences")
    if rows * each * max_length > MOST_SCORES:
        raise ValueError(
            f"rows · counts · max_length must be at most {MOST_SCORES} scores, got {rows} · {each} · {max_length}; "
            "make one of them smaller"
        )
    now = _plan_now(pages, [], each, topk)
    plan = StandingChoice(rows, max_length, each, topk, pages.page_size, pages.serial, now)
    renew_choice(plan, pages, seqs)
    return plan


def _plan_now(pages: PagedKVCache, seqs: Sequence[int], counts: int | Sequence[int], topk: int) -> ChoicePlan:
    members, at = pages.sequences.batch(check_seqs(seqs))
    lengths = pages.sequences.lengths[at]
    each = [counts] * len(members) if not isinstance(counts, (Sequence, torch.Tensor, np.ndarray)) else list(counts)
    if len(each) != len(members):
        raise ValueError(f"counts must be one number or one for each of {len(members)} sequences, got {len(each)}")
    for seq, count, length in zip(members, each, lengths.tolist(), strict=True):
        hint = f"sequence {seq} has {length} tokens" if length else f"sequence {seq} has none; leave it out"
        checks.integer("counts", count, 1, length, hint)
    taken = np.array([int(count) for count in each], np.int64)
    return ChoicePlan(
        tuple(members), taken, lengths, pages.sequences.padded(at, -1), pages.page_size, topk, pages.serial
    )


def renew_choice(plan: StandingChoice, pages: PagedKVCache, seqs: Sequence[int]) -> StandingChoice:
    """renew_plan() of such a plan."""
    _check_cache_of(plan, pages)
    now = _plan_now(pages, seqs, plan.tokens_per_seq, plan.topk)
    if len(now.seqs) > plan.rows:
        raise ValueError(f"seqs must be at most the plan's {plan.rows} rows, got {len(now.seqs)}")
    for seq, length in zip(now.seqs, now.lengths.tolist(), strict=True):
        if length > plan.max_length:
            raise ValueError(
                f"seqs must have at most the plan's max_length of {plan.max_length} tokens, but sequence {seq} has "
                f"{length}"
            )
    plan.now = now
    kernels.renew(plan, upload)
    if pages._late is not None:  # places of new tokens, which another plan's list would take along
        pages._late.settle()
        pages._late = None
    return plan


@graphs.outside
def choose_keys(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: ChoicePlan | StandingChoice,
    *,
    rows: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """The keys that each query token chooses: the plan's topk largest of Σ_h weights_h · relu(q_h · key).

    q: (tokens, heads, dim), of the dtype of the cache's index keys on a GPU, and weights: (tokens, heads) float32, in
    the plan's order: the tokens of its first sequence, then those of the next. A scale, which must not be negative
    before relu, belongs into the weights. layer: one that has index keys.

    Returns int32 (tokens, topk): positions in the token's sequence, from the first to the last, then −1 for none; of
    equal scores the first are taken. A product that is NaN counts as 0, and a score that is NaN as the least. `decode`
    takes them as indices, once they are (sequences, tokens, topk). rows: where the chosen tokens are stored instead,
    page · page_size + offset.

    On a GPU nobody waits, and the call can be captured in a CUDA graph after a first one with the plan; a captured call
    of a standing plan replays over what `renew_plan` says.
    """
    pages = arguments.check_cache(cache)
    keys = _index_keys(pages)
    if not isinstance(plan, (ChoicePlan, StandingChoice)):
        raise TypeError(f"plan must come from tilewise.plan_choice, got {type(plan).__name__}")
    _check_cache_of(plan, pages)
    now, again = (plan, "plan_choice again") if isinstance(plan, ChoicePlan) else (plan.now, "renew_plan")
    check_current(now.seqs, now.lengths, pages, again)
    shape = (plan.tokens, "heads", keys.dim)
    checks.tensor("q", q, shape=shape, dtypes=checks.FLOATS, device=pages.device, unit_last_stride=True)
    checks.tensor("weights", weights, shape=q.shape[:2], dtypes=(torch.float32,), device=pages.device)
    stored = keys.stored(layer)
    q, weights = q.detach(), weights.detach()  # which keys are chosen has no gradient
    where = arguments.check_backend(backend, q, ())
    checks.flag("rows", rows)
    if q.device.type == "cpu":
        keys.check_written(layer, now.seqs)
    if where != "cpu" and q.numel():
        return kernels.run_choice(q, weights, stored, plan, rows=rows, send=upload)
    found = q.new_full((plan.tokens, plan.topk), -1, dtype=torch.int32)
    if q.numel():
        live = slice(0, now.tokens)
        with full_precision():
            found[live] = run_choice(q[live], weights[live], stored, now, rows=rows)
    return found


def _check_cache_of(plan: ChoicePlan | StandingChoice, pages: PagedKVCache) -> None:
    if plan.cache_serial != pages.serial:
        raise ValueError("plan was made for another cache; call plan_choice with this one")


def _index_keys(pages: PagedKVCache) -> IndexKeys:
    if pages.index_keys is None:
        raise ValueError("cache must have index keys; make it with PagedKVCache(..., index_dim=...)")
    return pages.index_keys
