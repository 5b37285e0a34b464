"""MLA decode on a card: random problems, DeepSeek's sizes, the same bits, graphs over growing sequences."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from mla_cases import CUT, DEEPSEEK, FOLDED, SIZES, Problem, chance, shaped, widened
from oracle import randn

from tilewise import PagedKVCache, decode, grow_plan, plan_decode
from tilewise.gpu import mla

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("begin", range(0, 300, 100))
def test_chance(begin):
    """300 random problems."""
    for seed in range(begin, begin + 100):
        sizes = DEEPSEEK if seed % 3 else SIZES
        chance(30_000 + seed, sizes, device="cuda")


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("page_size", [16, 64])
def test_heads_and_pages(heads, page_size):
    lengths = (700, 1, 64, 2000, 129, 0)  # sixteen pieces at most: ranges of more are never taken whole
    problem = Problem(lengths, heads=heads, sizes=DEEPSEEK, page_size=page_size)
    whole = problem.check(splitting=FOLDED, device="cuda")
    cut = problem.check(splitting=CUT, device="cuda")
    assert torch.equal(whole[0], cut[0])
    assert torch.equal(whole[1], cut[1])


def test_how_far_ahead_and_how_wide_products_are_changes_no_bit():
    problem, found = Problem((700, 2000, 129), heads=128, sizes=DEEPSEEK, page_size=64), []
    for ahead, fetches in ((0, 0), (2, 1), (9, 2)):
        for together in (1, 2, 4):
            with shaped(DEEPSEEK, (128,), ahead=ahead, together=together, fetches=fetches):
                found.append(problem.run(device="cuda"))
    for o, lse in found:
        assert torch.equal(o, found[0][0])
        assert torch.equal(lse, found[0][1])


@pytest.mark.parametrize("stored", ["fp8", "int8"])
@pytest.mark.parametrize("heads", [16, 128])
def test_codes(stored, heads):
    """By boxes, and one by one."""
    problem = Problem((700, 1, 64, 1500), heads=heads, sizes=DEEPSEEK, page_size=64, stored=stored)
    expected = problem.check(device="cuda")
    with mock.patch.object(mla, "_one_by_one", return_value=True):
        found = problem.run(device="cuda")
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    problem.check_chosen(500, device="cuda")


@pytest.mark.parametrize("stored", ["fp8", "int8"])
def test_codes_of_few_rows_that_are_widened(stored):
    with widened():
        test_codes(stored, 16)


@pytest.mark.parametrize("heads", [16, 128])
def test_a_sequence_has_the_same_bits_whatever_stands_beside_it(heads):
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


@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_replays_over_growing_sequences(heads):
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
