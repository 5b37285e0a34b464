"""torch.ops.tilewise.*: what torch says of the operators, and that compiled code with the public calls is right."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from compiled_cases import Graphs, compiled
from oracle import qkv, randn
from torch.library import opcheck

import tilewise
from tilewise import BlockSchedule, PagedKVCache, PrefixCache, traced

OPS = torch.ops.tilewise
FP8 = torch.float8_e4m3fn


# torch's check of the schema compares inputs before and after, and cannot compare FP8.
FOR_FP8 = ("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def assert_same(got, expected) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def make_cache(lengths=(5, 1, 9), kv_format="fp32", layers=2, head_dim=16):
    cache = PagedKVCache(64, 4, 2, head_dim, num_layers=layers, kv_format=kv_format)
    seqs = [cache.allocate() for _ in lengths]
    extend(cache, seqs, list(lengths))
    return cache, seqs


def extend(cache, seqs, counts) -> None:
    slots = cache.extend(seqs, counts)
    for layer in range(cache.num_layers):
        k, v = (randn(len(slots), 2, cache.head_dim, seed=7 * layer + n) for n in range(2))
        cache.write(layer, slots, k, v)


def storage(cache):
    return cache._k, cache._v


# What torch checks: schema, aliasing, fake kernels (shapes, dtypes and strides), AOT dispatch with symbolic sizes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True, "return_lse": True}, {"window_left": 3, "window_right": 2}])
def test_opcheck_attention(options, dtype):
    opcheck(OPS.attention.default, qkv(2, 5, 7, 4, 2, 40, dtype=dtype), options)


def test_opcheck_attention_with_every_tensor_and_strides():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 65, 63, 4, 2, 16))
    sinks, slopes = randn(4), randn(2, 4).abs()
    opcheck(OPS.attention.default, (q, k, v, sinks, slopes), {"softcap": 5.0, "scale": 0.2, "return_lse": True})


def test_opcheck_fp8():
    q, k, v = (x.to(FP8) for x in qkv(2, 5, 7, 4, 2, 16))
    scale = torch.tensor([0.5, 2.0])
    opcheck(OPS.attention.default, (q, k, v, None, None, scale, scale, scale), test_utils=FOR_FP8)
    assert OPS.attention(q, k, v)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(2, 0, 5), (2, 3, 0), (0, 3, 4)])
def test_opcheck_attention_of_nothing(shape):
    opcheck(OPS.attention.default, qkv(*shape, 4, 2, 8), {"return_lse": True})


def test_opcheck_attention_varlen():
    q, k, v = (x[0] for x in qkv(1, 9, 20, 4, 2, 16))
    starts = torch.tensor([0, 0, 4, 9]), torch.tensor([0, 6, 7, 20])
    opcheck(OPS.attention_varlen.default, (q, k, v, *starts), {"causal": True, "return_lse": True})
    opcheck(OPS.attention_varlen.default, (q, k, v, *starts), {"window_left": 2})
    pages = randn(8, 4, 2, 16)
    table = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 0]], dtype=torch.int32)
    paged = torch.tensor([0, 2, 7, 12])
    opcheck(OPS.attention_varlen.default, (q, pages, pages, starts[0], paged, table), {"return_lse": True})


@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "fp8", "int4"])
def test_opcheck_decode(kv_format):
    cache, seqs = make_cache(kv_format=kv_format, head_dim=64)
    plan = tilewise.plan_decode(cache, seqs, num_heads=4)
    q = randn(3, 1, 4, 64)
    which = {"test_utils": FOR_FP8} if kv_format == "fp8" else {}
    opcheck(OPS.decode.default, (q, *storage(cache), 1, plan.serial), {"return_lse": True}, **which)


def test_opcheck_decode_with_every_tensor():
    cache, seqs = make_cache()
    plan = tilewise.plan_decode(cache, seqs, num_heads=4, tokens_per_seq=2)
    tree = torch.ones(2, 2, dtype=torch.bool).tril()
    opcheck(OPS.decode.default, (randn(3, 2, 4, 16), *storage(cache), 0, plan.serial, randn(4), tree), {"scale": 0.3})


def test_opcheck_seen_keys():
    seen = torch.tensor([[True, False, True, True], [False] * 4])
    q, k, v = qkv(2, 3, 4, 4, 2, 16)
    opcheck(OPS.attention_seen_keys.default, (q, k, v, seen), {"scale": 0.3})
    given = [x.requires_grad_() for x in (q, k, v)]
    opcheck(OPS.attention_seen_keys.default, (*given, seen[:1]))


# Compiled code that calls the public names.


def test_attention_compiles():
    def layer(q, k, v, sinks):
        o, lse = tilewise.attention(q * 2, k, v, causal=True, window=(9, 0), sinks=sinks, return_lse=True)
        return o.flatten(2) + 1, lse, tilewise.attention(q, k, v)

    graphs, sinks = Graphs(), randn(4)
    fast = compiled(layer, graphs, dynamic=True)
    for seqlen_q in (63, 65, 64, 17):
        q, k, v = qkv(2, seqlen_q, 65, 4, 2, 40)
        assert_same(fast(q, k, v, sinks), layer(q, k, v, sinks))
    assert graphs.operators() == [["attention", "attention"]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_strides_and_dtypes_compile(dtype):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 5, 7, 4, 2, 96, dtype=dtype))
    assert_same([compiled(tilewise.attention, Graphs())(q, k, v)], [tilewise.attention(q, k, v)])


def test_the_emulated_kernel_compiles():
    q, k, v = qkv(1, 3, 5, 2, 1, 16, dtype=torch.bfloat16)
    fast = compiled(lambda q, k, v: tilewise.attention(q, k, v, backend="emulator"), Graphs())
    assert_same([fast(q, k, v)], [tilewise.attention(q, k, v, backend="emulator")])


def test_attention_varlen_compiles():
    def layer(q, k, v, starts_q, starts_k):
        return tilewise.attention_varlen(q + 1, k, v, starts_q, starts_k, causal=True, return_lse=True)

    graphs = Graphs()
    fast = compiled(layer, graphs, dynamic=True)
    for lengths in ([3, 0, 5], [1, 63, 2]):
        starts = torch.tensor([0, *lengths]).cumsum(0)
        q, k, v = (x[0] for x in qkv(1, sum(lengths), sum(lengths), 4, 2, 16))
        assert_same(fast(q, k, v, starts, starts), layer(q, k, v, starts, starts))
    assert graphs.operators() == [["attention_varlen"]]


@pytest.mark.parametrize("shared", [False, True])
def test_decode_steps_compile_once(shared):
    """Each step has a new plan, which is no reason to compile again: once for the first, once for all others."""

    def step(q, cache, plan):
        for layer in range(2):
            o, lse = tilewise.decode(q, cache, layer, plan, return_lse=True)
            q = q + o + lse.transpose(1, 2)[..., None]
        return q

    pages, seqs = make_cache()
    cache = pages
    if shared:
        cache = PrefixCache(pages)
        seqs = []
        for n in range(3):
            seq, _, slots = cache.insert([*range(6), 10 + n])
            for layer in range(2):
                pages.write(layer, slots, randn(len(slots), 2, 16), randn(len(slots), 2, 16, seed=1))
            seqs.append(seq)
    graphs = Graphs()
    fast = compiled(step, graphs)
    for n in range(5):
        if not shared:
            extend(pages, seqs, [1, 2, n])
        plan = tilewise.plan_decode(cache, seqs, num_heads=4)
        q = randn(3, 1, 4, 16, seed=n)
        assert_same([fast(q, cache, plan)], [step(q, cache, plan)])
    assert graphs.operators() == [["decode", "decode"]] * 2


def test_inductor():
    """Before, between and after the operators inductor's own loops run, which read what the operators give."""

    def layer(q, k, v, starts, plan, cache):
        o = tilewise.attention(q * 2, k, v, causal=True).flatten(0, 1) + 1
        p, lse = tilewise.attention_varlen(o, k[0], v[0], starts, starts, return_lse=True)
        weighted = (p * lse.t()[..., None])[:3, None]
        return tilewise.decode(weighted, cache, 1, plan) - 1, lse.exp()

    cache, seqs = make_cache()
    plan = tilewise.plan_decode(cache, seqs, num_heads=4)
    q, k, v = qkv(1, 9, 9, 4, 2, 16)
    args = q, k, v, torch.tensor([0, 4, 9]), plan, cache
    graphs = Graphs("inductor")
    for got, expected in zip(compiled(layer, graphs)(*args), layer(*args), strict=True):
        torch.testing.assert_close(got, expected)
    assert graphs.operators() == [["attention", "attention_varlen", "decode"]]


