"""Where the pages of the paged cache lie, how they are read, what they take, and pages of somebody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import check_pages, fill, noise, snapshot

from tilewise.kvcache import FORMATS, PagedKVCache, PrefixCache


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


@pytest.mark.usefixtures("written_by")
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


@pytest.mark.usefixtures("written_by")
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


@pytest.mark.usefixtures("written_by")
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
