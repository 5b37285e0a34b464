"""tilewise.compat.flash_attn on a card: the CPU's cases through the kernels, without waiting, and in CUDA graphs."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from flash_attn_cases import (
    HEADS,
    LAYOUTS,
    LENGTHS_K,
    OPTIONS,
    CacheCase,
    assert_flash,
    assert_grads,
    assert_varlen,
    by_hand,
    minus,
    normalised,
    paged,
    ragged,
    scores_of,
)
from oracle import assert_state, qkv, randn

from tilewise import reference
from tilewise.compat import flash_attn as fa
from tilewise.compat.rotary import apply_rotary_emb

pytestmark = pytest.mark.gpu
CUDA = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@contextmanager
def without_waiting():
    """An operation that makes the CPU wait for the card is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_card(x):
    """A tensor with its strides and what lies between its rows; anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    storage = torch.tensor([], dtype=x.dtype).set_(x.untyped_storage())
    return storage.to(CUDA).as_strided(x.shape, x.stride(), x.storage_offset())


def by_name(options):
    """window_size may be a tensor, which stays on the CPU."""
    return {name: x if name == "window_size" else on_card(x) for name, x in options.items()}


def back(result):
    return tuple(x.cpu() for x in result)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    ("sizes", "head_dim", "causal"),
    [((1, 1), 40, True), ((63, 65), 96, True), ((300, 63), 128, True), ((1, 700), 256, False), ((257, 129), 59, False)],
)
def test_dense(sizes, head_dim, causal, dtype):
    q, k, v = qkv(2, *sizes, 4, 2, head_dim, dtype=dtype)
    result = fa.flash_attn_func(on_card(q), on_card(k), on_card(v), causal=causal, return_attn_probs=True)
    assert result[0].is_cuda
    assert_flash(back(result), q, k, v, causal=causal)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("given", "meant"), OPTIONS)
def test_options_and_gradients(given, meant, deterministic):
    """The kernels' values, also where gradients are wanted, and gradients by the tolerance rule."""
    tensors = qkv(2, 133, 140, 4, 2, 64, dtype=BF16)
    options = {**by_name(given), "deterministic": deterministic}
    q, k, v = (on_card(x).requires_grad_() for x in tensors)
    result = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert_flash(back(result), *tensors, **meant)
    with torch.no_grad():
        assert torch.equal(fa.flash_attn_func(q, k, v, **options), result[0])
    assert_grads(
        lambda *x: back(fa.flash_attn_func(*(y.to(CUDA) for y in x), return_attn_probs=True, **options))[:2],
        tensors,
        lambda *x, dtype: reference.attention(*x, dtype=dtype, **meant),
    )
    if deterministic:
        grads = [torch.autograd.grad(fa.flash_attn_func(q, k, v, **options).sum(), (q, k, v)) for _ in range(3)]
        assert all(map(torch.equal, grads[0] * 2, grads[1] + grads[2]))


def test_packed_tensors():
    q, k, v = qkv(2, 100, 100, 4, 4, 64, dtype=BF16)
    result = fa.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2).to(CUDA), causal=True, return_attn_probs=True)
    assert_flash(back(result), q, k, v, causal=True)
    result = fa.flash_attn_kvpacked_func(q.to(CUDA), torch.stack((k, v), 2).to(CUDA), return_attn_probs=True)
    assert_flash(back(result), q, k, v)


@pytest.mark.parametrize("page_size", [None, 1, 16, 256])
def test_varlen_does_not_wait(page_size):
    q, k, v, cu_q, cu_k = arguments = ragged(BF16)
    keys, table = (k, v), None
    if page_size is not None:
        *keys, table = paged(k, v, LENGTHS_K, page_size)
    given = [on_card(x) for x in (q, *keys, cu_q, cu_k)]

    def call():
        return fa.flash_attn_varlen_func(*given, 65, 65, causal=True, return_attn_probs=True, block_table=on_table)

    on_table = on_card(table)
    call()  # compiles
    with without_waiting():
        result = call()
    assert_varlen(back(result), arguments, causal=True)


