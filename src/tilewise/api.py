"""The public calls: validate -> plan -> run. Read this first.

Layout is `(batch, seqlen, heads, head_dim)` with any strides whose last is 1, or `(total, heads, head_dim)` packed. The
LSE is the natural log of the softmax denominator, float32, `(batch, heads, seqlen_q)` or `(heads, total_q)`. A row
with no visible key gives output 0 and LSE −inf. `causal` and `window` align bottom-right: the last query sees the
last key. Query head h reads KV head `h // (heads_q // heads_kv)`. Softmax and accumulation are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from . import checks, cpu
from .kvcache import PagedKVCache, PrefixCache
from .plan import DecodePlan, Plan, Window, plan_dense, plan_shared_prefix, plan_varlen
from .sparse import BlockSchedule
from .state import add_sinks
from .tree import CPU_COST, CostModel, plan_tree

MAX_HEAD_DIM = 512
BACKENDS = ("auto", "cpu", "emulator")
EMULATOR = "emulator"  # also "emulator:NAME" for one kernel
DEQUANTISE = 4  # reading a quantised token on the CPU, in readings of a float32 one

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
LevelShape = tuple[int, int, Sequence[int] | None]
Level = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, Sequence[int] | torch.Tensor]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    schedule: BlockSchedule | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attention over a batch of equally long sequences: softmax(q kᵀ · scale) v.

    q: (B, Nq, Hq, D) float32, float16 or bfloat16; k, v: (B, Nk, Hkv, D) of the same dtype; Hq a multiple of Hkv.
    causal: query i sees keys up to i + Nk − Nq. window: (left, right) keys seen to either side, None for no limit.
    scale: of the scores, `D ** -0.5` if None. softcap c > 0: scores become c · tanh(scores / c).
    sinks: (Hq,), a logit that joins the softmax denominator only; it counts in the LSE.
    alibi_slopes: (Hq,) or (B, Hq), adds −slope · |i + Nk − Nq − j| after soft-capping.
    schedule: a BlockSchedule; keys outside its blocks are not seen. out: (B, Nq, Hq, D), written and returned.
    backend: "auto", "cpu", or "emulator": a CUDA kernel's source run on CPU tensors, "emulator:NAME" for a rung of the
    ladder by name; slow, and for the plain and causal problems that those kernels serve.

    Returns o (B, Nq, Hq, D), with return_lse also the LSE (B, Hq, Nq) float32. A NaN or infinity in a key that a window
    hides may still reach the rows of its tile, as in other fused kernels; what `causal` alone hides does not.
    """
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = _check_qkv(q, k, v)
    window = _check_window(window)
    scoring = _scoring(q, scale, softcap)
    slopes = _check_slopes(alibi_slopes, batch, heads_q, q.device)
    _check_sinks(sinks, heads_q, q.device)
    if schedule is not None:
        _check_schedule("schedule", schedule, seqlen_q, seqlen_k, heads_q)
    checks.flag("causal", causal)
    checks.flag("return_lse", return_lse)
    _check_out(out, q)
    _check_backend(backend, q, (k, v, sinks, alibi_slopes), emulated=True)
    if backend.startswith(EMULATOR):
        extras = {"window": window, "softcap": softcap or None, "alibi_slopes": slopes, "schedule": schedule}
        o, lse = _emulate(backend, q, k, v, causal, scoring.scale, extras)
        return _result(o, lse, sinks, out, return_lse)

    plan = plan_dense(
        batch,
        seqlen_q,
        seqlen_k,
        heads_q,
        heads_kv,
        head_dim,
        causal=causal,
        window=window,
        schedule=schedule,
        io_bytes=q.element_size(),
    )
    if slopes is not None:
        starts = [b * seqlen_q for b in range(batch)], [b * seqlen_k for b in range(batch)]
        scoring = cpu.Scoring(scoring.scale, softcap, cpu.Alibi(slopes, *starts, [seqlen_k - seqlen_q] * batch))
    with _full_precision():
        o, lse = cpu.run(plan, q, [(k, v)], scoring, _place(out, q, k, v))
    return _result(o, lse.view(batch, seqlen_q, heads_q).transpose(1, 2), sinks, out, return_lse)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    schedule: BlockSchedule | Sequence[BlockSchedule | None] | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attention over sequences of different lengths, packed end to end; empty ones are allowed.

    q: (total_q, Hq, D); k, v: (total_k, Hkv, D). cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 or int64, where each
    sequence starts, beginning with 0 and ending with the total. schedule: one BlockSchedule that fits every sequence,
    or one (or None) for each. Everything else as in `attention`; alibi_slopes (Hq,) or (B, Hq).

    Returns o (total_q, Hq, D), with return_lse also the LSE (Hq, total_q) float32.
    """
    _, total_q, total_k, heads_q, heads_kv, head_dim = _check_qkv(q, k, v, packed=True)
    starts_q = _check_starts("cu_seqlens_q", cu_seqlens_q, total_q, "q")
    starts_k = _check_starts("cu_seqlens_k", cu_seqlens_k, total_k, "k")
    batch = len(starts_q) - 1
    if len(starts_k) - 1 != batch:
        raise ValueError(f"cu_seqlens_k must have {batch + 1} entries like cu_seqlens_q, got {len(starts_k)}")
    lengths = [(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in zip(pairwise(starts_q), pairwise(starts_k), strict=True)]
    window = _check_window(window)
    scoring = _scoring(q, scale, softcap)
    slopes = _check_slopes(alibi_slopes, batch, heads_q, q.device)
    _check_sinks(sinks, heads_q, q.device)
    schedules: Sequence[BlockSchedule | None] | None = None
    if schedule is not None:
        schedules = [schedule] * batch if isinstance(schedule, BlockSchedule) else _check_schedule_list(schedule, batch)
        for b, ((nq, nk), one) in enumerate(zip(lengths, schedules, strict=True)):
            if one is not None:
                _check_schedule(f"schedule (sequence {b})", one, nq, nk, heads_q)
    checks.flag("causal", causal)
    checks.flag("return_lse", return_lse)
    _check_out(out, q)
    _check_backend(backend, q, (k, v, sinks, alibi_slopes))

    plan = plan_varlen(
        starts_q,
        starts_k,
        heads_q,
        heads_kv,
        head_dim,
        causal=causal,
        window=window,
        schedules=schedules,
        io_bytes=q.element_size(),
    )
    if slopes is not None:
        alibi = cpu.Alibi(slopes, starts_q[:-1], starts_k[:-1], [nk - nq for nq, nk in lengths])
        scoring = cpu.Scoring(scoring.scale, softcap, alibi)
    with _full_precision():
        o, lse = cpu.run(plan, q, [(k, v)], scoring, _place(out, q, k, v))
    return _result(o, lse.transpose(0, 1), sinks, out, return_lse)


def shared_prefix_attention(
    q: torch.Tensor,
    levels: Sequence[Level],
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    lengths: Sequence[int] | torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attention of sequences that share prefixes, each prefix read once for all of them.

    q: (B, Nq, Hq, D); k, v: (B, Nk, Hkv, D), each sequence's own keys; lengths: (B,), how many of them are valid, all
    if None. levels: from the root down, each (k, v) or (k, v, lengths) with k, v (B_level, N_level, Hkv, D). Each batch
    size divides the next and the last divides B; sequence b belongs to member `b // (B // B_level)` of a level.
    Prefixes are in full view of every query; `causal` lies over the own keys alone, bottom-right.

    Returns o (B, Nq, Hq, D), with return_lse also the LSE (B, Hq, Nq) float32.
    """
    batch, seqlen_q, _, heads_q, heads_kv, head_dim = _check_qkv(q, k, v)
    scoring = _scoring(q, scale, softcap)
    _check_sinks(sinks, heads_q, q.device)
    checks.flag("causal", causal)
    checks.flag("return_lse", return_lse)
    _check_out(out, q)
    sources, shapes = _check_levels(levels, q, heads_kv)
    sources.append((k, v))
    shapes.append((batch, k.shape[1], None if lengths is None else _check_lengths("lengths", lengths, *k.shape[:2])))
    _check_backend(backend, q, [x for source in sources for x in source] + [sinks])

    plan = plan_shared_prefix(
        batch, seqlen_q, shapes, heads_q, heads_kv, head_dim, causal=causal, io_bytes=q.element_size()
    )
    with _full_precision():
        o, lse = cpu.run(plan, q, sources, scoring, _place(out, q, *(x for source in sources for x in source)))
    return _result(o, lse.view(batch, seqlen_q, heads_q).transpose(1, 2), sinks, out, return_lse)


