"""Engines as on a card, without one: passes of a few sizes, which are captured and replayed, and tokens a step late."""

from __future__ import annotations

import recorded

from tilewise.kvcache import storage
from tilewise.kvcache.slots import room_for
from tilewise.serving import Engine
from tilewise.serving.batch import Pass


class Recorded:
    """In a graph's place: a replay runs the captured pass again, over the memory and the plans that it began with."""

    def __init__(self, captured, kind, replays):
        self.captured, self.kind, self.replays = captured, kind, replays
        self.began_with = self.now()

    def now(self):
        one = self.captured
        buffers = (one.sources, one.tokens, one.positions, one.keep, one.numbers, one.chosen)
        plans = [*one.step.plans.items(), *one.step.decodes.plans.items()]
        return [x.data_ptr() for x in buffers], [x.shape for x in buffers], plans

    def replay(self):
        step = self.captured.step
        assert self.now() == self.began_with
        assert len(self.captured.tokens) == step.rows
        self.replays.append((step.rows, len(step.decodes.seqs), sum(tokens for _, tokens in step.chunks)))
        self.again()

    def again(self):
        self.captured.forward(self.kind)


class Taped(Recorded):
    """A replay makes each launch and each operator of the captured pass again, over the tensors that they had, and asks
    nobody else: what they read of the host is what it was."""

    def __init__(self, captured, kind, replays, monkeypatch):
        chosen = captured.chosen.clone()
        self.tape = recorded.Recorded(monkeypatch)
        with self.tape:
            captured.forward(kind)
        captured.chosen.copy_(chosen)  # a capture computes nothing
        super().__init__(captured, kind, replays)

    def again(self):
        self.tape.replay()


def like_a_card(served, late=True):
    """From now on. late: whether tokens come a step late."""
    served._graphs, served._late = True, late
    served._batches = served._make_batches()
    served._places = room_for(served.cache, served._schedule.max_rows)
    return served


def capture_nothing(monkeypatch, replays):
    """Captures are recordings; of each replay its rows, decodes and tokens of prompts are put into `replays`."""
    monkeypatch.setattr(Pass, "capture", lambda captured, kind: Recorded(captured, kind, replays))


def all_taped(monkeypatch):
    """All engines that are made from now on, of backend="emulator": also what is written is by kernels, and a pass is
    replayed launch by launch."""
    replays = all_like_cards(monkeypatch)
    monkeypatch.setattr(storage, "uses_kernels", lambda device: True)
    monkeypatch.setattr(Pass, "capture", lambda captured, kind: Taped(captured, kind, replays, monkeypatch))
    return replays


def all_like_cards(monkeypatch):
    """All engines that are made from now on."""
    replays, make = [], Engine.__init__
    capture_nothing(monkeypatch, replays)

    def init(served, *args, **options):
        make(served, *args, **options)
        like_a_card(served)

    monkeypatch.setattr(Engine, "__init__", init)
    return replays
