"""What torch asks of calls with gradients: compiled graphs, opcheck, checkpoints, torch.func, ranks that train."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from oracle import gradients, qkv, randn
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from tilewise import attention, attention_varlen, merge, shared_prefix_attention

OPS = torch.ops.tilewise
STARTS = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 6, 7, 20])


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.fixture
def fresh():
    torch._dynamo.reset()


def test_opcheck():
    """Forward and backward as torch sees them: schemas, fake kernels, autograd, AOT dispatch with symbolic sizes."""
    q, k, v = leaves(*qkv(2, 5, 7, 4, 2, 16))
    sinks, slopes = randn(4, seed=1).requires_grad_(), randn(4, seed=2).abs()
    opcheck(OPS.attention.default, (q, k, v), {"causal": True, "return_lse": True})
    opcheck(OPS.attention.default, (q, k, v, sinks, slopes), {"deterministic": True})
    q, k, v = (x[0] for x in leaves(*qkv(1, 9, 20, 4, 2, 16)))
    opcheck(OPS.attention_varlen.default, (q, k, v, *STARTS, None, sinks), {"window_left": 3, "return_lse": True})
    q, k, v, a, b = leaves(*qkv(4, 2, 3, 4, 2, 16), *(randn(2, 9, 2, 16, seed=n) for n in (1, 2)))
    opcheck(OPS.shared_prefix_attention.default, (q, k, v, sinks, [a, b], torch.tensor([9, 4, 3, 3, 3, 3])), {})


def test_operators_without_an_lse_make_it_again():
    q, k, v = leaves(*qkv(2, 5, 7, 4, 2, 16))
    got = torch.autograd.grad(OPS.attention(q, k, v, causal=True)[0].square().sum(), (q, k, v))
    assert_same(got, torch.autograd.grad(attention(q, k, v, causal=True).square().sum(), (q, k, v)))


def test_compiled(fresh):
    """One graph forward and one backward, whose gradients are those of the calls, through o and through the LSE."""

    def layer(q, k, v, sinks):
        o = attention(q * 2, k, v, causal=True, sinks=sinks, deterministic=True)
        packed = (o + 1).flatten(0, 1)[:9]
        p, lse = attention_varlen(packed, k.flatten(0, 1), v.flatten(0, 1), STARTS[0], STARTS[1], return_lse=True)
        return p.sum() + lse.sin().sum() + o.square().sum()

    inputs = leaves(*qkv(2, 10, 10, 4, 2, 16), randn(4, seed=5))
    got = torch.autograd.grad(torch.compile(layer, backend="aot_eager", fullgraph=True)(*inputs), inputs)
    for a, b in zip(got, torch.autograd.grad(layer(*inputs), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [None, [3, 1, 0, 2], torch.tensor([3, 1, 3, 2])], ids=["all", "list", "tensor"])
def test_shared_prefixes_compile(lengths, fresh):
    inputs = leaves(*qkv(4, 2, 3, 4, 2, 16), *(randn(2, 9, 2, 16, seed=n) for n in (1, 2)), randn(4, seed=3))

    def layer(q, k, v, a, b, sinks):
        given = {"lengths": lengths, "sinks": sinks, "return_lse": True}
        o, lse = shared_prefix_attention(q * 2, [(a, b, [9, 4])], k, v, **given)
        return o.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()

    got = torch.autograd.grad(torch.compile(layer, backend="aot_eager", fullgraph=True)(*inputs), inputs)
    assert_same(got, torch.autograd.grad(layer(*inputs), inputs))


def test_compiled_code_has_no_second_derivatives_and_none_of_slopes(fresh):
    q, k, v = leaves(*qkv(1, 5, 7, 4, 2, 16))
    (d_q,) = torch.autograd.grad(OPS.attention(q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        d_q.sum().backward()
    with pytest.raises(NotImplementedError, match="alibi_slopes have no gradients"):
        OPS.attention(q, k, v, None, torch.ones(4, requires_grad=True))


def test_checkpoints_and_autocast_change_nothing():
    q, k, v = qkv(1, 33, 40, 2, 1, 16)
    want = gradients(partial(attention, return_lse=True), (q, k, v), torch.ones_like(q))
    for reentrant in (False, True):
        inputs = leaves(q, k, v)
        checkpoint(attention, *inputs, use_reentrant=reentrant).sum().backward()
        assert_same([x.grad for x in inputs], want)
    inputs = leaves(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attention(*inputs).sum().backward()
    assert_same([x.grad for x in inputs], want)


def test_linear_layers_under_autocast():
    """They hand on bfloat16, and get gradients of it; their own are float32."""
    weight = randn(3 * 32, 16, seed=3).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = torch.nn.functional.linear(randn(2, 9, 16), weight).view(2, 9, 3, 2, 16).unbind(2)
        loss = attention(q, k, v, causal=True).float().square().sum()
    loss.backward()
    assert q.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    assert weight.grad.isfinite().all()


def test_func_grad_and_vjp():
    q, k, v = qkv(1, 33, 40, 2, 1, 16)
    want = gradients(partial(attention, return_lse=True), (q, k, v), torch.ones_like(q))
    assert torch.equal(torch.func.grad(lambda x: attention(x, k, v).sum())(q), want[0])
    o, pull = torch.func.vjp(attention, q, k, v)
    assert_same(pull(torch.ones_like(o)), want)


def test_gradients_add_up_and_graphs_can_be_kept():
    q, k, v = leaves(*qkv(1, 9, 12, 2, 1, 16))
    o = attention(q, k, v)
    o.sum().backward(retain_graph=True)
    once = q.grad.clone()
    o.sum().backward()
    assert torch.equal(q.grad, 2 * once)
    o = attention(q, k, v).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_the_same_bits_in_every_run():
    tensors = qkv(2, 130, 130, 4, 2, 16)
    for options in ({"causal": True}, {"softcap": 3.0}, {"window": (20, 0)}):
        call = partial(attention, return_lse=True, deterministic=True, **options)
        assert_same(*(gradients(call, tensors, randn(*tensors[0].shape, seed=4)) for _ in range(2)))


def test_functions_mean_in_the_backward_what_they_meant_in_the_forward():
    """Also where a lambda refers to a variable that has moved on; a tensor that was written to is refused."""
    q, k, v = leaves(*qkv(1, 20, 30, 2, 2, 8))
    want = [torch.autograd.grad(attention(q, k, v, window=(n, None)).sum(), q)[0] for n in (2, 9)]
    losses, n = [], 2
    near = lambda b, h, q, k: k >= q + 10 - n  # noqa: E731
    for n in (2, 9):  # noqa: B007
        losses.append(attention(q, k, v, mask=near).sum())
    for loss, expected in zip(losses, want, strict=True):
        torch.testing.assert_close(torch.autograd.grad(loss, q)[0], expected, rtol=1e-5, atol=1e-6)
    table = torch.ones(2)
    loss = attention(q, k, v, score=lambda s, b, h, q, k: s * table[h]).sum()
    table.add_(1)
    with pytest.raises(RuntimeError, match="was written to after the forward"):
        loss.backward()


def test_a_captured_tensor_of_inference_mode_is_named_as_such():
    q = torch.randn(1, 8, 1, 8, requires_grad=True)
    with torch.inference_mode():
        ids = torch.arange(8) // 3
    o = attention(q, q, q, mask=lambda b, h, q, k: ids[q] == ids[k])
    with pytest.raises(RuntimeError, match="inference_mode"):
        o.sum().backward()


def test_parts_merge_into_the_gradients_of_the_whole():
    """Attention over two halves of the keys, merged: through o and the LSE of both."""
    q, k, v = leaves(*qkv(2, 9, 20, 4, 2, 16))
    halves = [attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(0, 7), slice(7, 20))]
    o, lse = merge(*halves[0], *halves[1])
    whole = attention(q, k, v, return_lse=True)
    d_o, d_lse = randn(2, 9, 4, 16, seed=3), randn(2, 4, 9, seed=4)
    got, want = (torch.autograd.grad(x, (q, k, v), (d_o, d_lse)) for x in ((o, lse), whole))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_deterministic_is_a_flag():
    q, k, v = qkv(1, 5, 7, 4, 2, 16)
    for call in (
        lambda: attention(q, k, v, deterministic=1),
        lambda: attention_varlen(q[0], k[0], v[0], torch.tensor([0, 5]), torch.tensor([0, 7]), deterministic=1),
        lambda: shared_prefix_attention(q, [], k, v, deterministic=1),
    ):
        with pytest.raises(TypeError, match="deterministic"):
            call()


def test_ranks_train(tmp_path):
    """DDP and FSDP2 over two processes: each is left with the gradients of the whole batch."""
    words = [sys.executable, str(Path(__file__).with_name("gradient_ranks.py")), str(tmp_path)]
    told = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert len(list(tmp_path.glob("right-*"))) == 2, told.stdout[-2000:] + told.stderr[-6000:]
