"""attention() with block schedules of every form on the CPU, alone and beside a mask; and schedule_of()."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import assert_attention, assert_state, poison, qkv
from variant_cases import variants

from tilewise import BlockSchedule, attention, attention_varlen, plan_attention, reference, schedule_of

NAMES = tuple(variants(1, 1, 1))


def chance(*shape, seed=0, share=0.5):
    """bools, True with this chance."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


def lengths(blocks, block, batch=None, seed=0):
    """How many rows of each block are valid: some none, some all."""
    shape = (blocks,) if batch is None else (batch, blocks)
    values = torch.randint(-4, block + 5, shape, generator=torch.Generator().manual_seed(seed))
    return values.clamp(0, block).int()


def schedule(seqlen_q, seqlen_k, block_q, block_k, batch=None, heads=None, lengths_by=None, seed=0):
    """A random one; lengths_by: None for none, 1 for lengths of all sequences, else of each."""
    nq, nk = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    lead = () if heads is None and batch is None else (heads or 1,) if batch is None else (batch, heads or 1)
    given = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_q": block_q, "block_k": block_k}
    if lengths_by is not None:
        each = None if lengths_by == 1 else lengths_by
        given |= {"lengths_q": lengths(nq, block_q, each, seed), "lengths_k": lengths(nk, block_k, each, seed + 1)}
    return BlockSchedule.from_blocks(chance(*lead, nq, nk, seed=seed), **given)


MASKS = {
    "no mask": None,
    "mask": lambda b, h, q, k: (q - k) % 5 != 0,
    "mask of head and sequence": lambda b, h, q, k: (q + k) % (h + 2) != b,
}
OPTIONS = [{}, {"causal": True}, {"window": (30, 7), "sinks": torch.tensor([0.0, 1.0, -2.0, 3.0])}, {"softcap": 3.0}]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", [None, 2, 4], ids=["all heads", "KV heads", "query heads"])
@pytest.mark.parametrize(("batch", "lengths_by"), [(None, None), (None, 1), (3, None), (3, 1), (3, 3)])
def test_forms(batch, lengths_by, heads, options, mask):
    """Of all sequences or of each, with lengths of all, of each or without."""
    q, k, v = qkv(3, 130, 200, 4, 2, 16)
    given = {"schedule": schedule(130, 200, 32, 48, batch, heads, lengths_by), **options}
    if MASKS[mask] is not None:
        given["mask"] = MASKS[mask]
    assert_attention(attention(q, k, v, return_lse=True, out=poison(q), **given), q, k, v, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [(16, 16), (128, 16), (16, 128), (64, 64), (128, 128), (48, 112)])
@pytest.mark.parametrize("seqlens", [(1, 1), (63, 129), (129, 63), (300, 300)])
def test_blocks_and_lengths(seqlens, blocks, dtype):
    q, k, v = qkv(2, *seqlens, 4, 2, 32, dtype=dtype)
    given = {"schedule": schedule(*seqlens, *blocks, 2, 2, 2, seed=5), "mask": lambda b, h, q, k: q * 2 >= k}
    assert_attention(attention(q, k, v, return_lse=True, **given), q, k, v, **given)


def test_rows_past_a_length_are_zero_and_minus_infinity():
    q, k, v = qkv(1, 96, 96, 2, 1, 16)
    sizes = {"seqlen_q": 96, "seqlen_k": 96, "block_q": 32, "block_k": 32}
    given = BlockSchedule.from_blocks(torch.ones(3, 3, dtype=torch.bool), lengths_q=torch.tensor([32, 5, 0]), **sizes)
    o, lse = attention(q, k, v, schedule=given, return_lse=True, out=poison(q))
    assert (o[:, 37:] == 0).all()
    assert (lse[..., 37:] == -math.inf).all()
    assert torch.isfinite(lse[..., :37]).all()


