"""Random schedules and random masks together on the CPU, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import expressions
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_attention, assert_state, poison, qkv

from tilewise import BlockSchedule, attention, attention_varlen, reference

BATCH, HEADS, KV_HEADS = 2, 3, 1
LENGTHS = st.integers(1, 64)
WINDOWS = st.tuples(*[st.none() | st.integers(0, 70)] * 2)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def schedules(draw: Any, seqlen_q: int, seqlen_k: int, batches: tuple[int | None, ...]) -> BlockSchedule:
    """Of all heads, of KV heads or of query heads; of all sequences or of each; with lengths or without."""
    block_q, block_k = (16 * draw(st.integers(1, 8)) for _ in range(2))
    batch, heads = draw(st.sampled_from(batches)), draw(st.sampled_from([1, HEADS]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    nq, nk = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    more = {}
    for name, blocks, size in (("lengths_q", nq, block_q), ("lengths_k", nk, block_k)):
        if draw(st.booleans()):
            lead = draw(st.sampled_from([1, batch or 1]))
            more[name] = torch.randint(0, size + 1, (lead, blocks), generator=random, dtype=torch.int32)
    return BlockSchedule.from_blocks(
        torch.rand(batch or 1, heads, nq, nk, generator=random) < draw(st.sampled_from([0.2, 0.6, 1.0])),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        block_q=block_q,
        block_k=block_k,
        **more,
    )


@given(st.data(), LENGTHS, LENGTHS, DTYPES)
@settings(max_examples=150)
def test_dense(data, seqlen_q, seqlen_k, dtype):
    given = {"causal": data.draw(st.booleans()), "window": data.draw(WINDOWS)}
    if data.draw(st.booleans()):
        given["schedule"] = data.draw(schedules(seqlen_q, seqlen_k, (None, BATCH)))
    if data.draw(st.booleans()):
        given["mask"] = data.draw(expressions.masks()).function
    q, k, v = qkv(BATCH, seqlen_q, seqlen_k, HEADS, KV_HEADS, 16, dtype=dtype)
    assert_attention(attention(q, k, v, return_lse=True, out=poison(q), **given), q, k, v, **given)


@given(st.data(), st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=2, max_size=2), DTYPES)
@settings(max_examples=100)
def test_packed(data, lengths, dtype):
    given = {"causal": data.draw(st.booleans()), "window": data.draw(WINDOWS)}
    if data.draw(st.booleans()):
        given["schedule"] = [data.draw(st.none() | schedules(nq, nk, (None, 1))) for nq, nk in lengths]
    if data.draw(st.booleans()):
        given["mask"] = data.draw(expressions.masks()).function
    starts = [torch.tensor([0, *n]).cumsum(0) for n in zip(*lengths, strict=True)]
    q, k, v = (x[0] for x in qkv(1, int(starts[0][-1]), int(starts[1][-1]), HEADS, KV_HEADS, 16, dtype=dtype))
    got = attention_varlen(q, k, v, *starts, return_lse=True, out=poison(q), **given)
    exact, honest = (reference.attention_varlen(q, k, v, *starts, dtype=d, **given) for d in (torch.float64, dtype))
    assert_state(got, exact, honest)
