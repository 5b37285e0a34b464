"""Operators, sdpa, torch's flash attention and thunder on a card."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compiled_cases import Graphs, compiled
from oracle import randn
from sdpa_cases import SHAPES, check, make
from torch.library import opcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise import PagedKVCache
from tilewise.gpu import tilings
from tilewise.integrations import replace
from tilewise.integrations.replace import install, replace_sdpa, uninstall
from tilewise.integrations.sdpa import explain, sdpa, torch_sdpa

pytestmark = pytest.mark.gpu
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
OPS = torch.ops.tilewise


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    uninstall()


def tensors(*shapes, dtype=BF16):
    return make(*shapes, dtype=dtype, device="cuda")


def qkv(batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, dtype=BF16):
    q = randn(batch, seqlen_q, heads_q, head_dim, seed=0).to("cuda", dtype)
    k, v = (randn(batch, seqlen_k, heads_kv, head_dim, seed=n).to("cuda", dtype) for n in (1, 2))
    return q, k, v


def make_cache(kv_format="bf16"):
    cache = PagedKVCache(64, 16, 2, 64, num_layers=2, kv_format=kv_format, device="cuda")
    seqs = [cache.allocate() for _ in range(3)]
    extend(cache, seqs, [40, 1, 100])
    return cache, seqs


def extend(cache, seqs, counts) -> None:
    slots = cache.extend(seqs, counts)
    for layer in range(2):
        cache.write(layer, slots, *(randn(len(slots), 2, 64, seed=layer + n).to("cuda", BF16) for n in (3, 7)))


# Operators.


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("options", [{}, {"causal": True, "return_lse": True}, {"window_left": 9, "softcap": 3.0}])
def test_opcheck_attention(options, dtype):
    opcheck(OPS.attention.default, qkv(2, 65, 130, 4, 2, 96, dtype), options)


def test_opcheck_attention_of_strided_tensors():
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 65, 130, 4, 2, 64)]
    opcheck(OPS.attention.default, (*strided, randn(4).cuda()), {"return_lse": True})


def test_opcheck_attention_varlen():
    q, k, v = (x[0] for x in qkv(1, 90, 200, 4, 2, 64))
    for device in ("cuda", "cpu"):
        starts = torch.tensor([0, 0, 40, 90], device=device), torch.tensor([0, 60, 70, 200], device=device)
        opcheck(OPS.attention_varlen.default, (q, k, v, *starts), {"causal": True, "return_lse": True})


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "int4"])
def test_opcheck_decode(kv_format):
    cache, seqs = make_cache(kv_format)
    plan = tilewise.plan_decode(cache, seqs, num_heads=8)
    q = randn(3, 1, 8, 64).to("cuda", BF16)
    opcheck(OPS.decode.default, (q, cache._k, cache._v, 1, plan.serial), {"return_lse": True})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_everything_compiles(backend):
    def layer(q, k, v, starts, plan, cache):
        o = tilewise.attention(q * 2, k, v, causal=True).flatten(0, 1) + 1
        p, lse = tilewise.attention_varlen(o, k[0], v[0], starts, starts, return_lse=True)
        return tilewise.decode(p[:3, None] * 0.5, cache, 1, plan) - 1, lse

    cache, seqs = make_cache()
    plan = tilewise.plan_decode(cache, seqs, num_heads=8)
    args = *qkv(1, 90, 90, 8, 2, 64), torch.tensor([0, 40, 90], device="cuda"), plan, cache
    graphs = Graphs(backend)
    for got, expected in zip(compiled(layer, graphs)(*args), layer(*args), strict=True):
        torch.testing.assert_close(got, expected)
    assert graphs.operators() == [["attention", "attention_varlen", "decode"]]


def test_fp8_compiles():
    q, k, v = (x.to(FP8) for x in qkv(2, 65, 130, 4, 2, 128))
    got = compiled(tilewise.attention, Graphs())(q, k, v)
    assert got.dtype == BF16
    assert torch.equal(got, tilewise.attention(q, k, v))


def test_attention_in_graphs_of_the_compiler():
    def layer(q, k, v):
        return tilewise.attention(q * 2, k, v, causal=True) + 1

    fast = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for n in range(5):
            q, k, v = (x + n for x in qkv(2, 65, 130, 4, 2, 64))
            torch.testing.assert_close(fast(q, k, v).clone(), layer(q, k, v))


def test_decode_in_graphs_of_the_compiler():
    """Over a plan that grows."""

    def step(q, cache, plan):
        for layer in range(2):
            q = q + tilewise.decode(q, cache, layer, plan)
        return q

    cache, seqs = make_cache()
    plan = tilewise.plan_decode(cache, seqs, num_heads=8, room=40)
    fast = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for n in range(8):
            extend(cache, seqs, 1)
            plan = tilewise.grow_plan(plan, cache)
            q = randn(3, 1, 8, 64, seed=n).to("cuda", BF16)
            expected = step(q, cache, plan)
            torch.testing.assert_close(fast(q, cache, plan).clone(), expected)


def test_decode_steps_compile_once():
    def step(q, cache, plan):
        return tilewise.decode(q * 2, cache, 1, plan)

    cache, seqs = make_cache()
    graphs = Graphs()
    fast = compiled(step, graphs)
    for n in range(5):
        extend(cache, seqs, [1, 2, n])
        plan = tilewise.plan_decode(cache, seqs, num_heads=8)
        q = randn(3, 1, 8, 64, seed=n).to("cuda", BF16)
        assert torch.equal(fast(q, cache, plan), step(q, cache, plan))
    assert graphs.operators() == [["decode"]] * 2


# sdpa.


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 256])
def test_dtypes_and_head_dims(head_dim, dtype):
    check(*tensors((2, 3, 63, head_dim), (2, 3, 300, head_dim), dtype=dtype))


@pytest.mark.parametrize("seqlen_k", [1, 63, 65, 300])
@pytest.mark.parametrize("seqlen_q", [1, 63, 65, 300])
def test_is_causal_aligns_top_left(seqlen_q, seqlen_k):
    check(*tensors((2, 3, seqlen_q, 64), (2, 3, seqlen_k, 64)), is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES)
def test_shapes_broadcast(shapes, is_causal):
    check(*tensors(*shapes), is_causal=is_causal)


def test_grouped_heads_and_values_of_another_width():
    check(*tensors((2, 8, 65, 64), (2, 2, 130, 64)), enable_gqa=True, is_causal=True)
    check(*tensors((2, 8, 65, 192), (2, 2, 130, 192), (2, 2, 130, 128)), enable_gqa=True)
    check(*tensors((2, 8, 65, 64), (2, 2, 130, 64), (2, 2, 130, 128)), enable_gqa=True, scale=0.2)


def test_nothing_to_see():
    for shapes in (((2, 3, 0, 64), (2, 3, 5, 64)), ((2, 3, 5, 64), (2, 3, 0, 64)), ((0, 3, 5, 64),)):
        assert not check(*tensors(*shapes)).any()


def test_what_goes_to_torch():
    query, key, value = tensors((2, 3, 65, 64))
    mask = torch.ones(2, 1, 1, 65, dtype=torch.bool, device="cuda")
    mask[1, ..., 30:] = False
    check(query, key, value, mask, by="torch")
    assert "no GPU kernel takes an attn_mask" in str(explain(query, key, value, mask))
    floats = [x.float() for x in (query, key, value)]
    check(*floats)
    assert explain(*(x.double() for x in floats)).backend == "torch"
    with torch.autocast("cuda", dtype=BF16):
        assert explain(*floats).backend == "tilewise"
        assert torch.equal(sdpa(*floats), sdpa(query, key, value))
    assert "forward_mma" in explain(query, key, value, dropout_p=0.5).kernel
    assert explain(query, key, value.cpu()).backend == "torch"
    told = explain(query, key, value)
    kernel, why = tilings.kernel_of(query.device, BF16)
    assert (told.kernel, told.reasons) == (f"the GPU kernel {kernel}", ("bfloat16 on cuda is served", why))


def test_compiled_under_replacement():
    query, key, value = tensors((2, 3, 65, 64), (2, 3, 130, 64))
    graphs = Graphs("inductor")
    with replace_sdpa():
        fast = compiled(lambda q, k, v: F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1, graphs)
        got = fast(query, key, value)
    torch.testing.assert_close(got, sdpa(query * 2, key, value, is_causal=True) + 1)
    assert graphs.operators() == [["attention"]]


# Behind torch's own flash attention.

flash = pytest.mark.skipif(not replace.offers_flash(), reason="this torch takes no other flash attention")


@flash
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_flash_serves_torchs_own_function(head_dim, is_causal, monkeypatch):
    called = []
    attention = replace.api.attention
    monkeypatch.setattr(replace.api, "attention", lambda *a, **k: (called.append(1), attention(*a, **k))[1])
    query, key, value = (x.transpose(1, 2) for x in tensors((2, 130, 4, head_dim)))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = torch_sdpa(query, key, value, is_causal=is_causal)
        assert not called
        install(flash=True)
        got = torch_sdpa(query, key, value, is_causal=is_causal)
        assert called
        uninstall()
        del called[:]
        after = torch_sdpa(query, key, value, is_causal=is_causal)
        assert not called
    assert torch.equal(before, after)
    assert got.stride() == before.stride()
    expected = torch_sdpa(query.double(), key.double(), value.double(), is_causal=is_causal)
    error, honest = ((x.double() - expected).abs().max().item() for x in (got, before))
    assert error <= 2 * honest


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "enable_gqa": True, "scale": 0.2}])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_sdpa_trains(dtype, options):
    """By our kernels, as explain says; each gradient's error within twice that of torch's own."""
    inputs = [
        x.requires_grad_() for x in tensors((2, 4, 130, 64), (2, 2 if "scale" in options else 4, 130, 64), dtype=dtype)
    ]
    told = explain(*inputs, **options)
    assert told.backend == "tilewise"
    assert "backward" in told.kernel
    weight = randn(2, 4, 130, 64).to("cuda", dtype)
    got, torchs = (torch.autograd.grad(call(*inputs, **options), inputs, weight) for call in (sdpa, torch_sdpa))
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(torch_sdpa(*wide, **options), wide, weight.double())
    for ours, theirs, exact in zip(got, torchs, expected, strict=True):
        error, honest = ((x.double() - exact).abs().max().item() for x in (ours, theirs))
        assert error <= 2 * honest
    fast = torch.compile(lambda *x: sdpa(*x, **options), fullgraph=True, backend="aot_eager")
    for ours, eager in zip(torch.autograd.grad(fast(*inputs), inputs, weight), got, strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-2, rtol=2e-2)


@flash
@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_trains(is_causal, monkeypatch):
    called = []
    backward = replace.attention_backward
    monkeypatch.setattr(replace, "attention_backward", lambda *a, **k: (called.append(1), backward(*a, **k))[1])
    inputs = [x.requires_grad_() for x in tensors((2, 4, 130, 64))]
    weight = randn(2, 4, 130, 64).cuda()

    def gradients(*given):
        out = torch_sdpa(*given, is_causal=is_causal)
        return torch.autograd.grad((out.double() * weight).sum(), given)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = gradients(*inputs)
        install(flash=True)
        assert not called
        got = gradients(*inputs)
        assert called
        uninstall()
    expected = gradients(*(x.detach().double().requires_grad_() for x in inputs))
    for ours, theirs, exact in zip(got, before, expected, strict=True):
        error, honest = ((x.double() - exact).abs().max().item() for x in (ours, theirs))
        assert error <= 2 * honest


@flash
def test_flash_leaves_to_torch_what_it_does_not_serve():
    query, key, value = tensors((2, 4, 130, 64))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.manual_seed(0)
        before = torch_sdpa(query, key, value, dropout_p=0.5)
        install(flash=True)
        torch.manual_seed(0)
        got = torch_sdpa(query, key, value, dropout_p=0.5)
    assert torch.equal(got, before)


@flash
def test_flash_in_compiled_code():
    query, key, value = tensors((2, 4, 130, 64))
    install(flash=True)
    fast = torch.compile(lambda q, k, v: torch_sdpa(q * 2, k, v, is_causal=True) + 1, fullgraph=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        got = fast(query, key, value)
    torch.testing.assert_close(got, sdpa(query * 2, key, value, is_causal=True) + 1, atol=2e-2, rtol=2e-2)


def test_thunder():
    ours = pytest.importorskip("tilewise.integrations.thunder")
    import thunder

    query, key, value = tensors((2, 4, 130, 64))
    mask = torch.ones(2, 1, 1, 130, dtype=torch.bool, device="cuda")
    jitted = thunder.jit(
        lambda *x: F.scaled_dot_product_attention(*x), executors=[ours.executor, *thunder.get_default_executors()]
    )
    assert torch.equal(jitted(query, key, value), sdpa(query, key, value))
    assert "tilewise_sdpa" in str(thunder.last_traces(jitted)[-1])
    jitted(query, key, value, mask)
    assert "tilewise_sdpa" not in str(thunder.last_traces(jitted)[-1])
    leaves = [x.requires_grad_() for x in (query, key, value)]
    got = torch.autograd.grad(jitted(*leaves).sum(), leaves)
    assert "tilewise_sdpa_backward" in str(thunder.last_backward_traces(jitted)[-1])
    for mine, eager in zip(got, torch.autograd.grad(sdpa(*leaves).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, eager, atol=1e-2, rtol=2e-2)
