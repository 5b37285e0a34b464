"""Models of transformers on a card, by the GPU kernels: logits beside eager's, and generation."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers_cases as cases
from oracle import qkv, randn
from transformers_cases import WINDOW, assert_like_eager, build, exact_logits, padding, run, tokens

import tilewise.integrations.transformers as integration
from tilewise import api, reference
from tilewise.integrations.transformers import attention_forward

pytestmark = pytest.mark.gpu
CUDA = "cuda"
HALVES = (torch.bfloat16, torch.float16)
LAYER = SimpleNamespace(is_causal=True)
MODELS = [
    (cases.llama, {"head_dim": 40}),
    (cases.llama, {"head_dim": 64}),
    (cases.qwen3, {"head_dim": 128}),
    (cases.gemma2, {"head_dim": 256}),
    (cases.gemma3, {"head_dim": 96}),
    (cases.mistral, {"head_dim": 64}),
    (cases.gpt_oss, {"head_dim": 64}),
]
NAMES = [f"{make.__name__}-{sizes['head_dim']}" for make, sizes in MODELS]


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The names of the calls of Tilewise on CUDA tensors, in order."""
    integration.register()
    made: list[str] = []

    def counted(name):
        function = getattr(api, name)

        def call(q, *args, **kwargs):
            assert q.is_cuda
            made.append(name)
            return function(q, *args, **kwargs)

        monkeypatch.setattr(api, name, call)

    counted("attention")
    counted("attention_varlen")
    return made


def on_card(make, dtype=torch.bfloat16, **sizes):
    return build(make, dtype, **sizes).to(CUDA)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("make", "sizes"), MODELS, ids=NAMES)
def test_logits(make, sizes, dtype, calls):
    """200 tokens: more than a tile, far more than the window."""
    model, ids = on_card(make, dtype, **sizes), tokens(3, 200).to(CUDA)
    assert_like_eager(model, input_ids=ids)
    assert calls == ["attention"] * cases.LAYERS
    for left in (True, False):
        calls.clear()
        mask = padding([200, 65, 1], 200, left=left).to(CUDA)
        assert_like_eager(model, mask.bool(), input_ids=ids, attention_mask=mask)
        assert calls == ["attention_varlen"] * cases.LAYERS


@pytest.mark.parametrize("make", [cases.bert, cases.modernbert], ids=lambda make: make.__name__)
def test_encoders(make, calls):
    model, ids, mask = on_card(make), tokens(3, 130).to(CUDA), padding([130, 63, 1], 130, left=False).to(CUDA)
    assert_like_eager(model, mask.bool(), input_ids=ids, attention_mask=mask)
    assert calls == ["attention_varlen"] * cases.LAYERS


def test_images(calls):
    assert_like_eager(on_card(cases.vit), pixel_values=randn(2, 3, 32, 32, dtype=torch.bfloat16).to(CUDA))
    assert calls == ["attention"] * cases.LAYERS


@pytest.mark.parametrize("decoder_length", [5, 33])
def test_cross_attention(decoder_length, calls):
    model, mask = on_card(cases.bart), padding([33, 9, 1], 33, left=False).to(CUDA)
    inputs = {"input_ids": tokens(3, 33), "decoder_input_ids": tokens(3, decoder_length, seed=1)}
    assert_like_eager(model, attention_mask=mask, **{name: ids.to(CUDA) for name, ids in inputs.items()})
    assert sorted(calls) == ["attention"] * cases.LAYERS + ["attention_varlen"] * 2 * cases.LAYERS


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(("make", "sizes"), MODELS, ids=NAMES)
def test_generate(make, sizes, cache, padded, calls):
    """Each token is the oracle's best but for rounding: half precision may tell two like ones apart in either way."""
    model, ids, new = on_card(make, **sizes), tokens(3, 20).to(CUDA), 2 * WINDOW
    mask = padding([20, 11, 1] if padded else [20] * 3, 20)
    # The forward pass is not compiled, as generate would do it for a static cache on a card.
    result = model.generate(
        ids, attention_mask=mask.to(CUDA), max_new_tokens=new, do_sample=False, cache_implementation=cache,
        disable_compile=True,
    )  # fmt: skip
    # A window's cache loses the padding in the end, and then nothing is left to pack.
    assert len(calls) == cases.LAYERS * new
    assert set(calls[: cases.LAYERS]) == {"attention_varlen" if padded else "attention"}
    assert padded or set(calls) == {"attention"}
    mask = torch.cat((mask, torch.ones(3, new, dtype=mask.dtype)), 1)
    inputs = {"input_ids": result, "attention_mask": mask.to(CUDA)}
    positions = (mask.cumsum(-1) - 1).clamp(min=0).to(CUDA)
    exact = exact_logits(model, position_ids=positions, **inputs)[:, 19:-1]
    eager = run(model, "eager", position_ids=positions, **inputs)[:, 19:-1].cpu().double()
    chosen = exact.gather(-1, result[:, 20:, None].cpu())[..., 0]
    slack = 4 * (eager - exact).abs().max().item()  # two logits, each by the tolerance rule
    assert (exact.max(-1).values - chosen).max().item() <= slack
    assert slack < exact.std().item()  # or the test would say nothing


