"""Somebody else's pages as a cache: what from_pages() takes, and how it is checked."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tilewise import checks
from tilewise.formats import FORMATS, LATENT_FORMATS, PLAIN, KVFormat
from tilewise.kvcache.pool import Pages
from tilewise.kvcache.storage import check_device, check_writable, uses_kernels

if TYPE_CHECKING:
    from tilewise.kvcache.paged import PagedKVCache

ROW_BYTES = 4  # a latent row is so many bytes, or a multiple: KVFormat.bytes_per_token_head
# Latent rows as bytes, by the dtype that they come in
ROWS = {torch.uint8: "fp8", torch.float8_e4m3fn: "fp8", torch.int8: "int8"}


class Names(NamedTuple):
    """What a call's arguments are called."""

    pages: str
    table: str
    lengths: str
    value_dim: str


NAMES = Names("k_pages", "page_table", "lengths", "value_dim")


def take_pages(
    cache: PagedKVCache,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    value_dim: int | None,
    head_dim: int | None = None,
    names: Names = NAMES,
) -> None:
    """Make `cache`, of which nothing is there yet, the cache of from_pages(). names: those of the arguments there."""
    if v_pages is None and value_dim is None:
        raise ValueError("value_dim must be given with v_pages None: how many channels of a row of k_pages are V")
    if v_pages is not None and value_dim is not None:
        raise ValueError("value_dim goes with v_pages None, of rows that are K and V; v_pages tells its own")
    if head_dim is not None and (value_dim is None or k_pages.dtype not in ROWS):
        raise ValueError("head_dim goes with value_dim and rows of bytes; other pages tell it themselves")
    device = check_foreign(k_pages, v_pages, page_table, lengths, names)
    cache.device, cache._by_kernel = device, uses_kernels(device)
    cache.num_pages = checks.integer("num_pages of k_pages", k_pages.shape[0], 1)
    cache.page_size = checks.integer("page_size of k_pages", k_pages.shape[1], 1, 256)
    cache.num_kv_heads = checks.integer("kv heads of k_pages", k_pages.shape[2], 1)
    cache.num_layers, cache.shared_kv = 1, v_pages is None
    cache.format = cache.value_format = foreign_format(names.pages, k_pages, value_dim, head_dim, names.value_dim)
    cache.head_dim = cache.format.head_dim
    given = value_dim if v_pages is None else v_pages.shape[3]
    if v_pages is None:
        check_shared(cache.num_kv_heads, cache.head_dim, given, cache.format.name, names.value_dim)
    cache.value_dim = checks.head_dim(names.value_dim if v_pages is None else "head_dim of v_pages", given)
    rows = k_pages.detach().unsqueeze(0)
    cache._k = cache.format.from_rows(rows) if cache.format.latent else [rows]
    cache._v = []
    if v_pages is not None:
        cache.value_format, cache._v = foreign_format("v_pages", v_pages, None), [v_pages.detach().unsqueeze(0)]
    cache._start_empty()
    cache._foreign = True
    for pages, length in foreign_lists(page_table, lengths, cache.num_pages, cache.page_size, names):
        cache.pool.retain(pages)
        cache.adopt(pages, length)
        fill = np.full(len(pages), cache.page_size, np.int32)
        fill[-1:] -= len(pages) * cache.page_size - length
        cache.pool.fill[pages] = np.maximum(cache.pool.fill[pages], fill)
    cache._written.bits[..., 0] = np.arange(cache.page_size) < cache.pool.fill[:, None]


def check_shared(num_kv_heads: int, head_dim: int, value_dim: Any, kv_format: str, name: str = "value_dim") -> None:
    """Raise unless a row of these sizes can be K and V at once. name: of value_dim."""
    if num_kv_heads != 1:
        raise ValueError(f"num_kv_heads must be 1 with shared_kv: all heads read one row, got {num_kv_heads}")
    if checks.integer(name, value_dim, 1) > head_dim:
        raise ValueError(
            f"{name} must be at most head_dim {head_dim}: V is the first channels of rows that are K and V, got "
            f"{value_dim}"
        )
    if checks.choice("kv_format", kv_format, FORMATS) not in (*PLAIN, *LATENT_FORMATS):
        raise NotImplementedError(f'kv_format "{kv_format}" is not served with shared_kv: use "fp8" or "int8"')


