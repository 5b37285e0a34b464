"""Decode over float32 caches, in the emulator: errors by the oracle's float32 rule, on Hopper and as other cards."""

from __future__ import annotations

import pytest
import torch
from decode_cases import BF16, MODES, UNCUT, assert_decoded, check, decode, make_cache, make_tree, queries
from decode_page_cases import bits_of, chosen, pages_of, run
from oracle import assert_state
from test_decode_kernel import trees

import tilewise
from tilewise import arch, compiler, plan_decode, reference
from tilewise.formats import KVFormat
from tilewise.gpu import decode_kernels

F32 = torch.float32
SINKS = torch.linspace(-3, 4, 8)


def make(lengths, **options):
    return make_cache(lengths, kv_format="fp32", **options)


@pytest.mark.parametrize("head_dim", decode_kernels.HEAD_DIMS)
def test_head_dims(head_dim):
    """The smallest and the largest also by copies in the shape of another card, to the same bits as by TMA."""
    cache, seqs = make((129, 7, 0, 200), head_dim=head_dim)
    got = check(cache, seqs, dtype=F32)
    if head_dim not in (64, 256):
        return
    with arch.as_card("sm_89" if head_dim > 64 else "sm_80"):
        again = decode(cache, seqs, queries(cache, seqs, dtype=F32), mode=MODES[3])
    assert torch.equal(got[0], again[0])
    assert torch.equal(got[1], again[1])


def test_masks_and_scores():
    cache, seqs = make((1, 63, 0, 129, 300))
    for n, options in enumerate(
        (
            {"tokens": 4, "window": (30, 0)},
            {"tokens": 5, "group": 8},  # sixteen rows at a time
            {"scale": -0.3, "sinks": SINKS},
            {"scale": 0.0, "splitting": UNCUT},
        )
    ):
        check(cache, seqs, dtype=F32, mode=MODES[n], **options)
    check(cache, seqs, dtype=F32, softcap=2.0, sinks=SINKS)
    shared, below = make_tree([1, 4], [90, 30], kv_format="fp32")
    check(shared, below, dtype=F32, share=True, tokens=2, window=(100, 0))
    mask = trees(len(below), 7)
    check(shared, below, dtype=F32, share=True, tokens=7, group=1, tree=mask)


@pytest.mark.parametrize("page_size", [1, 64])
def test_page_sizes(page_size):
    cache, seqs = make((1, 63, 0, 65, 300), page_size=page_size)
    check(cache, seqs, dtype=F32, mode=MODES[2])


def test_every_digit_counts():
    """Sums of thousands of products, logits of ±1e4, and values that differ by 2^40."""
    cache, seqs = make((3000,), kv_heads=1)
    check(cache, seqs, dtype=F32, splitting=None)
    cache, seqs = make((200, 33))
    for size in (300.0, 3e5, 1e-7):
        check(cache, seqs, dtype=F32, size=size, scale=300.0 / size)
    cache = tilewise.PagedKVCache(20, 16, 1, 64, kv_format="fp32")
    seq = cache.allocate()
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(200, 1, 64, generator=generator) for _ in range(2))
    cache.write(0, cache.extend([seq], [200]), k, v * 2.0 ** torch.randint(-20, 21, (200, 1, 1), generator=generator))
    check(cache, [seq], dtype=F32, group=8)


def test_queries_of_sixteen_bits():
    cache, seqs = make((33, 100))
    check(cache, seqs, dtype=BF16)


def test_selected_pages():
    cache, seqs = make((300, 64, 1))
    q = queries(cache, seqs, dtype=F32)
    selected = chosen(3, 2, pages_of(cache, seqs))
    assert_decoded(run(cache, seqs, q, bits_of(selected)), q, cache, seqs, selected=selected)


@pytest.mark.parametrize("card", [None, "sm_80"])
def test_by_the_public_functions(card):
    """An output whose rows are off 16 bytes goes by way of another."""
    cache, seqs = make((70, 33))
    wide = torch.zeros(2, 1, 8, 66)[..., 1:65].copy_(queries(cache, seqs, dtype=F32))
    plan = plan_decode(cache, seqs, num_heads=8)
    exact, honest = (reference.decode(wide, cache, 0, seqs, **more) for more in ({}, {"dtype": F32}))
    with arch.as_card(card):
        for backend in ("cpu", "emulator"):
            assert_state(tilewise.decode(wide, cache, 0, plan, return_lse=True, backend=backend), exact, honest)


def test_what_is_not_served_says_so():
    cache, seqs = make_cache((20,))
    q = queries(cache, seqs, dtype=F32)
    with pytest.raises(NotImplementedError, match=r"float32 queries over fp32 caches, got torch.float32 over bf16"):
        decode(cache, seqs, q)


@pytest.mark.parametrize(("card", "head_dim", "rows"), [("sm_90a", 128, 4), ("sm_120", 256, 4)])
def test_no_kernel_spills(card, head_dim, rows):
    fmt, tma = KVFormat("fp32", head_dim), arch.hopper(card)
    tiling = decode_kernels.choose_tiling(fmt, rows, tma=tma, arch=card)
    spec = decode_kernels.decode_spec(F32, fmt, 16, tiling, tma=tma)
    report = compiler.compile(spec, card).report
    assert not report.spills
    assert arch.occupancy(card, report.registers, spec.threads, spec.shared_bytes) >= tiling.blocks


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", decode_kernels.HEAD_DIMS)
def test_on_a_card(head_dim):
    """Long sequences, where sums that tensor cores cut off would show; pages that TMA takes, and others."""
    for page_size in (16, 24):
        cache, seqs = make((5000, 129, 0, 3000), head_dim=head_dim, page_size=page_size)
        for options in ({}, {"tokens": 4, "window": (2500, 0)}, {"group": 16, "sinks": torch.linspace(-3, 4, 32)}):
            check(cache, seqs, dtype=F32, splitting=None, device="cuda", **options)
    shared, below = make_tree([1, 9], [900, 30], kv_format="fp32", head_dim=head_dim)
    check(shared, below, dtype=F32, share=True, splitting=None, device="cuda")
