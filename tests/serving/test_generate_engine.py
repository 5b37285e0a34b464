"""The serving engine on the CPU: who joins, leaves, waits and is sent out."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from tiny_models import NEW, PROMPTS, WARM, expected, run, tiny_model, tokens

from tilewise.serving import Engine, Sampling, generate, stream

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the engine -----------------------------------------------------------------------------------------------------


def test_sequences_join_and_leave(llama, answers):
    served = Engine(llama, num_pages=200, max_sequences=3)
    lengths = [3, 12, 1, 7, 5, 12, 2, 9]
    found, most, submitted = {}, 0, 0
    while submitted < len(PROMPTS) or served.busy:
        if submitted < len(PROMPTS):  # one every step, while others are decoded
            served.submit(PROMPTS[submitted], max_new_tokens=lengths[submitted])
            submitted += 1
        for token in served.step():
            found.setdefault(token.request, []).append(token.token)
            assert (token.finish_reason == "length") == (len(found[token.request]) == lengths[token.request])
        most = max(most, len(served._running))
    assert most == 3
    assert found == {n: right[:count] for n, (right, count) in enumerate(zip(answers, lengths, strict=True))}
    assert served.prefix.stats().sequences == 0


def test_more_samples_than_sequences(llama, answers):
    served = Engine(llama, num_pages=200, max_sequences=2)
    served.submit(PROMPTS[0], max_new_tokens=4, num_samples=5)
    assert run(served) == {(0, n): answers[0][:4] for n in range(5)}
    assert [sample.finish_reason for sample in served.result(0).samples] == ["length"] * 5


@pytest.mark.parametrize("pages", [9, 12, 20])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(**WARM)], ids=["greedy", "drawn"])
def test_too_few_pages_cost_time_but_no_token(llama, pages, sampling):
    """Room for one prompt and a bit: sequences are sent out and come back, also in the midst of their prefill."""

    def tokens_with(num_pages):
        served = Engine(llama, num_pages=num_pages, prefill_chunk=40)
        for n, prompt in enumerate(PROMPTS):
            served.submit(prompt, max_new_tokens=20 + n, num_samples=1 + n % 2, sampling=sampling)
        return served, run(served)

    tight, found = tokens_with(pages)
    assert found == tokens_with(400)[1]
    assert tight.stats().preemptions > 0
    assert tight.stats().peak_pages <= pages
    assert tight.prefix.stats().evictions > 0


@pytest.mark.parametrize("seed", range(6))
def test_chance(llama, seed):
    """Trees of prompts that come at any time, few pages, samples, cancellations, budgets, priorities."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 16])
    served = Engine(
        llama,
        page_size=page_size,
        num_pages=-(-90 // page_size) + rng.randint(1, 60 // page_size + 1),
        max_sequences=rng.randint(1, 6),
        prefill_chunk=rng.choice([1, 7, 30, 500]),
        token_budget=rng.choice([None, 4, 20]),
    )
    texts, asked, found = [[]], {}, {}
    for n in range(10):
        prompt = rng.choice(texts)[: rng.randint(0, 60)] + tokens(rng.randint(1, 12), seed=100 * seed + n)
        texts.append(prompt)
        samples, length = rng.choice([1, 1, 3]), rng.randint(1, 16)
        sampling = Sampling(**WARM) if rng.random() < 0.3 else Sampling()
        number = served.submit(
            prompt, max_new_tokens=length, num_samples=samples, sampling=sampling, priority=rng.choice([0, 0, 2])
        )
        asked[number] = prompt, length, samples, sampling
        for _ in range(rng.randint(0, 6)):
            for token in served.step():
                found.setdefault((token.request, token.sample), []).append(token.token)
        if rng.random() < 0.15:
            served.cancel(rng.choice(list(asked)))
    for key, more in run(served).items():
        found.setdefault(key, []).extend(more)
    assert served.prefix.stats().sequences == 0
    for number, (prompt, length, samples, sampling) in asked.items():
        result = served.result(number)
        alone = Engine(llama, num_pages=60)
        alone._next_request = number  # what is drawn depends on it
        alone.submit(prompt, max_new_tokens=length, num_samples=samples, sampling=sampling)
        right = run(alone)
        for n, sample in enumerate(result.samples):
            count = len(sample.tokens)
            assert sample.tokens == right[number, n][:count] == found.get((number, n), [])
            assert count == length or sample.finish_reason == "cancelled"


def test_the_oldest_is_never_sent_out(llama):
    served = Engine(llama, num_pages=12)
    for n in range(4):
        served.submit(tokens(60, seed=20 + n), max_new_tokens=60)
    order = []
    while served.busy:
        order += [token.request for token in served.step() if token.finish_reason]
    assert order[0] == 0
    assert served.stats().preemptions > 0


def test_cancel(llama, answers):
    served = Engine(llama, num_pages=200, max_sequences=2, prefill_chunk=20)
    numbers = [served.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    served.step()  # of the first, in the midst of its prefill
    served.cancel(numbers[0])
    while not any(s.request.number == 1 for s in served._running):
        served.step()
    served.step()
    served.cancel(numbers[1])  # running
    served.cancel(numbers[4])  # waiting
    run(served)
    results = [served.result(number) for number in numbers]
    assert [r.samples[0].finish_reason == "cancelled" for r in results] == [n in (0, 1, 4) for n in range(len(PROMPTS))]
    assert results[0].tokens == results[4].tokens == []
    assert 1 <= len(results[1].tokens) < NEW
    assert results[1].tokens == answers[1][: len(results[1].tokens)]
    assert [r.tokens for n, r in enumerate(results) if n not in (0, 1, 4)] == [
        right for n, right in enumerate(answers) if n not in (0, 1, 4)
    ]
    assert served.prefix.stats().sequences == 0
    with pytest.raises(ValueError, match="number must be that of a request, but 0 was never submitted or is forgotten"):
        served.cancel(numbers[0])


def test_a_cache_is_kept_between_requests(llama, answers):
    served = Engine(llama, num_pages=200)
    for _ in range(2):
        served.submit(PROMPTS[2], max_new_tokens=NEW)
        assert list(run(served).values()) == [answers[2]]
    assert served.result(1).reused == len(PROMPTS[2]) - 1
    with pytest.raises(ValueError, match="request 2 has 1 unfinished samples"):
        served.result(served.submit(PROMPTS[0], max_new_tokens=1))


def test_the_cache_is_free_as_soon_as_nobody_uses_the_engine(llama):
    """Without waiting for the garbage collector: the next engine may need the memory."""
    gc.collect()
    gc.disable()
    try:
        served = Engine(llama, num_pages=20)
        served.submit(PROMPTS[0], max_new_tokens=3, num_samples=2)
        run(served)
        cache = weakref.ref(served.cache)
        del served
        assert cache() is None
    finally:
        gc.enable()


def test_stream_and_on_token(llama, answers):
    seen = []
    generate(llama, PROMPTS, max_new_tokens=NEW, num_samples=2, on_token=lambda *token: seen.append(token))
    for found in (seen, list(stream(llama, PROMPTS, max_new_tokens=NEW, num_samples=2))):
        for n, right in enumerate(answers):
            assert [t for prompt, sample, t in found if (prompt, sample) == (n, 1)] == right
    first = next(stream(llama, PROMPTS, max_new_tokens=NEW))
    assert first == (0, 0, answers[0][0])


def test_autocast(llama):
    """Rotary embeddings leave q and k in float32, but not v."""
    with torch.autocast("cpu", torch.bfloat16):
        right = expected(llama, PROMPTS[0], 4)
        assert generate(llama, PROMPTS[:1], max_new_tokens=4, kv_format="bf16")[0].tokens == right


def test_a_compiled_model():
    model = tiny_model(num_hidden_layers=1)
    right = expected(model, [1, 2, 3], 3)
    model.compile(backend="eager")
    assert generate(model, [[1, 2, 3]], max_new_tokens=3)[0].tokens == right


def test_progress(llama, capsys):
    generate(llama, PROMPTS[:2], max_new_tokens=2, num_samples=2, progress=True)
    assert "4/4" in capsys.readouterr().err