def test_varlen_gradients():
    """Without waiting, beside the CPU's, which other tests hold to the oracle; a sequence without keys among them."""
    arguments = ragged(BF16)
    weight = randn(*arguments[0].shape, dtype=BF16, seed=9)
    grads = []
    for move, kind in ((lambda x: x, FP32), (lambda x: x, BF16), (on_card, BF16)):
        q, k, v = (move(x.to(kind).clone()).requires_grad_() for x in arguments[:3])
        starts = [move(x) for x in arguments[3:]]
        out = fa.flash_attn_varlen_func(q, k, v, *starts, 65, 65, causal=True)
        grads.append([x.cpu() for x in torch.autograd.grad(out, (q, k, v), move(weight.to(kind)))])
        if q.is_cuda:
            with without_waiting():
                out = fa.flash_attn_varlen_func(q, k, v, *starts, 65, 65, causal=True)
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for exact, cpu, card in zip(*grads, strict=True):
        verdict = reference.judge(card, exact.double(), cpu)
        assert verdict.ok, verdict.reason


class CardCase(CacheCase):
    """The same case with all of it on the card, called a second time without waiting."""

    def __call__(self, **options):
        moved = CacheCase.__new__(CacheCase)
        moved.__dict__ = {**self.__dict__, "given": by_name(self.given)}
        for name in ("q", "cos", "sin"):
            setattr(moved, name, on_card(getattr(self, name)))
        moved.caches = [on_card(x) for x in self.caches]
        moved.new = None if self.new is None else [on_card(x) for x in self.new]
        options = by_name(options)
        moved(**options)  # compiles, and writes what the next call writes again
        with without_waiting():
            result = moved(**options)
        for mine, card in zip(self.caches, moved.caches, strict=True):
            mine.copy_(card)
        return back(result)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("layout", [*LAYOUTS, 256])
def test_cache(layout, dtype):
    CardCase(512, [1, 333], layout=layout, seqlen_q=3, dtype=dtype).check(causal=True)
    CardCase(512, [0, 255], layout=layout, new=17, seqlen_q=17, rotary=16, dtype=dtype).check(causal=True)


@pytest.mark.parametrize("capacity", [19, 339, 400])
def test_capacities_leftpad_and_batch_idx(capacity):
    CardCase(capacity, [5, capacity - 2], new=2, seqlen_q=2, dtype=BF16).check(causal=True)
    CardCase(capacity, [9, capacity - 3], leftpad=[5, 7], new=3, seqlen_q=3, rotary=32, dtype=BF16).check(causal=True)
    CardCase(capacity, [9, capacity - 3], batch_idx=[3, 1], new=3, seqlen_q=3, layout="slice", dtype=BF16).check()


@pytest.mark.parametrize("layout", ["rows", 16])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"window_size": (3, 1)}, {"window": (3, 1)}),
        ({"softmax_scale": 0.7, "softcap": 2.0}, {"scale": 0.7, "softcap": 2.0}),
        ({"alibi_slopes": randn(2, HEADS, seed=9).abs()}, {"alibi_slopes": randn(2, HEADS, seed=9).abs()}),
        ({"learnable_sink": randn(HEADS, seed=5)}, {"sinks": randn(HEADS, seed=5)}),
    ],
)
def test_cache_options(layout, given, meant):
    CardCase(128, [9, 100], new=3, seqlen_q=5, layout=layout, dtype=BF16).check(given=given, **meant)


