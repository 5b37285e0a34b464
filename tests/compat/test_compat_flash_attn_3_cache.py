"""FlashAttention-3's flash_attn_with_kvcache: like flash_attn 2's where both have a thing, by the oracle where not."""

from __future__ import annotations

import math

import pytest
import torch
from flash_attn_cases import COS, DIM, HEADS, INF, KV_HEADS, LAYOUTS, SIN, CacheCase, K, Q, V, lengths, paged, starts_of
from oracle import assert_state, randn

from tilewise import reference
from tilewise.compat import flash_attn_3 as fa3
from tilewise.compat.rotary import apply_rotary_emb

FP8 = torch.float8_e4m3fn


def called(case, **options):
    """The call of a CacheCase by FlashAttention-3's names, over copies of its caches: result and caches."""
    given = {{"block_table": "page_table"}.get(name, name): x for name, x in case.given.items()}
    caches = [x.clone() for x in case.before]
    new = {} if case.new is None else {"k": case.new[0], "v": case.new[1]}
    rotary = {"rotary_cos": case.cos, "rotary_sin": case.sin, "rotary_interleaved": case.interleaved}
    result = fa3.flash_attn_with_kvcache(case.q, *caches, **new, **rotary, **given, return_softmax_lse=True, **options)
    return result, caches


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ({}, {"causal": True}),
        ({"new": 3, "rotary": 16}, {"window_size": (9, 1)}),
        ({"new": 2, "batch_idx": [3, 1], "leftpad": [4, 0]}, {"causal": True, "softcap": 2.0}),
        ({"new": 3, "rotary": DIM, "interleaved": False, "leftpad": [2, 9]}, {"num_splits": 3, "pack_gqa": True}),
    ],
)
def test_like_flash_attn_2(layout, setting, options):
    case = CacheCase(48, [9, 30], seqlen_q=3, layout=layout, **setting)
    (out, lse, *partial), caches = called(case, **options)
    options = {name: x for name, x in options.items() if name != "pack_gqa"}
    expected, expected_lse = case(**options)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert [x.shape for x in partial] == [(0,), (0,)]
    for got, wanted in zip(caches, case.caches, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_an_empty_cache_gives_zero_and_minus_infinity():
    (out, lse, *_), _ = called(CacheCase(16, [0, 3]))
    assert (out[0] == 0).all()
    assert (lse[0] == -INF).all()
    assert lse[1].isfinite().all()


def test_metadata_is_taken():
    case = CacheCase(16, [5, 3])
    metadata = fa3.get_scheduler_metadata(2, 1, 16, HEADS, KV_HEADS, DIM, case.given["cache_seqlens"])
    (out, *_), _ = called(case, scheduler_metadata=metadata)
    assert torch.equal(out, called(case)[0][0])
    caches = case.caches
    assert torch.equal(fa3.flash_attn_with_kvcache(case.q, *caches, **case.given), out)


ROWS_Q, ROWS_NEW, BEFORE = [3, 0, 5, 1], [2, 4, 0, 1], [7, 12, 40, 0]


def by_sequence(call, q, k, v, rotary_seqlens, **options):
    """`call` for one sequence after the other: out (total, …) and LSE (heads, total)."""
    starts_q, starts_new = starts_of(ROWS_Q).tolist(), starts_of(ROWS_NEW).tolist()
    found = []
    for b in range(len(BEFORE)):
        mine, new = slice(*starts_q[b : b + 2]), slice(*starts_new[b : b + 2])
        given = {"cache_seqlens": BEFORE[b], "cache_batch_idx": lengths(b)}
        if rotary_seqlens is not None:
            given["rotary_seqlens"] = rotary_seqlens[b : b + 1]
        out, lse, *_ = call(q[None, mine], k=k[None, new], v=v[None, new], **given, return_softmax_lse=True, **options)
        found.append((out[0], lse[0]))
    return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found], -1)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "attention_chunk": 8}])
