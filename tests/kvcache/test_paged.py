"""The paged cache: contents, sharing, copy-on-write, allocation, and that a refused call changes nothing."""

from __future__ import annotations

import copy
import re
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tilewise.kvcache import FORMATS, KVFormat, OutOfPages, PagedKVCache, PrefixCache, Rotary, Slots


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return made.to(torch.get_default_device(), dtype)  # a card where test_cache_gpu runs these tests


def fill(cache: PagedKVCache, slots: Slots, seed: int = 0) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Write noise into every layer; what was written, by layer."""
    written = {}
    for layer in range(cache.num_layers):
        k = noise(len(slots), cache.num_kv_heads, cache.head_dim, seed=seed * 100 + 2 * layer)
        v = noise(len(slots), cache.num_kv_heads, cache.head_dim, seed=seed * 100 + 2 * layer + 1)
        cache.write(layer, slots, k, v)
        written[layer] = k, v
    return written


def snapshot(cache: PagedKVCache) -> dict[str, Any]:
    """Everything that a refused call must leave alone, bytes of the pages in use included."""
    pool = cache.pool
    used = torch.from_numpy(np.flatnonzero(pool.refs))
    return {
        "sequences": {s: (cache.length(s), cache.page_list(s).tolist()) for s in cache.lengths},
        "next": cache._next_seq,
        "free": pool.free_pages,
        "refs": pool.refs.tolist(),
        "fill": pool.fill.tolist(),
        "generation": pool.generation.tolist(),
        "written": cache._written.tobytes(),
        "bytes": [t.cpu()[:, used].reshape(-1).view(torch.uint8).numpy().tobytes() for t in (*cache._k, *cache._v)],
    }


def check_pages(cache: PagedKVCache, held: Counter[int] | None = None) -> None:
    """No page is lost and none is doubly owned: each reference count is the number of its holders."""
    holders = Counter(held or {})
    for seq, length in cache.lengths.items():
        pages = cache.page_list(seq)
        assert len(pages) == -(-length // cache.page_size)
        assert len(set(pages.tolist())) == len(pages)
        holders.update(pages.tolist())
    refs = cache.pool.refs
    assert {p: int(refs[p]) for p in np.flatnonzero(refs)} == dict(holders)
    assert cache.pool.free_pages == int((refs == 0).sum()) == cache.num_pages - len(holders)
    assert (cache.pool.fill[refs == 0] == 0).all()


# Contents.


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 1), (1, 2), (1, 3), (2, 1)])
def test_an_empty_sequence_gives_empty_tensors(name: str, heads: int, head_dim: int) -> None:
    cache = PagedKVCache(2, 4, heads, head_dim, kv_format=name)
    k, v = cache.gather(0, cache.allocate())
    assert k.shape == v.shape == (0, heads, head_dim)


@settings(max_examples=120, deadline=None)
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


def test_writing_again_overwrites() -> None:
    cache = PagedKVCache(4, 4, 1, 8, kv_format="fp32")
    s = cache.allocate()
    slots = cache.extend([s], 6)
    fill(cache, slots)
    assert slots.complete
    again = fill(cache, slots, seed=7)
    assert torch.equal(cache.gather(0, s)[0], again[0][0])


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


# Where pages lie.


def test_pages_are_consecutive_where_possible() -> None:
    cache = PagedKVCache(16, 2, 1, 8)
    a, b = cache.allocate(), cache.allocate()
    cache.extend([a], 6)
    cache.extend([b], 2)
    assert cache.page_list(a).tolist() == [0, 1, 2]
    assert cache.page_list(b).tolist() == [3]
    cache.extend([b], 4)
    assert cache.page_list(b).tolist() == [3, 4, 5], "right after the last page"
    cache.free(a)
    c = cache.allocate()
    cache.extend([c], 8)
    assert cache.page_list(c).tolist() == [6, 7, 8, 9], "the hole 0-2 is too short for four pages"
    d = cache.allocate()
    cache.extend([d], 4)
    assert cache.page_list(d).tolist() == [0, 1], "the first hole that is long enough"
    e = cache.allocate()
    cache.extend([e], 14)
    assert sorted(cache.page_list(e).tolist()) == [2, *range(10, 16)], "in pieces only when it must"
    assert cache.pool.free_pages == 0


def test_the_next_page_comes_before_a_lower_hole() -> None:
    cache = PagedKVCache(8, 2, 1, 8)
    a, b = cache.allocate(), cache.allocate()
    cache.extend([a, b], [4, 2])
    cache.free(a)
    cache.extend([b], 2)
    assert cache.page_list(b).tolist() == [2, 3]


def test_pieces_are_few() -> None:
    cache = PagedKVCache(12, 1, 1, 8)
    seqs = [cache.allocate() for _ in range(5)]
    for s, count in zip(seqs, (1, 1, 3, 1, 6), strict=True):
        cache.extend([s], count)
    for s in (seqs[0], seqs[2], seqs[4]):
        cache.free(s)  # holes of 1, 3 and 6 pages
    s = cache.allocate()
    cache.extend([s], 9)
    assert cache.page_list(s).tolist() == [6, 7, 8, 9, 10, 11, 2, 3, 4], "the longest runs, in two pieces"


def test_load_is_a_view_of_consecutive_pages_and_a_gather_of_others() -> None:
    cache = PagedKVCache(16, 4, 2, 8, num_layers=2, kv_format="bf16")
    a, b = cache.allocate(), cache.allocate()
    fill(cache, cache.extend([a, b], [20, 4]))
    fill(cache, cache.extend([b], 8), seed=1)
    fill(cache, cache.extend([a], 12), seed=2)
    storage = cache._k[0].untyped_storage().data_ptr()
    for s, consecutive in ((a, False), (b, True)):
        pages = cache.page_list(s)
        whole = cache.gather(1, s)
        for start, stop in (
            (0, 4),
            (0, 0),
            (3, 9),
            (5, 5),
            (1, cache.length(s)),
            (cache.length(s) - 1, cache.length(s)),
        ):
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                for got, want in zip(cache.load(1, pages, start, stop, dtype), whole, strict=True):
                    assert got.dtype == dtype
                    assert torch.equal(got, want[start:stop].to(dtype))
            is_view = cache.load(1, pages, start, stop, torch.bfloat16)[0].untyped_storage().data_ptr() == storage
            assert is_view or not consecutive
        assert cache.load(1, pages, 0, 20 if s == a else 12, torch.bfloat16)[0].untyped_storage().data_ptr() == storage
    assert cache.gather(0, b)[0].untyped_storage().data_ptr() != storage, "what gather gives is the caller's"


@pytest.mark.parametrize("name", FORMATS)
def test_load_decodes_any_range_of_any_format(name: str) -> None:
    cache = PagedKVCache(12, 4, 2, 40, kv_format=name, group_size=32)
    a, b = cache.allocate(), cache.allocate()
    for step in range(4):
        fill(cache, cache.extend([a, b], [5, 4]), seed=step)
    for s in (a, b):
        whole = cache.gather(0, s)
        for start in range(0, cache.length(s), 3):
            for got, want in zip(
                cache.load(0, cache.page_list(s), start, cache.length(s), torch.float32), whole, strict=True
            ):
                assert torch.equal(got, want[start:].float())


def test_reading_what_was_not_written_is_refused() -> None:
    cache = PagedKVCache(4, 4, 1, 8, num_layers=2)
    a = cache.allocate()
    fill(cache, cache.extend([a], 5))
    slots = cache.extend([a], 1)
    cache.write(1, slots, noise(1, 1, 8), noise(1, 1, 8))
    assert len(cache.gather(1, a)[0]) == 6
    with pytest.raises(ValueError, match="layer 0: write"):
        cache.gather(0, a)
    assert len(cache.load(0, cache.page_list(a), 0, 5, torch.bfloat16)[0]) == 5, "the old tokens can be read"
    cache.free(a)
    b = cache.allocate()
    cache.extend([b], 5)
    with pytest.raises(ValueError, match="write"):
        cache.gather(1, b)  # the page was written, but by another sequence


def test_page_table_is_padded() -> None:
    cache = PagedKVCache(8, 2, 1, 8)
    seqs = [cache.allocate() for _ in range(3)]
    cache.extend(seqs, [3, 0, 7])
    table = cache.page_table([seqs[2], seqs[0], seqs[1]])
    assert table.dtype == torch.int32
    assert table.tolist() == [cache.page_list(seqs[2]).tolist(), [*cache.page_list(seqs[0]).tolist(), -1, -1], [-1] * 4]


def test_a_page_list_does_not_change_under_its_holder() -> None:
    cache = PagedKVCache(8, 2, 1, 8)
    a = cache.allocate()
    fill(cache, cache.extend([a], 3))
    cache.fork(a)
    pages = cache.page_list(a)
    before = pages.tolist()
    cache.extend([a], 4)
    assert cache.page_list(a)[1] != before[1]
    assert pages.tolist() == before
    with pytest.raises(ValueError, match="read-only"):
        pages[0] = 5


# Rotary.


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot_dim", [0, 2, 8, 16])
def test_rotary_turns_channel_pairs_by_their_position(rot_dim: int, interleaved: bool) -> None:
    angles = torch.arange(50)[:, None] * 0.9 ** torch.arange(rot_dim // 2)
    rotary = Rotary(angles.cos(), angles.sin(), interleaved)
    cache = PagedKVCache(20, 4, 3, 16, kv_format="fp32")
    a, b = cache.allocate(), cache.allocate()
    cache.extend([b], 17)
    slots = cache.extend([a, b], [6, 5])
    k, v = noise(11, 3, 16), noise(11, 3, 16, seed=1)
    cache.write(0, slots, k, v, rotary=rotary)
    want = k.double().clone()
    for token, position in enumerate(slots.positions.tolist()):
        for i in range(rot_dim // 2):
            p, q = (2 * i, 2 * i + 1) if interleaved else (i, i + rot_dim // 2)
            turned = torch.view_as_complex(torch.stack([k[token, :, p], k[token, :, q]], -1).double().contiguous())
            turned = turned * torch.polar(torch.tensor(1.0).double(), angles[position, i].double())
            want[token, :, p], want[token, :, q] = turned.real, turned.imag
    pages = cache.page_list(a), cache.page_list(b)
    got = [cache.load(0, pages[0], 0, 6, torch.float32), cache.load(0, pages[1], 17, 22, torch.float32)]
    torch.testing.assert_close(torch.cat([g[0] for g in got]).double(), want, rtol=0, atol=1e-5)
    assert torch.equal(torch.cat([g[1] for g in got]), v), "values do not turn"
    if not interleaved:
        cache.write(0, slots, k, v, rotary=(angles.cos(), angles.sin()))
        assert torch.equal(cache.load(0, pages[0], 0, 6, torch.float32)[0], got[0][0])


def test_rotary_computes_in_float32() -> None:
    angles = torch.arange(100)[:, None] * torch.ones(1, 4)
    rotary = Rotary(angles.cos(), angles.sin())
    x = noise(100, 2, 8, dtype=torch.bfloat16)
    turned = rotary.apply(x, torch.arange(100))
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotary.apply(x.float(), torch.arange(100)).bfloat16())


def test_rotary_refuses_what_its_tables_do_not_cover() -> None:
    cache = PagedKVCache(4, 4, 1, 8, kv_format="fp32")
    s = cache.allocate()
    slots = cache.extend([s], 5)
    k = noise(5, 1, 8)
    bad: list[tuple[Any, type[Exception], str]] = [
        ((torch.ones(4, 4), torch.ones(4, 4)), ValueError, "positions 0 to 3, got 0 to 4"),
        ((torch.ones(9, 5), torch.ones(9, 5)), ValueError, "10 channels"),
        ((torch.ones(9, 4), torch.ones(9, 3)), ValueError, "sin"),
        ((torch.ones(9, 4), torch.ones(9, 4).long()), ValueError, "sin"),
        ((torch.ones(9), torch.ones(9)), ValueError, "cos"),
        (torch.ones(9, 4), TypeError, "rotary"),
        ("llama", TypeError, "rotary"),
    ]
    for rotary, error, says in bad:
        with pytest.raises(error, match=says):
            cache.write(0, slots, k, k, rotary=rotary)
    with pytest.raises(TypeError, match="interleaved"):
        Rotary(torch.ones(9, 4), torch.ones(9, 4), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="write"):
        cache.gather(0, s)  # nothing was written


# Memory.


@pytest.mark.parametrize(("name", "per_head"), [("fp32", 256), ("bf16", 128), ("fp8", 68), ("int8", 68), ("int4", 36)])
def test_nbytes_is_the_real_storage(name: str, per_head: int) -> None:
    cache = PagedKVCache(10, 16, 3, 64, num_layers=5, kv_format=name)
    assert cache.bytes_per_token == 2 * 3 * 5 * per_head
    assert cache.nbytes == 10 * 16 * cache.bytes_per_token
    assert cache.nbytes == sum(t.untyped_storage().nbytes() for t in (*cache._k, *cache._v))


def test_stats() -> None:
    cache = PagedKVCache(10, 4, 1, 8, num_layers=2, kv_format="fp32")
    assert cache.stats().utilisation == 1.0
    a = cache.allocate()
    fill(cache, cache.extend([a], 6))
    b = cache.fork(a)
    fill(cache, cache.extend([b], 3), seed=1)
    stats = cache.stats()
    assert (stats.pages_total, stats.pages_used, stats.pages_free, stats.pages_shared) == (10, 4, 6, 1)
    assert (stats.tokens_stored, stats.tokens_logical) == (4 + 2 + 4 + 1, 15)
    assert stats.bytes_used == 4 * 4 * 2 * 2 * 8 * 4
    assert stats.utilisation == 11 / 16
    assert "4 of 10 pages" in str(stats)
    assert "69%" in str(stats)
    cache.free(a)
    cache.free(b)
    assert cache.stats().tokens_stored == cache.stats().pages_used == 0


# Somebody else's pages.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
def test_from_pages_wraps_without_a_copy(dtype: torch.dtype, table_dtype: torch.dtype) -> None:
    k, v = noise(9, 4, 2, 8, dtype=dtype), noise(9, 4, 2, 8, seed=1, dtype=dtype)
    table = torch.tensor([[7, 2, 5, -99], [7, 3, 1 << 30, 0], [0, 0, 0, 0]], dtype=table_dtype)
    cache = PagedKVCache.from_pages(k, v, table, torch.tensor([10, 6, 0]))
    assert cache.lengths == {0: 10, 1: 6, 2: 0}
    got = cache.gather(0, 1)
    assert torch.equal(got[0], torch.cat([k[7], k[3][:2]]))
    assert torch.equal(got[1], torch.cat([v[7], v[3][:2]]))
    assert cache.pool.refs[[7, 2, 5, 3]].tolist() == [2, 1, 1, 1]
    assert cache.stats().tokens_stored == 12
    assert (cache.format.dtype, cache.page_size, cache.num_kv_heads, cache.head_dim) == (dtype, 4, 2, 8)
    check_pages(cache)
    slots = cache.extend([1], 1)
    cache.write(0, slots, noise(1, 2, 8, seed=2), noise(1, 2, 8, seed=3))
    assert torch.equal(k[3][2], noise(2, 8, seed=2).to(dtype)), "the given tensor itself was written"
    assert cache.allocate() == 3


def test_from_pages_with_a_shared_half_full_page() -> None:
    k = noise(4, 4, 1, 8)
    cache = PagedKVCache.from_pages(k, k.clone(), torch.tensor([[1], [1]]), torch.tensor([2, 3]))
    cache.free(1)
    cache.extend([0], 1)  # in place where the freed one had a token: that token must not pass for written
    with pytest.raises(ValueError, match="write"):
        cache.gather(0, 0)


def test_pages_of_inference_mode_are_written_in_inference_mode_alone() -> None:
    """Torch refuses in-place changes of them elsewhere, and would say so only at the first write or page copy."""
    with torch.inference_mode():
        k = noise(3, 4, 1, 8)
        cache = PagedKVCache.from_pages(k, k.clone(), torch.tensor([[0]]), torch.tensor([2]))
        fill(cache, cache.extend([0], 1))
        slots = cache.extend([0], 1)
    rows = noise(1, 1, 8)
    before = snapshot(cache)
    for pages in ((k, k.clone()), (k.clone(), k)):
        with pytest.raises(ValueError, match=r"^[kv]_pages .*inference_mode"):
            PagedKVCache.from_pages(*pages, torch.tensor([[0]]), torch.tensor([2]))
    for call in (lambda: cache.write(0, slots, rows, rows), lambda: cache.extend([0], 1)):
        with pytest.raises(ValueError, match="inference_mode"):
            call()
    with pytest.raises(ValueError, match="inference_mode"):
        PrefixCache(cache).insert(range(9))
    assert snapshot(cache) == before
    assert cache.load(0, cache.page_list(0), 0, 3, torch.float32)[0].shape == (3, 1, 8), "reading is fine"


def test_from_pages_refuses_nonsense() -> None:
    k = noise(4, 4, 1, 8)
    table, lengths = torch.tensor([[0, 1], [2, 3]]), torch.tensor([5, 8])
    bad: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((k, k, torch.tensor([[0, 4], [2, 3]]), lengths), ValueError, r"page_table\[0\]"),
        ((k, k, torch.tensor([[0, 1], [-1, 3]]), lengths), ValueError, r"page_table\[1\]"),
        ((k, k, torch.tensor([[0, 1], [2, 2]]), lengths), ValueError, r"page_table\[1\].*twice"),
        ((k, k, table, torch.tensor([5, 9])), ValueError, r"lengths\[1\]"),
        ((k, k, table, torch.tensor([-1, 8])), ValueError, r"lengths\[0\]"),
        ((k, k, table, torch.tensor([5])), ValueError, "lengths"),
        ((k, k, table, lengths.float()), ValueError, "lengths"),
        ((k, k, table.float(), lengths), ValueError, "page_table"),
        ((k, k, table[0], lengths), ValueError, "page_table"),
        ((k, k.half(), table, lengths), ValueError, "v_pages"),
        ((k, k[:3], table, lengths), ValueError, "v_pages"),
        ((k.double(), k.double(), table, lengths), ValueError, "k_pages"),
        ((k[0], k[0], table, lengths), ValueError, "k_pages"),
        ((k.cpu().numpy(), k, table, lengths), TypeError, "k_pages"),
        ((noise(4, 4, 1, 16)[..., ::2], k, table, lengths), ValueError, "k_pages.*contiguous"),
        ((noise(4, 8, 1, 8)[:, :4], k, table, lengths), ValueError, "k_pages.*contiguous"),
        ((noise(1, 300, 1, 8), noise(1, 300, 1, 8), table, lengths), ValueError, "page_size"),
        ((k.to("meta"), k, table, lengths), NotImplementedError, "meta"),
    ]
    for arguments, error, says in bad:
        with pytest.raises(error, match=says):
            PagedKVCache.from_pages(*arguments)


# Refusals.


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"num_pages": 0}, ValueError, "num_pages"),
        ({"page_size": 0}, ValueError, "page_size"),
        ({"page_size": 257}, ValueError, "page_size"),
        ({"page_size": 16.0}, TypeError, "page_size"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads"),
        ({"head_dim": 513}, ValueError, "head_dim"),
        ({"num_layers": 0}, ValueError, "num_layers"),
        ({"kv_format": "int5"}, ValueError, "kv_format"),
        ({"group_size": 16}, ValueError, "group_size"),
        ({"device": "xpu"}, NotImplementedError, "xpu"),
        ({"device": torch.device("cuda", 99)}, NotImplementedError, "cuda:99"),
        ({"device": "toaster"}, ValueError, "device"),
        ({"device": 0}, TypeError, "device"),
    ],
)
def test_bad_caches(change: dict[str, Any], error: type[Exception], says: str) -> None:
    good: dict[str, Any] = {"num_pages": 4, "page_size": 4, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(error, match=says):
        PagedKVCache(**(good | change))


def test_bad_calls_change_nothing() -> None:
    cache = PagedKVCache(8, 4, 2, 8, num_layers=2)
    a, freed = cache.allocate(), cache.allocate()
    fill(cache, cache.extend([a], 3))
    cache.free(freed)
    slots = cache.extend([a], 2)
    other = PagedKVCache(8, 4, 2, 8, num_layers=2)
    foreign = other.extend([other.allocate()], 2)
    k = noise(2, 2, 8)
    gone = re.escape(f"sequence {freed} was freed or never allocated")
    pages = cache.page_list(a)
    bad: list[tuple[Any, type[Exception], str]] = [
        (lambda: cache.extend([freed], 1), ValueError, gone),
        (lambda: cache.extend([a, freed], 1), ValueError, gone),
        (lambda: cache.free(freed), ValueError, gone),
        (lambda: cache.fork(freed), ValueError, gone),
        (lambda: cache.length(freed), ValueError, gone),
        (lambda: cache.page_list(freed), ValueError, gone),
        (lambda: cache.page_table([a, freed]), ValueError, gone),
        (lambda: cache.gather(0, freed), ValueError, gone),
        (lambda: cache.gather(0, 99), ValueError, "99"),
        (lambda: cache.gather(0, True), TypeError, "seq"),
        (lambda: cache.extend([a, a], 1), ValueError, "once"),
        (lambda: cache.extend(a, 1), TypeError, "seqs"),
        (lambda: cache.extend(["a"], 1), TypeError, "seqs"),
        (lambda: cache.extend([a], -1), ValueError, "counts"),
        (lambda: cache.extend([a], [-1]), ValueError, "counts"),
        (lambda: cache.extend([a], [1, 1]), ValueError, "counts"),
        (lambda: cache.extend([a], 1.5), TypeError, "counts"),
        (lambda: cache.gather(2, a), ValueError, "layer"),
        (lambda: cache.gather(-1, a), ValueError, "layer"),
        (lambda: cache.write(2, slots, k, k), ValueError, "layer"),
        (lambda: cache.write(0, foreign, k, k), ValueError, "another cache"),
        (lambda: cache.write(0, (a,), k, k), TypeError, "slots"),
        (lambda: cache.write(0, slots, k[:1], k), ValueError, "^k "),
        (lambda: cache.write(0, slots, k, k[:, :1]), ValueError, "^v "),
        (lambda: cache.write(0, slots, k[None], k), ValueError, "^k "),
        (lambda: cache.write(0, slots, k.double(), k), ValueError, "^k "),
        (lambda: cache.write(0, slots, k, k.half()), ValueError, "same dtype"),
        (lambda: cache.write(0, slots, k, k.to("meta")), ValueError, "^v "),
        (lambda: cache.write(0, slots, k.cpu().numpy(), k), TypeError, "^k "),
        (lambda: cache.load(0, pages, 0, 9, torch.float32), ValueError, "stop"),
        (lambda: cache.load(0, pages, -1, 2, torch.float32), ValueError, "start"),
        (lambda: cache.load(0, pages, 2, 1, torch.float32), ValueError, "start"),
        (lambda: cache.load(0, np.array([8], np.int32), 0, 1, torch.float32), ValueError, "pages"),
        (lambda: cache.load(2, pages, 0, 1, torch.float32), ValueError, "layer"),
    ]
    before = snapshot(cache)
    for number, (call, error, says) in enumerate(bad):
        with pytest.raises(error, match=says):
            call()
        assert snapshot(cache) == before, f"case {number} changed the cache"
    assert not slots.complete


def test_errors_name_the_argument() -> None:
    cache = PagedKVCache(8, 4, 2, 8)
    a = cache.allocate()
    for call in (lambda: cache.extend([a, 7], 1), lambda: cache.page_table([a, 7])):
        with pytest.raises(ValueError, match=r"^seqs must .* sequence 7 was freed or never allocated"):
            call()
    for one in (cache.free, cache.fork, cache.length, cache.page_list, lambda seq: cache.gather(0, seq)):
        with pytest.raises(ValueError, match=r"^seq must .* sequence 7 was freed or never allocated"):
            one(7)


@pytest.mark.parametrize("kind", [torch.tensor, np.int64, np.array])
def test_a_layer_may_be_any_integer(kind: Any) -> None:
    cache = PagedKVCache(4, 4, 1, 8, num_layers=2, kv_format="fp32")
    a = cache.allocate()
    slots = cache.extend([a], 3)
    k = noise(3, 1, 8)
    cache.write(kind(0), slots, k, k)
    cache.write(kind(0), slots, k, k)
    assert not slots.complete, "one layer written twice is not two layers"
    cache.write(kind(1), slots, k, k + 1)
    assert slots.complete
    assert torch.equal(cache.gather(kind(1), a)[1], k + 1)
    assert torch.equal(cache.load(kind(1), cache.page_list(a), 1, 3, torch.float32)[1], k[1:] + 1)


def test_every_cache_has_a_serial_of_its_own() -> None:
    k = noise(2, 4, 1, 8)
    caches = [PagedKVCache(2, 4, 1, 8) for _ in range(2)]
    caches.append(PagedKVCache.from_pages(k, k.clone(), torch.tensor([[0]]), torch.tensor([4])))
    caches.append(copy.deepcopy(caches[0]))
    assert all(type(cache.serial) is int for cache in caches)
    assert len({cache.serial for cache in caches}) == 4


# Speed: generous bounds on a busy machine; a loop over tokens would miss them by far.


def best_of(n: int, call: Any) -> float:
    times = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def test_extending_is_quick() -> None:
    cache = PagedKVCache(8192, 16, 1, 1, num_layers=8)
    seqs = [cache.allocate() for _ in range(256)]
    cache.extend(seqs, 100)
    assert best_of(30, lambda: cache.extend(seqs, 1)) < 2e-3

    def long_prompt() -> None:
        s = cache.allocate()
        cache.extend([s], 65536)
        cache.free(s)

    assert best_of(5, long_prompt) < 20e-3


# Everything together.


class PagedCacheMachine(RuleBasedStateMachine):
    """Sequences are modelled as lists of rows; whatever the order of calls, the cache holds just those."""

    @initialize(page_size=st.sampled_from([1, 2, 4, 5]), num_pages=st.integers(3, 14), name=st.sampled_from(FORMATS))
    def start(self, page_size: int, num_pages: int, name: str) -> None:
        self.cache = PagedKVCache(num_pages, page_size, 1, 3, num_layers=2, kv_format=name)
        self.model: dict[int, list[int]] = {}  # the number of each token's row
        self.rows = 0
        self.slots: list[tuple[Slots, list[int]]] = []
        self.written: set[tuple[int, int]] = set()  # (row, layer)

    def row_values(self, numbers: list[int], layer: int) -> torch.Tensor:
        """(2, tokens, 1, 3): the keys and values that go with row numbers."""
        n = torch.tensor(numbers, dtype=torch.float32)
        return torch.stack([n + 0.25 * layer, -n - 0.5 * layer])[:, :, None, None] * torch.tensor([1.0, 0.5, -0.25])

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)))

    @rule()
    def allocate(self) -> None:
        self.model[self.cache.allocate()] = []

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, max_size=4))
        counts = data.draw(st.lists(st.integers(0, 7), min_size=len(seqs), max_size=len(seqs)))
        before = snapshot(self.cache)
        try:
            slots = self.cache.extend(seqs, counts)
        except (OutOfPages, ValueError) as error:
            assert snapshot(self.cache) == before
            if isinstance(error, OutOfPages):
                size = self.cache.page_size
                most = sum(-(-(len(self.model[s]) + n) // size) - len(self.model[s]) // size
                           for s, n in zip(seqs, counts, strict=True))  # fmt: skip
                assert most > self.cache.pool.free_pages, "there was room"
            else:
                assert any((n, each) not in self.written for s in seqs for n in self.model[s] for each in range(2))
            return
        numbers = list(range(self.rows, self.rows + sum(counts)))
        self.rows += sum(counts)
        assert slots.positions.tolist() == [
            len(self.model[s]) + i for s, n in zip(seqs, counts, strict=True) for i in range(n)
        ]
        at = 0
        for s, n in zip(seqs, counts, strict=True):
            self.model[s] += numbers[at : at + n]
            at += n
        self.slots.append((slots, numbers))

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), layer=st.integers(0, 1))
    def write(self, data: st.DataObject, layer: int) -> None:
        slots, numbers = data.draw(st.sampled_from(self.slots))
        values = self.row_values(numbers, layer)
        try:
            self.cache.write(layer, slots, values[0], values[1])
        except ValueError as error:
            if "stale" not in str(error):
                raise
            assert any(s not in self.model for s in slots.seqs) or slots.complete
            self.slots = [entry for entry in self.slots if entry[0] is not slots]
            return
        self.written |= {(n, layer) for n in numbers}
        assert slots.complete == all((n, each) in self.written for n in numbers for each in range(2))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.model[self.cache.fork(seq)] = list(self.model[seq])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.cache.free(seq)
        del self.model[seq]

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if hasattr(self, "cache"):
            check_pages(self.cache)
            assert self.cache.lengths == {s: len(rows) for s, rows in self.model.items()}

    @invariant()
    def contents_are_the_model(self) -> None:
        if not hasattr(self, "cache"):
            return
        form = self.cache.format
        for seq, rows in self.model.items():
            for layer in range(2):
                if all((n, layer) in self.written for n in rows):
                    want = self.row_values(rows, layer)
                    for got, x in zip(self.cache.gather(layer, seq), want, strict=True):
                        assert torch.equal(got, form.decode(form.encode(x)))
                else:
                    with pytest.raises(ValueError, match="write"):
                        self.cache.gather(layer, seq)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for seq in list(self.model):
                self.cache.free(seq)
            assert self.cache.pool.free_pages == self.cache.num_pages


TestPagedCacheMachine = PagedCacheMachine.TestCase
TestPagedCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
