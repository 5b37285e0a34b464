"""Edges of drawing a token: numbers and probabilities that meet exactly, and every part of a request's sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_models import drawn

from tilewise.serving.requests import Request, Sample
from tilewise.serving.sampling import Kind, Sampling, uniforms

TOP = 1 - 2.0**-53  # the largest number that is drawn with


def choose(logits, uniform=0.0, **sampling) -> int:
    sampling = {"temperature": 1.0, **sampling}
    logits = torch.tensor([logits], dtype=torch.float32)
    return int(drawn([Sampling(**sampling)], logits, torch.tensor([uniform], dtype=torch.float64)))


@pytest.mark.parametrize("top_k", [0, 2])
def test_zero_draws_no_token_without_weight(top_k):
    """Where the cumulative probability is still 0 the token before it is not meant."""
    assert choose([-math.inf, 0.0], 0.0, top_k=top_k) == 1
    assert choose([-math.inf, -math.inf, 0.0, 0.0], 0.0, top_k=top_k) == 2


def test_a_number_that_meets_a_boundary_draws_the_token_after_it():
    assert choose([0.0, 0.0], 0.5) == 1
    assert choose([0.0, 0.0], math.nextafter(0.5, 0.0)) == 0
    assert [choose([0.0] * 4, n / 4) for n in range(4)] == [0, 1, 2, 3]
    assert choose([0.0] * 4, TOP) == 3


def test_top_p_takes_the_fewest_tokens_that_add_up_to_it():
    """Half of the probability is reached by one of two equal tokens: the second is one too many."""
    assert choose([0.0, 0.0], 0.999, top_p=0.5) == 0
    assert choose([0.0, 0.0], 0.999, top_p=0.5001) == 1
    assert choose([0.0] * 4, 0.999, top_p=0.5) == 1
    assert choose([0.0] * 4, 0.999, top_p=0.75) == 2
    assert choose([0.0, 9.0], 0.999, top_p=1e-9) == 1, "the likeliest is always among them"


def test_top_k_comes_before_top_p():
    """Of four equal tokens two are left, and half of what is left is one."""
    assert choose([0.0] * 4, 0.999, top_k=2, top_p=0.5) == 0
    assert choose([0.0] * 4, 0.999, top_k=2) == 1
    assert choose([1.0, 0.0, 2.0], 0.999, top_k=1) == 2
    assert choose([1.0, 0.0, 2.0], 0.999, top_k=2) == 0, "in the order of their probabilities"


def test_equal_tokens_stay_in_their_order():
    assert [choose([0.0] * 3, (n + 0.5) / 3, top_k=3, top_p=0.999) for n in range(3)] == [0, 1, 2]


def test_the_temperature_divides():
    """Weights 3 : 1 at temperature 1 are 9 : 1 at one half and √3 : 1 at two."""
    logits = [math.log(3.0), 0.0]
    for temperature, share in ((1.0, 3 / 4), (0.5, 9 / 10), (2.0, 3**0.5 / (1 + 3**0.5))):
        assert choose(logits, share - 1e-6, temperature=temperature) == 0
        assert choose(logits, share + 1e-6, temperature=temperature) == 1


def test_rows_have_a_sampling_each():
    rows = [Sampling(), Sampling(1.0), Sampling(1.0, top_k=1), Sampling(1.0, top_p=0.5), Sampling(100.0)]
    logits = torch.tensor([[0.0, 2.0, 0.0]]).repeat(len(rows), 1)
    assert drawn(rows, logits, torch.full((len(rows),), TOP, dtype=torch.float64)).tolist() == [1, 2, 1, 1, 2]


def test_a_row_draws_what_it_draws_alone():
    """Whatever the others of its batch ask for, to the token."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    rows = [Sampling(), Sampling(1.0), Sampling(0.7, top_k=9), Sampling(1.3, top_p=0.8), Sampling(0.2)]
    for number in (0.0, 0.1, 0.35, 0.6, 0.9, TOP):
        uniform = torch.full((len(rows),), number, dtype=torch.float64)
        together = drawn(rows, logits.repeat(len(rows), 1), uniform).tolist()
        assert together == [int(drawn([row], logits, uniform[:1])) for row in rows]


def test_what_a_sampling_asks_for():
    """A greedy one filters nothing, whatever else it says; one that draws is not for nothing sorted."""
    kinds = [Sampling(), Sampling(0.0, 5, 0.5), Sampling(1.0), Sampling(1.0, top_k=1), Sampling(1.0, top_p=0.5)]
    assert [one.kind for one in kinds] == [Kind.GREEDY, Kind.GREEDY, Kind.DRAWN, Kind.FILTERED, Kind.FILTERED]


def test_what_a_sample_draws_with_tells_seed_prompt_sample_and_place():
    """Each of the four changes the number; the place is how many tokens it has."""
    request = Request(5, np.array([1]), None, Sampling(1.0, seed=7))
    sample = Sample(request, 2, [4, 4, 4])
    assert sample.draw == (7, 5, 2, 3)
    assert sample.age == (5, 2)
    base = (7, 5, 2, 3)
    others = [tuple(x + (i == j) for j, x in enumerate(base)) for i in range(4)]
    found = uniforms([base, *others, (5, 7, 2, 3), (7, 5, 3, 2)])
    assert len(set(found.tolist())) == len(found)
    assert uniforms([base])[0] == found[0]
    assert ((found >= 0) & (found < 1)).all()
