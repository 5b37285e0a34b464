"""decode_small on a card: the bits of decode.cu in every shape, at every size that it is chosen for, and in graphs."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise import PagedKVCache
from tilewise.formats import KVFormat
from tilewise.gpu import decode as decoding
from tilewise.gpu.decode_small import SmallDecode, SmallShape, blocks_per_sm
from tilewise.scores import Scores

pytestmark = pytest.mark.gpu
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = [
    SmallShape(cluster, warps, together, depth, 16, 4, tma)
    for cluster in (1, 2, 4, 8, 16)
    for warps, together, depth in ((4, 4, 2), (4, 8, 3), (8, 8, 2))
    for tma in (True, False)
]


def filled(lengths, *, kv_format="bf16", head_dim=128, page_size=16, kv_heads=8):
    """A cache on the card, and sequences of these lengths, whose pages were taken in turns."""
    pages = sum(n // page_size + 9 for n in lengths)
    cache = PagedKVCache(pages, page_size, kv_heads, head_dim, kv_format=kv_format, device="cuda")
    seqs = [cache.allocate() for _ in lengths]
    while any(cache.length(s) < n for s, n in zip(seqs, lengths, strict=True)):
        counts = [min(96, n - cache.length(s)) for s, n in zip(seqs, lengths, strict=True)]
        slots = cache.extend(seqs, counts)
        k, v = (torch.randn(len(slots), kv_heads, head_dim, device="cuda") for _ in range(2))
        cache.write(0, slots, k.to(FORMATS[kv_format]), v.to(FORMATS[kv_format]))
    return cache, seqs


def answer(cache, seqs, q, small):
    """(o, lse), and whether decode_small gave them."""
    plan = tilewise.plan_decode(cache, seqs, num_heads=q.shape[2], tokens_per_seq=q.shape[1], share_prefix=False)
    o, lse = torch.full_like(q, torch.nan), torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, device="cuda")
    k, v = ([part[0] for part in parts] for parts in (cache._k, cache._v))
    lists, lengths = [cache.page_list(s) for s in seqs], [cache.length(s) for s in seqs]
    scores = Scores((None, 0), q.shape[-1] ** -0.5)
    decoding.run(plan, q, cache.format, k, v, lists, lengths, o, lse, scores, small=small)
    (bound,) = decoding.kept(plan).bound.values()
    return o.view(torch.int16), lse.view(torch.int32), isinstance(bound, SmallDecode)


def assert_same(cache, seqs, q, small) -> None:
    o, lse, by_clusters = answer(cache, seqs, q, small)
    want_o, want_lse, _ = answer(cache, seqs, q, False)
    assert by_clusters
    assert torch.equal(o, want_o)
    assert torch.equal(lse, want_lse)


@pytest.mark.parametrize("tokens", [16, 250, 512, 1000, 1024, 2048, 3001, 4096, 8192])
@pytest.mark.parametrize("sequences", [1, 2, 3, 4, 8])
def test_it_is_chosen_and_has_the_bits_of_decode(sequences, tokens):
    cache, seqs = filled([tokens] * sequences)
    q = torch.randn(sequences, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    assert_same(cache, seqs, q, None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape):
    if blocks_per_sm(KVFormat("bf16", 128), shape) == 0:
        pytest.skip("does not fit a multiprocessor")
    cache, seqs = filled([900, 1, 2048, 0, 77])
    assert_same(cache, seqs, torch.randn(5, 1, 32, 128, device="cuda", dtype=torch.bfloat16), shape)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_head_dims_and_rows(kv_format, head_dim):
    cache, seqs = filled([700, 333], kv_format=kv_format, head_dim=head_dim, page_size=64, kv_heads=2)
    for group, tokens in ((1, 1), (3, 1), (8, 1), (4, 2)):
        q = torch.randn(2, tokens, 2 * group, head_dim, device="cuda", dtype=FORMATS[kv_format])
        assert_same(cache, seqs, 8 * q, None)  # large scores: references move


def test_a_graph_replays_over_sequences_that_grow():
    cache, seqs = filled([500, 700])
    q = torch.randn(2, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    plan = tilewise.plan_decode(cache, seqs, num_heads=32, share_prefix=False, room=40)
    tilewise.decode(q, cache, 0, plan)
    assert all(isinstance(bound, SmallDecode) for bound in decoding.kept(plan).bound.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tilewise.decode(q, cache, 0, plan)
    for _ in range(40):
        slots = cache.extend(seqs, 1)
        k, v = (torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        cache.write(0, slots, k, v)
        plan = tilewise.grow_plan(plan, cache)
        graph.replay()
        exact = [
            torch.nn.functional.scaled_dot_product_attention(
                q[n].transpose(0, 1).double(),
                *(x.transpose(0, 1).double() for x in cache.gather(0, s)),
                enable_gqa=True,
            ).transpose(0, 1)
            for n, s in enumerate(seqs)
        ]
        assert (o.double() - torch.stack(exact)).abs().max() < 2e-3
