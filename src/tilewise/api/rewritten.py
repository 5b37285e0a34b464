"""Arguments that become others before a call is made: `qv` a part of q and k, `chunk` packed sequences or a mask.

A second query beside the values is one longer dot product, (q | qv) · (k | v) = q · k + qv · v, so nothing below has to
know it: autograd takes the gradients through the concatenation. Blocks of positions are a choice of tiles where a plan
is cut for them (plan/dense.py, on the CPU). For kernels the blocks of dense tensors are packed sequences: queries and
keys of a block end together, so that bottom-right means the same. Beside a schedule, a function or dropout, which count
places in the whole sequence, and where packed sequences are given, they are one more condition of the mask, whose
blocks are judged and left out as those of every mask are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from tilewise import arguments, checks
from tilewise.api.options import Mask
from tilewise.gpu.abi import FP8

Joined = tuple[torch.Tensor, torch.Tensor]


def with_qv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: Any, packed: bool = False, paged: bool = False
) -> Joined:
    """q (…, Hq, D + Dv) and k (…, Hkv, D + Dv) with qv (…, Hq, Dv) and v (…, Hkv, Dv) behind them.

    packed, paged: q, or k and v, are so.
    """
    if isinstance(q, torch.Tensor) and q.dtype == FP8:
        raise NotImplementedError("qv goes with no FP8 inputs, whose v has a scale of its own; use bfloat16 inputs")
    sizes = arguments.check_qkv(q, k, v, packed=packed, paged=paged)
    shape = (*q.shape[:-1], sizes.value_dim)
    checks.tensor("qv", qv, shape=shape, dtypes=(q.dtype,), device=q.device, like="q")
    checks.head_dim("head_dim of q and qv together", sizes.head_dim + sizes.value_dim)
    return torch.cat((q, qv), -1), torch.cat((k, v), -1)


def out_of_pages(
    k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, starts_k: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of pages k and v (pages, page_size, Hkv, D or Dv) packed end to end, with gradients to the pages."""
    places = arguments.places_in_pages(page_table, starts_k, k.shape[1])
    return k.flatten(0, 1)[places], v.flatten(0, 1)[places]


def chunked(
    q: Any, k: Any, chunk: Any, mask: Mask | None, schedule: Any, backend: Any, starts: tuple[Any, Any] | None = None
) -> tuple[int | None, Mask | None]:
    """The chunk and the mask of a call, of which the one has become part of the other where plans do not cut by it.

    q and k dense, or packed with their starts; what is wrong about those is left to the call's own checks.
    """
    chunk = arguments.check_chunk(chunk)
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor):
        return chunk, mask
    if on_cpu(q, backend) and mask is None and schedule is None:
        return chunk, None
    if starts is None:
        return (None, _of_dense(mask, chunk, k.shape[1] - q.shape[1])) if q.dim() == k.dim() == 4 else (chunk, mask)
    if not all(isinstance(x, torch.Tensor) and x.dim() == 1 and len(x) for x in starts) or len({*map(len, starts)}) > 1:
        return chunk, mask
    shifts = (starts[1].diff().to(q.device) - starts[0].diff().to(q.device)).int()
    return None, _of_packed(mask, chunk, shifts)


def packs(q: Any, k: Any, v: Any, backend: Any, others: tuple[Any, ...], tensors: tuple[Any, ...]) -> bool:
    """Can the blocks of a dense call be packed sequences without a copy?

    others: what counts places in the whole sequence, or belongs to one, if given. tensors: `out` and those that may be
    there once per sequence, or None.
    """
    dense = [q, k, v, *(x for x in tensors[:1] if x is not None)]
    if any(x is not None for x in others) or any(isinstance(x, torch.Tensor) and x.dim() != 1 for x in tensors[1:]):
        return False
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 and x.numel() for x in dense) or on_cpu(q, backend):
        return False
    return backend in arguments.BACKENDS and all(len(x) == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in dense)


@lru_cache(maxsize=64)
def packed_starts(
    batch: int, seqlen_q: int, seqlen_k: int, chunk: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the queries and the keys of each block start, int32 on the device, which is sent them once."""
    shift = seqlen_k - seqlen_q
    ends_q, ends_k = ([0], [0]) if shift >= 0 else ([0, -shift], [0, 0])  # rows before key 0 see nothing
    for key in range(0, seqlen_k, chunk):
        ends_k.append(min(key + chunk, seqlen_k))
        ends_q.append(max(0, ends_k[-1] - shift))
    with torch.inference_mode(False):  # they are kept: a later backward pass must be able to save them
        whole = torch.arange(batch, dtype=torch.int32)[:, None]
        of_q, of_k = (
            torch.cat([(torch.tensor(ends[:-1], dtype=torch.int32) + whole * n).flatten(), whole[-1] * n + n])
            for ends, n in ((ends_q, seqlen_q), (ends_k, seqlen_k))
        )
        return of_q.to(device), of_k.to(device)


def on_cpu(q: torch.Tensor, backend: Any) -> bool:
    """Does a call run on the CPU backend? What is wrong about the backend is left to the checks."""
    return q.device.type == "cpu" and backend in ("auto", "cpu")


def _of_dense(mask: Mask | None, chunk: int, shift: int) -> Mask:
    """The mask, and that key and query are in one block; query q stands at key q + shift."""
    if mask is None:
        return lambda b, h, q, k: (q + shift) // chunk == k // chunk
    return lambda b, h, q, k: mask(b, h, q, k) & ((q + shift) // chunk == k // chunk)


def _of_packed(mask: Mask | None, chunk: int, shifts: torch.Tensor) -> Mask:
    """The same of packed sequences, shifts (B,) int32."""
    if mask is None:
        return lambda b, h, q, k: (q + shifts[b]) // chunk == k // chunk
    return lambda b, h, q, k: mask(b, h, q, k) & ((q + shifts[b]) // chunk == k // chunk)
