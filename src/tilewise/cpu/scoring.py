"""What the CPU backend does to scores: soft-capping, ALiBi, and which keys a row sees, by the band of its tile."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from tilewise.plan.tiles import OPEN, Band
from tilewise.scores import Scores


@dataclass(frozen=True)
class Alibi:
    """slopes (batch, heads) float32, and where each sequence's rows and keys start in the packed count."""

    slopes: torch.Tensor
    row_starts: Sequence[int]
    key_starts: Sequence[int]
    diagonals: Sequence[int]  # seqlen_k - seqlen_q: the key under row 0

    def sequence(self, row: int) -> int:
        """The sequence that owns a packed row."""
        return bisect_right(self.row_starts, row) - 1


@dataclass(frozen=True)
class Scoring:
    """What happens to the scores besides the band: the same for every tile of a call."""

    scale: float
    softcap: float = 0.0
    alibi: Alibi | None = None

    @classmethod
    def of(
        cls, scores: Scores, starts_q: Sequence[int] | None = None, starts_k: Sequence[int] | None = None
    ) -> Scoring:
        """starts_q, starts_k: where sequences start in the packed count, and the totals; only ALiBi asks for them."""
        alibi = None
        if scores.slopes is not None and starts_q is not None and starts_k is not None:
            lengths = zip(pairwise(starts_q), pairwise(starts_k), strict=True)
            diagonals = [(k1 - k0) - (q1 - q0) for (q0, q1), (k0, k1) in lengths]
            alibi = Alibi(scores.slopes, starts_q[:-1], starts_k[:-1], diagonals)
        return cls(scores.scale, scores.softcap, alibi)

    @property
    def needs_matmul(self) -> bool:
        """Does it ask for something that torch's flash kernel does not do?"""
        return self.softcap != 0.0 or self.alibi is not None

    def cap(self, s: torch.Tensor) -> torch.Tensor:
        """Scaled scores, soft-capped in place."""
        return s.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else s


@dataclass(frozen=True)
class Places:
    """Where a tile's rows and keys stand in their sequence, when they are not simply 0, 1, 2, …

    rows (n, rows) and keys (n, keys), int64; n may be 1. `diagonal` and `slopes` (n or 1, heads) are ALiBi's: the bias
    is −slope · |row + diagonal − key|.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    diagonal: int = 0
    slopes: torch.Tensor | None = None

    def seen(self, band: Band) -> torch.Tensor:
        """Visible pairs, bool (n, rows, keys)."""
        seen: torch.Tensor = band.allows(self.keys[:, None, :] - self.rows[:, :, None])
        return seen

    def cut(self, band: Band) -> Band | None:
        """What of the band is left to mask here: OPEN if every pair is visible, None if none is."""
        if band == OPEN:
            return OPEN
        least = int(self.keys.min() - self.rows.max())
        most = int(self.keys.max() - self.rows.min())
        if (band.low is not None and most < band.low) or (band.high is not None and least > band.high):
            return None
        low = None if band.low is None or least >= band.low else band.low
        high = None if band.high is None or most <= band.high else band.high
        return Band(low, high)

    def tile(self, n: int, rows: slice, keys: slice) -> Places:
        """The places of one tile of entry n of the batch."""

        def entry(x: torch.Tensor) -> torch.Tensor:
            return x if x.shape[0] == 1 else x[n : n + 1]

        slopes = None if self.slopes is None else entry(self.slopes)
        return Places(entry(self.rows)[:, rows], entry(self.keys)[:, keys], self.diagonal, slopes)


def counted(rows: int, keys: int, diagonal: int = 0, slopes: torch.Tensor | None = None) -> Places:
    """Places 0, 1, 2, … in both directions."""
    return Places(torch.arange(rows, device="cpu")[None], torch.arange(keys, device="cpu")[None], diagonal, slopes)


def bias_and_mask(s: torch.Tensor, scoring: Scoring, band: Band, places: Places) -> None:
    """Soft-cap, add ALiBi's bias and hide what the band hides, in place: s (heads, rows, keys)."""
    scoring.cap(s)
    if places.slopes is not None:
        distance = (places.rows[0, :, None] + places.diagonal - places.keys[0, None, :]).abs()
        s.sub_(places.slopes[0, :, None, None] * distance)
    if band != OPEN:
        s.masked_fill_(~places.seen(band), -math.inf)
