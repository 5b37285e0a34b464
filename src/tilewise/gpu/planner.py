"""Work lists that are made where they are used, kernels/decode/plan.cu: the memory of a standing plan.

`PlannedList` is what WorkList is to other plans: the arrays that the decode kernels walk. Its tensors are made once,
with room for any batch of so many sequences of so many tokens, and never move. `renew` sends what changed in one copy
and launches the planner, which makes the list anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tilewise import compiler, emulator
from tilewise.arch import LIMITS, card_of
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu.abi import FAR, PLAN_LIMITS, Divisor, PlanArgs, PlanRoom
from tilewise.plan.cost import MMA_STEP_CHUNKS, WHOLE_LIMITS
from tilewise.plan.items import ITEM_WORDS
from tilewise.plan.standing import Grown, StandingPlan
from tilewise.plan.worklist import CHUNK, Shape, Splitting

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

THREADS, SCAN_BYTES = 1024, 256  # decode/plan_block.cuh: kPlanThreads, kScanBytes
MOST_KEYS = 4096  # decode/plan_work.cuh: kMostKeys
MOST_BINS = 2048  # decode/plan_work.cuh: 1 << kBinBits
UNIT = 16  # decode/plan_work.cuh: kUnit
STEP_WORDS = 4  # decode/plan_work.cuh: kStepWords
NODE_BYTES, RANGE_BYTES = 64, 32  # decode/plan_work.cuh: PlanNode, PlanRange
TILE_ROUNDS = 64  # tile items of a block, at most: a batch that has more is not shared
CUT_PIECES = 2048  # pieces of own ranges that there is room for where ranges could as well stay whole
LEVELS = 3  # of the tree: a batch with more nodes above its sequences may find no room for their states
WINDOW_GAPS = 512  # ranges that windows leave between nodes, at most


class Batch(NamedTuple):
    """The sequences of a step. rows (n,): theirs in the cache's arrays `table`, `counts` and `stamps` (Sequences says
    what those are). lengths (n,): in tokens. order (n,): positions in `rows`, those below a node being neighbours.
    nodes: (m, 5) as plan/flat.py has them. last_stamp: the last number that was given as a stamp. `rows`, `order` and
    `nodes` are the very arrays of the step before where they are the same. grown: what the last step did, if that is
    all that happened since the one before it."""

    rows: Longs
    lengths: Longs
    order: Ints
    nodes: Longs
    table: Ints
    counts: Longs
    stamps: Longs
    last_stamp: int
    grown: Grown | None = None


class Room(NamedTuple):
    """What a list has room for. ranges, pieces, tiles, states: all in all, pieces of streaming warps and of tiles for
    one KV head. slots: units of a bin, of `together` heads each. tile_rounds: of a block."""

    together: int
    bins: int
    ranges: int
    pieces: int
    tiles: int
    states: int
    slots: int
    tile_rounds: int


def room_for(plan: StandingPlan, shape: Shape, splitting: Splitting) -> Room:
    """Room for any batch of the plan: what the planner falls back on always fits.

    A range that may be taken whole has one piece then, and a longer one as many as its length asks for. More room than
    that is for batches that are faster in more pieces, and for shared nodes.
    """
    heads, rows, longest = plan.heads_kv, plan.rows, plan.max_length
    rows_each = plan.tokens_per_seq * (plan.heads_q // heads)
    passes = -(-rows_each // shape.rows)
    together = shape.warps if heads % shape.warps == 0 and rows * heads * passes > shape.blocks else 1
    bins = shape.blocks * (1 if together > 1 or shape.tiles else shape.warps)
    limits = (0, *(limit for limit, _ in splitting.pieces))
    # A range may begin in the middle of a chunk.
    most = max(
        -(-min(longest, limit) // max(size, shape.chunk)) + 1
        for below, (limit, size) in zip(limits, splitting.pieces, strict=False)
        if longest > below
    )
    least = 1 if -(-longest // CHUNK) + 1 <= shape.longest else most
    own = max(rows * least, min(rows * most, CUT_PIECES))
    shares = plan.share is not False
    pieces = own * passes + (4 * shape.blocks + 2 * rows if shares else 0)
    # Nodes are cut into even shares, so that all of their pieces together leave states for about so many rows; a few
    # more for each level of the tree, of which most have three or fewer.
    node_states = -(-shape.tile_rows * shape.blocks // (rows_each * heads)) + 2 * LEVELS * rows
    states = own + (node_states if shares else 0)
    rounds = TILE_ROUNDS if shape.tiles else 0
    each = -(-pieces * (heads // together) // bins)
    windowed = plan.window is not None and plan.window[0] is not None
    return Room(
        together=together,
        bins=bins,
        ranges=-(-rows // 2) * 2 + (WINDOW_GAPS if windowed and shares else 0),
        pieces=pieces,
        tiles=min(MOST_KEYS, rounds * shape.blocks // heads),
        states=states,
        slots=2 * each + 8,
        tile_rounds=rounds,
    )


def lay_out(rows: int, room: Room) -> tuple[PlanRoom, int]:
    """Where the planner's block has what in its shared memory, and how many bytes all of it takes."""
    n, bins = -(-rows // 4) * 4, -(-room.bins // 2) * 2
    keys = min(MOST_KEYS, _power_of_two(max(room.pieces, room.tiles)))
    sizes = {"sums": 4 * 32 * 33, **dict.fromkeys(("place", "length", "caller", "under"), 4 * n), "split": 16 * n}
    sizes |= {"ranges": RANGE_BYTES * room.ranges, "nodes": NODE_BYTES * n, "loads": 8 * bins, "fresh": 8 * bins}
    sizes |= {**dict.fromkeys(("ranks", "counts", "work"), 4 * bins), "keys": 4 * keys, "next": 4 * room.tiles}
    found, end = PlanRoom(), SCAN_BYTES
    for name, size in sizes.items():
        setattr(found, name, end)
        end += size
    return found, end


def _power_of_two(count: int) -> int:
    return max(32, 1 << (count - 1).bit_length())


def _bits(size: int) -> int:
    """Of a power of two."""
    assert size & (size - 1) == 0, size
    return size.bit_length() - 1


def planner_spec(shared: int) -> KernelSpec:
    """The planner, with so many bytes of shared memory."""
    constants = (("kSelected", False),)
    return KernelSpec("decode_plan", "decode/plan.cu", "decode_plan", constants, THREADS, shared, product=True)


def specs() -> list[KernelSpec]:
    """The planner as a batch of 256 sequences gets it."""
    shared = 64 << 10  # about as much; it changes nothing of the code
    return [planner_spec(shared)]


class PageMirror:
    """Which places of a card's page table hold which sequences' pages, and how many of them were sent.

    A sequence keeps its place while it stays in the batch. A place is sent anew where its sequence's stamp changed, and
    otherwise only the pages that came at its end.
    """

    def __init__(self, rows: int) -> None:
        self._row = np.full(rows, -1, np.int64)  # of each place, in the cache
        self._stamp = np.zeros(rows, np.int64)
        self._sent = np.zeros(rows, np.int64)
        self._place = np.full(0, -1, np.int64)  # of each row of the cache
        self._rows, self._places = np.zeros(0, np.int64), np.zeros(0, np.int64)  # of the last batch
        self._last_stamp = -1

    def follow(self, batch: Batch) -> tuple[Longs, Longs, Longs, Longs]:
        """The places of the batch's sequences, (n,), the very array of the last call if the batch is the same; and for
        each of them that has to be sent: its position in the batch, its first page to send and the page up to which,
        (u,) each."""
        rows = batch.rows
        if rows is not self._rows:
            self._places, self._rows = self._find_places(rows, len(batch.table)), rows
        places = self._places
        counts, sent = batch.counts[rows], self._sent[places]
        if batch.last_stamp != self._last_stamp:
            stamps = batch.stamps[rows]
            changed = stamps != self._stamp[places]
            sent[changed] = 0
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
        self._sent[places] = grown.before + 1
        return places

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


def _lengths_of(head: Ints, count: int) -> Ints:
    """A view: where the header of a step has the lengths of its `count` sequences, decode/plan_work.cuh."""
    return head[STEP_WORDS + 2 : STEP_WORDS * (1 + count) : STEP_WORDS]


class PlannedList:
    """The list of a standing plan on one device, for decode kernels of one shape.

    items (blocks, slots, 16), tile_items (rounds, blocks, 16), order, live (rows,), states (rows, 4), pages (rows,
    pages of the longest sequence): as in WorkList, whose part it takes; tails are not used. `made` (8,): what the
    planner says of the list that it made, decode/plan_work.cuh.
    """

    tail_pages = selected_pages = 0

    def __init__(self, plan: StandingPlan, shape: Shape, splitting: Splitting, device: torch.device) -> None:
        self.plan, self.shape, self.device, self.page_size = plan, shape, device, plan.page_size
        self.room = room = room_for(plan, shape, splitting)
        self.sequences, self.blocks, self.total_states = plan.rows, shape.blocks, room.states
        self.in_step = not shape.tiles and room.together > 1
        self._rows_each = plan.tokens_per_seq * (plan.heads_q // plan.heads_kv)
        width = -(-plan.max_length // plan.page_size)
        each = room.together if shape.tiles else shape.warps
        units = max(room.pieces * (plan.heads_kv // room.together), room.tiles * plan.heads_kv)

        def zeros(*size: int) -> torch.Tensor:
            with torch.inference_mode(False):  # so that renew() may write to it under either mode
                return torch.zeros(size, dtype=torch.int32, device=device)

        self.items = zeros(shape.blocks, room.slots * each, ITEM_WORDS)
        self.tile_items = zeros(room.tile_rounds, shape.blocks, ITEM_WORDS)
        self.order, self.states, self.live = zeros(plan.rows), zeros(plan.rows, 4), zeros(plan.rows)
        self.pages = zeros(plan.rows + 1, width)  # a row more: kernels fetch ahead
        self.made = zeros(8)
        self._scratch = zeros(room.bins + shape.blocks + units)
        self._step = zeros(STEP_WORDS + plan.rows * (4 + 5 + 4 + width) + 8)
        self._mirror = PageMirror(plan.rows)
        self._numbers = np.arange(plan.rows, dtype=np.int32)
        self._grown = -1  # the number of the last step if it was one that Batch.grown tells of
        self._head: tuple[tuple[Longs, Ints, Longs], Ints] | None = None  # of the last step, and what it was made of
        self._layout, shared = lay_out(plan.rows, room)
        card = card_of(device)
        if shared > LIMITS[card].shared_block:
            raise NotImplementedError(
                f"standing plans on {card} take fewer than {plan.rows} rows: the planner would need {shared} bytes of "
                f"shared memory, and a block has {LIMITS[card].shared_block}; use fewer rows"
            )
        self.spec = planner_spec(shared)
        self._args = self._arguments(splitting)
        if device.type == "cuda":
            self._kernel = compiler.load(self.spec, device)
            self._launch_args = compiler.Args(self._args)

    def _arguments(self, splitting: Splitting) -> PlanArgs:
        plan, shape, room = self.plan, self.shape, self.room
        weights, left = shape.weights, plan.window[0] if plan.window is not None else None
        if len(splitting.pieces) != PLAN_LIMITS or len(WHOLE_LIMITS) != PLAN_LIMITS:
            raise AssertionError(f"the planner takes {PLAN_LIMITS} sizes of pieces, got {splitting.pieces}")
        a = PlanArgs(
            step=self._step.data_ptr(),
            table=self.pages.data_ptr(),
            items=self.items.data_ptr(),
            tile_items=self.tile_items.data_ptr(),
            order=self.order.data_ptr(),
            lengths=self.live.data_ptr(),
            states=self.states.data_ptr(),
            used=self._scratch.data_ptr(),
            placed=self._scratch.data_ptr() + 4 * (room.bins + shape.blocks),
            made=self.made.data_ptr(),
            rows=plan.rows,
            width=self.pages.shape[1],
            page_size=Divisor.by(plan.page_size),
            tokens=plan.tokens_per_seq,
            left=FAR if left is None else min(left, FAR),
            heads=Divisor.by(plan.heads_kv),
            rows_each=Divisor.by(self._rows_each),
            together=room.together,
            blocks=Divisor.by(shape.blocks),
            warps=shape.warps,
            joiners=shape.joiners,
            slots=room.slots,
            tile_rounds=room.tile_rounds,
            pass_rows=shape.rows,
            tile_rows=shape.tile_rows,
            tile_box=next((n for n in (64, 32, 16) if plan.page_size % n == 0), CHUNK),
            wide_rows=splitting.tile_rows if shape.tiles else FAR,
            in_turn=shape.in_turn,
            chunk_bits=_bits(shape.chunk),
            longest=shape.longest,
            shared_tokens=splitting.shared,
            item_cost=round(UNIT * weights.item_chunks),
            step_cost=round(UNIT * (MMA_STEP_CHUNKS if shape.in_turn else weights.step_chunks)),
            max_ranges=room.ranges,
            max_pieces=room.pieces,
            max_tiles=room.tiles,
            max_states=room.states,
            bins=room.bins,
            groups=Divisor.by(plan.heads_kv // room.together),
            passes=Divisor.by(-(-self._rows_each // shape.rows)),
            room=self._layout,
            item_chunks=weights.item_chunks,
            state_chunks=weights.state_chunks,
            sprint=weights.sprint,
        )
        for n, (limit, size) in enumerate(splitting.pieces):
            a.limits[n], a.size_bits[n] = limit, _bits(size)
        return a

    def tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The arrays by their names."""
        assert device == self.device
        return {name: getattr(self, name) for name in ("items", "tile_items", "order", "states", "pages", "live")}

    def renew(self, batch: Batch, **emulated: Any) -> None:
        """Make this the list of a batch: one copy to the device and one launch on the current stream, no wait.

        emulated: options of emulator.launch.
        """
        if self.device.type != "cuda":
            self._fill(batch, lambda words: self._step.numpy()[:words])
            known = {**self.tensors(self.device), "step": self._step, "scratch": self._scratch, "made": self.made}
            emulator.launch(self.spec, (1, 1, 1), [self._args], known, **emulated)
            return
        # New pinned memory in each call: torch does not hand it out again before the copy is done.
        staged: list[torch.Tensor] = []

        def pinned(words: int) -> Ints:
            staged.append(torch.empty(words, dtype=torch.int32, device="cpu", pin_memory=True))
            return staged[0].numpy()

        self._fill(batch, pinned)
        self._step[: staged[0].numel()].copy_(staged[0], non_blocking=True)
        self._kernel.launch((1, 1, 1), self._launch_args, stream=compiler.raw_stream(self._kernel.ordinal))

    def _fill(self, batch: Batch, buffer: Callable[[int], Ints]) -> None:
        """Write the step, decode/plan_work.cuh's PlanArgs.step, into `buffer(words)`."""
        grown, known, last = batch.grown, self._head, self._grown
        self._grown = -1 if grown is None else grown.number
        if grown is not None and grown.follows == last and known is not None and self._mirror.stands(batch):
            (_, order, nodes), head = known
            if order is batch.order and nodes is batch.nodes:
                self._fill_grown(grown, head, buffer)
                return
        places, update, begin, end = self._mirror.follow(batch)
        head = self._head_of(batch, places)
        _lengths_of(head, len(batch.rows))[:] = batch.lengths[batch.order]
        updates = head[2] = len(update)
        if not updates:
            buffer(len(head))[:] = head
            return
        sizes = end - begin
        ends = np.cumsum(sizes)
        total, at_pages = int(ends[-1]), len(head) + 4 * updates
        step = buffer(at_pages + total)
        step[: len(head)] = head
        changes = step[len(head) : at_pages].reshape(updates, 4)
        changes[:, 0], changes[:, 1], changes[:, 2], changes[:, 3] = places[update], begin, sizes, ends - sizes
        pages, rows = step[at_pages:], batch.rows[update]
        if total == updates:
            pages[:total] = batch.table[rows, begin]
            return
        long = sizes > 1
        (ones,), (many,) = (~long).nonzero(), long.nonzero()
        pages[ends[ones] - 1] = batch.table[rows[ones], begin[ones]]
        spans = (x[many].tolist() for x in (rows, begin, end, ends))
        for row, first, last, to in zip(*spans, strict=True):
            pages[to - (last - first) : to] = batch.table[row, first:last]

    def _fill_grown(self, grown: Grown, head: Ints, buffer: Callable[[int], Ints]) -> None:
        """The step after the last one, all of whose sequences grew by a token, and some by a page."""
        updates, at_changes = len(grown.at), len(head)
        lengths = _lengths_of(head, int(head[0]))
        lengths += 1
        head[2] = updates
        step = buffer(at_changes + 5 * updates)
        step[:at_changes] = head
        if updates:
            changes = step[at_changes:-updates].reshape(updates, 4)
            changes[:, 0], changes[:, 1] = self._mirror.grow(grown), grown.before
            changes[:, 2], changes[:, 3] = 1, self._numbers[:updates]
            step[-updates:] = grown.pages

    def _head_of(self, batch: Batch, places: Longs) -> Ints:
        """The header, sequences and nodes of a step, all but the lengths and the number of updates."""
        made_of = (places, batch.order, batch.nodes)
        if self._head is None or any(a is not b for a, b in zip(self._head[0], made_of, strict=True)):
            count, nodes = len(batch.rows), len(batch.nodes)
            head = np.zeros(STEP_WORDS + -(-(4 * count + 5 * nodes) // 4) * 4, np.int32)
            head[:2] = count, nodes
            sequences = head[STEP_WORDS : STEP_WORDS + 4 * count].reshape(count, 4)
            sequences[:, 0], sequences[:, 1] = batch.order, places[batch.order]
            head[STEP_WORDS + 4 * count : STEP_WORDS + 4 * count + 5 * nodes] = batch.nodes.ravel()
            self._head = made_of, head
        return self._head[1]
