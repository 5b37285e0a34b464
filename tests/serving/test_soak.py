"""Much traffic over a cache that is too small: every answer is right, every page comes back, nothing piles up.

`pytest -m soak` serves ten thousand requests, and on a card for TILEWISE_SOAK_SECONDS (600); here, a hundred.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from card_like import capture_nothing, like_a_card
from stub_model import Stub, Traffic, check, engine_of
from tiny_models import pages_are_back

from tilewise.serving import EngineFull

pytestmark = pytest.mark.usefixtures("one_thread")


def serve(served, stub, traffic, more, *, tick=lambda: None, grace=0.0, exact=True):
    """Random requests while `more(how many)` says so, each checked when it is done; cancelled now and then.

    tick: called after each step. grace: seconds that a step may take.
    """
    rng, asked, ends = traffic.random, {}, {}
    count = full = 0
    objects = []
    while more(count) or served.busy:
        for _ in range(rng.choice([0, 0, 1, 1, 2, 8]) if more(count) else 0):
            one = traffic.request(greedy=not exact)
            timeout = rng.choice([None, None, 2.0, 40.0, 1e6])
            try:
                number = served.submit(
                    one.prompt,
                    max_new_tokens=one.max_new_tokens,
                    num_samples=one.num_samples,
                    sampling=one.sampling,
                    priority=rng.choice([0, 0, 0, 1, 2]),
                    timeout=timeout,
                )
            except EngineFull:
                full += 1
                continue
            asked[number], count = one, count + 1
            ends[number] = time.monotonic() + (timeout or 1e9)
        if asked and rng.random() < 0.05:
            served.cancel(rng.choice(list(asked)))
        for token in served.step():
            asked[token.request].found.setdefault(token.sample, []).append(token.token)
        for number in [number for number in asked if served.done(number)]:
            check(stub, number, asked.pop(number), served.result(number), exact)
            del ends[number]
        now = time.monotonic() - grace
        assert all(now < end for end in ends.values()), "somebody waits longer than its time-out"
        tick()
        if count % 500 == 499:
            gc.collect()
            objects.append(len(gc.get_objects()))
    assert asked == {}
    assert served._requests == {}
    return full, objects


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def soak(monkeypatch, clock, requests, seed):
    stub = Stub()
    served = engine_of(stub, monkeypatch, num_pages=40, page_size=4, max_sequences=12, token_budget=40, max_waiting=30)

    def tick():
        clock[0] += 1.0

    full, objects = serve(served, stub, Traffic(seed), lambda count: count < requests, tick=tick)
    stats = served.stats()
    assert min(full, stats.preemptions, stats.timeouts, stats.mixed_steps, served.prefix.stats().evictions) > 0
    assert stub.most == served.token_budget, "no step has more tokens than its budget"
    assert pages_are_back(served)
    assert len(served._deadlines) < 100
    return objects


def test_a_hundred_requests(monkeypatch, clock):
    soak(monkeypatch, clock, 120, 1)


def test_two_engines_in_threads(monkeypatch, clock):
    """One model, a cache each, steps of one between those of the other: as on a card and not. serve() checks every
    answer against the model alone."""
    stub = Stub()
    capture_nothing(monkeypatch, [])
    options = {"num_pages": 40, "page_size": 4, "max_sequences": 12, "token_budget": 40, "max_waiting": 30}
    engines = [like_a_card(engine_of(stub, monkeypatch, **options)), engine_of(stub, monkeypatch, **options)]
    barrier = threading.Barrier(2)

    def run(served, seed):
        barrier.wait()
        return serve(served, stub, Traffic(seed), lambda count: count < 60)

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # or one would often be done before the other begins
    try:
        with ThreadPoolExecutor(2) as pool:
            for one in [pool.submit(run, served, seed) for seed, served in enumerate(engines, 11)]:
                one.result()
    finally:
        sys.setswitchinterval(switching)
    for served in engines:
        assert served.stats().mixed_steps > 0
        assert pages_are_back(served)


@pytest.mark.soak
def test_ten_thousand_requests(monkeypatch, clock):
    objects = soak(monkeypatch, clock, 10_000, 2)
    early, late = max(objects[: len(objects) // 4]), max(objects[-len(objects) // 4 :])
    assert late < 1.02 * early + 500, "objects pile up"


@pytest.mark.soak
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_a_card_for_ten_minutes(monkeypatch):
    """Two engines in turn, with graphs and without, over real time; streams of readers that come and go beside them."""
    seconds = float(os.environ.get("TILEWISE_SOAK_SECONDS", "600"))
    stub = Stub("cuda", head_dim=64, positions=2048)
    options = {"num_pages": 120, "page_size": 16, "max_sequences": 24, "token_budget": 96, "max_waiting": 60}
    engines = [engine_of(stub, monkeypatch, cuda_graphs=graphs, **options) for graphs in (True, False)]
    engines[0].prepare()  # or graphs that are first needed late would look as if memory piled up
    begun, number = time.monotonic(), 0
    used = []
    while time.monotonic() - begun < seconds:
        number += 1
        traffic = Traffic(number, longest=400, most=60)
        served = engines[number % 2]
        serve(served, stub, traffic, lambda count: count < 100, grace=5.0, exact=False)
        asyncio.run(readers(served, traffic))
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    captures, batches = engines[0].stats().graph_captures, engines[0]._batches
    assert captures <= len(batches.sizes) + len(batches.mixed_sizes), "joining and leaving capture nothing"
    assert used[-1] <= used[min(3, len(used) - 1)] + (8 << 20), "memory of the card piles up"
    for served in engines:
        assert pages_are_back(served)


async def readers(served, traffic):
    """Some read to the end, some go."""

    async def one(stops):
        asked = traffic.request(greedy=True)
        seen = []
        async for token in served.stream(asked.prompt, max_new_tokens=asked.max_new_tokens):
            seen.append(token.token)
            if len(seen) == stops:
                break
        return len(seen) == min(stops, asked.max_new_tokens)

    assert all(await asyncio.gather(*(one(traffic.random.choice([1, 5, 1000])) for _ in range(20))))
    while served._streams._thread is not None:
        await asyncio.sleep(0.001)


def test_readers_that_come_and_go(monkeypatch):
    stub = Stub()
    served = engine_of(stub, monkeypatch, num_pages=40, page_size=4, max_sequences=8, token_budget=40)
    asyncio.run(readers(served, Traffic(3)))
    assert pages_are_back(served)
