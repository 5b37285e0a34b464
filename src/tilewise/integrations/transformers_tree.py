"""Models of transformers trained over trees of tokens: what sequences share is computed once.

    with training_tree(tree):
        logits = model(tree.tokens[None], position_ids=tree.positions[None]).logits

Within it the mask of a forward pass is the tree. Layers carry it like any other mask, so it is still there when
gradient checkpointing computes a layer again, in another thread and after the block has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from tilewise.trees import TokenTree

from .. import api
from .extras import extra
from .transformers_mask import INSTEAD, Mask, make_mask, read_pattern

with extra("transformers"):
    from transformers.masking_utils import causal_mask_function


@dataclass(frozen=True, eq=False)
class TreeMask(Mask):
    """The mask of one forward pass over a tree, in one batch row. window: over the places in each sequence."""

    tree: TokenTree = field(kw_only=True)

    def to(self, *args: Any, **kwargs: Any) -> TreeMask:
        """Itself: the tree is where the model's inputs are."""
        return self

    def from_query(self, first: int) -> NoReturn:
        raise NotImplementedError(
            f"this model leaves out the first {first} tokens of the tree in some of its layers, which is not served; "
            "call it with logits_to_keep=0"
        )


class _Entered:
    """A tree that a block trains over, and whether a model has asked for its mask."""

    def __init__(self, tree: TokenTree) -> None:
        self.tree, self.asked = tree, False


_entered: ContextVar[_Entered | None] = ContextVar("tilewise_training_tree", default=None)


@contextmanager
def training_tree(tree: TokenTree) -> Iterator[None]:
    """Within it, models with attn_implementation="tilewise" attend over the tree, in every layer.

    A model is called on `tree.tokens[None]` with `position_ids=tree.positions[None]`, without padding and without a
    cache of earlier tokens. Sliding windows count by position. The backward pass may come after the block.
    """
    if not isinstance(tree, TokenTree):
        raise TypeError(f"tree must be a tilewise.TokenTree, got {type(tree).__name__}")
    here = _Entered(tree)
    token = _entered.set(here)
    try:
        yield
    finally:
        _entered.reset(token)
    if not here.asked:
        raise RuntimeError(
            "no model attended over the tree of training_tree: load it with "
            'attn_implementation="tilewise", after tilewise.integrations.transformers.register()'
        )


def mask_of_pass(batch_size: int, q_length: int, kv_length: int, *args: Any, **given: Any) -> Mask:
    """`make_mask`, or within `training_tree` the tree's; for transformers' AttentionMaskInterface."""
    here = _entered.get()
    if here is None:
        return make_mask(batch_size, q_length, kv_length, *args, **given)
    tree = here.tree
    if (batch_size, q_length, kv_length) != (1, tree.num_tokens, tree.num_tokens):
        raise ValueError(
            f"within training_tree a model takes tree.tokens[None], (1, {tree.num_tokens}), without earlier tokens; "
            f"got {batch_size} batch rows of {q_length} tokens over {kv_length} keys"
        )
    padding = given.get("attention_mask")
    if isinstance(padding, torch.Tensor) and not bool(padding.all()):
        raise ValueError("attention_mask marks padding, and a tree has none; leave it out within training_tree")
    pattern = read_pattern(
        given.get("mask_function", causal_mask_function), q_length
    )  # restarting positions look like documents
    if pattern.chunk:
        raise NotImplementedError(
            f"this model's attention keeps to chunks of positions, which a tree has none of; {INSTEAD}"
        )
    if not pattern.causal:
        raise NotImplementedError(f"this model's attention is not causal, and that over a tree is; {INSTEAD}")
    here.asked = True
    return TreeMask(1, q_length, kv_length, kv_length, True, pattern.window, tree=tree)


def attend_tree(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: TreeMask,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """One layer: query (1, Hq, total, D), key, value (1, Hkv, total, D) -> (1, total, Hq, D)."""
    if dropout:
        raise NotImplementedError(
            f"dropout over a tree is not served, got {dropout}: sequences that share a token would share what is "
            "dropped; set the config's attention dropout to 0"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options: Any = {"window": mask.window, "scale": scale, "softcap": softcap or 0.0, "sinks": sinks}
    o: torch.Tensor = api.attention_tree(q, k, v, mask.tree, **options)
    return o[None]
