"""Decode plans: find the tree of shared pages under a batch of sequences and decide which of its nodes to share.

Sequences that share a prefix hold the same pages at the same places of their page lists, whether a PrefixCache, a fork
or a foreign page table put them there. So the tree is read off the lists: a *node* is a run of pages that a group of
sequences has in common. Sharing a node computes the rows of the whole group over its tokens once, instead of once per
sequence; each row's states are merged afterwards. Chunk-first kernels, prefix/suffix phases and multi-level prefixes
are this tree with one, two or more levels. flat.py has the steps, this file puts them together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tilewise.plan.cost import CPU_COST, CostModel
from tilewise.plan.flat import (
    NODE_WORDS,
    Judge,
    PageTable,
    choose_nodes,
    cut_at_breaks,
    cut_nodes_at_breaks,
    find_spans,
    own_ranges,
    stored_tokens,
    tree_order,
)
from tilewise.plan.tiles import DecodePlan, Ints, PagedWork, Window
from tilewise.scores import Reach


def plan_tree(
    seqs: Sequence[int],
    page_lists: Sequence[Ints] | PageTable,
    lengths: npt.ArrayLike,
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
    chunk: int = 0,
    share: bool | None = None,
    cost: CostModel = CPU_COST,
    room: int = 0,
    pages_per_seq: int = 0,
    value_dim: int = 0,
) -> DecodePlan:
    """The plan of one decode step.

    page_lists, lengths: of each sequence of `seqs`, whose last `tokens_per_seq` tokens are the queries; a PageTable is
    taken as it is. share: True shares every node, False none, None those for which `cost` says that it pays; `cost`
    then takes the K and V of one token in one KV head as `stream_row_bytes` bytes, which is what the inner loop reads
    if that is not what is stored (`kv_row_bytes`). shortest_run: cut ranges where their pages are not consecutive, if
    the parts have at least this many tokens on average; 0 never cuts. A backend that reads consecutive pages in place
    wants that. pages_per_seq: how many pages a sequence reads at most, 0 for all; without `share`, `window` and
    `chunk`. value_dim: of V, 0 for head_dim. chunk: positions of a block that no row sees out of, 0 for no blocks.

    A node is shared only as far as every row of the group sees all of it, so shared items need no mask. What is left
    of each sequence, with its causal end, are its own items.
    """
    reach = Reach.of(window, chunk)
    table, counts = page_lists if isinstance(page_lists, PageTable) else PageTable.of(page_lists)
    order, common = tree_order(table, counts)
    given = np.asarray(lengths, np.int64)
    length = given[order]
    spans = find_spans(common)
    nodes = np.zeros((0, NODE_WORDS), np.int64)
    if share is not False and spans.first:
        kv_bytes = heads_kv * (stream_row_bytes or kv_row_bytes)
        mean_dim = -(-(head_dim + (value_dim or head_dim)) // 2)
        judge = Judge(cost, tokens_per_seq * heads_q, heads_kv, mean_dim, kv_bytes) if share is None else None
        nodes = choose_nodes(common, length, page_size, tokens_per_seq, reach, judge, spans)
    own = own_ranges(nodes, length, tokens_per_seq, reach, pages_per_seq * page_size)
    shared_nodes = len(nodes)
    if shortest_run:
        pages = table[order, : -(-int(length.max(initial=0)) // page_size)]
        nodes = cut_nodes_at_breaks(nodes, pages, page_size, shortest_run)
        of, *tokens = cut_at_breaks(pages, own[0], own[1], own[2], page_size, shortest_run)
        own = np.stack([own[0, of], *tokens])
    nodes_read, own_read = nodes[:, 3] - nodes[:, 2], own[2] - own[1]
    return DecodePlan(
        kind="decode",
        arrays=PagedWork(table, order, length, nodes, own, page_size, tokens_per_seq, reach),
        rows=len(order) * tokens_per_seq,
        keys=(int(nodes_read.sum() + own_read.sum()),),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        value_dim=value_dim,
        exclusive=not len(nodes) and bool((own[0, 1:] != own[0, :-1]).all()),
        kv_row_bytes=kv_row_bytes,
        io_bytes=io_bytes,
        seqs=tuple(seqs),
        lengths=tuple(given.tolist()),
        order=order,
        tokens_per_seq=tokens_per_seq,
        shared_nodes=shared_nodes,
        window=window,
        chunk=chunk,
        room=room,
        pages_per_seq=pages_per_seq,
        cache_serial=cache_serial,
        stored_tokens=stored_tokens(common, length, page_size, spans),
    )
