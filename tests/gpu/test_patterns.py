"""Random schedules and functions against float64: on the CPU backend, and by the Hopper forward in the emulator."""

from __future__ import annotations

import random

import expressions
import pytest
import torch
from forward_cases import FP16, check, check_varlen, packed
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import qkv
from pattern_cases import FP8, Kind, Problem, drawn, random_kind
from pattern_parts import MASKS, SCORES, Formula, bounded, steady

from tilewise import BlockSchedule

REACH = 400


@st.composite
def problems(draw, longest: int, area: int, *, fresh: bool = True, fp8: bool = False) -> Problem:
    """fresh: with functions that were never compiled before."""
    # A seed, not hypothesis's own Random, whose choices are mostly the first ones
    rng = random.Random(draw(st.integers(0, 2**32)))
    asked = draw(st.sampled_from(("none", "mask", "score", "both")))
    mask = score = None
    if asked in ("mask", "both"):
        mask = Formula(draw(st.sampled_from(MASKS)))
        if fresh and draw(st.booleans()):
            mask = Formula(draw(expressions.masks()).source)
    if asked in ("score", "both"):
        score = Formula(draw(st.sampled_from(SCORES)), score=True)
        if fresh and draw(st.booleans()):
            score = bounded(draw(expressions.scores()).source, draw(st.sampled_from(("", "", "k % 7 == 3"))))
            assume(steady(score, longest))
    return Problem(rng, random_kind(rng, mask, score, fp8), longest=longest, area=area)


@given(problems(longest=300, area=200_000))
@settings(max_examples=60)
def test_on_the_cpu(problem):
    problem.check("cpu", backend="cpu")


@given(problems(longest=REACH, area=150_000))
@settings(max_examples=22)
def test_in_the_emulator(problem):
    problem.check("cpu", backend="emulator")


@given(problems(longest=REACH, area=40_000, fresh=False, fp8=True))
@settings(max_examples=3)
def test_fp8_in_the_emulator(problem):
    problem.check("cpu", backend="emulator")


@pytest.mark.parametrize(
    "kind",
    [
        Kind(128, blocks=(64, 64), lengths=True),
        Kind(64, blocks=(128, 32), heads=(2, 1)),
        Kind(128, FP16, blocks=(64, 64), mask=Formula("documents"), spares=True),
    ],
    ids=["lengths", "packed heads", "spares"],
)
def test_many_of_one_kernel(kind):
    for seed in range(8):
        Problem(random.Random(seed), kind, longest=300, area=100_000).check()


def test_a_problem_drawn_by_a_seed():
    problem = drawn(20, longest=250)
    assert str(problem) == str(drawn(20, longest=250))
    problem.check()


# ---- what they found -------------------------------------------------------------------------------------------------
def whole(nq: int, nk: int, heads: int | None = None, **options) -> BlockSchedule:
    """All blocks of 64 × 64."""
    blocks = torch.ones(*(() if heads is None else (heads,)), -(-nq // 64), -(-nk // 64), dtype=torch.bool)
    return BlockSchedule.from_blocks(blocks, seqlen_q=nq, seqlen_k=nk, block_q=64, block_k=64, **options)


@pytest.mark.parametrize(("nq", "nk"), [(300, 80), (70, 2500), (300, 300)])
@pytest.mark.parametrize("lengths", [False, True])
def test_a_sequence_without_a_schedule_may_be_the_longest(nq, nk, lengths):
    options = {"lengths_k": torch.tensor([10, 5])} if lengths else {}
    check_varlen(*packed((70, nq), (80, nk), 2, 2, 64), schedule=[whole(70, 80, **options), None])


def test_a_mask_holds_where_a_sequence_has_no_schedule():
    """Blocks that another sequence's schedule calls whole are not whole there."""
    inner = torch.ones(2, 2, dtype=torch.bool).tril(-1)  # what the mask leaves whole
    given = packed((70, 90, 0), (80, 100, 0), 2, 2, 64)
    check_varlen(*given, schedule=[whole(70, 80, whole=inner), None, None], mask=lambda b, h, q, k: k <= q)


def test_schedules_of_kv_heads_and_of_query_heads_side_by_side():
    """Of packed sequences, each may have its own kind."""
    schedules = [whole(70, 80, 2), whole(70, 80, 4), whole(70, 80)]
    check_varlen(*packed((70,) * 3, (80,) * 3, 4, 2, 64), schedule=schedules)


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("which", ["mask", "score"])
def test_a_sequence_without_keys_looks_nothing_up(which, scheduled):
    table = torch.rand(80)
    function = {"mask": lambda b, h, q, k: table[k] > 0.3, "score": lambda s, b, h, q, k: s + table[k]}[which]
    schedule = [whole(70, 80), whole(5, 0)] if scheduled else None
    check_varlen(*packed((70, 5), (80, 0), 2, 2, 64), schedule=schedule, **{which: function})


def test_rows_without_a_key_between_others():
    """Blocks of no row and of all rows side by side in one tile, and lists that end in the middle of a block."""
    q, k, v = qkv(1, 130, 333, 2, 1, 128, dtype=torch.bfloat16)
    for seed in range(3):
        problem = Problem(random.Random(seed), Kind(blocks=(16, 16)))
        kept = torch.rand(9, 21, generator=torch.Generator().manual_seed(problem.seed)) < 0.3
        kept[seed::3] = seed == 1
        sizes = {"seqlen_q": 130, "seqlen_k": 333, "block_q": 16, "block_k": 16}
        check(q, k, v, schedule=BlockSchedule.from_blocks(kept, **sizes), causal=True)


def test_fp8_is_among_the_kinds():
    assert random_kind(random.Random(0), None, None, fp8=True).dtype == FP8
