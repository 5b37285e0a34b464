"""decode() over selected pages on a card: random problems, heads in step, graphs over selections that change."""

from __future__ import annotations

import pytest
import torch
from decode_cases import FORMATS, assert_decoded, decode, make_cache, queries
from decode_page_cases import KINDS, bits_of, chance, check, chosen, run

import tilewise
from tilewise import BlockSchedule, PagedKVCache, plan_decode

pytestmark = pytest.mark.gpu
MORE_KINDS = (*KINDS, ("bf16", 128, 16), ("fp16", 128, 16), ("fp8", 128, 64), ("int4", 128, 16), ("bf16", 256, 32))


@pytest.mark.parametrize("begin", range(0, 300, 100))
def test_chance(begin):
    for seed in range(begin, begin + 100):
        chance(30_000 + seed, MORE_KINDS, device="cuda")


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_many_sequences_in_step_and_apart(kv_format, page_size):
    """Eight heads: one copy for all of them where they read the same pages, one each where they do not."""
    lengths = [1, 15, 16, 17, 31, 33, 64, 129, 200, 257, 300, 0] * 6
    cache, seqs = make_cache(lengths, page_size=page_size, kv_heads=8, head_dim=128, kv_format=kv_format)
    for heads in (1, 8):
        for tokens in (1, 3):
            check(cache, seqs, heads=heads, tokens=tokens, splitting=None, runs=True, device="cuda")


def test_all_pages_are_plain_decode_to_the_bit():
    cache, seqs = make_cache((2990, 1, 64, 3000, 65), head_dim=128)  # no run of pages that a CPU's plan would cut out
    q = queries(cache, seqs)
    plain = decode(cache, seqs, q, splitting=None, device="cuda")
    got = run(cache, seqs, q, bits_of(chosen(5, 2, 188, share=2.0)), splitting=None, device="cuda")
    assert torch.equal(got[0], plain[0])
    assert torch.equal(got[1], plain[1])


def test_a_graph_replays_over_other_pages_and_growing_sequences():
    """The bits are written on the card between replays, and the host looks at none of them."""
    cache = PagedKVCache(200, 16, 2, 128, device="cuda")
    rand = lambda n: torch.randn(n, 2, 128, device="cuda").bfloat16()  # noqa: E731
    seqs = [cache.allocate() for _ in range(5)]
    slots = cache.extend(seqs, [1, 90, 200, 31, 16])
    cache.write(0, slots, rand(len(slots)), rand(len(slots)))
    plan = plan_decode(cache, seqs, num_heads=8, pages_per_seq=9, room=40)
    bits = torch.zeros(5, 2, 1, 1, dtype=torch.int32, device="cuda")
    schedule = BlockSchedule.from_bits(bits, seqlen_q=1, seqlen_k=16 * 16, block_q=16, block_k=16)
    q, out = torch.randn(5, 1, 8, 128, device="cuda").bfloat16(), torch.empty(5, 1, 8, 128, device="cuda").bfloat16()
    tilewise.decode(q, cache, 0, plan, schedule=schedule, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tilewise.decode(q, cache, 0, plan, schedule=schedule, out=out)
    for step in range(40):
        slots = cache.extend(seqs, 1)
        cache.write(0, slots, rand(5), rand(5))
        plan = tilewise.grow_plan(plan, cache)
        selected = chosen(5, 2, 16, share=0.7, seed=step)
        bits.copy_(bits_of(selected)[:, :, None], non_blocking=True)
        q.normal_()
        graph.replay()
        assert_decoded((out, None), q, cache, seqs, selected=selected & (selected.cumsum(-1) <= 9))


def test_any_bits_are_harmless():
    """Words of noise over sequences that end anywhere."""
    cache, seqs = make_cache((1, 300, 17, 0, 64), head_dim=128)
    for seed in range(20):
        noise = torch.randint(-(2**31), 2**31, (5, 2, 3), generator=torch.Generator().manual_seed(seed))
        selected = (noise[..., None] >> torch.arange(32) & 1).bool().flatten(2)
        q = queries(cache, seqs)
        got = run(cache, seqs, q, noise.int(), splitting=None, device="cuda")
        assert_decoded(got, q, cache, seqs, selected=selected)
