"""The table of cards: the kernels of cards without wgmma, run on the GPU at hand, beside torch's FlashAttention-2.

A GPU behaves as an older card (`arch.as_card`): that card's kernels, within its shared memory. Nothing here says how
fast such a card is; the ratios compare kernels that its users could run, on one GPU. float32, which the same kernels
serve, is measured as the GPU itself too. All kernels of a row alternate in one timing loop, each checked first.
`tilewise bench cards` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from tilewise import arch
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu.prefill import Forward, tma_can
from tilewise.scores import Scores

from .. import api
from ..plan import plan_dense
from . import peers, prefill, warm
from .judge import row_check
from .measure import Kernel, Result, measure, time_calls, time_replays
from .prefill import TOKENS, WIDTH, Goal, Row
from .sweep import Sheet
from .trees import UNSHARED, Pool, Tree
from .trees import build as build_tree
from .workloads import DTYPES, Point, backends, complete, problem_of, random_like, tensor_of

COLUMNS = ("as sm_80", "as sm_89", "itself", "torch")
CARDS = ("sm_80", "sm_89")  # 163 KB of shared memory per block, and 99
LENGTHS = (512, 2048, 8192)
PAGE = 16
DENSE, PAGED = "dense", "paged"
EFFICIENT, MATH = "torch efficient", "torch math"
PEERS = {peers.FA2: SDPBackend.FLASH_ATTENTION}
FLOAT32_PEERS = {EFFICIENT: SDPBackend.EFFICIENT_ATTENTION, MATH: SDPBackend.MATH}  # those that take float32
# Seconds per row: of warm-up, which need not be long since the rows follow each other, and of measuring after it.
HEAT, BUDGET, REPLAYS = 0.5, 0.4, 0.3
# At least so many times FlashAttention-2 at each of LENGTHS, by head dimension: without and with the causal mask.
BARS = {
    "sm_80": {
        64: ((1.10, 1.15, 1.15), (1.25, 1.20, 1.22)),
        128: ((1.08, 1.12, 1.15), (1.25, 1.22, 1.27)),
        256: ((1.00, 1.00, 1.02), (1.05, 1.12, 1.15)),
    },
    "sm_89": {
        64: ((1.10, 1.15, 1.15), (1.25, 1.20, 1.22)),
        128: ((1.03,) * 3, (1.12,) * 3),
        256: ((0.95,) * 3, (1.05,) * 3),
    },
}
FLOAT32_BAR, RAGGED_BAR, DECODE_BAR, SHARED_BAR = 1.5, 0.93, 0.95, 4.0


@dataclass(frozen=True)
class Outcome(prefill.Outcome):
    """A row with what was measured of it."""

    @property
    def rates(self) -> list[float | None]:
        """The TFLOP/s of COLUMNS, of torch's fastest kernel; nothing for decode: notes() has its times."""
        if self.row.measure is _decode:
            return [None] * len(COLUMNS)
        theirs = [result.tflops for result in self.results if not result.ours and result.tflops is not None]
        ours = [self.of(_name(self.ours, card)) for card in (*CARDS, None)]
        return [*(None if result is None else result.tflops for result in ours), max(theirs, default=None)]


def _name(ours: str, card: str | None, more: str = "") -> str:
    """Of Tilewise's kernel as a card; None: as the device itself."""
    return ", ".join([ours, *([f"as {card}"] if card else []), *([more] if more else [])])


# ---- what bars are set on ---------------------------------------------------------------------------------------


def over_torch(outcome: prefill.Outcome, card: str | None = None) -> float | None:
    """Tilewise's speed as a card over the fastest of torch's kernels; one that fails here is not the fastest."""
    ours = outcome.of(_name(outcome.ours, card))
    return None if ours is None else min(ours.ratio_to.values(), default=None)


def over_dense(outcome: prefill.Outcome, card: str, more: str = "") -> float | None:
    """The rate over ragged sequences, of packed or of paged K and V, over that on the same as a dense batch."""
    ours, dense = (outcome.of(_name(outcome.ours, card, name)) for name in (more, DENSE))
    if ours is None or dense is None or ours.tflops is None or dense.tflops is None:
        return None
    return ours.tflops / dense.tflops


