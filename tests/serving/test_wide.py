"""tilewise.generate on models whose heads differ: greedy tokens like the model's own, and what is refused."""

from __future__ import annotations

import pytest
import torch
import wide_models as wide

import tilewise
from tilewise.serving import Engine

PROMPTS = [list(range(3, 33)), list(range(3, 12)), [7]]  # of which two begin alike
NEW = 8


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


def test_a_query_projected_at_once():
    model = built(wide.deepseek_v3, q_lora_rank=None)
    assert greedy(model, PROMPTS) == [expected(model, prompt) for prompt in PROMPTS]


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
        tilewise.generate(scaled, [prompt[:3] for prompt in PROMPTS] * 5, max_new_tokens=1)


@pytest.mark.parametrize("make", wide.INDEXED, ids=lambda make: make.__name__)
def test_an_indexer_is_refused(make):
    with pytest.raises(NotImplementedError, match="layers of indexed_attention"):
        tilewise.generate(built(make), PROMPTS, max_new_tokens=NEW)
