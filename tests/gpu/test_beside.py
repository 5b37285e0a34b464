"""Two streams: what goes where, in which order, with streams and events that only take notes."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tilewise.gpu import beside


@pytest.fixture
def notes(monkeypatch):
    """What is asked of streams and events, in order; notes.append is the work."""
    made, current = [], ["main"]

    class Stream:
        def __init__(self, device=None, priority=0, name="side"):
            self.name = name

        def wait_event(self, event):
            made.append(f"{self.name} waits for {event.of}")

    class Event:
        of = ""

        def record(self, stream):
            self.of = f"{stream.name} {len(made)}"
            made.append(f"recorded {self.of}")

    @contextmanager
    def on(stream):
        current.append(stream.name)
        try:
            yield
        finally:
            current.pop()

    main = Stream(name="main")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(beside._local, "made", {}, raising=False)
    work = lambda name: made.append(f"{name} on {current[-1]}")  # noqa: E731
    return made, work, current


def test_a_branch_waits_for_what_was_there_and_is_waited_for(notes):
    made, work, current = notes
    branch = beside.Beside(torch.device("cpu"))
    with branch:
        work("decodes")
    work("chunks")
    branch.join()
    expected = ["recorded main 0", "side waits for main 0", "decodes on side", "recorded side 3", "chunks on main"]
    assert made == [*expected, "main waits for side 3"]
    assert current == ["main"]


def test_work_given_first_is_not_waited_for_by_the_branch(notes):
    made, work, _ = notes
    branch = beside.Beside(torch.device("cpu"))
    work("chunks")
    with branch:
        work("decodes")
    branch.join()
    assert made[:3] == ["recorded main 0", "chunks on main", "side waits for main 0"]


def test_an_error_leaves_no_branch_open(notes):
    made, _, current = notes
    with pytest.raises(ValueError, match="broken"), beside.Beside(torch.device("cpu")):
        raise ValueError("broken")
    assert made[-1] == "main waits for side 2"
    assert current == ["main"]


def test_a_device_has_one_second_stream(notes):
    first, again, other = (beside.Beside(torch.device("cuda", n)) for n in (0, 0, 1))
    assert first.second is again.second
    assert first.second is not other.second
