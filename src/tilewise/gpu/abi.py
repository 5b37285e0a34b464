"""What CUDA C++ and Python share: the product kernels' arguments as ctypes structures, and constants.

Each class names the C++ structure that it mirrors. A test compiles those and compares sizes and offsets.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import torch

from tilewise.functions.layout import Divisor as Divisor  # users' functions divide as the kernels do
from tilewise.scores import Scores, dropped_below

FP8 = torch.float8_e4m3fn
LOG2E = math.log2(math.e)
FAR = 0x3FFFFFFF  # tile/keys.cuh: kFar, a window without a limit; also the longest sequence
PANEL = 64  # tile/hopper.cuh: 16-bit columns of a panel
PANEL_BYTES = 128  # tile/hopper.cuh: a row of a panel
TILE_WORDS, LIST_HEADER = 16, 16  # prefill/work.cuh: of a WorkTile, and before a list of them
MAX_PARTS = 6  # copy_pages.cu
PLAN_LIMITS = 5  # decode/plan_work.cuh: kLimits, candidates for the longest range that one warp takes whole
MOST_SMALL = 32  # decode/small_args.cuh: sequences of a launch
# The C++ type of a torch dtype (tile/types.cuh), and its name in a tensor map.
ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "half", FP8: "e4m3"}
MAP_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", FP8: "fp8"}


class Strides(ctypes.Structure):
    """common/args.cuh: Strides."""

    _fields_ = [("batch", ctypes.c_int64), ("row", ctypes.c_int64), ("head", ctypes.c_int64)]

    @classmethod
    def of(cls, x: torch.Tensor) -> Strides:
        return cls(x.stride(0), x.stride(1), x.stride(2))


class Descale(ctypes.Structure):
    """prefill/work.cuh: Descale."""

    _fields_ = [("values", ctypes.c_void_p), ("batch", ctypes.c_int64)]


class ScoreArgs(ctypes.Structure):
    """common/scores.cuh: Scores. The pointers and slopes_batch, a stride in elements, are set per call."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("sinks", "slopes")),
        ("slopes_batch", ctypes.c_int64),
        *((n, ctypes.c_int) for n in ("left", "right")),
        *((n, ctypes.c_float) for n in ("scale_log2", "softcap_in", "softcap_out")),
        ("chunk", ctypes.c_int),
    ]

    @classmethod
    def of(cls, scores: Scores) -> ScoreArgs:
        """The softmax scale, the softcap, the window and the chunk in the kernels' terms.

        Scores are in base 2: the scale becomes scale · log2 e, and softcap · tanh(S · scale / softcap) becomes
        softcap_out · tanh(S · softcap_in), whose argument the kernels take as 2 log2 e times itself.
        """
        (left, right), scale, softcap = scores.window, scores.scale, scores.softcap
        return cls(
            left=FAR if left is None else min(left, FAR),
            right=FAR if right is None else min(right, FAR),
            scale_log2=scale * LOG2E,
            softcap_in=2 * LOG2E * scale / softcap if softcap else 0.0,
            softcap_out=softcap * LOG2E,
            chunk=min(scores.chunk, FAR),
        )


def score_rule(scores: Scores) -> tuple[str, str]:
    """The constant that says what a kernel does to scores, a type: common/scores.cuh."""
    return _rule_of(scores.softcap > 0, scores.alibi, scores.scale <= 0, *([True] if scores.chunk else []))


@cache
def _rule_of(*flags: bool) -> tuple[str, str]:
    return "Rule", f"ScoreRule<{', '.join(str(flag).lower() for flag in flags)}>"


def decode_score_rule(scores: Scores) -> tuple[str, str]:
    """The same of decode's kernels, which have no ALiBi and multiply with any scale."""
    return score_rule(Scores(softcap=scores.softcap, chunk=scores.chunk))


# One of each kind that a kernel is made for.
EVERY_RULE = (Scores(), Scores(softcap=30.0, alibi=True), Scores(scale=-1.0))
APART_RULES = (Scores(softcap=30.0), Scores(alibi=True))  # for kernels that do not take both together
DECODE_RULES = (decode_score_rule(Scores()), decode_score_rule(Scores(softcap=30.0)))


