"""The disk cache for everything that is compiled: cubins and the emulator's builds, one folder per entry.

<root>/<kind>/<key>/ holds the entry's files and CHECKSUM, which tells them from damaged and foreign ones. An entry is
written beside its place and renamed into it, so that no reader sees half of one and two processes cannot hurt each
other. The folder's time of change is the time of its last use; past the limit, entries unused for longest go first.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# kind -> where its builds live when the folder cannot be written
KINDS = {"cubin": "in memory", "emulator": "in a temporary folder"}
DEFAULT_LIMIT = 512  # MiB
CHECKSUM = "checksum.json"

_KEY = re.compile(r"[0-9a-f]{64}")
_BESIDE = re.compile(r"\.[0-9a-f]{16}-\d+-[0-9a-f]{8}")  # so strict because the root may be a folder of the user's
_ABANDONED = 3600.0  # seconds after which what stands beside its place is a killed writer's
_IN_USE = 600.0  # seconds after its last use in which the limit spares an entry
_CHECK_EVERY = 32 << 20  # bytes written by this process between two looks at the limit

_warned = threading.Lock()  # taken by the one warning of this process, and never given back
_warned_of_limit = threading.Lock()
_built = 0  # entries that this process has made
_unchecked: int | None = None  # bytes written since the last look at the limit; None before the first write


def root() -> Path | None:
    """TILEWISE_CACHE, or `tilewise` in the user's cache folder; None where the user has no home."""
    try:
        if chosen := os.environ.get("TILEWISE_CACHE"):
            return Path(chosen).expanduser()
        cache = os.environ.get("XDG_CACHE_HOME", "")  # the standard says to ignore one that is empty or relative
        return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "tilewise"
    except RuntimeError:
        return None


def limit() -> float:
    """The bytes that the cache may hold: TILEWISE_CACHE_LIMIT, in MiB."""
    given = os.environ.get("TILEWISE_CACHE_LIMIT", "")
    try:
        most = float(given or DEFAULT_LIMIT)
    except ValueError:
        most = math.nan
    if not most >= 0:
        if _warned_of_limit.acquire(blocking=False):
            warnings.warn(
                f"TILEWISE_CACHE_LIMIT must be a number of MiB, 0 or more, got {given!r}; {DEFAULT_LIMIT} is taken",
                RuntimeWarning,
                stacklevel=2,
            )
        most = DEFAULT_LIMIT
    return most * 2**20


def digest(*parts: str | bytes) -> str:
    """The SHA-256 of the parts and of where each ends: the key of what they make."""
    state = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        state.update(len(data).to_bytes(8, "little") + data)  # the length keeps "ab", "c" apart from "a", "bc"
    return state.hexdigest()


def find(kind: str, key: str) -> Path | None:
    """The folder of a whole entry, whose time of last use becomes now; None if there is none.

    Another process may remove it at any time, so whoever opens its files builds anew on an OSError.
    """
    return None if read(kind, key) is None else _place(kind, key)


def read(kind: str, key: str) -> dict[str, bytes] | None:
    """The files of a whole entry by name, whose time of last use becomes now; None if there is none."""
    entry = _place(kind, key)
    if entry is None or (files := _verified(kind, entry)) is None:
        return None
    with contextlib.suppress(OSError):  # a folder that cannot be written serves as well
        os.utime(entry)
    return files


def keep(kind: str, key: str, files: Mapping[str, bytes]) -> Path | None:
    """Writes an entry in place of a damaged or foreign one; a whole one stays. Its folder.

    None where it cannot be written, and the first time in a process a RuntimeWarning that says why.
    """
    global _built
    if wrong := [name for name in files if not _plain_name(name)]:
        raise ValueError(f"files must have plain names other than {CHECKSUM}, got {wrong[0]!r}")
    _built += 1
    try:
        return put(kind, key, files)
    except OSError as error:
        if _warned.acquire(blocking=False):
            warnings.warn(
                f"compiled kernels are kept {KINDS[kind]} only, and compiled again by the next process: "
                f"{root() or '~/.cache'} cannot be written ({error}); set TILEWISE_CACHE to a folder that can",
                RuntimeWarning,
                stacklevel=3,
            )
        return None


