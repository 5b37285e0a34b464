"""A DecodePlan as the arrays that kernels/decode/decode.cu walks: items that are cut, numbered and dealt out to blocks.

Sequences stand in the plan's order. Their query rows under one KV head are counted on through neighbours, so the rows
of a shared node are a range, which is taken in passes of as many rows as a body holds. How a sequence's own range is
cut depends on its own length alone, never on the batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tilewise.plan.tiles import DecodePlan, PagedTiles

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class PageLists(Protocol):
    """The pages of each sequence, in the caller's order."""

    def __getitem__(self, n: int, /) -> Ints: ...


CHUNK = 16  # decode/load.cuh: tokens that come together, if no more do; the unit of what follows
ITEM_WORDS = 16  # decode/work.cuh: of a DecodeItem, and its ItemKind
OWN, ALL_SEE, GOES_ON = 1, 2, 4
TILE_ROWS, TILE_TOKENS = 128, 64  # decode/tile.cuh: of an item, of a step
# What an item costs a warp beside its chunks, and a state on its way out and back, in chunks: measured on an H200.
ITEM_CHUNKS, STATE_CHUNKS = 1.0, 0.5
# What a step of tiles takes, in chunks of a streaming warp.
STEP_CHUNKS = 1.0
# A node that continues another's rows saves a state, but both are then one block's: up to so many times its even share.
CHAIN_SHARE = 1.25
# How much faster than its even share of the bandwidth a warp can be, when others have nothing to do.
SPRINT = 3.5
# Longer ranges are cut: with rings of two chunks a warp of 16384 tokens loses 5%, and of longer ones still it would
# fold more pieces than merging folds in one run, so that bits would depend on who did it.
WHOLE_CHUNKS, DEEP_CHUNKS = 512, 1024
FAR = 1 << 30


@dataclass(frozen=True)
class Splitting:
    """How token ranges are cut.

    A sequence's own range is computed in pieces of a size that depends on its own length alone: (up to this length,
    tokens a piece), the first that fits. A warp takes a piece, or the whole range piece by piece, which gives the same
    bits; whole: which of the two, None for whatever fills the warps best. Shared nodes: equal pieces of at least
    `shared` tokens, so many that the blocks have even work. tile_rows: from so many rows on a node goes through tiles.
    """

    pieces: tuple[tuple[int, int], ...] = ((256, 256), (1024, 64), (2048, 128), (8192, 512), (FAR, 1024))
    shared: int = 512
    tile_rows: int = 32
    whole: bool | None = None

    def of(self, tokens: Longs) -> Longs:
        """Tokens of a piece for ranges of so many."""
        limits, sizes = (np.array(x, np.int64) for x in zip(*self.pieces, strict=True))
        found: Longs = sizes[np.searchsorted(limits, np.minimum(tokens, limits[-1]))]
        return found


class Shape(NamedTuple):
    """Of the kernel: rows of a stream item, streaming warps of a block, blocks, whether it has tiles; sixteens of
    tokens of a range that a warp takes whole, at most; warps of a block that stream when their tiles are done; and
    tokens that come together."""

    rows: int
    warps: int
    blocks: int
    tiles: bool
    longest: int = WHOLE_CHUNKS
    joiners: int = 0
    chunk: int = CHUNK


class Node(NamedTuple):
    """Tokens [start, stop) that `sequences` from `first` on share."""

    first: int
    sequences: int
    start: int
    stop: int


class Own(NamedTuple):
    """Sequences' own ranges, (n,) each: [start, stop) with room to grow, `planned` being the stop without it."""

    sequence: Longs
    start: Longs
    stop: Longs
    planned: Longs


