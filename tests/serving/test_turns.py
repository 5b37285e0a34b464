"""Turns of an engine: token budgets, priorities, time-outs, back-pressure, want of pages, and a model that fails."""

from __future__ import annotations

import itertools
import time

import pytest
from tiny_models import NEW, PROMPTS, expected, pages_are_back, run, tokens

from tilewise.serving import Engine, EngineFull

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that stand still until they are set."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def passes(served, monkeypatch):
    """The number of tokens of every forward pass from now on."""
    found, forward = [], served._model.forward
    monkeypatch.setattr(
        served._model, "forward", lambda given, *rest: found.append(len(given)) or forward(given, *rest)
    )
    return found


# ---- budgets --------------------------------------------------------------------------------------------------------


def test_no_step_has_more_tokens_than_its_budget(llama, answers, monkeypatch):
    served = Engine(llama, num_pages=200, token_budget=13)
    sizes = passes(served, monkeypatch)
    for prompt in PROMPTS:
        served.submit(prompt, max_new_tokens=NEW)
        served.step()
    assert run(served) is not None
    assert [served.result(n).tokens for n in range(len(PROMPTS))] == answers
    assert max(sizes) == 13
    assert sizes.count(13) > 10  # what decode leaves is filled


def test_nobody_stands_still_while_a_prompt_is_computed(llama):
    """Three run; a prompt of 90 tokens comes in chunks of seven. Each of its steps brings each of them a token."""
    served = Engine(llama, num_pages=200, token_budget=10)
    short = [tokens(5, seed=n) for n in range(3)]
    for prompt in short:
        served.submit(prompt, max_new_tokens=30)
    while len(served._running) < 3:
        served.step()
    long = tokens(90, seed=9)
    served.submit(long, max_new_tokens=2)
    seen = []
    for _ in range(13):  # 12 · 7 and 6 tokens
        seen.append(sorted(token.request for token in served.step()))
    assert seen == [[0, 1, 2]] * 12 + [[0, 1, 2, 3]]
    run(served)
    for n, (prompt, count) in enumerate([*((one, 30) for one in short), (long, 2)]):
        assert served.result(n).tokens == expected(llama, prompt, count)


def test_a_chunk_is_a_limit_beside_the_budget(llama, monkeypatch):
    served = Engine(llama, num_pages=200, token_budget=50, prefill_chunk=20)
    sizes = passes(served, monkeypatch)
    for n in range(3):
        served.submit(tokens(40, seed=n), max_new_tokens=4)
    run(served)
    assert max(sizes) in (20, 21, 22)
    stats = served.stats()
    assert stats.steps == stats.prefill_steps + stats.decode_steps == len(sizes)
    assert 0 < stats.mixed_steps < stats.prefill_steps
    assert stats.decode_tokens == 3 * 3
    assert 0 < stats.host_seconds < stats.prefill_seconds + stats.decode_seconds
    assert stats.host_seconds_per_step == stats.host_seconds / stats.steps


def test_no_more_run_than_the_budget_has_tokens(llama):
    served = Engine(llama, num_pages=200, token_budget=2)
    for n in range(5):
        served.submit(tokens(6, seed=n), max_new_tokens=3, num_samples=2)
    while served.busy:
        served.step()
        assert len(served._running) <= 2
    for n in range(5):
        right = expected(llama, tokens(6, seed=n), 3)
        assert [sample.tokens for sample in served.result(n).samples] == [right] * 2


# ---- priorities -----------------------------------------------------------------------------------------------------


def ends(served):
    """Requests in the order in which they end."""
    order = []
    while served.busy:
        order += [token.request for token in served.step() if token.finish_reason]
    return order


def test_higher_priorities_have_their_turn_first(llama):
    served = Engine(llama, num_pages=200, max_sequences=1)
    for priority in (0, 3, -1, 3, 7):
        served.submit(tokens(8, seed=priority + 1), max_new_tokens=2, priority=priority)
    assert ends(served) == [4, 1, 3, 0, 2]


def test_a_higher_priority_takes_the_row_of_a_lower_one(llama):
    """Of the youngest of the lowest priority, which goes on later from what is cached of it."""
    served = Engine(llama, num_pages=200, max_sequences=3)
    prompts = [tokens(20, seed=n) for n in range(5)]
    for prompt, priority in zip(prompts[:3], (1, 0, 0), strict=True):
        served.submit(prompt, max_new_tokens=8, priority=priority)
    for _ in range(3):
        served.step()
    computed = served.stats().prefill_tokens
    served.submit(prompts[3], max_new_tokens=3, priority=0)
    served.submit(prompts[4], max_new_tokens=3, priority=1)
    served.step()
    assert sorted(sample.request.number for sample in served._running) == [0, 1, 4]
    order = ends(served)
    assert order.index(4) < order.index(2) < order.index(3)
    assert served.stats().preemptions == 1
    # Who was sent out computed its last token and what followed its last full page again, no more.
    assert served.stats().prefill_tokens - computed <= 20 + 20 + 16
    for n, (prompt, count) in enumerate(zip(prompts, (8, 8, 8, 3, 3), strict=True)):
        assert served.result(n).tokens == expected(llama, prompt, count)
    assert pages_are_back(served)


