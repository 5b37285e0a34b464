"""Gradients of the public calls on a card: by the tolerance rule, captured, compiled, the same bits, far addresses."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from gradient_cases import check, check_dense
from oracle import gradients, qkv, randn

from tilewise import BlockSchedule, attention, attention_varlen, reference, shared_prefix_attention

pytestmark = pytest.mark.gpu
CUDA = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def problem(*sizes, dtype=BF16, seed=0):
    return [x.to(CUDA) for x in qkv(*sizes, dtype=dtype, seed=seed)]


def leaves(*sizes, **given):
    return [x.requires_grad_() for x in problem(*sizes, **given)]


OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (70, 3)},
    "softcap": {"softcap": 2.0, "causal": True},
    "mask": {"mask": lambda b, h, q, k: (q + k + h) % 3 != 0},
    "score": {"score": lambda s, b, h, q, k: 3 * torch.tanh(s) - 0.01 * (q - k)},
}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_head_dims(head_dim, dtype):
    check_dense(*problem(2, 300, 333, 4, 2, head_dim, dtype=dtype), randn(4, seed=5).to(CUDA), causal=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    for deterministic in (False, True):
        check_dense(*problem(2, 300, 333, 4, 2, 64), deterministic=deterministic, **OPTIONS[name])


def test_schedules_and_slopes():
    schedule = BlockSchedule.random(300, 333, block_q=64, block_k=64, sparsity=0.5, seed=1)
    q, k, v = problem(1, 300, 333, 4, 2, 64)
    ours = lambda q, k, v: attention(q, k, v, schedule=schedule.to(CUDA), causal=True, return_lse=True)  # noqa: E731
    oracle = lambda q, k, v, **more: reference.attention(q, k, v, schedule=schedule, causal=True, **more)  # noqa: E731
    check(ours, oracle, (q, k, v), randn(1, 300, 4, 64, dtype=BF16, seed=7).to(CUDA))
    check_dense(q, k, v, alibi_slopes=torch.tensor([0.1, 0.3, 0.02, 0.5], device=CUDA), causal=True)


def test_500_random_problems():
    chance = random.Random(0)
    for number in range(500):
        group, heads = chance.choice([(1, 2), (2, 2), (4, 1), (3, 1)])
        options = {"causal": chance.random() < 0.5, "softcap": chance.choice([0.0, 0.0, 2.0])}
        if chance.random() < 0.3:
            options["window"] = chance.randrange(200), chance.choice([None, 0, 30])
        if chance.random() < 0.3:
            options["alibi_slopes"] = randn(group * heads, seed=number).abs().to(CUDA)
        sinks = randn(group * heads, seed=number).to(CUDA) if chance.random() < 0.3 else None
        sizes = chance.choice([1, 2]), chance.randrange(1, 600), chance.randrange(1, 600), group * heads, heads
        tensors = problem(*sizes, chance.choice([64, 128]), dtype=chance.choice([BF16, FP16]), seed=number)
        flags = {"with_lse": chance.random() < 0.5, "deterministic": chance.random() < 0.3}
        check_dense(*tensors, sinks, **flags, **options)


@pytest.mark.parametrize("where", ["cpu", CUDA])
def test_packed(where):
    starts = torch.tensor([0, 70, 70, 75, 605]), torch.tensor([0, 90, 120, 120, 755])
    tensors = [x[0] for x in problem(1, 605, 755, 4, 2, 128)]
    call = lambda starts, q, k, v: attention_varlen(q, k, v, *starts, causal=True, return_lse=True)  # noqa: E731
    d_o = randn(605, 4, 128, dtype=BF16, seed=4)
    got = gradients(partial(call, [x.to(where) for x in starts]), tensors, d_o.to(CUDA))
    assert_like_the_cpu(got, gradients(partial(call, starts), [x.cpu().float() for x in tensors], d_o.float()))


def assert_like_the_cpu(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu().float(), b, rtol=0.02, atol=0.02 * b.abs().max().item())


def test_shared_prefixes():
    tensors = [*problem(4, 40, 50, 4, 2, 64), *(randn(1, 300, 2, 64, dtype=BF16, seed=n).to(CUDA) for n in (1, 2))]
    call = lambda q, k, v, a, b: shared_prefix_attention(q, [(a, b)], k, v, lengths=[50, 41, 40, 45], return_lse=True)  # noqa: E731
    got = gradients(call, tensors, d_o := randn(4, 40, 4, 64, dtype=BF16, seed=4).to(CUDA))
    assert_like_the_cpu(got, gradients(call, [x.cpu().float() for x in tensors], d_o.cpu().float()))


def test_dropout_is_that_of_the_cpu():
    tensors = problem(1, 200, 150, 4, 2, 64, dtype=FP32)
    call = partial(attention, dropout_p=0.3, return_lse=True)
    with torch.autocast(CUDA, dtype=BF16):
        got = gradients(partial(call, dropout_seed=torch.tensor(5, device=CUDA)), tensors, torch.ones_like(tensors[0]))
    on_cpu = [x.cpu() for x in tensors]
    want = gradients(partial(call, dropout_seed=torch.tensor(5)), on_cpu, torch.ones_like(on_cpu[0]))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-3)


def test_the_same_bits_captured_and_compiled():
    q, k, v = leaves(2, 2000, 2000, 8, 8, 64)
    step = lambda q, k, v: attention(q, k, v, causal=True, deterministic=True).float().sum()  # noqa: E731
    want = torch.autograd.grad(step(q, k, v), (q, k, v))
    for _ in range(3):
        assert all(map(torch.equal, torch.autograd.grad(step(q, k, v), (q, k, v)), want))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, torch.autograd.grad(compiled(q, k, v), (q, k, v)), want))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(step(q, k, v), (q, k, v))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(step(q, k, v), (q, k, v))
    for x in got:
        x.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, want))


def test_offsets_beyond_32_bits():
    """Rows 2^22 elements apart: inputs and dO of a tensor of 3.8 · 10^9."""
    wide = torch.empty(3, 300, 1 << 22, device=CUDA, dtype=BF16)[..., :256].unflatten(-1, (4, 64))
    wide.copy_(randn(3, 300, 4, 64))
    far, d_o = [x[None].detach().requires_grad_() for x in wide.unbind(0)], wide[1:2]
    near = [x.detach().contiguous().requires_grad_() for x in far]
    call = partial(attention, causal=True, deterministic=True)
    got, want = (
        torch.autograd.grad(call(*x), x, y) for x, y in ((far, d_o), (near, d_o.contiguous()))
    )  # fmt: skip
    assert all(map(torch.equal, got, want))
