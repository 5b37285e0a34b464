"""Calls of GPU kernels, on a card or in the emulator: what they serve, and how one like an earlier one is made again.

api/ has checked the arguments. A call on CUDA tensors is kept under a key that holds everything that was checked, so
that the next one like it costs the CPU a look into a dictionary, the output's allocation and the launch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from tilewise import arch, checks
from tilewise.gpu import prefill, tilings, widths
from tilewise.gpu.abi import FP8
from tilewise.gpu.pattern import NO_PATTERN, SLAB, AnySchedule, Pattern, stacked
from tilewise.plan.schedule import BlockSchedule
from tilewise.scores import Scores
from tilewise.state import merge_states

if TYPE_CHECKING:
    from tilewise.functions import Function

out_dtype = tilings.out_dtype
KV = tuple[torch.Tensor, torch.Tensor]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def check_served(q: torch.Tensor, where: str, v: torch.Tensor | None = None) -> None:
    """NotImplementedError for what no forward kernel serves; v: None where its head dimension is q's."""
    instead = 'backend="cpu"' if where == "emulator" else ".cpu() tensors"
    if q.dtype not in tilings.DTYPES:
        raise NotImplementedError(
            f"GPU kernels take bfloat16, float16, float8_e4m3fn and float32, got {q.dtype}; convert q, k and v, or use "
            f"{instead}"
        )
    _check_head_dims(q, (q if v is None else v).shape[-1], instead)
    if not arch.serves_prefill(q.device):
        raise NotImplementedError(
            f"GPU kernels are for compute capability 8.x, 9.0, 10.x and 12.x, {q.device} has "
            f"{'.'.join(map(str, arch.capability(q.device)))}; use {instead}, or "
            "torch.nn.functional.scaled_dot_product_attention"
        )


def _check_head_dims(q: torch.Tensor, value_dim: int, instead: str) -> None:
    most = widths.NARROW[-1] if q.dtype == FP8 else widths.MAX_HEAD_DIM
    for name, head_dim in (("", q.shape[-1]), (" of v", value_dim)):
        if head_dim > most:
            also = ", or bfloat16" if head_dim <= widths.MAX_HEAD_DIM else ""
            kind = str(q.dtype).removeprefix("torch.")
            raise NotImplementedError(
                f"GPU kernels take head_dim{name} up to {most} in {kind}, got {head_dim}; use {instead}{also}"
            )