def plan_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    schedule: BlockSchedule | None = None,
) -> Plan:
    """The plan that `attention` makes for q (B, Nq, Hq, D), k (B, Nk, Hkv, D), to look at: `.show()`, `.draw(path)`."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = _check_qkv(q, k, k)
    window = _check_window(window)
    checks.flag("causal", causal)
    if schedule is not None:
        _check_schedule("schedule", schedule, seqlen_q, seqlen_k, heads_q)
    sizes = (batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim)
    return plan_dense(*sizes, causal=causal, window=window, schedule=schedule, io_bytes=q.element_size())


def plan_decode(
    cache: PagedKVCache | PrefixCache,
    seqs: Sequence[int],
    *,
    num_heads: int,
    tokens_per_seq: int = 1,
    share_prefix: Literal["auto"] | bool = "auto",
    window: Window | None = None,
    cost: CostModel | None = None,
) -> DecodePlan:
    """Plan one decode step of `seqs` for all layers.

    num_heads: query heads. tokens_per_seq: query tokens a sequence has, which are its last cached ones; each sees the
    tokens up to itself (of a sequence with fewer tokens the first rows see nothing). window: (left, right) as in
    `attention`. share_prefix: True puts the rows of all sequences under a node of the page tree over its tokens once,
    False never, "auto" where `cost` (a CostModel, the device's by default) says that it pays. The plan holds until one
    of its sequences changes.
    """
    pages = _check_cache(cache)
    checks.integer("num_heads", num_heads, 1)
    checks.integer("tokens_per_seq", tokens_per_seq, 1)
    if num_heads % pages.num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of the cache's {pages.num_kv_heads} KV heads, got {num_heads}")
    if not isinstance(share_prefix, bool) and not (isinstance(share_prefix, str) and share_prefix == "auto"):
        raise ValueError(f'share_prefix must be "auto", True or False, got {share_prefix!r}')
    if cost is not None and not isinstance(cost, CostModel):
        raise TypeError(f"cost must be a tilewise.CostModel, got {type(cost).__name__}")
    if not isinstance(seqs, (Sequence, torch.Tensor, np.ndarray)):
        raise TypeError(f"seqs must be a list of sequences, got {type(seqs).__name__}")
    members = [checks.integer("seqs", s) for s in seqs]
    return plan_tree(
        members,
        [pages.page_list(s) for s in members],
        [pages.length(s) for s in members],
        pages.page_size,
        heads_q=num_heads,
        heads_kv=pages.num_kv_heads,
        head_dim=pages.head_dim,
        kv_row_bytes=2 * pages.format.bytes_per_token_head,
        io_bytes=pages.format.dtype.itemsize if pages.format.dtype is not None else 2,
        # On the CPU every format runs at float32's pace, and a quantised one is turned into it first.
        stream_row_bytes=2 * 4 * pages.head_dim * (1 if pages.format.dtype is not None else DEQUANTISE),
        shortest_run=64,  # below it copying pages together costs less than another item
        cache_serial=pages.serial,
        tokens_per_seq=tokens_per_seq,
        window=_check_window(window),
        share=None if share_prefix == "auto" else bool(share_prefix),
        cost=cost or CPU_COST,
    )


def decode(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: DecodePlan,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attention of the plan's sequences over their cached keys in one layer.

    q: (num_seqs, tokens_per_seq, Hq, D) in the order of the plan's `seqs`, float32, float16 or bfloat16, whatever the
    cache's format; the queries' own tokens are already written. Other arguments as in `attention`.

    Returns o (num_seqs, tokens_per_seq, Hq, D), with return_lse also the LSE (num_seqs, Hq, tokens_per_seq) float32.
    """
    pages = _check_cache(cache)
    if not isinstance(plan, DecodePlan):
        raise TypeError(f"plan must come from tilewise.plan_decode, got {type(plan).__name__}")
    checks.integer("layer", layer, 0, pages.num_layers - 1)
    count, tokens = len(plan.seqs), plan.tokens_per_seq
    shape = (count, tokens, plan.heads_q, pages.head_dim)
    checks.tensor("q", q, shape=shape, dtypes=checks.FLOATS, unit_last_stride=True)
    if plan.cache_serial != pages.serial:
        raise ValueError("plan was made for another cache; call plan_decode with this one")
    for seq, length in zip(plan.seqs, plan.lengths, strict=True):
        if pages.length(seq) != length:
            raise ValueError(
                f"plan is out of date: sequence {seq} had {length} tokens and now has {pages.length(seq)}; "
                "call plan_decode again after extending"
            )
    scoring = _scoring(q, scale, softcap)
    _check_sinks(sinks, plan.heads_q, q.device)
    checks.flag("return_lse", return_lse)
    _check_out(out, q)
    _check_backend(backend, q, (sinks,))

    order = torch.from_numpy(plan.order).long()  # plan's rows -> the caller's
    with _full_precision():
        o, lse = cpu.run_paged(plan, q.index_select(0, order).flatten(0, 1), pages, layer, scoring)
    o, lse = o.view(q.shape), lse.view(count, tokens, plan.heads_q)
    o = torch.empty_like(o).index_copy_(0, order, o)
    lse = torch.empty_like(lse).index_copy_(0, order, lse)
    return _result(o, lse.transpose(1, 2), sinks, out, return_lse)


def _check_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool = False
) -> tuple[int, int, int, int, int, int]:
    """(batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim) of checked tensors."""
    lead: tuple[str, ...] = ("total",) if packed else ("batch", "seqlen")
    checks.tensor("q", q, shape=(*lead, "heads", "head_dim"), dtypes=checks.FLOATS, unit_last_stride=True)
    batch = () if packed else (q.shape[0],)
    seqlen_q, heads_q, head_dim = q.shape[-3:]
    shape = (*batch, lead[-1], "heads", head_dim)
    checks.tensor("k", k, shape=shape, dtypes=(q.dtype,), device=q.device, unit_last_stride=True)
    checks.tensor("v", v, shape=tuple(k.shape), dtypes=(q.dtype,), device=q.device, unit_last_stride=True)
    seqlen_k, heads_kv = k.shape[-3:-1]
    checks.integer("head_dim of q", head_dim, 1, MAX_HEAD_DIM)
    checks.integer("heads of k", heads_kv, 1)
    if heads_q == 0 or heads_q % heads_kv:
        raise ValueError(f"q must have a multiple of k's {heads_kv} heads, got {heads_q}")
    return 1 if packed else q.shape[0], seqlen_q, seqlen_k, heads_q, heads_kv, head_dim


