"""Choosing the next token: greedy, or drawn with temperature, top-k and top-p.

A draw takes one number from [0, 1) and looks up where the cumulative probability reaches it. That number is a hash of
the seed, the prompt's and the sample's number and the token's place, so what a sequence draws does not depend on what
is decoded beside it, nor on whether it was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from .. import checks

ALL = 2**31  # of top_k: more tokens than any vocabulary has
COLDEST = 1e-30  # of temperatures that float32 can divide by without fear; below it all weight is on the likeliest


class Kind(IntEnum):
    """What choosing has to do for a row, or for the row of a batch that asks for most."""

    GREEDY = 0
    DRAWN = 1
    FILTERED = 2  # by top_k or top_p


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

    @property
    def kind(self) -> Kind:
        if self.temperature == 0:
            return Kind.GREEDY
        return Kind.FILTERED if self.top_k or self.top_p < 1 else Kind.DRAWN


def check_sampling(sampling: object) -> Sampling:
    """`sampling`, TypeError unless it is one."""
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a tilewise.Sampling, got {type(sampling).__name__}")
    return sampling


def parameters(rows: Sequence[Sampling]) -> npt.NDArray[np.float64]:
    """(4, len(rows)): temperature, top_k, top_p of each, and 1 where the likeliest token is taken, else 0."""
    values = [(max(r.temperature, COLDEST), r.top_k or ALL, r.top_p, r.temperature == 0) for r in rows]
    return np.array(values, np.float64).reshape(-1, 4).T


def choose(kind: Kind, logits: torch.Tensor, uniform: torch.Tensor | None, params: torch.Tensor) -> torch.Tensor:
    """(n,) int64 tokens from logits (n, vocab), by parameters() (4, n) on their device, none of a higher kind.

    What it does depends on the kind alone, so that a graph can capture it.
    """
    likeliest = logits.argmax(-1)
    if kind == Kind.GREEDY:
        return likeliest
    assert uniform is not None
    temperature, top_k, top_p, greedy = params[:, :, None].unbind()
    below = logits.float() - logits.float().amax(-1, keepdim=True)  # the largest 0, however cold it is
    weights = torch.softmax(below / temperature.float(), -1).double()
    order = None
    if kind == Kind.FILTERED:
        # Rows that filter draw in the order of the weights; the others in that of the tokens, as they do by themselves.
        filters = (top_k < ALL) | (top_p < 1)
        place = torch.arange(weights.shape[-1], device=weights.device)
        ranked, order = weights.sort(stable=True, dim=-1, descending=True)
        ranked = ranked.masked_fill(place >= top_k, 0.0)
        before = ranked.cumsum(-1) - ranked
        ranked = ranked.masked_fill(before >= top_p * ranked.sum(-1, keepdim=True), 0.0)
        weights, order = torch.where(filters, ranked, weights), torch.where(filters, order, place)
    reached = weights.cumsum(-1)
    drawn = torch.searchsorted(reached, uniform[:, None] * reached[:, -1:], right=True)
    # Rounding may carry the product up to the very end: the last token that has any weight is meant then.
    drawn = torch.minimum(drawn, (weights > 0).long().cumsum(-1).argmax(-1, keepdim=True))
    if order is not None:
        drawn = order.gather(-1, drawn)
    return torch.where(greedy[:, 0] > 0, likeliest, drawn[:, 0])


def uniforms(keys: Sequence[tuple[int, int, int, int]]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each (seed, prompt, sample, place)."""
    return uniforms_of(np.array(keys, np.uint64).reshape(-1, 4).T)


def uniforms_of(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """uniforms() of (4, n) keys."""
    state = np.zeros(keys.shape[1], np.uint64)
    with np.errstate(over="ignore"):
        for word in keys:
            state = _mixed((state ^ word) + np.uint64(0x9E3779B97F4A7C15))
    found: npt.NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finishing step of splitmix64: every bit of x reaches every bit of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
