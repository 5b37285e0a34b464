"""Schedules in files: `.npz` holds everything, `.npy` the runs form, with lengths and block sizes as a comment in the
header, which numpy passes over. Files are never trusted: nothing is unpickled, and sizes are checked before
anything of that size is allocated."""

from __future__ import annotations

import math
import os
import re
import secrets
import stat
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tilewise.plan.schedule_grid import SCALARS, Geometry, Grid

AnyPath: TypeAlias = "str | os.PathLike[str]"

# The most bytes that one compressed array may inflate to. Files written here are not compressed, so their arrays are
# never larger than the file itself.
INFLATED_MAX = 64 * 2**20
# A run takes eight bytes in a file, however many blocks it stands for: without this limit a small file could ask for
# any number of indices.
RUN_BLOCKS_MAX = 2**28

_KEYS = ("seqlen_q", "seqlen_k", "block_q", "block_k", "heads", "indptr", "indices")
_MORE = ("batch", "whole", "lengths_q", "lengths_k")  # only in the files of schedules that have them

_SAID = ("seqlen_q", "seqlen_k", "block_q", "block_k")  # by the comment in the header of a .npy
_NOTE = re.compile("# tilewise " + " ".join(rf"{name}=(\d{{1,10}})" for name in _SAID) + r"\s*")
_ALIGNMENT = 64  # bytes, of the data in a .npy


