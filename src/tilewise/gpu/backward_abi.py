"""What the backward kernels and Python share: ctypes mirrors of kernels/backward/arguments.cuh, and constants."""

from __future__ import annotations

import ctypes

from tilewise.gpu.abi import Divisor, DropoutArgs, ScoreArgs, Strides

KEY_TILE_WORDS, KEY_LIST_HEADER = 16, 16  # arguments.cuh: kKeyTileWords, kKeyListHeader
STRIDED = ("q", "k", "v", "o", "do", "dq", "dk", "dv", "lse", "d_lse")


class QueryListArgs(ctypes.Structure):
    """backward/arguments.cuh: QueryLists."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("counts", "tiles", "bits", "visits")),
        *((n, ctypes.c_int) for n in ("width", "words", "rows_each", "lists_batch", "first")),
        ("heads_each", Divisor),
    ]


class BackwardArgs(ctypes.Structure):
    """backward/arguments.cuh: BackwardArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("q", "k", "v", "o", "d_o", "lse", "d_lse", "stats", "dq_sum", "turns")),
        *((n, ctypes.c_void_p) for n in ("dq", "dk", "dv", "starts_q", "starts_k", "list", "ends", "positions")),
        *((f"{name}_strides", Strides) for name in STRIDED),
        ("scores", ScoreArgs),
        ("scale", ctypes.c_float),
        *((n, ctypes.c_int) for n in ("seqlen_q", "seqlen_k", "sequences", "heads", "kv_heads", "group")),
        *((n, ctypes.c_int) for n in ("head_dim", "value_dim", "q_tiles", "kv_tiles", "together")),
        ("lists", QueryListArgs),
        ("dropout", DropoutArgs),
    ]


class KeyTileArgs(ctypes.Structure):
    """backward/arguments.cuh: KeyTile."""

    _fields_ = [
        *((n, ctypes.c_int) for n in ("sequence", "key", "q_start", "k_start", "seqlen_q", "seqlen_k", "slot")),
        *((n, ctypes.c_int) for n in ("begin", "end", "whole_begin", "whole_end")),
        ("reserved", ctypes.c_int * 5),
    ]


class KeyListArgs(ctypes.Structure):
    """backward/list.cu: KeyListArgs."""

    _fields_ = [("list", ctypes.c_void_p), ("buckets", ctypes.c_void_p)]


class PairArgs(ctypes.Structure):
    """backward/pairs.cu: PairArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("kept", "whole", "lengths_q", "lengths_k")),
        *((n, ctypes.c_void_p) for n in ("counts", "tiles", "bits", "visits")),
        ("kept_batch", ctypes.c_int64),
        *((n, ctypes.c_int) for n in ("kept_head", "kept_row", "q_blocks", "k_blocks")),
        *((n, ctypes.c_int) for n in ("lengths_q_batch", "lengths_k_batch", "list_heads", "left")),
        *((n, Divisor) for n in ("lists_each", "block_q", "block_k")),
    ]
