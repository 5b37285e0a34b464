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
from typing import Any, Final, Literal

import numpy as np
import torch

from . import checks, cpu, decoding, gpu
from .kvcache import PagedKVCache, PrefixCache
from .plan import DecodePlan, Ints, Plan, Window, plan_dense, plan_shared_prefix, plan_varlen
from .sparse import BlockSchedule
from .state import add_sinks
from .tree import CPU_COST, CostModel, plan_tree

MAX_HEAD_DIM = 512
BACKENDS = ("auto", "cpu", "cuda", "emulator")
EMULATOR: Final = "emulator"  # also "emulator:NAME" for one kernel
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
    exact: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attention over a batch of equally long sequences: softmax(q kᵀ · scale) v.

    q: (B, Nq, Hq, D) float32, float16, bfloat16 or float8_e4m3fn; k, v: (B, Nk, Hkv, D) of the same dtype; Hq a
    multiple of Hkv.
    causal: query i sees keys up to i + Nk − Nq. window: (left, right) keys seen to either side, None for no limit.
    scale: of the scores, `D ** -0.5` if None. softcap c > 0: scores become c · tanh(scores / c).
    sinks: (Hq,), a logit that joins the softmax denominator only; it counts in the LSE.
    alibi_slopes: (Hq,) or (B, Hq), adds −slope · |i + Nk − Nq − j| after soft-capping.
    schedule: a BlockSchedule; keys outside its blocks are not seen. out: (B, Nq, Hq, D), written and returned.
    exact: the standard softmax where a GPU kernel would use the lazy one, whose weights may be 2^8 times larger before
    they are divided by their sum; both hold to the same tolerance.
    q_descale, k_descale, v_descale: of FP8 inputs, (Hkv,) or (B, Hkv) float32: what the stored values stand for is
    values · descale, for q by the KV head that it reads. None is 1. The output is bfloat16, and on a GPU the weights of
    the softmax are rounded to FP8.
    backend: "auto" (a GPU kernel for CUDA tensors, the CPU backend for CPU tensors), "cuda", "cpu", or "emulator": the
    GPU kernel's source run on CPU tensors, slow; "emulator:NAME" for a rung of the ladder by name.

    CUDA tensors: bfloat16, float16 or FP8, head_dim up to 256, compute capability 9.0, no schedule. The call goes on
    the current stream and does not wait; once made, it can be captured in a CUDA graph.

    Returns o (B, Nq, Hq, D), with return_lse also the LSE (B, Hq, Nq) float32. A NaN or infinity in a key that a window
    (on a GPU also `causal`) hides may still reach the rows of its tile, as in other fused kernels.
    """
    key = None
    if schedule is None and isinstance(q, torch.Tensor) and q.is_cuda:
        flags = (causal, exact, return_lse, window, scale, softcap, backend)
        given = (q_descale, k_descale, v_descale)
        key, known = gpu.known_call(q, k, v, (sinks, alibi_slopes, out, *given), flags)
        if known is not None:
            return known.again(q, k, v) if known.plain else known(q, k, v, sinks, alibi_slopes, out, given)
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = _check_qkv(q, k, v, fp8=True)
    descales = _check_descales(q, (q_descale, k_descale, v_descale), batch, heads_kv)
    window = _check_window(window)
    scoring = _scoring(q, scale, softcap)
    slopes = _check_slopes(alibi_slopes, batch, heads_q, q.device)
    _check_sinks(sinks, heads_q, q.device)
    if schedule is not None:
        _check_schedule("schedule", schedule, seqlen_q, seqlen_k, heads_q)
    checks.flag("causal", causal)
    checks.flag("exact", exact)
    checks.flag("return_lse", return_lse)
    _check_out(out, q)
    where = _check_backend(backend, q, (k, v, sinks, alibi_slopes), kernels=True)
    if where != "cpu":
        options = gpu.kernel_options(causal, window, scoring, slopes, exact)
        if where == EMULATOR and (name := gpu.rung(backend, q.dtype)):
            asked = {"window": window, "softcap": softcap or None, "alibi_slopes": slopes, "schedule": schedule}
            o, lse = gpu.run_rung(name, q, k, v, causal, scoring.scale, asked)
            return _result(o, lse, sinks, out, return_lse)
        gpu.check_served(q, schedule, where)
        call = gpu.GpuCall(options, return_lse)
        if key is not None:
            gpu.calls()[key] = call
        return call(q, k, v, sinks, alibi_slopes, out, descales)
    fp8 = q.dtype == gpu.FP8
    if fp8:
        q, k, v = (_widened(x, descale, heads_kv) for x, descale in zip((q, k, v), descales, strict=True))

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
        o, lse = cpu.run(plan, q, [(k, v)], scoring, None if fp8 else checks.place(out, q, k, v))
    return _result(
        o.bfloat16() if fp8 else o, lse.view(batch, seqlen_q, heads_q).transpose(1, 2), sinks, out, return_lse
    )


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
    page_table: torch.Tensor | None = None,
    exact: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attention over sequences of different lengths, packed end to end; empty ones are allowed.

    q: (total_q, Hq, D); k, v: (total_k, Hkv, D). cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 or int64, where each
    sequence starts, beginning with 0 and ending with the total. schedule: one BlockSchedule that fits every sequence,
    or one (or None) for each. Everything else as in `attention`; alibi_slopes (Hq,) or (B, Hq).

    page_table: (B, pages a sequence) int32; then k, v are (pages, page_size, Hkv, D), and token t of sequence b is row
    t % page_size of page `page_table[b, t // page_size]`; cu_seqlens_k tells the lengths alone, and entries beyond them
    may be anything. With queries that are a sequence's last tokens and causal=True this is chunked prefill.

    On a GPU cu_seqlens may be there or on the CPU. There, their values are not looked at, which would make the CPU
    wait; whatever they say, nothing outside of the tensors is touched.

    Returns o (total_q, Hq, D), with return_lse also the LSE (Hq, total_q) float32.
    """
    paged = page_table is not None
    sizes = _check_qkv(q, k, v, packed=True, paged=paged, fp8=True)
    _, total_q, total_k, heads_q, heads_kv, head_dim = sizes
    checks.tensor("cu_seqlens_q", cu_seqlens_q, shape=("batch + 1",), dtypes=checks.INTEGERS)
    batch = cu_seqlens_q.shape[0] - 1
    if batch < 0:
        raise ValueError("cu_seqlens_q must start with 0, got no entries")
    checks.tensor("cu_seqlens_k", cu_seqlens_k, shape=(cu_seqlens_q.shape[0],), dtypes=checks.INTEGERS)
    window = _check_window(window)
    scoring = _scoring(q, scale, softcap)
    slopes = _check_slopes(alibi_slopes, batch, heads_q, q.device)
    _check_sinks(sinks, heads_q, q.device)
    descales = _check_descales(q, (q_descale, k_descale, v_descale), batch, heads_kv)
    checks.flag("causal", causal)
    checks.flag("exact", exact)
    checks.flag("return_lse", return_lse)
    _check_out(out, q)
    if page_table is not None:
        _check_page_table(page_table, k, batch)
    where = _check_backend(backend, q, (k, v, sinks, alibi_slopes), kernels=True)
    if where == EMULATOR and ":" in backend:
        raise NotImplementedError(f'backend "{backend}" runs attention() only; use backend="emulator" here')
    # Values on a GPU stay unread: looking at them would make the CPU wait.
    starts_q = _check_starts("cu_seqlens_q", cu_seqlens_q, total_q, "q") if cu_seqlens_q.device.type == "cpu" else []
    ends_with = None if paged else total_k
    starts_k = _check_starts("cu_seqlens_k", cu_seqlens_k, ends_with, "k") if cu_seqlens_k.device.type == "cpu" else []
    if page_table is not None and starts_k:
        _check_pages(page_table, k, starts_k)
    if where != "cpu":
        gpu.check_served(q, schedule, where)
        options = gpu.kernel_options(causal, window, scoring, slopes, exact)
        starts = tuple(x.to(q.device, cu_seqlens_q.dtype).contiguous() for x in (cu_seqlens_q, cu_seqlens_k))
        call = gpu.GpuCall(options, return_lse)
        return call(q, k, v, sinks, alibi_slopes, out, descales, (starts[0], starts[1]), page_table)
    if page_table is not None:
        k, v = (_gather(x, page_table, starts_k) for x in (k, v))
    fp8 = q.dtype == gpu.FP8
    if fp8:
        counts = [torch.tensor(starts).diff() for starts in (starts_q, starts_k, starts_k)]
        q, k, v = (
            _widened(x, None if descale is None else descale.repeat_interleave(count, 0), heads_kv)
            for x, descale, count in zip((q, k, v), descales, counts, strict=True)
        )
    lengths = [(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in zip(pairwise(starts_q), pairwise(starts_k), strict=True)]
    schedules: Sequence[BlockSchedule | None] | None = None
    if schedule is not None:
        schedules = [schedule] * batch if isinstance(schedule, BlockSchedule) else _check_schedule_list(schedule, batch)
        for b, ((nq, nk), one) in enumerate(zip(lengths, schedules, strict=True)):
            if one is not None:
                _check_schedule(f"schedule (sequence {b})", one, nq, nk, heads_q)

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
        o, lse = cpu.run(plan, q, [(k, v)], scoring, None if fp8 else checks.place(out, q, k, v))
    return _result(o.bfloat16() if fp8 else o, lse.transpose(0, 1), sinks, out, return_lse)


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
    where = _check_backend(backend, q, [x for source in sources for x in source] + [sinks], kernels=True)
    if where != "cpu":
        if ":" in backend:
            raise NotImplementedError(f'backend "{backend}" runs attention() only; use backend="emulator" here')
        gpu.check_served(q, None, where)
        o, lse = gpu.shared_prefix(q, sources, [shape[2] for shape in shapes], causal, scoring)
        return _result(o, lse, sinks, out, return_lse)

    plan = plan_shared_prefix(
        batch, seqlen_q, shapes, heads_q, heads_kv, head_dim, causal=causal, io_bytes=q.element_size()
    )
    with _full_precision():
        o, lse = cpu.run(plan, q, sources, scoring, checks.place(out, q, *(x for source in sources for x in source)))
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
    room: int = 0,
) -> DecodePlan:
    """Plan one decode step of `seqs` for all layers.

    num_heads: query heads. tokens_per_seq: query tokens a sequence has, which are its last cached ones; each sees the
    tokens up to itself (of a sequence with fewer tokens the first rows see nothing). window: (left, right) as in
    `attention`. share_prefix: True puts the rows of all sequences under a node of the page tree over its tokens once,
    False never, "auto" where `cost` (a CostModel, the device's by default) says that it pays. The plan holds until one
    of its sequences changes. room: on a GPU, tokens that each sequence may grow by under `grow_plan`.
    """
    pages = _check_cache(cache)
    checks.integer("num_heads", num_heads, 1)
    checks.integer("tokens_per_seq", tokens_per_seq, 1)
    checks.integer("room", room, 0)
    if num_heads % pages.num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of the cache's {pages.num_kv_heads} KV heads, got {num_heads}")
    if not isinstance(share_prefix, bool) and not (isinstance(share_prefix, str) and share_prefix == "auto"):
        raise ValueError(f'share_prefix must be "auto", True or False, got {share_prefix!r}')
    if cost is not None and not isinstance(cost, CostModel):
        raise TypeError(f"cost must be a tilewise.CostModel, got {type(cost).__name__}")
    if not isinstance(seqs, (Sequence, torch.Tensor, np.ndarray)):
        raise TypeError(f"seqs must be a list of sequences, got {type(seqs).__name__}")
    members = [checks.integer("seqs", s) for s in seqs]
    on_card = pages.device.type == "cuda"
    row_bytes = 2 * pages.format.bytes_per_token_head
    if not on_card:  # there every format runs at float32's pace, and a quantised one is turned into it first
        row_bytes = 2 * 4 * pages.head_dim * (1 if pages.format.dtype is not None else DEQUANTISE)
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
        stream_row_bytes=row_bytes,
        shortest_run=0 if on_card else 64,  # on a CPU, below it copying pages together costs less than another item
        cache_serial=pages.serial,
        tokens_per_seq=tokens_per_seq,
        window=_check_window(window),
        share=None if share_prefix == "auto" else bool(share_prefix),
        cost=cost or (decoding.GPU_COST if on_card else CPU_COST),
        room=room,
    )


