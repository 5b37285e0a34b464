"""Standing plans in the emulator: the planner makes the list, the decode kernels walk it, step after step."""

from __future__ import annotations

import pytest
import torch
from standing_cases import Churn

import tilewise as tw
from tilewise import reference
from tilewise.plan.tree import plan_tree


def exact(cache: tw.PagedKVCache, seq: int, q: torch.Tensor, window: tuple[int, int] | None) -> torch.Tensor:
    """(tokens, Hq, D): attention in float64 over the sequence's tokens."""
    k, v = (x[None].double() for x in cache.gather(0, seq))
    return reference.attention(q[None].double(), k, v, causal=True, window=window)[0][0]


def plan_as_on_a_card(cache: tw.PagedKVCache, seqs: list[int], heads: int, **options) -> tw.DecodePlan:
    """plan_decode of sequences that share nothing, without the CPU's cuts where pages are not consecutive."""
    return plan_tree(
        seqs, [cache.page_list(s) for s in seqs], cache.lengths_of(seqs), cache.page_size, heads_q=heads,
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
    for _ in range(3):
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
