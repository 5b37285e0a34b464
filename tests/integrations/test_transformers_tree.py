"""Models of transformers over a tree of tokens: logits, losses and gradients of the unshared sequences."""

from __future__ import annotations

import pytest
import torch
import transformers_cases as cases
from token_tree_cases import answers
from transformers_cases import build

from tilewise import TokenTree
from tilewise.integrations.transformers import training_tree
from tilewise.integrations.transformers_tree import mask_of_pass

pytestmark = pytest.mark.usefixtures("registered")
SEQUENCES = [[3 + t % 90 for t in s] for s in [*answers(19, 7, 12, 3), *answers(5, 4, 6, seed=1)]]


def over_the_tree(model, tree):
    with training_tree(tree):
        return model(tree.tokens[None], position_ids=tree.positions[None]).logits[0]


def one_by_one(model):
    return [model(torch.tensor([s])).logits[0] for s in SEQUENCES]


def loss_of(logits):
    """The mean over all tokens of all sequences that are predicted."""
    predicted = torch.cat([x[:-1] for x in logits])
    return torch.nn.functional.cross_entropy(predicted, torch.tensor([t for s in SEQUENCES for t in s[1:]]))


@pytest.mark.parametrize("make", [cases.llama, cases.qwen3, cases.mistral, cases.gpt_oss], ids=lambda m: m.__name__)
def test_a_step_over_a_tree_is_a_step_over_its_sequences(make):
    model, tree = build(make), TokenTree.from_sequences(SEQUENCES)
    assert tree.num_tokens < 0.6 * len(tree.index)
    model.requires_grad_(True)
    logits, alone = over_the_tree(model, tree), one_by_one(model)
    torch.testing.assert_close(tree.unpack(logits), torch.cat(alone), rtol=1e-4, atol=1e-3)
    ours, theirs = tree.pack_loss(logits), loss_of(alone)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    parameters = dict(model.named_parameters())
    got, want = (torch.autograd.grad(x, list(parameters.values()), allow_unused=True) for x in (ours, theirs))
    for name, one, other in zip(parameters, got, want, strict=True):
        assert (one is None) == (other is None), name
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()), msg=name)


def test_checkpointed_layers_are_computed_again_after_the_block():
    model, tree = build(cases.llama).train(), TokenTree.from_sequences(SEQUENCES)
    model.requires_grad_(True)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = tree.pack_loss(over_the_tree(model, tree))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_windows_count_by_position():
    model, tree = build(cases.mistral), TokenTree.from_sequences(SEQUENCES)
    assert max(tree.lengths) > 2 * cases.WINDOW
    logits = over_the_tree(model, tree)
    model.config.sliding_window = None
    assert not torch.allclose(over_the_tree(model, tree), logits)


def test_what_cannot_be_over_a_tree_says_so():
    model, tree = build(cases.llama), TokenTree.from_sequences(SEQUENCES)
    with pytest.raises(TypeError, match=r"tree must be a .*TokenTree"), training_tree(SEQUENCES):
        pass
    with pytest.raises(ValueError, match=r"takes tree.tokens\[None\]"), training_tree(tree):
        model(tree.tokens[None, 1:])
    padding = torch.ones(1, tree.num_tokens).index_fill_(1, torch.tensor([0]), 0)
    with pytest.raises(ValueError, match="attention_mask marks padding"), training_tree(tree):
        model(tree.tokens[None], attention_mask=padding)
    with training_tree(tree):
        mask = mask_of_pass(1, tree.num_tokens, tree.num_tokens)
        assert mask[:, :, 0:, :] is mask
        with pytest.raises(NotImplementedError, match="logits_to_keep=0"):
            mask[:, :, -1:, :]
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(NotImplementedError, match="dropout"):
        over_the_tree(model.train(), tree)
    model.eval().set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match='attn_implementation="tilewise"'):
        over_the_tree(model, tree)
    model.set_attn_implementation("tilewise")
    plain = model(tree.tokens[None]).logits  # and outside of the block there is no tree
    assert not torch.allclose(plain[0], over_the_tree(model, tree))
