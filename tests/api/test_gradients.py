"""Gradients of the public calls on the CPU: against autograd through the float64 oracle, by the tolerance rule."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from gradient_cases import check, check_dense
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_gradients, gradients, qkv, randn

import tilewise
from tilewise import BlockSchedule, attention, attention_varlen, merge_states, reference, shared_prefix_attention
from tilewise.cpu import backward

DOUBLE, FP8 = torch.float64, torch.float8_e4m3fn


LENGTHS = [(1, 1), (63, 65), (129, 127), (65, 200)]
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (40, 3)},
    "softcap": {"softcap": 2.0, "causal": True},
    "ALiBi": {"alibi_slopes": torch.tensor([0.1, 0.3, 0.02, 0.5]), "causal": True},
    "mask": {"mask": lambda b, h, q, k: (q + k + h) % 3 != 0},
    "score": {"score": lambda s, b, h, q, k: 1.5 * torch.tanh(s) - 0.01 * (q - k) * (q - k)},
    "scale": {"scale": -0.2},
}


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, with_lse):
    for nq, nk in LENGTHS:
        check_dense(*qkv(2, nq, nk, 4, 2, 24), with_lse=with_lse, **OPTIONS[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["full", "causal", "softcap", "mask"])
def test_16_bits(name, dtype):
    check_dense(*qkv(1, 150, 170, 4, 2, 40, dtype=dtype), **OPTIONS[name])


@pytest.mark.parametrize("causal", [False, True])
def test_sinks(causal):
    """Rows that see no key but their sink, too: 100 queries over 40 keys."""
    check_dense(*qkv(2, 100, 40, 4, 2, 16), randn(4, seed=5), causal=causal)


def test_rows_without_keys_have_no_gradients():
    d_q, *_ = check_dense(*qkv(1, 100, 40, 2, 2, 16), causal=True)
    assert (d_q[:, :60] == 0).all()
    q, k, v = qkv(1, 5, 0, 2, 2, 16)
    q.requires_grad_()
    attention(q, k, v).sum().backward()
    assert (q.grad == 0).all()


def test_schedules():
    q, k, v = qkv(2, 100, 130, 4, 2, 16)
    blocks = torch.rand(4, 7, 9, generator=torch.Generator().manual_seed(0)) < 0.4
    sizes = {"seqlen_q": 100, "seqlen_k": 130, "block_q": 16, "block_k": 16}
    for chosen in (blocks[0], blocks):  # by head, so that heads of a KV head differ
        check_dense(q, k, v, schedule=BlockSchedule.from_blocks(chosen, **sizes), causal=True)


def test_keys_past_the_lengths_of_blocks_may_be_anything():
    q, k, v = qkv(1, 64, 64, 2, 1, 16)
    sizes = {"seqlen_q": 64, "seqlen_k": 64, "block_q": 32, "block_k": 32}
    schedule = BlockSchedule.from_blocks(torch.ones(2, 2, dtype=torch.bool), **sizes, lengths_k=torch.tensor([32, 9]))
    call = partial(attention, return_lse=True, schedule=schedule)
    want = gradients(call, (q, k, v), d_o := randn(*q.shape, seed=4))
    k[:, 41:], v[:, 41:] = math.nan, math.inf
    assert all(map(torch.equal, gradients(call, (q, k, v), d_o), want))


def test_large_logits_and_large_gradients():
    """Weights of 0 and 1, and gradients of 1e4 over tiny weights."""
    check_dense(*qkv(1, 70, 90, 2, 1, 16, size=100.0), causal=True)
    q, k, v = qkv(1, 70, 90, 2, 1, 16)
    check(
        partial(attention, return_lse=True, softcap=30.0),
        partial(reference.attention, softcap=30.0),
        (q, k, v),
        1e4 * randn(*q.shape, seed=3),
    )


def test_strides_are_those_of_the_inputs():
    wide = randn(2, 3, 70, 4, 40, seed=1)
    q, k, v = (x.detach().requires_grad_() for x in wide[..., :32].unbind(1))
    o = attention(q, k, v, causal=True)
    o.backward(randn(2, 4, 70, 32, seed=2).transpose(1, 2))
    want = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    attention(*want, causal=True).backward(randn(2, 4, 70, 32, seed=2).transpose(1, 2))
    for a, b in zip((q, k, v), want, strict=True):
        assert torch.equal(a.grad, b.grad)


# ---- packed, paged, shared -------------------------------------------------------------------------------------------

STARTS_Q, STARTS_K = torch.tensor([0, 70, 70, 75, 205]), torch.tensor([0, 90, 120, 120, 255])


@pytest.mark.parametrize("name", OPTIONS)
def test_packed(name):
    q, k, v = (x[0] for x in qkv(1, 205, 255, 4, 2, 16))
    starts = (STARTS_Q, STARTS_K)
    ours = lambda q, k, v: attention_varlen(q, k, v, *starts, return_lse=True, **OPTIONS[name])  # noqa: E731
    oracle = lambda q, k, v, **more: reference.attention_varlen(q, k, v, *starts, **OPTIONS[name], **more)  # noqa: E731
    check(ours, oracle, (q, k, v), randn(*q.shape, seed=4), randn(4, 205, seed=5))


def test_pages_that_sequences_share_add_their_gradients():
    q = randn(40, 4, 16, seed=1).requires_grad_()
    k, v = (randn(6, 8, 2, 16, seed=n).requires_grad_() for n in (2, 3))
    table = torch.tensor([[4, 1, 0], [4, 1, 5]], dtype=torch.int32)
    starts = torch.tensor([0, 20, 40]), torch.tensor([0, 20, 43])
    attention_varlen(q, k, v, *starts, page_table=table, causal=True).sum().backward()
    got = [x.grad.clone() for x in (q, k, v)]
    places = [table[0].long()[:, None] * 8 + torch.arange(8), table[1].long()[:, None] * 8 + torch.arange(8)]
    index = torch.cat([places[0].flatten()[:20], places[1].flatten()[:23]])
    for x in (q, k, v):
        x.grad = None
    flat = (x.flatten(0, 1)[index] for x in (k, v))
    attention_varlen(q, *flat, *starts, causal=True).sum().backward()
    for a, x in zip(got, (q, k, v), strict=True):
        torch.testing.assert_close(a, x.grad, rtol=1e-5, atol=1e-5)


def test_shared_prefixes():
    """Two levels, of which one ends early; a prefix gets the gradients of all who share it."""
    q, k, v = qkv(4, 9, 12, 4, 2, 16)
    levels = [randn(1, 33, 2, 16, seed=n) for n in (1, 2)], [randn(2, 20, 2, 16, seed=n) for n in (3, 4)]
    lengths = [20, 7]

    def call(function, q, k, v, ka, va, kb, vb, **more):
        return function(q, [(ka, va), (kb, vb, lengths)], k, v, lengths=[12, 5, 9, 1], **more)

    tensors = (q, k, v, *levels[0], *levels[1])
    ours = partial(call, shared_prefix_attention, return_lse=True)
    oracle = partial(call, reference.shared_prefix_attention)
    got = gradients(ours, tensors, d_o := randn(*q.shape, seed=9), d_lse := randn(4, 4, 9, seed=10))
    exact = gradients(oracle, tensors, d_o, d_lse, dtype=DOUBLE)
    honest = gradients(partial(oracle, dtype=torch.float32), tensors, d_o, d_lse)
    _, lse = oracle(*(x.double() for x in tensors))
    assert_gradients(got, exact, honest, [0.0] * 7, lse, ("dq", "dk", "dv", "dk of 0", "dv of 0", "dk of 1", "dv of 1"))


def test_merged_states():
    o, lse = randn(3, 2, 5, 4, 16, seed=1), randn(3, 2, 4, 5, seed=2)
    lse[:, 0, 0, 0] = -math.inf  # a row that no state has keys for
    lse[1, 1] = -math.inf
    d_o, d_lse = randn(2, 5, 4, 16, seed=3), randn(2, 4, 5, seed=4)
    got = gradients(merge_states, (o, lse), d_o, d_lse)
    exact = gradients(merge_states, (o, lse), d_o, d_lse, dtype=DOUBLE)
    assert all(x.isfinite().all() for x in got)
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
    assert (got[0][:, 0, 0, 0] == 0).all()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random(data):
    group, heads_kv = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    nq, nk = data.draw(st.integers(1, 140)), data.draw(st.integers(0, 140))
    options = {"causal": data.draw(st.booleans()), "softcap": data.draw(st.sampled_from([0.0, 1.5]))}
    side = st.none() | st.integers(0, 60)
    options["window"] = data.draw(st.none() | st.tuples(side, side))
    if data.draw(st.booleans()):
        options["alibi_slopes"] = randn(group * heads_kv, seed=2).abs()
    sinks = randn(group * heads_kv, seed=3) if data.draw(st.booleans()) else None
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    tensors = qkv(data.draw(st.integers(1, 2)), nq, nk, group * heads_kv, heads_kv, 8, dtype=dtype)
    check_dense(*tensors, sinks, with_lse=data.draw(st.booleans()), **options)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_random_packed(data):
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=4))
    starts = [torch.tensor([0, *(n[side] for n in lengths)]).cumsum(0) for side in (0, 1)]
    group = data.draw(st.sampled_from([1, 3]))
    options = {"causal": data.draw(st.booleans()), "softcap": data.draw(st.sampled_from([0.0, 1.5]))}
    options["window"] = data.draw(st.none() | st.tuples(st.integers(0, 30), st.integers(0, 30)))
    if data.draw(st.booleans()):
        options["alibi_slopes"] = randn(len(lengths), 2 * group, seed=2).abs()
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    q, k, v = (x[0] for x in qkv(1, int(starts[0][-1]), int(starts[1][-1]), 2 * group, 2, 8, dtype=dtype))
    if not q.numel():
        return
    ours = lambda q, k, v: attention_varlen(q, k, v, *starts, return_lse=True, **options)  # noqa: E731
    oracle = lambda q, k, v, **more: reference.attention_varlen(q, k, v, *starts, **options, **more)  # noqa: E731
    d_lse = randn(2 * group, len(q), seed=5) if data.draw(st.booleans()) else None
    check(ours, oracle, (q, k, v), randn(*q.shape, dtype=dtype, seed=4), d_lse)


def test_logits_far_below_0():
    """An LSE of −200: hidden keys whose logits are 0 would have weights beyond float32 beside it."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = qkv(1, 100, 110, 2, 1, 16, dtype=dtype)
        check_dense((40 * q.abs()).to(dtype), -k.abs(), v, causal=True, scale=0.3)


