"""The Hopper backward, kernels/backward/backward.cu and what comes before and after it: arguments and launches.

`Backward` is bound to a problem's shapes, strides and options. Its kernels run on the card of the tensors, or in the
emulator over CPU tensors; it validates nothing. Sums and statistics that the kernels hand on to each other are made per
call, so calls of several threads and streams do not meet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from tilewise import compiler, emulator
from tilewise.arch import limits_of, multiprocessors
from tilewise.compiler.spec import Constant, KernelSpec
from tilewise.compiler.tensor_maps import TensorMapSpec
from tilewise.gpu.abi import (
    APART_RULES,
    ELEMENTS,
    EVERY_RULE,
    FAR,
    MAP_NAMES,
    PANEL,
    PANEL_BYTES,
    DropoutArgs,
    ScoreArgs,
    Strides,
    score_rule,
)
from tilewise.gpu.backward_abi import KEY_LIST_HEADER, KEY_TILE_WORDS, BackwardArgs, KeyListArgs
from tilewise.gpu.backward_call import GradientCall, Gradients
from tilewise.gpu.backward_lists import QueryLists, Step, listed, pairs_spec, query_lists
from tilewise.gpu.prefill import tma_can
from tilewise.scores import Scores

TILE_Q = 64  # rows of a query tile
CONSUMERS = 2
BEFORE_THREADS, AFTER_THREADS = 256, 128 * CONSUMERS
BEFORE_SHARED = 4 * TILE_Q
LIST_THREADS, BUCKETS = 1024, 128  # list.cu
LN2 = math.log(2)
# The fields of BackwardArgs for the address and the strides of a tensor
FIELDS = {
    **{name: (name, f"{name}_strides") for name in "qkvo"},
    **{f"d_{name}": (f"d{name}", f"d{name}_strides") for name in "qkv"},
    "d_o": ("d_o", "do_strides"),
    **{name: (name, "") for name in ("stats", "dq_sum", "turns", "list")},
}


@dataclass(frozen=True)
class Tiling:
    """How the kernel works at one pair of padded head dimensions.

    width, value_width: of Q and K, and of V and O, padded. tile_kv: keys of a block; with 64 both warpgroups work on
    the same ones. stages, do_stages, ds_stages: of Q, of dO and of dS. dq_columns: of each round in which a warpgroup's
    dQ leaves. ping_pong: the warpgroups take turns at the tensor cores. kv_registers: K and V stay in registers.
    scale_late: the exponentials wait for a load, so that none is put among products. mask_apart: with 64 keys, masks
    are computed for those tiles alone that need one; with 128 they always are.
    """

    width: int
    value_width: int
    tile_kv: int
    stages: int
    do_stages: int
    ds_stages: int
    dq_columns: int
    ping_pong: bool = False
    kv_registers: bool = False
    scale_late: bool = False
    mask_apart: bool = True

    @property
    def wide(self) -> bool:
        return self.tile_kv == 64

    @property
    def serial(self) -> bool:
        """Has S the registers of dP? Then there are none left: `tiling_of` says for what."""
        return not self.wide and self.width > 128

    def fitted(self, *, listed: bool = False, linear: bool = True) -> Tiling:
        """Itself, or with one stage less of dO: where P times the score's derivative takes its room, or the bits of a
        list come with it. linear: as Scores has it."""
        full = self.shared_bytes(listed=listed, linear=linear) > SHARED_LIMIT or (listed and self.serial)
        return replace(self, do_stages=self.do_stages - 1) if full and self.do_stages > 1 else self

    def shared_bytes(self, *, listed: bool = False, linear: bool = True) -> int:
        """backward/layout.cuh: kSharedBytes."""
        keys = self.tile_kv * (self.width + self.value_width) * 2
        rows = TILE_Q * (self.stages * self.width + self.do_stages * self.value_width) * 2
        squares = self.ds_stages + (self.wide and (1 if linear else 2))
        sums = squares * self.tile_kv * TILE_Q * 2 + CONSUMERS * TILE_Q * self.dq_columns * 4
        sights = self.stages if listed and not self.serial else 1
        small = 2 * self.stages * TILE_Q * 4 + sights * self.tile_kv * 8 + 128
        barriers = 16 * (2 * self.stages + self.do_stages + self.ds_stages + 6)
        return keys + rows + sums + small + barriers + 16 + 128


SHARED_LIMIT = limits_of("sm_90a").shared_block
# The first that is wide enough serves.
TILINGS = (
    Tiling(64, 64, 128, 2, 2, 3, 32, kv_registers=True),
    Tiling(128, 128, 128, 2, 2, 3, 64, ping_pong=True, scale_late=True),
    Tiling(192, 128, 128, 2, 1, 3, 64, ping_pong=True),
    Tiling(192, 192, 64, 2, 2, 1, 64),
    Tiling(256, 256, 64, 2, 2, 1, 32),
)
DTYPES = (torch.bfloat16, torch.float16)
PLAIN = Scores()
# Under a causal mask the last heads' key tiles begin side by side, the longest first, so that multiprocessors end
# together: about so many blocks for each of them. 0: heads come one after another up to the last. Not with grouped
# heads, of which too many would run at once: 0.77 of the speed with 64 on 8 (H200).
LAST_BLOCKS = 4


def tiling_of(
    head_dim: int, value_dim: int | None = None, scores: Scores = PLAIN, *, crowded: bool = False
) -> Tiling | None:
    """For Q and K of one head dimension and V of another, by default the same; None if none serves.

    Scores that are more than scaled, and what is `crowded`, find no registers in a serial one.
    """
    values = head_dim if value_dim is None else value_dim
    fit = (t for t in TILINGS if t.width >= head_dim and t.value_width >= values)
    return next((t for t in fit if not (t.serial and (scores.changed or crowded))), None)


def is_crowded(dtype: torch.dtype, packed: bool, listed: bool, in_turn: bool) -> bool:
    """Packed sequences leave registers for one of these three: float16, lists, turns."""
    return packed and (dtype == torch.float16) + listed + in_turn > 1


def serves(dtype: torch.dtype, head_dim: int, scores: Scores = PLAIN, value_dim: int | None = None) -> bool:
    """Does the kernel take such a problem? Curved scores with ALiBi need registers that heads beyond 64 lack, and
    dropout is done by the other one."""
    tiling = tiling_of(head_dim, value_dim, scores)
    if tiling is None or dtype not in DTYPES or scores.dropout:
        return False
    return tiling.width <= 64 or scores.linear or not scores.alibi


@dataclass(frozen=True)
class Kind:
    """What the kernels are compiled for. index: of the starts, None if dense. listed: which queries meet which keys is
    told by a schedule or a mask function. value_dim: of V, None if as head_dim."""

    dtype: torch.dtype
    head_dim: int
    scores: Scores
    masks: bool
    index: torch.dtype | None = None
    in_turn: bool = False
    listed: bool = False
    value_dim: int | None = None

    @property
    def tiling(self) -> Tiling:
        crowded = is_crowded(self.dtype, self.index is not None, self.listed, self.in_turn)
        found = tiling_of(self.head_dim, self.value_dim, self.scores, crowded=crowded)
        assert found is not None  # who asks for a kernel has asked `serves`
        return found

    @property
    def changed(self) -> bool:
        """Are scores more than scaled, so that S does not begin with −LSE?"""
        return self.scores.changed


@lru_cache(maxsize=256)
def specs_of(kind: Kind) -> tuple[KernelSpec, KernelSpec, KernelSpec]:
    """The kernel before, the main one and the one after."""
    room, packed = {"listed": kind.listed, "linear": kind.scores.linear}, kind.index is not None
    tiling = kind.tiling.fitted(**room)
    common: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENTS[kind.dtype]),
        ("kHeadDim", tiling.width),
        ("kValueDim", tiling.value_width),
        ("kDqColumns", tiling.dq_columns),
        ("kTileQ", TILE_Q),
        ("kPacked", packed),
        ("kInTurn", kind.in_turn),
    )
    main = (
        score_rule(kind.scores),
        ("kStages", tiling.stages),
        ("kDoStages", tiling.do_stages),
        ("kDsStages", tiling.ds_stages),
        ("kWide", tiling.wide),
        ("kMaskApart", tiling.mask_apart),
        ("kMasks", kind.masks),
        ("kListed", kind.listed),
        ("kPingPong", tiling.ping_pong),
        ("kKvInRegisters", tiling.kv_registers),
        ("kScaleLate", tiling.scale_late and not kind.scores.alibi),
    )
    ends = (
        ("Index", "int64_t" if kind.index == torch.int64 else "int"),
        ("kColumns", kind.head_dim),
        ("kValueColumns", kind.head_dim if kind.value_dim is None else kind.value_dim),
        ("kInitial", not kind.changed),
    )
    source = "backward/ends.cu"
    return (
        KernelSpec("backward_before", source, "before", common + ends, BEFORE_THREADS, BEFORE_SHARED, product=True),
        KernelSpec(
            "backward", "backward/backward.cu", "backward", common + main, 128 * (CONSUMERS + 1),
            tiling.shared_bytes(**room), product=True,
        ),
        KernelSpec("backward_after", source, "after", common + ends, AFTER_THREADS, 0, product=True),
    )  # fmt: skip


@lru_cache(maxsize=16)
def list_spec(index: torch.dtype, in_turn: bool, tile_kv: int = 128) -> KernelSpec:
    """The kernel that lists the key tiles of packed sequences; index: of the starts."""
    constants = (
        ("Index", "int64_t" if index == torch.int64 else "int"),
        ("kTileQ", TILE_Q),
        ("kTileKv", tile_kv),
        ("kInTurn", in_turn),
    )
    return KernelSpec("backward_list", "backward/list.cu", "list", constants, LIST_THREADS, 0, product=True)


def specs(*, every: bool = False) -> list[KernelSpec]:
    """The kernels as users get them: bfloat16 and head dimension 128, or `every` dtype, head dimension and feature."""
    rules = (*EVERY_RULE, *APART_RULES) if every else EVERY_RULE[:1]
    kinds = [
        Kind(dtype, t.width, scores, masks, index, in_turn, listed, t.value_width)
        for dtype in (DTYPES if every else DTYPES[:1])
        for t in (TILINGS if every else TILINGS[1:2])
        for scores in rules
        if serves(dtype, t.width, scores, t.value_width)
        for masks, index, listed in (
            *((False, None, False), (True, None, False), (True, torch.int32, False)),
            *((True, None, True), (True, torch.int32, True)),
        )
        for in_turn in ((False, True) if every else (False,))
    ]
    lists = [list_spec(torch.int32, in_turn) for in_turn in (False, True)]
    lists += [pairs_spec("", TILE_Q, 128, packed) for packed in (False, True)]
    if every:
        lists += [list_spec(torch.int32, in_turn, 64) for in_turn in (False, True)]
        lists += [pairs_spec("", TILE_Q, 64, packed) for packed in (False, True)]
    return list(dict.fromkeys([*(spec for kind in kinds for spec in specs_of(kind)), *lists]))


@dataclass(frozen=True)
class Shapes:
    """Of a call's tensors. Packed sequences have a batch of 1 and their lengths together.

    head_dim: of Q and K, value_dim: of V and O.
    """

    batch: int
    sequences: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    value_dim: int
    q_tiles: int
    kv_tiles: int
    tile_kv: int

    @classmethod
    def of(cls, call: GradientCall) -> Shapes:
        (seqlen_q, heads, head_dim), (seqlen_k, heads_kv, value_dim) = call.q.shape[-3:], call.v.shape[-3:]
        crowded = is_crowded(call.q.dtype, call.packed, listed(call), call.deterministic)
        tiling = tiling_of(head_dim, value_dim, call.scores, crowded=crowded)
        tile_kv = 128 if tiling is None else tiling.tile_kv
        if call.starts_q is None:
            batch = sequences = call.q.shape[0]
            tiles = math.ceil(seqlen_q / TILE_Q), math.ceil(seqlen_k / tile_kv)
        else:  # arguments.cuh: first_slot
            batch, sequences = 1, len(call.starts_q) - 1
            tiles = seqlen_q // TILE_Q + sequences + 2, seqlen_k // tile_kv + sequences + 2
        return cls(batch, sequences, seqlen_q, seqlen_k, heads, heads_kv, head_dim, value_dim, *tiles, tile_kv)


def gradients(call: GradientCall, **emulated: Any) -> Gradients:
    """dQ, dK, dV and dsinks of a call with 16-bit tensors, on the current stream. emulated: as in emulator.launch."""
    shapes, sinks = Shapes.of(call), call.scores.sinks
    given = {name: loadable(getattr(call, name)) for name in ("q", "k", "v", "o", "d_o")}
    found = {f"d_{n}": torch.empty_like(given[n], memory_format=torch.contiguous_format) for n in "qkv"}
    device = call.q.device
    if not call.q.numel() or not call.k.numel() or not shapes.sequences:
        none = None if sinks is None else torch.zeros(shapes.heads, dtype=torch.float32, device=device)
        return Gradients(torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v), none)
    slots = shapes.batch * shapes.heads * shapes.q_tiles
    index = None if call.starts_q is None else call.starts_q.dtype
    masks = listed(call) or call.packed or call.scores.window != (None, None) or shapes.seqlen_k % shapes.tile_kv > 0
    dims, rule = [given[name].shape[-1] for name in "qv"], call.scores.rule
    kind = Kind(call.q.dtype, dims[0], rule, masks, index, call.deterministic, listed(call), dims[1])
    stats = torch.empty(shapes.batch, shapes.heads, shapes.q_tiles, 2, TILE_Q, dtype=torch.float32, device=device)
    dq_sum = torch.empty(slots * TILE_Q * kind.tiling.width, dtype=torch.float32, device=device)
    work = {"stats": stats, "dq_sum": dq_sum}
    if call.deterministic:
        work["turns"] = torch.empty(slots * CONSUMERS, dtype=torch.int32, device=device)
    if call.packed:
        words = KEY_LIST_HEADER + KEY_TILE_WORDS * shapes.kv_tiles + BUCKETS
        work["list"] = torch.empty(words, dtype=torch.int32, device=device)
    args, read = arguments(call, shapes, given | found | work)
    plain = not call.deterministic and not call.packed and not kind.listed
    if plain and shapes.heads == shapes.heads_kv and call.scores.window == (None, 0):
        blocks = LAST_BLOCKS * multiprocessors(device)
        args.together = min(shapes.batch * shapes.heads_kv, math.ceil(blocks / shapes.kv_tiles))
    lists = query_lists(call, shapes.q_tiles, shapes.kv_tiles, TILE_Q, shapes.tile_kv) if kind.listed else None
    if lists is not None:
        read |= lists.tensors
    tensors = given | found | work | read
    run(steps(kind, shapes, args, tensors, lists), kind, shapes.tile_kv, tensors, **emulated)
    d_sinks = None
    if sinks is not None:  # one more key per row, whose value is 0: dP = 0
        less, delta = stats.unbind(3)
        logs = less * (LN2 if kind.changed else call.scores.scale)
        d_sinks = (torch.exp(sinks.float()[:, None, None] + logs) * delta).sum((0, 2, 3))
    d_q, d_k, d_v = (found[f"d_{n}"][..., : getattr(call, n).shape[-1]].contiguous() for n in "qkv")
    return Gradients(d_q, d_k, d_v, d_sinks)


def loadable(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy that TMA can load: rows on 16 bytes, padded with zeros."""
    spread = all(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)
    if spread and x.stride(-1) == 1 and tma_can(x):
        return x
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)).contiguous()


