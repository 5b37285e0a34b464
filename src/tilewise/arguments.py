"""Arguments of the public calls: checked, and brought into the form that plans and kernels take.

Nothing here changes anything: a call that raises leaves the world as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tilewise import checks, cpu, functions
from tilewise.cpu.dropout import Dropout
from tilewise.functions import Function
from tilewise.gpu.abi import FP8
from tilewise.gpu.tilings import out_dtype
from tilewise.plan.schedule import BlockSchedule
from tilewise.scores import ScoreOptions, Scores, Window

from .kvcache import PagedKVCache, PrefixCache
from .plan import DecodePlan, Ints, StepPlan
from .plan.standing import StandingPlan
from .plan.standing_step import StandingStep

MAX_HEAD_DIM = checks.MAX_HEAD_DIM
BACKENDS = ("auto", "cpu", "cuda", "emulator")
EMULATOR: Final = "emulator"  # also "emulator:NAME" for one kernel

LevelShape = tuple[int, int, Sequence[int] | None]


class Sizes(NamedTuple):
    """Of q, k and v; of packed tensors batch is 1 and the lengths are totals, of paged ones seqlen_k is a page's."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    value_dim: int


Schedules = BlockSchedule | Sequence[BlockSchedule | None] | None
Descales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Where = Literal["cpu", "cuda", "emulator"]


def check_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool = False, paged: bool = False, fp8: bool = False
) -> Sizes:
    """The sizes of checked tensors; paged: k and v are in pages."""
    lead: tuple[str, ...] = ("total",) if packed else ("batch", "seqlen")
    dtypes = (*checks.FLOATS, FP8) if fp8 else checks.FLOATS
    checks.not_float64("q", q)
    checks.tensor("q", q, shape=(*lead, "heads", "head_dim"), dtypes=dtypes, unit_last_stride=True)
    batch = () if packed else (q.shape[0],)
    seqlen_q, heads_q, head_dim = q.shape[-3:]
    shape = ("pages", "page_size", "heads", head_dim) if paged else (*batch, lead[-1], "heads", head_dim)
    checks.tensor("k", k, shape=shape, dtypes=(q.dtype,), device=q.device, unit_last_stride=True, like="q")
    of_v = (*k.shape[:-1], "value_dim")
    checks.tensor("v", v, shape=of_v, dtypes=(q.dtype,), device=q.device, unit_last_stride=True, like="q")
    seqlen_k, heads_kv = k.shape[-3:-1]
    checks.head_dim("head_dim of q", head_dim)
    value_dim = checks.head_dim("head_dim of v", v.shape[-1])
    checks.integer("heads of k", heads_kv, 1)
    if heads_q == 0 or heads_q % heads_kv:
        order = ", ".join((*lead, "heads", "head_dim"))
        raise ValueError(
            f"q must have a multiple of k's {heads_kv} heads, got {heads_q}; tensors are ({order}), those of torch's "
            "scaled_dot_product_attention need .transpose(-2, -3)"
        )
    return Sizes(1 if packed else q.shape[0], seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, value_dim)


def check_descales(q: torch.Tensor, descales: Descales, batch: int, heads_kv: int) -> Descales:
    """What FP8 inputs are to be multiplied with, as float32 (batch, heads_kv) with the last stride 1."""
    checked: list[torch.Tensor | None] = []
    for name, descale in zip("qkv", descales, strict=True):
        if descale is not None:
            name = f"{name}_descale"
            if q.dtype != FP8:
                raise ValueError(f"{name} goes with float8_e4m3fn inputs, got {q.dtype}; multiply those yourself")
            checks.tensor(name, descale, dtypes=(torch.float32,), device=q.device)
            if tuple(descale.shape) not in ((heads_kv,), (batch, heads_kv)):
                raise ValueError(f"{name} must be ({heads_kv},) or ({batch}, {heads_kv}), got {tuple(descale.shape)}")
            descale = descale.contiguous().expand(batch, heads_kv)
        checked.append(descale)
    return checked[0], checked[1], checked[2]


