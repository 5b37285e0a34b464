"""Engines over models of latent attention: what they keep, and steps that are replayed as on a card."""

from __future__ import annotations

import asyncio

import pytest
import torch
import wide_models as wide
from card_like import all_like_cards, all_taped
from latent_cases import EVERY_EXPERT, LATENT, PROMPTS, built, expected, served_late
from tiny_models import assert_likeliest, pages_are_back

import tilewise
from tilewise import arch
from tilewise.bench.generate import share_of_equal
from tilewise.serving import Engine, latent
from tilewise.serving.hf import ModelShape
from tilewise.serving.sizing import check_served

pytestmark = pytest.mark.usefixtures("one_thread")

MAKES = pytest.mark.parametrize("make", LATENT, ids=lambda make: make.__name__)


@MAKES
def test_graphs_serve_those_who_come_and_go(make, monkeypatch):
    """The model's own tokens, from a few captures, with idle rows and beside chunks of prompts."""
    replays, model = all_like_cards(monkeypatch), built(make)
    served = Engine(model, num_pages=60, max_sequences=8, token_budget=32)
    assert served_late(served) == [expected(model, prompt, 4 + n) for n, prompt in enumerate(PROMPTS)]
    assert any(decodes and chunks for _, decodes, chunks in replays)
    assert any(decodes + chunks < rows for rows, decodes, chunks in replays)
    assert served.stats().reused_tokens >= 2 * 32  # whole pages of what prompts share
    assert pages_are_back(served)


@pytest.mark.parametrize(
    ("kv_format", "rank", "card"), [("bf16", 128, None), ("fp8", 512, None), ("bf16", 512, "sm_89")]
)
def test_a_whole_pass_by_kernels(kv_format, rank, card, monkeypatch):
    """Every launch and operator of a captured pass again, over memory that stays: rows are written, decodes are planned
    and made beside chunks. With codes a graph has no prompts: their pages are widened call by call. As another card,
    too, whose kernels all of them then are."""
    monkeypatch.setattr(arch, "chosen", card)
    replays = all_taped(monkeypatch)
    model = built(wide.deepseek_v3, torch.bfloat16, kv_lora_rank=rank, qk_rope_head_dim=64, **EVERY_EXPERT)
    served = Engine(model, num_pages=40, max_sequences=4, token_budget=32, kv_format=kv_format, backend="emulator")
    assert served.cache.shared_kv
    prompts = PROMPTS[:4]
    found = served_late(served, prompts)
    assert any(decodes for _, decodes, _ in replays)
    assert any(chunks for *_, chunks in replays) == (kv_format == "bf16")
    if kv_format == "bf16":
        for prompt, answer in zip(prompts, found, strict=True):
            assert_likeliest(model, prompt, answer)
    else:  # what the same rows give on a CPU
        monkeypatch.undo()
        answers = served_late(Engine(model, num_pages=40, kv_format=kv_format), prompts)
        assert share_of_equal(found, answers) > 0.8


@pytest.mark.parametrize("kv_format", ["fp8", "int8"])
def test_rows_of_codes(kv_format, monkeypatch):
    """On a CPU as on a card: decodes are replayed, prompts go call by call."""
    model = built(wide.kimi_k2)
    answers = [expected(model, prompt, 4 + n) for n, prompt in enumerate(PROMPTS)]
    found = []
    for like_cards in (False, True):
        replays = all_like_cards(monkeypatch) if like_cards else []
        served = Engine(model, num_pages=60, max_sequences=8, token_budget=32, kv_format=kv_format)
        assert served.cache.bytes_per_token == 2 * (32 + 4 + 8 * 2)  # codes, a scale, the rotary part
        found.append(served_late(served))
    assert found[0] == found[1]
    assert replays
    assert not any(chunks for *_, chunks in replays)
    assert share_of_equal([x[:2] for x in found[0]], [x[:2] for x in answers]) > 0.7  # before one that differs
    with pytest.raises(NotImplementedError, match='kv_format "int4" is not served with shared_kv'):
        Engine(model, num_pages=60, kv_format="int4")


def test_generate_and_streams():
    """Samples of a prompt share its rows, and so do prompts that begin alike; tokens come one by one."""
    model = built(wide.glm4_moe_lite)
    right = [expected(model, prompt, 4) for prompt in PROMPTS[:3]]
    found = tilewise.generate(model, PROMPTS[:3], max_new_tokens=4, num_samples=2)
    assert [[sample.tokens for sample in one.samples] for one in found] == [[x, x] for x in right]
    streamed = list(tilewise.stream(model, PROMPTS[:2], max_new_tokens=4))
    assert [[token for one, _, token in streamed if one == n] for n in range(2)] == right[:2]
    served = Engine(model, num_pages=60)

    async def answer(prompt):
        return [token.token async for token in served.stream(prompt, max_new_tokens=4)]

    assert [asyncio.run(answer(prompt)) for prompt in PROMPTS[:3]] == right
    assert served.stats().reused_tokens >= 32
    assert "tokens cached" in served.prefix.show()
    assert not any("expand_kv" in vars(module) for module in model.modules())


def on_card(**more):
    given = {"layers": 2, "heads": 16, "kv_heads": 1, "head_dim": 576, "vocab": 97, "positions": 4096}
    given |= {"value_dim": 512, "shared_kv": True, "dtype": torch.bfloat16}
    return ModelShape(**{**given, **more}, end_tokens=(), device=torch.device("cuda"))


def test_formats_that_a_card_reads():
    for kv_format in ("bf16", "fp8", "int8"):
        check_served(on_card(), kv_format, 16)
    check_served(on_card(dtype=torch.float16), "fp16", 64)
    for dtype, kv_format in ((torch.bfloat16, "fp16"), (torch.float16, "fp8"), (torch.bfloat16, "int4")):
        with pytest.raises(NotImplementedError, match=f"latent rows are .*got {dtype} with kv_format '{kv_format}'"):
            check_served(on_card(dtype=dtype), kv_format, 16)
    with pytest.raises(NotImplementedError, match="multiple of 16 tokens are served, got page_size 24"):
        check_served(on_card(), "bf16", 24)


def test_rows_without_a_kernel_on_cards_are_expanded():
    card = torch.device("cuda")
    assert latent._served((576, 512), torch.bfloat16, card)
    assert latent._served((576, 512), torch.float16, card)
    assert not latent._served((576, 512), torch.float32, card)
    assert not latent._served((40, 32), torch.bfloat16, card)
    assert latent._served((40, 32), torch.float32, torch.device("cpu"))
