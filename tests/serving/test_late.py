"""Passes in flight, without a card: tokens come a step late, and answers are what they are at once."""

from __future__ import annotations

import pytest
from card_like import capture_nothing, like_a_card
from stub_model import VOCAB, Asked, Stub, check, engine_of
from tiny_models import pages_are_back

from tilewise.serving import Sampling

pytestmark = pytest.mark.usefixtures("one_thread")
STUB = Stub()


@pytest.fixture
def engine(monkeypatch):
    """Engines as on a card; `replays` are those of all."""

    def make(late=True, **options):
        made = engine_of(STUB, monkeypatch, **{"page_size": 4, "num_pages": 200, "max_sequences": 8, **options})
        return like_a_card(made, late)

    make.replays = []
    capture_nothing(monkeypatch, make.replays)
    return make


def prompt(count, seed=0):
    return [(seed * 11 + n * n * 7 + n) % VOCAB for n in range(count)]


def tokens_of(served):
    found = {}
    while served.busy:
        for token in served.step():
            found.setdefault((token.request, token.sample), []).append((token.token, token.finish_reason))
    return found


def test_tokens_come_with_the_next_step(engine):
    served = engine()
    number = served.submit(prompt(9), max_new_tokens=3)
    assert served.step() == []
    counts = []
    while served.busy:
        counts.append(len(served.step()))
    assert counts == [1, 1, 1]
    assert served.stats().steps == 3  # none for a token too many
    assert len(served.result(number).tokens) == 3
    assert pages_are_back(served)


def test_an_end_is_found_a_step_late_and_what_came_after_it_is_dropped(engine):
    """By its token, by a list of tokens; and the same answers at once."""
    answers = {}
    for late in (False, True):
        served = engine(late)
        free = served.submit(prompt(9), max_new_tokens=12)
        whole = [token for token, _ in tokens_of(served)[free, 0]]
        end = whole[4]
        stopped = served.submit(prompt(9), max_new_tokens=12, eos_token_id=end)
        listed = served.submit(prompt(9), max_new_tokens=12, stop=[whole[2:5]])
        beside = served.submit(prompt(13, 3), max_new_tokens=12, sampling=Sampling(0.9, seed=4), num_samples=3)
        answers[late] = tokens_of(served)
        assert [t for t, _ in answers[late][stopped, 0]] == whole[: whole.index(end) + 1]
        assert answers[late][stopped, 0][-1][1] == "eos"
        assert [t for t, _ in answers[late][listed, 0]][-3:] == whole[2:5]
        assert answers[late][listed, 0][-1][1] == "stop"
        assert len(answers[late][beside, 2]) == 12
        assert pages_are_back(served)
    assert answers[False] == answers[True]


def test_who_is_cancelled_gets_nothing_that_is_in_flight(engine):
    served = engine()
    numbers = [served.submit(prompt(9, n), max_new_tokens=n) for n in (20, 2, 19)]
    for _ in range(2):
        served.step()
    assert served._schedule.leaving  # the second's last token is on its way
    for number in numbers[:2]:
        served.cancel(number)
    assert [len(served.result(number).tokens) for number in numbers[:2]] == [1, 1]
    found = tokens_of(served)
    assert set(found) == {(numbers[2], 0)}
    assert len(served.result(numbers[2]).tokens) == 19
    assert pages_are_back(served)


def test_an_error_ends_what_is_in_flight(engine):
    class Broken(Exception):
        pass

    served = engine()
    numbers = [served.submit(prompt(9, n), max_new_tokens=n) for n in (20, 2)]
    for _ in range(2):
        served.step()
    STUB.fail = Broken()
    try:
        with pytest.raises(Broken):
            served.step()
    finally:
        STUB.fail = None
    assert not served.busy
    assert {served.result(number).samples[0].finish_reason for number in numbers} == {"error"}
    number = served.submit(prompt(9), max_new_tokens=3)
    assert len(tokens_of(served)[number, 0]) == 3
    assert pages_are_back(served)


def test_tokens_that_came_before_an_error_are_not_lost(engine):
    """A step that waits for what is in flight, because somebody lacks a row, and then raises."""
    served = engine(max_sequences=1)
    first = served.submit(prompt(9), max_new_tokens=20)
    found = [token for _ in range(3) for token in served.step()]
    assert len(found) == 2
    served.submit(prompt(5, 3), max_new_tokens=2, priority=1)
    STUB.fail = RuntimeError("broken")
    try:
        with pytest.raises(RuntimeError, match="broken"):
            served.step()
    finally:
        STUB.fail = None
    assert served.busy  # one token is left to be given out
    kept = served.step()
    assert [token.token for token in found + kept] == served.result(first).tokens
    assert len(kept) == 1
    assert not served.busy
    assert served.step() == []