def _check_window(window: Any) -> Window | None:
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be (left, right) or None, got {window!r}")
    left, right = (None if w is None else checks.integer("window", w, 0) for w in window)
    return left, right


def _scoring(q: torch.Tensor, scale: float | None, softcap: float) -> cpu.Scoring:
    scale = q.shape[-1] ** -0.5 if scale is None else checks.number("scale", scale)
    return cpu.Scoring(scale, checks.number("softcap", softcap, 0.0))


def _check_sinks(sinks: torch.Tensor | None, heads_q: int, device: torch.device) -> None:
    if sinks is not None:
        checks.tensor("sinks", sinks, shape=(heads_q,), dtypes=checks.FLOATS, device=device)


def _check_slopes(slopes: torch.Tensor | None, batch: int, heads_q: int, device: torch.device) -> torch.Tensor | None:
    """ALiBi slopes as float32 (batch, heads)."""
    if slopes is None:
        return None
    checks.tensor("alibi_slopes", slopes, dtypes=checks.FLOATS, device=device)
    if tuple(slopes.shape) not in ((heads_q,), (batch, heads_q)):
        raise ValueError(f"alibi_slopes must be ({heads_q},) or ({batch}, {heads_q}), got {tuple(slopes.shape)}")
    return slopes.float().expand(batch, heads_q)


