"""What follows from the nodes of a tree, for each of its packed tokens. Tensor operations alone: on a card nothing
waits for a value, and how many there are depends on the number of nodes and not on the shape of the tree."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Structure(NamedTuple):
    """Of each packed token, (total,): positions int64, its place in its sequence; ends int32, the first packed token
    behind it that is not below it; previous int64, the packed token before it in its sequence, −1 for the first."""

    positions: torch.Tensor
    ends: torch.Tensor
    previous: torch.Tensor


def structure_of(offsets: torch.Tensor, parents: torch.Tensor, total: int) -> Structure:
    """offsets (nodes + 1,), parents (nodes,), int64: nodes in depth-first order, −1 for those without a parent.

    Whatever they say, nothing outside of the packed tokens is named: a parent that does not come before its node counts
    as none.
    """
    nodes, device = parents.shape[0], parents.device
    number = torch.arange(nodes + 1, device=device)  # the last stands for "none"
    offsets = torch.cat([offsets, offsets.new_full((1,), total)]).clamp(0, total)
    sizes = offsets.diff().clamp(min=0)
    sizes[nodes:].zero_()  # by a slice: a number would be sent to a card, which waits
    up = torch.full_like(number, nodes)
    up[:nodes] = torch.where((parents >= 0) & (parents < number[:nodes]), parents, nodes)
    # Of a node or, if it has no tokens, of the nearest one above it that has some: that one.
    holder = torch.where(sizes > 0, number, up)
    before = up
    # Everything at most 2^n − 1 steps up or down is known after n rounds.
    reach, last = sizes, number
    for _ in range(nodes.bit_length()):
        reach = reach + reach[up]  # tokens of the node and of those above it
        last = last.scatter_reduce(0, up, last, "amax")  # the last node below it
        up, holder = up[up], holder[holder]
    end = offsets[(last + 1).clamp(max=nodes)]
    token = torch.arange(total, device=device)
    node = torch.searchsorted(offsets[1 : nodes + 1].contiguous(), token, right=True).clamp(max=max(0, nodes - 1))
    within = token - offsets[node]
    above = holder[before[node]]
    last_above = torch.where(above == nodes, -1, offsets[above + 1] - 1)
    ends = torch.maximum(end[node], token + 1)
    return Structure(
        (reach - sizes)[node] + within, ends.to(torch.int32), torch.where(within > 0, token - 1, last_above)
    )
