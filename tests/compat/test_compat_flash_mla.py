"""tilewise.compat.flash_mla against the oracle: dense and listed rows, plain and in bytes, and what is refused."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from oracle import assert_state, randn

from tilewise import reference
from tilewise.compat import flash_mla as mla
from tilewise.kvcache import KVFormat

INF, NAN = math.inf, math.nan
LENGTHS, PAGE, BLOCKS = [1, 63, 0, 65, 130], 16, 40
DIM, VALUE = 80, 64


def pages(dim=DIM, dtype=torch.float32, seed=1):
    """Blocks full of NaN, but for the rows of sequences, and the table of them, with anything beyond."""
    rows = torch.full((BLOCKS, PAGE, 1, dim), NAN, dtype=dtype)
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(LENGTHS), 12), 2147480000, dtype=torch.int32)
    values = randn(BLOCKS, PAGE, 1, dim, dtype=dtype, seed=seed)
    for b, n in enumerate(LENGTHS):
        for first in range(0, n, PAGE):
            table[b, first // PAGE] = block = order.pop()
            rows[block, : n - first] = values[block, : n - first]
    return rows, table, torch.tensor(LENGTHS, dtype=torch.int32)


def called(q, *given, **options):
    return mla.flash_mla_with_kvcache(q, *given, mla.get_mla_metadata()[0], **options)


def minus(lse):
    assert not (lse == -INF).any()
    return lse.masked_fill(lse == INF, -INF)


def judge(result, q, rows, value_dim, **options):
    """One sequence: q (1, tokens, heads, D), rows (n, 1, D)."""
    given = (q, rows[None], rows[None, ..., :value_dim])
    exact, honest = (reference.attention(*given, dtype=t, **options) for t in (torch.float64, q.dtype))
    assert_state((result[0], minus(result[1])), exact, honest)


def test_arguments_are_those_of_flash_mla():
    found = inspect.signature(mla.flash_mla_with_kvcache).parameters
    none = [
        "num_splits", "softmax_scale", "indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache",
        "topk_length", "extra_topk_length",
    ]  # fmt: skip
    assert list(found) == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", *none[:2], "causal",
        "is_fp8_kvcache", *none[2:],
    ]  # fmt: skip
    assert all(found[name].default is None for name in none)
    assert (found["causal"].default, found["is_fp8_kvcache"].default) == (False, False)
    assert mla.get_mla_metadata(torch.zeros(3), 128, 1, is_fp8_kvcache=True)[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_dense(tokens, causal, dtype):
    rows, table, lengths = pages(dtype=dtype)
    q = randn(len(LENGTHS), tokens, 4, DIM, dtype=dtype)
    out, lse = called(q, rows, table, lengths, VALUE, causal=causal)
    assert out.shape == (len(LENGTHS), tokens, 4, VALUE)
    assert lse.shape == (len(LENGTHS), 4, tokens)
    assert (out[2] == 0).all()
    assert (lse[2] == INF).all()
    for b, n in enumerate(LENGTHS):
        its = rows[table[b, : -(-n // PAGE)].long()].flatten(0, 1)[:n]
        judge((out[b : b + 1], lse[b : b + 1]), q[b : b + 1], its, VALUE, causal=causal)


def test_the_sizes_of_deepseek_and_a_scale():
    rows, table, lengths = pages(576, torch.bfloat16)
    q = randn(len(LENGTHS), 1, 16, 576, dtype=torch.bfloat16)
    out, lse = called(q, rows, table, lengths, 512, softmax_scale=192**-0.5, causal=True)
    its = rows[table[3, :5].long()].flatten(0, 1)[:65]
    judge((out[3:4], lse[3:4]), q[3:4], its, 512, scale=192**-0.5)


def test_layers_share_a_plan(monkeypatch):
    made = []
    plan = mla.api.plan_decode
    monkeypatch.setattr(mla.api, "plan_decode", lambda *given, **options: made.append(1) or plan(*given, **options))
    meta, _ = mla.get_mla_metadata()
    rows, table, lengths = pages()
    q = randn(len(LENGTHS), 1, 4, DIM)
    layers = [rows, 2 * rows, -rows]
    found = [mla.flash_mla_with_kvcache(q, layer, table, lengths, VALUE, meta) for layer in layers]
    assert len(made) == 1
    for layer, result in zip(layers, found, strict=True):
        torch.testing.assert_close(result, called(q, layer, table, lengths, VALUE), rtol=0, atol=0)
    made.clear()
    lengths[4] = 129  # not what it was planned for
    out, _ = mla.flash_mla_with_kvcache(q, rows, table, lengths, VALUE, meta)
    assert len(made) == 1
    assert torch.equal(out, called(q, rows, table, lengths, VALUE)[0])
    with pytest.raises(ValueError, match="tile_scheduler_metadata was first given"):
        mla.flash_mla_with_kvcache(q[:, :, :2], rows, table, lengths, VALUE, meta)


def in_bytes(rows):
    """Rows of 656 bytes, and the values that they stand for."""
    form = KVFormat("fp8", 576, latent=512)
    encoded = form.encode(rows.nan_to_num(0.0).float())
    whole = torch.cat([x.contiguous().view(torch.uint8) for x in encoded], -1)
    assert whole.shape[-1] == 656
    return whole, form.decode(encoded)


def test_rows_of_bytes():
    rows, table, lengths = pages(576)
    whole, values = in_bytes(rows)
    q = randn(len(LENGTHS), 2, 4, 576, dtype=torch.bfloat16)
    for given in (whole, whole.view(torch.float8_e4m3fn)):
        out, lse = called(q, given, table, lengths, 512, causal=True, is_fp8_kvcache=True)
        its = values[table[4, :9].long()].flatten(0, 1)[:130]
        judge((out[4:5], lse[4:5]), q[4:5], its.bfloat16(), 512, causal=True)


def listed(rows, indices, count):
    """The rows that a query sees: those listed before `count`, −1 left out."""
    names = [i for i in indices.tolist()[:count] if i >= 0]
    return rows.flatten(0, 1)[names]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_listed_rows(fp8, extra):
    batch, tokens, heads, n = 3, 2, 4, 24
    dtype = torch.bfloat16 if fp8 else torch.float32
    q = randn(batch, tokens, heads, 576, dtype=dtype)
    caches, lists, counts = [], [], []
    for seed in (1, 2):
        rows = randn(6, 8 * seed, 1, 576, dtype=dtype, seed=seed)
        caches.append(in_bytes(rows) if fp8 else (rows, rows))
        drawn = torch.randint(-1, 48 * seed, (batch, tokens, n), generator=torch.Generator().manual_seed(seed))
        drawn[0, 1] = -1  # a query that sees nothing
        lists.append(drawn.int())
        counts.append(torch.tensor([n, 5, 0], dtype=torch.int32))
    sink = torch.tensor([0.5, -INF, 3.0, INF])
    options = {"indices": lists[0], "topk_length": counts[0], "attn_sink": sink, "is_fp8_kvcache": fp8}
    if extra:
        options |= {
            "extra_k_cache": caches[1][0], "extra_indices_in_kvcache": lists[1], "extra_topk_length": counts[1],
        }  # fmt: skip
    out, lse = called(q, caches[0][0], None, None, 512, **options)
    for b in range(batch):
        for t in range(tokens):
            both = range(2 if extra else 1)
            its = torch.cat([listed(caches[i][1].to(dtype), lists[i][b, t], int(counts[i][b])) for i in both])
            one, keys = q[b : b + 1, t : t + 1], its[None]
            for dtype_, found in ((torch.float64, exact := []), (dtype, honest := [])):
                o, mine = reference.attention(one, keys, keys[..., :512], dtype=dtype_)
                kept = torch.where(mine == -INF, 0.0, torch.sigmoid(mine - sink[:, None]))
                found += [o * kept.transpose(1, 2)[..., None].to(o.dtype), mine]
            assert_state((out[b : b + 1, t : t + 1], minus(lse[b : b + 1, :, t : t + 1])), exact, honest)


ROWS, TABLE, SEQLENS = pages()
Q = randn(len(LENGTHS), 1, 4, DIM)
INDICES = torch.zeros(len(LENGTHS), 1, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"tile_scheduler_metadata": None}, TypeError, "must come from get_mla_metadata"),
        ({"num_splits": 1}, ValueError, "num_splits must be None"),
        ({"q": Q[..., :79]}, ValueError, "k_cache must have shape"),
        ({"k_cache": ROWS.expand(-1, -1, 2, -1)}, ValueError, "k_cache must have shape"),
        ({"q": Q[:, :0]}, ValueError, "seqlen of q must be at least 1, got 0"),
        ({"head_dim_v": 577}, ValueError, "head_dim_v must be at most head_dim 80"),
        ({"head_dim_v": 81}, ValueError, "head_dim_v must be at most head_dim 80"),
        ({"head_dim_v": 0}, ValueError, "head_dim_v must be at least 1"),
        ({"block_table": None}, ValueError, "block_table must be given"),
        ({"cache_seqlens": None}, ValueError, "cache_seqlens must be given"),
        ({"block_table": TABLE.long()}, ValueError, "block_table must be one of int32"),
        ({"block_table": TABLE + BLOCKS}, ValueError, "block_table.0. must name pages"),
        (
            {"cache_seqlens": SEQLENS + 200},
            ValueError,
            "cache_seqlens.0. must be between 0 and 192, what block_table has",
        ),
        ({"is_fp8_kvcache": True}, ValueError, "k_cache must be one of float8_e4m3fn"),
        ({"is_fp8_kvcache": 1}, TypeError, "is_fp8_kvcache"),
        ({"attn_sink": torch.zeros(4)}, ValueError, "attn_sink goes with indices"),
        ({"topk_length": SEQLENS}, ValueError, "topk_length goes with indices"),
        ({"indices": INDICES, "causal": True}, ValueError, "causal must be False"),
        ({"indices": INDICES[:, :, 0]}, ValueError, "indices must have 3 dimensions"),
        ({"indices": INDICES + BLOCKS * PAGE}, ValueError, "indices must be positions"),
        ({"indices": INDICES, "extra_k_cache": ROWS}, ValueError, "go together"),
        ({"indices": INDICES, "attn_sink": torch.zeros(3)}, ValueError, "attn_sink must have shape"),
        ({"indices": INDICES, "topk_length": SEQLENS[:2]}, ValueError, "topk_length must have shape"),
        ({"q": Q.clone().requires_grad_()}, NotImplementedError, "no backward pass"),
    ],
)
def test_refusals(changes, error, match):
    given = {
        "q": Q, "k_cache": ROWS, "block_table": TABLE, "cache_seqlens": SEQLENS, "head_dim_v": VALUE,
        "tile_scheduler_metadata": mla.get_mla_metadata()[0], **changes,
    }  # fmt: skip
    with pytest.raises(error, match=match):
        mla.flash_mla_with_kvcache(**given)


def test_rows_of_another_width_are_named():
    rows = torch.zeros(2, 64, 1, 656, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match="q must have the 544 channels that the rows of k_cache have with head_dim_v 448"
    ):
        called(randn(1, 1, 4, 576), rows, TABLE[:1] * 0, SEQLENS[:1] * 0 + 3, 448, is_fp8_kvcache=True)


def test_rows_of_deepseek_v4_are_refused():
    rows = torch.zeros(2, 64, 1, 584, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="rows of 584 bytes"):
        called(randn(1, 1, 4, 576), rows, TABLE[:1], SEQLENS[:1], 512, is_fp8_kvcache=True)
    with pytest.raises(NotImplementedError, match="rows of 584 bytes"):
        called(randn(1, 1, 4, 512), rows, TABLE[:1], SEQLENS[:1], 448, is_fp8_kvcache=True)
