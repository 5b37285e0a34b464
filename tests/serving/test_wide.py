"""tilewise.generate on models whose heads differ: greedy tokens like the model's own, and what is refused."""

from __future__ import annotations

import pytest
import torch
import wide_models as wide

import tilewise
from tilewise.serving import Engine

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


@pytest.mark.parametrize("make", [x for x in wide.SERVED if x is not wide.llama4], ids=lambda make: make.__name__)
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


def test_chunks_up_to_their_length():
    """Decoding has no chunks of positions: a sequence is at most as long as one."""
    model = built(wide.llama4)
    prompts = [prompt[: wide.CHUNK - NEW] for prompt in PROMPTS]
    assert greedy(model, prompts) == [expected(model, prompt) for prompt in prompts]
    with pytest.raises(ValueError, match=f"at most {wide.CHUNK} together"):
        tilewise.generate(model, PROMPTS, max_new_tokens=NEW)
    scaled = built(wide.llama4, floor_scale=12)
    assert Engine(scaled).shape.positions == 11  # from there on queries are scaled by their position
    with pytest.raises(NotImplementedError, match="smaller prefill_chunk"):
        tilewise.generate(scaled, [[3, 4, 5 + n] for n in range(5)], max_new_tokens=1)