def widened(x: torch.Tensor, descale: torch.Tensor | None, heads_kv: int) -> torch.Tensor:
    """FP8 (B, N, H, D) or (total, H, D) as float32, times descale (B or total, heads_kv) by KV head."""
    wide = x.float()
    if descale is not None:
        by_head = descale.repeat_interleave(x.shape[-2] // heads_kv, -1)
        wide *= by_head[:, None, :, None] if x.dim() == 4 else by_head[..., None]
    return wide


def check_window(window: Any) -> Window | None:
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be (left, right), how many keys are seen to either side, or None, got {window!r}")
    left, right = (None if w is None else checks.integer("window", w, 0, hint="None means no limit") for w in window)
    return left, right


def check_scores(
    q: torch.Tensor,
    batch: int,
    *,
    causal: bool = False,
    window: Any = None,
    chunk: Any = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    exact: bool = False,
) -> Scores:
    """The options of a call on q (…, heads, head_dim), checked, as the one value that plans and kernels take."""
    heads_q, head_dim = q.shape[-2:]
    left, right = check_window(window) or (None, None)
    right = 0 if checks.flag("causal", causal) else right
    scale = head_dim**-0.5 if scale is None else checks.number("scale", scale, hint="None means head_dim ** -0.5")
    softcap = checks.number("softcap", softcap, 0.0, hint="0.0 means no capping")
    slopes = check_slopes(alibi_slopes, batch, heads_q, q.device)
    if sinks is not None:
        checks.tensor("sinks", sinks, shape=(heads_q,), dtypes=checks.FLOATS, device=q.device)
    exact, chunk = checks.flag("exact", exact), check_chunk(chunk)
    return Scores((left, right), scale, softcap, slopes is not None, exact, chunk, sinks, slopes)


def check_chunk(chunk: Any) -> int:
    """The positions of a block; 0 for none, which callers say by None."""
    return 0 if chunk is None else checks.integer("chunk", chunk, 1, hint="None means no blocks")


def check_slopes(slopes: torch.Tensor | None, batch: int, heads_q: int, device: torch.device) -> torch.Tensor | None:
    """ALiBi slopes as float32 (batch, heads)."""
    if slopes is None:
        return None
    checks.tensor("alibi_slopes", slopes, dtypes=checks.FLOATS, device=device)
    if tuple(slopes.shape) not in ((heads_q,), (batch, heads_q)):
        raise ValueError(f"alibi_slopes must be ({heads_q},) or ({batch}, {heads_q}), got {tuple(slopes.shape)}")
    return slopes.float().expand(batch, heads_q)


class Call(NamedTuple):
    """What `attention` and `attention_varlen` were asked for, checked. descales: of q, k and v, (batch, heads_kv).

    schedule: a BlockSchedule or None; of packed sequences it may also be a list of both, one for each.
    """

    sizes: Sizes
    scores: Scores
    descales: Descales
    where: Where
    function: Function | None
    schedule: Any
    dropout: Dropout | None = None


def check_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: ScoreOptions,
    *,
    mask: Any,
    score: Any,
    schedule: Any,
    exact: bool,
    deterministic: bool,
    descales: Descales,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    return_lse: bool,
    out: torch.Tensor | None,
    backend: str,
    batch: int | None = None,
    paged: bool = False,
    rungs: bool = False,
) -> Call:
    """The checks that calls share; batch: the number of packed sequences, None for dense tensors; rungs: as below.

    Schedules of packed sequences are left to `check_schedules`, which needs to know where those start.
    """
    sizes = check_qkv(q, k, v, packed=batch is not None, paged=paged, fp8=True)
    if batch is not None:
        sizes = sizes._replace(batch=batch)
    scores = check_scores(q, sizes.batch, exact=exact, **options)
    function = check_function(mask, score, scores, q.device)
    checked = check_descales(q, descales, sizes.batch, sizes.heads_kv)
    checks.flag("return_lse", return_lse)
    checks.flag("deterministic", deterministic)
    check_out(out, q, sizes.value_dim)
    captured = () if function is None else function.tensors
    given = (k, v, options.get("sinks"), options.get("alibi_slopes"), *captured)
    where = check_backend(backend, q, given, rungs=rungs)
    if batch is None and schedule is not None:
        check_schedule("schedule", schedule, *sizes[1:3], sizes, q.device)
    return Call(sizes, scores, checked, where, function, schedule, Dropout.checked(dropout_p, dropout_seed))


def check_function(mask: Any, score: Any, scores: Scores, device: torch.device) -> Function | None:
    """The mask and the score function of a call, traced; None if there are none."""
    if mask is None and score is None:
        return None
    if score is not None and (scores.softcap or scores.alibi):
        name, text = (
            ("softcap", "c * torch.tanh(s / c)") if scores.softcap else ("alibi_slopes", "s - slopes[h] * (q - k)")
        )
        raise ValueError(f"{name} goes with no score function: write it in the function, {text}")
    function = functions.of(mask, score)
    function.check(device)
    return function