class DropoutArgs(ctypes.Structure):
    """common/dropout.cuh: Dropout. The seed's address is set per call."""

    _fields_ = [("seed", ctypes.c_void_p), ("below", ctypes.c_uint32), ("factor", ctypes.c_float)]

    @classmethod
    def of(cls, scores: Scores) -> DropoutArgs:
        if not scores.dropout:
            return cls()
        return cls(below=dropped_below(scores.dropout) << 16, factor=1.0 / (1.0 - scores.dropout))


class TileListArgs(ctypes.Structure):
    """prefill/work.cuh: TileLists."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("counts", "units", "order", "lengths_q", "lengths_k")),
        *((n, ctypes.c_int) for n in ("lengths_q_batch", "lengths_k_batch", "width", "rows_each", "lists_batch")),
        *((n, Divisor) for n in ("heads_each", "block_q", "block_k")),
    ]


class FoldArgs(ctypes.Structure):
    """prefill/fold.cu: FoldArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("kept", "whole", "counts", "units", "order", "finished")),
        ("kept_batch", ctypes.c_int64),
        *((n, ctypes.c_int) for n in ("kept_head", "kept_row", "q_blocks", "k_blocks", "list_heads")),
        ("lists_each", Divisor),
    ]


class KindsArgs(ctypes.Structure):
    """prefill/kinds.cu: KindsArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("kept", "whole")),
        *((n, ctypes.c_int) for n in ("heads", "q_blocks", "words", "seqlen_q", "seqlen_k", "block_q", "block_k")),
    ]


class NoFunctionArgs(ctypes.Structure):
    """common/functions.cuh: NoFunction."""

    _fields_ = [("unused", ctypes.c_int)]


class ForwardArgs(ctypes.Structure):
    """prefill/work.cuh: ForwardArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("q", "k", "v", "o", "lse", "page_table", "list", "counter")),
        *((f"{name}_strides", Strides) for name in ("q", "k", "v", "o")),
        *((n, ctypes.c_int64) for n in ("lse_batch", "lse_head", "page_table_stride")),
        ("scores", ScoreArgs),
        *((f"descale_{name}", Descale) for name in "qkv"),
        *((n, ctypes.c_int) for n in ("seqlen_q", "seqlen_k", "tiles", "q_tiles")),
        *((n, Divisor) for n in ("tile_heads", "tile_heads_per_kv", "together", "tiles_together")),
        ("lists", TileListArgs),
        ("dropout", DropoutArgs),
    ]


class RaggedArgs(ctypes.Structure):
    """prefill/ragged.cu: RaggedArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("starts_q", "starts_k", "list", "buckets")),
        *((n, ctypes.c_int) for n in ("sequences", "total_q", "total_k", "longest_k", "capacity", "reserved")),
    ]


class Paged(ctypes.Structure):
    """decode/work.cuh: Paged."""

    _fields_ = [("base", ctypes.c_void_p), *((n, ctypes.c_int64) for n in ("page", "token", "head", "group"))]

    @classmethod
    def of(cls, x: torch.Tensor, unit: int = 1) -> Paged:
        """Strides in elements times `unit`."""
        return cls(x.data_ptr(), *(s * unit for s in x.stride()[:3]), x.stride(3))


class DecodeArgs(ctypes.Structure):
    """decode/work.cuh: DecodeArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("q", "o", "lse", "tree", "items", "tile_items", "order", "lengths", "tails")),
        *((n, ctypes.c_void_p) for n in ("pages", "states", "state_o", "state_ml", "barrier_counter")),
        *((n, Paged) for n in ("k", "v", "k_scale", "v_scale", "k_zero", "v_zero")),
        *((n, Strides) for n in ("q_strides", "o_strides")),
        ("scores", ScoreArgs),
        *((n, ctypes.c_int) for n in ("slots", "tile_rounds", "sequences", "merge_rows", "kv_heads", "tokens")),
        *((n, ctypes.c_int) for n in ("table_pages", "tail_pages")),
        *((n, Divisor) for n in ("group", "rows_each", "merge_jobs")),
        ("selections", ctypes.c_int),
        ("own", ctypes.c_void_p),
    ]