def test_lengths_of_blocks_that_are_seen_whole():
    """Blocks of queries that see the same whole blocks run as one tile only if none of them is short."""
    q, k, v = qkv(1, 300, 700, 2, 1, 16)
    sizes = {"seqlen_q": 300, "seqlen_k": 700, "block_q": 32, "block_k": 64}
    given = {
        "schedule": BlockSchedule.from_blocks(torch.ones(10, 11, dtype=torch.bool), lengths_q=lengths(10, 32), **sizes),
        "mask": lambda b, h, q, k: k < 680,
    }
    assert_attention(attention(q, k, v, return_lse=True, out=poison(q), **given), q, k, v, **given)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_one_schedule_of_all_heads_beside_a_mask_that_tells_them_apart(heads):
    """A whole plane says where the mask is asked: here everywhere, and by all heads at once."""
    q, k, v = qkv(2, 200, 300, *heads, 16)
    blocks = chance(2, 5, share=0.8)
    sizes = {"seqlen_q": 200, "seqlen_k": 300, "block_q": 128, "block_k": 64}
    given = {
        "schedule": BlockSchedule.from_blocks(blocks, whole=torch.zeros_like(blocks), **sizes),
        "mask": MASKS["mask of head and sequence"],
    }
    assert_attention(attention(q, k, v, return_lse=True, **given), q, k, v, **given)


def test_fp8():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv(2, 130, 200, 4, 2, 16))
    given = {"schedule": schedule(130, 200, 32, 48, 2, 2, 2), "mask": MASKS["mask"]}
    assert_attention(attention(q, k, v, return_lse=True, **given), q, k, v, **given)


@pytest.mark.parametrize("mask", MASKS)
def test_packed_sequences_with_a_schedule_each(mask):
    lengths_q, lengths_k = (65, 0, 30, 129), (129, 16, 63, 127)
    starts = [torch.tensor([0, *n]).cumsum(0) for n in (lengths_q, lengths_k)]
    q, k, v = (x[0] for x in qkv(1, sum(lengths_q), sum(lengths_k), 4, 2, 32))
    forms = [(16, 32, None, 4), (32, 32, None, None), None, (64, 16, None, 2)]
    given = {
        "schedule": [
            None if form is None else schedule(nq, nk, *form, lengths_by=1)
            for form, nq, nk in zip(forms, lengths_q, lengths_k, strict=True)
        ],
        "mask": MASKS[mask],
        "causal": True,
    }
    got = attention_varlen(q, k, v, *starts, return_lse=True, out=poison(q), **given)
    exact, honest = (
        reference.attention_varlen(q, k, v, *starts, dtype=dtype, **given) for dtype in (torch.float64, torch.float32)
    )
    assert_state(got, exact, honest)


@pytest.mark.parametrize("mask", MASKS)
def test_packed_sequences_with_one_schedule_of_a_batch(mask):
    starts = torch.tensor([0, 100, 200, 300], dtype=torch.int32)
    q, k, v = (x[0] for x in qkv(1, 300, 300, 4, 2, 32))
    given = {"schedule": schedule(100, 100, 32, 16, 3, 2, 3), "mask": MASKS[mask]}
    got = attention_varlen(q, k, v, starts, starts, return_lse=True, **given)
    dense = [x.unflatten(0, (3, 100)) for x in (q, k, v)]
    o, lse = got[0].unflatten(0, (3, 100)), got[1].unflatten(1, (3, 100)).transpose(0, 1)
    assert_attention((o, lse), *dense, **given)


# ---- schedule_of ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [(128, 128), (64, 16), (16, 112)])
@pytest.mark.parametrize("name", [name for name in NAMES if variants(1, 1, 1)[name].mask is not None])
def test_schedule_of_keeps_what_is_seen(name, blocks):
    seqlen_q, seqlen_k = 260, 420
    mask = variants(3, seqlen_q, seqlen_k, batch=2)[name].mask
    made = schedule_of(mask, 2, 3, seqlen_q, seqlen_k, block_q=blocks[0], block_k=blocks[1])
    seen = torch.zeros(2, 3, seqlen_q, seqlen_k, dtype=torch.bool)
    zeros = torch.zeros(2, seqlen_q, 3, 8), torch.zeros(2, seqlen_k, 3, 8)
    # The oracle's LSE over one key at a time would be slow: weights of equal scores tell what is seen.
    v = torch.eye(seqlen_k)[None, :, None].expand(2, -1, 3, -1)
    for start in range(0, seqlen_k, 64):
        o, _ = reference.attention(zeros[0], zeros[1], v[..., start : start + 64], mask=mask)
        seen[..., start : start + 64] = (o > 0).transpose(1, 2)
    kept = made.to_mask()
    assert not (seen & ~kept).any()
    assert made.whole is not None
    whole = whole_of(made).to_mask()
    assert not (whole & ~seen).any()
    assert (made.batch, made.heads) == (2 if name == "prefix-LM" else None, None)


