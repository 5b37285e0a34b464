"""`tilewise cache`: what it shows and removes, and what it says of wrong arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewise import cli
from tilewise.compiler import cache as store

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `tilewise cache …` in this process: exit code, stdout, stderr."""
    monkeypatch.delenv("TILEWISE_DEBUG", raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(["cache", *words])
        return code, *capsys.readouterr()

    return run


def fill() -> None:
    for i in range(3):
        store.keep("cubin", store.digest(str(i)), {"kernel.cubin": bytes(1 << 20)})
    store.keep("emulator", store.digest("x"), {"kernel.so": bytes(5 << 20)})


def test_show(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill()
    monkeypatch.setenv("TILEWISE_CACHE_LIMIT", "64")
    code, out, err = run("show")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == str(cache.parent)
    assert [line.split() for line in lines[1:5]] == [
        ["kind", "entries", "MiB"],
        ["cubin", "3", "3.0"],
        ["emulator", "1", "5.0"],
        ["all", "4", "8.0"],
    ]
    assert lines[5].startswith("limit 64.0 MiB (TILEWISE_CACHE_LIMIT)")


def test_show_as_json(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill()
    monkeypatch.setenv("TILEWISE_CACHE_LIMIT", "64")
    code, out, err = run("show", "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert (record["root"], record["entries"], record["limit"]) == (str(cache.parent), 4, 64 << 20)
    assert [(kind, held["entries"]) for kind, held in record["kinds"].items()] == [("cubin", 3), ("emulator", 1)]
    assert record["bytes"] == sum(held["bytes"] for held in record["kinds"].values()) >= 8 << 20
    monkeypatch.setenv("TILEWISE_CACHE_LIMIT", "inf")
    assert json.loads(run("show", "--json")[1])["limit"] is None
    assert run("show")[1].splitlines()[5].startswith("limit none (TILEWISE_CACHE_LIMIT)")


def test_show_without_a_home(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "root", lambda: None)
    code, out, err = run("show")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "no folder, because you have no home: set TILEWISE_CACHE to one"
    assert json.loads(run("show", "--json")[1])["root"] is None
    assert run("clear") == (0, "removed 0 entries, 0.0 MiB\n", "")


def test_clear(run: Run) -> None:
    fill()
    assert run("clear", "--kind", "emulator") == (0, "removed 1 entry, 5.0 MiB\n", "")
    assert store.show().kinds["cubin"].entries == 3
    assert run("clear") == (0, "removed 3 entries, 3.0 MiB\n", "")
    assert store.show().entries == 0


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("clear", "--kind", "ptx"), "Invalid value for --kind: 'ptx' is not one of cubin, emulator", "cache clear"),
        (("clear", "everything"), "Got unexpected extra argument", "cache clear"),
        (("show", "--kind", "cubin"), "No such option: --kind", "cache show"),
        (("empty",), "No such command 'empty'", "cache"),
        ((), "Missing command", "cache"),
    ],
)
def test_wrong_arguments_say_what_to_do(run: Run, words: tuple[str, ...], error: str, hint: str) -> None:
    fill()
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    first, second = err.splitlines()
    assert first.startswith(f"error: {error}")
    assert second == f"hint: tilewise {hint} --help"
    assert store.show().entries == 4


def test_an_entry_that_cannot_be_removed_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fill()

    def refuse(source: Path, _: Path) -> None:
        raise PermissionError(13, "Permission denied", str(source))

    monkeypatch.setattr(store.os, "rename", refuse)
    code, _, err = run("clear")
    assert code == 1
    assert err.startswith("error: Permission denied: ")


def test_the_overview_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "tilewise cache show | clear" in capsys.readouterr().out
