"""tilewise.sdpa in torch's place, and behind torch's own flash attention: installed, nested, given back."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from oracle import randn
from sdpa_cases import make, serves

from tilewise import reference
from tilewise.integrations import replace
from tilewise.integrations.replace import FlashKernel, install, replace_sdpa, uninstall
from tilewise.integrations.sdpa import sdpa, torch_sdpa

pytestmark = pytest.mark.usefixtures("torch_as_it_was")


def test_install_and_uninstall():
    from torch.nn.functional import scaled_dot_product_attention as held

    install()
    install()
    assert F.scaled_dot_product_attention is sdpa
    assert held is torch_sdpa
    uninstall()
    assert F.scaled_dot_product_attention is torch_sdpa
    uninstall()
    with pytest.raises(TypeError, match="flash must be True or False, got 1"):
        install(flash=1)


def test_blocks_nest_and_end_by_exceptions():
    @replace_sdpa()
    def failing():
        assert F.scaled_dot_product_attention is sdpa
        raise KeyError

    with replace_sdpa():
        with pytest.raises(KeyError):
            failing()
        assert F.scaled_dot_product_attention is sdpa
        install()
    assert F.scaled_dot_product_attention is sdpa
    with replace_sdpa():
        uninstall()
        assert F.scaled_dot_product_attention is sdpa
    assert F.scaled_dot_product_attention is torch_sdpa


def test_blocks_of_threads_may_overlap():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with replace_sdpa():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with replace_sdpa():
        thread.start()
        assert entered.wait(10)
    assert F.scaled_dot_product_attention is sdpa  # the other thread's block is still open
    leave.set()
    thread.join()
    assert F.scaled_dot_product_attention is torch_sdpa


def test_somebody_elses_function_is_left_alone(monkeypatch):
    theirs = lambda *a, **k: None  # noqa: E731
    install()
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    uninstall()
    assert F.scaled_dot_product_attention is theirs
    monkeypatch.undo()
    F.scaled_dot_product_attention = torch_sdpa


def test_somebody_elses_function_is_put_back(monkeypatch):
    theirs = lambda *a, **k: None  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with replace_sdpa():
        install()
        assert F.scaled_dot_product_attention is sdpa
    uninstall()
    assert F.scaled_dot_product_attention is theirs
    monkeypatch.undo()
    with replace_sdpa():
        pass
    assert F.scaled_dot_product_attention is torch_sdpa


def test_a_model_that_calls_torchs_function(monkeypatch):
    model = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = randn(2, 9, 32)
    with torch.no_grad():
        expected = model(x, x, x, need_weights=False)[0]
        served = serves(monkeypatch)
        model.train()  # the fused path of eval() asks nobody
        with replace_sdpa():
            got = model(x, x, x, need_weights=False)[0]
    assert served == ["tilewise"]
    torch.testing.assert_close(got, expected)


def test_a_layer_of_torchs_trains(monkeypatch):
    """Gradients of all its weights, with padding and without, by Tilewise where it was torch; dropout is drawn anew."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x, weights = randn(2, 9, 32), list(layer.parameters())
    served = serves(monkeypatch)
    for mask in (None, torch.arange(9) >= torch.tensor([[9], [5]])):
        step = lambda: torch.autograd.grad(layer(x, src_key_padding_mask=mask).square().sum(), weights)  # noqa: B023, E731
        torchs = step()
        with replace_sdpa():
            torch.testing.assert_close(step(), torchs, atol=1e-4, rtol=1e-4)
    assert served[0] == "tilewise"
    layer.self_attn.dropout = 0.5
    with replace_sdpa():
        assert not torch.equal(layer(x), layer(x))
    assert served[-2:] == ["tilewise"] * 2


# Behind torch's own flash attention.

flash = pytest.mark.skipif(not replace.offers_flash(), reason="this torch takes no other flash attention")


@flash
def test_flash_is_listed_and_activated_on_demand():
    attention = torch.nn.attention
    assert "tilewise" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    install(flash=True)
    assert attention.current_flash_attention_impl() == "tilewise"
    install(flash=True)
    uninstall()
    assert attention.current_flash_attention_impl() is None


def test_a_torch_that_takes_no_flash(monkeypatch):
    monkeypatch.setattr(replace, "offers_flash", lambda: False)
    with pytest.raises(NotImplementedError, match="takes no other flash kernel"):
        install(flash=True)
    assert F.scaled_dot_product_attention is torch_sdpa


@flash
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_flash_operator(is_causal):
    """On CPU tensors, for which torch has no such kernel: ours is put there to be tried."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    query, key, value = make((2, 4, 9, 8), (2, 2, 9, 8))
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    d_o = randn(*query.shape, seed=9)
    kernel = FlashKernel("CPU")
    try:
        out, lse, *_, rows, keys, _, _, _ = operator(query, key, value, 0.0, is_causal, scale=0.3)
        got = torch.autograd.grad(operator(*leaves, 0.0, is_causal, scale=0.3)[0], leaves, d_o)
        with pytest.raises(NotImplementedError, match="dropout_p is not 0"):
            operator(query, key, value, 0.5)
        with pytest.raises(NotImplementedError, match="a debug mask"):
            operator(query, key, value, 0.0, False, True)
        with pytest.raises(NotImplementedError, match=r"flash_attention_backward: .*dropout_p is not 0"):
            torch.ops.aten._scaled_dot_product_flash_attention_backward(
                d_o, query, key, value, out, lse, None, None, 9, 9, 0.5, is_causal, lse, lse
            )
    finally:
        kernel.remove()
        kernel.remove()
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = torch_sdpa(*wide, is_causal=is_causal, scale=0.3, enable_gqa=True)
    for mine, right in zip(got, torch.autograd.grad(exact, wide, d_o.double()), strict=True):
        torch.testing.assert_close(mine.double(), right, atol=1e-5, rtol=1e-5)
    assert (rows, keys) == (9, 9)
    assert out.stride() == query.stride()
    q, k, v = (x.detach().transpose(1, 2) for x in (query, key, value))
    exact, exact_lse = reference.attention(q, k, v, causal=is_causal, scale=0.3)
    torch.testing.assert_close(out.transpose(1, 2).double(), exact, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-6, rtol=1e-6)
    with pytest.raises(NotImplementedError, match="Could not run"):
        operator(query, key, value)
