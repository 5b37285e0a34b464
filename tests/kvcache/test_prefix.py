"""The prefix tree: what is found and shared, when, what is evicted, and that a refused call changes nothing."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_paged import check_pages
from test_paged import snapshot as cache_snapshot

from tilewise.kvcache import OutOfPages, PagedKVCache, PrefixCache, Slots
from tilewise.kvcache.prefix import _Node

LAYERS = 2


def make(num_pages: int, page_size: int, kv_format: str = "fp32") -> PrefixCache:
    return PrefixCache(PagedKVCache(num_pages, page_size, 1, 2, num_layers=LAYERS, kv_format=kv_format))


def rows(tokens: Sequence[int], layer: int) -> torch.Tensor:
    """(tokens, 1, 2): stand-ins for keys. As in a model, a row depends on all the tokens up to its own."""
    values, state = [], layer
    for token in tokens:
        state = (state * 31 + token + 7) % 65521
        values.append(state)
    return torch.tensor(values, dtype=torch.float32)[:, None, None] * torch.tensor([1.0, -0.5])


def write(prefix: PrefixCache, slots: Slots, layers: Sequence[int] = range(LAYERS)) -> None:
    for layer in layers:
        parts = []
        at = 0
        for seq, count in zip(slots.seqs, slots.counts, strict=True):
            places = slots.positions[at : at + count]
            parts.append(rows(prefix.tokens(seq), layer)[places])
            at += count
        k = torch.cat(parts)
        prefix.cache.write(layer, slots, k, k + 1)


def add(prefix: PrefixCache, tokens: Sequence[int]) -> tuple[int, int]:
    """Insert and write -> (seq, reused)."""
    seq, reused, slots = prefix.insert(tokens)
    write(prefix, slots)
    return seq, reused


def check_contents(prefix: PrefixCache, seq: int) -> None:
    for layer in range(LAYERS):
        want = rows(prefix.tokens(seq), layer)
        k, v = prefix.cache.gather(layer, seq)
        assert torch.equal(k, want)
        assert torch.equal(v, want + 1)


def tree_of(node: _Node) -> list[Any]:
    below = [tree_of(node.children[key]) for key in node.keys]
    return [
        node.start,
        node.tokens.tolist(),
        node.pages.tolist(),
        node.last_used,
        sorted(live.seq for live in node.live),
        below,
    ]


def snapshot(prefix: PrefixCache) -> dict[str, Any]:
    """The whole state of cache and tree, least-recently-used order included."""
    return {
        "cache": cache_snapshot(prefix.cache),
        "tree": tree_of(prefix._root),
        "live": {
            s: (x.tokens.view().tolist(), x.complete, len(x.waiting), x.anchor.end) for s, x in prefix._live.items()
        },
        "clock": prefix._clock,
        "stats": prefix.stats(),
    }


def check_tree(prefix: PrefixCache) -> None:
    """The tree's own rules, and every page held by exactly those who should hold it."""
    size = prefix.cache.page_size
    held: Counter[int] = Counter()
    stack = [prefix._root]
    anchored: set[int] = set()
    while stack:
        node = stack.pop()
        held.update(node.pages.tolist())
        anchored |= {live.seq for live in node.live}
        assert node.keys == sorted(node.children)
        full = len(node.pages) * size == len(node.tokens)
        assert full or (len(node.pages) == 1 and 0 < len(node.tokens) < size and not node.children and not node.live)
        for key, child in node.children.items():
            assert child.parent is node
            assert child.start == node.end
            assert len(child.pages)
            assert child.tokens[:size].tobytes() == key
            assert child.last_used <= node.last_used
            stack.append(child)
        for live in node.live:
            assert live.anchor is node
            assert node.end == live.complete // size * size
            path: list[int] = []
            above: _Node | None = node
            while above is not None:
                path = above.tokens.tolist() + path
                above = above.parent
            assert live.tokens.view()[: node.end].tolist() == path
    assert anchored == set(prefix._live) == set(prefix.lengths)
    assert all(n == 1 for n in held.values()), "two nodes hold one page"
    check_pages(prefix.cache, held)


