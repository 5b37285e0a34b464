"""The table of MLA decode: rows that are keys and values at once, row by row with what each row must reach.

Every kernel is captured in a graph. The replays of a row's kernels alternate, and the L2 cache is flushed before each.
Each answer is checked on two sequences first. `tilewise bench mla` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from .. import api, arch, reference, tuned
from ..gpu import choice, mla_kernels, mla_mma
from ..kvcache import PagedKVCache
from ..plan.show import find_card
from . import prefill, warm
from .measure import Result
from .mla_choice import TOPK, TORCH, WRITTEN, ChoiceRow, time_choice, timed
from .prefill import Goal
from .records import records
from .sweep import Sheet, attempt
from .workloads import Point, backends, complete

HEAD_DIM, VALUE_DIM, PAGE_SIZE = 576, 512, 64
UNSHARED, BF16 = "unshared", "bf16"
COLUMNS = ("ours", UNSHARED, BF16, TORCH, "floor")


@dataclass(frozen=True)
class Row(prefill.Row):
    """chosen: positions that each query token reads, 0 for all."""

    chosen: int = 0

    @property
    def flops(self) -> int:
        """Of the products, as if nothing were shared."""
        point = self.point
        keys = self.chosen or point.prefix + point.seq
        return 2 * point.batch * point.tokens * point.heads * keys * (HEAD_DIM + VALUE_DIM)

    @property
    def bytes(self) -> int:
        """Of the cache, what is shared once."""
        point, row = self.point, 656 if self.point.kv_format == "fp8" else 2 * HEAD_DIM
        return row * (point.batch * (self.chosen or point.seq) + point.prefix)

    @property
    def floor_us(self) -> float:
        """The least time that an H200 takes: its memory's, or its tensor cores'."""
        card = find_card("H200")
        return 1e6 * max(self.bytes / card.bytes_per_s, self.flops / card.flops_per_s)


class Outcome(prefill.Outcome):
    """A row with what was measured of it."""

    @property
    def rates(self) -> list[float | None]:
        """The microseconds of COLUMNS."""
        assert isinstance(self.row, (Row, ChoiceRow))
        return [*(_microseconds(self, name) for name in ("", UNSHARED, BF16, TORCH)), self.row.floor_us]


def _microseconds(outcome: prefill.Outcome, part: str = "") -> float | None:
    result = outcome.of(part if part == TORCH else f"{outcome.ours}, {part}" if part else outcome.ours)
    return None if result is None or result.timing is None else result.timing.median * 1e6


def _rate(of: Callable[[Row | ChoiceRow], float], unit: float) -> Callable[[prefill.Outcome], float | None]:
    """What a row has so much of, per second, in units of `unit`."""

    def measured(outcome: prefill.Outcome) -> float | None:
        time = _microseconds(outcome)
        assert isinstance(outcome.row, (Row, ChoiceRow))
        return None if time is None else of(outcome.row) / time * 1e6 / unit

    return measured


def _over(part: str) -> Callable[[prefill.Outcome], float | None]:
    def measured(outcome: prefill.Outcome) -> float | None:
        ours, other = _microseconds(outcome), _microseconds(outcome, part)
        return None if ours is None or other is None else other / ours

    return measured


def rows(device: str) -> list[prefill.Row]:
    """The whole table."""
    base = Point("decode", kv_heads=1, hdim=HEAD_DIM, dtype="bfloat16", kv_format="bf16", device=device)
    base = replace(base, batch=64, seq=8192, page_size=PAGE_SIZE)
    few, many = replace(base, heads=16), replace(base, heads=128)
    rate = Goal(_rate(lambda row: row.bytes, 1e12), 4.0, unit=" TB/s")
    chosen: list[prefill.Row] = [
        Row("128 heads, 64 × 8192", many, (Goal(_rate(lambda row: row.flops, 1e12), 640, unit=" TFLOP/s"),)),
        Row("64 heads, 64 × 8192", replace(base, heads=64), ()),
        Row("16 heads, 64 × 8192", few, (rate,)),
        Row("8 heads, 64 × 8192", replace(base, heads=8), (rate,)),
        Row("16 heads, 64 × 8192, page 16", replace(few, page_size=16), (rate,)),
        Row("16 heads, 2 tokens, 64 × 8192", replace(few, tokens=2), (rate,)),
        Row("fp8, 16 heads, 64 × 8192", replace(few, kv_format="fp8"), (Goal(_over(BF16), 1.6, what="of bf16"),)),
        Row("fp8, 128 heads, 64 × 8192", replace(many, kv_format="fp8"), ()),
        Row("16 heads, 1 × 4096", replace(few, batch=1, seq=4096),
            (Goal(_microseconds, 20, unit=" µs", at_most=True),)),
        Row("128 heads, 1 × 8192", replace(many, batch=1), ()),
        Row("16 heads, 2048 chosen of 64 × 16384", replace(few, seq=16384), (), chosen=2048),
        Row("128 heads, 2048 chosen of 64 × 16384", replace(many, seq=16384), (), chosen=2048),
    ]  # fmt: skip
    for heads in (16, 128):
        point = replace(base, workload="prefix", heads=heads, prefix=8192, seq=256)
        goal = Goal(_over(UNSHARED), 4.0, what="of unshared")
        chosen.append(Row(f"{heads} heads, 64 × (8192 + 256)", point, (goal,)))
    keys = replace(base, heads=64, hdim=128)
    for batch, seq, tokens, goal in (
        (1, 65536, 1, Goal(_over(TORCH), 4.0, what="of torch")),
        (64, 16384, 1, Goal(_over(TORCH), 4.0, what="of torch")),
        (1, 65536, 2048, Goal(_rate(lambda row: row.flops, 1e12), 400, unit=" TFLOP/s")),
    ):
        name = f"{TOPK} of {batch} × {seq} by 64 heads" + (f", {tokens} tokens" if tokens > 1 else "")
        point = replace(keys, batch=batch, seq=seq, tokens=tokens)
        chosen.append(ChoiceRow(name, point, (goal,), measure=time_choice))
    return [replace(row, point=complete(row.point)) for row in chosen]


def run(chosen: Sequence[prefill.Row], sheet: Sheet | None = None, loops: int | None = None) -> Iterator[Outcome]:
    """Measure the rows one after the other, those that the sheet does not have; it gets each as soon as it is done."""
    todo = [row for row in chosen if sheet is None or not sheet.has(row.point)]
    if todo and todo[0].point.device != "cpu":
        device = torch.device(todo[0].point.device)
        target, card = arch.arch_of_device(device), arch.card_of(device)
        specs = (*mla_kernels.specs(card, every=True), *mla_mma.specs(card, every=True), *choice.specs())
        warm.compile_all((spec, target) for spec in specs)  # on all cores, not one by one
    for row in todo:
        outcome = Outcome(row, attempt(row.measure or _time, row, loops))
        if sheet is not None:
            sheet.append(records(row.point, outcome.results))
        yield outcome


def filled(point: Point, kv_format: str, value_dim: int = VALUE_DIM) -> tuple[PagedKVCache, list[int]]:
    """A cache of random rows of point.hdim channels, and its sequences."""
    tokens = point.prefix + point.batch * (point.seq + point.page_size)
    cache = PagedKVCache(
        -(-tokens // point.page_size) + 1, point.page_size, 1, point.hdim, value_dim=value_dim, shared_kv=True,
        kv_format=kv_format, device=point.device,
    )  # fmt: skip
    generator = torch.Generator(point.device).manual_seed(0)

    def fill(seqs: list[int], count: int) -> None:
        step = max(1, WRITTEN // len(seqs))
        for begin in range(0, count, step):
            slots = cache.extend(seqs, min(step, count - begin))
            rows = torch.randn(len(slots), 1, point.hdim, generator=generator, device=point.device)
            cache.write(0, slots, rows.to(torch.float16 if kv_format == "fp16" else torch.bfloat16))

    root = cache.allocate()
    if point.prefix:
        fill([root], point.prefix)
    seqs = [root, *(cache.fork(root) if point.prefix else cache.allocate() for _ in range(point.batch - 1))]
    fill(seqs, point.seq)
    return cache, seqs


def chosen_positions(point: Point, count: int) -> torch.Tensor:
    """int32 (batch, tokens, count): random positions of each query token's sequence, each once."""
    lists = [torch.randperm(point.seq)[:count] for _ in range(point.batch * point.tokens)]
    return torch.stack(lists).view(point.batch, point.tokens, -1).to(point.device, torch.int32)


