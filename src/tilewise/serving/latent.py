"""Models of multi-head latent attention served over a cache of latent rows, in the absorbed form (docs/guides/mla.md).

Such a layer makes keys and values of every head from a latent vector of each token: expand_kv(latent, rotary key).
While the engine runs it, its expand_kv leaves both as they are, one row, which is what the cache keeps. The matrix that
would have made keys of it multiplies the queries instead, the one that would have made values multiplies the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewise import checks

KERNEL = (576, 512)  # the row and its values that models are served with on a card
SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_b_proj", "layer_idx")

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def layers_of(model: Any) -> list[Any]:
    """The layers that the absorbed form serves: all of the model's, or none."""
    config = model.config.get_text_config()
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "expand_kv")]
    if len(layers) != config.num_hidden_layers or not all(map(_absorbable, layers)):
        return []
    row = config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank
    return layers if _served(row, model.dtype, model.device) else []


def _served(row: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Is there a kernel for such rows and their values? Other models are served keys and values of every head, which
    all cards have kernels for."""
    if device.type != "cuda":
        return row[0] <= checks.MAX_HEAD_DIM
    return row == KERNEL and dtype in (torch.bfloat16, torch.float16)


def unexpanded(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In expand_kv's place: latent (B, 1, T, L) and rotary (B, 1, T, R) as rows (B, 1, T, L + R), and their values."""
    return torch.cat((latent, rotary), -1), latent


def attend(layer: Any, q: torch.Tensor, rows: torch.Tensor, attention: Attend) -> torch.Tensor:
    """q (T, Hq, nope + R) over rows (T, 1, L + R) by `attention` of queries, keys and values -> (T, Hq, Dv)."""
    to_keys, to_values = _matrices(layer, q.dtype)
    q_latent = (q[..., : layer.qk_nope_head_dim].transpose(0, 1) @ to_keys).transpose(0, 1)
    q = torch.cat((q_latent, q[..., layer.qk_nope_head_dim :]), -1)
    o = attention(q, rows, rows[..., : layer.kv_lora_rank])
    return (o.transpose(0, 1) @ to_values.mT).transpose(0, 1)


def _matrices(layer: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What makes keys, (heads, nope, L), and values, (heads, Dv, L), of a latent vector."""
    width = layer.qk_nope_head_dim + layer.v_head_dim
    both = layer.kv_b_proj.weight.to(dtype).view(-1, width, layer.kv_lora_rank)
    return both[:, : layer.qk_nope_head_dim], both[:, layer.qk_nope_head_dim :]


@torch.no_grad()
def _absorbable(layer: Any) -> bool:
    """Are its keys and values what `_matrices` makes of a latent vector? That is tried: models differ in their ways."""
    if not all(hasattr(layer, name) for name in SIZES) or type(layer.kv_b_proj) is not torch.nn.Linear:
        return False
    weight = layer.kv_b_proj.weight
    if not weight.is_floating_point() or weight.is_meta or layer.kv_b_proj.bias is not None:
        return False
    latent = torch.linspace(-1, 1, 2 * layer.kv_lora_rank, device=weight.device, dtype=weight.dtype)
    rotary = torch.linspace(2, 3, 2 * layer.qk_rope_head_dim, device=weight.device, dtype=weight.dtype)
    latent, rotary = latent.view(1, 1, 2, -1), rotary.view(1, 1, 2, -1)
    k, v = layer.expand_kv(latent, rotary)
    to_keys, to_values = _matrices(layer, weight.dtype)
    expected = latent @ to_keys.mT, latent @ to_values.mT
    if k.shape[:-1] != expected[0].shape[:-1] or v.shape != expected[1].shape:
        return False
    expected = torch.cat((expected[0], rotary.expand(1, k.shape[1], 2, -1)), -1), expected[1]
    within = 16 * torch.finfo(weight.dtype).eps
    return all(
        x.shape == y.shape and bool((x - y).abs().max() <= within * y.abs().max())
        for x, y in zip((k, v), expected, strict=True)
    )
