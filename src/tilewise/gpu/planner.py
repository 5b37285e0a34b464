"""Work lists that are made where they are used, kernels/decode/plan.cu: the memory of a standing plan.

`PlannedList` is what WorkList is to other plans: the arrays that the decode kernels walk. Its tensors are made once,
with room for any batch of so many sequences of so many tokens, and never move. `renew` sends what changed
(plan_step.py), and `make` launches the planner, once for all layers: before the first one that asks for the list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewise import compiler, emulator
from tilewise.arch import LIMITS, card_of
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu.abi import FAR, PLAN_LIMITS, Divisor, PlanArgs, PlanRoom, decode_score_rule
from tilewise.gpu.plan_step import SPEC, STEP_WORDS, Batch, Stage
from tilewise.plan.cost import MMA_STEP_CHUNKS, WHOLE_LIMITS
from tilewise.plan.items import ITEM_WORDS
from tilewise.plan.standing import StandingPlan
from tilewise.plan.worklist import CHUNK, Shape, Splitting
from tilewise.scores import Scores

# decode/plan_block.cuh: kPlanThreads, at least one per row, by the most rows that get so many. On an H200 256 rows take
# 26 to 47 µs with 512 threads, 31 to 50 with 256 and 28 to 55 with 1024; 64 rows 13 to 29 with 256, 14 to 29 with 512.
THREADS = {128: 256, 512: 512, 1024: 1024}
SCAN_BYTES = 256  # decode/plan_block.cuh: kScanBytes
MOST_KEYS = 4096  # decode/plan_work.cuh: kMostKeys
MOST_BINS = 2048  # decode/plan_work.cuh: 1 << kBinBits
UNIT = 16  # decode/plan_work.cuh: kUnit
NODE_BYTES, RANGE_BYTES = 64, 32  # decode/plan_work.cuh: PlanNode, PlanRange
TILE_ROUNDS = 64  # tile items of a block, at most: a batch that has more is not shared
CUT_PIECES = 2048  # pieces of own ranges that there is room for where ranges could as well stay whole
LEVELS = 3  # of the tree: a batch with more nodes above its sequences may find no room for their states
WINDOW_GAPS = 512  # ranges that windows, or blocks of positions, leave between nodes, at most


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
    if plan.chunk:  # what a sequence's rows see begins with a block of positions
        longest = min(longest, plan.chunk + plan.tokens_per_seq - 1)
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
    return Room(
        together=together,
        bins=bins,
        ranges=-(-rows // 2) * 2 + (WINDOW_GAPS if shares and not plan.reach.whole else 0),
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
    sizes = {"sums": 4 * 32 * 34, **dict.fromkeys(("place", "length", "caller", "under"), 4 * n), "split": 16 * n}
    sizes |= {"ranges": RANGE_BYTES * room.ranges, "nodes": NODE_BYTES * n, "loads": 8 * bins, "fresh": 8 * bins}
    sizes |= {
        **dict.fromkeys(("ranks", "skipped", "counts", "work"), 4 * bins),
        "keys": 4 * keys,
        "next": 4 * room.tiles,
    }
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


def planner_spec(rows: int, shared: int, chunk: int = 0) -> KernelSpec:
    """The planner of so many rows, with so many bytes of shared memory; chunk: as of StandingPlan."""
    threads = next(n for most, n in THREADS.items() if most >= rows)
    constants = (("kSelected", False), decode_score_rule(Scores(chunk=chunk)), ("kPlanThreads", threads))
    return KernelSpec("decode_plan", "decode/plan.cu", "decode_plan", constants, threads, shared, product=True)


def specs() -> list[KernelSpec]:
    """The planner as a batch of 256 sequences gets it, and what sends it a step."""
    shared = 64 << 10  # about as much; it changes nothing of the code
    return [planner_spec(256, shared), SPEC]


class PlannedList:
    """The list of a standing plan on one device, for decode kernels of one shape.

    items (blocks, slots, 16), tile_items (rounds, blocks, 16), order, live (rows,), states (rows, 4), pages (rows,
    pages of the longest sequence): as in WorkList, whose part it takes; tails are not used. `made` (8,): what the
    planner says of the list that it made, decode/plan_work.cuh.
    """

    tail_pages = selected_pages = 0

    def __init__(self, plan: StandingPlan, shape: Shape, splitting: Splitting, device: torch.device) -> None:
        self.shape, self.device, self.page_size = shape, device, plan.page_size
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
        self._step = zeros(STEP_WORDS + plan.rows * (4 + 5) + 8)
        self.stage = Stage(plan.rows, plan.page_size, self._step, self.pages)
        self._stale = True  # there is a batch of which no list was made
        self._capture = 0  # the last capture that makes the list
        self._layout, shared = lay_out(plan.rows, room)
        card = card_of(device)
        if shared > LIMITS[card].shared_block:
            raise NotImplementedError(
                f"standing plans on {card} take fewer than {plan.rows} rows: the planner would need {shared} bytes of "
                f"shared memory, and a block has {LIMITS[card].shared_block}; use fewer rows"
            )
        self.spec = planner_spec(plan.rows, shared, plan.chunk)
        self._args = self._arguments(plan, splitting)
        if device.type == "cuda":
            self._kernel = compiler.load(self.spec, device)
            self._launch_args = compiler.Args(self._args)

    def _arguments(self, plan: StandingPlan, splitting: Splitting) -> PlanArgs:
        shape, room = self.shape, self.room
        weights, (left, chunk) = shape.weights, plan.reach
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
            pass_bits=_bits(shape.rows),
            tile_bits=_bits(shape.tile_rows),
            tile_box=next((n for n in (64, 32, 16) if plan.page_size % n == 0), CHUNK),
            wide_rows=splitting.tile_rows if shape.tiles else FAR,
            in_turn=shape.in_turn,
            chunk_bits=_bits(shape.chunk),
            group_bits=_bits(splitting.group),
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
            fold_chunks=weights.fold_chunks,
            positions=min(chunk, FAR),
        )
        for n, (limit, size) in enumerate(splitting.pieces):
            a.limits[n], a.size_bits[n] = limit, _bits(size)
        return a

    def tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The arrays by their names."""
        assert device == self.device
        return {name: getattr(self, name) for name in ("items", "tile_items", "order", "states", "pages", "live")}

    def renew(self, batch: Batch, **emulated: Any) -> None:
        """Take up a batch: one launch on the current stream, no wait. The list is made anew by `make`.

        emulated: options of emulator.launch.
        """
        self.stage.send(batch, **emulated)
        self._stale = True

    def make(self, stream: int = 0, capturing: bool = False) -> None:
        """Make the list of the batch that `renew` took up last, unless this has been done.

        stream: a raw handle, on a card. capturing: into a graph, which then makes the list itself, in every replay and
        before whatever in it asks for the list first: so it replays over every batch.
        """
        if capturing:
            capture = compiler.capture_of(stream)
            if capture != self._capture:
                self._capture = capture
                self.launch(stream)
        elif self._stale:
            self.launch(stream)
            self._stale = False

    def launch(self, stream: int | None = None) -> None:
        """The planner, whether there is a new batch or not."""
        if self.device.type == "cuda":
            self._kernel.launch((1, 1, 1), self._launch_args, stream=stream)
            return
        known = {**self.tensors(self.device), "step": self._step, "scratch": self._scratch, "made": self.made}
        emulator.launch(self.spec, (1, 1, 1), [self._args], known)
