"""Tilewise under models of transformers: logits and tokens like eager's, masks like transformers' own, and refusals."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DTYPES, assert_state, qkv, randn
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    create_bidirectional_mask,
    create_causal_mask,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers_cases import WINDOW, assert_like_eager, build, padding, run, tokens

import tilewise.integrations.transformers as integration
from tilewise import api, reference
from tilewise.integrations.transformers import attention_forward
from tilewise.integrations.transformers_mask import Mask, make_mask, visible

# Eager's own logits are up to 15 units in the last place of the largest logit away from float64 in these models (their
# weights are large), and so may ours be, in another direction.
ULPS = 32
DECODERS = [cases.llama, cases.qwen3, cases.gemma2, cases.gemma3, cases.mistral, cases.gpt_oss]
LENGTH = 65
LAYER = SimpleNamespace(is_causal=True)


@pytest.fixture(autouse=True)
def registered():
    integration.register()


@pytest.fixture
def calls(monkeypatch):
    """The names of the calls of Tilewise, in order."""
    made: list[str] = []

    def counted(name):
        function = getattr(api, name)

        def call(*args, **kwargs):
            made.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(api, name, call)

    counted("attention")
    counted("attention_varlen")
    return made


def forbid(monkeypatch, model, sdpa: bool = True) -> None:
    """Let eager attention, and torch's SDPA, fail when called."""

    def forbidden(*_, **__):
        raise AssertionError("this attention must not run")

    modeling = importlib.import_module(type(model).__module__)
    monkeypatch.setattr(modeling, "eager_attention_forward", forbidden)
    if sdpa:
        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", forbidden)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", forbidden)


# ---- models ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [*DECODERS, cases.bert, cases.modernbert], ids=lambda make: make.__name__)
@pytest.mark.parametrize("pad", ["none", "left", "right"])
def test_logits_are_eager_s(make, pad):
    model, ids = build(make), tokens(4, LENGTH)
    if pad == "none":
        assert_like_eager(model, input_ids=ids, ulps=ULPS)
    else:
        mask = padding([LENGTH, 63, WINDOW, 1], LENGTH, left=pad == "left")
        assert_like_eager(model, mask.bool(), input_ids=ids, attention_mask=mask, ulps=ULPS)


