"""Which query tiles meet which tiles of keys in the backward, where a schedule, a mask function or positions say so.

kernels/backward/pairs.cu finds it on the device, with bits for tiles that are seen in part. The main kernels walk the
lists and know nothing of functions, so that a new function compiles this one alone.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tilewise.compiler.spec import KernelSpec
from tilewise.gpu.abi import FAR, Divisor, NoFunctionArgs
from tilewise.gpu.backward_abi import BackwardArgs, PairArgs, QueryListArgs
from tilewise.gpu.backward_call import GradientCall
from tilewise.gpu.pattern import Pattern

BITS_BYTES = 1 << 28  # at most, of one round: the longest sequences would have gigabytes of them


class Step(NamedTuple):
    """A launch to come. args: ctypes structures; overlaps: it may begin before the one ahead of it has ended."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    overlaps: bool = False


class QueryLists(NamedTuple):
    """args: for BackwardArgs.lists; tensors: what kernels read and write of it, by name; the rest makes the lists.

    kv_tiles: all of them; backwards: those behind come first, as key tiles of dense problems add in turn.
    """

    args: QueryListArgs
    tensors: dict[str, torch.Tensor]
    spec: KernelSpec
    lists: int
    kv_tiles: int
    backwards: bool
    problem: PairArgs
    values: Any

    def rounds(self, args: BackwardArgs) -> list[tuple[BackwardArgs, Step]]:
        """The arguments of each round, and the launch that makes its lists. args: of the call."""
        found = []
        firsts = range(0, self.kv_tiles, self.args.rows_each)
        for first in reversed(firsts) if self.backwards else firsts:
            here = BackwardArgs.from_buffer_copy(args)
            here.lists, here.kv_tiles = self.args, min(self.args.rows_each, self.kv_tiles - first)
            here.lists.first = first
            found.append((here, Step(self.spec, (here.kv_tiles, self.lists, 1), (here, self.problem, self.values))))
        return found


@lru_cache(maxsize=256)
def pairs_spec(text: str, tile_q: int, tile_kv: int, packed: bool) -> KernelSpec:
    """The kernel that makes the lists. text: a mask function in C++, "" for none."""
    function = ("Function", "UserFunction" if text else "NoFunction")
    constants = (("kTileQ", tile_q), ("kTileKv", tile_kv), ("kPacked", packed), function)
    source = "backward/pairs.cu"
    # What a user's function takes of registers is the user's.
    threads = tile_q * tile_kv // 32
    shared = 4 * (threads + threads // 32)  # kPairBytes
    return KernelSpec("backward_pairs", source, "pairs", constants, threads, shared, product=not text, text=text)


def listed(call: GradientCall) -> bool:
    """Does more than the window and ends say which queries meet which keys?"""
    masked = call.function is not None and call.function.masks
    return masked or call.schedule is not None or call.positions is not None


def query_lists(call: GradientCall, q_tiles: int, kv_tiles: int, tile_q: int, tile_kv: int) -> QueryLists:
    """The lists of a call that has some. q_tiles, kv_tiles: BackwardArgs'; tile_q, tile_kv: rows and keys of a tile."""
    schedule, device, heads = call.schedule, call.q.device, call.q.shape[-2]
    sequences = len(call.q) if call.starts_q is None else len(call.starts_q) - 1
    longest = call.max_seqlens or (call.q.shape[-3], call.k.shape[-3])
    function = call.function if call.function is not None and call.function.masks else None
    pattern = Pattern.of(schedule, function, (sequences, heads, *longest))
    own = heads if "h" in pattern.uses else min(pattern.heads, heads)
    members = 1 if call.packed else sequences if "b" in pattern.uses else pattern.batch
    lists, width = members * own, max(1, min(q_tiles, math.ceil(longest[0] / tile_q)))
    words = math.ceil(math.ceil(longest[1] / tile_kv) / 32)
    shapes = {"counts": (2,), "tiles": (width,), "bits": (width, tile_kv, 2)}
    rounds = math.ceil(4 * lists * kv_tiles * math.prod(shapes["bits"]) / BITS_BYTES)
    rows = math.ceil(kv_tiles / rounds)
    tensors = {n: torch.empty(lists, rows, *x, dtype=torch.int32, device=device) for n, x in shapes.items()}
    if call.deterministic:
        tensors["visits"] = torch.zeros(lists, q_tiles, words, dtype=torch.int32, device=device)
    made = {name: x.data_ptr() for name, x in tensors.items()}
    args = QueryListArgs(**made, width=width, words=words, rows_each=rows)
    args.lists_batch, args.heads_each = own if members > 1 else 0, Divisor.by(heads // own)
    problem = PairArgs(**made, list_heads=own, lists_each=Divisor.by(max(1, own // pattern.heads)))
    problem.block_q, problem.block_k = (Divisor.by(max(1, n)) for n in (pattern.block_q, pattern.block_k))
    left = call.scores.window[0]
    problem.left = FAR if left is None else min(left, FAR)
    if schedule is not None:
        tensors |= _point(problem, schedule)
    if function is not None:
        tensors |= {f"captured {n}": x for n, x in enumerate(function.tensors)}
    spec = pairs_spec(pattern.text, tile_q, tile_kv, call.packed)
    values = NoFunctionArgs() if function is None else function.arguments()
    backwards = call.deterministic and not call.packed
    return QueryLists(args, tensors, spec, lists, kv_tiles, backwards, problem, values)


def _point(problem: PairArgs, schedule: Any) -> dict[str, torch.Tensor]:
    """Points the arguments at a schedule; returns what is read of it."""
    bits = schedule.bits
    problem.kept_batch = bits.stride(0) if bits.shape[0] > 1 else 0
    problem.kept_head = bits.stride(1) if bits.shape[1] > 1 else 0
    problem.kept_row, problem.q_blocks, problem.k_blocks = bits.stride(2), bits.shape[2], schedule.num_k_blocks
    planes = {"kept": bits, "whole": schedule.whole}
    planes |= {name: getattr(schedule, name) for name in ("lengths_q", "lengths_k")}
    read = {name: x for name, x in planes.items() if x is not None}
    for name, x in read.items():
        setattr(problem, name, x.data_ptr())
        if name.startswith("lengths"):
            setattr(problem, f"{name}_batch", x.stride(0) if x.shape[0] > 1 else 0)
    return read
