"""The attention function that transformers calls, alone: flags of the layer, padding, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from oracle import DTYPES, assert_state, qkv, randn
from transformers_cases import LAYER, padding

from tilewise import api, reference
from tilewise.integrations.transformers import attention_forward
from tilewise.integrations.transformers_mask import make_mask

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [40, 96])
@pytest.mark.parametrize(("queries", "keys"), [(1, 65), (63, 65), (65, 65), (1, 1)])
def test_flags_of_the_layer(dtype, head_dim, queries, keys):
    q, k, v = qkv(2, queries, keys, 4, 2, head_dim, dtype=dtype)
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]  # what a cache hands over
    sinks = randn(4, seed=9)
    for causal, window in ((True, None), (False, None), (True, 9), (False, 9)):
        options = {"causal": causal, "scale": 0.3, "softcap": 3.0, "sinks": sinks}
        if window is not None:
            options["window"] = (window - 1, None if causal else window - 1)
        o, weights = attention_forward(
            LAYER, *heads_first, None, scaling=0.3, softcap=3.0, s_aux=sinks, is_causal=causal, sliding_window=window
        )
        assert weights is None
        assert o.shape == q.shape
        exact, honest = (f(q, k, v, **options) for f in (reference.attention, reference.baseline))
        assert_state((o, honest[1]), exact, honest)


def test_is_causal_of_the_module_counts_where_none_is_given():
    q, k, v = (x.transpose(1, 2) for x in qkv(1, 5, 5, 2, 2, 16))
    for module, causal in ((SimpleNamespace(is_causal=False), False), (LAYER, True), (SimpleNamespace(), True)):
        o, _ = attention_forward(module, q, k, v, None)
        expected, _ = attention_forward(module, q, k, v, None, is_causal=causal)
        other, _ = attention_forward(module, q, k, v, None, is_causal=not causal)
        assert torch.equal(o, expected)
        assert not torch.allclose(o, other)


@pytest.mark.parametrize("value_dim", [8, 40])
def test_values_narrower_or_wider_than_keys(value_dim):
    q, k, _ = qkv(2, 7, 9, 4, 2, 24)
    v = randn(2, 9, 2, value_dim, seed=5)
    o, _ = attention_forward(LAYER, *(x.transpose(1, 2) for x in (q, k, v)), None)
    wide = [torch.nn.functional.pad(x, (0, 40 - x.shape[-1])) for x in (q, k, v)]
    exact, honest = (f(*wide, causal=True, scale=24**-0.5)[0] for f in (reference.attention, reference.baseline))
    assert reference.judge(o, exact[..., :value_dim], honest[..., :value_dim]).ok


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_plain_padding_mask(dtype):
    """(B, Nk); an empty row gives 0, and so does a padded query."""
    q, k, v = qkv(3, 4, 6, 4, 2, 16)
    mask = padding([6, 3, 0], 6)
    o, _ = attention_forward(LAYER, *(x.transpose(1, 2) for x in (q, k, v)), mask.to(dtype))
    assert not o[1, 0].any()
    assert not o[2].any()
    exact = reference.attention(q[1:2, 1:], k[1:2, 3:], v[1:2, 3:], causal=True)[0]
    torch.testing.assert_close(o[1:2, 1:], exact.float())


def test_the_gpu_kernel_s_source(monkeypatch):
    """The same call in the emulator: what a card would be given."""
    ragged = api.attention_varlen
    monkeypatch.setattr(api, "attention_varlen", lambda *x, **options: ragged(*x, backend="emulator", **options))
    q, k, v = qkv(2, 3, 5, 2, 1, 64, dtype=torch.bfloat16)
    sinks, mask = randn(2, seed=4), padding([5, 2], 5)
    o, _ = attention_forward(
        LAYER, *(x.transpose(1, 2) for x in (q, k, v)), mask, s_aux=torch.nn.Parameter(sinks, requires_grad=False)
    )
    for b, length in ((0, 5), (1, 2)):
        queries = min(3, length)
        one = q[b : b + 1, -queries:], k[b : b + 1, -length:], v[b : b + 1, -length:]
        exact, honest = (f(*one, causal=True, sinks=sinks)[0] for f in (reference.attention, reference.baseline))
        assert reference.judge(o[b : b + 1, -queries:], exact, honest).ok
    assert not o[1, 0].any()


# ---- what is refused -------------------------------------------------------------------------------------------------
def call(attention_mask=None, **options):
    q, k, v = (x.transpose(1, 2) for x in qkv(2, 4, 4, 2, 2, 8))
    return attention_forward(LAYER, q, k, v, attention_mask, **options)


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (ValueError, "dropout_p must be below 1", {"dropout": 1.0}),
        (NotImplementedError, "output_attentions", {"output_attentions": True}),
        (NotImplementedError, "position_bias", {"position_bias": torch.zeros(1)}),
        (ValueError, "indices must have 3 dimensions", {"indices": torch.zeros(1)}),
        (NotImplementedError, "block_indices", {"block_indices": torch.zeros(1)}),
        (NotImplementedError, "head_mask", {"head_mask": torch.zeros(1)}),
        (NotImplementedError, "paged cache", {"cache": object()}),
        (NotImplementedError, "mask of one's own", {"attention_mask": torch.zeros(2, 1, 4, 4)}),
        (TypeError, "attention_mask must be a padding mask or None, got str", {"attention_mask": "causal"}),
        (ValueError, r"attention_mask must have shape \(2, 4\)", {"attention_mask": torch.ones(2, 3)}),
        (ValueError, "s_aux and sinks", {"s_aux": torch.zeros(2), "sinks": torch.zeros(2)}),
        (ValueError, "sliding_window must be at least 1", {"sliding_window": 0}),
        (ValueError, "cu_seq_lens_q and cu_seq_lens_k go together", {"cu_seq_lens_q": torch.tensor([0, 4])}),
        (
            ValueError,
            "one batch row without padding, got 2 rows",
            {"cu_seq_lens_q": torch.tensor([0, 4]), "cu_seq_lens_k": torch.tensor([0, 4])},
        ),
        (ValueError, "made for 2 batch rows, 4 queries and 5 keys", {"attention_mask": make_mask(2, 4, 5, 1)}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refused_calls(error, words, options):
    with pytest.raises(error, match=words):
        call(**options)
