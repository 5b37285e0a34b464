"""The makers of BlockSchedule against the definition, element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cpu_seconds import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import blocks, covered, distances, grid, heads_or_none, lengths, quick, schedules

from tilewise.plan.schedule import BlockSchedule


@quick
@given(schedules())
def test_mask_round_trip(schedule: BlockSchedule) -> None:
    mask = schedule.to_mask()
    block_sizes = {"block_q": schedule.block_q, "block_k": schedule.block_k}
    assert BlockSchedule.from_mask(mask, **block_sizes) == schedule
    assert BlockSchedule.from_mask(mask.numpy(), **block_sizes) == schedule
    for head in range(schedule.heads or 1):
        one = mask if schedule.heads is None else mask[head]
        assert np.array_equal(grid(schedule, head), covered(one.numpy(), schedule.block_q, schedule.block_k))


@quick
@given(schedules())
def test_density_is_that_of_the_mask_s_blocks(schedule: BlockSchedule) -> None:
    # A block's first element is in it however ragged the edge is.
    firsts = schedule.to_mask()[..., :: schedule.block_q, :: schedule.block_k]
    assert schedule.num_blocks == int(firsts.sum())
    expected = firsts.double().mean().item() if firsts.numel() else 0.0
    assert schedule.density == pytest.approx(expected)
    assert schedule.sparsity == pytest.approx(1.0 - expected)


@quick
@given(st.tuples(lengths, lengths, blocks, blocks), st.integers(0, 12), st.integers(0, 2**32))
def test_from_mask_keeps_a_block_with_any_element(shape: tuple[int, ...], count: int, seed: int) -> None:
    seqlen_q, seqlen_k, block_q, block_k = shape
    mask = np.zeros((seqlen_q, seqlen_k), bool)
    mask.reshape(-1)[np.random.default_rng(seed).integers(0, max(1, mask.size), count if mask.size else 0)] = True
    schedule = BlockSchedule.from_mask(mask, block_q=block_q, block_k=block_k)
    assert np.array_equal(grid(schedule), covered(mask, block_q, block_k))
    assert bool(schedule.to_mask()[torch.from_numpy(mask)].all())


def test_from_mask_takes_a_view_that_is_not_contiguous() -> None:
    mask = torch.rand(100, 80, generator=torch.Generator().manual_seed(0)) < 0.001
    expected = covered(mask.T.numpy(), 16, 32)
    assert np.array_equal(grid(BlockSchedule.from_mask(mask.T, block_q=16, block_k=32)), expected)


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        ([[True]], TypeError, "mask must be a numpy array or a torch.Tensor, got list"),
        (np.ones((4, 4)), ValueError, "mask must be bool .* got float64"),
        (torch.ones(4, 4), ValueError, "mask must not be torch.float32; it takes bool"),
        (torch.ones(4, 4, dtype=torch.int32), ValueError, "mask must be bool .* got int32"),
        (torch.ones(4, dtype=torch.bool), ValueError, r"mask must have shape \(Nq, Nk\) or .* got \(4,\)"),
        (np.ones((1, 1, 4, 4), bool), ValueError, "mask must have shape"),
        (np.ones((0, 4, 4), bool), ValueError, "mask must have at least one head"),
    ],
)
def test_from_mask_refuses(mask: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BlockSchedule.from_mask(mask)


@quick
@given(
    st.tuples(lengths, lengths, blocks, blocks),
    st.one_of(st.none(), st.integers(0, 300)),
    st.one_of(st.none(), st.integers(0, 300)),
)
def test_banded_is_the_elementwise_window_blockwise(
    shape: tuple[int, ...], left: int | None, right: int | None
) -> None:
    seqlen_q, seqlen_k, block_q, block_k = shape
    away = distances(seqlen_q, seqlen_k)
    visible = (away >= -(10**6 if left is None else left)) & (away <= (10**6 if right is None else right))
    schedule = BlockSchedule.banded(seqlen_q, seqlen_k, block_q=block_q, block_k=block_k, left=left, right=right)
    assert np.array_equal(grid(schedule), covered(visible, block_q, block_k))


@quick
@given(st.tuples(lengths, lengths, blocks, blocks))
def test_causal_is_the_elementwise_triangle_blockwise(shape: tuple[int, ...]) -> None:
    seqlen_q, seqlen_k, block_q, block_k = shape
    schedule = BlockSchedule.causal(seqlen_q, seqlen_k, block_q=block_q, block_k=block_k)
    assert np.array_equal(grid(schedule), covered(distances(seqlen_q, seqlen_k) <= 0, block_q, block_k))


def test_numbers_wider_than_int64_are_taken() -> None:
    assert BlockSchedule.banded(100, 100, left=10**30, right=10**30) == BlockSchedule.full(100, 100)
    assert BlockSchedule.strided(100, 100, stride=10**30, local=10**30) == BlockSchedule.full(100, 100)


@quick
@given(st.tuples(lengths, lengths, blocks, blocks), st.integers(1, 20), st.integers(0, 20))
def test_strided_is_diagonal_neighbours_and_columns(shape: tuple[int, ...], stride: int, local: int) -> None:
    seqlen_q, seqlen_k, block_q, block_k = shape
    schedule = BlockSchedule.strided(seqlen_q, seqlen_k, block_q=block_q, block_k=block_k, stride=stride, local=local)
    expected = np.zeros((schedule.num_q_blocks, schedule.num_k_blocks), bool)
    for q_block in range(schedule.num_q_blocks):
        for k_block in range(schedule.num_k_blocks):
            queries = range(q_block * block_q, min(seqlen_q, (q_block + 1) * block_q))
            near = {(i + seqlen_k - seqlen_q) // block_k for i in queries}
            expected[q_block, k_block] = (k_block + 1) % stride == 0 or any(abs(k_block - b) <= local for b in near)
    assert np.array_equal(grid(schedule), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"stride": 0}, ValueError, "stride must be at least 1"),
        ({"stride": 2, "local": -1}, ValueError, "local must be at least 0"),
        ({"stride": 2.0}, TypeError, "stride must be an int"),
    ],
)
def test_strided_refuses(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BlockSchedule.strided(64, 64, **arguments)


@pytest.mark.parametrize("side", ["left", "right"])
def test_banded_refuses_a_negative_window(side: str) -> None:
    with pytest.raises(ValueError, match=f"{side} must be at least 0, got -1"):
        BlockSchedule.banded(64, 64, **{"left": 1, "right": 1, side: -1})


@quick
@given(
    st.tuples(lengths, lengths, blocks, blocks),
    heads_or_none,
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 2**63),
)
def test_random_keeps_the_same_number_in_every_row(
    shape: tuple[int, ...], heads: int | None, sparsity: float, seed: int
) -> None:
    seqlen_q, seqlen_k, block_q, block_k = shape
    made = [
        BlockSchedule.random(
            seqlen_q, seqlen_k, block_q=block_q, block_k=block_k, sparsity=sparsity, seed=seed, heads=heads
        )
        for _ in range(2)
    ]
    assert made[0] == made[1], "the same seed gives the same schedule"
    counts = np.diff(made[0].indptr)
    cols = made[0].num_k_blocks
    assert len(set(counts.tolist())) <= 1
    if len(counts) and cols:
        assert counts[0] >= 1
        wanted = (1 - sparsity) * cols
        assert abs(counts[0] - wanted) <= 0.5 + 1e-9 or (counts[0] == 1 and wanted < 1)


@pytest.mark.parametrize(("sparsity", "kept"), [(0.0, 64), (0.5, 32), (0.9, 6), (0.999, 1)])
def test_random_at_a_sparsity(sparsity: float, kept: int) -> None:
    schedule = BlockSchedule.random(1024, 1024, block_q=16, block_k=16, sparsity=sparsity, seed=0)
    assert np.diff(schedule.indptr).tolist() == [kept] * 64
    assert schedule.density == kept / 64
    if sparsity == 0.0:
        assert schedule == BlockSchedule.full(1024, 1024, block_q=16, block_k=16)


def test_random_rows_heads_and_seeds_differ_and_cover_every_column() -> None:
    schedule = BlockSchedule.random(2048, 2048, block_q=16, block_k=16, sparsity=0.9, seed=5, heads=2)
    other = BlockSchedule.random(2048, 2048, block_q=16, block_k=16, sparsity=0.9, seed=6, heads=2)
    first, second = grid(schedule, 0), grid(schedule, 1)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, grid(other, 0))
    assert not np.array_equal(first[0], first[1])
    # 13 of 128 blocks in each of 256 rows: 26 a column on average, 4 standard deviations of 4.8 each side.
    per_column = (first.sum(axis=0) + second.sum(axis=0)).tolist()
    assert min(per_column) > 5
    assert max(per_column) < 50


def test_random_does_not_depend_on_how_many_rows_are_made_at_a_time() -> None:
    # 8 heads of 512 × 512 blocks are made in two steps; the first head is made like one alone.
    many = BlockSchedule.random(8192, 8192, block_q=16, block_k=16, sparsity=0.95, seed=1, heads=8)
    one = BlockSchedule.random(8192, 8192, block_q=16, block_k=16, sparsity=0.95, seed=1)
    assert np.array_equal(many.indices[: one.num_blocks], one.indices)


def test_random_is_fast_with_a_million_blocks() -> None:
    def make(blocks: int) -> BlockSchedule:
        return BlockSchedule.random(16 * blocks, 16 * blocks, block_q=16, block_k=16, sparsity=0.5, seed=0)

    assert make(1024).num_blocks == 2**19
    quarter, whole = cpu_seconds(lambda: make(512), lambda: make(1024))
    assert whole < 2.0
    assert whole < 9 * quarter, "four times the blocks take about four times as long, in quadratic time 16 times"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"sparsity": 1.0}, ValueError, "sparsity must be at least 0 and below 1"),
        ({"sparsity": -0.1}, ValueError, "sparsity must be finite and at least 0"),
        ({"sparsity": float("nan")}, ValueError, "sparsity must be finite"),
        ({"sparsity": "half"}, TypeError, "sparsity must be a float"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"seed": None}, TypeError, "seed must be an int"),
        ({"heads": 0}, ValueError, "heads must be at least 1"),
        ({"block_q": 20}, ValueError, "block_q must be a multiple of 16"),
    ],
)
def test_random_refuses(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BlockSchedule.random(64, 64, **{"sparsity": 0.5, "seed": 0} | change)


def test_more_blocks_than_int32_counts_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="block_q and block_k are too small: 4294967296 blocks"):
        BlockSchedule.full(2**20, 2**20, block_q=16, block_k=16)
