"""Attention over rows of one tensor that are keys and values at once, each query token naming those that it reads.

What tilewise.compat.flash_mla is made of, and how models with an indexer read the rows of a cache: no plan. The callers
have checked the arguments, whose names are theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewise import arguments, graphs
from tilewise.api.on_cpu import full_precision
from tilewise.api.options import State
from tilewise.cpu.listed import run_listed
from tilewise.cpu.scoring import Scoring
from tilewise.formats import KVFormat
from tilewise.scores import DecodeOptions
from tilewise.state import add_sinks

if TYPE_CHECKING:
    from typing_extensions import Unpack

AT_ONCE = 1 << 25  # rows' channels, and scores, that largest_logits holds: 128 MiB


@graphs.outside
def attend_rows(
    q: torch.Tensor,
    rows: torch.Tensor,
    form: KVFormat,
    indices: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    value_dim: int,
    folds: bool = True,
    backend: str = "auto",
    **options: Unpack[DecodeOptions],
) -> State:
    """q: (n, heads, D). rows: (m, width) as `form` stores them, the last stride 1. indices: int32 (n, k): the rows that
    each query token reads; one that is named twice counts twice, and one that is not there, such as −1, is none.
    counts: integers (n,): how many of its indices count, all if None. value_dim: the channels of a row that are values.
    folds: a token's result has the same bits whatever n is. options: as in `decode`; scale is D ** -0.5 if None.

    Returns o (n, heads, value_dim) and the LSE (n, heads) float32, 0 and −inf, or its sink, for a token that reads
    nothing. On a card nobody looks at what is in the tensors, and nobody waits.
    """
    where = arguments.check_backend(backend, q, (rows, options.get("sinks")))
    scores = arguments.check_scores(q, len(q), causal=True, **options)
    pages = rows[None, :, None]
    parts = form.from_rows(pages) if form.latent else [pages]
    if where != "cpu":
        from tilewise.gpu.mla_rows import run_rows

        o, lse = q.new_empty((*q.shape[:2], value_dim)), q.new_empty(q.shape[:2], dtype=torch.float32)
        if counts is not None:
            counts = counts.clamp(0, indices.shape[1]).int()
        run_rows(q, form, parts, o, lse, scores, indices, counts, value_dim=value_dim, folds=folds)
        return o, lse
    compute = q.dtype if form.dtype == q.dtype else torch.float32

    def load(_: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = form.decode([x[0, positions] for x in parts], compute)
        return k, k[..., :value_dim]

    its = indices.masked_fill(unnamed(indices, counts, len(rows)), -1)[:, None]
    with full_precision():
        o, lse = run_listed(q[:, None], load, Scoring.of(scores), its, value_dim=value_dim, compute=compute)
        if scores.sinks is not None:
            o, lse = add_sinks(o, lse, scores.sinks)
    return o[:, 0], lse[..., 0]


def beyond(indices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(…, k) bool: which indices come after those that count, counts (…)."""
    return torch.arange(indices.shape[-1], device=indices.device) >= counts[..., None]


def unnamed(indices: torch.Tensor, counts: torch.Tensor | None, rows: int) -> torch.Tensor:
    """(…, k) bool: which indices name none of so many rows, or come after those that count."""
    none = (indices < 0) | (indices >= rows)
    return none if counts is None else none | beyond(indices, counts)


def largest_logits(
    q: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """(n, heads) float32: the largest scaled score of each query token and head over the rows (m, D) that it reads,
    −inf where it reads none. Arguments as of attend_rows; rows that are floats.

    By torch's own products, some query tokens at a time.
    """
    found = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    if not len(rows) or not indices.shape[1]:
        return found
    step = max(1, AT_ONCE // (indices.shape[1] * max(rows.shape[1], q.shape[1])))
    with full_precision():
        for first in range(0, len(q), step):
            some = slice(first, first + step)
            its = indices[some]
            none = unnamed(its, None if counts is None else counts[some], len(rows))
            scores = q[some].float() @ rows[its.clamp(0, len(rows) - 1)].float().mT * scale
            found[some] = scores.masked_fill_(none[:, None], -torch.inf).amax(-1)
    return found
