"""Choosing the next token: greedy, or drawn with temperature, top-k and top-p.

A draw takes one number from [0, 1) and looks up where the cumulative probability reaches it. That number is a hash of
the seed, the prompt's and the sample's number and the token's place, so what a sequence draws does not depend on what
is decoded beside it, nor on whether it was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .. import checks

COLDEST = 1e-30  # of temperatures that float32 can divide by without fear; below it all weight is on the likeliest


@dataclass(frozen=True)
class Sampling:
    """temperature 0: the likeliest token. top_k: draw among the k likeliest, 0 for all; top_p: among the fewest
    likeliest whose probabilities add up to it. As in transformers, the temperature comes first, then top_k, then top_p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks.number("temperature", self.temperature, 0.0)
        checks.integer("top_k", self.top_k, 0)
        if not 0.0 < checks.number("top_p", self.top_p, 0.0) <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        checks.integer("seed", self.seed, 0, 2**63 - 1)


class Chooser:
    """Chooses for rows with a Sampling each. What it does depends on those alone, so a graph can capture it."""

    def __init__(self, rows: Sequence[Sampling], vocab: int, device: torch.device) -> None:
        self._draws = [row.temperature > 0 for row in rows]
        self._filters = any(row.temperature > 0 and (row.top_k or row.top_p < 1) for row in rows)
        values = [[max(row.temperature, COLDEST), row.top_k or vocab, row.top_p, row.temperature == 0] for row in rows]
        temperature, top_k, top_p, greedy = torch.tensor(values, dtype=torch.float32).to(device).unbind(1)
        self._temperature, self._top_p = temperature[:, None], top_p[:, None].double()
        self._top_k, self._greedy = top_k[:, None].long(), greedy.bool()

    @property
    def draws(self) -> bool:
        """Does any row need a number to draw with?"""
        return any(self._draws)

    def __call__(self, logits: torch.Tensor, uniform: torch.Tensor | None) -> torch.Tensor:
        """(n,) int64 tokens from logits (n, vocab); uniform: (n,) float64 in [0, 1), needed where any row draws."""
        likeliest = logits.argmax(-1)
        if not self.draws:
            return likeliest
        assert uniform is not None
        below = logits.float() - logits.float().amax(-1, keepdim=True)  # the largest 0, however cold it is
        weights = torch.softmax(below / self._temperature, -1).double()
        order = None
        if self._filters:
            weights, order = weights.sort(stable=True, dim=-1, descending=True)
            place = torch.arange(weights.shape[-1], device=weights.device)
            weights = weights.masked_fill(place >= self._top_k, 0.0)
            before = weights.cumsum(-1) - weights
            weights = weights.masked_fill(before >= self._top_p * weights.sum(-1, keepdim=True), 0.0)
        reached = weights.cumsum(-1)
        drawn = torch.searchsorted(reached, uniform[:, None] * reached[:, -1:], right=True)
        # Rounding may carry the product up to the very end: the last token that has any weight is meant then.
        drawn = torch.minimum(drawn, (weights > 0).long().cumsum(-1).argmax(-1, keepdim=True))
        if order is not None:
            drawn = order.gather(-1, drawn)
        return torch.where(self._greedy, likeliest, drawn[:, 0])


def uniforms(keys: Sequence[tuple[int, int, int, int]]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each (seed, prompt, sample, place)."""
    state = np.zeros(len(keys), np.uint64)
    with np.errstate(over="ignore"):
        for word in np.array(keys, np.uint64).reshape(-1, 4).T:
            state = _mixed((state ^ word) + np.uint64(0x9E3779B97F4A7C15))
    found: npt.NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finishing step of splitmix64: every bit of x reaches every bit of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
