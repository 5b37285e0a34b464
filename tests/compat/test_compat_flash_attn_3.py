"""tilewise.compat.flash_attn_3 against the oracle: FlashAttention-3's arguments, its results, and what is refused."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from flash_attn_cases import INF, assert_grads, starts_of
from oracle import DTYPES, assert_attention, assert_state, qkv, randn

from tilewise import reference
from tilewise.compat import flash_attn_3 as fa3

NAN = math.nan
REQUIRED = inspect.Parameter.empty
TAIL = {"num_splits": 1, "pack_gqa": None, "deterministic": False, "sm_margin": 0, "return_attn_probs": False}
SCORES = {"softmax_scale": None, "causal": False}
DESCALES = {"q_descale": None, "k_descale": None, "v_descale": None}
WINDOW = {"window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0}


def required(*names):
    return dict.fromkeys(names, REQUIRED)


def optional(*names):
    return dict.fromkeys(names)


SIGNATURES = {
    "flash_attn_func": {**required("q", "k", "v"), **SCORES, "qv": None, **DESCALES, **WINDOW, **TAIL},
    "flash_attn_qkvpacked_func": {
        **required("qkv"), **SCORES, **DESCALES, **WINDOW, "deterministic": False, "num_heads_q": None, "sm_margin": 0,
        "return_attn_probs": False,
    },
    "flash_attn_varlen_func": {
        **required("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        **optional("seqused_q", "seqused_k"), **SCORES, "qv": None, **DESCALES, **WINDOW, **TAIL,
    },
    "flash_attn_combine": {**required("out_partial", "lse_partial"), **optional("out", "out_dtype")},
    "flash_attn_with_kvcache": {
        **required("q", "k_cache", "v_cache"),
        **optional("k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad"),
        **optional("page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens"),
        **DESCALES, **SCORES, **WINDOW, "rotary_interleaved": True, "scheduler_metadata": None, "num_splits": 0,
        "pack_gqa": None, "sm_margin": 0, "return_softmax_lse": False,
    },
    "get_scheduler_metadata": {
        **required("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim"),
        **required("cache_seqlens"), "qkv_dtype": torch.bfloat16, "headdim_v": None,
        **optional("cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad", "page_size"), "max_seqlen_k_new": 0,
        "causal": False, "window_size": (-1, -1), "attention_chunk": 0, "has_softcap": False, "num_splits": 0,
        "pack_gqa": None, "sm_margin": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", fa3.__all__)
def test_arguments_are_those_of_flash_attention_3(name):
    found = inspect.signature(getattr(fa3, name)).parameters
    assert [(p.name, p.default) for p in found.values()] == list(SIGNATURES[name].items())
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in found.values())


def blocks(seqlen_q, seqlen_k, chunk):
    """Which keys lie in a query's block of positions: bool (seqlen_q, seqlen_k), queries bottom-right."""
    position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    return position.div(chunk, rounding_mode="floor") == torch.arange(seqlen_k) // chunk


def unequal(sizes, head_dim, value_dim, dtype=torch.float32, batch=2):
    q, k, _ = qkv(batch, *sizes, 4, 2, head_dim, dtype=dtype)
    return q, k, randn(batch, sizes[1], 2, value_dim, dtype=dtype, seed=7)


# ---- dense -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 512), (24, 24), (17, 40)])
@pytest.mark.parametrize("sizes", [(1, 1), (63, 65), (129, 127)])
def test_values_of_another_head_dim(sizes, head_dim, value_dim, dtype):
    q, k, v = unequal(sizes, head_dim, value_dim, dtype)
    result = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert result[0].shape == (2, sizes[0], 4, value_dim)
    assert_attention(result, q, k, v, causal=True)
    assert torch.equal(fa3.flash_attn_func(q, k, v, causal=True, num_splits=3, pack_gqa=True), result[0])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, 9)}, {"softcap": 1.5}])
@pytest.mark.parametrize("chunk", [1, 16, 33, 500])
def test_attention_chunk(chunk, options):
    q, k, v = qkv(2, 65, 129, 4, 2, 16)
    result = fa3.flash_attn_func(q, k, v, attention_chunk=chunk, return_attn_probs=True, **options)
    meant = {"window" if n == "window_size" else n: x for n, x in options.items()}
    assert_attention(result, q, k, v, mask=blocks(65, 129, chunk), **meant)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_qv(scale):
    q, k, v = unequal((33, 65), 16, 40)
    qv = randn(2, 33, 4, 40, seed=9)
    result = fa3.flash_attn_func(q, k, v, scale, True, qv, return_attn_probs=True)
    meant = {"causal": True, "scale": scale or 56**-0.5}
    assert_attention(result, torch.cat((q, qv), -1), torch.cat((k, v), -1), v, **meant)