@pytest.mark.parametrize("layout", ["rows", "slice", 16])
@pytest.mark.parametrize("leftpad", [None, [2, 5]])
def test_graph_over_a_growing_cache(layout, leftpad):
    """One graph, replayed while the lengths on the card grow: each step as the CPU makes it."""
    if leftpad is not None and layout == 16:
        pytest.skip("cache_leftpad does not go with a block_table")
    steps = 20
    case = CacheCase(64, [7, 30], new=steps, layout=layout, dtype=BF16, leftpad=leftpad)
    cos, sin = (x.to(BF16) for x in (randn(64, 8).cos(), randn(64, 8).sin()))
    cpu = {**case.given, "rotary_cos": cos, "rotary_sin": sin, "causal": True, "return_softmax_lse": True}
    card = by_name(cpu)
    caches = [on_card(x) for x in case.caches]
    queries = randn(steps, *case.q.shape, dtype=BF16, seed=5)
    q, k, v = (x.clone() for x in (on_card(queries[0]), *(on_card(x)[:, :1] for x in case.new)))

    def step():
        return fa.flash_attn_with_kvcache(q, *caches, k, v, **card)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for n in range(steps):
        new = [x[:, n : n + 1] for x in case.new]
        for static, value in zip((q, k, v), (queries[n], *new), strict=True):
            static.copy_(value)
        graph.replay()
        expected = fa.flash_attn_with_kvcache(queries[n], *case.caches, *new, **cpu)
        wide = fa.flash_attn_with_kvcache(
            queries[n].float(),
            *(x.float() for x in case.caches),
            *(x.float() for x in new),
            **{**cpu, "rotary_cos": cos.float(), "rotary_sin": sin.float()},
        )
        assert_state(
            (result[0].cpu(), minus(result[1].cpu())),
            (wide[0].double(), minus(wide[1]).double()),
            (expected[0], minus(expected[1])),
        )
        card["cache_seqlens"] += 1
        cpu["cache_seqlens"] += 1
    for mine, theirs in zip(caches, case.caches, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, equal_nan=True)


def test_rotary():
    x, cos, sin = randn(2, 9, 4, 64, dtype=FP16), randn(32, 16).cos(), randn(32, 16).sin()
    offsets = torch.tensor([3, 20])
    for interleaved in (False, True):
        expected = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
        tables = [on_card(table) for table in (x, cos, sin, offsets)]
        with without_waiting():
            got = apply_rotary_emb(*tables[:3], interleaved, seqlen_offsets=tables[3])
        verdict = reference.judge(got.cpu(), expected.double(), expected)
        assert verdict.ok, verdict.reason


def test_what_no_kernel_serves_changes_nothing():
    caches = [torch.zeros(2, 32, 2, 600, device=CUDA) for _ in (0, 1)]
    new = torch.ones(2, 1, 2, 600, device=CUDA)
    with pytest.raises(NotImplementedError, match="head_dim"):
        fa.flash_attn_with_kvcache(torch.ones(2, 1, 4, 600, device=CUDA), *caches, new, new, cache_seqlens=3)
    assert not any(x.any() for x in caches)
    q = torch.ones(1, 4, 2, 600, device=CUDA, dtype=BF16)
    with pytest.raises(NotImplementedError, match="head_dim"):
        fa.flash_attn_func(q, q, q)


def test_rows_without_keys():
    q, k, v = qkv(2, 200, 70, 4, 2, 64, dtype=BF16)
    out, lse, _ = back(fa.flash_attn_func(*map(on_card, (q, k, v)), causal=True, return_attn_probs=True))
    assert (lse[:, :, :130] == math.inf).all()
    assert (out[:, :130] == 0).all()
    assert lse[:, :, 130:].isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_dropout_and_its_weights(dtype):
    """S_dmask normalises to the softmax's weights, and its signs are the mask of out and of the gradients."""
    q, k, v = qkv(2, 113, 203, 4, 2, 64, dtype=dtype)
    given = [x.to(CUDA).requires_grad_() for x in (q, k, v)]
    out, _, probs = fa.flash_attn_func(*given, dropout_p=0.17, causal=True, return_attn_probs=True)
    assert probs.shape == (2, 4, 128, 256)
    probs = probs.cpu()[:, :, :113, :203]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    scores = scores_of(*wide[:2], causal=True)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(normalised(probs, scores, 64), scores.softmax(-1), rtol=ulp, atol=ulp / 8)
    exact = by_hand(0.17, ~probs.signbit(), wide[2], scores)
    torch.testing.assert_close(out.cpu().double(), exact, rtol=ulp, atol=ulp)
    weight = randn(*q.shape, dtype=dtype, seed=9)
    grads = torch.autograd.grad(exact, wide, weight.double())
    for mine, right in zip(torch.autograd.grad(out, given, weight.to(CUDA)), grads, strict=True):
        torch.testing.assert_close(mine.cpu().double(), right, rtol=4 * ulp, atol=4 * ulp)
