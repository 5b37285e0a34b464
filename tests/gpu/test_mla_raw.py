"""The body of the MLA decode for up to sixteen rows over codes, kernels/mla/raw.cuh, in the emulator by the oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import test_mla
import torch
from mla_cases import CUT, DEEPSEEK, FOLDED, LONG, Problem, chance, shaped, widened

from tilewise import compiler, emulator
from tilewise.gpu import mla, mla_kernels

BOTH = pytest.mark.parametrize("stored", ["fp8", "int8"])
CASES = {
    "fp8 codes": partial(test_mla.test_codes_are_widened, "fp8", True, 0),
    "int8 codes": partial(test_mla.test_codes_are_widened, "int8", False, 5),
    "codes, shared and chosen": test_mla.test_codes_of_a_shared_prefix_and_of_chosen_positions,
}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    """What test_mla.py asks of all bodies."""
    CASES[name]()


def test_which_kernel(monkeypatch):
    found = []
    monkeypatch.setattr(emulator, "launch", lambda spec, *_, **__: found.append(dict(spec.constants)))
    for heads in (8, 17):
        for stored in ("", "fp8"):
            Problem((20,), heads=heads, sizes=DEEPSEEK, stored=stored).run()
    with widened():
        Problem((20,), heads=8, sizes=DEEPSEEK, stored="fp8").run()
    assert [(of["kRows"], of["kRaw"]) for of in found] == [
        (16, False), (16, True), (32, False), (32, False), (16, False),
    ]  # fmt: skip


@pytest.mark.parametrize("lengths", [(1, 63, 64, 65, 127, 129), (330, 1, 65, 0)])
@pytest.mark.parametrize(("late", "seed"), [(True, 0), (False, 7)])
def test_lengths_at_edges_whatever_the_order_of_events(lengths, late, seed):
    Problem(lengths, heads=16, sizes=DEEPSEEK, page_size=64, stored="fp8").check(late=late, seed=seed)


def test_as_codes_that_are_widened_within_rounding():
    """fp8 codes under powers of two are bfloat16 values exactly: orders of sums differ, and P's rounding."""
    problem = Problem((330, 1, 65, 0), heads=8, sizes=DEEPSEEK, stored="fp8")
    raw = problem.check(splitting=LONG)
    assert problem.raw
    with widened():
        wide = problem.check(splitting=LONG)
    assert not problem.raw
    torch.testing.assert_close(raw[1], wide[1], rtol=0, atol=1e-5)
    assert not torch.equal(raw[0], wide[0])


def test_by_boxes_or_one_by_one_the_same_bits_whatever_the_order_of_events():
    problem = Problem((330, 1, 65, 0), heads=8, sizes=DEEPSEEK, page_size=16, stored="fp8")
    expected = problem.check(splitting=LONG)
    found = [problem.run(splitting=LONG, late=False, seed=5), problem.run(splitting=LONG, seed=3)]
    with mock.patch.object(mla, "_one_by_one", return_value=True):
        found += [problem.run(splitting=LONG, late=late, seed=seed) for late, seed in ((True, 0), (False, 2))]
    for o, lse in found:
        assert torch.equal(o, expected[0])
        assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("page_size", [24, 64])
@BOTH
def test_in_pieces_and_in_the_smallest_ring(page_size, stored):
    """Several items of a block; int8's scales are no powers of two."""
    problem = Problem((200, 330, 70), heads=8, sizes=DEEPSEEK, page_size=page_size, stored=stored)
    tiling = mla_kernels.choose_tiling(*DEEPSEEK, 16, codes=True, boxes=page_size == 64)
    with shaped(DEEPSEEK, (16,), places=2 * mla_kernels.block_places(*DEEPSEEK, tiling)):
        cut, whole = problem.check(splitting=CUT, seed=2), problem.run(splitting=FOLDED)
    assert torch.equal(cut[0], whole[0])
    assert torch.equal(cut[1], whole[1])


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 3e4, 1e30])
def test_queries_of_any_size(size):
    """They are halves for a while, scaled by row."""
    problem = Problem((130,), heads=3, sizes=DEEPSEEK, stored="fp8")
    problem.q[:, :, 1] *= size
    problem.check(scale=min(0.1, 1 / size) if size else 0.1)


def scaled(problem, factors):
    """The problem with the scales of its only sequence's tokens times `factors`, (tokens,) or (tokens, groups)."""
    codes, scales, rest = problem.parts
    factors = torch.as_tensor(factors, dtype=torch.float32).reshape(len(factors), -1)
    for n, factor in enumerate(factors):
        page, slot = problem.lists[0][n // problem.page_size], n % problem.page_size
        scales[page, slot, 0] *= factor
    problem.parts = [codes, scales, rest]
    problem.unrounded = problem.format.decode(problem.parts, torch.float32)
    return problem


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-3, 1e3, 1e12])
@BOTH
def test_values_of_any_size(size, stored):
    """Weights are halves, in units that the scales of a group ask for."""
    problem = scaled(Problem((200,), heads=3, sizes=DEEPSEEK, stored=stored), torch.full((200,), size))
    problem.check(scale=min(0.04, 0.04 / size), splitting=LONG)


@pytest.mark.parametrize("factor", [4.0, 64.0, 4096.0, 1e9])
def test_scales_that_grow_move_units(factor):
    """From block to block, in one group of channels only; then weights of earlier blocks count for less."""
    factors = torch.ones(448, 4)
    for block in range(7):
        factors[64 * block + 5 :, block % 2] *= factor ** (1 / 3)
    scaled(Problem((448,), heads=3, sizes=DEEPSEEK, stored="fp8"), factors).check(
        scale=1e-4 / factor**0.5, splitting=LONG
    )