@pytest.mark.parametrize("rotary_seqlens", [None, lengths(3, 1, 20, 5)])
def test_packed_queries_and_packed_new_keys(options, rotary_seqlens):
    total, new = sum(ROWS_Q), sum(ROWS_NEW)
    q, caches = randn(total, 4, 16), [randn(4, 48, 2, 16, seed=s) for s in (1, 2)]
    k, v = (randn(new, 2, 16, seed=s) for s in (3, 4))
    tables = {"rotary_cos": COS.repeat(2, 1), "rotary_sin": SIN.repeat(2, 1)}
    alone, together = ([x.clone() for x in caches] for _ in range(2))

    def one(q, **given):
        return fa3.flash_attn_with_kvcache(q, *alone, **given)

    expected = by_sequence(one, q, k, v, rotary_seqlens, **tables, **options)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, *together, k, v, **tables, cache_seqlens=torch.tensor(BEFORE, dtype=torch.int32),
        cu_seqlens_q=starts_of(ROWS_Q), cu_seqlens_k_new=starts_of(ROWS_NEW), max_seqlen_q=max(ROWS_Q),
        rotary_seqlens=rotary_seqlens, return_softmax_lse=True, **options,
    )  # fmt: skip
    assert lse.shape == (4, total)
    torch.testing.assert_close((out, lse), expected, rtol=2e-6, atol=2e-6)
    for got, wanted, before in zip(together, alone, caches, strict=True):
        assert torch.equal(got, wanted)
        assert not torch.equal(got, before)


def test_rows_of_nobody():
    q, caches = randn(9, 4, 16), [randn(3, 20, 2, 16, seed=s) for s in (1, 2)]
    starts, seqlens = starts_of([2, 0, 4]), lengths(20, 3, 8)
    expected = fa3.flash_attn_with_kvcache(q[:6], *caches, cache_seqlens=seqlens, cu_seqlens_q=starts, causal=True)
    q[6:] = math.nan
    out = fa3.flash_attn_with_kvcache(q, *caches, cache_seqlens=seqlens, cu_seqlens_q=starts, causal=True)
    assert torch.equal(out[:6], expected)
    assert out.shape == (9, 4, 16)


@pytest.mark.parametrize("page_size", [None, 4, 16])
@pytest.mark.parametrize("leftpad", [None, [5, 0]])
@pytest.mark.parametrize("with_qv", [False, True])
def test_values_of_another_head_dim(page_size, leftpad, with_qv):
    """K of 16 and V of 40 channels, a query for each, over rows and pages with NaN where no token is."""
    counts, scale = [9, 30], (56 if with_qv else 16) ** -0.5
    k, v = randn(39, 2, 16, seed=1), randn(39, 2, 40, seed=2)
    q, qv = randn(2, 3, 4, 16), randn(2, 3, 4, 40, seed=3)
    options = {"cache_seqlens": lengths(*counts), "causal": True, "return_softmax_lse": True}
    if page_size is None:
        caches = [torch.full((2, 35, 2, x.shape[-1]), math.nan) for x in (k, v)]
        for cache, x in zip(caches, (k, v), strict=True):
            cache[0, :9], cache[1, :30] = x[:9], x[9:]
    else:
        *caches, table = paged(k, v, counts, page_size)
        options["page_table"] = table
    if leftpad is not None:
        options["cache_leftpad"] = lengths(*leftpad)
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, *caches, qv=qv if with_qv else None, **options)
    for b, (first, end) in enumerate([(0, 9), (9, 39)]):
        seen = slice(first + (leftpad[b] if leftpad else 0), end)
        mine, theirs = (torch.cat((q, qv), -1), torch.cat((k, v), -1)) if with_qv else (q, k)
        given = (mine[b : b + 1], theirs[None, seen], v[None, seen])
        exact, honest = (
            reference.attention(*given, causal=True, scale=scale, dtype=t) for t in (torch.float64, v.dtype)
        )
        assert_state((out[b : b + 1], lse[b : b + 1]), exact, honest)


