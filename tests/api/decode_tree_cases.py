"""Paged caches whose sequences form a tree, filled with random tokens."""

from __future__ import annotations

from oracle import randn

from tilewise import PagedKVCache


def grow(cache, seqs, counts, seed=0):
    """Extend and write random tokens in every layer."""
    slots = cache.extend(seqs, counts)
    for layer in range(cache.num_layers):
        k = randn(len(slots), cache.num_kv_heads, cache.head_dim, seed=1000 * seed + 2 * layer)
        v = randn(len(slots), cache.num_kv_heads, cache.value_dim, seed=1000 * seed + 2 * layer + 1)
        rows = (k,) if cache.shared_kv else (k, v)
        cache.write(layer, slots, *(x.to(cache.device) for x in rows))
    return slots


def tree(cache, fanouts, tokens, seed=0):
    """Sequences of a tree: `tokens[level]` tokens a node, `fanouts[level]` children a node, by fork."""
    root = cache.allocate()
    level = [root]
    for depth, (fanout, count) in enumerate(zip(fanouts, tokens, strict=True)):
        level = [s if n == 0 else cache.fork(s) for s in level for n in range(fanout)]
        grow(cache, level, [count] * len(level), seed=seed + depth)
    return level


def make_cache(pages=400, page_size=4, kv_heads=2, head_dim=16, **options):
    options.setdefault("kv_format", "fp32")
    return PagedKVCache(pages, page_size, kv_heads, head_dim, **options)
