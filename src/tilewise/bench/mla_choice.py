"""Rows of the MLA table in which an indexer chooses what is read: DeepSeek-V3.2's heads over keys of 128 channels.

Beside it stand the same products, relu, sums and topk by torch, as the models' own code has them, over keys that are
gathered for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from .. import api
from ..kvcache import PagedKVCache
from ..plan.choice import ChoicePlan
from ..plan.show import find_card
from . import prefill
from .measure import OK, WRONG, Result, time_replays
from .workloads import Point, backends

TORCH = "torch"
TOPK = 2048
MOST = 1 << 30  # scores of heads that torch is asked for at once: 4 GiB
WRITTEN = 1 << 16  # tokens that are written at a time
BUDGET = 0.3  # seconds of replays per row


class Counted(Protocol):
    """A row of the table, with what it multiplies and what it reads."""

    @property
    def point(self) -> Point: ...
    @property
    def flops(self) -> int: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True)
class ChoiceRow(prefill.Row):
    """point.tokens query tokens of each of point.batch sequences choose among point.seq keys of point.hdim channels."""

    chosen: int = TOPK

    @property
    def keys(self) -> int:
        """Those that the query tokens of a sequence see, each up to itself, summed up."""
        point = self.point
        return point.tokens * point.seq - point.tokens * (point.tokens - 1) // 2

    @property
    def flops(self) -> int:
        """Of the products."""
        return 2 * self.point.batch * self.keys * self.point.heads * self.point.hdim

    @property
    def bytes(self) -> int:
        """Of the keys, once; and of the scores, which are written and read."""
        point = self.point
        return point.batch * (point.seq * point.hdim * 2 + 8 * self.keys)

    @property
    def floor_us(self) -> float:
        """The least time that an H200 takes: its memory's, or its tensor cores'."""
        card = find_card("H200")
        return 1e6 * max(self.bytes / card.bytes_per_s, self.flops / card.flops_per_s)


def time_choice(row: prefill.Row, loops: int | None) -> list[Result]:
    """Tilewise's way and, where its scores fit, torch's."""
    assert isinstance(row, ChoiceRow)
    point, ours = row.point, next(iter(backends(row.point)))
    cache = PagedKVCache(
        point.batch * -(-point.seq // point.page_size), point.page_size, 1, 24, value_dim=16, shared_kv=True,
        index_dim=point.hdim, device=point.device,
    )  # fmt: skip
    index = cache.index_keys
    assert index is not None
    generator = torch.Generator(point.device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=point.device)

    seqs, step = cache.allocate(point.batch), max(1, WRITTEN // point.batch)
    for begin in range(0, point.seq, step):
        slots = cache.extend(seqs, min(step, point.seq - begin))
        index.write(0, slots, drawn(len(slots), point.hdim))
    plan = api.plan_choice(cache, seqs, point.tokens, topk=row.chosen)
    q = drawn(plan.tokens, point.heads, point.hdim).to(index.dtype)
    weights = drawn(plan.tokens, point.heads)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        ours: lambda: api.choose_keys(q, weights, cache, 0, plan),
    }
    if plan.tokens * point.heads * point.seq <= MOST:
        places = index.places(seqs)
        calls[TORCH] = lambda: by_torch(q, weights, index.read(0, places), row.chosen)
    errors = {name: (shortfall(call(), q, weights, cache, plan), 1.0) for name, call in calls.items()}
    return timed(row, calls, errors, loops)


def timed(
    row: Counted,
    calls: Mapping[str, Callable[[], object]],
    errors: Mapping[str, tuple[float, float]],
    loops: int | None,
) -> list[Result]:
    """What a row's calls take, beside (error, allowed) of their answers. All but torch's are ours."""
    timings = time_replays(calls, device=torch.device(row.point.device), loops=loops, budget=BUDGET)
    found = []
    for name, (error, allowed) in errors.items():
        timing = timings.get(name)
        seconds = None if timing is None else timing.median
        found.append(
            Result(
                name, name != TORCH, OK if error <= allowed else WRONG, error=error, allowed=allowed, timing=timing,
                tflops=None if seconds is None else row.flops / seconds / 1e12,
                gbps=None if seconds is None else row.bytes / seconds / 1e9,
            )
        )  # fmt: skip
    return found


def by_torch(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, topk: int) -> torch.Tensor:
    """(tokens, topk) positions. keys: (sequences, keys, dim), q: the last tokens of each."""
    q, weights = (x.unflatten(0, (len(keys), -1)) for x in (q, weights))
    scores = (q.float() @ keys.transpose(-1, -2).float()[:, None]).relu_()
    found = (weights[..., None, :] @ scores)[..., 0, :]
    tokens, length = found.shape[1:]
    at = torch.arange(length, device=q.device)
    found.masked_fill_(at > at[length - tokens :, None], -torch.inf)
    return found.topk(min(topk, length), -1).indices.flatten(0, 1).int()


def shortfall(
    chosen: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, cache: PagedKVCache, plan: ChoicePlan
) -> float:
    """By how much the best key that was left out of a list scores more than the worst in it, where 1 is as far as
    float32 sums may be off; of the first and the last query token, in float64."""
    worst, index = 0.0, cache.index_keys
    assert index is not None
    for row, n in {(0, 0), (plan.tokens - 1, len(plan.seqs) - 1)}:
        place = int(plan.lengths[n]) - int(plan.starts[n + 1]) + row
        keys = index.read(0, index.places([plan.seqs[n]]))[0, : place + 1].double().cpu()
        its, weight = q[row].double().cpu(), weights[row].double().cpu()
        exact, bound = weight @ (its @ keys.T).relu(), weight.abs() @ (its.abs() @ keys.abs().T) * 2.0**-18
        taken = torch.zeros(len(exact), dtype=torch.bool)
        taken[[i for i in chosen[row].tolist() if 0 <= i < len(exact)]] = True
        if int(taken.sum()) != min(plan.topk, len(exact)):
            return float("inf")
        if not taken.all():
            gap = exact[~taken].max() - exact[taken].min()
            worst = max(worst, float(gap / bound.max()))
    return worst
