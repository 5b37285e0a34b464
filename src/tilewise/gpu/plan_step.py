"""What changes in a standing plan's batch, on its way to the card: kernels/decode/plan_step.cu, one launch per step.

A step is a message in memory that the card reads where it is: who is there, or that each has a token more, and the
pages that came. The kernel keeps the page table up to date and leaves the step for the planner.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tilewise import compiler, emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu.abi import Divisor, StageArgs
from tilewise.plan.standing import Grown

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

THREADS = 512  # decode/plan_step.cu: kStageThreads
STEP_WORDS = 4  # decode/plan_step.cu: kStepWords
MESSAGES = 8  # that the host may be ahead of the card before it waits
LATE = 64  # steps of growth after which it is written down what was sent
SPEC = KernelSpec("decode_plan_step", "decode/plan_step.cu", "decode_plan_step", (), THREADS, 0, product=True)


class Batch(NamedTuple):
    """The sequences of a step. rows (n,): theirs in the cache's arrays `table`, `counts` and `stamps` (Sequences says
    what those are). lengths (n,): in tokens. order (n,): positions in `rows`, those below a node being neighbours.
    nodes: (m, 5) as plan/flat.py has them. last_stamp: the last number that was given as a stamp. `rows`, `order` and
    `nodes` are the very arrays of the step before where they are the same. grown: what the last step did, if that is
    all that happened since the one before it. places: (2, room) int64 on the device, the positions and the index of
    each sequence's last token, to be filled in. replaced: the `rows` of an earlier step, of as many sequences, and the
    places (u,) at which this one has others."""

    rows: Longs
    lengths: Longs
    order: Ints
    nodes: Longs
    table: Ints
    counts: Longs
    stamps: Longs
    last_stamp: int
    grown: Grown | None = None
    places: torch.Tensor | None = None
    replaced: tuple[Longs, Longs] | None = None


class PageMirror:
    """Which places of a card's page table hold which sequences' pages, and how many of them were sent.

    A sequence keeps its place while it stays in the batch. A place is sent anew where its sequence's stamp changed, and
    otherwise only the pages that came at its end.
    """

    def __init__(self, rows: int) -> None:
        self._row = np.full(rows, -1, np.int64)  # of each place, in the cache
        self._stamp = np.zeros(rows, np.int64)
        self._sent = np.zeros(rows, np.int64)
        self._late: list[tuple[Longs, Longs]] = []  # places that got a page more after so many, not in `_sent` yet
        self._place = np.full(0, -1, np.int64)  # of each row of the cache
        self._rows, self._places = np.zeros(0, np.int64), np.zeros(0, np.int64)  # of the last batch
        self._last_stamp = -1

    def follow(self, batch: Batch) -> tuple[Longs, Longs, Longs, Longs]:
        """The places of the batch's sequences, (n,), the very array of the last call if the batch is the same; and for
        each of them that has to be sent: its position in the batch, its first page to send and the page up to which,
        (u,) each."""
        rows, others = batch.rows, batch.rows is not self._rows
        if self._late:
            self._settle()
        if others:
            if not self._replace(batch):
                self._places = self._find_places(rows, len(batch.table))
            self._rows = rows
        places = self._places
        counts, sent = batch.counts[rows], self._sent[places]
        # A row that joins may have been stamped while another batch was followed: the last stamp need not be new.
        if others or batch.last_stamp != self._last_stamp:
            stamps = batch.stamps[rows]
            sent[stamps != self._stamp[places]] = 0
            self._stamp[places] = stamps
            self._last_stamp = batch.last_stamp
        (update,) = (counts > sent).nonzero()
        if len(update):
            self._sent[places] = counts
        return places, update, sent[update], counts[update]

    def stands(self, batch: Batch) -> bool:
        """Whether the batch has the sequences of the last call, and none has another page than then, but at its end."""
        return batch.rows is self._rows and batch.last_stamp == self._last_stamp

    def grow(self, grown: Grown) -> Longs:
        """The places of sequences of a batch that stands, which have a page more than in the last call."""
        places = self._places[grown.at]
        self._late.append((places, grown.before))
        if len(self._late) > LATE:
            self._settle()
        return places

    def _settle(self) -> None:
        for places, before in self._late:
            self._sent[places] = before + 1
        self._late.clear()

    def _replace(self, batch: Batch) -> bool:
        """Give sequences that are new in the batch the places of those that they replaced; False if that is not all
        that is new."""
        if batch.replaced is None or batch.replaced[0] is not self._rows or len(self._place) < len(batch.table):
            return False
        at = batch.replaced[1]
        joining, places = batch.rows[at], self._places[at]
        if np.count_nonzero(self._place[joining] >= 0):  # some only changed their order, or have a row of one that left
            return False
        self._place[self._rows[at]] = -1
        self._row[places], self._place[joining] = joining, places
        self._stamp[places] = 0  # no row's: all of its pages are sent
        return True

    def _find_places(self, rows: Longs, cache_rows: int) -> Longs:
        if len(self._place) < cache_rows:
            self._place = np.append(self._place, np.full(cache_rows - len(self._place), -1, np.int64))
        places = self._place[rows]
        stays = np.zeros(len(self._row), np.bool_)
        stays[places[places >= 0]] = True
        (gone,) = (~stays & (self._row >= 0)).nonzero()
        self._place[self._row[gone]] = -1
        self._row[gone] = -1
        (new,) = (places < 0).nonzero()
        if len(new):
            free = (self._row < 0).nonzero()[0][: len(new)]
            places[new] = free
            self._row[free] = rows[new]
            self._place[rows[new]] = free
            self._stamp[free] = 0  # no row's: all of its pages are sent
        return places


class Messages:
    """Memory of the host that the card reads: messages of some words each, used in turn, larger ones on their own.

    The card notes the number of the last message that it has read, so the host sees which it may write again.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        self._device, self._words, cuda = device, words, device.type == "cuda"
        with torch.inference_mode(False):
            self.memory = torch.zeros(MESSAGES * words, dtype=torch.int32, pin_memory=cuda)
            self.seen = torch.zeros(1, dtype=torch.int64, pin_memory=cuda)
        self._slots = self.memory.numpy().reshape(MESSAGES, words)
        self._seen = self.seen.numpy()
        self._addresses = [self.memory.data_ptr() + 4 * words * n for n in range(MESSAGES)]
        self._large: list[torch.Tensor | None] = [None] * MESSAGES
        self.number = 0

    def next(self, words: int) -> tuple[Ints, int]:
        """Room for the next message, and its address."""
        self.number += 1
        turn = self.number % MESSAGES
        if self._seen[0] < self.number - MESSAGES:  # the card is far behind
            torch.cuda.synchronize(self._device)
        if words <= self._words:
            return self._slots[turn], self._addresses[turn]
        large = torch.empty(words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._large[turn] = large  # until that turn comes again
        return large.numpy(), large.data_ptr()

    def known(self) -> dict[str, torch.Tensor]:
        """The memory by names, for the emulator."""
        large = {f"message{n}": x for n, x in enumerate(self._large) if x is not None}
        return {"messages": self.memory, "seen": self.seen, **large}


class Stage:
    """Sends the steps of one list. step, pages: what the planner reads, on the list's device; pages (rows + 1, width).

    The next step may be sent before the card has read the last one.
    """

    def __init__(self, rows: int, page_size: int, step: torch.Tensor, pages: torch.Tensor) -> None:
        self._step, self._pages, self.device = step, pages, step.device
        self.mirror = PageMirror(rows)
        self.grown = -1  # the number of the last step if it was one that Batch.grown tells of
        self._head: tuple[tuple[Longs, Ints, Longs], Ints] | None = None  # of the last step, and what it was made of
        self._places: torch.Tensor | None = None  # of a step before, with its room and its address
        self._room = self._address = 0
        self._messages = Messages(32 * rows + 16384, self.device)
        self._args = a = StageArgs(step=step.data_ptr(), table=pages.data_ptr(), width=pages.shape[1])
        a.page_size, a.seen = Divisor.by(page_size), self._messages.seen.data_ptr()
        if self.device.type == "cuda":
            self._kernel = compiler.load(SPEC, self.device)
            self._launch_args = compiler.Args(a)

    def send(self, batch: Batch, **emulated: Any) -> None:
        """Bring the step and the page table up to date: one launch on the current stream, no wait.

        emulated: options of emulator.launch.
        """
        a = self._args
        self._write(batch)
        a.number, places = self._messages.number, batch.places
        if places is None:
            a.positions = a.index = a.room = 0
        else:
            if places is not self._places:  # mostly the same, step after step
                self._places, self._room, self._address = places, places.shape[1], places.data_ptr()
            a.room, a.positions, a.index = self._room, self._address, self._address + 8 * self._room
        if self.device.type == "cuda":
            self._kernel.launch((1, 1, 1), self._launch_args)
            return
        known = {"step": self._step, "pages": self._pages, **self._messages.known()}
        if places is not None:
            known["places"] = places
        emulator.launch(SPEC, (1, 1, 1), [a], known, **emulated)

    def _write(self, batch: Batch) -> None:
        """Write the message, and what the kernel's arguments say of it."""
        a, grown, known, last = self._args, batch.grown, self._head, self.grown
        self.grown = -1 if grown is None else grown.number
        if grown is not None and grown.follows == last and known is not None and self.mirror.stands(batch):
            _, order, nodes = known[0]
            if order is batch.order and nodes is batch.nodes:
                updates = a.updates = len(grown.at)
                message, a.message = self._messages.next(3 * updates)
                a.grown = 1
                if updates:
                    message[:updates] = self.mirror.grow(grown)
                    message[updates : 2 * updates] = grown.before
                    message[2 * updates : 3 * updates] = grown.pages
                return
        places, update, begin, end = self.mirror.follow(batch)
        head, count = self._head_of(batch, places), len(batch.rows)
        head[STEP_WORDS + 2 : STEP_WORDS * (1 + count) : STEP_WORDS] = batch.lengths[batch.order]
        updates, sizes = len(update), end - begin
        ends = sizes.cumsum()
        total, at_pages = int(ends[-1]) if updates else 0, len(head) + 4 * updates
        message, a.message = self._messages.next(at_pages + total)
        a.sequences, a.nodes, a.updates, a.grown = count, len(batch.nodes), updates, 0
        message[: len(head)] = head
        if not updates:
            return
        changes = message[len(head) : at_pages].reshape(4, updates)
        changes[0], changes[1], changes[2], changes[3] = places[update], begin, sizes, ends - sizes
        self._write_pages(batch, batch.rows[update], begin, sizes, ends, message[at_pages : at_pages + total])

    def _write_pages(self, batch: Batch, rows: Longs, begin: Longs, sizes: Longs, ends: Longs, pages: Ints) -> None:
        """Of each row `sizes` pages from `begin` on, up to `ends` of what is written, (u,) each."""
        table = batch.table
        if len(pages) == len(rows):
            pages[:] = table[rows, begin]
            return
        long = sizes > 1
        (ones,), (many,) = (~long).nonzero(), long.nonzero()
        if len(ones):
            pages[ends[ones] - 1] = table[rows[ones], begin[ones]]
        for row, first, size, to in zip(*(x[many].tolist() for x in (rows, begin, sizes, ends)), strict=True):
            pages[to - size : to] = table[row, first : first + size]

    def _head_of(self, batch: Batch, places: Longs) -> Ints:
        """The header, sequences and nodes of a step, all but the lengths."""
        known = self._head
        if known is None or not (known[0][0] is places and known[0][1] is batch.order and known[0][2] is batch.nodes):
            count, nodes = len(batch.rows), len(batch.nodes)
            head = np.zeros(STEP_WORDS + -(-(4 * count + 5 * nodes) // 4) * 4, np.int32)
            head[:2] = count, nodes
            sequences = head[STEP_WORDS : STEP_WORDS + 4 * count].reshape(count, 4)
            sequences[:, 0], sequences[:, 1] = batch.order, places[batch.order]
            head[STEP_WORDS + 4 * count : STEP_WORDS + 4 * count + 5 * nodes] = batch.nodes.ravel()
            known = self._head = (places, batch.order, batch.nodes), head
        return known[1]
