"""attention() on the CPU against the float64 oracle: every option, alone and mixed, and the hostile shapes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import DTYPES, assert_attention, poison, qkv, randn

import tilewise
from tilewise import BlockSchedule, attention, reference

LENGTHS = (1, 63, 65, 127, 129)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_lengths(seqlen_q, seqlen_k, causal, dtype):
    q, k, v = qkv(2, seqlen_q, seqlen_k, 2, 1, 64, dtype=dtype)
    assert_attention(attention(q, k, v, causal=causal, return_lse=True), q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 2, 40, 64, 96, 128, 192, 256, 512])
def test_head_dims(head_dim, dtype):
    q, k, v = qkv(1, 33, 70, 4, 2, head_dim, dtype=dtype)
    assert_attention(attention(q, k, v, causal=True, return_lse=True), q, k, v, causal=True)


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 2), (12, 4), (16, 1)])
@pytest.mark.parametrize("seqlen_q", [1, 300])  # heads folded into rows, and not
def test_grouped_heads(heads, seqlen_q):
    q, k, v = qkv(2, seqlen_q, 310, *heads, 32)
    assert_attention(attention(q, k, v, causal=True, return_lse=True), q, k, v, causal=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0}, {"window": (40, 3)}], ids=str)
def test_more_threads_than_one(options):
    """The suite runs on one; users do not."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        q, k, v = qkv(2, 300, 310, 8, 2, 64)
        assert_attention(attention(q, k, v, return_lse=True, **options), q, k, v, **options)
    finally:
        torch.set_num_threads(threads)


WINDOWS = [(0, 0), (5, 0), (0, 5), (10, None), (None, 5), (100, 3), (64, 64), (1000, 1000)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (700, 700), (129, 700), (300, 65)])
def test_windows(window, causal, lengths):
    q, k, v = qkv(2, *lengths, 2, 1, 16)
    options = {"causal": causal, "window": window}
    assert_attention(attention(q, k, v, return_lse=True, **options), q, k, v, **options)


def test_window_equals_causal_when_it_reaches_everything():
    q, k, v = qkv(1, 200, 200, 2, 2, 32)
    assert torch.equal(attention(q, k, v, window=(200, 0)), attention(q, k, v, causal=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 60.0, 1e4])
def test_small_and_large_logits(size, dtype):
    q, k, v = qkv(1, 40, 600, 2, 1, 64, dtype=dtype, size=size)
    assert_attention(attention(q, k, v, causal=True, return_lse=True), q, k, v, causal=True)


@pytest.mark.parametrize("level", [-1e4, 1e4])
@pytest.mark.parametrize("softcap", [0.0, 2e4])
def test_all_logits_very_negative_or_positive(level, softcap):
    # A maximum that starts anywhere but at −inf would be the largest "logit" of a very negative row.
    q, k, v = qkv(1, 5, 40, 1, 1, 4, size=0.01)
    q[..., 0], k[..., 0] = 1.0, 2 * level  # scale 1/2: every logit is level ± a little
    got = attention(q, k, v, softcap=softcap, return_lse=True)
    assert_attention(got, q, k, v, softcap=softcap)
    if not softcap:
        assert ((got[1] - level).abs() < 20).all()


def test_rows_without_a_visible_key_are_zero_and_minus_infinity():
    q, k, v = qkv(2, 10, 4, 2, 1, 16)
    o, lse = attention(q, k, v, causal=True, return_lse=True)  # bottom-right: the first six rows see nothing
    assert (o[:, :6] == 0).all()
    assert (lse[:, :, :6] == -math.inf).all()
    assert torch.isfinite(lse[:, :, 6:]).all()
    assert_attention((o, lse), q, k, v, causal=True)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "batch"), [(5, 0, 2), (0, 5, 2), (0, 0, 1), (3, 4, 0)])
def test_empty_dimensions(seqlen_q, seqlen_k, batch):
    q, k, v = qkv(batch, seqlen_q, seqlen_k, 4, 2, 8)
    o, lse = attention(q, k, v, causal=True, return_lse=True, out=poison(q))
    assert o.shape == q.shape
    assert lse.shape == (batch, 4, seqlen_q)
    if batch and not seqlen_k:
        assert (o == 0).all()
        assert (lse == -math.inf).all()


