"""Who serves a call of tilewise.sdpa, torch or Tilewise, and why; what torch alone does, eagerly and compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compiled_cases import Graphs, compiled
from oracle import randn
from sdpa_cases import check, make, padding, serves
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise import arch, reference
from tilewise.integrations import sdpa as module
from tilewise.integrations.replace import replace_sdpa
from tilewise.integrations.sdpa import Explanation, Facts, decide, explain, sdpa, torch_sdpa

pytestmark = pytest.mark.usefixtures("torch_as_it_was")

CARD = Facts((2, 4, 8, 64), (2, 4, 8, 64), (2, 4, 8, 64), torch.bfloat16, "cuda", kernels=True)


# Who serves, and why.


REFUSED = {
    "attn_mask and dropout_p": lambda q, k, v: ((q, k, v, torch.ones(1, 5, dtype=torch.bool)), {"dropout_p": 0.5}),
    "value that only torch judges": lambda q, k, v: ((q, k, v), {"dropout_p": 1.0}),
    "no kernels take torch.float64": lambda q, k, v: ((q.double(), k.double(), v.double()), {}),
    "attn_mask differs from query to query": lambda q, k, v: ((q, k, v, torch.ones(5, 5, dtype=torch.bool)), {}),
    "attn_mask is added to the scores": lambda q, k, v: ((q, k, v, torch.zeros(1, 5)), {}),
    "attn_mask and is_causal": lambda q, k, v: ((q, k, v, torch.ones(1, 5, dtype=torch.bool)), {"is_causal": True}),
    "only torch judges": lambda q, k, v: ((q, k, v), {"scale": float("inf")}),
    "head dimensions are served from 1 to 576": lambda q, k, v: (make((1, 1, 2, 577)), {}),
    "key and value differ in heads": lambda q, k, v: ((q, k[:, :2], v), {"enable_gqa": True}),
    "plain tensors": lambda q, k, v: ((q.as_subclass(Sub), k, v), {}),
}


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize("reason", REFUSED)
def test_explain_says_why_torch_serves(reason, monkeypatch):
    args, options = REFUSED[reason](*make((2, 4, 5, 8)))
    told = explain(*args, **options)
    assert told.backend == "torch"
    assert reason in "; ".join(told.reasons)
    assert str(told).startswith("torch, by torch's own scaled_dot_product_attention: ")
    served = serves(monkeypatch)
    sdpa(*args, **options)
    assert served == ["torch"]


@pytest.mark.parametrize(
    ("shapes", "options", "reason"),
    [
        (((2, 4, 5, 8),), {}, "float32 on cpu is served"),
        (((2, 4, 5, 8), (2, 4, 9, 8)), {"is_causal": True}, "keys after the last query's are left out"),
        (((2, 4, 9, 8), (2, 4, 5, 8)), {"is_causal": True}, "a window that ends L − S after"),
        (((2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 16)), {}, "float32 on cpu is served"),
        (((2, 4, 9, 8),), {"attn_mask": torch.ones(2, 1, 1, 9, dtype=torch.bool)}, "hides keys from all queries"),
    ],
)
def test_explain_says_why_tilewise_serves(shapes, options, reason, monkeypatch):
    tensors = make(*shapes)
    told = explain(*tensors, **options)
    assert told == Explanation("tilewise", "the CPU backend", told.reasons)
    assert reason in str(told)
    served = serves(monkeypatch)
    sdpa(*tensors, **options)
    assert set(served) == {"tilewise"}


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"causal": True, "key": (2, 4, 100, 64), "value": (2, 4, 100, 64)}, True),
        ({"gqa": True, "key": (2, 2, 8, 64), "value": (2, 2, 8, 64)}, True),
        ({"value": (2, 4, 8, 128)}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, True),
        ({"dtype": torch.float8_e4m3fn}, False),
        ({"kernels": False}, False),
        ({"mask": (2, 1, 1, 8), "mask_is_bool": True}, False),
        ({"value": (2, 4, 8, 576)}, True),
        ({"value": (2, 4, 8, 577)}, False),
        ({"dropout": True}, True),
        ({"dropout": True, "value": (2, 4, 8, 257)}, False),
        ({"dropout": True, "grad": True, "trains": False}, False),
        ({"grad": True}, True),
        ({"grad": True, "trains": False}, False),
        ({"fused": False}, False),
        ({"device": "xpu"}, False),
        ({"device": ""}, False),
        ({"dtype": None}, False),
    ],
)
def test_decisions_for_a_card(change, served):
    path, reasons = decide(CARD._replace(**change))
    assert (path != "torch") == served
    assert reasons


@pytest.mark.parametrize(
    ("card", "dtype", "kernel", "why"),
    [
        (None, torch.bfloat16, "forward", "sm_90a has wgmma and TMA"),
        (None, torch.float32, "forward_mma", "sm_90a runs float32 as three TF32 products of mma.sync each"),
        ("sm_86", torch.float16, "forward_mma", "sm_86, which TILEWISE_CARD asks for, has no wgmma"),
        ("sm_100", torch.bfloat16, "forward_mma", "Blackwell have no kernel of their own yet"),
    ],
)
def test_explain_names_the_kernel_of_the_card(card, dtype, kernel, why):
    """Asked of the emulator's card, which is any that TILEWISE_CARD names."""
    with arch.as_card(card):
        told = module._explained(CARD._replace(dtype=dtype), torch.device("cpu"), ("it is served",))
    assert (told.backend, told.kernel) == ("tilewise", f"the GPU kernel {kernel}")
    assert told.reasons[0] == "it is served"
    assert why in str(told)


