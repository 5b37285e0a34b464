"""The peers Tilewise is timed against: found by import, never required. Torch's SDPA is always there.

Each maker returns runnable peers by name. Layouts are the public ones: q (B, Nq, H, D), k and v (B, Nk, Hkv, D), or
packed (total, H, D) with the sequences' `lengths`. `causal` and `window`, the keys seen to the left, align
bottom-right.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.plan.schedule import BlockSchedule

Run = Callable[[torch.Tensor | None], torch.Tensor]
Ints = npt.NDArray[np.int32]

SDPA = "torch SDPA"
SDPA_MASK = "torch SDPA + mask"
SDPA_ROWS = "torch SDPA by rows"
SDPA_PADDED = "torch SDPA, padded"
CUDNN = "cuDNN"
CUDNN_PADDED = "cuDNN, padded"
FA2 = "torch FA2"
FA3 = "FlashAttention-3"
FLASHINFER = "FlashInfer"
FLASHINFER_CASCADE = "FlashInfer cascade"

# Name and the modules that may carry it, the first importable one wins.
CUDA_PEERS: dict[str, tuple[str, ...]] = {
    "FlashAttention-2": ("flash_attn",),
    FA3: ("flash_attn_interface", "fa3_fwd_interface"),
    FLASHINFER: ("flashinfer",),
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


def torch_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    backend: SDPBackend | None = None,
) -> Run:
    """`F.scaled_dot_product_attention` as its user would call it; `causal` only where its top-left rule is ours.

    torch chooses the backend itself unless one is named.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]

    def run(_: torch.Tensor | None) -> torch.Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return o.transpose(1, 2)

    return run


def torch_backends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> dict[str, Run]:
    """The kernels that a CUDA build of torch carries, each by its name; on CPU tensors there is nothing to choose."""
    if q.device.type != "cuda":
        return {}
    backends = {CUDNN: SDPBackend.CUDNN_ATTENTION, FA2: SDPBackend.FLASH_ATTENTION}
    return {name: torch_sdpa(q, k, v, mask=None, causal=causal, backend=b) for name, b in backends.items()}


def padded_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, lengths: Sequence[int]
) -> tuple[str, Run]:
    """What a user without ragged kernels does: packed sequences padded to the longest, for cuDNN where it is there.

    It answers (B, longest, H, D). Without `causal` the padding joins the softmax: the mask that keeps it out would only
    make this slower.
    """
    q, k, v = (pad(x, lengths) for x in (q, k, v))
    cuda = q.device.type == "cuda"
    run = torch_sdpa(q, k, v, mask=None, causal=causal, backend=SDPBackend.CUDNN_ATTENTION if cuda else None)
    return CUDNN_PADDED if cuda else SDPA_PADDED, run


