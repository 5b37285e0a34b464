"""Anything in any order: an engine that is asked, stepped, cancelled, kept waiting and failed as hypothesis likes."""

from __future__ import annotations

import time

import pytest
from card_like import capture_nothing, like_a_card
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stub_model import VOCAB, Asked, Stub, check, engine_of
from tiny_models import pages_are_back

from tilewise.serving import EngineFull, Sampling

STUB = Stub()
ROOT = [(7 * n) % VOCAB for n in range(40)]
SAMPLINGS = [Sampling(), Sampling(), Sampling(0.8, seed=2), Sampling(1.2, top_k=5, top_p=0.9)]


class Broken(Exception):
    pass


class EngineMachine(RuleBasedStateMachine):
    """Every answer is the model's own, whatever goes on beside it; at the end every page is back."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.now = 0.0
        self.patch.setattr(time, "monotonic", lambda: self.now)
        self.asked, self.due = {}, {}

    @initialize(
        page_size=st.sampled_from([1, 4, 8]),
        spare=st.integers(1, 60),
        rows=st.integers(1, 6),
        budget=st.sampled_from([None, 1, 5, 17]),
        chunk=st.sampled_from([3, 20, 500]),
        waiting=st.sampled_from([None, 3]),
        static=st.booleans(),
        late=st.booleans(),
    )
    def begin(self, page_size, spare, rows, budget, chunk, waiting, static, late):
        self.served = engine_of(
            STUB,
            self.patch,
            page_size=page_size,
            num_pages=-(-56 // page_size) + 1 + spare // page_size,
            max_sequences=rows,
            token_budget=budget,
            prefill_chunk=chunk,
            max_waiting=waiting,
        )
        if static:
            capture_nothing(self.patch, [])
            like_a_card(self.served, late)
        self.served._late = late

    @rule(
        shared=st.integers(0, 40),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
        new=st.integers(1, 10),
        samples=st.integers(1, 3),
        sampling=st.sampled_from(SAMPLINGS),
        priority=st.integers(-1, 1),
        timeout=st.sampled_from([None, None, 0.0, 3.0]),
    )
    def submit(self, shared, own, new, samples, sampling, priority, timeout):
        one = Asked(ROOT[:shared] + own, new, samples, sampling)
        options = {"num_samples": samples, "sampling": sampling, "priority": priority, "timeout": timeout}
        try:
            number = self.served.submit(one.prompt, max_new_tokens=new, **options)
        except EngineFull:
            assert len(self.served._schedule.waiting) + len(self.served._arrived) >= self.served.max_waiting
            return
        self.asked[number] = one
        self.due[number] = self.now + (1e9 if timeout is None else timeout)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            for token in self.served.step():
                self.asked[token.request].found.setdefault(token.sample, []).append(token.token)
            for number in [number for number in self.asked if self.served.done(number)]:
                self.finish(number)
            assert all(self.now < due for due in self.due.values())

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data):
        number = data.draw(st.sampled_from(sorted(self.asked)))
        self.served.cancel(number)
        self.finish(number)

    @precondition(lambda self: self.served.busy)
    @rule()
    def fail(self):
        STUB.fail = Broken()
        try:
            tokens = self.served.step()  # it may be that nothing is computed
        except Broken:
            STUB.fail = None
            tokens = self.served.step()  # those that had come before the error
            assert not self.served.busy
        finally:
            STUB.fail = None
        for token in tokens:
            self.asked[token.request].found.setdefault(token.sample, []).append(token.token)
        for number in [number for number in self.asked if self.served.done(number)]:
            self.finish(number)

    @invariant()
    def no_more_run_than_may(self):
        if hasattr(self, "served"):
            schedule = self.served._schedule
            assert schedule.under_way <= min(self.served.max_sequences, self.served.token_budget or 10**9)
            assert self.served.prefix.stats().sequences == schedule.under_way + len(schedule.leaving)

    def finish(self, number):
        del self.due[number]
        check(STUB, number, self.asked.pop(number), self.served.result(number))

    def teardown(self):
        try:
            steps = 0
            while hasattr(self, "served") and self.served.busy:
                steps += 1
                assert steps < 3000, "it goes on for ever"
                self.step(1)
            if hasattr(self, "served"):
                assert self.asked == {}
                assert self.served._requests == {}
                assert pages_are_back(self.served)
        finally:
            self.patch.undo()


TestEngine = pytest.mark.usefixtures("one_thread")(EngineMachine.TestCase)
TestEngine.settings = settings(max_examples=16, stateful_step_count=25)


@pytest.mark.soak
@pytest.mark.usefixtures("one_thread")
class TestEngineForLong(EngineMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=60, derandomize=False)