def test_equals_take_nothing_from_each_other(llama):
    served = Engine(llama, num_pages=200, max_sequences=2)
    for n in range(4):
        served.submit(tokens(8, seed=n), max_new_tokens=4, priority=5)
    assert ends(served) == [0, 1, 2, 3]
    assert served.stats().preemptions == 0


def test_a_higher_priority_takes_the_pages_of_lower_ones(llama):
    served = Engine(llama, num_pages=12)
    for n in range(3):
        served.submit(tokens(40, seed=n), max_new_tokens=20, priority=0)
    while len(served._running) < 3:
        served.step()
    high = tokens(70, seed=9)
    served.submit(high, max_new_tokens=30, priority=1)
    order = ends(served)
    assert order.index(3) < order.index(2)  # who made way; the older ones fit beside it
    assert served.stats().preemptions >= 1
    assert served.result(3).tokens == expected(llama, high, 30)
    for n in range(3):
        assert served.result(n).tokens == expected(llama, tokens(40, seed=n), 20)
    assert pages_are_back(served)


def test_a_long_prompt_of_a_low_priority_gives_way_chunk_by_chunk(llama):
    """A prompt under way goes on with what a later one of a higher priority leaves."""
    served = Engine(llama, num_pages=200, token_budget=16)
    served.submit(tokens(200, seed=1), max_new_tokens=2, priority=0)
    served.step()
    served.submit(tokens(30, seed=2), max_new_tokens=1, priority=4)
    first = [token.request for _ in range(2) for token in served.step()]
    assert first == [1]
    run(served)
    assert served.result(0).tokens == expected(llama, tokens(200, seed=1), 2)


def test_a_prompt_does_not_wait_for_one_of_a_lower_priority_that_begins_alike(llama):
    served = Engine(llama, num_pages=200, token_budget=40)
    start = tokens(60, seed=3)
    served.submit([*start, 1], max_new_tokens=2, priority=0)
    served.step()
    served.submit([*start, 2], max_new_tokens=2, priority=1)
    order = [token.request for token in itertools.chain.from_iterable(served.step() for _ in range(2))]
    assert order[0] == 1
    run(served)
    for n in (0, 1):
        assert served.result(n).tokens == expected(llama, [*start, n + 1], 2)


# ---- time-outs and back-pressure ------------------------------------------------------------------------------------


def test_requests_end_when_their_time_is_over(llama, answers, clock):
    """Waiting, prefilled or running: what there is of them stays, their pages come back, others go on."""
    served = Engine(llama, num_pages=200, max_sequences=3, token_budget=20)
    running = served.submit(PROMPTS[0], max_new_tokens=NEW, timeout=5.0)
    other = served.submit(PROMPTS[1], max_new_tokens=NEW)
    while len(served._running) < 2:
        served.step()
    prefilled = served.submit(tokens(200, seed=8), max_new_tokens=4, timeout=5.0)
    served.step()
    waiting = served.submit(PROMPTS[2], max_new_tokens=4, timeout=5.0, priority=-1)
    late = served.submit(PROMPTS[3], max_new_tokens=NEW, timeout=50.0)
    clock[0] += 4.9
    served.step()
    assert not any(served.done(n) for n in (running, prefilled, waiting))
    clock[0] += 0.2
    assert {token.request for token in served.step()} == {other, late}  # which has its turn now
    assert [served.done(n) for n in (running, prefilled, waiting, other, late)] == [True] * 3 + [False] * 2
    results = [served.result(n).samples[0] for n in (running, prefilled, waiting)]
    assert [one.finish_reason for one in results] == ["timeout"] * 3
    assert 0 < len(results[0].tokens) < NEW
    assert results[0].tokens == answers[0][: len(results[0].tokens)]
    assert results[1].tokens == results[2].tokens == []
    run(served)
    assert served.result(other).tokens == answers[1]
    assert served.result(late).tokens == answers[3]
    assert served.stats().timeouts == 3
    assert pages_are_back(served)


