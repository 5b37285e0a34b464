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

from ..scores import Scores

FILE = "config.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class AttentionShape:
    """heads, kv_heads, head_dim: of every layer. dtype: that the weights are stored in. scores: one per kind of layer,
    causal: what is done to scores, and which keys a row sees."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scores: tuple[Scores, ...]


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
    head_dim = _whole(config, name, "head_dim", default=0)
    head_dim = head_dim or _whole(config, name, "hidden_size", "n_embd", "d_model") // heads
    if heads % kv_heads:
        raise ValueError(f"{name}: {heads} query heads are no multiple of {kv_heads} KV heads")
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if stored not in DTYPES:
        raise ValueError(f"{name}: dtype must be one of {', '.join(DTYPES)}, got {stored!r}")
    cap = float(config.get("attn_logit_softcapping") or 0.0)
    rules = [Scores((left, 0), head_dim**-0.5, cap, bool(config.get("alibi"))) for left in _windows(config)]
    return AttentionShape(name, heads, kv_heads, head_dim, DTYPES[stored], tuple(dict.fromkeys(rules)))


def _windows(config: Mapping[str, Any]) -> list[int | None]:
    """Keys that each kind of layer sees to the left, None for all."""
    size = config.get("sliding_window")
    if not size or config.get("use_sliding_window") is False:
        return [None]
    kinds = set(config.get("layer_types") or ("sliding_attention",))
    return [None] * ("full_attention" in kinds) + [int(size) - 1] * ("sliding_attention" in kinds) or [None]


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