@pytest.mark.parametrize("length", [1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize("make", DECODERS, ids=lambda make: make.__name__)
def test_short_prompts(make, length):
    assert_like_eager(build(make), input_ids=tokens(2, length), ulps=ULPS)


def test_images_see_each_other():
    assert_like_eager(build(cases.vit), pixel_values=randn(2, 3, 32, 32), ulps=ULPS)


@pytest.mark.parametrize("decoder_length", [5, 33])
def test_cross_attention_with_a_padded_encoder(decoder_length):
    """33 are as many queries as keys: they must not be taken for padded ones."""
    model, mask = build(cases.bart), padding([33, 9, 1], 33, left=False)
    decoder = tokens(3, decoder_length, seed=1)
    assert_like_eager(model, input_ids=tokens(3, 33), attention_mask=mask, decoder_input_ids=decoder, ulps=ULPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [cases.llama, cases.gemma2, cases.gpt_oss, cases.bert], ids=lambda make: make.__name__)
def test_half_precision_holds_to_the_tolerance_rule(make, dtype):
    model, mask = build(make, dtype), padding([33, 17], 33)
    assert_like_eager(model, mask.bool(), input_ids=tokens(2, 33), attention_mask=mask)


def test_under_autocast():
    """Without a cache, which would change that, q and k come in float32 and v in bfloat16."""
    model, inputs = build(cases.llama), {"input_ids": tokens(2, 33), "use_cache": False}
    with torch.autocast("cpu", torch.bfloat16):
        got, eager = run(model, "tilewise", **inputs), run(model, "eager", **inputs)
    verdict = reference.judge(got, cases.exact_logits(model, **inputs), eager)
    assert verdict.ok, verdict.reason


def test_packed_sequences_by_positions(calls):
    """Two sequences in one row, told by their positions; then by cu_seq_lens."""
    model, ids = build(cases.mistral), tokens(1, 40)
    positions = torch.cat((torch.arange(23), torch.arange(17)))[None]
    assert_like_eager(model, input_ids=ids, position_ids=positions, use_cache=False, ulps=ULPS)
    assert calls == ["attention_varlen"] * cases.LAYERS
    alone = torch.cat([run(model, "tilewise", input_ids=ids[:, part]) for part in (slice(23), slice(23, 40))], 1)
    starts = torch.tensor([0, 23, 40], dtype=torch.int32)
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 23, "max_length_k": 23}
    together = run(model, "tilewise", input_ids=ids, position_ids=positions, **given)
    torch.testing.assert_close(together, alone)


# ---- generation ------------------------------------------------------------------------------------------------------
def generated(model, implementation, **options):
    model.set_attn_implementation(implementation)
    new = options.pop("max_new_tokens", 2 * WINDOW)
    result = model.generate(max_new_tokens=new, do_sample=False, **options)
    model.set_attn_implementation("tilewise")
    return result


@pytest.mark.parametrize("make", DECODERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("lengths", [None, [12, 5, 1]], ids=["whole", "padded"])
def test_generate_gives_eager_s_tokens(make, cache, lengths):
    """From before the window is full to beyond it; with padding the rows leave the window one after the other."""
    model = build(make)
    inputs = {"inputs": tokens(3, 12), "cache_implementation": cache}
    if lengths is not None:
        inputs["attention_mask"] = padding(lengths, 12)
    assert torch.equal(generated(model, "tilewise", **inputs), generated(model, "eager", **inputs))


def test_generate_by_beams_and_from_an_encoder():
    model, mask = build(cases.bart), padding([9, 4], 9, left=False)
    inputs = {"inputs": tokens(2, 9), "attention_mask": mask, "num_beams": 3}
    assert torch.equal(generated(model, "tilewise", **inputs), generated(model, "eager", **inputs))


@pytest.mark.parametrize("make", [cases.llama, cases.mistral], ids=lambda make: make.__name__)
def test_a_prompt_in_chunks_into_a_static_cache(make):
    """Keys beyond the current length are never seen: the cache is full of NaN there."""
    model, ids = build(make), tokens(2, 20)
    whole = run(model, "tilewise", input_ids=ids)
    cache = StaticCache(model.config, max_cache_len=32)
    parts = []
    for part in (ids[:, :6], ids[:, 6:7], ids[:, 7:20]):
        parts.append(run(model, "tilewise", input_ids=part, past_key_values=cache))
        for layer in cache.layers:
            filled = int(layer.get_seq_length())
            layer.keys[:, :, filled:], layer.values[:, :, filled:] = torch.nan, torch.nan
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_right_padding_then_new_tokens(calls):
    """The padding then lies between tokens; without a window that is served."""
    model, ids, mask = build(cases.llama), tokens(2, 12), padding([12, 7], 12, left=False)
    mask[1, 10:] = 1
    rows = mask.bool()
    assert_like_eager(model, rows, input_ids=ids, attention_mask=mask, ulps=ULPS)
    assert calls == ["attention_varlen"] * cases.LAYERS


# ---- which attention runs --------------------------------------------------------------------------------------------
def test_our_kernels_are_the_ones_that_run(calls, monkeypatch):
    model, ids = build(cases.llama), tokens(2, 9)
    forbid(monkeypatch, model)
    run(model, "tilewise", input_ids=ids)
    assert calls == ["attention"] * cases.LAYERS
    calls.clear()
    run(model, "tilewise", input_ids=ids, attention_mask=padding([9, 4], 9))
    assert calls == ["attention_varlen"] * cases.LAYERS
    calls.clear()
    generated(model, "tilewise", inputs=ids, max_new_tokens=3)
    assert calls == ["attention"] * cases.LAYERS * 3
    with pytest.raises(AssertionError, match="must not run"):
        run(model, "eager", input_ids=ids)


def test_a_mask_without_padding_packs_nothing(calls):
    run(build(cases.llama), "tilewise", input_ids=tokens(2, 9), attention_mask=torch.ones(2, 9, dtype=torch.int64))
    assert calls == ["attention"] * cases.LAYERS


def test_kv_heads_are_not_repeated(monkeypatch):
    heads = []
    monkeypatch.setattr(api, "attention", lambda q, k, v, **_: heads.append((q.shape[2], k.shape[2])) or q)
    run(build(cases.llama), "tilewise", input_ids=tokens(1, 3))
    assert heads == [(4, 2)] * cases.LAYERS


def test_without_the_registration_nothing_works(monkeypatch):
    model, ids, mask = build(cases.llama), tokens(2, 9), padding([9, 4], 9)
    right = run(model, "tilewise", input_ids=ids, attention_mask=mask)
    with monkeypatch.context() as patch:
        patch.delitem(AttentionMaskInterface._global_mapping, "tilewise")
        wrong = run(model, "tilewise", input_ids=ids, attention_mask=mask)  # transformers makes no mask at all
        assert not torch.allclose(wrong[1, -1], right[1, -1])
    monkeypatch.delitem(AttentionInterface._global_mapping, "tilewise")
    with pytest.raises(KeyError, match="tilewise"):
        model(ids)
    with pytest.raises(ValueError, match="tilewise"):
        type(model)._from_config(model.config, attn_implementation="tilewise")


def test_a_model_is_made_with_it_by_name():
    model = cases.llama(attn_implementation="tilewise")
    assert model.config._attn_implementation == "tilewise"
    integration.register()  # a second time
    assert model.eval()(tokens(1, 3)).logits.shape == (1, 3, cases.VOCABULARY)


def test_importing_tilewise_imports_no_transformers():
    code = "import sys, tilewise; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_compiled_model_runs():
    model, ids, mask = build(cases.llama), tokens(2, 9), padding([9, 4], 9)
    expected = run(model, "tilewise", input_ids=ids, attention_mask=mask)
    with torch.no_grad():
        got = torch.compile(model, backend="eager")(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got, expected)


# ---- gradients -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make", [cases.llama, cases.mistral, cases.gpt_oss, cases.bert], ids=lambda make: make.__name__
)
def test_gradients_are_eager_s(make, calls):
    mask, ids = padding([12, 7, 1], 12), tokens(3, 12)
    gradients = []
    for implementation in ("tilewise", "eager"):
        model = build(make).requires_grad_(True)
        model.set_attn_implementation(implementation)
        model(ids, attention_mask=mask).logits[mask.bool()].square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert calls == []  # the kernels have no backward
    ours, eager = gradients
    assert ours.keys() == eager.keys()
    assert make is not cases.gpt_oss or any("sinks" in name for name in ours)
    largest = max(expected.abs().max().item() for expected in eager.values())
    for name, expected in eager.items():  # that of a key's bias is 0 but for rounding
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-6 * largest, msg=name)