def test_qkvpacked():
    q, k, v = qkv(2, 33, 33, 4, 2, 16)
    expected = fa3.flash_attn_func(q, k, v, causal=True, window_size=(9, -1))
    heads_apart = fa3.flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), None, True, num_heads_q=4, window_size=(9, -1))
    assert torch.equal(heads_apart, expected)
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    expected = fa3.flash_attn_func(q, k, v, softcap=2.0)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), softcap=2.0), expected)


def test_fp8():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv(2, 33, 65, 4, 2, 32))
    descales = [randn(2, 2, seed=n).abs() for n in (1, 2, 3)]
    out, lse = fa3.flash_attn_func(q, k, v, None, True, None, *descales, return_attn_probs=True)
    assert out.dtype == torch.bfloat16
    wide = [
        x.float() * d.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
        for x, d in zip((q, k, v), descales, strict=True)
    ]
    exact = reference.attention(*wide, causal=True)
    assert_state((out, lse), exact, reference.attention(*wide, causal=True, dtype=torch.float32, fp8_weights=True))
    leaf = q.clone().requires_grad_()
    again = fa3.flash_attn_func(leaf, k, v, None, True, None, *descales)
    assert torch.equal(again, out)
    assert not again.requires_grad
    plain = qkv(2, 33, 65, 4, 2, 32)  # descales of what is not FP8 are left unread, as there
    assert torch.equal(
        fa3.flash_attn_func(*plain, None, True, None, *descales), fa3.flash_attn_func(*plain, None, True)
    )


def test_gradients():
    q, k, v = unequal((17, 33), 24, 16)
    mask = blocks(17, 33, 8)

    def call(*tensors):
        return fa3.flash_attn_func(*tensors, causal=True, attention_chunk=8, return_attn_probs=True)

    def oracle(*tensors, dtype):
        return reference.attention(*tensors, causal=True, mask=mask, dtype=dtype)

    assert_grads(call, (q, k, v), oracle)


# ---- packed ----------------------------------------------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = [3, 63, 1, 65, 7], [9, 65, 5, 63, 4]
USED_Q, USED_K = [1, 63, 0, 33, 7], [7, 65, 3, 33, 0]


def packed(value_dim=24, dtype=torch.float32):
    q = randn(sum(LENGTHS_Q), 4, 16, dtype=dtype)
    k = randn(sum(LENGTHS_K), 2, 16, dtype=dtype, seed=1)
    return q, k, randn(sum(LENGTHS_K), 2, value_dim, dtype=dtype, seed=2)


def rows_used(lengths, used):
    starts = starts_of(lengths).tolist()
    return [start + n for start, count in zip(starts, used, strict=False) for n in range(count)]


def longest():
    return max(LENGTHS_Q), max(LENGTHS_K)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 3)}, {"attention_chunk": 8}])
def test_varlen_and_rows_that_are_not_used(options, dtype):
    q, k, v = packed(dtype=dtype)
    starts = starts_of(LENGTHS_Q), starts_of(LENGTHS_K)
    meant = {{"window_size": "window", "attention_chunk": "chunk"}.get(n, n): x for n, x in options.items()}

    def judge(result, given):
        honest = reference.attention_varlen(*given, dtype=dtype, **meant)
        assert_state(result, reference.attention_varlen(*given, **meant), honest)

    judge(
        fa3.flash_attn_varlen_func(q, k, v, *starts, *longest(), return_attn_probs=True, **options), (q, k, v, *starts)
    )
    mine, theirs = rows_used(LENGTHS_Q, USED_Q), rows_used(LENGTHS_K, USED_K)
    q0, k0, v0 = (torch.full_like(x, NAN) for x in (q, k, v))
    q0[mine], k0[theirs], v0[theirs] = q[mine], k[theirs], v[theirs]
    used = {"seqused_q": torch.tensor(USED_Q), "seqused_k": torch.tensor(USED_K, dtype=torch.int32)}
    out, lse = fa3.flash_attn_varlen_func(q0, k0, v0, *starts, *longest(), **used, return_attn_probs=True, **options)
    given = (q[mine], k[theirs], v[theirs], starts_of(USED_Q), starts_of(USED_K))
    judge((out[mine], lse[:, mine]), given)
    others = sorted(set(range(len(q))) - set(mine))
    assert (out[others] == 0).all()
    assert (lse[:, others] == -INF).all()
    assert lse.is_contiguous()


