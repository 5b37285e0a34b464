"""The tree of shared pages over a batch as flat arrays: its order, which nodes to share, what stays each sequence's.

A batch of sequences is two arrays: `order`, in which sequences that share a prefix are neighbours, and `common`, how
many leading pages each of them has in common with the next. A node of the tree is a run of neighbours that have more
pages in common than with those around it. Nothing here makes an object per sequence: a serving step plans hundreds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.plan.cost import CostModel
from tilewise.scores import Reach

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

# Columns of `nodes` (m, 5): the first of its sequences in the plan's order and their number, the tokens [start, stop)
# that they share, and the row of the shared node around it, -1 for none. Parents stand before children.
FIRST, SEQUENCES, START, STOP, ABOVE = range(5)
NODE_WORDS = 5
FEW = 4  # nodes that are looked at one by one
_plain: dict[type[CostModel], bool] = {}  # kinds of cost models that _is_plain was asked about


class PageTable(NamedTuple):
    """The page lists of n sequences: table (n, width) with zeros after each list, counts (n,), the pages of each."""

    table: Ints
    counts: Longs

    @classmethod
    def of(cls, lists: Sequence[Ints]) -> PageTable:
        """Lists of pages as one table."""
        counts = np.array([len(pages) for pages in lists], np.int64)
        table = np.zeros((len(lists), int(counts.max(initial=0))), np.int32)
        for row, pages in zip(table, lists, strict=True):
            row[: len(pages)] = pages
        return cls(table, counts)


class Judge(NamedTuple):
    """The cost model and the sizes of the problem that it is asked about."""

    cost: CostModel
    rows_each: int  # query tokens × query heads per sequence
    heads_kv: int
    head_dim: int
    kv_bytes: float  # K and V of one token, all KV heads

    def node_us(self, sequences: int, tokens: int) -> tuple[float, float]:
        """The time of a node unshared, and what sharing saves of it."""
        asked = (sequences, tokens, self.rows_each, self.head_dim, self.kv_bytes)
        return self.cost.alone_us(*asked), self.cost.saving_us(*asked)


class Spans(NamedTuple):
    """The nodes of a tree, shared or not, parents before children: of each its sequences [first, end) of the order, its
    `depth`, the pages that all of them have in common, and the depth of the node around it. One list each."""

    first: list[int]
    end: list[int]
    depth: list[int]
    over: list[int]


def tree_order(table: Ints, counts: Longs) -> tuple[Ints, Longs]:
    """The order of a batch, (n,), and the leading pages that neighbours of it have in common, (n - 1,).

    table, counts: a PageTable's. The order is that of the lists' bytes, so it depends on nothing but the lists.
    """
    count = len(table)
    order = np.arange(count, dtype=np.int32)
    common = np.zeros(max(0, count - 1), np.int64)
    if not count or not table.shape[1]:
        return order, common
    if skip := _prefix_of_all(table, counts):
        return _order_behind(table, counts, skip)
    key = _as_bytes(table[:, 0]).astype(np.int64)
    key[counts == 0] = -1
    order = key.argsort(kind="stable").astype(np.int32)
    key = key[order]
    same = (key[1:] == key[:-1]) & (key[1:] >= 0)
    if not same.any():  # lists with different first pages have nothing in common
        return order, common
    inside = np.append(same, False) | np.append(False, same)
    places = inside.nonzero()[0]  # in the order: of the lists that begin like another one
    members, group = order[places], key[places]
    width = int(counts[members].max())
    lists = table[members, :width]
    own = counts[members]
    together = group[1:] == group[:-1]
    # Groups mostly have a long prefix in common: what comes before the first difference in any of them is left out.
    differs = lists[1:] != lists[:-1]
    if not together.all():
        differs &= together[:, None]
    apart = differs.any(0)
    skip = int(apart.argmax()) if apart.any() else width
    rest = lists[:, skip:]
    by = _by_bytes(rest, own)
    by = by[group[by].argsort(kind="stable")]
    order[places], own = members[by], own[by]
    common[same] = np.minimum(_first_difference(rest[by]) + skip, np.minimum(own[1:], own[:-1]))[together]
    return order, common


def _prefix_of_all(table: Ints, counts: Longs) -> int:
    """How many leading pages all lists have in common, if every list has another page after them; else 0."""
    if len(table) < 2 or table[0, 0] != table[-1, 0]:
        return 0
    width = int(np.minimum.reduce(counts))
    whole = width // 8 * 8  # truth values are looked at eight at a time
    differs = (table[1:, :whole] != table[:-1, :whole]).view(np.uint64)
    (blocks,) = np.bitwise_or.reduce(differs, axis=0).nonzero()
    first = 8 * int(blocks[0]) if len(blocks) else whole
    columns = table[:, first : min(first + 8, width)]
    (apart,) = np.logical_or.reduce(columns[1:] != columns[:-1]).nonzero()
    return first + int(apart[0]) if len(apart) else 0


def _order_behind(lists: Ints, counts: Longs, skip: int) -> tuple[Ints, Longs]:
    """tree_order() of lists that have their first `skip` pages in common."""
    key = _as_bytes(lists[:, skip])
    by = key.argsort()
    key = key[by]
    if not np.count_nonzero(key[1:] == key[:-1]):  # mostly each goes its own way there
        return by.astype(np.int32), np.full(len(by) - 1, skip)
    rest = np.ascontiguousarray(lists[:, skip:])
    by = _by_bytes(rest)
    first = _first_difference(rest[by])
    if np.maximum.reduce(first) == rest.shape[1]:  # some are equal but for their lengths
        by = _by_bytes(rest, counts)
    own = counts[by]
    return by.astype(np.int32), np.minimum(first + skip, np.minimum(own[1:], own[:-1]))


def _as_bytes(pages: Ints) -> npt.NDArray[np.uint32]:
    """(n,) numbers that are ordered as the bytes of these pages are."""
    return pages.byteswap().view(np.uint32)


def _by_bytes(lists: Ints, counts: Longs | None = None) -> Longs:
    """(n,): the order of the lists' bytes. Filled up with zeros, a list equals itself with page 0 after it: with
    `counts`, the lists' lengths, the shorter one comes first."""
    by = np.arange(len(lists)) if counts is None else counts.argsort(kind="stable")
    if lists.shape[1]:
        chosen = np.ascontiguousarray(lists if counts is None else lists[by])
        by = by[chosen.view(f"V{4 * lists.shape[1]}")[:, 0].argsort(kind="stable")]
    return by


