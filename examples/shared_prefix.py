"""Serving questions behind one system prompt: it is computed once, kept once, and read once a step for all of them.

    python examples/shared_prefix.py

Questions come in while others are being answered, as they do in a server.
"""

from __future__ import annotations

import time

from tiny_llama import tiny_llama, words

from tilewise.serving import Engine

SYSTEM, QUESTIONS = 600, 12
LOOK = 12  # the step after which the cache is shown


def main() -> None:
    model = tiny_llama()
    system = words(SYSTEM, seed=0)
    questions = [system + words(8 + 3 * n, seed=1 + n) for n in range(QUESTIONS)]

    lengths = [12 + 5 * (n % 4) for n in range(QUESTIONS)]

    engine = Engine(model, num_pages=200, max_sequences=8)
    started = time.perf_counter()
    numbers, steps = [], 0
    while engine.busy or len(numbers) < QUESTIONS:
        if len(numbers) < QUESTIONS:  # one arrives with every step
            n = len(numbers)
            numbers.append(engine.submit(questions[n], max_new_tokens=lengths[n]))
        for token in engine.step():
            if token.finish_reason:
                print(f"step {steps:2}: question {token.request} is answered ({token.finish_reason})")
        steps += 1
        if steps == LOOK:
            print(f"\nThe cache after {LOOK} steps:\n{engine.prefix.show(max_tokens=4)}\n")
    seconds = time.perf_counter() - started

    for number in numbers[:3]:
        answer = engine.result(number)
        print(f"question {number}: {answer.reused} of {len(answer.prompt)} tokens reused, answer {answer.tokens[:8]} …")

    stats, per_token = engine.stats(), engine.cache.bytes_per_token
    prompts = sum(map(len, questions))
    alone = (prompts + sum(lengths)) * per_token
    print(f"\n{QUESTIONS} questions of {prompts} tokens in {seconds:.2f} s:")
    print(f"  computed {stats.prefill_tokens} tokens of prompts, reused {stats.reused_tokens}")
    print(f"  {stats.decode_tokens} tokens in {stats.decode_steps} decode steps")
    print(f"  keys and values took {stats.peak_bytes / 1e6:.2f} MB at most; without sharing {alone / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
