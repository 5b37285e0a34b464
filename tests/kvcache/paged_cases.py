"""What the tests of the paged cache share: noise to write, snapshots to compare, the rules that pages obey."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tilewise.kvcache import PagedKVCache, Slots


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


def snapshot(cache: PagedKVCache, *, calls: bool = True) -> dict[str, Any]:
    """Everything that a refused call must leave alone, bytes of the pages in use included. calls: also by how many
    calls before it a page was freed."""
    pool = cache.pool
    used = torch.from_numpy(np.flatnonzero(pool.refs))
    return {
        "sequences": {s: (cache.length(s), cache.page_list(s).tolist()) for s in cache.lengths},
        "next": cache._next_seq,
        "free": pool.free_pages,
        "refs": pool.refs.tolist(),
        "fill": pool.fill.tolist(),
        "freed": (pool.freed if calls else pool.freed > 0).tolist(),
        "written": cache._written.bits.tobytes(),
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


def best_of(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """The least CPU seconds that each call took this thread, in rounds of all of them.

    CPU seconds, since a busy machine takes the others; in rounds, so that a slow spell slows all that is compared.
    """
    least = [math.inf] * len(calls)
    for _ in range(rounds):
        for number, call in enumerate(calls):
            start = time.thread_time()
            call()
            least[number] = min(least[number], time.thread_time() - start)
    return least


def python_loop(count: int) -> Callable[[], None]:
    """A measure for host code: one addition to each of `count` elements of an array, one by one."""
    numbers = np.zeros(count, np.int64)

    def loop() -> None:
        for i in range(count):
            numbers[i] += 1

    return loop
