"""What the prefix tree evicts, in which order, and that a living sequence loses nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from prefix_cases import LAYERS, add, check_contents, check_tree, empty_out, make, snapshot, write

from tilewise.kvcache import OutOfPages


def test_the_least_recently_used_goes_first() -> None:
    prefix = make(7, 4)
    prompts = {name: [value] * 8 for value, name in enumerate("abc")} | {"d": [9] * 12}
    for name in "abc":
        prefix.release(add(prefix, prompts[name])[0])
    seq, reused, _ = prefix.insert(prompts["a"][:4])  # a is used once more: b is the oldest
    assert reused == 3
    prefix.release(seq)
    seq, _ = add(prefix, prompts["d"])
    assert prefix.stats().evictions == 2
    prefix.release(seq)
    found = {name: prefix._match(np.array(prompt)).pages.size for name, prompt in prompts.items()}
    assert found == {"a": 2, "b": 0, "c": 2, "d": 3}
    check_tree(prefix)


def test_a_sequence_is_in_use_until_its_release() -> None:
    prefix = make(4, 4)
    a, _ = add(prefix, [1] * 8)
    b, _ = add(prefix, [2] * 8)
    prefix.release(b)
    prefix.release(a)  # inserted first, but used last
    add(prefix, [3] * 8)
    assert prefix._match(np.array([1] * 8)).pages.size == 2
    assert prefix._match(np.array([2] * 8)).pages.size == 0


@pytest.mark.parametrize("child", [False, True])
def test_a_node_stays_while_a_sequence_with_its_own_copy_stands_on_it(child: bool) -> None:
    """The node's pages are those of a sequence that is gone; the one that computed the same beside it lives."""
    prefix = make(8, 4)
    a, _, slots_a = prefix.insert(range(8))
    b, _, slots_b = prefix.insert(range(8))
    write(prefix, slots_a)
    write(prefix, slots_b)
    prefix.release(a)
    if child:
        prefix.release(add(prefix, [*range(8), 5, 5, 5, 5])[0])
        with pytest.raises(OutOfPages, match="3 of 8 are free and 1 can be evicted"):
            prefix.insert([9] * 20)
    seq, _ = add(prefix, [9] * 16)  # all that is left: the child goes, the node does not
    with pytest.raises(OutOfPages, match="0 can be evicted"):
        prefix.extend([seq], [9])
    write(prefix, slots_b)
    check_contents(prefix, b)
    check_tree(prefix)
    prefix.release(seq)
    write(prefix, prefix.extend([b], [[7, 7, 7, 7]]))
    check_tree(prefix)
    empty_out(prefix)


def test_only_as_much_as_needed_is_evicted_and_from_the_end() -> None:
    prefix = make(8, 4)
    prefix.release(add(prefix, range(32))[0])
    seq, _ = add(prefix, [99] * 9)
    assert prefix.stats().evictions == 3
    prefix.release(seq)
    assert prefix._match(np.arange(32)).pages.size == 5
    check_tree(prefix)


def test_parents_outlive_their_children() -> None:
    prefix = make(6, 4)
    prefix.release(add(prefix, [*range(8), *[50] * 4])[0])
    prefix.release(add(prefix, [*range(8), *[60] * 4])[0])
    add(prefix, [99] * 12)  # two pages are free; one branch goes
    assert prefix.stats().evictions == 1
    assert prefix._match(np.array([*range(8), *[60] * 4])).pages.size == 3
    assert prefix._match(np.array([*range(8), *[50] * 4])).pages.size == 2
    check_tree(prefix)


def test_what_a_living_sequence_stands_on_is_never_evicted() -> None:
    prefix = make(6, 4)
    a, _ = add(prefix, range(12))
    prefix.release(add(prefix, [*range(8), *[50] * 8])[0])
    seq, reused = add(prefix, [99] * 8)
    assert reused == 0
    check_contents(prefix, a)
    prefix.release(seq)
    before = snapshot(prefix)
    with pytest.raises(OutOfPages, match="3 can be evicted"):
        prefix.insert([98] * 16)
    assert snapshot(prefix) == before
    check_contents(prefix, a)


