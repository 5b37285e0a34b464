"""Page lists of trees without a cache, and their plans: what the tests of trees and work lists share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from tilewise.plan import DecodePlan, PageTable, plan_tree
from tilewise.plan.tiles import Ints


def tree_lists(fanouts: Sequence[int], pages: Sequence[int], fresh: Iterator[int] | None = None) -> list[Ints]:
    """The page list of each leaf of a tree whose nodes on level d have `pages[d]` pages and `fanouts[d]` siblings."""
    fresh = fresh or count()
    lists: list[list[int]] = [[]]
    for fanout, own in zip(fanouts, pages, strict=True):
        lists = [[*above, *(next(fresh) for _ in range(own))] for above in lists for _ in range(fanout)]
    return [np.array(x, np.int32) for x in lists]


def random_lists(rng: np.random.Generator, page_size: int) -> tuple[list[Ints], list[int]]:
    """Page lists and lengths of the leaves of a random tree, in random order. Some lists go on after their lengths."""
    fresh = iter(rng.permutation(10_000).tolist())
    found: list[list[int]] = []

    def build(above: list[int], depth: int) -> None:
        pages = above + [next(fresh) for _ in range(int(rng.integers(0, 5)))]
        children = int(rng.integers(0, 5)) if depth < 3 and len(found) < 16 else 0
        if not children:
            found.append(pages)
        for _ in range(children):
            build(pages, depth + 1)

    for _ in range(int(rng.integers(1, 4))):
        build([], 0)
    rng.shuffle(found)  # type: ignore[arg-type]
    lengths = [max(0, len(pages) * page_size - int(rng.integers(0, 2 * page_size))) for pages in found]
    return [np.array(pages, np.int32) for pages in found], lengths


def make_plan(
    lists: Sequence[Ints] | PageTable,
    lengths: Sequence[int],
    page_size: int = 16,
    *,
    heads: tuple[int, int] = (8, 2),
    **options: Any,
) -> DecodePlan:
    """heads: of the queries, of K and V. Every node is shared unless `share` says something else."""
    sizes = {"heads_q": heads[0], "heads_kv": heads[1], "head_dim": 64, "kv_row_bytes": 256.0, "io_bytes": 2}
    return plan_tree(range(len(lengths)), lists, lengths, page_size, **{**sizes, "share": True, **options})


def first_seen(position: int, left: int | None, chunk: int) -> int:
    """The first key that the row at a position sees, in plain words."""
    return max(0, 0 if left is None else position - left, position - position % chunk if chunk else 0)
