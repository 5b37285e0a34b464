"""BlockSchedule: makers against the elementwise definition, strict checks, damaged and hostile files, pictures."""

from __future__ import annotations

import copy
import io
import os
import pickle
import stat
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewise.plan import schedule
from tilewise.plan.schedule import BlockSchedule

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
lengths = st.integers(0, 260)
blocks = st.sampled_from([16, 32, 48, 64, 80, 128])
heads_or_none = st.one_of(st.none(), st.integers(1, 3))


@st.composite
def schedules(draw: st.DrawFn, heads: st.SearchStrategy[int | None] = heads_or_none) -> BlockSchedule:
    """Any schedule: ragged or aligned, any rows empty, shared or per head."""
    seqlen_q, seqlen_k, block_q, block_k, n = draw(st.tuples(lengths, lengths, blocks, blocks, heads))
    rows, cols = (n or 1) * -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    kept = np.random.default_rng(draw(st.integers(0, 2**32))).random((rows, cols)) < draw(st.floats(0, 1))
    indptr = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int32)
    return BlockSchedule(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        block_q=block_q,
        block_k=block_k,
        heads=n,
        indptr=indptr,
        indices=np.nonzero(kept)[1].astype(np.int32),
    )


def covered(visible: np.ndarray, block_q: int, block_k: int) -> np.ndarray:
    """The definition, block by block: (num_q_blocks, num_k_blocks), True where a block has a visible pair."""
    n_q, n_k = -(-visible.shape[0] // block_q), -(-visible.shape[1] // block_k)
    result = np.zeros((n_q, n_k), bool)
    for i in range(n_q):
        for j in range(n_k):
            result[i, j] = visible[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k].any()
    return result


def grid(schedule: BlockSchedule, head: int = 0) -> np.ndarray:
    """(num_q_blocks, num_k_blocks) of one head, read through `row`."""
    result = np.zeros((schedule.num_q_blocks, schedule.num_k_blocks), bool)
    for q_block in range(schedule.num_q_blocks):
        result[q_block, schedule.row(q_block, head)] = True
    return result


def distances(seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """key - diagonal key, bottom-right: 0 where query and key are the same token."""
    return np.arange(seqlen_k)[None, :] - (np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)


# 3 blocks of 16 queries (ragged), 4 blocks of 32 keys
GOOD: dict[str, Any] = {
    "seqlen_q": 40,
    "seqlen_k": 128,
    "block_q": 16,
    "block_k": 32,
    "heads": None,
    "indptr": np.array([0, 2, 2, 5], np.int32),
    "indices": np.array([1, 3, 0, 1, 2], np.int32),
}


# ---- the class ------------------------------------------------------------------------------------------------------


def test_rows_and_facts_of_a_schedule_written_by_hand() -> None:
    schedule = BlockSchedule(**GOOD)
    assert (schedule.num_q_blocks, schedule.num_k_blocks, schedule.num_blocks) == (3, 4, 5)
    assert schedule.density == 5 / 12
    assert schedule.sparsity == pytest.approx(7 / 12)
    assert [schedule.row(i).tolist() for i in range(3)] == [[1, 3], [], [0, 1, 2]]
    assert schedule.row(0, head=7).tolist() == [1, 3], "a shared schedule has the same rows for every head"
    mask = schedule.to_mask()
    assert mask.dtype == torch.bool
    assert mask.shape == (40, 128)
    expected = torch.zeros(40, 128, dtype=torch.bool)
    expected[:16, 32:64] = expected[:16, 96:] = expected[32:, :96] = True
    assert torch.equal(mask, expected)


def test_per_head_rows_are_head_major() -> None:
    schedule = BlockSchedule(
        seqlen_q=32, seqlen_k=32, block_q=16, block_k=16, heads=2,
        indptr=np.array([0, 1, 1, 2, 4]), indices=np.array([0, 1, 0, 1]),
    )  # fmt: skip
    assert [schedule.row(i, head).tolist() for head in (0, 1) for i in (0, 1)] == [[0], [], [1], [0, 1]]
    assert schedule.to_mask().shape == (2, 32, 32)
    assert schedule.to_mask()[:, ::16, ::16].tolist() == [[[True, False], [False] * 2], [[False, True], [True] * 2]]


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16, np.uint64, ">i4"])
def test_any_integer_dtype_is_taken_and_stored_as_int32(kind: Any) -> None:
    schedule = BlockSchedule(**GOOD | {"indptr": GOOD["indptr"].astype(kind), "indices": GOOD["indices"].astype(kind)})
    assert schedule.indptr.dtype == schedule.indices.dtype == np.int32
    assert schedule == BlockSchedule(**GOOD)


