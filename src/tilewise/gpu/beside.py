"""Two streams of one card: work that waits for what was asked for before it, beside other work, and is waited for.

Forked and joined by events, so that a graph captures both branches.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Literal, NamedTuple

import torch

# How chunks of prompts and decodes share a card: on two streams, either given to it first, or one after the other.
ORDER: Literal["decodes first", "chunks first", "apart"] = "decodes first"


def side_by_side(device: torch.device) -> bool:
    """Do both go on streams of their own there?"""
    return device.type == "cuda" and ORDER != "apart"


class _Second(NamedTuple):
    """The second stream of a device, and the events at which it forks and joins."""

    stream: torch.cuda.Stream
    fork: torch.cuda.Event
    join: torch.cuda.Event


_local = threading.local()  # two threads must not take each other's events


def _second(device: torch.device) -> _Second:
    """One for all streams that it is beside, so that it is there before one of them is captured."""
    made: dict[int | None, _Second] = _local.__dict__.setdefault("made", {})
    found = made.get(device.index)
    if found is None:
        # Before others wherever both have blocks to place: what stands here is the shorter of two.
        stream = torch.cuda.Stream(device, priority=-1)
        found = made[device.index] = _Second(stream, torch.cuda.Event(), torch.cuda.Event())
    return found


class Beside:
    """A branch beside the current stream of a device, after all that this has been given so far. Calls within `with`
    go on the branch; `join` lets the first stream go on when those are done."""

    def __init__(self, device: torch.device) -> None:
        self.main = torch.cuda.current_stream(device)
        self.second = _second(device)
        self.second.fork.record(self.main)
        self.within = torch.cuda.stream(self.second.stream)

    def __enter__(self) -> None:
        self.second.stream.wait_event(self.second.fork)
        self.within.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.second.join.record(self.second.stream)
        self.within.__exit__(kind, error, trace)
        if error is not None:  # no branch of a capture is left open
            self.join()

    def join(self) -> None:
        self.main.wait_event(self.second.join)