def arguments(
    call: GradientCall, shapes: Shapes, tensors: dict[str, torch.Tensor]
) -> tuple[BackwardArgs, dict[str, torch.Tensor]]:
    """The kernels' arguments, and those of the call's tensors that they read besides."""
    scores, read = call.scores, {"lse": call.lse}
    if call.d_lse is not None:
        read["d_lse"] = call.d_lse
    args = BackwardArgs(scores=ScoreArgs.of(scores), scale=scores.scale)
    args.seqlen_q, args.seqlen_k, args.sequences = shapes.seqlen_q, shapes.seqlen_k, shapes.sequences
    args.heads, args.kv_heads, args.group = shapes.heads, shapes.heads_kv, shapes.heads // shapes.heads_kv
    args.head_dim, args.value_dim = tensors["q"].shape[-1], tensors["v"].shape[-1]
    args.q_tiles, args.kv_tiles = shapes.q_tiles, shapes.kv_tiles
    if call.deterministic:  # twice as far apart as blocks would begin that a step takes to hand on
        steps = shapes.q_tiles * args.group
        args.together = min(shapes.batch * shapes.heads_kv, math.ceil(2 * multiprocessors(call.q.device) / steps))
    for name, x in tensors.items():
        field, strides = FIELDS[name]
        setattr(args, field, x.data_ptr())
        if strides:
            *batch, row, head, _ = x.stride()
            setattr(args, strides, Strides(batch[0] if batch else 0, row, head))
    for name, x in read.items():
        *batch, head, row = x.stride()
        setattr(args, name, x.data_ptr())
        setattr(args, f"{name}_strides", Strides(batch[0] if batch else 0, row, head))
    for name in ("starts_q", "starts_k", "ends", "positions"):
        if (x := getattr(call, name)) is not None:
            setattr(args, name, x.data_ptr())
            read[name] = x
    if call.positions is not None:  # the window looks there, and not at how far apart tokens stand
        args.scores.left = FAR
    if scores.slopes is not None:
        args.scores.slopes, args.scores.slopes_batch = scores.slopes.data_ptr(), scores.slopes.stride(0)
        read["slopes"] = scores.slopes
    args.dropout = DropoutArgs.of(scores)
    if scores.seed is not None:
        args.dropout.seed = scores.seed.data_ptr()
        read["seed"] = scores.seed
    return args, read


