"""What a step costs the host, held against plain Python loops timed beside it: no bound depends on the machine."""

from __future__ import annotations

from paged_cases import best_of, fill, python_loop

from tilewise.kvcache import PagedKVCache, PrefixCache


def test_a_decode_step_costs_the_host_little() -> None:
    """One token each: the cost of 256 sequences is 30 µs on a quiet machine, and few of them cost hardly less."""
    caches = {}
    for batch in (16, 256, 1024):
        cache = PagedKVCache(16384, 16, 1, 1, num_layers=80)
        seqs = [cache.allocate() for _ in range(batch)]
        cache.extend(seqs, [100 + i % 16 for i in range(batch)])  # in every step some sequences begin a page
        caches[batch] = cache, seqs
    steps = [lambda cache=cache, seqs=seqs: cache.extend(seqs, 1) for cache, seqs in caches.values()]
    few, step, many, loop = best_of(50, *steps, python_loop(256))
    assert step < 5 * loop
    assert many < 3 * few, "the cost grows with the sequences, as that of a loop over them does"


def test_a_step_of_the_tree_costs_the_host_little() -> None:
    prefix = PrefixCache(PagedKVCache(8192, 16, 1, 1))
    living = []
    for i in range(256):
        seq, _, slots = prefix.insert([i] * 20)
        fill(prefix.cache, slots)
        living.append(seq)
    step, loop = best_of(50, lambda: prefix.extend(living, [1] * 256), python_loop(256))
    assert step < 12 * loop


def test_extending_is_quick() -> None:
    cache = PagedKVCache(8192, 16, 1, 1, num_layers=8)

    def long_prompt() -> None:
        s = cache.allocate()
        cache.extend([s], 65536)
        cache.free(s)

    prompt, loop = best_of(5, long_prompt, python_loop(65536))
    assert prompt < loop / 2, "a loop over the tokens"
