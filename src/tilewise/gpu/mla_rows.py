"""Attention over rows of one tensor that are keys and values at once: each query token names the rows that it reads.

`run_rows` runs the kernels of mla.py, on a card or, over CPU tensors, in the emulator, without a plan and a cache. The
tensor is one page, longer than any tensor, so that there is no table of pages. All query tokens are of one sequence,
and to the work list each of them is a sequence as long as its list (mla.py). That work list follows from the sizes
alone, so it is kept by them. Nothing is read from a card, and nobody waits for one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache
from typing import Any

import torch

from tilewise.formats import KVFormat
from tilewise.gpu.abi import Divisor, decode_score_rule
from tilewise.gpu.decode import Workspace
from tilewise.gpu.mla import MAX_LISTS, Asked, MlaDecode, Parts, check_served, chosen_list, launch, tiling_of
from tilewise.plan.worklist import FAR
from tilewise.scores import Scores

ONE_PAGE = FAR  # tokens: all rows are in it
KEPT = 32  # sizes for which a thread keeps kernels and lists, which take 64 bytes per query token and tile of 64 heads


class RowsDecode(MlaDecode):
    """The kernel and work list for query tokens over rows of one tensor."""

    def __init__(self, count: int, heads: int, parts: Parts, asked: Asked, folds: bool) -> None:
        listed = chosen_list(count, asked.chosen, heads, asked.tiling, asked.device, folds=folds)
        super().__init__(1, heads, parts, listed, asked)
        # One sequence, whose place is 0 and whose one page is page 0, which stands in its tail
        self.zero = torch.zeros(1, dtype=torch.int32, device=self.device)
        more = self.more
        more.places = more.tail_from = more.pages = more.tails = self.zero.data_ptr()
        more.table_pages = more.tail_pages = 0
        more.queries, more.chosen = Divisor.by(count), asked.chosen
        self.barriers: dict[int, torch.Tensor] = {}

    def over(self, rows: int) -> None:
        """The next call is over so many rows."""
        length = _new_length(rows, self.device) if self._capturing() else _length(rows, self.device)
        self.more.lengths = length.data_ptr()
        self.tables = {"zero": self.zero, "length": length}

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _workspace(self, stream: int | None) -> Workspace:
        """Scratch of one launch: of many sizes that are kept, few are used again soon. Whoever captures a call of these
        sizes gets a barrier of its own, for nobody knows who else does and when they replay."""
        if stream is None:
            return self._scratch(self._barrier() if self.args.merge_rows else self.graph_barrier)
        if stream not in self.barriers:
            self.barriers[stream] = self._barrier()
        return self._scratch(self.barriers[stream])


def _new_length(rows: int, device: torch.device) -> torch.Tensor:
    """The number of rows where the kernel reads it: filled in, not copied, so that nobody waits."""
    return torch.full((1,), rows, dtype=torch.int32, device=device)


_length = lru_cache(maxsize=256)(_new_length)  # not of a capture: a graph fills those that it makes

_local = threading.local()  # a bound kernel has arguments of its own, which two threads cannot fill at once
_captured: dict[int, RowsDecode] = {}  # by their ids: a graph that was captured reads their lists for as long as it is


def _bound(key: tuple[Any, ...], parts: Parts) -> RowsDecode:
    """The kernel for this number of query tokens and heads, Asked and folds, made once."""
    if not hasattr(_local, "kept"):
        _local.kept = OrderedDict()
    kept: OrderedDict[tuple[Any, ...], RowsDecode] = _local.kept
    count, heads, asked, folds = key
    capturing = asked.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    found = kept.get(key)
    if found is None:
        if capturing:
            raise RuntimeError(
                f"a graph cannot capture the first call of {count} query tokens of {heads} heads with "
                f"{asked.chosen} indices each, for it compiles and makes a list; make one before the capture"
            )
        found = kept[key] = RowsDecode(count, heads, parts, asked, folds)
        if len(kept) > KEPT:
            kept.popitem(last=False)
    kept.move_to_end(key)
    if capturing:
        _captured[id(found)] = found
    return found


def run_rows(
    q: torch.Tensor,
    form: KVFormat,
    parts: Parts,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    scores: Scores,
    indices: torch.Tensor,
    counts: torch.Tensor | None,
    *,
    value_dim: int,
    folds: bool = True,
    **emulated: Any,
) -> None:
    """Attention of query tokens over the rows that they name.

    q: (n, Hq, head_dim), o: (n, Hq, value_dim), lse: (n, Hq) float32, contiguous, or None. parts: the components of the
    rows, (1, rows, 1, *trailing). scores: causal, without a window. indices: int32 (n, k), the rows that each query
    token reads, in any order; one that is named twice counts twice, and one that is not there, such as −1, is none.
    counts: int32 (n,), how many of its indices count, from 0 to k; all if None. folds: a token's result has the same
    bits whatever n is; else lists that one block takes whole are computed at once, which is faster.
    """
    check_served(q, form, parts, value_dim)
    rows, codes, heads = parts[0], not form.plain, q.shape[1]
    if not q.numel():
        return
    if not rows.shape[1] or not indices.shape[1]:  # no address to read from, or no list
        o.zero_()
        if lse is not None:
            lse[:] = -torch.inf if scores.sinks is None else scores.sinks.float()
        return
    tiling = tiling_of(form, value_dim, heads, q.device, way="chosen")
    asked = Asked(
        0, q.device, q.dtype, form.head_dim, value_dim, tiling, False, form.name if codes else "", indices.shape[1],
        decode_score_rule(scores), 1, ONE_PAGE, (),
    )  # fmt: skip
    indices, counts = indices.contiguous(), None if counts is None else counts.contiguous()
    for first in range(0, len(q), MAX_LISTS - 1):
        some = slice(first, first + MAX_LISTS - 1)
        bound = _bound((len(q[some]), heads, asked, folds), parts)
        bound.over(rows.shape[1])
        launch(
            bound, q[some, None], parts, o[some, None], None if lse is None else lse[some], scores, indices[some],
            None if counts is None else counts[some], **emulated,
        )  # fmt: skip
