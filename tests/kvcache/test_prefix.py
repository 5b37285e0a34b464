"""The prefix tree: what is found and shared, when, in batches of any size, and what a person sees of it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from prefix_cases import LAYERS, add, check_contents, check_tree, empty_out, longest_common, make, rows, write
from prefix_machine import PrefixCacheMachine


@pytest.mark.usefixtures("written_by")
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


@pytest.mark.usefixtures("written_by")
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


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
