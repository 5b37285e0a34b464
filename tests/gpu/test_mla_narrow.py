"""The body of the MLA decode for up to 32 rows by mma.sync, kernels/mla/narrow.cuh, in the emulator by the oracle."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from mla_cases import CUT, DEEPSEEK, FOLDED, LONG, SIZES, Problem, by_sync, chance, shaped
from test_mla_mma import CASES

from tilewise import compiler, emulator
from tilewise.gpu import mla, mla_kernels

WIDE = ("128 heads", "not served")  # of 64 rows, or of no kernel


@pytest.mark.parametrize("name", [name for name in CASES if name not in WIDE])
def test_case(name):
    """What test_mla.py asks of the other bodies."""
    with by_sync():
        CASES[name][1]()


def test_which_kernel(monkeypatch):
    found = []
    monkeypatch.setattr(emulator, "launch", lambda spec, *_, **__: found.append(dict(spec.constants)))
    for heads in (8, 32, 33):
        Problem((20,), heads=heads).run()
        with by_sync():
            Problem((20,), heads=heads).run()
    assert [(of["kRows"], of["kSync"]) for of in found] == [
        (16, False), (16, True), (32, False), (32, True), (64, False), (64, False),
    ]  # fmt: skip


def test_as_the_other_body_within_rounding():
    """Products are the same, sums are in another order."""
    problem = Problem((330, 1, 65, 0), heads=24, sizes=DEEPSEEK)
    wgmma = problem.check(splitting=LONG)
    with by_sync():
        sync = problem.check(splitting=LONG)
    torch.testing.assert_close(sync[1], wgmma[1], rtol=0, atol=1e-5)
    assert not torch.equal(sync[0], wgmma[0])


@pytest.mark.parametrize("heads", [8, 24])
def test_codes_by_boxes_or_one_by_one_have_the_same_bits_whatever_the_order_of_events(heads):
    problem = Problem((330, 1, 65, 0), heads=heads, sizes=DEEPSEEK, page_size=16, stored="fp8")
    with by_sync():
        expected = problem.check(splitting=LONG)
        found = [problem.run(splitting=LONG, late=False, seed=5), problem.run(splitting=LONG, seed=3)]
        with mock.patch.object(mla, "_one_by_one", return_value=True):
            found += [problem.run(splitting=LONG, late=late, seed=seed) for late, seed in ((True, 0), (False, 2))]
    for o, lse in found:
        assert torch.equal(o, expected[0])
        assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("page_size", [24, 64])
@pytest.mark.parametrize(("heads", "stored"), [(8, "int8"), (24, "int8"), (16, "fp8")])
def test_codes_in_pieces_and_in_the_smallest_ring(page_size, heads, stored):
    """Several items of a block; int8's scales are no powers of two."""
    problem = Problem((200, 330, 70), heads=heads, sizes=DEEPSEEK, page_size=page_size, stored=stored)
    rows = 16 if heads <= 16 else 32
    tiling = mla_kernels.choose_tiling(*DEEPSEEK, rows, codes=True, boxes=page_size == 64, sync=True)
    with shaped(DEEPSEEK, (rows,), sync=True, places=2 * mla_kernels.block_places(*DEEPSEEK, tiling)):
        cut, whole = problem.check(splitting=CUT, seed=2), problem.run(splitting=FOLDED)
    assert torch.equal(cut[0], whole[0])
    assert torch.equal(cut[1], whole[1])


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 3e4, 1e30])
def test_queries_of_any_size_over_codes(size):
    """They are halves for a while, scaled by row."""
    problem = Problem((130,), heads=3, sizes=DEEPSEEK, stored="fp8")
    problem.q[:, :, 1] *= size
    with by_sync():
        problem.check(scale=min(0.1, 1 / size) if size else 0.1)


def test_every_channel_is_a_code():
    for page_size in (24, 16):
        with by_sync():
            Problem((400,), heads=8, sizes=(512, 512), page_size=page_size, stored="fp8").check(splitting=LONG)


def test_int8_codes_at_both_ends():
    """−128 has no counterpart above 0."""
    problem = Problem((70,), heads=8, sizes=DEEPSEEK, stored="int8")
    codes, scales, rest = problem.parts
    seen = codes[problem.lists[0].tolist()]
    assert seen.min() < -120
    codes[problem.lists[0][0], 3] = torch.arange(512).remainder(256).sub(128).to(torch.int8)
    problem.unrounded = problem.format.decode([codes, scales, rest], torch.float32)
    with by_sync():
        problem.check()


def test_a_row_of_32_whose_reference_must_move_alone():
    """In either group of rows, for keys of either of its warps' groups."""
    for row, key in ((3, 2), (19, 60)):
        problem = Problem((448,), heads=32)
        for block in (4, 5):
            page = problem.lists[0][4 * block + key // 16]
            problem.rows[page, key % 16, 0] = problem.q[0, 0, row] * (block - 3)
        with by_sync():
            problem.check(splitting=LONG, seed=1)


@pytest.mark.parametrize("sizes", [(128, 128), (320, 128), (512, 512), (256, 256)])
@pytest.mark.parametrize("heads", [16, 32])
def test_other_sizes(sizes, heads):
    with by_sync():
        Problem((300, 64), heads=heads, sizes=sizes).check(splitting=LONG, late=False)


def test_chance():
    for seed in range(6):
        with by_sync():
            chance(60_000 + seed, DEEPSEEK if seed % 3 == 0 else SIZES)


def test_shapes_that_fit():
    for rows, codes, places in ((16, False, 25), (32, False, 22), (16, True, 22), (32, True, 21)):
        tiling = mla_kernels.choose_tiling(*DEEPSEEK, rows, codes=codes, sync=True)
        assert tiling.places == places
        assert (tiling.looks, tiling.raw) == (not codes or rows == 16, codes and rows == 16)
        assert mla_kernels.fits(*DEEPSEEK, tiling)
        assert not mla_kernels.fits(*DEEPSEEK, replace(tiling, places=places + 1))
        assert not mla_kernels.fits(*DEEPSEEK, replace(tiling, ahead=1)), "no panel is scored ahead"
        block = mla_kernels.block_places(*DEEPSEEK, tiling)
        assert mla_kernels.fits(*DEEPSEEK, replace(tiling, places=2 * block))
        assert not mla_kernels.fits(*DEEPSEEK, replace(tiling, places=2 * block - 1)), "a deadlock"
    assert not mla_kernels.fits(*DEEPSEEK, replace(mla_kernels.choose_tiling(*DEEPSEEK, 64), sync=True)), "64 rows"
    assert not mla_kernels.choose_tiling(*DEEPSEEK, 64, sync=True).sync


@pytest.mark.parametrize(("rows", "stored"), [(16, ""), (16, "fp8"), (32, "")])
def test_no_kernel_spills(rows, stored):
    """`tilewise kernels --kernel mla_decode --all` looks at every variant."""
    tiling = mla_kernels.choose_tiling(*DEEPSEEK, rows, codes=bool(stored), sync=True)
    spec = mla_kernels.mla_spec(torch.bfloat16, *DEEPSEEK, 64, tiling, stored=stored)
    (row,) = compiler.resource_rows([(spec, "sm_90a")])
    assert row.error is None
    assert (row.spill_stores, row.spill_loads) == (0, 0)
