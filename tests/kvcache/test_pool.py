"""The pool of pages: where pages are taken from, against a plain spelling of the rule, and who holds them."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.kvcache import PagedKVCache
from tilewise.kvcache.pool import SCAN, PagePool


def plain_take(used: list[bool], last: list[int], wanted: list[int]) -> list[int]:
    """Right after the last page where all are free there, else the first run that is long enough, else the longest."""

    def runs() -> list[range]:
        edges = [p for p in range(len(used) + 1) if (p == len(used) or used[p]) != (p == 0 or used[p - 1])]
        return [range(a, b) for a, b in zip(edges[0::2], edges[1::2], strict=True)]

    taken: list[list[int]] = [[] for _ in wanted]
    for pages, after, count in zip(taken, last, wanted, strict=True):
        if after >= 0 and after + count < len(used) and not any(used[after + 1 : after + 1 + count]):
            pages += range(after + 1, after + 1 + count)
            for page in pages:
                used[page] = True
    for pages, count in zip(taken, wanted, strict=True):
        while len(pages) < count:
            missing = count - len(pages)
            fitting = [run for run in runs() if len(run) >= missing]
            run = fitting[0] if fitting else max(runs(), key=len)
            for page in run[:missing]:
                used[page] = True
                pages.append(page)
    return [page for pages in taken for page in pages]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pages_are_taken_as_the_rule_says(data: st.DataObject) -> None:
    used = data.draw(st.lists(st.booleans(), min_size=4, max_size=60))
    held = [p for p, is_used in enumerate(used) if is_used]
    free = len(used) - len(held)
    last, wanted = [], []
    for count in data.draw(st.lists(st.integers(1, 7), max_size=8)):
        if sum(wanted) + count <= free:
            last.append(data.draw(st.sampled_from([-1, *held])))
            wanted.append(count)
    if all(count == 1 for count in wanted):
        return  # the lowest pages, which fill holes; see test_single_pages
    pool = PagePool(len(used))
    pool.retain(np.array(held, np.int32))
    got = pool.take(np.array(last, np.int64), np.array(wanted, np.int64))
    assert got.dtype == np.int64  # other arrays are looked up with them, again and again
    assert got.tolist() == plain_take(used, last, wanted)
    assert (pool.refs > 0).tolist() == used
    assert pool.free_pages == used.count(False)
    if pool.free_pages:  # what is below the lowest free page is not looked at again
        one = pool.take(np.array([-1]), np.array([1]))
        assert one.tolist() == [used.index(False)]


def test_runs_that_are_longer_than_one_look() -> None:
    """Holes before the first look's end, one across it, one over several looks; used pages in between."""
    pages = 40 * SCAN
    used = np.zeros(pages, bool)
    used[:: 3 * SCAN] = True
    used[SCAN : 2 * SCAN] = True
    used[9 * SCAN : 10 * SCAN : 2] = True
    for wanted in ([2 * SCAN, 5, 3 * SCAN - 1], [SCAN - 1] * 5, [3 * SCAN, 1, 1, 2], [20 * SCAN]):
        pool = PagePool(pages)
        pool.retain(np.flatnonzero(used).astype(np.int32))
        got = pool.take(np.full(len(wanted), -1), np.array(wanted))
        assert got.tolist() == plain_take(used.tolist(), [-1] * len(wanted), wanted)


def test_single_pages() -> None:
    pool = PagePool(10)
    pool.retain(np.array([0, 1, 4], np.int32))
    last = np.array([1, 4, 4, -1, 9])
    assert pool.take(last, np.ones(5, np.int64)).tolist() == [2, 5, 3, 6, 7]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_lists_are_held_and_given_up_together(data: st.DataObject) -> None:
    """Sequences that share pages end in one call: what nobody holds is free, once, and is known to be."""
    cache = PagedKVCache(80, 2, 1, 1)
    for _ in range(data.draw(st.integers(1, 5))):
        living = list(cache.lengths)
        new = cache.allocate(1) if not living else cache.fork(data.draw(st.lists(st.sampled_from(living), max_size=4)))
        cache.mark_written(cache.extend(new, [data.draw(st.integers(0, 6)) for _ in new]))
    living = list(cache.lengths)
    ending = data.draw(st.lists(st.sampled_from(living), unique=True))
    before, known = cache.pool.refs.copy(), cache.pool.freed.copy()
    given_up = Counter(page for seq in ending for page in cache.page_list(seq).tolist())
    cache.free(ending)
    after = [int(refs) - given_up[page] for page, refs in enumerate(before)]
    assert cache.pool.refs.tolist() == after
    freed = (before > 0) & (cache.pool.refs == 0)
    assert (cache.pool.freed > known).tolist() == freed.tolist()
    assert cache.pool.free_pages == after.count(0)
    assert not cache.pool.fill[freed].any()


def test_reservations_are_noted_by_page() -> None:
    """Tokens of long prompts are many: to keep them all until somebody looks took milliseconds every few steps."""
    cache = PagedKVCache(400, 16, 1, 1)
    seqs = cache.allocate(4)
    cache.mark_written(cache.extend(seqs, [1, 0, 37, 16 * 200 + 5]))
    cache.mark_written(cache.extend(seqs, [15, 3, 0, 11]))
    noted = [len(index) for index in cache.pool._late]
    assert noted == [1 + 0 + 3 + 201, 1 + 1 + 0 + 1]
    fill = np.zeros(400, np.int64)
    for seq in seqs:
        pages, length = cache.page_list(seq), cache.length(seq)
        fill[pages] = np.minimum(16, length - 16 * np.arange(len(pages)))
    assert cache.pool.fill.tolist() == fill.tolist()
