"""Schedules in files: round trips, and damaged, hostile and foreign files."""

from __future__ import annotations

import io
import os
import pickle
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_cases import GOOD, blocks, lengths, quick, schedules

from tilewise.plan import schedule_files
from tilewise.plan.schedule import BlockSchedule


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
    assert np.array_equal(stored, schedule.to_runs())
    assert np.array_equal(np.load(tmp_path / "a.npy", mmap_mode="r"), stored) or not stored.size
    assert BlockSchedule.load(tmp_path / "a.npy") == schedule
    assert BlockSchedule.load(tmp_path / "a.npy", **geometry) == schedule
    assert os.listdir(tmp_path) == ["a.npy"]


def test_a_npy_says_its_geometry_and_the_data_stay_aligned(tmp_path: Path) -> None:
    schedule = BlockSchedule.causal(500, 700, block_q=64, block_k=128)
    schedule.save(tmp_path / "a.npy")
    written = (tmp_path / "a.npy").read_bytes()
    assert b"# tilewise seqlen_q=500 seqlen_k=700 block_q=64 block_k=128 " in written
    assert len(written) % 64 == schedule.to_runs().nbytes % 64
    (tmp_path / "b.npy").write_bytes(written)  # a copy alone says as much
    assert BlockSchedule.load(tmp_path / "b.npy") == schedule


@pytest.mark.parametrize(
    "given_here", [{"seqlen_q": 499}, {"seqlen_k": 0}, {"block_q": 32}, {"block_k": 16}], ids=lambda d: next(iter(d))
)
def test_npy_of_another_geometry(tmp_path: Path, given_here: dict[str, int]) -> None:
    geometry = {"seqlen_q": 500, "seqlen_k": 700, "block_q": 64, "block_k": 128}
    BlockSchedule.full(**geometry).save(tmp_path / "a.npy")
    name, value = next(iter(given_here.items()))
    with pytest.raises(ValueError, match=f"it is for {name}={geometry[name]}, asked for {name}={value}"):
        BlockSchedule.load(tmp_path / "a.npy", **given_here)


@pytest.mark.parametrize(
    "note",
    [
        "# tilewise",
        "# tilewise seqlen_q=64 seqlen_k=64 block_q=16",
        "# tilewise seqlen_q=64 seqlen_k=64 block_q=-6 block_k=16",
        "# tilewise seqlen_q=64 seqlen_k=64 block_q=16 block_k=16 heads=3",
        "# tilewise seqlen_q=99999999999 seqlen_k=64 block_q=16 block_k=16",
        "# of somebody else",
    ],
)
def test_a_note_in_a_npy_that_is_not_understood_is_not_passed_over(tmp_path: Path, note: str) -> None:
    """Blocks of 16 would be taken for others without a word."""
    content = npy(header=INT32_HEADER.format((4, 2)) + note, data=b"\x00" * 32)
    refused(tmp_path / "a.npy", content, "its header has a note that is none of Tilewise's")


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
    text = header.encode().ljust(181) + b"\n"
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
    real = schedule_files.read_npy
    monkeypatch.setattr(
        schedule_files, "read_npy", lambda f, s, name, *rest: (read.append(name), real(f, s, name, *rest))[1]
    )
    monkeypatch.setattr(schedule_files, "INFLATED_MAX", rows * 4)
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
        BlockSchedule.causal(256, 256, block_q=16, block_k=16).save(tmp_path / "a.npy")
        whole = (tmp_path / "a.npy").read_bytes()
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
