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

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tilewise import api, traced
from tilewise.api import gradients
from tilewise.gpu import calls
from tilewise.gpu.abi import FP8
from tilewise.kvcache import PagedKVCache
from tilewise.scores import SCHEMA_OPTIONS, SCHEMA_SCALING, SCHEMA_TENSORS

if TYPE_CHECKING:
    from tilewise.api import Result

State = tuple[torch.Tensor, torch.Tensor]
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# Operators want their tensors before the star.
TENSORS = (
    f"{SCHEMA_TENSORS}, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "Tensor? dropout_seed=None"
)
TENSOR_NAMES = tuple(declared.split()[1].removesuffix("=None") for declared in TENSORS.split(", "))
OPTIONS = (
    f"{SCHEMA_OPTIONS}, float dropout_p=0.0, bool exact=False, bool deterministic=False, bool return_lse=False, "
    'str backend="auto"'
)

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
    """attention(): q (B, Nq, Hq, D), k, v (B, Nk, Hkv, D or Dv) -> o (B, Nq, Hq, Dv), lse (B, Hq, Nq) or (0,)."""
    options |= zip(TENSOR_NAMES, tensors, strict=False)
    return both(api.attention(q, k, v, window=(window_left, window_right), **options))


@_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any, return_lse: bool = False, **options: Any
) -> State:
    return shapes(q, (q.shape[0], q.shape[2], q.shape[1]) if return_lse else None, v.shape[-1])


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
    """attention_varlen(): q (total_q, Hq, D), k, v packed or paged -> o (total_q, Hq, Dv), lse (Hq, total_q)."""
    options |= zip(TENSOR_NAMES, tensors, strict=False)
    given = {"page_table": page_table, "window": (window_left, window_right), **options}
    return both(api.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **given))


@_attention_varlen.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any, return_lse: bool = False, **options: Any
) -> State:
    return shapes(q, (q.shape[1], q.shape[0]) if return_lse else None, v.shape[-1])


@torch.library.custom_op(
    "tilewise::decode",
    mutates_args=(),
    tags=TAGS,
    schema=(
        "(Tensor q, Tensor[] k_pages, Tensor[] v_pages, SymInt layer, SymInt plan, Tensor? sinks=None, "
        f"Tensor? tree_mask=None, *, {SCHEMA_SCALING}, SymInt? value_dim=None, bool return_lse=False, "
        'str backend="auto") -> (Tensor, Tensor)'
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
    value_dim: int | None = None,
    **options: Any,
) -> State:
    """decode(): q (num_seqs, tokens, Hq, D) -> o (num_seqs, tokens, Hq, value_dim), lse (num_seqs, Hq, tokens) float32
    or (0,).

    k_pages, v_pages: the components of the cache's storage, all layers. plan: the serial number of a living plan.
    value_dim: the cache's, q's D if None: whoever traces the call has no other way to know the width of o.
    """
    found, cache = traced.recall(plan)
    pages = _over(cache, k_pages, v_pages)
    return both(api.decode(q, pages, layer, found, sinks=sinks, tree_mask=tree_mask, **options))


@_decode.register_fake
def _(q: torch.Tensor, *others: Any, value_dim: int | None = None, return_lse: bool = False, **options: Any) -> State:
    return shapes(q, (q.shape[0], q.shape[2], q.shape[1]) if return_lse else None, value_dim)


@torch.library.custom_op(
    "tilewise::attend",
    mutates_args=(),
    tags=TAGS,
    schema=(
        "(Tensor q, Tensor[] k_pages, Tensor[] v_pages, SymInt layer, SymInt plan, Tensor? sinks=None, "
        f'*, {SCHEMA_SCALING}, SymInt? value_dim=None, bool return_lse=False, str backend="auto") -> (Tensor, Tensor)'
    ),
)
def _attend(
    q: torch.Tensor,
    k_pages: Sequence[torch.Tensor],
    v_pages: Sequence[torch.Tensor],
    layer: int,
    plan: int,
    sinks: torch.Tensor | None = None,
    value_dim: int | None = None,
    **options: Any,
) -> State:
    """attend(): q (rows, Hq, D) -> o (rows, Hq, value_dim), lse (Hq, rows) or (0,). Pages and plan as in `_decode`."""
    found, cache = traced.recall(plan)
    return both(api.attend(q, _over(cache, k_pages, v_pages), layer, found, sinks=sinks, **options))


@_attend.register_fake
def _(q: torch.Tensor, *others: Any, value_dim: int | None = None, return_lse: bool = False, **options: Any) -> State:
    return shapes(q, (q.shape[1], q.shape[0]) if return_lse else None, value_dim)


# Gradients. The backward passes are operators themselves, so that a compiled graph holds them. Where the forward was
# not asked for the LSE, they make it again.

GRADS = "Tensor? sinks, Tensor? dropout_seed, Tensor? alibi_slopes, Tensor o, Tensor lse, Tensor? d_o, Tensor? d_lse"


@torch.library.custom_op(
    "tilewise::attention_backward",
    mutates_args=(),
    tags=TAGS,
    schema=f"(Tensor q, Tensor k, Tensor v, {GRADS}, *, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    dropout_seed: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    *state: Any,
    **options: Any,
) -> Grads:
    """Of q, k, v and sinks, each like it; the last (0,) without sinks. d_o like o, d_lse like lse, None for zeros."""
    node = gradients.Dense(api.attention, *_split(alibi_slopes, **options))
    return _gradients(node, (q, k, v, sinks, dropout_seed), *state)


@torch.library.custom_op(
    "tilewise::attention_varlen_backward",
    mutates_args=(),
    tags=TAGS,
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? page_table, "
        f"{GRADS}, *, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _attention_varlen_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    page_table: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_seed: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    *state: Any,
    **options: Any,
) -> Grads:
    """As `_attention_backward`."""
    node = gradients.Packed(api.attention_varlen, *_split(alibi_slopes, **options))
    return _gradients(node, (q, k, v, cu_seqlens_q, cu_seqlens_k, page_table, sinks, dropout_seed), *state)


def _split(
    alibi_slopes: torch.Tensor | None,
    *,
    window_left: int | None = None,
    window_right: int | None = None,
    exact: bool = False,
    deterministic: bool = False,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    backend: str = "auto",
    **scores: Any,
) -> tuple[Any, dict[str, Any]]:
    """The options of the scores, and the others, as the nodes of the public calls keep them."""
    pattern = {"schedule": None, "mask": None, "score": None}
    rest = {"exact": exact, "deterministic": deterministic, "dropout_p": dropout_p, "backend": backend}
    return {**scores, "window": (window_left, window_right), "alibi_slopes": alibi_slopes}, {**pattern, **rest}


def _gradients(
    node: gradients.Call,
    tensors: tuple[torch.Tensor | None, ...],
    o: torch.Tensor,
    lse: torch.Tensor,
    d_o: torch.Tensor | None,
    d_lse: torch.Tensor | None,
) -> Grads:
    if lse.numel() * o.shape[-1] != o.numel():
        lse, d_lse = node.forward(*tensors)[1], None
    made: Any = gradients.found(node, tensors, (o, lse), (d_o, d_lse))
    return made[0], made[1], made[2], o.new_empty(0) if made[-2] is None else made[-2]


@_attention_backward.register_fake
@_attention_varlen_backward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor | None, **options: Any) -> Grads:
    sinks = others[-7]
    d_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: State) -> None:
    """inputs: those of the operators, which end in those of TENSORS."""
    *tensors, slopes, _, _, _, seed = inputs
    if inputs[0].dtype == FP8 or (slopes is not None and slopes.requires_grad):
        gradients.check(inputs[0], None, "auto", slopes)
    if not keyword_only_inputs["dropout_p"]:
        gradients.check_kernels(inputs[0], inputs[2], keyword_only_inputs["backend"])
    ctx.save_for_backward(*tensors, seed, slopes, *output)
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)


