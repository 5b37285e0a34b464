"""Attention under a padding mask, as an operator: sequences whose keys are seen by all queries alike, or by none.

What `sdpa` runs for such a mask, eagerly and in compiled graphs, with its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from tilewise import api
from tilewise.api import gradients
from tilewise.api.backward import attention_backward

from .torch_ops import TAGS, State

Keys = slice | torch.Tensor


@torch.library.custom_op(
    "tilewise::attention_seen_keys",
    mutates_args=(),
    tags=TAGS,
    schema="(Tensor q, Tensor k, Tensor v, Tensor seen, *, float? scale=None) -> (Tensor, Tensor)",
)
def attention_seen_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, *, scale: float | None = None
) -> State:
    """attention() over the keys that are seen, the others not being touched: what a padding mask means.

    q (B, Nq, Hq, D), k, v (B, Nk, Hkv, D or Dv) on the CPU, seen bool (B, Nk), or (1, Nk) for all sequences alike ->
    o (B, Nq, Hq, Dv), lse (B, Hq, Nq) float32.
    """
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    for these, keys in _sequences(len(q), seen):
        _, lse[these] = api.attention(
            q[these], k[these, keys], v[these, keys], scale=scale, out=o[these], return_lse=True
        )
    return o, lse


@attention_seen_keys.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any, **options: Any) -> State:
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return o, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


@torch.library.custom_op(
    "tilewise::attention_seen_keys_backward",
    mutates_args=(),
    tags=TAGS,
    schema=(
        "(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor seen, Tensor o, Tensor lse, *, float? scale=None) -> "
        "(Tensor, Tensor, Tensor)"
    ),
)
def attention_seen_keys_backward(
    d_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, contiguous; those of keys that are not seen are 0."""
    d_q, d_k, d_v = (x.new_zeros(x.shape) for x in (q, k, v))
    for these, keys in _sequences(len(q), seen):
        of = (q[these], k[these, keys], v[these, keys], o[these], lse[these])
        d_q[these], d_k[these, keys], d_v[these, keys] = attention_backward(d_o[these], *of, scale=scale)
    return d_q, d_k, d_v


@attention_seen_keys_backward.register_fake
def _(d_o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any, **options: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: State) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.scale = keyword_only_inputs["scale"]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_o: torch.Tensor, _: Any) -> Any:
    return *torch.ops.tilewise.attention_seen_keys_backward(d_o, *ctx.saved_tensors, scale=ctx.scale), None


def _no_second(ctx: Any, *grads: Any) -> NoReturn:
    gradients.refuse_second()


attention_seen_keys.register_autograd(_backward, setup_context=_setup)
attention_seen_keys_backward.register_autograd(_no_second)


def _sequences(batch: int, seen: torch.Tensor) -> Iterator[tuple[slice, Keys]]:
    """Sequences that see the same keys, and those keys: a slice if they are at an end, as padding leaves them."""
    step = 1 if len(seen) > 1 else batch
    for at, row in zip(range(0, batch, max(1, step)), seen, strict=False):
        (keys,) = row.nonzero(as_tuple=True)
        run: Keys = keys
        if len(keys) and int(keys[-1]) - int(keys[0]) == len(keys) - 1:
            run = slice(int(keys[0]), int(keys[-1]) + 1)
        yield slice(at, at + step), run
