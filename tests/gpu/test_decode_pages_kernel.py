"""Decode over selected pages in the emulator: every format and cut against the oracle, and what is read for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from decode_cases import (
    BF16,
    FOLDED,
    FORMATS,
    MODES,
    SMALL,
    UNCUT,
    assert_decoded,
    decode,
    grow,
    make_cache,
    make_tree,
    queries,
    stored,
)
from decode_page_cases import PAIRS, bits_of, chance, check, chosen, pages_of, run

from tilewise import PagedKVCache, arch, compiler, emulator, plan_decode
from tilewise.formats import KVFormat
from tilewise.gpu import decode as decoding
from tilewise.gpu import decode_kernels
from tilewise.plan.items import Word

LENGTHS = (1, 15, 16, 17, 63, 65, 0, 129, 300)


# ---- formats, pages, heads, tokens -----------------------------------------------------------------------------------
@pytest.mark.parametrize("kv_format", FORMATS)
def test_formats(kv_format):
    """Lengths around a page and a chunk, pages per head and for all heads; scales as on a CPU and as on a card."""
    cache, seqs = make_cache(LENGTHS, kv_format=kv_format, head_dim=128)
    for n, mode in enumerate(MODES):
        check(cache, seqs, heads=1 + n % 2, mode=mode, seed=n)
    if kv_format not in ("bf16", "fp16"):
        check(cache, seqs, runs=True)
    check(cache, seqs, runs=kv_format == "int4", tma=False)


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128])
def test_page_sizes(page_size):
    for kv_format in ("bf16", "int4"):  # chunks of 16 and of 32 tokens
        cache, seqs = make_cache(LENGTHS, kv_format=kv_format, page_size=page_size)
        check(cache, seqs)
        check(cache, seqs, tokens=3, tma=False)


@pytest.mark.parametrize(("group", "kv_heads", "tokens"), [(1, 1, 1), (1, 5, 2), (3, 2, 1), (8, 1, 16), (64, 1, 5)])
def test_heads_and_tokens(group, kv_heads, tokens):
    cache, seqs = make_cache((70, 1, 9, 0, 160), kv_heads=kv_heads)
    for splitting in (SMALL, PAIRS):
        check(cache, seqs, group=group, tokens=tokens, splitting=splitting)


def test_every_choice_of_the_last_pages_under_several_query_tokens():
    """A page that is left out hides its tokens and moves nothing else; query tokens lie in up to two pages."""
    which = torch.tensor([[n >> page & 1 for page in range(3)] for n in range(8)], dtype=torch.bool)
    for length, tokens in ((33, 5), (36, 5), (37, 5), (48, 16), (34, 16), (3, 5)):
        cache = PagedKVCache(40, 16, 1, 64, kv_format="bf16")
        first = cache.allocate()
        grow(cache, [first], [length])
        seqs = [first, *(cache.fork(first) for _ in range(7))]
        check(cache, seqs, which[:, None], tokens=tokens, group=2)


def test_sixty_five_sequences():
    cache, seqs = make_cache([7 * n % 90 for n in range(65)], kv_heads=3)
    check(cache, seqs, share=0.4, group=2)
    check(cache, seqs, share=0.4, group=2, heads=1, splitting=PAIRS)


def test_one_selection_for_all_sequences():
    """A batch of 1 stands for all: its bits past a sequence's end are none of it."""
    cache, seqs = make_cache(LENGTHS)
    selected = chosen(1, 2, pages_of(cache, seqs))
    q = queries(cache, seqs)
    got = run(cache, seqs, q, bits_of(selected))
    assert_decoded(got, q, cache, seqs, selected=selected.expand(len(seqs), -1, -1))


def test_sequences_in_another_order_than_the_plan_s():
    """The plan sorts sequences by their pages; bits are in the caller's order."""
    cache, seqs = make_tree([1, 3, 2], [40, 30, 20])
    for order in ([5, 0, 3, 1, 4, 2], [2, 1, 0]):
        check(cache, [seqs[n] for n in order])


def test_scores():
    cache, seqs = make_cache(LENGTHS)
    sinks = torch.linspace(-3, 4, 8)
    check(cache, seqs, softcap=2.0)
    check(cache, seqs, softcap=30.0, sinks=sinks, tokens=2)
    for scale in (0.0, -0.3):
        check(cache, seqs, scale=scale, sinks=sinks)


