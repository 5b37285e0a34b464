"""How large a cache is: what the memory affords, what prompts need, and what a card's kernels can read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from tilewise import checks
from tilewise.formats import LATENT_FORMATS, PLAIN
from tilewise.gpu import decode_kernels as decoding

from ..kvcache import FORMATS, KVFormat
from ..kvcache.index_keys import index_bytes
from .requests import Tokens

if TYPE_CHECKING:
    from .hf import ModelShape

# What a card's kernels read as latent rows, by the dtype of the queries: gpu/mla.py, check_served.
LATENT_ROWS = {torch.bfloat16: ("bf16", *LATENT_FORMATS), torch.float16: ("fp16",)}


def format_of(shape: ModelShape, kv_format: str | None) -> str:
    """The format asked for, or that of the model's dtype."""
    if kv_format is None:
        kv_format = next((name for name, dtype in PLAIN.items() if dtype == shape.dtype), "bf16")
    return str(checks.choice("kv_format", kv_format, FORMATS))


def affordable_pages(shape: ModelShape, kv_format: str | None, page_size: int, memory: int | None) -> int:
    """How many pages `memory` bytes hold, or the share of the free memory that a cache takes unless told."""
    checks.integer("page_size", page_size, 1, 256)
    if memory is None and shape.device.type == "cuda":
        memory = torch.cuda.mem_get_info(shape.device)[0] * 4 // 5
    elif memory is None:
        memory = _free_memory() // 2
    name = format_of(shape, kv_format)
    form = KVFormat(name, shape.head_dim, latent=shape.value_dim if shape.shared_kv and name in LATENT_FORMATS else 0)
    page = (1 if shape.shared_kv else 2) * page_size * shape.layers * shape.kv_heads * form.bytes_per_token_head
    if shape.indexers is not None:
        page += page_size * index_bytes(len(shape.indexers.layers), shape.indexers.dim, form)
    if checks.integer("memory", memory, 1) < page:
        raise ValueError(f"memory must hold at least one page of {page} bytes, got {memory}")
    return memory // page


def _free_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not every system tells
        return 4 << 30


def pages_needed(prompts: Sequence[Tokens], page_size: int, max_new_tokens: int, num_samples: int) -> int:
    """Pages that all prompts with their samples take at once, pages of common beginnings counted once."""
    checks.integer("max_new_tokens", max_new_tokens, 1)
    checks.integer("num_samples", num_samples, 1)
    pages, before = 1, np.empty(0, np.int64)
    # As bytes, big end first, tokens sort so that the longest common beginnings stand next to each other.
    for prompt in sorted(prompts, key=lambda tokens: tokens.astype(">i8").tobytes()):
        least = min(len(before), len(prompt))
        differ = np.flatnonzero(before[:least] != prompt[:least])
        common = int(differ[0]) if len(differ) else least
        own = -(-(len(prompt) + max_new_tokens) // page_size) - min(common, len(prompt) - 1) // page_size
        # Each further sample copies the page in which the prompt ends.
        pages += own + 1 + (num_samples - 1) * (-(-(max_new_tokens + page_size) // page_size))
        before = prompt
    return pages


def check_served(shape: ModelShape, kv_format: str, page_size: int) -> None:
    """NotImplementedError for what no kernel of a card serves, before anything is computed."""
    if shape.device.type != "cuda":
        return
    unfit = kv_format == "bf16" and shape.dtype != torch.bfloat16
    unfit = unfit or (kv_format != "fp32" and shape.dtype == torch.float32)
    if shape.dtype not in decoding.DTYPES or unfit:
        raise NotImplementedError(
            "on a card models in bfloat16, float16 and float32 are served, a bf16 cache for bfloat16 alone, float32 "
            f"over an fp32 cache alone, got {shape.dtype} with {kv_format}; convert the model, or move it to the CPU"
        )
    if kv_format not in decoding.FORMATS:
        raise NotImplementedError(f"on a card kv_format {tuple(decoding.FORMATS)} is served, got {kv_format!r}")
    if shape.shared_kv and kv_format not in LATENT_ROWS.get(shape.dtype, ()):
        raise NotImplementedError(
            "on a card latent rows are bf16, fp8 or int8 of a model in bfloat16, and fp16 of one in float16, got "
            f"{shape.dtype} with kv_format {kv_format!r}"
        )
    if shape.head_dim not in decoding.HEAD_DIMS and not shape.shared_kv:
        raise NotImplementedError(
            f"on a card head_dim {decoding.HEAD_DIMS} is served, got {shape.head_dim}; move the model to the CPU"
        )
    if page_size % 16:
        raise NotImplementedError(f"on a card pages of a multiple of 16 tokens are served, got page_size {page_size}")
