"""Tiny models of transformers whose heads differ: latent attention, layers of several widths, chunks, chosen keys.

Each is a function of further settings of its configuration; weights are random, of whatever seed torch is at.
"""

from __future__ import annotations

from typing import Any

import transformers

VOCABULARY, WINDOW, CHUNK, CHOSEN = 97, 8, 12, 10
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1
}  # fmt: skip
INDEXER: dict[str, Any] = {"index_topk": CHOSEN, "index_n_heads": 2, "index_head_dim": 16}


def _made(name: str, *settings: dict[str, Any], config: str = "") -> Any:
    given: dict[str, Any] = {}
    for one in settings:
        given |= one
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config or f"{name}Config")(**given))


def deepseek_v3(**more: Any) -> Any:
    """Of its two layers one has experts, in groups. Without q_lora_rank q is projected at once."""
    return _made(
        "DeepseekV3", COMMON, LATENT, EXPERTS, {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}, more
    )


def kimi_k2(**more: Any) -> Any:
    """DeepSeek-V3's layers, experts in one group, rotary embedding by yarn with a scale of the scores of its own."""
    yarn = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    kimi = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rope_parameters": yarn}
    return _made("DeepseekV3", COMMON, LATENT, EXPERTS, kimi, more)


def glm4_moe(**more: Any) -> Any:
    """Grouped heads, a part of whose channels is turned."""
    return _made(
        "Glm4Moe", COMMON, EXPERTS, {"num_key_value_heads": 2, "head_dim": 32, "first_k_dense_replace": 1}, more
    )


def glm4_moe_lite(**more: Any) -> Any:
    return _made("Glm4MoeLite", COMMON, LATENT, EXPERTS, more)


def glm_moe_dsa(**more: Any) -> Any:
    """GLM-5: latent attention over keys that an indexer chooses."""
    return _made("GlmMoeDsa", COMMON, LATENT, EXPERTS, INDEXER, more)


def deepseek_v32(**more: Any) -> Any:
    return _made("DeepseekV32", COMMON, LATENT, EXPERTS, INDEXER, more)


def hy_v4(**more: Any) -> Any:
    """As GLM-5, with sinks, and an indexer that turns its last channels. Not every release of transformers has it."""
    return _made("HYV4", COMMON, LATENT, EXPERTS, INDEXER, more)


def axk2(**more: Any) -> Any:
    """As DeepSeek-V3.2, with a gate. Not every release of transformers has it."""
    return _made("AXK2", COMMON, LATENT, EXPERTS, INDEXER, more)


def gemma4(**more: Any) -> Any:
    """Window layers of 4 KV heads with 16 channels beside a layer of all keys, of 2 with 32, whose V is its K; the last
    two layers read the keys of those before them."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    gemma = {
        "num_hidden_layers": 4, "layer_types": kinds, "sliding_window": WINDOW, "num_key_value_heads": 4,
        "head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 2,
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return _made("Gemma4", COMMON, gemma, more, config="Gemma4TextConfig")


def llama4(**more: Any) -> Any:
    """Three layers that keep to chunks, and one without rotary embedding that sees all keys."""
    llama = {
        "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size_mlp": 48,
        "num_local_experts": 4, "attention_chunk_size": CHUNK, "floor_scale": 200,
    }  # fmt: skip
    return _made("Llama4", COMMON, llama, more, config="Llama4TextConfig")


INDEXED = [glm_moe_dsa, deepseek_v32]
SERVED = [deepseek_v3, kimi_k2, glm4_moe, glm4_moe_lite, gemma4, llama4]
