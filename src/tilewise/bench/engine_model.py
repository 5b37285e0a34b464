"""The engine's schedule in a small discrete model: what a token budget does to latencies, without a card.

Requests arrive, prompts are computed in chunks beside those who decode, as serving/schedule.py has it, and a step takes
what `Costs` says. The costs are those of an 8B Llama on an H200, and with them the model gives what
docs/results/engine-8b-h200.txt has: some 51 requests/s at once, and at 70% of that 6.3, 10.1 and 10.5 ms between tokens
(p50, p95, p99).

    python -m tilewise.bench.engine_model 34 none 512 192    # 34 requests/s; token budgets
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from ..serving.batch import mixed_sizes
from ..serving.schedule import CROWD, SPREAD, even_tokens
from .engine_traffic import Lengths

QUESTIONS, ANSWERS = Lengths(128, 0.7, 8, 1024), Lengths(128, 0.6, 8, 512)  # of `tilewise bench engine` on a card


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step: of decodes alone, and for each of their rows; of a step with prompts, and for each row of
    its graph, idle ones too."""

    decode: float = 5.9
    row: float = 0.0109
    mixed: float = 4.9
    token: float = 0.0235

    def step(self, rows: int, prompts: int, sizes: Sequence[int]) -> float:
        """Of so many rows that decode and so many tokens of prompts, in a graph of one of these sizes."""
        decode = self.decode + self.row * rows
        if not prompts:
            return decode
        size = next((size for size in sizes if size >= rows + prompts), rows + prompts)
        return max(decode, self.mixed + self.token * size)


@dataclass(frozen=True)
class Latencies:
    """Of a run: requests per second, milliseconds between tokens and to first tokens, (p50, p95, p99) each."""

    requests_per_s: float
    between: tuple[float, ...]
    first: tuple[float, ...]


@dataclass
class _Request:
    arrival: float
    left: int  # tokens of its prompt that are to be computed
    tokens: int  # that are to follow
    last: float = 0.0  # when it got its last token


def simulate(
    requests: int,
    rate: float,
    *,
    seed: int = 0,
    token_budget: int | None = None,
    prefill_chunk: int = 4096,
    max_sequences: int = 256,
    costs: Costs | None = None,
) -> Latencies:
    """Serve so many requests, `rate` a second on average, all at once if that is infinite. Their system prompts are
    cached; what the others are, Engine says."""
    costs, chance = costs or Costs(), np.random.default_rng(seed)
    lengths = zip(QUESTIONS.draw(requests, chance).tolist(), ANSWERS.draw(requests, chance).tolist(), strict=True)
    gaps = chance.exponential(1e3, requests) / rate if math.isfinite(rate) else np.zeros(requests)
    coming = deque(_Request(at, *one) for at, one in zip(np.cumsum(gaps).tolist(), lengths, strict=True))
    sizes = mixed_sizes(token_budget or max_sequences + prefill_chunk)
    waiting: deque[_Request] = deque()
    computing: list[_Request] = []
    running: list[_Request] = []
    between: list[float] = []
    first: list[float] = []
    now = 0.0
    while coming or waiting or computing or running:
        if not (waiting or computing or running):
            now = max(now, coming[0].arrival)
        while coming and coming[0].arrival <= now:
            waiting.append(coming.popleft())
        rows = len(running)
        budget = min(prefill_chunk, (token_budget or math.inf) - rows)
        if running:
            known = sum(one.left for one in (*computing, *waiting)) if len(waiting) <= CROWD else SPREAD * budget
            budget = even_tokens(int(budget), rows, int(min(known, SPREAD * budget)))
        while waiting and rows + len(computing) < max_sequences and sum(one.left for one in computing) < budget:
            computing.append(waiting.popleft())
        fed, done = 0, []
        for one in computing:
            count = min(one.left, int(budget) - fed)
            one.left -= count
            fed += count
            done += [one] if not one.left else []
        now += costs.step(rows, fed, sizes)
        for one in running:
            between.append(now - one.last)
            one.last, one.tokens = now, one.tokens - 1
        for one in done:
            first.append(now - one.arrival)
            one.last, one.tokens = now, one.tokens - 1
        computing = [one for one in computing if one.left]
        running = [one for one in (*running, *done) if one.tokens]
    found = (tuple(np.percentile(x, (50, 95, 99)).tolist()) for x in (between, first))
    return Latencies(requests / now * 1e3, *found)


def main(words: Sequence[str] | None = None) -> None:
    """Print what budgets do, as the command above asks."""
    asked = argparse.ArgumentParser(prog="python -m tilewise.bench.engine_model", description="Latencies by budget.")
    asked.add_argument("rate", type=float, help="requests per second")
    asked.add_argument("budgets", nargs="+", type=lambda word: None if word == "none" else int(word))
    asked.add_argument("--requests", type=int, default=2000)
    for one in fields(Costs):
        asked.add_argument(f"--{one.name}", type=float, default=one.default, help="ms, see Costs")
    given = asked.parse_args(words)
    costs = Costs(**{one.name: getattr(given, one.name) for one in fields(Costs)})
    print("budget  ms between tokens p50 / p95 / p99  ms to the first token p50 / p95 / p99")
    for budget in given.budgets:
        run = simulate(given.requests, given.rate, token_budget=budget, costs=costs)
        between, first = (" / ".join(f"{value:.1f}" for value in x) for x in (run.between, run.first))
        print(f"{budget or 'none':>6}  {between:>34}  {first:>37}")


if __name__ == "__main__":
    main()
