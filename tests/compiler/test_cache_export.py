"""`tilewise cache export` and `import`: what goes from machine to machine, and what is refused on the way."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewise import cli
from tilewise.compiler import archive
from tilewise.compiler import cache as store

KEY = store.digest("kernel")
FILES = {"kernel.cubin": b"\x7fELF" * 99, "report.json": b"{}"}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("TILEWISE_DEBUG", raising=False)

    def run(*words: object) -> tuple[int, str, str]:
        code = cli.main(["cache", *map(str, words)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on this is another machine, with an empty cache."""
    return lambda: monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "elsewhere"))


def packed(path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> Path:
    """An archive with these members, whatever they are."""
    with tarfile.open(path, "w:gz") as made:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                made.addfile(content)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return path


def entry(key: str = KEY, files: dict[str, bytes] = FILES, kind: str = "cubin") -> dict[str, bytes]:
    """A sound entry's members."""
    store.keep("cubin", key, files)
    (found,) = [content for name, content in store.whole("cubin") if name == key]
    return {f"{kind}/{key}/{name}": data for name, data in found.items()}


def test_there_and_back(tmp_path: Path, elsewhere: Callable[[], None]) -> None:
    keys = [store.digest(str(n)) for n in range(5)]
    for n, key in enumerate(keys):
        store.keep("cubin", key, {"kernel.cubin": bytes([n]) * 1000, "report.json": b"{}"})
    store.keep("emulator", KEY, {"kernel.so": b"of this machine alone"})
    entries, size = archive.write(tmp_path / "kernels.tar.gz")
    assert entries == 5
    assert size > 5000
    built = store.built()
    elsewhere()
    assert archive.read(tmp_path / "kernels.tar.gz") == archive.Imported(5, 0, ())
    for n, key in enumerate(keys):
        assert store.read("cubin", key) == {"kernel.cubin": bytes([n]) * 1000, "report.json": b"{}"}
    assert store.read("emulator", KEY) is None
    assert store.built() == built, "nothing was compiled"
    assert archive.read(tmp_path / "kernels.tar.gz") == archive.Imported(0, 5, ())


def test_damaged_entries_stay_behind(tmp_path: Path, cache: Path) -> None:
    entry()
    store.keep("cubin", store.digest("other"), FILES)
    (cache / KEY / "kernel.cubin").write_bytes(b"damaged")
    assert archive.write(tmp_path / "kernels.tar.gz")[0] == 1


def test_what_is_whole_stays_and_what_is_damaged_is_replaced(tmp_path: Path, cache: Path) -> None:
    members = entry()
    path = packed(tmp_path / "kernels.tar.gz", members)
    before = (cache / KEY / "kernel.cubin").stat()
    assert archive.read(path) == archive.Imported(0, 1, ())
    assert (cache / KEY / "kernel.cubin").stat().st_ino == before.st_ino
    (cache / KEY / "kernel.cubin").write_bytes(b"damaged")
    assert archive.read(path) == archive.Imported(1, 0, ())
    assert store.read("cubin", KEY) == FILES


def link(name: str, target: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = tarfile.SYMTYPE, target
    return made


@pytest.mark.parametrize(
    "member",
    [
        "../../escaped",
        "/tmp/escaped",
        f"cubin/{KEY}/../../escaped",
        f"cubin/{KEY}/folder/escaped",
        f"cubin/{'x' * 64}/kernel.cubin",
        f"emulator/{KEY}/kernel.so",
        f"cubin/{KEY}",
        "tables/some.json",
    ],
)
def test_members_of_another_form_are_refused(member: str, tmp_path: Path, elsewhere: Callable[[], None]) -> None:
    path = packed(tmp_path / "kernels.tar.gz", {member: b"content", **entry(store.digest("good"))})
    elsewhere()
    done = archive.read(path)
    assert (done.added, done.there) == (1, 0)
    assert done.refused == (f"{member!r}: no file of a compiled kernel",)
    root = store.root()
    assert root is not None
    assert {p.relative_to(root).parts[0] for p in root.rglob("*")} == {"cubin"}
    assert not list(tmp_path.rglob("*escaped*"))


def test_links_are_refused(tmp_path: Path, elsewhere: Callable[[], None]) -> None:
    name = f"cubin/{KEY}/kernel.cubin"
    good = entry()
    path = packed(tmp_path / "kernels.tar.gz", {**good, name: link(name, "/etc/passwd")})
    elsewhere()
    done = archive.read(path)
    assert (done.added, len(done.refused)) == (0, 2)  # the link, and the entry that is not whole without it
    assert store.read("cubin", KEY) is None


@pytest.mark.parametrize("how", ["changed", "missing", "no checksum", "another key", "more"])
def test_entries_that_are_not_what_was_written_are_refused(
    how: str, tmp_path: Path, elsewhere: Callable[[], None]
) -> None:
    members = entry()
    name = f"cubin/{KEY}/kernel.cubin"
    if how == "changed":
        members[name] = b"something else"
    elif how == "missing":
        del members[name]
    elif how == "no checksum":
        del members[f"cubin/{KEY}/{store.CHECKSUM}"]
    elif how == "another key":
        members = {n.replace(KEY, store.digest("another")): data for n, data in members.items()}
    else:
        members[f"cubin/{KEY}/more"] = b"more"
    elsewhere()
    done = archive.read(packed(tmp_path / "kernels.tar.gz", members))
    assert (done.added, done.there, len(done.refused)) == (0, 0, 1)
    assert "damaged or not whole" in done.refused[0]
    assert store.show().entries == 0


def test_an_entry_has_a_size(tmp_path: Path, elsewhere: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path / "kernels.tar.gz", entry())
    elsewhere()
    monkeypatch.setattr(archive, "MOST", 300)
    done = archive.read(path)
    assert done.added == 0
    assert any("larger than any compiled kernel" in line for line in done.refused)


def test_what_comes_before_a_damage_is_kept(tmp_path: Path, elsewhere: Callable[[], None]) -> None:
    import random

    for n in range(8):
        store.keep("cubin", store.digest(str(n)), {"kernel.cubin": random.Random(n).randbytes(40_000)})
    path = tmp_path / "kernels.tar.gz"
    archive.write(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elsewhere()
    done = archive.read(path)
    assert 0 < done.added < 8
    assert done.refused[-1].startswith(f"the rest of {path}")


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b" + bytes(40)])
def test_what_is_no_archive_is_said(content: bytes, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "kernels.tar.gz"
    path.write_bytes(content)
    code, out, err = run("import", path)
    assert (code, err) == (1, "")
    assert out.startswith("0 added, 0 were there, 1 refused\nrefused the rest of")


def test_the_commands(tmp_path: Path, run: Run, elsewhere: Callable[[], None]) -> None:
    entry()
    path = tmp_path / "kernels.tar.gz"
    code, out, err = run("export", path)
    assert (code, err) == (0, "")
    assert out == f"{path}: 1 kernel, 0.0 MiB before compression\n"
    code, out, err = run("export", path)
    assert (code, out) == (1, "")
    assert "exists; --force overwrites it" in err
    assert run("export", path, "--force")[0] == 0
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    elsewhere()
    assert run("import", path) == (0, "1 added, 0 were there, 0 refused\n", "")
    code, _, err = run("import", tmp_path / "none.tar.gz")
    assert code == 1
    assert "No such file or directory" in err


def test_an_empty_cache_is_an_empty_archive(tmp_path: Path, run: Run) -> None:
    assert run("export", tmp_path / "kernels.tar.gz")[0] == 0
    assert run("import", tmp_path / "kernels.tar.gz") == (0, "0 added, 0 were there, 0 refused\n", "")
