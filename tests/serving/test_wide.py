"""tilewise.generate on models whose heads differ: greedy tokens like the model's own, and what is refused."""

from __future__ import annotations

import pytest
import torch
import wide_models as wide
from card_like import all_taped
from latent_cases import served_late
from tiny_models import assert_likeliest, run

import tilewise
from tilewise.serving import Engine

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [list(range(3, 28)), list(range(3, 9))]  # which begin alike
NEW = 4


def built(make, **settings):
    torch.manual_seed(7)
    model = make(**settings).eval()
    model.set_attn_implementation("eager")
    return model


def expected(model, prompt, count=NEW):
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()


def greedy(model, prompts):
    return [generation.tokens for generation in tilewise.generate(model, prompts, max_new_tokens=NEW)]


@pytest.mark.parametrize("make", wide.SERVED, ids=lambda make: make.__name__)
def test_greedy_tokens_are_the_model_s_own(make):
    model = built(make)
    assert greedy(model, PROMPTS) == [expected(model, prompt) for prompt in PROMPTS]


LATENT = [wide.deepseek_v3, wide.kimi_k2, wide.glm4_moe_lite]


@pytest.mark.parametrize("make", LATENT, ids=lambda make: make.__name__)
def test_latent_rows_are_what_is_kept(make):
    """A row of 32 + 8 channels per token and layer, in place of 4 heads of 24 and 12."""
    cache = Engine(built(make)).cache
    assert (cache.shared_kv, cache.num_kv_heads, cache.head_dim, cache.value_dim) == (True, 1, 40, 32)
    assert cache.bytes_per_token == 2 * 40 * 4


def test_latent_rows_in_bytes_and_shared():
    """Quantised rows, which two samples of a prompt share; a query projected at once; the model stays as it is."""
    model = built(wide.deepseek_v3, q_lora_rank=None)
    (found,) = tilewise.generate(model, PROMPTS[:1], max_new_tokens=NEW, kv_format="fp8", num_samples=2)
    assert found.samples[0].tokens == found.samples[1].tokens
    assert found.tokens[:1] == expected(model, PROMPTS[0], 1)
    assert not any("expand_kv" in vars(module) for module in model.modules())


def test_layers_of_another_kind_are_expanded():
    """Where keys and values are not what the weights make of a latent vector, they are kept as the layer makes them."""
    model = built(wide.deepseek_v3)
    layer = model.model.layers[1].self_attn
    before = layer.expand_kv

    def other(kv_nope, k_rot):
        k, v = before(kv_nope, k_rot)
        return k, 2 * v

    layer.expand_kv = other
    assert not Engine(model).cache.shared_kv
    assert greedy(model, PROMPTS[:1]) == [expected(model, PROMPTS[0])]


def test_many_chunks_of_positions():
    """Prompts in pieces, and tokens that come to the next chunk and the one after it. From floor_scale positions on
    queries are scaled by theirs, of whatever pass they are a part; and the model stays as it is."""
    model = built(wide.llama4, floor_scale=5, attn_scale=2.0)
    prompts, new = [[*range(3, 33), 4], [*range(3, 33), 5], [7] * (wide.CHUNK - 1)], wide.CHUNK + 3
    engine = Engine(model, prefill_chunk=9)
    for prompt in prompts:
        engine.submit(prompt, max_new_tokens=new)
    for (n, _), tokens in run(engine).items():
        ids = torch.tensor([[*prompts[n], *tokens]])
        with torch.no_grad():
            likeliest = model(ids, use_cache=False).logits[0, len(prompts[n]) - 1 : -1].argmax(-1)
        assert tokens == likeliest.tolist()
    assert all(m.attn_temperature_tuning for m in model.modules() if hasattr(m, "attn_temperature_tuning"))


@pytest.mark.parametrize("chunk", [32, 24])
def test_chunks_of_positions_as_on_a_card(chunk, monkeypatch):
    """A whole pass by kernels, replayed over memory that stays; where chunks do not begin with a page of 16 tokens,
    passes of decodes alone."""
    replays = all_taped(monkeypatch)
    settings = {"head_dim": 64, "num_local_experts": 1, "floor_scale": 20}  # rounding chooses no other experts
    model = built(wide.llama4, attention_chunk_size=chunk, **settings).to(torch.bfloat16)
    served = Engine(model, num_pages=60, max_sequences=4, token_budget=32, backend="emulator")
    prompts = [[*range(3, 60)], [*range(3, 32)], [*range(40, 70)]]
    for prompt, found in zip(prompts, served_late(served, prompts), strict=True):
        assert_likeliest(model, prompt, found)
    assert any(decodes for _, decodes, _ in replays)
    assert any(chunks for *_, chunks in replays) == (chunk == 32)
