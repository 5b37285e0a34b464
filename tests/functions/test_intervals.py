"""What interval arithmetic says of blocks: exact where it should be, never wrong, on the host and in kernels alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from function_cases import SIZES, boxes_of, check_never_wrong, grid, probed, true_kinds, well_known

from tilewise import functions
from tilewise.functions.function import Function

BLOCKS = ((8, 8), (5, 16), (40, 56))


def truth_of(function: Function, sizes: Any, block: tuple[int, int]) -> torch.Tensor:
    return true_kinds(function.seen(*grid(sizes).unbind(1)), sizes, *block)


def emulated_kinds(made: list[Function], sizes: Any, block: tuple[int, int]) -> torch.Tensor:
    """(functions, B, H, blocks of q, blocks of k), as the kernel's `seen` has them."""
    found = probed(made, grid((1, 1, 1, 1)), torch.zeros(1), boxes_of(sizes, *block), sizes).seen
    shape = truth_of(made[0], sizes, block).shape
    return found.sum(2).to(torch.int8).reshape(len(made), *shape)


@pytest.mark.parametrize("block", BLOCKS)
def test_well_known_masks_are_exact(block):
    """Also at ragged ends, and where the mask depends on the batch."""
    known = {name: mask for name, (mask, _) in well_known().items() if mask is not None}
    made = {name: functions.of(mask, None) for name, mask in known.items()}
    device = dict(zip(known, emulated_kinds(list(made.values()), SIZES, block), strict=True))
    for name, function in made.items():
        truth = truth_of(function, SIZES, block)
        host = function.blocks(*SIZES, *block)
        assert (host.shape, host.dtype) == (truth.shape, torch.int8)
        check_never_wrong(host, truth, name)
        assert torch.equal(device[name], host), name
        if name in ("causal", "window", "prefix", "documents", "documents causal", "alibi", "nothing"):
            assert torch.equal(host, truth), name


