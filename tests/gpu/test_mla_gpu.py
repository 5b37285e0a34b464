"""MLA decode on a card: random problems, DeepSeek's sizes, the same bits, graphs over growing sequences."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from mla_cases import CUT, DEEPSEEK, FOLDED, SIZES, Problem, chance, seesaw, shaped
from oracle import randn

from tilewise import PagedKVCache, decode, grow_plan, plan_decode

pytestmark = pytest.mark.gpu


def body(wide, sizes=DEEPSEEK, **fields):
    """Within it items of 64 rows have the other body, if it is asked for."""
    return seesaw(sizes, **fields) if wide else nullcontext()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("begin", range(0, 300, 100))
def test_chance(begin, wide):
    """300 random problems, by either body."""
    for seed in range(begin, begin + 100):
        sizes = DEEPSEEK if seed % 3 else SIZES
        with body(wide, sizes):
            chance(30_000 + seed, sizes, device="cuda")


@pytest.mark.parametrize(("heads", "wide"), [(8, False), (16, False), (32, False), (64, False), (128, False),
                                             (64, True), (128, True)])  # fmt: skip
@pytest.mark.parametrize("page_size", [16, 64])
def test_heads_and_pages(heads, page_size, wide):
    lengths = (700, 1, 64, 2000, 129, 0)  # sixteen pieces at most: ranges of more are never taken whole
    problem = Problem(lengths, heads=heads, sizes=DEEPSEEK, page_size=page_size)
    with body(wide):
        whole = problem.check(splitting=FOLDED, device="cuda")
        cut = problem.check(splitting=CUT, device="cuda")
    assert torch.equal(whole[0], cut[0])
    assert torch.equal(whole[1], cut[1])


def test_how_far_ahead_and_how_wide_products_are_changes_no_bit():
    problem, found = Problem((700, 2000, 129), heads=128, sizes=DEEPSEEK, page_size=64), []
    for ahead in (0, 2, 9):
        for together in (1, 2, 4):
            with body(True, ahead=ahead, together=together):
                found.append(problem.run(device="cuda"))
    for o, lse in found:
        assert torch.equal(o, found[0][0])
        assert torch.equal(lse, found[0][1])


@pytest.mark.parametrize("stored", ["fp8", "int8"])
@pytest.mark.parametrize(("heads", "wide"), [(16, False), (128, False), (128, True)])
def test_codes(stored, heads, wide):
    problem = Problem((700, 1, 64, 1500), heads=heads, sizes=DEEPSEEK, page_size=64, stored=stored)
    with body(wide):
        expected = problem.check(device="cuda")
        problem.check_chosen(500, device="cuda")
    with shaped(DEEPSEEK, (16, 64) if not wide else (64,), seesaw=wide, apart=True):
        found = problem.run(device="cuda")
        problem.check_chosen(500, device="cuda")
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(("heads", "wide"), [(16, False), (128, False), (128, True)])
def test_a_sequence_has_the_same_bits_whatever_stands_beside_it(heads, wide):
    with body(wide):
        same_bits(heads)


def same_bits(heads):
    lengths = (3000, 1, 64, 700, 65)
    problem = Problem(lengths, heads=heads, sizes=DEEPSEEK, page_size=64)
    together = problem.run(device="cuda")
    lists, q = problem.lists, problem.q
    for n, length in enumerate(lengths):
        problem.lists, problem.lengths, problem.q = lists[n : n + 1], [length], q[n : n + 1]
        alone = problem.run(device="cuda")
        assert torch.equal(alone[0][0], together[0][n])
        assert torch.equal(alone[1][0], together[1][n])


def test_many_sequences_under_one_prefix():
    problem = Problem(
        [64 * 40 + n for n in range(1, 33)], heads=16, sizes=DEEPSEEK, page_size=64, prefixes=[(0, 40)] * 32
    )
    problem.check(share=True, device="cuda")


@pytest.mark.parametrize(("heads", "wide"), [(16, False), (128, False), (128, True)])
def test_a_graph_replays_over_growing_sequences(heads, wide):
    with body(wide):
        replays(heads)


def replays(heads):
    cache = PagedKVCache(200, 64, 1, 576, value_dim=512, shared_kv=True, device="cuda")
    seqs = [cache.allocate() for _ in range(3)]
    total = sum(counts := [300, 64, 1])
    cache.write(0, cache.extend(seqs, counts), randn(total, 1, 576, dtype=torch.bfloat16).cuda())
    q = randn(3, 1, heads, 576, dtype=torch.bfloat16).cuda()
    plan = plan_decode(cache, seqs, num_heads=heads, room=80)
    out = torch.empty(3, 1, heads, 512, dtype=torch.bfloat16, device="cuda")
    decode(q, cache, 0, plan, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(q, cache, 0, plan, out=out)
    for step in range(70):
        cache.write(0, cache.extend(seqs, 1), randn(3, 1, 576, dtype=torch.bfloat16, seed=step).cuda())
        grow_plan(plan, cache)
        graph.replay()
    exact = decode(q, cache, 0, plan_decode(cache, seqs, num_heads=heads))
    torch.testing.assert_close(out.float(), exact.float(), rtol=1e-2, atol=1e-2)
