"""Steps that prefill and decode over one cache: chunks of prompts and next tokens, as lists of tiles.

A *chunk* is the last tokens of a sequence, which are its queries: each sees the sequence up to itself. Chunks of
sequences that begin with the same pages may share them as decode does (tree.py): a node puts the rows of a whole group
over its tokens once, and each row's states are merged. Nodes end with a page here, because the forward, which computes
chunks on a GPU, reads whole lists of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tilewise.plan.cost import PLAN_MARGIN, CostModel
from tilewise.plan.dense import cut
from tilewise.plan.flat import PageTable, tree_order
from tilewise.plan.show import Card, find_card
from tilewise.plan.standing import StandingPlan
from tilewise.plan.tiles import (
    OPEN,
    Band,
    DecodePlan,
    Ints,
    PagedTiles,
    Plan,
    Value,
    Window,
    _serials,
    band_of,
    blocks_of,
)
from tilewise.scores import Reach


class Part(NamedTuple):
    """Rows of a chunk that read the tokens [start, stop) of its sequence; the last of them stands at the last token."""

    rows: int
    start: int
    stop: int


def parts_of(rows: int, start: int, stop: int, chunk: int) -> list[Part]:
    """`rows` rows over tokens [start, stop), as one part, or with blocks of `chunk` positions, 0 for none, as one for
    each block that they stand in; start is 0 then."""
    if not chunk:
        return [Part(rows, start, stop)]
    return [Part(end - row, key, last) for row, end, key, last in blocks_of(rows, stop, chunk)]


class ChunkNode(NamedTuple):
    """Tokens [start, stop), whole pages, that the rows of chunks [first, end) of a plan's order all see: what these
    have in common and share, or a piece of what one chunk reads, for others to read beside it.

    level: how many nodes are shared above it.
    """

    first: int
    end: int
    start: int
    stop: int
    level: int


@dataclass(frozen=True, eq=False)
class ChunkPlan(Plan):
    """Chunks over a cache's pages: the last `tokens[n]` tokens of `seqs[n]`, which has `lengths[n]`.

    Rows stand in the plan's order: first the chunk order[0] of `seqs`, then order[1], …; where nothing is shared that
    is the order given. own: for each chunk of `seqs`, the token from which it reads what is in no node. chunk: as of
    DecodePlan.
    """

    seqs: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    order: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    nodes: tuple[ChunkNode, ...] = ()
    own: tuple[int, ...] = ()
    window: Window | None = None
    chunk: int = 0
    stored_tokens: int = 0

    @property
    def stored(self) -> int:
        return self.stored_tokens

    @property
    def shared_nodes(self) -> int:
        return sum(node.end - node.first > 1 for node in self.nodes)

    def row_order(self, first: int = 0, end: int | None = None) -> Ints:
        """(rows,): which of the given rows stands at each of the plan's; or at those of chunks [first, end) alone."""
        firsts = np.concatenate([[0], np.cumsum(self.tokens, dtype=np.int32)])
        runs = [np.arange(firsts[n], firsts[n + 1], dtype=np.int32) for n in self.order[first:end]]
        return np.concatenate([np.zeros(0, np.int32), *runs])