def edges() -> dict[str, Callable[..., Any]]:
    """Masks whose intervals meet what floats and 32-bit integers have at their ends."""
    n = 64
    odd = torch.linspace(-3, 3, n)
    odd[[5, 40]] = torch.nan
    odd[[9, 50]] = torch.inf
    odd[[20, 51]] = -torch.inf
    huge = torch.arange(n) * 2**30  # wraps past 32 bits
    signs = torch.arange(n).int() - 20
    zero = torch.zeros(n).int()
    big = torch.full((n,), 3e38)
    return {
        "NaN <": lambda b, h, q, k: odd[k] < 1.0,
        "NaN >=": lambda b, h, q, k: odd[k] >= -1e30,
        "NaN !=": lambda b, h, q, k: odd[k] != 0.5,
        "NaN abs": lambda b, h, q, k: odd[k].abs() >= 0.0,
        "NaN max": lambda b, h, q, k: torch.maximum(odd[k], 0.0 * odd[q]) >= -9.0,
        "NaN clamp": lambda b, h, q, k: odd[k].clamp(-1, 1) <= 1.0,
        "NaN not": lambda b, h, q, k: ~(odd[k] < 10.0),
        "NaN to bool": lambda b, h, q, k: odd[k].bool(),
        "NaN to int": lambda b, h, q, k: odd[k].int() < 3,
        "NaN where": lambda b, h, q, k: torch.where(k < q, odd[k], 1.0) > -4.0,
        "inf - inf": lambda b, h, q, k: odd[q] - odd[k] <= 1e38,
        "0 * inf": lambda b, h, q, k: odd[q] * (k * 0.0) == 0.0,
        "inf / inf": lambda b, h, q, k: (odd[q] / odd[k]).abs() >= 0.0,
        "overflow to inf": lambda b, h, q, k: big[q] * 2.0 - big[k] * 2.0 <= 0.0,
        "sqrt of less than 0": lambda b, h, q, k: odd[k].sqrt() >= 0.0,
        "log of less than 0": lambda b, h, q, k: odd[k].log() <= 5.0,
        "rsqrt of 0": lambda b, h, q, k: (signs[k] * 1.0).rsqrt() >= 0.0,
        "sin of inf": lambda b, h, q, k: odd[k].sin() <= 1.0,
        "exp": lambda b, h, q, k: torch.exp(odd[k] * 10.0) >= 0.0,
        "tanh": lambda b, h, q, k: torch.tanh((q - k) / 8.0) > 0.3,
        "sigmoid": lambda b, h, q, k: torch.sigmoid((q - k) * 1.0) < 0.9,
        "round": lambda b, h, q, k: torch.round((q - k) / 4.0) == 2.0,
        "floor of a float": lambda b, h, q, k: ((q - k) / 4.0).floor() >= 3.0,
        "wrapping sum": lambda b, h, q, k: q * 50000000 + k * 50000000 >= 0,
        "wrapping product": lambda b, h, q, k: (q * 100000) * (k * 1000) >= 0,
        "wrapping neg": lambda b, h, q, k: -(q + (-2147483647) - 1) <= 0,
        "wrapping abs": lambda b, h, q, k: (q + (-2147483647) - 1).abs() > 0,
        "wrapping square": lambda b, h, q, k: (q * 2000) * (q * 2000) >= 0,
        "int64 that wraps": lambda b, h, q, k: huge[k] >= 0,
        "floordiv by a negative": lambda b, h, q, k: (q - k) // -7 >= 1,
        "mod by a negative": lambda b, h, q, k: (q - k) % -7 >= -3,
        "mod": lambda b, h, q, k: (q - k) % 64 < 30,
        "floordiv by what may be 0": lambda b, h, q, k: k // signs[q] >= 0,
        "mod by what may be 0": lambda b, h, q, k: k % signs[q] >= 0,
        "mod by 0": lambda b, h, q, k: k % zero[q] == k,
        "floordiv by a range": lambda b, h, q, k: (k - 20) // (q + 1) >= 0,
        "mod by a range": lambda b, h, q, k: k % (q + 1) == k,
        "mod by a negative range": lambda b, h, q, k: (k - 9) % (q - 70) <= 0,
        "power": lambda b, h, q, k: (k % 3) ** (q % 4) < 2,
        "bits": lambda b, h, q, k: (q & 24) == (k & 24),
        "bits of negatives": lambda b, h, q, k: ((q - 30) & (k - 30)) < 0,
        "or": lambda b, h, q, k: (q | k) < 32,
        "xor": lambda b, h, q, k: (q ^ k) < 16,
        "not": lambda b, h, q, k: ~q + k < 0,
        "shifts": lambda b, h, q, k: (1 << (k % 5)) + (q >> 2) > 9,
        "wrapping shift": lambda b, h, q, k: (k << 28) >= 0,
        "shift by what is too much": lambda b, h, q, k: (q >> k) == 0,
        "division by what may be 0": lambda b, h, q, k: q / (k - 20) >= 0.0,
        "circle": lambda b, h, q, k: (q - k) ** 2 + (h * 8) ** 2 <= 200,
        "less than itself": lambda b, h, q, k: odd[k] == odd[k],
    }


@pytest.mark.parametrize("block", [(16, 16), (9, 64), (2, 1)])
def test_edges_are_never_wrong(block):
    sizes = (1, 2, 64, 64)
    made = {name: functions.of(mask, None) for name, mask in edges().items()}
    device = emulated_kinds(list(made.values()), sizes, block)
    for n, (name, function) in enumerate(made.items()):
        truth = truth_of(function, sizes, block)
        check_never_wrong(function.blocks(*sizes, *block), truth, name)
        check_never_wrong(device[n], truth, name)
        assert torch.equal(device[n], function.blocks(*sizes, *block)), name


