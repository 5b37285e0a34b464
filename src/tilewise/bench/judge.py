"""How answers are judged: by the tolerance rule, on as many rows as the oracle has time for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from tilewise.plan.blocks import kept_blocks
from tilewise.plan.schedule import BlockSchedule

from .. import reference
from ..plan import Window
from .measure import Check

# The oracle's work is bounded, since a check that takes a minute does not get made: of larger problems it sees row
# blocks spread evenly over all rows, the first and the last among them. It works where the data is: by device type.
ORACLE_PAIRS = {"cpu": 1 << 28, "cuda": 1 << 31}
PAIRS_AT_ONCE = {"cpu": 1 << 23, "cuda": 1 << 26}
# What hides keys or changes scores besides `causal` and `window`, as the oracle's options for the rows and keys of one
# sequence.
More = Callable[[slice, slice], dict[str, Any]]


def in_blocks(schedule: BlockSchedule, device: torch.device) -> More:
    """The blocks of a schedule, one pattern for all sequences: what is expanded is only what the oracle looks at."""
    kept = kept_blocks(schedule.cpu())[0].to(device)  # (heads or 1, num_q_blocks, num_k_blocks)

    def more(rows: slice, keys: slice) -> dict[str, Any]:
        of_row, of_key = (
            torch.arange(x.start, x.stop, device=device) // size
            for x, size in ((rows, schedule.block_q), (keys, schedule.block_k))
        )
        return {"mask": kept[:, of_row[:, None], of_key]}

    return more


def by_functions(mask: Callable[..., Any] | None, score: Callable[..., Any] | None) -> More:
    """What a mask and a score function say, which count rows and keys from the sequence's first."""

    def more(rows: slice, keys: slice) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if mask is not None:
            options["mask"] = lambda b, h, q, k: mask(b, h, q + rows.start, k + keys.start)
        if score is not None:
            options["score"] = lambda s, b, h, q, k: score(s, b, h, q + rows.start, k + keys.start)
        return options

    return more


def row_check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sizes: Sequence[tuple[int, int]],
    *,
    causal: bool = False,
    window: Window | None = None,
    more: More | None = None,
) -> Callable[[torch.Tensor], Check]:
    """Judge an answer by the tolerance rule, against float64 and PyTorch's own math in q's dtype.

    q and k are (B, N, H, D) or packed (total, H, D), v and the answer as well with v's D, and `sizes` are the queries
    and keys of each sequence.
    The oracle forms whole score matrices, so it sees one sequence and some rows at a time: rows [a, b) with the keys
    they can see are a bottom-right aligned problem of their own.
    """
    q, k, v = (x.flatten(0, -3) for x in (q, k, v))
    starts_q, starts_k = ([0, *accumulate(column)] for column in zip(*sizes, strict=True))
    expected: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def expect(b: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        nq, nk = sizes[b]
        first = 0 if window is None or window[0] is None else max(0, nk - nq + start - window[0])
        keys = slice(first, max(first, nk - nq + stop) if causal else nk)
        rows = q[None, starts_q[b] + start : starts_q[b] + stop]
        one_k, one_v = (x[None, starts_k[b] : starts_k[b + 1]][:, keys] for x in (k, v))
        options = {"causal": causal, "window": window, **({} if more is None else more(slice(start, stop), keys))}
        with torch.device(q.device):  # for the masks that the oracle makes
            exact, lse = reference.attention(rows, one_k, one_v, **options)
            honest, _ = reference.baseline(rows, one_k.to(q.dtype), one_v.to(q.dtype), **options)
        return exact, honest, lse

    def check(answer: torch.Tensor) -> Check:
        answer = answer.detach().flatten(0, -3)
        if answer.shape != (shape := (*q.shape[:-1], v.shape[-1])):
            return Check(False, math.inf, 0.0, f"shape {tuple(answer.shape)} instead of {shape}, packed")
        if not torch.isfinite(answer).all():
            return Check(False, math.inf, 0.0, "NaN or infinity in the output")
        parts = []
        for place in row_blocks(sizes, q.shape[1], q.device.type):
            if place not in expected:  # each kernel of the problem is judged by the same answers
                expected[place] = expect(*place)
            b, start, stop = place
            parts.append((answer[starts_q[b] + start : starts_q[b] + stop], *expected[place]))
        got, exact, honest, lse = (torch.cat([x.flatten() for x in column]) for column in zip(*parts, strict=True))
        verdict = reference.judge(got, exact, honest, lse=lse)
        baseline = (honest.double() - exact).abs().max().item()
        return Check(verdict.ok, verdict.error, baseline, verdict.reason, verdict.allowed)

    return check


def row_blocks(sizes: Sequence[tuple[int, int]], heads: int, device: str) -> Iterator[tuple[int, int, int]]:
    """(sequence, first row, end row) of the rows that are checked: all, or an even spread of ORACLE_PAIRS' worth."""
    places = []
    for b, (nq, nk) in enumerate(sizes):
        step = max(1, min(nq, PAIRS_AT_ONCE[device] // max(1, heads * nk)))
        places += [(b, start, min(nq, start + step)) for start in range(0, nq, step)]
    pairs = heads * sum(nq * nk for nq, nk in sizes)
    keep = max(2, len(places) * ORACLE_PAIRS[device] // max(1, pairs))
    if len(places) <= keep:
        yield from places
        return
    for i in range(keep):
        yield places[round(i * (len(places) - 1) / (keep - 1))]
