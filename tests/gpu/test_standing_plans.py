"""Standing plans in the emulator: the planner makes the list, the decode kernels walk it, step after step."""

from __future__ import annotations

import random

import pytest
import torch

import tilewise as tw
from tilewise import reference
from tilewise.plan.tree import plan_tree


class Churn:
    """A cache whose sequences come, go, fork, grow and copy the last page that they share, all at random."""

    def __init__(
        self, seed: int, kv_format: str, dtype: torch.dtype, heads: int, page_size: int, dim: int = 64
    ) -> None:
        self.r, self.dtype, self.heads, self.dim = random.Random(seed), dtype, heads, dim
        torch.manual_seed(seed)
        self.cache = tw.PagedKVCache(400, page_size, heads, dim, kv_format=kv_format)
        self.roots = [self.new(self.r.randrange(40, 200)) for _ in range(2)]
        self.seqs: list[int] = []

    def new(self, length: int) -> int:
        seq = self.cache.allocate()
        self.grow([seq], [length])
        return seq

    def grow(self, seqs: list[int], counts: int | list[int]) -> None:
        slots = self.cache.extend(seqs, counts)
        x = torch.randn(2, len(slots), self.heads, self.dim).to(self.dtype)
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


def exact(cache: tw.PagedKVCache, seq: int, q: torch.Tensor, window: tuple[int, int] | None) -> torch.Tensor:
    """(tokens, Hq, D): attention in float64 over the sequence's tokens."""
    k, v = (x[None].double() for x in cache.gather(0, seq))
    return reference.attention(q[None].double(), k, v, causal=True, window=window)[0][0]


def plan_as_on_a_card(cache: tw.PagedKVCache, seqs: list[int], heads: int, **options) -> tw.DecodePlan:
    """plan_decode of sequences that share nothing, without the CPU's cuts where pages are not consecutive."""
    of = cache.sequences
    _, rows = of.batch(seqs)
    return plan_tree(
        seqs, of.table[rows], of.counts[rows], of.lengths[rows], cache.page_size, heads_q=heads,
        heads_kv=cache.num_kv_heads, head_dim=cache.head_dim, kv_row_bytes=1.0, io_bytes=2, share=False,
        cache_serial=cache.serial, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kv_format", "dtype", "heads", "group", "page_size", "options"),
    [
        ("bf16", torch.bfloat16, 4, 2, 16, {"share_prefix": False}),
        ("bf16", torch.bfloat16, 1, 8, 16, {"share_prefix": True}),
        ("fp16", torch.float16, 1, 16, 64, {"share_prefix": True, "window": (70, 0), "tokens_per_seq": 2}),
        ("int8", torch.bfloat16, 2, 4, 16, {"share_prefix": True}),
        ("int4", torch.float16, 1, 4, 24, {"share_prefix": False, "window": (50, 0)}),
        ("fp32", torch.float32, 1, 2, 16, {"share_prefix": True, "tokens_per_seq": 3}),
    ],
)
def test_every_step_is_that_of_a_fresh_plan(kv_format, dtype, heads, group, page_size, options):
    of = Churn(7, kv_format, dtype, heads, page_size)
    rows, tokens = 6, options.get("tokens_per_seq", 1)
    plan = tw.plan_decode(of.cache, [], num_heads=heads * group, rows=rows, max_length=400, **options)
    for _ in range(4):
        of.step(rows)
        tw.renew_plan(plan, of.cache, of.seqs)
        q = torch.randn(rows, tokens, heads * group, 64).to(dtype)
        o, lse = tw.decode(q, of.cache, 0, plan, return_lse=True, backend="emulator")
        n = len(of.seqs)
        assert not o[n:].any()
        assert (lse[n:] == -torch.inf).all()
        if not n:
            continue
        if not options["share_prefix"]:
            fresh = plan_as_on_a_card(of.cache, of.seqs, heads * group, window=options.get("window"))
            expected, expected_lse = tw.decode(q[:n], of.cache, 0, fresh, return_lse=True, backend="emulator")
            assert torch.equal(o[:n], expected)
            assert torch.equal(lse[:n], expected_lse)
            continue
        for one, row, seq in zip(o, q, of.seqs, strict=False):
            found = exact(of.cache, seq, row, options.get("window"))
            assert (one.double() - found).abs().max() < {torch.float32: 1e-5}.get(dtype, 2e-2)
