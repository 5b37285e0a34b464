"""Models with heads of several widths, latent attention, chunks and chosen keys: logits and tokens like eager's."""

from __future__ import annotations

import pytest
import torch
import transformers_cases as cases
import wide_models as wide
from oracle import qkv
from transformers import StaticCache
from transformers_cases import LAYER, assert_like_eager, build, padding, run, tokens

from tilewise import reference
from tilewise.integrations.transformers import attention_forward
from tilewise.integrations.transformers_mask import make_mask

pytestmark = pytest.mark.usefixtures("registered")

LENGTH, ULPS = 29, 64  # longer than two chunks; eager's own logits are up to 30 units away from float64


def names(make):
    return make.__name__


@pytest.mark.parametrize("make", wide.SERVED, ids=names)
def test_logits_are_eager_s(make):
    model, ids = build(make), tokens(3, LENGTH)
    mask = padding([LENGTH, 17, 1], LENGTH)
    assert_like_eager(model, mask.bool(), input_ids=ids, attention_mask=mask, ulps=ULPS)


@pytest.mark.parametrize("pad", ["none", "right"])
def test_chunks(pad):
    model, ids = build(wide.llama4), tokens(3, LENGTH)
    if pad == "none":
        assert_like_eager(model, input_ids=ids, ulps=ULPS)
    else:
        mask = padding([LENGTH, 17, 1], LENGTH, left=False)
        assert_like_eager(model, mask.bool(), input_ids=ids, attention_mask=mask, ulps=ULPS)


@pytest.mark.parametrize("make", wide.INDEXED, ids=names)
@pytest.mark.parametrize("pad", ["none", "left", "right"])
def test_keys_that_an_indexer_chooses(make, pad):
    model, ids = build(make), tokens(3, LENGTH)
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    if pad != "none":
        mask = padding([LENGTH, 17, 1], LENGTH, left=pad == "left")
    got, eager = (run(model, name, input_ids=ids, attention_mask=mask)[mask.bool()] for name in ("tilewise", "eager"))
    torch.testing.assert_close(got, eager, rtol=0, atol=ULPS * torch.finfo(got.dtype).eps * eager.abs().max().item())
    model.config.index_topk = LENGTH
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = LENGTH
    everything = run(model, "eager", input_ids=ids, attention_mask=mask)[mask.bool()]
    assert (everything - eager).abs().max() > 0.1, "the choice must matter"


def test_indices_beside_the_mask():
    """By the oracle, −1 for none, a row with no key left; the mask still hides what it hides."""
    q, k, v = qkv(2, 4, 6, 4, 2, 8)
    indices = torch.tensor([[[0, 5], [1, -1], [-1, -1], [4, 3]], [[2, 0], [5, 4], [3, 1], [5, 0]]], dtype=torch.int32)
    chosen = torch.zeros(2, 4, 6, dtype=torch.bool)
    for b, i, n in (indices >= 0).nonzero().tolist():
        chosen[b, i, indices[b, i, n]] = True
    mask = make_mask(2, 4, 6, q_offset=2)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    o, _ = attention_forward(LAYER, *heads_first, mask, indices=indices)
    options = {"causal": True, "mask": chosen[:, None]}
    exact, honest = (f(q, k, v, **options) for f in (reference.attention, reference.baseline))
    verdict = reference.judge(o, exact[0], honest[0])
    assert verdict.ok, verdict.reason
    with pytest.raises(ValueError, match="indices must have shape"):
        attention_forward(LAYER, *heads_first, mask, indices=indices[:, :3])
    documents = make_mask(1, 6, 6, mask_function=cases.packed_causal(torch.tensor([[0, 0, 1, 1, 1, 1]])))
    with pytest.raises(NotImplementedError, match="indices over packed sequences"):
        attention_forward(
            LAYER, *(x[:1] for x in heads_first[1:2] * 3), documents, indices=indices.view(1, 8, 2)[:, :6]
        )


def generated(model, implementation, **options):
    model.set_attn_implementation(implementation)
    result = model.generate(max_new_tokens=18, do_sample=False, **options)
    model.set_attn_implementation("tilewise")
    return result


@pytest.mark.parametrize("make", [wide.deepseek_v3, wide.gemma4, wide.llama4, wide.glm_moe_dsa], ids=names)
def test_generate_gives_eager_s_tokens(make):
    """From within the first chunk to the third; the rows leave a chunk one after the other."""
    model, inputs = build(make), {"inputs": tokens(2, 9), "attention_mask": padding([9, 4], 9)}
    assert torch.equal(generated(model, "tilewise", **inputs), generated(model, "eager", **inputs))


@pytest.mark.parametrize("static", [False, True])
def test_a_prompt_in_parts_over_chunks(static):
    """Parts that begin and end within chunks, into caches that keep no more than a chunk."""
    cuts = [5, 11, 3, 14]
    model, ids = build(wide.llama4), tokens(2, sum(cuts))
    whole = run(model, "eager", input_ids=ids)
    past = StaticCache(config=model.config, max_cache_len=40) if static else None
    first, found = 0, []
    for count in cuts:
        with torch.no_grad():
            out = model(ids[:, first : first + count], past_key_values=past, use_cache=True)
        past, first = out.past_key_values, first + count
        found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-4)
