"""Which token ranges a decode plan has, and how each of them is cut into pieces.

A plan's work is of two kinds. A *node* is a token range that several neighbouring sequences share; tiles or streaming
warps compute it, and it is cut so that all blocks get an even share. An *own range* belongs to one sequence. The size
of its pieces depends on its own length, and on the room that it has to grow, never on the batch, so that a sequence
decoded without sharing has the same bits whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.plan.cost import WHOLE_CHUNKS, WHOLE_LIMITS, WIDE_ROWS, Weights
from tilewise.plan.flat import SEQUENCES, START, STOP, of_deepest
from tilewise.plan.tiles import DecodePlan

Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

CHUNK = 16  # tokens of the smallest chunk, decode/load.cuh: kChunk; costs are counted in chunks of this size
TILE_ROWS, TILE_TOKENS = 128, 64  # decode/tile.cuh: rows of a tile item at most, tokens of one of its steps
FAR = 1 << 30  # no limit; more tokens than any sequence has
# Pieces, by the order in which states are merged (decode/states.cuh). Up to 64, kRun · kFolds, groups of four are
# folded before anything else. Of up to sixteen, kRun, and one group more, groups are folded one after another, as by a
# warp that takes the range whole.
MOST_IN_GROUPS, RUN = 64, 16


@dataclass(frozen=True)
class Splitting:
    """How token ranges are cut.

    pieces: pairs (limit, tokens): own ranges of up to `limit` tokens are cut into pieces of `tokens` tokens; the first
    limit that is large enough counts. Either several warps take one piece each and leave one state each, or one warp
    takes the range whole and folds piece after piece into one state. Both give the same bits. whole: True for always
    whole, False for always cut, None for whatever is estimated to keep the warps busiest.
    group: with more than 1, states are folded in groups of so many, and groups in their order. Then one warp may also
    take a group of pieces together, with the same bits. groups: like `whole`, of ranges that are cut.
    shared: nodes are cut into equal pieces of at least this many tokens, as many as give all blocks even work.
    tile_rows: a node with at least this many rows per KV head goes through tiles.
    """

    pieces: tuple[tuple[int, int], ...] = ((256, 256), (1024, 64), (2048, 128), (8192, 512), (FAR, 1024))
    shared: int = 512
    tile_rows: int = WIDE_ROWS
    whole: bool | None = None
    group: int = 1
    groups: bool | None = None

    def of(self, tokens: Longs, grown: Longs | None = None) -> Longs:
        """(n,) → (n,): tokens per piece for own ranges of so many tokens. grown: how many they may come to have; with
        room for more pieces than a run has, a range is cut as if it had grown."""
        limits, sizes = _columns(self.pieces)
        found: Longs = sizes[limits.searchsorted(np.minimum(tokens, limits[-1]))]
        return found if grown is None else np.where(grown > RUN * found, self.of(grown), found)


@lru_cache(maxsize=64)
def _columns(pieces: tuple[tuple[int, int], ...]) -> tuple[Longs, Longs]:
    limits, sizes = np.array(pieces, np.int64).T
    return limits, sizes


class Shape(NamedTuple):
    """The sizes of a decode kernel and its grid.

    rows: query rows of a stream item at most. warps: streaming warps per block. blocks: blocks of the grid. tiles:
    whether the kernel has a part for tiles. longest: own ranges of up to this many chunks of 16 tokens may be taken
    whole by one warp. joiners: warps per block that stream after their tile items are done. chunk: tokens that a
    streaming warp loads and computes at a time, 16 or 32. weights: what the list is balanced by. tile_rows: rows of a
    tile item at most. in_turn: a block's warps do not stream while they compute its tile items.
    """

    rows: int
    warps: int
    blocks: int
    tiles: bool
    longest: int = WHOLE_CHUNKS
    joiners: int = 0
    chunk: int = CHUNK
    weights: Weights = Weights()
    tile_rows: int = TILE_ROWS
    in_turn: bool = False


class Own(NamedTuple):
    """The sequences' own ranges, (n,) each, by sequence and ascending: tokens [start, stop) of `sequence`, a number of
    the plan's order. stop includes the room to grow; planned is the stop without it."""

    sequence: Longs
    start: Longs
    stop: Longs
    planned: Longs


