"""The cache by itself: where it is, whole entries only, its limit, and processes that share it."""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from compiler_cases import entries, finish, leftovers, python

from tilewise.compiler import cache as store

MIB = 1 << 20


def key(name: object) -> str:
    return store.digest(str(name))


def add(name: object, size: int = 1000, kind: str = "cubin", unused_for: float = 0.0) -> Path:
    """An entry last used so many seconds ago."""
    entry = store.keep(kind, key(name), {"data": bytes(size)})
    assert entry is not None
    age(entry, unused_for)
    return entry


def age(entry: Path, seconds: float) -> None:
    os.utime(entry, (time.time() - seconds,) * 2)


def as_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_unchecked", None)


def earlier_versions(root: Path) -> tuple[Path, Path]:
    """A cubin and an emulator build where earlier versions put them, 300 and 200 bytes."""
    cubin, build = root / key("old"), root / "emulator" / ("ab" * 16 + ".so")
    for folder in (cubin, build.parent):
        folder.mkdir(parents=True)
    (cubin / "kernel.cubin").write_bytes(bytes(100))
    (cubin / "report.json").write_bytes(bytes(200))
    build.write_bytes(bytes(200))
    return cubin, build


# Where


def test_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", "~/kernels")
    assert store.root() == Path.home() / "kernels"
    for none in ("", None):
        if none is None:
            monkeypatch.delenv("TILEWISE_CACHE")
        else:
            monkeypatch.setenv("TILEWISE_CACHE", none)
        monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
        assert store.root() == Path("/var/cache/me/tilewise")
        for ignored in ("relative", "./here", "~/cache", ""):  # as the XDG specification says
            monkeypatch.setenv("XDG_CACHE_HOME", ignored)
            assert store.root() == Path.home() / ".cache" / "tilewise"
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert store.root() == Path.home() / ".cache" / "tilewise"


