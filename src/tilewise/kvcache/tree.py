"""The parts of the prefix tree: its nodes, the sequences that stand on them, and prompts as arrays of token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tilewise.kvcache.pool import Pages
from tilewise.kvcache.progress import Progress, Tokens
from tilewise.kvcache.slots import Slots

TOKEN_BITS = 64  # of an id


class Node:
    """A run of pages whose tokens stand at [start, end) of every sequence through it.

    All pages are full, except that a node without children may be one page that a released sequence left partly filled.
    """

    __slots__ = ("children", "keys", "last_used", "live", "pages", "parent", "start", "tokens")

    def __init__(self, tokens: Tokens, pages: Pages, parent: Node | None, start: int, last_used: int) -> None:
        self.tokens, self.pages = tokens, pages
        self.parent, self.start, self.last_used = parent, start, last_used
        self.children: dict[bytes, Node] = {}  # by the tokens of their first page
        self.keys: list[bytes] = []  # of the children, sorted: neighbours have the longest prefix in common
        self.live: set[Live] = set()  # sequences whose last full, written page this node's end stands for

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Live:
    """A living sequence, in a row of the cache. `complete` tokens are written in every layer, `anchor.end` of them are
    in the tree."""

    __slots__ = ("_progress", "anchor", "row", "seq")

    def __init__(self, seq: int, row: int, anchor: Node, progress: Progress) -> None:
        self.seq, self.row, self.anchor, self._progress = seq, row, anchor, progress
        anchor.live.add(self)

    @property
    def complete(self) -> int:
        return int(self._progress.complete[self.row])

    @property
    def tokens(self) -> Tokens:
        """The ids of all its tokens, a copy."""
        return self._progress.tokens(self.row, 0, self._progress.length(self.row))

    @property
    def waiting(self) -> list[Slots]:
        """Slots that must be written before all its tokens count as written."""
        return [step.slots for step in self._progress.waiting(self.row)]


@dataclass(frozen=True)
class Match:
    """The longest known prefix of a prompt: `pages` full ones, then `extra` tokens at the beginning of `extra_page`."""

    node: Node  # the deepest node reached
    taken: int  # how many of its pages match
    pages: Pages
    extra: int = 0
    extra_page: int = -1
    extra_node: Node | None = None  # the node that holds extra_page; None if only a living sequence does


@dataclass(frozen=True)
class PrefixStats:
    """What PrefixCache.stats() counts since the cache was made; the last three are what it holds now."""

    inserts: int
    hits: int  # inserts that reused anything
    tokens_inserted: int
    tokens_reused: int
    evictions: int  # pages taken from the tree to make room
    sequences: int
    nodes: int
    cached_tokens: int

    @property
    def hit_rate(self) -> float:
        """The share of the inserted tokens that did not have to be computed."""
        return self.tokens_reused / self.tokens_inserted if self.tokens_inserted else 0.0

    def __str__(self) -> str:
        return (
            f"{self.sequences} sequences, {self.nodes} nodes, {self.cached_tokens} tokens cached; {self.hits} hits in "
            f"{self.inserts} inserts, {self.tokens_reused} of {self.tokens_inserted} tokens reused "
            f"({self.hit_rate:.0%}), {self.evictions} pages evicted"
        )


def path_of(node: Node | None) -> Iterator[Node]:
    """The node and its ancestors."""
    while node is not None:
        yield node
        node = node.parent


def key_of(tokens: Tokens, page_size: int) -> bytes:
    return tokens[:page_size].tobytes()


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many first tokens are the same."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def common_tokens(a: bytes, b: bytes) -> int:
    """common_prefix() of the tokens that two keys are made of: of a page, this is ten times as fast."""
    n = min(len(a), len(b))
    differ = int.from_bytes(a[:n], "big") ^ int.from_bytes(b[:n], "big")
    return (8 * n - differ.bit_length()) // TOKEN_BITS


def is_single(token: Any) -> bool:
    """Whether it is one token, as an int or a 0-d tensor or array (what sampling gives), not a list of them."""
    if isinstance(token, (np.ndarray, torch.Tensor)):
        return token.ndim == 0
    return not isinstance(token, Sequence)


def token_array(name: str, tokens: Any) -> Tokens:
    """A one-dimensional sequence of integers as int64, not always a copy."""
    if isinstance(tokens, torch.Tensor):
        # Torch makes an empty tensor float32 unless told, so no tokens are of any dtype.
        if tokens.numel() and (tokens.is_floating_point() or tokens.is_complex()):
            raise TypeError(f"{name} must be integers of at most 64 bits, got {tokens.dtype}")
        tokens = tokens.detach().cpu().numpy() if tokens.numel() else np.empty(tokens.shape)
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be ints, a 1-D int tensor or array, got {type(tokens).__name__}")
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must be one-dimensional, got lists of different lengths") from None
    except TypeError:  # tensors on a card, or of dtypes that numpy does not have
        if not all(isinstance(t, (int, torch.Tensor)) and getattr(t, "ndim", 0) == 0 for t in tokens):
            raise TypeError(f"{name} must be integers of at most 64 bits, got tensors of another dtype") from None
        ids = np.asarray([int(t) if isinstance(t, int) else t.item() for t in tokens])
    if ids.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {ids.shape}")
    if not len(ids):
        return np.empty(0, np.int64)
    if ids.dtype.kind not in "iu" or (ids.dtype == np.uint64 and ids.max() >= 2**63):
        raise TypeError(f"{name} must be integers of at most 64 bits, got {ids.dtype}")
    return ids.astype(np.int64, copy=False)


def check_prompt(name: str, tokens: Any) -> Tokens:
    prompt = token_array(name, tokens)
    if not len(prompt):
        raise ValueError(f"{name} must hold at least one token, got none")
    return prompt


def check_new_tokens(tokens: Any) -> tuple[Tokens, list[int] | None]:
    """The tokens of extend(), one sequence after another, and how many each has; None: one each."""
    if isinstance(tokens, (torch.Tensor, np.ndarray)):
        if tokens.ndim == 1:
            return token_array("tokens", tokens), None
        tokens = tokens.tolist()
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise TypeError(f"tokens must be a list of ints or of lists of ints, got {type(tokens).__name__}")
    if set(map(type, tokens)) == {int}:
        return token_array("tokens", tokens), None
    new = [token_array("tokens", [t] if is_single(t) else t) for t in tokens]
    return np.concatenate(new) if new else np.empty(0, np.int64), [len(t) for t in new]
