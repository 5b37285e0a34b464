"""S_dmask, flash_attn's third result where weights are dropped: the softmax's weights as its forward kernel has them.

That kernel walks over the keys in blocks, from the last to the first, and a weight is e^(score − reference), where the
reference is the row's largest score in that block and in those behind it. S_dmask has these weights, neither divided by
their sum nor by 1 − p, with the sign of those that are dropped turned. e^(reference − LSE) normalises a block.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F

from tilewise import arguments
from tilewise.cpu.anywhere import Problem
from tilewise.cpu.dropout import Dropout
from tilewise.cpu.products import SCORES_PER_TILE
from tilewise.cpu.scoring import ALL, Scoring, View
from tilewise.scores import ScoreOptions

from .inputs import Inputs

ROUNDED = 128  # lengths are rounded up to multiples of it


def block_width(head_dim: int) -> int:
    """How many keys flash_attn's forward kernel takes at once where it drops weights, on every card."""
    if head_dim <= 32:
        return 128
    return 32 if 96 < head_dim <= 128 else 64


@torch.no_grad()
def dropped_weights(
    inputs: Inputs, asked: ScoreOptions, dropout: Dropout, longest: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """(batch, heads, rows, keys) in q's dtype, rows and keys of the longest sequence rounded up to multiples of 128.

    Dropped weights have their sign bit set, also where they are 0; pairs beyond a sequence's end are 0. longest: of
    packed sequences, what the caller says of their queries and keys; lengths beyond it count.
    """
    problem = _problem(inputs, asked, dropout)
    most = [
        max([said, *(end - start for start, end in pairwise(starts))])
        for said, starts in zip(longest, (problem.starts_q, problem.starts_k), strict=True)
    ]
    rounded = [-(-n // ROUNDED) * ROUNDED for n in most]
    found = problem.q.new_zeros(len(problem.starts_q) - 1, problem.q.shape[1], *rounded)
    with torch.autocast(found.device.type, enabled=False):  # it would make bfloat16 products of float32 ones
        for rows, keys, view in problem.parts():
            of_sequence = found[int(view.sequences)]
            k = problem.k[keys].transpose(0, 1).float()
            at_once = max(1, SCORES_PER_TILE // (found.shape[1] * k.shape[1]))
            for row in range(0, rows.stop - rows.start, at_once):
                strip = slice(row, min(row + at_once, rows.stop - rows.start))
                q, here = problem.q[rows][strip], view.part(ALL, strip)
                weights = _weights(q, k, problem.scoring, here)
                kept = dropout.kept(*here.indices())[0]
                of_sequence[:, strip, : k.shape[1]] = torch.where(kept, weights, -weights)
    return found


def _problem(inputs: Inputs, asked: ScoreOptions, dropout: Dropout) -> Problem:
    """The sequences as they are packed, with what is done to their scores."""
    q, k, v, starts_q, starts_k = inputs.q, inputs.k, inputs.v, inputs.starts_q, inputs.starts_k
    if starts_q is None or starts_k is None:
        from_q, from_k = ([b * x.shape[1] for b in range(x.shape[0] + 1)] for x in (q, k))
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    else:
        from_q, from_k = starts_q.tolist(), starts_k.tolist()
        if inputs.page_table is not None:
            k, v = (arguments.gather(x, inputs.page_table, from_k) for x in (k, v))
    options: ScoreOptions = {**asked, "alibi_slopes": inputs.slopes}
    scores = arguments.check_scores(q, len(from_q) - 1, **options)
    scoring = Scoring.of(scores, from_q, from_k, dropout=dropout)
    return Problem(q, k, v, from_q, from_k, scoring, scores.window)


def _weights(q: torch.Tensor, k: torch.Tensor, scoring: Scoring, view: View) -> torch.Tensor:
    """(Hq, rows, keys) float32, of q (rows, Hq, D) over k (Hkv, keys, D) float32, not normalised."""
    rows, heads, head_dim = q.shape
    queries = q.float().transpose(0, 1).reshape(k.shape[0], -1, head_dim)
    products = torch.bmm(queries * scoring.alpha, k.mT).view(heads, rows, -1)
    s, factor = scoring.apply(products, view)
    s.mul_(factor)
    if view.hides:
        view.hide(s)
    keys, width = s.shape[-1], block_width(head_dim)
    blocks = F.pad(s, (0, -keys % width), value=-math.inf).unflatten(-1, (-1, width))
    top = blocks.amax(-1).flip(-1).cummax(-1).values.flip(-1)  # of each block and those behind it
    top = top.masked_fill(top == -math.inf, 0.0)  # where a row has seen no key yet: its weights are 0
    weights: torch.Tensor = blocks.sub(top[..., None]).exp_().flatten(-2)
    return weights[..., :keys]
