"""The table of page lists and the stamps by which a copy of it elsewhere is kept up to date."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import fill

from tilewise.kvcache import OutOfPages, PagedKVCache, sequences
from tilewise.kvcache.sequences import Sequences


class Mirror:
    """A copy of the table that looks at stamps and counts alone, as one on a card does."""

    def __init__(self) -> None:
        self.lists: dict[int, list[int]] = {}  # by row
        self.stamps: dict[int, int] = {}

    def follow(self, sequences: Sequences) -> None:
        for row in sequences.rows.values():
            stamp, count = int(sequences.stamps[row]), int(sequences.counts[row])
            known = len(self.lists[row]) if self.stamps.get(row) == stamp else 0
            assert known <= count
            self.lists[row] = self.lists.get(row, [])[:known] + sequences.table[row, known:count].tolist()
            self.stamps[row] = stamp


def check_table(cache: PagedKVCache, mirror: Mirror) -> None:
    rows = cache.sequences
    mirror.follow(rows)
    assert len(rows.table) == len(rows.lengths) == len(rows.counts) == len(rows.stamps)
    assert len(set(rows.rows.values())) == len(rows.rows)
    for seq, row in rows.rows.items():
        pages = cache.page_list(seq).tolist()
        assert mirror.lists[row] == pages, "the copy has other pages"
        assert rows.counts[row] == len(pages)
        assert rows.lengths[row] == cache.length(seq)
        assert rows.last[row] == (pages[-1] if pages else -1)
        assert not rows.table[row, len(pages) :].any()
    free = sorted(set(range(len(rows.table))) - set(rows.rows.values()))
    assert not rows.table[free].any()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_copy_that_follows_the_stamps_is_always_right(data: st.DataObject) -> None:
    cache = PagedKVCache(40, data.draw(st.sampled_from([1, 2, 4])), 1, 2)
    mirror = Mirror()
    for _ in range(data.draw(st.integers(1, 25))):
        living = list(cache.lengths)
        what = data.draw(st.sampled_from(["allocate", "fork", "free", "extend", "extend"] if living else ["allocate"]))
        if what == "allocate":
            cache.allocate()
        elif what == "fork":
            cache.fork(data.draw(st.sampled_from(living)))
        elif what == "free":
            cache.free(data.draw(st.sampled_from(living)))
        else:
            some = data.draw(st.lists(st.sampled_from(living), unique=True, max_size=4))
            try:
                fill(cache, cache.extend(some, [data.draw(st.integers(0, 9)) for _ in some]))
            except OutOfPages:
                cache.free(living[0])
        check_table(cache, mirror)


def test_what_changes_a_stamp() -> None:
    cache = PagedKVCache(40, 4, 1, 2)
    a, b = cache.allocate(), cache.allocate()

    def stamps(*seqs: int) -> list[int]:
        return cache.sequences.stamps[[cache.sequences.rows[s] for s in seqs]].tolist()

    first = stamps(a, b)
    assert len(set(first)) == 2
    fill(cache, cache.extend([a, b], [6, 60]))
    assert stamps(a, b) == first, "growing is no change, in a wider table either"
    c = cache.fork(a)
    third = stamps(c)
    assert stamps(a, b) == first
    assert third[0] not in first
    fill(cache, cache.extend([c, b], 1))
    assert stamps(a, b) == first
    assert stamps(c) != third, "its last page was copied"
    seen = {*first, *third, *stamps(c)}
    row = cache.sequences.rows[b]
    cache.free(b)
    d = cache.allocate()
    assert cache.sequences.rows[d] == row
    assert stamps(d)[0] not in seen, "the row has another sequence"


@pytest.mark.parametrize("large", [1, 2**20])
def test_the_table_grows_in_both_directions(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied as a whole, or list by list."""
    monkeypatch.setattr(sequences, "LARGE", large)
    cache = PagedKVCache(4096, 1, 1, 2)
    mirror = Mirror()
    for count in (1, 9, 33, 200):
        seqs = [cache.allocate() for _ in range(count)]
        cache.extend(seqs, count % 13)
        check_table(cache, mirror)
    long = cache.allocate()
    cache.extend([long], 700)
    check_table(cache, mirror)
    assert cache.sequences.table.dtype == np.int32
    with pytest.raises(ValueError, match="once"):
        cache.sequences.batch([long, long])


def test_a_batch_in_which_some_took_the_places_of_others():
    """It is what all of them, looked up one by one, are; and whoever is not alive, or named twice, is found."""
    cache = PagedKVCache(8, 4, 1, 8)
    r = random.Random(0)
    seqs = cache.allocate(12)
    others = cache.allocate(3)
    for _ in range(300):
        before = cache.sequences.batch(seqs)
        assert cache.sequences.batch(seqs)[1] is before[1]
        places = r.sample(range(12), r.randrange(0, 12))
        leaving = [seqs[n] for n in places]
        ended = [seq for seq in leaving if r.random() < 0.7]
        if ended:
            cache.free(ended)
            with pytest.raises(ValueError, match="must be alive"):
                cache.sequences.batch(seqs)
        others += [seq for seq in leaving if seq not in ended]
        for n in places:
            seqs[n] = others.pop(r.randrange(len(others))) if others and r.random() < 0.5 else cache.allocate()
        if r.random() < 0.2:
            with pytest.raises(ValueError, match="name each sequence once"):
                cache.sequences.batch([*seqs[:-1], seqs[0]])
        if r.random() < 0.2:
            with pytest.raises(TypeError, match="seqs must be"):
                cache.sequences.batch([*seqs[:-1], 1.5])
        if r.random() < 0.3 and others:
            cache.free(others.pop())
        named, rows = cache.sequences.batch(seqs)
        assert named == tuple(seqs)
        assert rows.tolist() == [cache.sequences.rows[seq] for seq in seqs]
    known = cache.sequences.batch(seqs)[1]
    for _ in range(sequences.MOST_GONE + 2):
        cache.free(cache.allocate())
    assert all(len(batch.gone) < sequences.MOST_GONE for batch in cache.sequences._known)
    assert cache.sequences.batch(seqs)[1].tolist() == known.tolist()
