"""Pages as plain numbers, kernels/common/widen.cu: what the forward reads where a cache stores something else.

It runs on the card of the pages, or in the emulator over CPU tensors, and validates nothing.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from tilewise import compiler, emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.formats import FORMATS, LATENT_FORMATS, KVFormat
from tilewise.gpu.abi import ELEMENTS
from tilewise.gpu.append import CHANNELS, CODES, FLOATS, THREADS

VECTOR_STORE = 4  # widen.cu
Parts = Sequence[torch.Tensor]


class WidenStore(ctypes.Structure):
    """widen.cu: WidenStore."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("codes", "scale", "zero", "rotary")),
        *((f"{x}_{n}", ctypes.c_int64) for x in ("codes", "scale", "rotary") for n in ("page", "token", "head")),
    ]


class WidenArgs(ctypes.Structure):
    """widen.cu: WidenArgs."""

    _fields_ = [
        ("store", WidenStore * 2),
        ("out", ctypes.c_void_p * 2),
        ("pages", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        *((n, ctypes.c_int) for n in ("page_size", "heads", "head_dim", "value_dim", "stored", "group_lanes")),
        ("vectors", ctypes.c_uint32),
    ]


@lru_cache(maxsize=256)
def widen_spec(dtype: torch.dtype, form: KVFormat, value_dim: int = 0) -> KernelSpec:
    """The kernel that makes pages of `dtype` from those of `form`. value_dim: V's, 0 where it is no larger than K's."""
    chunks = -(-max(form.head_dim, value_dim) // CHANNELS)
    lanes = min(32, max(4, 1 << (chunks - 1).bit_length()))
    constants = (
        ("Element", ELEMENTS[dtype]),
        ("Stored", ELEMENTS[form.dtype] if form.dtype else "uint8_t"),
        ("kFormat", CODES.get(form.name, (0, 1.0))[0]),
        ("kLatentRow", form.latent > 0),
        ("kLanes", lanes),
        ("kChunks", -(-chunks // lanes)),
    )
    return KernelSpec("widen", "common/widen.cu", "widen", constants, THREADS, 0, product=True)


def specs(*, every: bool = False) -> list[KernelSpec]:
    """The kernels as users get them: bfloat16 and head dimension 128, or `every` dtype, format and width."""
    dtypes, widths = (FLOATS, (32, 64, 128, 256)) if every else ((torch.bfloat16,), (128,))
    forms = [KVFormat(name, d) for name in FORMATS for d in widths]
    forms += [KVFormat(name, 576, latent=512) for name in LATENT_FORMATS]
    return list(dict.fromkeys(widen_spec(t, form) for form in forms for t in dtypes if form.dtype != t))


class _Widen:
    """The kernel and its arguments for one device, dtype and format. One thread at a time fills and launches them."""

    def __init__(self, spec: KernelSpec, device: torch.device, form: KVFormat) -> None:
        self.spec, self.lock = spec, threading.Lock()
        self.args = a = WidenArgs()
        a.head_dim, a.group_lanes = form.head_dim, form.group_size // CHANNELS
        self.rows_of_block = THREADS // dict(spec.constants)["kLanes"]  # type: ignore[operator]
        if device.type == "cuda":
            self.kernel = compiler.load(spec, device)
            self.launch_args = compiler.Args(a)


@lru_cache(maxsize=256)
def _bound(device: torch.device, dtype: torch.dtype, form: KVFormat, value_dim: int) -> _Widen:
    return _Widen(widen_spec(dtype, form, value_dim), device, form)


def widen(
    form: KVFormat,
    k_parts: Parts,
    v_parts: Parts | None,
    pages: torch.Tensor,
    dtype: torch.dtype,
    value_dim: int | None = None,
    **emulated: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `pages` (n,) int32 as new pages (n, page size, heads, D) of `dtype`.

    k_parts: the components of `form`, v_parts: the same for V's head_dim, each (pages, page size, heads, …).
    value_dim: V's head_dim, K's if None. v_parts is None where K's rows are both: V is then the first value_dim
    channels of the new K. emulated: options of emulator.launch.
    """
    page_size, heads = k_parts[0].shape[1:3]
    value_dim = form.head_dim if value_dim is None else value_dim
    k, v = (
        torch.empty((len(pages), page_size, heads, d), dtype=dtype, device=pages.device)
        for d in (form.head_dim, value_dim if v_parts is not None else 0)
    )
    v = k[..., :value_dim] if v_parts is None else v
    if not len(pages):
        return k, v
    made = [("k", k, k_parts), *([("v", v, v_parts)] if v_parts is not None else ())]
    bound = _bound(pages.device, dtype, form, value_dim if value_dim > form.head_dim else 0)
    with bound.lock:
        a = bound.args
        a.rows, a.page_size, a.heads, a.pages = k.numel() // form.head_dim, page_size, heads, pages.data_ptr()
        a.value_dim, a.stored = form.latent or value_dim, len(made)
        a.vectors = 0
        for i, (_, out, parts) in enumerate(made):
            a.out[i] = out.data_ptr()
            a.vectors |= VECTOR_STORE * (out.shape[3] * dtype.itemsize % 16 == 0) << i
            a.vectors |= _set_store(a.store[i], parts, form.latent > 0) << i
        grid = (-(-len(made) * a.rows // bound.rows_of_block), 1, 1)
        if pages.device.type == "cuda":
            bound.kernel.launch(grid, bound.launch_args)
            return k, v
        known = {"pages": pages}
        for name, out, parts in made:
            known |= {name: out, **{f"{name}_part{i}": x for i, x in enumerate(parts)}}
        emulator.launch(bound.spec, grid, [a], known, **emulated)
    return k, v


def _set_store(store: WidenStore, parts: Parts, latent: bool) -> bool:
    """Also whether eight channels can be loaded as one vector, or as two of float32. latent: of a latent row, whose
    rotary part is read value by value: it is a ninth of what is read."""
    codes = parts[0]
    size, address = codes.element_size(), codes.data_ptr()
    store.codes, strides = address, codes.stride()[:3]
    store.codes_page, store.codes_token, store.codes_head = strides
    if len(parts) > 1:
        store.scale = parts[1].data_ptr()
        store.scale_page, store.scale_token, store.scale_head = parts[1].stride()[:3]
    if len(parts) > 2 and latent:
        store.rotary = parts[2].data_ptr()
        store.rotary_page, store.rotary_token, store.rotary_head = parts[2].stride()[:3]
    elif len(parts) > 2:
        store.zero = parts[2].data_ptr()
    wide = 4 if len(parts) > 2 and not latent else min(16, CHANNELS * size)
    return address % wide == 0 and all(s * size % wide == 0 for s in strides)