def under(table: tuned.Tuned, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The call where this is the table."""

    def made() -> torch.Tensor:
        with tuned.trying(table):
            return call()

    return made


def _time(row: prefill.Row, loops: int | None) -> list[Result]:
    assert isinstance(row, Row)
    point, ours = row.point, next(iter(backends(row.point)))
    generator = torch.Generator(point.device).manual_seed(1)
    q = torch.randn(point.batch, point.tokens, point.heads, HEAD_DIM, generator=generator, device=point.device)
    q = q.to(torch.bfloat16)
    indices = chosen_positions(point, row.chosen) if row.chosen else None
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    caches: list[tuple[PagedKVCache, list[int]]] = []

    def add(name: str, kv_format: str, share: Literal["auto"] | bool = "auto") -> None:
        cache, seqs = caches[-1] if caches and caches[-1][0].format.name == kv_format else filled(point, kv_format)
        caches.append((cache, seqs))
        plan = api.plan_decode(
            cache, seqs, num_heads=point.heads, tokens_per_seq=point.tokens, share_prefix=share
        )  # fmt: skip
        calls[name] = lambda: api.decode(q, cache, 0, plan, indices=indices)

    add(ours, point.kv_format)
    if point.prefix:
        add(f"{ours}, {UNSHARED}", point.kv_format, False)
    if point.kv_format != "bf16":
        add(f"{ours}, {BF16}", "bf16")
    errors = {name: judged(call(), q, *caches[n], indices) for n, (name, call) in enumerate(calls.items())}
    return timed(row, calls, errors, loops)


def judged(
    o: torch.Tensor, q: torch.Tensor, cache: PagedKVCache, seqs: list[int], indices: torch.Tensor | None
) -> tuple[float, float]:
    """The largest error of the first and the last sequence, and what is allowed."""
    worst = (0.0, 1.0)
    for n in {0, len(seqs) - 1}:
        keys = cache.gather(0, seqs[n])[0].cpu()
        of = q[n : n + 1].cpu()
        options: dict[str, Any] = {"causal": True}
        if indices is not None:
            keys, of, options = keys[indices[n, 0].long().cpu()], of[:, :1], {}
        k = keys[None].to(q.dtype)
        v = k[..., : o.shape[-1]]
        exact, honest = reference.attention(of, k, v, **options), reference.baseline(of, k, v, **options)
        verdict = reference.judge(o[n : n + 1, : of.shape[1]].cpu(), exact[0], honest[0], lse=exact[1])
        if verdict.error / verdict.allowed > worst[0] / worst[1]:
            worst = (verdict.error, verdict.allowed)
    return worst


def notes(outcomes: Sequence[Outcome]) -> list[str]:
    """What the table's numbers do not say."""
    return [
        f"rows of {HEAD_DIM} channels, {VALUE_DIM} of them values; floor: of an H200, by its memory or its products",
        f"{TOPK} of so many keys: what an indexer of 64 heads over keys of 128 channels chooses, and torch's way to it",
    ]