def test_explain_names_the_kernels_of_training():
    told = module._explained(CARD._replace(grad=True), torch.device("cpu"), ("it is served",))
    assert told.kernel == "the GPU kernel forward, then backward"
    torch._dynamo.reset()
    asked = torch.compile(  # in graphs, too: facts are found while they are traced
        lambda x, y: x + module.trains(x.device, torch.float16, x, y), fullgraph=True, backend="eager"
    )
    with arch.as_card("sm_90a"):
        assert (asked(torch.zeros(8, 64), torch.zeros(8, 64)) == 1).all()
        assert (asked(torch.zeros(8, 64), torch.zeros(8, 300)) == 0).all()


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((2, 3, 70, 8),), {"is_causal": True}),
        (((2, 3, 5, 8), (2, 3, 9, 8)), {"is_causal": True}),
        (((2, 3, 9, 8), (2, 3, 5, 8)), {"is_causal": True, "scale": 0.3}),
        (((2, 8, 5, 8), (1, 4, 6, 8), (1, 4, 6, 8)), {"enable_gqa": True}),
        (((2, 1, 4, 5, 8), (3, 1, 6, 8), (1, 1, 3, 4, 6, 4)), {}),
        (((3, 3, 5, 8), (3, 3, 9, 8)), {"attn_mask": padding(9, 4, 0)}),
        (((2, 3, 5, 8), (2, 3, 33, 8), (2, 3, 33, 4)), {"attn_mask": randn(1, 33) > 0}),
    ],
)
def test_gradients(shapes, options, monkeypatch):
    """Of query, key and value, all of them ours: by the tolerance rule beside torch's in float64 and in float32."""
    tensors = [x.requires_grad_() for x in make(*shapes)]
    assert "its gradients are Tilewise's, too" in str(explain(*tensors, **options))
    served = serves(monkeypatch)
    out = sdpa(*tensors, **options)
    assert set(served) == {"tilewise"}
    d_o = randn(*out.shape, seed=9)
    got = torch.autograd.grad(out, tensors, d_o)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = torch.autograd.grad(torch_sdpa(*wide, **options), wide, d_o.double())
    torchs = torch.autograd.grad(torch_sdpa(*tensors, **options), tensors, d_o)
    for mine, right, other in zip(got, exact, torchs, strict=True):
        verdict = reference.judge(mine, right, other)
        assert verdict.ok, verdict.reason


def test_values_with_and_without_gradients_are_the_same():
    tensors = [x.requires_grad_() for x in make((2, 3, 5, 8))]
    recorded = sdpa(*tensors, is_causal=True)
    with torch.no_grad():
        assert torch.equal(check(*tensors, is_causal=True), recorded)
    with torch.inference_mode():
        check(*tensors)


def test_dropout(monkeypatch):
    """Ours, with as many weights dropped as asked for, from torch's generator, and the same ones in the gradients."""
    query, key, _ = make((2, 3, 70, 64), (2, 3, 64, 64))
    leaf = torch.eye(64).expand(2, 3, 64, 64).clone().requires_grad_()  # then the output are the weights
    served = serves(monkeypatch)
    torch.manual_seed(0)
    weights = sdpa(query, key, leaf, dropout_p=0.3)
    torch.manual_seed(0)
    assert torch.equal(sdpa(query, key, leaf, dropout_p=0.3), weights)
    assert set(served) == {"tilewise"}
    whole = torch_sdpa(query, key, leaf).detach()
    kept = weights != 0
    assert abs(kept.double().mean().item() - 0.7) < 0.02
    torch.testing.assert_close(weights, torch.where(kept, whole / 0.7, 0.0))
    d_o = randn(2, 3, 70, 64, seed=9)
    (grad,) = torch.autograd.grad(weights, leaf, d_o)
    torch.testing.assert_close(grad, weights.detach().mT @ d_o, atol=1e-5, rtol=1e-5)


