"""Transformers models as the engine runs them: what their configuration says, their forward pass, their attention.

Alone in importing transformers. A model's attention goes through a function registered there under a name of its own,
which hands queries, keys and values of each layer to the step (steps.py) that came along with the forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from ..integrations.transformers import as_autocast, refuse_unserved
from ..scores import DecodeOptions, Reach
from . import indexed, latent
from .compiled import Heads, Segments, compiled_calls, fits
from .steps import Step

# Registered for attention alone: for a name that has no mask function, transformers makes no mask, and so does not look
# at position ids on the host to make one, which a graph capture would not survive.
NAME = "tilewise_serving"
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", *indexed.LAYER_TYPES)
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

# Forward passes under way, by the id of what is different during them: how many, and what it was before them.
MISSING = object()
_lock = threading.Lock()
_under_way: dict[int, tuple[int, Any]] = {}


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    tilewise_step: Step | None = None,
    tilewise_shape: ModelShape | None = None,
    tilewise_positions: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over packed tokens: query (1, Hq, T, D), key (1, Hkv, T, D), value (1, Hkv, T, Dv) ->
    (1, T, Hq, Dv). A layer with fewer KV heads or channels than the cache has room for is widened to it."""
    if tilewise_step is None:
        raise RuntimeError(f'attention implementation "{NAME}" serves tilewise.Engine alone; set another for this call')
    lists = isinstance(tilewise_step, indexed.STEPS)
    if attention_mask is not None and not lists:
        raise NotImplementedError(
            f"{type(module).__name__} brings an attention mask of its own; tilewise.generate serves causal attention "
            "with or without a sliding window or chunks of positions; use model.generate"
        )
    refuse_unserved(kwargs if lists else {**kwargs, "indices": indices})
    assert tilewise_shape is not None  # they come along with the step
    assert tilewise_positions is not None
    layer: int = module.layer_idx  # type: ignore[assignment]
    chunk = tilewise_shape.chunk if _is_chunked(module, layer) else 0
    reach = Reach(None if sliding_window is None else sliding_window - 1, chunk)
    query = _tempered(module, query, tilewise_positions)
    q, k, v = (x[0].transpose(0, 1) for x in as_autocast((query, key, value)))
    heads, head_dim, value_dim = tilewise_shape.kv_heads, tilewise_shape.head_dim, v.shape[-1]
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    if tilewise_shape.shared_kv:
        options: DecodeOptions = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
        attend = partial(tilewise_step.attend, layer, reach=reach, **options)
        return latent.attend(module, q, k, partial(attend, indices=indices) if lists else attend)[None], None
    q, k, v = _widened(q, q.shape[1], head_dim), _widened(k, heads, head_dim), _widened(v, heads, head_dim)
    o = tilewise_step.attend(layer, q, k, v, reach=reach, scale=scaling, softcap=softcap or 0.0, sinks=s_aux)
    return o[None, ..., :value_dim], None