def test_batch_65():
    q, k, v = qkv(65, 3, 17, 2, 1, 16)
    assert_attention(attention(q, k, v, causal=True, return_lse=True), q, k, v, causal=True)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("causal", [False, True])
def test_softcap(softcap, causal):
    q, k, v = qkv(2, 150, 260, 4, 2, 32, size=5.0)
    options = {"softcap": softcap, "causal": causal}
    assert_attention(attention(q, k, v, return_lse=True, **options), q, k, v, **options)


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (20, 3)}, {"softcap": 3.0, "causal": True}])
@pytest.mark.parametrize("lengths", [(130, 130), (50, 200), (200, 50)])
def test_alibi(per_batch, options, lengths):
    q, k, v = qkv(3, *lengths, 4, 2, 16)
    slopes = (
        torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) if per_batch else torch.tensor([0.5, 0.25, 1, 2])
    )
    got = attention(q, k, v, alibi_slopes=slopes, return_lse=True, **options)
    assert_attention(got, q, k, v, alibi_slopes=slopes, **options)


@pytest.mark.parametrize("sink", [-math.inf, -20.0, 0.0, 30.0])
def test_sinks(sink):
    q, k, v = qkv(2, 6, 4, 2, 1, 16)
    sinks = torch.tensor([sink, 0.5])
    got = attention(q, k, v, sinks=sinks, causal=True, return_lse=True)
    assert_attention(got, q, k, v, sinks=sinks, causal=True)
    assert (got[0][:, :2] == 0).all()  # rows without keys: the sink has no value


def test_sinks_equal_one_more_key_with_zero_value():
    q, k, v = qkv(1, 9, 20, 2, 2, 16)
    q[..., 0] = 1.0
    extra = torch.zeros(1, 1, 2, 16)
    extra[..., 0] = 3.0
    with_key = attention(q, torch.cat((k, extra), 1), torch.cat((v, torch.zeros_like(extra)), 1))
    with_sink = attention(q, k, v, sinks=torch.full((2,), 3.0 * 16**-0.5))
    assert torch.allclose(with_key, with_sink, atol=1e-6)


def test_scale():
    q, k, v = qkv(1, 30, 30, 1, 1, 16)
    for scale in (0.0, -0.5, 1.0, np.float32(0.5)):
        for options in ({}, {"causal": True}, {"window": (3, 2)}):
            got = attention(q, k, v, scale=scale, return_lse=True, **options)
            assert_attention(got, q, k, v, scale=float(scale), **options)


def test_strided_inputs_and_output():
    packed = randn(2, 70, 3, 4, 32)  # q, k and v side by side in one tensor
    q, k, v = packed.unbind(2)
    head_major = randn(2, 4, 70, 32, seed=5).transpose(1, 2)
    for query in (q, head_major, q[:, ::2]):
        for causal in (False, True):
            whole = torch.full((2, 70, 4, 64), float("nan"))
            out = whole[:, : query.shape[1], :, 32:]
            got = attention(query, k, v, causal=causal, window=(40, None), out=out, return_lse=True)
            assert got[0] is out
            assert_attention(got, query, k, v, causal=causal, window=(40, None))
            assert torch.isnan(whole[..., :32]).all()  # nothing beside the view was touched


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 0)}, {"softcap": 2.0}])
@pytest.mark.parametrize("seqlen_k", [6, 20, 40])
def test_every_element_of_out_is_written(options, seqlen_k):
    q, k, v = qkv(2, 20, seqlen_k, 4, 2, 24)
    out = poison(q)
    result = attention(q, k, v, out=out, **options)
    assert result is out
    assert not torch.isnan(out).any()
    assert torch.equal(out, attention(q, k, v, **options))


def test_out_may_be_an_input():
    q, k, v = qkv(1, 40, 60, 2, 2, 16)
    expected = attention(q, k, v, window=(5, 0))
    got = attention(q, k, v, window=(5, 0), out=q)
    assert got is q
    assert torch.equal(got, expected)


