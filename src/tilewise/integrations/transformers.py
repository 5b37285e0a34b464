"""Tilewise as an attention implementation of transformers, in two lines:

    import tilewise.integrations.transformers as t; t.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise", dtype=torch.bfloat16)

A model makes its masks once a forward pass and calls attention once a layer, so a function for each is registered.
`make_mask` reads what the model asked for (causal, window, chunk, padding, packed sequences, how much of a static cache
is filled) and finds the rows of each sequence; `attention_forward` runs `tilewise.attention`, or, where rows are
missing or packed, `tilewise.attention_varlen` over the rows that are there. No mask is formed, unless for a model that
looks at it to choose keys for each query. As in eager attention, the mask is what counts: a model's `is_causal` and
`sliding_window` are looked at only where it made no mask.

Padded queries of a causal or windowed mask give 0. Of a mask without either, every query is computed: nothing tells a
padded query from one of a cross-attention. What a mask says beyond this (image tokens that see each other, masks of
one's own) raises NotImplementedError.

Training is the same calls: they have gradients of q, k, v and of sinks, also over padding and packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import api, checks
from .extras import extra
from .transformers_mask import INSTEAD, Mask, chosen_keys, mask_of_flags, with_given_sequences
from .transformers_tree import TreeMask, attend_tree, mask_of_pass
from .transformers_tree import training_tree as training_tree

with extra("transformers"):
    from transformers import AttentionInterface, AttentionMaskInterface

NAME = "tilewise"

# What models hand to attention besides the mask, and what it would change; never to be ignored.
UNSERVED = {
    "position_bias": "a bias on the scores",
    "indices": "keys that are chosen for each query",
    "block_indices": "blocks of keys that are chosen for each query",
    "head_mask": "a factor for each head",
    "cache": "the paged cache of continuous batching",
}


def register() -> None:
    """Make `attn_implementation="tilewise"` known to every model of transformers. Calling it again changes nothing.

    transformers offers no way to take an implementation out again. torch.compile breaks its graph at both functions:
    masks are read from tensors' values.
    """
    AttentionInterface.register(NAME, torch.compiler.disable(attention_forward))
    AttentionMaskInterface.register(NAME, torch.compiler.disable(mask_of_pass))


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, for transformers' AttentionInterface.

    query: (B, Hq, Nq, D); key: (B, Hkv, Nk, D); value: (B, Hkv, Nk, Dv). attention_mask: what `make_mask` made, a
    (B, Nk) bool or int with 0 for padding, or None. is_causal (of the module if None) and sliding_window: looked at
    where no Mask is given. softcap, dropout, s_aux or sinks (Hq,): as in `tilewise.attention`. indices: (B, Nq, n), the
    keys that each query may see beside what the mask says, as DeepSeek's sparse attention chooses them. cu_seq_lens_q,
    cu_seq_lens_k: sequences packed in one batch row.

    Returns (B, Nq, Hq, Dv) and None: attention weights are never formed. float32, bfloat16 and float16 are served.
    """
    checks.tensor("query", query, shape=("batch", "heads", "queries", "head_dim"))
    refuse_unserved(kwargs)
    if s_aux is not None and sinks is not None:
        raise ValueError("s_aux and sinks are two names of one argument, got both")
    if isinstance(attention_mask, TreeMask):
        q, k, v = as_autocast((query, key, value))
        sinks = s_aux if sinks is None else sinks
        return attend_tree(q, k, v, attention_mask, scaling, softcap, sinks, dropout), None
    mask = attention_mask
    if not isinstance(mask, Mask):
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = mask_of_flags(query, key, bool(causal), sliding_window, attention_mask)
    if (query.shape[0], query.shape[2], key.shape[2]) != (mask.batch, mask.queries, mask.kv_length):
        raise ValueError(
            f"attention_mask was made for {mask.batch} batch rows, {mask.queries} queries and {mask.kv_length} keys, "
            f"got query {tuple(query.shape)} and key {tuple(key.shape)}"
        )
    mask = with_given_sequences(mask, kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"))

    q, k, v = (x.transpose(1, 2) for x in as_autocast((query, key, value)))
    k, v = k[:, : mask.keys], v[:, : mask.keys]
    sinks = s_aux if sinks is None else sinks
    chosen = None if indices is None else chosen_keys(indices, mask)
    return _attend(q, k, v, mask, scaling, softcap or 0.0, sinks, dropout, chosen), None


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    scale: float | None,
    softcap: float,
    sinks: torch.Tensor | None,
    dropout: float,
    chosen: torch.Tensor | None,
) -> torch.Tensor:
    """The kernels: q (B, Nq, Hq, D), k (B, keys, Hkv, D), v (B, keys, Hkv, Dv) -> (B, Nq, Hq, Dv); rows of no
    sequence give 0.

    chosen: which keys each query may see, bool (sequences, queries of one, keys of one), or None for all.
    """
    options: dict[str, Any] = {
        "causal": mask.causal, "window": mask.window, "scale": scale, "softcap": softcap, "sinks": sinks,
        "dropout_p": dropout, "chunk": mask.chunk or None,
        "mask": None if chosen is None else lambda b, h, q, k: chosen[b, q, k],
    }  # fmt: skip
    ragged = mask.ragged
    if ragged is None:
        o = api.attention(q, k, v, **options)
    else:
        rows = ragged.rows_q, ragged.rows_k, ragged.rows_k
        q1, k1, v1 = (x.flatten(0, 1) if r is None else x[r] for x, r in zip((q, k, v), rows, strict=True))
        o = api.attention_varlen(q1, k1, v1, ragged.starts_q, ragged.starts_k, **options)
    assert isinstance(o, torch.Tensor)
    if ragged is None or ragged.rows_q is None:
        return o.view(*q.shape[:-1], v.shape[-1])
    padded = o.new_zeros((*q.shape[:-1], v.shape[-1]))
    padded[ragged.rows_q] = o
    return padded


def as_autocast(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors in autocast's dtype, where it is on: rotary embeddings leave q and k in float32, but not v."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return [x.to(torch.get_autocast_dtype(kind)) for x in tensors]


def refuse_unserved(kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            'output_attentions is not served: attention weights are never formed; use attn_implementation="eager"'
        )
    for name, meaning in UNSERVED.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name} ({meaning}) is not served; {INSTEAD}")