def test_time_that_is_over_at_once(llama):
    served = Engine(llama, num_pages=200)
    number = served.submit([1, 2, 3], max_new_tokens=4, timeout=0.0)
    assert served.busy
    assert served.step() == []
    assert not served.busy
    assert served.result(number).samples[0].finish_reason == "timeout"


def test_a_full_engine_says_so(llama):
    served = Engine(llama, num_pages=200, max_sequences=1, max_waiting=2)
    for n in range(2):
        served.submit([1 + n], max_new_tokens=3)
    with pytest.raises(EngineFull, match="2 requests wait, max_waiting is 2"):
        served.submit([9], max_new_tokens=3)
    served.step()  # one of them runs now
    assert served.submit([7], max_new_tokens=3) == 2
    with pytest.raises(EngineFull):
        served.submit([9], max_new_tokens=3)
    assert sorted(run(served)) == [(0, 0), (1, 0), (2, 0)]
    assert served.submit([9], max_new_tokens=3) == 3


def test_bad_limits(llama):
    served = Engine(llama, num_pages=20)
    for error, match, options in (
        (ValueError, "timeout must be finite and at least 0.0, got -1", {"timeout": -1}),
        (TypeError, "timeout must be a float, got str", {"timeout": "1"}),
        (TypeError, "priority must be an int, got float", {"priority": 0.5}),
    ):
        with pytest.raises(error, match=match):
            served.submit([1], max_new_tokens=1, **options)
    for name in ("token_budget", "max_waiting"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            Engine(llama, num_pages=20, **{name: 0})


# ---- want of pages --------------------------------------------------------------------------------------------------


def test_what_others_share_is_not_computed_again(llama):
    """The youngest is sent out; when it comes back, the prompt that it has in common with the other is still there."""
    start = tokens(96, seed=4)  # six pages
    served = Engine(llama, num_pages=10, max_sequences=2)  # of twelve that both take
    for n in (1, 2):
        served.submit([*start, n], max_new_tokens=38)
    while not served.stats().preemptions and served.busy:
        served.step()
    computed = served.stats().prefill_tokens
    (job,) = served._schedule.waiting
    assert job.request.number == 1
    own = len(job.tokens) - len(start)
    run(served)
    assert served.stats().prefill_tokens - computed <= own
    for n in (0, 1):
        assert served.result(n).tokens == expected(llama, [*start, n + 1], 38)
    assert pages_are_back(served)


def test_a_prompt_that_had_its_turn_earlier_takes_pages_of_those_who_run(llama):
    """It is of a higher priority, and longer than what is left: it goes on chunk by chunk as they make way."""
    served = Engine(llama, num_pages=14, token_budget=8)
    for n in range(2):
        served.submit(tokens(20, seed=n), max_new_tokens=60)
    while len(served._running) < 2:
        served.step()
    long = tokens(150, seed=7)
    served.submit(long, max_new_tokens=4, priority=1)
    assert ends(served)[0] == 2
    assert served.result(2).tokens == expected(llama, long, 4)
    for n in range(2):
        assert served.result(n).tokens == expected(llama, tokens(20, seed=n), 60)
    assert pages_are_back(served)


# ---- a model that fails ---------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_model_that_fails_ends_everything_and_the_engine_goes_on(llama, answers, steps):
    """In a prefill, in a mixed step and in a decode step; in the midst of the layers."""
    served = Engine(llama, num_pages=60, max_sequences=3)
    numbers = [served.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    for _ in range(steps):
        served.step()

    def fail(*_):
        raise Broken

    hook = llama.model.layers[1].register_forward_hook(fail)
    try:
        with pytest.raises(Broken):
            served.step()
    finally:
        hook.remove()
    assert not served.busy
    results = [served.result(number).samples[0] for number in numbers]
    assert {one.finish_reason for one in results} <= {"error", "length"}
    assert all(one.tokens == right[: len(one.tokens)] for one, right in zip(results, answers, strict=True))
    numbers = [served.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    run(served)
    assert [served.result(number).tokens for number in numbers] == answers
    assert pages_are_back(served)


def test_an_engine_whose_device_failed_says_so(llama, monkeypatch):
    served = Engine(llama, num_pages=60)
    number = served.submit([1, 2], max_new_tokens=3)

    def lost(*_):
        raise RuntimeError("the card fell off the bus")

    monkeypatch.setattr(served._model, "forward", lost)
    monkeypatch.setattr(served._schedule, "end", lost)
    with pytest.raises(RuntimeError, match="fell off"):
        served.step()
    assert not served.busy
    assert served.result(number).samples[0].finish_reason == "error"
    for call in (served.step, lambda: served.submit([1], max_new_tokens=1)):
        with pytest.raises(RuntimeError, match=r"cannot be used any more: .* \(the card fell off the bus\)"):
            call()