def test_inputs_are_not_changed():
    q, k, v = qkv(1, 40, 60, 4, 2, 16)
    copies = [x.clone() for x in (q, k, v)]
    for options in ({}, {"causal": True, "softcap": 1.0}, {"alibi_slopes": torch.rand(4)}):
        attention(q, k, v, **options)
    assert all(torch.equal(a, b) for a, b in zip(copies, (q, k, v), strict=True))


def test_nan_in_memory_around_the_tensors_is_not_read():
    whole = torch.full((1, 100, 2, 48), float("nan"))
    q, k, v = qkv(1, 50, 50, 2, 2, 16)
    hidden = []
    for x, start in zip((q, k, v), (0, 16, 32), strict=True):
        view = whole[:, 10:60, :, start : start + 16]
        view.copy_(x)
        hidden.append(view)
    got = attention(*hidden, causal=True, return_lse=True)
    assert_attention(got, q, k, v, causal=True)


def random_schedule(seqlen_q, seqlen_k, heads=None):
    return BlockSchedule.random(seqlen_q, seqlen_k, block_q=32, block_k=16, sparsity=0.6, seed=1, heads=heads)


SCHEDULES = {
    "random": random_schedule,
    "random for each head": lambda nq, nk: random_schedule(nq, nk, heads=4),
    "banded": lambda nq, nk: BlockSchedule.banded(nq, nk, block_q=16, block_k=32, left=40, right=0),
    "strided": lambda nq, nk: BlockSchedule.strided(nq, nk, block_q=64, block_k=64, stride=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 5)}, {"softcap": 2.0}, {"alibi": True}])
@pytest.mark.parametrize("lengths", [(192, 192), (150, 217), (70, 33)])
def test_schedules(name, options, lengths):
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    q, k, v = qkv(2, *lengths, 4, 2, 16)
    options["schedule"] = SCHEDULES[name](*lengths)
    got = attention(q, k, v, return_lse=True, out=poison(q), **options)
    assert_attention(got, q, k, v, **options)


def test_a_full_schedule_is_dense_attention():
    q, k, v = qkv(1, 100, 130, 2, 1, 16)
    schedule = BlockSchedule.random(100, 130, block_q=16, block_k=16, sparsity=0.0, seed=0)
    assert schedule.density == 1
    assert torch.allclose(attention(q, k, v, schedule=schedule), attention(q, k, v), atol=1e-6)


def test_schedule_gathers_in_chunks(monkeypatch):
    monkeypatch.setattr("tilewise.cpu.blocks.GATHER_BYTES", 1)  # one tile at a time
    q, k, v = qkv(1, 200, 200, 2, 2, 16)
    schedule = BlockSchedule.random(200, 200, block_q=16, block_k=16, sparsity=0.7, seed=3)
    assert_attention(attention(q, k, v, schedule=schedule, return_lse=True), q, k, v, schedule=schedule)


@pytest.mark.parametrize("options", [{"window": (50, 2)}, {"softcap": 4.0}, {"causal": True}])
def test_scores_are_made_in_small_tiles(options, monkeypatch):
    q, k, v = qkv(1, 300, 400, 4, 1, 16)
    whole = attention(q, k, v, return_lse=True, **options)
    monkeypatch.setattr("tilewise.cpu.products.SCORES_PER_TILE", 4096)
    monkeypatch.setattr("tilewise.cpu.tiles.MASK_VALUES", 4096)
    got = attention(q, k, v, return_lse=True, **options)
    assert torch.allclose(whole[0], got[0], atol=1e-6)
    assert_attention(got, q, k, v, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (256, 0)}, {"softcap": 2.0}])
def test_memory_does_not_grow_with_the_score_matrix(options):
    seqlen = 8192
    q, k, v = qkv(1, seqlen, seqlen, 1, 1, 16)
    with torch.profiler.profile(profile_memory=True) as profile:
        attention(q, k, v, **options)
    largest = max((e.self_cpu_memory_usage for e in profile.events() if e.self_cpu_memory_usage > 0), default=0)
    assert largest < seqlen * seqlen * 4 / 8