def _check_schedule(name: str, schedule: Any, seqlen_q: int, seqlen_k: int, heads_q: int) -> None:
    if not isinstance(schedule, BlockSchedule):
        raise TypeError(f"{name} must be a tilewise.BlockSchedule, got {type(schedule).__name__}")
    try:
        schedule.check(seqlen_q, seqlen_k, heads_q)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_schedule_list(schedules: Any, batch: int) -> Sequence[BlockSchedule | None]:
    if not isinstance(schedules, (list, tuple)):
        raise TypeError(f"schedule must be a BlockSchedule or a list of them, got {type(schedules).__name__}")
    if len(schedules) != batch:
        raise ValueError(f"schedule must have one entry for each of the {batch} sequences, got {len(schedules)}")
    return schedules


def _check_starts(name: str, starts: torch.Tensor, total: int, packed: str) -> list[int]:
    checks.tensor(name, starts, shape=("batch + 1",), dtypes=checks.INTEGERS)
    values: list[int] = starts.tolist()
    if not values or values[0] != 0:
        raise ValueError(f"{name} must start with 0, got {values[:1]}")
    if any(b < a for a, b in pairwise(values)):
        raise ValueError(f"{name} must not decrease, got {values if len(values) < 20 else [*values[:20], '…']}")
    if values[-1] != total:
        raise ValueError(f"{name} must end with {packed}'s total of {total} rows, got {values[-1]}")
    return values


