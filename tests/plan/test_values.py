"""Plans are values: compared, hashed, copied and pickled, before and after they were run."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from oracle import qkv, randn

import tilewise
from tilewise import BlockSchedule, PagedKVCache, attention, decode, plan_attention, plan_decode
from tilewise.gpu import decode as decoding

COPIES = [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))]


def cached():
    cache = PagedKVCache(num_pages=32, page_size=16, num_kv_heads=1, head_dim=64, num_layers=1, kv_format="bf16")
    seqs = [cache.allocate() for _ in range(2)]
    slots = cache.extend(seqs, [40, 20])
    cache.write(0, slots, randn(60, 1, 64, dtype=torch.bfloat16), randn(60, 1, 64, dtype=torch.bfloat16, seed=1))
    fork = cache.fork(seqs[0])
    return cache, [*seqs, fork]


def plans():
    q, k, _ = qkv(2, 100, 130, 4, 2, 64)
    schedule = BlockSchedule.random(100, 130, block_q=32, block_k=32, sparsity=0.5, seed=0, heads=4)
    yield lambda: plan_attention(q, k, causal=True)
    yield lambda: plan_attention(q, k, schedule=schedule)
    yield lambda: plan_attention(q.bfloat16(), k.bfloat16(), window=(30, 0), backend="emulator")


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("copied", COPIES)
def test_plans_of_tensors(number, copied):
    make = list(plans())[number]
    plan = make()
    assert plan == make()
    assert hash(plan) == hash(make())
    plan.show()  # keeps its summary
    same = copied(plan)
    assert same == plan
    assert hash(same) == hash(plan)
    assert same.summary == plan.summary
    assert len({plan, same, make()}) == 1
    others = [m() for n, m in enumerate(plans()) if n != number]
    assert plan not in others
    assert plan != "a plan"


@pytest.mark.parametrize("copied", COPIES)
def test_plans_of_a_cache_before_and_after_a_run(copied):
    cache, seqs = cached()
    plan, again = (plan_decode(cache, seqs, num_heads=2, share_prefix=True) for _ in range(2))
    assert plan == again
    assert hash(plan) == hash(again)
    assert plan != plan_decode(cache, seqs[:2], num_heads=2)
    assert plan != plan_decode(cache, seqs, num_heads=2, share_prefix=False)
    q = randn(3, 1, 2, 64, dtype=torch.bfloat16)
    for backend in ("cpu", "emulator"):
        o = decode(q, cache, 0, plan, backend=backend)
        same = copied(plan)
        assert same == plan == again
        assert same.serial != plan.serial  # compiled code and kept kernels find a plan by it
        assert torch.equal(decode(q, cache, 0, same, backend=backend), o)


def test_items_are_made_when_they_are_looked_at():
    cache, seqs = cached()
    plan, again = (plan_decode(cache, seqs, num_heads=2, share_prefix=True) for _ in range(2))
    assert plan == again
    assert hash(plan) == hash(again)
    decode(randn(3, 1, 2, 64, dtype=torch.bfloat16), cache, 0, plan, backend="emulator")
    copies = [plan, *(copied(plan) for copied in COPIES)]
    assert not [x for x in copies if "work" in vars(x)]
    assert len({repr(x.work) for x in copies}) == 1
    assert plan.work is plan.work
    assert "work" not in vars(copy.copy(plan)), "a copy has the arrays alone"
    assert plan.work == again.work


def test_plans_over_other_pages_are_others():
    cache, (first, other, fork) = cached()
    plan = plan_decode(cache, [first, other, fork], num_heads=2)
    cache.free(fork)
    cache.mark_written(cache.extend([other], [20]))
    again = cache.fork(other)
    assert plan != plan_decode(cache, [first, other, again], num_heads=2)
    before = plan_decode(cache, [other, again], num_heads=2, share_prefix=True)
    slots = cache.extend([again], [1])  # its last page is copied
    cache.mark_written(slots)
    after = plan_decode(cache, [other, again], num_heads=2, share_prefix=True)
    assert before.seqs == after.seqs
    assert before != after


def test_a_plan_that_is_gone_leaves_nothing_behind():
    cache, seqs = cached()
    plan = plan_decode(cache, seqs, num_heads=2)
    decode(randn(3, 1, 2, 64, dtype=torch.bfloat16), cache, 0, plan, backend="emulator")
    serial = plan.serial
    assert decoding.kept(plan).bound
    assert serial in decoding._kept
    assert not [name for name in vars(plan) if name.startswith("_")]
    del plan
    gc.collect()
    assert serial not in decoding._kept


def test_a_plan_finds_itself_in_a_dict_after_it_has_grown():
    cache, seqs = cached()
    plan = plan_decode(cache, seqs, num_heads=2, room=4)
    table = {plan: "kept"}
    object.__setattr__(plan, "lengths", tuple(n + 1 for n in plan.lengths))  # what growing on a GPU does
    assert table[plan] == "kept"


def test_running_a_plan_does_not_change_it():
    q, k, v = qkv(1, 64, 64, 2, 2, 64)
    plan = plan_attention(q, k, causal=True)
    before = pickle.dumps(plan)
    attention(q, k, v, causal=True)
    assert pickle.loads(before) == plan_attention(q, k, causal=True)
    assert tilewise.Plan.__eq__(plan, plan)