def over_unshared(outcome: prefill.Outcome, card: str) -> float | None:
    """The speed over that without sharing; 1 where nothing is shared."""
    ours, unshared = (outcome.of(_name(outcome.ours, card, name)) for name in ("", UNSHARED))
    if ours is None or ours.timing is None or (unshared is not None and unshared.timing is None):
        return None
    return 1.0 if unshared is None or unshared.timing is None else unshared.timing.median / ours.timing.median


# ---- the rows ---------------------------------------------------------------------------------------------------


def rows(device: str) -> list[Row]:
    """The whole table, short problems first; on a CPU smaller problems, and bars on nothing."""
    cuda = torch.device(device).type == "cuda"
    chosen = [*_decode_rows(device)]
    for place, n in enumerate(LENGTHS):
        for hdim, causal in product(BARS["sm_80"], (False, True)):
            goals = [Goal(partial(over_torch, card=c), BARS[c][hdim][causal][place], what=c) for c in CARDS]
            chosen.append(_dense_row(device, "bfloat16", n, hdim, causal, goals))
            if hdim == 128:
                chosen.append(_dense_row(device, "float16", n, hdim, causal, goals))
            if hdim in (64, 128) and n > LENGTHS[0]:
                cards = (None, "sm_80")
                goals = [Goal(partial(over_torch, card=c), FLOAT32_BAR, what=c or "itself") for c in cards]
                chosen.append(_dense_row(device, "float32", n, hdim, causal, goals))
        if n > LENGTHS[0]:
            chosen.append(_ragged_row(device, n))
    return [replace(row, point=complete(row.point), goals=row.goals if cuda else ()) for row in chosen]


def _share(device: str) -> int:
    """Of the tokens and heads, a CPU has one in so many."""
    return 1 if torch.device(device).type == "cuda" else 16