def test_softcap_with_gradients_is_refused():
    model = build(cases.gemma2).requires_grad_(True)
    with pytest.raises(NotImplementedError, match="softcap with gradients"):
        model(tokens(1, 4))


def test_a_row_without_keys_has_zero_gradients():
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in qkv(2, 3, 3, 2, 1, 8))
    o, _ = attention_forward(LAYER, q, k, v, padding([3, 0], 3))
    assert not o[1].any()
    o.sum().backward()
    assert not q.grad[1].any()
    assert torch.isfinite(k.grad).all()
    assert k.grad[0].any()


# ---- masks, beside transformers' own ---------------------------------------------------------------------------------
@st.composite
def mask_arguments(draw):
    """Arguments of a mask function, as caches of all kinds give them."""
    kind = draw(st.sampled_from(["causal", "sliding", "bidirectional", "bidirectional window"]))
    batch, queries, past = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(0, 9))
    window = draw(st.integers(1, 6))
    room = kv_offset = 0
    if kind == "causal":
        function = causal_mask_function
        room = draw(st.integers(0, 5))
    elif kind == "sliding":
        function = sliding_window_causal_mask_function(window)
        kv_offset = draw(st.sampled_from([0, max(past - window + 1, 0)]))
        room = draw(st.integers(0, 5))
    elif kind == "bidirectional":
        function = bidirectional_mask_function
        past = 0
        room = draw(st.integers(0, 4)) - min(2, queries - 1)
    else:
        function, past = sliding_window_bidirectional_mask_function(window), 0
    end = past + queries
    mask = None
    if draw(st.booleans()):
        position = torch.arange(end + max(0, room if kind == "bidirectional" else 0))
        bounds = draw(st.lists(st.tuples(st.integers(0, end), st.integers(0, end)), min_size=batch, max_size=batch))
        mask = torch.stack([(position >= low) & (position < len(position) - high) for low, high in bounds])
        if kind in ("causal", "bidirectional"):  # padding between tokens too
            mask &= torch.tensor(draw(st.lists(st.booleans(), min_size=mask.numel(), max_size=mask.numel()))).view(
                mask.shape
            )
    length = end - kv_offset + room
    q_offset = torch.tensor(past) if room and kind != "bidirectional" else past
    return {
        "batch_size": batch, "q_length": queries, "kv_length": length, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": function, "attention_mask": mask,
    }  # fmt: skip


