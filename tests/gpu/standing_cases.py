"""A cache under churn, for tests of standing plans."""

from __future__ import annotations

import random

import torch

import tilewise as tw


class Churn:
    """A cache whose sequences come, go, fork, grow and copy the last page that they share, all at random.

    value_dim: of rows that are K and V at once; None for K and V apart, of one width.
    """

    def __init__(
        self,
        seed: int,
        kv_format: str,
        dtype: torch.dtype,
        heads: int,
        page_size: int,
        dim: int = 64,
        pages: int = 400,
        device: str = "cpu",
        value_dim: int | None = None,
    ) -> None:
        self.r, self.dtype, self.heads, self.dim = random.Random(seed), dtype, heads, dim
        torch.manual_seed(seed)
        rows = {"value_dim": value_dim, "shared_kv": value_dim is not None}
        self.cache = tw.PagedKVCache(pages, page_size, heads, dim, kv_format=kv_format, device=device, **rows)
        self.roots = [self.new(self.r.randrange(40, 200)) for _ in range(2)]
        self.seqs: list[int] = []

    def new(self, length: int) -> int:
        seq = self.cache.allocate()
        self.grow([seq], [length])
        return seq

    def grow(self, seqs: list[int], counts: int | list[int]) -> None:
        slots = self.cache.extend(seqs, counts)
        both = 1 if self.cache.shared_kv else 2
        x = torch.randn(both, len(slots), self.heads, self.dim, device=self.cache.device).to(self.dtype)
        self.cache.write(0, slots, *x)

    def step(self, rows: int) -> None:
        r, cache = self.r, self.cache
        for _ in range(r.randrange(0, 1 + len(self.seqs) // 2)):
            cache.free(self.seqs.pop(r.randrange(len(self.seqs))))
        while len(self.seqs) < rows and r.random() < 0.8:
            kind = r.random()
            if kind < 0.6:
                self.seqs.append(cache.fork(r.choice(self.roots)))
            elif kind < 0.8 and self.seqs:
                self.seqs.append(cache.fork(r.choice(self.seqs)))
            else:
                self.seqs.append(self.new(r.randrange(1, 30)) if r.random() < 0.8 else cache.allocate())
        r.shuffle(self.seqs)
        growing = [s for s in self.seqs if r.random() < 0.8]
        if growing:
            self.grow(growing, [r.choice([1, 1, 1, 20]) for _ in growing])
