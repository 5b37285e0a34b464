"""What the CPU backend does to scores: soft-capping, ALiBi, a score function; and which keys the rows of a tile see."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from tilewise.plan.tiles import OPEN, Band, seen_keys
from tilewise.scores import Scores

if TYPE_CHECKING:
    from tilewise.cpu.dropout import Dropout
    from tilewise.functions import Function

ALL = slice(None)
MINUS_INFINITY = -1 << 23  # its bits as a float32, in an int32
FIRST = torch.zeros(1, dtype=torch.int32, device="cpu")


Chain = Callable[[torch.Tensor], torch.Tensor]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Sequences:
    """Where each sequence's rows and keys start in the packed count, and how much longer its keys are."""

    row_starts: Sequence[int]
    key_starts: Sequence[int]
    diagonals: Sequence[int]  # seqlen_k - seqlen_q: the key under row 0

    def of(self, row: int) -> int:
        """The sequence that owns a packed row."""
        return bisect_right(self.row_starts, row) - 1


@dataclass(frozen=True)
class Scoring:
    """What happens to the scores besides what hides them: the same for every tile of a call."""

    scale: float
    softcap: float = 0.0
    slopes: torch.Tensor | None = None  # ALiBi's, (batch, heads) float32
    function: Function | None = None
    sequences: Sequences | None = None  # with ALiBi, functions and dropout, which ask where a row and a key stand
    dropout: Dropout | None = None

    @classmethod
    def of(
        cls,
        scores: Scores,
        starts_q: Sequence[int] | None = None,
        starts_k: Sequence[int] | None = None,
        function: Function | None = None,
        dropout: Dropout | None = None,
    ) -> Scoring:
        """starts_q, starts_k: where sequences start in the packed count, and the totals."""
        sequences = None
        asked = any(x is not None for x in (scores.slopes, function, dropout))
        if asked and starts_q is not None and starts_k is not None:
            lengths = zip(pairwise(starts_q), pairwise(starts_k), strict=True)
            diagonals = [(k1 - k0) - (q1 - q0) for (q0, q1), (k0, k1) in lengths]
            sequences = Sequences(starts_q[:-1], starts_k[:-1], diagonals)
        return cls(scores.scale, scores.softcap, scores.slopes, function, sequences, dropout)

    @property
    def scored(self) -> bool:
        """Is there a score function?"""
        return self.function is not None and self.function.scores

    @property
    def changes(self) -> bool:
        """Does it ask for more than something that is added to the scores?"""
        return self.softcap != 0.0 or self.scored or self.dropout is not None

    @property
    def asks_places(self) -> bool:
        """Does it ask where a row and a key stand, and which head is computed?"""
        return self.slopes is not None or self.scored or self.dropout is not None

    @property
    def needs_products(self) -> bool:
        """Does it ask for something that torch's flash kernel does not do by itself?"""
        return self.softcap != 0.0 or self.asks_places

    @property
    def alpha(self) -> float:
        """What `apply` expects products to be multiplied with."""
        return self.scale / self.softcap if self.softcap else self.scale

    @property
    def narrow(self) -> bool:
        """Are scores between −50 and 50? Then e^(score − reference) has all its bits for every reference up to 50."""
        return 0.0 < self.softcap <= 50.0 and not self.asks_places

    def cap(self, s: torch.Tensor) -> torch.Tensor:
        """Scaled scores, soft-capped in place."""
        return s.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else s

    def apply(self, s: torch.Tensor, view: View | None) -> tuple[torch.Tensor, float]:
        """Scores of `alpha` times the products (heads, rows, keys) of the one tile of `view`; nothing is hidden yet.

        Returns them, in the memory of `s` or in new memory, and what they are still to be multiplied with.
        """
        factor = 1.0
        if self.softcap:
            s.tanh_()
            factor = self.softcap
        if view is None:
            return s, factor
        if self.slopes is not None and self.sequences is not None:
            b = int(view.sequences)
            distance = (view.rows[0, :, None] + self.sequences.diagonals[b] - view.keys[0, None, :]).abs().float()
            s.mul_(factor).addcmul_(self.slopes[b, view.heads][:, None, None], distance, value=-1.0)
            factor = 1.0
        if self.function is not None and self.function.scores:
            scored = self.function.scored(s[None], *view.indices())[0]
            s = scored if scored.is_contiguous() else s.copy_(scored)
        return s, factor

    def with_derivative(self, s: torch.Tensor, view: View | None) -> tuple[torch.Tensor, Chain]:
        """Scores of `alpha` times the products (heads, rows, keys), multiplied with everything; and what takes the
        gradient of a score to that of the scaled product, in its memory or not."""
        if not self.needs_products:
            return s, _same
        slope = None
        if self.softcap:
            s = s.tanh_()
            slope = s.square().neg_().add_(1.0)  # d cap · tanh(x / cap) = 1 − tanh²
        plain = replace(self, softcap=0.0, function=None)
        capped, _ = plain.apply(s * self.softcap if self.softcap else s, view)
        function = self.function
        if function is None or not function.scores or view is None:
            return capped, _same if slope is None else slope.mul_
        with torch.enable_grad():
            leaf = capped.detach().requires_grad_()
            made = function.scored(leaf[None], *view.indices())[0]

        def chain(d_s: torch.Tensor) -> torch.Tensor:
            if not made.requires_grad:  # the score does not depend on the product
                return torch.zeros_like(d_s)
            return torch.autograd.grad(made, leaf, d_s)[0]

        return made.detach().expand(capped.shape).clone(), chain


