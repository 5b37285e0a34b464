"""Fixtures of the benchmarks' tests: a clock and a card that only tests move."""

from __future__ import annotations

import types

import pytest
from bench_cases import Event

from tilewise.bench import measure


@pytest.fixture(autouse=True)
def quick(fixed_ceiling):
    """On one thread, with a ceiling ready."""


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `pass_by` moves: tests of numbers must not depend on how busy the machine is."""
    now = [0.0]

    def pass_by(seconds):
        now[0] += seconds

    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    return pass_by


@pytest.fixture
def card(monkeypatch, clock):
    """A GPU as far as the loop knows one: what runs there takes the time that it passes on the clock."""
    Event.log.clear()
    monkeypatch.setattr(measure, "_event", Event)
    monkeypatch.setattr(measure, "_synchronize", lambda device: Event.log.append("synchronized"))
    monkeypatch.setattr(measure, "_flusher", lambda calls, device: lambda: (clock(0.25), Event.log.append("flush")))

    def call(name, seconds):
        return lambda: (clock(seconds), Event.log.append(name))

    return call
