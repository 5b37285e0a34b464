"""tilewise.sdpa beside torch's function and the float64 oracle: the same numbers, whatever the shapes and masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import DTYPES, randn
from sdpa_cases import SHAPES, check, make, padding

from tilewise.integrations.sdpa import sdpa, torch_sdpa

pytestmark = pytest.mark.usefixtures("torch_as_it_was")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 96])
def test_dtypes_and_head_dims(head_dim, dtype):
    check(*make((2, 3, 63, head_dim), (2, 3, 65, head_dim), dtype=dtype))


@pytest.mark.parametrize("seqlen_k", [1, 2, 63, 65])
@pytest.mark.parametrize("seqlen_q", [1, 2, 63, 65])
def test_is_causal_aligns_top_left(seqlen_q, seqlen_k):
    check(*make((2, 3, seqlen_q, 8), (2, 3, seqlen_k, 8)), is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES)
def test_shapes_broadcast(shapes, is_causal):
    check(*make(*shapes), is_causal=is_causal)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 8, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
        ((8, 5, 8), (1, 6, 8), (1, 6, 8)),
        ((2, 8, 5, 8), (1, 4, 6, 8), (1, 4, 6, 8)),
        ((2, 2, 8, 5, 8), (2, 2, 2, 6, 8), (2, 2, 2, 6, 4)),
    ],
)
def test_grouped_heads(shapes):
    check(*make(*shapes), enable_gqa=True, is_causal=True)


@pytest.mark.parametrize("shapes", [((2, 3, 0, 8), (2, 3, 5, 8)), ((2, 3, 5, 8), (2, 3, 0, 8)), ((0, 3, 5, 8),)])
def test_nothing_to_see(shapes):
    assert not check(*make(*shapes), is_causal=True).any()


@pytest.mark.parametrize("scale", [0.0, 1, -0.3])
def test_scale(scale):
    check(*make((2, 3, 5, 8)), scale=scale, is_causal=True)


def test_strides():
    query, key, value = make((2, 65, 3, 8), (2, 63, 3, 8))
    check(*(x.transpose(1, 2) for x in (query, key, value)))
    check(*(x.transpose(1, 2).mT.contiguous().mT for x in (query, key, value)))  # last stride is not 1
    check(*(x.transpose(1, 2)[:, ::2] for x in (query, key, value)))
    query, key, value = make((1, 2, 3, 16), (1, 2, 0, 16))
    check(*(x[..., ::2] for x in (query, key, value)))  # an empty tensor is contiguous, whatever its strides are


@pytest.mark.parametrize(
    "shapes", [((1, 2, 3, 8), (3, 2, 0, 8)), ((2, 0, 8), (3, 2, 5, 8)), ((3, 1, 4, 8), (3, 2, 0, 8)), ((0, 8), (5, 8))]
)
def test_an_empty_call_that_broadcasts_has_torchs_shape(shapes):
    query, key, value = make(*shapes)
    assert sdpa(query, key, value).shape == torch_sdpa(query, key, value).shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", [False, True])
def test_padding(left, dtype):
    tensors = make((4, 4, 9, 16), (4, 2, 65, 16), dtype=dtype)
    check(*tensors, padding(65, 1, 0, 63, left=left), enable_gqa=True)


def test_hidden_keys_of_any_pattern():
    tensors = make((2, 3, 5, 8), (2, 3, 33, 8), (2, 3, 33, 4))
    check(*tensors, randn(2, 1, 1, 33) > 0)
    for one_for_all in (randn(1, 33) > 0, randn(1, 1, 33) > 0, randn(1, 1, 1, 33) > 0):
        check(*tensors, one_for_all)
    check(*make((2, 3, 4, 5, 8), (3, 4, 6, 8)), randn(2, 1, 1, 1, 6) > 0)
    check(*make((3, 5, 8), (3, 6, 8)), randn(1, 1, 6) > 0)
    check(*make((5, 8), (6, 8)), randn(1, 6) > 0)
    check(*tensors, torch.zeros(1, 33, dtype=torch.bool))


def test_hidden_keys_are_not_touched():
    query, key, value = make((2, 3, 5, 8), (2, 3, 9, 8))
    mask = padding(4, 9)
    expected = sdpa(query, key, value, mask)
    key[0, :, 4:], value[0, :, 4:] = float("nan"), float("nan")
    assert torch.equal(sdpa(query, key, value, mask), expected)


def test_masks_that_go_to_torch():
    tensors = make((2, 3, 5, 8), (2, 3, 6, 8))
    whole = randn(5, 6) > 0
    whole[2] = False
    assert not check(*tensors, whole, by="torch")[:, :, 2].any()  # as in torch: a row that sees nothing is 0
    check(*tensors, randn(2, 3, 1, 6) > 0, by="torch")
    bias = randn(2, 1, 1, 6)
    assert torch.equal(sdpa(*tensors, bias), torch_sdpa(*tensors, bias))
    mask = randn(1, 6) > 0
    assert torch.equal(sdpa(*tensors, mask, is_causal=True), torch_sdpa(*tensors, mask, is_causal=True))


@given(data=st.data())
def test_chance(data):
    """Any shapes, options and masks: torch's answer, or torch's error."""
    size = st.sampled_from([1, 2, 3, 4])
    draw = data.draw
    rank, rows, keys = draw(st.integers(2, 5)), draw(st.integers(0, 9)), draw(st.integers(0, 9))
    dims, value_dim = draw(st.sampled_from([1, 8])), draw(st.sampled_from([1, 8]))
    full = [draw(size) for _ in range(rank - 2)]

    def lead():
        cut = full[draw(st.integers(0, len(full))) :]
        return [draw(st.sampled_from([n, n, n, 1, 2])) for n in cut]

    tensors = make((*lead(), rows, dims), (*lead(), keys, dims), (*lead(), keys, value_dim))
    options = {"is_causal": draw(st.booleans()), "enable_gqa": draw(st.booleans())}
    if draw(st.booleans()):
        shape = [*lead(), draw(st.sampled_from([1, 1, rows])), keys]
        options["attn_mask"] = randn(*shape) > -0.5
    try:
        expected = torch_sdpa(*tensors, **options)
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)):
            sdpa(*tensors, **options)
        return
    got = sdpa(*tensors, **options)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected)