def check_foreign(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    names: Names,
) -> torch.device:
    """Raise unless the arguments of from_pages() are of the right kind and shape; their device."""
    shape = ("num_pages", "page_size", "kv_heads", "head_dim")
    dtypes = checks.FLOATS if v_pages is not None else (*checks.FLOATS, *ROWS)
    checks.tensor(names.pages, k_pages, shape=shape, dtypes=dtypes, unit_last_stride=True)
    device = check_device(k_pages.device)
    given = [(names.pages, k_pages)]
    if v_pages is not None:
        shape = (*map(int, k_pages.shape[:3]), "value_dim")  # type: ignore[assignment]
        checks.tensor("v_pages", v_pages, shape=shape, dtypes=(k_pages.dtype,), device=device, unit_last_stride=True)
        given.append(("v_pages", v_pages))
    for name, pages in given:
        check_writable(name, pages)
        try:
            pages.view(-1, *pages.shape[2:])
        except RuntimeError:
            raise ValueError(
                f"{name} must have its tokens one after another in memory, got strides {pages.stride()} for shape "
                f"{tuple(pages.shape)}; use {name}.contiguous()"
            ) from None
    checks.tensor(names.table, page_table, shape=("n", "max_pages"), dtypes=checks.INTEGERS, device=device)
    checks.tensor(names.lengths, lengths, shape=(len(page_table),), dtypes=checks.INTEGERS, device=device)
    return device


def foreign_format(
    name: str,
    pages: torch.Tensor,
    value_dim: int | None,
    head_dim: int | None = None,
    value_name: str = NAMES.value_dim,
) -> KVFormat:
    """The format of pages (num_pages, page_size, kv heads, width): values, or with a value_dim latent rows as bytes,
    whose rotary part goes to the end of the row if head_dim does not tell."""
    width = pages.shape[3]
    if pages.dtype not in ROWS or value_dim is None:
        plain = {dtype: plain for plain, dtype in PLAIN.items()}[pages.dtype]
        return KVFormat(plain, checks.head_dim(f"head_dim of {name}", width))
    value_dim = checks.head_dim(value_name, value_dim)
    without = KVFormat(ROWS[pages.dtype], value_dim, latent=value_dim)  # a row that has no rotary part
    if head_dim is None:
        head_dim = value_dim + max(0, width - without.bytes_per_token_head) // 2
        head_dim = checks.head_dim(f"head_dim of {name}", head_dim)
    form = replace(without, head_dim=checks.integer("head_dim", head_dim, value_dim, checks.MAX_HEAD_DIM))
    if form.bytes_per_token_head != width:
        raise ValueError(
            f"{name} must hold rows of {without.bytes_per_token_head} bytes for {value_name} {value_dim}, and two more "
            f"for each channel of the rotary part, in all a multiple of four, got {width}"
        )
    if any(x % ROW_BYTES for x in (pages.storage_offset(), *pages.stride()[:3])):
        raise ValueError(
            f"{name} must have rows that begin at multiples of {ROW_BYTES} bytes of their storage, where scales lie, "
            f"got offset {pages.storage_offset()} and strides {pages.stride()}; use {name}.clone()"
        )
    return form


def foreign_lists(
    page_table: torch.Tensor, lengths: torch.Tensor, num_pages: int, page_size: int, names: Names
) -> Iterator[tuple[Pages, int]]:
    """The page list (int32) and the length in tokens of each sequence of from_pages(), which the table must name."""
    for seq, (row, length) in enumerate(zip(page_table.cpu().numpy(), lengths.tolist(), strict=True)):
        room = len(row) * page_size
        if not 0 <= length <= room:
            raise ValueError(
                f"{names.lengths}[{seq}] must be between 0 and {room}, what {names.table} has room for, got {length}"
            )
        used = row[: -(-length // page_size)]
        if len(used) and (used.min() < 0 or used.max() >= num_pages):
            raise ValueError(
                f"{names.table}[{seq}] must name pages 0 to {num_pages - 1} in its first {len(used)} entries, "
                f"got {used.min()} to {used.max()}"
            )
        if len(np.unique(used)) != len(used):
            raise ValueError(f"{names.table}[{seq}] names a page twice; one page cannot hold two places of a sequence")
        yield used.astype(np.int32), length


def over_other_pages(cache: PagedKVCache, k_pages: torch.Tensor) -> PagedKVCache:
    """The sequences of `cache`, whose rows from_pages() took, over other pages of the same shape: another layer's, only
    to be read. A plan of one is a plan of the other."""
    other = copy(cache)
    other.serial = cache.serial
    rows = k_pages.detach().unsqueeze(0)
    other._k = cache.format.from_rows(rows) if cache.format.latent else [rows]
    return other
