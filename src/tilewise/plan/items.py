"""The pieces of a plan's ranges as DecodeItems, the records that kernels/decode/work.cuh defines.

Sequences are numbered in the plan's order, in which the sequences of a node are neighbours. The query rows of a
sequence under one KV head are numbered through its neighbours, so the rows of a node are one range. A node with more
rows than an item holds is computed in several *passes* over the same tokens.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.plan.cost import CHAIN_SHARE
from tilewise.plan.ranges import CHUNK, FAR, TILE_ROWS, TILE_TOKENS, Cutter, Longs, Node, Own, OwnCut

Ints = npt.NDArray[np.int32]

OWN, ALL_SEE, GOES_ON = 1, 2, 4  # decode/work.cuh: ItemKind


class Word(IntEnum):
    """The words of a DecodeItem in their order in memory; decode/work.cuh says what each of them holds."""

    SEQUENCE = 0
    ROW = 1
    ROWS = 2
    CALLER_HEAD = 3
    TABLE = 4
    START = 5
    STOP = 6
    STATE_FOLD = 7
    PAGE = 8
    TAIL_FROM = 9
    FIRST_STATE = 10
    STATES_BEFORE = 11
    GROWS_FROM = 12
    PIECE = 13
    KIND = 14
    SECOND_PAGE = 15


ITEM_WORDS = len(Word)
# The four words of `States`. A tile item has the pages of its first tile in their place.
STATE_WORDS = slice(Word.FIRST_STATE, Word.PIECE + 1)


class Pieces(NamedTuple):
    """Pieces of token ranges, one entry per pass over the rows and for all KV heads alike: (n,) each.

    They are kept as arrays (9, n) of int64; Pieces(*array) gives the fields their names.
    """

    sequence: Longs
    row: Longs  # the first row, counted from the first row of `sequence`
    rows: Longs
    table: Longs  # the sequence whose pages hold the tokens
    start: Longs
    stop: Longs
    state: Longs  # which of its sequences' states the piece leaves
    fold: Longs  # chunks that are folded at a time, 0 for a piece that is computed at once
    kind: Longs


PIECE_FIELDS = len(Pieces._fields)


class States(NamedTuple):
    """The states of each sequence, (n,) each. The states of the range that grows depend on the sequence's length.

    first: the number of its first state in scratch. before: how many states it has besides those of the range that
    grows. grows_from: where that range begins. piece: tokens per piece of it. A sequence whose number of states does
    not change has FAR for both.
    """

    first: Longs
    before: Longs
    grows_from: Longs
    piece: Longs

    def table(self) -> Ints:
        """(n, 4): DecodeArgs.states."""
        return np.stack(self, 1).astype(np.int32)


class Sequences(NamedTuple):
    """What the items copy from the tables of their sequences, so that a warp needs no lookups before its first load."""

    order: Ints  # (n,): the caller's number of each sequence
    states: Ints  # (n, 4): States.table
    pages: Ints  # (n, table_pages)
    tail_from: Ints  # (n,)
    page_size: int
    chunk: int


class TileChains:
    """Pieces of the nodes that go through tiles, and which of them continue others.

    If a child node has the same passes as its parent, the first piece of the child can continue the parent's last
    piece: one block computes both, the rows stay in registers between them, and the two leave one state instead of
    two. This needs a child whose tokens are seen by all rows, and a chain that is not much longer than an even share
    per block (CHAIN_SHARE). most: rows of an item at most.
    """

    def __init__(self, rows_each: int, share: float, chaining: bool, most: int = TILE_ROWS) -> None:
        self.rows_each, self.share, self.chaining, self.most = rows_each, share, chaining, most
        self.parts: list[Longs] = []  # (9, n) each, one per node
        self._count = 0
        self._above: list[_LastPiece] = []  # the node that was added last, after its ancestors
        self._before: dict[int, int] = {}  # from a piece to the piece that it continues

    def add(self, node: Node, begins: Longs, size: int, state: int, kind: int) -> int:
        """Adds the next node, parents before children. Returns 1 if it continues its parent, and so has one state less,
        otherwise 0."""
        while self._above and node.first >= self._above[-1].node.first + self._above[-1].node.sequences:
            self._above.pop()
        above = self._above[-1] if self._above and kind & ALL_SEE and self.chaining else None
        tokens = min(size, node.stop - int(begins[0]))
        if above and not (self._continues(node, above.node) and above.tokens + tokens <= CHAIN_SHARE * self.share):
            above = None
        made = node_pieces(node, begins, size, state - (above is not None), kind, self.rows_each, self.most)
        passes = made.shape[1] // len(begins)
        if above is not None:
            first = above.first_pass + (node.first - above.node.first) * self.rows_each // self.most
            self._before |= {self._count + n: first + n for n in range(passes)}
        tokens = node.stop - int(begins[-1]) + (above.tokens if above is not None and len(begins) == 1 else 0)
        self._above.append(_LastPiece(node, self._count + made.shape[1] - passes, tokens))
        self._count += made.shape[1]
        self.parts.append(made)
        return int(above is not None)

    def _continues(self, node: Node, above: Node) -> bool:
        """Does the node begin where its parent ends, and is each of its passes one of the parent's passes?"""
        ahead = (node.first - above.first) * self.rows_each
        end, end_above = node.first + node.sequences, above.first + above.sequences
        return (
            node.start == above.stop
            and ahead % self.most == 0
            and (node.sequences * self.rows_each % self.most == 0 or end == end_above)
        )

    def pieces(self) -> Longs:
        """(9, n): of all nodes."""
        return np.concatenate([*self.parts, np.zeros((PIECE_FIELDS, 0), np.int64)], axis=1)

    def chains(self, heads: int) -> list[list[int]]:
        """Items of all heads, numbered as `items_of_heads` makes them: each list is one block's, in this order."""
        after = {b: a for a, b in self._before.items()}
        found = []
        for n in range(self._count):
            if n not in self._before:
                chain = [n]
                while chain[-1] in after:
                    chain.append(after[chain[-1]])
                found += [[m * heads + h for m in chain] for h in range(heads)]
        return found


