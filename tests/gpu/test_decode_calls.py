"""tilewise.decode by the kernels, in the emulator: what the call hands on to them, against the oracle."""

from __future__ import annotations

import pytest
import torch
from decode_cases import assert_decoded, make_cache, queries

from tilewise import decode, plan_decode

WINDOWS = [None, (20, None), (20, 5), (None, 3), (0, 0)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_query_tokens_see_no_later_ones_whatever_the_window_allows(window):
    cache, seqs = make_cache((40, 3, 64, 17))
    q = queries(cache, seqs, tokens=3)
    plan = plan_decode(cache, seqs, num_heads=q.shape[2], tokens_per_seq=3, window=window)
    assert_decoded(decode(q, cache, 0, plan, return_lse=True, backend="emulator"), q, cache, seqs, window=window)


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"softcap": 2.0}, {"sinks": torch.linspace(-2, 3, 8)}], ids=str)
def test_options_of_the_scores_reach_the_kernel(options):
    cache, seqs = make_cache((40, 3, 64, 17))
    q = queries(cache, seqs)
    plan = plan_decode(cache, seqs, num_heads=q.shape[2])
    got = decode(q, cache, 0, plan, return_lse=True, backend="emulator", **options)
    assert_decoded(got, q, cache, seqs, **options)
