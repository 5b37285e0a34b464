"""FlashMLA's calls over packed sequences: their signatures, values, gradients and refusals."""

from __future__ import annotations

import inspect

import pytest
import torch
from flash_attn_cases import starts_of
from oracle import assert_attention, randn

import tilewise
from tilewise.compat import flash_mla, flash_mla_varlen

COMMON = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "deterministic": False, "is_varlen": True,
}  # fmt: skip
SIGNATURES = {
    "flash_attn_varlen_func": [
        "q", "k", "v", "cu_seqlens_qo", "cu_seqlens_kv", "max_seqlen_qo", "max_seqlen_kv", *COMMON,
    ],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", "head_dim_qk", *COMMON],
    "flash_attn_varlen_kvpacked_func": [
        "q", "kv", "cu_seqlens_qo", "cu_seqlens_kv", "max_seqlen_qo", "max_seqlen_kv", "head_dim_qk", *COMMON,
    ],
}  # fmt: skip
QUERIES, KEYS = (65, 0, 1, 129), (63, 5, 0, 200)


@pytest.mark.parametrize("name", flash_mla_varlen.__all__)
def test_signatures(name):
    found = inspect.signature(getattr(flash_mla, name)).parameters
    assert list(found) == SIGNATURES[name]
    assert {n: p.default for n, p in found.items() if p.default is not p.empty} == COMMON


def packed(dtype=torch.float32):
    return (
        randn(sum(QUERIES), 4, 192, dtype=dtype, seed=1), randn(sum(KEYS), 2, 192, dtype=dtype, seed=2),
        randn(sum(KEYS), 2, 128, dtype=dtype, seed=3), starts_of(QUERIES), starts_of(KEYS), max(QUERIES), max(KEYS),
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients(causal):
    q, k, v, *starts = packed()
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse = flash_mla.flash_attn_varlen_func(*ours, *starts, softmax_scale=0.1, causal=causal)
    theirs = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = tilewise.attention_varlen(*theirs, *starts[:2], causal=causal, scale=0.1, return_lse=True)
    assert torch.equal(o, wanted[0])
    assert torch.equal(lse, wanted[1].T)
    one = [x[None, :n] for x, n in ((q, QUERIES[0]), (k, KEYS[0]), (v, KEYS[0]))]
    assert_attention((o[None, : QUERIES[0]], lse[None, : QUERIES[0]].mT), *one, causal=causal, scale=0.1)
    o.square().sum().backward()
    wanted[0].square().sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(ours, theirs, strict=True))
    both = flash_mla.flash_attn_varlen_kvpacked_func(
        q, torch.cat([k, v], -1), *starts, 192, softmax_scale=0.1, causal=causal
    )
    assert torch.equal(both[0], o)
    alike = flash_mla.flash_attn_varlen_func(k, k, v, *[starts[1]] * 2, *[starts[3]] * 2, causal=causal)
    one = flash_mla.flash_attn_varlen_qkvpacked_func(torch.cat([k, k, v], -1), starts[1], starts[3], 192, causal=causal)
    assert all(torch.equal(x, y) for x, y in zip(one, alike, strict=True))


def test_refusals():
    q, k, v, *starts = packed()
    for options, error, says in (
        ({"dropout_p": 0.1}, NotImplementedError, "dropout_p must be 0 here, got 0.1"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"is_varlen": None}, TypeError, "is_varlen must be True or False"),
        ({"max_seqlen_qo": -1}, ValueError, "max_seqlen_qo must be at least 0"),
        ({"cu_seqlens_kv": [0, 3]}, TypeError, "cu_seqlens_kv must be a torch.Tensor"),
        ({"k": k[..., :64]}, ValueError, "k must"),
    ):
        names = ("q", "k", "v", "cu_seqlens_qo", "cu_seqlens_kv", "max_seqlen_qo", "max_seqlen_kv")
        with pytest.raises(error, match=says):
            flash_mla.flash_attn_varlen_func(**{**dict(zip(names, (q, k, v, *starts), strict=True)), **options})
    with pytest.raises(ValueError, match="head_dim_qk must be at least 1 and at most 191, got 192"):
        flash_mla.flash_attn_varlen_kvpacked_func(q, k, *starts, 192)
    with pytest.raises(ValueError, match="head_dim_qk must be at least 1 and at most 95, got 96"):
        flash_mla.flash_attn_varlen_qkvpacked_func(q, starts[0], starts[2], 96)
