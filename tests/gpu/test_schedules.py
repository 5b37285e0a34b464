"""The kernels of schedules in the emulator: bits, lists and the largest scores by definition, whatever is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_kernel_cases import (
    check_lists,
    check_pack,
    check_scatter,
    check_select,
    check_turned,
    geometry,
    lead4,
)

from tilewise import compiler
from tilewise.gpu import schedules as kernels
from tilewise.plan import schedule as plan_schedule
from tilewise.plan.schedule import BlockSchedule

leads = st.sampled_from([(), (1,), (3,), (1, 1), (2, 1), (2, 3)])
columns = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 96, 128, 130, 1100]))
seeds = st.integers(0, 2**32)
few = settings(max_examples=25)


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bools(*shape: int, seed: int = 0, density: float = 0.5) -> torch.Tensor:
    return torch.rand(shape, generator=chance(seed)) < density


# ---- bools -----------------------------------------------------------------------------------------------------------


@given(leads, st.integers(0, 9), columns, seeds, st.booleans())
def test_pack(lead: tuple[int, ...], nq: int, nk: int, seed: int, whole: bool) -> None:
    kept = bools(*lead, nq, nk, seed=seed, density=seed % 5 / 4)
    check_pack(kept, bools(*lead, nq, nk, seed=seed + 1) if whole else None)


@pytest.mark.parametrize("offset", [0, 1, 4, 16])
def test_pack_takes_views_of_any_alignment(offset: int) -> None:
    wide = bools(3, 7, 200, seed=offset)
    check_pack(wide[..., offset : offset + 160])
    flat = wide.reshape(-1)[offset : offset + 5 * 64].view(5, 64)
    check_pack(flat, ~flat)
    check_pack(wide.transpose(0, 2)[:64], wide.transpose(0, 2)[64:128])
    check_pack(wide[:1].expand(4, 7, 200))


def test_any_byte_but_zero_is_true() -> None:
    bytes_ = torch.randint(0, 256, (4, 64), generator=chance(0), dtype=torch.uint8)
    bytes_[:, ::3] = 0
    for x in (bytes_, bytes_[:, :33].contiguous()):
        bits, _ = kernels.pack(x.view(torch.bool))
        assert torch.equal(bits, kernels.pack(x != 0)[0])


# ---- lists -----------------------------------------------------------------------------------------------------------


def hostile(seed: int, *shape: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Mostly key blocks, also repeated and unsorted ones, and numbers far outside."""
    rng = chance(seed)
    x = torch.randint(0, max(1, cols), shape, generator=rng, dtype=torch.int64)
    far = torch.tensor([-1, cols, -(2**31), 2**31 - 1, -(2**62), 2**62, 2**32, 2**32 + 1])
    far = far if dtype == torch.int64 else far.clamp(-(2**31), 2**31 - 1)
    strange = torch.rand(shape, generator=rng) < seed % 3 / 10
    return torch.where(strange, far[torch.randint(0, len(far), shape, generator=rng)], x).to(dtype)


dtypes = st.sampled_from([torch.int32, torch.int64])


@given(leads, st.integers(0, 5), columns, st.integers(0, 70), dtypes, seeds, st.booleans())
def test_scatter_of_anything(
    lead: tuple[int, ...], nq: int, cols: int, width: int, dtype: torch.dtype, seed: int, full: bool
) -> None:
    counts = hostile(seed, *lead, nq, cols=width + 1, dtype=dtype)
    indices = hostile(seed + 1, *lead, nq, width, cols=cols, dtype=dtype)
    if not full:
        check_scatter(counts, indices, cols)
        return
    full_counts = hostile(seed + 2, *lead, nq, cols=4, dtype=dtype)
    check_scatter(counts, indices, cols, full_counts, hostile(seed + 3, *lead, nq, 3, cols=cols, dtype=dtype))


