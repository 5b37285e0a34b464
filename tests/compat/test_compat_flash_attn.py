"""tilewise.compat.flash_attn against the oracle: every argument of every call, caches in place, gradients, refusals."""

from __future__ import annotations

import inspect
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from oracle import DTYPES, assert_state, qkv, randn

from tilewise import api, reference
from tilewise.compat import flash_attn as fa
from tilewise.compat.bert_padding import index_first_axis, pad_input, unpad_input
from tilewise.compat.rotary import apply_rotary_emb

INF = math.inf


def minus(lse):
    """flash_attn's +inf of a row without keys, as the oracle says it."""
    assert not (lse == -INF).any()
    return lse.masked_fill(lse == INF, -INF)


def assert_flash(result, q, k, v, **options):
    """(out, softmax_lse, S_dmask) of a dense call, against the oracle with Tilewise's options."""
    out, lse, probs = result
    assert probs.shape == (0,)
    assert probs.dtype == q.dtype
    assert lse.is_contiguous()
    exact = reference.attention(q, k, v, **options)
    assert_state((out, minus(lse)), exact, reference.baseline(q, k, v, **options))


def starts_of(lengths, dtype=torch.int32):
    return F.pad(torch.tensor(lengths, dtype=dtype).cumsum(0, dtype=dtype), (1, 0))


# ---- the calls as flash_attn has them --------------------------------------------------------------------------------

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


SLOPES = randn(2, 4, seed=9).abs()
OPTIONS = [
    ({"window_size": (5, 3)}, {"window": (5, 3)}),
    ({"window_size": (5, -1)}, {"window": (5, None)}),
    ({"window_size": [-1, 0]}, {"window": (None, 0)}),
    ({"window_size": torch.tensor([4, 30]), "causal": True}, {"window": (4, 0), "causal": True}),
    ({"softmax_scale": 0.4, "softcap": 1.5}, {"scale": 0.4, "softcap": 1.5}),
    ({"softcap": -1.0, "deterministic": True}, {}),
    ({"alibi_slopes": SLOPES, "causal": True}, {"alibi_slopes": SLOPES, "causal": True}),
    ({"alibi_slopes": SLOPES[0]}, {"alibi_slopes": SLOPES[0]}),
    ({"learnable_sink": randn(4, seed=5)}, {"sinks": randn(4, seed=5)}),
]


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


# ---- packed sequences ------------------------------------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = [1, 63, 0, 65, 7], [1, 65, 5, 63, 0]


def ragged(dtype=torch.float32, heads_kv=2, lengths_k=LENGTHS_K):
    q = randn(sum(LENGTHS_Q), 4, 16, dtype=dtype)
    k, v = (randn(sum(lengths_k), heads_kv, 16, dtype=dtype, seed=s) for s in (1, 2))
    return q, k, v, starts_of(LENGTHS_Q), starts_of(lengths_k)


def assert_varlen(result, arguments, **options):
    out, lse, probs = result
    assert probs.shape == (0,)
    exact = reference.attention_varlen(*arguments, **options)
    honest = reference.attention_varlen(*arguments, dtype=arguments[0].dtype, **options)
    assert_state((out, minus(lse)), exact, honest)


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