class GpuCall:
    """A checked call of the forward, bound to its kernel when it is first made.

    Kept by `known_call` for calls like it, which then cost the CPU no checks and no planning.
    """

    __slots__ = ("bound", "plain", "return_lse", "scores")

    def __init__(self, scores: Scores, return_lse: bool) -> None:
        self.scores, self.return_lse = scores, return_lse  # the rule alone: a kept call keeps no tensors alive
        self.bound: prefill.Forward | None = None
        self.plain = False  # nothing but q, k, v, a schedule and functions go in, and o comes out: `again` serves

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        out: torch.Tensor | None,
        descales: tuple[torch.Tensor | None, ...] = (None, None, None),
        starts: tuple[torch.Tensor, torch.Tensor] | None = None,
        page_table: torch.Tensor | None = None,
        *,
        schedule: BlockSchedule | Sequence[BlockSchedule | None] | None = None,
        function: Function | None = None,
        listed: dict[prefill.Forward, prefill.TileList] | None = None,
        seed: torch.Tensor | None = None,
    ) -> Result:
        """seed: of dropout, () int64. listed: the tiles of calls with these starts and this page table, by the kernel
        that walks them; those of a kernel that is not there are listed, and put there."""
        if out is not None and checks.place(out, q, k, v) is None:  # it is read from as well: by way of another
            again = GpuCall(self.scores, self.return_lse)
            given = (q, k, v, sinks, slopes, None, descales, starts, page_table)
            result = again(*given, schedule=schedule, function=function, seed=seed)
            if isinstance(result, torch.Tensor):
                return out.copy_(result)
            return out.copy_(result[0]), result[1]
        blocks: AnySchedule | None
        if schedule is None or isinstance(schedule, BlockSchedule):
            blocks = schedule
        else:
            blocks = stacked(schedule, q.shape[0], _longest(k, page_table))
        o = out
        if o is None:
            o = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype(q.dtype))
        lse = None
        if self.return_lse:
            shape = (q.shape[1], q.shape[0]) if starts is not None else (q.shape[0], q.shape[2], q.shape[1])
            lse = q.new_empty(shape, dtype=torch.float32)
        if self.bound is None:
            like_q = q.is_contiguous() and q.dtype == o.dtype
            self.plain = like_q and all(x is None for x in (sinks, slopes, out, starts, lse, seed))
            _check_head_dims(q, v.shape[-1], ".cpu() tensors" if q.is_cuda else 'backend="cpu"')
            if not q.numel() or not k.numel():
                self.plain = False
                return _nothing_to_see(o, lse, sinks)
            self.bound = prefill.Forward(
                q,
                k,
                v,
                o,
                self.scores,
                tma=prefill.tma_can(q, k, v, o),
                sequences=None if starts is None else starts[0].shape[0] - 1,
                index=torch.int32 if starts is None else starts[0].dtype,
                paged=page_table is not None,
                pattern=_pattern(q, k, blocks, function, starts, page_table),
                table_pages=0 if page_table is None else page_table.shape[1],
            )
        if sinks is not None:
            sinks = sinks.float().contiguous()
        if slopes is not None:
            slopes = slopes.float().contiguous().expand(q.shape[0] if starts is None else starts[0].shape[0] - 1, -1)
        batch = q.shape[0] if starts is None else starts[0].shape[0] - 1
        descales = tuple(x if x is None or x.dim() == 2 else x.contiguous().expand(batch, -1) for x in descales)
        tiles = None
        if listed is not None and starts is not None and page_table is not None:
            tiles = listed.get(self.bound)
            if tiles is None:
                tiles = listed[self.bound] = prefill.TileList(self.bound, starts, page_table, k.shape[1])
                tiles.make()
        if seed is not None:
            seed = on_device(seed, q)
        self.bound(q, k, v, o, lse, sinks, slopes, starts, page_table, descales, blocks, function, tiles, seed)
        return o if lse is None else (o, lse)

    def again(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        schedule: BlockSchedule | None = None,
        function: Function | None = None,
    ) -> torch.Tensor:
        """The same as calling it, of a plain call that was made before, by the shortest way."""
        o = torch.empty_like(q) if v.shape[-1] == q.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))
        assert self.bound is not None
        self.bound.launch((q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()), schedule, function)
        return o


