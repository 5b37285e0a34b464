"""The calls of torch.nn.attention.flex_attention, served by Tilewise: same names, arguments, order, defaults, shapes.

    from tilewise.compat.flex_attention import create_block_mask, flex_attention

On CUDA tensors they run Tilewise's kernels (head_dim up to 256, every card since Ampere), on CPU tensors its CPU
backend, in float32, bfloat16 and float16. There is nothing to compile: `torch.compile(flex_attention)` works and breaks
its graph here. `BlockMask`, `AuxRequest`, `AuxOutput`, `and_masks`, `or_masks` and `noop_mask` are torch's own, so that
a mask may come from here or from torch, and go to either. What differs:

- score_mod and mask_mod are traced, not called for each pair, into expressions that no value of theirs recompiles;
  what they may do, `tilewise.attention` says of its functions. An index past a captured tensor's end means its last
  entry, one below 0 its first.
- `create_block_mask` forms no mask of queries × keys. Where arithmetic on ranges cannot tell, a block counts as
  partial, so one may be listed of which nothing is seen; and a last block, shorter than the others, may be full.
- Lists may be in any order, and entries that are out of range or twice there count not, or once.
- query, key and value get gradients, from the output and from the LSE; tensors that score_mod or mask_mod capture get
  none: one that requires them raises NotImplementedError.
- There are no max_scores, no FP8 and no float64 here: NotImplementedError says so.

Meaning: score_mod gets the scaled score and its result counts where the block mask shows the pair: in the blocks of the
full lists all pairs, in those of the other lists what mask_mod allows, elsewhere none. h is the query head, q and k
count from 0. A row with no visible key gives 0 and an LSE of −inf.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, overload

import torch
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    and_masks,
    noop_mask,
    or_masks,
)

from tilewise import checks, functions
from tilewise.api import attention, schedule_of

from .block_masks import BLOCK, Cut, block_mask_from, shown_by
from .flash_options import rows

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]

Function = Callable[..., Any]
Device = torch.device | str | int
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput]
P = ParamSpec("P")
R = TypeVar("R")

HINTS = set(FlexKernelOptions.__annotations__) - {"BACKEND"}  # they change no result


def _outside_graphs(call: Callable[P, R]) -> Callable[P, R]:
    """The call, at which a graph being compiled is broken: no graph holds a function of the user's or a schedule."""
    uncompiled = torch.compiler.disable(call)

    @functools.wraps(call)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        made: R = uncompiled(*args, **kwargs)
        return made

    return plain


@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Function | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: None = None,
) -> torch.Tensor: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Function | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: FlexKernelOptions | None = None,
    return_aux: None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Function | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest,
) -> tuple[torch.Tensor, AuxOutput]: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Function | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Result: ...
@_outside_graphs
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Function | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Result:
    """Attention with scores and a mask of the user's own.

    query: (B, Hq, Nq, D); key: (B, Hkv, Nk, D); value: (B, Hkv, Nk, Dv); with enable_gqa Hq may be a multiple of Hkv.
    The keys may be of one sequence for all, (1, Hkv, Nk, D), if block_mask is of B sequences.
    score_mod: (score, b, h, q, k) -> the score to take. block_mask: of torch or of `create_block_mask`, for 1 or B
    sequences, 1 or Hq heads, Nq queries and Nk keys, on query's device. What is made of it is kept as long as it lives.
    scale: `D ** -0.5` if None. kernel_options: hints for torch's kernels are accepted and change nothing.

    Returns out (B, Hq, Nq, Dv), laid out as query is; with return_lse also the LSE (B, Hq, Nq) float32, natural log;
    with return_aux (out, AuxOutput).
    """
    with_lse = _check_returned(return_lse, return_aux)
    _check_options(kernel_options)
    query, key, value = (_as_autocast(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    _check_inputs(query, key, value, enable_gqa)
    schedule = mask_mod = None
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)
        schedule, mask_mod = shown_by(block_mask)
    elif len(key) != len(query):
        raise ValueError(f"key must have query's batch size {len(query)} without a block_mask, got {len(key)}")
    _check_captured(mask_mod, score_mod)

    q, k, v = (rows("x", x, x.shape).transpose(1, 2) for x in (query, key, value))
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))  # autograd keeps the output
    result = attention(
        q,
        k.expand(len(q), -1, -1, -1),
        v.expand(len(q), -1, -1, -1),
        scale=scale,
        schedule=schedule,
        mask=mask_mod,
        score=score_mod,
        deterministic=getattr(block_mask, "dq_write_order", None) is not None,
        return_lse=with_lse,
        out=None if recorded else _out_like(q, v.shape[-1]),
    )
    o, lse = result if isinstance(result, tuple) else (result, None)
    if recorded:
        o = _out_like(q, v.shape[-1]).copy_(o)
    o = o.transpose(1, 2)
    if return_aux is not None:
        return o, AuxOutput(lse=lse)
    return o if lse is None else (o, lse)