class OwnCut(NamedTuple):
    """How each own range is cut, (n,) each: the tokens that one warp takes together, and those that it folds at a time,
    0 where it does not; whether one warp takes the range whole, the first token of the range's first chunk, and the
    number of items, which is 1 for a whole range."""

    size: Longs
    fold: Longs
    whole: Flags
    begin: Longs
    parts: Longs


def find_own(plan: DecodePlan, length: Longs, room: int) -> Own:
    """The plan's own ranges. length: (n,), in the plan's order: tokens that each sequence has now, or reads if those
    are fewer. What it got since the plan was made is its own.

    Every sequence needs an item that writes its result, and with `room` also a range at its end that can grow; a
    sequence that has none gets an own range at its end, which may be empty.
    """
    arrays = plan.arrays
    sequence, start, stop = arrays.own
    most = plan.pages_per_seq * arrays.page_size
    then = np.minimum(arrays.lengths, most) if most else arrays.lengths
    ends = stop == then[sequence]
    planned = np.where(ends, length[sequence], stop)
    own = Own(sequence, start, planned + room * ends if room else planned, planned)
    served = np.zeros(len(length), np.bool_)
    if not room:
        served = of_deepest(arrays.nodes, np.ones(len(arrays.nodes), np.int64), len(length)) > 0
        served[sequence] = True
        served &= length == then
    served[sequence[ends]] = True
    if np.count_nonzero(served) < len(served):
        missing = np.flatnonzero(~served)
        more = then[missing], length[missing] + room, length[missing]
        both = np.concatenate([np.stack(own), np.stack([missing, *more])], axis=1)
        own = Own(*both[:, both[0].argsort(kind="stable")])
    return own