@dataclass(frozen=True, eq=False)
class StepPlan(Value):
    """What `attend` runs: chunks of prompts, then next tokens, over one cache, for all layers of a step.

    prefill, decode: the plans of either part, None where there is nothing of it. decode may be a standing plan, whose
    idle rows are the step's last ones; the step is then what that is. rows: query rows in all, those of the chunks
    first. serial: as of DecodePlan.
    """

    prefill: ChunkPlan | None
    decode: DecodePlan | StandingPlan | None
    heads_q: int
    window: Window | None
    chunk: int
    share_prefix: bool | None
    cache_serial: int
    serial: int = field(default_factory=_serials.__next__, init=False, compare=False)

    @property
    def prefill_rows(self) -> int:
        return 0 if self.prefill is None else self.prefill.rows

    @property
    def rows(self) -> int:
        each = self.decode.tokens_per_seq if isinstance(self.decode, StandingPlan) else 1
        return self.prefill_rows + (0 if self.decode is None else self.decode.rows * each)

    def show(self, card: str | Card = "H200") -> str:
        """Both parts as a few lines of text, with the floors in microseconds for a named card: print it."""
        known = find_card(card)
        chunks = 0 if self.prefill is None else len(self.prefill.seqs)
        nodes = 0 if self.prefill is None else self.prefill.shared_nodes
        decodes = 0 if self.decode is None else len(self.decode.seqs)
        shared = f", {nodes} shared prefixes" if nodes else ""
        head = f"step: {chunks} chunks of {self.prefill_rows:,} tokens{shared}; {decodes} decodes"
        return "\n".join([head, *(plan.show(known) for plan in self._parts())])

    def _parts(self) -> list[Plan]:
        decode = self.decode.now if isinstance(self.decode, StandingPlan) else self.decode
        return [plan for plan in (self.prefill, decode) if plan is not None]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy gets a number of its own."""
        for name, value in state.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "serial", next(_serials))

    def __hash__(self) -> int:
        return hash((self.prefill, self.decode, self.heads_q, self.cache_serial))


Judge = Callable[["Chunks", Sequence[ChunkNode]], tuple[list[ChunkNode], bool]]  # the nodes, and are they cut
Split = Callable[[int, int], int]  # rows over so many tokens -> the tokens of a piece, 0 to leave them together


class Chunks(NamedTuple):
    """What a judge of shared nodes is told: tokens and lengths of the chunks in the plan's order."""

    tokens: Sequence[int]
    lengths: Sequence[int]