def on_device(seed: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The seed of dropout where q is, without a wait: it is filled in, not copied, if it came from the CPU."""
    if seed.device == q.device:
        return seed
    if seed.device.type == "cpu":
        return torch.full((), int(seed), dtype=seed.dtype, device=q.device)
    return seed.to(q.device)


def _longest(k: torch.Tensor, page_table: torch.Tensor | None) -> int:
    """Keys of a sequence, at most."""
    return k.shape[-3] if page_table is None else page_table.shape[1] * k.shape[1]


def pattern_key(q: torch.Tensor, k: Any, schedule: Any, function: Function | None) -> tuple[Any, ...]:
    """What a dense call's checks and its kernel depend on of its schedule and functions."""
    key: tuple[Any, ...] = ()
    if schedule is not None:
        key += (schedule.form if isinstance(schedule, BlockSchedule) else object(),)
    if function is not None:
        function.check(q.device)
        regular = isinstance(k, torch.Tensor) and q.dim() == k.dim() == 4
        key += (function.text((q.shape[0], q.shape[2], q.shape[1], k.shape[1])) if regular else object(),)
    return key


def _pattern(
    q: torch.Tensor,
    k: torch.Tensor,
    schedule: AnySchedule | None,
    function: Function | None,
    starts: tuple[torch.Tensor, torch.Tensor] | None,
    page_table: torch.Tensor | None,
) -> Pattern:
    """What a kernel has to be made for; sizes are upper bounds where they are on the device."""
    if schedule is None and function is None:
        return NO_PATTERN
    keys = _longest(k, page_table)
    sequences = q.shape[0] if starts is None else starts[0].shape[0] - 1
    pattern = Pattern.of(schedule, function, (sequences, q.shape[-2], q.shape[-3], keys))
    if pattern.listed and page_table is not None and k.shape[1] % SLAB:
        raise NotImplementedError(
            f"GPU kernels take a schedule or a mask over pages of a multiple of {SLAB} tokens, got pages of "
            f'{k.shape[1]}; use such pages, or CPU tensors and backend="cpu"'
        )
    return pattern


def shared_prefix(
    q: torch.Tensor,
    sources: Sequence[KV],
    lengths: Sequence[Sequence[int] | None],
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels of prefixes, then each sequence's own keys: (k, v) (members, N, Hkv, D), and the lengths of each or None.

    One launch of the forward per level, in which the rows of all sequences under a member stand over its keys; the
    states are merged. q: (B, Nq, Hq, D) -> o like it, with the head_dim of v, lse (B, Hq, Nq).
    """
    batch, seqlen_q, heads, _ = q.shape
    states = []
    for level, ((k, v), valid) in enumerate(zip(sources, lengths, strict=True)):
        own = level == len(sources) - 1
        call = GpuCall(scores.rule if own else scores.rule.unmasked, True)
        members, rows = k.shape[0], batch // max(1, k.shape[0]) * seqlen_q
        if valid is None:
            result = call(q.reshape(members, rows, *q.shape[2:]), k, v, None, None, None)
        else:  # what lies beyond a length is not looked at: the rest, packed
            there = torch.cat([torch.arange(n) + m * k.shape[1] for m, n in enumerate(valid)]).to(q.device)
            k, v = (x.flatten(0, 1).index_select(0, there) for x in (k, v))
            counts = [rows] * members, list(valid)
            starts = [torch.tensor([0, *accumulate(n)], dtype=torch.int32).to(q.device) for n in counts]
            result = call(q.reshape(-1, *q.shape[2:]), k, v, None, None, None, starts=(starts[0], starts[1]))
        o, lse = result
        if valid is not None:
            lse = lse.view(heads, members, rows).transpose(0, 1)
        # (members, heads, sequences of a member, rows of a sequence) -> (sequences, heads, rows)
        lse = lse.reshape(members, heads, -1, seqlen_q).transpose(1, 2).reshape(batch, heads, seqlen_q)
        states.append((o.view(*q.shape[:-1], o.shape[-1]), lse))
    if len(states) == 1:
        return states[0]
    return merge_states(*(torch.stack(x) for x in zip(*states, strict=True)))


def _nothing_to_see(o: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None) -> Result:
    """No rows, or no keys: zeros, and what the sinks alone make of the LSE."""
    o.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
        if sinks is not None:
            lse.copy_(sinks.float()[:, None].expand_as(lse))
    return o if lse is None else (o, lse)


_local = threading.local()  # a bound call has arguments of its own, which two threads cannot fill at once


def calls() -> dict[Any, GpuCall]:
    """This thread's calls by their keys."""
    found: dict[Any, GpuCall] | None = getattr(_local, "calls", None)
    if found is None or len(found) > 1024:
        found = _local.calls = {}
    return found


def bind(
    q: torch.Tensor,
    where: str,
    scores: Scores,
    return_lse: bool,
    key: tuple[Any, ...] | None = None,
    v: torch.Tensor | None = None,
) -> GpuCall:
    """A new call; with a key it is kept for calls like it. NotImplementedError for what the forward does not serve."""
    check_served(q, where, v)
    made = GpuCall(scores, return_lse)
    if key is not None:
        calls()[key] = made
    return made


def known_call(
    q: torch.Tensor, k: Any, v: Any, others: tuple[Any, ...], flags: tuple[Any, ...]
) -> tuple[tuple[Any, ...] | None, GpuCall | None]:
    """The key of a call on CUDA tensors: all that was checked about it; and the call, if one like it was made.

    others: tensors or None: sinks, slopes, out, three descales; of packed sequences also where they start, and the page
    table. flags: four bools first, then whatever else the call depends on. 1 is not True here: the checks refuse it.
    """
    a, b, c, d = flags[:4]
    if not (type(q) is type(k) is type(v) is torch.Tensor and type(a) is type(b) is type(c) is type(d) is bool):
        return None, None
    grad = torch.is_grad_enabled()
    key: tuple[Any, ...] = (
        flags, arch.chosen, grad and (q.requires_grad or k.requires_grad or v.requires_grad),
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16,
    )  # fmt: skip
    if any(x is not None for x in others):
        for x in others:
            if x is None:
                key += (None,)
            elif type(x) is torch.Tensor:
                key += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16, grad and x.requires_grad)
            else:
                return None, None
    try:
        return key, calls().get(key)
    except TypeError:  # a flag of a wrong type: the checks will say so
        return None, None
