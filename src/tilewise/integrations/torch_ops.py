"""The public calls as PyTorch operators, `torch.ops.tilewise.*`: what compiled and exported graphs hold.

Nobody has to call these by name: while code is traced, `tilewise.attention()`, `attention_varlen()`, `decode()` and
`attend()` go to `traced`, which puts the operator in the graph. When the graph runs, the operator makes
the eager call, so arguments are checked, and errors raised, by that call alone. The fake kernels tell shapes only.

Every operator returns (o, lse), both contiguous; without return_lse, lse is empty. Not offered are `out=`, because a
graph's compiler places outputs itself, and `schedule=`, `mask=` and `score=`: nothing in a graph may hold a
BlockSchedule or a function, and a call with one runs between two graphs.

A decode plan and its cache are Python objects, which graphs cannot hold either. `traced.remember` puts both in a table
that keeps neither alive; the operator takes the plan's serial number, which changes from step to step without a new
compilation, and the cache's tensors, so that the compiler sees what is read and in which order it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tilewise import api, traced
from tilewise.gpu import calls
from tilewise.kvcache import PagedKVCache
from tilewise.scores import SCHEMA_OPTIONS, SCHEMA_SCALING, SCHEMA_TENSORS

if TYPE_CHECKING:
    from tilewise.api import Result

State = tuple[torch.Tensor, torch.Tensor]

# Operators want their tensors before the star.
TENSORS = f"{SCHEMA_TENSORS}, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None"
TENSOR_NAMES = tuple(declared.split()[1].removesuffix("=None") for declared in TENSORS.split(", "))
OPTIONS = f'{SCHEMA_OPTIONS}, bool exact=False, bool return_lse=False, str backend="auto"'

# The operators: schema, what runs, and the shapes of what comes back. The compiler's own CUDA graphs go round them: a
# launch keeps counters and buffers from call to call, which a graph's pool would have to own.
TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))


@torch.library.custom_op(
    "tilewise::attention",
    mutates_args=(),
    tags=TAGS,
    schema=f"(Tensor q, Tensor k, Tensor v, {TENSORS}, *, {OPTIONS}) -> (Tensor, Tensor)",
)
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *tensors: torch.Tensor | None,
    window_left: int | None = None,
    window_right: int | None = None,
    **options: Any,
) -> State:
    """attention(): q (B, Nq, Hq, D), k, v (B, Nk, Hkv, D) -> o (B, Nq, Hq, D), lse (B, Hq, Nq) float32 or (0,)."""
    options |= zip(TENSOR_NAMES, tensors, strict=False)
    return _both(api.attention(q, k, v, window=(window_left, window_right), **options))


@_attention.register_fake
def _(q: torch.Tensor, *others: torch.Tensor | None, return_lse: bool = False, **options: Any) -> State:
    return _shapes(q, (q.shape[0], q.shape[2], q.shape[1]) if return_lse else None)


@torch.library.custom_op(
    "tilewise::attention_varlen",
    mutates_args=(),
    tags=TAGS,
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? page_table=None, "
        f"{TENSORS}, *, {OPTIONS}) -> (Tensor, Tensor)"
    ),
)
def _attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    page_table: torch.Tensor | None = None,
    *tensors: torch.Tensor | None,
    window_left: int | None = None,
    window_right: int | None = None,
    **options: Any,
) -> State:
    """attention_varlen(): q (total_q, Hq, D), k, v packed or paged -> o (total_q, Hq, D), lse (Hq, total_q) or (0,)."""
    options |= zip(TENSOR_NAMES, tensors, strict=False)
    given = {"page_table": page_table, "window": (window_left, window_right), **options}
    return _both(api.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **given))


@_attention_varlen.register_fake
def _(q: torch.Tensor, *others: torch.Tensor | None, return_lse: bool = False, **options: Any) -> State:
    return _shapes(q, (q.shape[1], q.shape[0]) if return_lse else None)


@torch.library.custom_op(
    "tilewise::decode",
    mutates_args=(),
    tags=TAGS,
    schema=(
        "(Tensor q, Tensor[] k_pages, Tensor[] v_pages, SymInt layer, SymInt plan, Tensor? sinks=None, "
        f'Tensor? tree_mask=None, *, {SCHEMA_SCALING}, bool return_lse=False, str backend="auto") -> (Tensor, Tensor)'
    ),
)
def _decode(
    q: torch.Tensor,
    k_pages: Sequence[torch.Tensor],
    v_pages: Sequence[torch.Tensor],
    layer: int,
    plan: int,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    **options: Any,
) -> State:
    """decode(): q (num_seqs, tokens, Hq, D) -> o like it, lse (num_seqs, Hq, tokens) float32 or (0,).

    k_pages, v_pages: the components of the cache's storage, all layers. plan: the serial number of a living plan.
    """
    found, cache = traced.recall(plan)
    pages = _over(cache, k_pages, v_pages)
    return _both(api.decode(q, pages, layer, found, sinks=sinks, tree_mask=tree_mask, **options))


@_decode.register_fake
def _(q: torch.Tensor, *others: Any, return_lse: bool = False, **options: Any) -> State:
    return _shapes(q, (q.shape[0], q.shape[2], q.shape[1]) if return_lse else None)


@torch.library.custom_op(
    "tilewise::attend",
    mutates_args=(),
    tags=TAGS,
    schema=(
        "(Tensor q, Tensor[] k_pages, Tensor[] v_pages, SymInt layer, SymInt plan, Tensor? sinks=None, "
        f'*, {SCHEMA_SCALING}, bool return_lse=False, str backend="auto") -> (Tensor, Tensor)'
    ),
)
def _attend(
    q: torch.Tensor,
    k_pages: Sequence[torch.Tensor],
    v_pages: Sequence[torch.Tensor],
    layer: int,
    plan: int,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> State:
    """attend(): q (rows, Hq, D) -> o like it, lse (Hq, rows) float32 or (0,). Pages and plan as in `_decode`."""
    found, cache = traced.recall(plan)
    return _both(api.attend(q, _over(cache, k_pages, v_pages), layer, found, sinks=sinks, **options))


@_attend.register_fake
def _(q: torch.Tensor, *others: Any, return_lse: bool = False, **options: Any) -> State:
    return _shapes(q, (q.shape[1], q.shape[0]) if return_lse else None)


def _both(result: Result) -> State:
    if isinstance(result, torch.Tensor):
        return result.contiguous(), result.new_empty((0,), dtype=torch.float32)
    return result[0].contiguous(), result[1]


def _shapes(q: torch.Tensor, lse: tuple[int, ...] | None) -> State:
    return q.new_empty(q.shape, dtype=calls.out_dtype(q.dtype)), q.new_empty(lse or (0,), dtype=torch.float32)


def _over(cache: PagedKVCache, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> PagedKVCache:
    """The same cache, reading from these tensors: a compiler may have written the pages into others."""
    same = PagedKVCache.__new__(PagedKVCache)
    same.__dict__.update(cache.__dict__, _k=list(k), _v=list(v))
    return same


def _no_backward(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(
        "Tilewise has no backward pass yet; call it under torch.no_grad(), or use "
        "torch.nn.functional.scaled_dot_product_attention for training"
    )


for _op in (_attention, _attention_varlen, _decode, _attend):
    _op.register_autograd(_no_backward)
