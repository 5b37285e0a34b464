"""qv: a second query, for the values, against the float64 oracle."""

from __future__ import annotations

from functools import partial

import gradient_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_attention, assert_state, poison, randn

from tilewise import attention, attention_varlen, reference
from tilewise.gpu.abi import FP8

DIMS = st.integers(1, 40) | st.sampled_from([63, 64, 65, 128])
OPTIONS = (
    {},
    {"causal": True},
    {"scale": 0.2, "window": (9, 3)},
    {"chunk": 16, "softcap": 3.0},
    {"score": lambda s, b, h, q, k: s - 0.1 * h},
)


def tensors(batch, seqlen_q, seqlen_k, head_dim, value_dim, dtype=torch.float32):
    """q (B, Nq, 4, D), k (B, Nk, 2, D), v (B, Nk, 2, Dv), qv (B, Nq, 4, Dv)."""
    q, qv = (randn(batch, seqlen_q, 4, d, dtype=dtype, seed=n) for n, d in ((1, head_dim), (4, value_dim)))
    k, v = (randn(batch, seqlen_k, 2, d, dtype=dtype, seed=n) for n, d in ((2, head_dim), (3, value_dim)))
    return q, k, v, qv


@given(DIMS, DIMS, st.sampled_from([1, 17, 65]), st.sampled_from(OPTIONS), st.sampled_from([torch.float32, torch.half]))
@settings(max_examples=40)
def test_dense(head_dim, value_dim, seqlen_q, options, dtype):
    q, k, v, qv = tensors(2, seqlen_q, 63, head_dim, value_dim, dtype)
    out = poison(q.new_empty(*q.shape[:-1], value_dim))
    got = attention(q, k, v, qv=qv, return_lse=True, out=out, **options)
    assert got[0] is out
    assert_attention(got, q, k, v, qv=qv, **options)


def test_the_absorbed_form_of_latent_attention():
    """One KV head whose row is 64 rotary channels beside 512 latent ones, which are the values, too."""
    q, k, v, qv = tensors(1, 3, 65, 64, 512)
    k, v = k[:, :, :1], v[:, :, :1]
    assert_attention(attention(q, k, v, qv=qv, causal=True, return_lse=True), q, k, v, qv=qv, causal=True)


@pytest.mark.parametrize("options", OPTIONS[:4])
def test_gradients(options):
    q, k, v, qv = tensors(1, 66, 70, 12, 20)

    def ours(q, k, v, qv):
        return attention(q, k, v, qv=qv, return_lse=True, **options)

    def oracle(q, k, v, qv, dtype=torch.float64):
        return reference.attention(q, k, v, qv=qv, dtype=dtype, **options)

    d_o, d_lse = randn(1, 66, 4, 20, seed=7), randn(1, 4, 66, seed=8)
    gradient_cases.check(ours, oracle, (q, k, v, qv), d_o, d_lse, floors=[2e-5] * 4)


@pytest.mark.parametrize("paged", [False, True])
def test_packed_and_paged(paged):
    starts_q, starts_k = torch.tensor([0, 3, 3, 10]), torch.tensor([0, 7, 7, 19])
    q, k, v, qv = (x[0] for x in tensors(1, 10, 30, 12, 8))
    table, places = None, torch.arange(19)
    if paged:  # NaN in the pages that no sequence reaches
        table = torch.tensor([[3, 1, -9], [7, 7, 7], [0, 3, 4]], dtype=torch.int32)
        places = torch.tensor([18, 19, 20, 21, 22, 23, 6, *range(6), *range(18, 24)])
        k, v = (x.unflatten(0, (5, 6)).clone() for x in (k, v))
        k[2], v[2] = torch.nan, torch.nan
    else:
        k, v = k[:19], v[:19]

    def ours(q, k, v, qv):
        return attention_varlen(q, k, v, starts_q, starts_k, qv=qv, page_table=table, causal=True, return_lse=True)

    def oracle(q, k, v, qv, dtype=torch.float64):
        k, v = (x.flatten(0, -3)[places] for x in (k, v))
        return reference.attention_varlen(q, k, v, starts_q, starts_k, qv=qv, causal=True, dtype=dtype)

    given = (q, k, v, qv)
    assert_state(ours(*given), oracle(*given), oracle(*given, dtype=torch.float32))
    gradient_cases.check(ours, oracle, given, randn(10, 4, 8, seed=7), floors=[2e-5] * 4)


def test_compiled_code():
    q, k, v, qv = tensors(1, 9, 9, 12, 8)
    compiled = torch.compile(lambda q, k, v, qv: attention(q, k, v, qv=qv), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, qv), attention(q, k, v, qv=qv))


Q, K, V, QV = tensors(1, 5, 7, 12, 8)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qv": QV[..., :7]}, ValueError, r"qv must have shape \(1, 5, 4, 8\), got \(1, 5, 4, 7\)"),
        ({"qv": QV[:, :4]}, ValueError, "qv must have shape"),
        ({"qv": QV[:, :, :2]}, ValueError, "qv must have shape"),
        ({"qv": QV[0]}, ValueError, "qv must have 4 dimensions"),
        ({"qv": QV.half()}, ValueError, "qv must have q's dtype float32, got float16"),
        ({"qv": QV.to("meta")}, ValueError, "qv must be on cpu like q, got meta"),
        ({"qv": True}, TypeError, "qv must be a torch.Tensor, got bool"),
        ({"k": K[..., :11]}, ValueError, "k must have shape"),
        (
            dict(zip(("q", "k", "v", "qv"), tensors(1, 5, 7, 100, 512), strict=True)),
            NotImplementedError,
            "head_dim of q and qv together is 612, .* at most 576",
        ),
        (
            {"q": Q.to(FP8), "k": K.to(FP8), "v": V.to(FP8), "qv": QV.to(FP8)},
            NotImplementedError,
            "qv goes with no FP8 inputs.*; use bfloat16",
        ),
    ],
)
def test_bad_ones_are_named(changes, error, message):
    given = {"q": Q, "k": K, "v": V, "qv": QV, **changes}
    with pytest.raises(error, match=message):
        attention(**given)
    starts_q, starts_k = torch.tensor([0, 5]), torch.tensor([0, 7])
    packed = {name: x[0] if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with pytest.raises(error, match=message.replace(r"\(1, ", r"\(").replace("4 dim", "3 dim")):
        attention_varlen(**packed, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)


def test_the_scale_is_that_of_both_head_dimensions():
    got = partial(attention, Q, K, V, qv=QV)
    assert torch.allclose(got(), got(scale=20**-0.5))
    assert not torch.allclose(got(), got(scale=12**-0.5))
