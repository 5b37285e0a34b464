"""What the dense and packed calls of tilewise.compat.flash_attn refuse, by the argument's name."""

from __future__ import annotations

import math

import pytest
import torch
from flash_attn_cases import K, Q, V, starts_of

from tilewise.compat import flash_attn as fa

CU = starts_of([8, 8])


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be below 1"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p"),
        ({"dropout_p": None}, TypeError, "dropout_p"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"deterministic": None}, TypeError, "deterministic"),
        ({"return_attn_probs": 1}, TypeError, "return_attn_probs"),
        ({"window_size": 5}, TypeError, "window_size must be"),
        ({"window_size": (1, 2, 3)}, TypeError, "window_size must be"),
        ({"window_size": (1.5, 2)}, TypeError, "window_size must be an int"),
        ({"softcap": "x"}, TypeError, "softcap"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes must be"),
        ({"learnable_sink": torch.ones(3)}, ValueError, "learnable_sink must have shape"),
        ({"q": Q.tolist()}, TypeError, "q must be a torch.Tensor"),
        ({"q": Q[0]}, ValueError, "q must have 4 dimensions"),
        ({"k": K.half()}, ValueError, "k must have q's dtype float32, got float16"),
        ({"k": K[..., :8]}, ValueError, "k must have shape"),
        ({"q": Q[:, :, :3]}, ValueError, "multiple of k's 2 heads"),
        ({"q": Q.double(), "k": K.double(), "v": V.double()}, NotImplementedError, "q is float64"),
    ],
)
def test_refusals(changes, error, match):
    with pytest.raises(error, match=match):
        fa.flash_attn_func(**{"q": Q, "k": K, "v": V, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"dropout_p": 2}, ValueError, "dropout_p must be below 1"),
        ({"max_seqlen_q": 8.5}, TypeError, "max_seqlen_q"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k"),
        ({"cu_seqlens_q": [0, 8, 16]}, TypeError, "cu_seqlens_q"),
        ({"cu_seqlens_k": CU.float()}, ValueError, "cu_seqlens_k must be one of int32"),
        ({"cu_seqlens_k": CU + 1}, ValueError, "cu_seqlens_k must start with 0"),
        ({"cu_seqlens_k": CU * 2}, ValueError, "cu_seqlens_k must end with k's total of 16"),
        ({"q": Q}, ValueError, "q must have 3 dimensions"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, ValueError, "k must have 4 dimensions"),
        ({"block_table": torch.zeros(2, 1), "k": K, "v": V}, ValueError, "page_table must be one of int32"),
        ({"learnable_sink": 1.0}, TypeError, "learnable_sink"),
    ],
)
def test_varlen_refusals(changes, error, match):
    given = {"q": Q.flatten(0, 1), "k": K.flatten(0, 1), "v": V.flatten(0, 1), "cu_seqlens_q": CU, "cu_seqlens_k": CU}
    with pytest.raises(error, match=match):
        fa.flash_attn_varlen_func(**{**given, "max_seqlen_q": 8, "max_seqlen_k": 8, **changes})


def test_packed_refusals():
    with pytest.raises(ValueError, match="qkv must have shape"):
        fa.flash_attn_qkvpacked_func(torch.stack((Q, Q), 2))
    with pytest.raises(TypeError, match=r"kv must be a torch\.Tensor"):
        fa.flash_attn_kvpacked_func(Q, (K, V))
    with pytest.raises(ValueError, match="qkv must have 4 dimensions"):
        fa.flash_attn_varlen_qkvpacked_func(torch.stack((Q, Q, Q), 2), CU, 8)
    with pytest.raises(ValueError, match="dropout_p must be below 1"):
        fa.flash_attn_varlen_kvpacked_func(Q.flatten(0, 1), torch.stack((K, V), 2).flatten(0, 1), CU, CU, 8, 8, 1.0)
