"""Codes of latent rows whose loading warps copy or widen, kernels/mla/widen.cuh, in the emulator: the same bits as by
warps that do both, which test_mla.py judges by the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mla_cases import CUT, DEEPSEEK, FOLDED, LONG, Problem, shaped

from tilewise.gpu import mla_kernels


def apart(rows: int, sizes: tuple[int, int] = DEEPSEEK, **fields):
    return shaped(sizes, (rows,), apart=True, **fields)


def test_the_same_bits_whatever_the_order_of_events():
    problem = Problem((330, 1, 65, 0), heads=8, sizes=DEEPSEEK, page_size=24, stored="fp8")
    expected = problem.run(splitting=LONG)
    for late, seed in ((True, 0), (False, 5), (True, 3)):
        with apart(16):
            found = problem.run(splitting=LONG, late=late, seed=seed)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_of_other_scales_and_in_pieces():
    """int8 codes, whose scales are no powers of two; several items of a block."""
    problem = Problem((200, 330, 70), heads=8, sizes=DEEPSEEK, page_size=24, stored="int8")
    with apart(16, slots=14, places=18):
        cut, whole = problem.check(splitting=CUT, seed=2), problem.run(splitting=FOLDED)
    assert torch.equal(cut[0], whole[0])
    assert torch.equal(cut[1], whole[1])


@pytest.mark.parametrize("wide", [False, True])
def test_64_rows_of_either_body(wide):
    problem = Problem((330, 65), heads=33, sizes=DEEPSEEK, page_size=24, stored="fp8")
    with apart(64, seesaw=wide):  # copies that land at once: places of the ring are what is waited for
        problem.check(splitting=LONG, late=False, seed=4)


def test_chosen_positions():
    problem = Problem((300, 40), heads=8, sizes=DEEPSEEK, stored="fp8")
    with apart(16):
        problem.check_chosen(270, seed=1)


def test_every_channel_is_a_code():
    """The place of weights is no panel's."""
    with apart(16, (512, 512)):
        Problem((400,), heads=8, sizes=(512, 512), page_size=24, stored="fp8").check(splitting=LONG)


def test_what_is_no_code_is_not_widened():
    assert not mla_kernels.fits(*DEEPSEEK, mla_kernels.MlaTiling(16, 18, apart=True))


def test_shapes_whose_barriers_tell_laps_apart():
    few, many = (replace(mla_kernels.choose_tiling(*DEEPSEEK, rows, codes=True), apart=True) for rows in (16, 64))
    assert mla_kernels.fits(*DEEPSEEK, few, boxes=False)
    assert mla_kernels.fits(*DEEPSEEK, many, boxes=False)
    assert not mla_kernels.fits(*DEEPSEEK, replace(few, slots=10), boxes=False), "six warps have a pair each"
    assert mla_kernels.fits(*DEEPSEEK, replace(many, slots=4), boxes=False)
    assert not mla_kernels.fits(*DEEPSEEK, replace(many, slots=16, places=10), boxes=False), "a place comes too soon"
    tight = replace(few, slots=16, places=17)
    assert mla_kernels.fits(*DEEPSEEK, tight, boxes=False)
    assert not mla_kernels.fits(512, 512, tight, boxes=False), "two of the places are of weights"
