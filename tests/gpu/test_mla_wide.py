"""The body of the MLA decode for 64 query rows, kernels/mla/wide.cuh, in the emulator by the oracle: rows as rows of
products, a seesaw of two warpgroups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mla_cases import BF16, CUT, DEEPSEEK, FOLDED, FP16, GROUPED, LONG, SIZES, Problem, shaped
from oracle import randn
from test_mla import cancelling, same_bits

from tilewise import PagedKVCache, compiler, decode, plan_decode, tuned
from tilewise.bench.tune import entry_of, holding
from tilewise.gpu import mla, mla_kernels
from tilewise.gpu.decode import kept

EDGES = (1, 63, 64, 65, 127, 129, 0, 300)


def test_lengths_at_edges_whatever_the_order_of_events():
    problem = Problem(EDGES, heads=33)
    first = problem.check(splitting=LONG)
    for late, seed in ((False, 7), (True, 3)):
        again = problem.run(splitting=LONG, late=late, seed=seed)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_whole_or_cut_the_same_bits():
    """Pieces of two blocks and of three, so that either warpgroup has the last one."""
    problem = Problem((70, 329), heads=80)
    problem.check(splitting=CUT)
    for pieces in (128, 192):
        cut, whole = (replace(how, pieces=((how.pieces[0][0], pieces),)) for how in (CUT, FOLDED))
        one, other = problem.run(splitting=cut), problem.run(splitting=whole, late=False, seed=3)
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_groups_of_pieces_have_the_same_bits():
    same_bits(cancelling(1500, 40), GROUPED, CUT, FOLDED)


def test_the_same_bits_whatever_the_batch():
    problem = Problem((700, 5, 64, 200, 33), heads=64)
    together = problem.run()
    problem.lists, problem.lengths, problem.q = problem.lists[:1], problem.lengths[:1], problem.q[:1]
    single = problem.run()
    assert torch.equal(single[0][0], together[0][0])
    assert torch.equal(single[1][0], together[1][0])


def test_a_shared_prefix_under_a_window():
    problem = Problem((200, 260, 170, 40), heads=17, tokens=2, prefixes=[*[(0, 10)] * 3, None])
    problem.check(share=True, window=100)
    problem.check(window=70)


@pytest.mark.parametrize("scale", [1e3, -0.5, 0.0])
def test_scales(scale):
    Problem((200,), heads=33).check(scale=scale)


def test_references_move_when_scores_rise():
    """Later keys with larger and larger scores, up to ±1e4 and beyond, block after block."""
    problem = Problem((448,), heads=64)
    rise = torch.linspace(0, 60, 448)
    for n, page in enumerate(problem.lists[0].tolist()):
        problem.rows[page] *= rise[16 * n : 16 * n + 16, None, None]
    problem.check(scale=1.0, splitting=LONG)
    problem.check(scale=1.0, splitting=FOLDED)


@pytest.mark.parametrize("row", [0, 63])
def test_one_row_alone_finds_that_its_reference_must_move(row):
    """The rows of its warp, in the other warpgroup too, have to hear of it: in blocks of either."""
    problem = Problem((448,), heads=64)
    for block in (4, 5):  # after one in which no reference moved
        problem.rows[problem.lists[0][4 * block + 2], 7, 0] = problem.q[0, 0, row] * (block - 3)
    problem.check(splitting=LONG, seed=1)


def test_softcap_sinks_and_float16():
    Problem((129, 70), heads=40, dtype=FP16).check(softcap=5.0, sinks=randn(40, seed=5))


def test_pages_of_any_size_are_gathered():
    Problem((330, 1, 64, 0), heads=17, tokens=2, page_size=24).check(splitting=LONG, late=False)


def test_chosen_positions():
    Problem((130, 2, 0), heads=40, tokens=2).check_chosen(100)
    Problem((300,), heads=64).check_chosen(129, late=False)


def test_codes_are_widened():
    with shaped(DEEPSEEK, (64,), ahead=4):  # as many panels as there can be beside a block
        problem = Problem((260, 1, 65, 0), heads=40, sizes=DEEPSEEK, page_size=24, stored="fp8")
        problem.check(splitting=LONG, late=False)


def test_deepseek_sizes_with_several_tokens():
    Problem((130, 2), heads=20, tokens=2, sizes=DEEPSEEK, page_size=64).check()


@pytest.mark.parametrize("sizes", [(128, 128), (320, 128)])
def test_panels_that_are_all_values_or_mostly_none(sizes):
    Problem((400, 64), heads=40, sizes=sizes).check(splitting=LONG)


def test_how_far_ahead_and_how_wide_products_are_changes_no_bit():
    sizes, found = (320, 256), []
    for ahead, together, looks, fetches in ((0, 1, False, 0), (5, 2, True, 2)):
        with shaped(sizes, (64,), ahead=ahead, together=together, looks=looks, fetches=fetches):
            found.append(Problem((300, 129), heads=40, sizes=sizes).check(splitting=LONG))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_standing_plans_and_the_public_call():
    cache = PagedKVCache(60, 16, 1, 192, value_dim=128, shared_kv=True)
    seqs = [cache.allocate()]
    cache.write(0, cache.extend(seqs, 70), randn(70, 1, 192, dtype=BF16))
    seqs += [cache.fork(seqs[0]), cache.fork(seqs[0])]
    cache.write(0, cache.extend(seqs, [3, 70, 1]), randn(74, 1, 192, dtype=BF16, seed=1))
    q = randn(5, 1, 40, 192, dtype=BF16, seed=2)
    plan = plan_decode(cache, seqs, num_heads=40, rows=5, max_length=200)
    got = decode(q, cache, 0, plan, return_lse=True, backend="emulator")
    exact = decode(q.float(), cache, 0, plan, return_lse=True, backend="cpu")
    torch.testing.assert_close(got[1], exact[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[0].float(), exact[0], rtol=1e-2, atol=1e-2)


# ---- what a table says -------------------------------------------------------------------------------------------
def bound(problem: Problem) -> mla_kernels.MlaTiling:
    plan = problem.plan()
    problem.run(plan=plan)
    (made,) = kept(plan).bound.values()
    assert isinstance(made, mla.MlaDecode)
    return made.asked.tiling


def test_a_table_says_how_far_ahead_scores_are():
    problem, chosen = Problem((20,), heads=40), mla_kernels.choose_tiling(*SIZES, 64)
    assert bound(problem) == chosen
    entry = entry_of("mla", replace(chosen, ahead=1))
    with tuned.trying(holding("mla", tuned.mla_key("bf16", *SIZES, 64, "boxes"), entry)):
        assert bound(problem).ahead == 1
        assert bound(Problem((20,), heads=8)).rows == 16
    with tuned.trying(holding("mla", tuned.mla_key("bf16", *SIZES, 64, "gather"), entry)):
        assert bound(problem) == chosen, "rows of this key come by boxes"
    for wrong in ({"ahead": 4}, {"places": 99}, {"rows": 32}, {"looks": 1}, {"fetches": 5}):
        with tuned.trying(holding("mla", tuned.mla_key("bf16", *SIZES, 64, "boxes"), {**entry, **wrong})):
            assert bound(problem) == chosen, f"{wrong} is none"


def test_shapes_that_fit():
    boxes = mla_kernels.choose_tiling(*DEEPSEEK, 128)
    assert (boxes.places, boxes.looks) == (18, True)
    assert mla_kernels.fits(*DEEPSEEK, replace(boxes, ahead=9))
    assert (boxes.fetches, mla_kernels.choose_tiling(*DEEPSEEK, 64).fetches) == (1, 0), "who reads rows with others"
    assert not mla_kernels.fits(*DEEPSEEK, boxes, boxes=False), "a warp looks ahead that loads"
    gathered = mla_kernels.choose_tiling(*DEEPSEEK, 128, boxes=False)
    assert mla_kernels.fits(*DEEPSEEK, replace(gathered, ahead=9), boxes=False)
    assert not mla_kernels.fits(*DEEPSEEK, replace(gathered, fetches=1), boxes=False), "L2 is asked for boxes"
    assert not mla_kernels.fits(*DEEPSEEK, replace(boxes, rows=32, together=2))
    assert not mla_kernels.fits(*DEEPSEEK, replace(boxes, places=19))
    codes = mla_kernels.choose_tiling(*DEEPSEEK, 128, codes=True)
    assert mla_kernels.fits(*DEEPSEEK, replace(codes, ahead=8))
    assert not mla_kernels.fits(*DEEPSEEK, replace(codes, ahead=9)), "codes come two panels at a time"
    assert mla_kernels.choose_tiling(512, 512, 64).places == 18, "whole blocks"
    values = mla_kernels.MlaTiling(64, 21, ahead=5)  # every panel holds values, and weights have a place
    assert mla_kernels.fits(384, 384, replace(values, ahead=6), boxes=False)
    assert mla_kernels.fits(384, 384, replace(values, ahead=6, places=14), boxes=False)
    assert not mla_kernels.fits(384, 384, replace(values, places=13), boxes=False), "not whole blocks"
    assert not mla_kernels.fits(384, 384, replace(values, ahead=1, places=7), boxes=False), "a deadlock"


def test_as_many_panels_ahead_as_fit_where_weights_have_a_place():
    with shaped((384, 384), (64,), places=14, ahead=6):
        Problem((1500,), heads=64, sizes=(384, 384), page_size=24).check(splitting=LONG)


def test_no_kernel_spills_and_no_product_is_serialised():
    """`tilewise kernels --kernel mla_decode --all` looks at every variant."""
    specs = [s for s in mla_kernels.specs(every=True) if dict(s.constants)["kRows"] == 64]
    assert len(specs) == 32
    (row,) = compiler.resource_rows([(specs[1], "sm_90a")])  # boxes
    assert row.error is None
    assert (row.spill_stores, row.spill_loads, row.serialised) == (0, 0, ())
