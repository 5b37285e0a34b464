"""Models of transformers by tilewise.compat.flex_attention: logits like eager's, with masks of ours and of theirs."""

from __future__ import annotations

import pytest
import torch
import transformers_cases as cases
from oracle import assert_attention, qkv, randn
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.masking_utils import blockwise_overlay, chunked_overlay, create_causal_mask, flex_attention_mask
from transformers_cases import LAYER, WINDOW, build, padding, run, tokens

import tilewise.integrations.transformers_flex as integration
from tilewise import reference
from tilewise.compat.flex_attention import BlockMask
from tilewise.integrations.transformers_flex import NAME, attention_forward, make_block_mask

ULPS = 32  # as test_transformers.py has it
DECODERS = [cases.llama, cases.qwen3, cases.gemma2, cases.gemma3, cases.mistral, cases.gpt_oss]
LENGTH = 150  # more than a block


@pytest.fixture(autouse=True)
def registered():
    import tilewise.integrations.transformers as first

    first.register()
    integration.register()


def assert_logits(model, rows=None, **inputs):
    """Within the tolerance rule beside eager's, in `rows` (bool) if given."""
    got, eager, exact = run(model, NAME, **inputs), run(model, "eager", **inputs), cases.exact_logits(model, **inputs)
    if rows is not None:
        got, eager, exact = (x[rows] for x in (got, eager, exact))
    verdict = reference.judge(got, exact, eager)
    assert verdict.ok, verdict.reason
    assert (got - eager).abs().max() <= ULPS * torch.finfo(torch.float32).eps * exact.abs().max()


@pytest.mark.parametrize("make", [*DECODERS, cases.bert, cases.modernbert], ids=lambda make: make.__name__)
@pytest.mark.parametrize("pad", ["none", "left", "right"])
def test_logits_are_eager_s(make, pad):
    model, ids = build(make), tokens(3, LENGTH)
    if pad == "none":
        assert_logits(model, input_ids=ids)
    else:
        mask = padding([LENGTH, 63, 1], LENGTH, left=pad == "left")
        assert_logits(model, mask.bool(), input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("make", [cases.llama, cases.gemma2, cases.gemma3], ids=lambda make: make.__name__)
def test_masks_that_transformers_made(make, monkeypatch):
    """As attn_implementation="flex_attention" has them, by torch's create_block_mask, not compiled here."""
    made = []
    theirs = lambda *args, **kwargs: made.append(flex_attention_mask(*args, **kwargs)) or made[-1]  # noqa: E731
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, NAME, theirs)
    mask = padding([LENGTH, 63], LENGTH)
    with torch.compiler.set_stance("force_eager"):
        assert_logits(build(make), mask.bool(), input_ids=tokens(2, LENGTH), attention_mask=mask)
    assert made
    assert all(isinstance(x, BlockMask) for x in made)


def test_images_see_each_other():
    assert_logits(build(cases.vit), pixel_values=randn(2, 3, 32, 32))


def test_cross_attention_with_a_padded_encoder():
    decoder = tokens(3, 5, seed=1)
    mask = padding([33, 9, 1], 33, left=False)
    assert_logits(build(cases.bart), input_ids=tokens(3, 33), attention_mask=mask, decoder_input_ids=decoder)


def test_packed_sequences():
    positions = torch.cat((torch.arange(93), torch.arange(57)))[None]
    assert_logits(build(cases.mistral), input_ids=tokens(1, 150), position_ids=positions, use_cache=False)


@pytest.mark.parametrize("make", [cases.llama, cases.gemma3], ids=lambda make: make.__name__)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_gives_eager_s_tokens(make, cache):
    model, made = build(make), []
    inputs = {"inputs": tokens(3, 12), "attention_mask": padding([12, 5, 1], 12), "cache_implementation": cache}
    for implementation in (NAME, "eager"):
        model.set_attn_implementation(implementation)
        made.append(model.generate(**inputs, max_new_tokens=2 * WINDOW, do_sample=False))
    assert torch.equal(*made)


def test_a_prompt_in_chunks_into_a_static_cache():
    model, ids = build(cases.mistral), tokens(2, 20)
    cache = StaticCache(model.config, max_cache_len=32)
    parts = [run(model, NAME, input_ids=x, past_key_values=cache) for x in (ids[:, :6], ids[:, 6:7], ids[:, 7:])]
    torch.testing.assert_close(torch.cat(parts, 1), run(model, NAME, input_ids=ids))


