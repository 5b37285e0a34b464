"""Shared nodes on Hopper: tiles by wgmma of quantised caches, and of head dimensions above 128."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decode_cases import (
    BF16,
    FP16,
    MODES,
    SMALL,
    assert_decoded,
    check,
    decode,
    grow,
    make_tree,
    queries,
)

from tilewise import PagedKVCache, arch, compiler, plan_decode
from tilewise.formats import KVFormat
from tilewise.gpu import decode as decoding
from tilewise.gpu.decode_kernels import HEAD_DIMS, choose_tiling, decode_spec, shared_bytes, tiles_can
from tilewise.plan.items import Word
from tilewise.plan.worklist import FAR, Splitting

pytestmark = pytest.mark.usefixtures("own_card")

EVERY = Splitting(pieces=((150, 1024), (FAR, 64)), shared=64, tile_rows=1, whole=False)  # every node through tiles
WHOLE = Splitting(pieces=((FAR, 64),), shared=4096, tile_rows=1)  # and a node in one piece
# What costs a compilation: int8 at D 64, int4 at D 128, where Q is in shared memory, bf16 at D 256
KINDS = [("int8", 64), ("int4", 128), ("bf16", 256)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def by_tiles(
    cache: PagedKVCache,
    seqs: list[int],
    q: torch.Tensor | None = None,
    *,
    group: int = 4,
    tokens: int = 1,
    **options: Any,
) -> Any:
    """(o, lse), judged by the oracle, of a plan that shares whatever can be shared; the kernel with tiles made them."""
    if q is not None:
        group = q.shape[2] // cache.num_kv_heads
    plan = plan_decode(
        cache, seqs, num_heads=group * cache.num_kv_heads, tokens_per_seq=tokens, share_prefix=True,
        window=options.get("window"),
    )  # fmt: skip
    options = {"splitting": EVERY, **options}
    if q is None:
        got = check(cache, seqs, group=group, tokens=tokens, plan=plan, **options)
    else:
        got = decode(cache, seqs, q, plan=plan, **options)
        assert_decoded(got, q, cache, seqs)
    (bound,) = decoding.kept(plan).bound.values()
    assert bound.spec.entry == "decode_tree"
    tiled = bound.listed.tile_items.reshape(-1, bound.listed.tile_items.shape[-1])
    assert tiled[:, Word.ROWS].max() > 0
    return got


def forks(k: torch.Tensor, v: torch.Tensor, count: int = 5, **options: Any) -> tuple[PagedKVCache, list[int]]:
    """Sequences that share every one of these tokens, (tokens, KV heads, D)."""
    cache = PagedKVCache(len(k) // 16 + 3, 16, k.shape[1], k.shape[2], **options)
    seq = cache.allocate()
    cache.write(0, cache.extend([seq], len(k)), k, v)
    return cache, [seq, *(cache.fork(seq) for _ in range(count - 1))]


# ---- rows, tokens, trees ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kv_format", "head_dim"), KINDS)
def test_rows_and_tokens(device, kv_format, head_dim):
    """Rows of one sixteen and of several items; nodes that end within a tile, and that lap the rings."""
    cache, seqs = make_tree([1, 33], [70, 3], kv_heads=1, head_dim=head_dim, kv_format=kv_format)
    by_tiles(cache, seqs, device=device)
    by_tiles(cache, seqs[:3], group=1, device=device, mode=MODES[1])
    long, below = make_tree([1, 5], [333, 9], kv_heads=1, head_dim=head_dim, kv_format=kv_format)
    by_tiles(long, below, group=3, splitting=WHOLE, device=device, mode=MODES[2])


@pytest.mark.parametrize(("kv_format", "head_dim"), KINDS)
def test_three_levels_and_a_chain(device, kv_format, head_dim):
    """Items that go on with their parent's rows; scales in runs; sequences of their own beside."""
    options = {"kv_heads": 1, "head_dim": head_dim, "kv_format": kv_format}
    cache, seqs = make_tree([1, 2, 4], [90, 40, 9], **options)
    by_tiles(cache, [seqs[n] for n in (5, 0, 7, 2, 1, 3)], device=device, runs=True, mode=MODES[3])
    chain, below = make_tree([1, 1, 20], [96, 64, 5], **options)
    fresh = chain.allocate()
    grow(chain, [fresh], 20)
    by_tiles(chain, [fresh, *below], device=device, splitting=WHOLE, group=2)