@settings(max_examples=150)
@given(mask_arguments())
def test_masks_say_what_transformers_masks_say(arguments):
    expected = sdpa_mask(**arguments, allow_is_causal_skip=False).expand(arguments["batch_size"], -1, -1, -1)
    mask = make_mask(**arguments)
    seen = visible(mask, torch.device("cpu")).expand(arguments["batch_size"], -1, -1, -1)
    assert not expected[..., mask.keys :].any()
    there = torch.ones(mask.batch, mask.queries, dtype=torch.bool)
    if arguments["attention_mask"] is not None and (mask.causal or mask.window is not None):
        start = int(arguments["q_offset"])
        there = arguments["attention_mask"][:, start : start + mask.queries]
    expected = expected[..., : mask.keys] & there[:, None, :, None]  # padded queries see nothing
    assert torch.equal(seen, expected)

    q, k, v = qkv(mask.batch, mask.queries, mask.kv_length, 4, 2, 8)
    o, _ = attention_forward(LAYER, *(x.transpose(1, 2) for x in (q, k, v)), mask)
    options = {"mask": seen}
    k, v = k[:, : mask.keys], v[:, : mask.keys]
    exact, honest = (f(q, k, v, **options) for f in (reference.attention, reference.baseline))
    verdict = reference.judge(o, exact[0], honest[0])
    assert verdict.ok, verdict.reason


def test_packed_sequences_beside_padding_and_batches():
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    config = SimpleNamespace(_attn_implementation="tilewise", is_causal=True)
    mask = create_causal_mask(config, torch.zeros(2, 6, 1), None, None, position_ids=positions)
    expected = (documents[:, :, None] == documents[:, None, :]) & torch.ones(6, 6, dtype=torch.bool).tril()
    assert isinstance(mask, Mask)
    assert torch.equal(visible(mask, torch.device("cpu"))[:, 0], expected)
    padded = make_mask(
        2, 6, 6,
        mask_function=packed_causal(documents), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
    )  # fmt: skip
    expected[0, 0], expected[0, :, 0], expected[1, 5] = False, False, False
    assert torch.equal(visible(padded, torch.device("cpu"))[:, 0], expected)


def packed_causal(documents):
    return and_masks(causal_mask_function, packed_sequence_mask_function(documents))


def test_positions_that_a_mask_does_not_reach_are_padding():
    arguments = {"batch_size": 1, "q_length": 4, "kv_length": 4, "attention_mask": torch.ones(1, 2, dtype=torch.bool)}
    seen = visible(make_mask(**arguments), torch.device("cpu"))
    expected = sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert torch.equal(seen[:, :, :2], expected[:, :, :2])
    assert not seen[:, :, 2:].any()


def test_a_mask_moves_with_its_model():
    mask = make_mask(2, 3, 3, attention_mask=padding([3, 1], 3))
    assert mask.contiguous() is mask
    moved = mask.to("meta").ragged
    assert {x.device.type for x in (*moved.rows_q, *moved.rows_k, moved.starts_q, moved.starts_k)} == {"meta"}
    assert make_mask(2, 3, 3).to("meta").ragged is None


@pytest.mark.parametrize("causal", [True, False])
def test_no_queries(causal):
    q, k, v = (x.transpose(1, 2) for x in qkv(2, 0, 3, 2, 2, 8))
    o, _ = attention_forward(LAYER, q, k, v, padding([3, 1], 3), is_causal=causal)
    assert o.shape == (2, 0, 2, 8)


def test_blocks_that_are_none_change_nothing():
    widened = or_masks(causal_mask_function, blockwise_overlay(torch.full((1, 4), -1)))
    assert make_mask(1, 4, 4, mask_function=widened).causal