def _first_difference(lists: Ints) -> Longs:
    """(n - 1,): the first column in which each list differs from the next one, the number of columns if none does."""
    width = lists.shape[1]
    if not width:
        return np.zeros(len(lists) - 1, np.int64)
    differs = lists[1:] != lists[:-1]
    found = differs.argmax(1)
    first: Longs = np.where(differs[np.arange(len(found)), found], found, width)
    return first


def find_spans(common: Longs) -> Spans:
    """All nodes of the tree. It looks only where `common` changes."""
    if not len(common):
        return Spans([], [], [], [])
    changes = [0, *((common[1:] != common[:-1]).nonzero()[0] + 1).tolist(), len(common)]
    depths = [*common[changes[:-1]].tolist(), 0]
    if len(depths) == 2 and not depths[0]:
        return Spans([], [], [], [])
    found: list[tuple[int, int, int, int]] = []  # first, -end, depth, over: sorted, parents come before children
    opened: list[tuple[int, int]] = []  # depth and first of the nodes around the place that is looked at
    deepest = 0
    for at, depth in zip(changes, depths, strict=True):
        first = at
        while deepest > depth:
            closed, first = opened.pop()
            deepest = opened[-1][0] if opened else 0
            found.append((first, -at - 1, closed, deepest if deepest > depth else depth))
        if depth > deepest:
            opened.append((depth, first))
            deepest = depth
    found.sort()
    firsts, ends, depths, over = map(list, zip(*found, strict=True))
    return Spans(firsts, [-end for end in ends], depths, over)


def choose_nodes(
    common: Longs,
    lengths: Longs,
    page_size: int,
    tokens_per_seq: int,
    reach: Reach,
    judge: Judge | None,
    spans: Spans | None = None,
) -> Longs:
    """(m, 5): the nodes to share, as FIRST … ABOVE say.

    common: (n - 1,), lengths: (n,) in tokens, both in the plan's order. reach: how far back rows see. judge: says which
    nodes are worth sharing, and whether the plan as a whole is; None shares every node that has tokens which all of its
    rows see. spans: find_spans(common), for who has them already.

    A node is shared only as far as every row of its sequences sees all of it: what is shared needs no mask.
    """
    spans = spans or find_spans(common)
    if not spans.first:
        return np.zeros((0, NODE_WORDS), np.int64)
    # The first row of the shortest sequence and the last row of the longest one see the least.
    if reach.whole and len(spans.first) <= FEW:
        each = zip(spans.first, spans.end, spans.depth, strict=True)
        lows = [min(depth * page_size, int(lengths[a:b].min()) - (tokens_per_seq - 1)) for a, b, depth in each]
        tokens = (spans.first, spans.end, [0] * len(lows), lows)
    else:
        edges = np.array([spans.first, spans.end], np.int64).T.ravel()
        padded = np.append(lengths, 0)  # reduceat takes no index past the end
        stops = np.minimum.reduceat(padded, edges)[::2] - (tokens_per_seq - 1)
        stops = np.minimum(np.array(spans.depth) * page_size, stops)
        starts = np.zeros_like(stops) if reach.whole else reach.first(np.maximum.reduceat(padded, edges)[::2] - 1)
        tokens = (spans.first, spans.end, starts.tolist(), stops.tolist())
    if judge is None:
        return np.array(_all_nodes(*tokens), np.int64).reshape(-1, NODE_WORDS)
    seen = lengths if reach.whole else lengths - reach.first(lengths - tokens_per_seq)
    return np.array(_judged(*tokens, int(seen.sum()), judge), np.int64).reshape(-1, NODE_WORDS)