@_outside_graphs
def create_block_mask(
    mask_mod: Function,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Device | None = None,
    BLOCK_SIZE: int | tuple[int, int] = BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The blocks in which mask_mod (b, h, q, k) -> bool lets one of Q_LEN queries see one of KV_LEN keys.

    B, H: 1 if None. device: of its lists, an accelerator if None and there is one. BLOCK_SIZE: of queries and of keys,
    multiples of 16. separate_full_blocks: list blocks apart in which every pair is seen. _compile: accepted, there is
    nothing to compile. dq_kv_order: of torch's backward, accepted and not needed.
    """
    if compute_dq_write_order:
        raise NotImplementedError(
            "compute_dq_write_order makes lists for torch's FLASH kernel, which Tilewise does not need; leave it out, "
            "or use torch's create_block_mask"
        )
    batch, heads = (1 if n is None else checks.integer(name, n, 1) for name, n in (("B", B), ("H", H)))
    blocks = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    lengths = checks.integer("Q_LEN", Q_LEN, 1), checks.integer("KV_LEN", KV_LEN, 1)
    q, k = (Cut.of(length, block) for length, block in zip(lengths, blocks, strict=True))
    schedule = schedule_of(
        mask_mod, batch, heads, q.length, k.length, block_q=q.piece, block_k=k.piece, device=_device(device)
    )
    return block_mask_from(schedule, q, k, batch, heads, mask_mod, separate_full_blocks)


@_outside_graphs
def create_mask(
    mod_fn: Function, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Device | None = None
) -> torch.Tensor:
    """What a mask_mod (b, h, q, k), or a score_mod (score, b, h, q, k) by scores other than −inf, lets be seen.

    Returns (B or 1, H or 1, Q_LEN, KV_LEN) bool on `device`, an accelerator if None and there is one.
    """
    sizes = [1 if n is None else checks.integer(name, n, 0) for name, n in (("B", B), ("H", H))]
    sizes += [checks.integer(name, n, 0) for name, n in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN))]
    where = _device(device)
    at = [torch.arange(n, device=where).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate(sizes)]
    if _arguments(mod_fn) != 5:
        return functions.of(mod_fn, None).seen(*at).contiguous()
    scores = functions.of(None, mod_fn).scored(torch.zeros((), device=where), *at)
    return (scores != -torch.inf).expand(sizes).contiguous()


def _arguments(function: Function) -> int:
    """How many arguments it must be given."""
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is inspect.Parameter.empty for p in parameters)


def _device(device: Device | None) -> torch.device:
    if device is None:
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device(device)


# ---- what is asked --------------------------------------------------------------------------------------------------


def _check_returned(return_lse: bool, return_aux: AuxRequest | None) -> bool:
    """Is the LSE asked for?"""
    if return_aux is None:
        return checks.flag("return_lse", return_lse)
    if not isinstance(return_aux, AuxRequest):
        raise TypeError(f"return_aux must be an AuxRequest or None, got {type(return_aux).__name__}")
    if return_lse:
        raise ValueError("return_lse and return_aux are both given; return_aux=AuxRequest(lse=True) says it all")
    if return_aux.max_scores:
        raise NotImplementedError("return_aux with max_scores is not served: the largest scores are never kept")
    return return_aux.lse


def _check_options(options: FlexKernelOptions | None) -> None:
    for name, value in (options or {}).items():
        hint = name.removeprefix("fwd_").removeprefix("bwd_")
        if hint not in HINTS and (name, value) != ("BACKEND", "AUTO"):
            raise NotImplementedError(
                f"kernel_options has {name!r}: {value!r}, which is no hint for torch's kernels and asks for what "
                "Tilewise does not do; leave it out, or use torch's flex_attention"
            )


def _check_inputs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested or x.dim() != 4:
            raise NotImplementedError(f"{name} is served as (batch, heads, seqlen, head_dim), got {x.dim()} dimensions")
        if x.dtype != query.dtype or x.dtype not in checks.FLOATS:
            raise NotImplementedError(
                f"query, key and value are served in one of float32, float16 and bfloat16, got {name} in {x.dtype}"
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"key must have query's head_dim {query.shape[-1]}, got {key.shape[-1]}")
    heads, heads_kv = query.shape[1], key.shape[1]
    if heads != heads_kv and not checks.flag("enable_gqa", enable_gqa):
        raise ValueError(f"key must have query's {heads} heads, got {heads_kv}; enable_gqa=True takes grouped heads")


def _check_block_mask(block_mask: BlockMask, query: torch.Tensor, key: torch.Tensor) -> None:
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask or None, got {type(block_mask).__name__}")
    if block_mask.kv_indices.device != query.device:
        raise ValueError(f"block_mask must be on {query.device} like query, got {block_mask.kv_indices.device}")
    batch, heads, *lengths = (1,) * (4 - len(block_mask.shape)) + block_mask.shape
    if lengths != [query.shape[2], key.shape[2]]:
        raise ValueError(
            f"block_mask must be for {query.shape[2]} queries and {key.shape[2]} keys, got one for {lengths[0]} and "
            f"{lengths[1]}"
        )
    for name, n, of in (("sequences", batch, query.shape[0]), ("heads", heads, query.shape[1])):
        if n not in (1, of):
            raise ValueError(f"block_mask must be of 1 or {of} {name} like query, got {n}")
    if len(key) != len(query) and (len(key), batch) != (1, len(query)):
        raise ValueError(
            f"key must have query's batch size {len(query)}, or 1 with a block_mask of {len(query)} sequences, got "
            f"{len(key)} with a block_mask of {batch}"
        )


def _check_captured(mask_mod: Function | None, score_mod: Function | None) -> None:
    if not torch.is_grad_enabled() or (mask_mod is None and score_mod is None):
        return
    if any(x.requires_grad for x in functions.of(mask_mod, score_mod).tensors):
        raise NotImplementedError(
            "score_mod or mask_mod captures a tensor that requires gradients, and what functions capture gets none; "
            "use its detach(), or torch's flex_attention to train it"
        )


def _as_autocast(name: str, x: torch.Tensor) -> torch.Tensor:
    """The tensor in autocast's dtype, where it is on."""
    kind = checks.tensor(name, x).device.type
    if torch.is_autocast_enabled(kind) and x.dtype in checks.FLOATS:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _out_like(q: torch.Tensor, value_dim: int) -> torch.Tensor:
    """(B, N, H, value_dim), its dimensions in memory in q's order, as torch's own function has them."""
    if value_dim == q.shape[-1]:
        return torch.empty_like(q)
    order = sorted(range(4), key=q.stride, reverse=True)
    return torch.empty_permuted((*q.shape[:-1], value_dim), order, dtype=q.dtype, device=q.device)
