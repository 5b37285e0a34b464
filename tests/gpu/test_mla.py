"""Decode over rows that are keys and values at once, in the emulator: kernels/mla by the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from mla_cases import BF16, CUT, DEEPSEEK, FOLDED, FP16, GROUPED, LONG, Problem
from oracle import randn

from tilewise import PagedKVCache, compiler, decode, plan_decode
from tilewise.gpu import mla_kernels
from tilewise.gpu.decode import grow
from tilewise.plan.ranges import Cutter, Own, Shape
from tilewise.plan.worklist import FAR

EDGES = (1, 63, 64, 65, 127, 129, 0, 300)


@pytest.mark.parametrize(("late", "seed"), [(True, 0), (False, 7), (True, 3)])
def test_lengths_at_edges_whatever_the_order_of_events(late, seed):
    Problem(EDGES, heads=8).check(splitting=LONG, late=late, seed=seed)


def test_deepseek_sizes_with_several_tokens():
    Problem((130, 65, 2), heads=8, tokens=2, sizes=DEEPSEEK, page_size=64).check()


def test_more_heads_than_any_model_has():
    """Tokens that see the same keys come as more heads."""
    Problem((65,), heads=256).check()
    with pytest.raises(NotImplementedError, match="up to 2048 query heads of all of them, got 1, 16 and 129 of each"):
        Problem((20,), heads=129, tokens=16).run()


def test_128_heads_are_two_tiles_of_rows():
    problem = Problem((70, 329), heads=128)
    problem.check(splitting=LONG)
    cut = problem.check(splitting=CUT)
    whole = problem.run(splitting=FOLDED, late=False, seed=3)
    assert torch.equal(cut[0], whole[0])
    assert torch.equal(cut[1], whole[1])


def test_every_panel_holds_values():
    Problem((100, 64), heads=16, sizes=(128, 128)).check()


def test_whole_or_cut_the_same_bits():
    problem = Problem((500, 300, 1), heads=8)
    whole, cut = problem.run(splitting=FOLDED), problem.run(splitting=CUT)
    assert torch.equal(whole[0], cut[0])
    assert torch.equal(whole[1], cut[1])
    problem.check(splitting=CUT)


def cancelling(length, heads):
    """A sequence whose last value channels cancel to the rounding of sums, so that any other order of them is seen."""
    problem, half = Problem((length,), heads=heads), length // 2
    rows = problem.gathered(0).clone()
    rows[half : 2 * half] = rows[:half]
    rows[half : 2 * half, 96:128] *= -1
    problem.q[..., 96:128] = 0
    for n, page in enumerate(problem.lists[0].tolist()):
        some = rows[16 * n : 16 * n + 16]
        problem.rows[page, : len(some), 0] = some
    return problem


def same_bits(problem, *ways, **options):
    """However ranges are cut. Whatever rows they are, there is something to be rounded."""
    first = problem.run(splitting=ways[0], **options)
    assert first[0][..., 96:128].abs().max() > 0
    for n, way in enumerate(ways[1:]):
        o, lse = problem.run(splitting=way, late=n % 2 == 0, seed=n, **options)
        assert torch.equal(o, first[0])
        assert torch.equal(lse, first[1])


def test_groups_of_pieces_have_the_same_bits():
    """Up to sixteen pieces, of which the last group may be short; a window begins in the middle of a group."""
    Problem((2040, 1300, 520, 128, 1), heads=8).check(splitting=GROUPED)
    for length in (2040, 1300):
        same_bits(cancelling(length, 8), CUT, GROUPED, FOLDED)
    same_bits(cancelling(2040, 8), GROUPED, CUT, FOLDED, window=1500)
    with pytest.raises(AssertionError):
        same_bits(cancelling(2040, 8), CUT, replace(CUT, pieces=((FAR, 64),)))


def test_groups_of_pieces_where_merging_shares_them_out():
    """More than sixteen pieces; of more than 64 none is a group."""
    short = [replace(way, pieces=((FAR, 64),)) for way in (CUT, GROUPED)]
    for length in (32 * 64 + 50, 64 * 64, 65 * 64):
        same_bits(cancelling(length, 8), *short)


def test_a_list_of_groups_grows():
    """From one group to two, and from a state that is the result to two that are merged."""
    problem, more = Problem((500, 1020, 90), heads=8), Problem((530, 1050, 120), heads=8)
    plan = problem.plan()
    problem.lists, problem.rows = more.lists, more.rows
    problem.run(plan=plan, room=40, splitting=GROUPED)
    problem.lengths, problem.q = more.lengths, more.q
    grow(plan, torch.tensor(more.lengths).numpy(), more.lists)
    grown = problem.check(plan=plan, room=40, splitting=GROUPED)
    made = more.run(splitting=CUT)
    assert torch.equal(grown[0], made[0])


@pytest.mark.parametrize("way", [GROUPED, CUT], ids=["groups", "pieces"])
def test_items_that_a_sequence_does_not_reach(way):
    """Who has one state writes the result, and items in the room to grow come after it in the same block."""
    problem = Problem((250, 90, 700, 0, 128), heads=8)
    problem.check(splitting=way, room=1200)
    problem.check(splitting=way, room=1200, late=False, seed=4)


def grown(before, after, way):
    """What a sequence gives that has come from `before` to `after` tokens under one list."""
    problem, more = cancelling(after, 8), cancelling(after, 8)
    problem.lengths = [before]
    plan, room = problem.plan(), after - before
    problem.run(plan=plan, room=room, splitting=way)
    problem.lengths = [after]
    grow(plan, torch.tensor([after]).numpy(), more.lists)
    return problem.run(plan=plan, room=room, splitting=way)


def test_ranges_that_grow_far():
    """Merging folds runs of sixteen states; a block folds groups, however many. The same are twenty pieces: with room
    for more pieces are larger, or such a range is never whole."""
    ways = [
        replace(mla_kernels.NARROW, whole=whole, groups=groups)
        for whole, groups in ((False, False), (False, True), (True, False))
    ]
    for after in (1024, 1290, 1500):
        first, *others = (grown(1000, after, way)[0] for way in ways)
        assert all(torch.equal(first, other) for other in others)
    one, last = np.array([0]), mla_kernels.NARROW.pieces[-1][1]
    shape = Shape(16, 1, 1, False, longest=mla_kernels.LONGEST, chunk=64, weights=mla_kernels.WEIGHTS[16])
    for planned, stop, size, whole in (
        (1000, 1024, 64, True), (1000, 1025, 128, True), (1000, 3000, 256, True),
        (9000, 20 * last, last, True), (9000, 20 * last + 1, last, False), (100, 20 * last, last, True),
        (100, 20 * last + 1, last, False),
    ):  # fmt: skip
        cut = Cutter(8, 1, shape, mla_kernels.NARROW).cut_own(Own(one, one, np.array([stop]), np.array([planned])))
        assert (cut.fold.item() if whole else size, cut.whole.item()) == (size, whole)


def test_a_window_that_has_left_the_first_groups():
    """A block takes a range whole of which the first groups are hidden by now."""
    problem, more = Problem((260,), heads=8), Problem((860,), heads=8)
    plan, way = problem.plan(window=200), replace(FOLDED, pieces=((FAR, 64),))
    problem.lists, problem.rows = more.lists, more.rows
    problem.run(plan=plan, room=600, splitting=way, window=200)
    problem.lengths, problem.q = more.lengths, more.q
    grow(plan, torch.tensor(more.lengths).numpy(), more.lists)
    problem.check(plan=plan, room=600, splitting=way, window=200)


def test_the_same_bits_whatever_the_batch():
    problem = Problem((700, 5, 64, 200, 33), heads=8)
    together = problem.run()
    alone = Problem((700, 5, 64, 200, 33), heads=8)
    for name in ("lists", "lengths"):
        setattr(alone, name, getattr(alone, name)[:1])
    alone.q = alone.q[:1]
    single = alone.run()
    assert torch.equal(single[0][0], together[0][0])
    assert torch.equal(single[1][0], together[1][0])


def test_a_shared_prefix_has_the_rows_of_all_its_sequences():
    prefixes = [None, (0, 9), (0, 9), (0, 9), (1, 4), (1, 4)]  # the first sequence shares nothing
    lengths = (40, 9 * 16, 9 * 16 + 1, 9 * 16 + 70, 4 * 16 + 5, 4 * 16 + 65)
    problem = Problem([n + 3 for n in lengths], heads=8, tokens=3, prefixes=prefixes)
    plan = problem.plan(share=True)
    assert plan.shared_nodes == 2
    problem.check(plan=plan)


def test_a_window_over_a_shared_prefix():
    problem = Problem((200, 260, 170), heads=8, tokens=2, prefixes=[(0, 10)] * 3)
    problem.check(share=True, window=100)


def test_softcap_sinks_and_float16():
    problem = Problem((129, 70), heads=24, dtype=FP16)
    problem.check(softcap=5.0, sinks=randn(24, seed=5))


@pytest.mark.parametrize("scale", [1e3, -0.5, 0.0])
def test_scales(scale):
    Problem((200, 66), heads=8).check(scale=scale)


def test_references_move_when_scores_rise():
    """Later keys with larger and larger scores, up to ±1e4 and beyond, block after block."""
    problem = Problem((448,), heads=8)
    rise = torch.linspace(0, 60, 448)
    for n, page in enumerate(problem.lists[0].tolist()):
        problem.rows[page] *= rise[16 * n : 16 * n + 16, None, None]
    problem.check(scale=1.0, splitting=LONG)
    problem.check(scale=1.0, splitting=FOLDED)


@pytest.mark.parametrize("of_warp", [0, 3])
def test_one_warp_alone_finds_that_references_must_move(of_warp):
    """The other warps of its warpgroup have to hear of it."""
    problem = Problem((448,), heads=8)
    for block in (4, 5):  # of either warpgroup, after one in which no reference moved
        problem.rows[problem.lists[0][4 * block + of_warp]] *= 10 * block  # sixteen keys of a block: a warp's
    problem.check(splitting=LONG)


@pytest.mark.parametrize("page_size", [1, 24])
def test_pages_of_any_size_are_gathered(page_size):
    Problem((130, 1, 64, 0), heads=8, tokens=2, page_size=page_size).check(splitting=LONG, late=page_size == 1)


def test_chosen_positions():
    Problem((130, 70, 2, 0), heads=8, tokens=2).check_chosen(100)
    Problem((300, 40), heads=8).check_chosen(129, late=False)
    Problem((300,), heads=8).check_chosen(0)


def test_chosen_positions_of_many_tokens():
    """Each of them is a sequence by itself, so that a sequence may have as many as it likes."""
    Problem((40,), heads=2, tokens=17).check_chosen(30)


@pytest.mark.parametrize(("stored", "late", "seed"), [("fp8", True, 0), ("fp8", False, 5), ("int8", True, 0)])
def test_codes_are_widened(stored, late, seed):
    Problem((130, 1, 65, 0), heads=8, sizes=DEEPSEEK, page_size=24, stored=stored).check(
        splitting=LONG, late=late, seed=seed
    )


def test_codes_of_a_shared_prefix_and_of_chosen_positions():
    problem = Problem((170, 200), heads=8, sizes=DEEPSEEK, page_size=24, prefixes=[(0, 5)] * 2, stored="fp8")
    problem.check(share=True, splitting=CUT)
    Problem((130, 40), heads=8, sizes=DEEPSEEK, stored="int8").check_chosen(70)


def test_a_list_grows():
    problem = Problem((100, 31, 16), heads=8)
    more = Problem((103, 34, 19), heads=8)
    plan = problem.plan()
    problem.lists, problem.rows = more.lists, more.rows
    problem.run(plan=plan, room=8)
    problem.lengths, problem.q = more.lengths, more.q
    grow(plan, torch.tensor(more.lengths).numpy(), more.lists)
    problem.check(plan=plan, room=8)


def test_standing_plans_and_the_public_call():
    cache = PagedKVCache(60, 16, 1, 192, value_dim=128, shared_kv=True)
    seqs = [cache.allocate()]
    cache.write(0, cache.extend(seqs, 70), randn(70, 1, 192, dtype=BF16))
    seqs += [cache.fork(seqs[0]), cache.fork(seqs[0])]
    cache.write(0, cache.extend(seqs, [3, 70, 1]), randn(74, 1, 192, dtype=BF16, seed=1))
    q = randn(5, 1, 8, 192, dtype=BF16, seed=2)
    indices = torch.arange(60, dtype=torch.int32).expand(5, 1, 60).contiguous()
    for plan, rows in (
        (plan_decode(cache, seqs, num_heads=8, rows=5, max_length=200), 5),
        (plan_decode(cache, seqs, num_heads=8, share_prefix=True), 3),
    ):
        for options in ({}, {"indices": indices[:rows]}):
            got = decode(q[:rows], cache, 0, plan, return_lse=True, backend="emulator", **options)
            exact = decode(q[:rows].float(), cache, 0, plan, return_lse=True, backend="cpu", **options)
            torch.testing.assert_close(got[1], exact[1], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[0].float(), exact[0], rtol=1e-2, atol=1e-2)


def test_strides_of_queries_and_output():
    problem = Problem((70, 9), heads=8)
    exact = problem.run()
    problem.q = randn(2, 1, 8, 200, dtype=BF16)[..., 3:195].copy_(problem.q)
    found = problem.run()
    assert torch.equal(found[0], exact[0])


def test_batch_of_65():
    problem = Problem([3 + n % 7 for n in range(65)], heads=2)
    got = problem.run()
    for n in (0, 33, 64):
        problem.judge(got, n, slice(None), problem.gathered(n))


def test_what_is_not_served_says_so():
    problem = Problem((20,), heads=8)
    problem.value_dim = 96
    with pytest.raises(NotImplementedError, match="multiple of 128"):
        problem.run()
    problem = Problem((20,), heads=8)
    problem.q = problem.q.half()
    with pytest.raises(NotImplementedError, match="float16 over bf16"):
        problem.run()
    problem = Problem((20,), heads=8)
    with pytest.raises(ValueError, match="indices must have shape"):
        problem.run(indices=torch.zeros(1, 2, 5, dtype=torch.int32))
    with pytest.raises(ValueError, match="int32"):
        problem.run(indices=torch.zeros(1, 1, 5, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="window"):
        problem.run(indices=torch.zeros(1, 1, 5, dtype=torch.int32), window=3)


def test_rings_are_of_two_whole_blocks():
    for rows in (1, 16, 17, 33, 1000):
        tiling = mla_kernels.choose_tiling(576, 512, rows)
        assert tiling.places == 18
        assert mla_kernels.shared_bytes(576, tiling) <= 227 << 10


def test_no_kernel_spills_and_no_product_is_serialised():
    """As users get them; `tilewise kernels --kernel mla_decode --all` looks at every variant."""
    for spec in (mla_kernels.specs()[n] for n in (0, -3)):  # boxes for 16 rows, and for 64
        (row,) = compiler.resource_rows([(spec, "sm_90a")])
        assert row.error is None
        assert (row.spill_stores, row.spill_loads, row.serialised) == (0, 0, ())
    assert not mla_kernels.specs("sm_80")