@dataclass(frozen=True)
class View:
    """Where the rows and the keys of n tiles stand in their sequences, and which keys a row sees.

    rows (n or 1, rows), keys (n or 1, keys), int32. A key is seen if the band over these places, the mask function and
    `there` (n or 1, keys), bool, allow it. sequences (n or 1,), heads (heads,), int32: which sequence and query heads.
    steady: rows and keys of a tile count up by one.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    band: Band = OPEN
    mask: Function | None = None
    there: torch.Tensor | None = None
    sequences: torch.Tensor = FIRST
    heads: torch.Tensor = FIRST
    steady: bool = False

    @property
    def hides(self) -> bool:
        """May a pair be hidden?"""
        return self.band != OPEN or self.mask is not None or self.there is not None

    @property
    def by_head(self) -> bool:
        """Do heads see different keys?"""
        return self.mask is not None and "h" in self.mask.uses

    @property
    def pairs(self) -> int:
        """How many pairs `seen` tells for one tile."""
        return (len(self.heads) if self.by_head else 1) * self.rows.shape[1] * self.keys.shape[1]

    def indices(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequence, query head, row and key, which broadcast to (n, heads, rows, keys)."""
        b, h = self.sequences[:, None, None, None], self.heads[:, None, None]
        return b, h, self.rows[:, None, :, None], self.keys[:, None, None, :]

    @cached_property
    def seen(self) -> torch.Tensor:
        """Visible pairs, bool (n or 1, heads or 1, rows, keys)."""
        b, h, q, k = self.indices()
        allowed = []
        if self.mask is not None:
            b, h = (x if name in self.mask.uses else x[:1] for name, x in (("b", b), ("h", h)))
            allowed.append(self.mask.seen(b, h, q, k))
        if self.band.low is not None:
            allowed.append(k >= q + self.band.low)
        if self.band.high is not None:
            allowed.append(k <= q + self.band.high)
        if self.there is not None:
            allowed.append(self.there[:, None, None, :])
        if not allowed or self.there is not None:  # those tell nothing of rows
            allowed.append(torch.ones((), dtype=torch.bool, device=q.device).expand(1, 1, q.shape[2], k.shape[3]))
        return reduce(torch.logical_and, allowed)

    @cached_property
    def bias(self) -> torch.Tensor:
        """The same as what is added to scores: float32, 0 or −inf."""
        # 1 − 1 = 0 and 0 − 1, whose bits are all ones, under the bits of −inf: a tenth of the time of torch.where.
        return self.seen.to(torch.int32).sub_(1).bitwise_and_(MINUS_INFINITY).view(torch.float32)

    @cached_property
    def blind(self) -> torch.Tensor:
        """Rows that see no key, bool (n or 1, heads or 1, rows)."""
        seen = self.seen.view(torch.uint8)
        return seen.amax(-1) == 0 if seen.shape[-1] else seen.new_ones(seen.shape[:-1], dtype=torch.bool)

    @property
    def banded(self) -> bool:
        """Does nothing but a band hide pairs, and that along the diagonals of a tile?"""
        return self.steady and self.mask is None and self.there is None

    def clear(self, x: torch.Tensor) -> None:
        """Put 0 where the band hides a pair of the one tile, x (heads, rows, keys); `steady` views only."""
        low, high = self.band.shifted(int(self.rows[0, 0] - self.keys[0, 0]))
        if high is not None:
            x.tril_(high)
        if low is not None:
            x.triu_(low)

    def hide(self, s: torch.Tensor) -> None:
        """Put −inf where a pair of the one tile is hidden, s (heads, rows, keys)."""
        if self.steady:
            self.clear(s)  # NaN and infinities of hidden keys, too
        s.add_(self.bias[0])

    def _ends(self) -> tuple[int, int, int, int]:
        """The first and the last row, the first and the last key of the one tile."""
        rows, keys = self.rows[0], self.keys[0]
        if self.steady:
            row, key = int(rows[0]), int(keys[0])
            return row, row + len(rows) - 1, key, key + len(keys) - 1
        return int(rows.min()), int(rows.max()), int(keys.min()), int(keys.max())

    def span(self) -> slice:
        """Of the keys of the one tile, those from the first to the last that the band lets a row see."""
        low, high = self.band
        if self.band == OPEN:
            return slice(0, self.keys.shape[1])
        first, last, key, _ = self._ends()
        if self.steady:
            start, stop = seen_keys(last - first + 1, self.keys.shape[1], self.band.shifted(first - key))
            return slice(start, stop)
        near = Band(None if low is None else first + low, None if high is None else last + high).allows(self.keys[0])
        found = near.nonzero()
        return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)

    def cut(self) -> View | None:
        """Without the bounds of the band that hide nothing here; None if they hide everything."""
        if self.band == OPEN:
            return self
        row, last_row, key, last_key = self._ends()
        least, most = key - last_row, last_key - row
        low, high = self.band
        if (low is not None and most < low) or (high is not None and least > high):
            return None
        low = None if low is None or least >= low else low
        high = None if high is None or most <= high else high
        return replace(self, band=Band(low, high))

    def of_heads(self, heads: slice, scoring: Scoring) -> View:
        """The view of some of its heads; itself, with what it has found, if nothing asks which heads they are."""
        return replace(self, heads=self.heads[heads]) if scoring.asks_places or self.by_head else self

    def part(self, tiles: slice, rows: slice = ALL, keys: slice = ALL, heads: slice = ALL) -> View:
        """The view of some of its tiles, and of some rows, keys and heads of those."""

        def some(x: torch.Tensor) -> torch.Tensor:
            return x if x.shape[0] == 1 else x[tiles]

        there = None if self.there is None else some(self.there)[:, keys]
        places = (some(self.rows)[:, rows], some(self.keys)[:, keys])
        return View(*places, self.band, self.mask, there, some(self.sequences), self.heads[heads], self.steady)


def counted(rows: int, keys: int, band: Band = OPEN) -> View:
    """Places 0, 1, 2, … in both directions."""
    return View(count_up(0, rows)[None], count_up(0, keys)[None], band, steady=True)


def count_up(start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """start, …, stop − 1 as functions take them."""
    return torch.arange(start, stop, dtype=torch.int32, device=device)