# ---- what is selected ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "splitting", [SMALL, UNCUT, FOLDED, PAIRS, None], ids=["small", "uncut", "folded", "pairs", "own"]
)
@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_all_pages_are_plain_decode_to_the_bit(kv_format, splitting):
    cache, seqs = make_cache(LENGTHS, kv_format=kv_format)
    for tokens in (1, 3):
        q = queries(cache, seqs, tokens=tokens)
        plain = decode(cache, seqs, q, splitting=splitting)
        for heads in (1, 2):
            every = torch.ones(len(seqs), heads, pages_of(cache, seqs), dtype=torch.bool)
            got = run(cache, seqs, q, bits_of(every), splitting=splitting)
            assert torch.equal(got[0], plain[0])
            assert torch.equal(got[1], plain[1])


def test_a_sequence_that_selects_nothing():
    """Beside ones that do, in one head of two, cut and whole: zeros, and the sink alone."""
    cache, seqs = make_cache((300, 70, 40))
    sinks = torch.linspace(-3, 4, 8)
    selected = chosen(3, 2, 19, 0.7)
    selected[0] = selected[2, 1] = False
    for splitting in (SMALL, UNCUT, FOLDED, PAIRS):
        o, lse = check(cache, seqs, selected, splitting=splitting)
        assert not o[0].any()
        assert not o[2, :, 4:].any()
        assert (lse[0] == -math.inf).all()
        _, lse = check(cache, seqs, selected, splitting=splitting, sinks=sinks)
        assert torch.allclose(lse[0, :, 0], sinks)


@pytest.mark.parametrize("beyond", [-1, 0x55555555])
def test_bits_past_a_sequence_s_end_select_nothing(beyond):
    cache, seqs = make_cache(LENGTHS)
    check(cache, seqs, chosen(len(seqs), 2, 200), beyond=beyond)


def test_fewer_bits_than_pages():
    """Pages that the bits do not tell about are not read."""
    cache, (seq,) = make_cache((16 * 40,))
    selected = chosen(1, 2, 40)
    selected[..., 32:] = False
    q = queries(cache, [seq])
    got = run(cache, [seq], q, bits_of(selected)[..., :1])
    assert_decoded(got, q, cache, [seq], selected=selected)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_of_more_pages_than_the_plan_has_room_for_the_first_are_read(most):
    cache, seqs = make_cache(LENGTHS)
    for tokens in (1, 3):
        for splitting in (SMALL, PAIRS):
            check(cache, seqs, share=0.8, most=most, tokens=tokens, splitting=splitting)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int4"])
def test_what_is_not_selected_may_be_anything(kv_format):
    """NaN in the keys, values and scales of the pages that a head leaves out, and in those alone."""
    cache, seqs = make_cache((200, 65, 31), kv_format=kv_format)
    selected = chosen(3, 2, 13)
    q = queries(cache, seqs)
    parts = stored(cache)
    clean = run(cache, seqs, q, bits_of(selected))
    for n, seq in enumerate(seqs):
        for head in range(2):
            pages = cache.page_list(seq)
            gone = torch.from_numpy(pages[~selected[n, head, : len(pages)].numpy()].astype(np.int64))
            for x in (*parts[0], *parts[1]):
                if x.dtype.is_floating_point and x.element_size() > 1:
                    x[gone, :, head] = math.nan
                else:
                    x.view(torch.uint8)[gone, :, head] = 0x7F
    for tma in (True, False):
        got = run(cache, seqs, q, bits_of(selected), parts=parts, tma=tma)
        assert torch.equal(got[0], clean[0])
        assert torch.equal(got[1], clean[1])


def test_sequences_of_thousands_of_pages():
    """More words of bits than a block's warps take at once; the first page, the last, and some between."""
    cache, (seq,) = make_cache((16 * 1100 + 5,), kv_heads=1)
    selected = chosen(1, 1, 1101, 0.02)
    selected[..., 0] = selected[..., -1] = True
    check(cache, [seq], selected)
    check(cache, [seq], selected, most=7, splitting=None)


# ---- plans -----------------------------------------------------------------------------------------------------------
def test_one_plan_serves_every_selection():
    """The same kernel and list, whatever the bits are; per head and for all heads are two kernels."""
    cache, seqs = make_cache(LENGTHS)
    q = queries(cache, seqs)
    plan = plan_decode(cache, seqs, num_heads=8, pages_per_seq=12)
    for seed in range(6):
        selected = chosen(len(seqs), 1 + seed % 2, 19, seed / 6, seed)
        got = run(cache, seqs, q, bits_of(selected), plan=plan, mode=MODES[seed % 4])
        assert_decoded(got, q, cache, seqs, selected=selected & (selected.cumsum(-1) <= 12))
    assert len(decoding.kept(plan).bound) == 2
    assert len(decoding.kept(plan).lists) == 1


