"""Blocks whose keys all lie on one side of the rows, where scores are computed otherwise: by ALiBi and by functions.

A warp has sixteen rows and a block up to 128 keys, so sequences of a few hundred tokens have blocks on either side of
a warp's rows and across them, and rows that stand exactly at a block's first and last key.
"""

from __future__ import annotations

import pytest
import torch
from forward_cases import BF16, FP16, MODES, check, check_varlen, packed
from oracle import qkv
from test_forward_fp8 import check as check_fp8
from test_forward_fp8 import problem as fp8_problem

from tilewise import BlockSchedule

# Negative, usual, and so steep that a difference of two distances of a block would lose what is between them
SLOPES = torch.tensor([-0.05, 3e4, 2.0, 50.0])


def alibi(slopes: torch.Tensor):
    return lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()


def problem(nq: int, nk: int, heads=(4, 4), head_dim: int = 64, dtype=BF16, size: float = 1.0):
    q, k, v = qkv(1, nq, nk, *heads, head_dim, dtype=dtype)
    return q * size, k, v


@pytest.mark.parametrize("shift", [-2, -1, 0])
def test_rows_at_the_edges_of_blocks(shift):
    """Rows stand at every key, in the middle of blocks, at their first and last ones, and one beside them."""
    q, k, v = problem(384, 384 + shift)
    check(q, k, v, alibi_slopes=SLOPES, mode=MODES[shift % 4])
    check(q, k, v, score=alibi(SLOPES), mode=MODES[-1 - shift])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("nq", "nk"), [(20, 390), (390, 140)])
def test_lengths_that_differ(nq, nk, exact):
    """ALiBi counts from the last key, functions from the first."""
    q, k, v = problem(nq, nk)
    for options in ({"alibi_slopes": SLOPES}, {"score": alibi(SLOPES)}):
        check(q, k, v, exact=exact, **options)


@pytest.mark.parametrize("window", [(None, 0), (130, 20), (0, None)])
def test_windows(window):
    q, k, v = problem(300, 390, (2, 2))
    check(q, k, v, window=window, alibi_slopes=SLOPES[2:])
    check(q, k, v, window=window, score=alibi(SLOPES[2:]))


def test_heads_packed_as_neighbouring_rows():
    """Each row of a lane has its own slope, and a token's rows stand at one position."""
    q, k, v = problem(140, 300, (16, 1))
    slopes = SLOPES.repeat(4)
    check(q, k, v, alibi_slopes=slopes)
    score = lambda s, b, h, q, k: torch.where(q >= k, s - slopes[h] * (q - k), s + 1.0)  # noqa: E731
    check(q, k, v, score=score, mode=MODES[3])


def test_softcap_and_any_scale():
    q, k, v = problem(200, 390)
    check(q, k, v, alibi_slopes=SLOPES, softcap=4.0, scale=-0.3)
    check(q, k, v, score=alibi(SLOPES), scale=-0.3)


def test_large_scores():
    """The reference moves in blocks on either side, by more than the exponentials can tell."""
    q, k, v = problem(200, 390, size=300.0)
    k[:, 64:70] *= 4
    check(q, k, v, alibi_slopes=SLOPES, scale=1.0)
    check(q, k, v, score=alibi(SLOPES), scale=1.0)


def test_fp8():
    q, k, v = fp8_problem(1, 150, 290, 2, 2, 64)
    descales = (torch.tensor([0.5, 2.0]), None, None)
    check_fp8(q, k, v, descales=descales, score=alibi(SLOPES[2:]))


def test_listed_blocks():
    """A block of the kernel holds units from either side of the rows, side by side."""
    kept = torch.rand(3, 13, generator=torch.Generator().manual_seed(4)) < 0.7
    kept[0] = True
    sizes = {"seqlen_q": 330, "seqlen_k": 390, "block_q": 128, "block_k": 32}
    schedule = BlockSchedule.from_blocks(kept, **sizes)
    q, k, v = problem(330, 390, (2, 2), dtype=FP16)
    check(q, k, v, schedule=schedule, alibi_slopes=SLOPES[2:])
    check(q, k, v, schedule=schedule, score=alibi(SLOPES[2:]), mode=MODES[1])


def test_beside_a_mask():
    q, k, v = problem(330, 390, (2, 2))
    check(q, k, v, mask=lambda b, h, q, k: (q - k < 140) | (k < 40), score=alibi(SLOPES[2:]))


def test_packed_sequences():
    q, k, v, *starts = packed((200, 0, 150, 3), (200, 40, 300, 0), 2, 2, 64)
    check_varlen(q, k, v, *starts, alibi_slopes=SLOPES[2:])
    check_varlen(q, k, v, *starts, score=alibi(SLOPES[2:]), mode=MODES[2])


def test_functions_of_other_kinds():
    """A line on one side only; other text on either side; rows and keys that are looked up on it; −inf on one side."""
    table, per_row = torch.randn(2, 400), torch.randn(400)
    q, k, v = problem(300, 390, (2, 2))
    scores = (
        lambda s, b, h, q, k: torch.where(q >= k, 2.0 * s + per_row[q] - 0.05 * (q - k), s + table[h, (k - q).abs()]),
        lambda s, b, h, q, k: torch.where(k > q, -torch.inf, s + (q - k).abs() * per_row[q] * 0.1),
    )
    for number, score in enumerate(scores):
        check(q, k, v, score=score, exact=number == 1, mode=MODES[number])
