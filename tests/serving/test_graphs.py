"""Graphs as far as the host's side goes, without a card: sizes, idle rows, who is captured when."""

from __future__ import annotations

import pytest
import torch
from card_like import all_like_cards
from tiny_models import NEW, PROMPTS, WARM, expected, run, tiny_model, tokens

from tilewise.serving import Engine, Sampling, batch

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def replays(monkeypatch):
    """Engines capture and replay as on a card; the rows, the decodes and the tokens of prompts of each replay."""
    return all_like_cards(monkeypatch)


def test_sizes():
    assert batch._sizes(1) == [1]
    assert batch._sizes(8) == [1, 2, 4, 8]
    assert batch._sizes(100) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert batch.mixed_sizes(1) == [1]
    assert batch.mixed_sizes(40) == [16, 32, 40]
    assert batch.mixed_sizes(512) == [16, 32, 64, 128, 160, 192, 224, 256, 320, 384, 448, 512]
    assert batch.mixed_sizes(700) == [16, 32, 64, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 700]


def test_one_graph_serves_those_who_come_and_go(llama, answers, replays):
    """Between five and eight run, of unequal lengths: one capture, idle rows where fewer are left; and one for prompts
    beside them."""
    served = Engine(llama, num_pages=200, max_sequences=8)
    lengths = [3, 9, NEW, NEW, NEW, 4, NEW, 4]
    found = {}
    for n in range(5):
        served.submit(PROMPTS[n], max_new_tokens=lengths[n])
    for n in range(5, 8):
        for _ in range(2):
            for token in served.step():
                found.setdefault(token.request, []).append(token.token)
        served.submit(PROMPTS[n], max_new_tokens=lengths[n])
    for (request, _), more in run(served).items():
        found.setdefault(request, []).extend(more)
    assert found == {n: right[:length] for n, (right, length) in enumerate(zip(answers, lengths, strict=True))}
    assert served.stats().graph_captures == 2
    assert {size for size, _, prompts in replays if not prompts} == {8}
    assert len({count for size, count, _ in replays if size == 8}) > 2
    assert [one for one in replays if one[2]] == [(128, 5, 63), (128, 5, 65)]
    assert served.prefix.stats().sequences == 0


def test_a_smaller_batch_takes_over_after_a_while_and_is_kept(llama, replays, monkeypatch):
    monkeypatch.setattr(batch, "SHRINK_AFTER", 3)
    served = Engine(llama, num_pages=200, max_sequences=8)
    prompts = [tokens(9 + n, seed=30 + n) for n in range(5)]
    for _ in range(2):
        numbers = [served.submit(prompt, max_new_tokens=4 if n else 16) for n, prompt in enumerate(prompts)]
        run(served)
        for number, prompt in zip(numbers, prompts, strict=True):
            assert served.result(number).tokens == expected(llama, prompt, 4 if number % 5 else 16)
    # Three steps of five, the first of them call by call; two of one in eight rows; then one row, once call by call.
    decodes = [(size, count) for size, count, prompts in replays if not prompts]
    assert decodes[:4] == [(8, 5), (8, 5), (8, 1), (8, 1)]
    assert decodes[4:14] == [(1, 1)] * 9 + [(8, 5)]
    assert served.stats().graph_captures == 2  # none of them in the second round


def test_each_kind_of_choice_has_its_graph(llama, replays):
    """Greedy rows beside drawn ones are what they are alone, and drawn ones too, idle rows or not."""
    kinds = [Sampling(), Sampling(temperature=0.9, seed=3), Sampling(**WARM)]
    alone = []
    for n, sampling in enumerate(kinds):
        served = Engine(llama, num_pages=60)
        served._next_request = n
        served.submit(PROMPTS[n], max_new_tokens=4 * (3 - n), sampling=sampling)
        alone.append(run(served)[n, 0])
    served = Engine(llama, num_pages=200, max_sequences=4)
    for n, sampling in enumerate(kinds):
        served.submit(PROMPTS[n], max_new_tokens=4 * (3 - n), sampling=sampling)
    assert run(served) == {(n, 0): right for n, right in enumerate(alone)}
    assert set(served._batches._pass(4, mixed=False)._graphs) == {0, 1, 2}