@pytest.mark.parametrize("kv_format", ["fp32", "fp8"])
def test_decode_and_attend_over_rows_that_are_keys_and_values(kv_format):
    cache = PagedKVCache(8, 4, 1, 24, value_dim=16, shared_kv=True, kv_format=kv_format)
    seqs = cache.allocate(3)
    cache.write(0, cache.extend(seqs, [5, 1, 9]), randn(15, 1, 24))
    plan = tilewise.plan_decode(cache, seqs, num_heads=4)
    step = tilewise.plan_step(cache, [(seqs[2], 4)], seqs[:2], num_heads=4)

    def both(q, rows):
        return tilewise.decode(q, cache, 0, plan) * 2, *tilewise.attend(rows, cache, 0, step, return_lse=True)

    args, graphs = (randn(3, 1, 4, 24), randn(6, 4, 24, seed=1)), Graphs()
    assert_same(compiled(both, graphs)(*args), both(*args))
    assert graphs.operators() == [["decode", "attend"]]
    with pytest.raises(Exception, match="indices cannot be part of a compiled graph"):
        compiled(lambda q, its: tilewise.decode(q, cache, 0, plan, indices=its), Graphs())(
            args[0], torch.zeros(3, 1, 1, dtype=torch.int32)
        )


def test_decode_sees_pages_that_the_graph_has_written():
    """The compiler may put what a graph writes elsewhere until its end: decode reads from there."""
    pages = randn(6, 4, 2, 16), randn(6, 4, 2, 16, seed=1)
    cache = PagedKVCache.from_pages(*(x.clone() for x in pages), torch.tensor([[4, 0]]), torch.tensor([7]))
    plan = tilewise.plan_decode(cache, [0], num_heads=4)

    def step(q, new):
        k_pages = cache.parts(0)[0][0]
        k_pages[0, 2] = new
        return tilewise.decode(q, cache, 0, plan)

    q, new = randn(1, 1, 4, 16), randn(2, 16, seed=5)
    got = compiled(step, Graphs())(q, new)
    k = torch.cat((pages[0][4], pages[0][0]))[:7].clone()
    v = torch.cat((pages[1][4], pages[1][0]))[:7]
    k[6] = new
    torch.testing.assert_close(got, tilewise.attention(q, k[None], v[None]))
    assert torch.equal(cache.parts(0)[0][0][0, 2], new)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return tilewise.attention(q, k, v, causal=True)

    tensors = qkv(2, 5, 7, 4, 2, 16)
    seqlen = torch.export.Dim("seqlen", min=2, max=100)
    sizes = ({1: seqlen}, None, None)
    program = torch.export.export(Model(), tensors, dynamic_shapes=sizes, strict=strict)
    assert "tilewise.attention" in str(program.graph)
    tensors = qkv(2, 63, 7, 4, 2, 16)
    assert_same([program.module()(*tensors)], [Model()(*tensors)])


