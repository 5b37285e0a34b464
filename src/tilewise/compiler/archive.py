"""Compiled kernels in one file, to be taken to another machine: what the cache holds of cubins, as a .tar.gz.

An entry is found by its key, which has the sources, the compiler and the architecture in it; so what is of no use on
another machine is never looked at there, and does no harm. An import takes nothing on trust but that: every entry is
checked like one on disk, names that would leave the cache's folder are refused, and a whole entry that is there stays.
Like any compiled code, take it from people whom you trust.
"""

from __future__ import annotations

import gzip
import io
import os
import secrets
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewise.compiler import cache

KIND = "cubin"
MOST = 256 << 20  # bytes of an entry


@dataclass(frozen=True)
class Imported:
    """How many entries were added, how many were there already, and what was refused, with why."""

    added: int
    there: int
    refused: tuple[str, ...]


def write(path: Path, *, force: bool = False) -> tuple[int, int]:
    """Write every whole entry into a file: how many, and their bytes. FileExistsError for one that is there."""
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists; --force overwrites it")
    entries = size = 0
    aside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with tarfile.open(aside, "w:gz", format=tarfile.PAX_FORMAT, compresslevel=6) as archive:
            for key, files in cache.whole(KIND):
                for name, data in sorted(files.items()):
                    member = tarfile.TarInfo(f"{KIND}/{key}/{name}")
                    member.size, member.mode = len(data), 0o644
                    archive.addfile(member, io.BytesIO(data))
                    size += len(data)
                entries += 1
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return entries, size


def read(path: Path) -> Imported:
    """Take the entries of a file into the cache. OSError if the file cannot be read or the cache cannot be written."""
    added = there = 0
    refused: list[str] = []
    with path.open("rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:gz") as archive:
                for key, files in _entries(archive, refused):
                    content = cache.sound(KIND, key, files)
                    if content is None:
                        refused.append(f"{KIND}/{key}: damaged or not whole")
                    elif cache.read(KIND, key) is not None:
                        there += 1
                    else:
                        cache.put(KIND, key, content)
                        added += 1
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
            refused.append(f"the rest of {path}: {error}")
    return Imported(added, there, tuple(refused))


def _entries(archive: tarfile.TarFile, refused: list[str]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Key and files of each entry, whose members stand together. Members of another form are refused by name."""
    key, files, size = "", dict[str, bytes](), 0
    for member in archive:
        parts = member.name.split("/")
        if len(parts) != 3 or parts[0] != KIND or not cache.is_key(parts[1]) or not member.isfile():
            refused.append(f"{member.name!r}: no file of a compiled kernel")
            continue
        if parts[1] != key:
            if key:
                yield key, files
            key, files, size = parts[1], {}, 0
        size += member.size
        if size > MOST:
            refused.append(f"{member.name!r}: larger than any compiled kernel")
            continue
        data = archive.extractfile(member)
        files[parts[2]] = data.read() if data else b""
    if key:
        yield key, files