def empty_out(prefix: PrefixCache) -> None:
    """Release everything, forget everything: every page must be free again."""
    for seq in list(prefix.lengths):
        prefix.release(seq)
    prefix.clear()
    assert prefix.cache.pool.free_pages == prefix.cache.num_pages
    assert prefix.stats().nodes == prefix.stats().cached_tokens == 0
    assert prefix.cache.lengths == prefix.lengths == {}


# What is found.


def test_full_pages_are_shared_and_the_rest_is_copied() -> None:
    prefix = make(32, 16)
    prompt = list(range(100, 180))
    a, reused = add(prefix, prompt)
    assert reused == 0
    b, reused = add(prefix, [*prompt[:37], 1, 2, 3])
    assert reused == 37
    pages_a, pages_b = prefix.cache.page_list(a), prefix.cache.page_list(b)
    assert pages_a[:2].tolist() == pages_b[:2].tolist()
    assert not set(pages_a[2:].tolist()) & set(pages_b[2:].tolist())
    for seq in (a, b):
        check_contents(prefix, seq)
    check_tree(prefix)
    empty_out(prefix)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int8", "int4"])
def test_shared_and_copied_tokens_are_the_same_bytes_in_every_format(kv_format: str) -> None:
    prefix = make(32, 4, kv_format)
    a, _ = add(prefix, range(20))
    b, reused = add(prefix, [*range(10), 77])
    assert reused == 10
    for layer in range(LAYERS):
        for mine, its in zip(prefix.cache.gather(layer, a), prefix.cache.gather(layer, b), strict=True):
            assert torch.equal(mine[:10], its[:10])


def test_the_last_token_is_always_left_to_compute() -> None:
    for size in (1, 4, 16):
        prefix = make(64, size)
        for n in (1, 4, 5, 16, 17):
            first, _ = add(prefix, range(n))
            prefix.release(first)
            seq, reused, slots = prefix.insert(range(n))
            assert reused == n - 1
            assert (len(slots), slots.positions.tolist()) == (1, [n - 1])
            prefix.release(seq)


def test_the_longest_of_many_prefixes_is_found() -> None:
    rng = random.Random(0)
    for size in (1, 3, 8):
        prefix = make(4000, size)
        known: list[list[int]] = []
        for _ in range(150):
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
            if known and rng.random() < 0.7:
                base = rng.choice(known)
                prompt = base[: rng.randrange(len(base) + 1)] + prompt
            seq, reused = add(prefix, prompt)
            assert reused == longest_common(prompt[:-1], known)
            check_contents(prefix, seq)
            if rng.random() < 0.5:
                prefix.release(seq)
            known.append(prompt)
        check_tree(prefix)
        empty_out(prefix)


def longest_common(prompt: list[int], known: list[list[int]]) -> int:
    best = 0
    for other in known:
        n = 0
        while n < min(len(prompt), len(other)) and prompt[n] == other[n]:
            n += 1
        best = max(best, n)
    return best


def test_prompts_may_be_lists_arrays_or_tensors() -> None:
    prefix = make(32, 4)
    kinds: list[Any] = [range(9), list(range(9)), np.arange(9, dtype=np.int32), torch.arange(9), torch.arange(9).int()]
    for number, prompt in enumerate(kinds):
        seq, reused = add(prefix, prompt)
        assert prefix.tokens(seq) == list(range(9))
        assert reused == (8 if number else 0)
    array = np.arange(9)
    seq, _ = add(prefix, array)
    array[:] = 0
    assert prefix.tokens(seq) == list(range(9)), "the caller's array is the caller's"


# When it is found.


