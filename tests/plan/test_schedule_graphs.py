"""Schedules that are made and read inside of compiled functions: the graph is broken there, and nothing else."""

from __future__ import annotations

import pytest
import torch
from oracle import qkv

from tilewise import BlockSchedule, attention, schedule_of

SIZES = {"seqlen_q": 200, "seqlen_k": 300, "block_q": 64, "block_k": 64}
BLOCKS = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.5
GIVEN = BlockSchedule.from_blocks(BLOCKS, **SIZES)
COUNTS, INDICES = torch.tensor([2, 0, 1, 3]), torch.tensor([[0, 4, 0], [0, 0, 0], [2, 0, 0], [1, 2, 3]])
MAKERS = {
    "from_blocks": lambda: BlockSchedule.from_blocks(BLOCKS, **SIZES),
    "from_lists": lambda: BlockSchedule.from_lists(COUNTS, INDICES, **SIZES),
    "from_scores": lambda: BlockSchedule.from_scores(BLOCKS.float(), top_k=2, **SIZES),
    "from_bits": lambda: BlockSchedule.from_bits(GIVEN.bits, **SIZES),
    "random": lambda: BlockSchedule.random(200, 300, block_q=64, block_k=64, sparsity=0.5, seed=1),
    "arrays": lambda: BlockSchedule(**SIZES, heads=2, indptr=GIVEN.indptr, indices=GIVEN.indices),
    "schedule_of": lambda: schedule_of(lambda b, h, q, k: q + 17 >= k, 1, 2, 200, 300, block_q=64, block_k=64),
    "transpose": lambda: GIVEN.transpose().transpose(),
    "to": lambda: GIVEN.to("cpu"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_made_in_a_compiled_function(name):
    q, k, v = qkv(1, 200, 300, 2, 2, 16)

    def call(q, k, v):
        schedule = MAKERS[name]()
        return attention(q + 1, k, v, schedule=schedule) * 2, schedule.bits + 1

    torch._dynamo.reset()
    for got, expected in zip(torch.compile(call, backend="eager")(q, k, v), call(q, k, v), strict=True):
        assert torch.equal(got, expected)


def test_read_in_a_compiled_function():
    def call(x, schedule):
        counts, indices = schedule.lists(5)
        read = schedule.bits.sum() + schedule.density + schedule.to_mask().sum() + counts.sum() + indices.sum()
        return x + read + torch.as_tensor(schedule.indices.sum())

    torch._dynamo.reset()
    made = BlockSchedule.from_blocks(BLOCKS, **SIZES)
    assert torch.equal(torch.compile(call, backend="eager")(torch.zeros(3), made), call(torch.zeros(3), GIVEN))


def test_what_is_refused_is_refused_in_a_compiled_function():
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="block_q"):
        torch.compile(lambda: BlockSchedule.from_blocks(BLOCKS, **{**SIZES, "block_q": 0}), backend="eager")()


def test_no_graph_holds_one():
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"BlockSchedule\.from_blocks cannot be part of a compiled"):
        torch.compile(MAKERS["from_blocks"], backend="eager", fullgraph=True)()
