"""Standing plans: one plan for a batch whose sequences come, go and grow from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tilewise.plan.flat import NODE_WORDS, Judge, choose_nodes
from tilewise.plan.schedule_files import AnyPath
from tilewise.plan.show import Card
from tilewise.plan.tiles import DecodePlan, Window, _serials
from tilewise.scores import Reach

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

KEPT_STEPS = 64  # after so many steps of growth nodes are chosen anew


class Grown(NamedTuple):
    """What a step did to a batch in which nothing else happened: each sequence got a token, and the u at places `at` a
    page, `pages`, after the `before` that they had, (u,) each. number: of the step, which no other one has. follows:
    the number of the step before; 0 for the first of its kind."""

    number: int
    follows: int
    at: Longs
    before: Longs
    pages: Longs


class Arranged(NamedTuple):
    """The order of a batch, its leading pages in common and the nodes that it shares, as plan/flat.py has them."""

    order: Ints
    common: Longs
    nodes: Longs


class TreeOrder(Protocol):
    """Who keeps the order of a batch: kvcache/lineage.py."""

    def update(self, seqs: Sequence[int], rows: Longs, /) -> tuple[Ints, Longs]:
        """order and common of sequences that have these rows in the cache's arrays; the very arrays of the last call
        if sequences only grew since."""
        ...


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
    chunk: int
    share: bool | None
    judge: Judge
    cache_serial: int
    plan_once: Callable[[list[int]], DecodePlan] = field(repr=False)
    tree: TreeOrder | None = field(repr=False)  # None if nothing is shared
    seqs: tuple[int, ...] = ()
    rows_of: Longs = field(
        default_factory=lambda: np.zeros(0, np.int64), repr=False
    )  # of `seqs`, in the cache's arrays
    lengths: Longs = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)
    serial: int = field(default_factory=_serials.__next__, init=False)
    _arranged: Arranged | None = field(default=None, init=False, repr=False)
    _kept: int = field(default=0, init=False, repr=False)  # how often the batch only grew since nodes were chosen
    # Of positions, those in which each sequence then ended; none if rows do not keep to blocks.
    _blocks: Longs = field(default_factory=lambda: np.zeros(0, np.int64), init=False, repr=False)
    _now: DecodePlan | None = field(default=None, init=False, repr=False)

    @property
    def reach(self) -> Reach:
        """How far back rows see."""
        return Reach.of(self.window, self.chunk)

    @property
    def now(self) -> DecodePlan:
        """The plan of the sequences as they are now, as plan_decode without `rows` makes it."""
        if self._now is None:
            self._now = self.plan_once(list(self.seqs))
        return self._now

    def hold(self, seqs: tuple[int, ...], rows_of: Longs, lengths: Longs) -> None:
        """Be the plan of these sequences from now on: (n,) rows in the cache's arrays, (n,) lengths in tokens."""
        self.seqs, self.rows_of, self.lengths, self._now = seqs, rows_of, lengths, None

    def arrange(self) -> Arranged:
        """The order of the sequences as they are now and the nodes that they share.

        A batch that only grew keeps its nodes for some steps: they stay right, and choosing anew would seldom choose
        differently; but where a row has come to the next block of positions, nothing of what came before is seen.
        """
        known, count = self._arranged, len(self.seqs)
        if self.tree is None:
            if known is None or len(known.order) != count:
                none = np.zeros((0, NODE_WORDS), np.int64)
                known = Arranged(np.arange(count, dtype=np.int32), none[:, 0], none)
        else:
            order, common = self.tree.update(self.seqs, self.rows_of)
            blocks = (self.lengths - 1) // self.chunk if self.chunk else self._blocks
            same = known is not None and known.order is order and known.common is common
            same = same and (blocks is self._blocks or np.array_equal(blocks, self._blocks))
            if known is not None and same and self._kept < KEPT_STEPS:
                self._kept += 1
            else:
                judge, sizes = None if self.share else self.judge, (self.page_size, self.tokens_per_seq)
                nodes = choose_nodes(common, self.lengths[order], *sizes, self.reach, judge)
                known, self._kept, self._blocks = Arranged(order, common, nodes), 0, blocks
        self._arranged = known
        return known

    def show(self, card: str | Card = "H200") -> str:
        """`now` as a few lines of text."""
        return self.now.show(card)

    def draw(self, path: AnyPath) -> None:
        """Write a picture of `now`, a PNG or an SVG by the path's ending."""
        self.now.draw(path)
