"""Lists that grow over sequences which shared their last page: each goes on in a copy of its own."""

from __future__ import annotations

import pytest
from decode_cases import MODES, SMALL, assert_decoded, decode, grow, make_cache, queries

from tilewise import plan_decode
from tilewise.arguments import PageListsOf
from tilewise.gpu import decode as decoding


@pytest.mark.parametrize("counted", [True, False], ids=["the cache counts copies", "plain lists"])
@pytest.mark.parametrize("steps", [(1, 1), (20, 1)])
def test_a_fork_s_next_token_is_not_read_by_the_other(steps, counted):
    cache, (first, other) = make_cache((40, 24), spare=20)  # 40 tokens end within a page of 16
    seqs = [first, cache.fork(first), other]
    q = queries(cache, seqs)
    plan = plan_decode(cache, seqs, num_heads=q.shape[2], room=60)
    got = decode(cache, seqs, q, plan=plan, room=60, splitting=SMALL)
    assert_decoded(got, q, cache, seqs)
    (listed,) = decoding.kept(plan).lists.values()
    before = [cache.page_list(seq)[-1] for seq in seqs[:2]]
    assert before[0] == before[1]
    for number, step in enumerate(steps):
        grow(cache, seqs, step, seed=50 + number)
        lists = PageListsOf(cache, seqs) if counted else [cache.page_list(seq) for seq in seqs]
        listed.grow([cache.length(seq) for seq in seqs], lists)
        got = decode(cache, seqs, q, plan=plan, room=60, splitting=SMALL, mode=MODES[number])
        assert_decoded(got, q, cache, seqs)
    assert cache.page_list(seqs[0])[2] != cache.page_list(seqs[1])[2]


def test_lists_are_read_again_only_where_they_may_have_changed():
    cache, seqs = make_cache((40, 24), spare=20)
    plan = plan_decode(cache, seqs, num_heads=8, room=60)

    class Lists(PageListsOf):
        def block(self, numbers, first, width):
            read.extend(numbers.tolist())
            return super().block(numbers, first, width)

    q, read = queries(cache, seqs), []
    decode(cache, seqs, q, plan=plan, room=60, splitting=SMALL)
    (listed,) = decoding.kept(plan).lists.values()
    for step, expected in ((1, [0, 1]), (1, []), (6, []), (1, [0, 1])):  # the first time nothing is known of copies
        grow(cache, seqs, step)
        read.clear()
        listed.grow([cache.length(seq) for seq in seqs], Lists(cache, seqs))
        assert sorted(read) == expected
