"""Engines over models of latent attention on a card: steps replayed from graphs, compiled layers, rows of codes."""

from __future__ import annotations

import pytest
import torch
import wide_models as wide
from latent_cases import LATENT, PROMPTS, deepseek_rows, served_late
from tiny_models import assert_likeliest, pages_are_back, run, tokens

from tilewise.bench.generate import share_of_equal
from tilewise.serving import Engine, Sampling, generate

pytestmark = pytest.mark.gpu
LONG = tokens(200, seed=9)
PROMPTS = [*PROMPTS, LONG, LONG + tokens(65, seed=10)]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "calls"])
@pytest.mark.parametrize("make", LATENT, ids=lambda make: make.__name__)
def test_families(make, graphs):
    model = deepseek_rows(make).cuda()
    served = Engine(model, num_pages=400, max_sequences=8, token_budget=150, cuda_graphs=graphs)
    assert served.cache.shared_kv
    for _ in range(2):  # in the second round all sizes were captured
        for prompt, answer in zip(PROMPTS, served_late(served, PROMPTS, 12), strict=True):
            assert_likeliest(model, prompt, answer)
    assert bool(served.stats().graph_captures) == graphs
    assert served.stats().mixed_steps > 3
    assert pages_are_back(served)


@pytest.mark.parametrize("heads", [1, 16, 64])
def test_heads_in_float16(heads):
    model = deepseek_rows(wide.deepseek_v3, torch.float16, num_attention_heads=heads, num_key_value_heads=heads).cuda()
    # transformers multiplies float16 experts by sizes that the host reads, which no graph captures.
    found = generate(model, PROMPTS, max_new_tokens=12, prefill_chunk=100, cuda_graphs=False)
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert_likeliest(model, prompt, one.tokens)


def test_graphs_made_before_anybody_comes():
    model = deepseek_rows(wide.glm4_moe_lite).cuda()
    served = Engine(model, num_pages=400, max_sequences=8, token_budget=300)
    served.prepare(Sampling(0.8))
    captured = served.stats().graph_captures
    assert captured == 2 * (4 + 9)
    for prompt, answer in zip(PROMPTS, served_late(served, PROMPTS, 12), strict=True):
        assert_likeliest(model, prompt, answer)
    served.submit(PROMPTS[0], max_new_tokens=12, sampling=Sampling(0.8))
    run(served)
    assert served.stats().graph_captures == captured


@pytest.mark.parametrize("make", [wide.deepseek_v3, wide.glm4_moe_lite], ids=lambda make: make.__name__)
def test_compiled_layers(make):
    model = deepseek_rows(make).cuda()
    served = Engine(model, num_pages=400, max_sequences=8, token_budget=100, compile=True)
    for prompt, answer in zip(PROMPTS, served_late(served, PROMPTS, 12), strict=True):
        assert_likeliest(model, prompt, answer)
    assert served.stats().graph_captures


@pytest.mark.parametrize("kv_format", ["fp8", "int8"])
def test_rows_of_codes(kv_format):
    """Decodes are replayed, prompts go call by call."""
    model = deepseek_rows(wide.deepseek_v3).cuda()
    exact = [one.tokens for one in generate(model, PROMPTS, max_new_tokens=4)]
    served = Engine(model, num_pages=400, max_sequences=8, kv_format=kv_format)
    assert served.cache.bytes_per_token == 2 * 656
    numbers = [served.submit(prompt, max_new_tokens=4) for prompt in PROMPTS]
    run(served)
    assert served.stats().graph_captures
    found = [served.result(number).tokens for number in numbers]
    assert share_of_equal(found, exact) > {"fp8": 0.4, "int8": 0.6}[kv_format]


def test_few_pages():
    """Sequences lose their pages, which graphs then read no more, and come back."""
    model = deepseek_rows(wide.deepseek_v3).cuda()
    served = Engine(model, num_pages=26, prefill_chunk=64, max_sequences=4)
    for prompt, answer in zip(PROMPTS, served_late(served, PROMPTS, 30), strict=True):
        assert_likeliest(model, prompt, answer)
    assert served.stats().preemptions > 0


def test_what_is_not_served():
    model = deepseek_rows(wide.deepseek_v3).cuda()
    for kv_format in ("fp16", "fp32", "int4"):
        with pytest.raises(NotImplementedError, match="latent rows are bf16, fp8 or int8"):
            Engine(model, num_pages=40, kv_format=kv_format)