def test_a_plan_that_grows():
    """New pages and longer last pages, to the end of the room; sequences of more and of fewer tokens than are read."""
    cache, seqs = make_cache((1, 16, 90, 0, 200, 31), spare=60)
    q = queries(cache, seqs, tokens=2)
    plan = plan_decode(cache, seqs, num_heads=8, tokens_per_seq=2, pages_per_seq=6, room=60)
    for number, step in enumerate((0, 1, 15, 20, 24)):
        if step:
            grow(cache, seqs, step, seed=70 + number)
            (listed,) = decoding.kept(plan).lists.values()
            listed.grow([cache.length(s) for s in seqs], [cache.page_list(s) for s in seqs])
        selected = chosen(len(seqs), 2, 17, 0.6, seed=number)
        got = run(cache, seqs, q, bits_of(selected), plan=plan, room=60, splitting=PAIRS)
        assert_decoded(got, q, cache, seqs, selected=selected & (selected.cumsum(-1) <= 6))
    assert listed.items[..., Word.STOP].max() == 6 * 16, "no work where nothing can be selected"


@pytest.mark.parametrize("kv_format", ["bf16", "int4"])
@arch.as_card("sm_90a")
def test_warps_in_step_read_what_all_heads_selected(kv_format, monkeypatch):
    """One copy brings a chunk for all heads of a block where they read the same pages, and only there."""
    monkeypatch.setattr(decoding, "multiprocessors", lambda device: 1)
    heads = 8 if kv_format == "int4" else 4
    cache, seqs = make_cache((70, 33, 129, 5, 40), kv_format=kv_format, kv_heads=heads)
    q = queries(cache, seqs, group=2)
    plan = plan_decode(cache, seqs, num_heads=2 * heads, pages_per_seq=9)
    for many in (1, heads):
        selected = chosen(len(seqs), many, 9)
        got = run(cache, seqs, q, bits_of(selected), plan=plan, splitting=PAIRS)
        assert_decoded(got, q, cache, seqs, selected=selected)
    in_step = [dict(bound.spec.constants)["kInStep"] for bound in decoding.kept(plan).bound.values()]
    assert in_step == [True, False]


@pytest.mark.parametrize(("blocks", "group", "at_once"), [(200, 1, 1), (4, 1, 2), (2, 1, 4), (2, 3, 4)])
def test_heads_with_different_numbers_of_states_are_merged(blocks, group, at_once, monkeypatch):
    """One head of a sequence has one state, its neighbours many or none; a block merges a row, or a warp `at_once`,
    which may be those of several heads."""
    monkeypatch.setattr(decoding, "multiprocessors", lambda device: blocks)
    cache, seqs = make_cache((1500, 300, 40), kv_heads=6)
    selected = chosen(3, 6, 94, 0.7)
    selected[:, 1] = False
    selected[:, 2, 2:] = False
    selected[1, 4, 5:] = False
    plan = plan_decode(cache, seqs, num_heads=6 * group, pages_per_seq=94)
    check(cache, seqs, selected, group=group, splitting=PAIRS, plan=plan)
    (bound,) = decoding.kept(plan).bound.values()
    assert bound.args.merge_rows == at_once


def test_a_tenth_of_the_pages_is_a_tenth_of_the_bytes(monkeypatch):
    """What the kernel copies of keys and values, as the emulator counts it."""
    cache, seqs = make_cache((1600, 1600), kv_heads=2)
    q = queries(cache, seqs)
    counted: list[int] = []
    launch = emulator.launch

    def counting(spec: Any, *given: Any, **options: Any) -> None:
        counters = launch(spec, *given, **options, count=True)
        assert counters is not None
        counted.append(counters.async_bytes)

    monkeypatch.setattr(emulator, "launch", counting)
    decode(cache, seqs, q)
    selected = torch.zeros(2, 2, 100, dtype=torch.bool)
    for n, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        selected[n, head, torch.randperm(100, generator=torch.Generator().manual_seed(2 * n + head))[:10]] = True
    run(cache, seqs, q, bits_of(selected), most=10)
    plain, listing, tenth = counted
    assert plain == 2 * 1600 * 2 * 2 * 64 * 2  # sequences, tokens, heads, keys and values, bfloat16
    assert listing == 0
    assert tenth == plain // 10


def test_chance():
    for seed in range(24):
        chance(seed)


# ---- compiled --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(("kv_format", "head_dim"), [("bf16", 128), ("int8", 128), ("int4", 128), ("bf16", 256)])
def test_no_kernel_spills(kv_format, head_dim, arch):
    fmt = KVFormat(kv_format, head_dim)
    tma = arch == "sm_90a"
    tiling = decode_kernels.choose_tiling(fmt, 4, tma=tma, arch=arch)
    for spec in (decode_kernels.SELECT_SPEC, decode_kernels.decode_spec(BF16, fmt, 16, tiling, tma=tma, selected=True)):
        report = compiler.compile(spec, arch).report
        assert report.spill_stores == report.spill_loads == 0
