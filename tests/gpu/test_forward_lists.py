"""The Hopper forward over lists: block schedules, lengths of blocks and mask functions, in the emulator."""

from __future__ import annotations

import math

import pytest
import torch
from forward_cases import BF16, FP16, MODES, NAN, check, check_varlen
from oracle import qkv, randn
from variant_cases import variants

from tilewise import BlockSchedule, attention, attention_varlen, functions
from tilewise.gpu import kinds
from tilewise.gpu.abi import FP8
from tilewise.gpu.pattern import block_keys


def random_schedule(nq, nk, block_q, block_k, *, lead=(), density=0.4, seed=0, lengths=False) -> BlockSchedule:
    """Blocks kept at random, no block of one row; lengths: of every block, 0 and whole ones among them."""
    random = torch.Generator().manual_seed(seed)
    rows, columns = -(-nq // block_q), -(-nk // block_k)
    blocks = torch.rand(*lead, rows, columns, generator=random) < density
    if rows > 2:
        blocks[..., 1, :] = False
    options = {}
    if lengths:
        options["lengths_q"] = torch.randint(0, block_q + 1, (rows,), generator=random)
        options["lengths_k"] = torch.randint(0, block_k + 1, (columns,), generator=random)
        for name, n, block in (("lengths_q", nq, block_q), ("lengths_k", nk, block_k)):
            options[name][-1] = min(int(options[name][-1]), n - (n - 1) // block * block)
    return BlockSchedule.from_blocks(blocks, seqlen_q=nq, seqlen_k=nk, block_q=block_q, block_k=block_k, **options)


# head_dim, block_q, block_k, seqlen_q, seqlen_k
SIZES = (
    (128, 128, 128, 300, 700),
    (128, 64, 64, 300, 700),
    (64, 64, 128, 129, 511),
    (64, 128, 16, 300, 300),
    (128, 16, 32, 65, 300),
    (96, 48, 48, 150, 300),
    (128, 32, 112, 127, 400),
    (192, 128, 64, 200, 300),
    (256, 64, 128, 200, 300),
    (40, 32, 80, 130, 300),
    (20, 64, 64, 130, 140),
)


@pytest.mark.parametrize(("head_dim", "block_q", "block_k", "nq", "nk"), SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_block_sizes(head_dim, block_q, block_k, nq, nk, causal):
    """Blocks of every kind of size: whole tiles, several per tile, rows of several blocks in one tile, no TMA."""
    q, k, v = qkv(1, nq, nk, 2, 2, head_dim, dtype=BF16)
    schedule = random_schedule(nq, nk, block_q, block_k, lead=(2,), seed=head_dim + block_k)
    check(q, k, v, schedule=schedule, causal=causal)


@pytest.mark.parametrize("lead", [(), (2,), (4,), (3, 1), (3, 2), (3, 4)])
def test_patterns_per_sequence_and_head(lead):
    """One for all, per KV head, per query head, per sequence; with grouped heads."""
    q, k, v = qkv(3, 130, 200, 4, 2, 64, dtype=FP16)
    check(q, k, v, schedule=random_schedule(130, 200, 64, 64, lead=lead))


@pytest.mark.parametrize("lead", [(), (2,), (8,)])
def test_packed_heads_share_a_tile(lead):
    """Few rows of grouped heads: the heads of a KV head are rows of one tile, unless each has a pattern of its own."""
    q, k, v = qkv(2, 5, 300, 8, 2, 128, dtype=BF16)
    check(q, k, v, schedule=random_schedule(5, 300, 16, 64, lead=lead, density=0.6), causal=True)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("block", [128, 64])
def test_orders_of_threads(block, mode):
    q, k, v = qkv(1, 300, 400, 2, 1, 128, dtype=BF16)
    check(q, k, v, schedule=random_schedule(300, 400, block, block), causal=True, mode=mode)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"window": (50, 20)},
        {"alibi_slopes": torch.tensor([0.5, 0.1])},
        {"sinks": torch.tensor([1.0, -2.0])},
        {"scale": -0.2},
        {"exact": True, "causal": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_with_the_other_options(options):
    q, k, v = qkv(1, 200, 300, 2, 1, 128, dtype=BF16)
    check(q, k, v, schedule=random_schedule(200, 300, 64, 64), **options)


@pytest.mark.parametrize(
    ("head_dim", "block_q", "block_k"), [(128, 128, 128), (128, 64, 64), (64, 128, 32), (256, 64, 64), (128, 16, 16)]
)
@pytest.mark.parametrize("options", [{}, {"exact": True, "causal": True, "sinks": torch.tensor([1.0, 0.0])}])
def test_lengths_of_blocks(head_dim, block_q, block_k, options):
    """Rows and keys past their block's length hold NaN, which reaches nothing."""
    nq, nk = 200, 300
    schedule = random_schedule(nq, nk, block_q, block_k, lead=(2,), lengths=True, density=0.7)
    q, k, v = qkv(1, nq, nk, 2, 2, head_dim, dtype=BF16)
    for x, block, lengths in ((q, block_q, schedule.lengths_q), (k, block_k, schedule.lengths_k)):
        place = torch.arange(x.shape[1])
        missing = place % block >= lengths[0][place // block]
        x[:, missing] = NAN
        if x is k:
            v[:, missing] = NAN
    clean = [x.nan_to_num(0.0) for x in (q, k, v)]
    given = {"schedule": schedule, "backend": "emulator", "return_lse": True, **options}
    for got, expected in zip(attention(q, k, v, **given), check(*clean, schedule=schedule, **options), strict=True):
        assert torch.equal(got, expected)


def test_keys_past_the_end_are_not_touched():
    """K and V of a longer tensor: what lies behind the last key is NaN."""
    q, k, v = qkv(1, 130, 256, 1, 1, 128, dtype=BF16)
    k[:, 200:] = v[:, 200:] = NAN
    check(q, k[:, :200], v[:, :200], schedule=random_schedule(130, 200, 64, 64, density=0.8))


def test_scores_at_the_edge():
    """Logits of ±1e4, and rows that see nothing."""
    q, k, v = qkv(1, 200, 300, 1, 1, 64, dtype=BF16, size=2500.0)
    check(q, k, v, schedule=random_schedule(200, 300, 64, 64))


@pytest.mark.parametrize("block", [64, 128])
def test_fp8(block):
    q, k, v = (x.to(FP8) for x in qkv(1, 200, 300, 2, 2, 128))
    got = check_fp8(q, k, v, random_schedule(200, 300, block, block, density=0.6))
    assert got[0].dtype == BF16
    check_fp8(q, k, v, random_schedule(200, 300, block, block, lengths=True, density=0.8))


def check_fp8(q, k, v, schedule):
    """P is rounded to FP8, as dense calls have it: the output is off by what that costs."""
    got = attention(q, k, v, schedule=schedule, backend="emulator", return_lse=True)
    exact = attention(*(x.float() for x in (q, k, v)), schedule=schedule, return_lse=True)
    assert torch.equal(got[1].isfinite(), exact[1].isfinite())
    seen = exact[1].isfinite()
    assert (got[1] - exact[1])[seen].abs().max() < 1e-5
    assert (got[0].float() - exact[0]).abs().max() < 0.07 * v.float().abs().max()
    return got


@pytest.mark.parametrize("page_size", [0, 16, 64, 48])
def test_packed_sequences(page_size):
    """A schedule per sequence, one sequence without, one empty; K and V in pages too."""
    lengths_q, lengths_k = (70, 0, 129, 64), (200, 30, 129, 100)
    heads, dim = 2, 64
    q = randn(sum(lengths_q), heads, dim, dtype=BF16)
    starts_q, starts_k = (
        torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32) for x in (lengths_q, lengths_k)
    )
    schedules = [random_schedule(a, b, 64, 32, lead=(2,), seed=a) for a, b in zip(lengths_q, lengths_k, strict=True)]
    schedules[3] = None
    if page_size:
        pages = [-(-n // page_size) for n in lengths_k]
        order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(1))
        k, v = (randn(len(order), page_size, heads, dim, dtype=BF16, seed=s) for s in (1, 2))
        table = torch.full((4, max(pages)), 10**6, dtype=torch.int32)
        for b, n in enumerate(pages):
            table[b, :n] = order[sum(pages[:b]) : sum(pages[: b + 1])]
        check_varlen(q, k, v, starts_q, starts_k, page_table=table, schedule=schedules, causal=True)
    else:
        k, v = (randn(sum(lengths_k), heads, dim, dtype=BF16, seed=s) for s in (1, 2))
        check_varlen(q, k, v, starts_q, starts_k, schedule=schedules, causal=True)


@pytest.mark.parametrize("page_size", [1, 8, 24])
def test_pages_that_are_too_small(page_size):
    """A unit of keys lies in one page, and is no smaller than 16 keys; a score alone needs no units."""
    starts = torch.tensor([0, 20], dtype=torch.int32)
    q, (k, v) = randn(20, 1, 64, dtype=BF16), (randn(24, page_size, 1, 64, dtype=BF16, seed=s) for s in (1, 2))
    table, n = torch.arange(24, dtype=torch.int32)[None], min(24, 24 * page_size)
    given = (q, k, v, starts, torch.tensor([0, n], dtype=torch.int32))
    for options in ({"schedule": random_schedule(20, n, 16, 16)}, {"mask": lambda b, h, q, k: q >= k}):
        with pytest.raises(NotImplementedError, match=f"multiple of 16 tokens, got pages of {page_size}; use"):
            attention_varlen(*given, page_table=table, backend="emulator", **options)
        attention_varlen(*given, page_table=table, backend="cpu", **options)


def test_packed_sequences_with_an_output_that_is_an_input():
    starts = torch.tensor([0, 40, 100], dtype=torch.int32)
    q, k, v = (randn(100, 2, 64, dtype=BF16, seed=s) for s in range(3))
    given = {"schedule": [random_schedule(n, n, 16, 16, seed=n) for n in (40, 60)], "backend": "emulator"}
    expected = attention_varlen(q, k, v, starts, starts, **given)
    assert torch.equal(attention_varlen(q, k, v, starts, starts, out=v, **given), expected)


def test_block_keys():
    """A block of the kernel holds whole units, a unit lies in one block of the schedule and in one page."""
    for most in (48, 64, 96, 128):
        for block in range(16, 129, 16):
            for page in (0, 16, 48, 64, 256):
                for step in (16, 32):
                    keys, unit = block_keys(most, block, page, step)
                    assert keys <= most
                    assert keys % step == 0
                    assert keys % unit == 0
                    assert block % unit == 0
                    assert not page or page % unit == 0
                    assert unit >= min(16, block)
    assert block_keys(128, 64, 0, 16) == (128, 64)
    assert block_keys(128, 128, 0, 16) == (128, 128)
    assert block_keys(64, 128, 0, 16) == (64, 64)


# ---- functions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", variants(2, 8, 8))
@pytest.mark.parametrize(("head_dim", "nq", "nk"), [(128, 200, 333), (64, 129, 129)])
def test_the_ten_variants(name, head_dim, nq, nk):
    variant = variants(2, nq, nk)[name]
    q, k, v = qkv(1, nq, nk, 2, 1, head_dim, dtype=BF16)
    check(q, k, v, mask=variant.mask, score=variant.score)


@pytest.mark.parametrize("head_dim", [40, 192, 256, 20])
def test_functions_and_head_dims(head_dim):
    both = variants(2, 150, 200)
    q, k, v = qkv(2, 150, 200, 2, 2, head_dim, dtype=FP16)
    check(q, k, v, mask=both["documents"].mask, score=both["ALiBi"].score)


def test_functions_with_window_and_sinks():
    both = variants(4, 150, 200)
    q, k, v = qkv(1, 150, 200, 4, 2, 64, dtype=BF16)
    mask = both["documents"].mask
    check(q, k, v, mask=mask, causal=True, window=(60, 0), sinks=torch.tensor([1.0, 0.0, -1.0, 2.0]))
    check(q, k, v, mask=mask, softcap=3.0)
    check(q, k, v, mask=mask, alibi_slopes=torch.tensor([0.5, 0.1, 0.2, 1.0]))


def test_scores_of_minus_infinity():
    """A score function may hide keys too, in blocks that no mask cuts, and all keys of a row."""
    q, k, v = qkv(1, 150, 300, 1, 1, 128, dtype=BF16)
    check(q, k, v, score=lambda s, b, h, q, k: torch.where((k > q + 100) | (q == 7), -math.inf, s))
    check(q, k, v, score=lambda s, b, h, q, k: torch.where(k % 3 == 0, -math.inf, s), exact=True)


def test_packed_heads_with_functions():
    """Heads that are rows of one tile each get their own number."""
    q, k, v = qkv(2, 6, 300, 8, 2, 128, dtype=BF16)
    check(q, k, v, mask=lambda b, h, q, k: k < 40 * h + 30 * b + q, score=lambda s, b, h, q, k: s * (1 + h) * 0.2)


def test_functions_over_packed_sequences():
    lengths_q, lengths_k = (70, 0, 129, 64), (200, 30, 129, 100)
    q = randn(sum(lengths_q), 2, 64, dtype=BF16)
    k, v = (randn(sum(lengths_k), 2, 64, dtype=BF16, seed=s) for s in (1, 2))
    starts_q, starts_k = (
        torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32) for x in (lengths_q, lengths_k)
    )
    limit = torch.tensor([100, 3, 60, 80])
    check_varlen(q, k, v, starts_q, starts_k, mask=lambda b, h, q, k: (k <= limit[b]) & (k >= q // 2))
    check_varlen(q, k, v, starts_q, starts_k, score=lambda s, b, h, q, k: s - 0.1 * (q - k).abs(), causal=True)


@pytest.mark.parametrize("block", [64, 128])
def test_function_and_schedule_together(block):
    """Both must allow; blocks that the schedule promises to be whole are not searched again."""
    nq, nk = 200, 300
    q, k, v = qkv(1, nq, nk, 2, 2, 128, dtype=BF16)

    def mask(b, h, q, k):
        return (q + k) % 5 < 3

    check(q, k, v, schedule=random_schedule(nq, nk, block, block, lead=(2,)), mask=mask)
    rows, columns = -(-nq // block), -(-nk // block)
    kept = torch.rand(rows, columns, generator=torch.Generator().manual_seed(3)) < 0.6
    whole = kept & (torch.arange(columns) % 2 == 0)
    sizes = {"seqlen_q": nq, "seqlen_k": nk, "block_q": block, "block_k": block}
    schedule = BlockSchedule.from_blocks(kept, whole=whole, **sizes)
    check(q, k, v, schedule=schedule, mask=lambda b, h, q, k: (k // block % 2 == 0) | (q > k), causal=True)


def test_fp8_functions():
    q, k, v = (x.to(FP8) for x in qkv(1, 200, 300, 2, 2, 64))
    variant = variants(2, 200, 300)
    given = {"mask": variant["documents"].mask, "score": variant["ALiBi"].score, "return_lse": True}
    got = attention(q, k, v, backend="emulator", k_descale=torch.tensor([0.5, 2.0]), **given)
    wide = [x.float() for x in (q, k, v)]
    wide[1] = wide[1] * torch.tensor([0.5, 2.0])[:, None]
    exact = attention(*wide, **given)
    seen = exact[1].isfinite()
    assert (got[1] - exact[1])[seen].abs().max() < 1e-4
    assert (got[0].float() - exact[0]).abs().max() < 0.07 * v.float().abs().max()


@pytest.mark.parametrize("name", ["causal", "window", "documents", "tree of drafts", "2-D neighbourhood", "prefix-LM"])
def test_schedule_of_a_mask_on_the_device(name):
    """kinds.cu tells the truth about every block: what is seen of it, and whether that is all."""
    mask, block_q, block_k, nq, nk = variants(2, 200, 333, batch=2)[name].mask, 32, 48, 200, 333
    function = functions.of(mask, None)
    found = kinds.schedule_of(function, 2, 2, nq, nk, block_q, block_k, torch.device("cpu"))
    b, h = torch.arange(found.batch or 1)[:, None, None, None], torch.arange(found.heads or 1)[:, None, None]
    seen = function.seen(b, h, torch.arange(nq)[:, None], torch.arange(nk))
    rows, columns = found.num_q_blocks, found.num_k_blocks
    pad = (0, columns * block_k - nk, 0, rows * block_q - nq)
    some, every = (
        torch.nn.functional.pad(seen, pad, value=value).unflatten(3, (columns, block_k)).unflatten(2, (rows, block_q))
        for value in (False, True)
    )
    sizes = {"seqlen_q": nq, "seqlen_k": nk, "block_q": block_q, "block_k": block_k}
    truth = BlockSchedule.from_blocks(some.any(5).any(3), whole=every.all(5).all(3), **sizes)
    assert torch.equal(found.bits, truth.bits)
    assert torch.equal(found.whole, truth.whole)
