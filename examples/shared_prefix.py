"""Serving questions behind one system prompt: it is computed once, kept once, and read once a step for all of them.

    python examples/shared_prefix.py

Questions come in while others are being answered, as they do in a server.
"""

from __future__ import annotations

import argparse
import time

from tiny_llama import tiny_llama, words

from tilewise.serving import Engine

LOOK = 12  # the step after which the cache is shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", type=int, default=600, help="tokens of the system prompt (%(default)s)")
    parser.add_argument("--questions", type=int, default=12, help="one comes with every step (%(default)s)")
    args = parser.parse_args()
    if args.system < 1 or args.questions < 1:
        parser.error("--system and --questions must be at least 1")
    model = tiny_llama()
    system = words(args.system, seed=0)
    questions = [system + words(8 + 3 * n, seed=1 + n) for n in range(args.questions)]
    lengths = [12 + 5 * (n % 4) for n in range(args.questions)]

    # Eight are answered at a time; the rest of the pages keep what was computed before.
    engine = Engine(model, num_pages=max(200, args.system // 16 + 8 * (3 * args.questions // 16 + 5)), max_sequences=8)
    started = time.perf_counter()
    numbers, steps = [], 0
    while engine.busy or len(numbers) < args.questions:
        if len(numbers) < args.questions:  # one arrives with every step
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
    print(f"\n{args.questions} questions of {prompts} tokens in {seconds:.2f} s:")
    print(f"  computed {stats.prefill_tokens} tokens of prompts, reused {stats.reused_tokens}")
    print(f"  {stats.decode_tokens} tokens in {stats.decode_steps} decode steps")
    print(f"  keys and values took {stats.peak_bytes / 1e6:.2f} MB at most; without sharing {alone / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