# What is refused, and where.


def test_errors_are_those_of_the_call():
    q, k, v = qkv(1, 5, 7, 4, 2, 16)
    with pytest.raises(ValueError, match="window must be at least 0, got -1"):
        compiled(lambda *x: tilewise.attention(*x, window=(-1, 0)), Graphs())(q, k, v)
    with pytest.raises(ValueError, match=r"k must have shape \(1, seqlen, heads, 16\), got \(1, 7, 2, 8\)"):
        compiled(lambda *x: tilewise.attention(*x), Graphs())(q, k[..., :8], v)


NOT_HELD = {
    "out": torch.empty(1, 64, 4, 16),
    "schedule": BlockSchedule.random(64, 64, block_q=16, block_k=16, sparsity=0.5, seed=0),
    "mask": lambda b, h, q, k: q >= k,
    "score": lambda s, b, h, q, k: s * 2,
}


@pytest.mark.parametrize("name", NOT_HELD)
def test_what_no_graph_holds(name):
    q, k, v = qkv(1, 64, 64, 4, 2, 16)
    call = lambda *x: tilewise.attention(*x, **{name: NOT_HELD[name]})  # noqa: E731
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"{name}\b.* cannot be part of a compiled graph"):
        compiled(call, Graphs())(q, k, v)
    torch._dynamo.reset()
    assert_same([torch.compile(call, backend="aot_eager")(q, k, v)], [call(q, k, v)])  # not as one graph: it breaks


