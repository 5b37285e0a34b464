"""Plans: an attention problem as a list of tiles. Pure: no GPU, no tensors read, no I/O.

A plan is a list of work items. Each says which query rows meet which key rows; running it leaves a state `(o, lse)`
on those rows, and states over disjoint keys merge (state.py). Query rows are counted through the whole batch: row
`b * seqlen_q + i` of a dense call, row i of a packed one. So are keys, within a *source*: a pair of K and V
tensors, or the list of a paged cache's pages.

What a row may see of its keys is a *band*: key j is visible to row i when `low <= j - i <= high` (None: no bound).
Causal and sliding windows, aligned bottom-right, are bands, and a band's tiles are a formula: a `Tiles` item with
`count` > 1 is that formula for a batch of equal sequences or for the equal tiles of a window. Only sparse patterns
and trees need arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.plan.pictures import draw_plan
from tilewise.plan.schedule_files import AnyPath
from tilewise.plan.show import Card, PlanSummary, find_card
from tilewise.scores import Reach
from tilewise.scores import Window as Window

Ints = npt.NDArray[np.int32]


class Band(NamedTuple):
    """Key j is visible to row i when low <= j - i <= high; None is no bound. Both count from the item's first."""

    low: int | None
    high: int | None

    def shifted(self, by: int) -> Band:
        """The same band when j - i of the old count is j - i + by of the new one."""
        return Band(None if self.low is None else self.low + by, None if self.high is None else self.high + by)

    def opened(self, rows: int, keys: int) -> Band:
        """Without the bounds that hide nothing of a rows × keys tile: "is there a mask" has one answer."""
        low = None if self.low is None or self.low <= -(rows - 1) else self.low
        high = None if self.high is None or self.high >= keys - 1 else self.high
        return Band(low, high)

    def allows(self, offset: Any) -> Any:
        """Which of these offsets, key − row, are visible: a tensor or an array of integers -> bools."""
        seen = offset == offset
        if self.low is not None:
            seen &= offset >= self.low
        if self.high is not None:
            seen &= offset <= self.high
        return seen


OPEN = Band(None, None)


def window_band(window: Window | None, causal: bool = False) -> Band:
    """The band of a window whose row i stands at key i."""
    left, right = window if window is not None else (None, None)
    return Band(None if left is None else -left, 0 if causal else right)


def band_of(seqlen_q: int, seqlen_k: int, causal: bool, window: Window | None) -> Band:
    """The band of one sequence: bottom-right, so row i stands at key i + seqlen_k - seqlen_q."""
    return window_band(window, causal).shifted(seqlen_k - seqlen_q).opened(seqlen_q, seqlen_k)


def blocks_of(rows: int, keys: int, chunk: int) -> Iterator[tuple[int, int, int, int]]:
    """The blocks of `chunk` positions in which rows stand, the last of them at the last key: of each its rows
    [row, end) and its keys [key, stop) up to the last row's. Rows before key 0 are in none."""
    shift = keys - rows
    for key in range(max(0, shift) // chunk * chunk, keys, chunk):
        yield max(0, key - shift), min(rows, key + chunk - shift), key, min(key + chunk, keys)


def visible_pairs(rows: int, keys: int, band: Band) -> int:
    """How many (row, key) pairs of a rows × keys tile the band leaves visible."""
    if band == OPEN:
        return rows * keys
    i = np.arange(rows, dtype=np.int64)
    first = np.zeros_like(i) if band.low is None else np.clip(i + band.low, 0, keys)
    end = np.full_like(i, keys) if band.high is None else np.clip(i + band.high + 1, 0, keys)
    return int(np.maximum(end - first, 0).sum())


def seen_keys(rows: int, keys: int, band: Band) -> tuple[int, int]:
    """The keys [start, stop) of a rows × keys tile that one of its rows sees, or more."""
    start = 0 if band.low is None else max(0, band.low)
    stop = keys if band.high is None else min(keys, rows + band.high)
    return start, max(start, stop)


class Rectangle(NamedTuple):
    """Rows [row, row + rows) meet keys [key, key + keys) of a source: what pictures and sums are made of."""

    row: int
    rows: int
    source: int
    key: int
    keys: int
    pairs: int  # visible ones
    heads: int  # query heads that do this; kv heads in proportion
    seen: tuple[int, int]  # of the keys, those [start, stop) that a row sees
    head: int | None = None  # the first of the query heads, where the pattern is not that of all
    band: Band = OPEN  # counted from this row and key
    partial: bool = False  # which pairs are visible is left to the mask function


class Value:
    """A dataclass whose fields may be arrays, compared and hashed by what they hold."""

    __slots__ = ()

    def _values(self) -> tuple[Any, ...]:
        of: Any = self
        compared = (getattr(of, f.name) for f in fields(of) if f.compare)
        return tuple((x.shape, x.tobytes()) if isinstance(x, np.ndarray) else x for x in compared)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Value) and type(self) is type(other) and self._values() == other._values()
        )

    def __hash__(self) -> int:
        return hash(self._values())