IMAGES = torch.tensor([-1] * 5 + [0] * 9 + [-1] * 6 + [1] * 12 + [-1] * 8).expand(2, 40)
OWN = {
    "one's own": {
        "or_mask_function": lambda b, h, q, k: (q < 10) & (k < 10),
        "and_mask_function": lambda b, h, q, k: (k % 3 != 1) | (q == k),
    },
    "chunks": {"and_mask_function": chunked_overlay(16, torch.tensor([0, 3]))},
    "images": {"or_mask_function": blockwise_overlay(IMAGES)},
}


@pytest.mark.parametrize("kind", OWN)
def test_masks_of_one_s_own(kind):
    """Masks that only functions can say; `tilewise` refuses them, but for chunks, which are an option of its calls."""
    model, ids = build(cases.llama), tokens(2, 40)
    given = {"inputs_embeds": model.model.embed_tokens(ids), "past_key_values": None, "attention_mask": None}
    made = {}
    for name in (NAME, "eager"):
        mask = create_causal_mask(_with(model, name).config, **given, **OWN[kind])
        assert isinstance(mask, BlockMask) == (name == NAME)
        made[name] = run(model, name, input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(made[NAME], made["eager"], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(made[NAME], run(model, NAME, input_ids=ids), rtol=1e-2)
    if kind == "chunks":
        mask = create_causal_mask(_with(model, "tilewise").config, **given, **OWN[kind])
        found = run(model, "tilewise", input_ids=ids, attention_mask=mask)
        there = torch.arange(40) >= torch.tensor([[0], [3]])  # what comes before is padding, of which nobody asks
        torch.testing.assert_close(found[there], made["eager"][there], rtol=1e-4, atol=1e-4)
    else:
        with pytest.raises(NotImplementedError):
            create_causal_mask(_with(model, "tilewise").config, **given, **OWN[kind])


def _with(model, name):
    model.set_attn_implementation(name)
    return model


def test_it_is_flex_attention_that_runs(monkeypatch):
    calls = []
    flex = integration.flex_attention
    monkeypatch.setattr(integration, "flex_attention", lambda *x, **y: calls.append(x[1].shape[1]) or flex(*x, **y))
    run(build(cases.llama), NAME, input_ids=tokens(2, 9))
    assert calls == [2] * cases.LAYERS  # KV heads are not repeated


def test_a_model_is_made_with_it_by_name():
    model = cases.llama(attn_implementation=NAME).eval()
    with torch.no_grad():
        assert model(tokens(1, 3)).logits.shape == (1, 3, cases.VOCABULARY)
    assert AttentionInterface._global_mapping[NAME] is attention_forward


@pytest.mark.parametrize("kind", ["bias", "bool"])
def test_a_tensor_for_a_mask_and_a_position_bias(kind):
    q, k, v = qkv(2, 20, 30, 4, 2, 16)
    seen = torch.rand(2, 1, 20, 30, generator=torch.Generator().manual_seed(1)) < 0.7
    bias = randn(1, 4, 20, 30, seed=5)
    given = seen if kind == "bool" else torch.where(seen, 0.0, -torch.inf)
    o, _ = attention_forward(LAYER, *(x.transpose(1, 2) for x in (q, k, v)), given, position_bias=bias, scaling=0.3)
    s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) * 0.3 + bias
    weights = s.masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(o.double(), torch.einsum("bhqk,bkhd->bqhd", weights, v.double().repeat_interleave(2, 2)),
                               rtol=1e-5, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"s_aux": torch.tensor([0.5, -1.0, 30.0, 0.0])}], ids=str)
def test_without_a_mask_the_layer_tells(options):
    q, k, v = qkv(2, 20, 30, 4, 2, 16)
    by_heads = [x.transpose(1, 2) for x in (q, k, v)]
    wanted = {"softcap": options.get("softcap", 0.0), "sinks": options.get("s_aux")}
    for is_causal in (None, False):
        o, _ = attention_forward(LAYER, *by_heads, None, is_causal=is_causal, **options)
        _, lse = reference.attention(q, k, v, causal=is_causal is None, **wanted)
        assert_attention((o, lse.float()), q, k, v, causal=is_causal is None, **wanted)


def test_refusals():
    q, k, v = (x.transpose(1, 2) for x in qkv(1, 4, 4, 2, 2, 16))
    for options, match in (
        ({"dropout": 0.1}, "dropout"),
        ({"output_attentions": True}, "output_attentions"),
        ({"head_mask": torch.ones(2)}, "head_mask"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            attention_forward(LAYER, q, k, v, None, **options)
    with pytest.raises(NotImplementedError, match="captures a tensor that requires gradients"):
        attention_forward(LAYER, q, k, v, None, position_bias=torch.zeros(1, 2, 4, 4, requires_grad=True))
    made = make_block_mask(1, 4, 4)
    assert make_block_mask(1, 4, 4, attention_mask=made) is made
