"""Sequences that share beginnings, and what their tree must be, told pair by pair."""

from __future__ import annotations

import torch
from hypothesis import strategies as st


@st.composite
def families(draw, most: int = 6, longest: int = 40):
    """Sequences, each a new one or one before it cut somewhere and continued; some empty, some equal."""
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, most))):
        begun = draw(st.sampled_from([[], *sequences]))
        begun = begun[: draw(st.integers(0, len(begun)))]
        own = draw(st.integers(0, longest))
        seed = draw(st.integers(0, 3))
        generator = torch.Generator().manual_seed(seed)
        sequences.append(begun + torch.randint(0, 5, (own,), generator=generator).tolist())
    return sequences if any(sequences) else [[1]]


def answers(prompt: int, *lengths: int, seed: int = 0) -> list[list[int]]:
    """A prompt and answers to it, which share no token with each other."""
    generator = torch.Generator().manual_seed(seed)
    begun = torch.randint(0, 50, (prompt,), generator=generator).tolist()
    rest = [torch.randint(0, 50, (n,), generator=generator).tolist() for n in lengths]
    return [[*begun, 100 + n, *own[1:]] if own else begun for n, own in enumerate(rest)]


def visible(sequences: list[list[int]]) -> dict[tuple[int, ...], set[tuple[int, ...]]]:
    """By a token's whole beginning, itself included, those that it sees: the tree without any tree."""
    return {tuple(s[: n + 1]): {tuple(s[: m + 1]) for m in range(n + 1)} for s in sequences for n in range(len(s))}


def beginnings(tree) -> list[tuple[int, ...]]:
    """Of each packed token the tokens of its sequence up to it, by `previous`."""
    tokens, found = tree.tokens.tolist(), []
    for n, before in enumerate(tree.previous.tolist()):
        found.append((*(found[before] if before >= 0 else ()), tokens[n]))
    return found
