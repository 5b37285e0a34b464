"""Dropout of the softmax's weights: which of them are kept follows from a seed and from where they stand, nothing else.

Whoever asks for the same weight again, in the backward pass or in tiles of another size, finds the same answer. The
generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): its key are the two
halves of the seed, its counter is (key // 8, row, head, sequence), all counted within their sequence, and each of its
four words serves two of the eight keys: 16 bits per weight. A kernel finds the same by the same integer arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewise import checks

WORD = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
STEPS = 0x9E3779B9, 0xBB67AE85  # from round to round, of the key's two words
ROUNDS = 10
LANES = 8  # keys per counter
LEVELS = 1 << 16  # of a weight's 16 bits: it is kept if they are not below p of these

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, seed: int) -> Words:
    """Four words of 32 bits, in int64, for each counter of four; the counter's tensors broadcast."""
    a, b, c, d = counter
    low, high = seed & WORD, (seed >> 32) & WORD
    for _ in range(ROUNDS):
        # Products of words may exceed an int64; what is shifted and masked out of them is right all the same.
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (
            ((second >> 32) & WORD) ^ b ^ low,
            second & WORD,
            ((first >> 32) & WORD) ^ d ^ high,
            first & WORD,
        )
        low, high = (low + STEPS[0]) & WORD, (high + STEPS[1]) & WORD
    return a, b, c, d


def drawn(p: Any, seed: Any, q: Any) -> Any:
    """The seed that a call was given, or one of torch's generator where it drops weights and was given none."""
    if not p or seed is not None or not isinstance(q, torch.Tensor):
        return seed
    return torch.randint(0, (1 << 63) - 1, (), dtype=torch.int64, device=q.device)


class Dropout(NamedTuple):
    """p: the share of the weights that is dropped, below 1; those that are kept are divided by 1 − p."""

    p: float
    seed: int

    @classmethod
    def checked(cls, p: Any, seed: Any) -> Dropout | None:
        """What the arguments of a call ask for; None if nothing is dropped. seed: from `drawn`."""
        share = checks.number("dropout_p", p, 0.0)
        if share >= 1.0:
            raise ValueError(f"dropout_p must be below 1, got {p}")
        if seed is not None:
            checks.tensor("dropout_seed", seed, shape=(), dtypes=(torch.int64,))
        if not share:
            return None
        return cls(share, int(seed))

    def kept(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Bools (n, heads, rows, keys): b (n, 1, 1, 1), h (heads, 1, 1), q (n or 1, 1, rows, 1), k (1, 1, 1, keys)."""
        b, h, q, k = (x.long() for x in (b, h, q, k))
        of_eight, place = torch.unique_consecutive(k.flatten() // LANES, return_inverse=True)
        words = torch.broadcast_tensors(*philox((of_eight, q, h, b), self.seed))
        halves = torch.stack([half for word in words for half in (word % LEVELS, word // LEVELS)], dim=-1)
        return halves.flatten(-2)[..., place * LANES + k.flatten() % LANES] >= round(self.p * LEVELS)

    def factors(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """What the weights of one tile are multiplied with, (heads, rows, keys) float32: 0 or 1 / (1 − p)."""
        return self.kept(b, h, q, k)[0].float().mul_(1.0 / (1.0 - self.p))
