"""Steps over the same sequences again and again: the same as steps that know nothing of the one before."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from paged_cases import check_pages, snapshot

from tilewise.kvcache import OutOfPages, PagedKVCache, PrefixCache
from tilewise.kvcache.slots import Slots


def forget(cache: PagedKVCache) -> None:
    """The next step is the first one."""
    cache.sequences.run = cache.sequences.stepped = None


def written(cache: PagedKVCache) -> list[list[int]]:
    """Of each sequence, what its tokens have."""
    size = cache.page_size
    bits = cache._written.bits.reshape(cache.num_pages, size)
    return [bits[cache.page_list(seq)].reshape(-1)[:length].tolist() for seq, length in cache.lengths.items()]


def equal(cache: PagedKVCache, other: PagedKVCache) -> bool:
    """Are they the same in all that a sequence has?"""
    here, there = (snapshot(one) for one in (cache, other))
    for one in (here, there):
        del one["written"], one["bytes"]
    return here == there and written(cache) == written(other)


def same_slots(slots: Slots, other: Slots) -> bool:
    return (slots.seqs, slots.counts, slots.host_positions.tolist(), slots.host_index.tolist()) == (
        other.seqs,
        other.counts,
        other.host_positions.tolist(),
        other.host_index.tolist(),
    )


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_run_is_step_after_step(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 4, 16]))
    cache = PagedKVCache(60, size, 1, 1, num_layers=data.draw(st.sampled_from([1, 3])))
    seqs = cache.allocate(3)
    cache.mark_written(cache.extend(seqs, [data.draw(st.integers(0, 2 * size)) for _ in seqs]))
    other = copy.deepcopy(cache)
    for _ in range(data.draw(st.integers(1, 12))):
        forget(other)
        living = list(cache.lengths)
        what = data.draw(st.sampled_from(["step", "step", "step", "fork", "free", "more"]))
        if what == "fork":
            seq = data.draw(st.sampled_from(living))
            assert cache.fork(seq) == other.fork(seq)
        elif what == "free" and len(living) > 1:
            seq = data.draw(st.sampled_from(living))
            cache.free(seq)
            other.free(seq)
        elif what == "more":
            seq, count = data.draw(st.sampled_from(living)), data.draw(st.integers(0, 3))
            for one in (cache, other):
                try:
                    one.mark_written(one.extend([seq], count))
                except OutOfPages:
                    break
        else:
            late = data.draw(st.booleans())
            for _ in range(data.draw(st.integers(1, 2 * size + 1))):
                forget(other)
                try:
                    slots = cache.extend(living, 1)
                except OutOfPages:
                    with pytest.raises(OutOfPages):
                        other.extend(living, 1)
                    assert equal(cache, other)
                    return
                expected = other.extend(living, 1)
                assert same_slots(slots, expected)
                if not late:
                    cache.mark_written(slots)
                    other.mark_written(expected)
                    continue
                assert equal(cache, other)  # nothing counts as written that is only reserved
                cache.mark_written(slots)
                other.mark_written(expected)
        assert equal(cache, other)
        check_pages(cache)
    assert other.sequences.run is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_run_goes_on_while_sequences_take_the_places_of_others(data: st.DataObject) -> None:
    """Some of a batch leave in every step, ended or not, and others join: forks that share their last page, and ones
    that had a place before, among them."""
    size = data.draw(st.sampled_from([1, 2, 4]))
    cache = PagedKVCache(400, size, 1, 1)
    root = cache.allocate()
    cache.mark_written(cache.extend([root], data.draw(st.integers(1, 2 * size))))
    seqs = cache.fork(root, 5)
    away: list[int] = []
    other = copy.deepcopy(cache)
    draw = data.draw
    followed = 0
    for _ in range(draw(st.integers(2, 10))):
        forget(other)
        for place in draw(st.lists(st.integers(0, 4), max_size=2, unique=True)):
            leaving = seqs[place]
            what = draw(st.sampled_from(["free", "stay", "swap"]))
            if what == "swap":  # the order changes, and nothing else
                seqs[place], seqs[0] = seqs[0], leaving
                continue
            joining = away.pop() if away and draw(st.booleans()) else None
            if joining is None:
                parent = draw(st.sampled_from([root, *seqs]))
                joining = cache.fork(parent)
                assert other.fork(parent) == joining
                more = draw(st.integers(0, 2))
                for one in (cache, other):
                    one.mark_written(one.extend([joining], more))
            seqs[place] = joining
            if what == "stay":
                away.append(leaving)
            else:
                cache.free(leaving)
                other.free(leaving)
        run = cache.sequences.run
        slots, expected = cache.extend(seqs, 1), other.extend(seqs, 1)
        followed += run is not None and cache.sequences.run is run
        assert same_slots(slots, expected)
        cache.mark_written(slots)
        other.mark_written(expected)
        assert equal(cache, other)
        check_pages(cache)
    event(f"steps of a run that was there: {followed}")


def test_a_run_survives_who_leaves_and_joins() -> None:
    cache = PagedKVCache(100, 4, 1, 1)
    seqs = cache.allocate(6)
    new = cache.allocate(1)
    cache.mark_written(cache.extend([*seqs, *new], 3))
    for _ in range(3):
        cache.mark_written(cache.extend(seqs, 1))
    run = cache.sequences.run
    assert run is not None
    cache.free(seqs[2])
    seqs[2] = new[0]
    other = cache.fork(new[0])  # shares its last page: it takes a copy, and the run is over
    cache.free(other)
    cache.mark_written(cache.extend(seqs, 1))
    assert cache.sequences.run is run
    cache.fork(seqs[1])
    cache.mark_written(cache.extend(seqs, 1))
    assert cache.sequences.run is not run
    assert cache.lengths_of(seqs).tolist() == [8, 8, 5, 8, 8, 8]


def test_pages_of_a_run_are_taken_as_unwritten() -> None:
    """Also where the page was written by somebody who is gone, and where a relative wrote more of it."""
    cache = PagedKVCache(4, 4, 1, 1, kv_format="fp32")
    (gone,) = cache.allocate(1)
    cache.mark_written(cache.extend([gone], 16))
    cache.free(gone)
    seqs = cache.allocate(2)
    cache.mark_written(cache.extend(seqs, 1))
    for length in range(2, 9):
        slots = cache.extend(seqs, 1)
        for seq in seqs:
            with pytest.raises(ValueError, match="not all written"):
                cache.gather(0, seq)
        cache.mark_written(slots)
        assert len(cache.gather(0, seqs[0])[0]) == length
    assert cache.sequences.run is not None


def test_slots_of_a_run_go_stale_with_their_pages() -> None:
    cache = PagedKVCache(8, 4, 1, 1)
    seqs = cache.allocate(2)
    steps = [cache.extend(seqs, 1) for _ in range(3)]
    cache.free(seqs[0])
    with pytest.raises(ValueError, match="stale"):
        cache.mark_written(steps[2])


def test_a_step_of_the_tree_after_another() -> None:
    """What a prefix tree takes in from a run, a later prompt finds."""
    prefix = PrefixCache(PagedKVCache(40, 4, 1, 1))
    seqs = []
    for number in range(3):
        seq, _, slots = prefix.insert([number] * (5 + number))
        prefix.cache.mark_written(slots)
        seqs.append(seq)
    for token in range(10, 20):
        prefix.cache.mark_written(prefix.extend(seqs, [token] * 3))
    run = prefix.cache.sequences.run
    assert run is not None
    assert run.changes == prefix.cache.sequences.changes
    assert prefix.tokens(seqs[1]) == [1] * 6 + list(range(10, 20))
    assert prefix.match([*prefix.tokens(seqs[1]), 7]) == 16
    expected = np.array([prefix.cache.length(seq) for seq in seqs])
    assert run.lengths.tolist() == expected.tolist() == [15, 16, 17]
