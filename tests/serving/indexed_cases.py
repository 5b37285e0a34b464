"""Tiny models whose layers attend to the keys that an indexer chooses, prompts for them, and what to expect.

Two programs that add in another order may choose another key where two scores are almost equal, and with relu scores of
zero are equal. So the indexers here have eight heads, which seldom are all silent about a key, and prompts are looked
for over which the model itself never has to choose between scores that rounding might exchange (`clear`).
"""

from __future__ import annotations

import pytest
import torch
import transformers
import wide_models as wide
from latent_cases import built, expected
from tiny_models import tokens

TOPK = 8
# Four layers, of which two reuse what the one before them chose
SHARED_CHOICE = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}
MAKES = {
    "deepseek_v32": (wide.deepseek_v32, {}),
    "glm_moe_dsa": (wide.glm_moe_dsa, SHARED_CHOICE),
    "hy_v4": (wide.hy_v4, SHARED_CHOICE),
    "axk2": (wide.axk2, {}),
}
NEW = 6


def model_of(name, dtype=torch.float32, **settings):
    make, special = MAKES[name]
    if name in ("hy_v4", "axk2") and not hasattr(transformers, {"hy_v4": "HYV4Config", "axk2": "AXK2Config"}[name]):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model = built(make, dtype, **{**special, "index_n_heads": 8, "index_topk": TOPK, **settings})
    for parameter in (p for layer_name, p in model.named_parameters() if layer_name.endswith("sinks")):
        parameter.data.normal_(0, 1)
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def clear(model, sequence):
    """Whether the model, over all of a sequence, never chooses between scores that rounding might exchange."""
    gaps, topk = [], torch.Tensor.topk

    def noted(scores, k, *args, **options):
        if k < scores.shape[-1] and scores.shape[-1] == len(sequence):
            best = topk(scores, k + 1, dim=-1).values
            best = best[best[..., -1] > torch.finfo(torch.float32).min]  # who has to choose
            gaps.append(((best[..., -2] - best[..., -1]) / best.abs().amax(-1)).min().item() if len(best) else 1.0)
        return topk(scores, k, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", noted)
        model(torch.tensor([sequence]))
    assert gaps or len(sequence) <= TOPK
    return min(gaps, default=1.0) > 2**-20  # eight times what rounding changes


def own_answers(model, make, count=NEW):
    """The first prompts of make(0), make(1), … over which every choice is clear, and the model's greedy tokens. The
    n-th has n tokens more than `count`, so that they end one after the other."""
    for seed in range(100):
        prompts = make(seed)
        found = [expected(model, prompt, count + n) for n, prompt in enumerate(prompts)]
        if all(clear(model, prompt + answer) for prompt, answer in zip(prompts, found, strict=True)):
            return prompts, found
    raise AssertionError("no prompts whose keys are chosen clearly")


def alike(seed):
    """Prompts that begin alike, and others; some that see all keys at first, or to the end."""
    common = tokens(30, seed=100 + seed)
    others = [tokens(n, seed=1000 * n + seed) for n in (3, 1, 13, 1, TOPK + 1)]
    return [common + others[0], others[1], common + others[2], others[3], common, others[4]]