def put(kind: str, key: str, files: Mapping[str, bytes]) -> Path:
    """What `keep` does, for an entry that this process did not make; OSError where it cannot be written."""
    entry = _place(kind, key)
    if entry is None:
        raise OSError(errno.ENOENT, "no home folder")
    entry.parent.mkdir(parents=True, exist_ok=True)
    _sweep(entry.parent, entry.parents[1])
    aside = _beside(entry)
    try:
        aside.mkdir()
        for name, data in files.items():
            (aside / name).write_bytes(data)
        (aside / CHECKSUM).write_bytes(_record(kind, key, files))
        _put(kind, entry, aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _hold_to_limit(entry.parents[1], sum(map(len, files.values())))
    return entry


def whole(kind: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """The key and the files of every whole entry of this version, its checksum with them, in the order of the keys."""
    folder = root()
    for found in sorted(_listed(folder / kind) if folder else [], key=lambda found: found.name):
        if _KEY.fullmatch(found.name) and (files := _verified(kind, Path(found.path))) is not None:
            yield found.name, {**files, CHECKSUM: _record(kind, found.name, files)}


def sound(kind: str, key: str, files: Mapping[str, bytes]) -> dict[str, bytes] | None:
    """The files of an entry that comes from elsewhere with its checksum, without that; None if they are not whole."""
    rest = {name: data for name, data in files.items() if name != CHECKSUM}
    try:
        record = json.loads(files[CHECKSUM])
        whole = record["files"] == sorted(rest) and record["checksum"] == _checksum(kind, key, rest)
    except (ValueError, KeyError, TypeError):
        return None
    return rest if whole and all(map(_plain_name, rest)) else None


def is_key(name: str) -> bool:
    """Is it what `digest` gives?"""
    return _KEY.fullmatch(name) is not None


def built() -> int:
    """How many entries this process has made, kept or not; other processes may fill the same folder meanwhile."""
    return _built


@dataclass(frozen=True)
class Held:
    """What the cache holds of one kind."""

    entries: int
    bytes: int


@dataclass(frozen=True)
class CacheState:
    """The cache's folder (None where the user has no home), what it holds of each kind, and its limit in bytes."""

    root: Path | None
    kinds: dict[str, Held]
    limit: float

    @property
    def entries(self) -> int:
        return sum(held.entries for held in self.kinds.values())

    @property
    def bytes(self) -> int:
        return sum(held.bytes for held in self.kinds.values())


def show() -> CacheState:
    """What the cache holds now, entries of earlier versions with the others."""
    folder, kinds = root(), {}
    for kind in KINDS:
        sizes = [size for _, size, _ in _survey(folder, kind)] if folder else []
        kinds[kind] = Held(len(sizes), sum(sizes))
    return CacheState(folder, kinds, limit())


def clear(kind: str | None = None) -> tuple[int, int]:
    """Removes the entries of one kind, or all, earlier versions' with them: how many, and their bytes.

    Only what the cache made is touched, whatever else lies in its folder. OSError if an entry cannot be removed.
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    entries = freed = 0
    if folder := root():
        for which in KINDS if kind is None else (kind,):
            for _, size, path in list(_survey(folder, which)):
                if _discard(path):
                    entries, freed = entries + 1, freed + size
            _sweep(folder / which, folder)
    return entries, freed


def _place(kind: str, key: str) -> Path | None:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if not _KEY.fullmatch(key):
        raise ValueError(f"key must be what digest() gives, got {key!r}")
    folder = root()
    return folder / kind / key if folder else None


def _checksum(kind: str, key: str, files: Mapping[str, bytes]) -> str:
    return digest(kind, key, *(part for item in sorted(files.items()) for part in item))


def _record(kind: str, key: str, files: Mapping[str, bytes]) -> bytes:
    """What stands in CHECKSUM."""
    return json.dumps({"files": sorted(files), "checksum": _checksum(kind, key, files)}).encode()


def _plain_name(name: str) -> bool:
    """A file name that stays within its folder, and is not CHECKSUM's."""
    return name not in ("", ".", "..", CHECKSUM) and os.path.basename(name) == name and "\0" not in name


def _verified(kind: str, entry: Path) -> dict[str, bytes] | None:
    """The entry's files, or None if one is missing or they are not what was written under this key."""
    try:
        record = json.loads((entry / CHECKSUM).read_bytes())
        files = {name: (entry / name).read_bytes() for name in record["files"]}
        return files if record["checksum"] == _checksum(kind, entry.name, files) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _beside(entry: Path) -> Path:
    return entry.parent / f".{digest(entry.name)[:16]}-{os.getpid()}-{secrets.token_hex(4)}"


def _put(kind: str, entry: Path, aside: Path) -> None:
    for _ in range(3):
        try:
            os.rename(aside, entry)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        if _verified(kind, entry) is not None:
            return  # another process was first, and made the same
        _discard(entry)  # damaged or foreign
    raise OSError(errno.EEXIST, "something else comes back in its place", str(entry))


def _discard(entry: Path) -> bool:
    """Removes an entry, moved first so that no reader finds it half removed. False if another process was first."""
    rubbish = _beside(entry)
    try:
        os.rename(entry, rubbish)
    except FileNotFoundError:
        return False
    _remove(rubbish)
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sweep(*folders: Path) -> None:
    """Removes what processes killed in mid-write left behind an hour or more ago."""
    for found in (found for folder in folders for found in _listed(folder) if _BESIDE.fullmatch(found.name)):
        with contextlib.suppress(OSError):
            if found.stat(follow_symlinks=False).st_mtime < time.time() - _ABANDONED:
                _remove(Path(found.path))


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _survey(folder: Path, kind: str) -> Iterator[tuple[float, int, Path]]:
    """Time of last use, bytes and place of every entry, those of earlier versions with them."""
    found = [e for e in _listed(folder / kind) if _KEY.fullmatch(e.name)]
    if kind == "cubin":  # earlier versions had <root>/<key>/
        found += [e for e in _listed(folder) if _KEY.fullmatch(e.name)]
    else:  # and <root>/emulator/<name>.so and .o
        found += [e for e in _listed(folder / kind) if e.name.endswith((".so", ".o")) and e.is_file()]
    for entry in found:
        with contextlib.suppress(OSError):  # another process removed it
            own = entry.stat(follow_symlinks=False)
            inside = _listed(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else []
            size = sum(file.stat(follow_symlinks=False).st_size for file in inside) if inside else own.st_size
            yield own.st_mtime, size, Path(entry.path)


def _hold_to_limit(folder: Path, wrote: int) -> None:
    """After a write: removes the entries unused for longest, if the cache is past its limit.

    Counting a cache takes a stat of every file, so a process does it at its first write and then once per _CHECK_EVERY
    bytes. Entries used within _IN_USE stay, for another process may be about to open one.
    """
    global _unchecked
    _unchecked = None if _unchecked is None else _unchecked + wrote
    if _unchecked is not None and _unchecked < _CHECK_EVERY:
        return
    _unchecked = 0
    entries = sorted(entry for kind in KINDS for entry in _survey(folder, kind))
    excess = sum(size for _, size, _ in entries) - limit()
    for _, size, path in entries:
        if excess <= 0:
            break
        with contextlib.suppress(OSError):  # gone, or not ours to remove
            # Asked again: it may have been used since it was counted.
            if path.lstat().st_mtime < time.time() - _IN_USE and _discard(path):
                excess -= size
