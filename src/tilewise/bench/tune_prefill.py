"""What `tilewise tune prefill` and `tune sparse` measure: shapes, and the tilings beside the one that is chosen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import torch

from tilewise import arch, checks, functions, tuned
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu import prefill
from tilewise.gpu.abi import FP8
from tilewise.gpu.mma_tilings import BLOCK_OVERHEAD, MmaTiling
from tilewise.gpu.pattern import NO_PATTERN, Pattern
from tilewise.gpu.tilings import (
    LONG_PAIR,
    PAIRS,
    SHORT_64,
    SMALL_64,
    TILINGS,
    Tiling,
    geometry,
    out_dtype,
    pack_of,
    spec_of,
)
from tilewise.gpu.widths import MAX_HEAD_DIM, Widths, widths_of
from tilewise.plan.schedule import BlockSchedule
from tilewise.scores import Scores
from tilewise.tuned import Tuned, Value

from .tune import Call, Problem

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float8": FP8}
HEAD_DIMS, LENGTHS, TOKENS, WIDTH = (64, 128, 256), (512, 2048, 8192), 16384, 2048  # WIDTH: heads × head dimension
KINDS = ("128x128", "64x64", "mask")
KEPT = 0.5  # of the blocks of a schedule
PACKS = (1, 4)  # query heads of a KV head per tile that a tiling has to serve, as grouped heads may have it
PAGE = 16
FORM = "B,N,Hq,Hkv,D[:Dv][,causal][,paged]"


@dataclass(frozen=True)
class Shape:
    """q (batch, seq, heads, hdim) over k and v (batch, seq, kv_heads, hdim); paged: in pages of 16 tokens; vdim: the
    head dimension of v, 0 for that of k."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    hdim: int
    causal: bool = False
    paged: bool = False
    vdim: int = 0

    @property
    def values(self) -> int:
        """The head dimension of v."""
        return self.vdim or self.hdim

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        more = ", causal" * self.causal + ", paged" * self.paged
        dims = f"{self.hdim}" if self.values == self.hdim else f"{self.hdim} and {self.values}"
        return f"{self.batch} × {self.seq}, {heads} heads, D {dims}{more}"


def parse(texts: Sequence[str]) -> list[Shape]:
    """Shapes as FORM, one or several in a text with blanks or semicolons between; ValueError for anything else."""
    found = []
    for text in (part for given in texts for part in re.split(r"[;\s]+", given) if part):
        words = text.split(",")
        causal, paged = "causal" in words[5:], "paged" in words[5:]
        said = ["causal"] * causal + ["paged"] * paged
        numbers = [*words[:4], *":".join(words[4:5]).split(":")]
        if len(numbers) not in (5, 6) or words[5:] != said or not all(x.isascii() and x.isdigit() for x in numbers):
            raise ValueError(f"a shape must be {FORM} in whole numbers, got {text!r}")
        batch, seq, heads, kv_heads, hdim, *vdim = (
            checks.integer(f"{name} of {text!r}", int(word), 1)
            for name, word in zip(("B", "N", "Hq", "Hkv", "D", "Dv"), numbers, strict=False)
        )
        shape = Shape(batch, seq, heads, kv_heads, hdim, causal, paged, *vdim)
        if shape.heads % shape.kv_heads:
            raise ValueError(f"Hq must be a multiple of Hkv in {text!r}")
        found.append(shape)
    return list(dict.fromkeys(found))


