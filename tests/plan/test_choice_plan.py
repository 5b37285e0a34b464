"""Tiles of an indexer's choice: every row once, and no more scores than asked for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilewise.plan.choice import ChoicePlan


def plan_of(pairs, topk):
    lengths, counts = (np.array([pair[i] for pair in pairs], np.int64) for i in range(2))
    return ChoicePlan(tuple(range(len(pairs))), counts, lengths, np.zeros((len(pairs), 1), np.int32), 16, topk, 1)


SEQUENCES = st.lists(
    st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), min_size=0, max_size=8
)


@given(SEQUENCES, st.integers(1, 200), st.integers(1, 9), st.integers(1, 5000))
def test_every_row_is_listed_once(pairs, topk, rows_each, at_once):
    plan = plan_of(pairs, topk)
    groups = list(plan.tiles(rows_each, at_once))
    rows = [tuple(row) for group in groups for row in group.rows.tolist()]
    places = [(n, place) for n, (length, count) in enumerate(pairs) for place in range(length - count, length)]
    assert sorted((row, n, place) for row, n, place, _ in rows) == [(i, *its) for i, its in enumerate(places)]
    for _, n, _, kept in rows:
        assert (kept < 0) == (pairs[n][0] <= topk)
    for group in groups:
        tiled = [
            (row + i, n, place + i, kept + i)
            for n, row, count, place, kept in group.tiles.tolist()
            for i in range(count)
        ]
        assert tiled == [tuple(row) for row in group.rows.tolist() if row[3] >= 0]
        assert [kept for *_, kept in tiled] == list(range(group.kept))
        assert group.width == max((place + 1 for _, _, place, _ in tiled), default=0)
        assert len(group.tiles) <= 1 or group.kept * group.width <= at_once
        assert all(count <= rows_each for _, _, count, _, _ in group.tiles.tolist())


def test_short_sequences_beside_a_long_one_keep_no_scores():
    (group,) = plan_of([(10, 1)] * 1000 + [(1_000_000, 1)], 2048).tiles(64, 1 << 26)
    assert (group.kept, group.width, len(group.rows)) == (1, 1_000_000, 1001)
