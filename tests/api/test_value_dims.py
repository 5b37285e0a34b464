"""Values of another head dimension than queries and keys, in every call over tensors, against the float64 oracle."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import gradient_cases
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import assert_attention, assert_gradients, assert_state, gradient_floors, gradients, poison, randn

from tilewise import (
    BlockSchedule,
    TokenTree,
    attention,
    attention_tree,
    attention_varlen,
    explain,
    merge,
    plan_attention,
    reference,
    sdpa,
    shared_prefix_attention,
)
from tilewise.api.backward import attention_backward
from tilewise.gpu.abi import FP8

DIMS = st.integers(1, 40) | st.sampled_from([63, 64, 65, 127, 129, 192, 512, 576])
LENGTHS = st.sampled_from([1, 2, 17, 63, 65])
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (9, 3)},
    {"softcap": 3.0, "causal": True},
    {"alibi_slopes": torch.tensor([0.1, 0.4, 0.2, 0.8])},
    {"alibi_slopes": torch.tensor([0.1, 0.4, 0.2, 0.8]), "window": (20, 0)},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "scale": 0.1},
    {"mask": lambda b, h, q, k: (q + k + h) % 3 > 0},
    {"score": lambda s, b, h, q, k: s * 0.5 + h},
    {"dropout_p": 0.3, "dropout_seed": torch.tensor(7)},
)


def tensors(batch, seqlen_q, seqlen_k, head_dim, value_dim, dtype=torch.float32, size=1.0):
    """q (B, Nq, 4, D), k (B, Nk, 2, D), v (B, Nk, 2, Dv)."""
    q = randn(batch, seqlen_q, 4, head_dim, dtype=dtype, seed=1, size=size)
    k, v = (randn(batch, seqlen_k, 2, d, dtype=dtype, seed=n) for n, d in ((2, head_dim), (3, value_dim)))
    return q, k, v


def out_like(q, v):
    return poison(q.new_empty(*q.shape[:-1], v.shape[-1]))


@given(DIMS, DIMS, LENGTHS, LENGTHS, st.sampled_from(OPTIONS), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60)
def test_dense(head_dim, value_dim, seqlen_q, seqlen_k, options, dtype):
    q, k, v = tensors(2, seqlen_q, seqlen_k, head_dim, value_dim, dtype)
    out = out_like(q, v)
    got = attention(q, k, v, return_lse=True, out=out, **options)
    assert got[0] is out
    assert_attention(got, q, k, v, **options)


@given(DIMS, DIMS, st.sampled_from(OPTIONS))
@settings(max_examples=25)
def test_packed_with_an_empty_sequence(head_dim, value_dim, options):
    starts_q, starts_k = torch.tensor([0, 5, 5, 70]), torch.tensor([0, 9, 20, 86])
    q, k, v = (x[0] for x in tensors(1, 70, 86, head_dim, value_dim))
    got = attention_varlen(q, k, v, starts_q, starts_k, return_lse=True, out=out_like(q, v), **options)
    exact, honest = (
        reference.attention_varlen(q, k, v, starts_q, starts_k, dtype=d, **options) for d in (torch.float64, q.dtype)
    )
    assert_state(got, exact, honest)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 16), (16, 40)])
def test_pages_and_their_gradients(head_dim, value_dim):
    table = torch.tensor([[3, 1, -9], [0, 3, 4]], dtype=torch.int32)  # page 3 stands in both
    starts_q, starts_k = torch.tensor([0, 3, 10]), torch.tensor([0, 7, 19])
    q, k, v = (x[0] for x in tensors(1, 10, 30, head_dim, value_dim))
    k, v = (x.unflatten(0, (5, 6)) for x in (k, v))
    places = torch.tensor([18, 19, 20, 21, 22, 23, 6, *range(6), *range(18, 24)])

    def paged(q, k, v):
        return attention_varlen(q, k, v, starts_q, starts_k, page_table=table, causal=True, return_lse=True)

    def oracle(q, k, v, dtype=torch.float64):
        k, v = (x.flatten(0, 1)[places] for x in (k, v))
        return reference.attention_varlen(q, k, v, starts_q, starts_k, causal=True, dtype=dtype)

    assert_state(paged(q, k, v), oracle(q, k, v), oracle(q, k, v, torch.float32))
    gradient_cases.check(paged, oracle, (q, k, v), randn(10, 4, value_dim, seed=6), randn(4, 10, seed=5))


@pytest.mark.parametrize("lengths", [None, [3, 0, 7, 7]])
def test_shared_prefixes_and_their_gradients(lengths):
    q, k, v = tensors(4, 5, 7, 24, 10)
    roots = [(randn(1, 9, 2, 24, seed=5), randn(1, 9, 2, 10, seed=6))]
    roots.append((randn(2, 6, 2, 24, seed=7), randn(2, 6, 2, 10, seed=8)))
    of_levels = [x for level in roots for x in level]

    def levels(given):
        return [(*given[:2], [8]), tuple(given[2:])]

    def ours(q, k, v, *given):
        return shared_prefix_attention(q, levels(given), k, v, lengths=lengths, return_lse=True)

    def oracle(q, k, v, *given, dtype=torch.float64):
        return reference.shared_prefix_attention(q, levels(given), k, v, lengths=lengths, dtype=dtype)

    given = (q, k, v, *of_levels)
    assert_state(ours(*given), oracle(*given), oracle(*given, dtype=torch.float32))
    gradient_cases.check(ours, oracle, given, randn(4, 5, 4, 10, seed=9), floors=[1e-5] * len(given))
    with pytest.raises(ValueError, match=r"levels\[0\]\[1\] must have shape"):
        shared_prefix_attention(q, [(roots[0][0], roots[0][0])], k, v)


@pytest.mark.parametrize("window", [None, (4, 0)])
def test_a_tree_of_tokens(window):
    tree = TokenTree.from_sequences([[1, 2, 3, 4], [1, 2, 5], [1, 6, 7, 8, 9]])
    q, k, v = (x[0] for x in tensors(1, tree.num_tokens, tree.num_tokens, 12, 20))
    pad = torch.nn.functional.pad
    wide = attention_tree(*(pad(x, (0, 8)) for x in (q, k)), v, tree, window=window, scale=12**-0.5)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = attention_tree(*leaves, tree, window=window)
    assert torch.equal(o, wide)
    assert [x.shape for x in torch.autograd.grad(o.sum(), leaves)] == [x.shape for x in leaves]


@given(st.integers(1, 33), st.integers(1, 65), st.sampled_from(OPTIONS[:-1]), st.booleans())
@example(64, 65, OPTIONS[0], False)
@example(192, 128, OPTIONS[1], False)
@example(576, 512, OPTIONS[1], True)
@settings(max_examples=25)
def test_gradients(head_dim, value_dim, options, with_lse):
    q, k, v = tensors(1, 66, 70, head_dim, value_dim)
    ours, oracle = partial(attention, return_lse=True, **options), partial(reference.attention, **options)
    d_lse = randn(1, 4, 66, seed=8) if with_lse else None
    d_o = randn(1, 66, 4, value_dim, seed=7)
    gradient_cases.check(ours, oracle, (q, k, v), d_o, d_lse, scale=options.get("scale"))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(40, 32), (24, 40)])
def test_gradients_by_kernels(head_dim, value_dim):
    """Whose kernels have one head dimension: zeros are added, and taken away again."""
    q, k, v = tensors(1, 40, 50, head_dim, value_dim, torch.float16)
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    d_o = randn(*o.shape, seed=7, dtype=q.dtype)
    got = attention_backward(d_o, q, k, v, o, lse, causal=True, backend="emulator")
    call = partial(reference.attention, causal=True)
    exact = gradients(call, (q, k, v), d_o, dtype=torch.float64)
    honest = gradients(partial(call, dtype=q.dtype), (q, k, v), d_o)
    assert_gradients(got, exact, honest, gradient_floors(call, (q, k, v), d_o), lse.double())
    assert all(x.is_contiguous() for x in got)


def test_blocks_of_a_schedule():
    blocks = torch.rand(2, 4, 5, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    schedule = BlockSchedule.from_blocks(blocks, seqlen_q=70, seqlen_k=90, block_q=16, block_k=16)
    for head_dim, value_dim in ((8, 24), (40, 16)):
        q, k, v = tensors(2, 70, 90, head_dim, value_dim)
        options = {"schedule": schedule, "causal": True}
        assert_attention(attention(q, k, v, return_lse=True, **options), q, k, v, **options)
        ours, oracle = partial(attention, return_lse=True, **options), partial(reference.attention, **options)
        gradient_cases.check(ours, oracle, (q, k, v), randn(2, 70, 4, value_dim, seed=7))


def test_large_logits_unused_memory_and_no_keys():
    q, k, v = tensors(65, 3, 9, 12, 5, size=3e3)  # logits of about ±1e4
    options = {"causal": True, "window": (4, None)}
    assert_attention(attention(q, k, v, return_lse=True, **options), q, k, v, **options)
    around = torch.full((65, 9, 2, 17), math.nan)
    around[..., 6:11] = v
    assert torch.equal(attention(q, k, around[..., 6:11]), attention(q, k, v))
    o, lse = attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert o.shape == (65, 3, 4, 5)
    assert o.abs().sum() == 0
    assert (lse == -math.inf).all()


def test_results_are_contiguous_and_float8_widened():
    q, k, v = tensors(2, 9, 9, 16, 8)
    assert attention(q, k, v).is_contiguous()
    narrow = [x.to(FP8) for x in (q, k, v)]
    descale = torch.tensor([0.5, 2.0])
    o = attention(*narrow, v_descale=descale)
    exact = attention(*(x.float() for x in narrow[:2]), narrow[2].float() * descale[:, None]).bfloat16()
    assert torch.equal(o, exact)


def test_states_merge():
    q, k, v = tensors(1, 5, 12, 16, 6)
    parts = [attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 5), slice(5, 12))]
    assert_attention(merge(*parts[0], *parts[1]), q, k, v)


def test_sdpa_takes_values_of_another_head_dim():
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in tensors(2, 9, 70, 24, 16))
    seen = torch.ones(2, 1, 1, 70, dtype=torch.bool)
    seen[1, ..., 40:] = False
    for options in ({}, {"attn_mask": seen}):
        assert explain(q, k, v, enable_gqa=True, **options).backend == "tilewise"
        ours = sdpa(q, k, v, enable_gqa=True, **options)
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        assert torch.allclose(ours, exact, atol=1e-6)
        found, wanted = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (ours, exact))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def test_compiled_code_knows_the_shapes():
    q, k, v = tensors(2, 9, 9, 24, 16)

    def both(q, k, v):
        o, lse = attention(q, k, v, causal=True, return_lse=True)
        starts = torch.tensor([0, 9])
        return o * 2, lse, attention_varlen(q[0], k[0], v[0], starts, starts), shared_prefix_attention(q, [], k, v)

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for got, wanted in zip(compiled(q, k, v), both(q, k, v), strict=True):
        assert torch.equal(got, wanted)
    torch.library.opcheck(torch.ops.tilewise.attention.default, (q, k, v), test_utils="test_faketensor")


def test_the_plan_counts_both_head_dimensions():
    q, k, _ = tensors(2, 64, 64, 24, 24)
    same, other = (plan_attention(q, k, value_dim=n).summary for n in (None, 8))
    assert same.flops == 2 * 4 * 2 * 64 * 64 * (24 + 24)
    assert other.flops == 2 * 4 * 2 * 64 * 64 * (24 + 8)
    assert other.bytes == 4 * 2 * 64 * (2 + 4) * (24 + 8)
    with pytest.raises(ValueError, match="value_dim must be at least 1"):
        plan_attention(q, k, value_dim=0)


def test_out_must_have_the_head_dimension_of_v():
    q, k, v = tensors(1, 3, 3, 8, 4)
    with pytest.raises(ValueError, match=r"out must have shape \(1, 3, 4, 4\), got \(1, 3, 4, 8\)"):
        attention(q, k, v, out=torch.empty_like(q))
