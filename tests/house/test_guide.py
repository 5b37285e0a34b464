"""The guide to masks: its examples run as they stand, and its ten kinds of attention are what the oracle says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import variant_cases
from oracle import assert_attention
from script_cases import run_script

import tilewise

DOCS = Path(__file__).parents[2] / "docs"
GUIDE, README = (DOCS / "guide-masks.md").read_text(), (DOCS.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
TEN = r"^o = attention\(.*\)  # (.*)$"  # a line and its name


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run(number, tmp_path):
    done = run_script(EXAMPLES[number], folder=tmp_path, environment={}, logs=tmp_path, seconds=300)
    assert done.returncode == 0, done.stderr
    if "draw(" in EXAMPLES[number]:
        assert (tmp_path / "documents.png").stat().st_size > 1000
    if "except TypeError" in EXAMPLES[number]:
        assert "write & | ~ for `and`" in done.stdout


def test_readme_has_the_same_ten():
    in_guide, in_readme = ([m.group() for m in re.finditer(TEN, text, re.M)] for text in (GUIDE, README))
    assert in_guide == in_readme
    assert len(in_guide) == 10
    assert "(docs/guide-masks.md)" in README


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
        assert (DOCS / name).stat().st_size > 10_000
        assert Path(name).name in (DOCS / "pictures" / "draw.py").read_text()
