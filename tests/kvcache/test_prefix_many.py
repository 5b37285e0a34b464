"""Several sequences in one call of the prefix tree: the same as one after another, and all or none."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_cases import add, check_contents, check_tree, empty_out, make, snapshot, tree_of, write

from tilewise.kvcache import OutOfPages, PrefixCache

prompt = st.lists(st.integers(0, 1), min_size=1, max_size=11)


def grown(data: st.DataObject, num_pages: int = 200) -> PrefixCache:
    """A tree with living sequences, forks among them, some of whose tokens are not written."""
    prefix = make(num_pages, data.draw(st.sampled_from([1, 2, 3])))
    for tokens in data.draw(st.lists(prompt, min_size=1, max_size=5)):
        try:
            seq, _, slots = prefix.insert(tokens)
        except OutOfPages:
            break
        if data.draw(st.booleans()):
            prefix.fork(seq, data.draw(st.integers(1, 2)))
        if data.draw(st.integers(0, 3)):
            write(prefix, slots)
    return prefix


def plain_tree(prefix: PrefixCache) -> list[Any]:
    """The tree without the numbers of its pages, which depend on where there was room."""

    def without(node: list[Any]) -> list[Any]:
        start, tokens, pages, last_used, living, below = node
        return [start, tokens, len(pages), last_used, living, [without(child) for child in below]]

    return without(tree_of(prefix._root))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_releasing_a_list_is_releasing_one_after_another(data: st.DataObject) -> None:
    prefix = grown(data)
    other = copy.deepcopy(prefix)
    ending = data.draw(st.lists(st.sampled_from(sorted(prefix.lengths)), unique=True))
    prefix.release(ending)
    for seq in ending:
        other.release(seq)
    assert snapshot(prefix, calls=False) == snapshot(other, calls=False)
    check_tree(prefix)
    empty_out(prefix)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_inserting_a_list_is_inserting_one_after_another(data: st.DataObject) -> None:
    prefix = grown(data)
    other = copy.deepcopy(prefix)
    prompts = data.draw(st.lists(prompt, max_size=4))
    seqs, reused, slots = prefix.insert_many(prompts)
    alone = [other.insert(tokens) for tokens in prompts]
    assert seqs == [seq for seq, _, _ in alone]
    assert reused == [n for _, n, _ in alone]
    assert slots.seqs == tuple(seqs)
    assert slots.counts == tuple(len(tokens) - n for tokens, n in zip(prompts, reused, strict=True))
    assert plain_tree(prefix) == plain_tree(other)
    assert prefix.stats() == other.stats()
    check_tree(prefix)
    if prompts:
        write(prefix, slots)
    for _, _, own in alone:
        write(other, own)
    assert plain_tree(prefix) == plain_tree(other)
    check_tree(prefix)
    for seq, tokens in zip(seqs, prompts, strict=True):
        assert prefix.tokens(seq) == tokens
        if seq in other.lengths and not prefix._live[seq].waiting:
            check_contents(prefix, seq)
    empty_out(prefix)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_running_out_of_pages_inserts_none(data: st.DataObject) -> None:
    prefix = grown(data, data.draw(st.integers(8, 20)))
    prompts = data.draw(st.lists(prompt, min_size=2, max_size=5))
    before = snapshot(prefix)
    try:
        seqs, _, _ = prefix.insert_many(prompts)
    except OutOfPages:
        assert snapshot(prefix) == before
    else:
        assert [prefix.tokens(seq) for seq in seqs] == prompts
    check_tree(prefix)
    empty_out(prefix)


def test_two_forks_released_together_leave_their_last_page() -> None:
    prefix = make(8, 4)
    a, _ = add(prefix, range(6))
    (b,) = prefix.fork(a, 1)
    prefix.release([a, b])
    assert prefix.match([*range(6), 9]) == 6
    empty_out(prefix)


def test_prompts_that_end_in_one_node() -> None:
    """Each cuts it at another place."""
    prefix = make(64, 2)
    add(prefix, range(16))
    prompts = [[*range(n), 99] for n in (12, 4, 8, 4, 15)]
    seqs, reused, slots = prefix.insert_many(prompts)
    assert reused == [12, 4, 8, 4, 15]
    check_tree(prefix)
    write(prefix, slots)
    check_tree(prefix)
    for seq, tokens in zip(seqs, prompts, strict=True):
        assert prefix.tokens(seq) == tokens
        check_contents(prefix, seq)
    empty_out(prefix)


def test_nobody_waits_for_what_was_dropped() -> None:
    prefix = make(64, 4)
    a, _ = add(prefix, range(6))
    for n in range(20):
        seq, _, slots = prefix.insert([*range(6), n, n])
        (child,) = prefix.fork(seq, 1)
        step = prefix.extend([a], [n])
        prefix.release([seq, child] if n % 2 else child)
        if not n % 2:
            prefix.release(seq)
        write(prefix, step)
    assert prefix._progress._steps == []
    with pytest.raises(ValueError, match="stale"):
        prefix.cache.write(0, slots, torch.zeros(2, 1, 2), torch.zeros(2, 1, 2))
    check_contents(prefix, a)
    empty_out(prefix)


def test_steps_written_in_another_order() -> None:
    """A token counts as written when those before it do."""
    prefix = make(64, 2)
    seq, _, first = prefix.insert([1, 2, 3])
    second = prefix.extend([seq], [4])
    (child,) = prefix.fork(seq, 1)
    third = prefix.extend([seq], [5])
    write(prefix, third)
    write(prefix, second)
    assert prefix.match([1, 2, 3, 4, 5, 6]) == 0
    assert len(prefix._live[seq].waiting) == 3
    assert len(prefix._live[child].waiting) == 2
    write(prefix, first)
    assert prefix.match([1, 2, 3, 4, 5, 6]) == 5
    assert prefix._live[seq].complete == 5
    assert prefix._live[child].complete == 4
    assert prefix._live[seq].waiting == prefix._live[child].waiting == []
    check_tree(prefix)
    empty_out(prefix)


@pytest.mark.parametrize("pages", [7, 8, 9, 16])
def test_a_prompt_that_goes_on_where_all_pages_are_full(pages: int) -> None:
    prefix = make(64, 2)
    tokens = list(range(2 * pages))
    add(prefix, tokens)
    assert prefix.match([*tokens, 5, 6]) == 2 * pages
    seq, reused = add(prefix, [*tokens, 5, 6])
    assert reused == 2 * pages
    check_contents(prefix, seq)


def test_bad_lists_change_nothing() -> None:
    prefix = make(16, 4)
    a, _ = add(prefix, range(6))
    b, _ = add(prefix, range(3))
    prefix.release(b)
    bad: list[tuple[Any, type[Exception], str]] = [
        (lambda: prefix.release([a, b]), ValueError, f"^seq must .* sequence {b} was released"),
        (lambda: prefix.release([a, a]), ValueError, "^seq must name each sequence once"),
        (lambda: prefix.release([a, "b"]), TypeError, "^seq must"),
        (lambda: prefix.insert_many([[1, 2], []]), ValueError, r"^prompts\[1\] must hold at least one token"),
        (lambda: prefix.insert_many([[1, 2], 3]), TypeError, r"^prompts\[1\] must"),
        (lambda: prefix.insert_many([1, 2]), TypeError, r"^prompts\[0\] must"),
        (lambda: prefix.insert_many("ab"), TypeError, "^prompts must be a list"),
        (lambda: prefix.insert_many(np.zeros((2, 2), np.int64)), TypeError, "^prompts must be a list"),
    ]
    before = snapshot(prefix)
    for number, (call, error, says) in enumerate(bad):
        with pytest.raises(error, match=says):
            call()
        assert snapshot(prefix) == before, f"case {number} changed something"
    prefix.release(torch.tensor([a]))
    assert prefix.lengths == {}
