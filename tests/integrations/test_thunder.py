"""The thunder executor: its operator stands in the trace where Tilewise serves, and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from oracle import DTYPES, randn
from sdpa_cases import make, padding

from tilewise import arch, reference
from tilewise.integrations.replace import replace_sdpa
from tilewise.integrations.sdpa import explain, sdpa, torch_sdpa

# Only where it is not installed: what breaks our own module must not pass for that.
if importlib.util.find_spec("thunder") is None:
    pytest.skip("needs lightning-thunder", allow_module_level=True)
ours = importlib.import_module("tilewise.integrations.thunder")  # first: thunder alone does not import under torch 2.13
thunder = importlib.import_module("thunder")


@pytest.fixture(autouse=True)
def _defaults_as_they_were():
    before = thunder.get_default_executors()
    yield
    ours.unregister()
    assert thunder.get_default_executors() == before


def jit(function):
    return thunder.jit(function, executors=[ours.executor, *thunder.get_default_executors()])


def in_trace(jitted, name="tilewise_sdpa", traces=thunder.last_traces) -> bool:
    return any(bsym.sym.name == name for bsym in traces(jitted)[-1].bound_symbols)


def trains_in_trace(jitted) -> bool:
    return in_trace(jitted, "tilewise_sdpa_forward") and in_trace(
        jitted, "tilewise_sdpa_backward", thunder.last_backward_traces
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_function(is_causal, dtype):
    tensors = make((2, 3, 63, 40), (2, 3, 65, 40), dtype=dtype)
    jitted = jit(lambda q, k, v: F.scaled_dot_product_attention(q * 2, k, v, is_causal=is_causal, scale=0.3) + 1)
    got = jitted(*tensors)
    assert in_trace(jitted)
    expected = sdpa(tensors[0] * 2, *tensors[1:], is_causal=is_causal, scale=0.3) + 1
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "shapes", [((5, 8), (6, 8), (6, 8)), ((2, 3, 5, 8), (3, 6, 8), (3, 6, 4)), ((7, 2, 3, 5, 8), (2, 1, 6, 8))]
)
def test_shapes(shapes):
    tensors = make(*shapes)
    jitted = jit(lambda *x: F.scaled_dot_product_attention(*x).exp())
    torch.testing.assert_close(jitted(*tensors), torch_sdpa(*tensors).exp())
    assert in_trace(jitted)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.back = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, 1)
        return self.back(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_a_module():
    torch.manual_seed(0)
    block, x = Block(), randn(2, 9, 16)
    jitted = jit(block)
    with torch.no_grad():
        torch.testing.assert_close(jitted(x), block(x))
        assert in_trace(jitted)
    jitted(x).sum().backward()
    assert trains_in_trace(jitted)
    got = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    block(x).sum().backward()
    torch.testing.assert_close(got, [p.grad for p in block.parameters()])


def test_a_padding_mask():
    tensors, mask = make((3, 2, 5, 8), (3, 2, 9, 8)), padding(9, 1, 0)
    jitted = jit(lambda *x: F.scaled_dot_product_attention(*x) + 1)
    torch.testing.assert_close(jitted(*tensors, mask), torch_sdpa(*tensors, mask) + 1)
    assert in_trace(jitted)


@pytest.mark.parametrize(
    ("mask", "options", "dtype"),
    [
        (None, {"dropout_p": 0.5}, torch.float32),
        (torch.ones(5, 5, dtype=torch.bool), {}, torch.float32),
        (torch.zeros(1, 5), {}, torch.float32),
        (None, {}, torch.float64),
    ],
)
def test_refused_as_explain_says(mask, options, dtype):
    tensors = [*make((2, 3, 5, 8), dtype=dtype), mask]
    assert options or explain(*tensors).backend == "torch"  # dropout is refused by the trace alone
    jitted = jit(lambda *x: F.scaled_dot_product_attention(*x, **options) + 1)
    got = jitted(*tensors)
    assert not in_trace(jitted)
    if not options:
        torch.testing.assert_close(got, torch_sdpa(*tensors) + 1)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((2, 3, 70, 8),), {"is_causal": True, "scale": 0.3}),
        (((2, 3, 5, 8), (2, 3, 9, 8), (2, 3, 9, 4)), {"is_causal": True}),
        (((2, 3, 9, 8), (3, 5, 8)), {"is_causal": True}),
        (((3, 2, 5, 8), (3, 2, 9, 8)), {"attn_mask": padding(9, 1, 0)}),
        (((5, 8), (6, 8), (6, 8)), {}),
    ],
)
def test_gradients(shapes, options):
    """Those of torch's function in float64, by the tolerance rule."""
    tensors = [x.requires_grad_() for x in make(*shapes)]
    jitted = jit(lambda q, k, v: F.scaled_dot_product_attention(q * 2, k, v, **options))

    def gradients(call, *given):
        out = call(given[0] * 2, *given[1:], **options)
        return torch.autograd.grad(out, given, randn(*out.shape, seed=9, dtype=out.dtype))

    out = jitted(*tensors)
    got = torch.autograd.grad(out, tensors, randn(*out.shape, seed=9))
    assert trains_in_trace(jitted)
    exact, other = (
        gradients(torch_sdpa, *(x.detach().to(dtype).requires_grad_() for x in tensors))
        for dtype in (torch.float64, torch.float32)
    )
    for mine, right, base in zip(got, exact, other, strict=True):
        verdict = reference.judge(mine, right, base)
        assert verdict.ok, verdict.reason