class Cutter(NamedTuple):
    """Cuts the ranges of one problem: `rows_each` query rows per sequence and KV head, `heads` KV heads. Nodes are
    (m, 5), as choose_nodes in flat.py returns them."""

    rows_each: int
    heads: int
    shape: Shape
    splitting: Splitting

    def by_tiles(self, nodes: Longs) -> Flags:
        """(m,): which nodes go through tiles. Streaming warps compute the others."""
        found: Flags = nodes[:, SEQUENCES] * self.rows_each >= self.splitting.tile_rows
        return found & self.shape.tiles

    def own_work(self, nodes: Longs, length: Longs) -> float:
        """What blocks do besides `nodes`, in tokens as size_nodes counts them: what sequences have of their own, with
        an item and a state each. 0 where warps of a block take items of their own, which even out. length: (n,)."""
        if self.shape.tiles or self.shape.warps > 1:
            return 0.0
        weights, passes = self.shape.weights, -(-self.rows_each // self.shape.rows)
        tokens = int(length.sum()) - int(((nodes[:, STOP] - nodes[:, START]) * nodes[:, SEQUENCES]).sum())
        items = int(np.count_nonzero(length)) * CHUNK * (weights.item_chunks + weights.state_chunks)
        return passes * (tokens + items)

    def size_nodes(self, nodes: Longs, by_tiles: Flags, beside: float = 0.0) -> tuple[Longs, Longs, float]:
        """The tokens of a piece of each node, (m,), and the passes over its rows, (m,); and for nodes that go through
        tiles the tokens per block if all of them were dealt out evenly. The tokens of a node count once for each KV
        head and each pass. beside: own_work.

        Pieces of a node are equal, multiples of 64 tokens, and have about an even share per block of all that there is
        to do: were nodes cut for all blocks, the blocks that sequences' own ranges come to would be done last.
        """
        shape, tokens = self.shape, nodes[:, STOP] - nodes[:, START]
        most = np.where(by_tiles, shape.tile_rows, shape.rows)
        passes: Longs = -(-nodes[:, SEQUENCES] * self.rows_each // most)
        work = tokens * passes
        of_tiles = int(np.add.reduce(work * by_tiles))
        others = int(np.add.reduce(work)) - of_tiles
        streams, tiles = (
            max(self.splitting.shared, x * self.heads / shape.blocks) for x in (others + beside, of_tiles)
        )
        pieces = np.maximum(1, (tokens / np.where(by_tiles, tiles, streams) + 1e-9).astype(np.int64))
        return -(-tokens // (pieces * TILE_TOKENS)) * TILE_TOKENS, passes, tiles

    def node_sizes(self, nodes: Longs) -> Longs:
        """(m,): size_nodes' tokens of a piece of each node."""
        return self.size_nodes(nodes, self.by_tiles(nodes))[0]

    def cut_own(self, own: Own) -> OwnCut:
        """How each own range is cut. Room for a few pieces more does not change their size."""
        chunk, group = self.shape.chunk, self.splitting.group
        piece = np.maximum(self.splitting.of(own.planned - own.start, own.stop - own.start), chunk)
        begin = own.start // chunk * chunk
        size, fold = piece, np.zeros_like(piece)
        reached = -(-(own.stop - begin) // piece)  # pieces, with the room to grow
        whole, groups = self._choose(own, piece, reached)
        if groups:
            may = reached <= MOST_IN_GROUPS
            size, fold = np.where(may, group * piece, piece), np.where(may, piece, 0)
        parts = np.where(whole, 1, np.maximum(1, -(-(own.stop - begin) // size)))
        return OwnCut(size, np.where(whole, piece, fold), whole, begin, parts)

    def _choose(self, own: Own, size: Longs, reached: Longs) -> tuple[Flags, bool]:
        """(n,): which ranges one warp takes whole; and whether others are cut into groups of pieces. size: (n,), tokens
        of their pieces; reached: (n,), the pieces that they may come to have.

        Ranges up to some limit are taken whole, longer ones are cut. Each candidate for the limit, and for what longer
        ones are cut into, gets an estimate: the larger of what all warps do on average and what the longest item takes
        a warp that runs `sprint` times as fast because the others are done. The smallest estimate wins; of equal ones
        pieces do, and the smallest limit.
        """
        chunks = -(-(own.planned - own.start // CHUNK * CHUNK) // CHUNK)
        pieces = np.maximum(1, -(-chunks // (size // CHUNK)))
        splitting, shape = self.splitting, self.shape
        ways = [of for of in (False, True) if splitting.groups in (None, of)] if splitting.group > 1 else [False]
        if splitting.whole is not None and len(ways) == 1:
            return np.full(len(chunks), splitting.whole), ways[0]
        times = self.heads * -(-self.rows_each // shape.rows)  # each range has one item per head and pass
        warps, weights = shape.blocks * shape.warps, shape.weights
        limits = np.array((*WHOLE_LIMITS, shape.longest))[:, None]
        taken = ((chunks <= limits) | (pieces == 1)) & (reached <= RUN + splitting.group)
        if splitting.whole is not None:
            taken = np.full((1, len(chunks)), splitting.whole)
        best, found = np.inf, (taken[0], ways[0])
        for groups in ways:
            # pieces of an item
            each = np.where(reached <= MOST_IN_GROUPS, splitting.group, 1) if groups else 1
            parts = -(-pieces // each)
            items, states = np.where(taken, 1, parts), np.where(taken, 0, parts)
            work = chunks + items * weights.item_chunks + states * weights.state_chunks
            if weights.fold_chunks:
                work += (pieces - np.where(taken | groups, items, pieces)) * weights.fold_chunks
            average = work.sum(1) * times / warps
            cut = np.minimum(size // CHUNK * each, chunks) if groups else size // CHUNK
            longest = np.where(taken, chunks, cut).max(1, initial=0) + weights.item_chunks
            estimates = np.maximum(average, longest / weights.sprint)
            n = int(estimates.argmin())
            if estimates[n] < best:
                best, found = float(estimates[n]), (taken[n], groups)
        return found


def uses_tiles(plan: DecodePlan, splitting: Splitting | None = None) -> bool:
    """Has the plan a shared node with enough rows for tiles?"""
    rows = plan.tokens_per_seq * (plan.heads_q // plan.heads_kv)
    return bool((plan.arrays.nodes[:, SEQUENCES] * rows >= (splitting or Splitting()).tile_rows).any())
