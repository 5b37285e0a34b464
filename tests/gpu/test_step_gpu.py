"""attend() on a card: every format against the oracle, both streams, graphs, and the same bits in any order."""

from __future__ import annotations

import pytest
import torch
from decode_tree_cases import grow, make_cache
from oracle import poison, randn
from step_cases import assert_step, judge_step, mixed

from tilewise import PrefixCache, attend, attention_varlen, decode, plan_decode, plan_step, renew_plan
from tilewise.gpu import beside

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = [("bf16", BF16), ("fp16", FP16), ("fp32", FP32), ("fp32", BF16), ("fp8", BF16), ("int8", FP16), ("int4", BF16),
         ("int4", FP32), ("bf16", FP16)]  # fmt: skip


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("kv_format", "dtype"), KINDS)
def test_formats(kv_format, dtype, share):
    cache, prefill, seqs = mixed(kv_format=kv_format, head_dim=128, page_size=16, device="cuda")
    assert_step(cache, prefill, seqs, dtype=dtype, share=share)
    assert_step(PrefixCache(cache), prefill, [], dtype=dtype, share=share, sinks=randn(4, seed=3).cuda())


@pytest.mark.parametrize("head_dim", [64, 80, 96, 192, 200, 256])
@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_head_dims_and_pages(head_dim, page_size):
    cache, prefill, seqs = mixed(kv_format="bf16", head_dim=head_dim, page_size=page_size, device="cuda")
    for share in (False, True):
        assert_step(cache, prefill, seqs, dtype=BF16, share=share)


@pytest.mark.parametrize("options", [{"window": (9, 0)}, {"softcap": 3.0}, {"scale": -0.2}])
def test_options(options):
    cache, prefill, seqs = mixed(kv_format="bf16", head_dim=64, page_size=16, device="cuda")
    for share in (False, True):
        assert_step(cache, prefill, seqs, dtype=BF16, share=share, **options)


def large(kv_format="bf16"):
    """Two chunks of 300 and 16 decodes over 2000 shared tokens -> cache, prefill, decode."""
    cache = make_cache(kv_format=kv_format, head_dim=128, page_size=16, pages=900, kv_heads=8, device="cuda")
    root = cache.allocate()
    grow(cache, [root], [2000], seed=1)
    seqs = [root, *(cache.fork(root) for _ in range(17))]
    grow(cache, seqs, [300, 300, *range(20, 36)], seed=2)
    return cache, [(seq, 300) for seq in seqs[:2]], seqs[2:]


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_any_order_gives_the_same_bits(kv_format, monkeypatch):
    cache, prefill, seqs = large(kv_format)
    plan = plan_step(cache, prefill, seqs, num_heads=32)
    q = randn(plan.rows, 32, 128, dtype=BF16).cuda()
    states = []
    for order in ("apart", "decodes first", "chunks first"):
        monkeypatch.setattr(beside, "ORDER", order)
        states += [attend(q, cache, 0, plan, return_lse=True, out=poison(q)) for _ in range(5)]
    for o, lse in states[1:]:
        assert torch.equal(o, states[0][0])
        assert torch.equal(lse, states[0][1])
    judge_step(q, *states[0], cache, 0, plan)


def test_the_bits_of_separate_calls():
    cache, prefill, seqs = large()
    plan = plan_step(cache, prefill, seqs, num_heads=32, share_prefix=False)
    q = randn(plan.rows, 32, 128, dtype=BF16).cuda()
    o = attend(q, cache, 0, plan)
    (k,), (v,) = cache.parts(0)
    chunks = [seq for seq, _ in prefill]
    starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32).cuda() for n in (300, 2300)]
    packed = attention_varlen(q[:600], k, v, *starts, causal=True, page_table=cache.page_table(chunks))
    assert torch.equal(o[:600], packed)
    alone = decode(q[600:, None], cache, 0, plan_decode(cache, seqs, num_heads=32, share_prefix=False))
    assert torch.equal(o[600:], alone[:, 0])