def pad(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Packed sequences (total, H, D) as (B, longest, H, D), zeros behind the shorter ones."""
    padded: torch.Tensor = torch.nn.utils.rnn.pad_sequence(list(x.split(list(lengths))), batch_first=True)
    return padded


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


def cuda_peers(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    window: int = 0,
    lengths: Sequence[int] | None = None,
) -> tuple[dict[str, Run], str]:
    """The importable CUDA peers on q, k, v, and one line on those that are absent ("" when none is).

    Packed where `lengths` are given; a `window` of 0 is none. On CPU tensors all of them are absent; a peer that is
    here and fails when called is the measuring loop's to report.
    """
    if q.device.type != "cuda":
        return {}, f"not measured: {', '.join(CUDA_PEERS)} (they take CUDA tensors, these are on the {q.device.type})"
    makers = {"FlashAttention-2": _flash_attention, FA3: _flash_attention, FLASHINFER: _flashinfer}
    runs: dict[str, Run] = {}
    absent = []
    for name, make in makers.items():
        module = find(name)
        if isinstance(module, str):
            absent.append(f"{name} ({module})")
        else:
            runs[name] = make(module, q, k, v, causal, window, lengths)
    return runs, f"not measured: {', '.join(absent)}" if absent else ""


def starts_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where each packed sequence starts, int32, the total at the end."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _flash_attention(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int,
    lengths: Sequence[int] | None,
) -> Run:
    options: dict[str, Any] = {"causal": causal, **({"window_size": (window, 0)} if window else {})}
    name, ragged = "flash_attn_func", tuple[Any, ...]()
    if lengths is not None:
        starts, longest = starts_of(lengths, q.device), max(lengths)
        name, ragged = "flash_attn_varlen_func", (starts, starts, longest, longest)

    def run(_: torch.Tensor | None) -> torch.Tensor:
        o = getattr(module, name)(q, k, v, *ragged, **options)
        answer: torch.Tensor = o[0] if isinstance(o, tuple) else o  # version 3 has returned (o, lse) at times
        return answer

    return run


def _flashinfer(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int,
    lengths: Sequence[int] | None,
) -> Run:
    """Planned at the first call, outside the timed ones, as its users do once per step."""
    heads, head_dim = q.shape[-2:]
    kv_heads = k.shape[-2]
    options: dict[str, Any] = {"causal": causal, "q_data_type": q.dtype, **({"window_left": window} if window else {})}
    lengths_q, lengths_k = (lengths or [x.shape[1]] * x.shape[0] for x in (q, k))
    rows, keys, values = (x if lengths else x.flatten(0, 1) for x in (q, k, v))
    planned: list[Any] = []

    def plan() -> Any:
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
        wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        starts = (starts_of(x, q.device) for x in (lengths_q, lengths_k))
        wrapper.plan(*starts, heads, kv_heads, head_dim, **options)
        return wrapper

    def run(_: torch.Tensor | None) -> torch.Tensor:
        if not planned:
            planned.append(plan())
        o: torch.Tensor = planned[0].run(rows, keys, values)
        return o.view(q.shape)

    return run


def flashinfer_blocks(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, schedule: BlockSchedule) -> Run:
    """Its block-sparse attention, q, k and v (1, N, H, D): one pattern for all heads, planned at the first call."""

    def plan(workspace: torch.Tensor) -> Any:
        wrapper = module.BlockSparseAttentionWrapper(workspace)
        rows = [torch.tensor(x, dtype=torch.int32, device=q.device) for x in (schedule.indptr, schedule.indices)]
        sizes = (schedule.seqlen_q, schedule.seqlen_k, schedule.block_q, schedule.block_k)
        wrapper.plan(*rows, *sizes, q.shape[2], k.shape[2], q.shape[3], q_data_type=q.dtype)
        return wrapper

    return _planned_run(plan, q, (k[0], v[0]), apart=True)


# ---- FlashInfer over pages, from its documentation --------------------------------------------------------------


def flashinfer_decode(
    module: Any, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, table: Ints, last: int
) -> Run:
    """Batch decode, each sequence over all its pages.

    q: (B, 1, H, D); k_pages, v_pages: (pages, page size, Hkv, D); table: (B, pages of each); last: tokens in the last
    page of each.
    """

    def plan(workspace: torch.Tensor) -> Any:
        # With groups of query heads its users turn the tensor cores on.
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*_paged_arrays(table, last, q.device), *_paged_sizes(q, k_pages), **_paged_types(q, k_pages))
        return wrapper

    return _planned_run(plan, q, (k_pages, v_pages))


def flashinfer_cascade(
    module: Any,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    levels: Sequence[Ints],
    last: Sequence[int],
) -> Run:
    """Its cascade: level by level (nodes, pages of each), the rows of a node's sequences together; states merged."""

    def plan(workspace: torch.Tensor) -> Any:
        wrapper = module.MultiLevelCascadeAttentionWrapper(len(levels), workspace, "NHD")
        rows_at = [starts_of([len(q) // len(nodes)] * len(nodes), q.device) for nodes in levels]
        arrays = zip(*(_paged_arrays(*level, q.device) for level in zip(levels, last, strict=True)), strict=True)
        wrapper.plan(rows_at, *map(list, arrays), *_paged_sizes(q, k_pages), **_paged_types(q, k_pages))
        return wrapper

    return _planned_run(plan, q, (k_pages, v_pages))


def _planned_run(
    plan: Callable[[torch.Tensor], Any], q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], *, apart: bool = False
) -> Run:
    """Planned at the first call, outside the timed ones; 128 MB, its usual workspace, is little for many sequences.

    apart: K and V are two arguments and not a pair.
    """
    planned: list[Any] = []

    def run(_: torch.Tensor | None) -> torch.Tensor:
        if not planned:
            planned.append(plan(torch.empty(512 << 20, dtype=torch.uint8, device=q.device)))
        o: torch.Tensor = planned[0].run(q.flatten(0, 1), *(kv if apart else (kv,)))
        return o.view(q.shape)

    return run


def _paged_arrays(table: Ints, last: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each row's pages start, the pages, and the tokens in the last page of each, all int32."""
    lengths = torch.full((len(table),), last, dtype=torch.int32, device=device)
    pages = torch.from_numpy(table.reshape(-1)).to(device)
    return starts_of([table.shape[1]] * len(table), device), pages, lengths


def _paged_sizes(q: torch.Tensor, k_pages: torch.Tensor) -> tuple[int, int, int, int]:
    """Query heads, KV heads, head dimension, page size."""
    return q.shape[2], k_pages.shape[2], q.shape[3], k_pages.shape[1]


def _paged_types(q: torch.Tensor, k_pages: torch.Tensor) -> dict[str, torch.dtype]:
    return {"q_data_type": q.dtype, "kv_data_type": k_pages.dtype}