def test_autocast():
    tensors = make((2, 3, 5, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "bfloat16 on cpu" in str(explain(*tensors))
        got = sdpa(*tensors)
        assert got.dtype == torch.bfloat16
        assert sdpa(tensors[0], tensors[1].half(), tensors[2]).dtype == torch.bfloat16
        assert sdpa(*(x.double() for x in tensors)).dtype == torch.float64
    assert torch.equal(got, sdpa(*(x.bfloat16() for x in tensors)))


def test_switches_of_torch_are_obeyed():
    tensors = make((2, 3, 5, 8))
    with sdpa_kernel(SDPBackend.MATH):
        assert "switched flash kernels off" in str(explain(*tensors))
    assert explain(*tensors).backend == "tilewise"


def test_transforms_and_traces():
    tensors = make((2, 3, 5, 8))
    torch.testing.assert_close(torch.func.vmap(sdpa)(*tensors), torch_sdpa(*tensors))
    torch.testing.assert_close(torch.jit.trace(sdpa, tensors)(*tensors), torch_sdpa(*tensors))


def test_what_torch_refuses_it_refuses_here():
    query, key, value = make((2, 3, 5, 8))
    for args, options in (
        ((query, key[..., :4], value), {}),
        ((query, key[:, :2], value[:, :2]), {}),
        ((query, key, value), {"dropout_p": 2.0}),
        ((query, key.double(), value), {}),
        ((query[0, 0, 0], key, value), {}),
        ((query, key, value, torch.ones(4, 4, dtype=torch.bool)), {}),
    ):
        assert explain(*args, **options).backend == "torch"
        with pytest.raises(RuntimeError):
            sdpa(*args, **options)
    for options in ({"is_causal": 1}, {"scale": "1"}, {"dropout_p": None}):
        with pytest.raises(TypeError):
            sdpa(query, key, value, **options)
    with pytest.raises(TypeError):
        sdpa(query, key, [1.0])
    with pytest.raises(TypeError):
        sdpa(query, key, value, None, 0.0, False, 1.0)  # scale goes by name alone, as in torch


# Compiled.


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((2, 3, 5, 8), (2, 3, 9, 8)), {"is_causal": True}),
        (((2, 3, 9, 8), (2, 3, 5, 8)), {"is_causal": True}),
        (((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 4)), {"enable_gqa": True, "scale": 0.3}),
        (((7, 2, 3, 5, 8), (2, 1, 6, 8)), {}),
        (((2, 3, 5, 8),), {"attn_mask": padding(5, 2)}),
    ],
)
def test_compiles_to_an_operator(shapes, options):
    torch._dynamo.reset()
    tensors, graphs = make(*shapes), Graphs()
    fast = compiled(lambda *x: F.scaled_dot_product_attention(*x, **options), graphs)
    with replace_sdpa():
        got = fast(*tensors)
    torch.testing.assert_close(got, torch_sdpa(*tensors, **options))
    assert graphs.operators() == [["attention_seen_keys" if "attn_mask" in options else "attention"]]


@pytest.mark.parametrize("mask", [None, padding(5, 2)], ids=["causal", "padding"])
def test_training_compiles_whole(mask):
    torch._dynamo.reset()
    tensors = [x.requires_grad_() for x in make((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 4))]
    options = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": True}
    fast = torch.compile(lambda *x: F.scaled_dot_product_attention(*x, **options), fullgraph=True, backend="aot_eager")
    with replace_sdpa():
        got = torch.autograd.grad(fast(*tensors).square().sum(), tensors)
        eager = F.scaled_dot_product_attention(*tensors, **options)
    wanted = torch.autograd.grad(eager.square().sum(), tensors, create_graph=True)
    torch.testing.assert_close(got, wanted)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        wanted[0].sum().backward()


def test_compiles_what_torch_serves():
    torch._dynamo.reset()
    tensors = make((2, 3, 5, 8))
    fast = torch.compile(sdpa, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(*tensors, randn(5, 5)), torch_sdpa(*tensors, randn(5, 5)))
