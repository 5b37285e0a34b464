"""attention_tree: forward and backward against the float64 oracle over the unshared sequences."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attention_tree_cases import check, ours, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import gradients, randn
from token_tree_cases import answers, families

from tilewise import TokenTree, arguments, attention_tree, attention_varlen, functions
from tilewise.api import gradients as gradient_nodes
from tilewise.api.tree import Tree
from tilewise.gpu import backward
from tilewise.gpu.backward_call import Gradients


@settings(max_examples=12)
@given(families(most=5, longest=90), st.data())
def test_trees_of_all_kinds(sequences, data):
    tree = TokenTree.from_sequences(sequences)
    heads_kv = data.draw(st.sampled_from([1, 2]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    tensors = tensors_of(
        tree, heads_kv * data.draw(st.sampled_from([1, 3])), heads_kv, 16, dtype, data.draw(st.booleans())
    )
    options = {
        "window": data.draw(st.sampled_from([None, (0, 0), (7, None), (60, 3)])),
        "softcap": data.draw(st.sampled_from([0.0, 2.0])),
        "scale": data.draw(st.sampled_from([None, 0.3])),
    }
    check(tree, tensors, data.draw(st.booleans()), **options)


def test_a_tree_of_three_levels_with_stretches_longer_than_a_tile():
    prompts = answers(150, 80, 130)
    sequences = [p + rest for p in prompts for rest in ([1] * 70, [2] * 20, [3] * 90)]
    tree = TokenTree.from_sequences([*sequences, [9] * 40])
    check(tree, tensors_of(tree, 2, 1, 16), with_lse=False)


def test_the_result_is_that_of_the_unshared_batch_in_one_call():
    tree = TokenTree.from_sequences(answers(100, 30, 0, 50))
    q, k, v = tensors_of(tree, 4, 2, 16)
    o, lse = attention_varlen(
        *(tree.unpack(x) for x in (q, k, v)), tree.starts, tree.starts, causal=True, return_lse=True
    )
    got, got_lse = attention_tree(q, k, v, tree, return_lse=True)
    torch.testing.assert_close(tree.unpack(got), o)
    torch.testing.assert_close(tree.unpack(got_lse.T).T, lse)
    assert torch.equal(attention_tree(q, k, v, tree), got)


def test_gradients_have_the_same_bits_again_and_torch_checkpoints_them():
    from torch.utils.checkpoint import checkpoint

    tree = TokenTree.from_sequences(answers(80, 30, 40))
    tensors = [x.requires_grad_() for x in tensors_of(tree, 2, 1, 16)]
    call = partial(attention_tree, tree=tree, deterministic=True)
    once, again = (torch.autograd.grad(call(*tensors).sum(), tensors) for _ in range(2))
    kept = torch.autograd.grad(checkpoint(call, *tensors, use_reentrant=False).sum(), tensors)
    for one, two, three in zip(once, again, kept, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    (d_q,) = torch.autograd.grad(call(*tensors).sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        d_q.sum().backward()


def test_compiled_code_breaks_its_graph_and_gives_the_same():
    tree = TokenTree.from_sequences(answers(20, 5, 6))
    q, k, v = tensors_of(tree, 2, 1, 16)
    compiled = torch.compile(lambda *x: attention_tree(*x, tree) + 1, backend="eager")
    assert torch.equal(compiled(q, k, v), attention_tree(q, k, v, tree) + 1)


def test_other_trees_are_no_other_kernels():
    texts = set()
    for prompt, lengths in ((200, (30, 50)), (1000, (7, 8, 9)), (64, (640,))):
        tree = TokenTree.from_sequences(answers(prompt, *lengths))
        sizes = (1, 4, tree.num_tokens, tree.num_tokens)
        texts.add(functions.of(tree.sees(), None).text(sizes) + functions.of(tree.sees(9), None).text(sizes))
    assert len(texts) == 1


def test_forward_and_backward_in_the_emulator(own_card):
    tree = TokenTree.from_sequences([*answers(150, 70, 20), [5] * 30])
    check(tree, tensors_of(tree, 2, 1, 64, torch.bfloat16, sinks=True), backend="emulator")


def refused():
    tree = TokenTree.from_sequences([[1, 2, 3]])
    x = torch.zeros(3, 1, 8)
    return {
        "tree must be a tilewise.TokenTree, got list": lambda: attention_tree(x, x, x, [[1]]),
        "q must have a row for each of the tree's 3": lambda: attention_tree(x[:2], x[:2], x[:2], tree),
        "k must have shape": lambda: attention_tree(x, x[:2], x[:2], tree),
        "q must have 3 dimensions": lambda: attention_tree(x[None], x[None], x[None], tree),
        "tree must be on meta": lambda: attention_tree(*[x.to("meta")] * 3, tree),
        "deterministic must be True or False": lambda: attention_tree(x, x, x, tree, deterministic=1),
        "window must be": lambda: attention_tree(x, x, x, tree, window=5),
    }


@pytest.mark.parametrize("message", refused())
def test_what_is_refused_says_why(message):
    with pytest.raises((TypeError, ValueError), match=message):
        refused()[message]()


def test_kernels_are_asked_for_one_sequence_with_ends(monkeypatch):
    tree = TokenTree.from_sequences([*answers(60, 20, 30), [5] * 10])
    tensors, made = tensors_of(tree, 4, 2, 16, sinks=True), []

    def kernel(call):
        """The formulas, over what `ends` let a query see."""
        made.append(call)
        group, place = call.q.shape[1] // call.k.shape[1], torch.arange(len(call.q))
        k, v = (x.repeat_interleave(group, 1) for x in (call.k, call.v))
        seen = (place <= place[:, None]) & (place[:, None] < call.ends)
        s = (torch.einsum("ihd,jhd->hij", call.q, k) * call.scores.scale).masked_fill(~seen, -torch.inf)
        p = torch.exp(s - call.lse[..., None])
        delta = torch.einsum("ihd,ihd->hi", call.d_o, call.o) - call.d_lse
        d_s = p * (torch.einsum("ihd,jhd->hij", call.d_o, v) - delta[..., None]) * call.scores.scale
        d_k, d_v = (
            torch.einsum("hij,ihd->jhd", of, by).unflatten(1, (-1, group)).sum(2)
            for of, by in ((d_s, call.q), (p, call.d_o))
        )
        d_sinks = -(torch.exp(call.scores.sinks[:, None] - call.lse) * delta).sum(1)
        return Gradients(torch.einsum("hij,jhd->ihd", d_s, k), d_k, d_v, d_sinks)

    monkeypatch.setattr(backward, "gradients", kernel)
    rule = arguments.check_scores(tensors[0], 1, causal=True).rule
    state = [x.detach() for x in ours(tree, *tensors)]
    grads = randn(4, 16, seed=7).expand(tensors[0].shape), randn(4, tree.num_tokens, seed=8)
    got = gradient_nodes.found(Tree(tree, rule, "emulator", True), tensors, state, grads)
    want = gradients(partial(ours, tree), tensors, *grads)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    (call,) = made
    assert call.deterministic
    assert call.starts_q.tolist() == call.starts_k.tolist() == [0, tree.num_tokens]
    assert call.ends.dtype == torch.int32
