"""Compiled graphs that torch keeps on disk, from process to process, and our operators in them.

Torch finds a kept graph by what it computes, and an operator counts by its name. A graph of an earlier Tilewise, whose
operator of that name took other arguments, would be found and fail. So the operators' schemas become part of the key.
"""

from __future__ import annotations

import hashlib

import torch
import torch.compiler.config as config

OPERATORS = (
    *("attention", "attention_seen_keys", "attention_varlen", "shared_prefix_attention", "decode", "attend"),
    *("attention_backward", "attention_seen_keys_backward", "attention_varlen_backward"),
    "shared_prefix_attention_backward",
)


def tag() -> str:
    """Of the operators as they are registered."""
    schemas = [str(getattr(torch.ops.tilewise, name).default._schema) for name in OPERATORS]
    return f"tilewise-{hashlib.sha256(chr(10).join(schemas).encode()).hexdigest()[:16]}"


def mark() -> None:
    """Make the tag part of the key of every graph that torch keeps from now on, beside a tag that the user has set."""
    if tag() not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {tag()}".strip()
