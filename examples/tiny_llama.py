"""A Llama so small that the examples run on a CPU in seconds. Its weights are random, so what it says means nothing.

Put `transformers.AutoModelForCausalLM.from_pretrained(...)` in its place, on a card in bfloat16, and the examples stay
as they are.
"""

from __future__ import annotations

import torch
import transformers

VOCAB = 512


def tiny_llama() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # larger than usual, so that some tokens are clearly likelier than others
            parameter.data.normal_(0, 0.1)
    return model


def words(count: int, seed: int) -> list[int]:
    """Random token ids, which stand for a tokenized text."""
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
