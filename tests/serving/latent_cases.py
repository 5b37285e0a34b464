"""Tiny models of latent attention, and prompts for them that come while others are answered."""

from __future__ import annotations

import torch
import wide_models as wide
from tiny_models import run, tokens

LATENT = [wide.deepseek_v3, wide.kimi_k2, wide.glm4_moe_lite]
SHARED = tokens(40, seed=1)
PROMPTS = [SHARED + tokens(3, seed=2), tokens(37, seed=3), SHARED + tokens(20, seed=4), [5], SHARED, tokens(18, seed=6)]
# In 16 bits all experts serve a token, so that rounding chooses no other ones.
EVERY_EXPERT = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}


def built(make, dtype=torch.float32, **settings):
    """The same weights each time."""
    torch.manual_seed(7)
    return make(**settings).eval().to(dtype)


def deepseek_rows(make, dtype=torch.bfloat16, **settings):
    """With rows of 512 + 64 channels, as cards have a kernel for."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 1024}
    return built(make, dtype, **{**sizes, **EVERY_EXPERT, **settings})


def expected(model, prompt, count):
    """What model.generate makes of one prompt, greedily: its new tokens."""
    given = torch.tensor([prompt], device=model.device)
    all_of_it = torch.ones_like(given)  # also tokens that would be padding
    found = model.generate(given, attention_mask=all_of_it, max_new_tokens=count, do_sample=False)
    return found[0, len(prompt) :].tolist()


def served_late(served, prompts=PROMPTS, shortest=4):
    """Prompts that come while others are answered, in answers of different lengths; their tokens."""
    numbers = []
    for n, prompt in enumerate(prompts):
        numbers.append(served.submit(prompt, max_new_tokens=shortest + n))
        served.step()
        served.step()
    run(served)
    return [served.result(number).tokens for number in numbers]