def test_extending_evicts_too() -> None:
    prefix = make(4, 4)
    a, _ = add(prefix, range(4))
    prefix.release(add(prefix, [50] * 12)[0])
    write(prefix, prefix.extend([a], [[1] * 8]))
    assert prefix.stats().evictions == 2
    before = snapshot(prefix)
    with pytest.raises(OutOfPages):
        prefix.extend([a], [[1] * 5])
    assert snapshot(prefix) == before
    check_contents(prefix, a)
    check_tree(prefix)


@pytest.mark.usefixtures("written_by")
def test_out_of_pages_leaves_cache_and_tree_as_they_were() -> None:
    prefix = make(10, 4)
    live, _ = add(prefix, range(14))
    _, _, pending = prefix.insert([*range(6), 70, 71])
    for value in (40, 50):
        prefix.release(add(prefix, [*range(8), *[value] * 4])[0])
    calls: list[Any] = [
        lambda: prefix.insert([99] * 40),
        lambda: prefix.insert([*range(8), *[40] * 4, *[99] * 30]),  # matches what it would have to evict
        lambda: prefix.insert([*range(10), *[99] * 30]),  # matches inside a node, and part of a page
        lambda: prefix.insert([*range(8), 50, *[99] * 30]),
        lambda: prefix.extend([live], [[99] * 40]),
        lambda: prefix.extend([live, pending.seqs[0]], [[99] * 20, [1]]),
    ]
    before = snapshot(prefix)
    for number, call in enumerate(calls):
        with pytest.raises(OutOfPages, match="evicted"):
            call()
        assert snapshot(prefix) == before, f"case {number}"
    write(prefix, pending)
    check_tree(prefix)
    empty_out(prefix)


def test_the_page_to_copy_from_is_evicted_if_nothing_else_is_left() -> None:
    prefix = make(3, 4)
    live, _ = add(prefix, [1] * 8)
    prefix.release(add(prefix, range(4))[0])
    seq, reused = add(prefix, [0, 1, 9])  # two tokens could be copied, but only from the page that is needed
    assert reused == 0
    for s in (live, seq):
        check_contents(prefix, s)
    check_tree(prefix)


def test_a_tail_that_a_longer_one_holds_too_is_dropped() -> None:
    prefix = make(16, 8)
    for end in (3, 5, 7):
        seq, reused = add(prefix, range(end))
        assert reused == max(end - 2, 0) if end > 3 else reused == 0
        prefix.release(seq)
        assert prefix.cache.stats().pages_used == 1
    assert add(prefix, range(12))[1] == 7
    assert prefix.cache.stats().pages_used == 2, "its own two pages, which hold the tail's tokens too"


def test_clear_keeps_the_living() -> None:
    prefix = make(64, 4)
    a, _ = add(prefix, range(10))
    for value in range(5):
        prefix.release(add(prefix, [*range(6), *[50 + value] * 6])[0])
    prefix.clear()
    check_contents(prefix, a)
    check_tree(prefix)
    assert prefix.stats().cached_tokens == 8
    assert prefix.cache.stats().pages_used == 3
    assert prefix.stats().evictions == 0, "to forget on request is no eviction"
    assert add(prefix, [*range(10), 4])[1] == 10


def test_a_tree_deeper_than_python_recursion_goes() -> None:
    prefix = make(3000, 1)
    chain = list(range(1, 1201))
    for prompt in [chain, *([*chain[:depth], 0] for depth in range(1, 1200))]:
        seq, _, slots = prefix.insert(prompt)
        for layer in range(LAYERS):
            prefix.cache.write(layer, slots, torch.zeros(len(slots), 1, 2), torch.zeros(len(slots), 1, 2))
        prefix.release(seq)
    assert prefix.stats().nodes == 2 * 1199 + 1
    assert prefix.show().count("\n") == prefix.stats().nodes
    prefix.release(prefix.insert([0] * 1500)[0])
    assert prefix.stats().evictions == 1500 - 601
    empty_out(prefix)
