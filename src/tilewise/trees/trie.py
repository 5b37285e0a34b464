"""What sequences of tokens share: a tree whose nodes are stretches of tokens, in depth-first order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Nodes(NamedTuple):
    """Node n has the packed tokens offsets[n] … offsets[n + 1] − 1 and hangs below parents[n], −1 for none.

    lasts: of each sequence its last packed token, −1 if it is empty.
    """

    offsets: Ints
    parents: Ints
    lasts: Ints

    def unpacked(self) -> tuple[Ints, Ints]:
        """The packed token of each token of the sequences, one sequence after the other, and where these start."""
        offsets, parents = self.offsets.tolist(), self.parents.tolist()
        pieces: list[Ints] = []
        starts = [0]
        for last, node in zip(self.lasts.tolist(), self._owners(), strict=True):
            path: list[Ints] = []
            stop = last + 1
            while node >= 0:
                path.append(np.arange(offsets[node], stop))
                node = parents[node]
                stop = offsets[node + 1]
            pieces += reversed(path)
            starts.append(starts[-1] + sum(map(len, path)))
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64), np.array(starts)

    def _owners(self) -> list[int]:
        """The node in which each sequence ends; −1 for none."""
        found = np.searchsorted(self.offsets, self.lasts, side="right") - 1
        owners: list[int] = np.where(self.lasts < 0, -1, found).tolist()
        return owners

    def leaves(self) -> Ints:
        """The last token of each node that has tokens, and none below it."""
        parents, leaf = self.parents.tolist(), np.diff(self.offsets) > 0
        for n in np.flatnonzero(leaf).tolist():
            above = parents[n]
            while above >= 0 and self.offsets[above] == self.offsets[above + 1]:
                above = parents[above]
            if above >= 0:
                leaf[above] = False
        return self.offsets[1:][leaf] - 1


def pack(sequences: Sequence[Ints]) -> tuple[Ints, Nodes]:
    """The packed tokens, each shared beginning once, and the nodes; a branch is where it first appears in a sequence.

    A sequence that is the beginning of another one ends within its nodes.
    """
    lasts = np.full(len(sequences), -1, np.int64)
    tokens: list[Ints] = []
    offsets, parents = [0], list[int]()
    stack = [(group, 0, -1) for group in reversed(_by_next_token(sequences, range(len(sequences)), 0))]
    while stack:
        members, depth, parent = stack.pop()
        longest = max((sequences[m] for m in members), key=len)
        stop = len(longest)
        for m in members:
            both = min(stop, len(sequences[m]))
            differ = np.flatnonzero(longest[depth:both] != sequences[m][depth:both])
            stop = depth + int(differ[0]) if len(differ) else stop
        node, start = len(parents), offsets[-1]
        tokens.append(longest[depth:stop])
        parents.append(parent)
        offsets.append(start + stop - depth)
        for m in members:
            if len(sequences[m]) <= stop:
                lasts[m] = start + len(sequences[m]) - depth - 1
        going_on = [m for m in members if len(sequences[m]) > stop]
        stack += [(group, stop, node) for group in reversed(_by_next_token(sequences, going_on, stop))]
    packed = np.concatenate(tokens) if tokens else np.zeros(0, np.int64)
    return packed, Nodes(np.array(offsets, np.int64), np.array(parents, np.int64), lasts)


def _by_next_token(sequences: Sequence[Ints], members: Sequence[int], depth: int) -> list[list[int]]:
    """The members that go on past `depth`, those together that go on with the same token."""
    groups: dict[int, list[int]] = {}
    for m in members:
        if len(sequences[m]) > depth:
            groups.setdefault(int(sequences[m][depth]), []).append(m)
    return list(groups.values())
