"""An indexer's choice: kernels/index/scores.cu and select.cu, over the keys in a cache's pages.

`run_choice` runs them on a card or, over CPU tensors, in the emulator, and validates nothing but what no kernel serves.
What a plan says is sent to a card when it is first used, and kept with it: a step has one plan for all layers. That
of a standing plan has its place there, where `renew` brings it up to date.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from tilewise import arch, compiler, emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu.abi import ELEMENTS, Divisor
from tilewise.gpu.captures import capturing
from tilewise.plan.choice import ChoicePlan, ChoiceTiles, StandingChoice

KEYS = 256  # scores.cu: kKeys, of a block
ROWS = 64  # of a tile: a block's keys come once for so many query tokens
AT_ONCE = 1 << 26  # scores that are kept: 256 MiB
STAGES = 3  # query tokens on their way, or multiplied
BLOCKS = 2  # of scores, per multiprocessor
SCORES_THREADS = 256
SCAN_BYTES = 8 * 32  # decode/plan_block.cuh
MAX_DIM, MAX_HEADS = 128, 128
DTYPES = (torch.bfloat16, torch.float16)
SELECT_THREADS = 1024
# Besides, a bin for each of 2^11 digits, and what was found
SELECT_SPEC = KernelSpec(
    "index_select",
    "index/select.cu",
    "index_select",
    (("kPlanThreads", SELECT_THREADS),),
    SELECT_THREADS,
    SCAN_BYTES + 4 * 2**11 + 8,
    product=True,
)


class IndexTable(ctypes.Structure):
    """index/args.cuh: IndexTable."""

    _fields_ = [("pages", ctypes.c_void_p), ("most", ctypes.c_int), ("page_size", Divisor)]


class IndexScoresArgs(ctypes.Structure):
    """index/args.cuh: IndexScoresArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("q", "weights", "keys", "tiles", "scores")),
        ("width", ctypes.c_int64),
        ("table", IndexTable),
        *((n, ctypes.c_int) for n in ("heads", "dim", "count")),
    ]


class IndexSelectArgs(ctypes.Structure):
    """index/args.cuh: IndexSelectArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("scores", "rows", "chosen")),
        ("width", ctypes.c_int64),
        ("table", IndexTable),
        *((n, ctypes.c_int) for n in ("topk", "stored")),
    ]


@lru_cache(maxsize=64)
def scores_spec(dtype: torch.dtype, heads: int, dim: int) -> KernelSpec:
    """The kernel of scores for so many heads of `dim` channels."""
    wide, channels = -(-heads // 16) * 16, -(-dim // 32) * 32
    constants = (
        ("Element", ELEMENTS[dtype]),
        ("kHeads", wide),
        ("kChannels", channels),
        ("kStages", STAGES),
        ("kPlanThreads", SCORES_THREADS),
    )
    shared = SCORES_THREADS // 4 + 16 + STAGES * wide * (2 * channels + 4)
    return KernelSpec(
        "index_scores", "index/scores.cu", "index_scores", constants, SCORES_THREADS, shared, product=True
    )


def specs(*, every: bool = False) -> list[KernelSpec]:
    """The kernels as users get them: those of DeepSeek-V3.2 and GLM-5, or of `every` dtype and size."""
    sizes = [(h, d) for h in (16, 32, 64, 128) for d in (32, 64, 96, 128)] if every else [(64, 128), (32, 128)]
    dtypes = DTYPES if every else DTYPES[:1]
    return [*(scores_spec(t, h, d) for t in dtypes for h, d in sizes), SELECT_SPEC]


def why_not(dtype: torch.dtype, heads: int, dim: int) -> str:
    """Why no kernel scores keys of this dtype and size, or nothing."""
    if dtype not in DTYPES:
        return f"GPU kernels choose among keys in bfloat16 and float16, got {dtype}"
    if heads > MAX_HEADS or dim > MAX_DIM or dim % 8:
        return (
            f"GPU kernels choose by up to {MAX_HEADS} heads of up to {MAX_DIM} channels, a multiple of 8, got {heads} "
            f"of {dim}"
        )
    return ""


Send = Callable[["npt.NDArray[np.integer]", torch.device, "torch.Tensor | None"], torch.Tensor]


@dataclass
class _Group:
    """Rows that are dealt with together: ChoiceTiles on the device. items: blocks of keys under tiles, at most."""

    tiles: torch.Tensor
    rows: torch.Tensor
    kept: int
    width: int
    items: int


@dataclass
class _Sent:
    """What a plan says, on a device. lists: a standing plan's rows and tiles, which are views of it."""

    pages: torch.Tensor
    groups: list[_Group]
    lists: torch.Tensor | None = None


_sent: WeakKeyDictionary[ChoicePlan | StandingChoice, dict[torch.device, _Sent]] = WeakKeyDictionary()
_captured: dict[int, _Sent] = {}  # by their ids: a graph reads them for as long as it is, and nobody tells us how long


def _send(plan: ChoicePlan | StandingChoice, device: torch.device, send: Send) -> _Sent:
    known = _sent.setdefault(plan, {})
    captured = device.type == "cuda" and capturing()
    if device not in known:
        if captured:
            raise RuntimeError("a graph cannot capture the first choose_keys of a plan; make one before the capture")
        if isinstance(plan, ChoicePlan):
            groups = [_group(x, device, send) for x in plan.tiles(ROWS, AT_ONCE)]
            known[device] = _Sent(send(plan.pages, device, None), groups)
        else:
            known[device] = _standing(plan, device)
            renew(plan, send)
    if captured:
        _captured[id(known[device])] = known[device]
    return known[device]


