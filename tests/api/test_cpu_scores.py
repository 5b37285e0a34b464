"""ALiBi and soft-capping on the CPU, over more rows and keys than one piece of work takes: right, in little memory."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import assert_attention, qkv, randn

import tilewise.cpu.lines
import tilewise.cpu.products
from tilewise import attention

BANDS = [{}, {"causal": True}, {"window": (300, 40)}, {"window": (None, 5)}, {"window": (0, 0)}]
LENGTHS = [(530, 700), (600, 290)]  # with fewer keys the first rows see none under some bands


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_alibi(options, lengths):
    q, k, v = qkv(2, *lengths, 4, 2, 32)
    slopes = torch.tensor([[0.5, 0.01, 3.0, 0.0], [0.1, -0.01, 50.0, 1e-4]])  # of each sequence
    got = attention(q, k, v, alibi_slopes=slopes, return_lse=True, **options)
    assert_attention(got, q, k, v, alibi_slopes=slopes, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alibi_in_16_bits(dtype):
    q, k, v = qkv(1, 300, 520, 4, 1, 64, dtype=dtype)
    options = {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "causal": True}
    assert_attention(attention(q, k, v, return_lse=True, **options), q, k, v, **options)


@pytest.mark.parametrize("options", BANDS, ids=str)
def test_alibi_takes_a_line_instead_of_a_matrix(options, monkeypatch):
    """What torch's kernel is given as a mask lies in memory for rows + keys values per head, not rows × keys."""
    q, k, v = qkv(1, 700, 700, 4, 2, 16)
    sizes, flash = [], tilewise.cpu.lines.flash

    def noted(q, k, v, scoring, triangle, hidden):
        assert hidden.bias.shape[-2:] == (q.shape[2], k.shape[1])
        sizes.append(hidden.bias.untyped_storage().nbytes() / (4 * q.shape[1] * (q.shape[2] + k.shape[1])))
        return flash(q, k, v, scoring, triangle, hidden)

    def refused(*_):
        raise AssertionError("ALiBi alone needs no scores of ours")

    monkeypatch.setattr("tilewise.cpu.lines.flash", noted)
    monkeypatch.setattr("tilewise.cpu.tiles.product_state", refused)
    attention(q, k, v, alibi_slopes=torch.rand(4), **options)
    assert sizes
    assert max(sizes) < 1


@pytest.mark.parametrize("softcap", [0.5, 30.0, 50.0, 60.0])  # scores up to 50 take a shorter way
@pytest.mark.parametrize(
    "options", [*BANDS, {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.1, 3.0, 0.0])}], ids=str
)
def test_softcap(softcap, options):
    q, k, v = qkv(1, 330, 600, 4, 2, 16, size=20.0)
    options = {"softcap": softcap, **options}
    assert_attention(attention(q, k, v, return_lse=True, **options), q, k, v, **options)


@pytest.mark.parametrize("softcap", [30.0, 50.0, 150.0])
def test_visible_scores_far_below_hidden_ones(softcap):
    """A hidden key whose score is the largest there is takes no digits from rows that see the least ones."""
    q, k, v = qkv(1, 300, 300, 2, 2, 16)
    q = q.abs()
    k = -1000.0 * k.abs()
    k[:, -1] *= -1.0
    options = {"softcap": softcap, "causal": True}
    got = attention(q, k, v, return_lse=True, **options)
    assert_attention(got, q, k, v, **options)
    assert math.isclose(got[1][0, 0, 0].item(), -softcap, rel_tol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_softcap_of_few_and_of_many_rows(rows, dtype):
    q, k, v = qkv(2, rows, 700, 8, 2, 32, dtype=dtype)
    options = {"softcap": 20.0, "causal": True}
    assert_attention(attention(q, k, v, return_lse=True, **options), q, k, v, **options)


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"softcap": 60.0}, {"alibi_slopes": torch.ones(2)}], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_key_reaches_only_the_rows_that_see_it(options, bad):
    q, k, v = qkv(1, 270, 270, 2, 2, 8)
    k[:, 200] = bad
    o = attention(q, k, v, causal=True, **options)
    before = attention(q[:, :200], k[:, :200], v[:, :200], causal=True, **options)
    assert torch.allclose(o[:, :200], before, atol=1e-6)
    if math.isnan(bad):
        assert torch.isnan(o[:, 200:]).all()


def test_scores_take_the_memory_of_a_tile(monkeypatch):
    """However long the sequences are: that of so many scores per thread, K and V of some heads, and no more."""
    made = []
    floats = tilewise.cpu.products._floats

    def noted(*shape, device):
        made.append(math.prod(shape))
        return floats(*shape, device=device)

    monkeypatch.setattr("tilewise.cpu.products._floats", noted)
    for length in (1024, 2048):
        attention(*qkv(1, length, length, 8, 2, 16), softcap=30.0)
    scores, loaded = made[::2], made[1::2]
    assert max(scores) <= tilewise.cpu.products.SCORES_PER_CORE * torch.get_num_threads()
    assert max(loaded) <= 2 * 2 * 2048 * 16


def test_masks_of_every_shape_become_minus_infinity():
    """What is added where a pair is hidden is −inf and nothing else, and 0 where it is seen."""
    seen = randn(40, 70) > 0
    seen[3] = False
    view = tilewise.cpu.scoring.counted(40, 70)
    object.__setattr__(view, "seen", seen[None, None])
    assert torch.equal(view.bias[0, 0], torch.where(seen, 0.0, -math.inf))
    assert torch.equal(view.blind[0, 0], ~seen.any(-1))