def _all_nodes(first: list[int], end: list[int], starts: list[int], stops: list[int]) -> list[tuple[int, ...]]:
    nodes: list[tuple[int, ...]] = []
    around: list[tuple[int, int, int]] = []  # end of each node around, the end of what is shared up to it, its row
    covered, above = 0, -1
    for a, b, start, stop in zip(first, end, starts, stops, strict=True):
        while around and a >= around[-1][0]:
            around.pop()
        _, covered, above = around[-1] if around else (0, 0, -1)
        start = max(covered, start)
        if stop > start:
            nodes.append((a, b - a, start, stop, above))
            covered, above = stop, len(nodes) - 1
        around.append((b, covered, above))
    return nodes


def _judged(
    first: list[int], end: list[int], starts: list[int], stops: list[int], seen: int, judge: Judge
) -> list[tuple[int, ...]]:
    """The nodes that are worth sharing; none if the plan with them is no faster than the plan without. seen: tokens
    that the sequences see, added up.

    CostModel.alone_us and saving_us stand here in line: a call per node would take most of the time.
    """
    cost, rows, head_dim, kv_bytes = judge.cost, judge.rows_each, judge.head_dim, judge.kv_bytes
    plain = _is_plain(type(cost))
    bytes_per_us, flops_per_us, margin, item_us = cost.kv_bytes_per_us, cost.flops_per_us, cost.margin, cost.item_us
    state_us = cost.row_state_us
    nodes: list[tuple[int, ...]] = []
    around: list[tuple[int, int, int]] = []  # end of each node around, the end of what is shared up to it, its row
    saved_us = alone_us = 0.0
    shared = widest = last = covered = 0
    above = -1
    for a, b, start, stop in zip(first, end, starts, stops, strict=True):
        while around and a >= last:
            around.pop()
            last, covered, above = around[-1] if around else (0, 0, -1)
        if covered > start:
            start = covered
        tokens, size = stop - start, b - a
        if tokens > 0:
            if plain:
                read, flops = tokens * kv_bytes / bytes_per_us, 4 * tokens * rows * head_dim
                one, together = flops / flops_per_us, flops * size / flops_per_us
                apart = size * (one if one > read else read)
                saving = apart - (item_us + (together if together > read else read) + size * rows * state_us) * margin
            else:
                apart, saving = judge.node_us(size, tokens)
            if saving > 0:
                nodes.append((a, size, start, stop, above))
                saved_us += saving
                alone_us += apart
                shared += size * tokens
                if size > widest:
                    widest = size
                covered, above = stop, len(nodes) - 1
        last = b
        around.append((b, covered, above))
    if not nodes or not cost.pays(alone_us, saved_us, (seen - shared) * kv_bytes, widest * rows // judge.heads_kv):
        return []
    return nodes


def _is_plain(kind: type[CostModel]) -> bool:
    """Whether this kind of cost model counts as CostModel does."""
    found = _plain.get(kind)
    if found is None:
        names = ("alone_us", "saving_us", "_stream_us")
        found = _plain[kind] = all(getattr(kind, x) is getattr(CostModel, x) for x in names)
    return found


def of_deepest(nodes: Longs, values: Longs, count: int) -> Longs:
    """(count,): of each sequence what `values` (m,) says of the deepest node (m, 5) that it is below, 0 if it is below
    none."""
    if len(nodes) <= FEW:
        found = np.zeros(count, np.int64)
        for (first, sequences, *_), value in zip(nodes.tolist(), values.tolist(), strict=True):
            found[first : first + sequences] = value
        return found
    # Where a node begins and ends, what it says goes up and down by what it says more than the node around it.
    more = values - np.append(values, 0)[nodes[:, ABOVE]]
    steps = np.zeros(count + 1, np.int64)
    np.add.at(steps, nodes[:, FIRST], more)
    np.subtract.at(steps, nodes[:, FIRST] + nodes[:, SEQUENCES], more)
    return steps.cumsum()[:-1]


def own_ranges(nodes: Longs, lengths: Longs, tokens_per_seq: int, reach: Reach, most: int = 0) -> Longs:
    """(3, k): sequence, start and stop of the tokens that some row of a sequence sees and that no node shares; by
    sequence, and ascending.

    nodes, lengths, reach: as in choose_nodes. most: how many tokens a sequence reads at most, 0 for all.
    """
    before = [np.zeros((3, 0), np.int64)]  # what some rows see before the first node that all rows see
    if reach.whole:
        at = of_deepest(nodes, nodes[:, STOP], len(lengths))
    else:
        at = reach.first(lengths - tokens_per_seq)
        for first, sequences, start, stop, _ in nodes.tolist():
            span = at[first : first + sequences]
            short = (span < start).nonzero()[0]
            before.append(np.stack(np.broadcast_arrays(short + first, span[short], start)))
            span[:] = stop
    ends = np.minimum(lengths, most) if most else lengths
    (owners,) = (ends > at).nonzero()
    own = np.empty((3, len(owners)), np.int64)
    own[0], own[1], own[2] = owners, at[owners], ends[owners]
    if len(before) > 1:
        own = np.concatenate([*before, own], axis=1)
        own = own[:, np.lexsort((own[1], own[0]))]
    return own


def stored_tokens(common: Longs, lengths: Longs, page_size: int, spans: Spans) -> int:
    """Tokens that lie in the pages, each counted once. Arguments as in choose_nodes."""
    if not spans.first:
        return int(lengths.sum())
    around = np.concatenate([[0], common, [0]])
    leaves = np.maximum(0, lengths - np.maximum(around[1:], around[:-1]) * page_size)
    edges = np.array([spans.first, spans.end], np.int64).T.ravel()
    shortest = np.minimum.reduceat(np.append(lengths, 0), edges)[::2]
    stops = np.minimum(np.array(spans.depth) * page_size, shortest)
    return int(leaves.sum() + np.maximum(0, stops - np.array(spans.over) * page_size).sum())


class Parts(NamedTuple):
    """Ranges cut into parts, (k,) each: which range a part is of, and its tokens [start, stop)."""

    of: Longs
    start: Longs
    stop: Longs


def cut_at_breaks(pages: Ints, sequence: Longs, start: Longs, stop: Longs, page_size: int, shortest: int) -> Parts:
    """Token ranges, cut where their pages are not consecutive if the parts have at least `shortest` tokens on average.

    pages: (n, width), the page lists. sequence, start, stop: (m,), of each range the row of its pages and its tokens.
    """
    numbers = np.arange(len(start))
    first, last = start // page_size, (stop - 1) // page_size
    long = stop - start >= 2 * shortest  # two parts or more
    if not long.any():
        return Parts(numbers, start, stop)
    begin = int(first[long].min())
    read = pages[:, begin:]
    width = read.shape[1] - 1
    # The places before which a list does not go on with the next page, counted through all lists.
    breaks = np.flatnonzero(read[:, 1:] != read[:, :-1] + 1)
    base = sequence * width - begin
    low, high = np.searchsorted(breaks, base + np.maximum(first, begin)), np.searchsorted(breaks, base + last)
    parts = np.where(long & (stop - start >= shortest * (high - low + 1)), high - low + 1, 1)
    if parts.max() == 1:
        return Parts(numbers, start, stop)
    of = np.repeat(numbers, parts)
    inner = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)  # which part of its range it is
    begins = start[of]
    later = inner > 0
    places = breaks[low[of[later]] + inner[later] - 1] - base[of[later]] + 1
    begins[later] = places * page_size
    ends = np.append(begins[1:], 0)
    lasts = np.append(~later[1:], True)
    return Parts(of, begins, np.where(lasts, stop[of], ends))


def cut_nodes_at_breaks(nodes: Longs, pages: Ints, page_size: int, shortest: int) -> Longs:
    """Nodes (m, 5) cut by cut_at_breaks: a part stands above the next one, the last one above the node's children."""
    if not len(nodes):
        return nodes
    first = nodes[:, FIRST]
    parts = cut_at_breaks(pages[first], np.arange(len(nodes)), nodes[:, START], nodes[:, STOP], page_size, shortest)
    if len(parts.of) == len(nodes):
        return nodes
    made = nodes[parts.of]
    made[:, START], made[:, STOP] = parts.start, parts.stop
    lasts = np.append((np.bincount(parts.of)).cumsum() - 1, -1)  # of each node its last part; -1 stays -1
    made[:, ABOVE] = np.arange(-1, len(made) - 1)
    begins = np.append(0, lasts[:-2] + 1)
    made[begins, ABOVE] = lasts[nodes[:, ABOVE]]
    return made