def steps(
    kind: Kind, shapes: Shapes, args: BackwardArgs, tensors: dict[str, torch.Tensor], lists: QueryLists | None
) -> list[Step]:
    """The launches, one after another."""
    before, main, after = specs_of(kind)
    rows, heads = shapes.batch * shapes.heads * shapes.q_tiles, shapes.heads_kv * shapes.batch
    found = []
    if kind.index is not None:
        at = tensors["list"].data_ptr()
        listing = KeyListArgs(at, at + 4 * (KEY_LIST_HEADER + KEY_TILE_WORDS * shapes.kv_tiles))
        found.append(Step(list_spec(kind.index, kind.in_turn, shapes.tile_kv), (1, 1, 1), (args, listing)))
    rounds = [] if lists is None else lists.rounds(args)
    if rounds:  # a block looks at its list at once: that is made before the kernel before, which the main one overlaps
        args, making = rounds[0]
        found.append(making)
    # The last two begin while the one before them ends, and wait for what they read of it.
    found += [Step(before, (rows, 1, 1), (args,)), Step(main, (args.kv_tiles * heads, 1, 1), (args,), True)]
    for here, making in rounds[1:]:
        found += [making, Step(main, (here.kv_tiles * heads, 1, 1), (here,))]
    return [*found, Step(after, (rows, 1, 1), (args,), True)]


