"""Writing tokens into pages, kernels/common/append.cu, and copying pages, copy_pages.cu: arguments and launches.

Both run on the card of their tensors, or in the emulator over CPU tensors. They validate nothing: kvcache has done so.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tilewise import compiler, emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.formats import FORMATS, LATENT_FORMATS, KVFormat
from tilewise.gpu.abi import ELEMENTS, AppendArgs, CopyArgs, Source, Store

if TYPE_CHECKING:
    from tilewise.kvcache import Rotary

THREADS = 256  # append.cu, copy_pages.cu: kThreads
CHANNELS = 8  # append.cu: of a chunk
VECTOR_TABLE, VECTOR_STORE = 8, 16  # append.cu
MAX_COPIES = 65535  # the grid's z
CODES = {"fp8": (1, 448.0), "int8": (2, 127.0), "int4": (3, 15.0)}  # kFormat, kTop
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@lru_cache(maxsize=256)
def append_spec(
    dtype: torch.dtype, form: KVFormat, rotary: int = 0, table: torch.dtype = torch.float32, value_dim: int = 0
) -> KernelSpec:
    """The kernel for k and v of `dtype`, stored as `form`.

    rotary: 0 none, 1 half-split, 2 interleaved; table: the dtype of its cosines and sines. value_dim: of v; 0 where it
    is no larger than k's.
    """
    chunks = -(-max(form.head_dim, value_dim) // CHANNELS)
    lanes = min(32, max(4, 1 << (chunks - 1).bit_length()))
    kind, top = CODES.get(form.name, (0, 1.0))
    constants = (
        ("Element", ELEMENTS[dtype]),
        ("Stored", ELEMENTS[form.dtype] if form.dtype else "uint8_t"),
        ("Table", ELEMENTS[table]),
        ("kRotary", rotary),
        ("kFormat", kind),
        ("kLatentRow", form.latent > 0),
        ("kTop", top),
        ("kMaxScale", float(np.float32(torch.finfo(torch.float32).max / top * (1 - 2.0**-22)))),  # as formats.py has it
        ("kLanes", lanes),
        ("kChunks", -(-chunks // lanes)),
    )
    return KernelSpec("append", "common/append.cu", "append", constants, THREADS, 0, product=True)


COPY_SPEC = KernelSpec("copy_pages", "common/copy_pages.cu", "copy_pages", (), THREADS, 0, product=True)


def specs(*, every: bool = False) -> list[KernelSpec]:
    """The kernels as users get them: bfloat16 and head dimension 128, or `every` dtype, format and width."""
    dtypes, widths = (FLOATS, (32, 64, 128, 256, 512)) if every else ((torch.bfloat16,), (128,))
    turns = (0, 1, 2) if every else (0, 1)
    found = [append_spec(t, KVFormat(name, d), r) for name in FORMATS for d in widths for t in dtypes for r in turns]
    latent = [KVFormat("bf16", 576), *(KVFormat(name, 576, latent=512) for name in LATENT_FORMATS)]
    found += [append_spec(t, form, r) for form in latent for t in dtypes for r in turns]
    return [*dict.fromkeys(found), COPY_SPEC]


Parts = Sequence[torch.Tensor]


class _Append:
    """The kernel and its arguments for one device, dtype and format. One thread at a time fills and launches them."""

    def __init__(self, spec: KernelSpec, device: torch.device, form: KVFormat) -> None:
        self.spec, self.form, self.lock = spec, form, threading.Lock()
        self.args = a = AppendArgs()
        a.head_dim, a.group_lanes = form.head_dim, form.group_size // CHANNELS
        self.rows_of_block = THREADS // dict(spec.constants)["kLanes"]  # type: ignore[operator]
        if device.type == "cuda":
            self.kernel = compiler.load(spec, device)
            self.launch_args = compiler.Args(a)


@lru_cache(maxsize=256)
def _bound(
    device: torch.device, dtype: torch.dtype, form: KVFormat, rotary: int, table: torch.dtype, value_dim: int
) -> _Append:
    return _Append(append_spec(dtype, form, rotary, table, value_dim), device, form)


def append(
    form: KVFormat,
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_parts: Parts,
    v_parts: Parts | None,
    positions: torch.Tensor,
    index: torch.Tensor,
    rotary: Rotary | None = None,
    q: torch.Tensor | None = None,
    first: int = 0,
    **emulated: Any,
) -> None:
    """Write k, v (tokens, heads, D) into the pages at `index`, k turned by `rotary` in its channels from `first` on.

    q: (tokens, query heads, D), turned too, in place. k_parts: the components of `form`, v_parts: the same for the
    head_dim of v, each (pages, page size, heads, …), tokens of codes one after another; both v and v_parts are None
    where k is the rows of a shared_kv cache. positions, index: (tokens,) int64; a negative index is skipped. The last
    strides of k, v, q are 1. emulated: options of emulator.launch.
    """
    tokens, heads, _ = k.shape
    if not tokens:
        return
    turned, table = (1 + rotary.interleaved, rotary.cos.dtype) if rotary is not None else (0, torch.float32)
    value_dim = v.shape[2] if v is not None else 0
    bound = _bound(k.device, k.dtype, form, turned, table, value_dim if value_dim > form.head_dim else 0)
    stored = [(k, k_parts), *([(v, v_parts)] if v is not None and v_parts is not None else ())]
    with bound.lock:
        a = bound.args
        a.tokens, a.heads, a.heads_q, a.stored, a.first = tokens, heads, 0, len(stored), first
        a.value_dim = form.latent or value_dim
        vectors = 0
        for i, (x, parts) in enumerate(stored):
            vectors |= (
                _set_source(a.source[i], x) << i | VECTOR_STORE * _set_store(a.store[i], parts, form.latent > 0) << i
            )
        if q is not None:
            a.heads_q = q.shape[1]
            vectors |= _set_source(a.source[2], q) << 2
        page_size = k_parts[0].shape[1]
        a.page_size, a.page_shift = page_size, page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1
        a.positions, a.index = positions.data_ptr(), index.data_ptr()
        if rotary is not None:
            vectors |= VECTOR_TABLE * _set_tables(a, rotary)
        a.vectors = vectors
        grid = (-(-tokens * (len(stored) * heads + a.heads_q) // bound.rows_of_block), 1, 1)
        if k.device.type == "cuda":
            bound.kernel.launch(grid, bound.launch_args)
            return
        known = {"positions": positions, "index": index}
        for name, (x, parts) in zip("kv", stored, strict=False):
            known |= {name: x, **{f"{name}_part{i}": part for i, part in enumerate(parts)}}
        if q is not None:
            known["q"] = q
        if rotary is not None:
            known |= {"cos": rotary.cos, "sin": rotary.sin}
        emulator.launch(bound.spec, grid, [a], known, **emulated)


def _set_source(source: Source, x: torch.Tensor) -> bool:
    """Also whether every row lies on 16 bytes, so that whole chunks can be read as vectors."""
    address, (token, head, _) = x.data_ptr(), x.stride()
    source.base, source.token, source.head = address, token, head
    return address % 16 == 0 and (token | head) * x.element_size() % 16 == 0


def _set_store(store: Store, parts: Parts, latent: bool) -> bool:
    """Also whether a chunk of eight codes can be stored as one vector, or two of float32. latent: of a latent row."""
    codes = parts[0]
    size, address, (page, token, head, _) = codes.element_size(), codes.data_ptr(), codes.stride()
    token = token if codes.shape[1] > 1 else page  # the stride of a dimension of size 1 may be anything
    store.codes, store.codes_token, store.codes_head = address, token, head
    if len(parts) > 1:
        store.scale = parts[1].data_ptr()
        store.scale_page, store.scale_token, store.scale_head, _ = parts[1].stride()
    wide = min(16, CHANNELS * size)
    if len(parts) > 2 and latent:
        place, (page, turned, store.rotary_head, _) = parts[2].data_ptr(), parts[2].stride()
        store.rotary, store.rotary_token = place, turned if codes.shape[1] > 1 else page
        if (place | 2 * store.rotary_token | 2 * store.rotary_head) % 16:  # it is stored by eight channels too
            return False
    elif len(parts) > 2:
        store.zero, wide = parts[2].data_ptr(), 4
    return (address | token * size | head * size) % wide == 0


def _set_tables(a: AppendArgs, rotary: Rotary) -> bool:
    """Also whether eight of a row of each table can be read as vectors."""
    cos, sin = rotary.cos, rotary.sin
    a.cos, a.sin, a.pairs = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
    (a.cos_row, a.cos_column), (a.sin_row, a.sin_column) = cos.stride(), sin.stride()
    return all(x.stride(1) == 1 and (x.data_ptr() | x.stride(0) * x.element_size()) % 16 == 0 for x in (cos, sin))


_copying = threading.Lock()


@lru_cache(maxsize=32)
def _copy_bound(device: torch.device) -> tuple[compiler.Kernel, CopyArgs, compiler.Args]:
    args = CopyArgs()
    return compiler.load(COPY_SPEC, device), args, compiler.Args(args)


def copy_pages(parts: Parts, pages: torch.Tensor, **emulated: Any) -> None:
    """Copy pages[0] to pages[1], (2, n) int64, in every layer of the parts.

    parts: each (layers, pages, page size, heads, row). No page may be in both rows. One launch for 65535 pages.
    """
    layers, _, page_size, heads, _ = parts[0].shape
    on_card = parts[0].device.type == "cuda"
    with _copying:
        kernel, a, launch_args = _copy_bound(parts[0].device) if on_card else (None, CopyArgs(), None)
        a.layers, a.page_size, a.heads = layers, page_size, heads
        most = 1
        for to, x in zip(a.part, parts, strict=False):
            size, row = x.element_size(), x.shape[-1] * x.element_size()
            strides = [s * size for s in x.stride()[:-1]]
            unit = next(u for u in (16, 4, 2, 1) if math.gcd(row, x.data_ptr(), *strides) % u == 0)
            to.base, to.unit, to.row = x.data_ptr(), unit, row // unit
            to.layer, to.page, to.token, to.head = (s // unit for s in strides)
            most = max(most, page_size * heads * to.row)
        for chunk in pages.split(MAX_COPIES, 1):
            chunk = chunk.contiguous()
            a.pages, a.count = chunk.data_ptr(), chunk.shape[1]
            grid = (min(-(-most // THREADS), 64), layers * len(parts), a.count)
            if kernel is not None and launch_args is not None:
                kernel.launch(grid, launch_args)
            else:
                known = {f"part{i}": x for i, x in enumerate(parts)}
                emulator.launch(COPY_SPEC, grid, [a], known | {"pages": chunk}, **emulated)