@pytest.mark.parametrize("tiny", [1e-4, 1e-6])
def test_scales_of_0_before_small_ones(tiny):
    """They ask for no unit."""
    factors = torch.full((448, 4), tiny)
    factors[:64, 1:] = 0.0
    scaled(Problem((448,), heads=3, sizes=DEEPSEEK, stored="fp8"), factors).check(scale=0.04, splitting=LONG)


def test_scales_below_0():
    """Nobody writes them, but they are multiplied with like others."""
    factors = torch.where(torch.arange(130) % 3 == 0, -1.0, 1.0)
    scaled(Problem((130,), heads=3, sizes=DEEPSEEK, stored="fp8"), -2.0 * factors).check(scale=0.02, splitting=LONG)


def test_one_token_far_larger_than_the_others():
    """It comes last, and its value alone would not fit a half in the unit of the others."""
    factors = torch.ones(130)
    factors[129] = 2.0**20
    scaled(Problem((130,), heads=3, sizes=DEEPSEEK, stored="fp8"), factors).check(scale=1e-8, splitting=LONG)


@pytest.mark.parametrize("page_size", [16, 24])
def test_garbage_beyond_the_end(page_size):
    """Codes that are NaN, and scales that are infinite, NaN or far too large, of either sign, of tokens that are not
    there."""
    problem = Problem((70,), heads=3, sizes=DEEPSEEK, page_size=page_size, stored="fp8")
    expected = problem.run(splitting=LONG)
    for garbage in (torch.inf, torch.nan, 3e38, -torch.inf, -3e38, -1e36):
        for n in range(70, -(-70 // page_size) * page_size):
            page, slot = problem.lists[0][n // page_size], n % page_size
            problem.parts[0].view(torch.uint8)[page, slot] = 0x7F
            problem.parts[1][page, slot] = garbage
        found = problem.run(splitting=LONG)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_a_window_over_a_shared_prefix():
    """Rows begin and end inside of boxes, beside which memory holds NaN."""
    problem = Problem((200, 260, 40), heads=8, sizes=DEEPSEEK, prefixes=[(0, 10), (0, 10), None], stored="fp8")
    problem.check(share=False, window=100)
    assert problem.raw


@pytest.mark.parametrize("page_size", [24, 16])
def test_every_channel_is_a_code(page_size):
    Problem((400,), heads=8, sizes=(512, 512), page_size=page_size, stored="fp8").check(splitting=LONG)


def test_chosen_positions():
    Problem((300, 40), heads=8, sizes=DEEPSEEK, stored="fp8").check_chosen(270, seed=1)


def test_int8_codes_at_both_ends():
    """−128 has no counterpart above 0."""
    problem = Problem((70,), heads=8, sizes=DEEPSEEK, stored="int8")
    codes, scales, rest = problem.parts
    seen = codes[problem.lists[0].tolist()]
    assert seen.min() < -120
    codes[problem.lists[0][0], 3] = torch.arange(512).remainder(256).sub(128).to(torch.int8)
    problem.unrounded = problem.format.decode([codes, scales, rest], torch.float32)
    problem.check()


def test_a_row_whose_reference_must_move_alone():
    """For keys of one warp."""
    problem = Problem((448,), heads=8, sizes=DEEPSEEK, stored="int8")
    for row, key in ((3, 2), (5, 60)):
        for block in (4, 5):
            page = problem.lists[0][4 * block + key // 16]
            problem.parts[1][page, key % 16] *= 10 * (block - 3)
            problem.q[0, 0, row] *= 3
    problem.unrounded = problem.format.decode(problem.parts, torch.float32)
    problem.check(splitting=LONG, seed=1)


def test_chance():
    for seed in range(60_000, 60_016, 2):
        chance(seed, DEEPSEEK)


def test_shapes_that_fit():
    for boxes in (True, False):
        tiling = mla_kernels.choose_tiling(*DEEPSEEK, 16, codes=True, boxes=boxes)
        assert tiling.places == 15
        assert (tiling.looks, tiling.raw) == (boxes, True)
        assert mla_kernels.fits(*DEEPSEEK, tiling)
        assert not mla_kernels.fits(*DEEPSEEK, replace(tiling, places=24))
        assert not mla_kernels.fits(*DEEPSEEK, replace(tiling, ahead=1)), "no panel is scored ahead"
        assert not mla_kernels.fits(*DEEPSEEK, replace(tiling, codes=False)), "16-bit rows"
        assert not mla_kernels.fits(*DEEPSEEK, replace(tiling, rows=32)), "32 rows"
        block = mla_kernels.block_places(*DEEPSEEK, tiling)
        assert mla_kernels.fits(*DEEPSEEK, replace(tiling, places=2 * block))
        assert not mla_kernels.fits(*DEEPSEEK, replace(tiling, places=2 * block - 1)), "a deadlock"
    assert not mla_kernels.choose_tiling(*DEEPSEEK, 32, codes=True).raw
    assert not mla_kernels.choose_tiling(*DEEPSEEK, 16).raw


@BOTH
def test_no_kernel_spills(stored):
    """`tilewise kernels --kernel mla_decode --all` looks at every variant."""
    tiling = mla_kernels.choose_tiling(*DEEPSEEK, 16, codes=True)
    spec = mla_kernels.mla_spec(torch.bfloat16, *DEEPSEEK, 64, tiling, stored=stored)
    (row,) = compiler.resource_rows([(spec, "sm_90a")])
    assert row.error is None
    assert (row.spill_stores, row.spill_loads) == (0, 0)