def _check_lengths(name: str, lengths: Any, count: int, padded: int) -> list[int]:
    if isinstance(lengths, torch.Tensor):
        checks.tensor(name, lengths, shape=(count,), dtypes=checks.INTEGERS)
        lengths = lengths.tolist()
    elif not isinstance(lengths, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be a list of ints or an int tensor, got {type(lengths).__name__}")
    if len(lengths) != count:
        raise ValueError(f"{name} must have {count} entries, got {len(lengths)}")
    return [checks.integer(name, n, 0, padded) for n in lengths]


def _check_levels(levels: Any, q: torch.Tensor, heads_kv: int) -> tuple[list[cpu.KV], list[LevelShape]]:
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
        checks.tensor(f"levels[{n}][0]", k, shape=shape, dtypes=(q.dtype,), device=q.device, unit_last_stride=True)
        same = tuple(k.shape)
        checks.tensor(f"levels[{n}][1]", v, shape=same, dtypes=(q.dtype,), device=q.device, unit_last_stride=True)
        valid = _check_lengths(f"levels[{n}][2]", level[2], *same[:2]) if len(level) == 3 else None
        sources.append((k, v))
        shapes.append((same[0], same[1], valid))
    sizes = [shape[0] for shape in shapes] + [q.shape[0]]
    for n, (members, below) in enumerate(pairwise(sizes)):
        if members == 0 or below % members:
            raise ValueError(f"levels[{n}][0] must have a batch size that divides the next one, {below}, got {members}")
    return sources, shapes


def _check_cache(cache: Any) -> PagedKVCache:
    if isinstance(cache, PrefixCache):
        return cache.cache
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache must be a PagedKVCache or a PrefixCache, got {type(cache).__name__}")
    return cache


def _check_out(out: torch.Tensor | None, q: torch.Tensor) -> None:
    if out is None:
        return
    checks.tensor("out", out, shape=tuple(q.shape), dtypes=(q.dtype,), device=q.device, unit_last_stride=True)
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise ValueError(f"out must have a place for every element, got strides {out.stride()}; use torch.empty")
    if out.requires_grad or (out.is_inference() and not torch.is_inference_mode_enabled()):
        raise ValueError("out must be writable here, got one that requires gradients or was made in inference mode")


def _check_backend(
    backend: str, q: torch.Tensor, others: Sequence[torch.Tensor | None], emulated: bool = False
) -> None:
    """Refuse what no kernel serves, before anything runs."""
    if backend == "cuda":
        raise NotImplementedError('backend "cuda" is not built yet; use backend="auto" with CPU tensors')
    if isinstance(backend, str) and backend.partition(":")[0] == EMULATOR:
        if not emulated:
            raise NotImplementedError(f'backend "{backend}" runs attention() only; use backend="auto" here')
    else:
        checks.choice("backend", backend, BACKENDS)
    if q.device.type != "cpu":
        raise NotImplementedError(
            f"q is on {q.device}: Tilewise has no kernels for {q.device.type} tensors yet; "
            "use .cpu() tensors, or torch.nn.functional.scaled_dot_product_attention on this device"
        )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, *others)):
        raise NotImplementedError(
            "an input requires gradients, and Tilewise has no backward pass yet; call it under torch.no_grad(), or use "
            "torch.nn.functional.scaled_dot_product_attention for training"
        )


