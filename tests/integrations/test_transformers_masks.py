"""The masks of transformers as Tilewise understands them, beside transformers' own, and those it refuses."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import qkv
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers_cases import LAYER, build, packed_causal, padding, run, tokens, visible

from tilewise import reference
from tilewise.integrations.transformers import attention_forward
from tilewise.integrations.transformers_mask import Mask, make_mask

pytestmark = pytest.mark.usefixtures("registered")


@st.composite
def mask_arguments(draw):
    """Arguments of a mask function, as caches of all kinds give them."""
    kind = draw(st.sampled_from(["causal", "sliding", "chunked", "bidirectional", "bidirectional window"]))
    batch, queries, past = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(0, 9))
    window = draw(st.integers(1, 6))
    room = kv_offset = 0
    if kind == "causal":
        function = causal_mask_function
        room = draw(st.integers(0, 5))
    elif kind in ("sliding", "chunked"):
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
    if kind == "chunked":  # counted from a row's first token
        begins = torch.zeros(batch, dtype=int) if mask is None else (mask.cumsum(-1) == 0).sum(-1)
        function = chunked_causal_mask_function(window, begins)
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
    seen = visible(mask).expand(arguments["batch_size"], -1, -1, -1)
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
    assert torch.equal(visible(mask)[:, 0], expected)
    padded = make_mask(
        2, 6, 6,
        mask_function=packed_causal(documents), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
    )  # fmt: skip
    expected[0, 0], expected[0, :, 0], expected[1, 5] = False, False, False
    assert torch.equal(visible(padded)[:, 0], expected)


@pytest.mark.parametrize("chunk", [2, 3, 4])
def test_chunks_of_packed_sequences_begin_with_them(chunk):
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [*range(chunk, 5 + chunk), 0, 1, 2]])  # whole chunks before it
    text = {"attention_chunk_size": chunk, "get_text_config": lambda: config}
    config = SimpleNamespace(_attn_implementation="tilewise", is_causal=True, **text)
    ask = partial(create_chunked_causal_mask, config, torch.zeros(2, 8, 1), None, None)
    if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # before 5.23 they began with the batch row
        with pytest.raises(NotImplementedError, match="chunks begin with them"):
            ask(position_ids=positions)
        return
    mask = ask(position_ids=positions)
    documents = torch.tensor([[0] * 5 + [1] * 3] * 2)
    near = positions[:, :, None] // chunk == positions[:, None, :] // chunk
    expected = (documents[:, :, None] == documents[:, None, :]) & near & torch.ones(8, 8, dtype=torch.bool).tril()
    assert torch.equal(visible(mask)[:, 0], expected)
    with pytest.raises(NotImplementedError, match="chunks begin with them"):
        ask(position_ids=positions + 1)


LEFT, RIGHT = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]), torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
MASKS = {
    "causal": {},
    "earlier keys": {"kv_length": 9, "q_offset": 3},
    "static cache": {"kv_length": 20, "q_offset": 3},
    "window": {"mask_function": sliding_window_causal_mask_function(3)},
    "chunks": {"mask_function": chunked_causal_mask_function(4, torch.zeros(2, dtype=int))},
    "bidirectional": {"mask_function": bidirectional_mask_function, "attention_mask": RIGHT},
    "left": {"attention_mask": LEFT},
    "right, window": {"attention_mask": RIGHT, "mask_function": sliding_window_causal_mask_function(3)},
    "packed": {"mask_function": packed_causal(DOCUMENTS)},
    "packed, right": {"mask_function": packed_causal(DOCUMENTS), "attention_mask": RIGHT},
}


@pytest.mark.parametrize("name", MASKS)
def test_the_last_queries_of_a_mask(name):
    """Models leave out the others where only the last logits count; what is cut otherwise is formed."""
    mask = make_mask(**{"batch_size": 2, "q_length": 6, "kv_length": 6, **MASKS[name]})
    whole = mask.formed()
    for rows in (slice(None), slice(0, None), slice(-1, None), slice(-4, None), slice(5, 6)):
        cut = mask[:, :, rows, :]
        assert isinstance(cut, Mask)
        assert torch.equal(cut.formed(), whole[:, :, rows])
    for index in ((slice(None), 0), (..., slice(2, None)), (slice(None), slice(None), slice(0, 3), slice(None))):
        assert torch.equal(mask[index], whole[index])


def test_positions_that_a_mask_does_not_reach_are_padding():
    arguments = {"batch_size": 1, "q_length": 4, "kv_length": 4, "attention_mask": torch.ones(1, 2, dtype=torch.bool)}
    seen = visible(make_mask(**arguments))
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


CHUNKS = chunked_causal_mask_function(3, torch.zeros(1, dtype=int))


def packed():
    return packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1]]))


def image_tokens(batch, head, query, key):
    return query == key


@pytest.mark.parametrize(
    ("words", "function"),
    [
        ("block_sequence_ids", or_masks(causal_mask_function, blockwise_overlay(torch.tensor([[-1, 0, 0, -1]])))),
        ("or_mask_function .*image_tokens", or_masks(causal_mask_function, image_tokens)),
        ("mask_function .*image_tokens", image_tokens),
        (
            "chunked attention over packed",
            and_masks(packed(), chunked_causal_mask_function(3, torch.zeros(1, dtype=int))),
        ),
        ("into chunks twice", and_masks(*[chunked_causal_mask_function(3, torch.zeros(1, dtype=int))] * 2)),
    ],
)
def test_refused_masks(words, function):
    with pytest.raises(NotImplementedError, match=words):
        make_mask(1, 4, 4, mask_function=function)


def test_refused_sizes_and_padding_of_masks():
    window = sliding_window_causal_mask_function(3)
    for function in (window, CHUNKS):
        with pytest.raises(NotImplementedError, match="padding between the tokens"):
            make_mask(1, 4, 4, mask_function=function, attention_mask=torch.tensor([[True, False, True, True]]))
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
    assert torch.equal(mask[:, 0, :, :3], torch.ones(1, 4, 3, dtype=torch.bool).tril())  # but look at it
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
