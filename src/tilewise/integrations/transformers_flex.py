"""`tilewise.compat.flex_attention` under models of transformers, for any mask that can be written as a function:

    import tilewise.integrations.transformers_flex as t; t.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise_flex", dtype=torch.bfloat16)

It stands where transformers' own "flex_attention" does. What "tilewise" refuses is served here: chunks, image tokens
that see each other, masks of one's own, a bias on the scores; sinks too. The mask becomes a BlockMask, and one of
queries × keys is never formed. BlockMasks that transformers has made are taken as well. q, k, v and sinks get
gradients; a bias on the scores that requires them is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from ..state import add_sinks
from .extras import extra
from .transformers import refuse_unserved

with extra("transformers"):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import (
        add_offsets_to_mask_function,
        and_masks,
        causal_mask_function,
        padding_mask_function,
        prepare_padding_mask,
    )

NAME = "tilewise_flex"


class Mask(BlockMask):
    """A BlockMask that passes for a tensor where `generate` makes masks ahead, as for static caches."""

    def contiguous(self) -> Mask:
        return self


def register() -> None:
    """Make `attn_implementation="tilewise_flex"` known to every model of transformers."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_block_mask)


def make_block_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | BlockMask | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> BlockMask:
    """The mask of a forward pass, for transformers' AttentionMaskInterface; its arguments are those of `sdpa_mask`.

    Query i stands at position q_offset + i, key j at kv_offset + j. attention_mask: (batch_size, positions) bool, False
    for padding.
    """
    if isinstance(attention_mask, BlockMask):  # made ahead
        return attention_mask
    if attention_mask is not None:
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask_function = and_masks(mask_function, padding_mask_function(padding))
    mask_function = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    made = create_block_mask(mask_function, batch_size, None, q_length, kv_length, device)
    made.__class__ = Mask
    return made


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, for transformers' AttentionInterface.

    query: (B, Hq, Nq, D); key: (B, Hkv, Nk, D); value: (B, Hkv, Nk, Dv). attention_mask: a BlockMask; or (B or 1, Hq or
    1, Nq, Nk), bool with True for what is seen, else added to the scores; or None: then is_causal, the module's if
    None, tells what is seen. position_bias: added to the scores too. softcap, s_aux (Hq,): as in `tilewise.attention`.

    Returns (B, Nq, Hq, Dv) and None: attention weights are never formed.
    """
    if dropout:
        raise NotImplementedError(
            f"dropout is not served here, got {dropout}; call model.eval(), set the config's attention dropout to 0, "
            'or use attn_implementation="tilewise"'
        )
    refuse_unserved(kwargs)
    block_mask = attention_mask if isinstance(attention_mask, BlockMask) else None
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        block_mask = make_block_mask(len(query), queries, keys, keys - queries, device=query.device)
    given = [x for x in (attention_mask, position_bias) if isinstance(x, torch.Tensor)]
    result: Any = flex_attention(
        query,
        key,
        value,
        _score_mod(softcap, given),
        block_mask,
        scaling,
        enable_gqa=True,
        return_aux=AuxRequest(lse=s_aux is not None),
    )
    o, aux = result[0].transpose(1, 2), result[1]
    return (o if s_aux is None else add_sinks(o, aux.lse, s_aux)[0]), None


def _score_mod(softcap: float | None, given: list[torch.Tensor]) -> Callable[..., Any] | None:
    """Caps the scores, then adds or hides what each of `given`, (B or 1, Hq or 1, Nq, Nk), says; None for nothing."""
    masks = [x for x in given if x.dtype == torch.bool]
    biases = [x for x in given if x.dtype != torch.bool]

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        for bias in biases:  # an index past the end means the last entry, which of a dimension of 1 is the one for all
            score = score + bias[b, h, q, k]
        for mask in masks:
            score = torch.where(mask[b, h, q, k], score, -torch.inf)
        return score

    return None if softcap is None and not given else score_mod
