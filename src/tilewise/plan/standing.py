"""Standing plans: one plan for a batch whose sequences come, go and grow from step to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.plan.flat import NODE_WORDS, Judge, choose_nodes, tree_order
from tilewise.plan.schedule_files import AnyPath
from tilewise.plan.show import Card
from tilewise.plan.tiles import DecodePlan, Window, _serials

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

KEPT_STEPS = 64  # after so many steps of growth nodes are chosen anew


class Arranged(NamedTuple):
    """The order of a batch and the nodes that it shares, as plan/flat.py has them; of the cache's `rows` with `stamps`,
    (n,) each. steps: how often the batch only grew since the nodes were chosen."""

    rows: Longs
    stamps: Longs
    order: Ints
    nodes: Longs
    steps: int


@dataclass(eq=False)
class StandingPlan:
    """A decode plan for up to `rows` sequences of up to `max_length` tokens, which `renew_plan` brings up to date.

    It is no value but a thing that changes: one object, whose memory on a card stays where it is while `seqs` and
    `lengths` change. decode() takes q with `rows` rows, of which the first len(seqs) are those of `seqs`; the others
    are idle.

    share: True shares every node of the page tree, False none, None those for which `judge` says that it pays. serial:
    as of DecodePlan.
    """

    pages_per_seq: ClassVar[int] = 0  # as of DecodePlan: all pages are read
    room: ClassVar[int] = 0  # as of DecodePlan: it is renewed instead

    rows: int
    max_length: int
    heads_q: int
    heads_kv: int
    head_dim: int
    page_size: int
    tokens_per_seq: int
    window: Window | None
    share: bool | None
    judge: Judge
    cache_serial: int
    plan_once: Callable[[list[int]], DecodePlan] = field(repr=False)
    seqs: tuple[int, ...] = ()
    lengths: Longs = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)
    serial: int = field(default_factory=_serials.__next__, init=False)
    arranged: Arranged | None = field(default=None, init=False, repr=False)
    _now: DecodePlan | None = field(default=None, init=False, repr=False)

    @property
    def now(self) -> DecodePlan:
        """The plan of the sequences as they are now, as plan_decode without `rows` makes it."""
        if self._now is None:
            self._now = self.plan_once(list(self.seqs))
        return self._now

    def hold(self, seqs: tuple[int, ...], lengths: Longs) -> None:
        """Be the plan of these sequences, (n,) lengths in tokens, from now on."""
        self.seqs, self.lengths, self._now = seqs, lengths, None

    def arrange(self, rows: Longs, table: Ints, counts: Longs, stamps: Longs) -> Arranged:
        """The order of the sequences and the nodes that they share. rows: theirs in `table`, `counts` and `stamps`.

        A batch that only grew keeps what it has for some steps: its nodes stay right, and choosing anew would seldom
        choose differently.
        """
        known, seen = self.arranged, stamps[rows]
        if known is not None and len(rows) == len(known.rows) and known.steps < KEPT_STEPS:
            if (rows == known.rows).all() and (seen == known.stamps).all():
                self.arranged = known._replace(steps=known.steps + 1)
                return self.arranged
        order, nodes = np.arange(len(rows), dtype=np.int32), np.zeros((0, NODE_WORDS), np.int64)
        if self.share is not False:
            order, common = tree_order(table[:, : counts[rows].max(initial=0)][rows], counts[rows])
            left = self.window[0] if self.window is not None else None
            judge = None if self.share else self.judge
            nodes = choose_nodes(common, self.lengths[order], self.page_size, self.tokens_per_seq, left, judge)
        self.arranged = Arranged(rows, seen, order, nodes, 0)
        return self.arranged

    def show(self, card: str | Card = "H200") -> str:
        """`now` as a few lines of text."""
        return self.now.show(card)

    def draw(self, path: AnyPath) -> None:
        """Write a picture of `now`, a PNG or an SVG by the path's ending."""
        self.now.draw(path)
