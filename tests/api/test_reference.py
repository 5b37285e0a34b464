"""The oracle is right for reasons of its own: torch's float64 SDPA, hand-made cases, the tiled loop's four mistakes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from oracle import qkv, randn

from tilewise import reference


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_equals_torch_in_float64(causal, heads):
    q, k, v = (x.double() for x in qkv(2, 33, 33, *heads, 16))
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    o, lse = reference.attention(q, k, v, causal=causal)
    assert torch.allclose(o, expected, atol=1e-12)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(heads[0] // heads[1], 2)) / 4
    if causal:
        scores = scores.masked_fill(torch.ones(33, 33).triu(1).bool(), -math.inf)
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-12)


def test_causal_and_window_align_bottom_right():
    seen = reference.visible(2, 4, causal=True)
    assert seen.tolist() == [[True, True, True, False], [True, True, True, True]]
    seen = reference.visible(3, 2, causal=True)
    assert seen.tolist() == [[False, False], [True, False], [True, True]]
    seen = reference.visible(4, 4, window=(1, 0))
    assert seen.tolist() == [[i - 1 <= j <= i for j in range(4)] for i in range(4)]


def test_alibi_bias_by_hand():
    q, k, v = qkv(1, 2, 3, 1, 1, 4)
    slope = 0.5
    scores = (q[0, :, 0].double() @ k[0, :, 0].double().T) / 2
    bias = torch.tensor([[-slope * abs(i + 3 - 2 - j) for j in range(3)] for i in range(2)])
    expected = torch.softmax(scores + bias, -1) @ v[0, :, 0].double()
    o, _ = reference.attention(q, k, v, alibi_slopes=torch.tensor([slope]))
    assert torch.allclose(o[0, :, 0], expected, atol=1e-12)


def test_sinks_and_softcap_by_hand():
    q, k, v = qkv(1, 2, 3, 1, 1, 4)
    scores = 3.0 * torch.tanh((q[0, :, 0].double() @ k[0, :, 0].double().T) / 2 / 3.0)
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + math.exp(0.7))
    o, lse = reference.attention(q, k, v, softcap=3.0, sinks=torch.tensor([0.7]))
    assert torch.allclose(o[0, :, 0], weights @ v[0, :, 0].double(), atol=1e-6)
    assert torch.allclose(lse[0, 0], (scores.exp().sum(-1) + math.exp(0.7)).log(), atol=1e-6)


@pytest.mark.parametrize(("nq", "nk"), [(64, 64), (37, 70), (70, 37), (1, 5), (16, 16)])
@pytest.mark.parametrize("causal", [False, True])
def test_tiled_loop(nq, nk, causal):
    """Ragged tiles; P is not the running sum; the old maximum inside the loop; divided once; LSE = m + log l."""
    q, k, v = qkv(2, nq, nk, 3, 3, 24, size=4.0)
    o, lse = reference.tiled_attention(q, k, v, causal=causal)
    exact = reference.attention(q, k, v, causal=causal)
    assert torch.allclose(o.double(), exact[0], atol=1e-5)
    assert torch.allclose(lse.double(), exact[1], atol=1e-5)


@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_tiled_loop_starts_its_maximum_at_minus_infinity(level):
    q, k, v = torch.ones(1, 3, 1, 4), torch.full((1, 40, 1, 4), level / 2), randn(1, 40, 1, 4)
    o, lse = reference.tiled_attention(q, k, v)
    assert torch.allclose(o, v.mean(1, keepdim=True).expand_as(o), atol=1e-5)
    assert torch.allclose(lse, torch.tensor(level + math.log(40.0)), atol=1e-2)


def test_judge_sees_a_single_wrong_element():
    """Not a mean: one outlier among many right values is a failure."""
    exact = randn(1, 500, 8, 64).double()
    honest = exact.bfloat16()
    assert reference.judge(honest, exact, honest).ok
    wrong = honest.clone()
    wrong[0, 250, 3, 17] += 0.1
    verdict = reference.judge(wrong, exact, honest)
    assert not verdict.ok
    assert verdict.error > verdict.allowed


@pytest.mark.parametrize("value", [float("nan"), math.inf, -math.inf])
def test_judge_wants_nan_and_infinity_in_the_same_places(value):
    exact = randn(4, 4).double()
    result = exact.float()
    result[1, 1] = value
    assert not reference.judge(result, exact, exact.float()).ok
    exact[1, 1] = value
    assert reference.judge(result, exact, result).ok
    result[1, 1] = 0.0
    assert not reference.judge(result, exact, exact.float()).ok


def test_judge_refuses_another_shape():
    assert "shape" in reference.judge(torch.zeros(3), torch.zeros(4), torch.zeros(4)).reason


def test_judge_refuses_what_is_thrice_as_wrong_as_torch():
    exact = randn(10_000).double()
    honest = exact.half()
    error = (honest.double() - exact).abs().max()
    for times, ok in ((1.9, True), (3.5, False)):
        assert reference.judge((exact + times * error).float(), exact, honest).ok is ok
