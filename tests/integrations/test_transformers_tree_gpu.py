"""Models of transformers over a tree of tokens on a card, beside the same sequences one by one in float32."""

from __future__ import annotations

import pytest
import torch
import transformers_cases as cases
from token_tree_cases import answers
from transformers_cases import build

from tilewise import TokenTree
from tilewise.integrations.transformers import training_tree

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("registered")]
SEQUENCES = [[3 + t % 90 for t in s] for s in answers(60, 30, 45, 1, 20)]


@pytest.mark.parametrize("make", [cases.llama, cases.qwen3], ids=lambda m: m.__name__)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_step_over_a_tree(make, head_dim):
    exact = build(make, head_dim=head_dim).requires_grad_(True)
    tree = TokenTree.from_sequences(SEQUENCES)
    losses = [
        torch.nn.functional.cross_entropy(exact(torch.tensor([s])).logits[0, :-1], torch.tensor(s[1:]), reduction="sum")
        for s in SEQUENCES
    ]
    want = torch.autograd.grad(sum(losses) / sum(len(s) - 1 for s in SEQUENCES), list(exact.parameters()))
    model, there = build(make, head_dim=head_dim).to("cuda", torch.bfloat16).requires_grad_(True), tree.to("cuda")
    with training_tree(there):
        logits = model(there.tokens[None], position_ids=there.positions[None], use_cache=False).logits
    got = torch.autograd.grad(there.pack_loss(logits), list(model.parameters()))
    close = [
        torch.nn.functional.cosine_similarity(a.cpu().float().flatten(), b.flatten(), 0).item()
        for a, b in zip(got, want, strict=True)
    ]
    assert min(close) > 0.98, close
