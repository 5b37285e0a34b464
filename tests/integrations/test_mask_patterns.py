"""Mask functions that are read as patterns: of two windows the narrower counts, on each side."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_overlay,
)

from tilewise.integrations.transformers_mask import Pattern, read_pattern


@pytest.mark.parametrize("sizes", [(5, 9), (9, 5), (9, 5, 7)])
def test_the_narrowest_of_several_windows_counts(sizes):
    pattern = read_pattern(and_masks(causal_mask_function, *map(sliding_window_overlay, sizes)), 100)
    assert (pattern.causal, pattern.window, pattern.documents) == (True, (4, None), None)


def test_each_side_is_narrowed_alone():
    one, other = Pattern(window=(5, 9)), Pattern(window=(7, 2))
    assert one.narrowed(other).window == other.narrowed(one).window == (5, 2)
    assert Pattern(window=(5, None)).narrowed(Pattern(window=(None, 3))).window == (5, 3)
    assert Pattern(window=(0, 0)).narrowed(Pattern()).window == (0, 0)
    assert Pattern().narrowed(Pattern(causal=True)).window is None


def test_what_one_of_both_hides_stays_hidden():
    assert read_pattern(and_masks(bidirectional_mask_function, causal_mask_function), 9).causal
    assert read_pattern(and_masks(causal_mask_function, bidirectional_mask_function), 9).causal
    documents = torch.tensor([[0, 0, 1]])
    for pattern in (Pattern(documents=documents).narrowed(Pattern()), Pattern().narrowed(Pattern(documents=documents))):
        assert pattern.documents is documents
    with pytest.raises(NotImplementedError, match="packs sequences twice"):
        Pattern(documents=documents).narrowed(Pattern(documents=documents))