def check_path(path: Any, *suffixes: str) -> Path:
    """`path` as a Path that ends in one of these suffixes."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise TypeError(f"path must be a str or a pathlib.Path, got {type(path).__name__}")
    result = Path(path)
    if result.suffix not in suffixes:
        raise ValueError(f"path must end in {' or '.join(suffixes)}, got {str(path)!r}")
    return result


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that replaces `path` once it is complete: no reader sees a part of it, a failure keeps the old one."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path must be in an existing folder, {path.parent} is not one")
    temporary = path.with_name(f".tilewise-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def reading(source: Path) -> Iterator[tuple[IO[bytes], int]]:
    """The open file and its size. Whatever goes wrong in the body becomes a ValueError that names the file."""
    status = os.stat(source)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"path must be a file, {source} is not one")
    with open(source, "rb") as file:
        # numpy and zipfile raise a dozen kinds of exceptions for damaged bytes: all mean the same to the caller.
        try:
            if status.st_size == 0:
                raise ValueError("the file is empty")
            yield file, status.st_size
        except Exception as error:
            why = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"{source} is not a schedule that can be loaded: {why}") from error


def write_npz(file: IO[bytes], scalars: Geometry, arrays: dict[str, npt.NDArray[Any] | None]) -> None:
    """scalars: the values of SCALARS. heads=None is written as 0, which no schedule per head has; batch=None and arrays
    that are None are not written."""
    held = {name: array for name, array in arrays.items() if array is not None}
    sizes = {name: np.int64(value or 0) for name, value in zip(SCALARS, scalars, strict=True)}
    if not sizes["batch"]:
        del sizes["batch"]
    np.savez(file, **held, **sizes)  # type: ignore[arg-type]


def read_npz(file: IO[bytes], size: int, given: dict[str, int | None]) -> dict[str, Any]:
    """The arguments of a BlockSchedule. size: bytes of the file. given: values that the file's must agree with, None
    for any."""
    with zipfile.ZipFile(file) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        more = [name for name in _MORE if name in members]
        if set(members) != {*_KEYS, *more} or len(archive.infolist()) != len(members):
            held = ", ".join(sorted(member.filename for member in archive.infolist())[:8]) or "nothing"
            raise ValueError(f"it must hold {', '.join(_KEYS)}, it holds {held}")

        def read(name: str, dtype: type[np.integer[Any]], *shape: int | None) -> npt.NDArray[Any]:
            member = members[name]
            if member.file_size > max(size, INFLATED_MAX):
                raise ValueError(f"{name} would inflate to {member.file_size} bytes")
            with archive.open(member) as stream:
                return read_npy(stream, member.file_size, name, dtype, shape)

        scalars: dict[str, Any] = {name: int(read(name, np.int64)) for name in SCALARS if name in members}
        for name, value in given.items():
            if value is not None and value != scalars[name]:
                raise ValueError(f"it is for {name}={scalars[name]}, asked for {name}={value}")
        scalars["heads"] = scalars["heads"] or None
        grid = Grid(**scalars)
        indptr = read("indptr", np.int32, grid.rows + 1)
        shapes = {"whole": grid.shape, "lengths_q": (None, grid.q_blocks), "lengths_k": (None, grid.cols)}
        tensors = {
            name: torch.from_numpy(read(name, np.int32, *shapes[name]).astype(np.int32))
            for name in more
            if name != "batch"
        }
        return {**scalars, "indptr": indptr, "indices": read("indices", np.int32, int(indptr[-1])), **tensors}


def write_runs(file: IO[bytes], runs: npt.NDArray[np.int32], geometry: Sequence[int | None]) -> None:
    """What np.save writes of the runs, (num_q_blocks, 2), and behind the header's dictionary a comment with the
    geometry, of which the first four values are _SAID."""
    said = " ".join(f"{name}={value}" for name, value in zip(_SAID, geometry, strict=False))
    shape = f"({runs.shape[0]}, {runs.shape[1]})"
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }} # tilewise {said} "
    start = np.lib.format.magic(1, 0)
    header += " " * (-(len(start) + 2 + len(header) + 1) % _ALIGNMENT) + "\n"
    file.write(start + len(header).to_bytes(2, "little") + header.encode("ascii"))
    file.write(runs.astype("<i4").tobytes())


def _said(file: IO[bytes]) -> dict[str, int]:
    """The geometry that the header of a .npy says, none if it has no comment; the file is at its start again."""
    version = np.lib.format.read_magic(file)
    length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    _, comment, said = file.read(min(length, 2**16)).decode("latin1").partition("#")
    file.seek(0)
    if not comment:
        return {}
    note = _NOTE.fullmatch(comment + said)
    if note is None:
        raise ValueError(f"its header has a note that is none of Tilewise's: {(comment + said).strip()[:100]!r}")
    return dict(zip(_SAID, map(int, note.groups()), strict=True))


def read_runs(file: IO[bytes], size: int, given: dict[str, int | None]) -> dict[str, Any]:
    """The arguments of BlockSchedule.from_runs. given: values that the file's must agree with, None for any. A file
    without a note on its geometry takes what is given, else blocks of 16 × 16 and, for both lengths, as many queries as
    it has runs for."""
    for name, value in _said(file).items():
        if given[name] not in (None, value):
            raise ValueError(f"it is for {name}={value}, asked for {name}={given[name]}")
        given = {**given, name: value}
    runs = read_npy(file, size, "runs", np.int32, (None, 2))
    blocks = int(runs[:, 1].sum(dtype=np.int64))
    if blocks > RUN_BLOCKS_MAX:
        raise ValueError(f"its runs add up to {blocks} blocks, at most {RUN_BLOCKS_MAX} are loaded from a file")
    block_q = 16 if given["block_q"] is None else given["block_q"]
    queries = len(runs) * block_q
    usual = {"seqlen_q": queries, "seqlen_k": queries, "block_q": block_q, "block_k": 16}
    return {"runs": runs} | {name: usual[name] if value is None else value for name, value in given.items()}


def read_npy(
    file: IO[bytes], size: int, name: str, dtype: type[np.integer[Any]], shape: Sequence[int | None]
) -> npt.NDArray[Any]:
    """The array in an `.npy` stream of `size` bytes. Its header must declare `dtype`, `shape` (None is free) and
    exactly the bytes that are there, before any of them is read."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"{name} has .npy version {version}, versions 1.0 and 2.0 are read")
    declared, fortran, stored = readers[version](file)
    if stored.hasobject:
        raise ValueError(f"{name} holds Python objects, which would have to be unpickled")
    if stored.newbyteorder("=") != dtype:
        raise ValueError(f"{name} must be {np.dtype(dtype)}, the file has {stored}")
    fits = len(declared) == len(shape) and all(
        n >= 0 and want in (None, n) for n, want in zip(declared, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("n" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape ({wanted}), the file declares {declared}")
    expected, left = math.prod(declared) * stored.itemsize, size - file.tell()
    if expected != left:
        raise ValueError(f"{name} declares {expected} bytes of data, the file has {left}")
    data = file.read(expected)
    if len(data) != expected:
        raise ValueError(f"{name} does not have the {expected} bytes of data it declares")
    return np.frombuffer(data, stored).reshape(declared, order="F" if fortran else "C")
