"""What the tests of tilewise.compat.flash_attn share: answers as the oracle says them, batches, caches by hand."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from oracle import assert_state, qkv, randn

from tilewise import reference
from tilewise.compat import flash_attn as fa

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


# ---- dropout ---------------------------------------------------------------------------------------------------------


def scores_of(q, k, *, causal=False, window=None, softcap=0.0, slopes=None):
    """(B, Hq, Nq, Nk) of q (B, Nq, Hq, D) over k (B, Nk, Hkv, D), in float64; −inf where a key is hidden."""
    rows, keys = q.shape[1], k.shape[1]
    wide = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bihd,bjhd->bhij", q.double(), wide) * q.shape[-1] ** -0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    if slopes is not None:
        distance = (torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)).abs()
        s = s - slopes.double().expand(*s.shape[:2])[..., None, None] * distance
    return s.masked_fill(~reference.visible(rows, keys, causal=causal, window=window), -INF)


def lse_of(scores, sink=None):
    """(B, Hq, Nq, 1): +inf, flash_attn's value, where a row sees no key."""
    lse = scores.logsumexp(-1, keepdim=True)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.double()[:, None, None])
    return lse.masked_fill(lse == -INF, INF)


def normalised(probs, scores, width):
    """The softmax's weights out of S_dmask's: e^(score − top), where a block's top is the largest score of its row from
    its first key on, times e^(top − LSE)."""
    found = [
        probs[..., j : j + width].double().abs() * (scores[..., j:].amax(-1, keepdim=True) - lse_of(scores)).exp()
        for j in range(0, scores.shape[-1], width)
    ]
    return torch.cat(found, -1)


def by_hand(p, kept, v, scores, sink=None):
    """out (B, Nq, Hq, D) in float64 with the weights that were kept of a share 1 − p."""
    wide = v.double().repeat_interleave(scores.shape[1] // v.shape[2], 2)
    return torch.einsum("bhij,bjhd->bihd", (scores - lse_of(scores, sink)).exp() * kept / (1 - p), wide)


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
            rows = torch.full((max(self.where) + 1, self.table.shape[1]), -7, dtype=torch.int32)
            rows[self.where] = self.table
            self.given["block_table"] = rows
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


# ---- arguments that are as they should be, for refusals to change ----------------------------------------------------

Q, K, V = qkv(2, 8, 8, 4, 2, 16)
COS, SIN = tables(40, 16)


def lengths(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)