def test_tensors_are_taken() -> None:
    tensors = {name: torch.from_numpy(GOOD[name]) for name in ("indptr", "indices")}
    assert BlockSchedule(**GOOD | tensors) == BlockSchedule(**GOOD)


def test_immutable() -> None:
    given_indices = GOOD["indices"].copy()
    schedule = BlockSchedule(**GOOD | {"indices": given_indices})
    given_indices[:] = 0
    assert schedule == BlockSchedule(**GOOD), "the caller's array is still the caller's"
    with pytest.raises(AttributeError):
        schedule.block_q = 32  # type: ignore[misc]
    for array in (schedule.indptr, schedule.indices, schedule.row(0)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_copies_are_equal_checked_and_read_only() -> None:
    schedule = BlockSchedule(**GOOD)
    for other in (pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)):
        assert other == schedule
        assert not other.indices.flags.writeable
        assert not other.indptr.flags.writeable


@pytest.mark.parametrize(
    "change",
    [
        {"seqlen_q": 41},
        {"seqlen_k": 127},
        {"heads": 1},
        {"indices": np.array([1, 2, 0, 1, 2])},
        {"indptr": np.array([0, 2, 4, 5]), "indices": np.array([1, 3, 0, 1, 2])},
    ],
)
def test_equal_only_when_everything_is(change: dict[str, Any]) -> None:
    schedule = BlockSchedule(**GOOD)
    same = BlockSchedule(**GOOD)
    assert same == schedule
    assert hash(same) == hash(schedule)
    assert BlockSchedule(**GOOD | change) != schedule
    assert schedule != "a schedule"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"seqlen_q": -1}, ValueError, "seqlen_q must be at least 0"),
        ({"seqlen_k": -1}, ValueError, "seqlen_k must be at least 0"),
        ({"seqlen_k": 2**31}, ValueError, "seqlen_k must be at least 0"),
        ({"seqlen_q": 40.0}, TypeError, "seqlen_q must be an int, got float"),
        ({"seqlen_q": True}, TypeError, "seqlen_q must be an int, got bool"),
        ({"block_q": 0}, ValueError, "block_q must be a multiple of 16 from 16 to 128, got 0"),
        ({"block_q": 24}, ValueError, "block_q must be a multiple of 16"),
        ({"block_k": 144}, ValueError, "block_k must be a multiple of 16 from 16 to 128, got 144"),
        ({"block_k": -16}, ValueError, "block_k must be a multiple of 16"),
        ({"block_k": "32"}, TypeError, "block_k must be an int, got str"),
        ({"heads": 0}, ValueError, "heads must be at least 1, got 0"),
        ({"heads": 2.0}, TypeError, "heads must be an int"),
        ({"heads": 2**31}, ValueError, "heads=2147483648"),
        ({"heads": 2}, ValueError, "indptr must have 7 entries"),
        ({"indptr": [0, 2, 2, 5]}, TypeError, "indptr must be a numpy array or a torch.Tensor, got list"),
        ({"indptr": np.array([0.0, 2, 2, 5])}, ValueError, "indptr must be int32 .* got float64"),
        ({"indptr": np.array([False, True, True, True])}, ValueError, "indptr must be int32 .* got bool"),
        ({"indptr": np.array([0, 2, 2, 5], object)}, ValueError, "indptr must be int32 .* got object"),
        ({"indices": torch.zeros(5, dtype=torch.bfloat16)}, ValueError, "indices must not be torch.bfloat16"),
        ({"indptr": np.array([[0, 2, 2, 5]])}, ValueError, "indptr must have 1 dimension, got shape"),
        ({"indptr": np.array([0, 2, 5])}, ValueError, "indptr must have 4 entries"),
        ({"indptr": np.array([0, 2, 2, 5, 5])}, ValueError, "indptr must have 4 entries"),
        ({"indptr": np.array([], np.int32)}, ValueError, "indptr must have 4 entries"),
        ({"indptr": np.array([1, 2, 2, 5])}, ValueError, "indptr must start at 0, got 1"),
        ({"indptr": np.array([0, 3, 2, 5])}, ValueError, "indptr must never fall, got 2 after 3 at row 1"),
        ({"indptr": np.array([0, -2, 2, 5])}, ValueError, "indptr must be between 0 and"),
        ({"indptr": np.array([0, 2, 2, 4])}, ValueError, "indptr must end at the number of indices, 5, got 4"),
        ({"indptr": np.array([0, 2, 2, 2**32 + 5])}, ValueError, "indptr must be between 0 and"),
        ({"indices": np.array([1, 3, 0, 1])}, ValueError, "indptr must end at the number of indices, 4, got 5"),
        ({"indices": np.array([1, 4, 0, 1, 2])}, ValueError, "indices must be below num_k_blocks=4, got 4"),
        ({"indices": np.array([1, 3, -1, 1, 2])}, ValueError, "indices must be between 0 and"),
        ({"indices": np.array([1, 3, 0, 1, 2**32])}, ValueError, "indices must be between 0 and"),
        ({"indices": np.array([3, 1, 0, 1, 2])}, ValueError, "unsorted 3, 1 in query block 0 of head 0"),
        ({"indices": np.array([1, 3, 0, 2, 1])}, ValueError, "unsorted 2, 1 in query block 2 of head 0"),
        ({"indices": np.array([1, 3, 0, 1, 1])}, ValueError, "duplicate 1, 1 in query block 2 of head 0"),
    ],
)
def test_constructor_refuses(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BlockSchedule(**GOOD | change)


def test_bad_row_of_a_later_head_is_named() -> None:
    with pytest.raises(ValueError, match="duplicate 1, 1 in query block 1 of head 1"):
        BlockSchedule(
            seqlen_q=32, seqlen_k=32, block_q=16, block_k=16, heads=2,
            indptr=np.array([0, 1, 1, 1, 3]), indices=np.array([0, 1, 1]),
        )  # fmt: skip


def test_row_and_head_out_of_range() -> None:
    schedule = BlockSchedule.full(64, 64, heads=2)
    for arguments, words in (((1,), "q_block"), ((-1,), "q_block"), ((0, 2), "head"), ((0, -1), "head")):
        with pytest.raises(ValueError, match=words):
            schedule.row(*arguments)


def test_check_says_what_does_not_fit() -> None:
    schedule = BlockSchedule.full(100, 200, heads=4)
    schedule.check(100, 200, 4)
    BlockSchedule.full(100, 200).check(100, 200, 17)
    with pytest.raises(ValueError, match="schedule is for seqlen_q=100, got seqlen_q=101"):
        schedule.check(101, 200, 4)
    with pytest.raises(ValueError, match="schedule is for seqlen_k=200, got seqlen_k=100"):
        schedule.check(100, 100, 4)
    with pytest.raises(ValueError, match="schedule is for num_heads=4, got num_heads=1"):
        schedule.check(100, 200, 1)


def test_repr_is_one_short_line() -> None:
    text = repr(BlockSchedule.causal(4096, 8192, block_q=128))
    assert "4096 × 8192" in text
    assert "128 × 64" in text
    assert len(text) < 120
    assert "\n" not in text
    assert "heads=3" in repr(BlockSchedule.full(16, 16, heads=3))


# ---- makers ---------------------------------------------------------------------------------------------------------


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
    start = time.perf_counter()
    schedule = BlockSchedule.random(16384, 16384, block_q=16, block_k=16, sparsity=0.5, seed=0)
    assert time.perf_counter() - start < 2.0
    assert schedule.num_blocks == 2**19


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


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_runs_by_hand() -> None:
    runs = np.array([[1, 2], [0, 0], [3, 1]], np.int32)
    schedule = BlockSchedule.from_runs(runs, 40, 128, block_q=16, block_k=32)
    assert [schedule.row(i).tolist() for i in range(3)] == [[1, 2], [], [3]]
    assert schedule.to_runs().dtype == np.int32
    assert np.array_equal(schedule.to_runs(), runs)
    assert BlockSchedule.from_runs(torch.from_numpy(runs), 40, 128, block_q=16, block_k=32) == schedule
    # where an empty run starts says nothing
    moved = np.array([[1, 2], [4, 0], [3, 1]], np.int32)
    assert BlockSchedule.from_runs(moved, 40, 128, block_q=16, block_k=32) == schedule


@quick
@given(schedules(heads=st.none()))
def test_runs_exist_exactly_when_no_row_has_gaps(schedule: BlockSchedule) -> None:
    gaps = [row for row in map(schedule.row, range(schedule.num_q_blocks)) if (np.diff(row) > 1).any()]
    if gaps:
        with pytest.raises(ValueError, match=r"one run of key blocks a row, row \d+ has gaps"):
            schedule.to_runs()
        return
    again = BlockSchedule.from_runs(
        schedule.to_runs(), schedule.seqlen_q, schedule.seqlen_k, block_q=schedule.block_q, block_k=schedule.block_k
    )
    assert again == schedule


def test_runs_of_a_schedule_per_head() -> None:
    with pytest.raises(ValueError, match="one pattern for all heads, this schedule has heads=2"):
        BlockSchedule.full(64, 64, heads=2).to_runs()


@pytest.mark.parametrize(
    ("runs", "error", "words"),
    [
        (((0, 1),) * 3, TypeError, "runs must be a numpy array or a torch.Tensor, got tuple"),
        (np.zeros((2, 2), np.int32), ValueError, r"runs must have shape \(3, 2\)"),
        (np.zeros((3, 3), np.int32), ValueError, r"runs must have shape \(3, 2\)"),
        (np.zeros(6, np.int32), ValueError, r"runs must have shape \(3, 2\)"),
        (np.zeros((3, 2)), ValueError, "runs must be int32 .* got float64"),
        (np.array([[0, 1], [-1, 2], [0, 1]]), ValueError, "runs must be between 0 and"),
        (np.array([[0, 1], [1, -1], [0, 1]]), ValueError, "runs must be between 0 and"),
        (np.array([[0, 4], [3, 2], [0, 1]]), ValueError, r"runs\[1\] must stay within the 4 key blocks"),
        (np.array([[0, 4], [0, 1], [2**31 - 1] * 2]), ValueError, r"runs\[2\] must stay within"),
    ],
)
def test_from_runs_refuses(runs: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BlockSchedule.from_runs(runs, 40, 128, block_q=16, block_k=32)


# ---- files ----------------------------------------------------------------------------------------------------------


@quick
@given(schedules())
def test_npz_round_trip(tmp_path: Path, schedule: BlockSchedule) -> None:
    path = tmp_path / "a.npz"
    schedule.save(path)
    assert BlockSchedule.load(path) == schedule
    assert BlockSchedule.load(str(path), block_q=schedule.block_q, seqlen_k=schedule.seqlen_k) == schedule
    assert os.listdir(tmp_path) == ["a.npz"]


@quick
@given(st.tuples(lengths, lengths, blocks, blocks), st.integers(0, 100), st.integers(0, 100))
def test_npy_round_trip(tmp_path: Path, shape: tuple[int, ...], left: int, right: int) -> None:
    geometry = dict(zip(("seqlen_q", "seqlen_k", "block_q", "block_k"), shape, strict=True))
    schedule = BlockSchedule.banded(**geometry, left=left, right=right)
    schedule.save(tmp_path / "a.npy")
    stored = np.load(tmp_path / "a.npy", allow_pickle=False)
    assert stored.dtype == np.int32
    assert stored.shape == (schedule.num_q_blocks, 2)
    assert BlockSchedule.load(tmp_path / "a.npy", **geometry) == schedule


def test_npy_without_geometry_is_16_by_16_and_square(tmp_path: Path) -> None:
    runs = np.array([[0, 1], [0, 2], [1, 2], [0, 4]], np.int32)
    np.save(tmp_path / "a.npy", np.asfortranarray(runs))
    expected = BlockSchedule.from_runs(runs, 64, 64, block_q=16, block_k=16)
    assert BlockSchedule.load(tmp_path / "a.npy") == expected
    np.save(tmp_path / "b.npy", runs.astype(">i4"))
    assert BlockSchedule.load(tmp_path / "b.npy") == expected
    wide = BlockSchedule.load(tmp_path / "a.npy", block_q=32)
    assert (wide.seqlen_q, wide.seqlen_k, wide.block_q, wide.block_k) == (128, 128, 32, 16)
    with pytest.raises(ValueError, match=r"a\.npy .* runs must have shape \(2, 2\)"):
        BlockSchedule.load(tmp_path / "a.npy", seqlen_q=32)


def test_save_is_deterministic_and_keeps_the_usual_permissions(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        BlockSchedule(**GOOD).save(tmp_path / name)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    (tmp_path / "plain").touch()
    assert stat.S_IMODE((tmp_path / "a.npz").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize("name", ["a", "a.npz.bak", "a.txt", ".npz"])
def test_wrong_suffix(tmp_path: Path, name: str) -> None:
    schedule = BlockSchedule(**GOOD)
    for call in (schedule.save, BlockSchedule.load, schedule.draw):
        with pytest.raises(ValueError, match="path must end in"):
            call(tmp_path / name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", [3, None, b"a.npz"])
def test_a_path_of_the_wrong_kind(path: Any) -> None:
    schedule = BlockSchedule(**GOOD)
    for call in (schedule.save, BlockSchedule.load, schedule.draw):
        with pytest.raises(TypeError, match="path must be a str"):
            call(path)


def test_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    old = BlockSchedule(**GOOD)
    old.save(path)

    def half_written(file: Any, **_: Any) -> None:
        file.write(b"PK half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", half_written)
    with pytest.raises(OSError, match="disk full"):
        BlockSchedule.full(64, 64).save(path)
    assert BlockSchedule.load(path) == old
    gaps = tmp_path / "b.npy"
    with pytest.raises(ValueError, match="has gaps"):
        old.save(gaps)
    assert os.listdir(tmp_path) == ["a.npz"]


def test_missing_files_and_folders(tmp_path: Path) -> None:
    for name in ("no.npz", "no.npy"):
        with pytest.raises(FileNotFoundError):
            BlockSchedule.load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="existing folder"):
        BlockSchedule(**GOOD).save(tmp_path / "no" / "a.npz")


def test_load_checks_its_arguments_before_the_file(tmp_path: Path) -> None:
    for arguments, error in (
        ({"block_q": 0}, ValueError),
        ({"seqlen_q": -1}, ValueError),
        ({"block_k": 1.0}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(arguments))):
            BlockSchedule.load(tmp_path / "no.npz", **arguments)


@pytest.mark.parametrize(
    "given_here", [{"seqlen_q": 41}, {"seqlen_k": 0}, {"block_q": 32}, {"block_k": 16}], ids=lambda d: next(iter(d))
)
def test_npz_of_another_geometry(tmp_path: Path, given_here: dict[str, int]) -> None:
    BlockSchedule(**GOOD).save(tmp_path / "a.npz")
    name, value = next(iter(given_here.items()))
    with pytest.raises(ValueError, match=f"it is for {name}={GOOD[name]}, asked for {name}={value}"):
        BlockSchedule.load(tmp_path / "a.npz", **given_here)


def npy(array: Any = None, *, header: str | None = None, data: bytes = b"") -> bytes:
    """The bytes of an .npy file: of an array (objects are pickled), or with a header of one's own."""
    stream = io.BytesIO()
    if header is None:
        np.save(stream, array, allow_pickle=True)
        return stream.getvalue()
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def arrays_of(change: dict[str, Any] | None = None) -> dict[str, bytes]:
    members = {name: np.int64(GOOD[name] or 0) for name in ("seqlen_q", "seqlen_k", "block_q", "block_k", "heads")}
    members |= {"indptr": GOOD["indptr"], "indices": GOOD["indices"]}
    raw = {name: npy(value) for name, value in members.items()}
    for name, value in (change or {}).items():
        if value is None:
            del raw[name]
        else:
            raw[name] = value if isinstance(value, bytes) else npy(value)
    return raw


def npz(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return stream.getvalue()


def refused(path: Path, content: bytes, words: str, **arguments: Any) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        BlockSchedule.load(path, **arguments)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))


def test_a_foreign_npz_with_the_right_arrays_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path.write_bytes(npz(arrays_of(), compression))
        assert BlockSchedule.load(path) == BlockSchedule(**GOOD)


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    trap = np.empty((4, 2), object)
    trap[:] = Trap(sprung)
    refused(tmp_path / "a.npy", npy(trap), "runs holds Python objects")
    refused(tmp_path / "a.npz", npz(arrays_of({"indices": trap})), "indices holds Python objects")
    refused(tmp_path / "b.npz", npz(arrays_of({"seqlen_q": trap})), "seqlen_q holds Python objects")
    refused(tmp_path / "b.npy", pickle.dumps(Trap(sprung)), "magic string")
    assert not sprung.exists()
    np.load(tmp_path / "a.npy", allow_pickle=True)
    assert sprung.exists(), "the trap works"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indices": None}, "it must hold seqlen_q, .*, indices, it holds block_k.npy"),
        ({"heads": None}, "it must hold"),
        ({"extra": np.int64(1)}, "it must hold .* it holds .*extra.npy"),
        ({"seqlen_q": np.int64(-40)}, "seqlen_q must be at least 0"),
        ({"seqlen_q": np.int32(40)}, "seqlen_q must be int64, the file has int32"),
        ({"seqlen_q": np.float64(40)}, "seqlen_q must be int64, the file has float64"),
        ({"seqlen_k": np.array([128])}, r"seqlen_k must have shape \(\), the file declares \(1,\)"),
        ({"seqlen_k": np.int64(96)}, "indices must be below num_k_blocks=3, got 3"),
        ({"block_q": np.int64(17)}, "block_q must be a multiple of 16"),
        ({"block_k": np.int64(0)}, "block_k must be a multiple of 16"),
        ({"heads": np.int64(-1)}, "heads must be at least 1, got -1"),
        ({"heads": np.int64(2)}, r"indptr must have shape \(7\), the file declares \(4,\)"),
        ({"heads": np.int64(2**62)}, "heads=4611686018427387904"),
        ({"seqlen_q": np.int64(2**31 - 1)}, r"indptr must have shape \(134217729\)"),
        ({"indptr": np.array([0, 2, 2, 5])}, "indptr must be int32, the file has int64"),
        ({"indptr": np.array([0, 3, 2, 5], np.int32)}, "indptr must never fall"),
        ({"indptr": np.array([1, 2, 2, 5], np.int32)}, "indptr must start at 0"),
        ({"indptr": np.array([0, 2, 2, -5], np.int32)}, r"indices must have shape \(-5\)"),
        ({"indptr": np.array([0, 2, 2, 4], np.int32)}, r"indices must have shape \(4\), the file declares \(5,\)"),
        ({"indices": np.array([[1, 3, 0, 1, 2]], np.int32)}, r"indices must have shape \(5\)"),
        ({"indices": np.array([1, 3, 0, 1, 1], np.int32)}, "duplicate 1, 1"),
        ({"indices": np.array([3, 1, 0, 1, 2], np.int32)}, "unsorted 3, 1"),
        ({"indices": np.array([1, 3, 0, 1, 4], np.int32)}, "indices must be below num_k_blocks=4"),
        ({"indices": np.array([1, 3, -1, 1, 2], np.int32)}, "indices must be between 0"),
        ({"indices": b"not an array"}, "magic string"),
        ({"indices": b""}, "."),
        ({"indices": npy(GOOD["indices"])[:-4]}, "indices declares 20 bytes of data, the file has 16"),
        ({"indices": npy(GOOD["indices"]) + b"more"}, "indices declares 20 bytes of data, the file has 24"),
    ],
)
def test_npz_that_is_wrong(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    refused(tmp_path / "a.npz", npz(arrays_of(change)), words)


def test_npz_whose_data_ends_before_its_declared_size(tmp_path: Path) -> None:
    # The deflated stream of `indices` is four bytes short, and its directory entry claims that it is not.
    packed = bytearray(npz(arrays_of({"indices": npy(GOOD["indices"])[:-4]}), zipfile.ZIP_DEFLATED))
    entry = packed.rindex(b"PK\x01\x02")
    assert packed[entry + 46 :].startswith(b"indices.npy")
    packed[entry + 24] += 4
    refused(tmp_path / "a.npz", bytes(packed), "indices does not have the 20 bytes of data it declares")


def test_npz_whose_check_sum_is_wrong(tmp_path: Path) -> None:
    # 1, 2 in place of 1, 3 would be a valid schedule too.
    whole, (before, after) = npz(arrays_of()), (np.array(pair, np.int32).tobytes() for pair in ([1, 3], [1, 2]))
    assert whole.count(before) == 1
    refused(tmp_path / "a.npz", whole.replace(before, after), "CRC")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_npz_with_an_array_twice(tmp_path: Path) -> None:
    stream = io.BytesIO(npz(arrays_of()))
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("indices.npy", arrays_of()["indices"])
    refused(tmp_path / "a.npz", stream.getvalue(), "it must hold")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"seqlen_q,seqlen_k\n1,2\n", "."),
        (b"\x00" * 1000, "."),
        (npy(np.zeros((4, 2), np.int32))[:40], "."),
        (npz(arrays_of())[:-30], "."),
        (npz(arrays_of())[:200], "."),
        (npz(arrays_of())[100:], "."),
        (npz({}), "it holds nothing"),
    ],
)
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_files_that_are_something_else(tmp_path: Path, suffix: str, content: bytes, words: str) -> None:
    refused(tmp_path / f"a.{suffix}", content, words if suffix == "npz" or not content else ".")