@given(
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(0, 59),
    st.booleans(),
    st.sampled_from([None, (7, 0), (3, 4)]),
    st.integers(0, 1000),
)
def test_split_the_keys_anywhere_and_merge(seqlen_q, seqlen_k, at, causal, window, seed):
    """Keys cut in two, each half with the mask of the whole: the merged states are the whole's."""
    at = min(at, seqlen_k)
    q, k, v = qkv(1, seqlen_q, seqlen_k, 2, 1, 8, seed=seed)
    seen = reference.visible(seqlen_q, seqlen_k, causal=causal, window=window)
    exact = reference.attention(q, k, v, causal=causal, window=window)
    halves = [reference.attention(q, k[:, s], v[:, s], mask=seen[:, s]) for s in (slice(0, at), slice(at, None))]
    o, lse = tilewise.merge(*[x.float() for state in halves for x in state])
    assert torch.allclose(o.double(), exact[0], atol=2e-6)
    assert torch.allclose(lse.double(), exact[1], atol=2e-6)
    got = attention(q, k, v, causal=causal, window=window, return_lse=True)
    assert torch.allclose(got[0], o, atol=2e-6)


@given(
    st.integers(1, 3), st.sampled_from([1, 5, 64, 90]), st.sampled_from([1, 31, 200]),
    st.sampled_from([(2, 1), (4, 4)]), st.sampled_from([8, 40]), st.sampled_from(DTYPES), st.booleans(),
    st.sampled_from([None, *WINDOWS]), st.sampled_from([0.0, 3.0]), st.booleans(), st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
def test_any_mix_of_options(batch, nq, nk, heads, head_dim, dtype, causal, window, softcap, sinks, alibi, seed):
    q, k, v = qkv(batch, nq, nk, *heads, head_dim, dtype=dtype, seed=seed)
    options = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "sinks": randn(heads[0], seed=seed) if sinks else None,
        "alibi_slopes": randn(heads[0], seed=seed + 1).abs() if alibi else None,
    }
    assert_attention(attention(q, k, v, return_lse=True, out=poison(q), **options), q, k, v, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 0)}, {"softcap": 2.0}])
def test_scores_of_minus_infinity_are_no_key(options):
    """Keys whose scores overflow to −inf weigh nothing, alone in a tile or not (torch's kernel says LSE 0)."""
    q, k, v = torch.ones(1, 4, 2, 4), randn(1, 8, 2, 4, seed=1), randn(1, 8, 2, 4)
    k[:, :6] = -math.inf
    got = attention(q, k, v, return_lse=True, **options)
    assert_attention(got, q, k, v, **options)


@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_key_reaches_only_the_rows_that_see_it(heads, bad):
    q, k, v = qkv(1, 9, 9, *heads, 8)
    k[:, -1] = bad
    o = attention(q, k, v, causal=True)
    assert torch.isfinite(o[:, :-1]).all()
    assert torch.isnan(o[:, -1]).all()


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": (9, 0)}])
def test_autocast_does_not_lower_the_precision(options):
    q, k, v = qkv(1, 40, 40, 2, 1, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attention(q, k, v, return_lse=True, **options)
    assert_attention(got, q, k, v, **options)


def test_defaults_of_torch_do_not_matter():
    q, k, v = qkv(1, 40, 60, 4, 2, 16)
    expected = attention(q, k, v, window=(9, 0), softcap=2.0)
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        got = attention(q, k, v, window=(9, 0), softcap=2.0)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(got, expected)


def test_a_schedule_needs_no_memory_beyond_its_tiles():
    seqlen = 8192
    q, k, v = qkv(1, seqlen, seqlen, 1, 1, 16)
    schedule = BlockSchedule.full(seqlen, seqlen, block_q=64, block_k=64)
    with torch.profiler.profile(profile_memory=True) as profile:
        attention(q, k, v, schedule=schedule)
    largest = max(e.self_cpu_memory_usage for e in profile.events())
    assert largest < seqlen * seqlen * 4 / 8


def test_a_backend_can_be_named():
    q, k, v = qkv(1, 4, 4, 1, 1, 8)
    assert torch.equal(attention(q, k, v, backend="cpu"), attention(q, k, v))
    with pytest.raises(ValueError, match='backend "cuda" takes CUDA tensors, got q on cpu'):
        attention(q, k, v, backend="cuda")
