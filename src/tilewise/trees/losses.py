"""What is computed per token of a tree, with its gradients: values for the tokens of sequences, log-probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

LOGITS_AT_ONCE = 1 << 24  # that are held in float32


class Unpack(torch.autograd.Function):
    """x (total, …) -> x[index]; its backward sums, in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.total = x.shape[0]
        return x[index]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return Pack.apply(grad, index, ctx.total), None  # type: ignore[no-untyped-call]


class Pack(torch.autograd.Function):
    """x (len(index), …) -> (total, …): row n is added to row index[n], in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, total: int) -> torch.Tensor:
        ctx.save_for_backward(index)
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.new_zeros((total, *x.shape[1:]), dtype=wide).index_add_(0, index, x.to(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return Unpack.apply(grad, index), None, None  # type: ignore[no-untyped-call]


class Logprobs(torch.autograd.Function):
    """logits (total, vocabulary), previous and tokens (total,) -> of each token its log-probability, float32 (total,),
    after the token before it; 0 for tokens that none comes before.

    Nothing as large as the logits is made in float32, and backward makes their gradient alone.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, previous: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        lse = torch.cat([torch.logsumexp(x.float(), -1) for x in logits.split(_rows(logits))])
        rows = previous.clamp(min=0)
        ctx.save_for_backward(logits, previous, tokens, lse)
        return (logits[rows, tokens].float() - lse[rows]).masked_fill(previous < 0, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        logits, previous, tokens, lse = ctx.saved_tensors
        grad = grad.float().masked_fill(previous < 0, 0.0)
        of_row = torch.zeros_like(lse).index_add_(0, previous.clamp(min=0), grad)
        found = torch.empty_like(logits)
        step, vocabulary = _rows(logits), logits.shape[1]
        for start in range(0, len(logits), step):
            rows = slice(start, start + step)
            part = (logits[rows].float() - lse[rows, None]).exp_().mul_(-of_row[rows, None])
            here = (previous >= start) & (previous < start + step)
            at = torch.where(here, (previous - start) * vocabulary + tokens, 0)
            part.view(-1).scatter_add_(0, at, torch.where(here, grad, 0.0))
            found[rows] = part
        return found, None, None


def _rows(logits: torch.Tensor) -> int:
    return max(1, LOGITS_AT_ONCE // max(1, logits.shape[1]))
