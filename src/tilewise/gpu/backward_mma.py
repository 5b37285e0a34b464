"""The backward by mma.sync, kernels/backward/backward_mma.cu and mma_ends.cu: which form of it serves, and its launch.

It serves every card without wgmma, and on Hopper what backward_hopper.py does not. The choice is a pure function of the
card's shared memory and of what a problem needs registers for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from tilewise import compiler, emulator
from tilewise.arch import arch_of_device, card_of, hopper, limits_of
from tilewise.compiler.spec import Constant, KernelSpec
from tilewise.gpu.abi import ELEMENTS, EVERY_RULE, score_rule
from tilewise.gpu.backward_abi import KEY_LIST_HEADER, KEY_TILE_WORDS, BackwardArgs, KeyListArgs
from tilewise.gpu.backward_call import GradientCall, Gradients
from tilewise.gpu.backward_hopper import BUCKETS, LIST_THREADS, LN2, Shapes, arguments, loadable, serves
from tilewise.gpu.backward_picks import SLOPE, Picked
from tilewise.scores import Scores

SOURCE, ENDS = "backward/backward_mma.cu", "backward/mma_ends.cu"
RESERVED = 1024  # bytes of shared memory that each block takes besides
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (64, 128, 192, 256)  # head dimensions that the products run over; others are padded


@dataclass(frozen=True)
class BackwardTiling:
    """Queries and keys of a tile, keys of a pair of warps, parts of dQ side by side, places for Q and dO, and the rest.

    dq_each: parts of dQ per warp. own_registers: a warp keeps its rows of K or V in registers. blocks_each: thread
    blocks that a multiprocessor holds.
    """

    tile_q: int
    tile_kv: int
    pair_keys: int
    dq_across: int
    stages: int = 2
    own_registers: bool = False
    blocks_each: int = 1
    dq_each: int = 1

    @property
    def threads(self) -> int:
        return 64 * self.tile_kv // self.pair_keys

    def shared_bytes(self, width: int, size: int) -> int:
        """Shared memory per block, as mma_layout.cuh lays it out; size: bytes of an element."""
        rows, scores = 2 * self.tile_kv + 2 * self.stages * self.tile_q, 2 * self.tile_q * self.tile_kv
        return size * (width * rows + scores) + 8 * self.stages * self.tile_q + 4 * KEY_TILE_WORDS


# By bytes of an element and padded head dimension: the first that fits the card's shared memory is taken. A warp holds
# dK or dV of its pair's keys in registers, and S or dP of them. With 32 keys each fragment of Q and dO that is read
# serves two products.
TILINGS: dict[tuple[int, int], tuple[BackwardTiling, ...]] = {
    (2, 64): (
        BackwardTiling(32, 128, 64, 2, blocks_each=2),
        BackwardTiling(64, 128, 32, 2, own_registers=True),
        BackwardTiling(64, 64, 16, 2),
    ),
    (2, 128): (
        BackwardTiling(64, 128, 32, 4),
        BackwardTiling(32, 64, 32, 4, blocks_each=2),
        BackwardTiling(32, 64, 16, 4),
    ),
    (2, 192): (BackwardTiling(64, 64, 16, 2), BackwardTiling(32, 48, 16, 3)),
    (2, 256): (BackwardTiling(32, 64, 16, 4), BackwardTiling(32, 32, 16, 2, stages=1)),
    (4, 64): (BackwardTiling(32, 128, 32, 4), BackwardTiling(32, 64, 16, 4)),
    (4, 128): (BackwardTiling(32, 64, 16, 4), BackwardTiling(16, 32, 16, 4)),
    (4, 192): (BackwardTiling(16, 32, 16, 4), BackwardTiling(16, 32, 16, 4, stages=1)),
    (4, 256): (BackwardTiling(16, 32, 16, 8, dq_each=2), BackwardTiling(16, 16, 16, 4, stages=1, dq_each=2)),
}
# Where the compiler finds too few registers for the first of them (`tilewise kernels --all`), the next is taken.
TOO_WIDE = {"sm_87": ((2, 64),), "sm_100": ((4, 64), (4, 128)), "sm_103": ((4, 64), (4, 128))}


def padded(head_dim: int) -> int:
    """The head dimension that the products run over."""
    return next(d for d in WIDTHS if d >= head_dim)


def choose(
    card: str, dtype: torch.dtype, head_dim: int, block_k: int = 0, crowded: bool = False, dropped: bool = False
) -> BackwardTiling:
    """The tiling for a head dimension on a card.

    block_k: keys of a schedule's blocks, which tiles do not exceed. crowded: scores take more than a factor, or masks
    more than a span, and registers that S would have; dropped: weights are dropped, which takes some, too.
    """
    width, size, limits = padded(head_dim), dtype.itemsize, limits_of(card)
    fitting = [
        t
        for t in TILINGS[size, width][(size, width) in TOO_WIDE.get(card, ()) :]
        if t.shared_bytes(width, size) <= min(limits.shared_block, limits.shared_sm // t.blocks_each - RESERVED)
        and not ((crowded or dropped) and t.pair_keys == 64)
    ]
    found = next((t for t in fitting if not block_k or t.tile_kv <= block_k), fitting[-1 if block_k else 0])
    if (crowded or dropped) and found == TILINGS[2, 128][0]:
        return replace(found, tile_q=32)
    if dropped and (size, width) == (4, 128):
        return replace(found, tile_q=16, dq_across=found.threads // 32)
    return replace(found, own_registers=found.own_registers and not (crowded and dropped))


def new_card(device: torch.device) -> bool:
    """Is there stmatrix, and one instruction that adds four floats? The emulator behaves as the card it imitates."""
    return _newer(card_of(device) if device.type == "cpu" else arch_of_device(device))


def _newer(arch: str) -> bool:
    return int(arch.removeprefix("sm_").rstrip("a")) >= 90


@dataclass(frozen=True)
class Kind:
    """What the kernels are compiled for. index: of the starts, None if dense; in_turn: dQ is added up in a fixed order.

    new: the card has stmatrix and adds four floats by one instruction. function: a user's mask and score in C++, and
    slope: the score's derivative; "" for none. picked: a schedule or a mask leaves out tiles.
    """

    dtype: torch.dtype
    head_dim: int
    scores: Scores
    new: bool
    index: torch.dtype | None = None
    in_turn: bool = False
    function: str = ""
    slope: str = ""
    picked: bool = False


@lru_cache(maxsize=1024)
def specs_of(kind: Kind, tiling: BackwardTiling) -> tuple[KernelSpec, KernelSpec, KernelSpec]:
    """The kernel before, the main one and the one after."""
    width = padded(kind.head_dim)
    common: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENTS[kind.dtype]),
        ("kHeadDim", width),
        ("kColumns", kind.head_dim),
        ("kTileQ", tiling.tile_q),
        ("kTileKv", tiling.tile_kv),
        ("kPairKeys", tiling.pair_keys),
        ("kDqEach", tiling.dq_each),
        ("kDqAcross", tiling.dq_across),
        ("kStages", tiling.stages),
        ("kNewCard", kind.new),
        ("kInTurn", kind.in_turn),
    )
    main = (
        *(*common, score_rule(Scores() if kind.slope else kind.scores)),
        ("Function", "UserFunction" if kind.function else "NoFunction"),
        ("Slope", SLOPE if kind.slope else "NoFunction"),
        ("kPicked", kind.picked),
        ("kDropout", kind.scores.dropout > 0),
        ("kOwnInRegisters", tiling.own_registers),
        ("kBlocksEach", tiling.blocks_each),
    )
    ends = (
        *common,
        ("Index", "int64_t" if kind.index == torch.int64 else "int"),
        ("kPacked", kind.index is not None),
    )
    before, after = (
        KernelSpec(f"backward_mma_{end}", ENDS, f"{end}_mma", ends, tiling.threads, 0, product=True)
        for end in ("before", "after")
    )
    shared = tiling.shared_bytes(width, kind.dtype.itemsize)
    text = kind.function + kind.slope
    product = not text  # what a user's function takes of registers is the user's
    made = KernelSpec("backward_mma", SOURCE, "backward_mma", main, tiling.threads, shared, product=product, text=text)
    return before, made, after


def list_spec(index: torch.dtype, tiling: BackwardTiling, in_turn: bool) -> KernelSpec:
    """The kernel that lists the key tiles of packed sequences; index: of the starts."""
    constants = (
        ("Index", "int64_t" if index == torch.int64 else "int"),
        ("kTileQ", tiling.tile_q),
        ("kTileKv", tiling.tile_kv),
        ("kInTurn", in_turn),
    )
    return KernelSpec("backward_list", "backward/list.cu", "list", constants, LIST_THREADS, 0, product=True)


def specs(card: str, *, every: bool = False) -> list[KernelSpec]:
    """The kernels as a card's users get them: bfloat16 and head dimension 128, or `every` one; on Hopper the others."""
    dtypes = DTYPES if every else (torch.float32 if hopper(card) else torch.bfloat16,)
    rules = (*EVERY_RULE, *(replace(rule, dropout=0.1) for rule in EVERY_RULE)) if every else EVERY_RULE[:1]
    kinds = [
        Kind(dtype, head_dim, scores, _newer(card), index, in_turn)
        for dtype in dtypes
        for head_dim in (WIDTHS if every else (128,))
        for scores in rules
        if not (hopper(card) and serves(dtype, head_dim, scores))
        for index in (None, torch.int32)
        for in_turn in ((False, True) if every else (False,))
    ]
    chosen = {kind: choose(card, kind.dtype, kind.head_dim, 0, *_takes(kind.scores)) for kind in kinds}
    made = [spec for kind, tiling in chosen.items() for spec in specs_of(kind, tiling)]
    tilings = dict.fromkeys(chosen.values())
    lists = [list_spec(torch.int32, tiling, in_turn) for tiling in tilings for in_turn in (False, True)]
    return list(dict.fromkeys([*made, *lists]))