@pytest.mark.parametrize(("kv_format", "head_dim"), KINDS)
def test_scores_and_windows(device, kv_format, head_dim):
    cache, seqs = make_tree([1, 5], [100, 9], kv_heads=1, head_dim=head_dim, kv_format=kv_format)
    grow(cache, seqs[:1], 30)
    for number, options in enumerate((
        {"window": (60, 0), "tokens": 3},
        {"sinks": torch.linspace(-2, 3, 4), "scale": -0.2},
        {"scale": 0.0},
        {"size": 300.0, "scale": 1.0},
    )):  # fmt: skip
        by_tiles(cache, seqs, device=device, mode=MODES[number], **options)


def test_a_list_that_grows(device):
    cache, seqs = make_tree([1, 9], [48, 17], kv_heads=1, kv_format="int8")
    plan = plan_decode(cache, seqs, num_heads=4, share_prefix=True, room=40)
    for step in range(2):
        check(cache, seqs, plan=plan, room=40, splitting=SMALL, device=device)
        grow(cache, seqs, 20 if step == 0 else 0)
        (listed,) = decoding.kept(plan).lists.values()
        listed.grow([cache.length(s) for s in seqs], [cache.page_list(s) for s in seqs])


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 32, 48, 64])
@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "fp8", "int8", "int4"])
def test_every_kind(kv_format, page_size):
    for head_dim in HEAD_DIMS:
        dtype = FP16 if kv_format == "fp16" else BF16
        if not tiles_can(dtype, KVFormat(kv_format, head_dim), True):
            continue
        cache, seqs = make_tree([1, 40], [300, 40], head_dim=head_dim, page_size=page_size, kv_format=kv_format)
        by_tiles(cache, seqs, dtype=dtype, device="cuda", runs=True)
        by_tiles(cache, seqs, dtype=dtype, device="cuda", tokens=2, softcap=20.0)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4", "bf16"])
def test_many_sequences_of_a_long_prefix(kv_format):
    head_dim = 256 if kv_format == "bf16" else 128
    cache, seqs = make_tree([1, 64], [2048, 100], kv_heads=8, head_dim=head_dim, kv_format=kv_format)
    by_tiles(cache, seqs, device="cuda", splitting=None, runs=True)


# ---- what the format holds -------------------------------------------------------------------------------------------
HOLDING = ["int8", "int4", pytest.param("fp8", marks=pytest.mark.gpu)]
DIM = {"int8": 64, "int4": 128, "fp8": 64}