def test_gradients_that_are_parts_of_something_larger():
    """What comes down from a torch.cat is strided."""
    q, k, v = (x.requires_grad_() for x in qkv(2, 70, 70, 2, 2, 16))
    wide = randn(2, 70, 2, 50, seed=3)
    want = torch.autograd.grad(attention(q, k, v, causal=True), (q, k, v), wide[..., 20:36].contiguous())
    joined = torch.cat((torch.zeros(2, 70, 2, 20), attention(q, k, v, causal=True), torch.zeros(2, 70, 2, 14)), -1)
    assert all(map(torch.equal, torch.autograd.grad(joined, (q, k, v), wide), want))


# ---- what autograd asks for ------------------------------------------------------------------------------------------


def test_memory_is_that_of_tiles():
    """Never all scores: 2 × 2048 × 2048 of them would be 32 MiB."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 2048, 2048, 2, 2, 8))
    o = attention(q, k, v, causal=True, softcap=5.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        o.sum().backward()
    assert max(event.cpu_memory_usage for event in profile.events()) < 12 << 20


def test_a_second_derivative_says_that_there_is_none():
    q, k, v = (x.requires_grad_() for x in qkv(1, 5, 5, 2, 2, 8))
    (d_q,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        d_q.sum().backward()


def test_a_batch_of_small_tiles_is_one_call(monkeypatch):
    """Of torch's kernel; not where K and V would be copied for a few rows of each query head of a group."""
    made, flash = [], backward._flash_gradients
    monkeypatch.setattr(backward, "_flash_gradients", lambda *given: made.append(1) or flash(*given))
    for sizes, count in (((8, 20, 20, 4, 4, 16), 1), ((8, 20, 40, 4, 2, 16), 1), ((3, 2, 40, 4, 2, 16), 0)):
        made.clear()
        q, k, v = (x.requires_grad_() for x in qkv(*sizes))
        attention(q, k, v).sum().backward()
        assert len(made) == count