def defaults() -> list[Shape]:
    """One per head dimension, length class and mask; and of pages, as prompts are computed into a cache."""
    return [
        Shape(TOKENS // n, n, WIDTH // d, WIDTH // d, d, causal, paged)
        for d in HEAD_DIMS
        for n in LENGTHS
        for causal, paged in ((False, False), (True, False), (True, True))
    ]


def sparse_defaults() -> list[Shape]:
    return [Shape(1, TOKENS, WIDTH // d, WIDTH // d, d) for d in HEAD_DIMS]


# ---- tilings beside the chosen one ------------------------------------------------------------------------------


Change = dict[str, Value]


def hopper_changes(t: Tiling, scores: Scores, dtype: torch.dtype) -> list[list[Change]]:
    """What may be different in a tiling of the Hopper forward, kind by kind.

    Rings have two stages at least: one is computed while the next one is loaded.
    """
    step = t.unit or (32 if dtype == FP8 else 16)
    longest = 128 if t.unit else 192  # a list has a word of bits per row
    sizes = [t.tile_kv + n * step for n in (-2, -1, 1, 2)]
    if t.parts > 1:  # K has a stage per part, and is gone before the softmax; V's slice has one place or two
        depths = [{"stages_v": 3 - t.stages_v}]
        return [[{"tile_kv": n} for n in sizes if 32 <= n <= 96], depths, [{"ping_pong": not t.ping_pong}]]
    rings = [(max(2, t.stages_k + k), max(2, t.stages_v + v)) for k, v in ((1, 0), (0, 1), (1, 1), (-1, 0), (0, -1))]
    return [
        [{"tile_kv": n} for n in sizes if 32 <= n <= longest],
        [{"stages_k": k, "stages_v": v} for k, v in rings],
        [{"stages_raw": t.stages_raw + 1}] if t.stages_raw else [],
        [{"ping_pong": not t.ping_pong}] if t.tile_q > 64 else [],  # one warpgroup has nobody to take turns with
        [{"q_registers": not t.q_registers}],
        [] if scores.exact else [{"lazy": not t.lazy}],
    ]


def mma_changes(t: MmaTiling, scores: Scores, dtype: torch.dtype) -> list[list[Change]]:
    """The same of the forward by mma.sync: prefill/forward_mma.cu says what goes together."""
    step = t.unit or (32 if t.operand.itemsize == 1 else 16)
    widened = t.operand != dtype  # what arrives has one place
    return [
        [{"tile_kv": n} for n in (t.tile_kv + m * step for m in (-2, -1, 1, 2)) if step <= n <= 128],
        [] if widened else [{"stages": n} for n in (1, 2)],
        [] if t.unit else [{"tile_q": q, "warp_rows": rows} for q, rows in ((128, 32), (128, 16), (64, 16), (64, 32))],
        [{"q_registers": not t.q_registers}],
        [{"blocks_each": n} for n in (1, 2, 3)],
        [] if scores.exact else [{"lazy": not t.lazy}],
    ]


# By the class of a tiling: what may be different, kind by kind.
CHANGES: dict[type, Callable[[Any, Scores, torch.dtype], list[list[Change]]]] = {
    Tiling: hopper_changes,
    MmaTiling: mma_changes,
}


def candidates(tiling: Any, widths: Widths, scores: Scores, dtype: torch.dtype) -> list[Any]:
    """The tilings to be measured beside the chosen one: one thing is different, or two."""
    kinds = CHANGES[type(tiling)](tiling, scores, dtype)
    found = [replace(tiling, **change) for kind in kinds for change in kind]
    for one, other in combinations(kinds, 2):
        found += [replace(tiling, **first, **second) for first, second in product(one, other)]
    if isinstance(tiling, Tiling) and not tiling.unit and dtype != FP8:
        found += [TILINGS[widths.widest]] if widths.widest in TILINGS else []
        found += (SMALL_64, SHORT_64) if widths.widest == 64 else ()
        found += [LONG_PAIR] if (widths.width, widths.value_width) in PAIRS else []
    return [other for other in dict.fromkeys(found) if other != tiling]


# ---- problems ---------------------------------------------------------------------------------------------------


def problems(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> Iterator[Problem]:
    """Of `tune prefill`, made one after another: each has tensors of its own."""
    for shape in shapes:
        yield _problem(shape, dtype, device, None, None)


def sparse_problems(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> Iterator[Problem]:
    """Of `tune sparse`: random blocks of two sizes, and documents as a mask function; not of pages."""
    for shape in dict.fromkeys(replace(shape, paged=False) for shape in shapes):
        for kind in KINDS:
            schedule, function = None, None
            if kind == "mask":
                function = _documents(shape.seq, device)
            else:
                block = int(kind.partition("x")[0])
                made = BlockSchedule.random(
                    shape.seq, shape.seq, block_q=block, block_k=block, sparsity=1 - KEPT, seed=0
                )
                schedule = made.to(device)
            yield _problem(shape, dtype, device, schedule, function)


def _documents(tokens: int, device: torch.device) -> functions.Function | None:
    """Causal attention within four documents."""
    document = (torch.arange(tokens, device=device) // max(1, tokens // 4)).to(torch.int32)
    return functions.of(lambda b, h, q, k: (document[q] == document[k]) & (q >= k), None)


def check(shapes: Sequence[Shape]) -> None:
    """ValueError for shapes that no kernel serves."""
    for shape in shapes:
        for name, dim in (("D", shape.hdim), ("Dv", shape.values)):
            if dim > MAX_HEAD_DIM:
                raise ValueError(f"{name} must be at most {MAX_HEAD_DIM} for prefill, got {dim}")
        if shape.paged and shape.seq % PAGE:
            raise ValueError(f"N must be whole pages of {PAGE} tokens with paged, got {shape.seq}")


def _problem(
    shape: Shape, dtype: torch.dtype, device: torch.device, schedule: BlockSchedule | None, function: Any
) -> Problem:
    scores = Scores((None, 0 if shape.causal else None), scale=shape.hdim**-0.5)
    pattern = NO_PATTERN
    if schedule is not None or function is not None:
        pattern = Pattern.of(schedule, function, (shape.batch, shape.heads, shape.seq, shape.seq))
    batch, rows, sequences = (
        (1, shape.batch * shape.seq, shape.batch) if shape.paged else (shape.batch, shape.seq, None)
    )
    sized = (dtype, batch, rows, shape.heads, shape.kv_heads, shape.hdim, scores)
    widths, tma = (
        widths_of(shape.hdim, shape.values),
        all(d * dtype.itemsize % 16 == 0 for d in (shape.hdim, shape.values)),
    )
    loads: dict[str, Any] = {
        "tma": tma, "page_size": PAGE * shape.paged, "pattern": pattern, "value_dim": shape.values,
    }  # fmt: skip
    card = arch.card_of(device)
    made = geometry(card, *sized, sequences=sequences, **loads)  # as it is chosen without a table
    plain = tma and not shape.paged
    family, key = tuned.key_of(dtype, widths.key, shape.seq, scores, plain=plain, pattern=pattern)
    limits = arch.limits_of(card)

    def specs(tiling: Any) -> list[KernelSpec]:
        pack = made.pack if pattern.listed else pack_of(tiling.tile_q, shape.seq, shape.heads // shape.kv_heads)
        packs = [pack, *(p for p in PACKS if p != pack and tiling.tile_q % p == 0)]
        return [spec_of(dtype, shape.hdim, tiling, scores, pack=pack, **loads) for pack in packs]

    others = candidates(made.tiling, widths, scores, dtype)
    fitting = tuple(t for t in others if _fits(t, specs(t)[0].shared_bytes, limits))
    name = str(shape) if family == "prefill" else f"{shape}, {key.split('/')[2]}"
    data = _Data(shape, dtype, device, scores, pattern, schedule, function)
    return Problem(family, key, name, made.tiling, fitting, specs, data.bind, data.same)


def _fits(tiling: Any, shared: int, limits: arch.Limits) -> bool:
    room = tiling.blocks_each * (shared + BLOCK_OVERHEAD) <= limits.shared_sm
    return shared <= limits.shared_block and room and tiling.tile_q * 32 <= 1024 * getattr(tiling, "warp_rows", 32)


class _Data:
    """A problem's tensors, made when the first call is bound."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        scores: Scores,
        pattern: Pattern,
        schedule: BlockSchedule | None,
        function: Any,
    ) -> None:
        self.shape, self.dtype, self.device, self.scores = shape, dtype, device, scores
        self.pattern, self.schedule, self.function = pattern, schedule, function
        self.tensors: tuple[torch.Tensor, ...] = ()

    def bind(self, table: Tuned, spec: KernelSpec) -> Call:
        """A call of `spec`, which is what is bound where this is the table."""
        if not self.tensors:
            generator = torch.Generator(self.device).manual_seed(0)
            shape, lead = self.shape, (self.shape.batch, self.shape.seq)
            kinds = ((shape.heads, shape.hdim), (shape.kv_heads, shape.hdim), (shape.kv_heads, shape.values))
            made = [torch.randn(*lead, *kind, generator=generator, device=self.device).to(self.dtype) for kind in kinds]
            o = torch.empty(*lead, shape.heads, shape.values, dtype=out_dtype(self.dtype), device=self.device)
            self.tensors = (*made, o)
        q, k, v, o = self.tensors
        bound: dict[str, Any] = {"pattern": self.pattern}
        given: dict[str, Any] = {"schedule": self.schedule, "function": self.function}
        if self.shape.paged:
            q, o = q.flatten(0, 1), o.flatten(0, 1)
            k, v = (x.reshape(-1, PAGE, *x.shape[2:]) for x in (k, v))
            batch, pages = self.shape.batch, self.shape.seq // PAGE
            bound |= {"sequences": batch, "paged": True, "table_pages": pages}
            whole = torch.arange(batch + 1, dtype=torch.int32, device=self.device)
            table_of = torch.arange(batch * pages, dtype=torch.int32, device=self.device).view(batch, pages)
            given |= {"starts": (whole * self.shape.seq,) * 2, "page_table": table_of}
        with tuned.trying(table):
            forward = prefill.Forward(q, k, v, o, self.scores, tma=prefill.tma_can(q, k, v, o), **bound)
        if forward.spec != spec:
            raise RuntimeError(f"the table leads to {forward.spec}, not to {spec}")
        return lambda: forward(q, k, v, o, None, None, None, **given)

    def same(self, chosen: Call, other: Call) -> bool:
        """Are the results equal but for rounding? Other blocks of keys are summed in another order."""
        o = self.tensors[-1]
        chosen()
        expected = o.float()
        o.fill_(torch.nan)
        other()
        most = 4 * torch.finfo(o.dtype).eps * expected.abs().max()
        return bool(((o.float() - expected).abs() <= most).all())