def test_the_last_token_of_a_prompt_stands_with_the_decodes(engine):
    """A question that is asked again has one token to compute, which takes no chunk; its samples follow it."""
    served = engine()
    first = served.submit(prompt(21), max_new_tokens=4, num_samples=2)
    once = tokens_of(served)
    served.submit(prompt(30, 5), max_new_tokens=30)
    for _ in range(4):
        served.step()
    engine.replays.clear()
    again = served.submit(prompt(21), max_new_tokens=4, num_samples=2)
    served.step()
    assert served.stats().mixed_steps == 1
    rest = tokens_of(served)
    for sample in range(2):
        assert rest[again, sample] == once[first, sample]
    assert all(chunks == 0 for *_, chunks in engine.replays)
    assert pages_are_back(served)


def test_decodes_leave_their_rows_to_prompts(engine):
    """Sixteen rows: whoever decodes has the first ones, a chunk what is left."""
    served = engine(token_budget=16)
    for n in range(6):
        served.submit(prompt(30, n), max_new_tokens=12)
    found = tokens_of(served)
    alone = []
    for n in range(6):
        served.submit(prompt(30, n), max_new_tokens=12)
        alone.append(next(iter(tokens_of(served).values())))
    assert list(found.values()) == alone
    assert {rows for rows, _, chunks in engine.replays if chunks} == {16}
    assert max(decodes + chunks for _, decodes, chunks in engine.replays) == 16
    assert any(decodes > 1 and chunks > 1 for _, decodes, chunks in engine.replays)


def test_more_than_a_graph_takes_goes_call_by_call_in_between(engine, monkeypatch):
    """The tokens that are on their way reach such a pass, too, and those that it chooses the next one."""
    answers = []
    for most in (2048, 20):
        monkeypatch.setattr("tilewise.serving.batch.MOST_TOKENS", most)
        served = engine()
        for n in range(4):
            served.submit(prompt(9 + 9 * n, n), max_new_tokens=9)
            served.step()
            served.step()
        tokens_of(served)
        answers.append([served.result(n).tokens for n in range(4)])
    assert answers[0] == answers[1]


def test_by_kernels_in_the_emulator(engine, monkeypatch):
    """Standing steps of a whole engine: what kernels read is what the host has put into memory for this step."""
    stub = Stub(head_dim=64)
    served = like_a_card(
        engine_of(stub, monkeypatch, page_size=16, num_pages=40, max_sequences=4, token_budget=16, backend="emulator")
    )
    asked = {}
    for n in range(3):
        one = Asked(prompt(14 if n % 2 else 20, n % 2), 3, 1 + n % 2)
        asked[served.submit(one.prompt, max_new_tokens=3, num_samples=one.num_samples)] = one
        served.step()
    tokens_of(served)
    for number, one in asked.items():
        result = served.result(number)
        one.found = {n: sample.tokens for n, sample in enumerate(result.samples)}
        check(stub, number, one, result, exact=False)
    assert any(chunks for *_, chunks in engine.replays)


@pytest.mark.parametrize("late", [False, True])
def test_answers_can_be_asked_on(engine, late):
    """What was fed is found in the cache under the tokens that it was, and what follows is what follows alone."""
    served = engine(late)
    whole = {}
    for round_ in range(3):
        numbers = []
        for n in range(3):
            asked = [*whole.get(n, prompt(7 + n, n)), *([5] if round_ else [])]
            numbers.append((served.submit(asked, max_new_tokens=5 + n, num_samples=1 + n % 2), asked))
            served.step()
        tokens_of(served)
        for n, (number, asked) in enumerate(numbers):
            result = served.result(number)
            if round_:
                assert result.reused >= len(asked) - 2  # all but the last token of the answer, which was never fed
            one = Asked(asked, 5 + n, 1 + n % 2, found={m: s.tokens for m, s in enumerate(result.samples)})
            check(STUB, number, one, result)
            whole[n] = asked + result.samples[0].tokens
    assert pages_are_back(served)


def test_prompts_are_spread_over_steps_beside_decodes(monkeypatch):
    """A long prompt comes in parts that cost little, many of them as the budget allows; where nobody waits, at once."""
    stub = Stub(positions=2048)
    served = like_a_card(engine_of(stub, monkeypatch, num_pages=4000, max_sequences=64, token_budget=512))
    capture_nothing(monkeypatch, [])

    def chunks():
        counts, before = [], served.stats().prefill_tokens
        while served._schedule.prefilling or served._schedule.waiting or served._arrived:
            served.step()
            counts.append(served.stats().prefill_tokens - before)
            before += counts[-1]
        return counts

    served.submit(prompt(400), max_new_tokens=200)
    assert chunks() == [400]
    served.submit(prompt(600, 1), max_new_tokens=3)
    assert chunks() == [223, 223, 154]
    served.submit(prompt(600, 1), max_new_tokens=3)
    assert chunks() == [1]  # the others are cached
    for n in range(5):
        served.submit(prompt(600, 2 + n), max_new_tokens=1)
    found = chunks()
    assert found[:2] == [500, 416]  # a sixth of what is left
    assert sum(found) == 3000
    assert max(found[-3:]) <= 223
