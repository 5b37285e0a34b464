"""The backward on a card: random problems by the tolerance rule, graphs, the same bits in turn, far addresses."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from backward_cases import dense, ends_of, packed, tree
from oracle import qkv, randn

from tilewise import BlockSchedule, attention
from tilewise.gpu import backward
from tilewise.gpu.backward import GradientCall
from tilewise.scores import Scores

pytestmark = pytest.mark.gpu
CUDA = "cuda"


def random_problem(seed: int, device: str) -> None:
    """A dense call, packed sequences or trees, with some of all options."""
    chance = random.Random(seed)
    head_dim, group = chance.choice([40, 64, 96, 128, 192, 256]), chance.choice([1, 2, 4])
    value_dim = {192: chance.choice([128, 192]), 64: chance.choice([64, 200])}.get(head_dim, head_dim)
    dtype = chance.choice([torch.bfloat16, torch.float16])
    options = chance.choice([{}, {"causal": True}, {"window": (chance.randrange(200), chance.randrange(60))}])
    if chance.random() < 0.3:
        options = {**options, "softcap": 5.0}
    rest = {"device": device, "deterministic": chance.random() < 0.3}
    kind = chance.choice(["dense", "dense", "schedule", "packed", "tree"])
    length = lambda: chance.randrange(1, 700)  # noqa: E731
    if kind == "packed":
        lengths = [[chance.choice([0, length()]) for _ in range(chance.randrange(1, 6))] + [length()] for _ in range(2)]
        count = min(map(len, lengths))
        sizes = (x[-count:] for x in lengths)
        rest["value_dim"] = value_dim
        packed(*sizes, 2 * group, 2, head_dim, dtype=dtype, with_lse=chance.random() < 0.5, **rest, **options)
    elif kind == "tree":
        branches = [(length(), *((chance.randrange(1, 200),) for _ in range(chance.randrange(4)))) for _ in range(3)]
        left = chance.choice([None, chance.randrange(300)])
        rest["value_dim"] = value_dim
        tree(ends_of((length(), *branches), (length(),)), 2 * group, 2, head_dim, dtype=dtype, left=left, **rest)
    else:
        seqlen_q, seqlen_k = length(), length()
        schedule = None
        if kind == "schedule":
            block_q, block_k = (chance.choice([16, 48, 64, 128]) for _ in range(2))
            kept = torch.rand(-(-seqlen_q // block_q), -(-seqlen_k // block_k)) < 0.5
            sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_q": block_q, "block_k": block_k}
            schedule = BlockSchedule.from_blocks(kept, **sizes)
        q, k, _ = qkv(2, seqlen_q, seqlen_k, 2 * group, 2, head_dim, dtype=dtype, seed=seed)
        v = randn(2, seqlen_k, 2, value_dim, dtype=dtype, seed=3 * seed + 2)
        dense(q, k, v, with_lse=chance.random() < 0.5, schedule=schedule, **rest, **options)


@pytest.mark.parametrize("first", range(0, 500, 50))
def test_random_problems(first):
    for seed in range(first, first + 50):
        torch.full((1 << 28,), float("nan"), device=CUDA)  # what the kernels' work space will be made of
        random_problem(seed, CUDA)


def problem(head_dim=128, heads=8, seqlen=1500, value_dim=None, **options):
    dims = head_dim, head_dim, value_dim or head_dim
    q, k, v = (torch.randn(2, seqlen, heads, d, device=CUDA, dtype=torch.bfloat16) for d in dims)
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    return GradientCall(q, k, v, o, lse, torch.randn_like(o), Scores((None, 0), scale=head_dim**-0.5), **options)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)])
def test_in_turn(head_dim, value_dim):
    call = problem(head_dim, value_dim=value_dim, deterministic=True)
    first = backward.gradients(call)
    for _ in range(10):
        assert all(torch.equal(*pair) for pair in zip(first[:3], backward.gradients(call)[:3], strict=True))


def test_graphs():
    """A captured call, replayed over other values."""
    call = problem(deterministic=True)
    backward.gradients(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward.gradients(call)
    for _ in range(3):
        call.d_o.normal_()
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(captured[:3], backward.gradients(call)[:3], strict=True))


def test_far_addresses():
    """Heads more than 2^31 elements apart."""
    call = problem(64, heads=2, seqlen=300, deterministic=True)
    apart = (1 << 31) + 8
    room = torch.empty(apart + 2 * 300 * 64 + 64, device=CUDA, dtype=torch.bfloat16)
    far = {}
    for name in ("q", "k", "v", "o", "d_o"):
        x = getattr(call, name)
        far[name] = room.as_strided(x.shape, (300 * 64, 64, apart, 1)).copy_(x)
        got = backward.gradients(replace(call, **{name: far[name]}))
        assert all(torch.equal(*pair) for pair in zip(got[:3], backward.gradients(call)[:3], strict=True))
