"""Gradients of tilewise.compat.flash_attn against the oracle's in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from flash_attn_cases import OPTIONS, SLOPES, assert_grads, leaves, starts_of
from oracle import qkv, randn

from tilewise import reference
from tilewise.compat import flash_attn as fa
from tilewise.compat.bert_padding import pad_input, unpad_input


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("given", "meant"), OPTIONS)
def test_gradients(given, meant, dtype):
    q, k, v = qkv(2, 9, 12, 4, 2, 16, dtype=dtype)
    assert_grads(
        lambda *x: fa.flash_attn_func(*x, return_attn_probs=True, **given)[:2],
        (q, k, v),
        lambda *x, dtype: reference.attention(*x, dtype=dtype, **meant),
    )


def test_gradients_are_those_of_sdpa():
    tensors = qkv(2, 33, 33, 4, 2, 40)
    mine, torchs = leaves(*tensors), leaves(*tensors)
    weight = randn(2, 33, 4, 40, seed=9)
    fa.flash_attn_func(*mine, causal=True).backward(weight)
    q, k, v = (x.transpose(1, 2) for x in torchs)
    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).backward(weight)
    for a, b in zip(mine, torchs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_gradients_of_packed_tensors():
    q, k, v = qkv(2, 12, 12, 4, 4, 16)
    plain, (packed,), (queries, pair) = (
        leaves(q, k, v),
        leaves(torch.stack((q, k, v), 2)),
        leaves(q, torch.stack((k, v), 2)),
    )
    fa.flash_attn_func(*plain, causal=True).sum().backward()
    fa.flash_attn_qkvpacked_func(packed, causal=True).sum().backward()
    fa.flash_attn_kvpacked_func(queries, pair, causal=True).sum().backward()
    expected = [x.grad for x in plain]
    torch.testing.assert_close(packed.grad, torch.stack(expected, 2))
    torch.testing.assert_close(queries.grad, expected[0])
    torch.testing.assert_close(pair.grad, torch.stack(expected[1:], 2))


def test_gradients_of_the_sink_beside_slopes():
    """Slopes have none: flash_attn says nothing, and we say so."""
    q, k, v = qkv(2, 9, 12, 4, 2, 16)
    assert_grads(
        lambda q, k, v, sink: fa.flash_attn_func(
            q, k, v, causal=True, alibi_slopes=SLOPES, learnable_sink=sink, return_attn_probs=True
        )[:2],
        (q, k, v, randn(4, seed=5)),
        lambda q, k, v, sink, dtype: reference.attention(
            q, k, v, causal=True, alibi_slopes=SLOPES, sinks=sink, dtype=dtype
        ),
    )
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        fa.flash_attn_func(*leaves(q, k, v), alibi_slopes=SLOPES.clone().requires_grad_())


def test_gradients_of_rows_without_keys_are_zero():
    q, k, v = leaves(*qkv(1, 6, 2, 2, 1, 16))
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    (out.sum() + lse[:, :, 4:].sum()).backward()
    assert (q.grad[:, :4] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert q.grad[:, 5].abs().sum() > 0
    q, k, v = leaves(*qkv(1, 6, 0, 2, 1, 16))
    fa.flash_attn_func(q, k, v).sum().backward()
    assert (q.grad == 0).all()


@pytest.mark.parametrize(("heads_kv", "window"), [(6, (-1, -1)), (1, (-1, -1)), (2, (37, 12))])
@pytest.mark.parametrize("causal", [False, True])
def test_padded_batches_as_flash_attn_s_own_tests_train_them(causal, heads_kv, window):
    """Unpadded, attended to, padded again; each error of a gradient within three times that of torch in bfloat16."""
    q, k, v = qkv(2, 113, 203, 6, heads_kv, 40, dtype=torch.bfloat16)
    there_q, there_k = (torch.arange(n) < torch.tensor([[n], [n - 30]]) for n in (113, 203))
    d_o = randn(*q.shape, dtype=q.dtype, seed=7) * there_q[..., None, None]

    def ours(q, k, v):
        (q1, rows, cu_q, most_q, _), (k1, _, cu_k, most_k, _) = unpad_input(q, there_q), unpad_input(k, there_k)
        v1 = unpad_input(v, there_k)[0]
        o = fa.flash_attn_varlen_func(q1, k1, v1, cu_q, cu_k, most_q, most_k, causal=causal, window_size=window)
        return pad_input(o, rows, *q.shape[:2])

    def oracle(q, k, v, dtype):
        sides = tuple(None if side < 0 else side for side in window)
        parts = []
        for b, (n, m) in enumerate(((113, 203), (83, 173))):
            one = q[b : b + 1, :n], k[b : b + 1, :m], v[b : b + 1, :m]
            o = reference.attention(*one, causal=causal, window=sides, dtype=dtype)[0]
            parts.append(F.pad(o, (0, 0, 0, 0, 0, 113 - n)))
        return torch.cat(parts)

    got = torch.autograd.grad(ours(*(given := leaves(q, k, v))), given, d_o)
    exact, torchs = (
        torch.autograd.grad(oracle(*(given := leaves(q, k, v, dtype=dtype)), dtype), given, d_o.to(dtype))
        for dtype in (torch.float64, torch.bfloat16)
    )
    for mine, right, other in zip(got, exact, torchs, strict=True):
        assert (mine - right).abs().max() <= 3 * (other - right).abs().max()
    again = torch.autograd.grad(ours(*(given := leaves(q, k, v))), given, d_o)
    assert all(map(torch.equal, got, again))


def test_gradients_of_varlen():
    """Sequences with keys for every row, an empty one among them, rows of nobody at the end."""
    lengths_q, lengths_k = [1, 9, 0, 5], [3, 12, 4, 5]
    cu_q, cu_k = starts_of(lengths_q), starts_of(lengths_k)
    q, k, v = (randn(n + 2, h, 16, seed=s) for n, h, s in ((15, 4, 0), (24, 2, 1), (24, 2, 2)))

    def oracle(q, k, v, dtype):
        o = []
        for b, n in enumerate(lengths_q):
            rows, keys = slice(int(cu_q[b]), int(cu_q[b]) + n), slice(int(cu_k[b]), int(cu_k[b + 1]))
            o.append(reference.attention(q[None, rows], k[None, keys], v[None, keys], causal=True, dtype=dtype)[0][0])
        o = torch.cat((*o, o[0].new_zeros(2, 4, 16)))
        return o, o.new_zeros(1)

    def call(q, k, v):
        return fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 12, causal=True), q.new_zeros(1)

    assert_grads(call, (q, k, v), oracle)


def test_gradients_of_pages():
    """A page that two sequences share has the sum of both, and one twice in a sequence of all its uses."""
    q, k, v = randn(4, 4, 16), randn(5, 4, 2, 16, seed=1), randn(5, 4, 2, 16, seed=2)
    table = torch.tensor([[3, 1, 1], [3, 4, 99]], dtype=torch.int32)
    cu_q, cu_k = starts_of([3, 1]), starts_of([11, 6])

    def oracle(q, k, v, dtype):
        parts = []
        for b, (rows, n) in enumerate(((slice(0, 3), 11), (slice(3, 4), 6))):
            pages = table[b, : -(-n // 4)].long()
            keys, values = (x[pages].flatten(0, 1)[None, :n] for x in (k, v))
            parts.append(reference.attention(q[None, rows], keys, values, causal=True, dtype=dtype))
        return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    def call(q, k, v):
        return fa.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 3, 11, causal=True, block_table=table, return_attn_probs=True
        )[:2]

    assert_grads(call, (q, k, v), oracle)


def test_gradients_change_no_value_and_come_only_where_asked():
    q, k, v = qkv(2, 33, 40, 4, 2, 16, dtype=torch.bfloat16)
    plain = fa.flash_attn_func(q, k, v, causal=True)
    (wanted,) = leaves(q)
    out = fa.flash_attn_func(wanted, k, v, causal=True)
    assert torch.equal(out, plain)
    (twice,) = torch.autograd.grad(out.sum(), wanted, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        twice.sum().backward()
    out.sum().backward()
    assert wanted.grad is not None
    assert k.grad is None
    with torch.no_grad():
        assert not fa.flash_attn_func(wanted, k, v).requires_grad


def test_training_compiles_whole():
    torch._dynamo.reset()
    starts = starts_of([9, 0, 5])
    tensors = [randn(14, h, 16, seed=s) for h, s in ((4, 0), (2, 1), (2, 2))]

    def call(q, k, v):
        return fa.flash_attn_varlen_func(q, k, v, starts, starts, 9, 9, causal=True, deterministic=True)

    mine, eager = leaves(*tensors), leaves(*tensors)
    torch.compile(call, fullgraph=True, backend="aot_eager")(*mine).square().sum().backward()
    call(*eager).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, eager, strict=True))


def test_gradients_under_autocast_are_float32():
    tensors = qkv(1, 9, 9, 2, 2, 16)
    mine, plain = leaves(*tensors), leaves(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fa.flash_attn_func(*mine).sum().backward()
    fa.flash_attn_func(*plain).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, plain, strict=True))
