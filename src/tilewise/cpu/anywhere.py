"""Sequences one after another by torch's products, on whatever device they are: what a card has no kernel for.

The strips of products.py and backward.py run over each sequence as one tile, in which a view says what every row sees.
No block is left out, and nothing is as large as all scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.cpu.backward import Keys, Rows, product_gradients
from tilewise.cpu.products import product_state
from tilewise.cpu.scoring import Scoring, View, count_up
from tilewise.plan.tiles import band_of
from tilewise.scores import Window

if TYPE_CHECKING:
    from tilewise.functions import Function
    from tilewise.plan.schedule import BlockSchedule

KV = tuple[torch.Tensor, torch.Tensor]


class Seen(NamedTuple):
    """What a schedule and a mask function let rows see, asked as a mask function is: bits (batch or 1, heads or 1,
    q blocks, words) int32 and lengths of blocks as in a BlockSchedule."""

    schedule: BlockSchedule | None
    function: Function | None
    heads: int  # query heads
    uses: str = "bhqk"

    def seen(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        found = torch.ones((), dtype=torch.bool, device=q.device)
        if self.schedule is not None:
            bits, block_q, block_k = self.schedule.bits, self.schedule.block_q, self.schedule.block_k
            at = b.long() if len(bits) > 1 else torch.zeros_like(b, dtype=torch.int64)
            q_block, k_block = q.long() // block_q, k.long() // block_k
            words = bits[at, h.long() // (self.heads // bits.shape[1]), q_block, k_block // 32]
            found = (words >> (k_block % 32)) & 1 == 1
            for x, block, size, lengths in (
                (q, q_block, block_q, self.schedule.lengths_q),
                (k, k_block, block_k, self.schedule.lengths_k),
            ):
                if lengths is not None:
                    found = found & (x % size < lengths[at if len(lengths) > 1 else torch.zeros_like(at), block])
        if self.function is not None and self.function.masks:
            found = found & self.function.seen(b, h, q, k)
        return found


class Problem(NamedTuple):
    """Packed sequences: q (rows, Hq, D), k (keys, Hkv, D) and v (keys, Hkv, Dv), and where each starts in them, on the
    host. schedules: one per sequence, or one for all, or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts_q: Sequence[int]
    starts_k: Sequence[int]
    scoring: Scoring
    window: Window
    schedules: Any = None

    def parts(self) -> list[tuple[slice, slice, View]]:
        """The rows and the keys of each sequence that has both, and what its rows see."""
        found = []
        bounds = zip(pairwise(self.starts_q), pairwise(self.starts_k), strict=True)
        for b, ((row, last_row), (key, last_key)) in enumerate(bounds):
            if last_row > row and last_key > key:
                found.append(
                    (slice(row, last_row), slice(key, last_key), self._view(b, last_row - row, last_key - key))
                )
        return found

    def _view(self, b: int, rows: int, keys: int) -> View:
        device, heads = self.q.device, self.q.shape[1]
        schedule = self.schedules[b] if isinstance(self.schedules, (list, tuple)) else self.schedules
        function = self.scoring.function
        mask: Any = None
        if schedule is not None or (function is not None and function.masks):
            mask = Seen(schedule, function, heads)
        band = band_of(rows, keys, False, self.window)
        places = count_up(0, rows, device)[None], count_up(0, keys, device)[None]
        sequence = torch.tensor([b], dtype=torch.int32, device=device)
        return View(*places, band, mask, None, sequence, count_up(0, heads, device), steady=True)

    def state(self) -> KV:
        """o (rows, Hq, Dv) and lse (rows, Hq) float32."""
        o = self.q.new_zeros(*self.q.shape[:2], self.v.shape[-1])
        lse = torch.full(self.q.shape[:2], -torch.inf, dtype=torch.float32, device=self.q.device)
        for rows, keys, view in self.parts():
            made = product_state(self.q[None, rows], self.k[None, keys], self.v[None, keys], self.scoring, view)
            o[rows], lse[rows] = made[0][0], made[1][0]
        return o, lse

    def gradients(
        self, o: torch.Tensor, lse: torch.Tensor, d_o: torch.Tensor | None, d_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of q, k and v, float32. o, d_o (rows, Hq, Dv); lse, d_lse (rows, Hq)."""
        at = Rows.of(self.q, o, lse, d_o, d_lse).with_d_q()
        over = Keys.of(self.k, self.v)
        for rows, keys, view in self.parts():
            product_gradients(at.part(rows), over.part(keys), self.scoring, view)
        return at.added(), over.d_k, over.d_v