def _widened(x: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """x (T, H, D) as (T, heads, head_dim): each head as often as it must be, zeros in further channels, which change no
    score and no value. What fits into no such shape stays as it is, for the step to refuse."""
    _, given, channels = x.shape
    if given != heads and heads % given == 0:
        x = x.repeat_interleave(heads // given, 1)
    return F.pad(x, (0, head_dim - channels)) if channels < head_dim else x


def _is_chunked(module: Any, layer: int) -> bool:
    """Does the layer keep attention inside blocks of positions?"""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    return layer < len(kinds) and kinds[layer] == "chunked_attention"


def _scales_queries(module: Any) -> bool:
    """Llama 4's layers without rotary embedding scale queries by where they stand among the tokens of a pass, as if
    these were one sequence. `_tempered` does it in their place."""
    config = getattr(module, "config", None)
    tuned = hasattr(module, "attn_temperature_tuning") and getattr(config, "attn_temperature_tuning", False)
    return bool(tuned) and not getattr(module, "use_rope", True)


def _tempered(module: Any, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The queries (1, Hq, T, D) of such a layer, scaled by their positions (T,) in their own sequences."""
    if not _scales_queries(module):
        return query
    floors = torch.floor((positions.float() + 1.0) / module.floor_scale)
    scales = torch.log1p(floors) * module.attn_scale + 1.0
    tempered: torch.Tensor = (query * scales[:, None]).to(query.dtype)
    return tempered


AttentionInterface.register(NAME, torch.compiler.disable(attention))  # a step is no part of a compiled graph


@dataclass(frozen=True)
class ModelShape:
    """What the engine has to know of a model; `end_tokens` are those that end a sequence, by its own settings.

    kv_heads, head_dim: that the cache has room for, the most of any layer. positions: how long a sequence may be.
    shared_kv: the cache has latent rows (latent.py). value_dim: channels of a value, 0 for head_dim. chunk: of
    layers of chunked attention, positions of a block that tokens do not see out of; 0 if there are none. indexers: what
    chooses the keys of a query (indexed.py), if anything does.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    end_tokens: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value_dim: int = 0
    shared_kv: bool = False
    chunk: int = 0
    indexers: indexed.Indexers | None = None


class ServedModel:
    """A causal language model of transformers, which stays as it is: only during forward() does its attention differ.

    Engines on several threads may share it: its own attention is back when the last of their passes is over. Other
    calls of the model meanwhile raise. compile: see compiled.py.

    Raises TypeError for anything else, NotImplementedError for one whose attention is not of the kinds that decode()
    serves.
    """

    def __init__(self, model: PreTrainedModel, *, compile: bool = False) -> None:
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"model must be a causal language model of transformers, got {type(model).__name__}")
        self.model: Any = model
        configs = {id(c): c for c in (model.config, model.config.get_text_config())}.values()
        self._swapped: list[tuple[Any, str, Any]] = [(c, "_attn_implementation_internal", NAME) for c in configs]
        self._check_served()
        layers = latent.layers_of(model)
        indexers = indexed.modules_of(model, layers)
        shape = self.shape = self._read_shape(layers, indexed.sizes_of(indexers))
        self._swapped += [(layer, "expand_kv", latent.unexpanded) for layer in layers] + indexed.swapped(indexers)
        self._swapped += [(m, "attn_temperature_tuning", False) for m in model.modules() if _scales_queries(m)]
        self._segments: Segments | None = None
        heads = Heads(shape.heads, shape.kv_heads, shape.head_dim)
        if compile and fits(model, heads):
            self._segments = Segments(model, heads, shape.positions)
        elif compile:
            self._swapped += [(layer, "_compiled_call_impl", call) for layer, call in compiled_calls(model)]

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, step: Step, keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits (T, vocab) after each of the packed `tokens` (T,) at `positions` (T,), or (len(keep), vocab)."""
        if self._segments is not None:
            with torch.no_grad():
                return self._segments.forward(tokens, step, keep)
        more: dict[str, Any] = {}
        if isinstance(step, indexed.STEPS):  # its layers cut a mask for their indexers, which have another one
            more = {"past_key_values": indexed.Past(step), "attention_mask": tokens.new_zeros((1, 1, 1, 1))}
        with self._own_attention(), torch.no_grad():
            logits: torch.Tensor = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
                tilewise_step=step,
                tilewise_shape=self.shape,
                tilewise_positions=positions,
                **more,
            ).logits
        return logits[0]

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """Tilewise's attention for the time of a forward pass, set behind the property, which walks all sub-configs."""
        with _lock:
            for owner, name, value in self._swapped:
                passes, before = _under_way.get(id(owner), (0, vars(owner).get(name, MISSING)))
                _under_way[id(owner)] = passes + 1, before
                setattr(owner, name, value)
        try:
            yield
        finally:
            with _lock:
                for owner, name, _ in self._swapped:
                    passes, before = _under_way.pop(id(owner))
                    if passes > 1:
                        _under_way[id(owner)] = passes - 1, before
                    elif before is MISSING:
                        delattr(owner, name)  # its class's is back
                    else:
                        setattr(owner, name, before)

    def _check_served(self) -> None:
        model, config = self.model, self.model.config.get_text_config()
        name = type(model).__name__
        instead = "use model.generate"
        if model.config.is_encoder_decoder or not model.can_generate():
            raise NotImplementedError(f"{name} is no decoder-only language model, which is what is served; {instead}")
        if not model._can_set_attn_implementation():
            raise NotImplementedError(f"{name} has attention that cannot be replaced by transformers' means; {instead}")
        if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
            raise NotImplementedError(f"{name} attends in both directions; causal attention is served; {instead}")
        kinds = set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES)
        if kinds:
            raise NotImplementedError(
                f"{name} has layers of {', '.join(sorted(kinds))}; {', '.join(LAYER_TYPES)} are served; {instead}"
            )
        rope = getattr(config, "rope_parameters", None) or {}
        nested = [rope, *(one for one in rope.values() if isinstance(one, dict))]
        changing = {one.get("rope_type") for one in nested} & set(LENGTH_DEPENDENT_ROPE)
        if changing:
            raise NotImplementedError(
                f"{name} has rotary embeddings of type {changing.pop()}, which change with the longest sequence of a "
                f"batch, so that cached keys could not be shared; {instead}"
            )
        if model.training:
            raise ValueError("model is in training mode, with dropout; call model.eval() first")
        places = set((getattr(model, "hf_device_map", None) or {}).values())
        if len(places) > 1:
            raise NotImplementedError(f"model lies on {len(places)} devices; one is served; {instead}")

    def _read_shape(self, latent_layers: Sequence[Any], indexers: indexed.Indexers | None) -> ModelShape:
        """latent_layers: those whose keys and values are kept as latent rows: all of the model's, or none."""
        model, config = self.model, self.model.config.get_text_config()
        heads, kinds = config.num_attention_heads, getattr(config, "layer_types", None) or ()
        kv_heads, head_dim, value_dim = *_widest(config), 0
        if latent_layers:
            kv_heads, head_dim, value_dim = 1, config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank
        settings = model.generation_config.eos_token_id if model.generation_config is not None else config.eos_token_id
        ends = settings if isinstance(settings, (list, tuple)) else [settings]
        return ModelShape(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=config.vocab_size,
            positions=getattr(config, "max_position_embeddings", None) or 2**31,
            end_tokens=tuple(int(end) for end in ends if end is not None),
            dtype=model.dtype,
            device=model.device,
            value_dim=value_dim,
            shared_kv=bool(latent_layers),
            chunk=config.attention_chunk_size if "chunked_attention" in kinds else 0,
            indexers=indexers,
        )


def _widest(config: Any) -> tuple[int, int]:
    """The most KV heads, and the most channels of a head, that a layer has."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # multi-head latent attention, as its layers hand it over
        return heads, max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    layers = getattr(config, "per_layer_config", None)
    configs = [config] if layers is None else [layers[n] for n in range(config.num_hidden_layers)]
    kv_heads = max(getattr(c, "num_key_value_heads", None) or heads for c in configs)
    return kv_heads, max(getattr(c, "head_dim", None) or config.hidden_size // heads for c in configs)
