"""Commands where a terminal is less than usual: no control codes under NO_COLOR, no letters that a stream lacks."""

from __future__ import annotations

import io
import sys

import pytest
from test_rooms import files_with

from tilewise import cli
from tilewise.bench.tune_command import Bar
from tilewise.serving.generate import _progress as generating

pytestmark = pytest.mark.usefixtures("quick")
SMALL = ["--heads", "2", "--hdim", "16", "--loops", "1"]


class Terminal(io.TextIOWrapper):
    """A stream that says it is a terminal, and keeps what is written."""

    def __init__(self, encoding: str, errors: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, errors=errors, newline="\n")

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture
def on_terminal(monkeypatch):
    """Run a command line, or with None only prepare: (exit code, what stands on stdout's screen and on stderr's)."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def run(words, encoding="utf-8", errors="strict"):
        screens = [Terminal(encoding, errors), Terminal(encoding, "backslashreplace")]
        monkeypatch.setattr(sys, "stdout", screens[0])
        monkeypatch.setattr(sys, "stderr", screens[1])
        code = None if words is None else cli.main(words)
        return code, screens

    return run


COMMANDS = {
    "overview": [],
    "help": ["--help"],
    "help of a command": ["bench", "prefix", "--help"],
    "doctor": ["doctor"],
    "a spinner": ["bench", "--seq", "32", *SMALL],
    "a progress bar": ["sweep", "--seq", "16", "32", *SMALL],
    "a table": ["cache", "show"],
    "a mistake": ["bench", "--seq", "many"],
    "a schedule": ["schedule", "show", "a.npz"],
    "cases": ["testdata", "check", "case.npz"],
}


@pytest.fixture
def files(run):
    assert run("schedule", "make", "causal", "--seq", "128", "-o", "a.npz")[0] == 0
    assert run("testdata", "make", "randn", "--seq", "16", "--hdim", "8", "-o", "case.npz")[0] == 0


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_no_color_means_no_control_codes(on_terminal, monkeypatch, words):
    monkeypatch.setenv("NO_COLOR", "1")
    code, screens = on_terminal(words)
    assert code == (2 if "many" in words else 0)
    shown = "".join(screen.text for screen in screens)
    assert shown
    assert [c for c in shown if ord(c) < 32 and c != "\n"] == []


def test_a_terminal_has_colours_otherwise(on_terminal, monkeypatch):
    """So that the test above does not hold for want of a terminal; an empty NO_COLOR is none."""
    monkeypatch.setenv("NO_COLOR", "")
    for words in (["--help"], ["doctor"], ["sweep", "--seq", "16", *SMALL]):
        assert "\x1b[" in "".join(screen.text for screen in on_terminal(words)[1]), words


def test_the_bar_of_long_commands_without_control_codes(on_terminal, monkeypatch):
    """Of tune and warm, which need a card or a compiler, and of tilewise.generate."""
    monkeypatch.setenv("NO_COLOR", "1")
    _, (_, errors) = on_terminal(None)
    with Bar() as bar, generating(True, 2) as done:
        bar.total(2)
        bar.next("first")
        done()
        bar.next("second")
        done()
    assert "generate" in errors.text
    assert "\x1b" not in errors.text


def test_one_place_makes_consoles():
    """Where NO_COLOR is looked at; generate()'s bar cannot import it from below."""
    assert files_with(r"\bConsole\(") == ["bench/terminal.py", "serving/generate.py"]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_stream_that_takes_ascii_alone(on_terminal, monkeypatch, words):
    monkeypatch.setenv("NO_COLOR", "1")
    code, (_, errors) = on_terminal(words, encoding="ascii")
    assert code == (2 if "many" in words else 0)
    assert "bug in Tilewise" not in errors.text


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_what_stands_for_letters_that_a_stream_does_not_have(on_terminal, monkeypatch, errors):
    """surrogateescape is what Python gives to streams where the locale is C."""
    monkeypatch.setenv("NO_COLOR", "1")
    code, (out, err) = on_terminal(["doctor"], encoding="ascii", errors=errors)
    assert (code, err.text) == (0, "")
    assert "?" not in out.text
    assert "+ torch" in out.text
    monkeypatch.setenv("COLUMNS", "140")
    code, (out, _) = on_terminal(["bench", "--seq", "32", *SMALL], encoding="ascii", errors=errors)
    assert code == 0
    assert "us/tok.head" in out.text
    assert "1.00x" in out.text
