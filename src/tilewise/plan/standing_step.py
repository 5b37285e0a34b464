"""Standing steps: one step of chunks and decodes for a server in which both come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tilewise.plan.show import Card
from tilewise.plan.standing import StandingPlan
from tilewise.plan.step import StepPlan
from tilewise.plan.tiles import Window, _serials


@dataclass(eq=False)
class StandingStep:
    """A step of `rows` query rows in all, which `renew_step` brings up to date.

    It is no value but a thing that changes: one object, whose memory on a card stays where it is while chunks and
    decodes change. Of q's rows the first are those of the decodes, in the order of decode.seqs; then follow those of
    the chunks, one after another, up to max_chunks of them; the others are idle. So rows that decodes leave are free
    for chunks, and a step of so many tokens takes the same time, whatever they are.

    chunks: (seq, tokens) of each chunk; lengths: of their sequences. serial: as of DecodePlan.
    """

    rows: int
    max_chunks: int
    decode: StandingPlan
    heads_q: int
    page_size: int
    window: Window | None
    chunk: int
    share: bool | None
    cache_serial: int
    plan_once: Callable[[list[tuple[int, int]]], StepPlan] = field(repr=False)
    chunks: tuple[tuple[int, int], ...] = ()
    lengths: tuple[int, ...] = ()
    serial: int = field(default_factory=_serials.__next__, init=False)
    _now: StepPlan | None = field(default=None, init=False, repr=False)

    @property
    def first_row(self) -> int:
        """Of the chunks."""
        return len(self.decode.seqs)

    @property
    def chunk_rows(self) -> int:
        """How many rows the chunks have."""
        return sum(tokens for _, tokens in self.chunks)

    @property
    def most_parts(self) -> int:
        """Of the chunks at most: each of them is one, but that rows in several blocks of positions are as many."""
        more = self.max_chunks + self.rows // self.chunk if self.chunk else 0
        return min(self.rows, self.max_chunks + more)

    @property
    def table_pages(self) -> int:
        """Pages of what a part reads at most: of a block of positions, or of the longest sequence."""
        longest = self.decode.max_length
        return -(-min(longest, self.chunk or longest) // self.page_size)

    @property
    def now(self) -> StepPlan:
        """The chunks as they are now, as plan_step without `rows` plans them; the decodes have `decode.now`."""
        if self._now is None:
            self._now = self.plan_once(list(self.chunks))
        return self._now

    def hold(self, chunks: tuple[tuple[int, int], ...], lengths: tuple[int, ...]) -> None:
        """Be the step of these chunks, beside what `decode` is the plan of, from now on."""
        self.chunks, self.lengths, self._now = chunks, lengths, None

    def show(self, card: str | Card = "H200") -> str:
        """Both parts as they are now, as a few lines of text."""
        head = f"step of {self.rows:,} rows: {len(self.decode.seqs)} decodes, {len(self.chunks)} chunks"
        parts = [self.decode.show(card)] if self.decode.seqs else []
        return "\n".join([head, *parts, *([self.now.show(card)] if self.chunks else [])])
