"""Keys that an indexer chooses: plan which tokens ask, then choose layer by layer.

The keys lie in the pages of a cache that was made with index_dim (kvcache/index_keys.py), beside the latent rows that
decode and attend read of what was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from tilewise.plan.choice import ChoicePlan


@graphs.outside
def plan_choice(
    cache: PagedKVCache | PrefixCache, seqs: Sequence[int], counts: int | Sequence[int] = 1, *, topk: int
) -> ChoicePlan:
    """Plan, for all layers, what tokens of `seqs` choose among: `choose_keys` runs it.

    counts: how many query tokens a sequence has (one number, or one for each), which are its last cached ones; each
    chooses among the tokens up to itself. topk: the keys that a token takes, all of them where it sees no more. The
    plan holds until one of its sequences changes.
    """
    pages = arguments.check_cache(cache)
    _index_keys(pages)
    members, at = pages.sequences.batch(check_seqs(seqs))
    lengths = pages.sequences.lengths[at]
    each = [counts] * len(members) if not isinstance(counts, (Sequence, torch.Tensor, np.ndarray)) else list(counts)
    if len(each) != len(members):
        raise ValueError(f"counts must be one number or one for each of {len(members)} sequences, got {len(each)}")
    for seq, count, length in zip(members, each, lengths.tolist(), strict=True):
        hint = f"sequence {seq} has {length} tokens" if length else f"sequence {seq} has none; leave it out"
        checks.integer("counts", count, 1, length, hint)
    return ChoicePlan(
        tuple(members),
        np.array([int(count) for count in each], np.int64),
        lengths,
        pages.sequences.padded(at, -1),
        pages.page_size,
        checks.integer("topk", topk, 1),
        pages.serial,
    )


@graphs.outside
def choose_keys(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: ChoicePlan,
    *,
    rows: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """The keys that each query token chooses: the plan's topk largest of Σ_h weights_h · relu(q_h · key).

    q: (tokens, heads, dim), of the dtype of the cache's index keys on a GPU, and weights: (tokens, heads) float32, in
    the plan's order: the tokens of its first sequence, then those of the next. A scale, which must not be negative
    before relu, belongs into the weights. layer: one that has index keys.

    Returns int32 (tokens, topk): positions in the token's sequence, from the first to the last, then −1 for none; of
    equal scores the first are taken, and NaN counts as the least. `decode` takes them as indices, once they are
    (sequences, tokens, topk). rows: where the chosen tokens are stored instead, page · page_size + offset.
    """
    pages = arguments.check_cache(cache)
    keys = _index_keys(pages)
    if not isinstance(plan, ChoicePlan):
        raise TypeError(f"plan must come from tilewise.plan_choice, got {type(plan).__name__}")
    if plan.cache_serial != pages.serial:
        raise ValueError("plan was made for another cache; call plan_choice with this one")
    check_current(plan.seqs, plan.lengths, pages, "plan_choice again")
    checks.tensor(
        "q", q, shape=(plan.rows, "heads", keys.dim), dtypes=checks.FLOATS, device=pages.device, unit_last_stride=True
    )
    checks.tensor("weights", weights, shape=q.shape[:2], dtypes=(torch.float32,), device=pages.device)
    stored = keys.stored(layer)
    q, weights = q.detach(), weights.detach()  # which keys are chosen has no gradient
    where = arguments.check_backend(backend, q, ())
    checks.flag("rows", rows)
    if q.device.type == "cpu":
        keys.check_written(layer, plan.seqs)
    if not q.numel():
        return q.new_full((plan.rows, plan.topk), -1, dtype=torch.int32)
    if where == "cpu":
        with full_precision():
            return run_choice(q, weights, stored, plan, rows=rows)
    return kernels.run_choice(q, weights, stored, plan, rows=rows, send=upload)


def _index_keys(pages: PagedKVCache) -> IndexKeys:
    if pages.index_keys is None:
        raise ValueError("cache must have index keys; make it with PagedKVCache(..., index_dim=...)")
    return pages.index_keys
