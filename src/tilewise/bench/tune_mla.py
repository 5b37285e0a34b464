"""What `tilewise tune mla` measures: the shapes of rings, how far ahead of products scores and loads are, and codes of
few rows raw or widened, which alone changes bits of a result, so that the oracle judges it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from tilewise import api, arch, tuned
from tilewise.arch import LIMITS
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu import mla as kernel
from tilewise.gpu.abi import DECODE_RULES
from tilewise.gpu.decode import kept
from tilewise.gpu.mla_kernels import (
    CLASSES,
    DTYPES,
    MAX_DIM,
    ROWS,
    MlaTiling,
    block_places,
    choose_tiling,
    class_of,
    fits,
    mla_spec,
    shared_bytes,
)
from tilewise.tuned import Tuned

from . import mla
from .tune import Call, Problem
from .tune_prefill import Shape
from .workloads import Point

PAGE, VALUE_DIM = mla.PAGE_SIZE, mla.VALUE_DIM
AHEAD, TOGETHER = (0, 2, 4, 6, 7, 8, 9), (1, 2)
FETCHES = (0, 1)  # blocks ahead that L2 is asked for


@dataclass(frozen=True)
class Case:
    """A step that is measured. stored: the cache's format; chosen: positions that each query token reads, 0 for all."""

    shape: Shape
    stored: str = "bf16"
    chosen: int = 0

    def __str__(self) -> str:
        return f"{self.shape}, {self.stored}" + f", {self.chosen} chosen" * bool(self.chosen)

    @property
    def way(self) -> str:
        """How rows come: tuned.MLA_WAYS."""
        return "chosen" if self.chosen else "boxes"


def defaults(dtype: torch.dtype) -> list[Case]:
    """A step per key that DeepSeek's models ask for; rows of codes are read with bfloat16 queries."""
    few, some, more, many = (Shape(64, 8192, heads, 1, MAX_DIM, vdim=VALUE_DIM) for heads in CLASSES)
    plain = _stored(dtype)
    stored = (plain, "fp8") if dtype == torch.bfloat16 else (plain,)
    codes = [Case(shape, name) for name in stored[1:] for shape in (few, many)]
    chosen = [Case(replace(shape, seq=16384), name, chosen=2048) for name in stored for shape in (few, many)]
    return [*(Case(shape, plain) for shape in (many, more, few, some)), *codes, *chosen]


def _stored(dtype: torch.dtype) -> str:
    """The format of a cache of such rows."""
    return "fp16" if dtype == torch.float16 else "bf16"


