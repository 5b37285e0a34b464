"""Which rows of a rank meet which keys, step by step: plans of context-parallel attention. Pure: no tensors, no I/O.

A chunk of queries over a chunk of keys is again attention with a window, aligned bottom-right. Say row 0 of the chunk
stands `shift` keys after its key 0. Then the rule `low <= key − position <= high` of the whole sequence reads
`low + shift <= j − i <= high + shift` inside the pair of chunks. `attention` says the same of Nq rows and Nk keys by
`window = (Nk − Nq − low − shift, high + shift − Nk + Nq)`. Either may come out negative; then the last rows see
nothing, or the last keys are seen by nobody, and without them it is 0. So every pair of chunks is one call without a
dense mask, or none at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from tilewise import arguments, checks
from tilewise.plan import Band, Window, band_of, visible_pairs

from .shards import LAYOUTS, Chunk, Layout, chunks_of, shard_size

Method = Literal["ring", "all_gather"]
METHODS = ("ring", "all_gather")


class Piece(NamedTuple):
    """Rows [row, row + rows) of a rank meet keys [key, key + keys) of the block at hand: one call of `attention`."""

    row: int
    rows: int
    key: int
    keys: int
    window: Window = (None, None)  # of that call, bottom-right

    @property
    def pairs(self) -> int:
        """Visible (row, key) pairs: the work, in units of one query head."""
        return visible_pairs(self.rows, self.keys, band_of(self.rows, self.keys, False, self.window))


class Step(NamedTuple):
    """What a rank does while it has one block of keys: compute, and meanwhile pass it on and receive the next.

    source: the rank whose keys they are, in that rank's order; None: all keys, in order.
    """

    source: int | None
    keys: int
    pieces: tuple[Piece, ...]
    sends: bool = False
    receives: bool = False


@dataclass(frozen=True)
class ContextPlan:
    """What one rank computes and what travels: steps in their order.

    hops: how many ranks further its keys go in a ring; from the last of them their gradients come home.
    """

    rank: int
    world: int
    method: str
    layout: str
    seqlen_q: int
    seqlen_k: int
    steps: tuple[Step, ...]
    hops: int = 0

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Positions of the queries that this rank holds, in its order: (start, stop) of each chunk."""
        return chunks_of(self.layout, self.seqlen_q, self.rank, self.world)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All calls of `attention`."""
        return tuple(piece for step in self.steps for piece in step.pieces)

    @property
    def pairs(self) -> int:
        """Visible (row, key) pairs that this rank computes, for each sequence and query head."""
        return sum(piece.pairs for piece in self.pieces)

    @property
    def keys_sent(self) -> int:
        """Tokens whose K and V this rank sends, one for each rank that is sent to."""
        if self.method == "all_gather":
            return (self.world - 1) * shard_size(self.layout, self.seqlen_k, self.rank, self.world)
        return sum(step.keys for step in self.steps if step.sends)

    @property
    def exclusive(self) -> bool:
        """Is no row in two pieces, so that no states need merging?"""
        spans = sorted((piece.row, piece.row + piece.rows) for piece in self.pieces)
        return all(a[1] <= b[0] for a, b in pairwise(spans))


def visible_piece(row: int, rows: int, key: int, keys: int, shift: int, window: Window) -> Piece | None:
    """`rows` rows over `keys` keys, row 0 standing `shift` keys after key 0, without what sees or shows nothing."""
    left, right = window
    band = Band(None if left is None else shift - left, None if right is None else shift + right)
    # Rows before `top` see only keys before the first, rows from `bottom` on only keys after the last; so for keys.
    top = 0 if band.high is None else max(0, -band.high)
    bottom = rows if band.low is None else min(rows, keys - band.low)
    first = 0 if band.low is None else max(0, top + band.low)
    end = keys if band.high is None else min(keys, bottom + band.high)
    if top >= bottom or first >= end:
        return None
    size, width = bottom - top, end - first
    band = band.shifted(top - first).opened(size, width)
    diagonal = width - size
    kept = (
        None if band.low is None else diagonal - band.low,
        None if band.high is None else band.high - diagonal,
    )
    return Piece(row + top, size, key + first, width, kept)


def fused(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same pairs in fewer calls, where pieces adjoin: a call with more in it runs closer to the card's rate."""
    todo = sorted(pieces, key=lambda p: p[:4])
    done: list[Piece] = []
    for piece in todo:  # the same rows, and keys to the left in full view: bottom-right, that moves no window
        last = done[-1] if done else None
        if (
            last is not None
            and last[:2] == piece[:2]
            and last.key + last.keys == piece.key
            and last.window == (None, None)
            and piece.window[0] is None
        ):
            done[-1] = Piece(*last[:3], last.keys + piece.keys, piece.window)
        else:
            done.append(piece)
    todo, done = sorted(done, key=lambda p: (p.key, p.keys, p.row)), []
    for piece in todo:  # the same keys, in full view of all the rows
        last = done[-1] if done else None
        if (
            last is not None
            and last[2:] == piece[2:]
            and last.row + last.rows == piece.row
            and piece.window == (None, None)
        ):
            done[-1] = Piece(last.row, last.rows + piece.rows, *last[2:])
        else:
            done.append(piece)
    return tuple(sorted(done, key=lambda p: p[:4]))


