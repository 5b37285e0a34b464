"""BlockSchedule: the class, strict checks, the runs form and pictures."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import GOOD, grid, quick, schedules

from tilewise.plan.schedule import BlockSchedule

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
        with pytest.raises(ValueError, match=r"one run of key blocks per row, row \d+ has gaps"):
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


def test_draw_takes_png_and_svg(tmp_path: Path) -> None:
    BlockSchedule(**GOOD).draw(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    with pytest.raises(ValueError, match=r"path must end in \.png or \.svg"):
        BlockSchedule(**GOOD).draw(tmp_path / "a.pdf")


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (1, 5000), (20000, 20000)])
def test_draw_any_shape(tmp_path: Path, shape: tuple[int, int]) -> None:
    BlockSchedule.causal(*shape, block_q=16, block_k=16).draw(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
