"""tilewise.compat.flash_attn against the oracle: every argument of its dense and packed calls."""

from __future__ import annotations

import inspect
import math
from functools import partial

import pytest
import torch
from flash_attn_cases import INF, LENGTHS_K, LENGTHS_Q, OPTIONS, SLOPES, assert_flash, assert_varlen, paged, ragged
from oracle import DTYPES, qkv, randn

from tilewise.compat import flash_attn as fa

SCORES = "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0"
REST = f"dropout_p=0.0 {SCORES} alibi_slopes=None deterministic=False return_attn_probs=False"
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q k v {REST}",
    "flash_attn_kvpacked_func": f"q kv {REST}",
    "flash_attn_qkvpacked_func": f"qkv {REST}",
    "flash_attn_varlen_func": f"q k v {LENGTHS} {REST} block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q kv {LENGTHS} {REST}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {REST}",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    f"cache_batch_idx=None cache_leftpad=None block_table=None {SCORES} rotary_interleaved=True alibi_slopes=None "
    "num_splits=0 return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults(name):
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    spelt = [p.name if p.default is p.empty else f"{p.name}={p.default}".replace(" ", "") for p in positional]
    assert spelt == SIGNATURES[name].split()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["learnable_sink"]
    assert set(SIGNATURES) == set(fa.__all__)


# ---- dense -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "head_dim", "causal"),
    [((1, 1), 40, True), ((63, 65), 96, True), ((65, 63), 40, True), ((1, 65), 16, False), ((5, 0), 16, True)],
)
def test_dense(sizes, head_dim, causal, dtype):
    q, k, v = qkv(2, *sizes, 4, 2, head_dim, dtype=dtype)
    result = fa.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    assert_flash(result, q, k, v, causal=causal)
    assert torch.equal(fa.flash_attn_func(q, k, v, causal=causal), result[0])


def test_rows_without_keys_are_zero_and_plus_infinite():
    q, k, v = qkv(1, 5, 2, 2, 1, 16)
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse[:, :, :3] == INF).all()
    assert (out[:, :3] == 0).all()
    assert lse[:, :, 3:].isfinite().all()


@pytest.mark.parametrize(("given", "meant"), OPTIONS)
def test_options(given, meant):
    q, k, v = qkv(2, 33, 40, 4, 2, 16, seed=1)
    assert_flash(fa.flash_attn_func(q, k, v, return_attn_probs=True, **given), q, k, v, **meant)


def test_options_by_position():
    q, k, v = qkv(2, 20, 20, 4, 4, 16)
    meant = {"scale": 0.3, "causal": True, "window": (4, 0), "softcap": 2.0, "alibi_slopes": SLOPES}
    given = (0.0, 0.3, True, (4, 0), 2.0, SLOPES, True, True)
    assert_flash(fa.flash_attn_func(q, k, v, *given), q, k, v, **meant)
    assert_flash(fa.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), *given), q, k, v, **meant)
    assert_flash(fa.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), *given), q, k, v, **meant)


def test_packed_tensors_take_every_keyword():
    q, k, v = qkv(2, 20, 20, 4, 4, 16)
    sink = randn(4, seed=5)
    calls = (
        partial(fa.flash_attn_kvpacked_func, q, torch.stack((k, v), 2)),
        partial(fa.flash_attn_qkvpacked_func, torch.stack((q, k, v), 2)),
    )
    for call in calls:
        result = call(softcap=3.0, window_size=(6, 2), learnable_sink=sink, return_attn_probs=True)
        assert_flash(result, q, k, v, softcap=3.0, window=(6, 2), sinks=sink)


def test_any_strides():
    q, k, v = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in qkv(2, 33, 33, 4, 2, 40))
    assert q.stride(-1) != 1
    assert_flash(fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True), q, k, v, causal=True)
    q, k, v = (x[..., ::2] for x in qkv(2, 5, 0, 4, 2, 80))  # an empty tensor is contiguous, whatever its strides are
    assert not fa.flash_attn_func(q, k, v).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_varlen(dtype, causal):
    arguments = ragged(dtype)
    result = fa.flash_attn_varlen_func(*arguments, 65, 65, causal=causal, return_attn_probs=True)
    assert_varlen(result, arguments, causal=causal)
    assert torch.equal(fa.flash_attn_varlen_func(*arguments, 65, 65, causal=causal), result[0])


def test_varlen_by_position_and_packed():
    slopes = randn(len(LENGTHS_Q), 4, seed=9).abs()
    meant = {"scale": 0.3, "causal": True, "window": (9, 0), "softcap": 2.0, "alibi_slopes": slopes}
    given = (0.0, 0.3, True, (9, 0), 2.0, slopes, True, True)
    q, k, v, cu_q, cu_k = arguments = ragged()
    assert_varlen(fa.flash_attn_varlen_func(*arguments, 65, 65, *given), arguments, **meant)
    result = fa.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), cu_q, cu_k, 65, 65, *given)
    assert_varlen(result, arguments, **meant)
    q, k, v, cu, _ = same = ragged(heads_kv=4, lengths_k=LENGTHS_Q)
    longest = torch.tensor(65)  # a tensor is not looked at
    result = fa.flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 1), cu, longest, *given)
    assert_varlen(result, same, **meant)


def test_varlen_sink_and_int64():
    q, k, v, cu_q, cu_k = ragged()
    sink = randn(4, seed=5)
    arguments = (q, k, v, cu_q.long(), cu_k.long())
    result = fa.flash_attn_varlen_func(*arguments, 65, 65, learnable_sink=sink, return_attn_probs=True)
    assert_varlen(result, arguments, sinks=sink)


def test_varlen_rows_of_nobody():
    """Rows after the last sequence are not looked at, and have their place in the output."""
    q, k, v, cu_q, cu_k = arguments = ragged()
    more = [torch.cat((x, torch.full_like(x[:3], math.nan))) for x in (q, k, v)]
    out, lse, probs = fa.flash_attn_varlen_func(*more, cu_q, cu_k, 65, 65, causal=True, return_attn_probs=True)
    assert out.shape == more[0].shape
    assert lse.shape == (4, len(out))
    assert_varlen((out[:-3], lse[:, :-3], probs), arguments, causal=True)


@pytest.mark.parametrize("page_size", [1, 16, 20])
def test_varlen_block_table(page_size):
    q, k, v, cu_q, cu_k = arguments = ragged()
    *pages, table = paged(k, v, LENGTHS_K, page_size)
    wide = table.repeat_interleave(2, 1)[:, ::2]  # of any strides
    result = fa.flash_attn_varlen_func(
        q, *pages, cu_q, cu_k, 65, 65, causal=True, return_attn_probs=True, block_table=wide
    )
    assert_varlen(result, arguments, causal=True)