@pytest.mark.parametrize(
    ("count", "row", "faults"),
    [
        (3, [0, 4, 9, 4], 0),
        (0, [5, 3, 3, 99], 0),
        (4, [0, 4, 9, 4], 2 | 4),
        (4, [0, 4, 4, 9], 2),
        (4, [9, 4, 1, 0], 4),
        (2, [0, 10, -5, -5], 1),
        (2, [-1, 3, 0, 0], 1),
        (5, [0, 1, 2, 3], 8),
        (-1, [0, 1, 2, 3], 8),
    ],
)
def test_faults_by_hand(count: int, row: list[int], faults: int) -> None:
    for dtype in (torch.int32, torch.int64):
        counts, indices = torch.tensor([count], dtype=dtype), torch.tensor([row], dtype=dtype)
        check_scatter(counts, indices, 10)
        assert kernels.scatter(counts, indices, None, None, 10)[2].item() == faults


def test_full_lists_are_kept_and_whole() -> None:
    counts, indices = torch.tensor([1, 2]), torch.tensor([[3, 0], [1, 40]])
    full_counts, full_indices = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([[0, 39, 0], [40, 5, 5]])
    check_scatter(counts, indices, 41, full_counts, full_indices)
    bits, whole, faults = kernels.scatter(counts, indices, full_counts, full_indices, 41)
    assert bits.tolist() == [[[[0b1001, 1 << 7], [0b10, 1 << 8]]]]
    assert whole is not None
    assert whole.tolist() == [[[[1, 1 << 7], [0, 1 << 8]]]]
    assert faults.tolist() == [[[0, 2]]], "block 40 of row 1 is in both of its lists"


@pytest.mark.parametrize("seed", range(4))
def test_scatter_in_any_order_of_threads(seed: int) -> None:
    counts = torch.full((9,), 100)
    check_scatter(counts, hostile(5, 9, 100, cols=70, dtype=torch.int64), 70, seed=seed)


@given(leads, st.integers(0, 40), columns, seeds)
def test_transpose(lead: tuple[int, ...], nq: int, nk: int, seed: int) -> None:
    check_turned(bools(*lead, nq, nk, seed=seed, density=seed % 4 / 3), bools(*lead, nq, nk, seed=seed + 1))


@given(leads, st.integers(0, 5), columns, st.one_of(st.none(), st.integers(0, 80)), seeds)
def test_lists(lead: tuple[int, ...], nq: int, nk: int, width: int | None, seed: int) -> None:
    check_lists(bools(*lead, nq, nk, seed=seed, density=seed % 5 / 4), width)


def test_bits_past_the_last_key_block_are_ignored() -> None:
    bits = torch.full((1, 1, 3, 2), -1, dtype=torch.int32)
    counts, indices = kernels.lists(bits, 40, 64)
    assert counts.tolist() == [[[40] * 3]]
    assert indices is not None
    assert indices.max() == 39
    turned, _ = kernels.transpose(bits, None, 40)
    assert turned.tolist() == [[[[0b111]] * 40]]


# ---- scores ----------------------------------------------------------------------------------------------------------

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("normal", "few values", "strange", "tiny", "equal")


def scores_of(kind: str, *shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    rng = chance(seed)
    x = torch.randn(shape, generator=rng)
    if kind == "few values":
        x = torch.randint(-2, 3, shape, generator=rng).float() / 4
        x[torch.rand(shape, generator=rng) < 0.2] = -0.0
    elif kind == "strange":
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e-45, -0.0])
        x = torch.where(torch.rand(shape, generator=rng) < 0.3, odd[torch.randint(0, 7, shape, generator=rng)], x)
    elif kind == "tiny":
        x = torch.exp(30 * x)
    elif kind == "equal":
        x = torch.full(shape, float(torch.rand((), generator=rng)) - 0.3)
    return x.to(dtype)


asked = st.one_of(
    st.integers(1, 50).map(lambda k: {"top_k": k}),
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]).map(lambda t: {"threshold": t}),
)


@given(leads, st.integers(0, 3), st.integers(0, 128), st.sampled_from(KINDS), asked, seeds, st.booleans(), st.data())
def test_select(
    lead: tuple[int, ...],
    nq: int,
    nk: int,
    kind: str,
    wanted: dict[str, Any],
    seed: int,
    causal: bool,
    data: st.DataObject,
) -> None:
    block_q, block_k = data.draw(st.tuples(*[st.sampled_from([16, 48, 128])] * 2))
    sizes = geometry(nq, nk, block_q, block_k, data.draw(st.integers(0, 15)))
    x = scores_of(kind, *lead, nq, nk, seed=seed, dtype=torch.float32)
    check_select(x.abs() if "threshold" in wanted and seed % 2 else x, wanted, sizes, causal)


