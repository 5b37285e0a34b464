"""Attention over a tree of tokens that is packed in depth-first order, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from tilewise import arguments, checks, cpu, graphs
from tilewise.api import gradients
from tilewise.api.on_cpu import full_precision
from tilewise.api.options import Result, State, TreeOptions
from tilewise.api.prefill import attention, result
from tilewise.cpu.backward import by_rows
from tilewise.cpu.scoring import Scoring
from tilewise.gpu import backward
from tilewise.gpu.backward_call import GradientCall
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

    q: (total, Hq, D) float32, float16 or bfloat16; k, v: (total, Hkv, D or Dv) of the same dtype; total =
    tree.num_tokens.
    window: (left, right); a token sees `left` tokens before its own in its sequence, None for all; what comes after it
    is never seen. scale, softcap, sinks, backend: as in `attention`.
    Gradients of q, k, v, sinks, o and the LSE are served; those of k and v of shared tokens are summed in float32.
    deterministic: the same bits in every run, in the backward pass too.

    What the tree looks like is told by tensors: other lengths and branches compile nothing, and on a GPU nothing waits.

    Returns o (total, Hq, Dv), with return_lse also the LSE (Hq, total) float32.
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
    with torch.no_grad():  # it refuses inputs that require gradients of calls that have none
        where = arguments.check_backend(backend, q, (k, v, sinks))
    node, wanted = Tree(tree, scores.rule, where, deterministic), arguments.wants_gradients(q, k, v, sinks)
    if wanted:
        gradients.check_kernels(q, v, where)
    if not wanted:
        state = node.forward(q, k, v, sinks)
    elif where != "cpu" and scores.window[0] is not None:
        state = node.under_blocks(q, k, v, sinks)  # a key is not seen by one range of queries: it has a node of its own
    else:
        state = gradients.apply(node, q, k, v, sinks)
    return gradients.asked(state, return_lse)


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


@dataclass(frozen=True)
class Tree:
    """attention_tree(q, k, v, sinks) as a node of autograd's graph. scores: the rule."""

    tree: TokenTree
    scores: Scores
    where: arguments.Where
    deterministic: bool

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> State:
        """o (total, Hq, Dv) and lse (Hq, total), sinks joined."""
        if self.where != "cpu":
            return self.under_blocks(q, k, v, sinks)
        with full_precision():
            o, lse = cpu.run(self.plan(q, v), q, [(k, v)], Scoring.of(self.scores))
        state = result(o, lse.transpose(0, 1), sinks, None, True)
        assert isinstance(state, tuple)
        return state

    def backward(self, tensors: Sequence[Any], state: State, grads: gradients.Grads) -> gradients.Grads:
        q, k, v, sinks = tensors
        if self.where != "cpu":
            return self._by_kernels(q, k, v, sinks, state, grads)
        scoring = Scoring.of(replace(self.scores, sinks=sinks))
        found = gradients.walk(self.plan(q, v), q, [(k, v)], scoring, sinks, by_rows(state), by_rows(grads))
        return found.d_q, *found.d_sources[0], found.d_sinks

    def plan(self, q: torch.Tensor, v: torch.Tensor) -> Plan:
        """The plan that the CPU walks forward and backward; kept with the tree, for every layer asks for the same."""
        sizes = (q.shape[1], v.shape[1], q.shape[2], v.shape[2])
        ends, left, io_bytes = self.tree.host_ends, self.scores.window[0], q.element_size()
        key = ("plan", sizes, left, io_bytes)
        return self.tree.keep(key, lambda: plan_branches(ends, *sizes, left=left, io_bytes=io_bytes))

    def under_blocks(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> State:
        """One sequence under the tree's blocks; in those that it cuts through a kernel asks which pairs are seen."""
        left = self.scores.window[0]
        o, lse = attention(
            q[None], k[None], v[None], causal=True, scale=self.scores.scale, softcap=self.scores.softcap, sinks=sinks,
            schedule=self.tree.schedule(left), mask=self.tree.sees(left), return_lse=True,
            deterministic=self.deterministic, backend=self.where,
        )  # fmt: skip
        return o[0], lse[0]

    def _by_kernels(self, q: Any, k: Any, v: Any, sinks: Any, state: State, grads: gradients.Grads) -> gradients.Grads:
        """One packed sequence, of which `ends` tells the queries that see a key."""
        (o, lse), (d_o, d_lse), total = state, grads, self.tree.num_tokens
        d_o = torch.zeros_like(o) if d_o is None else d_o.to(o.dtype)
        if d_o.stride(-1) != 1:  # what a sum hands down is one element, seen everywhere
            d_o = d_o.contiguous()
        starts = torch.arange(0, total + 1, total, dtype=torch.int32, device=q.device)
        call = GradientCall(
            q, k, v, o, lse, d_o, replace(self.scores, sinks=None if sinks is None else sinks.float().contiguous()),
            d_lse=None if d_lse is None else d_lse.float().contiguous(), starts_q=starts, starts_k=starts,
            max_seqlens=(total, total), ends=self.tree.ends,
            deterministic=self.deterministic or torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return backward.gradients(call)
