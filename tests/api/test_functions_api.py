"""attention() with mask and score functions on the CPU, against the float64 oracle."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import assert_attention, assert_state, poison, qkv, randn
from variant_cases import variants

from tilewise import BlockSchedule, attention, attention_varlen, plan_attention, reference
from tilewise.functions import Function

NAMES = tuple(variants(1, 1, 1))
BUILT_IN = tuple(name for name, variant in variants(1, 1, 1).items() if variant.built_in is not None)
LENGTHS = [(1, 1), (63, 65), (65, 63), (127, 129), (129, 127), (1, 129), (129, 1), (300, 300)]


def given(name, heads, seqlen_q, seqlen_k, batch=1):
    """The functions of a variant, as options."""
    variant = variants(heads, seqlen_q, seqlen_k, batch=batch)[name]
    return {"mask": variant.mask, "score": variant.score}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_variants(name, lengths, dtype):
    q, k, v = qkv(2, *lengths, 4, 2, 32, dtype=dtype)
    options = given(name, 4, *lengths, batch=2)
    assert_attention(attention(q, k, v, return_lse=True, out=poison(q), **options), q, k, v, **options)


@pytest.mark.parametrize("lengths", [(200, 200), (100, 300), (260, 70)])
@pytest.mark.parametrize("name", BUILT_IN)
def test_variants_are_what_is_built_in(name, lengths):
    """The oracle of the built-in option judges the function."""
    q, k, v = qkv(2, *lengths, 4, 2, 32, size=3.0)
    variant = variants(4, *lengths, batch=2)[name]
    got = attention(q, k, v, mask=variant.mask, score=variant.score, return_lse=True)
    assert_attention(got, q, k, v, **variant.built_in)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_variants_of_packed_sequences(name, dtype):
    lengths_q, lengths_k = (65, 0, 1, 129, 40, 0), (129, 7, 63, 127, 0, 0)
    starts = [torch.tensor([0, *n]).cumsum(0) for n in (lengths_q, lengths_k)]
    q, k, v = (x[0] for x in qkv(1, sum(lengths_q), sum(lengths_k), 4, 2, 32, dtype=dtype))
    options = given(name, 4, 129, 129, batch=6)
    got = attention_varlen(q, k, v, *starts, return_lse=True, out=poison(q), **options)
    exact, honest = (
        reference.attention_varlen(q, k, v, *starts, dtype=as_dtype, **options) for as_dtype in (torch.float64, dtype)
    )
    assert_state(got, exact, honest)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("seqlen_q", [3, 300])  # heads folded into rows, and not
def test_a_mask_of_each_head(heads, seqlen_q):
    width = torch.tensor([1, 5, 70, 400, 30, 2])
    q, k, v = qkv(2, seqlen_q, 310, *heads, 32)

    def mask(b, h, q, k):
        return (q - k).abs() <= width[h] + b

    assert_attention(attention(q, k, v, mask=mask, return_lse=True), q, k, v, mask=mask)


def test_a_mask_of_each_packed_sequence():
    """Whole blocks of one are hidden from another."""
    widths, lengths = torch.tensor([0, 400, 130, 1, 260]), (300, 200, 300, 20, 290)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (x[0] for x in qkv(1, sum(lengths), sum(lengths), 4, 2, 16))
    options = {"mask": lambda b, h, q, k: (q - k).abs() < widths[b]}
    got = attention_varlen(q, k, v, starts, starts, return_lse=True, **options)
    exact, honest = (
        reference.attention_varlen(q, k, v, starts, starts, dtype=dtype, **options)
        for dtype in (torch.float64, torch.float32)
    )
    assert_state(got, exact, honest)


MIXED = {
    "causal": {"causal": True},
    "window": {"window": (40, 3)},
    "softcap": {"softcap": 3.0},
    "ALiBi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "sinks": {"sinks": torch.tensor([-1.0, 0.0, 2.0, 40.0])},
    "scale": {"scale": -0.3},
    "schedule": {"schedule": BlockSchedule.random(150, 260, block_q=48, block_k=32, sparsity=0.5, seed=1)},
    "schedule of heads": {
        "schedule": BlockSchedule.random(150, 260, block_q=16, block_k=64, sparsity=0.5, seed=2, heads=4)
    },
    "all": {"causal": True, "window": (100, None), "sinks": torch.zeros(4), "scale": 0.2},
}  # fmt: skip


MIXTURES = [
    (mixed, name)
    for mixed in MIXED
    for name in ("2-D neighbourhood", "prefix-LM", "relative bias table")
    if name != "relative bias table" or mixed not in ("softcap", "ALiBi")  # refused beside a score: a test says so
]


@pytest.mark.parametrize(("mixed", "name"), MIXTURES)
def test_together_with_other_options(mixed, name):
    options = {**given(name, 4, 150, 260, batch=2), **MIXED[mixed]}
    q, k, v = qkv(2, 150, 260, 4, 2, 32, size=2.0)
    assert_attention(attention(q, k, v, return_lse=True, out=poison(q), **options), q, k, v, **options)


@pytest.mark.parametrize("name", ["causal", "documents", "ALiBi"])
def test_fp8(name):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv(2, 150, 200, 4, 2, 32))
    options = given(name, 4, 150, 200, batch=2)
    got = attention(q, k, v, return_lse=True, **options)
    assert got[0].dtype == torch.bfloat16
    assert_attention(got, q, k, v, **options)


def test_a_mask_and_a_score_together():
    slopes = torch.tensor([0.1, 0.2])
    q, k, v = qkv(1, 200, 200, 2, 2, 32)
    options = {"mask": lambda b, h, q, k: q >= k, "score": lambda s, b, h, q, k: s - slopes[h] * (q - k)}
    assert_attention(attention(q, k, v, return_lse=True, **options), q, k, v, **options)


@pytest.mark.parametrize("options", [
    {"mask": lambda b, h, q, k: (q % 7 != 3) & (k < 90)},
    {"score": lambda s, b, h, q, k: torch.where(q % 7 != 3, s, -math.inf)},
    {"mask": lambda b, h, q, k: q % 7 != 3, "softcap": 2.0},
], ids=["mask", "score", "softcap"])  # fmt: skip
def test_rows_without_a_visible_key_are_zero_and_minus_infinity(options):
    q, k, v = qkv(2, 70, 100, 4, 2, 16)
    o, lse = attention(q, k, v, return_lse=True, out=poison(q), **options)
    assert (o[:, 3::7] == 0).all()
    assert (lse[:, :, 3::7] == -math.inf).all()
    assert_attention((o, lse), q, k, v, **options)


@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_very_negative_and_very_positive_scores(level):
    q, k, v = qkv(1, 70, 200, 2, 1, 16)
    options = {"score": lambda s, b, h, q, k: s + level + torch.where(k % 3 == 0, -math.inf, 0.0)}
    got = attention(q, k, v, return_lse=True, **options)
    assert_attention(got, q, k, v, **options)
    assert ((got[1] - level).abs() < 30).all()


def test_a_mask_that_hides_everything_and_one_that_hides_nothing():
    q, k, v = qkv(2, 70, 200, 4, 2, 16)
    o, lse = attention(q, k, v, return_lse=True, mask=lambda b, h, q, k: k < 0, out=poison(q))
    assert (o == 0).all()
    assert (lse == -math.inf).all()
    got = attention(q, k, v, return_lse=True, mask=lambda b, h, q, k: k >= 0)
    assert_attention(got, q, k, v)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "batch"), [(5, 0, 2), (0, 5, 2), (0, 0, 1), (3, 4, 0)])
def test_empty_dimensions(seqlen_q, seqlen_k, batch):
    q, k, v = qkv(batch, seqlen_q, seqlen_k, 4, 2, 8)
    o, lse = attention(q, k, v, mask=lambda b, h, q, k: q >= k, return_lse=True, out=poison(q))
    assert o.shape == q.shape
    assert lse.shape == (batch, 4, seqlen_q)
    if batch and not seqlen_k:
        assert (o == 0).all()
        assert (lse == -math.inf).all()


def test_numbers_and_tensors_of_now_are_taken():
    """A function is traced, and what it captures is looked at, at each call."""
    q, k, v = qkv(1, 100, 100, 1, 1, 16)
    seen, width = torch.ones(100, dtype=torch.bool), 3

    def mask(b, h, q, k):
        return seen[k] & ((q - k).abs() <= width)

    for change in (lambda: None, lambda: seen.logical_not_(), lambda: seen.copy_(torch.arange(100) % 2 == 0)):
        change()
        assert_attention(attention(q, k, v, mask=mask, return_lse=True), q, k, v, mask=mask)
    width = 40
    assert_attention(attention(q, k, v, mask=mask, return_lse=True), q, k, v, mask=mask)


def test_few_tiles_evaluate_the_mask(monkeypatch):
    """Of a causal mask these are the tiles near the diagonal, and they do it once for all heads."""
    asked, seen = [], Function.seen

    def counting(self, *at):
        asked.append(math.prod(torch.broadcast_shapes(*(x.shape for x in at))))
        return seen(self, *at)

    q, k, v = qkv(1, 2048, 2048, 8, 2, 16)
    monkeypatch.setattr(Function, "seen", counting)
    attention(q, k, v, mask=lambda b, h, q, k: q >= k)
    assert 2048 * 2049 // 2 * 0.1 < sum(asked) < 2048 * 2049 // 2 * 0.3


def test_the_plan_of_a_mask_has_its_tiles():
    q, k = randn(1, 1024, 4, 16), randn(1, 1024, 2, 16)
    plan = plan_attention(q, k, mask=lambda b, h, q, k: (q >= k) & (q - k < 256))
    assert sum(r.rows * r.keys for r in plan.rectangles()) == (8 * 3 - 3) * 128 * 128


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_refusals():
    q, k, v = qkv(1, 20, 20, 2, 1, 16)
    mask, score = (lambda b, h, q, k: q >= k), (lambda s, b, h, q, k: s * 2)
    with pytest.raises(ValueError, match="softcap goes with no score function: write it in the function"):
        attention(q, k, v, score=score, softcap=2.0)
    with pytest.raises(ValueError, match="alibi_slopes goes with no score function: write it in the function"):
        attention(q, k, v, score=score, alibi_slopes=torch.ones(2))
    with pytest.raises(TypeError, match="mask must be a function"):
        attention(q, k, v, mask=torch.ones(20, 20, dtype=torch.bool))
    with pytest.raises(TypeError, match="score must take 5 arguments"):
        attention(q, k, v, score=mask)
    with pytest.raises(TypeError, match="must return a bool"):
        attention(q, k, v, mask=lambda b, h, q, k: q - k)
    with pytest.raises(TypeError, match="write & "):
        attention(q, k, v, mask=lambda b, h, q, k: q >= k and q - k < 3)
    elsewhere = torch.ones(20, device="meta")
    with pytest.raises(ValueError, match="must be on cpu"):
        attention(q, k, v, score=lambda s, b, h, q, k: s + elsewhere[k])
    learned = torch.ones(20, requires_grad=True)
    with pytest.raises((ValueError, NotImplementedError), match="grad"):
        attention(q, k, v, score=lambda s, b, h, q, k: s + learned[k])
    for options in ({"mask": mask}, {"score": score}):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            attention(q, k, v, backend="emulator:mma", **options)