def run(steps: list[Step], kind: Kind, tile_kv: int, tensors: dict[str, torch.Tensor], **emulated: Any) -> None:
    """Launches on the card of the tensors, or in the emulator."""
    boxes = {"q": TILE_Q, "k": tile_kv, "v": tile_kv, "d_o": TILE_Q, "d_k": 64, "d_v": 64}
    maps = [
        (_map_of(tensors[name], kind.index is not None, box), tensors[name].data_ptr()) for name, box in boxes.items()
    ]
    device = tensors["q"].device
    for step in steps:
        main = step.spec.name == "backward"
        if device.type == "cuda":
            made = [compiler.encode(*m) for m in maps] if main else []
            args = compiler.Args(*made, *step.args)
            _loaded(step.spec, device).launch(step.grid, args, pdl=step.overlaps)
        else:
            drawn = [emulator.tensor_map(*m) for m in maps] if main else []
            resident = 2 if main and kind.in_turn else 1  # a block waits for those that began before it
            emulator.launch(step.spec, step.grid, [*drawn, *step.args], tensors, resident=resident, **emulated)


def _map_of(x: torch.Tensor, packed: bool, rows: int) -> TensorMapSpec:
    """(D, N, heads, B), of which a box is a panel of these rows. The stride of a dimension of size 1 is not used."""
    (*batch, rows_each, heads, head_dim), (*far, row, head, _) = x.shape, x.stride()
    sizes = (head_dim, rows_each, heads, 1 if packed else batch[0])
    strides = (row, head, 0 if packed else far[0])
    return _map(x.dtype, sizes, strides, rows)


@lru_cache(maxsize=1024)
def _map(dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], rows: int) -> TensorMapSpec:
    used = tuple(s * dtype.itemsize if n > 1 else 16 for n, s in zip(sizes[1:], strides, strict=True))
    return TensorMapSpec(MAP_NAMES[dtype], sizes, used, (PANEL, rows, 1, 1), PANEL_BYTES)


_loaded = lru_cache(maxsize=256)(compiler.load)
