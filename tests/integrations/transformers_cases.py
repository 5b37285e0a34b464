"""Tiny models of transformers with random weights, and how their logits are judged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function, sdpa_mask

from tilewise import reference
from tilewise.integrations.transformers_mask import Mask

VOCABULARY, WINDOW, LAYERS = 97, 8, 2
ORACLE = "oracle"
LAYER = SimpleNamespace(is_causal=True)  # stands for an attention layer of a decoder

# Weights ten times the usual size: scores far from 0, so that a wrong mask, cap or sink shows in the logits.
COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "initializer_range": 0.2,
}  # fmt: skip
TEXT: dict[str, Any] = {
    **COMMON, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
DECODER: dict[str, Any] = {**TEXT, "num_key_value_heads": 2}
ALTERNATING = ["sliding_attention", "full_attention"]


def llama(head_dim: int = 40, **more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, head_dim=head_dim, **more))


def qwen3(head_dim: int = 96) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=head_dim))


def gemma2(head_dim: int = 32) -> Any:
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **DECODER,
            head_dim=head_dim,
            sliding_window=WINDOW,
            layer_types=ALTERNATING,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=16,
        )
    )


def gemma3(head_dim: int = 32) -> Any:
    config = transformers.Gemma3TextConfig(
        **DECODER, head_dim=head_dim, sliding_window=WINDOW, layer_types=ALTERNATING, query_pre_attn_scalar=16
    )
    return transformers.Gemma3ForCausalLM(config)


def mistral(head_dim: int = 16) -> Any:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**DECODER, head_dim=head_dim, sliding_window=WINDOW)
    )


def gpt_oss(head_dim: int = 16, experts_of_a_token: int = 2) -> Any:
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **DECODER,
            head_dim=head_dim,
            sliding_window=WINDOW,
            layer_types=ALTERNATING,
            num_local_experts=4,
            num_experts_per_tok=experts_of_a_token,
        )
    )


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))


def modernbert() -> Any:
    return transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            **TEXT, cls_token_id=1, sep_token_id=2, local_attention=WINDOW, layer_types=ALTERNATING
        )
    )


def vit() -> Any:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**COMMON, image_size=32, patch_size=4, num_labels=VOCABULARY)
    )


def bart() -> Any:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCABULARY, d_model=64, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_ffn_dim=48,
            decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=2, init_std=0.2, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
            max_position_embeddings=128,
        )
    )  # fmt: skip


def build(make: Callable[..., Any], dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    """The model, the same for each call, ready for inference with Tilewise.

    In half precision the weights are half as large: where scores are far apart, rounding decides between keys, and two
    right results are far apart as well. For the same reason a token goes to all experts there.
    """
    torch.manual_seed(7)
    if dtype != torch.float32 and make is gpt_oss:
        sizes["experts_of_a_token"] = 4
    model = make(**sizes).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
        elif dtype != torch.float32 and parameter.dim() > 1:
            parameter *= 0.5
    model = model.to(dtype)
    model.set_attn_implementation("tilewise")
    return model


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """(batch, length) token ids, none of which is special."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(lengths: list[int], total: int, left: bool = True) -> torch.Tensor:
    """(batch, total) int64, 1 where a row of that length has tokens."""
    position = torch.arange(total).expand(len(lengths), total)
    if left:
        position = position.flip(-1)
    return (position < torch.tensor(lengths)[:, None]).long()


def oracle_forward(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **_):
    """The float64 oracle as an attention implementation; its mask is transformers' own, or None for all in view."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "mask": attention_mask}
    o, _lse = reference.attention(q, k, v, **options)
    return o.to(query.dtype), None


def oracle_mask(**options):
    return sdpa_mask(**{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def run(model: Any, implementation: str, **inputs: Any) -> torch.Tensor:
    """The model's logits by that attention implementation; afterwards it is Tilewise's again."""
    model.set_attn_implementation(implementation)
    try:
        with torch.no_grad():
            return model(**inputs).logits
    finally:
        model.set_attn_implementation("tilewise")


def exact_logits(model: Any, **inputs: Any) -> torch.Tensor:
    """The logits of a float64 copy of the model on the CPU, by the oracle."""
    AttentionInterface.register(ORACLE, oracle_forward)
    AttentionMaskInterface.register(ORACLE, oracle_mask)
    wide = copy.deepcopy(model).to("cpu", torch.float64)
    wide.set_experts_implementation("eager")  # the grouped products of experts have no float64
    inputs = {
        name: x.to("cpu", torch.float64 if x.is_floating_point() else None) if isinstance(x, torch.Tensor) else x
        for name, x in inputs.items()
    }
    return run(wide, ORACLE, **inputs)


def assert_like_eager(model: Any, rows: torch.Tensor | None = None, ulps: float | None = None, **inputs: Any) -> None:
    """Tilewise's logits are within the tolerance rule beside eager's, in `rows` (bool) if given.

    ulps: how many units in the last place of the largest logit they may be away from eager's.
    """
    got, eager, exact = run(model, "tilewise", **inputs), run(model, "eager", **inputs), exact_logits(model, **inputs)
    if rows is not None:
        got, eager, exact = (x[rows.to(x.device)] for x in (got, eager, exact))
    got, eager = got.cpu(), eager.cpu()
    verdict = reference.judge(got, exact, eager)
    assert verdict.ok, verdict.reason
    if ulps is not None:
        unit = torch.finfo(got.dtype).eps * exact.abs().max().item()
        difference = (got - eager).abs().max().item()
        own = (eager.double() - exact).abs().max().item()
        assert difference <= ulps * unit, (
            f"{difference / unit:.1f} ulps from eager, which is {own / unit:.1f} off itself"
        )


def visible(mask: Mask) -> torch.Tensor:
    """Which key each query sees: bool (B, 1, queries, keys)."""
    return mask.formed()[..., : mask.keys]


def packed_causal(documents: torch.Tensor) -> Any:
    """The mask function of sequences packed in a row."""
    return and_masks(causal_mask_function, packed_sequence_mask_function(documents))
