"""What a model's configuration says about its attention: transformers' names, read with or without transformers.

A configuration is a `config.json`, a folder that has one, or the name of a model that transformers knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..scores import Reach, Scores

FILE = "config.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class AttentionShape:
    """heads, kv_heads, head_dim: of every layer. dtype: that the weights are stored in. scores: one per kind of layer,
    causal: what is done to scores, and which keys a row sees. value_dim: of V, 0 for head_dim. latent: of models of
    latent attention, the channels of a row that stands for all heads, and how many of them are values. indexed: the
    heads of an indexer that chooses the rows which a query reads, and their channels."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scores: tuple[Scores, ...]
    value_dim: int = 0
    latent: tuple[int, int] | None = None
    indexed: tuple[int, int] | None = None


def read_config(source: str) -> AttentionShape:
    """The attention of a model: FileNotFoundError or ImportError if its configuration cannot be had, ValueError if that
    does not tell what is needed."""
    path = Path(source).expanduser()
    if path.is_dir():
        path /= FILE
    if path.suffix == ".json" or path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from error
        return attention_shape(config, str(path))
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ImportError(
            f"{source} is no file; for the name of a model, pip install 'tilewise[transformers]'"
        ) from error
    return attention_shape(AutoConfig.from_pretrained(source).to_dict(), source)


def attention_shape(config: Any, name: str) -> AttentionShape:
    """The same of a configuration as a mapping; of a model for text and more, its text part's."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{name} is no model's configuration: a mapping was expected, got {type(config).__name__}")
    config = {**config, **(config.get("text_config") or {})}
    heads = _whole(config, name, "num_attention_heads", "n_head", "num_heads")
    kv_heads = _whole(config, name, "num_key_value_heads", "n_head_kv", default=heads)
    value_dim, latent = 0, None
    if config.get("kv_lora_rank") is not None:
        rank, rope = (_whole(config, name, size) for size in ("kv_lora_rank", "qk_rope_head_dim"))
        head_dim, value_dim = _whole(config, name, "qk_nope_head_dim") + rope, _whole(config, name, "v_head_dim")
        kv_heads, latent = heads, (rank + rope, rank)
    else:
        head_dim = _whole(config, name, "head_dim", default=0)
        head_dim = head_dim or _whole(config, name, "hidden_size", "n_embd", "d_model") // heads
    if heads % kv_heads:
        raise ValueError(f"{name}: {heads} query heads are no multiple of {kv_heads} KV heads")
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if stored not in DTYPES:
        raise ValueError(f"{name}: dtype must be one of {', '.join(DTYPES)}, got {stored!r}")
    cap = float(config.get("attn_logit_softcapping") or 0.0)
    rules = [
        Scores((left, 0), head_dim**-0.5, cap, bool(config.get("alibi")), chunk=chunk)
        for left, chunk in _reaches(config)
    ]
    rules = list(dict.fromkeys(rules))
    indexed = None
    if config.get("index_topk") is not None:
        indexed = _whole(config, name, "index_n_heads"), _whole(config, name, "index_head_dim")
    return AttentionShape(name, heads, kv_heads, head_dim, DTYPES[stored], tuple(rules), value_dim, latent, indexed)


def _reaches(config: Mapping[str, Any]) -> list[Reach]:
    """How far back each kind of layer sees."""
    size, chunk = config.get("sliding_window"), config.get("attention_chunk_size")
    if config.get("use_sliding_window") is False:
        size = None
    kinds = config.get("layer_types") or (["sliding_attention"] if size else ["full_attention", "chunked_attention"])
    found = [Reach()] if "full_attention" in kinds else []
    if size and "sliding_attention" in kinds:
        found.append(Reach(int(size) - 1))
    if chunk and "chunked_attention" in kinds:
        found.append(Reach(chunk=int(chunk)))
    return found or [Reach()]


def _whole(config: Mapping[str, Any], where: str, *names: str, default: int | None = None) -> int:
    """The first of these that the configuration has."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{where}: {name} must be a whole number, 1 or more, got {value!r}")
            return value
    if default is None:
        raise ValueError(f"{where} has no {' or '.join(names)}: is it a model's configuration?")
    return default
