"""shared_prefix_attention() as a PyTorch operator, as torch_ops.py has the other calls, and its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewise import api
from tilewise.api import gradients
from tilewise.integrations.torch_ops import TAGS, State, both, no_second, shapes
from tilewise.scores import SCHEMA_SCALING

# levels: k and v of each, in turn. lengths: None or, for each sequence of each level and then of k, its valid keys.
TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor[] levels, Tensor? lengths"
OPTIONS = f'bool causal=True, {SCHEMA_SCALING}, bool deterministic=False, bool return_lse=False, str backend="auto"'


@torch.library.custom_op(
    "tilewise::shared_prefix_attention",
    mutates_args=(),
    tags=TAGS,
    schema=f"({TENSORS}, *, {OPTIONS}) -> (Tensor, Tensor)",
)
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    levels: Sequence[torch.Tensor],
    lengths: torch.Tensor | None,
    **options: Any,
) -> State:
    """q (B, Nq, Hq, D), k, v (B, Nk, Hkv, D or Dv) -> o (B, Nq, Hq, Dv), lse (B, Hq, Nq) float32 or (0,)."""
    *of_levels, own = _lengths(lengths, [*levels[::2], k])
    pairs = zip(levels[::2], levels[1::2], of_levels, strict=True)
    given = [(a, b) if n is None else (a, b, n) for a, b, n in pairs]
    return both(api.shared_prefix_attention(q, given, k, v, sinks=sinks, lengths=own, **options))


@_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any, return_lse: bool = False, **options: Any
) -> State:
    return shapes(q, (q.shape[0], q.shape[2], q.shape[1]) if return_lse else None, v.shape[-1])


@torch.library.custom_op(
    "tilewise::shared_prefix_attention_backward",
    mutates_args=(),
    tags=TAGS,
    schema=f"({TENSORS}, Tensor o, Tensor lse, Tensor? d_o, Tensor? d_lse, *, {OPTIONS}) -> Tensor[]",
)
def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    levels: Sequence[torch.Tensor],
    lengths: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    d_o: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    *,
    causal: bool = True,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
    **scaling: Any,
) -> list[torch.Tensor]:
    """Of q, k, v, sinks ((0,) without), and each of levels."""
    rest = {"deterministic": deterministic, "backend": backend}
    valid = _lengths(lengths, [*levels[::2], k])
    node = gradients.SharedPrefix(api.shared_prefix_attention, {"causal": causal, **scaling}, rest, valid)
    tensors: Any = (q, k, v, sinks, *levels)
    if lse.numel() * o.shape[-1] != o.numel():  # the forward was not asked for it
        lse, d_lse = node.forward(*tensors)[1], None
    found = gradients.found(node, tensors, (o, lse), (d_o, d_lse))
    return [q.new_empty(0) if x is None else x for x in found]


@_backward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, levels: Any, *others: Any, **options: Any) -> Any:
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, sinks, *levels)]


def _lengths(lengths: torch.Tensor | None, keys: Sequence[torch.Tensor]) -> list[list[int] | None]:
    """The valid keys of the sequences of each of `keys` (B, N, Hkv, D); None where those are all."""
    if lengths is None:
        return [None] * len(keys)
    split = lengths.split([len(x) for x in keys])
    listed: list[list[int]] = [x.tolist() for x in split]
    return [None if all(n == x.shape[1] for n in one) else one for one, x in zip(listed, keys, strict=True)]


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: State) -> None:
    q, k, v, sinks, levels, lengths = inputs
    gradients.check_kernels(q, v, keyword_only_inputs["backend"])
    ctx.save_for_backward(q, k, v, sinks, lengths, *output, *levels)
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_o: torch.Tensor | None, d_lse: torch.Tensor | None) -> Any:
    q, k, v, sinks, lengths, o, lse, *levels = ctx.saved_tensors
    d_q, d_k, d_v, d_sinks, *d_levels = _backward(q, k, v, sinks, levels, lengths, o, lse, d_o, d_lse, **ctx.options)
    return d_q, d_k, d_v, None if sinks is None else d_sinks, d_levels, None


_attention.register_autograd(_gradients, setup_context=_keep)
_backward.register_autograd(no_second)
