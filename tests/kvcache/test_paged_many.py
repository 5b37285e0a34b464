"""Several sequences in one call of the paged cache: as one after another, and all or none."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import check_pages, fill, noise, snapshot

from tilewise.kvcache import OutOfPages, PagedKVCache


def grown(data: st.DataObject) -> PagedKVCache:
    cache = PagedKVCache(60, data.draw(st.sampled_from([1, 2, 4])), 1, 2)
    for _ in range(data.draw(st.integers(1, 5))):
        living = list(cache.lengths)
        new = cache.allocate(2) if not living else cache.fork(data.draw(st.lists(st.sampled_from(living), max_size=3)))
        try:
            fill(cache, cache.extend(new, [data.draw(st.integers(0, 6)) for _ in new]))
        except OutOfPages:
            break
    return cache


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_lists_are_the_same_as_one_after_another(data: st.DataObject) -> None:
    cache = grown(data)
    other = copy.deepcopy(cache)
    living = list(cache.lengths)
    parents = data.draw(st.lists(st.sampled_from(living), max_size=5))
    count = data.draw(st.sampled_from([None, 0, 1, 2]))
    children = cache.fork(parents, count)
    assert children == [other.fork(seq) for seq in parents for _ in range(1 if count is None else count)]
    assert snapshot(cache, calls=False) == snapshot(other, calls=False)
    ending = data.draw(st.lists(st.sampled_from(living + children), unique=True))
    cache.free(ending)
    for seq in ending:
        other.free(seq)
    assert snapshot(cache, calls=False) == snapshot(other, calls=False)
    assert cache.allocate(3) == [other.allocate() for _ in range(3)]
    assert snapshot(cache, calls=False) == snapshot(other, calls=False)
    check_pages(cache)


def test_what_comes_back() -> None:
    cache = PagedKVCache(16, 4, 1, 8)
    a = cache.allocate()
    fill(cache, cache.extend([a], 6))
    assert type(cache.fork(a)) is int
    assert type(cache.fork(torch.tensor(a))) is int
    assert cache.fork(a, 1) == [3]
    assert cache.fork([a]) == [4]
    assert cache.fork(np.array([a, a]), 2) == [5, 6, 7, 8]
    assert cache.fork(a, 0) == cache.fork([], 3) == cache.fork([]) == cache.allocate(0) == []
    assert cache.pool.refs.max() == 9
    cache.free(torch.tensor([a, 1, 2]))
    cache.free([])
    cache.free((3, 4))
    cache.free(np.int64(5))
    assert list(cache.lengths) == [6, 7, 8]
    check_pages(cache)


def test_forks_of_many_grow_with_one_copy_less_than_holders() -> None:
    """Two parents, their forks and the parents themselves extend at once: the last holder of each page keeps it."""
    cache = PagedKVCache(32, 4, 1, 8, kv_format="fp32")
    parents = cache.allocate(2)
    written = fill(cache, cache.extend(parents, [6, 3]))
    rows = written[0][0].split([6, 3])
    seqs = [*cache.fork(parents, 3), *parents]
    order = [seqs[n] for n in (0, 6, 3, 1, 7, 4, 2, 5)]
    used = cache.stats().pages_used
    fill(cache, cache.extend(order, [1, 2, 1, 1, 1, 3, 1, 1]), seed=1)
    assert cache.stats().pages_used == used + 3 + 3 + 1  # copies, and a second page after one of them
    for n, seq in enumerate(seqs):
        of = rows[n // 3 if n < 6 else n - 6]
        assert torch.equal(cache.gather(0, seq)[0][: len(of)], of)
    check_pages(cache)


def test_the_first_that_cannot_be_copied_is_named() -> None:
    cache = PagedKVCache(32, 4, 1, 8, num_layers=2)
    a, b = cache.allocate(2)
    fill(cache, cache.extend([a], 2))
    cache.extend([b], 2)
    (c,) = cache.fork([a])
    d, e = cache.fork(b, 2)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=f"sequence {d} shares its last page"):
        cache.extend([c, d, b, e], 1)
    assert snapshot(cache) == before


def test_slots_of_sequences_that_end_together() -> None:
    """Their pages were freed since, so what was reserved cannot be written; others' can."""
    cache = PagedKVCache(8, 4, 1, 8, kv_format="fp32")
    seqs = cache.allocate(3)
    slots = cache.extend(seqs, [3, 5, 2])
    own = cache.extend(seqs[1:2], 2)
    freed = cache.pool.freed.copy()
    ended = np.concatenate([cache.page_list(seqs[0]), cache.page_list(seqs[2])])
    cache.free([seqs[0], seqs[2]])
    assert (cache.pool.freed > freed)[ended].all()
    assert (cache.pool.freed == freed)[cache.page_list(seqs[1])].all()
    with pytest.raises(ValueError, match=f"stale: sequence {seqs[0]} was freed"):
        fill(cache, slots)
    fill(cache, own)


def test_moved_pages_are_noticed_among_many() -> None:
    cache = PagedKVCache(32, 4, 1, 8, kv_format="fp32")
    seqs = cache.allocate(4)
    slots = cache.extend(seqs, [2, 0, 9, 4])
    fill(cache, slots)
    fill(cache, slots, seed=1)
    twin = cache.fork(seqs[2])
    cache.free(cache.allocate())
    fill(cache, slots, seed=2)  # nothing moved
    fill(cache, cache.extend([seqs[2]], 1))  # it gets a copy of its last page
    with pytest.raises(ValueError, match="stale: their sequence has copied its page"):
        fill(cache, slots, seed=3)
    assert torch.equal(cache.gather(0, twin)[0], noise(15, 1, 8, seed=200)[2:11])


def test_bad_lists_change_nothing() -> None:
    cache = PagedKVCache(8, 4, 2, 8)
    a, b, freed = cache.allocate(3)
    fill(cache, cache.extend([a, b], [3, 6]))
    cache.free(freed)
    gone = f"^seq must be alive, but sequence {freed} was freed or never allocated"
    bad: list[tuple[Any, type[Exception], str]] = [
        (lambda: cache.free([a, freed]), ValueError, gone),
        (lambda: cache.free([a, b, a]), ValueError, "^seq must name each sequence once"),
        (lambda: cache.free([a, 1.5]), TypeError, "^seq must be an int"),
        (lambda: cache.free([a, True]), TypeError, "^seq must be an int"),
        (lambda: cache.free("a"), TypeError, "^seq must be an int"),
        (lambda: cache.free(None), TypeError, "^seq must be an int"),
        (lambda: cache.fork([a, freed]), ValueError, gone),
        (lambda: cache.fork([a, freed], 3), ValueError, gone),
        (lambda: cache.fork(a, -1), ValueError, "^count must be at least 0"),
        (lambda: cache.fork([a, b], 1.0), TypeError, "^count must be an int"),
        (lambda: cache.allocate(-1), ValueError, "^count must be at least 0"),
        (lambda: cache.allocate("2"), TypeError, "^count must be an int"),
    ]
    before = snapshot(cache)
    for number, (call, error, says) in enumerate(bad):
        with pytest.raises(error, match=says):
            call()
        assert snapshot(cache) == before, f"case {number} changed the cache"