@pytest.mark.parametrize("page_size", [None, 16])
def test_fp8(page_size):
    case = CacheCase(48, [9, 30], new=3, seqlen_q=3, rotary=16, layout=page_size or "rows")
    tensors = [case.q, *(x.nan_to_num(0.0) for x in case.before), *case.new, case.cos, case.sin]
    q, k_cache, v_cache, k, v, cos, sin = (x.to(FP8) for x in tensors)
    descales = [randn(2, KV_HEADS, seed=n).abs() for n in (1, 2, 3)]
    given = {{"block_table": "page_table"}.get(name, name): x for name, x in case.given.items()}
    named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    options = {"rotary_cos": cos, "rotary_sin": sin, "causal": True, "return_softmax_lse": True, **given, **named}
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
    assert out.dtype == torch.bfloat16
    # Keys are turned and rounded as they are written; queries are too.
    wide = apply_rotary_emb(q.float(), cos.float(), sin.float(), True, seqlen_offsets=case.given["cache_seqlens"])
    wide = wide.to(FP8).float()
    for b, count in enumerate(case.lengths):
        tokens = [torch.stack([case.row(x, b, t) for t in range(count + 3)]).float() for x in (k_cache, v_cache)]
        scales = (descales[0][b].repeat_interleave(HEADS // KV_HEADS), descales[1][b], descales[2][b])
        one = [(x * d[:, None])[None] for x, d in zip((wide[b], *tokens), scales, strict=True)]
        exact = reference.attention(*one, causal=True)
        honest = reference.attention(*one, causal=True, dtype=torch.float32, fp8_weights=True)
        assert_state((out[b : b + 1], lse[b : b + 1]), exact, (honest[0].bfloat16(), honest[1]))


# ---- refusals --------------------------------------------------------------------------------------------------------

TABLE = torch.tensor([[0], [1]], dtype=torch.int32)
PACKED = {"q": Q.flatten(0, 1), "cu_seqlens_q": starts_of([8, 8])}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"v_cache": torch.zeros(2, 39, 2, 16)}, ValueError, "v_cache must have shape"),
        ({"v": V[..., :8]}, ValueError, "v must have shape"),
        ({"qv": Q[..., :8]}, ValueError, "qv must have shape"),
        ({"page_table": TABLE + 1}, ValueError, "page_table.1. must be at least 0 and at most 1, got 2"),
        ({"page_table": TABLE.long()}, ValueError, "page_table must be one of int32"),
        ({"cu_seqlens_q": starts_of([8, 8])}, ValueError, "q must have 3 dimensions"),
        ({**PACKED, "cu_seqlens_q": lengths(1, 8, 16)}, ValueError, "cu_seqlens_q must start with 0"),
        ({**PACKED, "cu_seqlens_q": lengths(0, 18, 16)}, ValueError, "cu_seqlens_q must not decrease"),
        ({**PACKED, "max_seqlen_q": -1}, ValueError, "max_seqlen_q"),
        ({"cu_seqlens_k_new": starts_of([4, 4])}, ValueError, "k must have 3 dimensions"),
        ({"cu_seqlens_k_new": starts_of([8, 7]), "k": K.flatten(0, 1), "v": V.flatten(0, 1)}, ValueError,
         "cu_seqlens_k_new must end with k's total of 16 rows, got 15"),
        ({"cu_seqlens_k_new": starts_of([4, 4]), "k": None, "v": None}, ValueError, "cu_seqlens_k_new goes with k"),
        ({"rotary_cos": COS, "rotary_sin": SIN, "rotary_seqlens": lengths(3)}, ValueError, "rotary_seqlens must have"),
        ({"rotary_cos": COS, "rotary_sin": SIN, "rotary_seqlens": lengths(3, 35)}, ValueError, "for each position"),
        ({"rotary_cos": COS[:8], "rotary_sin": SIN[:8], "page_table": TABLE.expand(2, 2)}, ValueError,
         "rows of rotary_cos"),
        ({"scheduler_metadata": torch.zeros(3)}, ValueError, "scheduler_metadata must be one of int32"),
        ({"attention_chunk": -3}, ValueError, "attention_chunk"),
        ({"return_softmax_lse": 1}, TypeError, "return_softmax_lse"),
        ({"q": Q.clone().requires_grad_()}, NotImplementedError, "no backward pass"),
    ],
)  # fmt: skip
def test_refusals_change_nothing(changes, error, match):
    caches = {"k_cache": torch.zeros(2, 40, 2, 16), "v_cache": torch.zeros(2, 40, 2, 16)}
    given = {"q": Q, **caches, "k": K, "v": V, "cache_seqlens": lengths(3, 3), **changes}
    with pytest.raises(error, match=match):
        fa3.flash_attn_with_kvcache(**given)
    assert not any(x.any() for x in caches.values())


def test_descales_are_checked_before_the_cache_changes():
    caches = [torch.zeros(2, 40, 2, 16, dtype=FP8) for _ in range(2)]
    q, k, v = (x.to(FP8) for x in (Q, K, V))
    with pytest.raises(ValueError, match="k_descale must have shape"):
        fa3.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=3, k_descale=torch.ones(3, 2))
    assert not any(x.float().any() for x in caches)
