"""Scores in blocks whose keys all lie on one side of the rows: fewer operations, the same values."""

from __future__ import annotations

import math  # noqa: F401 (formulas use it)
import re

import pytest
import torch
from function_cases import SCALE, SIZES, grid, probed

from tilewise import functions

SLOPES = torch.tensor([0.5, -0.25, 7.0])
TABLE = torch.randn(3, 56, generator=torch.Generator().manual_seed(1))
PER_ROW = torch.randn(40, generator=torch.Generator().manual_seed(2))
PER_KEY = torch.randn(56, generator=torch.Generator().manual_seed(3))
NUMBER, INTEGER = 0.3, 5

# Score -> the sides on which it is a line along the keys
LINES = {
    "s - SLOPES[h] * (q - k).abs()": "before after",
    "s - SLOPES[h] * (k - q).abs()": "before after",
    "s + SLOPES[h] * (k - q)": "before after",
    "s - SLOPES[h] * (torch.maximum(q, k) - torch.minimum(q, k))": "before after",
    "s - NUMBER * abs(q.float() - k.float())": "before after",
    "s - SLOPES[h] * torch.where(q >= k, q - k, k - q)": "before after",
    "2 * s / SLOPES[h] - (q - k).abs() / NUMBER + PER_ROW[q]": "before after",
    "-(s + (q - k).abs() * PER_ROW[q] - b)": "before after",
    "s + torch.where(q >= k, 0.0, SLOPES[h] * (q - k))": "after",
    "torch.where(q < k, -math.inf, s - SLOPES[h] * (q - k))": "before",
    "torch.where(~(q < k) & (h >= 0), s + k, s - k)": "after",  # h >= 0 is not looked into
    "s + SLOPES[h] * (q - k).clamp(min=0)": "before",
    "s + SLOPES[h] * (k - q).clamp(0)": "after",
    "s + NUMBER * (q - k + 2).abs()": "before",
    "s + NUMBER * (q - k - 2).abs()": "after",
    "s + NUMBER * (q - k + 1).abs()": "before after",
    "s + NUMBER * (q - k - 1).abs()": "after",
    "s + NUMBER * k": "before after",
    "s + INTEGER * (q - 2 * k)": "before after",
    "s - (q - k).abs() - SLOPES[h] * (q - k)": "before after",
    # None of these is one.
    "s": "",
    "s + SLOPES[h]": "",
    "s + PER_ROW[q]": "",
    "s * (q - k)": "",
    "s - SLOPES[h] * (q - k).abs() ** 2": "",
    "s - SLOPES[h] * torch.sqrt((q - k).abs().float())": "",
    "torch.tanh(s) - SLOPES[h] * (q - k).abs()": "",
    "s - (q - k).abs() * PER_KEY[k]": "",
    "s + TABLE[h, (q - k).abs()]": "",
    "s - SLOPES[h] * ((q - k).abs() // 4)": "",
    "torch.where(q - k < INTEGER, s, s - k)": "",
    "torch.where(q > k, s, s - k)": "after",  # q may be k before
    "torch.where((q >= k) ^ (s > 0), s, -s)": "",
    "torch.where((q == k) | (q != k), s, 7 * s)": "",
    "s + torch.minimum(q, k) * SLOPES[h]": "before",
    "s + (q < k) * 3.0": "",
    "s + (k - 2147483647) * 1e-8": "before after",
    "s + (k * 214748364) * 1e-10": "",  # it may leave 32 bits
}


def score_of(source: str):
    return eval(f"lambda s, b, h, q, k: {source}", globals())


@pytest.fixture(scope="module")
def made():
    return {source: functions.of(None, score_of(source)) for source in LINES}


def test_which_scores_are_lines(made):
    for source, sides in LINES.items():
        flags = re.search(r"kLine\[3\] = \{false, (\w+), (\w+)\}", made[source].text(SIZES))
        assert flags is not None
        found = [side for side, flag in zip(("before", "after"), flags.groups(), strict=True) if flag == "true"]
        assert " ".join(found) == sides, source


def test_values_are_those_of_torch(made):
    """Each element by the text of its side; q == k belongs to the keys that are not after the row."""
    indices = grid()
    scores = torch.randn(len(indices), generator=torch.Generator().manual_seed(0))
    found = probed(list(made.values()), indices, scores, torch.zeros(0, 4, 2))
    b, h, q, k = indices.unbind(1)
    for n, source in enumerate(LINES):
        expected = score_of(source)((scores * SCALE).double(), b, h.long(), q, k)
        tolerance = {"rtol": 1e-5, "atol": 2e-5, "msg": lambda m, source=source: f"{source}: {m}"}
        torch.testing.assert_close(found.score[n].double(), expected.double(), **tolerance)
        torch.testing.assert_close(found.sided[n].double(), expected.double(), **tolerance)


def test_one_text_where_sides_do_not_matter():
    for source in ("s", "5.0 * torch.tanh(s / 5.0)", "s + TABLE[h, k]", "torch.where(q - k < INTEGER, s, 0.0)"):
        text = functions.of(None, score_of(source)).text(SIZES)
        assert "kSided = false" in text, source
        assert "constexpr (kSide" not in text, source


def test_a_known_side_leaves_no_comparison():
    text = functions.of(None, score_of("torch.where(q >= k, s + PER_KEY[k], s * TABLE[h, (k - q).abs()])")).text(SIZES)
    before, after = re.findall(r"if constexpr \(kSide == k\w+\) \{(.*?)\n        \}", text, re.DOTALL)
    assert ">=" not in before + after
    assert "t1" not in before
    assert "t0" not in after
    assert "function::within" not in after, "the range of an absolute value is not lost"


def test_numbers_do_not_change_the_text():
    def made(offset: int, slope: float):
        return functions.of(None, lambda s, b, h, q, k: s - slope * (q - k + offset).abs()).text(SIZES)

    assert made(3, 0.25) == made(-7, -4.0) == made(300, 1e-3)