def check(shapes: Sequence[Shape], dtype: torch.dtype) -> None:
    """ValueError for shapes that the kernel does not serve."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be bfloat16 or float16 for mla, got {str(dtype).removeprefix('torch.')}")
    for shape in shapes:
        if shape.kv_heads != 1 or shape.causal or shape.paged:
            raise ValueError(f"a shape of mla must be B,N,Hq,1,D:Dv, which is decoded from pages, got {shape}")
        if shape.hdim % 64 or shape.hdim > MAX_DIM or shape.values % 128 or shape.values > shape.hdim:
            raise ValueError(
                f"D must be a multiple of 64 up to {MAX_DIM} and Dv one of 128 up to D for mla, "
                f"got {shape.hdim} and {shape.values}"
            )


def candidates(head_dim: int, value_dim: int, tiling: MlaTiling, card: str, *, boxes: bool) -> list[MlaTiling]:
    """The tilings to be measured beside the chosen one: other distances, wider products of 64 rows, other rings and
    codes raw or widened beside fewer, and L2 asked for what comes next or not."""
    wide = tiling.rows == ROWS[-1]
    widths = TOGETHER if wide else TOGETHER[:1]
    ways = (True, False) if tiling.codes and tiling.rows == ROWS[0] else (tiling.raw,)
    found = []
    for raw in ways:
        one = choose_tiling(head_dim, value_dim, tiling.rows, card, codes=tiling.codes, boxes=boxes, raw=raw)
        found += [one, *(replace(one, ahead=ahead, together=n) for ahead, n in product(AHEAD, widths))]
        if not wide:
            found += [replace(one, places=n) for n in rings(head_dim, value_dim, one, card)]
    if boxes:
        found = [replace(one, fetches=n) for one, n in product(found, FETCHES)]
    fitting = (t for t in found if fits(head_dim, value_dim, t, card, boxes=boxes))
    return [other for other in dict.fromkeys(fitting) if other != tiling]


def rings(head_dim: int, value_dim: int, tiling: MlaTiling, card: str) -> list[int]:
    """Places of other rings: two blocks, all that there is room for, and between these."""
    block = block_places(head_dim, value_dim, tiling)
    most = next(
        n
        for n in range(8 * block, 0, -1)
        if shared_bytes(head_dim, replace(tiling, places=n)) <= LIMITS[card].shared_block
    )
    return [2 * block, (2 * block + most) // 2, most]


def problems(asked: Sequence[Shape | Case], dtype: torch.dtype, device: torch.device) -> Iterator[Problem]:
    """Made one after another: each has a cache of its own."""
    for one in asked:
        yield problem(one if isinstance(one, Case) else Case(one, _stored(dtype)), device)


def problem(case: Case, device: torch.device) -> Problem:
    shape, card, boxes = case.shape, arch.card_of(device), case.way == "boxes"
    dims = (shape.hdim, shape.values)
    codes = case.stored not in ("bf16", "fp16")
    tiling = choose_tiling(*dims, shape.heads, card, codes=codes, boxes=boxes)
    dtype = torch.float16 if case.stored == "fp16" else torch.bfloat16

    def specs(tiling: MlaTiling) -> list[KernelSpec]:
        pages = (PAGE, 16) if boxes else (PAGE,)
        ways = [(page, rule) for rule in DECODE_RULES for page in pages]
        options = {"chosen": case.chosen > 0, "stored": case.stored if codes else ""}
        return [mla_spec(dtype, *dims, page, tiling, rule=rule, **options) for page, rule in ways]

    data = _Data(case, dtype, device, tiling.raw)
    key = tuned.mla_key(case.stored, *dims, class_of(shape.heads), case.way)
    others = tuple(candidates(*dims, tiling, card, boxes=boxes))
    return Problem("mla", key, str(case), tiling, others, specs, data.bind, data.same, replay=True)


class _Data:
    """A problem's cache and plan, made when the first call is bound. raw: of the chosen tiling. judged: a result's
    error, and what is allowed."""

    judged: Callable[[torch.Tensor], tuple[float, float]]

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device, raw: bool) -> None:
        self.case, self.dtype, self.device, self.raw = case, dtype, device, raw
        self.call: Call | None = None
        self.other_bits: list[Call] = []  # of the calls that were bound

    def _make(self) -> Call:
        shape, device = self.case.shape, str(self.device)
        point = Point(
            "decode", batch=shape.batch, seq=shape.seq, heads=shape.heads, kv_heads=1, hdim=shape.hdim,
            page_size=PAGE, device=device,
        )  # fmt: skip
        cache, seqs = mla.filled(point, self.case.stored, shape.values)
        generator = torch.Generator(self.device).manual_seed(1)
        q = torch.randn(shape.batch, 1, shape.heads, shape.hdim, generator=generator, device=self.device).to(self.dtype)
        indices = mla.chosen_positions(point, self.case.chosen) if self.case.chosen else None
        self.judged = lambda o: mla.judged(o, q, cache, seqs, indices)
        self.plan = api.plan_decode(cache, seqs, num_heads=shape.heads, share_prefix=False)
        backend = "auto" if self.device.type == "cuda" else "emulator"
        return lambda: api.decode(q, cache, 0, self.plan, indices=indices, backend=backend)

    def bind(self, table: Tuned, spec: KernelSpec) -> Call:
        """A call of `spec`, which is what is bound where this is the table."""
        self.call = self.call or self._make()
        call = mla.under(table, self.call)  # type: ignore[arg-type]
        call()
        made = [bound for bound in kept(self.plan).bound.values() if isinstance(bound, kernel.MlaDecode)]
        if spec not in [bound.spec for bound in made]:
            raise RuntimeError(f"the table leads to {made[-1].spec}, not to {spec}")
        if dict(spec.constants)["kRaw"] != self.raw:
            self.other_bits.append(call)
        return call

    def same(self, chosen: Call, other: Call) -> bool:
        """Are the results the same to the bit? Where one of them has raw codes: are they right?"""
        expected, found = chosen(), other()
        assert isinstance(expected, torch.Tensor)
        assert isinstance(found, torch.Tensor)
        if other in self.other_bits:
            error, allowed = self.judged(found)
            return error <= allowed
        return torch.equal(found, expected)
