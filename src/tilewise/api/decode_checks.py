"""What plan_decode and decode ask of their arguments, beyond what arguments.py asks of those of all calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from tilewise import arguments, checks
from tilewise.kvcache import PagedKVCache
from tilewise.plan import BlockSchedule, DecodePlan
from tilewise.plan.cost import CostModel
from tilewise.plan.standing import Longs, StandingPlan
from tilewise.scores import Reach


def check_sizes(
    pages: PagedKVCache,
    seqs: Any,
    num_heads: Any,
    tokens_per_seq: Any,
    share_prefix: Any,
    cost: Any,
    room: Any,
) -> None:
    """What plan_decode asks of its arguments, one by one."""
    check_sharing(pages, num_heads, share_prefix, cost)
    checks.integer("tokens_per_seq", tokens_per_seq, 1)
    checks.integer("room", room, 0)
    if not isinstance(seqs, (Sequence, torch.Tensor, np.ndarray)):
        raise TypeError(f"seqs must be a list of sequences, got {type(seqs).__name__}")


def check_sharing(pages: PagedKVCache, num_heads: Any, share_prefix: Any, cost: Any) -> None:
    """What plan_decode and plan_step ask of these."""
    checks.integer("num_heads", num_heads, 1)
    if num_heads % pages.num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of the cache's {pages.num_kv_heads} KV heads, got {num_heads}")
    if not isinstance(share_prefix, bool) and not (isinstance(share_prefix, str) and share_prefix == "auto"):
        raise ValueError(f'share_prefix must be "auto", True or False, got {share_prefix!r}')
    if cost is not None and not isinstance(cost, CostModel):
        raise TypeError(f"cost must be a tilewise.CostModel, got {type(cost).__name__}")


def check_current(seqs: Sequence[int], lengths: Sequence[int] | Longs, pages: PagedKVCache, instead: str) -> None:
    """ValueError, which says to call `instead`, unless the sequences of a plan have the lengths that it was made for.
    Given as a list, the cache remembers them."""
    changed = np.flatnonzero(pages.lengths_of(seqs) != lengths)
    if len(changed):
        seq, length = seqs[changed[0]], lengths[changed[0]]
        raise ValueError(
            f"plan is out of date: sequence {seq} had {length} tokens and now has {pages.length(seq)}; call {instead}"
        )


def check_indices(
    indices: Any, plan: DecodePlan | StandingPlan, pages: PagedKVCache, tree: torch.Tensor | None
) -> None:
    """The tokens that queries read, if they are listed; on a CPU, that they are there."""
    if indices is None:
        return
    shape = (arguments.places(plan), plan.tokens_per_seq, "k")
    checks.tensor("indices", indices, shape=shape, dtypes=(torch.int32,), device=pages.device, unit_last_stride=True)
    if tree is not None:
        raise NotImplementedError("tree_mask and indices do not go together; leave out of the lists what is hidden")
    if plan.pages_per_seq:
        raise NotImplementedError("schedule and indices do not go together; list the tokens of the pages")
    if not plan.reach.whole:
        raise ValueError("indices go with a plan without a window and a chunk; leave out of the lists what they hide")
    if indices.device.type != "cpu":
        return
    lengths = torch.tensor(plan.lengths, dtype=torch.int32)[:, None, None]
    its = indices[: len(plan.lengths)]
    wrong = ((its < -1) | (its >= lengths)).nonzero()
    if len(wrong):
        n, t, i = wrong[0].tolist()
        raise ValueError(
            f"indices must be positions in their sequence, or -1 for none, got {int(its[n, t, i])} at [{n}, {t}, {i}], "
            f"where sequence {plan.seqs[n]} has {plan.lengths[n]} tokens"
        )


def check_pages_per_seq(pages: int | None, share_prefix: Literal["auto"] | bool, reach: Reach) -> int:
    """0 for None."""
    if pages is None:
        return 0
    if share_prefix is True:
        raise ValueError('share_prefix must be False or "auto" with pages_per_seq: sequences select pages of their own')
    if not reach.whole:
        raise NotImplementedError(
            "pages_per_seq goes without a window and a chunk; leave the pages before it out of the schedule"
        )
    return checks.integer("pages_per_seq", pages, 1)


def check_schedule(
    schedule: Any, plan: DecodePlan | StandingPlan, pages: PagedKVCache, tree: torch.Tensor | None
) -> torch.Tensor | None:
    """The selection's bits: int32 (num_seqs or 1, Hkv or 1, words)."""
    if schedule is None:
        if plan.pages_per_seq:
            raise ValueError("schedule must be given: the plan was made with pages_per_seq, for selected pages")
        return None
    if not isinstance(schedule, BlockSchedule):
        raise TypeError(f"schedule must be a tilewise.BlockSchedule or None, got {type(schedule).__name__}")
    if not plan.pages_per_seq:
        raise ValueError("schedule takes a plan of plan_decode(..., pages_per_seq=...), got one over all pages")
    if tree is not None:
        raise NotImplementedError("tree_mask and schedule do not go together; decode a tree over all pages")
    if schedule.lengths_q is not None or schedule.lengths_k is not None:
        raise NotImplementedError("decode takes no schedule with lengths of blocks; the sequences' lengths hold")
    bits, count = schedule.bits, len(plan.seqs)
    if bits.device != pages.device:
        raise ValueError(
            f"schedule must be on {pages.device} like the cache, got one on {bits.device}; use .to(device)"
        )
    for name, got, taken in (
        ("block_k", schedule.block_k, (pages.page_size,)),
        ("num_q_blocks", schedule.num_q_blocks, (1,)),
        ("batch", schedule.batch, (None, 1, count)),
        ("heads", schedule.heads, (None, 1, pages.num_kv_heads)),
    ):
        if got not in taken:
            raise ValueError(f"schedule must have {name} {' or '.join(map(str, taken))} for this plan, got {got}")
    longest = max(plan.lengths, default=0)
    if schedule.num_k_blocks * pages.page_size < longest:
        raise ValueError(
            f"schedule must reach the longest sequence, of {longest} tokens, got seqlen_k {schedule.seqlen_k}"
        )
    return bits[:, :, 0]