def test_chunks_longer_than_the_text_change_nothing():
    mask = make_mask(1, 4, 4, mask_function=chunked_causal_mask_function(4, torch.zeros(1, dtype=int)))
    assert mask.causal
    assert mask.window is None


# ---- the attention function alone ------------------------------------------------------------------------------------
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
        (NotImplementedError, "dropout is not served, got 0.1", {"dropout": 0.1}),
        (NotImplementedError, "output_attentions", {"output_attentions": True}),
        (NotImplementedError, "position_bias", {"position_bias": torch.zeros(1)}),
        (NotImplementedError, "indices", {"indices": torch.zeros(1)}),
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


def image_tokens(batch, head, query, key):
    return query == key


@pytest.mark.parametrize(
    ("words", "function"),
    [
        ("block_sequence_ids", or_masks(causal_mask_function, blockwise_overlay(torch.tensor([[-1, 0, 0, -1]])))),
        ("or_mask_function .*image_tokens", or_masks(causal_mask_function, image_tokens)),
        ("mask_function .*image_tokens", image_tokens),
        ("chunked attention", chunked_causal_mask_function(3, torch.zeros(1, dtype=int))),
    ],
)
def test_refused_masks(words, function):
    with pytest.raises(NotImplementedError, match=words):
        make_mask(1, 4, 4, mask_function=function)


def test_refused_sizes_and_padding_of_masks():
    window = sliding_window_causal_mask_function(3)
    with pytest.raises(NotImplementedError, match="padding between the tokens"):
        make_mask(1, 4, 4, mask_function=window, attention_mask=torch.tensor([[True, False, True, True]]))
    with pytest.raises(ValueError, match=r"attention_mask must be \(2, positions\)"):
        make_mask(2, 4, 4, attention_mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="reach to position 9"):
        make_mask(1, 4, 4, q_offset=5)
    with pytest.raises(NotImplementedError, match="last query at the last key"):
        make_mask(1, 4, 6, mask_function=sliding_window_bidirectional_mask_function(2))
    with pytest.raises(NotImplementedError, match="one after the other"):
        make_mask(1, 3, 3, mask_function=packed_causal(torch.tensor([[0, 1, 0]])))
    with pytest.raises(ValueError, match="as many queries"):
        make_mask(1, 2, 3, q_offset=1, mask_function=packed_causal(torch.tensor([[0, 0, 1]])))
    with pytest.raises(ValueError, match="5 queries for 4 keys"):
        make_mask(1, 5, 4, kv_offset=1, attention_mask=torch.tensor([[False, False, True, True, True]]))


def test_models_cannot_compute_with_the_mask():
    mask = make_mask(1, 4, 4)
    with pytest.raises(NotImplementedError, match=r"computes \(add\) with its attention mask"):
        torch.zeros(4, 4) + mask
    with pytest.raises(NotImplementedError, match="indexes its attention mask"):
        mask[:, :, :, :4]
    with pytest.raises(AttributeError, match="no tensor and has no 'logical_not'"):
        mask.logical_not()


def test_masks_of_one_s_own_reach_us_and_are_refused():
    model, own = build(cases.llama), torch.zeros(1, 1, 4, 4)
    with pytest.raises(NotImplementedError, match="mask of one's own"):
        run(model, "tilewise", input_ids=tokens(1, 4), attention_mask=own)


def test_images_in_a_prompt_are_refused_by_name():
    config = SimpleNamespace(_attn_implementation="tilewise", is_causal=True)
    embedded, blocks = torch.zeros(1, 4, 1), torch.tensor([[-1, 0, 0, -1]])
    with pytest.raises(NotImplementedError, match="block_sequence_ids"):
        create_causal_mask(config, embedded, None, None, block_sequence_ids=blocks)
    with pytest.raises(NotImplementedError, match="or_mask_function"):
        create_causal_mask(config, embedded, None, None, or_mask_function=image_tokens)
    with pytest.raises(NotImplementedError, match="image_tokens"):
        create_bidirectional_mask(config, embedded, None, and_mask_function=image_tokens)


def test_dropout_in_training_is_refused():
    model = build(lambda: cases.llama(attention_dropout=0.1)).train()
    with pytest.raises(NotImplementedError, match=r"dropout is not served, got 0\.1"):
        model(tokens(1, 4))
