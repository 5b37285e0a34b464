"""Dropout of tilewise.compat.flash_attn: what S_dmask says, and that out and its gradients are those of that mask."""

from __future__ import annotations

import math

import pytest
import torch
from flash_attn_cases import INF, SLOPES, by_hand, leaves, lse_of, normalised, paged, scores_of, starts_of
from oracle import qkv, randn

from tilewise.compat import flash_attn as fa

P = 0.17
WIDTHS = {16: 128, 32: 128, 40: 64, 96: 64, 111: 32, 128: 32, 160: 64}  # keys of a block, by head_dim

CASES = [
    (113, 203, 32, {"causal": True}, {"causal": True}),
    (1, 65, 16, {}, {}),
    (63, 300, 40, {"window_size": (37, 12)}, {"window": (37, 12)}),
    (129, 127, 96, {"causal": True}, {"causal": True}),  # rows without keys
    (65, 129, 111, {"alibi_slopes": SLOPES}, {"slopes": SLOPES}),
    (7, 1, 160, {"alibi_slopes": SLOPES[0], "causal": True}, {"slopes": SLOPES[0], "causal": True}),
    (33, 129, 128, {"softcap": 1.5, "learnable_sink": randn(4, seed=5)}, {"softcap": 1.5}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "keys", "head_dim", "given", "meant"), CASES)