def test_blocks_that_are_told():
    """Never wrong is easy for who says nothing: how many of the blocks that are whole or empty must be told so."""
    sizes, block = (1, 2, 64, 64), (16, 16)
    wanted = {"tanh": 1, "round": 1, "circle": 1, "or": 1, "NaN <": 1, "floor of a float": 1, "mod": 0.5}
    for name, share in wanted.items():
        function = functions.of(edges()[name], None)
        kinds, truth = function.blocks(*sizes, *block), truth_of(function, sizes, block)
        assert (kinds != 1).sum() >= share * (truth != 1).sum(), (name, kinds, truth)


def test_floats_round_as_the_kernel_does():
    """3.3 · q in float32 is compared with itself at another place: rounding must not part the two."""
    products = torch.arange(64) * torch.tensor(3.3)
    made = [functions.of(lambda b, h, q, k: q * 3.3 >= products[k], None)]
    sizes = (1, 1, 64, 64)
    for block in ((1, 1), (4, 4)):
        truth = truth_of(made[0], sizes, block)
        assert torch.equal(made[0].blocks(*sizes, *block), truth)
        assert torch.equal(emulated_kinds(made, sizes, block)[0], truth)


def test_heads_and_batches_as_ranges():
    """`seen` takes an interval for b and h too: the heads of a pack."""
    widths = torch.tensor([4, 8, 30])
    function = functions.of(lambda b, h, q, k: (q - k).abs() < widths[h] + b, None)
    box = torch.tensor(
        [[[0, 1], [0, 1], [0, 3], [0, 3]], [[0, 1], [0, 2], [32, 35], [0, 3]], [[0, 0], [1, 2], [8, 9], [2, 9]]]
    )
    found = probed([function], grid((1, 1, 1, 1)), torch.zeros(1), box).seen[0]
    assert found.tolist() == [[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]


def test_lookups_over_many_entries():
    """Kernels look at up to 256 entries; the host knows the least and the largest of any number."""
    rising = torch.arange(1024)
    function = functions.of(lambda b, h, q, k: rising[k] < 2000, None)
    bytes_ = torch.zeros(1024, dtype=torch.uint8)
    narrow = functions.of(lambda b, h, q, k: bytes_[k] < 256, None)
    sizes = (1, 1, 1, 1024)
    assert function.blocks(*sizes, 1, 1024).item() == 2
    for size, kind in ((256, 2), (257, 1)):
        assert emulated_kinds([function], sizes, (1, size))[0].flatten()[0].item() == kind
    assert emulated_kinds([narrow], sizes, (1, 1024)).item() == 2  # by its dtype


def test_lookups_of_several_dimensions():
    """Dense masks, tables by head, transposed ones, and indices that are neither q nor k."""
    draw = torch.Generator().manual_seed(5)
    dense = torch.rand(40, 56, generator=draw) < 0.97
    dense[8:24, 16:32] = False
    table = torch.randint(0, 9, (3, 4, 7), generator=draw).permute(1, 2, 0)  # (4, 7, 3)
    masks = {
        "dense": lambda b, h, q, k: dense[q, k],
        "transposed": lambda b, h, q, k: dense.t()[k, q],
        "three": lambda b, h, q, k: table[q // 10][k // 8, h] > 4,
        "band": lambda b, h, q, k: dense[(q - k).clamp(0, 39), k // 2],
        "past the ends": lambda b, h, q, k: dense[q + 20, k - 9],
    }
    for name, mask in masks.items():
        function = functions.of(mask, None)
        for block in BLOCKS:
            truth, kinds = truth_of(function, SIZES, block), function.blocks(*SIZES, *block)
            check_never_wrong(kinds, truth, name)
            if name in ("dense", "transposed", "past the ends"):
                assert torch.equal(kinds, truth), name
        device = emulated_kinds([function], SIZES, (8, 8))[0]
        check_never_wrong(device, truth_of(function, SIZES, (8, 8)), name)


def test_no_mask_and_no_queries():
    scored = functions.of(None, lambda s, b, h, q, k: s)
    assert scored.blocks(2, 3, 40, 56, 16, 16).unique().tolist() == [2]
    causal = functions.of(lambda b, h, q, k: k <= q, None)
    assert causal.blocks(2, 3, 0, 56, 16, 16).shape == (2, 3, 0, 4)
