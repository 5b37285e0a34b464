"""Streams of an engine for asyncio: readers that go, stop and fail, and what they leave behind: nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
from tiny_models import NEW, PROMPTS, pages_are_back, run, tiny_model, tokens

from tilewise.serving import Engine, EngineFull, Sampling

pytestmark = pytest.mark.usefixtures("one_thread")


async def read(served, prompt, **options):
    return [token async for token in served.stream(prompt, **{"max_new_tokens": NEW, **options})]


def settle(served):
    """Until the engine's thread has ended: there is nothing left to do."""
    thread = served._streams._thread
    if thread is not None:
        thread.join(30)
    assert served._streams._thread is None
    assert not served._streams._open
    assert not served.busy


def test_streams_side_by_side(llama, answers):
    served = Engine(llama, num_pages=200, max_sequences=4, token_budget=30)

    async def everybody():
        return await asyncio.gather(*(read(served, prompt) for prompt in PROMPTS))

    for _ in range(2):  # the thread ends, and begins again
        found = asyncio.run(everybody())
        assert [[token.token for token in one] for one in found] == answers
        for one in found:
            assert [token.finish_reason for token in one] == [None] * (NEW - 1) + ["length"]
            assert len({token.request for token in one}) == 1
        settle(served)
    assert served._requests == {}, "a request that was read to its end is forgotten"
    assert pages_are_back(served)


def test_samples_of_one_prompt_come_in_one_stream(llama, answers):
    served = Engine(llama, num_pages=200, max_sequences=2)
    found = asyncio.run(read(served, PROMPTS[0], num_samples=3, sampling=Sampling()))
    for n in range(3):
        assert [token.token for token in found if token.sample == n] == answers[0]


def test_tokens_come_as_they_are_made(llama):
    """The first is there long before the last one is made."""
    served = Engine(llama, num_pages=200)

    async def look():
        stream = served.stream([1, 2, 3], max_new_tokens=400)
        first = await anext(stream)
        made = served.stats().decode_steps
        await stream.aclose()
        return first, made

    first, made = asyncio.run(look())
    assert first.finish_reason is None
    assert made < 300
    settle(served)
    assert pages_are_back(served)


def test_a_reader_that_is_cancelled_frees_its_pages(llama, answers):
    served = Engine(llama, num_pages=200)

    async def go():
        long = asyncio.create_task(read(served, tokens(30, seed=1), max_new_tokens=900))
        other = asyncio.create_task(read(served, PROMPTS[0]))
        await other
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        return await other

    assert [token.token for token in asyncio.run(go())] == answers[0]
    settle(served)
    assert served._requests == {}
    assert served.stats().decode_tokens < 900
    assert pages_are_back(served)


def test_a_reader_that_stops_keeps_nobody_from_going_on(llama, answers):
    """Its tokens wait in its mailbox; its pages are free when its request is done, read or not."""
    served = Engine(llama, num_pages=200, max_sequences=2)

    async def go():
        lazy = served.stream(PROMPTS[1], max_new_tokens=NEW)
        assert (await anext(lazy)).token == answers[1][0]
        others = [await read(served, prompt) for prompt in PROMPTS[:3]]
        while served.busy:
            await asyncio.sleep(0.001)
        assert served.prefix.stats().sequences == 0
        return others, [token.token async for token in lazy]

    others, late = asyncio.run(go())
    assert [[token.token for token in one] for one in others] == answers[:3]
    assert late == answers[1][1:]
    settle(served)
    assert served._requests == {}


def test_a_reader_that_is_forgotten_frees_its_pages(llama):
    """Somebody breaks out of the loop and keeps nothing; the event loop closes what was left."""
    served = Engine(llama, num_pages=200)

    async def go():
        async for _ in served.stream(PROMPTS[0], max_new_tokens=900):
            break
        gc.collect()

    asyncio.run(go())
    settle(served)
    assert served._requests == {}
    assert pages_are_back(served)


def test_a_stream_that_nobody_reads_asks_for_nothing(llama):
    served = Engine(llama, num_pages=200)

    async def go():
        served.stream(PROMPTS[0], max_new_tokens=4)

    asyncio.run(go())
    assert not served.busy


def test_an_event_loop_that_is_gone(llama):
    """Closed by hand with a reader in its midst: the request is cancelled when its next token finds nobody."""
    served = Engine(llama, num_pages=200)
    loop = asyncio.new_event_loop()
    stream = served.stream(PROMPTS[0], max_new_tokens=900)
    loop.run_until_complete(anext(stream))
    loop.close()
    settle(served)
    assert served.stats().decode_tokens < 900
    assert pages_are_back(served)


