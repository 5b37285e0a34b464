"""`TokenTree`: sequences that share beginnings, packed in depth-first order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from tilewise import checks
from tilewise.graphs import methods_outside
from tilewise.plan.branches import Ends
from tilewise.plan.schedule import BlockSchedule
from tilewise.plan.schedule_files import AnyPath
from tilewise.trees import pictures, trie
from tilewise.trees.losses import Logprobs, Pack, Unpack
from tilewise.trees.structure import structure_of

Kept = TypeVar("Kept")
BLOCK = 128  # queries and keys of a block of the schedule


@methods_outside
class TokenTree:
    """Sequences that share beginnings, each shared token once; several trees stand one after the other.

    Tokens are packed in depth-first order, so everything below a token stands right behind it, and packed token k is
    seen by the packed queries k … ends[k] − 1. All (total,), on one device:
      tokens     int64
      positions  int64, each token's place in its sequence: what a model calls position ids
      ends       int32
      previous   int64, the packed token before it in its sequence, −1 for a first one
    """

    def __init__(
        self, tokens: torch.Tensor, offsets: torch.Tensor, parents: torch.Tensor, nodes: trie.Nodes | None
    ) -> None:
        """`from_sequences` and `from_nodes` make trees."""
        with torch.inference_mode(False):  # or a tree that was made under it could not be trained over
            tokens, offsets, parents = (x.clone() if x.is_inference() else x for x in (tokens, offsets, parents))
            self.positions, self.ends, self.previous = structure_of(offsets, parents, tokens.shape[0])
        self.tokens, self._offsets, self._parents, self._given_nodes = tokens, offsets, parents, nodes
        self._kept: dict[Hashable, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what was found out: a tree that a data loader's process made is sent to the trainer's."""
        names = ("tokens", "positions", "ends", "previous", "_offsets", "_parents", "_given_nodes")
        return {**{name: getattr(self, name) for name in names}, "_kept": {}}

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Sequence[int] | torch.Tensor],
        *,
        device: torch.device | str | None = None,
    ) -> TokenTree:
        """The tree of these sequences, lists of ints or (length,) integer tensors; equal beginnings are shared.

        Branches stand in the order of the sequences that they first appear in. An empty sequence, and one that is the
        beginning of another, add no tokens. device: of the tree, that of the first tensor (else the CPU) if None.
        Tensors on a GPU are copied to the CPU first, and that waits.
        """
        if isinstance(sequences, (str, bytes)) or not isinstance(sequences, (Sequence, torch.Tensor)):
            raise TypeError(f"sequences must be a list of token lists or tensors, got {type(sequences).__name__}")
        if device is None:
            device = next((x.device for x in sequences if isinstance(x, torch.Tensor)), torch.device("cpu"))
        packed, nodes = trie.pack([_tokens(f"sequences[{n}]", x) for n, x in enumerate(sequences)])
        if not len(packed):
            raise ValueError("sequences must hold at least one token, got none")
        tokens, offsets, parents = (torch.from_numpy(x).to(device) for x in (packed, nodes.offsets, nodes.parents))
        return cls(tokens, offsets, parents, nodes)

    @classmethod
    def from_nodes(cls, tokens: torch.Tensor, offsets: torch.Tensor, parents: torch.Tensor) -> TokenTree:
        """A tree whose nodes are known, from tensors on one device; on a GPU nothing waits.

        tokens: (total,), packed in depth-first order. Node n has tokens[offsets[n] : offsets[n + 1]] and hangs below
        node parents[n] < n, −1 for a tree of its own; offsets (nodes + 1,), parents (nodes,), int32 or int64. Its
        sequences are the ways down to the leaves, in order. On a GPU the values are not looked at: whatever they say,
        nothing outside of the tensors is touched. `unpack` and what shows a tree look, and wait once.
        """
        device = tokens.device if isinstance(tokens, torch.Tensor) else None
        checks.tensor("tokens", tokens, shape=("total",), dtypes=checks.INTEGERS)
        checks.tensor("parents", parents, shape=("nodes",), dtypes=checks.INTEGERS, device=device)
        shape = (parents.shape[0] + 1,)
        checks.tensor("offsets", offsets, shape=shape, dtypes=checks.INTEGERS, device=device)
        if not tokens.shape[0] or not parents.shape[0]:
            raise ValueError(
                f"tokens and parents must not be empty, got {tuple(tokens.shape)} and {tuple(parents.shape)}"
            )
        if tokens.device.type == "cpu":
            _check_nodes(offsets.tolist(), parents.tolist(), tokens.shape[0])
        return cls(tokens.long(), offsets.long(), parents.long(), None)

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def num_tokens(self) -> int:
        """Packed tokens: what a model computes."""
        return self.tokens.shape[0]

    @property
    def lengths(self) -> list[int]:
        """Of the sequences."""
        lengths: list[int] = np.diff(self._unpacked[1]).tolist()
        return lengths

    @property
    def starts(self) -> torch.Tensor:
        """Where the sequences start when they stand unshared, one after the other: `cu_seqlens`, int32 (n + 1,)."""
        return self.keep("starts", lambda: torch.from_numpy(self._unpacked[1]).to(self.device, torch.int32))

    @property
    def index(self) -> torch.Tensor:
        """The packed token of each token of the sequences, one sequence after the other: int64 (sum of lengths,)."""
        return self.keep("index", lambda: torch.from_numpy(self._unpacked[0]).to(self.device))

    def to(self, device: torch.device | str) -> TokenTree:
        """The same on another device."""
        if torch.device(device) == self.device:
            return self
        tokens, offsets, parents = (x.to(device) for x in (self.tokens, self._offsets, self._parents))
        return TokenTree(tokens, offsets, parents, self._given_nodes)

    @cached_property
    def _nodes(self) -> trie.Nodes:
        if self._given_nodes is not None:
            return self._given_nodes
        offsets, parents = (x.cpu().numpy() for x in (self._offsets, self._parents))
        nodes = trie.Nodes(offsets, parents, np.zeros(0, np.int64))
        return nodes._replace(lasts=nodes.leaves())

    @cached_property
    def _unpacked(self) -> tuple[trie.Ints, trie.Ints]:
        return self._nodes.unpacked()

    @cached_property
    def host_ends(self) -> Ends:
        """`ends` as an array on the CPU."""
        ends: Ends = self.ends.cpu().numpy()
        return ends

    def keep(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """What `make` makes, once per key: every layer of a model asks for the same."""
        if key not in self._kept:
            with torch.inference_mode(False):  # the policy that drew the answers asks first, under it; training follows
                self._kept[key] = make()
        found: Kept = self._kept[key]
        return found

    # ---- values per token ------------------------------------------------------------------------------------------

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Values per packed token (total, …) as values per token of the sequences, (sum of lengths, …), one sequence
        after the other: `unpack(x).split(tree.lengths)`. Its backward sums over sequences that share a token."""
        self._check_rows("x", x, self.num_tokens)
        found: torch.Tensor = Unpack.apply(x, self.index)  # type: ignore[no-untyped-call]
        return found

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Values per token of the sequences (sum of lengths, …), one sequence after the other, summed over those that
        share a token: (total, …). Sums are float32."""
        self._check_rows("x", x, len(self.index))
        found: torch.Tensor = Pack.apply(x, self.index, self.num_tokens)  # type: ignore[no-untyped-call]
        return found

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Of each packed token its log-probability after the one before it, float32 (total,); 0 for first tokens.

        logits: (total, vocabulary) or (1, total, vocabulary), a model's. The logits of the last token that branches
        share serve each of them. Nothing as large as the logits is made but their gradient.
        """
        checks.tensor("logits", logits, dtypes=checks.FLOATS, device=self.device)
        if logits.dim() not in (2, 3) or logits.shape[-2] != self.num_tokens or logits.shape[:-2].numel() != 1:
            raise ValueError(
                f"logits must be ({self.num_tokens}, vocabulary), or that with a 1 before it, got {tuple(logits.shape)}"
            )
        flat = logits.view(logits.shape[-2:])
        found: torch.Tensor = Logprobs.apply(flat, self.previous, self.tokens)  # type: ignore[no-untyped-call]
        return found

    def pack_loss(self, logits: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """The cross-entropy of the sequences: − Σ weight · log-probability over all their tokens but the first ones.

        logits: as `logprobs` takes them. weights: per token of the sequences, (sum of lengths,), one sequence after the
        other: 0 for a prompt's, an advantage, one over a length. None is the mean over all tokens that are predicted,
        each as often as sequences have it, as of the unshared batch. Returns a float32 scalar.

        A loss that is not linear in the log-probabilities is made of `unpack(logprobs(logits))`.
        """
        if weights is None:
            counts = self.keep("counts", lambda: self.pack(torch.ones(len(self.index), device=self.device)))
            counts = counts.masked_fill(self.previous < 0, 0.0)
            shares = counts / counts.sum().clamp(min=1.0)
        else:
            self._check_rows("weights", weights, len(self.index))
            checks.tensor("weights", weights, shape=(len(self.index),))
            shares = self.pack(weights.float())
        return -(shares * self.logprobs(logits)).sum()

    def _check_rows(self, name: str, x: Any, rows: int) -> None:
        checks.tensor(name, x, device=self.device)
        if not x.dim() or x.shape[0] != rows:
            what = "packed tokens" if rows == self.num_tokens else "tokens of the sequences"
            raise ValueError(f"{name} must have a row for each of the {rows} {what}, got shape {tuple(x.shape)}")

    # ---- what kernels are told -------------------------------------------------------------------------------------

    def schedule(self, left: int | None = None) -> BlockSchedule:
        """Which blocks of queries meet which blocks of keys, with those that the mask `sees` shows whole; `causal`
        comes on top. left: how many tokens before its own a query sees. Made where the tree is; nothing waits."""
        return self.keep(("schedule", left), lambda: self._schedule(left))

    def _schedule(self, left: int | None) -> BlockSchedule:
        total, blocks = self.num_tokens, -(-self.num_tokens // BLOCK)

        def by_block(x: torch.Tensor, beyond: int) -> torch.Tensor:
            return F.pad(x, (0, blocks * BLOCK - total), value=beyond).view(blocks, BLOCK)

        first = torch.arange(blocks, device=self.device)[:, None] * BLOCK  # of a block's queries
        last = (first + BLOCK - 1).clamp(max=total - 1)
        kept = by_block(self.ends, 0).amax(1) > first
        whole = by_block(self.ends, total).amin(1) > last
        if left is not None:
            low, high = by_block(self.positions, total).amin(1), by_block(self.positions, 0).amax(1)
            kept = kept & (low[:, None] - high <= left)
            whole = whole & (high[:, None] - low <= left)
        sizes = {"seqlen_q": total, "seqlen_k": total, "block_q": BLOCK, "block_k": BLOCK}
        return BlockSchedule.from_blocks(kept.tril(), whole=(kept & whole).tril(), **sizes)

    def sees(self, left: int | None = None) -> Callable[[Any, Any, Any, Any], Any]:
        """The mask function (b, h, q, k) -> bool of what is not causal: does query q stand below key k, and at most
        `left` tokens behind it?"""
        return self.keep(("sees", left), lambda: _sees(self.ends, self.places, left))

    @property
    def places(self) -> torch.Tensor:
        """`positions` as int32."""
        return self.keep("places", lambda: self.positions.to(torch.int32))

    # ---- for people ------------------------------------------------------------------------------------------------

    def show(self, lines: int = 40) -> str:
        """The tree as text, at most `lines` of its branches: print it. Looks."""
        return pictures.text(self._nodes, len(self.index), checks.integer("lines", lines, 1))

    def draw(self, path: AnyPath) -> None:
        """Writes a picture of the tree and of its mask, a PNG or an SVG by the path's ending. Looks."""
        pictures.draw(self._nodes, self.host_ends, len(self.index), path)

    def __repr__(self) -> str:
        return f"TokenTree({self.num_tokens} tokens, {self._parents.shape[0]} nodes, {self.device})"


def _sees(ends: torch.Tensor, positions: torch.Tensor, left: int | None) -> Callable[[Any, Any, Any, Any], Any]:
    if left is None:
        return lambda b, h, q, k: q < ends[k]
    return lambda b, h, q, k: (q < ends[k]) & (positions[q] - positions[k] <= left)


def _tokens(name: str, given: Any) -> trie.Ints:
    """Checked tokens as an array."""
    if isinstance(given, torch.Tensor):
        if given.dim() != 1 or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise ValueError(f"{name} must be (length,) integers, got {given.dtype} of shape {tuple(given.shape)}")
        return given.detach().cpu().long().numpy()
    try:
        array = np.asarray(given)
    except ValueError:  # lists of unequal lengths
        array = np.zeros((0, 0))
    if array.ndim != 1:
        raise TypeError(f"{name} must be a list of ints or a (length,) tensor, got {type(given).__name__}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold ints, got {array.dtype}")
    return array.astype(np.int64)


def _check_nodes(offsets: list[int], parents: list[int], total: int) -> None:
    if offsets[0] != 0 or offsets[-1] != total or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"offsets must begin with 0, never decrease and end with the {total} tokens, got {offsets}")
    path: list[int] = []  # the node before, and all above it
    for n, parent in enumerate(parents):
        if not -1 <= parent < n:
            raise ValueError(f"parents[{n}] must be −1 or a node before node {n}, got {parent}")
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            raise ValueError(
                f"parents must tell nodes in depth-first order: node {n} hangs below {parent}, node {n - 1} does not"
            )
        path.append(n)