def test_nothing_is_shared_before_every_layer_was_written() -> None:
    prefix = make(32, 4)
    _, _, slots = prefix.insert(range(10))
    for layers, expected in (([], 0), ([1], 0), ([0], 10)):
        write(prefix, slots, layers)
        probe, reused, _ = prefix.insert([*range(10), 5])
        assert reused == expected
        prefix.release(probe)
    check_tree(prefix)


def test_an_insert_that_was_never_written_leaves_nothing() -> None:
    prefix = make(32, 4)
    seq, _, slots = prefix.insert(range(10))
    write(prefix, slots, [0])
    prefix.release(seq)
    assert prefix.cache.pool.free_pages == 32
    assert prefix.stats().nodes == 0
    with pytest.raises(ValueError, match="stale"):
        prefix.cache.write(1, slots, torch.zeros(10, 1, 2), torch.zeros(10, 1, 2))
    assert add(prefix, range(10))[1] == 0


def test_a_released_sequence_with_a_token_to_come_keeps_its_written_pages_only() -> None:
    prefix = make(32, 4)
    seq, _ = add(prefix, range(6))
    slots = prefix.extend([seq], [6])
    prefix.release(seq)
    with pytest.raises(ValueError, match="stale"):
        prefix.cache.write(0, slots, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    assert add(prefix, range(10))[1] == 4


def test_the_same_prompt_twice_at_once() -> None:
    prefix = make(32, 4)
    a, _, slots_a = prefix.insert(range(10))
    b, reused, slots_b = prefix.insert(range(10))
    assert reused == 0
    for slots in (slots_b, slots_a):  # written in the other order
        write(prefix, slots)
        check_tree(prefix)
    assert prefix.stats().cached_tokens == 8, "the tree holds one copy"
    c, reused = add(prefix, [*range(10), 3])
    assert reused == 10
    for seq in (a, b, c):
        check_contents(prefix, seq)
    # Both grow on, under the one node.
    write(prefix, prefix.extend([a, b], [[1, 1, 1], [2, 2, 2]]))
    check_tree(prefix)
    assert add(prefix, [*range(10), 2, 2, 2, 9])[1] == 13
    empty_out(prefix)


def test_generated_tokens_can_be_shared_once_written() -> None:
    prefix = make(64, 4)
    a, _ = add(prefix, range(6))
    b, _ = add(prefix, range(50, 53))
    for token in range(6, 15):
        slots = prefix.extend([a, b], [token, token])
        assert prefix.cache.lengths[a] == token + 1
        probe, reused, _ = prefix.insert([*range(20)])
        assert reused == token
        prefix.release(probe)
        write(prefix, slots)
    check_contents(prefix, b)
    write(prefix, prefix.extend([b, a], [[], [15, 16, 17]]))
    write(prefix, prefix.extend(np.array([a, b]), torch.tensor([18, 0])))  # type: ignore[arg-type]
    assert add(prefix, range(30))[1] == 19
    assert prefix.lengths[a] == 19
    check_tree(prefix)


def test_copying_from_a_page_in_use_leaves_its_owner_alone() -> None:
    """The new prompt copies the written beginning of a page in which the owner has a token still to come."""
    prefix = make(16, 8)
    a, _ = add(prefix, range(5))
    slots = prefix.extend([a], [5])
    b, reused = add(prefix, [*range(5), 9, 9])
    assert reused == 5
    page = int(prefix.cache.page_list(a)[0])
    write(prefix, slots)
    assert prefix.cache.page_list(a).tolist() == [page], "the owner goes on in place"
    for seq in (a, b):
        check_contents(prefix, seq)
    check_tree(prefix)


def test_slots_written_out_of_order() -> None:
    prefix = make(32, 4)
    a, _, first = prefix.insert(range(5))
    second = prefix.extend([a], [[5, 6, 7, 8]])
    write(prefix, second)
    assert prefix.stats().nodes == 0, "the first tokens are missing"
    write(prefix, first)
    assert prefix.stats().cached_tokens == 8
    check_contents(prefix, a)
    assert add(prefix, range(12))[1] == 9


# Forks.


def test_forks_share_all_and_part_on_growing() -> None:
    prefix = make(32, 4)
    a, _ = add(prefix, range(10))
    forks = prefix.fork(a, 3)
    assert len(set(forks)) == 3
    assert prefix.cache.stats().pages_used == 3
    write(prefix, prefix.extend([a, *forks], [[n] * 3 for n in range(100, 104)]))
    for n, seq in enumerate([a, *forks]):
        assert prefix.tokens(seq) == [*range(10), *[100 + n] * 3]
        check_contents(prefix, seq)
        prefix.release(seq)
        check_tree(prefix)
        assert add(prefix, [*range(10), *[100 + n] * 3, 7])[1] == 13
    empty_out(prefix)


def test_forks_made_before_the_prompt_was_written() -> None:
    prefix = make(32, 4)
    a, _, slots = prefix.insert(range(10))
    (b,) = prefix.fork(a, 1)
    prefix.release(a)
    assert prefix.stats().nodes == 0
    prefix.cache.write(0, slots, rows(range(10), 0), rows(range(10), 0) + 1)
    prefix.cache.write(1, slots, rows(range(10), 1), rows(range(10), 1) + 1)
    check_contents(prefix, b)
    check_tree(prefix)
    assert add(prefix, range(20))[1] == 10


# Eviction.


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


# Many.


@pytest.mark.parametrize("batch", [1, 64, 65, 80, 97, 112, 200])
def test_batches_of_any_size(batch: int) -> None:
    prefix = make(2000, 4)
    other, _ = add(prefix, [7] * 5)  # so that no sequence of the batch has number, page or position 0
    system = list(range(30))
    seqs = []
    for n in range(batch):
        seq, reused = add(prefix, [*system, 1000 + n, n % 7, n % 3])
        assert reused == (30 if n else 0)
        seqs.append(seq)
    prefix.release(other)
    for step in range(6):
        write(prefix, prefix.extend(seqs, [step * n for n in range(batch)]))
    for seq in seqs:
        check_contents(prefix, seq)
    shared = {tuple(prefix.cache.page_list(seq)[:7].tolist()) for seq in seqs}
    assert len(shared) == 1
    check_tree(prefix)
    for seq in seqs[::2]:
        prefix.release(seq)
    prefix.clear()
    check_tree(prefix)
    for seq in seqs[1::2]:
        check_contents(prefix, seq)
    empty_out(prefix)


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


# What a person sees.


def test_stats_count() -> None:
    prefix = make(64, 4)
    assert prefix.stats().hit_rate == 0.0
    a, _ = add(prefix, range(12))
    add(prefix, [*range(8), 1, 1, 1, 1])
    prefix.insert([5, 6])
    stats = prefix.stats()
    assert (stats.inserts, stats.hits, stats.tokens_inserted, stats.tokens_reused) == (3, 1, 26, 8)
    assert (stats.sequences, stats.nodes, stats.cached_tokens) == (3, 3, 16)
    assert stats.hit_rate == 8 / 26
    assert "8 of 26 tokens reused (31%)" in str(stats)
    prefix.release(a)
    assert prefix.stats().sequences == 2


def test_show_draws_the_tree() -> None:
    prefix = make(64, 4)
    a, _ = add(prefix, range(10, 22))
    b, _ = add(prefix, [*range(10, 18), 1, 2, 3, 4, 5])
    prefix.extend([b], [6])
    prefix.release(a)
    assert prefix.show(max_tokens=3).splitlines()[1:] == [
        "└─ 8 tokens [10 11 12 …] · 2 pages · 1 sequence · refs 2",
        "   ├─ 4 tokens [1 2 3 …] · 1 page · 1 sequence · refs 2",
        f"   │  └─ sequence {b}: 14 tokens, the last 2 its own [5 6], 1 not written yet",
        "   └─ 4 tokens [18 19 20 …] · 1 page · 0 sequences · refs 1",
    ]
    text = prefix.show(max_tokens=2, decode=lambda ids: "".join(chr(ord("a") + i) for i in ids))
    assert "8 tokens 'kl…'" in text
    assert "its own 'fg'" in text
    assert len(prefix.fork(b, 20)) == 20
    assert "and 13 more sequences" in prefix.show()
    assert prefix.show(max_tokens=0).splitlines()[1].startswith("└─ 8 tokens […]")


# Refusals.


def test_bad_calls_change_nothing() -> None:
    prefix = make(16, 4)
    a, _ = add(prefix, range(6))
    gone, _ = add(prefix, range(3))
    prefix.release(gone)
    foreign = prefix.cache.allocate()
    bad: list[tuple[Any, type[Exception], str]] = [
        (lambda: prefix.insert([]), ValueError, "tokens"),
        (lambda: prefix.insert("hello"), TypeError, "tokens"),
        (lambda: prefix.insert(5), TypeError, "tokens"),
        (lambda: prefix.insert([1.5, 2.0]), TypeError, "tokens"),
        (lambda: prefix.insert([True, False]), TypeError, "tokens"),
        (lambda: prefix.insert(["a", "b"]), TypeError, "tokens"),
        (lambda: prefix.insert([1 << 70]), TypeError, "tokens"),
        (lambda: prefix.insert([(1 << 64) - 1]), TypeError, "tokens"),
        (lambda: prefix.insert([[1, 2]]), ValueError, "tokens"),
        (lambda: prefix.insert([[1, 2], [3]]), ValueError, "tokens"),
        (lambda: prefix.insert(torch.zeros(2, 2).long()), ValueError, "tokens"),
        (lambda: prefix.insert(torch.zeros(2)), TypeError, "tokens"),
        (lambda: prefix.insert(torch.tensor(3)), ValueError, "tokens"),
        (lambda: prefix.insert(torch.ones(2).bfloat16()), TypeError, "^tokens must be integers .* got torch.bfloat16"),
        (lambda: prefix.insert([torch.ones(()).bfloat16()]), TypeError, "^tokens must be integers"),
        (lambda: prefix.extend([a], [torch.tensor(1.0)]), TypeError, "^tokens must be integers"),
        (lambda: prefix.extend(torch.tensor([a]), [5, 6]), ValueError, "^tokens must"),
        (lambda: prefix.extend(np.array([a]), [5, 6]), ValueError, "^tokens must"),
        (lambda: prefix.extend([a], 5), TypeError, "tokens"),
        (lambda: prefix.extend([a], [5, 6]), ValueError, "tokens"),
        (lambda: prefix.extend([a], [1.5]), TypeError, "tokens"),
        (lambda: prefix.extend([a, a], [5, 6]), ValueError, "once"),
        (lambda: prefix.extend(a, [5]), TypeError, "seqs"),
        (lambda: prefix.extend([gone], [5]), ValueError, f"^seqs must .* sequence {gone} was freed"),
        (lambda: prefix.extend([a, foreign], [5, 5]), ValueError, f"^seqs must .* sequence {foreign}"),
        (lambda: prefix.fork(gone, 1), ValueError, f"^seq must .* sequence {gone} was released"),
        (lambda: prefix.fork(a, 0), ValueError, "n must"),
        (lambda: prefix.fork(a, 1.0), TypeError, "n must"),
        (lambda: prefix.release(gone), ValueError, f"sequence {gone} was released"),
        (lambda: prefix.release("a"), TypeError, "seq"),
        (lambda: prefix.tokens(99), ValueError, "sequence 99"),
        (lambda: prefix.show(max_tokens=-1), ValueError, "max_tokens"),
    ]
    before = snapshot(prefix)
    for number, (call, error, says) in enumerate(bad):
        with pytest.raises(error, match=says):
            call()
        assert snapshot(prefix) == before, f"case {number} changed something"
    with pytest.raises(TypeError, match="cache"):
        PrefixCache(prefix)  # type: ignore[arg-type]


def test_the_cache_refuses_sequences_of_the_tree() -> None:
    """Grown, ended or forked behind the tree's back, they would leave it with pages and tokens that do not match."""
    prefix = make(16, 4)
    cache = prefix.cache
    a, _ = add(prefix, range(6))
    (b,) = prefix.fork(a, 1)
    own = cache.allocate()
    before = snapshot(prefix)
    for seq in (a, b):
        says = f"sequence {seq} belongs to a PrefixCache: use its "
        for call, use in (
            (lambda seq=seq: cache.extend([own, seq], 1), "extend"),
            (lambda seq=seq: cache.free(seq), "release"),
            (lambda seq=seq: cache.free(torch.tensor(seq)), "release"),
            (lambda seq=seq: cache.fork(seq), "fork"),
        ):
            with pytest.raises(ValueError, match=re.escape(f"{says}{use}()")):
                call()
    assert snapshot(prefix) == before
    cache.extend([own], 3)
    cache.free(cache.fork(own))
    cache.free(own)
    write(prefix, prefix.extend([a, b], [6, 7]))
    check_contents(prefix, b)
    check_tree(prefix)
    empty_out(prefix)
    assert not cache._managed


def test_sampled_tokens_may_be_single_tensors() -> None:
    prefix = make(16, 4)
    a, _ = add(prefix, [torch.tensor(1), torch.tensor(2)])
    b, _ = add(prefix, [1, 3])
    write(prefix, prefix.extend([a, b], [torch.tensor(3), np.array(4)]))
    write(prefix, prefix.extend(torch.tensor([a, b]), [torch.tensor([5, 6]), torch.tensor([])]))
    assert prefix.tokens(a) == [1, 2, 3, 5, 6]
    assert prefix.tokens(b) == [1, 3, 4]


# Everything together.


class PrefixCacheMachine(RuleBasedStateMachine):
    """Against the naive longest common prefix over all that is complete. `roomy`: nothing is ever evicted."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]), num_pages=st.sampled_from([5, 8, 12, 2000, 2000]))
    def start(self, page_size: int, num_pages: int) -> None:
        self.prefix = make(num_pages, page_size)
        self.roomy = num_pages == 2000
        self.complete: dict[int, list[int]] = {}  # living sequences: their tokens that are written everywhere
        self.cached: list[list[int]] = []  # what released sequences left
        self.slots: list[Slots] = []
        self.seen: list[list[int]] = [[]]

    def done(self, seq: int) -> None:
        """Recompute what is complete from the slots, as the tree must have noticed by itself."""
        tokens = self.prefix.tokens(seq)
        cache = self.prefix.cache
        written = (cache._written == cache._all_layers).all(-1)  # (pages, page_size), over the layers
        pages, size = self.prefix.cache.page_list(seq), self.prefix.cache.page_size
        n = 0
        while n < len(tokens) and written[pages[n // size], n % size]:
            n += 1
        self.complete[seq] = tokens[:n]

    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=9), finish=st.booleans())
    def insert(self, data: st.DataObject, more: list[int], finish: bool) -> None:
        base = data.draw(st.sampled_from(self.seen))
        prompt = base[: data.draw(st.integers(0, len(base)))] + more
        before = snapshot(self.prefix)
        matched = self.prefix._match(np.array(prompt[:-1], dtype=np.int64)).pages
        try:
            seq, reused, slots = self.prefix.insert(prompt)
        except OutOfPages:
            assert snapshot(self.prefix) == before
            needed = -(-len(prompt) // self.prefix.cache.page_size) - len(matched)
            assert needed > self.prefix.cache.pool.free_pages + len(self.evictable() - set(matched.tolist()))
            return
        living = longest_common(prompt[:-1], list(self.complete.values()))
        best = longest_common(prompt[:-1], [*self.complete.values(), *self.cached])
        if self.roomy:
            assert reused == best
        else:
            assert living // self.prefix.cache.page_size * self.prefix.cache.page_size <= reused <= best
        assert len(slots) == len(prompt) - reused
        self.seen.append(prompt)
        if finish:
            write(self.prefix, slots)
        else:
            self.slots.append(slots)
        self.done(seq)

    def evictable(self) -> set[int]:
        """Pages of nodes with nothing alive at or below them."""
        pages: set[int] = set()

        def visit(node: _Node) -> bool:
            below = [visit(child) for child in node.children.values()]
            idle = not node.live and all(below)
            if idle:
                pages.update(node.pages.tolist())
            return idle

        visit(self.prefix._root)
        return pages

    @precondition(lambda self: self.complete)
    @rule(data=st.data(), finish=st.booleans())
    def extend(self, data: st.DataObject, finish: bool) -> None:
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.complete)), unique=True, min_size=1, max_size=3))
        some = st.lists(st.integers(0, 2), max_size=6)
        tokens = data.draw(st.lists(some, min_size=len(seqs), max_size=len(seqs)))
        before = snapshot(self.prefix)
        try:
            slots = self.prefix.extend(seqs, tokens)
        except (OutOfPages, ValueError) as error:
            assert snapshot(self.prefix) == before
            if not isinstance(error, OutOfPages) and "write them" not in str(error):
                raise
            return
        self.seen += [self.prefix.tokens(seq) for seq in seqs]
        if finish:
            write(self.prefix, slots)
        else:
            self.slots.append(slots)
        for seq in self.complete:
            self.done(seq)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1))
    def write_later(self, data: st.DataObject, layer: int) -> None:
        slots = data.draw(st.sampled_from(self.slots))
        if slots.complete or any(seq not in self.complete for seq in slots.seqs):
            self.slots = [s for s in self.slots if s is not slots]
            return
        write(self.prefix, slots, [layer])
        for seq in self.complete:
            self.done(seq)

    @precondition(lambda self: self.complete)
    @rule(data=st.data(), n=st.integers(1, 2))
    def fork(self, data: st.DataObject, n: int) -> None:
        seq = data.draw(st.sampled_from(sorted(self.complete)))
        for child in self.prefix.fork(seq, n):
            self.complete[child] = list(self.complete[seq])
            assert self.prefix.tokens(child) == self.prefix.tokens(seq)

    @precondition(lambda self: self.complete)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.complete)))
        tokens = self.complete.pop(seq)
        size = self.prefix.cache.page_size
        last = self.prefix.cache.page_list(seq)[-1]
        in_use = any(last in self.prefix.cache.page_list(other) for other in self.complete)
        if in_use or len(tokens) < self.prefix.lengths[seq]:
            tokens = tokens[: len(tokens) // size * size]  # its last page goes on with a fork, or is dropped
        self.cached.append(tokens)
        self.prefix.release(seq)

    @rule()
    def clear(self) -> None:
        self.prefix.clear()
        assert not self.evictable()
        self.cached = []
        # Nodes on the path of the living stay, and living ones hold their tokens themselves.

    @invariant()
    def everything_is_in_order(self) -> None:
        if not hasattr(self, "prefix"):
            return
        check_tree(self.prefix)
        assert set(self.prefix.lengths) == set(self.complete)
        for seq, tokens in self.complete.items():
            pages = self.prefix.cache.page_list(seq)
            for layer in range(LAYERS):
                got = self.prefix.cache.load(layer, pages, 0, len(tokens), torch.float32)[0]
                assert torch.equal(got, rows(tokens, layer))

    def teardown(self) -> None:
        if hasattr(self, "prefix"):
            self.prefix.show()
            empty_out(self.prefix)


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