def check_schedule(
    name: str, schedule: Any, seqlen_q: int | None, seqlen_k: int | None, sizes: Sizes, device: torch.device
) -> None:
    """sizes: its heads and its batch are to fit the schedule, and these lengths where they are known."""
    if not isinstance(schedule, BlockSchedule):
        raise TypeError(f"{name} must be a tilewise.BlockSchedule, got {type(schedule).__name__}")
    if schedule.device != device:
        raise ValueError(f"{name} must be on {device}, where q is, got {schedule.device}; use schedule.to(q.device)")
    try:
        schedule.check(seqlen_q, seqlen_k, sizes.heads_q, sizes.heads_kv, sizes.batch)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_schedules(
    schedules: Any, starts_q: Sequence[int] | None, starts_k: Sequence[int] | None, sizes: Sizes, device: torch.device
) -> None:
    """One schedule for all packed sequences, or a list with one or None for each; starts are None if not known here."""
    batch = sizes.batch
    if isinstance(schedules, BlockSchedule):
        schedules = [schedules] * batch
    else:
        if not isinstance(schedules, (list, tuple)):
            raise TypeError(f"schedule must be a BlockSchedule or a list of them, got {type(schedules).__name__}")
        if len(schedules) != batch:
            raise ValueError(f"schedule must have one entry for each of the {batch} sequences, got {len(schedules)}")
        sizes = sizes._replace(batch=1)
    for b, one in enumerate(schedules):
        if one is not None:
            seqlen_q, seqlen_k = (None if x is None else x[b + 1] - x[b] for x in (starts_q, starts_k))
            check_schedule(f"schedule (sequence {b})", one, seqlen_q, seqlen_k, sizes, device)


def check_sequences(cu_seqlens_q: Any, cu_seqlens_k: Any) -> int:
    """How many packed sequences there are."""
    checks.tensor("cu_seqlens_q", cu_seqlens_q, shape=("batch + 1",), dtypes=checks.INTEGERS)
    if not len(cu_seqlens_q):
        raise ValueError("cu_seqlens_q must start with 0, got no entries")
    checks.tensor("cu_seqlens_k", cu_seqlens_k, shape=(cu_seqlens_q.shape[0],), dtypes=checks.INTEGERS)
    return int(cu_seqlens_q.shape[0]) - 1


def check_starts(name: str, starts: torch.Tensor, total: int | None, packed: str) -> list[int] | None:
    """The values; None, and nothing checked, where they are on a GPU: looking at them would make the CPU wait."""
    if starts.device.type != "cpu":
        return None
    values: list[int] = starts.tolist()
    if not values or values[0] != 0:
        raise ValueError(f"{name} must start with 0, got {values[:1]}")
    if any(b < a for a, b in pairwise(values)):
        raise ValueError(f"{name} must not decrease, got {values if len(values) < 20 else [*values[:20], '…']}")
    if total is not None and values[-1] != total:
        raise ValueError(f"{name} must end with {packed}'s total of {total} rows, got {values[-1]}")
    return values


