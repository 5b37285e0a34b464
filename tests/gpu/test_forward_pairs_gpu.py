"""V of another head dimension than Q and K, and wide ones, on a card: random problems, and large ones."""

from __future__ import annotations

import pytest
import torch
from forward_cases import BF16
from pair_cases import EVERY_KIND, PairChance, check_pair, tensors

from tilewise.gpu.calls import GpuCall
from tilewise.scores import Scores

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("number", range(len(EVERY_KIND)))
def test_random_problems(number):
    """300 and more in all."""
    for seed in range(11):
        PairChance(100 * number + seed, EVERY_KIND[number], longest=1500).check("cuda")


@pytest.mark.parametrize("dims", [(192, 128), (512, 512), (576, 512), (64, 512)], ids=str)
def test_many_tiles(dims):
    """As many as keep every multiprocessor busy for several rounds, the same bits each time."""
    q, k, v = tensors((2, 2100), (2, 2100), (8, 2), dims, device="cuda")
    first, _ = check_pair(q, k, v, causal=True)
    for _ in range(3):
        again, _ = check_pair(q, k, v, causal=True)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


def test_a_call_made_again():
    """The short way allocates O with V's head dimension."""
    q, k, v = tensors((2, 300), (2, 300), (4, 4), (192, 128), device="cuda", dtype=BF16)
    call = GpuCall(Scores((None, 0), scale=192**-0.5), False)
    first = call(q, k, v, None, None, None)
    assert call.plain
    assert torch.equal(call.again(q, k, v), first)