def test_gradients_of_what_is_refused_are_thunders():
    query, key, value = make((2, 3, 5, 8))
    bias = randn(5, 5)
    jitted = jit(lambda *x: F.scaled_dot_product_attention(*x))
    got = torch.autograd.grad(jitted(query.requires_grad_(), key, value, bias).sum(), query)
    assert not in_trace(jitted, "tilewise_sdpa_forward")
    torch.testing.assert_close(got, torch.autograd.grad(torch_sdpa(query, key, value, bias).sum(), query))


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"dropout_p": 0.1}, False),
        ({"requires_grad": True}, True),
        ({"device": "cuda:0", "dtype": "bfloat16"}, False),  # there are no kernels for the card
        ({"device": "meta"}, False),
        ({"dtype": "float8_e4m3fn"}, False),
        ({"head_dim": 577}, False),
    ],
)
def test_the_checker_by_meta_data(change, served, monkeypatch):
    monkeypatch.setattr(arch, "capability", lambda device: (7, 5))
    options = {"shape": (2, 3, 5, change.pop("head_dim", 8)), "device": "cpu", "dtype": "float32"}
    dropout_p = change.pop("dropout_p", 0.0)
    options |= change
    options["device"] = thunder.core.devices.to_device(options["device"])
    options["dtype"] = getattr(thunder.dtypes, options["dtype"])
    with thunder.core.trace.tracectx(thunder.core.trace.TraceCtx()):
        tensors = [thunder.TensorProxy(**options) for _ in range(3)]
    assert ours._served(*tensors, None, dropout_p) == served


def test_on_a_hopper_masks_are_refused_and_the_rest_is_not(monkeypatch):
    monkeypatch.setattr(arch, "capability", lambda device: (9, 0))
    device, dtype = thunder.core.devices.to_device("cuda:0"), thunder.dtypes.bfloat16
    with thunder.core.trace.tracectx(thunder.core.trace.TraceCtx()):
        tensors = [thunder.TensorProxy(shape=(2, 3, 5, 64), device=device, dtype=dtype) for _ in range(3)]
        mask = thunder.TensorProxy(shape=(2, 1, 1, 5), device=device, dtype=thunder.dtypes.bool8)
        leaves = [thunder.TensorProxy(like=x, requires_grad=True) for x in tensors]
    assert ours._served(*tensors, None, 0.0, True)
    assert not ours._served(*tensors, mask)
    for has_backward in (True, False):
        monkeypatch.setattr(ours, "trains", lambda *_, has=has_backward: has)
        assert ours._served(*leaves, None, 0.0, True) == has_backward


def test_register_once_for_all():
    ours.register()
    assert ours.register() is ours.executor
    assert thunder.get_default_executors().count(ours.executor) == 1
    assert thunder.get_executor("tilewise") is ours.executor
    jitted = thunder.jit(lambda *x: F.scaled_dot_product_attention(*x))
    jitted(*make((2, 3, 5, 8)))
    assert in_trace(jitted)


def test_tilewises_own_function_is_traced_as_torchs():
    tensors = make((2, 3, 5, 8))
    jitted = jit(lambda *x: sdpa(*x))
    jitted(*tensors)
    assert in_trace(jitted)
    with replace_sdpa():
        jitted = jit(lambda *x: F.scaled_dot_product_attention(*x))
        jitted(*tensors)
    assert in_trace(jitted)


def test_torch_is_left_as_it_was():
    """Stubs of methods that this torch has not are gone, an install() is back, and thunder knows torch's function."""
    code = """
import torch
from tilewise.integrations.replace import install
before = {name for name in dir(torch.Tensor)}
install()
from tilewise.integrations.sdpa import sdpa
from tilewise.integrations.thunder import executor
import thunder
print(set(dir(torch.Tensor)) == before, torch.nn.functional.scaled_dot_product_attention is sdpa)
f = thunder.jit(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q), executors=[executor])
f(torch.ones(1, 1, 2, 8))
print("tilewise_sdpa" in str(thunder.last_traces(f)[-1]))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout == "True True\nTrue\n"


def test_a_stub_says_what_is_missing():
    stub = ours._stub("rename")
    assert stub.__name__ == "rename"
    with pytest.raises(NotImplementedError, match=r"has no Tensor\.rename"):
        stub(torch.ones(1))