def _takes(scores: Scores, picks: bool = False) -> tuple[bool, bool]:
    """What registers are taken for: crowded and dropped, of `choose`. picks: there are functions or a schedule."""
    return scores.changed or picks, scores.dropout > 0


def shapes_of(call: GradientCall, tiling: BackwardTiling) -> Shapes:
    """The call's shapes, and how many tiles there are, at most."""
    shapes = Shapes.of(call)
    if call.packed:  # arguments.cuh: first_slot
        tiles = [n // tile + shapes.sequences + 2 for n, tile in _lengths(shapes, tiling)]
    else:
        tiles = [-(-n // tile) for n, tile in _lengths(shapes, tiling)]
    return replace(shapes, q_tiles=tiles[0], kv_tiles=tiles[1])


def _lengths(shapes: Shapes, tiling: BackwardTiling) -> tuple[tuple[int, int], tuple[int, int]]:
    return (shapes.seqlen_q, tiling.tile_q), (shapes.seqlen_k, tiling.tile_kv)


def gradients(call: GradientCall, tiling: BackwardTiling | None = None, **emulated: Any) -> Gradients:
    """dQ, dK, dV and dsinks of a call, on the current stream. tiling: another than the card's own.

    emulated: as in emulator.launch.
    """
    device, sinks = call.q.device, call.scores.sinks
    given = {name: loadable(getattr(call, name)) for name in ("q", "k", "v", "o", "d_o")}
    found = {f"d_{n}": torch.empty_like(given[n], memory_format=torch.contiguous_format) for n in "qkv"}
    block_k = 0 if call.schedule is None else call.schedule.block_k
    takes = _takes(call.scores, call.function is not None or call.schedule is not None)
    tiling = tiling or choose(card_of(device), call.q.dtype, call.q.shape[-1], block_k, *takes)
    shapes = shapes_of(call, tiling)
    if not call.q.numel() or not call.k.numel() or not shapes.sequences:
        none = None if sinks is None else torch.zeros(shapes.heads, dtype=torch.float32, device=device)
        return Gradients(torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v), none)
    rows = shapes.batch, shapes.heads, shapes.q_tiles
    stats = torch.empty(*rows, 2, tiling.tile_q, dtype=torch.float32, device=device)
    dq_sum = torch.empty(*rows, tiling.tile_q, padded(shapes.head_dim), dtype=torch.float32, device=device)
    work = {"stats": stats, "dq_sum": dq_sum}
    if call.deterministic:
        work["turns"] = torch.empty(*rows, tiling.threads // 32, dtype=torch.int32, device=device)
    if call.packed:
        words = KEY_LIST_HEADER + KEY_TILE_WORDS * shapes.kv_tiles + BUCKETS
        work["list"] = torch.empty(words, dtype=torch.int32, device=device)
    index = None if call.starts_q is None else call.starts_q.dtype
    head_dim = given["q"].shape[-1]
    picked = Picked.of(call)
    kind = Kind(
        call.q.dtype, head_dim, call.scores.rule, new_card(device), index, call.deterministic,
        picked.function, picked.slope, picked.picked,
    )  # fmt: skip
    args, read = arguments(call, shapes, given | found | work)
    run(kind, tiling, shapes, [args, *picked.args], given | found | work | read | picked.tensors, **emulated)
    d_sinks = None
    if sinks is not None:  # one more key per row, whose value is 0: dP = 0
        less, delta = stats.unbind(3)
        d_sinks = (torch.exp(sinks.float()[:, None, None] + less * LN2) * delta).sum((0, 2, 3))
    d_q, d_k, d_v = (x[..., : shapes.head_dim] for x in found.values())
    return Gradients(d_q, d_k, d_v, d_sinks)


def run(
    kind: Kind,
    tiling: BackwardTiling,
    shapes: Shapes,
    given: list[Any],
    tensors: dict[str, torch.Tensor],
    **emulated: Any,
) -> None:
    """Launches the kernels one after another. given: the main one's arguments; the others take the first of them."""
    args: BackwardArgs = given[0]
    slots, keys = shapes.batch * shapes.heads * shapes.q_tiles, shapes.kv_tiles * shapes.heads_kv * shapes.batch
    specs = specs_of(kind, tiling)
    launches: list[tuple[KernelSpec, int, list[Any]]] = list(
        zip(specs, (slots, keys, slots), ([args], given, [args]), strict=True)
    )
    if kind.index is not None:
        at = tensors["list"].data_ptr()
        listed = KeyListArgs(at, at + 4 * (KEY_LIST_HEADER + KEY_TILE_WORDS * shapes.kv_tiles))
        launches = [(list_spec(kind.index, tiling, kind.in_turn), 1, [args, listed]), *launches]
    device = tensors["q"].device
    for spec, grid, of in launches:
        if device.type == "cuda":
            compiler.load(spec, device).launch((grid, 1, 1), compiler.Args(*of))
        else:
            resident = 2 if kind.in_turn and spec is specs[1] else 1  # a block waits for those that began before it
            emulator.launch(spec, (grid, 1, 1), of, tensors, **{"resident": resident, **emulated})