class MlaArgs(ctypes.Structure):
    """mla/work.cuh: MlaArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("folds", "indices", "lengths", "tails", "pages", "tail_from", "places")),
        ("queries", Divisor),
        *((n, ctypes.c_int) for n in ("chosen", "table_pages", "tail_pages")),
    ]


class SmallSequence(ctypes.Structure):
    """decode/small_args.cuh: SmallSequence."""

    _fields_ = [("caller", ctypes.c_int), ("tail_from", ctypes.c_int), ("piece", Divisor), ("rounds", Divisor)]


class SmallArgs(ctypes.Structure):
    """decode/small_args.cuh: SmallArgs."""

    _fields_ = [("of", SmallSequence * MOST_SMALL)]


class SelectArgs(ctypes.Structure):
    """decode/select.cu: SelectArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("bits", "order", "lengths", "tail_from", "tails", "pages")),
        *((n, ctypes.c_void_p) for n in ("selected", "tokens", "own")),
        *((n, ctypes.c_int64) for n in ("batch", "head")),
        *((n, ctypes.c_int) for n in ("num_pages", "most", "page_size", "queries", "table_pages", "tail_pages")),
    ]


class PlanRoom(ctypes.Structure):
    """decode/plan_work.cuh: PlanRoom."""

    _fields_ = [
        (n, ctypes.c_uint32)
        for n in (
            *("sums", "place", "length", "caller", "under", "split", "ranges", "nodes"),
            *("loads", "fresh", "ranks", "skipped", "counts", "work", "keys", "next"),
        )
    ]


class PlanArgs(ctypes.Structure):
    """decode/plan_work.cuh: PlanArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("step", "table", "items", "tile_items", "order", "lengths", "states")),
        *((n, ctypes.c_void_p) for n in ("used", "placed", "made")),
        *((n, ctypes.c_int) for n in ("rows", "width", "tokens", "left", "together", "warps", "joiners")),
        *((n, ctypes.c_int) for n in ("slots", "tile_rounds", "pass_bits", "tile_bits", "tile_box", "wide_rows")),
        *((n, ctypes.c_int) for n in ("in_turn", "chunk_bits", "group_bits", "longest")),
        *((n, ctypes.c_int) for n in ("shared_tokens", "item_cost", "step_cost")),
        *((n, ctypes.c_int) for n in ("max_ranges", "max_pieces", "max_tiles", "max_states")),
        *((n, ctypes.c_int * PLAN_LIMITS) for n in ("limits", "size_bits")),
        ("bins", ctypes.c_int),
        *((n, Divisor) for n in ("page_size", "heads", "rows_each", "blocks", "groups", "passes")),
        ("room", PlanRoom),
        *((n, ctypes.c_double) for n in ("item_chunks", "state_chunks", "sprint", "fold_chunks")),
        ("positions", ctypes.c_int),
    ]


class StageArgs(ctypes.Structure):
    """decode/plan_step.cu: StageArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("message", "step", "table", "positions", "index", "seen")),
        ("number", ctypes.c_int64),
        *((n, ctypes.c_int) for n in ("sequences", "nodes", "updates", "grown", "width", "room")),
        ("page_size", Divisor),
    ]


class Source(ctypes.Structure):
    """append.cu: AppendSource."""

    _fields_ = [("base", ctypes.c_void_p), ("token", ctypes.c_int64), ("head", ctypes.c_int64)]


class Store(ctypes.Structure):
    """append.cu: AppendStore."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("codes", "scale", "zero", "rotary")),
        *((n, ctypes.c_int64) for n in ("codes_token", "codes_head", "scale_page", "scale_token", "scale_head")),
        *((n, ctypes.c_int64) for n in ("rotary_token", "rotary_head")),
    ]


class AppendArgs(ctypes.Structure):
    """append.cu: AppendArgs."""

    _fields_ = [
        ("source", Source * 3),
        ("store", Store * 2),
        *((n, ctypes.c_void_p) for n in ("positions", "index", "cos", "sin")),
        *((n, ctypes.c_int64) for n in ("cos_row", "cos_column", "sin_row", "sin_column")),
        *((n, ctypes.c_int) for n in ("tokens", "heads", "heads_q", "head_dim", "value_dim", "stored", "first")),
        *((n, ctypes.c_int) for n in ("pairs", "page_size", "page_shift", "group_lanes")),
        ("vectors", ctypes.c_uint32),
    ]


class CopyPart(ctypes.Structure):
    """copy_pages.cu: CopyPart."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("layer", "page", "token", "head")),
        *((n, ctypes.c_int) for n in ("unit", "row")),
    ]


class CopyArgs(ctypes.Structure):
    """copy_pages.cu: CopyArgs."""

    _fields_ = [
        ("pages", ctypes.c_void_p),
        ("part", CopyPart * MAX_PARTS),
        *((n, ctypes.c_int) for n in ("count", "layers", "page_size", "heads")),
    ]
