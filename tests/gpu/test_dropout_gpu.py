"""Dropout by kernels on a card: the CPU's mask, gradients, random problems, no waits, graphs, memory at 16k tokens."""

from __future__ import annotations

import random

import pytest
import torch
from dropout_cases import GIVEN, SEED, assert_kept, dense, packed
from oracle import qkv, randn

from tilewise import attention
from tilewise.integrations.sdpa import explain, sdpa

pytestmark = pytest.mark.gpu
CUDA = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (128, BF16), (256, FP16), (64, FP32), (128, FP32)])
def test_the_mask_is_the_cpus(head_dim, dtype):
    assert_kept([21, 0, 167, 300], [37, 5, 350, 129], 3, head_dim, dtype, CUDA)


@pytest.mark.parametrize("head_dim", [40, 64, 128, 192])
def test_dense(head_dim):
    dense(*qkv(2, 300, 333, 4, 2, head_dim, dtype=BF16), randn(4, seed=5), device=CUDA, causal=True)
    slopes = torch.tensor([0.1, 0.3, 0.02, 0.5])
    bent = {"softcap": 2.0, "alibi_slopes": slopes, "window": (70, 3)}
    dense(*qkv(2, 129, 65, 4, 2, head_dim, dtype=BF16), device=CUDA, deterministic=True, **bent)


def random_problem(seed: int) -> None:
    chance = random.Random(seed)
    head_dim, group = chance.choice([40, 64, 96, 128, 192, 256]), chance.choice([1, 2, 4])
    options = chance.choice([{}, {"causal": True}, {"window": (chance.randrange(200), chance.randrange(60))}])
    if chance.random() < 0.3:
        options = {**options, "softcap": 5.0}
    if chance.random() < 0.3:
        options = {**options, "alibi_slopes": randn(2 * group, seed=seed).abs()}
    options |= {"dropout_p": chance.choice([0.1, 0.5, 0.8]), "dropout_seed": torch.tensor(chance.getrandbits(62))}
    options |= {"deterministic": chance.random() < 0.3, "device": CUDA}
    dtype = chance.choice([BF16, FP16, FP32])
    if chance.random() < 0.5:
        lengths = [[chance.choice([0, chance.randrange(1, 500)]) for _ in range(3)] + [90] for _ in range(2)]
        packed(*lengths, 2 * group, 2, head_dim, dtype, **options)
    else:
        lengths = [chance.randrange(40, 700) for _ in range(2)]
        dense(*qkv(2, *lengths, 2 * group, 2, head_dim, dtype=dtype, seed=seed), **options)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_problems(first):
    for seed in range(first, first + 20):
        torch.full((1 << 28,), float("nan"), device=CUDA)  # what the kernels' work space will be made of
        random_problem(seed)


def test_16k_tokens_take_no_more_memory_than_their_tensors():
    """The weights of one head alone would be 512 MB."""
    q, k, v = (torch.randn(1, 16384, 16, 64, dtype=BF16, device=CUDA, requires_grad=True) for _ in range(3))
    d_o = torch.randn_like(q)
    attention(q, k, v, causal=True, dropout_p=0.1).backward(d_o)  # compiled, and the gradients' memory is there
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(q, k, v, causal=True, dropout_p=0.1).backward(d_o)
    assert torch.cuda.max_memory_allocated() - before < 12 * q.numel() * q.element_size()


def test_nothing_waits_for_the_seed():
    q, k, v = (x.to(CUDA).requires_grad_() for x in qkv(1, 200, 200, 4, 2, 64, dtype=BF16))
    call = lambda **given: attention(q, k, v, dropout_p=0.3, causal=True, **given)  # noqa: E731
    there = SEED.to(CUDA)
    want = call(dropout_seed=there)
    want.sum().backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        given, filled, drawn = call(dropout_seed=there), call(dropout_seed=SEED), call()
        drawn.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(given, want)
    assert torch.equal(filled, want)
    assert not torch.equal(drawn, want)


def test_a_graph_draws_anew_in_each_replay():
    q, k, v = (x.to(CUDA).requires_grad_() for x in qkv(1, 200, 200, 4, 2, 64, dtype=BF16))
    step = lambda: torch.autograd.grad(attention(q, k, v, dropout_p=0.3).sum(), (q, k, v))[2]  # noqa: E731
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d_v = step()
    found = []
    for _ in range(2):
        graph.replay()
        found.append(d_v.clone())
    assert all(x.isfinite().all() for x in found)
    assert not torch.equal(*found)


def test_torch_and_sdpa():
    """The same bits forward in every run, through sdpa too, whose kernel `explain` names."""
    q, k, v = (x.to(CUDA) for x in qkv(2, 200, 200, 4, 4, 64, dtype=BF16))
    torch.manual_seed(3)
    want = attention(q, k, v, dropout_p=0.3)
    torch.manual_seed(3)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(sdpa(*heads_first, dropout_p=0.3).transpose(1, 2), want)
    assert "forward_mma" in explain(*heads_first, dropout_p=0.3).kernel
    mask = lambda b, h, q, k: q >= k  # noqa: E731
    given = {**GIVEN, "dropout_seed": SEED.to(CUDA)}
    slow, fast = (attention(q, k, v, **given, **x) for x in ({"mask": mask}, {"causal": True}))
    torch.testing.assert_close(slow, fast, rtol=2e-2, atol=2e-2)
