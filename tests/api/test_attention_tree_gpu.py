"""attention_tree on a card: random trees, long ones, graphs, and that nothing waits."""

from __future__ import annotations

import random

import pytest
import torch
from attention_tree_cases import check, tensors_of
from token_tree_cases import answers

from tilewise import TokenTree, attention_tree, attention_varlen

pytestmark = pytest.mark.gpu
CUDA = "cuda"


def random_sequences(chance: random.Random) -> list[list[int]]:
    found: list[list[int]] = []
    for n in range(chance.randint(1, 7)):
        begun = chance.choice([[], *found, *found])
        begun = begun[: chance.randint(0, len(begun))]
        found.append(begun + [n + 1] * chance.choice([1, 17, 64, 100, 128, 300]))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_random_trees(seed):
    chance = random.Random(seed)
    tree = TokenTree.from_sequences(random_sequences(chance))
    heads_kv = chance.choice([1, 2])
    dtype = chance.choice([torch.bfloat16, torch.bfloat16, torch.float16])
    tensors = tensors_of(tree, heads_kv * chance.choice([1, 2, 4]), heads_kv, chance.choice([64, 128, 96]), dtype)
    options = {"window": chance.choice([None, None, (60, 0)]), "softcap": chance.choice([0.0, 0.0, 5.0])}
    check(tree, tensors, chance.random() < 0.5, device=CUDA, deterministic=chance.random() < 0.3, **options)


def test_a_long_tree_is_its_sequences():
    tree = TokenTree.from_sequences(answers(2000, *[700] * 6), device=CUDA)
    leaves = [x.to(CUDA).requires_grad_() for x in tensors_of(tree.to("cpu"), 8, 2, 128, torch.bfloat16)]
    d_o = torch.randn_like(leaves[0])
    o = attention_tree(*leaves, tree)
    starts = tree.starts
    alone = attention_varlen(*(tree.unpack(x) for x in leaves), starts, starts, causal=True)
    assert (tree.unpack(o).float() - alone.float()).abs().max() < 0.02
    d_alone = torch.zeros_like(alone)  # of one sequence per token, so that both are the same sum
    first = torch.zeros(tree.num_tokens, dtype=torch.long, device=CUDA)
    first.scatter_(0, tree.index, torch.arange(len(tree.index), device=CUDA))
    d_alone[first] = d_o
    for one, other in zip(
        torch.autograd.grad(o, leaves, d_o), torch.autograd.grad(alone, leaves, d_alone), strict=True
    ):
        assert (one.float() - other.float()).abs().max() < 0.02 * other.float().abs().max()


def test_deterministic_gradients_have_the_same_bits():
    tree = TokenTree.from_sequences(answers(1000, *[300] * 8), device=CUDA)
    leaves = [x.to(CUDA).requires_grad_() for x in tensors_of(tree.to("cpu"), 8, 2, 128, torch.bfloat16)]
    o = attention_tree(*leaves, tree, deterministic=True)
    d_o = torch.randn_like(o)
    once, again = (torch.autograd.grad(o, leaves, d_o, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_from_nodes_to_gradients_nothing_waits():
    like = TokenTree.from_sequences(answers(500, *[200] * 4))
    tokens, offsets, parents = (x.to(CUDA) for x in (like.tokens, like._offsets, like._parents))
    leaves = [x.to(CUDA).requires_grad_() for x in tensors_of(like, 4, 2, 64, torch.bfloat16)]
    logits = torch.randn(like.num_tokens, 600, device=CUDA, requires_grad=True)

    def step():
        tree = TokenTree.from_nodes(tokens, offsets, parents)
        loss = attention_tree(*leaves, tree).float().sum() + tree.logprobs(logits).sum()
        return torch.autograd.grad(loss, [*leaves, logits])

    step()  # kernels are compiled and loaded
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert all(x.isfinite().all() for x in got)


def test_a_step_is_captured_and_follows_new_values():
    tree = TokenTree.from_sequences(answers(300, *[100] * 4), device=CUDA)
    leaves = [x.to(CUDA).requires_grad_() for x in tensors_of(tree.to("cpu"), 4, 2, 64, torch.bfloat16)]
    d_o = torch.randn_like(leaves[0])

    def step():
        return torch.autograd.grad(attention_tree(*leaves, tree, deterministic=True), leaves, d_o)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            got = step()
    with torch.no_grad():
        leaves[0].normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, step(), strict=True))


def test_trees_that_are_gone_hold_no_memory():
    q = torch.randn(40_000, 2, 64, device=CUDA, dtype=torch.bfloat16)

    def over(tokens):
        tree = TokenTree.from_sequences([[0] * (tokens - 300) + [n] * 100 for n in (1, 2, 3)], device=CUDA)
        part = q[: tree.num_tokens].requires_grad_()
        torch.autograd.grad(attention_tree(part, part, part, tree).sum(), part)

    over(30_000)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for n in range(20):
        over(30_000 + 64 * n)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - held < 1 << 20  # the lists of one of them are more
