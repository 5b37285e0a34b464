"""Codes of latent rows on their way to 16-bit values, kernels/mla/widen.cuh, in the emulator: by TMA and one by one the
same bits, which test_mla.py judges by the oracle."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from mla_cases import CUT, DEEPSEEK, FOLDED, LONG, Problem, shaped, widened

from tilewise.gpu import mla, mla_kernels

pytestmark = pytest.mark.usefixtures("all_widened")


@pytest.fixture
def all_widened():
    with widened():
        yield


@pytest.mark.parametrize("heads", [8, 33])
def test_by_boxes_or_one_by_one_the_same_bits_whatever_the_order_of_events(heads):
    problem = Problem((330, 1, 65, 0), heads=heads, sizes=DEEPSEEK, page_size=16, stored="fp8")
    expected = problem.check(splitting=LONG)
    found = [problem.run(splitting=LONG, late=False, seed=5), problem.run(splitting=LONG, seed=3)]
    with mock.patch.object(mla, "_one_by_one", return_value=True):
        found += [problem.run(splitting=LONG, late=late, seed=seed) for late, seed in ((True, 0), (False, 2))]
    for o, lse in found:
        assert torch.equal(o, expected[0])
        assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("page_size", [24, 64])
def test_of_other_scales_and_in_pieces(page_size):
    """int8 codes, whose scales are no powers of two; several items of a block."""
    problem = Problem((200, 330, 70), heads=8, sizes=DEEPSEEK, page_size=page_size, stored="int8")
    with shaped(DEEPSEEK, (16,), raw=False, places=11, ahead=2):
        cut, whole = problem.check(splitting=CUT, seed=2), problem.run(splitting=FOLDED)
    assert torch.equal(cut[0], whole[0])
    assert torch.equal(cut[1], whole[1])


@pytest.mark.parametrize("page_size", [24, 32])
def test_64_rows_where_copies_land_at_once(page_size):
    """Places of the ring are what is waited for."""
    problem = Problem((330, 65), heads=33, sizes=DEEPSEEK, page_size=page_size, stored="fp8")
    problem.check(splitting=LONG, late=False, seed=4)


def test_chosen_positions():
    Problem((300, 40), heads=8, sizes=DEEPSEEK, stored="fp8").check_chosen(270, seed=1)


@pytest.mark.parametrize("page_size", [24, 16])
def test_every_channel_is_a_code(page_size):
    """The place of weights is no panel's."""
    Problem((400,), heads=8, sizes=(512, 512), page_size=page_size, stored="fp8").check(splitting=LONG)


def test_a_window_over_a_shared_prefix():
    """Rows begin and end inside of boxes, beside which memory holds NaN."""
    problem = Problem((200, 260, 40), heads=8, sizes=DEEPSEEK, prefixes=[(0, 10), (0, 10), None], stored="fp8")
    problem.check(share=True, window=100)


def test_shapes_that_fit():
    few, many = (mla_kernels.choose_tiling(*DEEPSEEK, rows, codes=True, raw=False) for rows in (16, 64))
    assert (few.places, many.places) == (25, 18)
    for tiling in (few, many):
        assert mla_kernels.fits(*DEEPSEEK, tiling)
        assert not mla_kernels.fits(*DEEPSEEK, replace(tiling, places=tiling.places + 1))
        assert not mla_kernels.fits(*DEEPSEEK, replace(tiling, looks=True)), "no warp is free"
    assert not mla_kernels.fits(192, 128, replace(few, places=12, ahead=0)), "scales of five blocks"
