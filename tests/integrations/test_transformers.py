"""Tilewise under models of transformers: logits and tokens like eager's, and by our kernels."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
import transformers_cases as cases
from oracle import randn
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers_cases import WINDOW, assert_like_eager, build, padding, run, tokens

import tilewise.integrations.transformers as integration
from tilewise import api, reference

pytestmark = pytest.mark.usefixtures("registered")

# Eager's own logits are up to 15 units in the last place of the largest logit away from float64 in these models (their
# weights are large), and so may ours be, in another direction.
ULPS = 32
DECODERS = [cases.llama, cases.qwen3, cases.gemma2, cases.gemma3, cases.mistral, cases.gpt_oss]
LENGTH = 65


@pytest.fixture
def calls(monkeypatch):
    """The names of the calls of Tilewise, in order."""
    made: list[str] = []

    def counted(name):
        function = getattr(api, name)

        def call(*args, **kwargs):
            made.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(api, name, call)

    counted("attention")
    counted("attention_varlen")
    return made


def forbid(monkeypatch, model, sdpa: bool = True) -> None:
    """Let eager attention, and torch's SDPA, fail when called."""

    def forbidden(*_, **__):
        raise AssertionError("this attention must not run")

    modeling = importlib.import_module(type(model).__module__)
    monkeypatch.setattr(modeling, "eager_attention_forward", forbidden)
    if sdpa:
        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", forbidden)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", forbidden)


# ---- models ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [*DECODERS, cases.bert, cases.modernbert], ids=lambda make: make.__name__)
@pytest.mark.parametrize("pad", ["none", "left", "right"])
def test_logits_are_eager_s(make, pad):
    model, ids = build(make), tokens(4, LENGTH)
    if pad == "none":
        assert_like_eager(model, input_ids=ids, ulps=ULPS)
    else:
        mask = padding([LENGTH, 63, WINDOW, 1], LENGTH, left=pad == "left")
        assert_like_eager(model, mask.bool(), input_ids=ids, attention_mask=mask, ulps=ULPS)


