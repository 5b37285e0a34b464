"""decode() on a card: random forests, large batches, graphs over growing sequences, streams."""

from __future__ import annotations

import pytest
import torch
from decode_cases import FOLDED, KINDS, SMALL, assert_decoded, chance, check, decode, make_cache, make_tree, queries

import tilewise
from tilewise import PagedKVCache, plan_decode
from tilewise.plan.worklist import FAR, Splitting

pytestmark = pytest.mark.gpu
MORE_KINDS = (*KINDS, ("bf16", 128, 16), ("fp16", 128, 16), ("fp8", 128, 64), ("int4", 128, 16), ("bf16", 256, 16))


@pytest.mark.parametrize("begin", range(0, 500, 100))
def test_chance(begin):
    """500 random trees and batches."""
    for seed in range(begin, begin + 100):
        chance(20_000 + seed, MORE_KINDS, device="cuda")


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "fp8", "int8", "int4"])
def test_formats(kv_format, share):
    dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    cache, seqs = make_tree([1, 5, 3], [300, 64, 33], kv_heads=2, head_dim=128, kv_format=kv_format)
    for splitting in (SMALL, None, FOLDED):
        check(cache, seqs, dtype=dtype, share=share, splitting=splitting, device="cuda", runs=True)


def test_a_sequence_has_the_same_bits_whatever_stands_beside_it():
    cache, seqs = make_cache((3000, 1, 64, 700, 65), head_dim=128)
    q = queries(cache, seqs)
    together, lse = decode(cache, seqs, q, splitting=None, device="cuda")
    whole = decode(cache, seqs, q, splitting=Splitting(whole=True), device="cuda")
    assert torch.equal(together, whole[0])
    for n, seq in enumerate(seqs):
        alone = decode(cache, [seq], q[n : n + 1], splitting=None, device="cuda")
        assert torch.equal(alone[0][0], together[n])
        assert torch.equal(alone[1][0], lse[n])


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int8", "int4"])
def test_many_heads_in_step(kv_format, page_size):
    """More pieces than blocks: neighbouring heads come as one; the same bits as alone, where they stand apart."""
    lengths = [1, 15, 16, 17, 31, 33, 64, 129, 200, 257, 300, 0] * 5
    cache, seqs = make_cache(lengths, page_size=page_size, kv_heads=8, head_dim=128, kv_format=kv_format)
    for seen, tokens in (({}, 1), ({"window": (70, 0)}, 2), ({"chunk": 64}, 3)):
        options = {"tokens": tokens, **seen, "splitting": SMALL, "device": "cuda", "runs": True}
        together, lse = check(cache, seqs, **options)
        q = queries(cache, seqs, tokens=tokens)
        del options["tokens"]
        for n in range(0, 12, 3):
            alone = decode(cache, [seqs[n]], q[n : n + 1], **options)
            assert torch.equal(alone[0][0], together[n])
            assert torch.equal(alone[1][0], lse[n])


def test_a_tree_of_three_levels_in_all_its_bodies():
    """A root that goes on into its children, nodes of few rows, many ends: chains, joining warps, merging by fours."""
    cache, seqs = make_tree([1, 4, 8, 4], [320, 192, 64, 33], kv_heads=8, head_dim=128)
    for splitting in (None, SMALL, Splitting(shared=64)):
        check(cache, seqs, share=True, splitting=splitting, device="cuda")


