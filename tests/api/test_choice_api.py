"""plan_choice and choose_keys on CPU tensors: what is chosen, and what is said of bad input."""

from __future__ import annotations

import pytest
import torch
from choice_cases import CASES, Problem, check

import tilewise
from tilewise.cpu import choice

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("lengths", "counts", "topk", "sizes"), CASES)
def test_the_best_are_chosen(lengths, counts, topk, sizes):
    problem = Problem(lengths, counts, topk, **{**sizes, "dtype": torch.float32})
    check(problem, problem.choose())


def test_few_scores_at_a_time(monkeypatch):
    problem = Problem([300, 65], [9, 65], 20, dtype=torch.float32)
    wanted = problem.choose()
    monkeypatch.setattr(choice, "AT_ONCE", 3000)
    assert torch.equal(problem.choose(), wanted)


@pytest.mark.parametrize(("backend", "dtype"), [("auto", torch.float32), ("emulator", torch.bfloat16)])
def test_equal_scores_and_nan(backend, dtype):
    problem = Problem([40], 1, 8, dtype=dtype)
    problem.q.abs_()
    problem.weights.abs_()
    index = problem.cache.index_keys
    stored = index.places(problem.seqs)[0]
    index.stored(2)[stored] = 1.0
    assert problem.choose(backend).tolist() == [list(range(8))]
    index.stored(2)[stored[3:36]] = torch.nan
    assert problem.choose(backend).tolist() == [[0, 1, 2, 3, 36, 37, 38, 39]], "their products count as 0"
    problem.weights.neg_()
    assert problem.choose(backend).tolist() == [list(range(3, 11))]
    problem.weights.fill_(torch.nan)
    assert problem.choose(backend).tolist() == [list(range(8))]


def test_what_is_chosen_is_read_by_decode():
    """A list of all keys gives what decode gives without one."""
    problem = Problem([30, 9], 1, 64, dtype=torch.float32)
    cache = problem.cache
    rows = torch.randn(len(problem.keys[0]) + len(problem.keys[1]), 1, 24)
    grown = tilewise.PagedKVCache(9, 16, 1, 24, value_dim=16, shared_kv=True, kv_format="fp32", index_dim=32)
    seqs = grown.allocate(2)
    slots = grown.extend(seqs, [30, 9])
    grown.write(0, slots, rows)
    grown.index_keys.write(0, slots, torch.cat(problem.keys))
    plan = tilewise.plan_decode(grown, seqs, num_heads=4)
    q = torch.randn(2, 1, 4, 24)
    chosen = tilewise.choose_keys(problem.q, problem.weights, grown, 0, tilewise.plan_choice(grown, seqs, topk=64))
    o = tilewise.decode(q, grown, 0, plan, indices=chosen[:, None])
    torch.testing.assert_close(o, tilewise.decode(q, grown, 0, plan))
    assert cache.num_layers == 3


def test_no_gradient_is_asked_for():
    problem = Problem([30], 1, 8, dtype=torch.float32)
    wanted = problem.choose()
    problem.q.requires_grad_()
    assert torch.equal(problem.choose(), wanted)


def test_no_sequences():
    problem = Problem([5], 1, 4, dtype=torch.float32)
    plan = tilewise.plan_choice(problem.cache, [], topk=4)
    found = tilewise.choose_keys(torch.empty(0, 8, 32), torch.empty(0, 8), problem.cache, 2, plan)
    assert found.shape == (0, 4)


