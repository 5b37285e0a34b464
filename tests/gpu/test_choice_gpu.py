"""An indexer's choice on a card: right, without a wait, in graphs and on other streams."""

from __future__ import annotations

import random

import pytest
import torch
from choice_cases import CASES, Problem, check
from oracle import randn
from test_choice import expected, hostile

import tilewise
from tilewise.gpu import choice
from tilewise.gpu.abi import Divisor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("lengths", "counts", "topk", "sizes"), CASES)
def test_the_best_are_chosen(lengths, counts, topk, sizes):
    check(Problem(lengths, counts, topk, **sizes, device="cuda"), (Problem(lengths, counts, topk, **sizes)).choose())
    problem = Problem(lengths, counts, topk, **sizes, device="cuda")
    found = problem.choose()
    check(problem, found)
    assert torch.equal(problem.choose(), found)


def test_random_problems():
    draw = random.Random(4)
    for seed in range(100):
        lengths = [draw.choice([1, 63, 65, 127, 129, 300, 1500]) for _ in range(draw.randint(1, 6))]
        counts = [draw.randint(1, min(n, 70)) for n in lengths]
        sizes = {
            "heads": draw.choice([1, 5, 16, 32, 64]),
            "dim": draw.choice([8, 32, 64, 96, 128]),
            "page": draw.choice([1, 3, 16, 64]),
            "dtype": draw.choice([torch.bfloat16, torch.float16]),
        }
        problem = Problem(lengths, counts, draw.choice([1, 16, 64, 512]), **sizes, seed=seed, device="cuda")
        check(problem, problem.choose())


def test_a_long_context():
    problem = Problem([70_000, 3000], [3, 1], 2048, heads=64, dim=128, page=64, device="cuda")
    check(problem, problem.choose())


@pytest.mark.parametrize(("keys", "topk"), [(5, 4), (4097, 64), (100_000, 2048)])
def test_scores_of_all_kinds(keys, topk):
    given = hostile(keys)
    width = -(-keys // 4) * 4
    scores = torch.full((len(given), width), torch.nan, device="cuda")
    scores[:, :keys] = given.cuda()
    listed = torch.tensor([[n, 0, keys - 1, n] for n in range(len(given))], dtype=torch.int32, device="cuda")
    table = choice.IndexTable(torch.zeros(1, dtype=torch.int32, device="cuda").data_ptr(), 1, Divisor.by(256))
    chosen = torch.full((len(given), topk), -7, dtype=torch.int32, device="cuda")
    choice.select(scores, listed, table, chosen, False, {})
    assert torch.equal(chosen.cpu(), expected(given, topk))


def test_nobody_waits_and_graphs_hold_it():
    problem = Problem([3000, 500], [2, 1], 64, heads=64, dim=128, device="cuda")
    wanted = problem.choose()
    torch.cuda.set_sync_debug_mode("error")
    try:
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            found = problem.choose(rows=True)
        torch.cuda.current_stream().wait_stream(other)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = tilewise.choose_keys(problem.q, problem.weights, problem.cache, 2, problem.plan)
    problem.q.copy_(problem.q.flip(1))
    problem.weights.copy_(problem.weights.flip(1))
    graph.replay()
    assert torch.equal(again, wanted)
    check(problem, wanted)
    assert found.shape == wanted.shape


def test_a_graph_replays_over_sequences_that_come_and_go():
    problem = Problem([3000, 500, 65], 1, 64, heads=64, dim=128, spare=200, device="cuda")
    cache, standing = problem.cache, tilewise.plan_choice(problem.cache, [], topk=64, rows=4, max_length=5000)
    q, weights = problem.q.new_zeros(4, 64, 128), problem.weights.new_zeros(4, 64)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="a graph cannot capture the first choose_keys"), torch.cuda.graph(graph):
        tilewise.choose_keys(q, weights, cache, 2, standing)
    tilewise.choose_keys(q, weights, cache, 2, standing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tilewise.choose_keys(q, weights, cache, 2, standing)
    a, b, c = problem.seqs
    for step, seqs in enumerate(([a, b], [c, a, b], [], [b], [a, c])):
        slots = cache.extend([b], 300)
        cache.index_keys.write(2, slots, randn(300, 128, dtype=torch.bfloat16, seed=step).cuda())
        live = len(seqs)
        q[:live] = randn(live, 64, 128, dtype=torch.bfloat16, seed=step).cuda()
        weights[:live] = randn(live, 64, seed=step).cuda()
        tilewise.renew_plan(standing, cache, seqs)
        graph.replay()
        now = tilewise.plan_choice(cache, seqs, topk=64)
        assert torch.equal(found[:live], tilewise.choose_keys(q[:live], weights[:live], cache, 2, now))
        assert (found[live:] == -1).all()