def test_each_suffix_means_its_form(tmp_path: Path) -> None:
    refused(tmp_path / "a.npy", npz(arrays_of()), "magic string")
    refused(tmp_path / "a.npz", npy(np.zeros((4, 2), np.int32)), "not a zip file")


INT32_HEADER = "{{'descr': '<i4', 'fortran_order': False, 'shape': {}, }}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npy(np.zeros((4, 2), np.int64)), "runs must be int32, the file has int64"),
        (npy(np.zeros((4, 2), np.float32)), "runs must be int32, the file has float32"),
        (npy(np.zeros((4, 3), np.int32)), r"runs must have shape \(n, 2\), the file declares \(4, 3\)"),
        (npy(np.zeros(8, np.int32)), r"runs must have shape \(n, 2\), the file declares \(8,\)"),
        (npy(np.zeros((2, 2, 2), np.int32)), r"runs must have shape \(n, 2\)"),
        (npy(np.zeros(4, [("start", "<i4"), ("count", "<i4")])), "runs must be int32"),
        (npy(np.array([[0, 5]] + [[0, 1]] * 3, np.int32)), r"runs\[0\] must stay within the 4 key blocks"),
        (npy(np.array([[-1, 1]] + [[0, 1]] * 3, np.int32)), "runs must be between 0 and"),
        (npy(np.array([[2, -1]] + [[0, 1]] * 3, np.int32)), "runs must be between 0 and"),
        (npy(np.zeros((4, 2), np.int32))[:-1], "runs declares 32 bytes of data, the file has 31"),
        (npy(np.zeros((4, 2), np.int32)) + b"\x00", "runs declares 32 bytes of data, the file has 33"),
        (npy(header=INT32_HEADER.format((2**60, 2)), data=b"\x00" * 32), "runs declares 9223372036854775808 bytes"),
        (npy(header=INT32_HEADER.format((-4, 2)), data=b"\x00" * 32), r"the file declares \(-4, 2\)"),
        (npy(header=INT32_HEADER.format((4.0, 2)), data=b"\x00" * 32), "."),
        (npy(header="{'descr': '|O', 'fortran_order': False, 'shape': (4, 2), }"), "Python objects"),
        (npy(header="{'descr': '<i4'"), "."),
        (npy(header="__import__('os').abort()"), "."),
        (npy(header="(" * 100), "."),
        (b"\x93NUMPY\x03\x00" + npy(np.zeros((4, 2), np.int32))[8:], r"version \(3, 0\)"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100, "."),
    ],
)
def test_npy_that_is_wrong(tmp_path: Path, content: bytes, words: str) -> None:
    refused(tmp_path / "a.npy", content, words)


