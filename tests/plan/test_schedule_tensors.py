"""BlockSchedule per sequence, with lengths and whole blocks: bits, blocks, lists, scores, transposes, files."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import GOOD, blocks, lengths, quick, schedules

from tilewise.plan.schedule import BlockSchedule

SIZES = {"seqlen_q": 40, "seqlen_k": 128, "block_q": 16, "block_k": 32}  # 3 × 4 blocks


@st.composite
def rich_schedules(draw: st.DrawFn) -> BlockSchedule:
    """Any schedule: per sequence and head or shared, with whole blocks and lengths or without."""
    seqlen_q, seqlen_k, block_q, block_k = draw(st.tuples(lengths, lengths, blocks, blocks))
    batch, heads = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    nq, nk = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    kept = torch.rand(batch, heads, nq, nk, generator=rng) < draw(st.floats(0, 1))
    more: dict[str, Any] = {}
    if draw(st.booleans()):
        more["whole"] = torch.rand(kept.shape, generator=rng) < 0.5
    for name, count, block in (("lengths_q", nq, block_q), ("lengths_k", nk, block_k)):
        if draw(st.booleans()):
            rows = draw(st.sampled_from([1, batch]))
            more[name] = torch.randint(0, block + 1, (rows, count), generator=rng)
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_q": block_q, "block_k": block_k}
    return BlockSchedule.from_blocks(kept, **sizes, **more)


def sizes_of(schedule: BlockSchedule) -> dict[str, int]:
    return {name: getattr(schedule, name) for name in SIZES}


def kept_blocks(schedule: BlockSchedule) -> torch.Tensor:
    """(batch or 1, heads or 1, num_q_blocks, num_k_blocks), read through `row`."""
    shape = (schedule.batch or 1, schedule.heads or 1, schedule.num_q_blocks, schedule.num_k_blocks)
    kept = torch.zeros(shape, dtype=torch.bool)
    for b, h, i in np.ndindex(*shape[:3]):
        kept[b, h, i, schedule.row(i, h, b).tolist()] = True
    return kept


# ---- what it holds ---------------------------------------------------------------------------------------------------


def test_per_sequence_by_hand() -> None:
    kept = torch.zeros(2, 1, 3, 4, dtype=torch.bool)
    kept[0, 0, 0, 1] = kept[1, 0, 2, 3] = kept[1, 0, 2, 0] = True
    schedule = BlockSchedule.from_blocks(kept, **SIZES)
    assert (schedule.batch, schedule.heads, schedule.num_blocks, schedule.device.type) == (2, None, 3, "cpu")
    assert schedule.indptr.tolist() == [0, 1, 1, 1, 1, 1, 3]
    assert schedule.indices.tolist() == [1, 0, 3]
    assert schedule.row(2, head=5, batch=1).tolist() == [0, 3]
    assert schedule.bits.shape == (2, 1, 3, 1)
    assert schedule.bits.flatten().tolist() == [2, 0, 0, 0, 0, 9]
    assert schedule.density == 3 / 24
    assert "batch=2" in repr(schedule)
    assert schedule.to_mask().shape == (2, 1, 40, 128)
    assert "all heads, sequence 1 of 2: 2 of 12 blocks kept" in schedule.show(batch=1)
    for arguments in ({"batch": 2}, {"batch": -1}):
        with pytest.raises(ValueError, match="batch"):
            schedule.row(0, **arguments)


@quick
@given(rich_schedules())
def test_bits_are_the_rows(schedule: BlockSchedule) -> None:
    kept = kept_blocks(schedule)
    words = torch.zeros(*kept.shape[:3], -(-kept.shape[3] // 32), dtype=torch.int64)
    for j in range(kept.shape[3]):
        words[..., j // 32] |= kept[..., j].long() << j % 32
    assert schedule.bits.dtype == torch.int32
    assert torch.equal(schedule.bits, words.int())
    assert schedule.bits is schedule.bits, "made once"


def test_bits_use_the_sign_too() -> None:
    schedule = BlockSchedule.from_blocks(
        torch.ones(1, 33, dtype=torch.bool), **SIZES | {"seqlen_q": 1, "seqlen_k": 1056}
    )
    assert schedule.bits.tolist() == [[[[-1, 1]]]]


@quick
@given(rich_schedules())
def test_mask_is_blocks_and_lengths(schedule: BlockSchedule) -> None:
    mask = schedule.to_mask()
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    kept = kept_blocks(schedule)
    batch, heads = kept.shape[:2]
    assert mask.shape == (batch, heads, schedule.seqlen_q, schedule.seqlen_k)
    rng = np.random.default_rng(0)
    for _ in range(200 if mask.numel() else 0):
        b, h, i, j = (int(rng.integers(n)) for n in mask.shape)
        seen = bool(kept[b, h, i // schedule.block_q, j // schedule.block_k])
        for name, at, block in (("lengths_q", i, schedule.block_q), ("lengths_k", j, schedule.block_k)):
            valid = getattr(schedule, name)
            if valid is not None:
                seen &= at % block < int(valid[b if len(valid) > 1 else 0, at // block])
        assert bool(mask[b, h, i, j]) == seen


def test_lengths_are_cut_to_the_last_block_and_copied() -> None:
    given_lengths = torch.tensor([16, 3, 16])
    schedule = BlockSchedule.from_blocks(torch.ones(3, 4, dtype=torch.bool), lengths_q=given_lengths, **SIZES)
    given_lengths.zero_()
    assert schedule.lengths_q is not None
    assert schedule.lengths_q.tolist() == [[16, 3, 8]]
    assert schedule.lengths_q.dtype == torch.int32
    assert schedule.lengths_k is None


@quick
@given(rich_schedules())
def test_copies_and_files(tmp_path_factory: pytest.TempPathFactory, schedule: BlockSchedule) -> None:
    path = tmp_path_factory.mktemp("schedules") / "a.npz"
    schedule.save(path)
    for other in (pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule), BlockSchedule.load(path)):
        assert other == schedule
        assert hash(other) == hash(schedule)
    assert schedule.to("cpu") is schedule
    assert schedule.cpu() is schedule


def test_whole_and_lengths_count_in_a_comparison() -> None:
    kept = torch.ones(3, 4, dtype=torch.bool)
    plain = BlockSchedule.from_blocks(kept, **SIZES)
    others = [
        BlockSchedule.from_blocks(kept, whole=kept, **SIZES),
        BlockSchedule.from_blocks(kept, whole=~kept, **SIZES),
        BlockSchedule.from_blocks(kept, lengths_q=torch.tensor([1, 2, 3]), **SIZES),
        BlockSchedule.from_blocks(kept, lengths_k=torch.tensor([1, 2, 3, 4]), **SIZES),
        BlockSchedule.from_blocks(kept.expand(2, 1, 3, 4), **SIZES),
        BlockSchedule.from_blocks(kept.expand(2, 3, 4), **SIZES),
    ]
    for n, one in enumerate(others):
        assert one != plain
        assert all((one == other) == (n == m) for m, other in enumerate(others))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"batch": np.int64(0)}, "batch must be at least 1"),
        ({"batch": np.int64(2)}, r"indptr must have shape \(7\)"),
        ({"whole": np.full((1, 1, 3, 1), 8, np.int32)}, "whole must have no block that the schedule does not keep"),
        ({"whole": np.zeros((1, 1, 3, 2), np.int32)}, r"whole must have shape \(1, 1, 3, 1\)"),
        ({"lengths_q": np.zeros((2, 3), np.int32)}, r"lengths_q must have shape \(3,\) or \(1, 3\), got \(2, 3\)"),
        ({"lengths_q": np.full((1, 3), 17, np.int32)}, "lengths_q must be between 0 and the block size 16, got 17"),
        ({"lengths_k": np.zeros((1, 3), np.int32)}, r"lengths_k must have shape \(n, 4\)"),
    ],
)
def test_files_with_more_that_is_wrong(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    held = {name: np.int64(GOOD[name] or 0) for name in (*SIZES, "heads")}
    np.savez(tmp_path / "a.npz", indptr=GOOD["indptr"], indices=GOOD["indices"], **held)
    assert BlockSchedule.load(tmp_path / "a.npz") == BlockSchedule(**GOOD), "as files were before they could hold more"
    np.savez(tmp_path / "a.npz", indptr=GOOD["indptr"], indices=GOOD["indices"], **held, **more)
    with pytest.raises(ValueError, match=words):
        BlockSchedule.load(tmp_path / "a.npz")


def test_a_plain_schedule_s_file_is_as_it_was(tmp_path: Path) -> None:
    BlockSchedule(**GOOD).save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as file:
        assert sorted(file.files) == sorted([*SIZES, "heads", "indptr", "indices"])


def test_runs_are_a_pattern_alone() -> None:
    kept = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    for name, schedule in (
        ("batch", BlockSchedule.from_blocks(kept, **SIZES)),
        ("lengths_q", BlockSchedule.from_blocks(kept[0, 0], lengths_q=torch.tensor([1, 2, 3]), **SIZES)),
        ("whole", BlockSchedule.from_blocks(kept[0, 0], whole=kept[0, 0], **SIZES)),
    ):
        with pytest.raises(ValueError, match=f"this schedule has {name}"):
            schedule.to_runs()


# ---- blocks ----------------------------------------------------------------------------------------------------------


@quick
@given(rich_schedules())
def test_blocks_and_bits_round_trip(schedule: BlockSchedule) -> None:
    kept, sizes = kept_blocks(schedule), sizes_of(schedule)
    more = {"lengths_q": schedule.lengths_q, "lengths_k": schedule.lengths_k}
    assert BlockSchedule.from_bits(schedule.bits, whole=schedule.whole, **sizes, **more) == schedule
    if schedule.whole is None:
        assert BlockSchedule.from_blocks(kept, **sizes, **more) == schedule
        assert BlockSchedule.from_blocks(kept.numpy(), **sizes, **more) == schedule


def test_a_leading_1_is_shared() -> None:
    kept = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    shared = BlockSchedule.from_blocks(kept, **SIZES)
    assert (shared.batch, shared.heads) == (None, None)
    assert BlockSchedule.from_blocks(kept[None], **SIZES) == shared
    assert BlockSchedule.from_blocks(kept[None, None], **SIZES) == shared
    assert BlockSchedule.from_blocks(kept.expand(1, 5, 3, 4), **SIZES).heads == 5
    assert BlockSchedule.from_blocks(kept.expand(5, 1, 3, 4), **SIZES).batch == 5


def test_whole_blocks_are_kept_ones() -> None:
    kept = torch.tensor([[True, False, True, False]] * 3)
    schedule = BlockSchedule.from_blocks(kept, whole=torch.tensor([[True, True, False, False]] * 3), **SIZES)
    assert schedule.whole is not None
    assert schedule.whole.flatten().tolist() == [1, 1, 1]


BOOLS = torch.ones(3, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"blocks": [[True]]}, TypeError, "blocks must be a torch.Tensor or a numpy array, got list"),
        ({"blocks": BOOLS[0]}, ValueError, r"blocks must have shape \(num_q_blocks, num_k_blocks\), \(heads, "),
        ({"blocks": BOOLS[None, None, None]}, ValueError, "blocks must have shape"),
        ({"blocks": BOOLS.expand(0, 3, 4)}, ValueError, r"got \(0, 3, 4\)"),
        ({"blocks": BOOLS.T}, ValueError, r"blocks must end in \(3, 4\), .* got \(4, 3\)"),
        ({"blocks": BOOLS.int()}, ValueError, "blocks must be bool .* got torch.int32"),
        ({"blocks": BOOLS.to("meta")}, ValueError, "blocks must be on the CPU or a CUDA device, got meta"),
        ({"whole": BOOLS[:2]}, ValueError, r"whole must be \(3, 4\) and torch.bool like blocks, got \(2, 4\)"),
        ({"whole": BOOLS.int()}, ValueError, "whole must be .* and torch.int32"),
        ({"whole": [True]}, TypeError, "whole must be a torch.Tensor or a numpy array, got list"),
        ({"whole": BOOLS.to("meta")}, ValueError, "whole must be on cpu like blocks, got meta"),
        ({"lengths_q": [1, 2, 3]}, TypeError, "lengths_q must be a torch.Tensor, got list"),
        ({"lengths_q": torch.ones(3)}, ValueError, "lengths_q must be one of int32, int64, got float32"),
        ({"lengths_q": torch.ones(4).int()}, ValueError, r"lengths_q must have shape \(3,\) or \(1, 3\), got \(4,\)"),
        ({"lengths_k": torch.tensor([0, 1, 33, 1])}, ValueError, "lengths_k must be between 0 and .* 32, got 0 to 33"),
        ({"lengths_k": torch.tensor([0, 1, -1, 1])}, ValueError, "lengths_k must be between 0 and .* got -1 to 1"),
        ({"block_q": 17}, ValueError, "block_q must be a multiple of 16"),
    ],
)
def test_from_blocks_refuses(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BlockSchedule.from_blocks(**{"blocks": BOOLS} | SIZES | change)


def test_from_bits_refuses() -> None:
    bits = torch.zeros(1, 1, 3, 1, dtype=torch.int32)
    for change, words in (
        ({"bits": bits[0]}, "bits must have 4 dimensions"),
        ({"bits": bits.long()}, "bits must be one of int32"),
        ({"bits": bits.expand(1, 1, 3, 2)}, r"bits must end in \(3, 1\)"),
        (
            {"whole": bits.expand(2, 1, 3, 1)},
            r"whole must be \(1, 1, 3, 1\) and torch.int32 like bits, got \(2, 1, 3, 1\)",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            BlockSchedule.from_bits(**{"bits": bits} | SIZES | change)
    with pytest.raises(ValueError, match="bits must be 0 past the last key block, num_k_blocks=4"):
        BlockSchedule.from_bits(torch.full((1, 1, 3, 1), 16, dtype=torch.int32), **SIZES)


# ---- lists -----------------------------------------------------------------------------------------------------------


@quick
@given(rich_schedules(), st.integers(0, 3))
def test_lists_round_trip(schedule: BlockSchedule, more: int) -> None:
    counts, indices = schedule.lists()
    assert torch.equal(counts, schedule.counts)
    assert torch.equal(counts, kept_blocks(schedule).sum(-1, dtype=torch.int32))
    assert indices.shape == (*counts.shape, schedule.num_k_blocks)
    rubbish = torch.where(torch.arange(indices.shape[-1]) < counts[..., None], indices, -77)
    bare = BlockSchedule.from_lists(counts, rubbish, **sizes_of(schedule))
    assert torch.equal(bare.bits, schedule.bits)
    narrow_counts, narrow = schedule.lists(more)
    assert torch.equal(narrow_counts, counts.clamp(max=more))
    wide = torch.zeros(*counts.shape, more, dtype=torch.int32)
    wide[..., : min(more, indices.shape[-1])] = indices[..., :more]
    assert torch.equal(narrow, wide)


@quick
@given(rich_schedules())
def test_full_lists_become_whole(schedule: BlockSchedule) -> None:
    sizes = sizes_of(schedule)
    whole = schedule.bits if schedule.whole is None else schedule.whole
    full = BlockSchedule.from_bits(whole, **sizes).lists()
    partial = BlockSchedule.from_bits(schedule.bits & ~whole, **sizes).lists()
    made = BlockSchedule.from_lists(
        *(x.long() for x in partial), full_counts=full[0].long(), full_indices=full[1].long(), **sizes
    )
    assert torch.equal(made.bits, schedule.bits)
    assert made.whole is not None
    assert torch.equal(made.whole, whole)


COUNTS, INDICES = torch.tensor([2, 0, 3]), torch.tensor([[1, 3, 9], [9, 9, 9], [0, 1, 2]])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"counts": torch.tensor([2, 0, 4])}, ValueError, "counts must be between 0 and the width 3 .* got 4 in"),
        ({"counts": torch.tensor([-1, 0, 3])}, ValueError, "counts must be .* got -1 in query block 0 of head 0"),
        ({"counts": torch.tensor([3, 0, 3])}, ValueError, "indices must be below num_k_blocks=4, got 9"),
        ({"indices": INDICES.clone().index_put_((torch.tensor(2), torch.tensor(0)), torch.tensor(-1))}, ValueError,
         "indices must be between 0 and"),
        ({"indices": INDICES.flip(1), "counts": torch.tensor([0, 0, 3])}, ValueError, "unsorted 2, 1 in query block 2"),
        ({"indices": torch.zeros_like(INDICES)}, ValueError, "duplicate 0, 0 in query block 0 of head 0"),
        ({"counts": COUNTS[:2]}, ValueError, r"counts must end in \(3\)"),
        ({"indices": INDICES[:2]}, ValueError, r"indices must have shape \(3, width\), as counts has, got \(2, 3\)"),
        ({"indices": INDICES.float()}, ValueError, "indices must be int32 or int64, got torch.float32"),
        ({"counts": COUNTS.bool()}, ValueError, "counts must be int32 or int64, got torch.bool"),
        ({"indices": [[1]]}, TypeError, "indices must be a torch.Tensor or a numpy array, got list"),
        ({"indices": INDICES.to("meta")}, ValueError, "indices must be on cpu like counts, got meta"),
        ({"full_counts": COUNTS}, ValueError, "full_counts and full_indices must be given together"),
        ({"full_counts": COUNTS, "full_indices": INDICES}, ValueError, "full_indices must not repeat .* got 1 in both"),
        ({"full_counts": COUNTS + 1, "full_indices": INDICES}, ValueError, "full_counts must be between 0 and the"),
        ({"full_counts": COUNTS, "full_indices": INDICES + 3}, ValueError, "full_indices must be below num_k_blocks=4"),
    ],
)  # fmt: skip
def test_from_lists_refuses(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BlockSchedule.from_lists(**{"counts": COUNTS, "indices": INDICES} | SIZES | change)


def test_a_faulty_list_of_a_sequence_is_named() -> None:
    counts = torch.zeros(2, 3, 3, dtype=torch.int32)
    counts[1, 2, 1] = 2
    with pytest.raises(ValueError, match="duplicate 0, 0 in query block 1 of head 2 of sequence 1"):
        BlockSchedule.from_lists(counts, torch.zeros(2, 3, 3, 4, dtype=torch.int32), **SIZES)


# ---- scores ----------------------------------------------------------------------------------------------------------
# What is kept, row by row: tests/gpu/test_schedules.py compares the kernels and this path with the definition.


def test_scores_by_hand() -> None:
    scores = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25] * 4, [0.0, 0.0, float("nan"), float("-inf")]])
    two = BlockSchedule.from_scores(scores, top_k=2, **SIZES)
    assert [two.row(i).tolist() for i in range(3)] == [[1, 3], [0, 1], [0, 1]]
    share = BlockSchedule.from_scores(scores, threshold=0.75, **SIZES)
    assert [share.row(i).tolist() for i in range(3)] == [[1, 2, 3], [0, 1, 2], []]
    # Rows 0, 16 and 32 of 40 queries stand at keys 88, 104 and 120 of 128: diagonal blocks 2 to 3, 3, 3.
    one = BlockSchedule.from_scores(scores, top_k=1, causal=True, **SIZES)
    assert [one.row(i).tolist() for i in range(3)] == [[1, 2, 3], [0, 3], [0, 3]]


def test_causal_scores_stay_in_the_triangle() -> None:
    scores = torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0))
    sizes = {"seqlen_q": 128, "seqlen_k": 128, "block_q": 16, "block_k": 16}
    everything = BlockSchedule.from_scores(scores, top_k=8, causal=True, **sizes)
    triangle = BlockSchedule.causal(128, 128, block_q=16, block_k=16)
    assert torch.equal(everything.bits, triangle.bits.expand(1, 2, 8, 1))
    assert all(
        i in BlockSchedule.from_scores(-scores, top_k=1, causal=True, **sizes).row(i, head)
        for i in range(8)
        for head in range(2)
    )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({}, ValueError, "exactly one of top_k and threshold, got neither"),
        (
            {"top_k": 2, "threshold": 0.5},
            ValueError,
            "exactly one of top_k and threshold, got top_k=2 and threshold=0.5",
        ),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int"),
        ({"threshold": 0.0}, ValueError, "threshold must be above 0 and at most 1, got 0.0"),
        ({"threshold": 1.1}, ValueError, "threshold must be above 0 and at most 1"),
        ({"threshold": float("nan")}, ValueError, "threshold must be finite"),
        ({"threshold": 0.5, "scores": -torch.ones(3, 4)}, ValueError, "scores must not be negative .* query block 0"),
        ({"top_k": 2, "scores": torch.ones(3, 4).double()}, ValueError, "scores must be one of float32"),
        ({"top_k": 2, "scores": torch.ones(4, 3)}, ValueError, r"scores must end in \(3, 4\)"),
        ({"top_k": 2, "scores": np.ones((3, 4))}, TypeError, "scores must be a torch.Tensor"),
        ({"top_k": 2, "causal": 1}, TypeError, "causal must be True or False"),
    ],
)
def test_from_scores_refuses(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BlockSchedule.from_scores(**{"scores": torch.ones(3, 4)} | SIZES | change)


# ---- transposes and checks -------------------------------------------------------------------------------------------


@quick
@given(rich_schedules())
def test_transpose(schedule: BlockSchedule) -> None:
    turned = schedule.transpose()
    assert torch.equal(turned.to_mask(), schedule.to_mask().transpose(-1, -2))
    assert (turned.block_q, turned.block_k) == (schedule.block_k, schedule.block_q)
    assert turned.transpose() == schedule


@quick
@given(schedules())
def test_looking_finds_nothing_wrong_on_the_cpu(schedule: BlockSchedule) -> None:
    schedule.check()


def test_check_of_heads_and_sequences() -> None:
    kept = torch.ones(2, 4, 3, 4, dtype=torch.bool)
    schedule = BlockSchedule.from_blocks(kept, **SIZES)
    schedule.check(40, 128, 4, 2, 2)
    schedule.check(40, 128, 8, 4, 2)
    schedule.check(batch=2)
    BlockSchedule.full(40, 128, block_q=16, block_k=32, heads=1).check(40, 128, 8)
    with pytest.raises(ValueError, match="schedule is for num_heads=4, got num_heads=8 and num_heads_kv=2"):
        schedule.check(40, 128, 8, 2, 2)
    with pytest.raises(ValueError, match="schedule is for batch=2, got batch=3"):
        schedule.check(40, 128, 4, 4, 3)


def test_nothing_can_be_assigned_or_deleted() -> None:
    schedule = BlockSchedule(**GOOD)
    for name in ("heads", "bits", "new"):
        with pytest.raises(AttributeError, match="does not change"):
            setattr(schedule, name, 1)
    with pytest.raises(AttributeError, match="does not change"):
        del schedule.heads
