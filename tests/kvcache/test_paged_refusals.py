"""What the paged cache refuses, naming the argument and changing nothing, and what it takes as an integer."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from paged_cases import fill, noise, snapshot

from tilewise.kvcache import PagedKVCache


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"num_pages": 0}, ValueError, "num_pages"),
        ({"page_size": 0}, ValueError, "page_size"),
        ({"page_size": 257}, ValueError, "page_size"),
        ({"page_size": 16.0}, TypeError, "page_size"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads"),
        ({"head_dim": 577}, NotImplementedError, "head_dim is 577, .*; use torch"),
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


@pytest.mark.usefixtures("written_by")
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
