"""Best of n, then a tree search, over one prompt that is computed once.

    python examples/best_of_n.py

Best of n draws n whole answers and keeps the one with the highest reward. The tree search spends the same number of
tokens in rounds: each round it continues the best partial answers in several ways. To the cache all of that is one
tree: what answers have in common is stored once and never computed again, however the search jumps about.
"""

from __future__ import annotations

from itertools import pairwise

from tiny_llama import VOCAB, tiny_llama, words

from tilewise.serving import Engine, Sampling

PROMPT, ANSWER, SAMPLES = 300, 48, 16
ROUNDS, KEPT = 6, 4  # of the search: SAMPLES continuations a round, from the KEPT best partial answers


def reward(answer: list[int]) -> float:
    """What a reward model would say; here: how often a token is larger than the one before it."""
    return sum(b > a for a, b in pairwise(answer)) / max(1, len(answer) - 1)


def finished(engine: Engine, numbers: list[int]) -> list[list[list[int]]]:
    """Step until all is done; the samples of each request."""
    while engine.busy:
        engine.step()
    return [[sample.tokens for sample in engine.result(number).samples] for number in numbers]


def main() -> None:
    engine = Engine(tiny_llama(), num_pages=400)
    prompt = words(PROMPT, seed=0)
    warm = Sampling(temperature=1.0, top_k=VOCAB // 4, seed=1)

    number = engine.submit(prompt, max_new_tokens=ANSWER, num_samples=SAMPLES, sampling=warm)
    (answers,) = finished(engine, [number])
    rewards = sorted(map(reward, answers), reverse=True)
    print(f"best of {SAMPLES} answers of {ANSWER} tokens: reward {rewards[0]:.2f}, median {rewards[SAMPLES // 2]:.2f}")
    print(f"  the prompt's {PROMPT} tokens were computed once: {engine.stats().prefill_tokens} in all\n")

    before = engine.stats()
    beams: list[list[int]] = [[]]
    for round_number in range(ROUNDS):
        each = SAMPLES // len(beams)
        numbers = [
            engine.submit(prompt + beam, max_new_tokens=ANSWER // ROUNDS, num_samples=each, sampling=warm)
            for beam in beams
        ]
        grown = finished(engine, numbers)
        candidates = [beam + more for beam, samples in zip(beams, grown, strict=True) for more in samples]
        beams = sorted(candidates, key=reward, reverse=True)[:KEPT]
        print(f"round {round_number + 1}: best reward {reward(beams[0]):.2f} after {len(beams[0])} tokens")
    after = engine.stats()
    reused = after.reused_tokens - before.reused_tokens
    computed = after.prefill_tokens - before.prefill_tokens
    print(f"tree search: reward {reward(beams[0]):.2f} for the same {SAMPLES * ANSWER} tokens")
    print(f"  going back to partial answers cost {computed} tokens of prefill; {reused} were found in the cache")


if __name__ == "__main__":
    main()