@pytest.mark.parametrize("kv_format", HOLDING)
def test_values_of_any_size(device, kv_format):
    """Values far outside of what a half holds, and that differ by 2^30 from token to token."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(150, 1, DIM[kv_format], generator=generator) for _ in range(2))
    grades = 2.0 ** torch.randint(-15, 16, (150, 1, 1), generator=generator)
    for factor, size in ((2.0**-40, 20.0), (2.0**40, 1.0)):
        cache, seqs = forks(k, v * grades * factor, kv_format=kv_format)
        by_tiles(cache, seqs, size=size, splitting=WHOLE, device=device)


@pytest.mark.parametrize("kv_format", HOLDING)
def test_values_that_rise_and_fall(device, kv_format):
    """By 2^60 along the node, under weights that make up for it: the references follow the products."""
    generator = torch.Generator().manual_seed(0)
    place, head_dim = torch.linspace(0, 1, 208)[:, None, None], DIM[kv_format]
    for rise in (60.0, -60.0):
        k = torch.ones(208, 1, head_dim) * place * -rise * math.log(2) / head_dim**0.5
        v = torch.randn(208, 1, head_dim, generator=generator) * 2.0 ** (rise * place)
        cache, seqs = forks(k, v, kv_format=kv_format)
        by_tiles(cache, seqs, torch.ones(5, 1, 4, head_dim, dtype=BF16), splitting=WHOLE, device=device)


@pytest.mark.parametrize("kv_format", HOLDING)
def test_weights_that_outgrow_what_they_weigh(device, kv_format):
    """Zeros, whose scales are the smallest there are, under logits that rise by 300; then values far below."""
    head_dim = DIM[kv_format]
    logits = torch.cat([torch.linspace(0, 300, 150), torch.full((58,), 280.0)])
    v = torch.randn(208, 1, head_dim, generator=torch.Generator().manual_seed(0))
    v[:150] = 0
    k = torch.ones(208, 1, head_dim) * logits[:, None, None] / head_dim**0.5
    cache, seqs = forks(k, v, kv_format=kv_format)
    by_tiles(cache, seqs, torch.ones(5, 1, 4, head_dim, dtype=BF16), splitting=WHOLE, device=device)


@pytest.mark.parametrize("kv_format", HOLDING)
def test_a_row_that_one_key_rules_is_its_value_to_the_bit(device, kv_format):
    """Every place of a tile in turn: a weight of 1 times a value that the format holds exactly."""
    head_dim = DIM[kv_format]
    k = torch.zeros(64, 1, head_dim)
    k[torch.arange(64), :, torch.arange(64)] = 120.0
    top = {"int8": 127, "int4": 15, "fp8": 7}[kv_format]  # fp8: 448 = 7 · 64, so that scales are powers of two
    v = torch.randint(0, top + 1, (64, 1, head_dim), generator=torch.Generator().manual_seed(1)).float()
    v[..., 0::32], v[..., 1::32] = top, 0
    v *= 2.0 ** (torch.arange(64) % 5)[:, None, None]
    cache, seqs = forks(k, v, count=8, kv_format=kv_format)
    q = torch.zeros(8, 1, 8, head_dim, dtype=BF16)  # head h of sequence n asks for token 8n + h
    q.view(64, head_dim)[torch.arange(64), torch.arange(64)] = 120.0
    o, _ = by_tiles(cache, seqs, q, splitting=WHOLE, device=device)
    assert torch.equal(o.view(64, 1, head_dim).float(), v)


def test_a_broken_token_shows_where_it_is_seen_and_nowhere_else(device):
    k, v = torch.ones(70, 2, 64), torch.ones(70, 2, 64)
    k[40, 0, 3], v[30, 1, 3] = math.nan, 2.0
    cache, seqs = forks(k, v, kv_format="int8")
    o, _ = by_tiles(cache, seqs, queries(cache, seqs), device=device)
    assert o[:, :, :4].isnan().all()
    assert o[:, :, 4:].isfinite().all()


# ---- which kernel ----------------------------------------------------------------------------------------------------
def test_streaming_warps_take_what_tiles_do_not():
    """Quantised caches above head_dim 128 or with many groups, queries of another dtype, pages that TMA cannot copy."""
    for head_dim in HEAD_DIMS:
        assert tiles_can(BF16, KVFormat("bf16", head_dim), True)
        assert not tiles_can(FP16, KVFormat("bf16", head_dim), True)
        assert not tiles_can(BF16, KVFormat("bf16", head_dim), False)
        for name in ("fp8", "int8", "int4"):
            assert tiles_can(FP16, KVFormat(name, head_dim), True) == (head_dim <= 128)
        assert not tiles_can(torch.float32, KVFormat("fp32", head_dim), True)
    assert not tiles_can(BF16, KVFormat("int4", 128, 32), True)
    cache, seqs = make_tree([1, 5], [70, 3], kv_format="int4", head_dim=128, group_size=32)
    plan = plan_decode(cache, seqs, num_heads=8, share_prefix=True)
    listed, bound = decoding.bind(
        plan, queries(cache, seqs), cache.format, *[[x[0] for x in of] for of in (cache._k, cache._v)],
        [cache.page_list(s) for s in seqs], [cache.length(s) for s in seqs], decoding.Scores((None, 0), 1.0),
        splitting=EVERY, processors=2,
    )  # fmt: skip
    assert bound is not None
    assert bound.spec.entry == "decode"
    assert not listed.tile_items[..., Word.ROWS].any()


def test_shapes_fit_a_multiprocessor():
    """Keys and values of quantised tiles come and go by themselves: two of each; three tiles above head_dim 128."""
    for name in ("bf16", "fp8", "int8", "int4"):
        for head_dim in HEAD_DIMS:
            fmt = KVFormat(name, head_dim)
            if not tiles_can(BF16, fmt, True):
                continue
            tiling = choose_tiling(fmt, 4, tiles=True)
            assert shared_bytes(fmt, tiling) <= arch.LIMITS["sm_90a"].shared_block
            assert tiling.stages >= 2
            assert tiling.tile_stages >= (2 if name != "bf16" else 3)
            assert (tiling.raw_stages >= 3) == (name != "bf16")
            assert tiling.tile_rows == (128 if head_dim <= 128 else 64)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "head_dim"), [("bf16", 128), ("bf16", 192), ("bf16", 256), ("int8", 128), ("fp8", 128)]
)
def test_kernels_with_tiles_do_not_spill(name, head_dim):
    """Nor are their products serialised: `tilewise kernels --all` tells of every kernel."""
    fmt = KVFormat(name, head_dim)
    spec = decode_spec(BF16, fmt, 16, choose_tiling(fmt, 4, tiles=True))
    (row,) = compiler.resource_rows([(spec, "sm_90a")])
    assert (row.error, row.spill_stores, row.spill_loads) == (None, 0, 0)
    assert not row.serialised