def plan_of(problem, **options):
    given = {"seqs": problem.seqs, "topk": 4, **options}
    return tilewise.plan_choice(problem.cache, given.pop("seqs"), given.pop("counts", 1), **given)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
        ({"topk": 2.0}, TypeError, "topk must be an int, got float"),
        ({"counts": 6}, ValueError, r"counts must be at least 1 and at most 5, got 6; sequence \d+ has 5 tokens"),
        ({"counts": 0}, ValueError, "counts must be at least 1 and at most 5, got 0"),
        ({"counts": [1, 1]}, ValueError, "counts must be one number or one for each of 1 sequences, got 2"),
        ({"seqs": [77]}, (KeyError, ValueError), "77"),
    ],
)
def test_bad_plans(options, error, message):
    problem = Problem([5], 1, 4)
    with pytest.raises(error, match=message):
        plan_of(problem, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rows": 4}, ValueError, "rows and max_length go together"),
        ({"max_length": 4}, ValueError, "rows and max_length go together"),
        ({"rows": 0, "max_length": 9}, ValueError, "rows must be at least 1 and at most 1024, got 0"),
        (
            {"rows": 4, "max_length": 9, "counts": [1]},
            TypeError,
            "counts must be an int, got list; with rows it is one",
        ),
        ({"rows": 1024, "max_length": 2**21}, ValueError, "must be at most 1073741824 scores, got 1024 · 1 · 2097152"),
        ({"rows": 1, "max_length": 9}, ValueError, "seqs must be at most the plan's 1 rows, got 2"),
        ({"rows": 2, "max_length": 6}, ValueError, r"max_length of 6 tokens, but sequence \d+ has 7"),
    ],
)
def test_bad_standing_plans(options, error, message):
    problem = Problem([5, 7], 1, 4)
    with pytest.raises(error, match=message):
        plan_of(problem, **options)


def test_a_standing_plan_that_was_not_renewed():
    problem = Problem([5, 7], 1, 4, dtype=torch.float32)
    plan = plan_of(problem, rows=3, max_length=20)
    problem.cache.extend(problem.seqs, 1)
    q, weights = torch.zeros(3, 8, 32), torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"plan is out of date: .* call renew_plan"):
        tilewise.choose_keys(q, weights, problem.cache, 2, plan)
    with pytest.raises(ValueError, match="plan was made for another cache"):
        tilewise.renew_plan(plan, Problem([5], 1, 4).cache, [])
    with pytest.raises(ValueError, match=r"q must have shape \(3, heads, 32\), got \(2, 8, 32\)"):
        tilewise.choose_keys(q[:2], weights[:2], problem.cache, 2, plan_of(problem, rows=3, max_length=20))


def test_bad_caches():
    cache = tilewise.PagedKVCache(4, 16, 1, 24)
    with pytest.raises(ValueError, match=r"cache must have index keys; make it with PagedKVCache\(\.\.\., index_dim"):
        tilewise.plan_choice(cache, [], topk=4)
    with pytest.raises(TypeError, match="cache must be a PagedKVCache or a PrefixCache, got list"):
        tilewise.plan_choice([], [], topk=4)
    problem = Problem([5], 1, 4)
    empty = problem.cache.allocate()
    with pytest.raises(ValueError, match=f"sequence {empty} has none; leave it out"):
        tilewise.plan_choice(problem.cache, [empty], topk=4)


def test_bad_calls():
    problem = Problem([5, 7], 1, 4, dtype=torch.float32)
    q, weights, cache, plan = problem.q, problem.weights, problem.cache, problem.plan
    cases = [
        ((q[:1], weights, cache, 2, plan), ValueError, r"q must have shape \(2, heads, 32\), got \(1, 8, 32\)"),
        ((q[..., :16], weights, cache, 2, plan), ValueError, r"q must have shape \(2, heads, 32\)"),
        ((q, weights[:, :3], cache, 2, plan), ValueError, r"weights must have shape \(2, 8\), got \(2, 3\)"),
        ((q, weights.double(), cache, 2, plan), ValueError, "weights must be one of float32, got float64"),
        ((q.int(), weights, cache, 2, plan), ValueError, "q must be one of float32, float16, bfloat16, got int32"),
        ((q, weights, cache, 1, plan), ValueError, r"layer must be one that has index keys, \(2, 0\), got 1"),
        ((q, weights, cache, 0, plan), ValueError, "index keys are not all written in layer 0"),
        ((q, weights, cache, 2, None), TypeError, "plan must come from tilewise.plan_choice, got NoneType"),
        ((q, weights, Problem([5], 1, 4).cache, 2, plan), ValueError, "plan was made for another cache"),
    ]
    for args, error, message in cases:
        with pytest.raises(error, match=message):
            tilewise.choose_keys(*args)
    with pytest.raises(TypeError, match="rows must be True or False"):
        tilewise.choose_keys(q, weights, cache, 2, plan, rows=1)
    cache.extend(problem.seqs, 1)
    with pytest.raises(ValueError, match=r"plan is out of date: .* call plan_choice again"):
        tilewise.choose_keys(q, weights, cache, 2, plan)
