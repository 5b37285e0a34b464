"""The derivative of a score is torch's own, operation by operation."""

from __future__ import annotations

import pytest
import torch

from tilewise import functions
from tilewise.functions.derivative import slope_of

TABLE = torch.linspace(0.5, 2.0, 7)
SCORES = {
    "as it is": lambda s, b, h, q, k: s,
    "without s": lambda s, b, h, q, k: TABLE[q] + k,
    "sums and products": lambda s, b, h, q, k: (2 * s - s * s * TABLE[k]) / (3 + s * s) - s,
    "softcap": lambda s, b, h, q, k: 5 * torch.tanh(s / 5) + TABLE[q % 7],
    "choices": lambda s, b, h, q, k: torch.where(s > k, torch.abs(s), -s) + torch.clamp(s, -1.0, 1.5) * q,
    "exponentials": lambda s, b, h, q, k: torch.exp(s) + torch.exp2(s * 0.5) + torch.sigmoid(s) * s,
    "roots and logarithms": lambda s, b, h, q, k: (
        torch.sqrt(s * s + 1) + torch.rsqrt(s * s + 2) + torch.log(s * s + 1) + torch.log2(s * s + 3)
    ),
    "waves": lambda s, b, h, q, k: torch.sin(s) * torch.cos(2 * s),
    "powers": lambda s, b, h, q, k: (s * s + 1) ** 1.5 + 2.0**s + (1.5 + TABLE[q]) ** s,
    "what is rounded": lambda s, b, h, q, k: torch.floor(s) * s + s % 2.5 + torch.round(s),
}


@pytest.mark.parametrize("name", SCORES)
def test_derivatives_are_torchs(name):
    function = functions.of(None, SCORES[name])
    at = torch.randn(1, 1, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    places = [torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(at.shape)]
    leaf = at.requires_grad_()
    made = function.scored(leaf, *places)
    (wanted,) = torch.autograd.grad(made.sum(), leaf) if made.requires_grad else (torch.zeros_like(at),)
    got = slope_of(function).scored(at.detach(), *places)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def times(factor):
    return lambda s, b, h, q, k: s * factor


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_numbers_are_those_of_the_function(factor):
    """Functions of one code share a trace, and not what they captured."""
    slope, zero = slope_of(functions.of(None, times(factor))), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    assert slope.scored(torch.ones(1, 1, 1, 1), zero, zero, zero, zero).item() == factor