class Broken(Exception):
    pass


def test_a_model_that_fails_ends_all_streams_with_its_error(llama, answers):
    served = Engine(llama, num_pages=200, max_sequences=3)

    async def go():
        tasks = [asyncio.create_task(read(served, prompt, max_new_tokens=200)) for prompt in PROMPTS]
        while served.stats().decode_steps < 3:
            await asyncio.sleep(0.001)

        def fail(*_):
            raise Broken

        hook = llama.model.layers[1].register_forward_hook(fail)
        try:
            found = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            hook.remove()
        return found, await read(served, PROMPTS[0])

    found, again = asyncio.run(go())
    assert [type(one) for one in found] == [Broken] * len(PROMPTS)
    assert [token.token for token in again] == answers[0]
    settle(served)
    assert served._requests == {}
    assert pages_are_back(served)


def test_what_submit_refuses_is_raised_where_the_first_token_is_asked_for(llama):
    served = Engine(llama, num_pages=200, max_waiting=1, max_sequences=1)

    async def go():
        with pytest.raises(ValueError, match="tokens must be from 0 to 96"):
            await read(served, [97])
        with pytest.raises(TypeError, match="unexpected keyword argument 'tokens_new'"):
            await read(served, [1], tokens_new=3)
        with served._turn():  # no step is taken meanwhile
            first = asyncio.create_task(read(served, [1]))
            await asyncio.sleep(0)
            with pytest.raises(EngineFull):
                await read(served, [2])
        assert len(await first) == NEW

    asyncio.run(go())
    settle(served)


def test_a_stream_whose_time_is_over(llama):
    served = Engine(llama, num_pages=200)

    async def go():
        seen = []

        async def all_of_it():
            async for token in served.stream([1, 2], max_new_tokens=900, timeout=0.1):
                seen.append(token)

        with pytest.raises(TimeoutError, match="request 0 was not done when its timeout was over"):
            await all_of_it()
        return seen

    started = time.monotonic()
    assert len(asyncio.run(go())) < 900
    assert time.monotonic() - started < 5
    settle(served)
    assert pages_are_back(served)


def test_who_cancels_goes_before_the_next_step(llama):
    """A thread that takes one step after the other lets others in between."""
    served = Engine(llama, num_pages=200)

    async def go():
        stream = served.stream([1, 2], max_new_tokens=900)
        number = (await anext(stream)).request
        before = served.stats().steps
        await asyncio.to_thread(served.cancel, number)
        taken = served.stats().steps - before
        await stream.aclose()
        return taken

    assert asyncio.run(go()) < 100
    settle(served)


def test_cancel_ends_a_stream_quietly(llama):
    served = Engine(llama, num_pages=200)

    async def go():
        seen = []
        async for token in served.stream([1, 2], max_new_tokens=900):
            seen.append(token)
            if len(seen) == 3:
                await asyncio.to_thread(served.cancel, token.request)
        return seen

    assert 3 <= len(asyncio.run(go())) < 900
    settle(served)


def test_streams_beside_steps_by_hand(llama, answers):
    """Whoever takes a step, tokens reach their readers, and the step's caller too."""
    served = Engine(llama, num_pages=200)
    number = served.submit(PROMPTS[0], max_new_tokens=NEW)

    async def go():
        reader = asyncio.create_task(read(served, PROMPTS[1]))
        while not served.done(number):
            served.step()
            await asyncio.sleep(0)
        return await reader

    assert [token.token for token in asyncio.run(go())] == answers[1]
    assert served.result(number).tokens == answers[0]
    settle(served)


def test_event_loops_on_several_threads_and_two_engines_on_one_model(llama, answers):
    engines = [Engine(llama, num_pages=60, max_sequences=3), Engine(llama, num_pages=60, kv_format="fp32")]
    found = {}

    def client(number):
        async def go():
            return await asyncio.gather(*(read(engines[number % 2], prompt) for prompt in PROMPTS[:4]))

        found[number] = [[token.token for token in one] for one in asyncio.run(go())]

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), answers[:4])
    for served in engines:
        settle(served)
        assert pages_are_back(served)
    assert llama.config._attn_implementation == "sdpa"


def test_submitting_from_many_threads(llama):
    model = tiny_model(num_hidden_layers=1)
    served = Engine(model, num_pages=100, max_sequences=4)
    numbers = []

    def client(seed):
        for n in range(5):
            numbers.append((served.submit([seed, n], max_new_tokens=2), seed, n))

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or served.busy:
        served.step()
    assert sorted(number for number, *_ in numbers) == list(range(20))
    for number, seed, n in numbers:
        assert served.result(number).prompt == [seed, n]
    assert run(served) == {}