# Rows of every kind of kernel: in one warp, in eight, and too long for registers.
@pytest.mark.parametrize(("nk", "dtype"), [(640, torch.float32), (640, torch.bfloat16), (1300, torch.float32)])
@pytest.mark.parametrize("kind", KINDS)
def test_select_long_rows(nk: int, dtype: torch.dtype, kind: str) -> None:
    for wanted in ({"top_k": 64}, {"top_k": 1}, {"top_k": 9999}, {"threshold": 0.9}, {"threshold": 1.0}):
        x = scores_of(kind, 2, nk, seed=nk, dtype=dtype)
        sizes = geometry(2, nk, less=3)
        check_select(x.abs() if "threshold" in wanted else x, wanted, sizes, kind == "equal")


@pytest.mark.parametrize("dtype", FLOATS)
def test_select_rows_that_no_register_holds(dtype: torch.dtype) -> None:
    for nk, kind in ((8193, "normal"), (8250, "equal"), (9000, "few values")):
        x = scores_of(kind, 1, nk, seed=1, dtype=dtype)
        check_select(x, {"top_k": 500}, geometry(1, nk))
        check_select(x.abs(), {"threshold": 0.7}, geometry(1, nk), causal=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_select_dtypes(dtype: torch.dtype) -> None:
    for kind in KINDS:
        x = scores_of(kind, 3, 2, 100, seed=3, dtype=dtype)
        check_select(x, {"top_k": 7}, geometry(2, 100))
        check_select(x.transpose(0, 1).abs(), {"threshold": 0.6}, geometry(3, 100))


def test_ten_equal_scores_reach_nine_tenths_with_nine() -> None:
    x = torch.full((1, 10), 0.1)
    for share, count in ((0.9, 9), (0.5, 5), (0.51, 6), (0.7, 7), (1.0, 10), (1e-9, 1)):
        bits, faults = kernels.select(x, None, share, None)
        assert bits.item() == 2**count - 1, share
        assert faults is not None
        assert faults.item() == 0


def test_a_row_of_zeros_keeps_nothing_by_share() -> None:
    bits, _ = kernels.select(torch.zeros(2, 40), None, 0.5, None)
    assert not bits.any()
    check_select(torch.zeros(2, 40), {"threshold": 0.5}, geometry(2, 40), causal=True)


# ---- through the class -----------------------------------------------------------------------------------------------


@few
@given(st.integers(1, 5), st.integers(1, 70), seeds)
def test_a_schedule_of_bits_is_the_one_on_the_cpu(nq: int, nk: int, seed: int) -> None:
    """What a schedule on a device does, over bits on the CPU and in the emulator."""
    kept, whole, rng = bools(2, 3, nq, nk, seed=seed), bools(2, 3, nq, nk, seed=seed + 1), chance(seed)
    sizes = geometry(nq, nk, 32, 16, less=seed % 16)
    lengths = {
        "lengths_q": torch.randint(0, 33, (2, nq), generator=rng, dtype=torch.int32),
        "lengths_k": torch.randint(0, 17, (nk,), generator=rng, dtype=torch.int32),
    }
    here = BlockSchedule.from_blocks(kept, whole=whole, **lengths, **sizes)
    there = BlockSchedule._on_device(here._grid, *kernels.pack(kept, whole), **lengths)
    assert there.cpu() == here
    assert there.transpose().cpu() == here.transpose()
    assert torch.equal(there.counts, here.counts)
    for width in (None, 3):
        assert all(torch.equal(x, y) for x, y in zip(there.lists(width), here.lists(width), strict=True))
    assert torch.equal(there.to_mask(), here.to_mask())
    assert there.show(1, batch=1) == here.show(1, batch=1)
    assert (there.num_blocks, there.density) == (here.num_blocks, here.density)
    there.check()
    assert there == there
    assert there != here
    assert len({there, here, there}) == 2


def test_check_tells_of_what_a_device_was_given() -> None:
    grid = BlockSchedule.full(48, 64, block_q=16, block_k=16, heads=2)._grid
    counts = torch.tensor([[1, 2, 1], [1, 2, 9]])
    indices = torch.tensor([[[0, 0], [1, 2], [3, 0]], [[3, 0], [2, 1], [4, 4]]])
    bits, whole, faults = kernels.scatter(counts, indices, None, None, 4)
    schedule = BlockSchedule._on_device(grid, bits, whole, None, None, faults)
    with pytest.raises(
        ValueError, match="key blocks that are not ascending in query block 1 of head 1, and 1 more row"
    ):
        schedule.check()
    BlockSchedule._on_device(grid, bits, whole, None, None, torch.zeros_like(faults)).check()
    for name, lengths in (("lengths_q", [16, 17, 3]), ("lengths_k", [0, 0, -1, 0])):
        wrong = {"lengths_q": None, "lengths_k": None, name: None}
        schedule = BlockSchedule._on_device(grid, bits, whole, **wrong)
        vars(schedule)[name] = torch.tensor([lengths], dtype=torch.int32)
        with pytest.raises(ValueError, match=f"{name} must be between 0 and the block size 16, got"):
            schedule.check()
    scores = torch.tensor([[0.5, 0.5], [0.5, -0.5]])
    bits, faults = kernels.select(scores, None, 0.5, None)
    grid = BlockSchedule.full(32, 32, block_q=16, block_k=16)._grid
    with pytest.raises(ValueError, match="negative scores in query block 1 of head 0"):
        BlockSchedule._on_device(grid, bits, None, None, None, faults).check()


def test_too_many_words_are_refused() -> None:
    shape = lead4(torch.empty(1, dtype=torch.bool).expand(2**16, 2**21))
    with pytest.raises(ValueError, match=r"at most 2\^31 − 1 words"):
        kernels.pack(shape)


def test_compiles_without_spills() -> None:
    for spec in kernels.specs():
        report = compiler.compile(spec, "sm_90a").report
        assert report.spill_stores == report.spill_loads == 0, spec


# ---- calls like earlier ones ----------------------------------------------------------------------------------------
def test_what_was_checked_before_is_checked_by_its_kind(monkeypatch):
    """A call like an earlier one makes the same; one that differs in anything that is checked is refused as ever."""
    monkeypatch.setattr(plan_schedule, "_on_cuda", lambda given: True)
    monkeypatch.setattr(plan_schedule, "_checked", {})
    sizes = {"seqlen_q": 200, "seqlen_k": 300, "block_q": 64, "block_k": 64}
    for seed in range(3):
        kept = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(seed)) < 0.5
        made = BlockSchedule.from_blocks(kept, **sizes)
        assert torch.equal(made.bits, bits_of_blocks(kept)), seed
        assert (made.seqlen_q, made.seqlen_k, made.block_q, made.block_k, made.heads) == (200, 300, 64, 64, 2)
        assert made.whole is made.lengths_q is made.lengths_k is None
        assert made.form == BlockSchedule.from_blocks(kept, **sizes).form
    assert len(plan_schedule._checked) == 1
    wrong: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (TypeError, "seqlen_q", kept, {"seqlen_q": 200.0}),
        (TypeError, "block_k", kept, {"block_k": True}),
        (ValueError, "block_q", kept, {"block_q": 60}),
        (ValueError, "must end in", kept, {"seqlen_k": 400}),
        (ValueError, "must end in", kept[:, :3], {}),
        (ValueError, "must be bool", kept.int(), {}),
        (TypeError, "blocks must be", kept.tolist(), {}),
        (ValueError, "whole must be", kept, {"whole": kept[0]}),
        (ValueError, "lengths_q must have shape", kept, {"lengths_q": torch.zeros(7, dtype=torch.int32)}),
    ]
    for error, match, blocks, options in wrong:
        with pytest.raises(error, match=match):
            BlockSchedule.from_blocks(blocks, **{**sizes, **options})


def bits_of_blocks(kept: torch.Tensor) -> torch.Tensor:
    """(1, heads, rows, words), by arithmetic on Python's ints."""
    words = [[[sum(1 << n for n, one in enumerate(row) if one)] for row in head] for head in kept.tolist()]
    return torch.tensor(words, dtype=torch.int32)[None]