def test_graphs_can_be_made_before_anybody_comes(llama, answers, replays):
    served = Engine(llama, num_pages=200, max_sequences=8, token_budget=100)
    served.prepare()
    assert served.stats().graph_captures == 8
    assert [size for size, *_ in replays] == [100, 64, 32, 16, 8, 4, 2, 1]
    for prompt in PROMPTS:
        served.submit(prompt, max_new_tokens=NEW)
    assert run(served) == {(n, 0): right for n, right in enumerate(answers)}
    assert served.stats().graph_captures == 8


def test_graphs_of_drawn_tokens_can_be_made_before_too(llama, replays):
    served = Engine(llama, num_pages=200, max_sequences=4, token_budget=20)
    with pytest.raises(TypeError, match=r"sampling must be a tilewise\.Sampling"):
        served.prepare(0.7)
    drawn, filtered = Sampling(0.8, seed=1), Sampling(0.9, top_k=5, seed=2)
    served.prepare(drawn, filtered, drawn)
    assert served.stats().graph_captures == 3 * 5  # of 20, 16, 4, 2 and 1 rows
    for n, sampling in enumerate((drawn, filtered, Sampling())):
        served.submit(PROMPTS[n], max_new_tokens=6, sampling=sampling)
    found = run(served)
    assert served.stats().graph_captures == 3 * 5
    alone = Engine(llama, num_pages=200, max_sequences=4, token_budget=20)
    alone.submit(PROMPTS[0], max_new_tokens=6, sampling=drawn)
    assert run(alone)[0, 0] == found[0, 0]


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_idle_rows_beside_windows_and_sinks(family, replays):
    model = tiny_model(family)
    served = Engine(model, num_pages=200, max_sequences=8)
    for n, prompt in enumerate(PROMPTS[:5]):
        served.submit(prompt, max_new_tokens=NEW - 2 * n)
    found = run(served)
    for n, prompt in enumerate(PROMPTS[:5]):
        assert found[n, 0] == expected(model, prompt, NEW - 2 * n)
    assert replays


def test_more_rows_than_a_plan_can_have_go_call_by_call(llama, answers, replays, monkeypatch):
    monkeypatch.setattr(batch, "LARGEST", 4)
    served = Engine(llama, num_pages=200, max_sequences=9)
    for prompt in PROMPTS:
        served.submit(prompt, max_new_tokens=NEW if prompt != PROMPTS[0] else 3)
    found = run(served)
    assert [found[n, 0] for n in range(1, 8)] == answers[1:]
    assert replays == []
    assert served._batches.sizes == [1, 2, 4]


def test_few_pages_with_graphs(llama, replays):
    """Who is sent out leaves an idle row, and finds one when it comes back."""

    def answered(num_pages):
        served = Engine(llama, num_pages=num_pages, max_sequences=6)
        for n in range(6):
            served.submit(tokens(30, seed=40 + n), max_new_tokens=4 if n == 0 else 30)
        return served, run(served)

    tight, found = answered(14)
    assert found == answered(200)[1]
    assert tight.stats().preemptions > 0
    assert tight.prefix.stats().sequences == 0


def test_idle_rows_are_written_nowhere(llama, replays):
    """Every written token of the cache belongs to a sequence that ran or a prompt that is cached."""
    served = Engine(llama, num_pages=40, max_sequences=8)
    for n in range(5):
        served.submit(tokens(20, seed=n), max_new_tokens=6)
    before = [x.clone() for x in (*served.cache._k, *served.cache._v)]
    run(served)
    free = served.cache.pool.refs == 0
    for old, new in zip(before, (*served.cache._k, *served.cache._v), strict=True):
        same = [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(old[0], new[0], strict=True)]
        assert all(unchanged for unchanged, unused in zip(same, free, strict=True) if unused)
