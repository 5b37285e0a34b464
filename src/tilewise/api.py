"""The public calls: validate -> plan -> run. Read this first.

Layout is `(batch, seqlen, heads, head_dim)` with any strides whose last is 1, or `(total, heads, head_dim)` packed. The
LSE is the natural log of the softmax denominator, float32, `(batch, heads, seqlen_q)` or `(heads, total_q)`. A row
with no visible key gives output 0 and LSE −inf. `causal` and `window` align bottom-right: the last query sees the
last key. Query head h reads KV head `h // (heads_q // heads_kv)`. Softmax and accumulation are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch

from tilewise import arguments, checks, cpu, traced
from tilewise.cpu.scoring import Scoring
from tilewise.gpu import calls, named
from tilewise.gpu import decode as decoding
from tilewise.gpu.abi import FP8
from tilewise.plan.cost import CPU_COST, GPU_COST, CostModel
from tilewise.plan.schedule import BlockSchedule
from tilewise.plan.tree import plan_tree
from tilewise.scores import DecodeOptions, ScoreOptions

from .kvcache import PagedKVCache, PrefixCache
from .plan import DecodePlan, Plan, Window, plan_dense, plan_shared_prefix, plan_varlen
from .state import add_sinks

DEQUANTISE = 4  # reading a quantised token on the CPU, in readings of a float32 one

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
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
    descales = (q_descale, k_descale, v_descale)
    if schedule is None and isinstance(q, torch.Tensor) and q.is_cuda and not torch.compiler.is_compiling():
        flags = (causal, exact, return_lse, window, scale, softcap, backend)
        key, known = calls.known_call(q, k, v, (sinks, alibi_slopes, out, *descales), flags)
        if known is not None:
            return known.again(q, k, v) if known.plain else known(q, k, v, sinks, alibi_slopes, out, descales)
    else:
        key = None
    options: ScoreOptions = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "sinks": sinks,
        "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    rest: dict[str, Any] = {"exact": exact, "return_lse": return_lse, "out": out, "backend": backend}
    if torch.compiler.is_compiling():
        return traced.attention(q, k, v, descales, schedule=schedule, **options, **rest)
    call = arguments.check_call(q, k, v, options, descales=descales, **rest)
    if schedule is not None:
        arguments.check_schedule("schedule", schedule, *call.sizes[1:4])
    if call.where == arguments.EMULATOR and (kernel := named.find(backend, q.dtype)):
        o, lse = named.run(kernel, q, k, v, options, call.scores.scale, schedule)
        return _result(o, lse, sinks, out, return_lse)
    if call.where != "cpu":
        calls.check_served(q, schedule, call.where)
        bound = calls.GpuCall(call.scores.rule, return_lse)
        if key is not None:
            calls.calls()[key] = bound
        return bound(q, k, v, sinks, alibi_slopes, out, call.descales)
    o, lse = _dense_on_cpu(q, k, v, call, schedule, out)
    return _result(o, lse, sinks, out, return_lse)


def _dense_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: arguments.Call,
    schedule: BlockSchedule | None,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` on the CPU: o like q (bfloat16 for FP8), lse (B, Hq, Nq)."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, _ = call.sizes
    fp8 = q.dtype == FP8
    if fp8:
        q, k, v = (arguments.widened(x, by, heads_kv) for x, by in zip((q, k, v), call.descales, strict=True))
    plan = plan_dense(*call.sizes, window=call.scores.window, schedule=schedule, io_bytes=q.element_size())
    starts = ([b * n for b in range(batch + 1)] for n in (seqlen_q, seqlen_k))
    with _full_precision():
        place = None if fp8 else checks.place(out, q, k, v)
        o, lse = cpu.run(plan, q, [(k, v)], Scoring.of(call.scores, *starts), place)
    return o.bfloat16() if fp8 else o, lse.view(batch, seqlen_q, heads_q).transpose(1, 2)


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
    options: ScoreOptions = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "sinks": sinks,
        "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    descales = (q_descale, k_descale, v_descale)
    rest: dict[str, Any] = {"exact": exact, "return_lse": return_lse, "out": out, "backend": backend}
    if torch.compiler.is_compiling():
        packed = (q, k, v, cu_seqlens_q, cu_seqlens_k)
        return traced.attention_varlen(*packed, page_table, descales, schedule=schedule, **options, **rest)
    batch = arguments.check_sequences(cu_seqlens_q, cu_seqlens_k)
    paged = page_table is not None
    call = arguments.check_call(q, k, v, options, descales=descales, batch=batch, paged=paged, **rest)
    if page_table is not None:
        arguments.check_page_table(page_table, k, batch)
    # Values on a GPU stay unread: looking at them would make the CPU wait.
    starts_q = arguments.check_starts("cu_seqlens_q", cu_seqlens_q, call.sizes.seqlen_q, "q")
    starts_k = arguments.check_starts("cu_seqlens_k", cu_seqlens_k, None if paged else call.sizes.seqlen_k, "k")
    if page_table is not None and starts_k is not None:
        arguments.check_pages(page_table, k, starts_k)
    if call.where != "cpu":
        calls.check_served(q, schedule, call.where)
        starts = tuple(x.to(q.device, cu_seqlens_q.dtype).contiguous() for x in (cu_seqlens_q, cu_seqlens_k))
        bound = calls.GpuCall(call.scores.rule, return_lse)
        return bound(q, k, v, sinks, alibi_slopes, out, call.descales, (starts[0], starts[1]), page_table)
    assert starts_q is not None  # on the CPU, as everything is here
    assert starts_k is not None
    if page_table is not None:
        k, v = (arguments.gather(x, page_table, starts_k) for x in (k, v))
    o, lse = _packed_on_cpu(q, k, v, call, schedule, starts_q, starts_k, out)
    return _result(o, lse, sinks, out, return_lse)


def _packed_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: arguments.Call,
    schedule: BlockSchedule | Sequence[BlockSchedule | None] | None,
    starts_q: list[int],
    starts_k: list[int],
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_varlen` on the CPU over packed k and v: o like q (bfloat16 for FP8), lse (Hq, total_q)."""
    heads_q, heads_kv, head_dim = call.sizes[3:]
    fp8 = q.dtype == FP8
    if fp8:
        counts = [torch.tensor(starts).diff() for starts in (starts_q, starts_k, starts_k)]
        q, k, v = (
            arguments.widened(x, None if descale is None else descale.repeat_interleave(count, 0), heads_kv)
            for x, descale, count in zip((q, k, v), call.descales, counts, strict=True)
        )
    schedules = arguments.check_schedules(schedule, starts_q, starts_k, heads_q)
    plan = plan_varlen(
        starts_q,
        starts_k,
        heads_q,
        heads_kv,
        head_dim,
        window=call.scores.window,
        schedules=schedules,
        io_bytes=q.element_size(),
    )
    with _full_precision():
        place = None if fp8 else checks.place(out, q, k, v)
        o, lse = cpu.run(plan, q, [(k, v)], Scoring.of(call.scores, starts_q, starts_k), place)
    return o.bfloat16() if fp8 else o, lse.transpose(0, 1)


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
    batch, seqlen_q, _, heads_q, heads_kv, head_dim = arguments.check_qkv(q, k, v)
    scores = arguments.check_scores(q, batch, causal=causal, scale=scale, softcap=softcap, sinks=sinks)
    checks.flag("return_lse", return_lse)
    arguments.check_out(out, q)
    sources, shapes = arguments.check_levels(levels, q, heads_kv)
    sources.append((k, v))
    shapes.append(
        (batch, k.shape[1], None if lengths is None else arguments.check_lengths("lengths", lengths, *k.shape[:2]))
    )
    where = arguments.check_backend(backend, q, [x for source in sources for x in source] + [sinks])
    if where != "cpu":
        calls.check_served(q, None, where)
        o, lse = calls.shared_prefix(q, sources, [shape[2] for shape in shapes], scores)
        return _result(o, lse, sinks, out, return_lse)

    plan = plan_shared_prefix(
        batch, seqlen_q, shapes, heads_q, heads_kv, head_dim, causal=causal, io_bytes=q.element_size()
    )
    with _full_precision():
        place = checks.place(out, q, *(x for source in sources for x in source))
        o, lse = cpu.run(plan, q, sources, Scoring.of(scores), place)
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
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = arguments.check_qkv(q, k, k)
    window = arguments.check_window(window)
    checks.flag("causal", causal)
    if schedule is not None:
        arguments.check_schedule("schedule", schedule, seqlen_q, seqlen_k, heads_q)
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
    pages = arguments.check_cache(cache)
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
    plan = plan_tree(
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
        window=arguments.check_window(window),
        share=None if share_prefix == "auto" else bool(share_prefix),
        cost=cost or (GPU_COST if on_card else CPU_COST),
        room=room,
    )
    return traced.remember(plan, pages)


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
    pages = arguments.check_cache(cache)
    arguments.check_plan(plan, pages)
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
    decoding.grow(plan, lengths, arguments.PageListsOf(pages, plan.seqs))
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
    if torch.compiler.is_compiling():
        return traced.decode(
            q, cache, layer, plan, scale=scale, softcap=softcap, sinks=sinks, tree_mask=tree_mask,
            return_lse=return_lse, out=out, backend=backend,
        )  # fmt: skip
    pages = arguments.check_cache(cache)
    arguments.check_plan(plan, pages)
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
    options: DecodeOptions = {"scale": scale, "softcap": softcap, "sinks": sinks}
    scores = arguments.check_scores(q, count, causal=True, window=plan.window, **options)
    checks.flag("return_lse", return_lse)
    arguments.check_out(out, q)
    tree = arguments.check_tree_mask(tree_mask, plan, q.device)
    where = arguments.check_backend(backend, q, (sinks,))
    if where != "cpu":
        o = out if out is not None and checks.place(out, q) is not None else q.new_empty(q.shape)
        states = q.new_empty((count, plan.heads_q, tokens), dtype=torch.float32) if return_lse else None
        decoding.run(
            plan,
            q,
            pages.format,
            *pages.parts(layer),
            arguments.PageListsOf(pages, plan.seqs),
            plan.lengths,
            o,
            states,
            scores,
            tree=tree,
            room=plan.room,
        )
        if out is not None and out is not o:
            o = out.copy_(o)
        return o if states is None else (o, states)

    if tree is not None:
        with _full_precision():
            o, lse = cpu.run_tree(q, pages, layer, plan.seqs, Scoring.of(scores), tree)
        return _result(o, lse, sinks, out, return_lse)
    order = torch.from_numpy(plan.order).long()  # plan's rows -> the caller's
    with _full_precision():
        o, lse = cpu.run_paged(plan, q.index_select(0, order).flatten(0, 1), pages, layer, Scoring.of(scores))
    o, lse = o.view(q.shape), lse.view(count, tokens, plan.heads_q)
    o = torch.empty_like(o).index_copy_(0, order, o)
    lse = torch.empty_like(lse).index_copy_(0, order, lse)
    return _result(o, lse.transpose(1, 2), sinks, out, return_lse)


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
