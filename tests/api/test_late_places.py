"""Places of a step that go to a card with the plan, or when somebody asks for them: where they are when a kernel reads
them. Caches on the CPU stand for those on a card, and the emulator for its kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise
from tilewise.kvcache import PagedKVCache, storage
from tilewise.kvcache.slots import STAGED_BYTES, Places, gather, room_for

ROWS = 6


@pytest.fixture
def sent(monkeypatch):
    """How many steps were sent by a copy of their own."""
    counted = []
    send = Places._send
    monkeypatch.setattr(storage, "uses_kernels", lambda device: True)
    monkeypatch.setattr(Places, "_send", lambda places, *step: (counted.append(places), send(places, *step))[1])
    return counted


def make(seqs=4):
    cache = PagedKVCache(40, 16, 1, 64, kv_format="bf16")
    living = cache.allocate(seqs)
    cache.mark_written(cache.extend(living, [15 + 3 * n for n in range(seqs)]))
    return cache, living


def standing(cache, seqs):
    """A plan that has a list."""
    plan = tilewise.plan_decode(cache, seqs, num_heads=1, rows=ROWS, max_length=200)
    tilewise.decode(torch.randn(ROWS, 1, 1, 64).bfloat16(), cache, 0, plan, backend="emulator")
    return plan


def check(slots, positions, index):
    """All places of the card, idle ones too."""
    idle = slots.room - len(index)
    assert slots._places.tensor.tolist() == [[*positions.tolist(), *[0] * idle], [*index.tolist(), *[-1] * idle]]


def test_a_lazy_step_is_sent_when_somebody_asks(sent):
    cache, seqs = make()
    slots = room_for(cache, 20, lazy=True)
    sent.clear()
    for counts in (1, [5, 0, 2, 1], 1):
        slots = cache.extend(seqs, counts, into=slots)
        cache.mark_written(slots)
    assert not sent
    assert slots.index.tolist() == slots.host_index.tolist()
    assert slots.all_positions.tolist()[:4] == slots.host_positions.tolist()
    assert len(sent) == 1
    check(slots, slots.host_positions, slots.host_index)
    cache.lazy_places = True
    slots = cache.extend(seqs, 2)
    assert len(sent) == 1
    assert slots.positions.tolist() == slots.host_positions.tolist()
    assert len(sent) == 2


def test_each_copy_has_memory_of_its_own():
    """Of pinned memory that copies may still be read from: many pieces are taken at a time, and each is used once."""
    places, pieces = Places(1000, torch.device("cpu")), STAGED_BYTES // 16000
    for step in range(2 * pieces + 1):
        positions = np.arange(step, step + 7)
        places.fill(positions, 3 * positions)
        assert places.tensor[:, :8].tolist() == [[*positions.tolist(), 0], [*(3 * positions).tolist(), -1]]
        left = [host.data_ptr() for host, _ in places._staged]
        assert len(set(left)) == len(left) == -(step + 1) % pieces


def test_places_go_with_the_plan_while_sequences_come_and_go(sent):
    cache, seqs = make()
    plan = standing(cache, seqs)
    slots, together = room_for(cache, ROWS, planned=True), room_for(cache, ROWS, planned=True)
    sent.clear()
    for step in range(3):
        slots = cache.extend(seqs, 1, into=slots)
        cache.mark_written(slots)
        tilewise.renew_plan(plan, cache, seqs)
        check(slots, slots.host_positions, slots.host_index)
        new = cache.fork(seqs[step])
        cache.free(seqs[0])
        seqs[0] = new
    # Of several steps, gathered into one.
    parts = [cache.extend(some, 1, into=room_for(cache, 3, lazy=True)) for some in (seqs[:3], seqs[3:])]
    positions, index = (np.concatenate([getattr(x, name) for x in parts]) for name in ("host_positions", "host_index"))
    together = gather(together, seqs, [1] * 4, positions, index)
    tilewise.renew_plan(plan, cache, seqs)
    check(together, positions, index)
    assert not sent


def test_places_of_other_sequences_than_the_plans_are_sent_by_themselves(sent):
    cache, seqs = make()
    plan = standing(cache, seqs)
    slots = room_for(cache, ROWS, planned=True)
    sent.clear()
    slots = cache.extend(seqs[:2], 1, into=slots)
    tilewise.renew_plan(plan, cache, seqs)
    assert len(sent) == 1
    check(slots, slots.host_positions, slots.host_index)
    # A gathered step with a chunk is not what a plan of decodes sends.
    chunk = cache.extend(seqs[2:3], 3, into=room_for(cache, 3, lazy=True))
    mixed = gather(room_for(cache, ROWS, planned=True), seqs[2:3], [3], chunk.host_positions, chunk.host_index)
    tilewise.renew_plan(plan, cache, seqs)
    check(mixed, chunk.host_positions, chunk.host_index)
