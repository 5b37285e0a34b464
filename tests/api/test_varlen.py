"""attention_varlen() against each sequence alone: ragged lengths, empty sequences, every option."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import DTYPES, assert_state, poison, randn

from tilewise import BlockSchedule, attention, attention_varlen, reference


def starts(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def packed(lengths_q, lengths_k, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, seed=0):
    q = randn(sum(lengths_q), heads_q, head_dim, dtype=dtype, seed=seed)
    k = randn(sum(lengths_k), heads_kv, head_dim, dtype=dtype, seed=seed + 1)
    v = randn(sum(lengths_k), heads_kv, head_dim, dtype=dtype, seed=seed + 2)
    return q, k, v, starts(lengths_q), starts(lengths_k)


def assert_varlen(arguments, **options):
    got = attention_varlen(*arguments, return_lse=True, out=poison(arguments[0]), **options)
    exact = reference.attention_varlen(*arguments, **options)
    assert_state(got, exact, reference.attention_varlen(*arguments, dtype=arguments[0].dtype, **options))
    return got


RAGGED_Q, RAGGED_K = [1, 63, 0, 65, 7, 0, 129], [1, 63, 5, 127, 0, 0, 200]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (20, 5)}, {"softcap": 2.0, "causal": True}, {"scale": 0.3}]
)
def test_ragged(options, dtype):
    assert_varlen(packed(RAGGED_Q, RAGGED_K, dtype=dtype), **options)


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi(per_sequence, causal):
    slopes = randn(len(RAGGED_Q), 4, seed=9).abs() if per_sequence else randn(4, seed=9).abs()
    assert_varlen(packed(RAGGED_Q, RAGGED_K), alibi_slopes=slopes, causal=causal)


def test_sinks():
    assert_varlen(packed(RAGGED_Q, RAGGED_K), sinks=randn(4, seed=3), causal=True)


def test_empty_sequences_and_empty_batch():
    o, lse = assert_varlen(packed([0, 3, 0], [4, 0, 0]))
    assert (o == 0).all()
    assert (lse == -math.inf).all()
    o, lse = assert_varlen(packed([], []))
    assert o.shape == (0, 4, 16)
    assert lse.shape == (4, 0)


def test_equal_lengths_equal_the_dense_call():
    q, k, v, cu_q, cu_k = packed([30] * 3, [50] * 3)
    got = attention_varlen(q, k, v, cu_q, cu_k, causal=True)
    dense = attention(q.view(3, 30, 4, 16), k.view(3, 50, 2, 16), v.view(3, 50, 2, 16), causal=True)
    assert torch.allclose(got.view_as(dense), dense, atol=1e-6)


def test_int64_starts_and_strided_rows():
    q, k, v, cu_q, cu_k = packed([5, 60], [70, 3])
    wide = torch.full((73, 2, 48), float("nan"))
    wide[..., 16:32] = k
    assert_varlen((q, wide[..., 16:32], v, cu_q.long(), cu_k.long()), causal=True)


def test_a_schedule_for_each_sequence():
    lengths_q, lengths_k = [64, 10, 100], [64, 30, 90]
    schedules = [
        BlockSchedule.random(nq, nk, block_q=16, block_k=16, sparsity=0.5, seed=n)
        for n, (nq, nk) in enumerate(zip(lengths_q, lengths_k, strict=True))
    ]
    schedules[1] = None
    assert_varlen(packed(lengths_q, lengths_k), schedule=schedules, causal=True)
    one = BlockSchedule.random(48, 48, block_q=16, block_k=16, sparsity=0.5, seed=0)
    assert_varlen(packed([48, 48], [48, 48]), schedule=one)


lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6)


@given(lengths, st.booleans(), st.randoms(use_true_random=False))
def test_permuting_sequences_permutes_outputs(pairs, causal, random):
    q, k, v, cu_q, cu_k = packed([p[0] for p in pairs], [p[1] for p in pairs])
    pieces = [(q[cu_q[b] : cu_q[b + 1]], k[cu_k[b] : cu_k[b + 1]], v[cu_k[b] : cu_k[b + 1]]) for b in range(len(pairs))]
    order = list(range(len(pairs)))
    random.shuffle(order)
    shuffled = [torch.cat([pieces[b][part] for b in order]) for part in range(3)]
    o = attention_varlen(q, k, v, cu_q, cu_k, causal=causal)
    again = attention_varlen(
        *shuffled, starts([pairs[b][0] for b in order]), starts([pairs[b][1] for b in order]), causal=causal
    )
    expected = torch.cat([o[cu_q[b] : cu_q[b + 1]] for b in order])
    assert torch.equal(again, expected)  # a sequence's result does not depend on the batch, to the bit
