"""The guide to masks: its ten kinds of attention are what the oracle says. (test_docs.py runs its examples.)

The guide to cards: its tables are what arch.py and the choice of kernels say.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import variant_cases
from oracle import assert_attention

import tilewise
from tilewise import arch
from tilewise.gpu import mma_tilings, tilings
from tilewise.scores import Scores

DOCS = Path(__file__).parents[2] / "docs"
GUIDE, README = (DOCS / "guides" / "masks.md").read_text(), (DOCS.parent / "README.md").read_text()
CARDS = (DOCS / "guides" / "cards.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
TEN = r"^o = attention\(.*\)  # (.*)$"  # a line and its name


def test_ten_are_those_that_kernels_are_tested_with():
    assert re.findall(TEN, GUIDE, re.M) == list(variant_cases.variants(1, 1, 1))


def test_each_of_the_ten_is_what_the_oracle_says(monkeypatch):
    """And where Tilewise has an option for it, what that does."""
    names, real = iter(re.findall(TEN, GUIDE, re.M)), tilewise.attention
    options = {"causal": {"causal": True}, "window": {"causal": True, "window": (256, 0)}}
    options |= {"softcap": {"softcap": 5.0}, "ALiBi": {"alibi_slopes": 2.0 ** -torch.arange(1, 5)}}
    checked = []

    def attention(q, k, v, **functions):
        name = next(names)
        got = real(q, k, v, return_lse=True, **functions)
        assert_attention(got, q, k, v, **functions)
        if name in options:
            assert_attention(got, q, k, v, **options[name])
        checked.append(name)
        return got[0]

    monkeypatch.setattr(tilewise, "attention", attention)
    exec(EXAMPLES[0], {})
    assert len(checked) == 10


def test_pictures_are_there():
    shown = re.findall(r"!\[.+?\]\((.+?)\)", GUIDE)
    assert len(shown) == 2
    for name in shown:
        assert (DOCS / "guides" / name).stat().st_size > 10_000
        assert Path(name).name in (DOCS / "pictures" / "draw.py").read_text()


# The guide to cards.


@pytest.mark.parametrize("card", arch.ARCHS)
def test_facts_of_cards_are_those_that_kernels_are_chosen_by(card):
    (row,) = re.findall(rf"^\|.*\| {card} \| (\d+) KB \| (.*) \| (.*) \|$", CARDS, re.MULTILINE)
    floats = mma_tilings.choose(card, torch.float32, 128, Scores())
    shared, fp8, float32 = arch.shared_block(card) >> 10, arch.fp8_products(card), floats.cuda_cores
    assert row == (str(shared), "FP8" if fp8 else "widened", "CUDA cores" if float32 else "TF32")


@pytest.mark.parametrize("card", arch.ARCHS)
def test_readme_says_which_kernel_a_card_runs(card):
    (row,) = [line for line in README.splitlines() if line.startswith("| ") and re.search(rf"\b{card}\b", line)]
    with arch.as_card(card):
        kernel, _ = tilings.kernel_of(torch.device("cpu"), torch.bfloat16)
    assert re.search(rf"`{kernel}`", row)
    assert "(docs/guides/cards.md)" in README


def test_plans_of_three_cards(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", CARDS, re.S)
    exec(example, {})
    assert re.findall(r"kernel +(\w+), bf16", capsys.readouterr().out) == ["forward", "forward_mma", "forward_mma"]
