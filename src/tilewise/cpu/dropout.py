"""Dropout of the softmax's weights: which of them are kept follows from a seed and from where they stand, nothing else.

Whoever asks for the same weight again, in the backward pass, in tiles of another size or on another device, finds the
same answer. The generator is Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11: seven
rounds are the fewest that pass their tests). Its key are the two halves of the seed; its counter is (group of keys,
group of rows, head, sequence), rows and keys being counted within their sequence. Each weight has 16 bits.

The groups are those that a lane of a warp holds in an mma fragment, so that kernels/common/dropout.cuh draws once for
eight weights: of each sixteen rows, row r and row r + 8 are a group, and of each sixteen keys, keys k, k + 1, k + 8 and
k + 9 of an even k. A weight's word of the four is 2 (key % 2) + (row // 8 % 2), its half of that is key // 8 % 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewise import checks
from tilewise.scores import DROPOUT_LEVELS, dropped_below

WORD = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
STEPS = 0x9E3779B9, 0xBB67AE85  # from round to round, of the key's two words
ROUNDS = 7

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
    seed: int | torch.Tensor  # () int64: on a GPU it stays there, unread

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
        return cls(share, seed)

    def kept(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Bools (n, heads, rows, keys): b (n, 1, 1, 1), h (heads, 1, 1), q: rows of them, k: keys, in any shape."""
        b, h, q, k = b.long().view(-1, 1, 1, 1), h.long(), q.long().flatten(), k.long().flatten()
        rows, row = torch.unique(q // 16 * 8 + q % 8, return_inverse=True)
        keys, key = torch.unique(k // 16 * 4 + k % 8 // 2, return_inverse=True)
        words = torch.stack(torch.broadcast_tensors(*philox((keys, rows[:, None], h, b), int(self.seed))), dim=-1)
        halves = torch.stack((words % DROPOUT_LEVELS, words // DROPOUT_LEVELS), dim=-1) >= dropped_below(self.p)
        # (…, rows, keys, key's parity, row's half, key's half), and with rows and keys that lie together:
        table: torch.Tensor = halves.unflatten(-2, (2, 2)).permute(0, 1, 2, 5, 3, 6, 4).flatten(4).flatten(2, 3)
        return table[:, :, row * 2 + q // 8 % 2][..., key * 4 + k // 8 % 2 * 2 + k % 2]

    def factors(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """What the weights of one tile are multiplied with, (heads, rows, keys) float32: 0 or 1 / (1 − p)."""
        return self.kept(b, h, q, k)[0].float().mul_(1.0 / (1.0 - self.p))