def test_weights_and_signs(rows, keys, head_dim, given, meant, dtype):
    """As flash_attn's own tests read S_dmask: weights that normalise to the softmax's, and the mask of out."""
    q, k, v = qkv(2, rows, keys, 4, 2, head_dim, dtype=dtype)
    torch.manual_seed(5)
    out, lse, probs = fa.flash_attn_func(q, k, v, dropout_p=P, return_attn_probs=True, **given)
    assert probs.shape == (2, 4, -(-rows // 128) * 128, -(-keys // 128) * 128)
    assert probs.dtype == dtype
    assert not probs.requires_grad
    scores = scores_of(q, k, **meant)
    rest = probs.clone()
    rest[:, :, :rows, :keys] = 0
    assert rest.eq(0).all()
    assert not rest.signbit()[:, :, rows:].any()
    probs = probs[:, :, :rows, :keys]
    assert probs.masked_select(scores == -INF).eq(0).all()
    weights = normalised(probs, scores, WIDTHS[head_dim])
    ulp = torch.finfo(dtype).eps
    right = (scores - lse_of(scores)).exp()
    torch.testing.assert_close(weights, right, rtol=40 * ulp if dtype == torch.float32 else ulp, atol=ulp / 8)
    sink = given.get("learnable_sink")
    torch.testing.assert_close(lse.double(), lse_of(scores, sink)[..., 0], atol=1e-5, rtol=1e-5)
    exact = by_hand(P, ~probs.signbit(), v, scores, sink)
    torch.testing.assert_close(out.double(), exact, atol=max(1e-5, ulp), rtol=max(1e-5, ulp))
    torch.manual_seed(5)
    assert torch.equal(fa.flash_attn_func(q, k, v, dropout_p=P, **given), out)


def test_as_many_as_asked_for_and_gradients_of_that_mask():
    given = leaves(*qkv(2, 113, 203, 4, 2, 32))
    out, _, probs = fa.flash_attn_func(*given, dropout_p=P, causal=True, return_attn_probs=True)
    kept = ~probs[:, :, :113, :203].signbit()
    assert abs(kept.double().mean().item() - (1 - P)) < 0.01
    wide = leaves(*given, dtype=torch.float64)
    exact = by_hand(P, kept, wide[2], scores_of(*wide[:2], causal=True))
    weight = randn(*out.shape, seed=9)
    grads = torch.autograd.grad(exact, wide, weight.double())
    for mine, right in zip(torch.autograd.grad(out, given, weight), grads, strict=True):
        torch.testing.assert_close(mine.double(), right, atol=1e-5, rtol=1e-5)


def test_signs_tell_what_was_dropped_of_weights_that_are_zero():
    """Logits of ±1e4: one weight of a row is 1 and the others nothing, and signbit() knows all of them."""
    q, k, v = qkv(1, 64, 200, 2, 2, 32)
    out, _, probs = fa.flash_attn_func(q * 1e4, k, v, dropout_p=0.5, return_attn_probs=True)
    dropped = probs[:, :, :64, :200].signbit()
    assert abs(dropped.double().mean().item() - 0.5) < 0.02
    assert probs.isfinite().all()
    largest = scores_of(q * 1e4, k).argmax(-1, keepdim=True)
    gone = dropped.gather(-1, largest)[..., 0].transpose(1, 2)
    assert torch.equal(out.eq(0).all(-1), gone)


@pytest.mark.parametrize("page_size", [None, 4])
def test_packed_sequences(page_size):
    """Each alone, an empty one among them, rows of nobody, which are NaN, behind the last."""
    lengths_q, lengths_k = [13, 0, 7, 1], [17, 5, 130, 0]
    q, k, v = (
        randn(sum(n) + 2, h, 16, seed=s) for n, h, s in ((lengths_q, 4, 0), (lengths_k, 2, 1), (lengths_k, 2, 2))
    )
    for x in (q, k, v):
        x[-2:] = math.nan
    slopes = randn(4, 4, seed=9).abs()
    starts, table = (starts_of(lengths_q), starts_of(lengths_k)), None
    keys, values = k, v
    if page_size is not None:
        keys, values, table = paged(k[:-2], v[:-2], lengths_k, page_size)
    options = {"causal": True, "alibi_slopes": slopes, "block_table": table}
    out, _, probs = fa.flash_attn_varlen_func(
        q, keys, values, *starts, 13, 130, dropout_p=P, return_attn_probs=True, **options
    )
    assert probs.shape == (4, 4, 128, 256)
    rest = probs.clone()
    for b, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rest[b, :, :n, :m] = 0
        if not n or not m:
            continue
        rows, those = slice(starts[0][b], starts[0][b + 1]), slice(starts[1][b], starts[1][b + 1])
        scores = scores_of(q[None, rows], k[None, those], causal=True, slopes=slopes[b])
        torch.testing.assert_close(
            normalised(probs[b : b + 1, :, :n, :m], scores, 128), (scores - lse_of(scores)).exp()
        )
        exact = by_hand(P, ~probs[b, :, :n, :m].signbit(), v[None, those], scores)
        torch.testing.assert_close(out[rows].double(), exact[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(rest, torch.zeros_like(rest))


def test_lengths_that_the_caller_says_are_those_of_the_result():
    """Longer than any sequence, as flash_attn has it; what is said too short is not believed."""
    q, k, v = (randn(20, h, 16, seed=s) for h, s in ((4, 0), (2, 1), (2, 2)))
    starts = starts_of([13, 7])
    for said, size in ((13, 128), (129, 256), (torch.tensor(300), 384), (1, 128)):
        probs = fa.flash_attn_varlen_func(q, k, v, starts, starts, said, said, dropout_p=P, return_attn_probs=True)[2]
        assert probs.shape == (2, 4, size, size)
        assert probs[0, :, :13, :13].ne(0).all()
    packed = torch.stack((q[:, :2], k, v), 1)
    assert fa.flash_attn_varlen_qkvpacked_func(packed, starts, 200, P, return_attn_probs=True)[2].shape[-1] == 256
    probs = fa.flash_attn_varlen_kvpacked_func(q, packed[:, 1:], starts, starts, 13, 200, P, return_attn_probs=True)[2]
    assert probs.shape == (2, 4, 128, 256)


def test_no_rows_and_no_keys():
    for rows, keys in ((0, 5), (5, 0)):
        probs = fa.flash_attn_func(*qkv(2, rows, keys, 4, 2, 16), dropout_p=P, return_attn_probs=True)[2]
        assert probs.shape == (2, 4, 128 * (rows > 0), 128 * (keys > 0))
        assert probs.eq(0).all()


def test_many_rows_are_taken_in_strips(monkeypatch):
    q, k, v = qkv(2, 65, 70, 4, 2, 16)
    given = {"dropout_p": P, "causal": True, "window_size": (20, 0), "alibi_slopes": SLOPES, "return_attn_probs": True}
    torch.manual_seed(3)
    whole = fa.flash_attn_func(q, k, v, **given)[2]
    monkeypatch.setattr("tilewise.compat.dropped.SCORES_PER_TILE", 4 * 70 * 9)
    torch.manual_seed(3)
    torch.testing.assert_close(fa.flash_attn_func(q, k, v, **given)[2], whole)


def test_weights_under_autocast_are_those_without():
    q, k, v = qkv(1, 33, 40, 2, 2, 32)
    torch.manual_seed(3)
    plain = fa.flash_attn_func(q, k, v, dropout_p=P, return_attn_probs=True)[2]
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fa.flash_attn_func(q, k, v, dropout_p=P, return_attn_probs=True)[2], plain)