@pytest.mark.parametrize("chosen", [None, "~/kernels"])
def test_no_home(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME whom the password file does not know."""
    for name in ("HOME", "XDG_CACHE_HOME", "TILEWISE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv("TILEWISE_CACHE", chosen)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["nobody"])
    assert store.root() is None
    assert store.find("cubin", key(1)) is None
    with pytest.warns(RuntimeWarning, match="kept in memory only.*no home folder"):
        assert store.keep("cubin", key(1), {"data": b""}) is None
    assert (store.show().root, store.show().entries) == (None, 0)
    assert store.clear() == (0, 0)


def test_digest_keeps_parts_apart() -> None:
    assert store.digest("ab", "c") != store.digest("a", "bc")
    assert store.digest("ab") != store.digest("ab", "")
    assert store.digest("ä") == store.digest("ä".encode())
    assert len(store.digest()) == 64


# Entries


def test_entries_of_this_process_are_counted(cache: Path) -> None:
    before = store.built()
    store.keep("cubin", key(1), {"data": b""})
    store.keep("emulator", key(2), {"data": b""})
    code = f"from tilewise.compiler import cache; cache.keep('cubin', '{key(3)}', {{}}); assert cache.built() == 1"
    finish(python(code))
    assert (store.built() - before, store.show().entries) == (2, 3)


def test_an_entry_is_what_was_kept() -> None:
    assert store.find("cubin", key(1)) is None
    files = {"a": b"first", "b": b""}
    entry = store.keep("cubin", key(1), files)
    assert entry is not None
    assert store.find("cubin", key(1)) == entry
    assert store.read("cubin", key(1)) == files
    assert store.find("emulator", key(1)) is None
    assert store.keep("cubin", key(1), files) == entry
    assert leftovers(entry.parent) == []


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: store.find("ptx", key(1)), "kind must be one of cubin, emulator, got 'ptx'"),
        (lambda: store.find("cubin", "../x"), "key must be what digest.. gives, got '../x'"),
        (lambda: store.keep("cubin", key(1), {"a/b": b""}), "plain names .*got 'a/b'"),
        (lambda: store.keep("cubin", key(1), {store.CHECKSUM: b""}), "plain names other than checksum.json"),
        (lambda: store.clear("ptx"), "kind must be one of cubin, emulator, got 'ptx'"),
    ],
)
def test_wrong_arguments_are_named(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def cut(entry: Path) -> None:
    (entry / "data").write_bytes(b"fir")


def flip(entry: Path) -> None:
    (entry / "data").write_bytes(b"fIrst")


def lose(entry: Path) -> None:
    (entry / "data").unlink()


def no_checksum(entry: Path) -> None:
    (entry / store.CHECKSUM).unlink()


def wrong_checksum(entry: Path) -> None:
    (entry / store.CHECKSUM).write_text('["data"]')


def copied(entry: Path) -> None:
    """A whole entry, of another key."""
    other = store.keep("cubin", key("other"), {"data": b"other"})
    assert other is not None
    shutil.rmtree(entry)
    os.rename(other, entry)


def a_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("not ours")


@pytest.mark.parametrize("damage", [cut, flip, lose, no_checksum, wrong_checksum, copied, a_file])
def test_a_damaged_entry_is_none_and_is_replaced(damage: Any) -> None:
    entry = store.keep("cubin", key(1), {"data": b"first"})
    assert entry is not None
    damage(entry)
    assert store.find("cubin", key(1)) is None
    assert store.keep("cubin", key(1), {"data": b"first"}) == entry
    assert store.read("cubin", key(1)) == {"data": b"first"}
    assert leftovers(entry.parent) == []
    assert entries(entry.parent) == [entry.name]


@pytest.mark.parametrize(("kind", "where"), [("cubin", "in memory"), ("emulator", "in a temporary folder")])
def test_a_folder_that_cannot_be_written_warns_once(
    kind: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()  # where even root can make no folder
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match=f"kept {where} only.*file/cache cannot be written.*set TILEWISE_CACHE"):
        assert store.keep(kind, key(1), {"data": b""}) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.keep(kind, key(1), {"data": b""}) is None
    assert store.show().entries == 0
    assert store.clear() == (0, 0)


def test_a_read_only_folder_still_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = add(1)

    def refuse(*_: Any, **__: Any) -> None:  # in place of rights, which root does not need
        raise OSError(errno.EROFS, "Read-only file system")

    for function in ("mkdir", "utime", "rename"):
        monkeypatch.setattr(os, function, refuse)
    assert store.find("cubin", key(1)) == entry
    with pytest.warns(RuntimeWarning, match="cannot be written .*Read-only file system"):
        assert store.keep("cubin", key(2), {"data": b"x"}) is None


# The module needs nothing of the package, and without it a process starts at once.
WRITE = f"""
    sys.path[:0] = [{str(Path(store.__file__).parent)!r}]
    import cache
    print("ready", flush=True)
    sys.stdin.readline()
    key, files = cache.digest("1"), dict(a=bytes(5000), b=b"x")
    for _ in range(200):
        cache.keep("emulator", key, files)
        found = cache.read("emulator", key)
        assert found is None or found == files
        cache.clear("emulator")
    print(cache.keep("emulator", key, files) is not None)
"""


def test_processes_that_write_and_clear_at_once(cache: Path) -> None:
    workers = [python(WRITE) for _ in range(2)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    assert [finish(worker, "go\n").split() for worker in workers] == [["True"]] * 2
    assert leftovers(cache.parent / "emulator") == []


def test_a_killed_writers_leftovers_go_after_an_hour(cache: Path) -> None:
    cache.mkdir(parents=True)
    left = store._beside(cache / key(1))
    left.mkdir()
    (left / "data").touch()
    assert store.find("cubin", key(1)) is None
    assert store.show().entries == 0
    add(1)
    assert left.exists()  # it may still be somebody's
    age(left, 4000)
    user = cache.parent / ".my-own-folder"  # TILEWISE_CACHE may be a folder with other things in it
    user.mkdir()
    age(user, 4000)
    add(2)
    assert leftovers(cache) == []
    assert user.exists()


# The limit


def test_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("", 512), ("20", 20), ("0.5", 0.5), ("0", 0), ("inf", float("inf"))):
        monkeypatch.setenv("TILEWISE_CACHE_LIMIT", text)
        assert store.limit() == expected * MIB
    monkeypatch.setenv("TILEWISE_CACHE_LIMIT", "-1")
    with pytest.warns(RuntimeWarning, match="TILEWISE_CACHE_LIMIT must be a number of MiB, 0 or more, got '-1'; 512"):
        assert store.limit() == 512 * MIB
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in ("much", "nan"):
            monkeypatch.setenv("TILEWISE_CACHE_LIMIT", text)
            assert store.limit() == 512 * MIB


def test_the_least_recently_used_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_LIMIT", "3.5")
    old = {name: add(name, MIB, "emulator" if name == "b" else "cubin", 5000 - i) for i, name in enumerate("abcd")}
    assert all(path.exists() for path in old.values())  # this process looked at the limit at its first write
    assert store.find("cubin", key("a")) == old["a"]  # which is its last use now
    as_a_new_process(monkeypatch)
    new = add("e", MIB // 4)
    assert [name for name, path in old.items() if path.exists()] == ["a", "c", "d"]
    assert new.exists()
    assert store.show().bytes < 3.5 * MIB


def test_what_is_in_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_LIMIT", "0")
    recent, old = add("a", unused_for=300), add("b", unused_for=700)
    as_a_new_process(monkeypatch)
    written = add("c")
    assert [path.exists() for path in (recent, old, written)] == [True, False, True]


def test_the_limit_is_looked_at_once_per_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    survey = store._survey
    monkeypatch.setattr(store, "_survey", lambda *args: looks.append(args) or survey(*args))
    monkeypatch.setattr(store, "_CHECK_EVERY", 10_000)
    for i in range(25):
        add(i, 1000)
    assert len(looks) == len(store.KINDS) * 3  # the first write, the eleventh and the twenty-first


def test_an_entry_used_while_the_cache_is_counted_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_LIMIT", "0")
    old = add("a", unused_for=5000)
    survey = store._survey

    def slow(*args: Any) -> Any:
        found = list(survey(*args))
        assert store.find("cubin", key("a")) is not None  # by another process
        return found

    monkeypatch.setattr(store, "_survey", slow)
    as_a_new_process(monkeypatch)
    add("b")
    assert old.exists()


# Show and clear


def test_show_and_clear(cache: Path) -> None:
    root = cache.parent
    assert (store.show().root, store.show().entries, store.show().bytes) == (root, 0, 0)
    old_cubin, old_build = earlier_versions(root)
    mine = root / "notes.txt"
    mine.write_text("the user's own")
    cubin, build = add(1, 1000), add(2, 5000, "emulator")
    state = store.show()
    overhead = (cubin / store.CHECKSUM).stat().st_size
    assert state.kinds == {
        "cubin": store.Held(2, 1300 + overhead),
        "emulator": store.Held(2, 5200 + overhead),
    }
    assert (state.entries, state.bytes, state.limit) == (4, 6500 + 2 * overhead, 512 * MIB)
    assert store.clear("emulator") == (2, 5200 + overhead)
    assert [p.exists() for p in (old_build, build, old_cubin, cubin)] == [False, False, True, True]
    assert store.clear() == (2, 1300 + overhead)
    assert [p.exists() for p in (old_cubin, cubin, mine)] == [False, False, True]
    assert store.clear() == (0, 0)


def test_earlier_versions_entries_count_for_the_limit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_LIMIT", "0")
    old = earlier_versions(cache.parent)
    for path in old:
        age(path, 5000)
    add(1)
    assert [path.exists() for path in old] == [False, False]
