"""The paged cache: contents, sharing, copy-on-write, and running out, which changes nothing."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_cases import check_pages, fill, noise, snapshot
from paged_machine import PagedCacheMachine

from tilewise.kvcache import FORMATS, KVFormat, OutOfPages, PagedKVCache


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 1), (1, 2), (1, 3), (2, 1)])
def test_an_empty_sequence_gives_empty_tensors(name: str, heads: int, head_dim: int) -> None:
    cache = PagedKVCache(2, 4, heads, head_dim, kv_format=name)
    k, v = cache.gather(0, cache.allocate())
    assert k.shape == v.shape == (0, heads, head_dim)


@pytest.mark.parametrize("name", FORMATS)
def test_a_copy_goes_its_own_way(name: str) -> None:
    cache = PagedKVCache(8, 4, 2, 64, value_dim=32, kv_format=name)
    seq = cache.allocate()
    cache.write(0, cache.extend([seq], 6), noise(6, 2, 64), noise(6, 2, 32))
    for made in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert [x.dtype for x in (*made._k, *made._v)] == [x.dtype for x in (*cache._k, *cache._v)]
        made.write(0, made.extend([seq], 1), noise(1, 2, 64, seed=1), noise(1, 2, 32, seed=1))
        assert all(map(torch.equal, (x[:6] for x in made.gather(0, seq)), cache.gather(0, seq)))
        assert (made.length(seq), cache.length(seq)) == (7, 6)


@pytest.mark.usefixtures("written_by")
# The fixture's choice holds for all examples.
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    page_size=st.sampled_from([1, 2, 3, 16, 64, 256]),
    steps=st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=1, max_size=5),
    name=st.sampled_from(FORMATS),
    head_dim=st.sampled_from([1, 5, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_any_page_size_gives_back_what_was_written(
    page_size: int, steps: list[list[int]], name: str, head_dim: int, dtype: torch.dtype
) -> None:
    pages = sum(-(-sum(counts) // page_size) for counts in zip(*steps, strict=True))
    cache = PagedKVCache(max(pages, 1), page_size, 2, head_dim, num_layers=2, kv_format=name, group_size=32)
    seqs = [cache.allocate() for _ in range(3)]
    rows: dict[tuple[int, int], list[torch.Tensor]] = {(layer, s): [] for layer in range(2) for s in seqs}
    for step, counts in enumerate(steps):
        slots = cache.extend(seqs, counts)
        for layer in (1, 0):
            kv = noise(2, sum(counts), 2, head_dim, seed=10 * step + layer, dtype=dtype)
            cache.write(layer, slots, kv[0], kv[1])
            for s, part in zip(seqs, kv.split(counts, 1), strict=True):
                rows[layer, s].append(part)
    form = KVFormat(name, head_dim, 32)
    for layer in range(2):
        for s in seqs:
            want = torch.cat(rows[layer, s], 1)
            for got, x in zip(cache.gather(layer, s), want, strict=True):
                assert got.dtype == form.decoded_dtype
                assert torch.equal(got, form.decode(form.encode(x)))
    check_pages(cache)


@pytest.mark.usefixtures("written_by")
def test_slots_say_where_the_tokens_go() -> None:
    cache = PagedKVCache(20, 4, 1, 8, kv_format="fp32")
    a, b = cache.allocate(), cache.allocate()
    cache.extend([a], 3)
    slots = cache.extend([b, a], [5, 2])
    assert (slots.seqs, slots.counts, len(slots)) == ((b, a), (5, 2), 7)
    assert slots.positions.tolist() == [0, 1, 2, 3, 4, 3, 4]
    pages = {s: cache.page_list(s) for s in (a, b)}
    where = [(b, 0), (b, 1), (b, 2), (b, 3), (b, 4), (a, 3), (a, 4)]
    assert slots.index.tolist() == [int(pages[s][p // 4]) * 4 + p % 4 for s, p in where]
    assert cache.lengths == {a: 5, b: 5}
    assert cache.length(a) == 5


@pytest.mark.usefixtures("written_by")
def test_a_sequence_whose_first_page_is_not_0() -> None:
    cache = PagedKVCache(8, 4, 1, 8, num_layers=2, kv_format="fp32")
    first, second = cache.allocate(), cache.allocate()
    fill(cache, cache.extend([first], 9))
    written = fill(cache, cache.extend([second], 6), seed=1)
    cache.free(first)
    assert cache.page_list(second)[0] != 0
    for layer in range(2):
        assert torch.equal(cache.gather(layer, second)[0], written[layer][0])
        assert torch.equal(cache.gather(layer, second)[1], written[layer][1])


@pytest.mark.usefixtures("written_by")
def test_writing_again_overwrites() -> None:
    cache = PagedKVCache(4, 4, 1, 8, kv_format="fp32")
    s = cache.allocate()
    slots = cache.extend([s], 6)
    fill(cache, slots)
    assert slots.complete
    again = fill(cache, slots, seed=7)
    assert torch.equal(cache.gather(0, s)[0], again[0][0])


@pytest.mark.usefixtures("written_by")
def test_empty_steps_and_sequences() -> None:
    cache = PagedKVCache(2, 4, 1, 8, num_layers=2)
    s = cache.allocate()
    for slots in (cache.extend([], []), cache.extend([s], 0)):
        assert len(slots) == 0
        assert slots.complete
        fill(cache, slots)
    assert cache.gather(1, s)[0].shape == (0, 1, 8)
    assert cache.page_table([s]).shape == (1, 0)
    assert cache.page_table([]).shape == (0, 0)


@pytest.mark.usefixtures("written_by")
def test_slots_are_complete_when_every_layer_was_written() -> None:
    cache = PagedKVCache(4, 4, 1, 8, num_layers=3)
    slots = cache.extend([cache.allocate()], 5)
    for layer in (2, 0, 0, 2):
        cache.write(layer, slots, noise(5, 1, 8), noise(5, 1, 8))
        assert not slots.complete
    cache.write(1, slots, noise(5, 1, 8), noise(5, 1, 8))
    assert slots.complete


def test_a_cache_made_under_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        cache = PagedKVCache(2, 4, 1, 8)
    k = noise(3, 1, 8).requires_grad_()
    cache.write(0, cache.extend([s := cache.allocate()], 3), k, k)
    assert not cache.gather(0, s)[0].requires_grad


# Sharing.


@pytest.mark.usefixtures("written_by")
def test_fork_shares_and_the_first_to_grow_copies() -> None:
    cache = PagedKVCache(8, 4, 2, 8, num_layers=2, kv_format="int4")
    a = cache.allocate()
    fill(cache, cache.extend([a], 6))
    before = [cache.gather(layer, a) for layer in range(2)]
    b = cache.fork(a)
    assert cache.page_list(a).tolist() == cache.page_list(b).tolist()
    assert cache.stats().pages_used == 2
    fill(cache, cache.extend([b], 3), seed=1)
    assert cache.page_list(a)[0] == cache.page_list(b)[0]
    assert cache.page_list(a)[1] != cache.page_list(b)[1]
    fill(cache, cache.extend([a], 1), seed=2)  # alone in its page by now: no copy
    assert cache.stats().pages_used == 4
    for layer in range(2):
        for s in (a, b):
            for got, want in zip(cache.gather(layer, s), before[layer], strict=True):
                assert torch.equal(got[:6], want)
    assert not torch.equal(cache.gather(0, a)[0][6], cache.gather(0, b)[0][6])
    check_pages(cache)


@pytest.mark.usefixtures("written_by")
def test_of_all_forks_growing_at_once_one_keeps_the_page() -> None:
    cache = PagedKVCache(4, 4, 1, 8, kv_format="fp32")
    a = cache.allocate()
    written = fill(cache, cache.extend([a], 2))
    seqs = [a, *(cache.fork(a) for _ in range(3))]
    fill(cache, cache.extend(seqs, 1), seed=1)  # three copies, and the last holder stays: exactly four pages
    assert cache.pool.free_pages == 0
    assert len({int(cache.page_list(s)[0]) for s in seqs}) == 4
    for s in seqs:
        assert torch.equal(cache.gather(0, s)[0][:2], written[0][0])
    check_pages(cache)


@pytest.mark.usefixtures("written_by")
def test_no_copy_where_none_is_needed() -> None:
    cache = PagedKVCache(8, 4, 1, 8)
    a = cache.allocate()
    fill(cache, cache.extend([a], 4))
    b = cache.fork(a)
    cache.extend([a, b], [0, 0])
    assert cache.stats().pages_used == 1
    fill(cache, cache.extend([a, b], [1, 1]))  # the shared page is full: both begin a new one
    assert cache.stats().pages_used == 3
    c = cache.fork(a)
    cache.extend([a, c], [0, 0])
    assert cache.page_list(a)[1] == cache.page_list(c)[1], "adding nothing must not copy"


def test_copying_tokens_that_are_not_written_yet_is_refused() -> None:
    cache = PagedKVCache(8, 4, 1, 8, num_layers=2)
    a = cache.allocate()
    slots = cache.extend([a], 6)
    cache.write(0, slots, noise(6, 1, 8), noise(6, 1, 8))
    b = cache.fork(a)
    before = snapshot(cache)
    for s in (a, b):
        with pytest.raises(ValueError, match=f"sequence {s} .* write them"):
            cache.extend([s], 1)
    assert snapshot(cache) == before
    cache.write(1, slots, noise(6, 1, 8), noise(6, 1, 8))
    cache.extend([b], 1)
    check_pages(cache)


@pytest.mark.usefixtures("written_by")
def test_forks_get_what_a_freed_parent_reserved() -> None:
    cache = PagedKVCache(8, 4, 1, 8, kv_format="fp32")
    a = cache.allocate()
    slots = cache.extend([a], 6)
    b = cache.fork(a)
    cache.free(a)
    written = fill(cache, slots)
    assert torch.equal(cache.gather(0, b)[0], written[0][0])
    with pytest.raises(ValueError, match=f"sequence {a} was freed"):
        fill(cache, slots)  # now the tokens are b's
    fill(cache, cache.extend([b], 1), seed=1)
    assert torch.equal(cache.gather(0, b)[0][:6], written[0][0])


@pytest.mark.usefixtures("written_by")
def test_slots_of_a_page_that_was_copied_cannot_change_the_fork() -> None:
    cache = PagedKVCache(8, 4, 1, 8, kv_format="fp32")
    a = cache.allocate()
    slots = cache.extend([a], 2)
    written = fill(cache, slots)
    b = cache.fork(a)
    fill(cache, cache.extend([a], 1))  # a moves to a copy
    with pytest.raises(ValueError, match="stale"):
        fill(cache, slots, seed=3)
    assert torch.equal(cache.gather(0, b)[0], written[0][0])


@pytest.mark.usefixtures("written_by")
def test_a_freed_page_is_not_written_through_old_slots() -> None:
    cache = PagedKVCache(2, 4, 1, 8, kv_format="fp32")
    a, b = cache.allocate(), cache.allocate()
    slots = cache.extend([a, b], [3, 3])
    cache.free(a)
    c = cache.allocate()
    written = fill(cache, cache.extend([c], 4), seed=1)  # in the page that was a's
    with pytest.raises(ValueError, match=f"sequence {a} was freed"):
        fill(cache, slots)
    assert torch.equal(cache.gather(0, c)[0], written[0][0])


# Running out.


@pytest.mark.usefixtures("written_by")
def test_out_of_pages_changes_nothing() -> None:
    cache = PagedKVCache(6, 4, 1, 8, num_layers=2)
    a, b = cache.allocate(), cache.allocate()
    fill(cache, cache.extend([a, b], [6, 9]))
    c = cache.fork(a)
    before = snapshot(cache)
    for seqs, counts in (([a], [7]), ([b, a], [3, 3]), ([a, b, c], [1, 4, 0]), ([c], 10**12)):
        with pytest.raises(OutOfPages, match="pages"):
            cache.extend(seqs, counts)
        assert snapshot(cache) == before
    cache.extend([a, b], [2, 3])  # one copy fits
    assert cache.pool.free_pages == 0
    cache.extend([c], 2)  # and c is alone now
    check_pages(cache)


def test_freed_pages_come_back_and_numbers_do_not() -> None:
    cache = PagedKVCache(4, 2, 1, 8)
    seen = set()
    for _ in range(10):
        s = cache.allocate()
        assert s not in seen
        seen.add(s)
        cache.extend([s], 8)
        cache.free(s)
    assert cache.pool.free_pages == 4
    assert cache.lengths == {}


TestPagedCacheMachine = PagedCacheMachine.TestCase
TestPagedCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_repr_says_sizes_format_device_and_what_is_used():
    cache = PagedKVCache(64, 16, 2, 96, num_layers=3, kv_format="int8")
    empty = "num_pages=64, page_size=16, num_kv_heads=2, head_dim=96, num_layers=3, kv_format='int8', "
    empty += f"device='{cache.device}'"
    assert repr(cache) == f"PagedKVCache({empty}, pages_in_use=0, sequences=0)"
    seqs = [cache.allocate(), cache.allocate()]
    cache.extend(seqs, [17, 5])
    assert repr(cache) == f"PagedKVCache({empty}, pages_in_use=3, sequences=2)"
    cache.free(seqs[0])
    assert repr(cache).endswith("pages_in_use=1, sequences=1)")