def test_folders_and_pipes_are_refused(tmp_path: Path) -> None:
    for suffix in ("npy", "npz"):
        (tmp_path / f"folder.{suffix}").mkdir()
        with pytest.raises(ValueError, match=rf"path must be a file, .*folder\.{suffix} is not one"):
            BlockSchedule.load(tmp_path / f"folder.{suffix}")
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(ValueError, match="path must be a file"):
        BlockSchedule.load(tmp_path / "pipe.npz")


def test_bombs_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An honest pattern, 4 blocks of which all rows are empty, that inflates to 200 times the file.
    rows = 2**16
    bomb = arrays_of({"seqlen_q": np.int64(rows * 16), "indptr": np.zeros(rows + 1, np.int32)})
    bomb |= {"indices": npy(np.zeros(0, np.int32))}
    packed = npz(bomb, zipfile.ZIP_DEFLATED)
    assert len(packed) < rows * 4 / 100
    path = tmp_path / "a.npz"
    path.write_bytes(packed)
    assert BlockSchedule.load(path).num_q_blocks == rows
    read: list[str] = []
    real = schedule._read_npy
    monkeypatch.setattr(
        schedule, "_read_npy", lambda f, s, name, *rest: (read.append(name), real(f, s, name, *rest))[1]
    )
    monkeypatch.setattr(schedule, "_INFLATED_MAX", rows * 4)
    refused(path, packed, f"indptr would inflate to {rows * 4 + 4 + 128} bytes")
    assert "indptr" not in read
    stored = npz(bomb)
    path.write_bytes(stored)
    assert BlockSchedule.load(path).num_q_blocks == rows, "as large as the file itself is no bomb"