def test_functions_between_two_graphs():
    """What a compiled function hands to its mask and score is what they capture, call by call."""
    q, k, v = qkv(2, 40, 40, 4, 2, 16)
    starts = torch.tensor([0, 30, 80])

    def call(q, k, v, table, width):
        mask, score = (lambda b, h, q, k: (q - k).abs() < width), (lambda s, b, h, q, k: s + table[h, b])
        o = tilewise.attention(q * 2, k, v, mask=mask, score=score)
        packed = [x.flatten(0, 1) for x in (o + 1, k, v)]
        return tilewise.attention_varlen(*packed, starts, starts, mask=mask, score=score, return_lse=True)

    fast = torch.compile(call, backend="aot_eager")
    for width in (3, 20):
        table = randn(4, 2, seed=width)
        assert_same(fast(q, k, v, table, width), call(q, k, v, table, width))


def test_no_backward():
    cache, seqs = make_cache()
    plan = tilewise.plan_decode(cache, seqs, num_heads=4)
    q = randn(3, 1, 4, 16).requires_grad_()
    with pytest.raises(Exception, match="this call has no backward pass"):
        compiled(tilewise.decode, Graphs())(q, cache, 0, plan).sum().backward()
    with pytest.raises(NotImplementedError, match="this call has no backward pass"):
        OPS.decode(q, *storage(cache), 0, plan.serial)[0].sum().backward()


def test_a_plan_of_another_cache():
    (cache, seqs), (other, _) = make_cache(), make_cache()
    plan = tilewise.plan_decode(cache, seqs, num_heads=4)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="plan was made for another cache"):
        compiled(tilewise.decode, Graphs())(randn(3, 1, 4, 16), other, 0, plan)


def test_nothing_is_kept_alive():
    cache, seqs = make_cache()
    plan = tilewise.plan_decode(cache, seqs, num_heads=4)
    q, pages, serials = randn(3, 1, 4, 16), storage(cache), (plan.serial, cache.serial)
    fast = compiled(lambda q, cache, plan: tilewise.decode(q, cache, 0, plan), Graphs())
    fast(q, cache, plan)
    del plan
    gc.collect()
    assert serials[0] not in traced._plans
    with pytest.raises(ValueError, match=f"plan {serials[0]} is not there any more; keep plans and caches"):
        OPS.decode(q, *pages, 0, serials[0])
    plan = tilewise.plan_decode(cache, seqs, num_heads=4)
    assert plan.serial != serials[0]
    del cache
    gc.collect()
    assert serials[1] not in traced._caches
    with pytest.raises(ValueError, match=f"the cache of plan {plan.serial} is not there any more"):
        OPS.decode(q, *pages, 0, plan.serial)


def test_plans_out_of_date():
    cache, seqs = make_cache()
    plan = tilewise.plan_decode(cache, seqs, num_heads=4)
    fast = compiled(lambda q, cache, plan: tilewise.decode(q, cache, 0, plan), Graphs())
    extend(cache, seqs, 1)
    with pytest.raises(ValueError, match="plan is out of date"):
        fast(randn(3, 1, 4, 16), cache, plan)


def test_importing_tilewise_imports_no_compiler_and_no_optional_package():
    code = "import sys, tilewise; print({'torch._dynamo', 'transformers', 'thunder'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout == "set()\n"
