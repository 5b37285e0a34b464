"""An indexer's choice: kernels/index/scores.cu and select.cu, over the keys in a cache's pages.

`run_choice` runs them on a card or, over CPU tensors, in the emulator, and validates nothing but what no kernel serves.
What a plan says is sent to a card when it is first used, and kept with it: a step has one plan for all layers.
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
from tilewise.plan.choice import ChoicePlan, ChoiceTiles

KEYS = 256  # scores.cu: kKeys, of a block
ROWS = 64  # of a tile: a block's keys come once for so many query tokens
AT_ONCE = 1 << 26  # scores that are kept: 256 MiB
STAGES = 3  # query tokens on their way, or multiplied
MAX_DIM, MAX_HEADS = 128, 128
DTYPES = (torch.bfloat16, torch.float16)
SELECT_THREADS = 1024
# plan_block.cuh's kScanBytes, a bin for each of 2^11 digits, and what was found
SELECT_SPEC = KernelSpec(
    "index_select",
    "index/select.cu",
    "index_select",
    (("kPlanThreads", SELECT_THREADS),),
    SELECT_THREADS,
    8 * 32 + 4 * 2**11 + 8,
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
        *((n, ctypes.c_int) for n in ("heads", "dim")),
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
    constants = (("Element", ELEMENTS[dtype]), ("kHeads", wide), ("kChannels", channels), ("kStages", STAGES))
    stage = wide * (2 * channels + 4)
    return KernelSpec("index_scores", "index/scores.cu", "index_scores", constants, 256, STAGES * stage, product=True)


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


Send = Callable[["npt.NDArray[np.integer]", torch.device], torch.Tensor]


@dataclass
class _Sent:
    """What a plan says, on the device."""

    pages: torch.Tensor
    groups: list[tuple[ChoiceTiles, torch.Tensor, torch.Tensor]]  # and its tiles and rows


_sent: WeakKeyDictionary[ChoicePlan, dict[torch.device, _Sent]] = WeakKeyDictionary()


def _send(plan: ChoicePlan, device: torch.device, send: Send) -> _Sent:
    known = _sent.setdefault(plan, {})
    if device not in known:
        groups = [(x, send(x.tiles, device), send(x.rows, device)) for x in plan.tiles(ROWS, AT_ONCE)]
        known[device] = _Sent(send(plan.pages, device), groups)
    return known[device]


def run_choice(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    plan: ChoicePlan,
    *,
    rows: bool,
    send: Send,
    **emulated: Any,
) -> torch.Tensor:
    """(tokens, topk) int32, as api.choice.choose_keys() says.

    q: (tokens, heads, dim), weights: (tokens, heads) float32, keys: (pages · page_size, dim). send: takes an array to
    a device. emulated: options of emulator.launch.
    """
    tokens, heads, dim = q.shape
    instead = ".cpu() tensors" if q.is_cuda else 'backend="cpu"'
    if reason := why_not(q.dtype, heads, dim):
        raise NotImplementedError(f"{reason}; use {instead}")
    if q.dtype != keys.dtype:
        raise NotImplementedError(f"q must have the dtype of the cache's index keys, {keys.dtype}, got {q.dtype}")
    if not arch.serves_prefill(q.device):
        raise NotImplementedError(f"GPU kernels are for compute capability 8.0 and up, {q.device} has less; {instead}")
    spec = scores_spec(q.dtype, heads, dim)
    wide = dict(spec.constants)["kHeads"]
    assert isinstance(wide, int)
    q = q.contiguous() if q.data_ptr() % 16 == 0 else q.clone(memory_format=torch.contiguous_format)
    if wide > heads or not weights.is_contiguous() or weights.data_ptr() % 16:
        weights, given = weights.new_zeros((tokens, wide)), weights
        weights[:, :heads] = given
    chosen = torch.empty((tokens, plan.topk), dtype=torch.int32, device=q.device)
    sent = _send(plan, q.device, send)
    table = IndexTable(sent.pages.data_ptr(), plan.pages.shape[1], Divisor.by(plan.page_size))
    for group, tiles, listed in sent.groups:
        width = -(-group.width // 4) * 4  # rows that begin at multiples of 16 bytes
        scores = torch.empty((group.kept, width), dtype=torch.float32, device=q.device)
        known = {"pages": sent.pages, "scores": scores}
        if len(tiles):
            named = {"q": q, "weights": weights, "keys": keys, "tiles": tiles, "scores": scores}
            args = IndexScoresArgs(*(x.data_ptr() for x in named.values()), width, table, heads, dim)
            _launch(spec, (-(-group.width // KEYS), len(tiles), 1), args, known | named, **emulated)
        select(scores, listed, table, chosen, rows, known, **emulated)
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