@dataclass
class WorkList:
    """A plan as arrays; decode/work.cuh says what they hold.

    items (blocks, slots, 16), tile_items (rounds, blocks, 16); live: lengths (n,) and tails
    (n, tail_pages), which grow() renews; tail_from (n,): the number of the first page in a tail; capacity (n,): the
    lengths up to which the list serves; total_states: of all sequences that have more than one; in_step: a block's
    warps have the same tokens of neighbouring heads, round by round.
    """

    items: Ints
    tile_items: Ints
    order: Ints
    states: Ints  # (n, 4)
    pages: Ints  # (n, table_pages)
    live: Ints
    tail_from: Ints  # (n,)
    tail_pages: int
    page_size: int
    capacity: Longs
    total_states: int
    in_step: bool
    _on_device: dict[torch.device, dict[str, torch.Tensor]] = field(default_factory=dict, repr=False)

    @property
    def sequences(self) -> int:
        return len(self.order)

    @property
    def blocks(self) -> int:
        return int(self.items.shape[0])

    @property
    def lengths(self) -> Ints:
        return self.live[: self.sequences]

    @property
    def tails(self) -> Ints:
        """(n, tail_pages): a sequence's pages from tail_from on."""
        return self.live[self.sequences :].reshape(self.sequences, self.tail_pages)

    def grow(self, lengths: npt.ArrayLike, page_lists: PageLists | None = None) -> None:
        """Take the sequences' new lengths and last pages, in the caller's order; the list itself stays as it is.

        page_lists: needed where a sequence got pages since the last time; others' lists are not looked at. Then one
        copy to the device, on the current stream, without a wait. Raises ValueError for a length that the list has no
        room for or that is smaller than it was; then nothing has changed.
        """
        now = self.check_growth(lengths)
        if page_lists is not None:
            tails, size = self.tails, self.page_size
            counts = -(-now // size)
            for n in np.flatnonzero(counts > -(-self.lengths // size)).tolist():
                tail = page_lists[int(self.order[n])][int(self.tail_from[n]) : int(counts[n])]
                tails[n, : len(tail)] = tail
        self.lengths[:] = now
        for device, tensors in self._on_device.items():
            if device.type == "cuda":
                # Fresh pinned memory each time: torch hands it out again only when the copy is done.
                staged = torch.empty(len(self.live), dtype=torch.int32, pin_memory=True)
                staged.numpy()[:] = self.live
                tensors["live"].copy_(staged, non_blocking=True)

    def check_growth(self, lengths: npt.ArrayLike) -> Longs:
        """The lengths in the plan's order. Raises ValueError for one that the list does not serve."""
        now = np.asarray(lengths, np.int64)[self.order]
        if (now > self.capacity).any() or (now < self.lengths).any():
            raise ValueError(
                f"lengths must be from {self.lengths.tolist()[:8]} to {self.capacity.tolist()[:8]} (in the plan's "
                f"order), got {now.tolist()[:8]}; make a new plan"
            )
        return now

    def tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The arrays on a device; on a CPU they are these arrays themselves."""
        found = self._on_device.get(device)
        if found is None:
            names = ("items", "tile_items", "order", "states", "pages", "live")
            found = {name: torch.from_numpy(getattr(self, name)) for name in names}
            if device.type == "cuda":
                found = {name: x.pin_memory().to(device, non_blocking=True) for name, x in found.items()}
            self._on_device[device] = found
        return found


def work_list(
    plan: DecodePlan,
    page_lists: PageLists,
    lengths: Sequence[int],
    page_size: int,
    shape: Shape,
    *,
    splitting: Splitting | None = None,
    room: int = 0,
) -> WorkList:
    """The list of a plan; page_lists and lengths in the order of plan.seqs. room: tokens each may yet grow by."""
    splitting = splitting or Splitting()
    count, heads = len(plan.order), plan.heads_kv
    rows_each = plan.tokens_per_seq * (plan.heads_q // heads)
    order = np.ascontiguousarray(plan.order, np.int32)
    length = np.array([lengths[n] for n in order], np.int64)
    states = np.zeros(count, np.int64)  # of each sequence, so far
    nodes, own = _ranges(plan, length, room)

    tiled = Tiled(rows_each, _even_share(nodes, rows_each, heads, shape, splitting), plan.window is None)
    passed: list[Longs] = []  # pieces that streaming warps take pass by pass
    for node, size in zip(nodes, _node_pieces(nodes, rows_each, heads, shape, splitting), strict=True):
        by_tiles = _by_tiles(node, rows_each, shape, splitting)
        step = TILE_TOKENS if by_tiles else shape.chunk
        begins = np.arange(node.start // step * step, node.stop, size)
        members = slice(node.first, node.first + node.sequences)
        state = int(states[node.first])  # the same of all of them: what lies above the node is shared by all
        kind = ALL_SEE if node.stop <= length[members].min() - plan.tokens_per_seq + 1 else 0
        if by_tiles:
            state -= tiled.add(node, begins, size, state, kind)
        else:
            passed.append(_node_items(node, begins, size, state, kind, rows_each, shape.rows))
        states[members] = state + len(begins)
    sizes = np.maximum(splitting.of(own.planned - own.start), shape.chunk)
    whole = _whole(own, sizes, heads * -(-rows_each // shape.rows), shape, splitting.whole)
    begun = own.start // shape.chunk * shape.chunk
    parts = np.where(whole, 1, np.maximum(1, -(-(own.stop - begun) // sizes)))
    passed.append(_own_items(own, sizes, parts, whole, states, rows_each, shape))

    # The range that grows is a sequence's last; what its states are before that does not change, nor is a whole one's.
    ends = (own.planned == length[own.sequence]) & ~whole
    fixed, begins, piece = states.copy(), np.full(count, FAR), np.full(count, FAR)
    np.add.at(states, own.sequence, parts)
    np.add.at(fixed, own.sequence[~ends], parts[~ends])
    begins[own.sequence[ends]] = begun[ends]
    piece[own.sequence[ends]] = sizes[ends]
    bases = np.concatenate([[0], np.cumsum(np.where(states > 1, states, 0))])

    states_of = np.stack([bases[:-1], fixed, begins, piece], 1).astype(np.int32)
    pages, live, tail_from, tail_pages = _tables(page_lists, order, length, page_size, room)
    of_sequence = Sequences(order, states_of, pages, tail_from, page_size, shape.chunk)
    items = _headed(np.concatenate(passed, axis=1), heads, rows_each, of_sequence)
    stop = np.minimum(items[:, 6], length[items[:, 4]])  # without the room to grow
    chunks = np.maximum(0, -(-(stop - items[:, 5] // CHUNK * CHUNK) // CHUNK))
    tiles = _headed(np.concatenate([*tiled.parts, np.zeros((9, 0), np.int64)], axis=1), heads, rows_each, of_sequence)
    tiles[:, 10:14] = _first_pages(tiles, of_sequence)
    blocks = max(1, min(shape.blocks, max(len(items), len(tiles))))
    tile_items = _deal_chains(tiles, tiled.chains(heads), blocks)
    if shape.tiles:
        busy = (-(-(tile_items[..., 6] - tile_items[..., 5]) // TILE_TOKENS) * STEP_CHUNKS).sum(0)
        dealt = _deal_beside(items, chunks, heads, shape, busy)
    else:
        dealt = _deal_warps(items, chunks, heads, blocks, shape.warps)
    return WorkList(
        items=dealt,
        tile_items=tile_items,
        order=order,
        states=states_of,
        pages=pages,
        live=live,
        tail_from=tail_from,
        tail_pages=tail_pages,
        page_size=page_size,
        capacity=length + room,
        total_states=int(bases[-1]),
        in_step=not shape.tiles and _in_step(len(items), heads, blocks, shape.warps),
    )


def uses_tiles(plan: DecodePlan, splitting: Splitting | None = None) -> bool:
    """Has the plan a node that is worth tiles?"""
    least = (splitting or Splitting()).tile_rows
    group = plan.heads_q // plan.heads_kv
    return any(tile.rows > plan.tokens_per_seq and tile.rows * group >= least for tile in plan.work)


def _by_tiles(node: Node, rows_each: int, shape: Shape, splitting: Splitting) -> bool:
    return shape.tiles and node.sequences * rows_each >= splitting.tile_rows


def _ranges(plan: DecodePlan, length: Longs, room: int) -> tuple[list[Node], Own]:
    """Shared nodes and own ranges. A sequence that has no work at all, or with `room` no range at its end, gets one."""
    tokens = plan.tokens_per_seq
    nodes, own = [], []
    ended, covered = np.zeros(len(length), np.bool_), np.zeros(len(length), np.bool_)
    for tile in plan.work:
        assert isinstance(tile, PagedTiles)
        first = tile.row // tokens
        if tile.rows > tokens:
            node = Node(first, tile.rows // tokens, tile.start, tile.stop)
            covered[node.first : node.first + node.sequences] = True
            nodes.append(node)
            continue
        members = np.arange(first, first + len(tile.pages))
        last = tile.stop == length[members]
        ended[members] |= last
        covered[members] = True
        own.append(np.stack(np.broadcast_arrays(members, tile.start, tile.stop + room * last, tile.stop)))
    missing = np.flatnonzero(~(ended if room else covered))
    own.append(np.stack([missing, length[missing], length[missing] + room, length[missing]]))
    return nodes, Own(*np.concatenate(own, axis=1).astype(np.int64))


def _even_share(
    nodes: list[Node], rows_each: int, heads: int, shape: Shape, splitting: Splitting, by_tiles: bool = True
) -> float:
    """Tokens of a pass that each block would have of the nodes that one of the bodies takes."""
    most = TILE_ROWS if by_tiles else shape.rows
    work = sum(
        (n.stop - n.start) * -(-n.sequences * rows_each // most)
        for n in nodes
        if _by_tiles(n, rows_each, shape, splitting) == by_tiles
    )
    return max(splitting.shared, work * heads / shape.blocks)


def _node_pieces(nodes: list[Node], rows_each: int, heads: int, shape: Shape, splitting: Splitting) -> list[int]:
    """Tokens of a piece of each node: equal ones, about as many in all as there are blocks, for each of the bodies."""
    shares = [_even_share(nodes, rows_each, heads, shape, splitting, tiled) for tiled in (False, True)]
    found = []
    for node in nodes:
        share = shares[_by_tiles(node, rows_each, shape, splitting)]
        tokens = node.stop - node.start
        pieces = max(1, int(tokens / share + 1e-9))
        found.append(-(-tokens // (pieces * TILE_TOKENS)) * TILE_TOKENS)
    return found


class Tiled:
    """Pieces of nodes that go through tiles. A node whose passes are those of the node above it continues them: its
    first piece begins with the rows as the last one above left them, and they are one state; if all rows see all of it,
    and both together are not much more than a block's share."""

    def __init__(self, rows_each: int, share: float, chaining: bool) -> None:
        self.rows_each, self.share, self.chaining = rows_each, share, chaining
        self.parts: list[Longs] = []  # as _node_items makes them
        self._count = 0
        # The last node and those above it, where their last pieces stand, and of how many tokens these are
        self._above: list[tuple[Node, int, int]] = []
        self._before: dict[int, int] = {}  # the piece that a piece continues

    def add(self, node: Node, begins: Longs, size: int, state: int, kind: int) -> int:
        """The next node, parents before children; 1 if it continues the one above, and so has a state less, else 0."""
        while self._above and node.first >= self._above[-1][0].first + self._above[-1][0].sequences:
            self._above.pop()
        above = self._above[-1] if self._above and kind & ALL_SEE and self.chaining else None
        tokens = min(size, node.stop - int(begins[0]))
        if above and not (self._continues(node, above[0]) and above[2] + tokens <= CHAIN_SHARE * self.share):
            above = None
        made = _node_items(node, begins, size, state - (above is not None), kind, self.rows_each, TILE_ROWS)
        passes = made.shape[1] // len(begins)
        if above is not None:
            first = above[1] + (node.first - above[0].first) * self.rows_each // TILE_ROWS
            self._before |= {self._count + n: first + n for n in range(passes)}
        last = node.stop - int(begins[-1]) + (above[2] if above is not None and len(begins) == 1 else 0)
        self._above.append((node, self._count + made.shape[1] - passes, last))
        self._count += made.shape[1]
        self.parts.append(made)
        return int(above is not None)

    def _continues(self, node: Node, above: Node) -> bool:
        ahead = (node.first - above.first) * self.rows_each
        end, end_above = node.first + node.sequences, above.first + above.sequences
        return (
            node.start == above.stop
            and ahead % TILE_ROWS == 0
            and (node.sequences * self.rows_each % TILE_ROWS == 0 or end == end_above)
        )

    def chains(self, heads: int) -> list[list[int]]:
        """Of all heads' items, those that follow each other in one block."""
        after = {b: a for a, b in self._before.items()}
        found = []
        for n in range(self._count):
            if n not in self._before:
                chain = [n]
                while chain[-1] in after:
                    chain.append(after[chain[-1]])
                found += [[m * heads + h for m in chain] for h in range(heads)]
        return found


def _node_items(node: Node, begins: Longs, size: int, state: int, kind: int, rows_each: int, most: int) -> Longs:
    """(9, n): sequence, row, rows, table, start, stop, state, fold, kind; passes of `most` rows over each piece."""
    rows = node.sequences * rows_each
    row = np.arange(0, rows, most)
    made = np.zeros((9, len(begins), len(row)), np.int64)
    made[0] = made[3] = node.first
    made[1], made[2] = row, np.minimum(most, rows - row)
    made[4], made[5] = np.maximum(begins, node.start)[:, None], np.minimum(begins + size, node.stop)[:, None]
    made[6] = (state + np.arange(len(begins)))[:, None]
    made[8] = kind
    return made.reshape(9, -1)


def _whole(own: Own, sizes: Longs, times: int, shape: Shape, asked: bool | None) -> Flags:
    """Which ranges a warp takes whole; each is there `times` times, for heads and passes.

    Ranges up to some length, the rest in pieces: the length by which memory, or the busiest warp, is done first.
    """
    chunks = -(-(own.planned - own.start // CHUNK * CHUNK) // CHUNK)
    pieces = np.maximum(1, -(-chunks // (sizes // CHUNK)))
    if asked is not None:
        return np.full(len(chunks), asked)
    best, warps = np.inf, shape.blocks * shape.warps
    found: Flags = pieces == 1
    for limit in (0, 64, 128, 256, 512, shape.longest):
        taken = (chunks <= limit) | (pieces == 1)
        items = np.where(taken, 1, pieces)
        memory = (chunks + items * ITEM_CHUNKS + np.where(taken, 0, pieces) * STATE_CHUNKS).sum() * times / warps
        longest = np.where(taken, chunks, sizes // CHUNK).max(initial=0) + ITEM_CHUNKS
        cost = max(memory, longest / SPRINT)
        if cost < best:
            best, found = cost, taken
    return found


def _own_items(own: Own, size: Longs, parts: Longs, whole: Flags, states: Longs, rows_each: int, shape: Shape) -> Longs:
    """The same of own ranges, each in `parts` pieces or whole; a sequence's ranges stand in order."""
    before = np.zeros(len(own.sequence), np.int64)  # states of its earlier ranges: few have more than one
    if len(np.unique(own.sequence)) != len(own.sequence):
        taken: dict[int, int] = {}
        for n, s in enumerate(own.sequence.tolist()):
            before[n] = taken.get(s, 0)
            taken[s] = int(before[n]) + int(parts[n])
    index = np.repeat(np.arange(len(own.sequence)), parts)
    number = np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)  # of a piece in its range
    begin = own.start[index] // shape.chunk * shape.chunk + number * size[index]
    row = np.arange(0, rows_each, shape.rows)
    made = np.zeros((9, len(index), len(row)), np.int64)
    made[0] = made[3] = own.sequence[index][:, None]
    made[1], made[2] = row, np.minimum(shape.rows, rows_each - row)
    made[4] = np.maximum(begin, own.start[index])[:, None]
    stop = np.where(whole[index], own.stop[index], np.minimum(begin + size[index], own.stop[index]))
    made[5] = stop[:, None]
    made[6] = (states[own.sequence[index]] + before[index] + number)[:, None]
    made[7] = np.where(whole[index], size[index] // shape.chunk, 0)[:, None]
    made[8] = OWN
    return made.reshape(9, -1)


class Sequences(NamedTuple):
    """What an item is told of its sequence."""

    order: Ints
    states: Ints  # (n, 4)
    pages: Ints
    tail_from: Ints
    page_size: int
    chunk: int


def _headed(parts: Longs, heads: int, rows_each: int, of: Sequences) -> Longs:
    """(n · heads, 16): DecodeItems, one for each KV head."""
    sequence, row, rows, table, start, stop, state, fold, kind = parts
    sequence, row = sequence + row // rows_each, row % rows_each
    # The pages of the first chunk's sixteens of tokens, unless one stands in the tail, which a step may replace.
    begin, tail_from = start // of.chunk * of.chunk, of.tail_from[table].astype(np.int64)
    number, second = begin // of.page_size, (begin + of.chunk - CHUNK) // of.page_size
    last = of.pages.shape[1] - 1
    page = np.where(second < tail_from, of.pages[table, np.minimum(number, last)], -1)
    second_page = np.where(second < tail_from, of.pages[table, np.minimum(second, last)], -1)
    caller_head = of.order[sequence].astype(np.int64) << 12
    words = [sequence, row, rows, caller_head, table, start, stop, state << 16 | fold, page, tail_from]
    made = np.stack([*words, *of.states[sequence].T.astype(np.int64), kind, second_page], -1)
    made = np.repeat(made, heads, axis=0)
    made[:, 3] += np.tile(np.arange(heads), parts.shape[1])
    return made


def _first_pages(tiles: Longs, of: Sequences) -> Longs:
    """(n, 4): the pages that the copies for an item's first tile take, −1 for one that stands in the tail."""
    box = next((n for n in (64, 32, 16) if of.page_size % n == 0), CHUNK)
    token = tiles[:, 5, None] // TILE_TOKENS * TILE_TOKENS + box * np.arange(4)
    number = token // of.page_size
    page = of.pages[tiles[:, 4, None], np.minimum(number, of.pages.shape[1] - 1)]
    return np.where(number < tiles[:, 9, None], page, -1).astype(np.int64)


def _in_step(items: int, heads: int, blocks: int, warps: int) -> bool:
    """Do neighbouring heads of a piece go to one block?"""
    return heads % warps == 0 and items > blocks


def _deal_warps(items: Longs, chunks: Longs, heads: int, blocks: int, warps: int) -> Ints:
    """(blocks, slots, 16), in which a warp has every `warps`-th slot. Few items go to different blocks.

    Of many, neighbouring heads of a piece go to one block, whose warps then ask for neighbouring bytes at about the
    same time: that is worth 2 to 3% of the bandwidth.
    """
    if not _in_step(len(items), heads, blocks, warps):
        dealt = _deal(items, chunks, blocks * warps).reshape(-1, warps, blocks, ITEM_WORDS).transpose(2, 0, 1, 3)
    else:
        together = _deal(items.reshape(-1, warps * ITEM_WORDS), chunks[::warps], blocks)
        dealt = together.reshape(-1, blocks, warps, ITEM_WORDS).transpose(1, 0, 2, 3)
    return np.ascontiguousarray(dealt).reshape(blocks, -1, ITEM_WORDS)


def _deal_beside(items: Longs, chunks: Longs, heads: int, shape: Shape, busy: npt.NDArray[np.float64]) -> Ints:
    """(blocks, slots, 16): beside tiles, which keep a block's joiners for `busy` chunks' time. A block's warps take its
    items one after another.

    Neighbouring heads of a piece go to one block, the longest first to the block that would be done first.
    """
    blocks, warps, joiners = len(busy), shape.warps, shape.joiners
    together = warps if _in_step(len(items), heads, blocks, warps) else 1
    cost = (chunks + ITEM_CHUNKS).reshape(-1, together).sum(1)

    def done(work: float, after: float) -> float:
        """When a block is done with so much streaming, whose tiles are after that time."""
        return work / warps if work <= warps * after else after + (work - warps * after) / (warps + joiners)

    lists: list[list[int]] = [[] for _ in range(blocks)]
    # When it would be done; of equals the one with the fewest tiles first; its work
    loads = [(0.0, after, 0.0, b) for b, after in enumerate(busy.tolist())]
    heapq.heapify(loads)
    for n in np.argsort(-cost, kind="stable").tolist():
        _, after, work, b = loads[0]
        lists[b] += range(n * together, (n + 1) * together)
        work += float(cost[n])
        heapq.heapreplace(loads, (done(work, after), after, work, b))
    dealt = np.zeros((blocks, max(map(len, lists)), ITEM_WORDS), np.int32)
    for b, own in enumerate(lists):
        dealt[b, : len(own)] = items[own]
    return dealt


def _deal_chains(tiles: Longs, chains: list[list[int]], blocks: int) -> Ints:
    """(rounds, blocks, 16): chains of items, the longest first, each to the block that has least to do."""
    steps = -(-(tiles[:, 6] - tiles[:, 5]) // TILE_TOKENS)
    cost = [int(steps[chain].sum()) for chain in chains]
    loads = [(0, b) for b in range(blocks)]
    lists: list[list[int]] = [[] for _ in range(blocks)]
    for n in sorted(range(len(chains)), key=lambda n: -cost[n]):
        load, b = loads[0]
        lists[b] += chains[n]
        tiles[chains[n][:-1], 14] |= GOES_ON
        heapq.heapreplace(loads, (load + cost[n], b))
    dealt = np.zeros((max(map(len, lists)), blocks, ITEM_WORDS), np.int32)
    for b, own in enumerate(lists):
        dealt[: len(own), b] = tiles[own]
    return dealt


def _deal(units: Longs, cost: Longs, blocks: int) -> Ints:
    """(rounds, blocks, …): the longest first, each to the block (or warp) that has least to do; empty ones last."""
    ranked = np.argsort(-cost, kind="stable")
    block, turn = np.arange(len(units)) % blocks, np.arange(len(units)) // blocks
    if len(units) and cost.min() != cost.max():
        loads, counts = [(0, b) for b in range(blocks)], [0] * blocks
        for n, c in enumerate(cost[ranked].tolist()):
            load, b = loads[0]
            block[n], turn[n] = b, counts[b]
            counts[b] += 1
            heapq.heapreplace(loads, (load + c + ITEM_CHUNKS, b))
    dealt = np.zeros((int(turn.max(initial=-1)) + 1, blocks, *units.shape[1:]), np.int32)
    dealt[turn, block] = units[ranked]
    return dealt


def _tables(
    page_lists: PageLists, order: Ints, length: Longs, page_size: int, room: int
) -> tuple[Ints, Ints, Ints, int]:
    """pages (n, table_pages), live, tail_from, tail_pages: a sequence's last page, and those to come, are its tail."""
    count = len(order)
    tail_from = np.maximum(0, -(-length // page_size) - 1).astype(np.int32)
    tail_pages = 2 + -(-room // page_size)
    live = np.zeros(count * (1 + tail_pages), np.int32)
    live[:count] = length
    tails = live[count:].reshape(count, tail_pages)
    pages = np.zeros((count, max(1, int(tail_from.max(initial=0)))), np.int32)
    for n, (caller, at) in enumerate(zip(order.tolist(), tail_from.tolist(), strict=True)):
        of = page_lists[caller]
        pages[n, :at] = of[:at]
        tail = of[at : at + tail_pages]
        tails[n, : len(tail)] = tail
    return pages, live, tail_from, tail_pages
