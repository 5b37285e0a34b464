"""tilewise.distributed on a card: a group of one over nccl, and what the ranks of a larger one would compute."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed_cases import PROBLEMS, by_ranks, decode_case, sequence_case
from oracle import assert_attention, qkv, randn

from tilewise import attention
from tilewise import distributed as tw
from tilewise.distributed.peers import Peers

pytestmark = pytest.mark.gpu
LAYOUTS, METHODS = ("zigzag", "contiguous"), ("ring", "all_gather")
CARD = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    """A process group of this process only."""
    torch.cuda.set_device(CARD)
    store = dist.FileStore(str(tmp_path_factory.mktemp("nccl") / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=CARD)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_group_of_one(name, layout):
    for timeout in (None, 30):
        for method in METHODS:
            options = {"method": method, "timeout": timeout, "device": CARD}
            sequence_case(tw.context_attention, PROBLEMS[name], None, layout, with_seqlen=timeout is None, **options)
        sequence_case(tw.head_attention, PROBLEMS[name], None, layout, timeout=timeout, device=CARD)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_decode_in_a_group_of_one(kv_format, tokens):
    decode_case(None, "in order", kv_format, torch.bfloat16, tokens, device=CARD, sinks=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 2049, 2049, 8, 2, 128), {"causal": True}),
        ((2, 1000, 1000, 4, 4, 64), {"causal": True, "window": (300, 0)}),
        ((1, 700, 1500, 4, 1, 96), {"causal": True, "softcap": 20.0}),
        ((1, 900, 500, 4, 2, 40), {"causal": True, "sinks": True}),  # rows without keys
        ((1, 999, 999, 4, 2, 128), {"window": (100, 57)}),
        ((1, 5, 5, 4, 2, 64), {"causal": True}),  # fewer positions than chunks
    ],
)
def test_what_ranks_compute(sizes, options, method, layout):
    """Seven ranks one after the other, their states merged on the card; nothing makes the CPU wait."""
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = qkv(*sizes, dtype=dtype)
        options = {**options, "sinks": randn(sizes[3], seed=7)} if "sinks" in options else options
        there = {name: x.to(CARD) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        there |= {"layout": layout, "method": method, "scale": sizes[5] ** -0.5}
        on_card = [x.to(CARD) for x in (q, k, v)]
        by_ranks(*on_card, 7, **there)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = by_ranks(*on_card, 7, **there)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_attention(tuple(x.cpu() for x in got), q, k, v, **options)


@pytest.mark.parametrize("method", METHODS)
def test_with_seqlen_nothing_waits(method):
    q, k, v = (x.to(CARD) for x in qkv(1, 512, 512, 4, 2, 64, dtype=torch.bfloat16))
    options = {"seqlen": 512, "causal": True, "method": method, "return_lse": True}
    expected = tw.context_attention(q, k, v, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = tw.context_attention(q, k, v, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("call", [tw.context_attention, tw.head_attention])
def test_gradients_of_one_rank_are_those_of_attention(call):
    leaves = [x.to(CARD).requires_grad_() for x in qkv(1, 300, 300, 4, 2, 64, dtype=torch.bfloat16)]
    d_o = randn(1, 300, 4, 64).to(CARD, torch.bfloat16)
    got = torch.autograd.grad(call(*leaves, causal=True, seqlen=300), leaves, d_o)
    for mine, whole in zip(got, torch.autograd.grad(attention(*leaves, causal=True), leaves, d_o), strict=True):
        torch.testing.assert_close(mine, whole, atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("timeout", [None, 30])
def test_a_rank_sends_to_itself(timeout):
    """What a ring does at each step, over nccl: both directions in one batch, waited for as one."""
    peers = Peers("a test", None, timeout, CARD)
    sent = torch.arange(1 << 20, device=CARD).to(torch.uint8)
    found = torch.zeros_like(sent)
    peers.start("bytes", (sent, 0), (found, 0)).wait()
    assert torch.equal(found, sent)


def test_tensors_that_the_group_cannot_move():
    with pytest.raises(ValueError, match=r"group must have a backend for cpu tensors \(gloo\)"):
        tw.context_attention(*qkv(1, 4, 4, 2, 1, 16))
    with pytest.raises(NotImplementedError, match="head_dim"):
        tw.context_attention(*(x.to(CARD) for x in qkv(1, 4, 4, 2, 1, 600)))
