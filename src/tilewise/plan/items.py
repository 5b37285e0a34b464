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
from tilewise.plan.flat import FIRST, SEQUENCES, START, STOP, of_deepest
from tilewise.plan.ranges import CHUNK, FAR, TILE_TOKENS, Cutter, Flags, Longs, Own, OwnCut

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


class NodeCut(NamedTuple):
    """How each node is cut, (m,) each: whether it goes through tiles, the tokens of a piece, the first token of its
    first piece, pieces, passes over each of them, the number of its first state, and which node its first piece
    continues, -1 for none.

    If a child node has the same passes as its parent, the first piece of the child can continue the parent's last
    piece: one block computes both, the rows stay in registers between them, and the two leave one state instead of
    two. This needs a chain of pieces that is not much longer than an even share per block (CHAIN_SHARE).
    """

    by_tiles: Flags
    size: Longs
    begin: Longs
    parts: Longs
    passes: Longs
    state: Longs
    continues: Longs


def cut_nodes(nodes: Longs, cutter: Cutter, chaining: bool, beside: float = 0.0) -> NodeCut:
    """How nodes (m, 5) are cut. chaining: whether pieces of tiles may continue others. beside: Cutter.own_work."""
    by_tiles = cutter.by_tiles(nodes)
    sizes, passes, share = cutter.size_nodes(nodes, by_tiles, beside)
    start = nodes[:, START]
    begin = start - start % np.where(by_tiles, TILE_TOKENS, cutter.shape.chunk)
    parts = -(-(nodes[:, STOP] - begin) // sizes)
    most, each, limit = cutter.shape.tile_rows, cutter.rows_each, CHAIN_SHARE * share
    rows, tiled, pieces = nodes.tolist(), by_tiles.tolist(), parts.tolist()
    # Of the first piece and of the last one, the tokens.
    opening = np.minimum(sizes, nodes[:, STOP] - begin).tolist()
    last = (nodes[:, STOP] - begin - (parts - 1) * sizes).tolist()  # and then of the chain up to a node's end
    states, continues = [], [-1] * len(rows)
    counts: list[int] = []  # states of the node's sequences up to its end
    for n, (first, sequences, start_n, _, above) in enumerate(rows):
        state = counts[above] if above >= 0 else 0
        if above >= 0 and tiled[n] and chaining and start_n == rows[above][STOP]:
            begins, ends = rows[above][FIRST], rows[above][FIRST] + rows[above][SEQUENCES]
            # Each of its passes has to be one of its parent's.
            fits = (first - begins) * each % most == 0 and (sequences * each % most == 0 or first + sequences == ends)
            if fits and last[above] + opening[n] <= limit:
                continues[n], state = above, state - 1
                last[n] += last[above] if pieces[n] == 1 else 0
        counts.append(state + pieces[n])
        states.append(state)
    return NodeCut(by_tiles, sizes, begin, parts, passes, *np.array([states, continues], np.int64))


def node_states(nodes: Longs, cut: NodeCut, sequences: int) -> Longs:
    """(sequences,): how many states each sequence has of the nodes above it."""
    return of_deepest(nodes, cut.state + cut.parts, sequences)


def node_pieces(nodes: Longs, cut: NodeCut, rows_each: int, most: int, by_tiles: bool) -> tuple[Longs, Longs]:
    """(9, n): the pieces of the nodes that go through tiles, or of the others, in passes of at most `most` rows over
    each of them; and (n,): the chain of each piece, the number of the first piece in it. A chain's pieces follow each
    other in one block."""
    (chosen,) = (cut.by_tiles == by_tiles).nonzero()
    if not len(chosen):
        return np.zeros((PIECE_FIELDS, 0), np.int64), chosen
    counts = cut.parts[chosen] * cut.passes[chosen]
    before = np.cumsum(counts) - counts  # the first piece of each node
    of = np.repeat(chosen, counts)
    number = np.arange(len(of)) - np.repeat(before, counts)
    part, turn = number // cut.passes[of], number % cut.passes[of]
    begins = cut.begin[of] + part * cut.size[of]
    made = np.zeros((PIECE_FIELDS, len(of)), np.int64)
    piece = Pieces(*made)
    piece.sequence[:] = piece.table[:] = nodes[of, FIRST]
    piece.row[:] = turn * most
    piece.rows[:] = np.minimum(most, nodes[of, SEQUENCES] * rows_each - piece.row)
    piece.start[:] = np.maximum(begins, nodes[of, START])
    piece.stop[:] = np.minimum(begins + cut.size[of], nodes[of, STOP])
    piece.state[:] = cut.state[of] + part
    piece.kind[:] = ALL_SEE  # a node ends before the first row of its shortest sequence
    chains = np.arange(len(of))
    (joined,) = (cut.continues >= 0).nonzero()
    place = np.zeros(len(nodes), np.int64)
    place[chosen] = before
    for n in joined.tolist() if by_tiles else ():
        above, passes = int(cut.continues[n]), int(cut.passes[n])
        last = int(place[above]) + int((cut.parts[above] - 1) * cut.passes[above])
        last += int(nodes[n, FIRST] - nodes[above, FIRST]) * rows_each // most
        chains[place[n] : place[n] + passes] = chains[last : last + passes]
    return made, chains


class Cut(NamedTuple):
    """All pieces of a plan: those of streaming warps, (9, n), those of tiles, (9, m), with the chain of each, (m,), and
    the states that they leave."""

    streamed: Longs
    tiled: Longs
    chains: Longs
    states: States
    total_states: int


def cut_plan(nodes: Longs, own: Own, cutter: Cutter, length: Longs, chaining: bool) -> Cut:
    """Cuts all ranges of a plan and numbers their states. nodes: (m, 5). length: (n,), in the plan's order. chaining:
    whether tile pieces may continue others."""
    cut = cutter.cut_own(own)
    if not len(nodes):
        none = np.zeros(len(length), np.int64)
        states, total = count_states(own, cut, none, length)
        return Cut(own_pieces(own, cut, none, cutter), np.zeros((PIECE_FIELDS, 0), np.int64), none[:0], states, total)
    nodes_cut = cut_nodes(nodes, cutter, chaining, cutter.own_work(nodes, length))
    counts = node_states(nodes, nodes_cut, len(length))
    shape, each = cutter.shape, cutter.rows_each
    streamed, _ = node_pieces(nodes, nodes_cut, each, shape.rows, by_tiles=False)
    tiled, chains = node_pieces(nodes, nodes_cut, each, shape.tile_rows, by_tiles=True)
    states, total = count_states(own, cut, counts, length)
    its = own_pieces(own, cut, counts, cutter)
    if streamed.shape[1]:
        its = np.concatenate([streamed, its], axis=1)
    return Cut(its, tiled, chains, states, total)


def count_states(own: Own, cut: OwnCut, node_states: Longs, length: Longs) -> tuple[States, int]:
    """The states of each sequence, and their number in scratch. node_states, length: (n,) for each sequence.

    A range that ends where its sequence ends grows with it, and so does the number of its states, unless one warp takes
    it whole. A sequence with a single state needs no scratch: its item writes the result.
    """
    sequence, parts, count = own.sequence, cut.parts, len(length)
    counts = node_states + _added(sequence, parts, count)
    before, grows_from, piece = counts, np.full(count, FAR), np.full(count, FAR)
    (cuts,) = (~cut.whole).nonzero()
    growing = cuts[own.planned[cuts] == length[sequence[cuts]]]
    if len(growing):
        its = sequence[growing]
        before = counts - _added(its, parts[growing], count)
        grows_from[its], piece[its] = cut.begin[growing], cut.size[growing]
    first = np.zeros(count + 1, np.int64)
    (counts * (counts > 1)).cumsum(out=first[1:])
    return States(first[:-1], before, grows_from, piece), int(first[-1])


def _added(sequence: Longs, parts: Longs, count: int) -> Longs:
    """(count,): the parts of each sequence."""
    found: Longs = np.bincount(sequence, parts, count).astype(np.int64)
    return found


def own_pieces(own: Own, cut: OwnCut, node_states: Longs, cutter: Cutter) -> Longs:
    """(9, n): the pieces of the own ranges. The ranges of one sequence stand in ascending order.

    node_states: (sequences,), how many states each sequence has of the nodes above it.
    """
    shape, parts, rows_each = cutter.shape, cut.parts, cutter.rows_each
    sequence, size, fold, whole, start, stop = own.sequence, cut.size, cut.fold, cut.whole, own.start, own.stop
    begin, state = cut.begin, node_states[sequence]
    new = sequence[1:] != sequence[:-1]  # of all ranges but the first: the first one of its sequence
    total = int(np.add.reduce(parts))
    if total > len(parts) or np.count_nonzero(new) < len(new):
        begun = parts.cumsum() - parts
        # States of the sequence's earlier own ranges come first.
        state += begun - np.maximum.accumulate(np.where(np.append(True, new)[: len(parts)], begun, 0))
    if total > len(parts):
        index = np.arange(len(parts)).repeat(parts)  # the range of each piece
        number = np.arange(total) - begun[index]  # which piece of its range it is
        sequence, size, start, stop = (x[index] for x in (sequence, size, start, stop))
        whole, fold = whole[index], fold[index]
        begin, state = begin[index] + number * size, state[index] + number
    row = np.arange(0, rows_each, shape.rows)
    made = np.empty((PIECE_FIELDS, total, len(row)), np.int64)
    piece = Pieces(*made)
    piece.sequence[:] = piece.table[:] = sequence[:, None]
    piece.row[:], piece.rows[:] = row, np.minimum(shape.rows, rows_each - row)
    piece.start[:] = np.maximum(begin, start)[:, None]
    piece.stop[:] = np.where(whole, stop, np.minimum(begin + size, stop))[:, None]
    piece.state[:] = state[:, None]
    piece.fold[:] = (fold // shape.chunk)[:, None]
    piece.kind[:] = OWN
    return made.reshape(PIECE_FIELDS, -1)


def items_of_heads(pieces: Longs, heads: int, rows_each: int, of: Sequences) -> Ints:
    """(n · heads, 16): the DecodeItems of pieces (9, n), one item per KV head, heads of a piece side by side."""
    part, count = Pieces(*pieces), pieces.shape[1]
    if not count:
        return np.empty((0, ITEM_WORDS), np.int32)
    turns = part.row // rows_each
    sequence, table = part.sequence + turns, part.table
    # The pages of the first chunk's two halves, unless one of them may be replaced while the list is in use: those
    # that stand in the tail.
    begin, tail_from = part.start // of.chunk * of.chunk, of.tail_from[table]
    number = begin // of.page_size
    second = number if of.chunk == CHUNK else (begin + of.chunk - CHUNK) // of.page_size
    last, fixed = of.pages.shape[1] - 1, second < tail_from
    page = second_page = np.where(fixed, of.pages[table, np.minimum(number, last)], -1)
    if second is not number:
        second_page = np.where(fixed, of.pages[table, np.minimum(second, last)], -1)
    items = np.empty((count, heads, ITEM_WORDS), np.int32)
    item = np.empty((ITEM_WORDS, count), np.int32)
    item[Word.SEQUENCE] = sequence
    item[Word.ROW] = part.row - turns * rows_each
    item[Word.ROWS] = part.rows
    item[Word.CALLER_HEAD] = of.order[sequence] << 12
    item[Word.TABLE] = table
    item[Word.START] = part.start
    item[Word.STOP] = part.stop
    item[Word.STATE_FOLD] = part.state << 16 | part.fold
    item[Word.PAGE] = page
    item[Word.TAIL_FROM] = tail_from
    item[STATE_WORDS] = of.states[sequence].T
    item[Word.KIND] = part.kind
    item[Word.SECOND_PAGE] = second_page
    items[:] = item.T[:, None]
    items[:, :, Word.CALLER_HEAD] += np.arange(heads, dtype=np.int32)
    return items.reshape(-1, ITEM_WORDS)


def first_tile_pages(items: Ints, of: Sequences) -> Ints:
    """(n, 4): the pages that the copies of each item's first tile read, −1 for a page in the tail."""
    box = next((n for n in (64, 32, 16) if of.page_size % n == 0), CHUNK)  # tokens per copy: gpu/decode.py tile_map
    token = items[:, Word.START, None] // TILE_TOKENS * TILE_TOKENS + box * np.arange(4)
    number = token // of.page_size
    page = of.pages[items[:, Word.TABLE, None], np.minimum(number, of.pages.shape[1] - 1)]
    return np.where(number < items[:, Word.TAIL_FROM, None], page, -1).astype(np.int32)