def starts_like(q: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernels take them: where q is, of one dtype."""
    device, dtype = q.device, starts_q.dtype
    return starts_q.to(device, dtype).contiguous(), starts_k.to(device, dtype).contiguous()


def check_lengths(name: str, lengths: Any, count: int, padded: int) -> list[int]:
    if isinstance(lengths, torch.Tensor):
        checks.tensor(name, lengths, shape=(count,), dtypes=checks.INTEGERS)
        lengths = lengths.tolist()
    elif not isinstance(lengths, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be a list of ints or an int tensor, got {type(lengths).__name__}")
    if len(lengths) != count:
        raise ValueError(f"{name} must have {count} entries, got {len(lengths)}")
    return [checks.integer(name, n, 0, padded) for n in lengths]


def check_levels(levels: Any, q: torch.Tensor, heads_kv: int, value_dim: int) -> tuple[list[cpu.KV], list[LevelShape]]:
    """The (k, v) of each level and its (batch, padded length, valid lengths or None)."""
    if not isinstance(levels, (list, tuple)):
        raise TypeError(f"levels must be a list of (k, v) or (k, v, lengths), got {type(levels).__name__}")
    sources: list[cpu.KV] = []
    shapes: list[LevelShape] = []
    for n, level in enumerate(levels):
        if not isinstance(level, (list, tuple)) or len(level) not in (2, 3):
            raise TypeError(f"levels[{n}] must be (k, v) or (k, v, lengths), got {type(level).__name__}")
        k, v = level[:2]
        shape = ("batch", "seqlen", heads_kv, q.shape[-1])
        rest: dict[str, Any] = {"dtypes": (q.dtype,), "device": q.device, "unit_last_stride": True, "like": "q"}
        checks.tensor(f"levels[{n}][0]", k, shape=shape, **rest)
        same = tuple(k.shape)
        checks.tensor(f"levels[{n}][1]", v, shape=(*same[:-1], value_dim), **rest)
        valid = check_lengths(f"levels[{n}][2]", level[2], *same[:2]) if len(level) == 3 else None
        sources.append((k, v))
        shapes.append((same[0], same[1], valid))
    sizes = [shape[0] for shape in shapes] + [q.shape[0]]
    for n, (members, below) in enumerate(pairwise(sizes)):
        if members == 0 or below % members:
            raise ValueError(f"levels[{n}][0] must have a batch size that divides the next one, {below}, got {members}")
    return sources, shapes


def check_cache(cache: Any) -> PagedKVCache:
    if isinstance(cache, PrefixCache):
        return cache.cache
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache must be a PagedKVCache or a PrefixCache, got {type(cache).__name__}")
    return cache


def check_plan(plan: Any, pages: PagedKVCache) -> None:
    if not isinstance(plan, (DecodePlan, StandingPlan)):
        raise TypeError(f"plan must come from tilewise.plan_decode, got {type(plan).__name__}")
    if plan.cache_serial != pages.serial:
        raise ValueError("plan was made for another cache; call plan_decode with this one")


def check_step(plan: Any, pages: PagedKVCache) -> None:
    if not isinstance(plan, (StepPlan, StandingStep)):
        raise TypeError(f"plan must come from tilewise.plan_step, got {type(plan).__name__}")
    if plan.cache_serial != pages.serial:
        raise ValueError("plan was made for another cache; call plan_step with this one")


def places(plan: DecodePlan | StandingPlan) -> int:
    """How many sequences q and o have room for."""
    return plan.rows if isinstance(plan, StandingPlan) else len(plan.seqs)


def check_tree_mask(mask: Any, plan: DecodePlan | StandingPlan, device: torch.device) -> torch.Tensor | None:
    """As (num_seqs, T, T)."""
    if mask is None:
        return None
    tokens, count = plan.tokens_per_seq, places(plan)
    given = checks.tensor("tree_mask", mask, dtypes=(torch.bool,), device=device)
    if tuple(given.shape) not in ((tokens, tokens), (count, tokens, tokens)):
        shapes = f"({tokens}, {tokens}) or ({count}, {tokens}, {tokens})"
        raise ValueError(f"tree_mask must be {shapes}, got {tuple(given.shape)}")
    if plan.window is not None or plan.chunk:
        raise ValueError(
            "tree_mask goes with a plan without a window and a chunk: which token is how far away, a tree does not say"
        )
    return given.expand(count, tokens, tokens)


class PageListsOf:
    """The page lists of sequences, looked up one by one where one is wanted: most steps want none."""

    def __init__(self, pages: PagedKVCache, seqs: Sequence[int]) -> None:
        self._pages, self._seqs = pages, seqs

    @property
    def copies(self) -> int:
        """Changes whenever a page was taken from one of the cache's sequences."""
        return self._pages.pool.losses

    def __getitem__(self, n: int) -> Ints:
        return self._pages.page_list(self._seqs[n])

    def block(self, numbers: npt.NDArray[np.int64], first: npt.NDArray[np.int64], width: int) -> Ints:
        """(n, width): the pages of the sequences `numbers` (n,) from number `first`, () or (n,), on, with zeros after
        the lists."""
        sequences = self._pages.sequences
        rows = sequences.batch(list(self._seqs))[1][numbers]
        if not first.any():
            found = sequences.table[:, :width][rows]
            return found if found.shape[1] == width else np.pad(found, ((0, 0), (0, width - found.shape[1])))
        at = first[..., None] + np.arange(width)
        last = sequences.table.shape[1] - 1
        return np.where(at <= last, sequences.table[rows[:, None], np.minimum(at, last)], 0)


def check_out(out: torch.Tensor | None, q: torch.Tensor, value_dim: int | None = None) -> None:
    """value_dim: of the values, q's head_dim if None."""
    if out is None:
        return
    shape = (*q.shape[:-1], q.shape[-1] if value_dim is None else value_dim)
    checks.tensor("out", out, shape=shape, dtypes=(out_dtype(q.dtype),), device=q.device, unit_last_stride=True)
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise ValueError(f"out must have a place for every element, got strides {out.stride()}; use torch.empty")
    if out.requires_grad or (out.is_inference() and not torch.is_inference_mode_enabled()):
        raise ValueError(
            "out must be writable here, got one that requires gradients or was made in inference mode; "
            f"use q.new_empty({shape}) under the same mode"
        )


def check_page_table(page_table: torch.Tensor, k: torch.Tensor, batch: int) -> None:
    shape = (batch, "pages a sequence")
    checks.tensor("page_table", page_table, shape=shape, dtypes=(torch.int32,), device=k.device, unit_last_stride=True)
    checks.integer("page_size of k", k.shape[1], 1)


def check_pages(page_table: torch.Tensor, k: torch.Tensor, starts: Sequence[int]) -> None:
    """The lengths fit the table; on the CPU also: the pages that they reach are there."""
    pages, page_size = k.shape[:2]
    for b, (start, end) in enumerate(pairwise(starts)):
        used = -(-(end - start) // page_size)
        if used > page_table.shape[1]:
            raise ValueError(
                f"page_table must have {used} pages for the {end - start} tokens of sequence {b}, "
                f"got {page_table.shape[1]}"
            )
        if page_table.device.type == "cpu" and used:
            row = page_table[b, :used]
            if int(row.min()) < 0 or int(row.max()) >= pages:
                raise ValueError(f"page_table must name pages from 0 to {pages - 1}, got {row.tolist()} (sequence {b})")


def gather(x: torch.Tensor, page_table: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """The sequences' tokens packed end to end, out of pages (pages, page_size, Hkv, D)."""
    parts = [x.new_empty((0, *x.shape[2:]))]
    for b, (start, end) in enumerate(pairwise(starts)):
        used = page_table[b, : -(-(end - start) // x.shape[1])].long()
        parts.append(x[used].flatten(0, 1)[: end - start])
    return torch.cat(parts)


def places_in_pages(page_table: torch.Tensor, starts: Sequence[int], page_size: int) -> torch.Tensor:
    """(tokens,) int64: where each of the packed tokens lies when the pages stand one after another."""
    parts = [page_table.new_empty(0, dtype=torch.int64)]
    for b, (start, end) in enumerate(pairwise(starts)):
        token = torch.arange(end - start, device=page_table.device)
        parts.append(page_table[b].long()[token // page_size] * page_size + token % page_size)
    return torch.cat(parts)


def check_backend(backend: str, q: torch.Tensor, others: Sequence[torch.Tensor | None], rungs: bool = False) -> Where:
    """Where the call runs, refusing what nothing there serves; rungs: the ladder's serve this call too, by name."""
    emulated = isinstance(backend, str) and backend.partition(":")[0] == EMULATOR
    if not emulated:
        checks.choice("backend", backend, BACKENDS)
    elif backend != EMULATOR and not rungs:
        raise NotImplementedError(f'backend "{backend}" runs attention() only; use backend="emulator" here')
    cuda = q.device.type == "cuda"
    if q.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"q is on {q.device}: Tilewise has no kernels for this call on {q.device.type} tensors yet; "
            "use .cpu() tensors"
        )
    if cuda != (backend == "cuda") and backend != "auto":
        taken = "CUDA tensors" if backend == "cuda" else "CPU tensors"
        raise ValueError(f'backend "{backend}" takes {taken}, got q on {q.device}; backend="auto" takes both')
    if wants_gradients(q, *others):
        raise NotImplementedError(
            "an input requires gradients, and this call has no backward pass; call it under torch.no_grad(), or use "
            "attention() or attention_varlen() for training"
        )
    return EMULATOR if emulated else "cuda" if cuda else "cpu"


def wants_gradients(*tensors: Any) -> bool:
    """Does autograd ask for gradients of one of the tensors?"""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)