def test_a_small_file_of_long_runs_is_refused_before_they_are_laid_out(tmp_path: Path) -> None:
    runs = np.zeros((2**15, 2), np.int32)
    runs[:, 1] = 2**15
    refused(tmp_path / "a.npy", npy(runs), "its runs add up to 1073741824 blocks, at most 268435456")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["npz", "deflated", "npy"]), st.data())
@pytest.mark.filterwarnings("ignore")
def test_any_damage_is_a_value_error_or_harmless(tmp_path: Path, form: str, data: st.DataObject) -> None:
    if form == "npy":
        whole = npy(BlockSchedule.causal(256, 256, block_q=16, block_k=16).to_runs())
    else:
        whole = npz(arrays_of(), zipfile.ZIP_STORED if form == "npz" else zipfile.ZIP_DEFLATED)
    path = tmp_path / ("a.npy" if form == "npy" else "a.npz")
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(damaged[: data.draw(st.integers(len(whole) // 2, len(whole)))]))
    try:
        loaded, message = BlockSchedule.load(path), None
    except ValueError as error:
        loaded, message = None, str(error)
    if message is not None:
        assert str(path) in message
        assert "\n" not in message
    else:
        # A zip has check sums; runs have none, but whatever is read is a valid schedule.
        assert form == "npy" or loaded == BlockSchedule(**GOOD)


# ---- pictures -------------------------------------------------------------------------------------------------------


def picture(text: str) -> list[str]:
    return [line.split("│")[1] for line in text.splitlines() if "│" in line]


def test_show_a_block_a_character() -> None:
    text = BlockSchedule(**GOOD).show()
    assert picture(text) == [" █ █", "    ", "███ "]
    assert text.splitlines()[0] == "40 queries × 128 keys in blocks of 16 × 32; all heads: 5 of 12 blocks kept (41.7%)"
    assert "keys 0 to 127" in text
    assert "queries" in text
    assert "a character is 1 block" in text


def test_show_downsamples_to_shades() -> None:
    schedule = BlockSchedule.causal(16 * 64, 16 * 64, block_q=16, block_k=16)
    text = schedule.show(width=16)
    shown = picture(text)
    assert len(shown) == 8
    assert {len(line) for line in shown} == {16}
    # Each line is 8 × 64 blocks, each character 8 × 4 of them: on the diagonal 26 and then 10 of 32 are kept.
    assert shown[0] == "▓░" + " " * 14
    assert shown[7] == "█" * 14 + "▓░"
    assert "a character is 8 × 4 blocks" in text
    one = BlockSchedule.from_mask(np.eye(4096, dtype=bool)[:, ::-1] & (np.arange(4096) == 0), block_q=16, block_k=16)
    assert one.num_blocks == 1
    assert "".join(picture(one.show())).strip() == "░", "a single block is never lost"
    most = BlockSchedule.from_mask(~one.to_mask(), block_q=16, block_k=16)
    assert "".join(picture(most.show())).count("▓") == 1, "a single hole is never lost"


@quick
@given(schedules(), st.integers(1, 20), st.integers(0, 2))
def test_show_never_breaks_and_is_never_wider_than_asked(schedule: BlockSchedule, width: int, head: int) -> None:
    head = min(head, (schedule.heads or 1) - 1)
    text = schedule.show(head, width=width)
    shown = picture(text)
    assert all(len(line) <= width for line in shown)
    assert len({len(line) for line in text.splitlines()[2:]}) <= 1, "the frame is straight"
    assert ("".join(shown).strip() == "") == (not grid(schedule, head).any())


def test_show_tells_the_head() -> None:
    mask = np.zeros((2, 32, 32), bool)
    mask[1, :16, 16:] = True
    schedule = BlockSchedule.from_mask(mask, block_q=16, block_k=16)
    assert picture(schedule.show(head=0)) == ["  ", "  "]
    assert picture(schedule.show(head=1)) == [" █", "  "]
    assert "head 1 of 2: 1 of 4 blocks kept (25.0%)" in schedule.show(head=1)
    for arguments, words in (({"head": 2}, "head"), ({"width": 0}, "width")):
        with pytest.raises(ValueError, match=words):
            schedule.show(**arguments)


def test_draw_paints_the_kept_blocks(tmp_path: Path) -> None:
    from matplotlib.image import imread

    def dark(schedule: BlockSchedule, **arguments: Any) -> float:
        schedule.draw(tmp_path / "a.png", **arguments)
        pixels = imread(tmp_path / "a.png")
        assert min(pixels.shape[:2]) > 400
        return float((pixels[..., 0] < 0.2).mean())

    mask = np.zeros((2, 512, 512), bool)
    mask[1] = True
    schedule = BlockSchedule.from_mask(mask, block_q=128, block_k=128)
    nothing, everything = dark(schedule, head=0), dark(schedule, head=1)
    assert everything > nothing + 0.4
    half = dark(BlockSchedule.banded(8192, 8192, block_q=64, block_k=64, left=None, right=0))
    assert nothing + 0.2 < half < everything - 0.1
    assert os.listdir(tmp_path) == ["a.png"]
    with pytest.raises(ValueError, match="head"):
        schedule.draw(tmp_path / "a.png", head=2)


def test_draw_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.extend(figure.axes))
    BlockSchedule(**GOOD).draw(tmp_path / "a.png")
    (axes,) = drawn
    assert axes.get_title() == "40 queries × 128 keys in blocks of 16 × 32\nall heads: 5 of 12 blocks kept (41.7%)"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key (token)", "query (token)")
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 128), (40, 0)), "tokens, the first query on top"


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (1, 5000), (20000, 20000)])
def test_draw_any_shape(tmp_path: Path, shape: tuple[int, int]) -> None:
    BlockSchedule.causal(*shape, block_q=16, block_k=16).draw(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
