"""The serving engine's limits, counted: sequences that run together, tokens of a chunk, pages that are shared."""

from __future__ import annotations

import pytest
import torch
from tiny_models import expected, tiny_model, tokens

from tilewise.serving import Engine


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama():
    return tiny_model()


def finish(served):
    """Runs to the end; the most sequences that ran, and the most prompt tokens of a step."""
    most = chunk = 0
    while served.busy:
        before = served.stats().prefill_tokens
        served.step()
        chunk = max(chunk, served.stats().prefill_tokens - before)
        most = max(most, len(served._running))
    return most, chunk


def test_prompts_that_are_done_together_start_no_more_samples_than_there_is_room_for(llama):
    """Two prompts of one chunk with three samples each, for four sequences: three and one, then the others."""
    served = Engine(llama, num_pages=200, max_sequences=4)
    prompts = [tokens(20, seed=5), tokens(33, seed=6)]
    for prompt in prompts:
        served.submit(prompt, max_new_tokens=3, num_samples=3)
    served.step()
    assert len(served._running) == 4
    assert finish(served)[0] <= 4
    for number, prompt in enumerate(prompts):
        right = expected(llama, prompt, 3)
        assert [sample.tokens for sample in served.result(number).samples] == [right] * 3


@pytest.mark.parametrize(("common", "reused"), [(15, 0), (16, 16), (17, 17), (32, 32)])
def test_a_prompt_waits_for_one_that_computes_a_page_of_it(llama, common, reused):
    """Submitted at once: a common beginning of a page is computed once, and all of it; for less nobody waits."""
    served = Engine(llama, num_pages=200)
    start = tokens(common, seed=7)
    prompts = [start + [1] * 10, start + [2] * 12]
    for prompt in prompts:
        served.submit(prompt, max_new_tokens=2)
    served.step()
    assert served.stats().prefill_tokens == common + 10 + (0 if reused else common + 12)
    finish(served)
    results = [served.result(n) for n in (0, 1)]
    assert [result.reused for result in results] == [0, reused]
    assert served.stats().reused_tokens == reused
    assert served.stats().prefill_tokens == sum(map(len, prompts)) - reused
    assert [result.tokens for result in results] == [expected(llama, prompt, 2) for prompt in prompts]


def test_a_chunk_has_as_many_tokens_as_were_asked_for(llama):
    """Prompts that are partly done share the next chunk with those that begin."""
    served = Engine(llama, num_pages=200, prefill_chunk=25)
    prompts = [tokens(n, seed=n) for n in (40, 60, 7, 30)]
    for prompt in prompts:
        served.submit(prompt, max_new_tokens=2)
    assert finish(served)[1] == 25
    assert served.stats().prefill_tokens == 137
    for number, prompt in enumerate(prompts):
        assert served.result(number).tokens == expected(llama, prompt, 2)


def test_a_prompt_that_was_served_before_computes_its_last_token_again(llama):
    """Its logits are needed, although all of it is in the cache."""
    for length in (33, 32, 17):
        served = Engine(llama, num_pages=200)
        prompt = tokens(length, seed=length)
        for _ in range(2):
            number = served.submit(prompt, max_new_tokens=2)
            finish(served)
        result = served.result(number)
        assert (result.tokens, result.reused) == (expected(llama, prompt, 2), length - 1)