def test_rows_of_nobody_and_one_side_used():
    q, k, v = packed()
    starts_q, starts_k = starts_of(LENGTHS_Q[:-1]), starts_of(LENGTHS_K[:-1])
    q, k, v = (
        torch.cat((x[: s[-1]], torch.full_like(x[s[-1] :], NAN)))
        for x, s in ((q, starts_q), (k, starts_k), (v, starts_k))
    )
    used = torch.tensor(USED_K[:-1])
    out, lse = fa3.flash_attn_varlen_func(q, k, v, starts_q, starts_k, *longest(), None, used, return_attn_probs=True)
    rows, keys = int(starts_q[-1]), rows_used(LENGTHS_K, USED_K[:-1])
    given = (q[:rows], k[keys], v[keys], starts_q, starts_of(USED_K[:-1]))
    honest = reference.attention_varlen(*given, dtype=torch.float32)
    assert_state((out[:rows], lse[:, :rows]), reference.attention_varlen(*given), honest)
    out = fa3.flash_attn_varlen_func(q, k, v, starts_q, starts_k, *longest(), torch.tensor(USED_Q[:-1]))
    assert out.shape == (len(q), 4, 24)
    assert (out[rows:] == 0).all()


def test_gradients_of_rows_that_are_not_used_are_zero():
    q, k, v = packed(16)
    starts = starts_of(LENGTHS_Q), starts_of(LENGTHS_K)
    used = (torch.tensor(USED_Q), torch.tensor(USED_K))
    mine, theirs = rows_used(LENGTHS_Q, USED_Q), rows_used(LENGTHS_K, USED_K)

    def call(*tensors):
        return fa3.flash_attn_varlen_func(*tensors, *starts, *longest(), *used, causal=True, return_attn_probs=True)

    def oracle(q, k, v, dtype):
        given = (q[mine], k[theirs], v[theirs], starts_of(USED_Q), starts_of(USED_K))
        o, lse = reference.attention_varlen(*given, causal=True, dtype=dtype)
        full = o.new_zeros(len(q), 4, 16).index_put((torch.tensor(mine),), o)
        wide = lse.new_full((len(q), 4), -INF).index_put((torch.tensor(mine),), lse.T).T
        return full, wide

    assert_grads(call, (q, k, v), oracle)


def test_varlen_qv():
    q, k, v = packed()
    qv = randn(len(q), 4, 24, seed=9)
    starts = starts_of(LENGTHS_Q), starts_of(LENGTHS_K)
    used = torch.tensor(USED_Q)
    result = fa3.flash_attn_varlen_func(q, k, v, *starts, *longest(), used, causal=True, qv=qv, return_attn_probs=True)
    mine = rows_used(LENGTHS_Q, USED_Q)
    given = (torch.cat((q, qv), -1)[mine], torch.cat((k, v), -1), v, starts_of(USED_Q), starts[1])
    meant = {"causal": True, "scale": 40**-0.5}
    honest = reference.attention_varlen(*given, dtype=torch.float32, **meant)
    assert_state((result[0][mine], result[1][:, mine]), reference.attention_varlen(*given, **meant), honest)


