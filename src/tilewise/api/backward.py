"""The backward pass of `attention` by itself, for callers that keep o and the LSE.

Their call is no single node of autograd's graph: because keys travel, or because somebody else records the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise import functions
from tilewise.api import gradients, rewritten
from tilewise.api.on_cpu import full_precision
from tilewise.api.prefill import attention
from tilewise.scores import ScoreOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Gradients(NamedTuple):
    """Of q, k and v, with their shapes; float32, or the inputs' dtype where a kernel rounds."""

    d_q: torch.Tensor
    d_k: torch.Tensor
    d_v: torch.Tensor


def attention_backward(
    d_o: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    d_lse: torch.Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    **options: Unpack[ScoreOptions],
) -> Gradients:
    """q: (B, Nq, Hq, D); o, d_o: (B, Nq, Hq, Dv); k, v: (B, Nk, Hkv, D or Dv); lse, d_lse: (B, Hq, Nq) float32; options
    as in `attention`.

    o and lse may be those of rows that see other keys beside these, and sinks, which are no option here: the gradients
    are then the share of these keys, and shares add up. A gradient that is None is 0.
    """
    rest: dict[str, Any] = {"exact": False, "deterministic": deterministic, "dropout_p": 0.0, "backend": backend}
    rest |= {"schedule": None, "mask": None, "score": None}
    function = None
    if (chunk := options.get("chunk")) is not None:
        chunk, mask = rewritten.chunked(q, k, chunk, None, None, backend)
        options, function = {**options, "chunk": chunk}, None if mask is None else functions.of(mask, None)
    node = gradients.Dense(attention, options, rest, function)
    with torch.no_grad(), full_precision():
        d_q, d_k, d_v, *_ = node.backward((q, k, v, None, None), (o, lse), (d_o, d_lse))
    assert d_q is not None
    assert d_k is not None
    assert d_v is not None
    return Gradients(d_q, d_k, d_v)
