"""Standing plans: one plan for sequences that come, go, fork and grow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise as tw

HEADS, GROUP, DIM = 2, 2, 16


def filled(pages: int = 64, page_size: int = 4, **options: object) -> tw.PagedKVCache:
    return tw.PagedKVCache(pages, page_size, HEADS, DIM, kv_format="fp32", **options)  # type: ignore[arg-type]


def extend(cache: tw.PagedKVCache, seqs: list[int], counts: int | list[int]) -> None:
    slots = cache.extend(seqs, counts)
    cache.write(0, slots, *(torch.randn(len(slots), HEADS, DIM) for _ in "kv"))


def standing(cache: tw.PagedKVCache, seqs: list[int], **options: object) -> tw.StandingPlan:
    given: dict[str, object] = {"num_heads": HEADS * GROUP, "rows": 6, "max_length": 64, **options}
    plan = tw.plan_decode(cache, seqs, **given)  # type: ignore[call-overload]
    assert isinstance(plan, tw.StandingPlan)
    return plan


@pytest.mark.parametrize("share", ["auto", True, False])
def test_on_a_cpu_it_is_the_plan_of_the_sequences_as_they_are(share):
    torch.manual_seed(0)
    cache = filled()
    root = cache.allocate()
    extend(cache, [root], 9)
    seqs = [cache.fork(root) for _ in range(3)]
    extend(cache, seqs, [1, 4, 6])
    plan = standing(cache, seqs, share_prefix=share)
    sinks = torch.randn(HEADS * GROUP)
    for step in range(4):
        q = torch.randn(6, 1, HEADS * GROUP, DIM)
        o, lse = tw.decode(q, cache, 0, plan, return_lse=True)
        fresh = tw.plan_decode(cache, seqs, num_heads=HEADS * GROUP, share_prefix=share)
        expected, expected_lse = tw.decode(q[: len(seqs)], cache, 0, fresh, return_lse=True)
        assert torch.equal(o[: len(seqs)], expected)
        assert torch.equal(lse[: len(seqs)], expected_lse)
        assert not o[len(seqs) :].any()
        assert (lse[len(seqs) :] == -torch.inf).all()
        o, lse = tw.decode(q, cache, 0, plan, return_lse=True, sinks=sinks)
        assert not o[len(seqs) :].any()
        assert torch.equal(lse[-1, :, 0], sinks)
        if step == 1:
            cache.free(seqs.pop(0))
        seqs.append(cache.fork(seqs[0]))
        extend(cache, seqs, 1)
        assert tw.renew_plan(plan, cache, seqs) is plan
        assert plan.seqs == tuple(seqs)
        assert plan.lengths.tolist() == [cache.length(s) for s in seqs]
    assert "decode" in plan.show()


def test_an_empty_batch_has_idle_rows_only():
    cache = filled()
    plan = standing(cache, [])
    o, lse = tw.decode(torch.full((6, 1, 4, DIM), torch.nan), cache, 0, plan, return_lse=True)
    assert not o.any()
    assert (lse == -torch.inf).all()


def test_a_mask_of_query_tokens_has_a_row_for_every_row_of_the_plan():
    torch.manual_seed(1)
    cache = filled()
    seqs = [cache.allocate() for _ in range(2)]
    extend(cache, seqs, [5, 8])
    plan = standing(cache, seqs, tokens_per_seq=3)
    q, mask = torch.randn(6, 3, 4, DIM), torch.tril(torch.ones(3, 3)).bool()
    fresh = tw.plan_decode(cache, seqs, num_heads=4, tokens_per_seq=3)
    expected = tw.decode(q[:2], cache, 0, fresh, tree_mask=mask)
    for given in (mask, mask.expand(6, 3, 3)):
        assert torch.equal(tw.decode(q, cache, 0, plan, tree_mask=given)[:2], expected)


def test_what_it_has_no_room_for_is_refused():
    cache = filled()
    seqs = [cache.allocate() for _ in range(7)]
    extend(cache, seqs[:1], 65)
    with pytest.raises(ValueError, match="at most the plan's 6 rows, got 7"):
        standing(cache, seqs)
    with pytest.raises(ValueError, match=f"max_length of 64 tokens, but sequence {seqs[0]} has 65"):
        standing(cache, seqs[:1])
    with pytest.raises(ValueError, match="max_length must be given"):
        standing(cache, [], max_length=None)
    with pytest.raises(ValueError, match="rows must be at least 1 and at most 1024, got 2000"):
        standing(cache, [], rows=2000)
    with pytest.raises(ValueError, match="without room and pages_per_seq, got room 8"):
        standing(cache, [], room=8)
    plan = standing(cache, seqs[1:3])
    with pytest.raises(TypeError, match="grow_plan takes other plans"):
        tw.renew_plan(tw.plan_decode(cache, seqs[1:3], num_heads=4), cache, seqs)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="renew_plan takes that"):
        tw.grow_plan(plan, cache)  # type: ignore[arg-type]
    extend(cache, seqs[1:3], 1)
    with pytest.raises(ValueError, match="out of date"):
        tw.decode(torch.zeros(6, 1, 4, DIM), cache, 0, plan)
    with pytest.raises(ValueError, match="another cache"):
        tw.renew_plan(plan, filled(), [])
    assert np.array_equal(tw.renew_plan(plan, cache, seqs[1:3]).lengths, [1, 1])