# ---- combine ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize("splits", [1, 5])
def test_combine(splits, dtype):
    o = randn(splits, 2, 4, 65, 24).transpose(2, 3)
    lse = randn(splits, 2, 8, 65, seed=1).transpose(-1, -2)[..., :4]
    lse[splits // 2 :, 0] = -INF
    o[splits // 2 :, 0] = NAN  # whatever stands where the LSE is −inf
    exact = reference.merge_states(torch.where(lse[..., None] == -INF, 0.0, o), lse.transpose(-1, -2))
    out, got = fa3.flash_attn_combine(o, lse, out_dtype=dtype)
    assert out.dtype == (dtype or torch.float32)
    assert got.shape == (2, 65, 4)
    assert_state((out, got.transpose(1, 2)), exact, (exact[0].to(out.dtype), exact[1].float()))
    place = torch.full((2, 65, 4, 24), NAN, dtype=out.dtype)
    assert fa3.flash_attn_combine(o, lse, place)[0] is place
    assert torch.equal(place, out)


# ---- refusals --------------------------------------------------------------------------------------------------------

Q, K, V = qkv(2, 8, 8, 4, 2, 16)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"v": V[:, :7]}, ValueError, "v must have shape"),
        ({"qv": Q[..., :15]}, ValueError, "qv must have shape"),
        ({"qv": Q[:, :7]}, ValueError, "qv must have shape"),
        ({"qv": 1}, TypeError, "qv must be a torch.Tensor"),
        ({"attention_chunk": -1}, ValueError, "attention_chunk must be at least 0"),
        ({"attention_chunk": True}, TypeError, "attention_chunk must be an int"),
        ({"num_splits": 1.0}, TypeError, "num_splits"),
        ({"pack_gqa": 1}, TypeError, "pack_gqa"),
        ({"sm_margin": -1}, ValueError, "sm_margin"),
        ({"window_size": 3}, TypeError, "window_size"),
        ({"deterministic": 0}, TypeError, "deterministic"),
        ({"return_attn_probs": 1}, TypeError, "return_attn_probs"),
    ],
)
def test_refusals(changes, error, match):
    with pytest.raises(error, match=match):
        fa3.flash_attn_func(**{"q": Q, "k": K, "v": V, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"seqused_q": torch.tensor([9, 0])}, ValueError, "seqused_q must be at least 0 and at most 8, got 9"),
        ({"seqused_k": torch.tensor([-1, 0])}, ValueError, "seqused_k must be at least 0"),
        ({"seqused_k": torch.tensor([1])}, ValueError, "seqused_k must have shape"),
        ({"seqused_q": torch.tensor([1.0, 2.0])}, ValueError, "seqused_q must be one of int32"),
        ({"cu_seqlens_q": [0, 8, 16]}, TypeError, "cu_seqlens_q"),
        ({"max_seqlen_q": None}, TypeError, "max_seqlen_q"),
        ({"qv": Q.flatten(0, 1)[:3]}, ValueError, "qv must have shape"),
    ],
)
def test_varlen_refusals(changes, error, match):
    starts = starts_of([8, 8])
    given = {name: x.flatten(0, 1) for name, x in (("q", Q), ("k", K), ("v", V))}
    given |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 8, "max_seqlen_k": 8, **changes}
    with pytest.raises(error, match=match):
        fa3.flash_attn_varlen_func(**given)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: fa3.flash_attn_qkvpacked_func(Q), ValueError, "num_heads_q must tell"),
        (lambda: fa3.flash_attn_qkvpacked_func(Q, num_heads_q=1), ValueError, "as many heads of K as of V"),
        (lambda: fa3.flash_attn_qkvpacked_func(Q, num_heads_q=5), ValueError, "num_heads_q"),
        (lambda: fa3.flash_attn_qkvpacked_func(Q[0]), ValueError, "qkv must have 4 dimensions"),
        (lambda: fa3.flash_attn_combine(Q[None].half(), Q[None, ..., 0]), ValueError, "out_partial must be one of"),
        (lambda: fa3.flash_attn_combine(Q[None], Q[None, :, :7, :, 0]), ValueError, "lse_partial must have shape"),
        (lambda: fa3.flash_attn_combine(Q[None], Q[None, ..., 0], K), ValueError, "out must have shape"),
        (lambda: fa3.flash_attn_combine(Q[None], Q[None, ..., 0], Q.half(), torch.bfloat16), ValueError, "out must be"),
        (lambda: fa3.flash_attn_combine(Q[None], Q[None, ..., 0], None, torch.int8), ValueError, "out_dtype"),
        (lambda: fa3.get_scheduler_metadata(3, 1, 9, 4, 2, 16, torch.tensor([1, 2])), ValueError, "cache_seqlens"),
    ],
)
def test_other_refusals(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("rows", [5, 0])
def test_no_row_counts(rows):
    """Nobody attends: zeros that autograd knows, and gradients of 0."""
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (rows, 7)]
    q, k, v = (randn(n, h, 64, seed=n).requires_grad_() for n, h in ((rows, 4), (7, 2), (7, 2)))
    used = torch.zeros(1, dtype=torch.int32)
    o, lse = fa3.flash_attn_varlen_func(q, k, v, *starts, rows, 7, seqused_q=used, return_attn_probs=True)
    assert o.shape == q.shape
    assert not o.any()
    assert (lse == -torch.inf).all()
    o.sum().backward()
    assert not any(x.grad.any() for x in (q, k, v))