def _emulate(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, extras: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel of the ladder in the emulator: the one named, or the highest rung that serves the problem."""
    from . import ladder  # brings the emulator and the compiler along, which nobody else here needs

    asked = [name for name, value in extras.items() if value is not None]
    if asked or scale <= 0:
        what = ", ".join(asked) or "a scale that is not positive"
        raise NotImplementedError(f'backend "{backend}" has no kernel with {what} yet; use backend="cpu"')
    _, _, name = backend.partition(":")
    names = [rung.name for rung in ladder.RUNGS]
    if name and name not in names:
        raise ValueError(f"backend must name a rung after the colon, one of {', '.join(names)}, got {name!r}")
    rungs = [rung for rung in reversed(ladder.RUNGS) if rung.name == name or (not name and rung.exact)]
    for rung in sorted(rungs, key=lambda rung: not rung.hopper):  # Hopper's first
        if (q.dtype in rung.dtypes and q.shape[-1] in rung.head_dims) or name:
            o, lse, _ = ladder.run(rung, q, k, v, causal=causal, scale=scale)
            return o, lse
    raise NotImplementedError(
        f'no kernel in the emulator serves {q.dtype} with head_dim {q.shape[-1]}; use backend="cpu"'
    )


def _full_precision() -> AbstractContextManager[Any]:
    """Autocast switched off: it would turn our float32 products into bfloat16 ones."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def _place(out: torch.Tensor | None, *inputs: torch.Tensor) -> torch.Tensor | None:
    """Where states may be built: `out`, unless it may overlap an input that is still to be read."""
    if out is None:
        return None
    shared = any(x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() for x in inputs)
    return None if shared else out


def _result(
    o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor | None, return_lse: bool
) -> Result:
    """What the caller gets: sinks joined, `out` filled, the LSE contiguous."""
    if sinks is not None:
        o, lse = add_sinks(o, lse, sinks)
    if out is not None and out is not o:
        out.copy_(o)
        o = out
    return (o, lse.contiguous()) if return_lse else o