@pytest.mark.parametrize("length", [1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize("make", DECODERS, ids=lambda make: make.__name__)
def test_short_prompts(make, length):
    assert_like_eager(build(make), input_ids=tokens(2, length), ulps=ULPS)


def test_images_see_each_other():
    assert_like_eager(build(cases.vit), pixel_values=randn(2, 3, 32, 32), ulps=ULPS)


@pytest.mark.parametrize("decoder_length", [5, 33])
def test_cross_attention_with_a_padded_encoder(decoder_length):
    """33 are as many queries as keys: they must not be taken for padded ones."""
    model, mask = build(cases.bart), padding([33, 9, 1], 33, left=False)
    decoder = tokens(3, decoder_length, seed=1)
    assert_like_eager(model, input_ids=tokens(3, 33), attention_mask=mask, decoder_input_ids=decoder, ulps=ULPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [cases.llama, cases.gemma2, cases.gpt_oss, cases.bert], ids=lambda make: make.__name__)
def test_half_precision_holds_to_the_tolerance_rule(make, dtype):
    model, mask = build(make, dtype), padding([33, 17], 33)
    assert_like_eager(model, mask.bool(), input_ids=tokens(2, 33), attention_mask=mask)


def test_under_autocast():
    """Without a cache, which would change that, q and k come in float32 and v in bfloat16."""
    model, inputs = build(cases.llama), {"input_ids": tokens(2, 33), "use_cache": False}
    with torch.autocast("cpu", torch.bfloat16):
        got, eager = run(model, "tilewise", **inputs), run(model, "eager", **inputs)
    verdict = reference.judge(got, cases.exact_logits(model, **inputs), eager)
    assert verdict.ok, verdict.reason


def test_packed_sequences_by_positions(calls):
    """Two sequences in one row, told by their positions; then by cu_seq_lens."""
    model, ids = build(cases.mistral), tokens(1, 40)
    positions = torch.cat((torch.arange(23), torch.arange(17)))[None]
    assert_like_eager(model, input_ids=ids, position_ids=positions, use_cache=False, ulps=ULPS)
    assert calls == ["attention_varlen"] * cases.LAYERS
    alone = torch.cat([run(model, "tilewise", input_ids=ids[:, part]) for part in (slice(23), slice(23, 40))], 1)
    starts = torch.tensor([0, 23, 40], dtype=torch.int32)
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 23, "max_length_k": 23}
    together = run(model, "tilewise", input_ids=ids, position_ids=positions, **given)
    torch.testing.assert_close(together, alone)


# ---- generation ------------------------------------------------------------------------------------------------------
def generated(model, implementation, **options):
    model.set_attn_implementation(implementation)
    new = options.pop("max_new_tokens", 2 * WINDOW)
    result = model.generate(max_new_tokens=new, do_sample=False, **options)
    model.set_attn_implementation("tilewise")
    return result


@pytest.mark.parametrize("make", DECODERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("lengths", [None, [12, 5, 1]], ids=["whole", "padded"])
def test_generate_gives_eager_s_tokens(make, cache, lengths):
    """From before the window is full to beyond it; with padding the rows leave the window one after the other."""
    model = build(make)
    inputs = {"inputs": tokens(3, 12), "cache_implementation": cache}
    if lengths is not None:
        inputs["attention_mask"] = padding(lengths, 12)
    assert torch.equal(generated(model, "tilewise", **inputs), generated(model, "eager", **inputs))


def test_generate_by_beams_and_from_an_encoder():
    model, mask = build(cases.bart), padding([9, 4], 9, left=False)
    inputs = {"inputs": tokens(2, 9), "attention_mask": mask, "num_beams": 3}
    assert torch.equal(generated(model, "tilewise", **inputs), generated(model, "eager", **inputs))


@pytest.mark.parametrize("make", [cases.llama, cases.mistral], ids=lambda make: make.__name__)
def test_a_prompt_in_chunks_into_a_static_cache(make):
    """Keys beyond the current length are never seen: the cache is full of NaN there."""
    model, ids = build(make), tokens(2, 20)
    whole = run(model, "tilewise", input_ids=ids)
    cache = StaticCache(model.config, max_cache_len=32)
    parts = []
    for part in (ids[:, :6], ids[:, 6:7], ids[:, 7:20]):
        parts.append(run(model, "tilewise", input_ids=part, past_key_values=cache))
        for layer in cache.layers:
            filled = int(layer.get_seq_length())
            layer.keys[:, :, filled:], layer.values[:, :, filled:] = torch.nan, torch.nan
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_right_padding_then_new_tokens(calls):
    """The padding then lies between tokens; without a window that is served."""
    model, ids, mask = build(cases.llama), tokens(2, 12), padding([12, 7], 12, left=False)
    mask[1, 10:] = 1
    rows = mask.bool()
    assert_like_eager(model, rows, input_ids=ids, attention_mask=mask, ulps=ULPS)
    assert calls == ["attention_varlen"] * cases.LAYERS


# ---- which attention runs --------------------------------------------------------------------------------------------
def test_our_kernels_are_the_ones_that_run(calls, monkeypatch):
    model, ids = build(cases.llama), tokens(2, 9)
    forbid(monkeypatch, model)
    run(model, "tilewise", input_ids=ids)
    assert calls == ["attention"] * cases.LAYERS
    calls.clear()
    run(model, "tilewise", input_ids=ids, attention_mask=padding([9, 4], 9))
    assert calls == ["attention_varlen"] * cases.LAYERS
    calls.clear()
    generated(model, "tilewise", inputs=ids, max_new_tokens=3)
    assert calls == ["attention"] * cases.LAYERS * 3
    with pytest.raises(AssertionError, match="must not run"):
        run(model, "eager", input_ids=ids)


def test_a_mask_without_padding_packs_nothing(calls):
    run(build(cases.llama), "tilewise", input_ids=tokens(2, 9), attention_mask=torch.ones(2, 9, dtype=torch.int64))
    assert calls == ["attention"] * cases.LAYERS


def test_kv_heads_are_not_repeated(monkeypatch):
    heads = []
    monkeypatch.setattr(api, "attention", lambda q, k, v, **_: heads.append((q.shape[2], k.shape[2])) or q)
    run(build(cases.llama), "tilewise", input_ids=tokens(1, 3))
    assert heads == [(4, 2)] * cases.LAYERS


def test_without_the_registration_nothing_works(monkeypatch):
    model, ids, mask = build(cases.llama), tokens(2, 9), padding([9, 4], 9)
    right = run(model, "tilewise", input_ids=ids, attention_mask=mask)
    with monkeypatch.context() as patch:
        patch.delitem(AttentionMaskInterface._global_mapping, "tilewise")
        wrong = run(model, "tilewise", input_ids=ids, attention_mask=mask)  # transformers makes no mask at all
        assert not torch.allclose(wrong[1, -1], right[1, -1])
    monkeypatch.delitem(AttentionInterface._global_mapping, "tilewise")
    with pytest.raises(KeyError, match="tilewise"):
        model(ids)
    with pytest.raises(ValueError, match="tilewise"):
        type(model)._from_config(model.config, attn_implementation="tilewise")


def test_a_model_is_made_with_it_by_name():
    model = cases.llama(attn_implementation="tilewise")
    assert model.config._attn_implementation == "tilewise"
    integration.register()  # a second time
    assert model.eval()(tokens(1, 3)).logits.shape == (1, 3, cases.VOCABULARY)


def test_importing_tilewise_imports_no_transformers():
    code = "import sys, tilewise; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_compiled_model_runs():
    model, ids, mask = build(cases.llama), tokens(2, 9), padding([9, 4], 9)
    expected = run(model, "tilewise", input_ids=ids, attention_mask=mask)
    with torch.no_grad():
        got = torch.compile(model, backend="eager")(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got, expected)