@pytest.mark.parametrize(
    ("sequences", "prefix", "own"), [(1, 0, 40_000), (1000, 64, 5), (65, 2048, 100), (256, 512, 64)]
)
def test_large(sequences, prefix, own):
    cache = PagedKVCache(sequences * (own // 16 + 2) + prefix // 16 + 1, 16, 8, 128, device="cuda")
    first = cache.allocate()
    generator = torch.Generator("cuda").manual_seed(0)
    rand = lambda n: torch.randn(n, 8, 128, device="cuda", generator=generator).bfloat16()  # noqa: E731
    if prefix:
        cache.write(0, cache.extend([first], prefix), rand(prefix), rand(prefix))
    seqs = [first, *(cache.fork(first) for _ in range(sequences - 1))]
    slots = cache.extend(seqs, own)
    cache.write(0, slots, rand(len(slots)), rand(len(slots)))
    q = torch.randn(sequences, 1, 32, 128, device="cuda", generator=generator).bfloat16()
    for share in (False, True):
        plan = plan_decode(cache, seqs, num_heads=32, share_prefix=share)
        o, lse = tilewise.decode(q, cache, 0, plan, return_lse=True)
        again = [tilewise.decode(q, cache, 0, plan) for _ in range(20)]
        assert all(torch.equal(o, x) for x in again)
        assert_decoded((o, lse), q, cache, seqs, only=sorted({0, sequences // 2, sequences - 1}))


@pytest.mark.parametrize("share", [False, True])
def test_a_graph_replays_over_growing_sequences(share):
    cache = PagedKVCache(400, 16, 2, 128, device="cuda")
    first = cache.allocate()
    rand = lambda n: torch.randn(n, 2, 128, device="cuda").bfloat16()  # noqa: E731
    cache.write(0, cache.extend([first], 96), rand(96), rand(96))
    seqs = [first, *(cache.fork(first) for _ in range(8))]
    slots = cache.extend(seqs, 1)
    cache.write(0, slots, rand(9), rand(9))
    plan = plan_decode(cache, seqs, num_heads=8, share_prefix=share, room=40)
    q, out = torch.randn(9, 1, 8, 128, device="cuda").bfloat16(), torch.empty(9, 1, 8, 128, device="cuda").bfloat16()
    tilewise.decode(q, cache, 0, plan, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tilewise.decode(q, cache, 0, plan, out=out)
    for _ in range(40):
        slots = cache.extend(seqs, 1)
        cache.write(0, slots, rand(9), rand(9))
        plan = tilewise.grow_plan(plan, cache)
        q.normal_()
        graph.replay()
        assert_decoded((out, None), q, cache, seqs)
    cache.write(0, cache.extend(seqs, 1), rand(9), rand(9))
    with pytest.raises(ValueError, match="make a new plan"):
        tilewise.grow_plan(plan, cache)


def test_a_stream_of_its_own_and_wrong_devices():
    cache, seqs = make_cache((200, 31), head_dim=64)
    on_card = PagedKVCache(40, 16, 2, 64, device="cuda")
    mine = [on_card.allocate() for _ in seqs]
    for seq, own in zip(seqs, mine, strict=True):
        k, v = cache.gather(0, seq)
        on_card.write(0, on_card.extend([own], len(k)), k.cuda(), v.cuda())
    q = queries(cache, seqs)
    plan = plan_decode(on_card, mine, num_heads=q.shape[2])
    with torch.cuda.stream(torch.cuda.Stream()):
        got = tilewise.decode(q.cuda(), on_card, 0, plan, return_lse=True)
        torch.cuda.current_stream().synchronize()
    assert_decoded(got, q, cache, seqs)
    with pytest.raises(ValueError, match="q must be on cuda:0 like the cache, got cpu"):
        tilewise.decode(q, on_card, 0, plan)


@pytest.mark.parametrize("share", [False, True])
def test_a_tree_of_speculated_tokens(share):
    cache, seqs = make_tree([1, 5, 3], [300, 64, 33], kv_heads=2, head_dim=128)
    mask = torch.eye(9, dtype=torch.bool).repeat(len(seqs), 1, 1) | (torch.rand(len(seqs), 9, 9) < 0.5).tril()
    for splitting in (SMALL, None):
        check(cache, seqs, tokens=9, share=share, tree=mask, splitting=splitting, device="cuda")


def test_pieces_are_of_every_size():
    cache, seqs = make_cache((5000,), head_dim=64)
    for tokens in (16, 64, 1024):
        check(cache, seqs, splitting=Splitting(((FAR, tokens),)), device="cuda")