def grow_plan(plan: DecodePlan, cache: PagedKVCache | PrefixCache) -> DecodePlan:
    """The plan for the same sequences after they were extended, all else being as it was.

    On a GPU it is the same plan: the list of work stays, and the lengths and new pages go to the card in one copy on
    the current stream, without a wait. So a captured `decode` replays over sequences that grow:

        plan = plan_decode(cache, seqs, num_heads=32, room=512)
        decode(q, cache, 0, plan, out=out)            # once, before the capture: it compiles
        with torch.cuda.graph(graph):
            decode(q, cache, 0, plan, out=out)
        ...                                           # each step: extend, write, then
        plan = grow_plan(plan, cache); graph.replay()

    What sequences had of their own when the plan was made stays theirs alone. Beyond `room` it raises ValueError, and a
    new plan is due. On a CPU, where a plan costs little, it is a new one.
    """
    pages = _check_cache(cache)
    _check_plan(plan, pages)
    lengths = pages.lengths_of(list(plan.seqs))
    if pages.device.type != "cuda":
        return plan_decode(
            cache,
            plan.seqs,
            num_heads=plan.heads_q,
            tokens_per_seq=plan.tokens_per_seq,
            share_prefix=plan.shared_nodes > 0,
            window=plan.window,
            room=plan.room,
        )
    decoding.grow(plan, lengths, _PageLists(pages, plan.seqs))
    return plan


