"""The order in which relatives are neighbours, kept from step to step, against sorting the page lists."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import fill, noise
from prefix_cases import make, write

from tilewise.kvcache import OutOfPages, PagedKVCache, PrefixCache, Slots
from tilewise.kvcache.lineage import Lineage

Nodes = set[tuple[frozenset[int], int]]


def common_pages(a: list[int], b: list[int]) -> int:
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return shared


def nodes_of(order: list[int], common: list[int]) -> Nodes:
    """The groups of places that have pages in common, each with how many; from an order and what neighbours share."""
    found: Nodes = set()
    for depth in set(common) - {0}:
        start = 0
        for end in range(1, len(order) + 1):
            if end == len(order) or common[end - 1] < depth:
                if end - start > 1 and min(common[start : end - 1]) == depth:
                    found.add((frozenset(order[start:end]), depth))
                start = end
    return found


def check(cache: PagedKVCache, lineage: Lineage, seqs: list[int]) -> None:
    order, common = lineage.update(seqs)
    assert order.dtype == np.int32
    assert common.dtype == np.int64
    lists = [cache.page_list(seq).tolist() for seq in seqs]
    assert sorted(order.tolist()) == list(range(len(seqs)))
    got = order.tolist()
    assert common.tolist() == [common_pages(lists[a], lists[b]) for a, b in pairwise(got)]
    by_bytes = sorted(range(len(seqs)), key=lambda n: lists[n])
    right = nodes_of(by_bytes, [common_pages(lists[a], lists[b]) for a, b in pairwise(by_bytes)])
    assert nodes_of(got, common.tolist()) == right


def some_of(data: st.DataObject, living: list[int], most: int = 6) -> list[int]:
    return data.draw(st.lists(st.sampled_from(living), unique=True, max_size=most)) if living else []


def churn(data: st.DataObject, cache: PagedKVCache, lineage: Lineage) -> None:
    for _ in range(data.draw(st.integers(1, 20))):
        living = list(cache.lengths)
        what = data.draw(st.sampled_from(["allocate", "fork", "forks", "free", "extend", "extend", "extend"]))
        if what == "allocate" or not living:
            cache.allocate(data.draw(st.integers(0, 3)))
        elif what == "fork":
            cache.fork(data.draw(st.sampled_from(living)), data.draw(st.integers(0, 4)))
        elif what == "forks":
            cache.fork(data.draw(st.lists(st.sampled_from(living), max_size=5)))
        elif what == "free":
            cache.free(some_of(data, living, 3))
        else:
            some = some_of(data, living)
            try:
                fill(cache, cache.extend(some, [data.draw(st.integers(0, 5)) for _ in some]))
            except OutOfPages:
                cache.free(living[: len(living) // 2])
        if data.draw(st.booleans()):
            living = list(cache.lengths)
            check(cache, lineage, data.draw(st.permutations(living)))
            check(cache, lineage, some_of(data, living))
    check(cache, lineage, list(cache.lengths))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_forks_that_come_grow_and_go(data: st.DataObject) -> None:
    cache = PagedKVCache(60, data.draw(st.sampled_from([1, 2, 3])), 1, 1)
    churn(data, cache, Lineage(cache))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_tables_of_somebody_else(data: st.DataObject) -> None:
    """A page may stand after other pages in another list, and a list may be equal to another or its beginning."""
    lists = st.lists(st.integers(0, 5), unique=True, max_size=5)
    table = data.draw(st.lists(lists, min_size=1, max_size=7))
    size = data.draw(st.sampled_from([1, 2]))
    pages = torch.tensor([pages + [-1] * (5 - len(pages)) for pages in table])
    lengths = torch.tensor([max(0, size * len(pages) - data.draw(st.integers(0, size - 1))) for pages in table])
    k = noise(24, size, 1, 1)
    cache = PagedKVCache.from_pages(k, k.clone(), pages, lengths)
    lineage = Lineage(cache)
    check(cache, lineage, list(range(len(table))))
    for pages in data.draw(st.lists(lists, max_size=4)):
        held = np.array(pages, np.int32)
        cache.pool.retain(held)
        cache.adopt(held, size * len(held))
        check(cache, lineage, list(cache.lengths))
    churn(data, cache, lineage)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_prompts_that_begin_alike(data: st.DataObject) -> None:
    """Some are computed side by side, in pages of their own, before the tree knows their tokens."""
    prefix = make(40, data.draw(st.sampled_from([1, 2, 3])))
    lineage = Lineage(prefix.cache)
    seen: list[list[int]] = [[]]
    pending: list[Slots] = []
    for _ in range(data.draw(st.integers(1, 15))):
        living = list(prefix.lengths)
        what = data.draw(st.sampled_from(["insert", "insert", "fork", "release", "extend"])) if living else "insert"
        if what not in ("insert", "fork") or data.draw(st.booleans()):
            while pending:
                write(prefix, pending.pop())
        try:
            if what == "insert":
                base = data.draw(st.sampled_from(seen))
                more = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
                seen.append(base[: data.draw(st.integers(0, len(base)))] + more)
                pending.append(prefix.insert(seen[-1])[2])
            elif what == "fork":
                prefix.fork(data.draw(st.sampled_from(living)), data.draw(st.integers(1, 3)))
            elif what == "release":
                prefix.release(data.draw(st.sampled_from(living)))
            else:
                some = some_of(data, living, 4) or living[:1]
                pending.append(prefix.extend(some, [[0] * data.draw(st.integers(0, 4)) for _ in some]))
        except OutOfPages:
            continue
        check(prefix.cache, lineage, list(prefix.lengths))


def test_growing_changes_nothing_and_costs_no_new_arrays() -> None:
    cache = PagedKVCache(60, 2, 1, 1)
    root = cache.allocate()
    fill(cache, cache.extend([root], 4))
    seqs = [*cache.fork(root, 3), cache.allocate()]
    lineage = Lineage(cache)
    before = lineage.update(seqs)
    assert before[1].tolist() == [2, 2, 0]
    fill(cache, cache.extend(seqs, 5))
    after = lineage.update(list(seqs))
    assert before[0] is after[0]
    assert before[1] is after[1]
    with pytest.raises(ValueError, match="read-only"):
        after[1][0] = 7
    again = cache.fork(seqs[0])
    assert lineage.update(seqs)[1].tolist() == [2, 2, 0]
    assert lineage.update([again, *seqs])[1].tolist() == [5, 2, 2, 0]
    assert lineage.update([])[0].shape == lineage.update([])[1].shape == (0,)


def test_forks_whose_shared_page_is_copied() -> None:
    """One in the middle of five that share a page begins a copy of it; then two more; then all."""
    cache = PagedKVCache(60, 4, 1, 1)
    root = cache.allocate()
    fill(cache, cache.extend([root], 6))
    seqs = [root, *cache.fork(root, 6)]
    lineage = Lineage(cache)
    order = lineage.update(seqs)[0].tolist()
    for some in ([order[3]], [order[1], order[5]], [order[2]], list(range(7))):
        fill(cache, cache.extend([seqs[n] for n in some], 1))
        check(cache, lineage, seqs)


def test_two_lineages_and_a_copy_of_the_cache() -> None:
    cache = PagedKVCache(60, 2, 1, 1)
    root = cache.allocate()
    fill(cache, cache.extend([root], 5))
    one, other = Lineage(cache), Lineage(cache)
    seqs = cache.fork(root, 3)
    check(cache, one, seqs)
    twin = copy.deepcopy(cache)
    fill(twin, twin.extend(seqs, 1))
    cache.free(seqs[1])
    check(cache, other, [root, seqs[0], seqs[2]])
    check(cache, one, [seqs[2], seqs[0]])
    check(twin, Lineage(twin), seqs)


def test_what_it_refuses() -> None:
    cache = PagedKVCache(4, 2, 1, 1)
    a = cache.allocate()
    lineage = Lineage(cache)
    with pytest.raises(TypeError, match="cache must be a PagedKVCache"):
        Lineage(PrefixCache(cache))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seqs must be alive"):
        lineage.update([a, a + 1])
    with pytest.raises(ValueError, match="once"):
        lineage.update([a, a])
    cache.free(a)
    with pytest.raises(ValueError, match="seqs must be alive"):
        lineage.update([a])
