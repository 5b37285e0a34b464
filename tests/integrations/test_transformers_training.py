"""Training steps of transformers' models by Tilewise: the loss and the gradients are eager's, and by our calls."""

from __future__ import annotations

import pytest
import torch
import transformers_cases as cases
from oracle import qkv
from transformers_cases import LAYER, LAYERS, build, padding, tokens

import tilewise.integrations.transformers_flex as flex
from tilewise import api
from tilewise.integrations.transformers import attention_forward

pytestmark = pytest.mark.usefixtures("registered")

LENGTH = 70  # beyond the windows


@pytest.fixture
def calls(monkeypatch):
    made = []
    for name in ("attention", "attention_varlen"):
        call = getattr(api, name)
        monkeypatch.setattr(api, name, lambda *x, call=call, name=name, **y: made.append(name) or call(*x, **y))
    return made


def trained(make, implementation, checkpointing=False, **inputs):
    """Loss and gradients of one step of a model in training, without dropout."""
    model = build(make).requires_grad_(True).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.set_attn_implementation(implementation)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(ours, eager):
    torch.testing.assert_close(ours[0], eager[0], rtol=1e-5, atol=0)
    assert ours[1].keys() == eager[1].keys()
    largest = max(x.abs().max().item() for x in eager[1].values())
    for name, expected in eager[1].items():  # that of a key's bias is 0 but for rounding
        torch.testing.assert_close(ours[1][name], expected, rtol=1e-4, atol=2e-6 * largest, msg=name)


def batch(pad):
    """Inputs of three sequences with labels, those of padding left out."""
    ids = tokens(3, LENGTH)
    if pad == "none":
        return {"input_ids": ids, "labels": ids}
    mask = padding([LENGTH, 37, 1], LENGTH, left=pad == "left")
    counts = mask.bool() & mask.roll(1, 1).bool()  # and the first token, which padding would have to foretell
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~counts, -100)}


@pytest.mark.parametrize("pad", ["none", "left", "right"])
@pytest.mark.parametrize(
    "make", [cases.llama, cases.gemma2, cases.gemma3, cases.gpt_oss, cases.bert], ids=lambda make: make.__name__
)
def test_a_step_is_eager_s(make, pad, calls):
    inputs = batch(pad)
    ours = trained(make, "tilewise", **inputs)
    assert calls == ["attention" if pad == "none" else "attention_varlen"] * LAYERS
    assert make is not cases.gpt_oss or any("sinks" in name for name in ours[1])
    assert_same_step(ours, trained(make, "eager", **inputs))


def test_a_step_over_packed_sequences(calls):
    ids = tokens(1, LENGTH)
    positions = torch.cat((torch.arange(43), torch.arange(LENGTH - 43)))[None]
    inputs = {"input_ids": ids, "labels": ids, "position_ids": positions}
    ours = trained(cases.mistral, "tilewise", **inputs)
    assert calls == ["attention_varlen"] * LAYERS
    assert_same_step(ours, trained(cases.mistral, "eager", **inputs))


def test_a_step_with_checkpoints(calls):
    """The forward pass is made once more for the backward pass, and nothing changes."""
    inputs = batch("left")
    loss, grads = trained(cases.llama, "tilewise", **inputs)
    again, same = trained(cases.llama, "tilewise", checkpointing=True, **inputs)
    assert len(calls) == 3 * LAYERS
    assert torch.equal(loss, again)
    assert all(torch.equal(grads[name], same[name]) for name in grads)


@pytest.mark.parametrize("make", [cases.gemma2, cases.gpt_oss], ids=lambda make: make.__name__)
def test_a_step_by_flex(make):
    flex.register()
    inputs = batch("left")
    assert_same_step(trained(make, flex.NAME, **inputs), trained(make, "eager", **inputs))


@pytest.mark.parametrize("pad", ["none", "left"])
def test_dropout_comes_from_torchs_generator(pad):
    losses, grads = [], []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model = build(lambda: cases.llama(attention_dropout=0.2)).requires_grad_(True).train()
        torch.manual_seed(seed)
        loss = model(**batch(pad)).loss
        loss.backward()
        losses.append(loss.item())
        grads.append(model.model.layers[0].self_attn.v_proj.weight.grad)
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(grads[0], grads[1])
    assert losses[0] != trained(cases.llama, "tilewise", **batch(pad))[0].item()


def test_a_row_without_keys_has_zero_gradients():
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in qkv(2, 3, 3, 2, 1, 8))
    sinks = torch.zeros(2, requires_grad=True)
    for given in (None, sinks):
        q.grad = k.grad = None
        o, _ = attention_forward(LAYER, q, k, v, padding([3, 0], 3), s_aux=given)
        assert not o[1].any()
        o.sum().backward()
        assert not q.grad[1].any()
        assert torch.isfinite(k.grad).all()
        assert k.grad[0].any()
    assert sinks.grad.all()