def test_only_what_requires_gradients_gets_them():
    q, k, v = qkv(1, 20, 30, 2, 2, 8)
    v.requires_grad_()
    attention(q, k, v).sum().backward()
    assert q.grad is None
    assert k.grad is None
    assert v.grad.shape == v.shape


def test_refusals():
    q, k, v = qkv(1, 20, 30, 2, 2, 8)
    q.requires_grad_()
    slopes = torch.ones(2, requires_grad=True)
    table = torch.zeros(2, 30, requires_grad=True)
    for error, words, call in (
        (ValueError, "out must be None", lambda: attention(q, k, v, out=torch.empty_like(q))),
        (NotImplementedError, 'use backend="emulator"', lambda: attention(q, k, v, backend="emulator:naive")),
        (
            NotImplementedError,
            "FP8 inputs",
            lambda: attention(*(x.to(FP8).requires_grad_() for x in (q.detach(), k, v))),
        ),
        (ValueError, "q_descale goes with float8", lambda: attention(q, k, v, q_descale=torch.ones(2))),
        (NotImplementedError, "alibi_slopes", lambda: attention(q, k, v, alibi_slopes=slopes)),
        (NotImplementedError, "requires", lambda: attention(q, k, v, score=lambda s, b, h, q, k: s + table[h, k])),
    ):
        with pytest.raises(error, match=words):
            call()
    assert tilewise.attention(q.detach(), k, v).requires_grad is False
