"""Tiny random models of transformers, each with what is special about its family; prompts, and how to judge tokens."""

from __future__ import annotations

import copy

import torch
import transformers

from tilewise.serving.sampling import choose, parameters

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
WINDOW = 24  # shorter than the prompts
FAMILIES = {
    "llama": ("Llama", {"head_dim": 40}),
    "qwen3": ("Qwen3", {"head_dim": 96}),  # norms of q and k
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": WINDOW}),
    "gemma2": (  # soft-capped, a window in every other layer, a scale of its own
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 9,
            "tie_word_embeddings": False,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (  # two rotary bases
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": (  # sinks, experts
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_implementation": "eager",
        },
    ),
}


def tokens(count, seed=0):
    """Random token ids."""
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


SHARED = tokens(70, seed=1)
# Shared beginnings, one of them a whole prompt; one token alone; around a page's and a tile's end.
PROMPTS = [SHARED + tokens(n, seed=n) for n in (1, 5, 30)] + [[3], SHARED, tokens(63, 2), tokens(65, 3), SHARED]
NEW = 12
WARM = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 5}


def tiny_model(family="llama", *, dtype=torch.float32, **options):
    """A model of FAMILIES with random weights, the same each time."""
    name, special = FAMILIES[family]
    if family == "gpt_oss" and dtype != torch.float32:
        options = {"num_experts_per_tok": 4, **options}  # all: rounding that chooses another expert tells nothing
    config_class = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config"))
    config = config_class(**{**COMMON, **special, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # what they are made with is so small that attention would hardly matter
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15)
    if family == "gpt_oss":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.normal_(0, 1)
    return model.to(dtype)


def expected(model, prompt, count):
    """What model.generate makes of one prompt, greedily: its new tokens."""
    given = torch.tensor([prompt], device=model.device)
    return model.generate(given, max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()


@torch.no_grad()
def assert_likeliest(model, prompt, found):
    """Each token is the likeliest after those before it, as far as the model's low precision can tell.

    By the rule of tolerance our logits may be off by twice what transformers' own are, against float32 weights of the
    same values; so the likeliest of ours is at most that much, on both sides, below the likeliest there is.
    """
    given = torch.tensor([prompt + found[:-1]], device=model.device)
    exact = copy.deepcopy(model).float()(given).logits[0, len(prompt) - 1 :]
    honest = model(given).logits[0, len(prompt) - 1 :].float()
    slack = 4 * (honest - exact).abs().max()
    below = exact.max(-1).values - exact[range(len(found)), found]
    assert below.max() <= slack, (
        f"token {int(below.argmax())} is {below.max():.3g} below the likeliest, taken {slack:.3g}"
    )
    assert slack < 0.25 * (exact.max() - exact.min()), "precision so low that every token would pass"


def run(served):
    """Step an engine to its end; (request, sample) -> tokens."""
    found = {}
    while served.busy:
        for token in served.step():
            found.setdefault((token.request, token.sample), []).append(token.token)
    return found


def drawn(rows, logits, uniform):
    """What rows with a Sampling each choose from logits (n, vocab), as one batch."""
    return choose(max(row.kind for row in rows), logits, uniform, torch.from_numpy(parameters(rows)))


def pages_are_back(served):
    """Of an engine that is idle: no sequence is left, and all pages are free once nothing is cached any more."""
    assert not served.busy
    assert served.prefix.stats().sequences == 0
    assert served.cache.lengths == {}
    served.prefix.clear()
    return served.cache.pool.free_pages == served.cache.num_pages and not served.cache.pool.refs.any()
