"""Trees of tokens: what is shared, what each token sees, values and losses per token."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from token_tree_cases import answers, beginnings, families, visible

from tilewise import TokenTree, attention_tree
from tilewise.plan.branches import plan_branches


@settings(max_examples=20)
@given(families())
def test_a_tree_holds_each_beginning_once_and_shows_what_sequences_show(sequences):
    tree = TokenTree.from_sequences(sequences)
    seen, named = visible(sequences), beginnings(tree)
    assert len(set(named)) == len(named) == tree.num_tokens == len(seen)
    assert set(named) == set(seen)
    assert tree.positions.tolist() == [len(name) - 1 for name in named]
    ends = tree.ends.tolist()
    for q, name in enumerate(named):
        assert {named[k] for k in range(tree.num_tokens) if k <= q < ends[k]} == seen[name]
    assert tree.lengths == [len(s) for s in sequences]
    assert tree.unpack(tree.tokens).tolist() == [t for s in sequences for t in s]


@settings(max_examples=20)
@given(families())
def test_nodes_on_a_device_tell_the_same_as_sequences(sequences):
    tree = TokenTree.from_sequences(sequences)
    again = TokenTree.from_nodes(tree.tokens, tree._offsets.int(), tree._parents.int())
    for name in ("positions", "ends", "previous"):
        assert torch.equal(getattr(again, name), getattr(tree, name)), name
    whole = {tuple(s) for s in sequences if s and not any(s == o[: len(s)] and s != o for o in sequences)}
    assert {tuple(x.tolist()) for x in again.unpack(again.tokens).split(again.lengths)} == whole


def test_nodes_without_tokens_and_a_long_chain_change_nothing():
    tokens = torch.arange(7)
    chain = TokenTree.from_nodes(tokens, torch.arange(8), torch.arange(-1, 6))
    assert chain.ends.tolist() == [7] * 7
    assert chain.previous.tolist() == list(range(-1, 6))
    empty = TokenTree.from_nodes(tokens, torch.tensor([0, 0, 3, 3, 5, 7, 7]), torch.tensor([-1, 0, 1, 2, 2, 0]))
    plain = TokenTree.from_nodes(tokens, torch.tensor([0, 3, 5, 7]), torch.tensor([-1, 0, 0]))
    for name in ("positions", "ends", "previous", "index"):
        assert torch.equal(getattr(empty, name), getattr(plain, name)), name


def test_what_nodes_say_that_cannot_be_names_no_token_outside():
    from tilewise.trees.structure import structure_of

    wild = structure_of(torch.tensor([5, -3, 99, 4, 7]), torch.tensor([3, -9, 2, 2]), 10)
    assert wild.ends.max() <= 10
    assert wild.previous.min() >= -1
    assert wild.previous.max() < 10
    assert (wild.ends > torch.arange(10)).all()


@settings(max_examples=25)
@given(families(longest=70))
def test_a_plan_meets_each_visible_pair_once(sequences):
    tree = TokenTree.from_sequences(sequences)
    total = tree.num_tokens
    q, k = torch.arange(total)[:, None], torch.arange(total)
    for left in (None, 0, 9, 64):
        met = torch.zeros(total, total, dtype=torch.int32)
        plan = plan_branches(tree.host_ends, 2, 1, 8, left=left)
        for r in plan.rectangles():
            offset = torch.arange(r.keys) - torch.arange(r.rows)[:, None]
            met[r.row : r.row + r.rows, r.key : r.key + r.keys] += r.band.allows(offset)
        seen = (k <= q) & (q < tree.ends)
        if left is not None:
            seen &= tree.positions[:, None] - tree.positions <= left
        assert torch.equal(met, seen.int()), left
        assert not plan.exclusive or (met.sum(1) > 0).all()
        schedule = tree.schedule(left)
        assert not (seen & ~schedule.to_mask()).any()
        asked = tree.sees(left)(0, 0, q, k)
        whole = type(schedule).from_bits(schedule.whole, seqlen_q=total, seqlen_k=total, block_q=128, block_k=128)
        assert asked[whole.to_mask()].all()


def test_answers_of_one_length_are_one_item_and_a_prompt_another():
    tree = TokenTree.from_sequences(answers(64, *[32] * 16))
    items = plan_branches(tree.host_ends, 8, 2, 64).work
    assert [(i.row, i.rows, i.keys, i.count) for i in items] == [(0, 64, 64, 1), (64, 32, 32, 16), (64, 512, 64, 1)]
    assert "16 × 32 tokens" in tree.show()
    assert tree.show().startswith("16 sequences of 1,536 tokens as 576: 2.67 × shared")


def test_unpack_and_pack_are_each_others_backward_with_float32_sums():
    tree = TokenTree.from_sequences(answers(5, *[3] * 300))
    x = torch.randn(tree.num_tokens, 2, dtype=torch.bfloat16, requires_grad=True)
    unpacked = tree.unpack(x)
    assert torch.equal(unpacked, x[tree.index])
    grad = torch.full_like(unpacked, 1.0)
    (got,) = torch.autograd.grad(unpacked, x, grad)
    assert got.dtype == torch.bfloat16
    assert got[:5].eq(300.0).all()  # of which sums in bfloat16 reach 256
    assert torch.equal(tree.pack(grad), got)
    y = torch.randn(len(tree.index), requires_grad=True)
    (back,) = torch.autograd.grad(tree.pack(y).square().sum(), y)
    assert torch.equal(back, 2 * tree.pack(y.detach())[tree.index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_losses_are_those_of_the_unshared_batch(dtype, monkeypatch):
    monkeypatch.setattr("tilewise.trees.losses.LOGITS_AT_ONCE", 7 * 130)  # seven rows at once
    sequences = [*answers(9, 4, 7, 1), [3, 4, 5]]
    tree = TokenTree.from_sequences(sequences)
    logits = torch.randn(1, tree.num_tokens, 130).to(dtype).requires_grad_()
    weights = torch.randn(len(tree.index))
    exact = logits.detach().double().requires_grad_()
    rows = exact[0][tree.index].split(tree.lengths)
    told = [
        F.log_softmax(x, -1)[:-1].gather(1, torch.tensor(s[1:])[:, None])[:, 0]
        for x, s in zip(rows, sequences, strict=True)
    ]
    logprobs = tree.unpack(tree.logprobs(logits)).split(tree.lengths)
    for got, want in zip(logprobs, told, strict=True):
        assert got[0] == 0
        torch.testing.assert_close(got[1:].double(), want, atol=1e-5, rtol=1e-5)
    by_weights = -sum((w[1:] * x).sum() for w, x in zip(weights.split(tree.lengths), told, strict=True))
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-4, "rtol": 5e-3}
    for got, want in (
        (tree.pack_loss(logits, weights), by_weights),
        (tree.pack_loss(logits), -torch.cat(told).mean()),
    ):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
        gradients = torch.autograd.grad(got, logits)[0], torch.autograd.grad(want, exact, retain_graph=True)[0]
        assert gradients[0].dtype == dtype
        torch.testing.assert_close(gradients[0].double(), gradients[1], **tolerance)


def test_a_certain_tokens_gradient_is_not_lost_in_sixteen_bits():
    tree = TokenTree.from_sequences([[0, 1]])
    logits = torch.tensor([[0.0, 9.0], [0.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(tree.pack_loss(logits), logits)
    exact = torch.sigmoid(torch.tensor(-9.0))
    torch.testing.assert_close(grad[0].float(), torch.stack([exact, -exact]), rtol=4e-3, atol=0)


def test_a_tree_is_sent_to_another_process_after_it_was_used():
    tree = TokenTree.from_sequences(answers(10, 4, 5))
    x = torch.randn(tree.num_tokens, 1, 8)
    used = attention_tree(x, x, x, tree), tree.schedule(), tree.sees(3), tree.index
    again = pickle.loads(pickle.dumps(tree))
    assert torch.equal(attention_tree(x, x, x, again), used[0])
    assert torch.equal(again.index, used[3])
    assert copy.deepcopy(tree).lengths == tree.lengths


@pytest.mark.parametrize("made", ["sequences", "nodes"])
def test_a_tree_of_inference_mode_is_trained_over(made):
    """The policy that draws the answers runs under it, and asks the tree first."""
    with torch.inference_mode():
        tree = TokenTree.from_sequences(answers(10, 4, 5))
        if made == "nodes":
            tree = TokenTree.from_nodes(tree.tokens.clone(), tree._offsets.clone(), tree._parents.clone())
        x = torch.randn(tree.num_tokens, 1, 8)
        drawn = attention_tree(x, x, x, tree), tree.logprobs(x[:, 0].repeat(1, 99)), tree.unpack(x)
    x = x.clone().requires_grad_()
    again = attention_tree(x, x, x, tree), tree.logprobs(x[:, 0].repeat(1, 99)), tree.unpack(x)
    for ours, theirs in zip(again, drawn, strict=True):
        assert torch.equal(ours, theirs)
        (grad,) = torch.autograd.grad(ours.square().sum(), x, retain_graph=True)
        assert grad.isfinite().all()
    assert not any(x.is_inference() for x in (tree.tokens, tree.positions, tree.ends, tree.previous, tree.index))


def test_trees_are_drawn_and_moved(tmp_path):
    tree = TokenTree.from_sequences([*answers(40, 10, 10, 20), [7, 7]])
    tree.draw(tmp_path / "tree.svg")
    assert (tmp_path / "tree.svg").stat().st_size > 1000
    with pytest.raises(ValueError, match="png"):
        tree.draw(tmp_path / "tree.pdf")
    assert tree.to("cpu") is tree
    assert "82 tokens, 5 nodes" in repr(tree)
    assert tree.show(lines=2).endswith("… and 2 more lines")


REFUSED = {
    "sequences must be a list": lambda: TokenTree.from_sequences(3),
    "sequences.1. must be a list of ints": lambda: TokenTree.from_sequences([[1], 2]),
    "sequences.0. must hold ints": lambda: TokenTree.from_sequences([[1.5]]),
    "sequences.0. must be .length,. integers": lambda: TokenTree.from_sequences([torch.zeros(2)]),
    "at least one token": lambda: TokenTree.from_sequences([[], []]),
    "offsets must begin": lambda: TokenTree.from_nodes(torch.arange(3), torch.tensor([0, 2]), torch.tensor([-1])),
    "parents.1. must be": lambda: TokenTree.from_nodes(torch.arange(3), torch.tensor([0, 2, 3]), torch.tensor([-1, 1])),
    "depth-first": lambda: TokenTree.from_nodes(torch.arange(4), torch.arange(5), torch.tensor([-1, 0, -1, 1])),
    "must have a row for each of the 2 packed": lambda: TokenTree.from_sequences([[1, 2]]).unpack(torch.zeros(3)),
    "must have a row for each of the 4 tokens": lambda: TokenTree.from_sequences([[1, 2]] * 2).pack(torch.zeros(3)),
    "logits must be": lambda: TokenTree.from_sequences([[1, 2]]).logprobs(torch.zeros(2, 2, 5)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_says_why(message):
    with pytest.raises((TypeError, ValueError), match=message):
        REFUSED[message]()
