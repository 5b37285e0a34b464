"""Stand-ins for the keys of a cache: the forms of an indexer's formula that are followed, and all that is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tilewise.serving import indexer_formula as formula

BATCH, TOKENS, HEADS, DIM, KEYS, TOPK = 2, 3, 4, 5, 9, 6
SCALE = DIM**-0.5
CPU = torch.device("cpu")


def indexer(
    q,
    keys,
    weights,
    mask,
    of_keys=lambda k: k.transpose(-1, -2).float().unsqueeze(1),
    products=lambda q, k: torch.matmul(q.float(), k) * SCALE,
    positive=F.relu,
    weighed=lambda w, s: torch.matmul(w.unsqueeze(-2), s).squeeze(-2),
    masked=lambda s, m: s + m,
    chosen=lambda s: s.topk(min(TOPK, s.shape[-1]), dim=-1).indices.to(torch.int32),
):
    """As transformers writes it; any part may be another."""
    return chosen(masked(weighed(weights, positive(products(q, of_keys(keys)))), mask))


def given(dtype=torch.bfloat16):
    """q, keys, weights and mask, and the stand-ins for keys and mask."""
    torch.manual_seed(5)
    q, keys = torch.randn(BATCH, TOKENS, HEADS, DIM).to(dtype), torch.randn(BATCH, KEYS, DIM).to(dtype)
    hidden = torch.arange(KEYS) > torch.tensor([[6, 7, 8], [5, 6, 8]])[..., None]
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    stood = formula.Keys.of(BATCH, KEYS, DIM, dtype, CPU), formula.Mask.of(BATCH, TOKENS, KEYS, CPU)
    return (q, keys, torch.randn(BATCH, TOKENS, HEADS), mask), stood


def followed(dtype=torch.bfloat16, **parts):
    (q, _, weights, _), (keys, mask) = given(dtype)
    return formula.choice_of(lambda: indexer(q, keys, weights, mask, **parts))


FOLLOWED = {
    "as it is": {},
    "transposed later": {"of_keys": lambda k: k.float().unsqueeze(1).transpose(2, 3)},
    "by other numbers of dims": {"of_keys": lambda k: k.unsqueeze(-3).transpose(-2, -1).to(torch.float32)},
    "the operator": {
        "products": lambda q, k: q.float() @ k * SCALE,
        "weighed": lambda w, s: (w[:, :, None] @ s).squeeze(2),
    },
    "a scale that comes first": {"products": lambda q, k: 0.5 * torch.mul(q.float() @ k, 2)},
    "no scale": {"products": lambda q, k: q.float().matmul(k)},
    "a scale after relu": {"positive": lambda s: torch.relu(s) * 0.25},
    "relu as a method": {"positive": lambda s: s.relu()},
    "relu as a module": {"positive": torch.nn.ReLU()},
    "the mask first": {"masked": lambda s, m: m.to(torch.float32) + s.float()},
    "torch's add and topk": {"masked": torch.add, "chosen": lambda s: torch.topk(s, TOPK).indices.int()},
    "indices as they are": {"chosen": lambda s: s.topk(k=TOPK).indices},
    "by what shapes and dtypes say": {
        "masked": lambda s, m: s + m if m.dtype == torch.float32 and m.shape == s.shape and m.device == CPU else None
    },
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parts", FOLLOWED.values(), ids=FOLLOWED)
def test_what_is_followed(parts, dtype):
    """Queries and weights are those by which the same code, over tensors, chooses the same."""
    (q, keys, weights, mask), _ = given(dtype)
    want = indexer(q, keys, weights, mask, **parts)
    choice = followed(dtype, **parts)
    assert choice.shape == want.shape == (BATCH, TOKENS, TOPK)
    assert choice.dtype == want.dtype
    assert torch.equal(choice.q, q.flatten(0, 1))
    assert choice.q.dtype == dtype
    assert choice.weights.dtype == torch.float32
    products = torch.einsum("nhd,nkd->nhk", choice.q.float(), keys.float().repeat_interleave(TOKENS, 0)).relu()
    scores = torch.einsum("nh,nhk->nk", choice.weights, products) + mask.flatten(0, 1)
    assert torch.equal(scores.topk(TOPK).indices.sort().values, want.flatten(0, 1).long().sort().values)


def looked_into(s, m):
    raise AssertionError(bool(m))


OTHERS = {
    "no relu": ({"positive": lambda s: s}, "weighing the products of queries and keys without relu"),
    "gelu": ({"positive": F.gelu}, "gelu of the products of queries and keys is not"),
    "relu in place": ({"positive": lambda s: F.relu(s, inplace=True)}, "values of the products .* in place"),
    "relu_": ({"positive": lambda s: s.relu_()}, "relu_ of the products"),
    "squares": ({"positive": lambda s: s.relu() ** 2}, r"TypeError.*unsupported operand type"),
    "a negative scale": ({"products": lambda q, k: q.float() @ k * -SCALE}, r"-0\.44\d* times the products"),
    "no number": ({"products": lambda q, k: q.float() @ k * math.nan}, "nan times"),
    "a scale of the heads": ({"products": lambda q, k: (q.float() @ k) * torch.ones(HEADS, 1)}, "a Tensor times"),
    "scaled in place": ({"products": lambda q, k: imul(q.float() @ k)}, "in place"),
    "a part of the keys": (
        {"of_keys": lambda k: k[:, 1:].transpose(-1, -2).float().unsqueeze(1)},
        "values of the keys",
    ),
    "keys plus something": ({"of_keys": lambda k: (k + 1).float()}, "unsupported operand"),
    "something plus keys": ({"of_keys": lambda k: torch.ones(1) + k}, "add with the keys"),
    "keys of one more axis": ({"of_keys": lambda k: k.float().transpose(1, 2)}, r"with keys \(batch, dim, keys\)"),
    "keys that lie": ({"of_keys": lambda k: k.float().unsqueeze(1)}, r"with keys \(batch, one, keys, dim\)"),
    "keys joined": ({"of_keys": lambda k: torch.cat([k, k])}, "cat with the keys"),
    "double": ({"of_keys": lambda k: k.transpose(1, 2).to(torch.float64).unsqueeze(1)}, "torch.float64 of the keys"),
    "products in 16 bits": (
        {"of_keys": lambda k: k.transpose(1, 2).unsqueeze(1), "products": torch.matmul},
        "a product of torch.bfloat16 and torch.bfloat16 with the keys",
    ),
    "more bits than the keys have": (
        {"products": lambda q, k: torch.matmul(q.float() * 1.01, k)},
        "the keys, in torch.bfloat16, by queries of more bits",
    ),
    "a head": ({"products": lambda q, k: q[:, :, 0].float() @ k}, r"keys \(2, 1, 5, 9\) by \(2, 3, 5\)"),
    "keys times queries": ({"products": lambda q, k: torch.matmul(k, q.float())}, "matmul with the keys"),
    "keys times keys": ({"products": lambda q, k: k @ k}, "unsupported operand"),
    "einsum": ({"weighed": lambda w, s: torch.einsum("bth,bthk->btk", w, s)}, "einsum with the products"),
    "weights in 16 bits": (
        {"weighed": lambda w, s: torch.matmul(w.bfloat16().unsqueeze(-2), s).squeeze(-2)},
        "a product of torch.bfloat16 and torch.float32 with the products",
    ),
    "a weight for all heads": (
        {"weighed": lambda w, s: torch.matmul(w[..., :1].unsqueeze(-2), s)},
        r"weighing products \(2, 3, 4, 9\) by \(2, 3, 1, 1\)",
    ),
    "the scores weighed again": ({"masked": lambda s, m: torch.matmul(torch.ones(3, 3), s)}, "product with the scores"),
    "another axis gone": ({"masked": lambda s, m: s.squeeze(0) + m}, r"squeeze\(0\) of scores \(2, 3, 9\)"),
    "no mask": ({"masked": lambda s, m: s}, "scores .* without the mask"),
    "two masks": ({"masked": lambda s, m: s + m + m}, "adding something else than the mask"),
    "a mask of its own": ({"masked": lambda s, m: s + torch.zeros(TOKENS, KEYS)}, "adding something else"),
    "twice the mask": ({"masked": lambda s, m: s + 2 * m}, "unsupported operand"),
    "the mask plus something": ({"masked": lambda s, m: s + (m + 1)}, "values of the mask"),
    "the mask as truth": ({"masked": lambda s, m: torch.where(m < 0, -1e9, 0.0) + s}, "values of the mask"),
    "filled by the mask": ({"masked": lambda s, m: s.masked_fill(m, -torch.inf)}, "masked_fill of the scores"),
    "a question": ({"masked": lambda s, m: s + m if m.any() else s}, "any of the mask"),
    "another question": ({"masked": looked_into}, "values of the mask"),
    "as an array": ({"of_keys": lambda k: np.asarray(k).sum()}, "of the keys"),
    "the least": ({"chosen": lambda s: s.topk(TOPK, largest=False).indices}, "unexpected keyword"),
    "of another axis": ({"chosen": lambda s: s.topk(2, dim=1).indices}, r"topk\(2, dim=1\)"),
    "more than there are": ({"chosen": lambda s: s.topk(KEYS + 1).indices}, r"topk\(10, dim=-1\)"),
    "all in order": ({"chosen": lambda s: s.argsort(-1)}, "argsort of the scores"),
    "what is best": ({"chosen": lambda s: s.topk(TOPK).values}, "values of the best scores"),
    "both": ({"chosen": lambda s: s.topk(TOPK)[1]}, "values of the best scores"),
    "as numbers": ({"chosen": lambda s: s.topk(TOPK).indices.float()}, "values of the chosen keys"),
    "in few bits": ({"chosen": lambda s: s.topk(TOPK).indices.to(torch.int16)}, "torch.int16 of the chosen keys"),
    "in order": ({"chosen": lambda s: s.topk(TOPK).indices.sort(-1).values}, "sort of the chosen keys"),
    "a mask of the choice": (
        {"chosen": lambda s: torch.ones(s.shape).scatter(-1, s.topk(TOPK).indices, 0.0)},
        "scatter with the chosen keys",
    ),
    "the scores": ({"chosen": lambda s: s}, "returns a Scores"),
    "a tensor": ({"chosen": lambda s: torch.zeros(1)}, "returns a Tensor"),
    "its own mistake": ({"chosen": lambda s: {}["k"]}, "KeyError"),
}


def imul(products):
    products *= SCALE
    return products


@pytest.mark.parametrize(("parts", "why"), OTHERS.values(), ids=OTHERS)
def test_what_is_not(parts, why):
    with pytest.raises(formula.NotFollowed, match=why):
        followed(**parts)


def test_want_of_memory_is_no_question_of_formula():
    def forward():
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        formula.choice_of(forward)
