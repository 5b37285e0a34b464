"""Decode plans: find the tree of shared pages under a batch of sequences and decide which of its nodes to share.

Sequences that share a prefix hold the same pages at the same places of their page lists, however they came to it
(PrefixCache, fork, somebody else's page table). So the tree is read off the lists: a *node* is a run of pages that
a group of sequences has in common. Sharing a node puts the rows of the whole group over its tokens once, in place
of once a sequence; each row's states are merged afterwards. Chunk-first kernels, prefix/suffix phases and
multi-level prefixes are this tree with one, two or more levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from tilewise.plan.cost import CPU_COST, CostModel
from tilewise.plan.tiles import OPEN, Band, DecodePlan, Ints, PagedTiles, Window


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
) -> DecodePlan:
    """The work list of a decode step. `share` None is "auto": the cost model decides node by node, taking one token's K
    and V in one KV head as `stream_row_bytes` (what the inner loop reads, if that is not what is stored).

    shortest_run: cut ranges where their pages are not consecutive, if the pieces have so many tokens on average (a
    backend that reads consecutive pages in place wants that; 0: never cut).

    Sequence n's last `tokens_per_seq` tokens are the queries. A node is shared only as far as every row of the group
    sees all of it, so shared items need no mask; what is left of each sequence, with its causal tail, is its own item.
    """
    asked = dict(locals())
    left = window[0] if window is not None else None
    rows_each = tokens_per_seq * heads_q
    kv_bytes = heads_kv * (stream_row_bytes or kv_row_bytes)
    ends = [length - tokens_per_seq + 1 for length in lengths]  # tokens before it are seen by all the rows
    starts = [0 if left is None else max(0, length - 1 - left) for length in lengths]

    def items(member: int, row: int, rows: int, start: int, stop: int, key: int, band: Band) -> list[PagedTiles]:
        """Rows over tokens [start, stop) of a member's pages; `band` counts from token 0."""
        pages = page_lists[member]
        cuts = [start, *_breaks(pages, page_size, start, stop), stop]
        if stop - start < shortest_run * (len(cuts) - 1) or not shortest_run:
            cuts = [start, stop]
        return [
            PagedTiles(
                row=row,
                rows=rows,
                pages=pages[None, a // page_size : -(-b // page_size)],
                start=a,
                stop=b,
                keys_at=np.array([key + a - start], np.int32),
                band=band.shifted(-a).opened(rows, b - a),
            )
            for a, b in pairwise(cuts)
        ]

    work: list[PagedTiles] = []  # shared nodes
    tails: list[PagedTiles] = []  # what is left of each sequence
    shared_nodes = tokens_read = stored = widest = 0
    saved_us = alone_us = 0.0
    # Sorted by pages, sequences that share a prefix stand together, and a node is a run of them.
    order = sorted(range(len(seqs)), key=lambda m: page_lists[m].tobytes())
    common = np.array([_common_pages(page_lists[a], page_lists[b]) for a, b in pairwise(order)], np.int64)
    # A pre-order walk. An entry: the run [first, end) of `order`, the pages above it, the token ranges already shared.
    stack: list[tuple[int, int, int, tuple[tuple[int, int], ...]]] = [(0, len(seqs), 0, ())] if seqs else []
    while stack:
        first, end, above, shared = stack.pop()
        row, group = first * tokens_per_seq, order[first:end]
        if len(group) == 1:
            member = group[0]
            stored += max(0, lengths[member] - above * page_size)
            diagonal = lengths[member] - tokens_per_seq
            band = Band(None if left is None else diagonal - left, diagonal)
            for start, stop in _left_over(lengths[member], tokens_per_seq, left, shared):
                tails += items(member, row, tokens_per_seq, start, stop, tokens_read, band)
                tokens_read += stop - start
            continue
        depth = int(common[first : end - 1].min())
        shortest = min(lengths[m] for m in group)
        stored += max(0, min(depth * page_size, shortest) - above * page_size)
        start = max(shared[-1][1] if shared else 0, max(starts[m] for m in group))
        stop = min(depth * page_size, min(ends[m] for m in group))
        if (
            stop > start
            and share is not False
            and (share or cost.shares(len(group), stop - start, rows_each, head_dim, kv_bytes))
        ):
            work += items(group[0], row, len(group) * tokens_per_seq, start, stop, tokens_read, OPEN)
            tokens_read += stop - start
            shared_nodes += 1
            widest = max(widest, len(group) * rows_each // heads_kv)
            saved_us += cost.saving_us(len(group), stop - start, rows_each, head_dim, kv_bytes)
            alone_us += cost.alone_us(len(group), stop - start, rows_each, head_dim, kv_bytes)
            shared = (*shared, (start, stop))
        splits = first + 1 + np.flatnonzero(common[first : end - 1] == depth)
        bounds = [first, *splits.tolist(), end]
        stack += [(a, b, depth, shared) for a, b in reversed(list(pairwise(bounds)))]

    if share is None and shared_nodes:
        own = sum((tail.stop - tail.start) * len(tail.pages) for tail in tails)
        if not cost.pays(alone_us, saved_us, own * kv_bytes, widest):
            return plan_tree(**{**asked, "share": False})
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
        cache_serial=cache_serial,
        stored_tokens=stored,
    )


def _batched(tails: Sequence[PagedTiles]) -> list[PagedTiles]:
    """Tails with the same tokens and the same band, one row range after another, as one item each."""
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
    """The tokens in (start, stop) at which a page follows that is not the next one in memory."""
    first = start // page_size
    part = pages[first : -(-stop // page_size)]
    after: list[int] = (np.flatnonzero(part[1:] != part[:-1] + 1) + 1).tolist()
    return [(first + n) * page_size for n in after]


def _common_pages(a: Ints, b: Ints) -> int:
    """How many first pages two lists have in common."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _left_over(
    length: int, tokens_per_seq: int, left: int | None, shared: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The token ranges some row of the sequence sees that no shared node has covered. Ranges in `shared` ascend."""
    at = 0 if left is None else max(0, length - tokens_per_seq - left)
    ranges = []
    for start, stop in shared:
        if start > at:
            ranges.append((at, start))
        at = max(at, stop)
    if length > at:
        ranges.append((at, length))
    return ranges
