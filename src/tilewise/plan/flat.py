"""The tree of shared pages over a batch as flat arrays: its order, which nodes to share, what stays each sequence's.

A batch of sequences is two arrays: `order`, in which sequences that share a prefix are neighbours, and `common`, how
many leading pages each of them has in common with the next. A node of the tree is a run of neighbours that have more
pages in common than with those around it. Nothing here makes an object per sequence: a serving step plans hundreds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.plan.cost import CostModel

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

# Columns of `nodes` (m, 5): the first of its sequences in the plan's order and their number, the tokens [start, stop)
# that they share, and the row of the shared node around it, -1 for none. Parents stand before children.
FIRST, SEQUENCES, START, STOP, ABOVE = range(5)
NODE_WORDS = 5


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

    table: (n, width), the page lists, of `counts` pages each and filled up with anything. The order is that of the
    lists' bytes, so it depends on nothing but the lists.
    """
    count = len(table)
    order = np.arange(count, dtype=np.int32)
    common = np.zeros(max(0, count - 1), np.int64)
    if not count or not table.shape[1]:
        return order, common
    key = table[:, 0].byteswap().view(np.uint32).astype(np.int64)
    key[counts == 0] = -1
    order = key.argsort(kind="stable").astype(np.int32)
    key = key[order]
    same = (key[1:] == key[:-1]) & (key[1:] >= 0)
    if not same.any():  # lists with different first pages have nothing in common
        return order, common
    pairs = same.nonzero()[0]
    inside = np.zeros(count, np.bool_)
    inside[pairs] = inside[pairs + 1] = True
    places = inside.nonzero()[0]
    members = order[places]
    own = counts[members]
    width = int(own.max())
    lists = table[members, :width]
    if int(own.min()) < width:
        lists[np.arange(width) >= own[:, None]] = 0
        # Filled up with zeros, a list equals itself with page 0 after it: the shorter one comes first.
        by = own.argsort(kind="stable")
        members, lists = members[by], lists[by]
    by = lists.view(f"V{4 * width}")[:, 0].argsort(kind="stable")
    members, lists = members[by], lists[by]
    order[places] = members
    at = np.cumsum(inside)[pairs] - 1
    differs = lists[:-1] != lists[1:] if len(at) == len(lists) - 1 else lists[at] != lists[at + 1]
    first = differs.argmax(1)
    first[~differs[np.arange(len(at)), first]] = width
    own = counts[members]
    common[pairs] = np.minimum(first, np.minimum(own[at], own[at + 1]))
    return order, common


def find_spans(common: Longs) -> Spans:
    """All nodes of the tree. It looks only where `common` changes."""
    if not common.any():
        return Spans([], [], [], [])
    changes = [0, *((common[1:] != common[:-1]).nonzero()[0] + 1).tolist(), len(common)]
    depths = [*common[changes[:-1]].tolist(), 0]
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
    left: int | None,
    judge: Judge | None,
    spans: Spans | None = None,
) -> Longs:
    """(m, 5): the nodes to share, as FIRST … ABOVE say.

    common: (n - 1,), lengths: (n,) in tokens, both in the plan's order. left: how many tokens before its own a row
    sees, None for all. judge: says which nodes are worth sharing, and whether the plan as a whole is; None shares every
    node that has tokens which all of its rows see. spans: find_spans(common), for who has them already.

    A node is shared only as far as every row of its sequences sees all of it: what is shared needs no mask.
    """
    spans = spans or find_spans(common)
    if not spans.first:
        return np.zeros((0, NODE_WORDS), np.int64)
    edges = np.array([spans.first, spans.end], np.int64).T.ravel()
    # The first row of the shortest sequence and the last row of the longest one see the least.
    padded = np.append(lengths, 0)  # reduceat takes no index past the end
    stops = np.minimum.reduceat(padded, edges)[::2] - (tokens_per_seq - 1)
    stops = np.minimum(np.array(spans.depth) * page_size, stops)
    starts = np.zeros_like(stops)
    if left is not None:
        starts = np.maximum(0, np.maximum.reduceat(padded, edges)[::2] - 1 - left)
    tokens = (spans.first, spans.end, starts.tolist(), stops.tolist())
    if judge is None:
        return np.array(_all_nodes(*tokens), np.int64).reshape(-1, NODE_WORDS)
    seen = lengths if left is None else np.minimum(lengths, tokens_per_seq + left)
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
    plain = all(getattr(type(cost), x) is getattr(CostModel, x) for x in ("alone_us", "saving_us", "_stream_us"))
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
