"""What commands write to: consoles that obey NO_COLOR, and streams that take any letter. Light: help imports it."""

from __future__ import annotations

import codecs
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# A pipe has no width; the tables need this much to stay in one piece. On a narrower terminal they leave columns out.
FULL_WIDTH = 132
# What stands for letters that a stream's encoding lacks, as ASCII lacks them all; "?" for any other.
INSTEAD = {
    "✓": "+", "·": ".", "×": "x", "µ": "u", "–": "-", "—": "-", "−": "-", "≥": ">=", "≤": "<=", "→": "->", "…": "...",
    "█": "#", "▓": "#", "▒": "+", "░": ".", "━": "-", "─": "-", "│": "|", "²": "2", "’": "'",
}  # fmt: skip
ERRORS = "tilewise.instead"
RAISES = ("strict", "surrogateescape")  # what streams have by themselves, the second where the locale is C


def plain() -> bool:
    """Does the user want no control codes? NO_COLOR says so unless it is empty: no-color.org."""
    return bool(os.environ.get("NO_COLOR"))


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for the tables where there is none.

    With NO_COLOR it treats a terminal as a file: neither styles nor the codes that move a bar, which then is written
    once, when it is done.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else FULL_WIDTH
    return Console(stderr=stderr, highlight=False, width=width, force_terminal=False if plain() else None)


def take_any_letter() -> None:
    """Have stdout and stderr replace what their encoding lacks, where they would raise UnicodeEncodeError."""
    codecs.register_error(ERRORS, _instead)
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) in RAISES and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=ERRORS)


def _instead(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(INSTEAD.get(letter, "?") for letter in letters), error.end
