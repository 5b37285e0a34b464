"""Index keys in the pages of latent rows: what is written is read, whoever shares, copies and frees the pages."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from paged_cases import noise

from tilewise.kvcache import PagedKVCache, PrefixCache, storage

SIZE, DIM = 4, 6
LAYERS = (0, 2)  # of three those that have an indexer


def cache_of(**options: Any) -> PagedKVCache:
    """Of its three layers two have index keys. Nothing that was not written is a number."""
    sizes = {"num_pages": 12, "page_size": SIZE, "num_kv_heads": 1, "head_dim": 8, "value_dim": 6, "shared_kv": True}
    sizes |= {"num_layers": 3, "kv_format": "fp32", "index_dim": DIM, "index_layers": LAYERS}
    made = PagedKVCache(**(sizes | options))
    assert made.index_keys is not None
    made.index_keys._stored.fill_(torch.nan)
    return made


def grow(cache: PagedKVCache, seqs: list[int], counts: list[int], seed: int) -> torch.Tensor:
    """Extend and write everything; the new index keys (layers, tokens, DIM)."""
    slots = cache.extend(seqs, counts)
    keys = torch.randn(len(LAYERS), len(slots), DIM, generator=torch.Generator().manual_seed(seed))
    for layer, its in zip(LAYERS, keys, strict=True):
        cache.index_keys.write(layer, slots, its)
    for layer in range(cache.num_layers):
        cache.write(layer, slots, noise(len(slots), 1, cache.head_dim))
    assert slots.complete
    return keys


def read(cache: PagedKVCache, seqs: list[int]) -> list[torch.Tensor]:
    """The index keys of each sequence, (layers, length, DIM)."""
    keys = cache.index_keys
    assert keys is not None
    both = torch.stack([keys.read(layer, keys.places(seqs)) for layer in LAYERS])
    assert both.isfinite().all()  # also past the ends of the shorter ones
    return [both[:, n, : cache.length(seq)] for n, seq in enumerate(seqs)]


def test_what_is_written_is_read():
    cache = cache_of()
    a, b = cache.allocate(2)
    first = grow(cache, [a, b], [7, 1], seed=1)
    second = grow(cache, [b, a], [5, 2], seed=2)
    found = read(cache, [a, b])
    assert torch.equal(found[0], torch.cat([first[:, :7], second[:, 5:]], 1))
    assert torch.equal(found[1], torch.cat([first[:, 7:], second[:, :5]], 1))
    assert cache.bytes_per_token == 3 * 8 * 4 + 2 * DIM * 4
    assert cache.nbytes == 12 * SIZE * cache.bytes_per_token


@pytest.mark.parametrize("by_kernel", [False, True])
def test_forks_copy_them_with_their_page(by_kernel, monkeypatch):
    """A last page that is shared is copied before one of them grows in it, index keys with it."""
    monkeypatch.setattr(storage, "uses_kernels", lambda device: by_kernel)
    cache = cache_of(head_dim=24, value_dim=16)
    parent = cache.allocate()
    keys = grow(cache, [parent], [6], seed=1)
    child = cache.fork(parent)
    more = {seq: grow(cache, [seq], [1], seed=2 + seq) for seq in (child, parent)}
    assert cache.page_list(parent)[0] == cache.page_list(child)[0]
    assert cache.page_list(parent)[1] != cache.page_list(child)[1]
    for seq, found in zip((parent, child), read(cache, [parent, child]), strict=True):
        assert torch.equal(found, torch.cat([keys, more[seq]], 1))


def test_a_prefix_is_shared_when_it_has_all_of_both():
    """A prompt whose index keys are missing in one layer is not handed to the next one that begins alike."""
    prefix = PrefixCache(cache_of())
    cache, prompt, keys = prefix.cache, list(range(2 * SIZE + 1)), noise(2, 2 * SIZE + 1, DIM)
    seq, _, slots = prefix.insert(prompt)
    for layer in range(3):
        cache.write(layer, slots, noise(len(prompt), 1, 8))
    cache.index_keys.write(0, slots, keys[0])
    assert prefix.match(prompt) == 0
    cache.index_keys.write(2, slots, keys[1])
    assert prefix.match([*prompt, 3]) == len(prompt)
    prefix.release(seq)
    other, reused, slots = prefix.insert([*prompt, 3])
    assert reused == len(prompt)
    assert len(slots) == 1
    places = cache.index_keys.places([other])[:, : len(prompt)]
    assert torch.equal(torch.stack([cache.index_keys.read(layer, places)[0] for layer in LAYERS]), keys)


def test_tokens_count_as_written_with_their_index_keys():
    cache = cache_of()
    seq = cache.allocate()
    slots = cache.extend([seq], 5)
    for layer in range(3):
        cache.write(layer, slots, noise(5, 1, 8))
    keys = cache.index_keys
    with pytest.raises(ValueError, match="index keys are not all written in layer 2"):
        keys.read(2, keys.places([seq]))
    keys.write(0, slots, noise(5, DIM))
    keys.write(2, slots, noise(3, DIM))
    assert not slots.complete
    with pytest.raises(ValueError, match="not all written in layer 2"):
        keys.read(2, keys.places([seq]))
    assert keys.read(2, keys.places([seq])[:, :3]).isfinite().all()
    keys.write(2, slots, noise(2, DIM), first=3)
    assert slots.complete
    assert keys.read(2, keys.places([seq])).shape == (1, 5, DIM)


def test_pages_that_somebody_else_gets_are_to_be_written():
    cache = cache_of(num_pages=2)
    seq = cache.allocate()
    grow(cache, [seq], [8], seed=1)
    cache.free(seq)
    seq = cache.allocate()
    slots = cache.extend([seq], 8)
    keys = cache.index_keys
    with pytest.raises(ValueError, match="not all written"):
        keys.read(0, keys.places([seq]))
    cache.free(seq)
    with pytest.raises(ValueError, match="slots are stale"):
        keys.write(0, slots, noise(8, DIM))


def test_copies_go_their_own_way():
    cache = cache_of()
    seq = cache.allocate()
    before = grow(cache, [seq], [6], seed=1)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        more = grow(other, [seq], [3], seed=2)
        assert torch.equal(read(other, [seq])[0], torch.cat([before, more], 1))
        assert torch.equal(read(cache, [seq])[0], before)


def test_dtypes_are_those_of_the_rows():
    assert cache_of(kv_format="bf16").index_keys.dtype == torch.bfloat16
    assert cache_of(kv_format="fp8").index_keys.dtype == torch.bfloat16
    codes = cache_of(kv_format="fp8")
    assert codes.bytes_per_token == 3 * codes.format.bytes_per_token_head + 2 * DIM * 2
    assert "dim=6, layers=(0, 2), dtype=torch.float32" in repr(cache_of().index_keys)
    assert cache_of(index_layers=None).index_keys.layers == (0, 1, 2)


def test_what_is_refused():
    with pytest.raises(ValueError, match="index_layers must name layers, each once"):
        cache_of(index_layers=(0, 0))
    with pytest.raises(ValueError, match="index_layers must be at least 0 and at most 2, got 3"):
        cache_of(index_layers=(3,))
    with pytest.raises(ValueError, match="index_layers goes with index_dim"):
        cache_of(index_dim=None)
    with pytest.raises(ValueError, match="index_dim"):
        cache_of(index_dim=0)
    with pytest.raises(NotImplementedError, match="index_dim is 577, and kernels take at most 576"):
        cache_of(index_dim=577)
    cache = cache_of()
    slots = cache.extend([cache.allocate()], 5)
    keys = cache.index_keys
    with pytest.raises(ValueError, match=r"layer must be one that has index keys, \(0, 2\), got 1"):
        keys.write(1, slots, noise(5, DIM))
    with pytest.raises(ValueError, match="keys must have shape"):
        keys.write(0, slots, noise(5, DIM + 1))
    with pytest.raises(ValueError, match="keys must have shape"):
        keys.write(0, slots, noise(3, DIM), first=3)
    with pytest.raises(TypeError, match="slots must be a Slots"):
        keys.write(0, None, noise(5, DIM))
    for places, error, says in (
        (torch.tensor([48]), ValueError, "places must be from 0 to 47, as .* got 48 to 48"),
        (torch.tensor([-1]), ValueError, "places must be from 0 to 47, as .* got -1 to -1"),
        (torch.tensor([1.0]), ValueError, "places must be one of int32, int64"),
        ([1], TypeError, "places must be a torch.Tensor"),
    ):
        with pytest.raises(error, match=says):
            keys.read(0, places)
    assert keys.places([]).shape == (0, 0)
    empty = cache.allocate()
    with pytest.raises(ValueError, match=f"seqs must have a token each, sequence {empty} has none"):
        keys.places([empty])
