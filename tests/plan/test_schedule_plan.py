"""Plans of schedules per sequence, per KV head and with lengths: run on the CPU against float64 over the whole mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_state, qkv
from schedule_cases import quick

from tilewise import cpu, reference
from tilewise.cpu.scoring import Scoring
from tilewise.plan import plan_dense, plan_varlen
from tilewise.plan.schedule import BlockSchedule
from tilewise.scores import Scores

HEAD_DIM = 8


def seen_by(schedule: BlockSchedule, heads_q: int) -> torch.Tensor:
    """(batch or 1, heads_q, Nq, Nk): the schedule's mask, each head's pattern for all query heads that share it."""
    mask = schedule.to_mask()
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    return mask.repeat_interleave(heads_q // mask.shape[1], 1)


def check(schedule: BlockSchedule, batch: int, heads_q: int, heads_kv: int, **options: Any) -> None:
    """attention under the schedule, planned and run on the CPU, against the oracle under its mask."""
    nq, nk = schedule.seqlen_q, schedule.seqlen_k
    q, k, v = qkv(batch, nq, nk, heads_q, heads_kv, HEAD_DIM)
    plan = plan_dense(batch, nq, nk, heads_q, heads_kv, HEAD_DIM, schedule=schedule, **options)
    scores = Scores((None, None), HEAD_DIM**-0.5)
    starts = ([b * n for b in range(batch + 1)] for n in (nq, nk))
    o, lse = cpu.run(plan, q, [(k, v)], Scoring.of(scores, *starts))
    got = o, lse.view(batch, nq, heads_q).transpose(1, 2)
    mask = seen_by(schedule, heads_q)
    exact, honest = (f(q, k, v, mask=mask, **options) for f in (reference.attention, reference.baseline))
    assert_state(got, exact, honest)
    assert (got[0][(exact[1] == -torch.inf).transpose(1, 2)] == 0).all(), "what sees nothing gives 0"
    seen = mask & reference.visible(nq, nk, **options)
    assert plan.flops == 4 * HEAD_DIM * int(seen.expand(batch, heads_q, nq, nk).sum())


@st.composite
def problems(draw: st.DrawFn) -> tuple[BlockSchedule, int, int, int]:
    """A schedule and the sequences, query heads and KV heads of a problem that it fits."""
    heads_kv, group, batch = draw(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)))
    own_heads = draw(st.sampled_from([1, heads_kv, heads_kv * group]))
    own_batch = draw(st.sampled_from([1, batch]))
    block_q, block_k = draw(st.tuples(*[st.sampled_from([16, 32, 48])] * 2))
    nq, nk = draw(st.tuples(*[st.integers(1, 3)] * 2))
    seqlen_q, seqlen_k = nq * block_q - draw(st.integers(0, 15)), nk * block_k - draw(st.integers(0, 15))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    kept = torch.rand(own_batch, own_heads, nq, nk, generator=rng) < draw(st.floats(0.2, 1))
    more = {}
    for name, count, block in (("lengths_q", nq, block_q), ("lengths_k", nk, block_k)):
        if draw(st.booleans()):
            step = draw(st.sampled_from([1, 4, block]))  # so that lengths have divisors in common
            rows = draw(st.sampled_from([1, own_batch]))
            more[name] = torch.randint(0, block // step + 1, (rows, count), generator=rng) * step
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_q": block_q, "block_k": block_k}
    return BlockSchedule.from_blocks(kept, **sizes, **more), batch, heads_kv * group, heads_kv


@quick
@given(problems(), st.sampled_from([{}, {"causal": True}, {"window": (7, 3)}, {"window": (None, 20)}]))
def test_any_schedule(problem: tuple[BlockSchedule, int, int, int], options: dict[str, Any]) -> None:
    check(*problem, **options)


def test_many_tiles_of_one_length() -> None:
    """Video tiles: every block has 60 of 64 rows."""
    kept = torch.rand(4, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.4
    lengths = torch.full((8,), 60)
    sizes = {"seqlen_q": 512, "seqlen_k": 512, "block_q": 64, "block_k": 64}
    schedule = BlockSchedule.from_blocks(kept, lengths_q=lengths, lengths_k=lengths, **sizes)
    check(schedule, 1, 4, 4)
    check(schedule, 2, 8, 4, causal=True)


def test_packed_sequences_with_lengths() -> None:
    lengths, heads = [40, 64], 2
    schedules = [
        BlockSchedule.from_blocks(
            torch.rand(2, -(-n // 16), -(-n // 32), generator=torch.Generator().manual_seed(n)) < 0.7,
            lengths_k=torch.tensor([20, 7]),
            seqlen_q=n,
            seqlen_k=n,
            block_q=16,
            block_k=32,
        )
        for n in lengths
    ]
    q, k, v = (x[0] for x in qkv(1, 104, 104, heads, heads, HEAD_DIM))
    plan = plan_varlen([0, 40, 104], [0, 40, 104], heads, heads, HEAD_DIM, schedules=schedules)
    scoring = Scoring.of(Scores((None, None), HEAD_DIM**-0.5), [0, 40, 104], [0, 40, 104])
    o, lse = cpu.run(plan, q, [(k, v)], scoring)
    for n, (start, end) in enumerate(((0, 40), (40, 104))):
        one = [x[None, start:end] for x in (q, k, v)]
        exact, honest = (f(*one, mask=seen_by(schedules[n], heads)) for f in (reference.attention, reference.baseline))
        assert_state((o[None, start:end], lse[start:end].T[None]), exact, honest)


@pytest.mark.parametrize("lengths", [None, torch.tensor([16, 8, 16, 4])])
def test_shared_patterns_are_listed_once(lengths: torch.Tensor | None) -> None:
    sizes = {"seqlen_q": 64, "seqlen_k": 64, "block_q": 16, "block_k": 16}
    kept = torch.ones(4, 4, dtype=torch.bool)
    shared = plan_dense(5, 64, 64, 2, 2, 8, schedule=BlockSchedule.from_blocks(kept, lengths_k=lengths, **sizes))
    assert [item.count for item in shared.work] == [5]  # type: ignore[union-attr]
    own = BlockSchedule.from_blocks(kept.expand(5, 1, 4, 4), lengths_k=lengths, **sizes)
    assert [item.count for item in plan_dense(5, 64, 64, 2, 2, 8, schedule=own).work] == [1] * 5  # type: ignore[union-attr]