def decode(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: DecodePlan,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attention of the plan's sequences over their cached keys in one layer.

    q: (num_seqs, tokens_per_seq, Hq, D) in the order of the plan's `seqs`, float32, float16 or bfloat16, whatever the
    cache's format; the queries' own tokens are already written. Other arguments as in `attention`.
    tree_mask: bool (T, T) or (num_seqs, T, T), T = tokens_per_seq: query t sees the sequence's query token j where it
    is True, in place of causality, for trees of speculated tokens. All see the first one, the tree's root.

    Returns o (num_seqs, tokens_per_seq, Hq, D), with return_lse also the LSE (num_seqs, Hq, tokens_per_seq) float32.
    """
    pages = _check_cache(cache)
    _check_plan(plan, pages)
    checks.integer("layer", layer, 0, pages.num_layers - 1)
    count, tokens = len(plan.seqs), plan.tokens_per_seq
    shape = (count, tokens, plan.heads_q, pages.head_dim)
    checks.tensor("q", q, shape=shape, dtypes=checks.FLOATS, unit_last_stride=True)
    if q.device != pages.device:
        raise ValueError(f"q must be on {pages.device} like the cache, got {q.device}")
    changed = np.flatnonzero(pages.lengths_of(list(plan.seqs)) != plan.lengths)
    if len(changed):
        seq, length = plan.seqs[changed[0]], plan.lengths[changed[0]]
        raise ValueError(
            f"plan is out of date: sequence {seq} had {length} tokens and now has {pages.length(seq)}; "
            "call plan_decode again after extending, or grow_plan"
        )
    scoring = _scoring(q, scale, softcap)
    _check_sinks(sinks, plan.heads_q, q.device)
    checks.flag("return_lse", return_lse)
    _check_out(out, q)
    tree = _check_tree_mask(tree_mask, plan, q.device)
    where = _check_backend(backend, q, (sinks,), kernels=True)
    if where != "cpu":
        if ":" in backend:
            raise NotImplementedError(f'backend "{backend}" runs attention() only; use backend="emulator" here')
        o = out if out is not None and checks.place(out, q) is not None else q.new_empty(q.shape)
        states = q.new_empty((count, plan.heads_q, tokens), dtype=torch.float32) if return_lse else None
        decoding.run(
            plan,
            q,
            pages.format,
            *pages.parts(layer),
            _PageLists(pages, plan.seqs),
            plan.lengths,
            o,
            states,
            scale=scoring.scale,
            softcap=softcap,
            sinks=sinks,
            tree=tree,
            window=plan.window,
            room=plan.room,
        )
        if out is not None and out is not o:
            o = out.copy_(o)
        return o if states is None else (o, states)

    if tree is not None:
        with _full_precision():
            o, lse = cpu.run_tree(q, pages, layer, plan.seqs, scoring, tree)
        return _result(o, lse, sinks, out, return_lse)
    order = torch.from_numpy(plan.order).long()  # plan's rows -> the caller's
    with _full_precision():
        o, lse = cpu.run_paged(plan, q.index_select(0, order).flatten(0, 1), pages, layer, scoring)
    o, lse = o.view(q.shape), lse.view(count, tokens, plan.heads_q)
    o = torch.empty_like(o).index_copy_(0, order, o)
    lse = torch.empty_like(lse).index_copy_(0, order, lse)
    return _result(o, lse.transpose(1, 2), sinks, out, return_lse)


def _check_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool = False, paged: bool = False, fp8: bool = False
) -> tuple[int, int, int, int, int, int]:
    """(batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim) of checked tensors; paged: of k and v in pages."""
    lead: tuple[str, ...] = ("total",) if packed else ("batch", "seqlen")
    dtypes = (*checks.FLOATS, gpu.FP8) if fp8 else checks.FLOATS
    checks.tensor("q", q, shape=(*lead, "heads", "head_dim"), dtypes=dtypes, unit_last_stride=True)
    batch = () if packed else (q.shape[0],)
    seqlen_q, heads_q, head_dim = q.shape[-3:]
    shape = ("pages", "page_size", "heads", head_dim) if paged else (*batch, lead[-1], "heads", head_dim)
    checks.tensor("k", k, shape=shape, dtypes=(q.dtype,), device=q.device, unit_last_stride=True)
    checks.tensor("v", v, shape=tuple(k.shape), dtypes=(q.dtype,), device=q.device, unit_last_stride=True)
    seqlen_k, heads_kv = k.shape[-3:-1]
    checks.integer("head_dim of q", head_dim, 1, MAX_HEAD_DIM)
    checks.integer("heads of k", heads_kv, 1)
    if heads_q == 0 or heads_q % heads_kv:
        raise ValueError(f"q must have a multiple of k's {heads_kv} heads, got {heads_q}")
    return 1 if packed else q.shape[0], seqlen_q, seqlen_k, heads_q, heads_kv, head_dim


def _check_descales(
    q: torch.Tensor, descales: Sequence[torch.Tensor | None], batch: int, heads_kv: int
) -> tuple[torch.Tensor | None, ...]:
    """What FP8 inputs are to be multiplied with, as float32 (batch, heads_kv) with the last stride 1."""
    checked: list[torch.Tensor | None] = []
    for name, descale in zip("qkv", descales, strict=True):
        if descale is not None:
            name = f"{name}_descale"
            if q.dtype != gpu.FP8:
                raise ValueError(f"{name} goes with float8_e4m3fn inputs, got {q.dtype}; multiply those yourself")
            checks.tensor(name, descale, dtypes=(torch.float32,), device=q.device)
            if tuple(descale.shape) not in ((heads_kv,), (batch, heads_kv)):
                raise ValueError(f"{name} must be ({heads_kv},) or ({batch}, {heads_kv}), got {tuple(descale.shape)}")
            descale = descale.contiguous().expand(batch, heads_kv)
        checked.append(descale)
    return tuple(checked)


def _widened(x: torch.Tensor, descale: torch.Tensor | None, heads_kv: int) -> torch.Tensor:
    """FP8 (B, N, H, D) or (total, H, D) as float32, times descale (B or total, heads_kv) by KV head."""
    wide = x.float()
    if descale is not None:
        by_head = descale.repeat_interleave(x.shape[-2] // heads_kv, -1)
        wide *= by_head[:, None, :, None] if x.dim() == 4 else by_head[..., None]
    return wide


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


def _check_starts(name: str, starts: torch.Tensor, total: int | None, packed: str) -> list[int]:
    values: list[int] = starts.tolist()
    if not values or values[0] != 0:
        raise ValueError(f"{name} must start with 0, got {values[:1]}")
    if any(b < a for a, b in pairwise(values)):
        raise ValueError(f"{name} must not decrease, got {values if len(values) < 20 else [*values[:20], '…']}")
    if total is not None and values[-1] != total:
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


def _check_plan(plan: Any, pages: PagedKVCache) -> None:
    if not isinstance(plan, DecodePlan):
        raise TypeError(f"plan must come from tilewise.plan_decode, got {type(plan).__name__}")
    if plan.cache_serial != pages.serial:
        raise ValueError("plan was made for another cache; call plan_decode with this one")


def _check_tree_mask(mask: Any, plan: DecodePlan, device: torch.device) -> torch.Tensor | None:
    """As (num_seqs, T, T)."""
    if mask is None:
        return None
    tokens, count = plan.tokens_per_seq, len(plan.seqs)
    given = checks.tensor("tree_mask", mask, dtypes=(torch.bool,), device=device)
    if tuple(given.shape) not in ((tokens, tokens), (count, tokens, tokens)):
        shapes = f"({tokens}, {tokens}) or ({count}, {tokens}, {tokens})"
        raise ValueError(f"tree_mask must be {shapes}, got {tuple(given.shape)}")
    if plan.window is not None:
        raise ValueError(
            "tree_mask goes with a plan without a window: which token is how far away, a tree does not say"
        )
    return given.expand(count, tokens, tokens)


class _PageLists:
    """The page lists of sequences, looked up one by one where one is wanted: most steps want none."""

    def __init__(self, pages: PagedKVCache, seqs: Sequence[int]) -> None:
        self._pages, self._seqs = pages, seqs

    def __getitem__(self, n: int) -> Ints:
        return self._pages.page_list(self._seqs[n])


def _check_out(out: torch.Tensor | None, q: torch.Tensor) -> None:
    if out is None:
        return
    dtype = gpu.out_dtype(q.dtype)
    checks.tensor("out", out, shape=tuple(q.shape), dtypes=(dtype,), device=q.device, unit_last_stride=True)
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise ValueError(f"out must have a place for every element, got strides {out.stride()}; use torch.empty")
    if out.requires_grad or (out.is_inference() and not torch.is_inference_mode_enabled()):
        raise ValueError("out must be writable here, got one that requires gradients or was made in inference mode")


def _check_page_table(page_table: torch.Tensor, k: torch.Tensor, batch: int) -> None:
    shape = (batch, "pages a sequence")
    checks.tensor("page_table", page_table, shape=shape, dtypes=(torch.int32,), device=k.device, unit_last_stride=True)
    checks.integer("page_size of k", k.shape[1], 1)


def _check_pages(page_table: torch.Tensor, k: torch.Tensor, starts: Sequence[int]) -> None:
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


def _gather(x: torch.Tensor, page_table: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """The sequences' tokens packed end to end, out of pages (pages, page_size, Hkv, D)."""
    parts = [x.new_empty((0, *x.shape[2:]))]
    for b, (start, end) in enumerate(pairwise(starts)):
        used = page_table[b, : -(-(end - start) // x.shape[1])].long()
        parts.append(x[used].flatten(0, 1)[: end - start])
    return torch.cat(parts)


def _check_backend(
    backend: str, q: torch.Tensor, others: Sequence[torch.Tensor | None], kernels: bool = False
) -> Literal["cpu", "cuda", "emulator"]:
    """Where the call runs, refusing what nothing there serves; kernels: this call has GPU kernels."""
    emulated = isinstance(backend, str) and backend.partition(":")[0] == EMULATOR
    if not emulated:
        checks.choice("backend", backend, BACKENDS)
    if not kernels and (emulated or backend == "cuda"):
        raise NotImplementedError(f'backend "{backend}" runs attention() and attention_varlen() only; use "auto" here')
    cuda = q.device.type == "cuda"
    if q.device.type not in ("cpu", "cuda") or (cuda and not kernels):
        raise NotImplementedError(
            f"q is on {q.device}: Tilewise has no kernels for this call on {q.device.type} tensors yet; "
            "use .cpu() tensors"
        )
    if cuda != (backend == "cuda") and backend != "auto":
        taken = "CUDA tensors" if backend == "cuda" else "CPU tensors"
        raise ValueError(f'backend "{backend}" takes {taken}, got q on {q.device}; backend="auto" takes both')
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, *others)):
        raise NotImplementedError(
            "an input requires gradients, and Tilewise has no backward pass yet; call it under torch.no_grad(), or use "
            "torch.nn.functional.scaled_dot_product_attention for training"
        )
    return EMULATOR if emulated else "cuda" if cuda else "cpu"


def _full_precision() -> AbstractContextManager[Any]:
    """Autocast switched off: it would turn our float32 products into bfloat16 ones."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


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
