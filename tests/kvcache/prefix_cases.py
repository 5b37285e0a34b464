"""What the tests of the prefix tree share: rows to write, snapshots to compare, the rules that the tree obeys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from paged_cases import check_pages
from paged_cases import snapshot as cache_snapshot

from tilewise.kvcache import PagedKVCache, PrefixCache, Slots
from tilewise.kvcache.tree import Node

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


def tree_of(node: Node) -> list[Any]:
    below = [tree_of(node.children[key]) for key in node.keys]
    return [
        node.start,
        node.tokens.tolist(),
        node.pages.tolist(),
        node.last_used,
        sorted(live.seq for live in node.live),
        below,
    ]


def snapshot(prefix: PrefixCache, *, calls: bool = True) -> dict[str, Any]:
    """The whole state of cache and tree, least-recently-used order included."""
    return {
        "cache": cache_snapshot(prefix.cache, calls=calls),
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
            above: Node | None = node
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


def longest_common(prompt: list[int], known: list[list[int]]) -> int:
    best = 0
    for other in known:
        n = 0
        while n < min(len(prompt), len(other)) and prompt[n] == other[n]:
            n += 1
        best = max(best, n)
    return best
