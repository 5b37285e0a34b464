"""Best of n, then a tree search, over one prompt that is computed once.

    python examples/best_of_n.py

Best of n draws n whole answers and keeps the one with the highest reward. The tree search spends the same number of
tokens in rounds: each round it continues the best partial answers in several ways. To the cache all of that is one
tree: what answers have in common is stored once and never computed again, however the search jumps about.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

from tiny_llama import VOCAB, tiny_llama, words

from tilewise.serving import Engine, Sampling

ROUNDS, KEPT = 6, 4  # of the search: as many continuations per round as samples, from the KEPT best partial answers


def reward(answer: list[int]) -> float:
    """What a reward model would say; here: how often a token is larger than the one before it."""
    return sum(b > a for a, b in pairwise(answer)) / max(1, len(answer) - 1)


def finished(engine: Engine, numbers: list[int]) -> list[list[list[int]]]:
    """Step until all is done; the samples of each request."""
    while engine.busy:
        engine.step()
    return [[sample.tokens for sample in engine.result(number).samples] for number in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=300, help="tokens of the prompt (%(default)s)")
    parser.add_argument("--answer", type=int, default=48, help=f"tokens of an answer, at least {ROUNDS} (%(default)s)")
    parser.add_argument("--samples", type=int, default=16, help=f"answers, at least {KEPT} (%(default)s)")
    args = parser.parse_args()
    if args.prompt < 1 or args.answer < ROUNDS or args.samples < KEPT:
        parser.error(f"--prompt must be at least 1, --answer {ROUNDS} and --samples {KEPT}")
    pages = args.prompt // 16 + (args.samples + 1) * (args.answer // 16 + 2) * ROUNDS
    engine = Engine(tiny_llama(), num_pages=max(400, pages))
    prompt = words(args.prompt, seed=0)
    warm = Sampling(temperature=1.0, top_k=VOCAB // 4, seed=1)

    number = engine.submit(prompt, max_new_tokens=args.answer, num_samples=args.samples, sampling=warm)
    (answers,) = finished(engine, [number])
    rewards = sorted(map(reward, answers), reverse=True)
    middle = rewards[args.samples // 2]
    print(f"best of {args.samples} answers of {args.answer} tokens: reward {rewards[0]:.2f}, median {middle:.2f}")
    print(f"  the prompt's {args.prompt} tokens were computed once: {engine.stats().prefill_tokens} in all\n")

    before = engine.stats()
    beams: list[list[int]] = [[]]
    for round_number in range(ROUNDS):
        each = args.samples // len(beams)
        numbers = [
            engine.submit(prompt + beam, max_new_tokens=args.answer // ROUNDS, num_samples=each, sampling=warm)
            for beam in beams
        ]
        grown = finished(engine, numbers)
        candidates = [beam + more for beam, samples in zip(beams, grown, strict=True) for more in samples]
        beams = sorted(candidates, key=reward, reverse=True)[:KEPT]
        print(f"round {round_number + 1}: best reward {reward(beams[0]):.2f} after {len(beams[0])} tokens")
    after = engine.stats()
    reused = after.reused_tokens - before.reused_tokens
    computed = after.prefill_tokens - before.prefill_tokens
    print(f"tree search: reward {reward(beams[0]):.2f} for the same {args.samples * args.answer} tokens")
    print(f"  going back to partial answers cost {computed} tokens of prefill; {reused} were found in the cache")


if __name__ == "__main__":
    main()
