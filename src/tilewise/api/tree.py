"""Attention over a tree of tokens that is packed in depth-first order, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from tilewise import arguments, checks, cpu, graphs
from tilewise.api import gradients
from tilewise.api.gradients_on_gpu import over_tree
from tilewise.api.on_cpu import full_precision
from tilewise.api.options import Result, State, TreeOptions
from tilewise.api.prefill import attention, result
from tilewise.cpu.scoring import Scoring
from tilewise.plan import Plan, Window
from tilewise.plan.branches import plan_branches
from tilewise.scores import Scores
from tilewise.trees import TokenTree

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention_tree(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tree: TokenTree,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[TreeOptions],
) -> torch.Tensor: ...
@overload
def attention_tree(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tree: TokenTree,
    *,
    return_lse: Literal[True],
    **options: Unpack[TreeOptions],
) -> State: ...
@overload
def attention_tree(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tree: TokenTree,
    *,
    return_lse: bool,
    **options: Unpack[TreeOptions],
) -> Result: ...
def attention_tree(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tree: TokenTree,
    *,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> Result:
    """Causal attention of sequences that share beginnings, over a tree of their tokens: each token sees itself and what
    comes before it in its sequence, as `attention_varlen` would have it of the unshared sequences.

    q: (total, Hq, D) float32, float16 or bfloat16; k, v: (total, Hkv, D) of the same dtype; total = tree.num_tokens.
    window: (left, right); a token sees `left` tokens before its own in its sequence, None for all; what comes after it
    is never seen. scale, softcap, sinks, backend: as in `attention`.
    Gradients of q, k, v, sinks, o and the LSE are served; those of k and v of shared tokens are summed in float32.
    deterministic: the same bits in every run, in the backward pass too.

    What the tree looks like is told by tensors: other lengths and branches compile nothing, and on a GPU nothing waits.

    Returns o (total, Hq, D), with return_lse also the LSE (Hq, total) float32.
    """
    given: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap}
    rest: dict[str, Any] = {"deterministic": deterministic, "backend": backend}
    if torch.compiler.is_compiling():
        call: Any = graphs.outside(attention_tree, "a TokenTree")
        made: Result = call(q, k, v, tree, sinks=sinks, return_lse=return_lse, **given, **rest)
        return made
    _check_tree(q, tree)
    arguments.check_qkv(q, k, v, packed=True)
    checks.tensor("k", k, shape=(tree.num_tokens, None, None))
    scores = arguments.check_scores(q, 1, causal=True, sinks=sinks, **given)
    checks.flag("return_lse", return_lse)
    checks.flag("deterministic", deterministic)
    if arguments.wants_gradients(q, k, v, sinks):
        gradients.check(q, None, backend)
        node = Tree(tree, scores.rule, backend, deterministic)
        return gradients.asked(gradients.apply(node, q, k, v, sinks), return_lse)
    o, lse = _state(q, k, v, sinks, tree, scores.rule, backend)
    return (o, lse) if return_lse else o


def _check_tree(q: Any, tree: Any) -> None:
    if not isinstance(tree, TokenTree):
        raise TypeError(f"tree must be a tilewise.TokenTree, got {type(tree).__name__}")
    checks.tensor("q", q, shape=("total", "heads", "head_dim"))
    if q.shape[0] != tree.num_tokens:
        raise ValueError(
            f"q must have a row for each of the tree's {tree.num_tokens} packed tokens, got {tuple(q.shape)}"
        )
    if tree.device != q.device:
        raise ValueError(f"tree must be on {q.device}, where q is, got {tree.device}; use tree.to(q.device)")


def plan_on_cpu(q: torch.Tensor, heads_kv: int, tree: TokenTree, scores: Scores) -> Plan:
    """The plan that the CPU walks forward and backward; kept with the tree, for every layer asks for the same."""
    sizes, left, io_bytes = (q.shape[1], heads_kv, q.shape[2]), scores.window[0], q.element_size()
    key = ("plan", sizes, left, io_bytes)
    return tree.keep(key, lambda: plan_branches(tree.host_ends, *sizes, left=left, io_bytes=io_bytes))


def _state(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    tree: TokenTree,
    scores: Scores,
    backend: str,
) -> State:
    """o like q and lse (Hq, total), sinks joined. scores: the rule."""
    if arguments.check_backend(backend, q, (k, v, sinks)) != "cpu":
        # One sequence under the tree's blocks; in those that it cuts through the kernel asks which pairs are seen.
        left = scores.window[0]
        o, lse = attention(
            q[None], k[None], v[None], causal=True, scale=scores.scale, softcap=scores.softcap, sinks=sinks,
            schedule=tree.schedule(left), mask=tree.sees(left), return_lse=True, backend=backend,
        )  # fmt: skip
        return o[0], lse[0]
    with full_precision():
        plan = plan_on_cpu(q, k.shape[1], tree, scores)
        o, lse = cpu.run(plan, q, [(k, v)], Scoring.of(scores))
    state = result(o, lse.transpose(0, 1), sinks, None, True)
    assert isinstance(state, tuple)
    return state


@dataclass(frozen=True)
class Tree:
    """attention_tree(q, k, v, sinks) as a node of autograd's graph. scores: the rule."""

    tree: TokenTree
    scores: Scores
    backend: str
    deterministic: bool

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> State:
        return _state(q, k, v, sinks, self.tree, self.scores, self.backend)

    def backward(self, tensors: Sequence[Any], state: State, grads: gradients.Grads) -> gradients.Grads:
        q, k, v, sinks = tensors
        if arguments.check_backend(self.backend, q, ()) != "cpu":
            scores = replace(self.scores, sinks=None if sinks is None else sinks.float().contiguous())
            return over_tree((q, k, v), scores, state, grads, self.tree, deterministic=self.deterministic)
        plan = plan_on_cpu(q, k.shape[1], self.tree, self.scores)
        scoring = Scoring.of(replace(self.scores, sinks=sinks))
        by_rows = gradients.by_rows
        found = gradients.walk(plan, q, [(k, v)], scoring, sinks, by_rows(state), by_rows(grads))
        return found.d_q, *found.d_sources[0], found.d_sinks