@dataclass(frozen=True, slots=True)
class Tiles:
    """Regular work: `count` tiles of rows × keys, each `row_step`, `key_step` after the last, all under one band.

    heads: of the query heads, how many have this tile; None for all.
    """

    row: int
    rows: int
    key: int
    keys: int
    band: Band = OPEN
    source: int = 0
    count: int = 1
    row_step: int = 0
    key_step: int = 0
    heads: int | None = None

    def rectangles(self, heads: int) -> Iterator[Rectangle]:
        pairs, heads = visible_pairs(self.rows, self.keys, self.band), self.heads or heads
        start, stop = seen_keys(self.rows, self.keys, self.band)
        for n in range(self.count):
            row, key = self.row + n * self.row_step, self.key + n * self.key_step
            seen = (key + start, key + stop)
            yield Rectangle(row, self.rows, self.source, key, self.keys, pairs, heads, seen, band=self.band)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTiles(Value):
    """Block-sparse work: `rows`-row query tiles that all have equally many key blocks, so that they run as one batch.

    A tile is the page-table idea turned on dense keys: tile n starts at row `rows_at[n]` and meets the `block`-key
    blocks `blocks[n]`, then `tail` keys of the ragged last block if it is among them. `masked`: the problem's band or
    a block's length still cuts through some of these blocks (position of a key = its place in the sequence).
    `partial`: the mask function beside the schedule has to be asked which pairs are seen.
    """

    rows_at: Ints  # (n,), within the sequence
    rows: int
    blocks: Ints  # (n, c), full blocks only, ascending
    block: int
    tail: int
    seqlen_k: int
    masked: bool
    band: Band
    partial: bool = False
    lengths: Ints | None = None  # (num_k_blocks,), how many keys of each block there are; None: all
    heads: tuple[int, int] | None = None  # the query heads [first, end); None: all
    row: int = 0  # where the sequence starts, in rows and in keys; `count` sequences share the pattern
    key: int = 0
    count: int = 1
    row_step: int = 0
    key_step: int = 0

    def rectangles(self, heads: int) -> Iterator[Rectangle]:
        for n in range(self.count):
            row, key = self.row + n * self.row_step, self.key + n * self.key_step
            for at, blocks in zip(self.rows_at.tolist(), self.blocks.tolist(), strict=True):
                for start, keys in self._pieces(blocks):
                    band, first = self.band.shifted(at - start), key + start
                    pairs, seen = visible_pairs(self.rows, keys, band), seen_keys(self.rows, keys, band)
                    seen = (first + seen[0], first + seen[1])
                    head, end = self.heads or (None, heads)
                    count = end - (head or 0)
                    yield Rectangle(row + at, self.rows, 0, first, keys, pairs, count, seen, head, band, self.partial)

    def _pieces(self, blocks: list[int]) -> Iterator[tuple[int, int]]:
        for b in [*blocks, *([self.seqlen_k // self.block] if self.tail else [])]:
            start = b * self.block
            keys = min(self.block, self.seqlen_k - start)
            yield start, keys if self.lengths is None else min(keys, int(self.lengths[b]))


@dataclass(frozen=True, slots=True, eq=False)
class PagedTiles(Value):
    """Paged work: `rows` rows from `row` on meet the tokens [start, stop) of the sequence whose pages these are.

    pages (n, c): the pages that hold those tokens, beginning with the one `start` lies in. Row n of the table is tile
    n, `rows` after the last: equal tiles of neighbouring sequences run as one batch. Rows of several sequences stand in
    one tile when they share the pages (then the band is open).
    """

    row: int
    rows: int
    pages: Ints
    start: int
    stop: int
    keys_at: Ints  # (n,), where each tile's tokens stand when every token read is counted once: for pictures
    band: Band = OPEN

    def rectangles(self, heads: int) -> Iterator[Rectangle]:
        keys = self.stop - self.start
        pairs, (start, stop) = visible_pairs(self.rows, keys, self.band), seen_keys(self.rows, keys, self.band)
        for n, key in enumerate(self.keys_at.tolist()):
            seen = (key + start, key + stop)
            yield Rectangle(self.row + n * self.rows, self.rows, 0, key, keys, pairs, heads, seen, band=self.band)


@dataclass(frozen=True, eq=False)
class PagedWork(Value):
    """The work of a decode plan as arrays; n sequences stand in the plan's order. `tiles` makes items of them.

    table (n, width): the page lists in the caller's order, with zeros after them; order (n,): their numbers in the
    plan's. lengths (n,): in tokens. nodes (m, 5): as choose_nodes in flat.py returns them. own (3, k): as own_ranges
    returns them. reach: how far back rows see.
    """

    table: Ints
    order: Ints
    lengths: npt.NDArray[np.int64]
    nodes: npt.NDArray[np.int64]
    own: npt.NDArray[np.int64]
    page_size: int
    tokens_per_seq: int
    reach: Reach

    @cached_property
    def pages(self) -> Ints:
        """(n, pages of the longest): the page lists in the plan's order. A GPU's list of work never asks for them."""
        return self.table[self.order, : -(-int(self.lengths.max(initial=0)) // self.page_size)]

    def tiles(self) -> tuple[PagedTiles, ...]:
        """The nodes, then the own ranges; those of neighbours with the same tokens and the same band are one item."""
        keys, size, rows = self._keys_at(), self.page_size, self.tokens_per_seq
        made = []
        for n, (first, members, start, stop, _) in enumerate(self.nodes.tolist()):
            pages = self.pages[first : first + 1, start // size : -(-stop // size)]
            made.append(PagedTiles(first * rows, members * rows, pages, start, stop, keys[n : n + 1]))
        own_keys = (keys[len(made) :] - self.own[1]).tolist()  # where token 0 of each sequence would stand
        batches: dict[tuple[int, int, int, int, Band], list[list[tuple[int, int]]]] = {}
        for n, owner, part in self._own_parts():
            runs, tile = batches.setdefault(part, []), (owner, own_keys[n] + part[2])
            if runs and owner == runs[-1][-1][0] + 1 and part[1] == rows:  # tiles stand `rows` after each other
                runs[-1].append(tile)
            else:
                runs.append([tile])
        for (row, its, start, stop, band), runs in batches.items():
            for run in runs:
                first = run[0][0]
                pages = self.pages[first : first + len(run), start // size : -(-stop // size)]
                at = np.array([key for _, key in run], np.int32)
                made.append(PagedTiles(first * rows + row, its, pages, start, stop, at, band))
        return tuple(made)

    def _own_parts(self) -> Iterator[tuple[int, int, tuple[int, int, int, int, Band]]]:
        """The own ranges, each as one part, or where its rows stand in several blocks of positions as one for each
        block: number and sequence of the range; the first of the sequence's rows, how many, their tokens, the band."""
        rows, (left, chunk) = self.tokens_per_seq, self.reach
        lengths = self.lengths[self.own[0]].tolist()
        for n, (owner, start, stop, length) in enumerate(zip(*self.own.tolist(), lengths, strict=True)):
            if rows == 1 and left is None:
                yield n, owner, (0, 1, start, stop, OPEN)
                continue
            for row, end, key, last in blocks_of(rows, length, chunk) if chunk else ((0, rows, start, stop),):
                first, last = max(start, key), min(stop, last)
                if first < last:
                    diagonal = length - rows + row - first
                    band = Band(None if left is None else diagonal - left, diagonal).opened(end - row, last - first)
                    yield n, owner, (row, end - row, first, last, band)

    def _keys_at(self) -> Ints:
        """(m + k,): where the tokens of each node and own range stand when every token read is counted once, as a walk
        through the tree meets them."""
        tokens = np.concatenate([self.nodes[:, 3] - self.nodes[:, 2], self.own[2] - self.own[1]])
        by = np.concatenate([self.nodes[:, 0], self.own[0]]).argsort(kind="stable")  # a node before what is below it
        found = np.empty(len(by), np.int32)
        found[by] = np.cumsum(tokens[by]) - tokens[by]
        return found


def page_step(table: Ints) -> int | None:
    """Pages from one list's first to the next one's, if each list's pages are consecutive and all the steps are equal.

    table (n, c), one list a row. Such a table is one strided view of the storage; None means it must be gathered.
    """
    if not table.size:
        return 0
    first = table[:, 0].astype(np.int64)
    step = int(first[1] - first[0]) if len(first) > 1 else 0
    regular = int(first[0]) + step * np.arange(table.shape[0])[:, None] + np.arange(table.shape[1])
    return step if step >= 0 and np.array_equal(table, regular) else None


def _covered(ranges: Iterable[tuple[int, int]]) -> int:
    """How many keys lie in one of the ranges [start, stop) or more."""
    total, end = 0, 0
    for start, stop in sorted(ranges):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


Work = Tiles | BlockTiles | PagedTiles


class Launch(NamedTuple):
    """How a GPU kernel takes a plan's tiles: `blocks` thread blocks take them in the order of the list.

    A tile is tile_rows query rows by blocks of tile_keys keys; `packed` query heads of a KV head stand in it as
    neighbouring rows, so that it has tile_rows / packed tokens. why: the reason that it is this kernel.
    """

    kernel: str
    tile_rows: int
    tile_keys: int
    packed: int
    blocks: int
    why: str


@dataclass(frozen=True, eq=False)
class Plan(Value):
    """The work list of one problem, for all layers and all calls of the same shape. A value: it can be compared, kept
    in a dict, copied and pickled, before and after it was run.

    rows: query rows in all; keys: key rows of each source. `exclusive`: no row is in two work items, so no states
    need merging. kv_row_bytes: bytes of one token's K and V in one KV head; io_bytes, out_bytes: bytes of a query and
    of an output value. launch: how a GPU kernel takes the list, None on a CPU. value_dim: the head_dim of V and o.
    """

    kind: str
    work: tuple[Work, ...]
    rows: int
    keys: tuple[int, ...]
    heads_q: int
    heads_kv: int
    head_dim: int
    exclusive: bool
    kv_row_bytes: float
    io_bytes: int
    out_bytes: int = 0  # as io_bytes
    launch: Launch | None = None
    value_dim: int = 0  # as head_dim

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    def rectangles(self) -> Iterator[Rectangle]:
        """Every tile of the list, one by one."""
        for item in self.work:
            yield from item.rectangles(self.heads_q)

    @property
    def stored(self) -> int:
        """Key rows that lie in memory, each counted once."""
        return sum(self.keys)

    @property
    def out_dim(self) -> int:
        """The head dimension of V and o."""
        return self.value_dim or self.head_dim

    @cached_property
    def summary(self) -> PlanSummary:
        """Work items, rows, key rows, bytes and FLOPs, counted from the list itself."""
        tiles = pairs = keys_read = states = 0
        ranges: dict[tuple[int, int | None], set[tuple[int, int]]] = {}  # by source and KV head, None for all of them
        group = max(1, self.heads_q // self.heads_kv)
        for r in self.rectangles():
            tiles += 1
            pairs += r.pairs * r.heads
            keys_read += r.keys * max(1, r.heads * self.heads_kv // self.heads_q)
            states += r.rows * r.heads
            head = None if r.head is None else r.head // group
            ranges.setdefault((r.source, head), set()).add(r.seen)
        met = sum(_covered(of) * (1 if head is not None else self.heads_kv) for (_, head), of in ranges.items())
        least_keys = min(met, self.stored * self.heads_kv)
        q_and_o = self.head_dim * self.io_bytes + self.out_dim * (self.out_bytes or self.io_bytes)
        q_and_o *= self.rows * self.heads_q
        partial = 0 if self.exclusive else 2 * states * (self.out_dim + 1) * 4
        return PlanSummary(
            kind=self.kind,
            items=len(self.work),
            tiles=tiles,
            rows=self.rows,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            keys_stored=self.stored,
            keys_read=keys_read // self.heads_kv,
            bytes=int(keys_read * self.kv_row_bytes) + q_and_o + partial,
            least_bytes=int(least_keys * self.kv_row_bytes) + q_and_o,
            flops=2 * pairs * (self.head_dim + self.out_dim),
            states_merged=0 if self.exclusive else states // self.heads_q,
            fp8=self.io_bytes == 1,
        )

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products over visible pairs only."""
        return self.summary.flops

    @property
    def bytes(self) -> int:
        """Bytes to move: K and V once for each tile that reads them, Q and O once, partial states out and back."""
        return self.summary.bytes

    def floor_us(self, card: str | Card = "H200") -> float:
        """The time under which no kernel can be on `card`, whatever its caches do.

        The larger of two: every byte that is needed moved once at the memory's peak, and the FLOPs at the matrix units'
        peak at the card's top clock.
        """
        return self.summary.floor_us(find_card(card))

    def show(self, card: str | Card = "H200") -> str:
        """The work list as a few lines of text, with the floor in microseconds for a named card: print it."""
        return self.summary.text(find_card(card), self.launch)

    def draw(self, path: AnyPath) -> None:
        """Write a picture of which rows meet which keys, a PNG or an SVG by the path's ending."""
        draw_plan(self, path)


_serials = count(2)  # compilers specialise 0 and 1


# A cached property where a field is declared: dataclass() leaves it on the class.
_made_from_arrays: Any = cached_property(lambda plan: plan.arrays.tiles())


@dataclass(frozen=True, eq=False)
class DecodePlan(Plan):
    """A plan over a cache's pages. Rows stand in tree order: row (n, t) is token t of sequence `order[n]` of `seqs`.

    arrays: the work, whose items in `work` are made when they are first looked at. cache_serial: which cache it was
    made for. chunk: positions of a block that no row sees out of, 0 for no blocks. stored_tokens: tokens that lie in
    the pages, each counted once. room: how many tokens each sequence may grow by under `grow_plan` before a kernel's
    list of work has to be made anew. pages_per_seq: for decode() with a schedule of pages, how many of them a sequence
    reads at most, 0 for all; the work stands over the first ones.
    serial: a number that no other plan of this process has or had, by which compiled code finds it.
    """

    work: tuple[PagedTiles, ...] = field(init=False, repr=False, compare=False, default=_made_from_arrays)
    arrays: PagedWork = field(kw_only=True, repr=False)
    seqs: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    order: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    tokens_per_seq: int = 1
    shared_nodes: int = 0
    window: Window | None = None
    chunk: int = 0
    room: int = 0
    pages_per_seq: int = 0
    cache_serial: int = -1
    stored_tokens: int = 0
    serial: int = field(default_factory=_serials.__next__, init=False, compare=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy gets a number of its own."""
        for name, value in state.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "serial", next(_serials))

    def __hash__(self) -> int:  # growing changes its lengths, and nothing else
        return hash((self.seqs, self.order.tobytes(), self.tokens_per_seq, self.cache_serial, self.heads_q, self.room))

    @property
    def stored(self) -> int:
        return self.stored_tokens

    @property
    def reach(self) -> Reach:
        """How far back rows see."""
        return self.arrays.reach