def _backward_of(operator: Any) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """A backward pass by the operator: gradients of q, k, v and, the first of TENSORS, sinks; None for the others."""

    def backward(ctx: Any, d_o: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        *tensors, sinks, seed, slopes, o, lse = ctx.saved_tensors
        d_q, d_k, d_v, d_sinks = operator(*tensors, sinks, seed, slopes, o, lse, d_o, d_lse, **ctx.options)
        between, after = (None,) * (len(tensors) - 3), (None,) * (len(TENSOR_NAMES) - 1)
        return d_q, d_k, d_v, *between, None if sinks is None else d_sinks, *after

    return backward


def no_second(ctx: Any, *grads: Any) -> NoReturn:
    gradients.refuse_second()


_attention.register_autograd(_backward_of(_attention_backward), setup_context=_keep)
_attention_varlen.register_autograd(_backward_of(_attention_varlen_backward), setup_context=_keep)
for _op in (_attention_backward, _attention_varlen_backward):
    _op.register_autograd(no_second)


def both(result: Result) -> State:
    if isinstance(result, torch.Tensor):
        return result.contiguous(), result.new_empty((0,), dtype=torch.float32)
    return result[0].contiguous(), result[1]


def shapes(q: torch.Tensor, lse: tuple[int, ...] | None, value_dim: int | None = None) -> State:
    """o and lse of a call; value_dim: of the values, q's head_dim if None."""
    o = (*q.shape[:-1], q.shape[-1] if value_dim is None else value_dim)
    return q.new_empty(o, dtype=calls.out_dtype(q.dtype)), q.new_empty(lse or (0,), dtype=torch.float32)


def _over(cache: PagedKVCache, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> PagedKVCache:
    """The same cache, reading from these tensors: a compiler may have written the pages into others."""
    same = PagedKVCache.__new__(PagedKVCache)
    same.__dict__.update(cache.__dict__, _k=list(k), _v=list(v))
    return same


def _no_backward(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(
        "an input requires gradients, and this call has no backward pass; call it under torch.no_grad(), or use "
        "attention() or attention_varlen() for training"
    )


for _op in (_decode, _attend):
    _op.register_autograd(_no_backward)