def paged(k, v, lengths, page_size, spare=2):
    """Tokens packed end to end as pages in no order, NaN where no token is, and the table, with anything beyond."""
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts) + spare, generator=torch.Generator().manual_seed(1)).tolist()
    pages = [torch.full((len(order), page_size, *x.shape[1:]), math.nan, dtype=x.dtype) for x in (k, v)]
    table = torch.full((len(lengths), max(counts) + 1), -7, dtype=torch.int32)
    first = 0
    for b, n in enumerate(lengths):
        for t in range(n):
            if t % page_size == 0:
                table[b, t // page_size] = order.pop()
            for page, x in zip(pages, (k, v), strict=True):
                page[table[b, t // page_size], t % page_size] = x[first + t]
        first += n
    return *pages, table


@pytest.mark.parametrize("page_size", [1, 16, 20])
def test_varlen_block_table(page_size):
    q, k, v, cu_q, cu_k = arguments = ragged()
    *pages, table = paged(k, v, LENGTHS_K, page_size)
    wide = table.repeat_interleave(2, 1)[:, ::2]  # of any strides
    result = fa.flash_attn_varlen_func(
        q, *pages, cu_q, cu_k, 65, 65, causal=True, return_attn_probs=True, block_table=wide
    )
    assert_varlen(result, arguments, causal=True)


# ---- a cache ---------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, DIM = 4, 2, 32


def tables(positions, rotary_dim, dtype=torch.float32):
    angles = randn(positions, rotary_dim // 2, seed=77)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(x, positions, cos, sin, interleaved):
    """x (tokens, heads, head_dim) in float64, channels as complex numbers."""
    half = cos.shape[1]
    y = x.double()
    a, b = (
        (y[..., : 2 * half : 2], y[..., 1 : 2 * half : 2]) if interleaved else (y[..., :half], y[..., half : 2 * half])
    )
    z = torch.complex(a, b) * torch.complex(cos[positions].double(), sin[positions].double())[:, None]
    pair = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
    return torch.cat((pair, y[..., 2 * half :]), -1)


class CacheCase:
    """Two sequences of a cache, by hand: what a call should give, and what should stand in the cache after it.

    layout: "rows" (sequences, capacity, …), "heads" (sequences, heads, capacity, …) seen as rows, "slice" of a longer
    and wider cache, or a page size. Rows that no token has are NaN.
    """

    def __init__(self, capacity, lengths, *, new=None, seqlen_q=1, layout="rows", dtype=torch.float32, leftpad=None,
                 batch_idx=None, rotary=0, interleaved=True, uniform=False):  # fmt: skip
        self.batch, self.lengths, self.dtype = len(lengths), lengths, dtype
        self.q = randn(self.batch, seqlen_q, HEADS, DIM, dtype=dtype)
        self.layout, self.leftpad, self.interleaved = layout, leftpad or [0] * self.batch, interleaved
        self.where = batch_idx or list(range(self.batch))
        tokens = [
            [randn(n, KV_HEADS, DIM, dtype=dtype, seed=10 * s + b) for b, n in enumerate(lengths)] for s in (1, 2)
        ]
        self.given = {"cache_seqlens": lengths[0] if uniform else torch.tensor(lengths, dtype=torch.int32)}
        if isinstance(layout, int):
            *self.caches, table = paged(
                *(torch.cat(x) for x in tokens), lengths, layout, spare=3 + self.batch * (capacity // layout)
            )
            free = sorted(set(range(len(self.caches[0]))) - set(table.flatten().tolist()))
            self.table = torch.full((self.batch, capacity // layout), -7, dtype=torch.int32)
            for b, n in enumerate(lengths):  # pages for what is to come, after those that are there
                used = -(-n // layout)
                self.table[b, :used] = table[b, :used]
                for page in range(used, -(-(n + (new or 0)) // layout)):
                    self.table[b, page] = free.pop()
            self.given["block_table"] = self.table
        else:
            self.caches = [self._contiguous(capacity, x) for x in tokens]
        if leftpad:
            self.given["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32)
        if batch_idx:
            self.given["cache_batch_idx"] = torch.tensor(batch_idx, dtype=torch.int32)
        self.new = [randn(self.batch, new, KV_HEADS, DIM, dtype=dtype, seed=30 + s) for s in (0, 1)] if new else None
        self.cos, self.sin = tables(capacity + seqlen_q, rotary, dtype) if rotary else (None, None)
        self.before = [x.clone() for x in self.caches]

    def _contiguous(self, capacity, tokens):
        sequences = max(self.where) + 1
        if self.layout == "heads":
            cache = torch.full((sequences, KV_HEADS, capacity, DIM), math.nan, dtype=self.dtype).transpose(1, 2)
        elif self.layout == "slice":
            cache = torch.full((sequences, capacity + 16, KV_HEADS, 2 * DIM), math.nan, dtype=self.dtype)
            cache = cache[:, 16:, :, DIM:]
        else:
            cache = torch.full((sequences, capacity, KV_HEADS, DIM), math.nan, dtype=self.dtype)
        for b, x in enumerate(tokens):
            cache[self.where[b], : len(x)] = x
        return cache

    def row(self, cache, b, position):
        """A view of the row of sequence b's token, old or new."""
        if isinstance(self.layout, int):
            return cache[self.table[b, position // self.layout], position % self.layout]
        return cache[self.where[b], position]

    def __call__(self, **options):
        new = {} if self.new is None else {"k": self.new[0], "v": self.new[1]}
        rotary = {"rotary_cos": self.cos, "rotary_sin": self.sin, "rotary_interleaved": self.interleaved}
        return fa.flash_attn_with_kvcache(
            self.q, *self.caches, **new, **rotary, **self.given, return_softmax_lse=True, **options
        )

    def check(self, given=None, **meant):
        """Calls with flash_attn's options `given`, Tilewise's `meant`; returns out and LSE."""
        out, lse = self(**(meant if given is None else given))
        assert lse.is_contiguous()
        together = not meant.get("causal") and meant.get("window") is None  # then q is all at one position
        slopes = meant.pop("alibi_slopes", None)
        expected = [c.double() for c in self.before]
        states = {torch.float64: [], self.dtype: []}
        for b, n in enumerate(self.lengths):
            q, added = self.q[b].double(), [] if self.new is None else [x[b].double() for x in self.new]
            if self.cos is not None:
                steps = torch.zeros(len(q), dtype=torch.long) if together else torch.arange(len(q))
                q = turned(q, n + steps, self.cos, self.sin, self.interleaved)
                added[0] = turned(added[0], n + torch.arange(len(added[0])), self.cos, self.sin, self.interleaved)
            total = n + (len(added[0]) if added else 0)
            for cache, rows in zip(expected, added, strict=False):
                for t, x in enumerate(rows):
                    self.row(cache, b, n + t).copy_(x)
            seen = range(self.leftpad[b], total)
            k, v = (torch.stack([self.row(c, b, t) for t in seen]) if seen else c[0, :0] for c in expected)
            if slopes is not None:
                meant["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[b]
            for dtype, found in states.items():
                found.append(reference.attention(*(x[None].to(dtype) for x in (q, k, v)), dtype=dtype, **meant))
        exact, honest = ([torch.cat(x) for x in zip(*found, strict=True)] for found in states.values())
        assert_state((out, minus(lse)), exact, honest)
        for cache, wanted in zip(self.caches, expected, strict=True):
            verdict = reference.judge(cache, wanted, wanted.to(self.dtype))
            assert verdict.ok, verdict.reason  # NaN stands where it stood: nothing else was written
        return out, lse


LAYOUTS = ["rows", "heads", "slice", 16, 4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_is_read(layout, dtype):
    CacheCase(48, [1, 33], layout=layout, seqlen_q=3, dtype=dtype).check(causal=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("new", [1, 17])
def test_cache_is_appended_to(layout, new):
    case = CacheCase(64, [0, 31], layout=layout, new=new, seqlen_q=new)
    before = [x.data_ptr() for x in case.caches]
    case.check(causal=True)
    assert [x.data_ptr() for x in case.caches] == before


@pytest.mark.parametrize("capacity", [35, 63, 65])
def test_capacities_that_no_page_divides(capacity):
    CacheCase(capacity, [5, capacity - 2], new=2, seqlen_q=2).check(causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [16, DIM])
@pytest.mark.parametrize("layout", ["rows", 16])
def test_rotary(layout, rotary, interleaved, dtype):
    def case():
        return CacheCase(
            48, [3, 30], new=4, seqlen_q=4, layout=layout, rotary=rotary, interleaved=interleaved, dtype=dtype
        )

    case().check(causal=True)
    case().check()  # all queries at one position
    case().check(given={"window_size": (7, 2)}, window=(7, 2))


def test_more_queries_than_new_keys():
    CacheCase(48, [3, 30], new=2, seqlen_q=5, rotary=16).check(causal=True)


@pytest.mark.parametrize("capacity", [48, 35])
def test_leftpad(capacity):
    CacheCase(capacity, [9, 30], leftpad=[5, 17], seqlen_q=2).check(causal=True)
    CacheCase(capacity, [9, 30], leftpad=[9, 0], new=3, seqlen_q=3, rotary=16).check(causal=True)
    slopes = randn(2, HEADS, seed=9).abs()
    CacheCase(capacity, [9, 30], leftpad=[5, 17], layout="slice").check(alibi_slopes=slopes)


@pytest.mark.parametrize("layout", ["rows", "heads", "slice"])
def test_batch_idx(layout):
    CacheCase(48, [9, 30], batch_idx=[4, 1], new=3, seqlen_q=3, layout=layout).check(causal=True)
    CacheCase(35, [9, 30], batch_idx=[0, 3], leftpad=[2, 1], layout=layout).check()


@pytest.mark.parametrize("layout", ["rows", 16])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"window_size": (3, 1)}, {"window": (3, 1)}),
        ({"window_size": (3, -1), "causal": True}, {"window": (3, 0), "causal": True}),
        ({"softmax_scale": 0.7, "softcap": 2.0}, {"scale": 0.7, "softcap": 2.0}),
        ({"alibi_slopes": SLOPES, "num_splits": 3}, {"alibi_slopes": SLOPES}),
        ({"alibi_slopes": SLOPES[1], "causal": True}, {"alibi_slopes": SLOPES[1], "causal": True}),
        ({"learnable_sink": randn(HEADS, seed=5)}, {"sinks": randn(HEADS, seed=5)}),
    ],
)
def test_cache_options(layout, given, meant):
    CacheCase(48, [9, 30], new=3, seqlen_q=5, layout=layout).check(given=given, **meant)


@pytest.mark.parametrize("layout", ["rows", 16])
def test_one_length_for_all(layout):
    CacheCase(35 if layout == "rows" else 48, [7, 7], new=3, seqlen_q=3, layout=layout, uniform=True).check(causal=True)


def test_no_lengths_is_the_whole_cache():
    case = CacheCase(20, [20, 20])
    case.given = {}
    case.check()
    assert fa.flash_attn_with_kvcache(case.q, *case.caches).shape == case.q.shape


def test_sequences_of_the_cache_at_any_distance():
    """One that is no multiple of a row's length, so that no page table can tell it."""
    rows, lengths = randn(2, 2, 32 * 2 * 16 + 8), torch.tensor([5, 32], dtype=torch.int32)
    k_cache, v_cache = rows[..., :-8].unflatten(-1, (32, 2, 16)).unbind()
    assert k_cache.stride(0) % k_cache.stride(1)
    q = randn(2, 1, 4, 16, seed=1)
    apart = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)
    dense = fa.flash_attn_with_kvcache(q, k_cache.contiguous(), v_cache.contiguous(), cache_seqlens=lengths)
    assert torch.equal(apart, dense)


def test_more_sequences_in_the_cache_than_in_the_batch():
    case = CacheCase(20, [20, 20], uniform=True)
    wider = [torch.cat((x, torch.full_like(x, math.nan))) for x in case.caches]
    expected = fa.flash_attn_with_kvcache(case.q, *case.caches)
    for lengths in (20, torch.tensor([20, 20])):
        torch.testing.assert_close(fa.flash_attn_with_kvcache(case.q, *wider, cache_seqlens=lengths), expected)


def test_an_empty_cache_gives_zero_and_plus_infinity():
    case = CacheCase(16, [0, 3])
    out, lse = case.check(causal=True)
    assert (out[0] == 0).all()
    assert (lse[0] == INF).all()


def test_a_shared_page_stays_as_it_is():
    """Two sequences with one first page; what they append goes to pages of their own."""
    caches = [randn(6, 16, KV_HEADS, DIM, seed=s) for s in (1, 2)]
    before = [x.clone() for x in caches]
    table = torch.tensor([[3, 5, 99], [3, 0, -1]], dtype=torch.int32)
    new = [randn(2, 2, KV_HEADS, DIM, seed=s) for s in (3, 4)]
    lengths = torch.tensor([16, 18], dtype=torch.int32)
    fa.flash_attn_with_kvcache(
        randn(2, 2, HEADS, DIM), *caches, *new, cache_seqlens=lengths, block_table=table, causal=True
    )
    for cache, old, rows in zip(caches, before, new, strict=True):
        old[5, 0:2], old[0, 2:4] = rows[0], rows[1]
        assert torch.equal(cache, old)


@pytest.mark.parametrize(
    ("capacity", "layout", "leftpad"),
    [(32, "rows", None), (64, "slice", None), (19, "rows", None), (32, "heads", [3, 6])],
)
def test_the_kernels_read_the_same_pages(capacity, layout, leftpad, monkeypatch):
    """The GPU kernels' source over the views of a contiguous cache, with NaN in every row that no token has."""
    monkeypatch.setattr(api, "attention_varlen", partial(api.attention_varlen, backend="emulator"))
    case = CacheCase(capacity, [4, 17], new=2, seqlen_q=2, layout=layout, leftpad=leftpad, dtype=torch.bfloat16)
    case.check(causal=True)


# ---- gradients -------------------------------------------------------------------------------------------------------


def leaves(*tensors, dtype=None):
    return [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in tensors]


def assert_grads(call, tensors, oracle):
    """Gradients of call(*tensors) -> (out, lse) against those of the oracle in float64, by the tolerance rule."""

    def grads(run, dtype):
        inputs = leaves(*tensors, dtype=dtype)
        out, lse = run(*inputs)
        weights = [randn(*x.shape, seed=50 + n).to(x.dtype) for n, x in enumerate((out, lse))]
        finite = torch.where(lse.isfinite(), lse, 0.0)
        return torch.autograd.grad((out * weights[0]).sum() + (finite * weights[1]).sum(), inputs)

    got = grads(call, None)
    exact, honest = (
        grads(partial(oracle, dtype=torch.float64), torch.float64),
        grads(partial(oracle, dtype=tensors[0].dtype), None),
    )
    for n, (mine, right, base) in enumerate(zip(got, exact, honest, strict=True)):
        assert mine.dtype == tensors[n].dtype
        verdict = reference.judge(mine, right, base)
        assert verdict.ok, f"gradient {n}: {verdict.reason}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("given", "meant"), OPTIONS)
def test_gradients(given, meant, dtype):
    q, k, v = qkv(2, 9, 12, 4, 2, 16, dtype=dtype)
    assert_grads(
        lambda *x: fa.flash_attn_func(*x, return_attn_probs=True, **given)[:2],
        (q, k, v),
        lambda *x, dtype: reference.attention(*x, dtype=dtype, **meant),
    )


def test_gradients_are_those_of_sdpa():
    tensors = qkv(2, 33, 33, 4, 2, 40)
    mine, torchs = leaves(*tensors), leaves(*tensors)
    weight = randn(2, 33, 4, 40, seed=9)
    fa.flash_attn_func(*mine, causal=True).backward(weight)
    q, k, v = (x.transpose(1, 2) for x in torchs)
    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).backward(weight)
    for a, b in zip(mine, torchs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_gradients_of_packed_tensors():
    q, k, v = qkv(2, 12, 12, 4, 4, 16)
    plain, (packed,), (queries, pair) = (
        leaves(q, k, v),
        leaves(torch.stack((q, k, v), 2)),
        leaves(q, torch.stack((k, v), 2)),
    )
    fa.flash_attn_func(*plain, causal=True).sum().backward()
    fa.flash_attn_qkvpacked_func(packed, causal=True).sum().backward()
    fa.flash_attn_kvpacked_func(queries, pair, causal=True).sum().backward()
    expected = [x.grad for x in plain]
    torch.testing.assert_close(packed.grad, torch.stack(expected, 2))
    torch.testing.assert_close(queries.grad, expected[0])
    torch.testing.assert_close(pair.grad, torch.stack(expected[1:], 2))


def test_gradients_of_slopes_and_sink():
    q, k, v = qkv(2, 9, 12, 4, 2, 16)
    assert_grads(
        lambda q, k, v, slopes, sink: fa.flash_attn_func(
            q, k, v, causal=True, alibi_slopes=slopes, learnable_sink=sink, return_attn_probs=True
        )[:2],
        (q, k, v, SLOPES, randn(4, seed=5)),
        lambda q, k, v, slopes, sink, dtype: reference.attention(
            q, k, v, causal=True, alibi_slopes=slopes, sinks=sink, dtype=dtype
        ),
    )


def test_gradients_of_rows_without_keys_are_zero():
    q, k, v = leaves(*qkv(1, 6, 2, 2, 1, 16))
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    (out.sum() + lse[:, :, 4:].sum()).backward()
    assert (q.grad[:, :4] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert q.grad[:, 5].abs().sum() > 0
    q, k, v = leaves(*qkv(1, 6, 0, 2, 1, 16))
    fa.flash_attn_func(q, k, v).sum().backward()
    assert (q.grad == 0).all()


def test_gradients_of_varlen():
    """Sequences with keys for every row, an empty one among them, rows of nobody at the end."""
    lengths_q, lengths_k = [1, 9, 0, 5], [3, 12, 4, 5]
    cu_q, cu_k = starts_of(lengths_q), starts_of(lengths_k)
    q, k, v = (randn(n + 2, h, 16, seed=s) for n, h, s in ((15, 4, 0), (24, 2, 1), (24, 2, 2)))

    def oracle(q, k, v, dtype):
        o = []
        for b, n in enumerate(lengths_q):
            rows, keys = slice(int(cu_q[b]), int(cu_q[b]) + n), slice(int(cu_k[b]), int(cu_k[b + 1]))
            o.append(reference.attention(q[None, rows], k[None, keys], v[None, keys], causal=True, dtype=dtype)[0][0])
        o = torch.cat((*o, o[0].new_zeros(2, 4, 16)))
        return o, o.new_zeros(1)

    def call(q, k, v):
        return fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 12, causal=True), q.new_zeros(1)

    assert_grads(call, (q, k, v), oracle)


def test_gradients_of_pages():
    """A page that two sequences share has the sum of both, and one twice in a sequence of all its uses."""
    q, k, v = randn(4, 4, 16), randn(5, 4, 2, 16, seed=1), randn(5, 4, 2, 16, seed=2)
    table = torch.tensor([[3, 1, 1], [3, 4, 99]], dtype=torch.int32)
    cu_q, cu_k = starts_of([3, 1]), starts_of([11, 6])

    def oracle(q, k, v, dtype):
        parts = []
        for b, (rows, n) in enumerate(((slice(0, 3), 11), (slice(3, 4), 6))):
            pages = table[b, : -(-n // 4)].long()
            keys, values = (x[pages].flatten(0, 1)[None, :n] for x in (k, v))
            parts.append(reference.attention(q[None, rows], keys, values, causal=True, dtype=dtype))
        return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    def call(q, k, v):
        return fa.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 3, 11, causal=True, block_table=table, return_attn_probs=True
        )[:2]

    assert_grads(call, (q, k, v), oracle)


def test_gradients_change_no_value_and_come_only_where_asked():
    q, k, v = qkv(2, 33, 40, 4, 2, 16, dtype=torch.bfloat16)
    plain = fa.flash_attn_func(q, k, v, causal=True)
    (wanted,) = leaves(q)
    out = fa.flash_attn_func(wanted, k, v, causal=True)
    assert torch.equal(out, plain)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), wanted, create_graph=True)
    out.sum().backward()
    assert wanted.grad is not None
    assert k.grad is None
    with torch.no_grad():
        assert not fa.flash_attn_func(wanted, k, v).requires_grad


def test_gradients_under_autocast_are_float32():
    tensors = qkv(1, 9, 9, 2, 2, 16)
    mine, plain = leaves(*tensors), leaves(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fa.flash_attn_func(*mine).sum().backward()
    fa.flash_attn_func(*plain).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, plain, strict=True))


# ---- refusals --------------------------------------------------------------------------------------------------------

Q, K, V = qkv(2, 8, 8, 4, 2, 16)
CU = starts_of([8, 8])


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"dropout_p": 0.1}, NotImplementedError, "no dropout"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p"),
        ({"dropout_p": None}, TypeError, "dropout_p"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"deterministic": None}, TypeError, "deterministic"),
        ({"return_attn_probs": 1}, TypeError, "return_attn_probs"),
        ({"window_size": 5}, TypeError, "window_size must be"),
        ({"window_size": (1, 2, 3)}, TypeError, "window_size must be"),
        ({"window_size": (1.5, 2)}, TypeError, "window_size must be an int"),
        ({"softcap": "x"}, TypeError, "softcap"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes must be"),
        ({"learnable_sink": torch.ones(3)}, ValueError, "learnable_sink must have shape"),
        ({"q": Q.tolist()}, TypeError, "q must be a torch.Tensor"),
        ({"q": Q[0]}, ValueError, "q must have 4 dimensions"),
        ({"k": K.half()}, ValueError, "k must be one of float32"),
        ({"k": K[..., :8]}, ValueError, "k must have shape"),
        ({"q": Q[:, :, :3]}, ValueError, "multiple of k's 2 heads"),
        ({"q": Q.double(), "k": K.double(), "v": V.double()}, ValueError, "q must be one of"),
    ],
)
def test_refusals(changes, error, match):
    with pytest.raises(error, match=match):
        fa.flash_attn_func(**{"q": Q, "k": K, "v": V, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"dropout_p": 0.5}, NotImplementedError, "no dropout"),
        ({"max_seqlen_q": 8.5}, TypeError, "max_seqlen_q"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k"),
        ({"cu_seqlens_q": [0, 8, 16]}, TypeError, "cu_seqlens_q"),
        ({"cu_seqlens_k": CU.float()}, ValueError, "cu_seqlens_k must be one of int32"),
        ({"cu_seqlens_k": CU + 1}, ValueError, "cu_seqlens_k must start with 0"),
        ({"cu_seqlens_k": CU * 2}, ValueError, "cu_seqlens_k must end with k's total of 16"),
        ({"q": Q}, ValueError, "q must have 3 dimensions"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, ValueError, "k must have 4 dimensions"),
        ({"block_table": torch.zeros(2, 1), "k": K, "v": V}, ValueError, "page_table must be one of int32"),
        ({"learnable_sink": 1.0}, TypeError, "learnable_sink"),
    ],
)
def test_varlen_refusals(changes, error, match):
    given = {"q": Q.flatten(0, 1), "k": K.flatten(0, 1), "v": V.flatten(0, 1), "cu_seqlens_q": CU, "cu_seqlens_k": CU}
    with pytest.raises(error, match=match):
        fa.flash_attn_varlen_func(**{**given, "max_seqlen_q": 8, "max_seqlen_k": 8, **changes})


def test_packed_refusals():
    with pytest.raises(ValueError, match="qkv must have shape"):
        fa.flash_attn_qkvpacked_func(torch.stack((Q, Q), 2))
    with pytest.raises(TypeError, match=r"kv must be a torch\.Tensor"):
        fa.flash_attn_kvpacked_func(Q, (K, V))
    with pytest.raises(ValueError, match="qkv must have 4 dimensions"):
        fa.flash_attn_varlen_qkvpacked_func(torch.stack((Q, Q, Q), 2), CU, 8)
    with pytest.raises(NotImplementedError, match="no dropout"):
        fa.flash_attn_varlen_kvpacked_func(Q.flatten(0, 1), torch.stack((K, V), 2).flatten(0, 1), CU, CU, 8, 8, 0.1)


def lengths(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


COS, SIN = tables(40, 16)
TABLE = torch.tensor([[0], [1]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"q": Q[..., :8]}, ValueError, "k_cache must have shape"),
        ({"q": Q[:, :, :3]}, ValueError, "q must have a multiple of k_cache's 2 heads"),
        ({"k_cache": Q[:1, :, :2], "v_cache": Q[:1, :, :2]}, ValueError, "sequences of k_cache must be at least 2"),
        ({"v_cache": torch.zeros(2, 39, 2, 16)}, ValueError, "v_cache must have shape"),
        ({"k_cache": torch.zeros(2, 40, 16, 2).transpose(2, 3)}, ValueError, "k_cache must have stride 1"),
        ({"k_cache": torch.zeros(2, 0, 2, 16), "v_cache": torch.zeros(2, 0, 2, 16)}, ValueError, "capacity of k_cache"),
        ({"v": None}, ValueError, "k and v must be given together"),
        ({"v": V[:, :3]}, ValueError, "v must have shape"),
        ({"k": K.half()}, ValueError, "k must be one of float32"),
        ({"cache_seqlens": None}, ValueError, "cache_seqlens must tell where"),
        ({"cache_seqlens": lengths(1, 33)}, ValueError, "cache_seqlens must be at least 0 and at most 32, got 33"),
        ({"cache_seqlens": 33}, ValueError, "cache_seqlens must be at least 0 and at most 32, got 33"),
        ({"cache_seqlens": lengths(-1, 3)}, ValueError, "cache_seqlens"),
        ({"cache_seqlens": lengths(1, 2, 3)}, ValueError, "cache_seqlens must have shape"),
        ({"cache_seqlens": lengths(1, 2).float()}, ValueError, "cache_seqlens must be one of int32"),
        ({"cache_seqlens": 1.5}, TypeError, "cache_seqlens must be an int"),
        ({"k": torch.zeros(2, 41, 2, 16), "v": torch.zeros(2, 41, 2, 16)}, ValueError, "room for, 40, got 41"),
        ({"cache_batch_idx": lengths(0, 2)}, ValueError, "cache_batch_idx must be at least 0 and at most 1"),
        ({"cache_batch_idx": [0, 1]}, TypeError, "cache_batch_idx"),
        ({"cache_leftpad": lengths(3, 4)}, ValueError, "cache_leftpad must be at least 0 and at most 3, got 4"),
        ({"cache_leftpad": lengths(-1, 0)}, ValueError, "cache_leftpad"),
        ({"block_table": TABLE, "cache_leftpad": lengths(0, 0)}, NotImplementedError, "cache_leftpad does not go"),
        ({"block_table": TABLE, "cache_batch_idx": lengths(0, 1)}, NotImplementedError, "cache_batch_idx does not go"),
        ({"block_table": TABLE[:1]}, ValueError, "block_table must have shape"),
        ({"block_table": TABLE.long()}, ValueError, "block_table must be one of int32"),
        ({"block_table": TABLE + 1}, ValueError, "block_table.1. must be at least 0 and at most 1, got 2"),
        ({"block_table": TABLE - 1}, ValueError, "block_table.0. must be at least 0"),
        ({"block_table": TABLE, "cache_seqlens": lengths(3, 33)}, ValueError, "at most 32, got 33"),
        ({"rotary_cos": COS}, ValueError, "rotary_cos and rotary_sin must be given together"),
        ({"rotary_cos": COS, "rotary_sin": SIN, "k": None, "v": None}, ValueError, "go with k and v"),
        ({"rotary_cos": COS[:39], "rotary_sin": SIN[:39]}, ValueError, "rows of rotary_cos must be at least 40"),
        ({"rotary_cos": COS, "rotary_sin": SIN[:, :4]}, ValueError, "rotary_sin must have shape"),
        (
            {"rotary_cos": tables(40, 18)[0], "rotary_sin": tables(40, 18)[1]},
            ValueError,
            "at most head_dim 16 channels",
        ),
        (
            {"rotary_cos": COS, "rotary_sin": SIN, "q": randn(2, 39, 4, 16), "causal": True},
            ValueError,
            "rotary_cos must have a row for each position, 3 to 41",
        ),
        ({"rotary_interleaved": None}, TypeError, "rotary_interleaved"),
        ({"return_softmax_lse": 1}, TypeError, "return_softmax_lse"),
        ({"num_splits": -1}, ValueError, "num_splits"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes must be"),
        ({"learnable_sink": torch.ones(3)}, ValueError, "learnable_sink must have shape"),
        ({"softcap": math.inf}, ValueError, "softcap"),
        ({"q": Q.clone().requires_grad_()}, NotImplementedError, "no backward pass"),
        ({"k": K.clone().requires_grad_()}, NotImplementedError, "no backward pass"),
    ],
)
def test_cache_refusals_change_nothing(changes, error, match):
    caches = {"k_cache": torch.zeros(2, 40, 2, 16), "v_cache": torch.zeros(2, 40, 2, 16)}
    given = {"q": Q, **caches, "k": K, "v": V, "cache_seqlens": lengths(3, 3), **changes}
    with pytest.raises(error, match=match):
        fa.flash_attn_with_kvcache(**given)
    assert not any(x.any() for x in caches.values())


# ---- beside them: padding and rotary ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64])
def test_unpad_and_pad(mask_dtype):
    x = randn(3, 5, 2, 4)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1]]).to(mask_dtype)
    packed, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    assert torch.equal(packed, x[mask.bool()])
    assert indices.tolist() == [0, 1, 2, 10, 12, 14]
    assert cu_seqlens.tolist() == [0, 3, 3, 6]
    assert cu_seqlens.dtype == torch.int32
    assert longest == 3
    assert used.tolist() == [3, 0, 3]
    assert torch.equal(index_first_axis(x.flatten(0, 1), indices), packed)
    padded = pad_input(packed, indices, 3, 5)
    assert torch.equal(padded, x * mask.bool()[..., None, None])
    (leaf,) = leaves(x)
    pad_input(unpad_input(leaf, mask)[0], indices, 3, 5).sum().backward()
    assert torch.equal(leaf.grad, mask.bool()[..., None, None].expand_as(x).float())


def test_unpad_with_places_that_do_not_count():
    x = randn(2, 3, 1)
    mask, unused = torch.tensor([[1, 0, 0], [1, 1, 0]]), torch.tensor([[0, 1, 0], [0, 0, 0]])
    packed, indices, cu_seqlens, longest, used = unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 3, 4]
    assert cu_seqlens.tolist() == [0, 2, 4]
    assert longest == 2
    assert used.tolist() == [1, 2]
    assert torch.equal(packed, x.flatten(0, 1)[indices])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: unpad_input(torch.zeros(4), torch.ones(4)), ValueError, "hidden_states must be"),
        (lambda: unpad_input(torch.zeros(2, 4), torch.ones(2, 3)), ValueError, "attention_mask must have shape"),
        (lambda: unpad_input(torch.zeros(2, 4), torch.ones(2, 4)), ValueError, "attention_mask must be one of bool"),
        (lambda: pad_input(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), 2, 2), ValueError, "indices"),
        (lambda: index_first_axis(torch.zeros(3, 4), [1]), TypeError, "indices"),
        (lambda: apply_rotary_emb(Q[0], COS, SIN), ValueError, "x must have 4 dimensions"),
        (lambda: apply_rotary_emb(Q, COS, SIN[:3]), ValueError, "sin must have shape"),
        (lambda: apply_rotary_emb(Q, *tables(40, 18)), ValueError, "at most head_dim 16 channels"),
        (lambda: apply_rotary_emb(Q, COS, SIN, seqlen_offsets=33), ValueError, "a row for each position, 33 to 40"),
        (lambda: apply_rotary_emb(Q, COS, SIN, seqlen_offsets=lengths(1)), ValueError, "seqlen_offsets must have"),
        (lambda: apply_rotary_emb(Q, COS, SIN, interleaved=1), TypeError, "interleaved"),
    ],
)
def test_refusals_beside(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 5, [0, 9]])
def test_apply_rotary_emb(offsets, interleaved, dtype):
    x, (cos, sin) = randn(2, 7, 3, 40, dtype=dtype), tables(16, 24, dtype)
    starts = offsets if isinstance(offsets, list) else [offsets] * 2
    given = lengths(*offsets) if isinstance(offsets, list) else offsets
    positions = [start + torch.arange(7) for start in starts]
    exact = torch.stack([turned(x[b], positions[b], cos, sin, interleaved) for b in (0, 1)])
    got = apply_rotary_emb(x, cos, sin, interleaved=interleaved, seqlen_offsets=given)
    assert got.dtype == dtype
    assert reference.judge(got, exact, exact.to(dtype)).ok
    packed = apply_rotary_emb(
        x.flatten(0, 1), cos, sin, interleaved, False, given, cu_seqlens=lengths(0, 7, 14), max_seqlen=7
    )
    assert torch.equal(packed, got.flatten(0, 1))
    mine = x.clone()
    assert apply_rotary_emb(mine, cos, sin, interleaved, inplace=True, seqlen_offsets=given) is mine
    assert torch.equal(mine, got)


def test_rotary_of_ragged_sequences_and_its_gradient():
    x, (cos, sin) = randn(9, 2, 16), tables(8, 16)
    got = apply_rotary_emb(x, cos, sin, cu_seqlens=lengths(0, 4, 4, 9), max_seqlen=5)
    positions = torch.cat((torch.arange(4), torch.arange(5)))
    exact = turned(x, positions, cos, sin, False)
    assert reference.judge(got, exact, exact.float()).ok
    (leaf,) = leaves(x)
    apply_rotary_emb(leaf, cos, sin, cu_seqlens=lengths(0, 4, 4, 9), max_seqlen=5).backward(got)
    torch.testing.assert_close(leaf.grad, x)  # turning back is turning's gradient
