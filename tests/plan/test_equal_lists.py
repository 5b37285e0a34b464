"""The work list of query tokens that choose as many keys each: that of a plan of as many sequences, made at once."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_seconds import cpu_seconds
from tree_cases import make_plan

from tilewise.plan.items import Word
from tilewise.plan.worklist import FAR, Shape, Splitting, equal_lists, work_list

SPLITTING = Splitting(pieces=((1024, 128), (FAR, 256)))
PAGE_WORDS = [Word.PAGE, Word.SECOND_PAGE, Word.TAIL_FROM]  # of no page table


@pytest.mark.parametrize("whole", [None, True, False])
@pytest.mark.parametrize(
    ("count", "tokens", "heads"), [(1, 2048, 70), (5, 300, 8), (9, 63, 130), (40, 1, 64), (3, 0, 4)]
)
def test_it_is_the_list_of_a_plan(count: int, tokens: int, heads: int, whole: bool | None) -> None:
    shape = Shape(64, 1, 7, tiles=False, longest=1024, chunk=64)
    splitting = Splitting(pieces=SPLITTING.pieces, whole=whole)
    pages = np.arange(-(-tokens // 16), dtype=np.int32)
    lists = [pages + n * len(pages) for n in range(count)]
    plan = make_plan(lists, [tokens] * count, heads=(heads, 1), share=False)
    expected = work_list(plan, lists, [tokens] * count, 16, shape, splitting=splitting)
    found = equal_lists(count, tokens, heads, shape, splitting=splitting)
    for name in ("order", "states", "lengths", "total_states", "blocks", "sequences"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    for listed in (found, expected):
        listed.items[..., PAGE_WORDS] = 0
    assert np.array_equal(found.items, expected.items)


def test_at_once_where_a_block_takes_a_list_whole() -> None:
    shape = Shape(64, 1, 4, tiles=False, longest=1024, chunk=64)
    many, few = (equal_lists(n, 2000, 64, shape, splitting=SPLITTING, folds=False) for n in (40, 1))
    folded = equal_lists(40, 2000, 64, shape, splitting=SPLITTING)
    assert (folded.items[..., Word.STATE_FOLD] == 256 // 64).all()
    assert (many.items[..., Word.STATE_FOLD] == 0).all()
    assert (many.items[..., Word.STOP] == 2000).all()
    assert many.total_states == folded.total_states == 0
    assert few.total_states == 8  # one list is cut as ever
    same = equal_lists(1, 2000, 64, shape, splitting=SPLITTING)
    assert np.array_equal(few.items, same.items)


def test_thousands_are_listed_quickly() -> None:
    """A prefill of 4096 tokens with 64 heads takes a card 3 ms per layer or more, and all layers share the list."""
    shape = Shape(64, 1, 132, tiles=False, longest=1024, chunk=64)
    (seconds,) = cpu_seconds(lambda: equal_lists(4096, 2048, 64, shape, splitting=SPLITTING, folds=False))
    assert seconds < 0.0015 * 5  # under 1.5 ms on a quiet machine