def _pieces(q_chunks: Sequence[Chunk], k_chunks: Sequence[Chunk], diagonal: int, window: Window) -> tuple[Piece, ...]:
    """Every chunk of a rank's queries over every chunk of a block of keys, as far as they see each other."""
    found = []
    row = 0
    for q in q_chunks:
        key = 0
        for k in k_chunks:
            piece = visible_piece(row, q.size, key, k.size, q.start + diagonal - k.start, window)
            if piece is not None:
                found.append(piece)
            key += k.size
        row += q.size
    return fused(found)


def plan_context(
    seqlen: int | tuple[int, int],
    *,
    rank: int,
    world: int,
    method: Method = "ring",
    layout: Layout = "zigzag",
    causal: bool = False,
    window: Window | None = None,
) -> ContextPlan:
    """The plan that `context_attention` follows on one rank, to look at: `.steps`, `.pairs`, `.keys_sent`.

    seqlen: positions of the whole sequence, or (of the queries, of the keys).
    """
    seqlen_q, seqlen_k = check_seqlen(seqlen)
    checks.integer("world", world, 1)
    checks.integer("rank", rank, 0, world - 1)
    checks.choice("method", method, METHODS)
    checks.choice("layout", layout, LAYOUTS)
    return planned(seqlen_q, seqlen_k, rank, world, method, layout, checks.flag("causal", causal), window)


def check_seqlen(seqlen: Any) -> tuple[int, int]:
    """(positions of the queries, of the keys)."""
    both = seqlen if isinstance(seqlen, (tuple, list)) else (seqlen, seqlen)
    if len(both) != 2:
        raise ValueError(f"seqlen must be an int, or (of the queries, of the keys), got {seqlen!r}")
    of_q, of_k = (checks.integer("seqlen", n, 0) for n in both)
    return of_q, of_k


def planned(
    seqlen_q: int,
    seqlen_k: int,
    rank: int,
    world: int,
    method: str,
    layout: str,
    causal: bool,
    window: Window | None,
) -> ContextPlan:
    """`plan_context` of checked arguments."""
    left, right = arguments.check_window(window) or (None, None)
    return _planned(seqlen_q, seqlen_k, rank, world, method, layout, (left, 0 if causal else right))


@lru_cache(maxsize=256)  # every layer of a model asks for the same plan
def _planned(
    seqlen_q: int, seqlen_k: int, rank: int, world: int, method: str, layout: str, window: Window
) -> ContextPlan:
    diagonal = seqlen_k - seqlen_q  # bottom-right: query i stands at key i + diagonal
    queries = [chunks_of(layout, seqlen_q, r, world) for r in range(world)]
    if method == "all_gather":
        pieces = _pieces(queries[rank], [Chunk(0, seqlen_k)], diagonal, window)
        steps = (Step(None, seqlen_k, pieces),)
        return ContextPlan(rank, world, method, layout, seqlen_q, seqlen_k, steps)

    blocks = [chunks_of(layout, seqlen_k, r, world) for r in range(world)]
    sizes = [sum(chunk.size for chunk in block) for block in blocks]
    # A block goes from rank to rank, and no further than the last one that needs it.
    hops = [
        max((t for t in range(world) if _pieces(queries[(s + t) % world], blocks[s], diagonal, window)), default=0)
        for s in range(world)
    ]
    ring = []
    for t in range(world):
        source, following = (rank - t) % world, (rank - t - 1) % world
        pieces = _pieces(queries[rank], blocks[source], diagonal, window)
        ring.append(Step(source, sizes[source], pieces, sends=t < hops[source], receives=t < hops[following]))
    return ContextPlan(rank, world, method, layout, seqlen_q, seqlen_k, tuple(ring), hops[rank])