@pytest.mark.parametrize("kv_format", ["bf16", "int4"])
@pytest.mark.parametrize("share", [False, True])
def test_captured(kv_format, share):
    cache, prefill, seqs = large(kv_format)
    plan = plan_step(cache, prefill, seqs, num_heads=32, share_prefix=share)
    q = randn(plan.rows, 32, 128, dtype=BF16).cuda()
    out, graph = torch.empty_like(q), torch.cuda.CUDAGraph()
    attend(q, cache, 0, plan, out=out, return_lse=True)
    with torch.cuda.graph(graph):
        _, lse = attend(q, cache, 0, plan, out=out, return_lse=True)
    for seed in range(3):
        q.copy_(randn(plan.rows, 32, 128, dtype=BF16, seed=seed))
        out.fill_(float("nan"))
        graph.replay()
        got = out.clone(), lse.clone()
        expected = attend(q, cache, 0, plan, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_streams_of_the_caller():
    """Inputs that a stream is still making, results that it uses at once: many times, beside a busy default stream."""
    cache, prefill, seqs = large()
    plan = plan_step(cache, prefill, seqs, num_heads=32)
    q = randn(plan.rows, 32, 128, dtype=BF16).cuda()
    expected = attend(q * 2, cache, 0, plan) + 1
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(10):
        busy @ busy
        with torch.cuda.stream(stream):
            for _ in range(3):
                made = (busy @ busy)[:1, :1].bfloat16() * 0 + q * 2
                got = attend(made.contiguous(), cache, 0, plan) + 1
                del made
        stream.synchronize()
        assert torch.equal(got, expected)


def test_many_short_chunks_share_by_themselves():
    cache = make_cache(kv_format="bf16", head_dim=128, page_size=16, pages=1300, kv_heads=8, device="cuda")
    root = cache.allocate()
    grow(cache, [root], [16384], seed=1)
    seqs = [root, *(cache.fork(root) for _ in range(63))]
    grow(cache, seqs, 8, seed=2)
    chunks = [(seq, 8) for seq in seqs]
    plan, apart = (plan_step(cache, chunks, num_heads=32, share_prefix=share) for share in ("auto", False))
    assert len(plan.prefill.nodes) == 1
    q = randn(plan.rows, 32, 128, dtype=BF16).cuda()
    together, alone = (attend(q, cache, 0, of, return_lse=True) for of in (plan, apart))
    assert torch.allclose(together[1], alone[1], atol=1e-3)
    assert torch.allclose(together[0].float(), alone[0].float(), atol=2e-3)  # outputs are about 1 / 128


def test_a_short_chunk_after_a_long_prefix_is_read_in_pieces():
    """As many whatever is beside it, where nothing is shared: with the same tiles its bits are the same, too."""
    cache = make_cache(kv_format="bf16", head_dim=128, page_size=16, pages=1300, kv_heads=2, device="cuda")
    seqs = [cache.allocate() for _ in range(4)]
    grow(cache, seqs, [16000, 40, 900, 200], seed=1)
    alone, o, lse = assert_step(cache, [(seqs[0], 13)], [], heads=8, dtype=BF16, share=False)
    assert len(alone.prefill.nodes) > 8
    prefill = [(seqs[1], 40), (seqs[0], 13), (seqs[2], 500)]
    plan = plan_step(cache, prefill, seqs[3:], num_heads=8, share_prefix=False)
    q = randn(plan.rows, 8, 128, dtype=BF16, seed=9).cuda()
    q[40:53] = randn(13, 8, 128, dtype=BF16, seed=5).cuda()
    together = attend(q, cache, 0, plan, return_lse=True)
    assert torch.equal(together[0][40:53], o)
    assert torch.equal(together[1][:, 40:53], lse)


def test_a_standing_plan_beside_chunks():
    """Sequences come and go under it; its idle rows are the last ones, and are not read."""
    cache, prefill, seqs = large()
    standing = plan_decode(cache, seqs[:5], num_heads=32, rows=20, max_length=4000, share_prefix=False)
    for now in (seqs, seqs[3:9]):
        renew_plan(standing, cache, now)
        plan = plan_step(cache, prefill, standing, num_heads=32, share_prefix=False)
        q = randn(plan.rows, 32, 128, dtype=BF16).cuda()
        used = 600 + len(now)
        q[used:] = float("nan")
        o, lse = attend(q, cache, 0, plan, return_lse=True, out=poison(q))
        same = plan_step(cache, prefill, now, num_heads=32, share_prefix=False)
        expected = attend(q[:used], cache, 0, same, return_lse=True)
        assert torch.equal(o[:used], expected[0])
        assert torch.equal(lse[:, :used], expected[1])
        assert (o[used:] == 0).all()
        assert (lse[:, used:] == -torch.inf).all()
