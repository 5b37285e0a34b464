"""The peers Tilewise is timed against: found by import, never required. Torch's SDPA is always there.

Each maker returns runnable peers by name. Layouts are the public ones: q (B, Nq, H, D), k and v (B, Nk, Hkv, D), and
`causal` aligns bottom-right.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

Run = Callable[[torch.Tensor | None], torch.Tensor]

SDPA = "torch SDPA"
SDPA_MASK = "torch SDPA + mask"
SDPA_ROWS = "torch SDPA by rows"

# Name and the modules that may carry it, the first importable one wins.
CUDA_PEERS: dict[str, tuple[str, ...]] = {
    "FlashAttention-2": ("flash_attn",),
    "FlashAttention-3": ("flash_attn_interface", "fa3_fwd_interface"),
    "FlashInfer": ("flashinfer",),
}


def find(name: str) -> ModuleType | str:
    """The peer's module, or why there is none."""
    reasons = []
    for module in CUDA_PEERS[name]:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:  # it is installed and misses something itself
                reasons.append(f"{module} does not import: {error}")
        except Exception as error:  # a broken build can raise anything at import; it is the peer's problem
            reasons.append(f"{module} does not import: {error}")
    return "; ".join(reasons) or "not installed"


def torch_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None, causal: bool) -> Run:
    """`F.scaled_dot_product_attention` as its user would call it; `causal` only where its top-left rule is ours."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]

    def run(_: torch.Tensor | None) -> torch.Tensor:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return o.transpose(1, 2)

    return run


def torch_sdpa_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """SDPA for one query token with grouped heads: the heads of a group become the rows of one KV head.

    torch's own grouped path copies K and V out to every query head first; a careful user writes this.
    """
    batch, tokens, heads, head_dim = q.shape
    rows = q.view(batch, k.shape[2], heads // k.shape[2], head_dim)
    k, v = k.transpose(1, 2), v.transpose(1, 2)

    def run(_: torch.Tensor | None) -> torch.Tensor:
        return F.scaled_dot_product_attention(rows, k, v).reshape(batch, tokens, heads, head_dim)

    return run


def cuda_peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> tuple[dict[str, Run], str]:
    """The importable CUDA peers on dense q, k, v, and one line on those that are absent ("" when none is).

    On CPU tensors all of them are absent; a peer that is here and fails when called is the measuring loop's to report.
    """
    if q.device.type != "cuda":
        return {}, f"not measured: {', '.join(CUDA_PEERS)} (they take CUDA tensors, these are on the {q.device.type})"
    makers = {"FlashAttention-2": _flash_attention, "FlashAttention-3": _flash_attention, "FlashInfer": _flashinfer}
    runs: dict[str, Run] = {}
    absent = []
    for name, make in makers.items():
        module = find(name)
        if isinstance(module, str):
            absent.append(f"{name} ({module})")
        else:
            runs[name] = make(module, q, k, v, causal)
    return runs, f"not measured: {', '.join(absent)}" if absent else ""


def _flash_attention(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Run:
    def run(_: torch.Tensor | None) -> torch.Tensor:
        o = module.flash_attn_func(q, k, v, causal=causal)
        answer: torch.Tensor = o[0] if isinstance(o, tuple) else o  # version 3 has returned (o, lse) at times
        return answer

    return run


def _flashinfer(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Run:
    """Planned at the first call, outside the timed ones, as its users do once per step."""
    batch, nq, heads, head_dim = q.shape
    nk, kv_heads = k.shape[1], k.shape[2]
    planned: list[Any] = []

    def plan() -> Any:
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
        wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        wrapper.plan(starts * nq, starts * nk, heads, kv_heads, head_dim, causal=causal, q_data_type=q.dtype)
        return wrapper

    def run(_: torch.Tensor | None) -> torch.Tensor:
        if not planned:
            planned.append(plan())
        o: torch.Tensor = planned[0].run(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        return o.view(batch, nq, heads, head_dim)

    return run