def _dense_row(device: str, dtype: str, n: int, hdim: int, causal: bool, goals: Sequence[Goal]) -> Row:
    share = _share(device)
    n, tokens, heads = n // share, TOKENS // share, max(1, WIDTH // share // hdim)
    sizes: dict[str, Any] = {"batch": tokens // n, "seq": n, "heads": heads, "kv_heads": heads, "hdim": hdim}
    kind = {"bfloat16": "", "float16": "fp16, "}.get(dtype, f"{dtype}, ")
    name = f"{kind}D {hdim}, N {n}, {'causal' if causal else 'full'}"
    return Row(name, Point(**sizes, dtype=dtype, causal=causal, device=device), tuple(goals), measure=_dense)


def _ragged_row(device: str, n: int) -> Row:
    row = _dense_row(device, "bfloat16", n, 128, True, [])
    point = replace(row.point, workload="varlen", lengths=f"{row.point.seq}-{row.point.seq}")
    goals = [
        Goal(partial(over_dense, card="sm_80", more=more), RAGGED_BAR, what=more or "packed") for more in ("", PAGED)
    ]
    return Row(f"ragged, {row.name}", point, tuple(goals), measure=_ragged)


def _decode_rows(device: str) -> Iterator[Row]:
    share = _share(device)
    base = Point("decode", batch=64, seq=4096 // share, heads=32, kv_heads=8, dtype="bfloat16", device=device)
    goal = Goal(partial(over_torch, card="sm_80"), DECODE_BAR, what="cuDNN")
    yield Row(f"decode {base.batch} × {base.seq}", base, (goal,), measure=_decode)
    point = replace(base, workload="prefix", prefix=8192 // share, seq=256 // share)
    goal = Goal(partial(over_unshared, card="sm_80"), SHARED_BAR, what="unshared")
    yield Row(f"shared {point.batch} × ({point.prefix} + {point.seq})", point, (goal,), measure=_decode)


def run(chosen: Sequence[Row], sheet: Sheet | None = None, loops: int | None = None) -> Iterator[prefill.Outcome]:
    """Measure the rows one after the other, those that the sheet does not have; it gets each as soon as it is done."""
    todo = [row for row in chosen if sheet is None or not sheet.has(row.point)]
    if todo and torch.device(todo[0].point.device).type == "cuda":
        target = arch.arch_of_device(torch.device(todo[0].point.device))
        warm.compile_all((spec, target) for spec in specs(todo))  # on all cores, not one by one at the first calls
    return prefill.run(todo, sheet, loops, Outcome)


def specs(chosen: Sequence[Row]) -> list[KernelSpec]:
    """The kernels that the rows take; they are found over tensors without contents."""
    found: list[KernelSpec] = []
    for row in chosen:
        point, dtype = row.point, DTYPES[row.point.dtype]
        for card in (name or arch.card_of(torch.device(point.device)) for name in _cards(row)):
            if row.measure is _decode:
                sizes = (point.heads, point.kv_heads, point.hdim, dtype, (Scores((None, 0)),), (), point.page_size)
                found += warm.specs(warm.Need(*sizes), card)
                continue
            with arch.as_card(card):
                found += _bound(torch.empty(1, dtype=dtype), point, row.measure is _ragged)
    return list(dict.fromkeys(found))


def _bound(one: torch.Tensor, point: Point, ragged: bool) -> Iterator[KernelSpec]:
    q = one.expand(point.batch, point.seq, point.heads, point.hdim)
    bind = partial(Forward, scores=Scores((None, 0 if point.causal else None)), tma=tma_can(q))
    yield bind(q, q, q, q).spec
    if ragged:
        rows, pages = q.flatten(0, 1), q.reshape(-1, PAGE, *q.shape[2:])
        for k, more in ((rows, {}), (pages, {"paged": True, "table_pages": point.seq // PAGE})):
            bound = bind(rows, k, k, rows, sequences=point.batch, **more)  # type: ignore[arg-type]
            yield from (bound.spec, bound.ragged_spec)


def notes(outcomes: Sequence[prefill.Outcome]) -> list[str]:
    """What the table's numbers do not say."""
    lines = []
    for outcome in outcomes:
        if outcome.row.measure is _decode:
            timed = [(r.kernel, r.timing.median * 1e6) for r in outcome.results if r.timing is not None]
            lines.append(f"{outcome.row.name}: {', '.join(f'{name} {us:.3g} µs' for name, us in timed)}")
    if outcomes and torch.device(outcomes[0].row.point.device).type == "cpu":
        lines.append("a CPU behaves as no card: these are the CPU's kernels, and no bars are set on them")
    return lines


# ---- measuring --------------------------------------------------------------------------------------------------


def _cards(row: Row) -> tuple[str | None, ...]:
    """Whose kernels a row times; None: the device's own."""
    if torch.device(row.point.device).type == "cpu":
        return (None,)
    if row.measure is not _dense:
        return ("sm_80",)
    return (None, "sm_80") if row.point.dtype == "float32" else CARDS


def _as_card(card: str | None, run: peers.Run) -> peers.Run:
    """The call, made as on this card."""
    if card is None:
        return run

    def imitated(out: torch.Tensor | None) -> torch.Tensor:
        with arch.as_card(card):
            return run(out)

    return imitated


def _measure(row: Row, kernels: list[Kernel], check: Any, shape: tuple[int, ...], loops: int | None) -> list[Result]:
    timer = partial(time_calls, heat=HEAT)
    return measure(problem_of(row.point, kernels, check, shape), loops=loops, budget=BUDGET, timer=timer)


def _work(point: Point) -> tuple[int, int]:
    """FLOPs, and bytes of q, k, v and o."""
    size = DTYPES[point.dtype].itemsize
    sizes = (point.batch, point.seq, point.seq, point.heads, point.kv_heads, point.hdim)
    plan = plan_dense(*sizes, causal=point.causal, io_bytes=size)
    return plan.flops, 4 * size * point.batch * point.seq * point.heads * point.hdim


def _tensors(point: Point) -> list[torch.Tensor]:
    """q, k and v, (B, N, H, D)."""
    generator = torch.Generator(point.device).manual_seed(0)
    return [random_like(point, generator, point.batch, point.seq, point.heads, point.hdim) for _ in range(3)]


def _dense(row: Row, loops: int | None) -> list[Result]:
    """Tilewise as each card, and torch's kernels on copies in their own layout, (B, H, N, D)."""
    point = row.point
    q, k, v = given = _tensors(point)
    flops, nbytes = _work(point)
    (ours,) = backends(point)

    def attention(out: torch.Tensor | None) -> torch.Tensor:
        return tensor_of(api.attention(q, k, v, causal=point.causal, out=out))

    kernels = [Kernel(_name(ours, card), _as_card(card, attention), True, flops, nbytes) for card in _cards(row)]
    theirs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    for name, backend in _peers(point).items():
        run = peers.torch_sdpa(*theirs, mask=None, causal=point.causal, backend=backend)
        kernels.append(Kernel(name, run, False, flops, nbytes))
    check = row_check(q, k, v, [(point.seq, point.seq)] * point.batch, causal=point.causal)
    return _measure(row, kernels, check, tuple(q.shape), loops)


def _peers(point: Point) -> dict[str, SDPBackend | None]:
    if torch.device(point.device).type == "cpu":
        return {peers.SDPA: None}
    return dict(FLOAT32_PEERS if point.dtype == "float32" else PEERS)


def _ragged(row: Row, loops: int | None) -> list[Result]:
    """Sequences of one length, packed, with K and V in pages in no order, and as a dense batch: one problem."""
    point = row.point
    q, k, v = given = _tensors(point)
    rows, keys, values = (x.flatten(0, 1) for x in given)
    starts = peers.starts_of([point.seq] * point.batch, q.device)
    count = point.batch * -(-point.seq // PAGE)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(q.device)
    pages = [torch.empty(count, PAGE, *x.shape[1:], dtype=x.dtype, device=x.device) for x in (keys, values)]
    for page, x in zip(pages, (keys, values), strict=True):
        page[order] = x.view(page.shape)
    table = order.int().view(point.batch, -1)
    flops, nbytes = _work(point)
    (ours,) = backends(point)

    def packed(out: torch.Tensor | None) -> torch.Tensor:
        return tensor_of(api.attention_varlen(rows, keys, values, starts, starts, causal=True, out=out))

    def paged(out: torch.Tensor | None) -> torch.Tensor:
        k_pages, v_pages = pages
        return tensor_of(
            api.attention_varlen(rows, k_pages, v_pages, starts, starts, page_table=table, causal=True, out=out)
        )

    def dense(out: torch.Tensor | None) -> torch.Tensor:
        return tensor_of(api.attention(q, k, v, causal=True, out=None if out is None else out.view(q.shape)))

    runs: dict[str, Callable[[torch.Tensor | None], torch.Tensor]] = {"": packed, PAGED: paged, DENSE: dense}
    kernels = [
        Kernel(_name(ours, card, more), _as_card(card, run), True, flops, nbytes)
        for card in _cards(row)
        for more, run in runs.items()
    ]
    check = row_check(q, k, v, [(point.seq, point.seq)] * point.batch, causal=True)
    return _measure(row, kernels, check, tuple(rows.shape), loops)


def _decode(row: Row, loops: int | None) -> list[Result]:
    """A decode step as `serve` has it; cuDNN beside what shares nothing."""
    point, tree = row.point, Tree.of(row.point)
    (card,), (ours,) = _cards(row), backends(point)
    with arch.as_card(card):
        problem = build_tree(tree, Pool([tree], torch.device(point.device)), with_peers=not point.prefix)
    kernels = []
    for kernel in problem.kernels:
        if kernel.ours:
            name = _name(ours, card, kernel.name.removeprefix(ours).removeprefix(", "))
            kernel = replace(kernel, name=name, run=_as_card(card, kernel.run))
        elif kernel.name not in (peers.CUDNN, peers.SDPA):
            continue
        kernels.append(kernel)
    return measure(replace(problem, kernels=kernels), loops=loops, budget=REPLAYS, timer=time_replays)
