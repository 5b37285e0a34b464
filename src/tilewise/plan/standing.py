"""Standing plans: one plan for a batch whose sequences come, go and grow from step to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tilewise.plan.flat import Judge
from tilewise.plan.schedule_files import AnyPath
from tilewise.plan.show import Card
from tilewise.plan.tiles import DecodePlan, Window, _serials

Longs = npt.NDArray[np.int64]


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

    def show(self, card: str | Card = "H200") -> str:
        """`now` as a few lines of text."""
        return self.now.show(card)

    def draw(self, path: AnyPath) -> None:
        """Write a picture of `now`, a PNG or an SVG by the path's ending."""
        self.now.draw(path)
