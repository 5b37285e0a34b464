"""chunk and qv on a card, against the float64 oracle, forward and backward."""

from __future__ import annotations

import pytest
import torch
from gradient_cases import check, check_dense
from oracle import assert_attention, assert_state, qkv, randn

from tilewise import attention, attention_varlen, reference

pytestmark = pytest.mark.gpu
CUDA = "cuda"
BF16 = torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 3)}, {"softcap": 2.0, "causal": True}])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(500, 500), (1, 700), (300, 129)])
def test_chunk(seqlen_q, seqlen_k, options):
    q, k, v = qkv(2, seqlen_q, seqlen_k, 4, 2, 64, dtype=BF16)
    for chunk in (64, 100, 1000, 100):  # one after another, and one that was there before
        given = {**options, "chunk": chunk}
        got = attention(*(x.to(CUDA) for x in (q, k, v)), return_lse=True, **given)
        assert_attention([x.cpu() for x in got], q, k, v, **given)


def test_chunk_of_packed_sequences():
    starts_q, starts_k = torch.tensor([0, 50, 50, 300]), torch.tensor([0, 90, 100, 500])
    q, k, v = (x[0] for x in qkv(1, 300, 500, 4, 2, 64, dtype=BF16))
    given = (q, k, v, starts_q, starts_k)
    got = attention_varlen(*(x.to(CUDA) for x in given), chunk=64, causal=True, return_lse=True)
    exact, honest = (
        reference.attention_varlen(*given, chunk=64, causal=True, dtype=dtype) for dtype in (torch.float64, BF16)
    )
    assert_state([x.cpu() for x in got], exact, honest)


@pytest.mark.parametrize("chunk", [50, 128])
def test_gradients_of_chunk(chunk):
    q, k, v = (x.to(CUDA) for x in qkv(1, 300, 310, 4, 2, 64, dtype=BF16))
    check_dense(q, k, v, chunk=chunk, causal=True)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (40, 72), (64, 512)])
def test_qv(head_dim, value_dim):
    q, qv = (randn(2, 130, 4, d, dtype=BF16, seed=d) for d in (head_dim, value_dim))
    k, v = (randn(2, 140, 2, d, dtype=BF16, seed=d + 1) for d in (head_dim, value_dim))
    got = attention(*(x.to(CUDA) for x in (q, k, v)), qv=qv.to(CUDA), causal=True, return_lse=True)
    assert_attention([x.cpu() for x in got], q, k, v, qv=qv, causal=True)


def test_gradients_of_qv():
    q, qv = (randn(1, 130, 4, d, dtype=BF16, seed=d).to(CUDA) for d in (48, 32))
    k, v = (randn(1, 140, 2, d, dtype=BF16, seed=d + 1).to(CUDA) for d in (48, 32))

    def ours(q, k, v, qv):
        return attention(q, k, v, qv=qv, return_lse=True)

    def oracle(q, k, v, qv, dtype=torch.float64):
        return reference.attention(q, k, v, qv=qv, dtype=dtype)

    check(ours, oracle, (q, k, v, qv), randn(1, 130, 4, 32, seed=7, dtype=BF16).to(CUDA), floors=[0.0] * 4)