class _LastPiece(NamedTuple):
    """The last piece of a node: its first pass's place among all pieces, and the tokens of the chain up to its end."""

    node: Node
    first_pass: int
    tokens: int


class Cut(NamedTuple):
    """All pieces of a plan: those of streaming warps, (9, n), those of tiles, and the states that they leave."""

    streamed: Longs
    tiled: TileChains
    states: States
    total_states: int


def cut_plan(nodes: list[Node], own: Own, cutter: Cutter, length: Longs, tokens: int, chaining: bool) -> Cut:
    """Cuts all ranges of a plan and numbers their states. length: (n,), in the plan's order. tokens: query tokens per
    sequence. chaining: whether tile pieces may continue others."""
    counts = np.zeros(len(length), np.int64)  # states of each sequence so far
    share = cutter.even_share(nodes, by_tiles=True)
    tiled = TileChains(cutter.rows_each, share, chaining, cutter.shape.tile_rows)
    streamed: list[Longs] = []
    for node, size in zip(nodes, cutter.node_sizes(nodes), strict=True):
        by_tiles = cutter.by_tiles(node)
        step = TILE_TOKENS if by_tiles else cutter.shape.chunk
        begins = np.arange(node.start // step * step, node.stop, size)
        members = slice(node.first, node.first + node.sequences)
        state = int(counts[node.first])  # equal for all members: they share the ancestors of the node too
        kind = ALL_SEE if node.stop <= length[members].min() - tokens + 1 else 0
        if by_tiles:
            state -= tiled.add(node, begins, size, state, kind)
        else:
            streamed.append(node_pieces(node, begins, size, state, kind, cutter.rows_each, cutter.shape.rows))
        counts[members] = state + len(begins)
    cut = cutter.cut_own(own)
    streamed.append(own_pieces(own, cut, counts, cutter))
    states, total = count_states(own, cut, counts, length)
    return Cut(np.concatenate(streamed, axis=1), tiled, states, total)


def count_states(own: Own, cut: OwnCut, node_states: Longs, length: Longs) -> tuple[States, int]:
    """The states of each sequence, and their number in scratch. node_states, length: (n,) for each sequence.

    A range that ends where its sequence ends grows with it, and so does the number of its states, unless one warp takes
    it whole. A sequence with a single state needs no scratch: its item writes the result.
    """
    grows = (own.planned == length[own.sequence]) & ~cut.whole
    counts, before = node_states.copy(), node_states.copy()
    grows_from, piece = np.full(len(length), FAR), np.full(len(length), FAR)
    np.add.at(counts, own.sequence, cut.parts)
    np.add.at(before, own.sequence[~grows], cut.parts[~grows])
    grows_from[own.sequence[grows]] = cut.begin[grows]
    piece[own.sequence[grows]] = cut.size[grows]
    ends = np.cumsum(np.where(counts > 1, counts, 0))
    first = np.concatenate([[0], ends])
    return States(first[:-1], before, grows_from, piece), int(first[-1])


def node_pieces(node: Node, begins: Longs, size: int, state: int, kind: int, rows_each: int, most: int) -> Longs:
    """(9, n): a node's pieces of `size` tokens from `begins` on, in passes of at most `most` rows over each of them.
    The pieces leave the states from number `state` on."""
    rows = node.sequences * rows_each
    row = np.arange(0, rows, most)
    made = np.zeros((PIECE_FIELDS, len(begins), len(row)), np.int64)
    piece = Pieces(*made)
    piece.sequence[:] = piece.table[:] = node.first
    piece.row[:], piece.rows[:] = row, np.minimum(most, rows - row)
    piece.start[:] = np.maximum(begins, node.start)[:, None]
    piece.stop[:] = np.minimum(begins + size, node.stop)[:, None]
    piece.state[:] = (state + np.arange(len(begins)))[:, None]
    piece.kind[:] = kind
    return made.reshape(PIECE_FIELDS, -1)


def own_pieces(own: Own, cut: OwnCut, node_states: Longs, cutter: Cutter) -> Longs:
    """(9, n): the pieces of the own ranges. The ranges of one sequence stand in ascending order.

    node_states: (sequences,), how many states each sequence has of the nodes above it.
    """
    shape, parts = cutter.shape, cut.parts
    before = np.zeros(len(own.sequence), np.int64)  # states of the sequence's earlier own ranges
    if len(np.unique(own.sequence)) != len(own.sequence):  # rare: few sequences have more than one own range
        taken: dict[int, int] = {}
        for n, s in enumerate(own.sequence.tolist()):
            before[n] = taken.get(s, 0)
            taken[s] = int(before[n]) + int(parts[n])
    index = np.repeat(np.arange(len(own.sequence)), parts)  # the range of each piece
    number = np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)  # which piece of its range it is
    size, whole = cut.size[index], cut.whole[index]
    begin, stop = cut.begin[index] + number * size, own.stop[index]
    row = np.arange(0, cutter.rows_each, shape.rows)
    made = np.zeros((PIECE_FIELDS, len(index), len(row)), np.int64)
    piece = Pieces(*made)
    piece.sequence[:] = piece.table[:] = own.sequence[index][:, None]
    piece.row[:], piece.rows[:] = row, np.minimum(shape.rows, cutter.rows_each - row)
    piece.start[:] = np.maximum(begin, own.start[index])[:, None]
    piece.stop[:] = np.where(whole, stop, np.minimum(begin + size, stop))[:, None]
    piece.state[:] = (node_states[own.sequence[index]] + before[index] + number)[:, None]
    piece.fold[:] = np.where(whole, size // shape.chunk, 0)[:, None]
    piece.kind[:] = OWN
    return made.reshape(PIECE_FIELDS, -1)


def items_of_heads(pieces: Longs, heads: int, rows_each: int, of: Sequences) -> Longs:
    """(n · heads, 16) int64: the DecodeItems of pieces (9, n), one item per KV head, heads of a piece side by side."""
    part = Pieces(*pieces)
    sequence, table = part.sequence + part.row // rows_each, part.table
    # The pages of the first chunk's two halves, unless one of them may be replaced while the list is in use: those
    # that stand in the tail.
    begin, tail_from = part.start // of.chunk * of.chunk, of.tail_from[table].astype(np.int64)
    number, second = begin // of.page_size, (begin + of.chunk - CHUNK) // of.page_size
    last, fixed = of.pages.shape[1] - 1, second < tail_from
    item = np.empty((pieces.shape[1], ITEM_WORDS), np.int64)
    item[:, Word.SEQUENCE] = sequence
    item[:, Word.ROW] = part.row % rows_each
    item[:, Word.ROWS] = part.rows
    item[:, Word.CALLER_HEAD] = of.order[sequence].astype(np.int64) << 12
    item[:, Word.TABLE] = table
    item[:, Word.START] = part.start
    item[:, Word.STOP] = part.stop
    item[:, Word.STATE_FOLD] = part.state << 16 | part.fold
    item[:, Word.PAGE] = np.where(fixed, of.pages[table, np.minimum(number, last)], -1)
    item[:, Word.TAIL_FROM] = tail_from
    item[:, STATE_WORDS] = of.states[sequence]
    item[:, Word.KIND] = part.kind
    item[:, Word.SECOND_PAGE] = np.where(fixed, of.pages[table, np.minimum(second, last)], -1)
    items = np.repeat(item, heads, axis=0)
    items[:, Word.CALLER_HEAD] += np.tile(np.arange(heads), pieces.shape[1])
    return items


def first_tile_pages(items: Longs, of: Sequences) -> Longs:
    """(n, 4): the pages that the copies of each item's first tile read, −1 for a page in the tail."""
    box = next((n for n in (64, 32, 16) if of.page_size % n == 0), CHUNK)  # tokens per copy: gpu/decode.py tile_map
    token = items[:, Word.START, None] // TILE_TOKENS * TILE_TOKENS + box * np.arange(4)
    number = token // of.page_size
    page = of.pages[items[:, Word.TABLE, None], np.minimum(number, of.pages.shape[1] - 1)]
    return np.where(number < items[:, Word.TAIL_FROM, None], page, -1).astype(np.int64)