def whole_of(made):
    """The blocks of the whole plane as a schedule of its own."""
    bits = (made.whole[..., None] >> torch.arange(32) & 1).flatten(-2)[..., : made.num_k_blocks].bool()
    sizes = {name: getattr(made, name) for name in ("seqlen_q", "seqlen_k", "block_q", "block_k")}
    return BlockSchedule.from_blocks(bits, **sizes)


@pytest.mark.parametrize("blocks", [(128, 128), (32, 64)])
@pytest.mark.parametrize("name", [name for name in NAMES if variants(1, 1, 1)[name].mask is not None])
def test_a_schedule_given_back_beside_its_mask(name, blocks):
    q, k, v = qkv(2, 300, 420, 4, 2, 16)
    mask = variants(4, 300, 420, batch=2)[name].mask
    made = schedule_of(mask, 2, 4, 300, 420, block_q=blocks[0], block_k=blocks[1])
    assert_attention(attention(q, k, v, mask=mask, schedule=made, return_lse=True), q, k, v, mask=mask)
    if blocks == (128, 128):
        assert plan_attention(q, k, mask=mask, schedule=made) == plan_attention(q, k, mask=mask)


def test_schedule_of_a_causal_mask():
    made = schedule_of(lambda b, h, q, k: q >= k, 4, 8, 1024, 1024)
    triangle = torch.ones(8, 8, dtype=torch.bool).tril()
    sizes = {"seqlen_q": 1024, "seqlen_k": 1024, "block_q": 128, "block_k": 128}
    assert made == BlockSchedule.from_blocks(triangle, whole=triangle.tril(-1), **sizes)


def test_schedule_of_has_heads_where_the_mask_does():
    made = schedule_of(lambda b, h, q, k: q >= k + 128 * h, 2, 3, 512, 512)
    assert (made.batch, made.heads) == (None, 3)


def test_refusals():
    q, k, v = qkv(2, 64, 64, 4, 2, 16)

    def causal(b, h, q, k):
        return q >= k

    with pytest.raises(ValueError, match="batch=3"):
        attention(q, k, v, schedule=schedule(64, 64, 16, 16, 3))
    with pytest.raises(ValueError, match="num_heads=3"):
        attention(q, k, v, schedule=schedule(64, 64, 16, 16, None, 3))
    with pytest.raises(ValueError, match=r"seqlen_q=48.*seqlen_q=64"):
        attention(q, k, v, schedule=schedule(48, 64, 16, 16))
    with pytest.raises(TypeError, match=r"schedule must be a tilewise\.BlockSchedule, got list"):
        attention(q, k, v, schedule=[])
    starts = torch.tensor([0, 64, 128])
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"sequence 1.*batch=2, got batch=1"):
        attention_varlen(*packed, starts, starts, schedule=[None, schedule(64, 64, 16, 16, 2)])
    with pytest.raises(ValueError, match="one entry for each of the 2 sequences, got 1"):
        attention_varlen(*packed, starts, starts, schedule=[None])
    with pytest.raises(TypeError, match="BlockSchedule or a list of them, got str"):
        attention_varlen(*packed, starts, starts, schedule="causal")
    for sizes, error, match in (
        ((0, 1, 8, 8), ValueError, "B must be at least 1"),
        ((1, 1.5, 8, 8), TypeError, "H must be an int"),
        ((1, 1, -1, 8), ValueError, "Nq must be at least 0"),
    ):
        with pytest.raises(error, match=match):
            schedule_of(causal, *sizes)
    with pytest.raises(ValueError, match="block_q must be a multiple of 16"):
        schedule_of(causal, 1, 1, 8, 8, block_q=10)
    with pytest.raises(TypeError, match="mask must be a function"):
        schedule_of(None, 1, 1, 8, 8)
    elsewhere = torch.ones(8, dtype=torch.bool)
    with pytest.raises(ValueError, match="meta"):
        schedule_of(lambda b, h, q, k: elsewhere[k], 1, 1, 8, 8, device="meta")
