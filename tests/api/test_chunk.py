"""chunk: attention inside blocks of positions, against the float64 oracle; and which tiles it leaves."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import gradient_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_attention, assert_state, poison, qkv, randn

from tilewise import BlockSchedule, attention, attention_varlen, plan_attention, reference
from tilewise.api.backward import attention_backward
from tilewise.distributed.asked import check_asked
from tilewise.plan.dense import plan_dense, plan_varlen

LENGTHS = st.sampled_from([1, 2, 31, 63, 65, 127, 129, 200])
CHUNKS = st.sampled_from([1, 2, 16, 33, 64, 100, 300])
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "window": (9, 0)},
    {"window": (40, 7), "softcap": 3.0},
    {"causal": True, "alibi_slopes": torch.tensor([0.1, 0.4, 0.2, 0.8])},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"mask": lambda b, h, q, k: (q + k + h) % 3 > 0},
    {"score": lambda s, b, h, q, k: s * 0.5 + h, "causal": True},
    {"dropout_p": 0.3, "dropout_seed": torch.tensor(7)},
)


def test_the_rule_is_that_of_positions_rounded_down():
    """Of 3 queries over 7 keys, at positions 4, 5 and 6; and of 4 queries over 2 keys, at −2, −1, 0 and 1."""
    assert reference.visible(3, 7, chunk=5).int().tolist() == [[1] * 5 + [0] * 2, *[[0] * 5 + [1] * 2] * 2]
    assert reference.visible(4, 2, chunk=3).int().tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert reference.visible(3, 3, chunk=2, causal=True).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


@given(LENGTHS, LENGTHS, CHUNKS, st.sampled_from(OPTIONS), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60)
def test_dense(seqlen_q, seqlen_k, chunk, options, dtype):
    q, k, v = qkv(2, seqlen_q, seqlen_k, 4, 2, 8, dtype=dtype)
    options = {**options, "chunk": chunk}
    assert_attention(attention(q, k, v, return_lse=True, **options), q, k, v, **options)


@given(CHUNKS, st.sampled_from(OPTIONS))
@settings(max_examples=25)
def test_packed(chunk, options):
    starts_q, starts_k = torch.tensor([0, 5, 5, 70, 130]), torch.tensor([0, 9, 20, 86, 100])
    q, k, v = (x[0] for x in qkv(1, 130, 100, 4, 2, 8))
    call = partial(reference.attention_varlen, q, k, v, starts_q, starts_k, chunk=chunk, **options)
    got = attention_varlen(q, k, v, starts_q, starts_k, chunk=chunk, return_lse=True, **options)
    assert_state(got, call(), call(dtype=torch.float32))


@given(CHUNKS, st.sampled_from(OPTIONS[:-1]))
@settings(max_examples=20)
def test_gradients(chunk, options):
    q, k, v = qkv(1, 130, 140, 4, 2, 8)
    gradient_cases.check_dense(q, k, v, chunk=chunk, **options)


def test_beside_a_schedule():
    schedule = BlockSchedule.strided(200, 200, block_q=16, block_k=16, stride=3)
    q, k, v = qkv(1, 200, 200, 4, 2, 8)
    options = {"schedule": schedule, "chunk": 50, "causal": True}
    assert_attention(attention(q, k, v, return_lse=True, **options), q, k, v, **options)


def test_the_backward_pass_by_itself():
    q, k, v = qkv(1, 40, 50, 4, 2, 8)
    o, lse = attention(q, k, v, chunk=16, return_lse=True)
    d_o = randn(*o.shape, seed=4)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(reference.attention(*exact, chunk=16)[0], exact, d_o.double())
    for found, of in zip(attention_backward(d_o, q, k, v, o, lse, chunk=16), wanted, strict=True):
        assert torch.allclose(found.double(), of, atol=1e-5)


def test_hidden_blocks_are_no_work():
    """The tiles are those of the blocks: their FLOPs, and no key of another block is read."""
    whole = plan_dense(1, 4096, 4096, 1, 1, 64)
    blocks = plan_dense(1, 4096, 4096, 1, 1, 64, chunk=512)
    assert blocks.flops * 8 == whole.flops
    assert (len(blocks.work), blocks.summary.tiles, blocks.summary.keys_read) == (1, 8, 4096)
    assert blocks.exclusive
    causal = plan_dense(1, 4096, 4096, 1, 1, 64, causal=True, chunk=512)
    assert causal.flops == 8 * plan_dense(1, 512, 512, 1, 1, 64, causal=True).flops
    assert causal.exclusive
    one = plan_varlen([0, 1], [0, 8192], 1, 1, 64, causal=True, chunk=512)  # a decode step reads its block alone
    assert [(t.row, t.rows, t.key, t.keys) for t in one.work] == [(0, 1, 8192 - 512, 512)]
    pairs = sum(r.pairs for r in plan_dense(2, 100, 130, 1, 1, 8, window=(9, 3), chunk=33).rectangles())
    assert pairs == 2 * int(reference.visible(100, 130, window=(9, 3), chunk=33).sum())


def test_the_plan_of_a_call():
    q, k, _ = qkv(2, 256, 256, 4, 2, 8)
    assert plan_attention(q, k, chunk=64).flops * 4 == plan_attention(q, k).flops
    masked = plan_attention(q, k, chunk=128, mask=lambda b, h, q, k: q >= k)  # blocks of 128, of which half are seen
    assert masked.summary.tiles == 4


@pytest.mark.parametrize("options", [{"mask": lambda b, h, q, k: (q + k) % 3 > 0}, {"causal": True}])
def test_kernels_take_it_as_a_mask_where_places_count(options):
    q, k, v = qkv(2, 70, 90, 2, 1, 32, dtype=torch.float16)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)[:, :80]  # whose sequences do not stand one behind another
    options = {**options, "chunk": 32}
    got = attention(q, k, v[:, :80], return_lse=True, backend="emulator", **options)
    assert_attention(got, q, k, v[:, :80], **options)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 90), (90, 70), (1, 65), (64, 64)])
def test_kernels_take_blocks_as_packed_sequences(seqlen_q, seqlen_k, monkeypatch):
    q, k, v = qkv(3, seqlen_q, seqlen_k, 2, 1, 32, dtype=torch.float16)
    monkeypatch.setattr("tilewise.api.rewritten.chunked", lambda *given: pytest.fail("a mask was made"))
    for options in ({"causal": True}, {"window": (9, 3), "sinks": torch.tensor([0.5, -1.0])}):
        out = poison(q)
        options = {**options, "chunk": 32, "alibi_slopes": torch.tensor([0.1, 0.4])}
        got = attention(q, k, v, return_lse=True, out=out, backend="emulator", **options)
        assert got[0] is out
        assert_attention(got, q, k, v, **options)
    assert torch.equal(attention(q, k, v, backend="emulator", **options), out)
    with pytest.raises(ValueError, match=r"k must have shape \(3, seqlen, heads, 32\)"):
        attention(q, k[..., :31], v, chunk=32, backend="emulator")
    with pytest.raises(ValueError, match=r"out must have shape"):
        attention(q, k, v, chunk=32, out=out[..., :31], backend="emulator")


def test_kernels_take_it_of_packed_sequences():
    starts_q, starts_k = torch.tensor([0, 20, 50]), torch.tensor([0, 40, 60])
    q, k, v = (x[0] for x in qkv(1, 50, 60, 2, 1, 32, dtype=torch.float16))
    got = attention_varlen(q, k, v, starts_q, starts_k, chunk=16, return_lse=True, backend="emulator")
    given = (q, k, v, starts_q, starts_k)
    exact, honest = (reference.attention_varlen(*given, chunk=16, dtype=d) for d in (torch.float64, q.dtype))
    assert_state(got, exact, honest)


def test_gradients_by_kernels():
    q, k, v = qkv(1, 40, 50, 2, 1, 32, dtype=torch.float16)
    ours = partial(attention, return_lse=True, chunk=16, backend="emulator")
    gradient_cases.check(ours, partial(reference.attention, chunk=16), (q, k, v), randn(1, 40, 2, 32, seed=7).half())


def test_blocks_that_were_packed_under_inference_mode_are_trained_over():
    """Where the blocks start is kept from call to call."""
    q, k, v = qkv(1, 24, 24, 2, 1, 32, dtype=torch.float16)
    call = partial(attention, chunk=9, backend="emulator")
    with torch.inference_mode():
        drawn = call(q, k, v)
    o = call(q.requires_grad_(), k, v)
    o.sum().backward()
    assert torch.equal(o, drawn)
    assert q.grad is not None


def test_other_sizes_of_blocks_trace_nothing_anew(monkeypatch):
    q, k, v = qkv(1, 40, 50, 2, 1, 8)
    mask = BlockSchedule.strided(40, 50, block_q=16, block_k=16, stride=2)
    for chunk in (7, 8):  # the first finds out, the second that it holds for other numbers
        attention(q, k, v, schedule=mask, chunk=chunk)
    monkeypatch.setattr("tilewise.functions.tracing._traced", lambda *given: pytest.fail("traced again"))
    assert_attention(attention(q, k, v, schedule=mask, chunk=9, return_lse=True), q, k, v, schedule=mask, chunk=9)


def test_compiled_code():
    q, k, v = qkv(2, 40, 50, 4, 2, 8)
    compiled = torch.compile(partial(attention, chunk=16, causal=True), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), attention(q, k, v, chunk=16, causal=True))


@pytest.mark.parametrize(
    ("chunk", "error", "message"),
    [
        (0, ValueError, "chunk must be at least 1, got 0; None means no blocks"),
        (-3, ValueError, "chunk must be at least 1, got -3"),
        (True, TypeError, "chunk must be an int, got bool"),
        (8.0, TypeError, "chunk must be an int, got float"),
        (math.inf, TypeError, "chunk must be an int, got float"),
    ],
)
def test_bad_chunks_are_named(chunk, error, message):
    q, k, v = qkv(1, 4, 4, 2, 1, 8)
    starts = torch.tensor([0, 4])
    with pytest.raises(error, match=message):
        attention(q, k, v, chunk=chunk)
    with pytest.raises(error, match=message):
        attention(q, k, v, chunk=chunk, backend="emulator")
    with pytest.raises(error, match=message):
        attention_varlen(q[0], k[0], v[0], starts, starts, chunk=chunk)


def test_split_sequences_refuse_it():
    with pytest.raises(NotImplementedError, match="chunk over a sequence that is split"):
        check_asked(*qkv(1, 4, 4, 2, 1, 8), "contiguous", False, "auto", {"chunk": 4})
