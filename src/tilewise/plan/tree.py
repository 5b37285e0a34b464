"""Decode plans: find the tree of shared pages under a batch of sequences and decide which of its nodes to share.

Sequences that share a prefix hold the same pages at the same places of their page lists, whether a PrefixCache, a fork
or a foreign page table put them there. So the tree is read off the lists: a *node* is a run of pages that a group of
sequences has in common. Sharing a node computes the rows of the whole group over its tokens once, instead of once per
sequence; each row's states are merged afterwards. Chunk-first kernels, prefix/suffix phases and multi-level prefixes
are this tree with one, two or more levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewise.plan.cost import CPU_COST, CostModel
from tilewise.plan.tiles import OPEN, Band, DecodePlan, Ints, PagedTiles, Window

Range = tuple[int, int]  # tokens [start, stop)


def plan_tree(
    seqs: Sequence[int],
    page_lists: Sequence[Ints],
    lengths: Sequence[int],
    page_size: int,
    *,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    kv_row_bytes: float,
    io_bytes: int,
    stream_row_bytes: float | None = None,
    shortest_run: int = 0,
    cache_serial: int = -1,
    tokens_per_seq: int = 1,
    window: Window | None = None,
    share: bool | None = None,
    cost: CostModel = CPU_COST,
    room: int = 0,
    pages_per_seq: int = 0,
) -> DecodePlan:
    """The plan of one decode step.

    page_lists, lengths: of each sequence of `seqs`, whose last `tokens_per_seq` tokens are the queries. share: True
    shares every node, False none, None those for which `cost` says that it pays; `cost` then takes the K and V of one
    token in one KV head as `stream_row_bytes` bytes, which is what the inner loop reads if that is not what is stored
    (`kv_row_bytes`). shortest_run: cut ranges where their pages are not consecutive, if the parts have at least this
    many tokens on average; 0 never cuts. A backend that reads consecutive pages in place wants that. pages_per_seq: how
    many pages a sequence reads at most, 0 for all; without `share` and `window`.

    A node is shared only as far as every row of the group sees all of it, so shared items need no mask. What is left
    of each sequence, with its causal end, are its own items.
    """
    left = window[0] if window is not None else None
    batch = _Batch(page_lists, lengths, page_size, tokens_per_seq, left, shortest_run, pages_per_seq * page_size)
    order, tree = _find_tree(batch)
    kv_bytes = heads_kv * (stream_row_bytes or kv_row_bytes)
    judge = _Judge(cost, tokens_per_seq * heads_q, heads_kv, head_dim, kv_bytes) if share is None else None
    shared: list[Range | None] = [None] * len(tree)
    if share is not False:
        chosen = _choose_nodes(batch, tree, judge)
        if any(chosen) and (judge is None or judge.plan_pays(batch, tree, chosen)):
            shared = chosen
    work, tails, tokens_read = _lay_out(batch, order, tree, shared)
    shared_nodes = len(tree) - shared.count(None)
    return DecodePlan(
        kind="decode",
        work=(*work, *_batched(tails)),
        rows=len(seqs) * tokens_per_seq,
        keys=(tokens_read,),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        exclusive=shared_nodes == 0 and len({tail.row for tail in tails}) == len(tails),
        kv_row_bytes=kv_row_bytes,
        io_bytes=io_bytes,
        seqs=tuple(seqs),
        lengths=tuple(lengths),
        order=np.array(order, np.int32),
        tokens_per_seq=tokens_per_seq,
        shared_nodes=shared_nodes,
        window=window,
        room=room,
        pages_per_seq=pages_per_seq,
        cache_serial=cache_serial,
        stored_tokens=sum(node.stored for node in tree),
    )


@dataclass(frozen=True)
class _Batch:
    """The sequences of a plan. left: how many tokens before its own a row sees, None for all. most: how many tokens a
    sequence reads at most, 0 for all."""

    page_lists: Sequence[Ints]
    lengths: Sequence[int]
    page_size: int
    tokens_per_seq: int
    left: int | None
    shortest_run: int
    most: int

    def tiles(self, member: int, row: int, rows: int, tokens: Range, key: int, band: Band) -> list[PagedTiles]:
        """Rows [row, row + rows) over a token range of sequence `member`, cut as `shortest_run` asks.

        key: where the first token stands when every token read is counted once. band: counted from token 0.
        """
        pages, size, (start, stop) = self.page_lists[member], self.page_size, tokens
        cuts = [start, stop]
        if self.shortest_run and stop - start >= 2 * self.shortest_run:  # two parts or more
            parts = [start, *_breaks(pages, size, start, stop), stop]
            if stop - start >= self.shortest_run * (len(parts) - 1):
                cuts = parts
        return [
            PagedTiles(
                row=row,
                rows=rows,
                pages=pages[None, a // size : -(-b // size)],
                start=a,
                stop=b,
                keys_at=np.array([key + a - start], np.int32),
                band=band.shifted(-a).opened(rows, b - a),
            )
            for a, b in pairwise(cuts)
        ]

    def left_over(self, length: int, shared: Sequence[Range]) -> list[Range]:
        """The token ranges of a sequence of `length` tokens that some row of it sees and that are in none of the shared
        ranges. Those ascend, and all rows see all of them."""
        at = 0 if self.left is None else max(0, length - self.tokens_per_seq - self.left)
        if self.most:
            length = min(length, self.most)
        ranges = []
        for start, stop in shared:
            if start > at:
                ranges.append((at, start))
            at = stop
        if length > at:
            ranges.append((at, length))
        return ranges


class _Node(NamedTuple):
    """A node of the tree: the sequences [first, end) of the plan's order. A leaf has one sequence.

    parent: the number of its parent in the tree, -1 for the root. depth: pages that the whole group has in common,
    those of the ancestors included. shortest, longest: of the group's lengths. stored: tokens in the node's own pages.
    """

    first: int
    end: int
    parent: int
    depth: int
    shortest: int
    longest: int
    stored: int

    @property
    def sequences(self) -> int:
        return self.end - self.first


def _find_tree(batch: _Batch) -> tuple[list[int], list[_Node]]:
    """The sequences in the plan's order, and the nodes of the tree over them, each node before its children.

    Sorted by their pages, the sequences that share a prefix are neighbours, and each node is a run of them.
    """
    page_lists, page_size = batch.page_lists, batch.page_size
    order = sorted(range(len(page_lists)), key=lambda m: page_lists[m].tobytes())
    common = np.array([_common_pages(page_lists[a], page_lists[b]) for a, b in pairwise(order)], np.int64)
    lengths = [batch.lengths[m] for m in order]
    tree: list[_Node] = []
    stack = [(0, len(order), -1, 0)] if order else []  # first, end, parent, pages of the ancestors
    while stack:
        first, end, parent, above = stack.pop()
        if end - first == 1:
            length = lengths[first]
            tree.append(_Node(first, end, parent, above, length, length, max(0, length - above * page_size)))
            continue
        depth = int(common[first : end - 1].min())
        shortest, longest = min(lengths[first:end]), max(lengths[first:end])
        stored = max(0, min(depth * page_size, shortest) - above * page_size)
        splits = first + 1 + np.flatnonzero(common[first : end - 1] == depth)
        bounds = [first, *splits.tolist(), end]
        stack += [(a, b, len(tree), depth) for a, b in reversed(list(pairwise(bounds)))]
        tree.append(_Node(first, end, parent, depth, shortest, longest, stored))
    return order, tree


class _Judge(NamedTuple):
    """The cost model and the sizes of the problem that it is asked about."""

    cost: CostModel
    rows_each: int  # query tokens × query heads per sequence
    heads_kv: int
    head_dim: int
    kv_bytes: float  # K and V of one token, all KV heads

    def node_pays(self, sequences: int, tokens: int) -> bool:
        return self.cost.shares(sequences, tokens, self.rows_each, self.head_dim, self.kv_bytes)

    def plan_pays(self, batch: _Batch, tree: list[_Node], shared: list[Range | None]) -> bool:
        """Is the plan with these shared nodes faster than the plan without sharing?"""
        own = widest = 0
        saved_us = alone_us = 0.0
        for node, tokens, covered in zip(tree, shared, _covered(tree, shared), strict=True):
            if tokens is not None:
                asked = (node.sequences, tokens[1] - tokens[0], self.rows_each, self.head_dim, self.kv_bytes)
                saved_us += self.cost.saving_us(*asked)
                alone_us += self.cost.alone_us(*asked)
                widest = max(widest, node.sequences * self.rows_each // self.heads_kv)
            elif node.sequences == 1:
                own += sum(stop - start for start, stop in batch.left_over(node.longest, covered))
        return self.cost.pays(alone_us, saved_us, own * self.kv_bytes, widest)


def _choose_nodes(batch: _Batch, tree: list[_Node], judge: _Judge | None) -> list[Range | None]:
    """The tokens of each node that its group shares, None for a node that is not shared. Without a judge, every node is
    shared that has tokens that all of its rows see."""
    chosen: list[Range | None] = []
    ends: list[int] = []  # for each node: the end of what the node and its ancestors share
    for node in tree:
        at = ends[node.parent] if node.parent >= 0 else 0
        # A row sees the tokens up to its own and `left` tokens before it. The first row of the shortest sequence and
        # the last row of the longest one see the least.
        start = at if batch.left is None else max(at, node.longest - 1 - batch.left)
        stop = min(node.depth * batch.page_size, node.shortest - batch.tokens_per_seq + 1)
        shares = (
            node.sequences > 1 and stop > start and (judge is None or judge.node_pays(node.sequences, stop - start))
        )
        chosen.append((start, stop) if shares else None)
        ends.append(stop if shares else at)
    return chosen


def _covered(tree: list[_Node], shared: list[Range | None]) -> list[tuple[Range, ...]]:
    """For each node the token ranges that it and its ancestors share, ascending."""
    found: list[tuple[Range, ...]] = []
    for node, tokens in zip(tree, shared, strict=True):
        above = found[node.parent] if node.parent >= 0 else ()
        found.append(above if tokens is None else (*above, tokens))
    return found


def _lay_out(
    batch: _Batch, order: list[int], tree: list[_Node], shared: list[Range | None]
) -> tuple[list[PagedTiles], list[PagedTiles], int]:
    """The items of the shared nodes, the items of what is left of each sequence, and the tokens that both read."""
    work: list[PagedTiles] = []
    tails: list[PagedTiles] = []
    tokens_read = 0
    for node, tokens, covered in zip(tree, shared, _covered(tree, shared), strict=True):
        member, row = order[node.first], node.first * batch.tokens_per_seq
        if tokens is not None:
            work += batch.tiles(member, row, node.sequences * batch.tokens_per_seq, tokens, tokens_read, OPEN)
            tokens_read += tokens[1] - tokens[0]
        elif node.sequences == 1:
            diagonal = node.longest - batch.tokens_per_seq
            band = Band(None if batch.left is None else diagonal - batch.left, diagonal)
            for start, stop in batch.left_over(node.longest, covered):
                tails += batch.tiles(member, row, batch.tokens_per_seq, (start, stop), tokens_read, band)
                tokens_read += stop - start
    return work, tails, tokens_read


def _batched(tails: Sequence[PagedTiles]) -> list[PagedTiles]:
    """Neighbouring tails with the same tokens and the same band as one item each."""
    batches: dict[tuple[int, int, Band], list[list[PagedTiles]]] = {}
    for tail in tails:
        runs = batches.setdefault((tail.start, tail.stop, tail.band), [])
        if runs and tail.row == runs[-1][-1].row + tail.rows:
            runs[-1].append(tail)
        else:
            runs.append([tail])
    return [
        replace(
            run[0],
            pages=np.concatenate([tail.pages for tail in run]),
            keys_at=np.concatenate([tail.keys_at for tail in run]),
        )
        for runs in batches.values()
        for run in runs
    ]


def _breaks(pages: Ints, page_size: int, start: int, stop: int) -> list[int]:
    """The tokens in (start, stop) that begin a page which does not follow its predecessor in memory."""
    first = start // page_size
    part = pages[first : -(-stop // page_size)]
    before: list[int] = (part[1:] != part[:-1] + 1).nonzero()[0].tolist()
    return [(first + n + 1) * page_size for n in before]


def _common_pages(a: Ints, b: Ints) -> int:
    """How many leading pages two lists have in common."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
