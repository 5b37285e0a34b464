"""A call of `sdpa` in two halves, for whoever records the graph instead of autograd: forward with the LSE, backward.

Both are for calls that `decide` has given to Tilewise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilewise import api
from tilewise.api.backward import attention_backward

from .sdpa import as_torch, laid
from .seen_keys import attention_seen_keys, attention_seen_keys_backward

State = tuple[torch.Tensor, torch.Tensor]


def sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> State:
    """What `sdpa` returns (..., Hq, L, Ev), and the LSE (B, Hq, L) float32, B being all leading dimensions."""
    q, k, v, seen, options = laid(query, key, value, attn_mask, is_causal, scale)
    if seen is None:
        o, lse = api.attention(q, k, v, return_lse=True, **options)
    else:
        o, lse = attention_seen_keys(q, k, v, seen, **options)
    return as_torch(o, query, key, value), lse


def sdpa_backward(
    d_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value. out, lse: what `sdpa_forward` gave; d_out: the gradient of out."""
    query, key, value = leaves = tuple(x.detach().requires_grad_() for x in (query, key, value))
    with torch.enable_grad():
        # What lies between these and our call are views, copies and zeros, whose gradients autograd knows.
        of = laid(query, key, value, attn_mask, is_causal, scale)
    q, k, v = (x.detach() for x in of[:3])
    o, d_o = (_laid_out(x, q, v.shape[-1]) for x in (out, d_out))
    if of.seen is None:
        found: tuple[torch.Tensor, ...] = attention_backward(d_o, q, k, v, o, lse, **of.options)
    else:
        found = attention_seen_keys_backward(d_o, q, k, v, of.seen, o, lse, **of.options)
    grads = [x.to(q.dtype) for x in found]
    return torch.autograd.grad([of.q, of.k, of.v], leaves, grads)


def _laid_out(x: torch.Tensor, q: torch.Tensor, value_dim: int) -> torch.Tensor:
    """x (..., Hq, L, Ev) as q (B, L, Hq, D) is, with value_dim: o is 0 beyond Ev, as v is."""
    batch, rows, heads, _ = q.shape
    return F.pad(x.reshape(batch, heads, rows, x.shape[-1]).transpose(1, 2), (0, value_dim - x.shape[-1]))
