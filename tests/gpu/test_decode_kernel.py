"""The decode kernel in the emulator: formats, heads, pages, masks and scores against the oracle."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from decode_cases import (
    BF16,
    FORMATS,
    FP16,
    MODES,
    SMALL,
    UNCUT,
    assert_decoded,
    chance,
    check,
    decode,
    make_cache,
    make_tree,
    queries,
    stored,
)
from oracle import assert_state

import tilewise
from tilewise import PagedKVCache, plan_decode, reference
from tilewise.formats import KVFormat
from tilewise.gpu import decode_kernels
from tilewise.plan.worklist import FAR, Splitting

LENGTHS = (1, 63, 65, 127, 0, 129, 300)


def dtype_of(kv_format: str) -> torch.dtype:
    return FP16 if kv_format == "fp16" else BF16


# ---- formats, head dimensions, heads, pages --------------------------------------------------------------------------
@pytest.mark.parametrize("kv_format", FORMATS)
def test_formats(kv_format):
    """Every length around a chunk, a page and a piece; scales as they lie on a CPU and as on a card."""
    cache, seqs = make_cache(LENGTHS, kv_format=kv_format, head_dim=128)
    for mode in MODES:
        o, lse = check(cache, seqs, dtype=dtype_of(kv_format), mode=mode)
        assert not o[4].any()
        assert (lse[4] == -math.inf).all()
    if kv_format not in ("bf16", "fp16"):
        check(cache, seqs, runs=True, mode=MODES[2])
    # By copies scales come alike for fp8 and int8: one way each.
    for runs in {"fp8": (True,), "int8": (False,), "int4": (False, True)}.get(kv_format, ()):
        check(cache, seqs, runs=runs, tma=False, mode=MODES[2])


@pytest.mark.parametrize(
    ("head_dim", "kv_format", "group_size"),
    [
        *((64, "int4", 32), (64, "int4", 128), (96, "bf16", 64), (96, "int8", 64), (96, "int4", 64)),
        *((192, "bf16", 64), (192, "int4", 128), (256, "bf16", 64), (256, "fp8", 64), (256, "int4", 32)),
    ],
)
def test_head_dims(head_dim, kv_format, group_size):
    cache, seqs = make_cache((129, 7, 200), kv_format=kv_format, head_dim=head_dim, group_size=group_size)
    check(cache, seqs)
    check(cache, seqs, tokens=2, group=2, mode=MODES[1])


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kv_format", ["fp16", "int8"])
def test_queries_of_another_type_than_the_cache(dtype, kv_format):
    cache, seqs = make_cache((33, 100), kv_format=kv_format)
    check(cache, seqs, dtype=dtype)


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 1), (1, 5), (3, 2), (8, 1), (16, 1), (64, 1)])
@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
def test_heads_and_tokens(group, kv_heads, tokens):
    """Up to 1024 rows a sequence; its last tokens see each other causally, and some nothing where there are fewer."""
    cache, seqs = make_cache((70, 1, 9, 0, 160), kv_heads=kv_heads)
    o, lse = check(cache, seqs, group=group, tokens=tokens, mode=MODES[tokens % 4])
    blind = max(0, tokens - 9)
    assert not o[2, :blind].any()
    assert (lse[2, :, :blind] == -math.inf).all()


@pytest.mark.parametrize("page_size", [1, 24, 256])
def test_page_sizes(page_size):
    """By copies token by token and from page to page, by TMA within a page; test_chance has 3, tiles have 32 and 64."""
    cache, seqs = make_cache((1, 63, 0, 65, 300), page_size=page_size)
    for mode in MODES:
        check(cache, seqs, mode=mode)


@pytest.mark.parametrize("page_size", [1, 64])
def test_quantised_pages_of_any_size(page_size):
    for kv_format in ("fp8", "int4"):
        cache, seqs = make_cache((1, 63, 65, 200), page_size=page_size, kv_format=kv_format)
        check(cache, seqs, mode=MODES[3])


def test_pages_by_copies_as_on_cards_without_tma():
    """The same kernel loads by cp.async: for older cards, and where a box of sixteen tokens does not fit a page."""
    cache, seqs = make_cache(LENGTHS)
    for mode in MODES:
        check(cache, seqs, tma=False, mode=mode)


def test_layouts_of_pages_and_queries():
    """Strided pages, queries and outputs; an output whose rows are off 8 bytes goes by way of another."""
    cache, seqs = make_cache((100, 31), kv_heads=2)
    k_parts, v_parts = stored(cache)
    heads_first = [[x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts] for parts in (k_parts, v_parts)]
    q = queries(cache, seqs)
    plain, _ = decode(cache, seqs, q)
    for parts in ((k_parts, heads_first[1]), heads_first):
        assert torch.equal(decode(cache, seqs, q, parts=parts)[0], plain)
    wide = torch.full((2, 3, 9, 72), math.nan, dtype=BF16)[:, 1:2, :8, 3:67].copy_(q)
    assert torch.equal(decode(cache, seqs, wide)[0], plain)


# ---- masks and scores ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("window", [(0, 0), (5, 0), (30, None), (100, 0), (1000, 0)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_windows(window, tokens):
    cache, seqs = make_cache((1, 63, 0, 129, 300))
    check(cache, seqs, window=window, tokens=tokens)
    cache, seqs = make_tree([1, 4], [90, 30])
    check(cache, seqs, window=window, tokens=tokens, share=True, mode=MODES[1])


def test_what_a_window_hides_may_be_anything():
    """Pages that no row looks at any more may be gone: others' numbers, NaN in their keys and values."""
    for kv_format in ("bf16", "int8", "int4"):
        cache, (seq,) = make_cache((200,), kv_format=kv_format)
        q = queries(cache, [seq])
        k_parts, v_parts = stored(cache)
        clean = decode(cache, [seq], q, window=(40, 0))
        gone = cache.page_list(seq)[: (200 - 1 - 40) // 16]
        first = cache.page_list(seq)[len(gone)]
        for x in (*k_parts, *v_parts):
            at = x if x.dtype.is_floating_point and x.element_size() > 1 else x.view(torch.uint8)
            bad = math.nan if at is x else 0x7F
            at[torch.from_numpy(gone.astype(np.int64))] = bad
            at[first, : (200 - 1 - 40) % 16] = bad
        for tma in (True, False):
            assert torch.equal(decode(cache, [seq], q, window=(40, 0), parts=(k_parts, v_parts), tma=tma)[0], clean[0])


@pytest.mark.parametrize("kv_format", ["bf16", "int4"])
def test_softcap_sinks_and_scale(kv_format):
    cache, seqs = make_tree([1, 3], [100, 20], kv_format=kv_format)
    sinks = torch.linspace(-3, 4, 8)
    check(cache, seqs, softcap=2.0, share=True)
    check(cache, seqs, softcap=1e8, sinks=sinks, size=5.0)
    for scale in (0.0, -0.3, 1.0):
        check(cache, seqs, scale=scale, sinks=sinks, share=True, mode=MODES[1])
    empty, (seq,) = make_cache((0,), kv_format=kv_format)
    _, lse = check(empty, [seq], sinks=sinks)
    assert torch.allclose(lse[0, :, 0], sinks)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_large_logits(kv_format):
    """Logits of ±1e4; queries that a half cannot hold, and such that it would lose."""
    cache, seqs = make_cache((200, 33), kv_format=kv_format)
    for size in (300.0, 1e4) if kv_format == "fp16" else (300.0, 3e5, 1e-7):
        for splitting in (SMALL, UNCUT):
            check(cache, seqs, size=size, scale=300.0 / size, dtype=dtype_of(kv_format), splitting=splitting)


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("factor", [2.0**-40, 1.0, 2.0**40])
def test_values_of_any_size(kv_format, factor):
    """Values far outside of what a half holds, and that differ by 2^30 from token to token."""
    generator = torch.Generator().manual_seed(0)
    cache = PagedKVCache(30, 16, 2, 64, kv_format=kv_format)
    seq = cache.allocate()
    slots = cache.extend([seq], [200])
    k, v = (torch.randn(200, 2, 64, generator=generator) for _ in range(2))
    grades = 2.0 ** torch.randint(-15, 16, (200, 1, 1), generator=generator)
    cache.write(0, slots, k, v * grades * factor)
    for size, splitting in product((1.0, 20.0), (SMALL, UNCUT)):
        check(cache, [seq], size=size, splitting=splitting)


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4"])
def test_values_that_rise_and_fall(kv_format):
    """By 2^60 along the sequence, under equal weights and under weights that make up for it."""
    place = torch.linspace(0, 1, 208)[:, None, None]
    for rise, size in product((60.0, -60.0), (0.0, 1.0)):
        cache = PagedKVCache(30, 16, 1, 64, kv_format=kv_format)
        seq = cache.allocate()
        slots = cache.extend([seq], [208])
        k = torch.ones(208, 1, 64) * place * -rise * math.log(2) / 8
        cache.write(
            0, slots, k, torch.randn(208, 1, 64, generator=torch.Generator().manual_seed(0)) * 2.0 ** (rise * place)
        )
        q = torch.full((1, 1, 4, 64), size, dtype=BF16)
        got = decode(cache, [seq], q, splitting=UNCUT)
        assert_decoded(got, q, cache, [seq])


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int8", "int4"])
def test_weights_that_outgrow_what_they_weigh(kv_format):
    """Zeros, whose scales are the smallest there are, under logits that rise by 300; then values, at any height."""
    for after in (300.0, 280.0, 200.0, 0.0):
        cache = PagedKVCache(30, 16, 1, 64, kv_format=kv_format)
        seq = cache.allocate()
        slots = cache.extend([seq], [208])
        logits = torch.cat([torch.linspace(0, 300, 150), torch.full((58,), after)])
        v = torch.randn(208, 1, 64, generator=torch.Generator().manual_seed(0))
        v[:150] = 0
        cache.write(0, slots, torch.ones(208, 1, 64) * logits[:, None, None] / 8, v)
        q = torch.ones(1, 1, 4, 64, dtype=BF16)
        cut, whole = (decode(cache, [seq], q, splitting=Splitting(((FAR, 64),), whole=one)) for one in (False, True))
        assert torch.equal(cut[0], whole[0])
        assert_decoded(cut, q, cache, [seq])


def test_a_broken_token_shows_where_it_is_seen_and_nowhere_else():
    for kv_format in ("int8", "int4", "fp8"):
        cache, seqs = make_cache((40, 40), kv_format=kv_format)
        slots = cache.extend([seqs[0]], [1])
        k = torch.ones(1, 2, 64)
        k[0, 0, 3] = math.nan
        cache.write(0, slots, k, torch.ones(1, 2, 64))
        o, _ = check(cache, seqs)
        assert o[0, :, :4].isnan().all()
        assert o[0, :, 4:].isfinite().all()


def trees(count: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """(count, tokens, tokens) bool: token t > 0 hangs below one before it, and sees its ancestors and itself."""
    rng = np.random.default_rng(seed)
    mask = torch.eye(tokens, dtype=torch.bool).repeat(count, 1, 1)
    for one in mask:
        for t in range(1, tokens):
            one[t] |= one[int(rng.integers(0, t))]
    return mask


@pytest.mark.parametrize(
    ("kv_format", "group", "tokens"), [("bf16", 4, 7), ("bf16", 1, 16), ("int4", 2, 5), ("bf16", 2, 1)]
)
def test_a_tree_of_speculated_tokens(kv_format, group, tokens):
    """Shared prefixes above, tails that are cut anywhere, sequences shorter than the tree; the CPU says the same."""
    cache, seqs = make_tree([1, 3, 2], [100, 20, 40], kv_format=kv_format)
    short, more = make_cache((tokens, max(1, tokens - 2), 70, 0), kv_format=kv_format)
    for one, of, share in ((cache, seqs, True), (cache, seqs, False), (short, more, False)):
        mask = trees(len(of), tokens, seed=len(of))
        for splitting in (SMALL, UNCUT, Splitting(((FAR, 16),))):
            check(one, of, group=group, tokens=tokens, share=share, tree=mask, splitting=splitting)
        q = queries(one, of, group=group, tokens=tokens)
        plan = plan_decode(one, of, num_heads=q.shape[2], tokens_per_seq=tokens, share_prefix=share)
        exact = reference.decode(q, one, 0, of, tree_mask=mask)
        honest = reference.decode(q, one, 0, of, tree_mask=mask, dtype=BF16)
        for backend in ("cpu", "emulator"):
            assert_state(
                tilewise.decode(q, one, 0, plan, tree_mask=mask, return_lse=True, backend=backend), exact, honest
            )


def test_a_lower_triangle_is_causal():
    cache, seqs = make_cache((70, 33))
    q = queries(cache, seqs, tokens=6)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    plan = plan_decode(cache, seqs, num_heads=q.shape[2], tokens_per_seq=6)
    for backend in ("cpu", "emulator"):
        got = tilewise.decode(q, cache, 0, plan, tree_mask=mask, backend=backend)
        assert (got.float() - tilewise.decode(q, cache, 0, plan, backend=backend).float()).abs().max() <= 0.01
    with pytest.raises(ValueError, match=r"tree_mask must be \(6, 6\) or \(2, 6, 6\), got \(5, 6\)"):
        tilewise.decode(q, cache, 0, plan, tree_mask=mask[1:])
    windowed = plan_decode(cache, seqs, num_heads=q.shape[2], tokens_per_seq=6, window=(9, 0))
    with pytest.raises(ValueError, match="without a window"):
        tilewise.decode(q, cache, 0, windowed, tree_mask=mask)


# ---- random problems -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_chance(first):
    for seed in range(first, first + 10):
        chance(seed)


# ---- what is refused -------------------------------------------------------------------------------------------------
def test_what_is_not_served_says_so():
    cache, seqs = make_cache((20,))
    q = queries(cache, seqs)
    with pytest.raises(NotImplementedError, match="bfloat16 queries"):
        decode(cache, seqs, q.half())
    with pytest.raises(NotImplementedError, match=r"torch\.float32"):
        decode(cache, seqs, q.float())
    with pytest.raises(NotImplementedError, match="16 tokens a sequence"):
        decode(cache, seqs, q.expand(-1, 17, -1, -1))
    k_parts, v_parts = stored(cache)
    odd = torch.empty(k_parts[0].numel() + 1, dtype=BF16)[1:].view(k_parts[0].shape)
    with pytest.raises(NotImplementedError, match="multiples of 16 bytes"):
        decode(cache, seqs, q, parts=([odd], v_parts))
    wide, (seq,) = make_cache((20,), head_dim=80)
    with pytest.raises(NotImplementedError, match="head_dim"):
        decode(wide, [seq], queries(wide, [seq]))


def test_no_sequences():
    cache, _ = make_cache((20,))
    o, lse = decode(cache, [], torch.empty(0, 1, 8, 64, dtype=BF16))
    assert o.shape == (0, 1, 8, 64)
    assert lse.shape == (0, 8, 1)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int8", "int4"])
def test_shared_memory_is_what_the_kernel_lays_out(kv_format):
    """The emulator refuses what lies beyond: every tiling has just enough, and two blocks fit where it says so."""
    for head_dim, rows in product(decode_kernels.HEAD_DIMS, (4, 16)):
        fmt = KVFormat(kv_format, head_dim)
        tiling = decode_kernels.choose_tiling(fmt, rows)
        assert tiling.blocks * (decode_kernels.shared_bytes(fmt, tiling) + 1024) <= 228 << 10