def _group(its: ChoiceTiles, device: torch.device, send: Send) -> _Group:
    ends = its.tiles[:, 3] + its.tiles[:, 2]
    items = int((-(-ends // KEYS)).sum())
    return _Group(send(its.tiles, device, None), send(its.rows, device, None), its.kept, _width(its.width), items)


def _width(keys: int) -> int:
    """Scores per row, so that rows begin at multiples of 16 bytes."""
    return -(-keys // 4) * 4


def _standing(plan: StandingChoice, device: torch.device) -> _Sent:
    """The places of what a standing plan says, of which nothing is there yet."""
    tokens, width = plan.tokens, _width(plan.max_length)
    tiles = plan.rows * -(-plan.tokens_per_seq // ROWS)
    with torch.inference_mode(False):  # or a later step outside of it could not refresh them
        lists = torch.zeros(4 * tokens + 5 * tiles, dtype=torch.int32, device=device)
        pages = torch.zeros((plan.rows, plan.most_pages), dtype=torch.int32, device=device)
    rows, its = lists[: 4 * tokens].view(tokens, 4), lists[4 * tokens :].view(tiles, 5)
    return _Sent(pages, [_Group(its, rows, tokens, width, tiles * -(-plan.max_length // KEYS))], lists)


def renew(plan: StandingChoice, send: Send) -> None:
    """Put what a standing plan says now where it was on the devices that know it, behind all that runs there."""
    for device, sent in _sent.get(plan, {}).items():
        (group,) = sent.groups
        assert sent.lists is not None
        values = np.zeros(len(sent.lists), np.int32)
        rows, tiles = values[: group.rows.numel()].reshape(-1, 4), values[group.rows.numel() :].reshape(-1, 5)
        rows[:, 0], rows[:, 2:] = np.arange(len(rows)), -1
        for its in plan.now.tiles(ROWS, plan.tokens * plan.max_length):
            tiles[: len(its.tiles)], rows[: len(its.rows)] = its.tiles, its.rows
        send(values, device, sent.lists)
        pages = plan.now.pages[:, : plan.most_pages]  # a sequence may have more of them than tokens to fill them
        if pages.size:
            send(pages, device, sent.pages[: len(pages), : pages.shape[1]])


def run_choice(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    plan: ChoicePlan | StandingChoice,
    *,
    rows: bool,
    send: Send,
    **emulated: Any,
) -> torch.Tensor:
    """(tokens, topk) int32, as api.choice.choose_keys() says.

    q: (tokens, heads, dim), weights: (tokens, heads) float32, keys: (pages · page_size, dim). send: takes an array to
    a device, into a tensor there if one is given. emulated: options of emulator.launch.
    """
    tokens, heads, dim = q.shape
    instead = ".cpu() tensors" if q.is_cuda else 'backend="cpu"'
    if reason := why_not(q.dtype, heads, dim):
        raise NotImplementedError(f"{reason}; use {instead}")
    if q.dtype != keys.dtype:
        raise NotImplementedError(f"q must have the dtype of the cache's index keys, {keys.dtype}, got {q.dtype}")
    if not arch.serves_prefill(q.device):
        raise NotImplementedError(
            f"GPU kernels are for compute capability 8.0 and up, {q.device} has less; use {instead}"
        )
    spec = scores_spec(q.dtype, heads, dim)
    wide = dict(spec.constants)["kHeads"]
    assert isinstance(wide, int)
    q = q.contiguous() if q.data_ptr() % 16 == 0 else q.clone(memory_format=torch.contiguous_format)
    if wide > heads or not weights.is_contiguous() or weights.data_ptr() % 16:
        weights, given = weights.new_zeros((tokens, wide)), weights
        weights[:, :heads] = given
    chosen = torch.empty((tokens, plan.topk), dtype=torch.int32, device=q.device)
    sent = _send(plan, q.device, send)
    table = IndexTable(sent.pages.data_ptr(), sent.pages.shape[1], Divisor.by(plan.page_size))
    for group in sent.groups:
        scores = torch.empty((group.kept, group.width), dtype=torch.float32, device=q.device)
        known = {"pages": sent.pages, "scores": scores}
        if group.items:
            named = {"q": q, "weights": weights, "keys": keys, "tiles": group.tiles, "scores": scores}
            pointers = (x.data_ptr() for x in named.values())
            args = IndexScoresArgs(*pointers, group.width, table, heads, dim, len(group.tiles))
            blocks = min(group.items, BLOCKS * arch.multiprocessors(q.device))
            _launch(spec, (blocks, 1, 1), args, known | named, **emulated)
        select(scores, group.rows, table, chosen, rows, known, **emulated)
    return chosen


def select(
    scores: torch.Tensor,
    listed: torch.Tensor,
    table: IndexTable,
    chosen: torch.Tensor,
    rows: bool,
    known: dict[str, torch.Tensor],
    **emulated: Any,
) -> None:
    """Into `chosen` (tokens, topk) the lists of the rows `listed`, ChoiceTiles.rows, by their scores (kept, width).

    known: the tensors that a launch in the emulator may touch besides these, by name.
    """
    pointers = (x.data_ptr() for x in (scores, listed, chosen))
    args = IndexSelectArgs(*pointers, scores.shape[1], table, chosen.shape[1], rows)
    _launch(
        SELECT_SPEC, (len(listed), 1, 1), args, known | {"scores": scores, "rows": listed, "chosen": chosen}, **emulated
    )


def _launch(
    spec: KernelSpec,
    grid: tuple[int, int, int],
    args: ctypes.Structure,
    known: dict[str, torch.Tensor],
    **emulated: Any,
) -> None:
    device = known["scores"].device
    if device.type == "cuda":
        compiler.load(spec, device).launch(grid, compiler.Args(args))
    else:
        emulator.launch(spec, grid, [args], known, **emulated)