def plan_chunks(
    seqs: Sequence[int],
    tokens: Sequence[int],
    page_lists: Sequence[Ints],
    lengths: Sequence[int],
    page_size: int,
    *,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    kv_row_bytes: float,
    io_bytes: int,
    window: Window | None = None,
    chunk: int = 0,
    judge: Judge | None = None,
    share: bool | None = True,
    split: Split | None = None,
    value_dim: int = 0,
) -> ChunkPlan:
    """The plan of the last `tokens` of each of `seqs`; page_lists, lengths: of each of them.

    share: True shares every node, as far as every row of the group sees all of it, False none, None those that `judge`
    says. split: into which pieces the tokens of a node, and those before a chunk, are cut, where the judge says so.
    With a window that ends to the left, or blocks of `chunk` positions, there is neither: what a row sees is its own.
    """
    reach = Reach.of(window, chunk)
    order, common = (x.tolist() for x in tree_order(*PageTable.of(page_lists)))  # who share pages are neighbours
    again = sum(min(c * page_size, lengths[a], lengths[b]) for c, (a, b) in zip(common, pairwise(order), strict=True))
    nodes: list[ChunkNode] = []
    if share is not False and reach.whole:
        nodes = _find_nodes([(lengths[n] - tokens[n] + 1) // page_size for n in order], common, page_size)
    cuts = split is not None and reach.whole
    if judge is not None and reach.whole:
        judged, pays = judge(Chunks(*([of[n] for n in order] for of in (tokens, lengths))), nodes)
        nodes = nodes if share else judged
        cuts = cuts and pays
    if not nodes:
        order = list(range(len(seqs)))
    own = [0] * len(seqs)
    for node in nodes:
        for n in order[node.first : node.end]:
            own[n] = max(own[n], node.stop)
    if split is not None and cuts:
        nodes = [piece for node in nodes for piece in _pieces(node, order, tokens, page_size, split)]
        for place, n in enumerate(order):
            seen = (lengths[n] - tokens[n] + 1) // page_size * page_size
            before = ChunkNode(place, place + 1, own[n], seen, 0)
            pieces = _pieces(before, order, tokens, page_size, split)
            if len(pieces) > 1:
                own[n] = seen
                nodes += pieces
    work, exclusive, tokens_read = _lay_out(order, nodes, own, tokens, page_lists, lengths, page_size, reach)
    return ChunkPlan(
        kind="prefill",
        work=tuple(work),
        rows=sum(tokens),
        keys=(tokens_read,),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        value_dim=value_dim,
        exclusive=exclusive,
        kv_row_bytes=kv_row_bytes,
        io_bytes=io_bytes,
        seqs=tuple(seqs),
        tokens=tuple(tokens),
        lengths=tuple(lengths),
        order=np.array(order, np.int32),
        nodes=tuple(nodes),
        own=tuple(own),
        window=window,
        chunk=chunk,
        stored_tokens=sum(lengths) - again,
    )


def _find_nodes(seen: Sequence[int], common: Sequence[int], page_size: int) -> list[ChunkNode]:
    """The nodes over chunks in an order in which those that share pages are neighbours, each before those below it.

    seen: whole pages that every row of each chunk sees; common: leading pages that neighbours have in common.
    """
    nodes: list[ChunkNode] = []
    stack = [(0, len(seen), 0, 0)]  # first, end, pages that are shared above, level
    while stack:
        first, end, above, level = stack.pop()
        if end - first < 2:
            continue
        depth = min(common[first : end - 1])
        stop = min(depth, *seen[first:end])
        if stop > above:
            nodes.append(ChunkNode(first, end, above * page_size, stop * page_size, level))
            above, level = stop, level + 1
        bounds = [first, *(n + 1 for n in range(first, end - 1) if common[n] == depth), end]
        stack += [(a, b, above, level) for a, b in reversed(list(pairwise(bounds)))]
    return nodes


def _pieces(
    node: ChunkNode, order: Sequence[int], tokens: Sequence[int], page_size: int, split: Split
) -> list[ChunkNode]:
    """The node in pieces of whole pages, equal but for a page."""
    rows = sum(tokens[n] for n in order[node.first : node.end])
    length = node.stop - node.start
    piece = split(rows, length) if length > 0 else 0
    if piece <= 0 or length <= piece:
        return [node]
    count = -(-length // piece)
    cuts = [node.start + length // page_size * n // count * page_size for n in range(count + 1)]
    return [node._replace(start=a, stop=b) for a, b in pairwise(cuts) if b > a]


def _lay_out(
    order: Sequence[int],
    nodes: Sequence[ChunkNode],
    own: Sequence[int],
    tokens: Sequence[int],
    page_lists: Sequence[Ints],
    lengths: Sequence[int],
    page_size: int,
    reach: Reach,
) -> tuple[list[PagedTiles], bool, int]:
    """The items of the nodes and of what each chunk reads for itself, whether no row is in two, and the tokens read."""
    rows = np.concatenate([[0], np.cumsum([tokens[n] for n in order])]).tolist()  # where each chunk starts
    work: list[PagedTiles] = []
    exclusive, read = not nodes, 0

    def item(n: int, row: int, count: int, start: int, stop: int, key: int, band: Band) -> PagedTiles:
        pages = page_lists[n][None, start // page_size : -(-stop // page_size)]
        return PagedTiles(row, count, pages, start, stop, np.array([key], np.int32), band)

    for node in nodes:
        row, end = rows[node.first], rows[node.end]
        work.append(item(order[node.first], row, end - row, node.start, node.stop, read, OPEN))
        read += node.stop - node.start
    for place, n in enumerate(order):
        keys = lengths[n] - own[n]
        at = set()
        for t in cut(tokens[n], keys, band_of(tokens[n], keys, True, reach.window), reach.chunk):
            for copy in range(t.count):
                row, key = t.row + copy * t.row_step, t.key + copy * t.key_step
                start = own[n] + key
                work.append(item(n, rows[place] + row, t.rows, start, start + t.keys, read + key, t.band))
                exclusive &= row not in at
                at.add(row)
        read += keys
    return work, exclusive, read


@dataclass(frozen=True)
class CostJudge:
    """Which nodes pay where each item runs by itself, as on a CPU: those that save time by the cost model.

    kv_bytes: K and V of one token, all KV heads, as the inner loop reads them.
    """

    cost: CostModel
    heads_q: int
    head_dim: int
    kv_bytes: float

    def __call__(self, chunks: Chunks, nodes: Sequence[ChunkNode]) -> tuple[list[ChunkNode], bool]:
        kept: list[ChunkNode] = []
        for node in nodes:
            # What a node that is not shared had above the group is now read by the nodes below it, or by the chunks.
            above = [k for k in kept if k.first <= node.first and node.end <= k.end]
            start = max((k.stop for k in above), default=0)
            rows = [self.heads_q * t for t in chunks.tokens[node.first : node.end]]
            length = node.stop - start
            together = self.cost.item_us + self._time(length, sum(rows)) + sum(rows) * self.cost.row_state_us
            if sum(self._time(length, r) for r in rows) > together * self.cost.margin:
                kept.append(node._replace(start=start, level=len(above)))
        return kept, False

    def _time(self, tokens: int, rows: int) -> float:
        return self.cost.alone_us(1, tokens, rows, self.head_dim, self.kv_bytes)


# Rows of a tile of the forward, query heads of one KV head among them.
TILE_ROWS = 128
# In microseconds: all that nodes take besides their tiles' walks: copying rows of Q, a launch of the forward with its
# list, and one that merges. On an H200 a chunk of 32 tokens after 8192 takes 152 µs whole and 87 µs in 8 pieces, whose
# walk is 19 µs.
NODES_US = 55.0
# In microseconds: one row of one query head of one state. An estimate: a row of 256 bytes of Q copied and read, and of
# O written and read, at 3.5 TB/s.
STATE_US = 0.0003
# In tokens: the shortest piece that a chunk's prefix is cut into. A tile walks so many in 19 µs on an H200.
SHORTEST_PIECE = 1024


@dataclass(frozen=True)
class TileJudge:
    """Which nodes pay where the forward's tiles share a card: as many levels of them, in pieces or whole, as take the
    least time, or none.

    All tiles that walk the same number of keys take equally long, however many of their rows are used. So sharing saves
    nothing while chunks fill their tiles; it pays where many short chunks have long prefixes, and more tiles than there
    are multiprocessors. processors: multiprocessors of the card; group: query heads per KV head.
    """

    cost: CostModel
    processors: int
    heads_kv: int
    group: int
    head_dim: int

    def __call__(self, chunks: Chunks, nodes: Sequence[ChunkNode]) -> tuple[list[ChunkNode], bool]:
        levels = range(2 + max((node.level for node in nodes), default=-1))
        ways = [([node for node in nodes if node.level < n], cut) for n in levels for cut in (False, True)]
        times = [self._time_us(chunks, *way) * (PLAN_MARGIN if n else 1.0) for n, way in enumerate(ways)]
        return ways[times.index(min(times))]

    def split(self, rows: int, tokens: int) -> int:
        """The pieces of so many tokens before rows of one chunk, 0 to leave them together: as many as give every
        multiprocessor one, but none so short that merging costs what is saved."""
        tiles = self._tiles(rows)
        piece = max(SHORTEST_PIECE, tokens * tiles // self.processors)
        return piece if tokens >= piece + 4 * SHORTEST_PIECE else 0

    def _time_us(self, chunks: Chunks, nodes: Sequence[ChunkNode], cut: bool) -> float:
        own = [0] * len(chunks.tokens)
        items = []  # of the launch of nodes: rows, keys, and keys of the longest piece
        for node in nodes:
            own[node.first : node.end] = [node.stop] * (node.end - node.first)
            rows, keys = sum(chunks.tokens[node.first : node.end]), node.stop - node.start
            items.append((rows, keys, (cut and self.split(rows, keys)) or keys))
        rest = []
        for rows, keys in ((t, n - at) for t, n, at in zip(chunks.tokens, chunks.lengths, own, strict=True)):
            piece = cut and self.split(rows, keys - rows)
            if piece:
                items.append((rows, keys - rows, piece))
            rest.append((rows, rows, rows) if piece else (rows, keys, keys))
        time = self._launch_us(rest)
        if items:
            states = sum(-(-keys // piece) * rows for rows, keys, piece in items) * self.group * self.heads_kv
            time += self._launch_us(items) + NODES_US + states * STATE_US
        return time

    def _launch_us(self, items: Sequence[tuple[int, int, int]]) -> float:
        """The longest walk of a tile, or what all of them walk together, evenly dealt."""
        together = sum(self._tiles(rows) * keys for rows, keys, _ in items)
        walked = max(*(piece for *_, piece in items), together / self.processors)
        return 4 * TILE_ROWS * self.head_dim * walked * self.processors / self.cost.flops_per_us

    def _tiles(self, rows: int) -> int:
        return -(-rows * self.group // TILE_ROWS) * self.heads_kv
