"""Lines of the user's function, for errors that name them."""

from __future__ import annotations

import linecache
import os
import sys
from types import FrameType, TracebackType
from typing import NamedTuple

import torch

# Frames in these folders are not the user's.
_NOT_THE_USERS = (os.path.dirname(__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep)


class Untraceable(TypeError):
    """A mask or score function does what cannot be written down as an expression."""


class NoAttribute(Untraceable, AttributeError):
    """The same by an attribute that does not exist."""


class Place(NamedTuple):
    """A line of the user's function."""

    file: str
    line: int

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line}" + (f" `{source}`" if source else "")


NOWHERE = Place("<unknown>", 0)


def here(depth: int = 1) -> Place:
    """The line of the user's function that is running."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno) if frame else NOWHERE


def raised_at(trace: TracebackType | None) -> Place:
    """The innermost line of the user's function in a traceback."""
    place = NOWHERE
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            place = Place(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return place


def refuse(what: str) -> Untraceable:
    """The error that `what` the user's function does now cannot be traced."""
    return Untraceable(f"a mask or score function, {here(2)}: {what}")
