"""Requests as a server gets them: a few system prompts, questions of their own, answers of all lengths, by chance.

Arrivals are a Poisson process. Everything comes from one seed, so that every server gets the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens: log-normal around `median`, `spread` its sigma, cut off at `least` and `most`."""

    median: int
    spread: float
    least: int
    most: int

    def draw(self, count: int, chance: np.random.Generator) -> npt.NDArray[np.int64]:
        """(count,) of them."""
        drawn = np.rint(self.median * np.exp(self.spread * chance.standard_normal(count)))
        lengths: npt.NDArray[np.int64] = np.clip(drawn, self.least, self.most).astype(np.int64)
        return lengths

    def __str__(self) -> str:
        return f"median {self.median}, sigma {self.spread:g}, {self.least} to {self.most}"


@dataclass(frozen=True)
class Mix:
    """What requests are made of: `systems` system prompts of `system_tokens`, questions and answers."""

    systems: int
    system_tokens: int
    questions: Lengths
    answers: Lengths

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.system_tokens + self.questions.most + self.answers.most

    def __str__(self) -> str:
        return (
            f"{self.systems} system prompts of {self.system_tokens} tokens; questions {self.questions}; "
            f"answers {self.answers} (log-normal)"
        )


@dataclass(frozen=True)
class Request:
    """A prompt, how many tokens are to follow it, and the second in which it arrives."""

    prompt: list[int]
    new_tokens: int
    arrival: float


def draw(mix: Mix, count: int, rate: float, vocab: int, seed: int) -> list[Request]:
    """`count` requests, `rate` a second on average; all of them at once if that is infinite.

    System prompts are the same for every seed, so that a server may have them cached; all else differs.
    """
    systems = np.random.default_rng(0).integers(vocab, size=(mix.systems, mix.system_tokens))
    chance = np.random.default_rng([1, seed])
    which = chance.integers(mix.systems, size=count)
    questions, answers = mix.questions.draw(count, chance), mix.answers.draw(count, chance)
    gaps = chance.exponential(1.0, count) / rate if math.isfinite(rate) else np.zeros(count)
    arrivals = np.cumsum(gaps) - gaps[0]
    return [
        Request(
            [*systems[system].tolist(), *chance.integers(vocab, size=int(question)).tolist()],
            int(answer),
            float(arrival),
        )
        for system, question, answer, arrival in zip(which, questions, answers, arrivals, strict=True)
    ]


def spread(requests: Sequence[Request], mix: Mix) -> str:
    """The lengths that were drawn, in words."""
    questions = [len(one.prompt) - mix.system_tokens for one in requests]
    words = []
    for name, drawn in (("questions", questions), ("answers", [one.new_tokens for one in requests])):
        low, middle, high = np.percentile(drawn, (5, 50, 95))
        words.append(f"{name} p5 {low:.0f}, p50 {middle:.0f}, p95 {high:.0f}, {sum(drawn)} tokens in all")
    return f"{len(requests)} requests: " + "; ".join(words)
