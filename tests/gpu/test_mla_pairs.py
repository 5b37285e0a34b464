"""MLA decode of more than 64 query rows in the emulator: two blocks share an item and what they load of it."""

from __future__ import annotations

import pytest
import torch
from mla_cases import BF16, CUT, DEEPSEEK, FOLDED, LONG, Problem
from oracle import randn

from tilewise import PagedKVCache, compiler, decode, plan_decode
from tilewise.gpu import mla_kernels

pytestmark = pytest.mark.usefixtures("own_card")

MODES = [(True, 0), (False, 7), (True, 3)]  # copies land late or at once; the order of threads
EDGES = (1, 63, 64, 65, 127, 129, 0, 200)


@pytest.fixture
def chosen(monkeypatch):
    """Sets constants of mla_kernels for a test."""

    def choose(**constants) -> None:
        mla_kernels.choose_tiling.cache_clear()
        for name, value in constants.items():
            monkeypatch.setattr(mla_kernels, name, value)

    yield choose
    monkeypatch.undo()
    mla_kernels.choose_tiling.cache_clear()


@pytest.mark.parametrize(("late", "seed"), MODES)
def test_lengths_at_edges_whatever_the_order_of_events(late, seed):
    """80 rows: the second block has sixteen."""
    Problem(EDGES, heads=80).check(splitting=LONG, late=late, seed=seed)


def test_deepseek_sizes_and_pages_of_64():
    Problem((130, 65), heads=128, sizes=DEEPSEEK, page_size=64).check(splitting=LONG)


@pytest.mark.parametrize("heads", [64, 200])
def test_whole_or_cut_the_same_bits(heads):
    """One block of 64 rows with scores ahead; an item of 128 rows and one of 72."""
    problem = Problem((330, 129), heads=heads)
    whole, cut = problem.run(splitting=FOLDED, late=False, seed=5), problem.check(splitting=CUT)
    assert torch.equal(whole[0], cut[0])
    assert torch.equal(whole[1], cut[1])


def test_the_same_bits_in_pairs_or_not(chosen):
    problem = Problem((300, 40), heads=128)
    chosen(PEERS=2)
    assert mla_kernels.choose_tiling(192, 128, 128).peers == 2
    pairs = problem.run()
    chosen(PEERS=1)
    assert mla_kernels.choose_tiling(192, 128, 128).peers == 1
    single = problem.run()
    assert torch.equal(pairs[0], single[0])
    assert torch.equal(pairs[1], single[1])


def test_scores_one_after_the_other_in_pairs(chosen):
    chosen(AHEAD=(False, False, False))
    Problem((200, 65), heads=128).check(splitting=LONG)


def test_references_move_when_scores_rise():
    problem = Problem((448,), heads=72)
    rise = torch.linspace(0, 60, 448)
    for n, page in enumerate(problem.lists[0].tolist()):
        problem.rows[page] *= rise[16 * n : 16 * n + 16, None, None]
    problem.check(scale=1.0, splitting=LONG)


def test_softcap_and_sinks_in_float16():
    problem = Problem((129, 70), heads=72, dtype=torch.float16)
    problem.check(softcap=5.0, sinks=randn(72, seed=5))


def test_few_rows_beside_a_wide_node():
    """Of the sequences' own ranges the second block has no rows, but half of what is loaded."""
    lengths, prefixes = [40, *(144 + 20 * n for n in range(9))], [None, *[(0, 9)] * 9]
    problem = Problem(lengths, heads=8, prefixes=prefixes)
    problem.check(share=True)
    problem.check(share=True, window=100, late=False, seed=2)


def test_a_standing_plan_that_may_share():
    """Ten rows of eight heads: the list is made by the planner's kernel, for clusters."""
    cache = PagedKVCache(60, 16, 1, 192, value_dim=128, shared_kv=True)
    seqs = [cache.allocate()]
    cache.write(0, cache.extend(seqs, 70), randn(70, 1, 192, dtype=BF16))
    seqs += [cache.fork(seqs[0]) for _ in range(8)]
    own = [3, 70, 1, 5, 9, 20, 2, 4, 1]
    cache.write(0, cache.extend(seqs, own), randn(sum(own), 1, 192, dtype=BF16, seed=1))
    q = randn(10, 1, 8, 192, dtype=BF16, seed=2)
    plan = plan_decode(cache, seqs, num_heads=8, rows=10, max_length=200)
    got = decode(q, cache, 0, plan, return_lse=True, backend="emulator")
    exact = decode(q.float(), cache, 0, plan, return_lse=True, backend="cpu")
    torch.testing.assert_close(got[1], exact[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[0].float(), exact[0], rtol=1e-2, atol=1e-2)


def test_items_that_nobody_looks_up_ahead(chosen):
    chosen(LOOKS=(False, False, False))
    Problem((200, 65, 0), heads=8).check(splitting=CUT)


def test_who_gets_pairs():
    assert mla_kernels.choose_tiling(576, 512, 64).peers == 1
    for rows in (65, 128, 1024):
        tiling = mla_kernels.choose_tiling(576, 512, rows)
        assert (tiling.rows, tiling.peers, tiling.places, tiling.ahead) == (64, 2, 18, True)
    assert mla_kernels.choose_tiling(512, 512, 128).peers == 1  # a block has a place that nothing comes to
    assert mla_kernels.choose_tiling(576, 512, 128, codes=True).peers == 1
    assert mla_kernels.choose_tiling(576, 512, 128, boxes=False).peers == 1
    assert mla_kernels.choose_tiling(320, 256, 128).places % 5 == 0


def test_no_spills_in_pairs():
    spec = mla_kernels.mla_spec(BF16, 576, 512, 64, mla_kernels.choose_tiling(576, 512, 128))
    (row,) = compiler.resource_rows([(spec, "sm_90a")])
    assert row.error is None
    assert (row.spill_stores, row.spill_loads, row.serialised) == (0, 0, ())
