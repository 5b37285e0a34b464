"""Random functions: torch's own result, the expression's, the kernel's and what intervals say of it all agree."""

from __future__ import annotations

import warnings

import expressions
import torch
from function_cases import SCALE, boxes_of, check_never_wrong, grid, probed, true_kinds
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import functions

SIZES = expressions.SIZES
GRID = grid(SIZES)
EAGER = [x.int() for x in GRID.unbind(1)]
SCORES = torch.randn(len(GRID), generator=torch.Generator().manual_seed(3))


def eager_mask(made: expressions.Made) -> torch.Tensor:
    return torch.as_tensor(made.function(*EAGER)).expand(len(GRID))


@given(expressions.masks())
@settings(max_examples=150)
def test_masks_as_torch_computes_them(made):
    function = functions.of(made.function, None)
    assert torch.equal(function.seen(*GRID.unbind(1)), eager_mask(made)), made.source


@given(expressions.scores())
@settings(max_examples=100)
def test_scores_as_torch_computes_them(made):
    function = functions.of(None, made.function)
    expected = made.function(SCORES.double(), *EAGER).double()
    got = function.scored(SCORES.double(), *GRID.unbind(1))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m: f"{made.source}: {m}")


@given(expressions.masks(), st.sampled_from([(16, 16), (13, 24), (64, 8), (1, 1)]))
@settings(max_examples=100)
def test_blocks_are_never_wrong(made, block):
    function = functions.of(made.function, None)
    truth = true_kinds(eager_mask(made), SIZES, *block)
    check_never_wrong(function.blocks(*SIZES, *block), truth, made.source)


@given(st.lists(expressions.masks(), min_size=12, max_size=12), st.lists(expressions.scores(), min_size=8, max_size=8))
@settings(max_examples=3)
def test_kernels_compute_what_torch_does(masks, scores):
    """All of the mask's bits, the score to float32, and intervals that are never wrong and no worse than the host's."""
    made = [functions.of(m.function, None) for m in masks] + [functions.of(None, s.function) for s in scores]
    boxes = boxes_of(SIZES, 16, 16)
    found = probed(made, GRID, SCORES, boxes, SIZES)
    indices = GRID.unbind(1)
    for n, source in enumerate(masks):
        expected = made[n].seen(*indices)
        assert torch.equal(found.mask[n], expected), source
        kinds = found.seen[n].sum(1).to(torch.int8).reshape(*SIZES[:2], 4, 4)
        check_never_wrong(kinds, true_kinds(expected, SIZES, 16, 16), source)
        assert torch.equal(kinds, made[n].blocks(*SIZES, 16, 16)), source
    for n, source in enumerate(scores, len(masks)):
        expected = made[n].scored((SCORES * SCALE).double(), *indices).float()
        for got in (found.score[n], found.sided[n]):
            torch.testing.assert_close(
                got, expected, rtol=2e-4, atol=2e-4, equal_nan=True, msg=lambda m, source=source: f"{source}: {m}"
            )


warnings.filterwarnings("ignore", message=".*floor_divide.*")