def test_packed_sequences(calls):
    model, ids = on_card(cases.mistral), tokens(1, 150).to(CUDA)
    positions = torch.cat((torch.arange(87), torch.arange(63)))[None].to(CUDA)
    assert_like_eager(model, input_ids=ids, position_ids=positions, use_cache=False)
    assert calls == ["attention_varlen"] * cases.LAYERS
    starts = torch.tensor([0, 87, 150], dtype=torch.int32, device=CUDA)
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 87, "max_length_k": 87}
    by_starts = run(model, "tilewise", input_ids=ids, position_ids=positions, use_cache=False, **given)
    by_positions = run(model, "tilewise", input_ids=ids, position_ids=positions, use_cache=False)
    assert torch.equal(by_starts, by_positions)


def test_under_autocast(calls):
    model, inputs = build(cases.llama).to(CUDA), {"input_ids": tokens(2, 33).to(CUDA), "use_cache": False}
    with torch.autocast(CUDA, torch.bfloat16):
        got, eager = run(model, "tilewise", **inputs), run(model, "eager", **inputs)
    verdict = reference.judge(got.cpu(), exact_logits(model, **inputs), eager.cpu())
    assert verdict.ok, verdict.reason
    assert calls == ["attention"] * cases.LAYERS


@pytest.mark.parametrize("make", [cases.llama, cases.gemma2], ids=lambda make: make.__name__)
def test_float32(make, calls):
    model, ids = build(make).to(CUDA), tokens(2, 130).to(CUDA)
    assert_like_eager(model, input_ids=ids)
    assert calls == ["attention"] * cases.LAYERS


def step(model, implementation, **inputs):
    """All gradients of one training step, one after another, float64."""
    model.set_attn_implementation(implementation)
    model.requires_grad_(True).zero_grad()
    model(**inputs, use_cache=False).loss.backward()
    model.set_attn_implementation("tilewise")
    return torch.cat([p.grad.double().cpu().flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize(
    ("make", "sizes"),
    [(cases.llama, 128), (cases.gemma2, 64), (cases.gpt_oss, 64)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_training_step(make, sizes, pad, calls):
    """As far from float64 as eager's step is, or little more; by our calls."""
    model, ids = on_card(make, head_dim=sizes), tokens(2, 130)
    inputs = {"input_ids": ids, "labels": ids}
    if pad:
        mask = padding([130, 67], 130, left=False)
        inputs |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    exact_logits(model, input_ids=ids[:1, :1])  # registers the oracle
    wide = copy.deepcopy(model).to("cpu", torch.float64)
    wide.set_experts_implementation("eager")
    exact = step(wide, cases.ORACLE, **inputs)
    there = {name: x.to(CUDA) for name, x in inputs.items()}
    calls.clear()
    ours, eager = step(model, "tilewise", **there), step(model, "eager", **there)
    assert calls == ["attention_varlen" if pad else "attention"] * cases.LAYERS
    assert (ours - exact).norm() <= 1.5 * (eager - exact).norm()


@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradients_of_padded_rows_are_finite(with_sinks):
    """A row without keys must not bring NaN into it."""
    heads_last = qkv(2, 5, 5, 4, 2, 64, dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2).to(CUDA).requires_grad_() for x in heads_last)
    sinks = randn(4, seed=3) if with_sinks else None
    given = None if sinks is None else sinks.to(CUDA).requires_grad_()
    mask = padding([5, 0], 5).to(CUDA)
    o, _ = attention_forward(LAYER, q, k, v, mask, s_aux=given)
    with torch.no_grad():
        kernel, _ = attention_forward(LAYER, q, k, v, mask, s_aux=given)
    one = [x[:1] for x in heads_last]
    exact, honest = (f(*one, causal=True, sinks=sinks)[0] for f in (reference.attention, reference.baseline))
    for result in (o, kernel):
        assert not result[1].any()
        verdict = reference.judge(result[:1].cpu(), exact, honest)
        assert verdict.ok, verdict.reason
    o.float().square().sum().backward()
    for x in (q, k, v, *([] if given is None else [given])):
        assert torch.isfinite(x.grad).all()
        assert x.grad.any()
