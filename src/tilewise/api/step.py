"""Prefill beside decode: one step of chunked prefills and decodes over one cache, planned once, run layer by layer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np
import torch

from tilewise import arch, arguments, checks, cpu, traced, tuned
from tilewise.api import standing_step
from tilewise.api.chunks import attend_chunks
from tilewise.api.decode_checks import check_current, check_sharing
from tilewise.api.decoding import decode, plan_decode, product_dim, stream_row_bytes
from tilewise.api.on_cpu import full_precision
from tilewise.api.options import Result, State, StepOptions
from tilewise.cpu.scoring import Scoring
from tilewise.gpu import beside
from tilewise.gpu.decode_shapes import check_served
from tilewise.kvcache import PagedKVCache, PrefixCache
from tilewise.plan import DecodePlan
from tilewise.plan.cost import CostModel
from tilewise.plan.standing import StandingPlan
from tilewise.plan.standing_step import StandingStep
from tilewise.plan.step import ChunkPlan, CostJudge, Judge, Split, StepPlan, TileJudge, plan_chunks
from tilewise.scores import DecodeOptions, Reach, Scores, Window
from tilewise.state import add_sinks

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NOTHING: Any = ()


@overload
def plan_step(
    cache: PagedKVCache | PrefixCache,
    prefill: Sequence[tuple[int, int]] = ...,
    decode: Sequence[int] | DecodePlan | StandingPlan = ...,
    *,
    num_heads: int,
    window: Window | None = ...,
    chunk: int | None = ...,
    share_prefix: Literal["auto"] | bool = ...,
    cost: CostModel | None = ...,
    rows: None = None,
    max_chunks: None = None,
) -> StepPlan: ...
@overload
def plan_step(
    cache: PagedKVCache | PrefixCache,
    prefill: Sequence[tuple[int, int]] = ...,
    decode: Sequence[int] | DecodePlan | StandingPlan = ...,
    *,
    num_heads: int,
    window: Window | None = ...,
    chunk: int | None = ...,
    share_prefix: Literal["auto"] | bool = ...,
    cost: CostModel | None = ...,
    rows: int,
    max_chunks: int,
) -> StandingStep: ...
def plan_step(
    cache: PagedKVCache | PrefixCache,
    prefill: Sequence[tuple[int, int]] = _NOTHING,
    decode: Sequence[int] | DecodePlan | StandingPlan = _NOTHING,
    *,
    num_heads: int,
    window: Window | None = None,
    chunk: int | None = None,
    share_prefix: Literal["auto"] | bool = "auto",
    cost: CostModel | None = None,
    rows: int | None = None,
    max_chunks: int | None = None,
) -> StepPlan | StandingStep:
    """Plan a step that prefills and decodes, for all layers: `attend` runs it.

    prefill: (seq, tokens) for each chunk, whose queries are the last `tokens` cached tokens of `seq`, each of which
    sees the sequence up to itself. decode: sequences whose query is their last token, or a plan of theirs by
    plan_decode, of this cache, these heads, this window and chunk (a standing plan's idle rows are the step's last).
    Either may be empty; a sequence is named once.
    num_heads, window, chunk, cost: as in plan_decode. share_prefix: whether prefixes that several sequences have in
    common are computed once for the rows of all of them, chunks among themselves and decodes among themselves: True,
    False, or "auto" where it pays. Chunks of prompts share whole pages, and nothing under a window that ends to the
    left or blocks of positions.
    rows, max_chunks: make a StandingStep instead, for a step of so many rows in all, up to max_chunks of them chunks,
    whose memory on a GPU stays where it is, so that one captured attend() is replayed over chunks and decodes that come
    and go; `renew_step` brings it up to date. decode must be a standing plan then, and q has its rows first. Chunks
    share nothing there. On a GPU the cache has the dtype of q, and `chunk` is a multiple of its page size.

    The plan holds until one of its sequences changes.
    """
    pages = arguments.check_cache(cache)
    check_sharing(pages, num_heads, share_prefix, cost)
    window, block = arguments.check_window(window), arguments.check_chunk(chunk)
    chunks = check_chunks(prefill, pages)
    share = None if share_prefix == "auto" else share_prefix
    known = decode if isinstance(decode, (DecodePlan, StandingPlan)) else None
    if known is not None:
        _check_decode_plan(known, pages, num_heads, Reach.of(window, block))
    if rows is not None or max_chunks is not None:
        given: dict[str, Any] = {"rows": rows, "max_chunks": max_chunks, "plan": decode, "heads_q": num_heads}
        plan_now = partial(_chunks_now, num_heads, window, block, cost)
        return standing_step.make(pages, chunks, plan_now, window=window, chunk=block, share=share, **given)
    if known is not None:
        seqs = list(known.seqs)
    else:
        if isinstance(decode, str) or not isinstance(decode, (Sequence, torch.Tensor, np.ndarray)):
            raise TypeError(f"decode must be a list of sequences or a plan of theirs, got {type(decode).__name__}")
        seqs = [checks.integer("decode", s) for s in decode]
    named = [seq for seq, _ in chunks] + seqs
    if len(set(named)) < len(named):
        twice = next(seq for seq in named if named.count(seq) > 1)
        raise ValueError(f"prefill and decode must name each sequence once, got sequence {twice} twice")
    planned = known
    if known is None and seqs:
        given = {"window": window, "chunk": chunk, "share_prefix": share_prefix, "cost": cost}
        planned = plan_decode(cache, seqs, num_heads=num_heads, **given)
    chunked = plan_prefill(pages, chunks, num_heads, window, block, share, cost) if chunks else None
    return traced.remember(StepPlan(chunked, planned, num_heads, window, block, share, pages.serial), pages)


def _chunks_now(
    num_heads: int,
    window: Window | None,
    chunk: int,
    cost: CostModel | None,
    pages: PagedKVCache,
    chunks: list[tuple[int, int]],
) -> StepPlan:
    """A standing step's chunks as they are, which share nothing."""
    chunked = plan_prefill(pages, chunks, num_heads, window, chunk, False, cost) if chunks else None
    return StepPlan(chunked, None, num_heads, window, chunk, False, pages.serial)


def plan_prefill(
    pages: PagedKVCache,
    chunks: Sequence[tuple[int, int]],
    num_heads: int,
    window: Window | None,
    chunk: int,
    share: bool | None,
    cost: CostModel | None = None,
) -> ChunkPlan:
    """The plan of checked chunks alone. share: None where it pays."""
    seqs = [seq for seq, _ in chunks]
    heads = pages.num_kv_heads
    used = cost or tuned.cost(pages.device, pages.format, shared_kv=pages.shared_kv)
    judge: Judge
    split: Split | None = None
    if pages.device.type == "cuda":
        tiles = TileJudge(used, arch.multiprocessors(pages.device), heads, num_heads // heads, product_dim(pages))
        judge, split = tiles, tiles.split
    else:
        judge = CostJudge(used, num_heads, product_dim(pages), heads * stream_row_bytes(pages))
    return plan_chunks(
        seqs,
        [tokens for _, tokens in chunks],
        [pages.page_list(seq) for seq in seqs],
        pages.lengths_of(seqs).tolist(),
        pages.page_size,
        heads_q=num_heads,
        heads_kv=pages.num_kv_heads,
        head_dim=pages.head_dim,
        value_dim=pages.value_dim,
        kv_row_bytes=pages.kv_row_bytes,
        io_bytes=pages.format.dtype.itemsize if pages.format.dtype is not None else 2,
        window=window,
        chunk=chunk,
        judge=judge,
        share=share,
        split=split,
    )


@overload
def attend(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: StepPlan | StandingStep,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[StepOptions],
) -> torch.Tensor: ...
@overload
def attend(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: StepPlan | StandingStep,
    *,
    return_lse: Literal[True],
    **options: Unpack[StepOptions],
) -> State: ...
@overload
def attend(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: StepPlan | StandingStep,
    *,
    return_lse: bool,
    **options: Unpack[StepOptions],
) -> Result: ...
def attend(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: StepPlan | StandingStep,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attention of a step's rows over the cached keys of one layer.

    q: (rows, Hq, D), the tokens of the plan's chunks one chunk after another, then those of its decodes (of a standing
    step the decodes first, and idle rows last, which give 0); float32, float16 or bfloat16, whatever the cache's
    format. Their own keys and values are already written. Other arguments as in `attention`; what comes out of a
    decode's row is what `decode` gives for it.

    On a GPU chunks and decodes run on two streams, which share the card: after all that the current stream was given
    before the call, and before all that it is given next. Head dimensions, dtypes and formats are those that
    attention_varlen or decode takes; pages that only decode reads are converted once for all chunks. The call can be
    captured in a graph once it was made uncaptured, which compiles and uploads.

    Returns o (rows, Hq, value_dim), with return_lse also the LSE (Hq, rows) float32.
    """
    if torch.compiler.is_compiling():
        given = {"scale": scale, "softcap": softcap, "sinks": sinks, "return_lse": return_lse, "backend": backend}
        return traced.attend(q, cache, layer, plan, out=out, **given)
    pages = arguments.check_cache(cache)
    arguments.check_step(plan, pages)
    if isinstance(plan, StandingStep):
        standing_step.check_current(plan, pages)
    else:
        _check_lengths(plan, pages)
    checks.integer("layer", layer, 0, pages.num_layers - 1)
    checks.not_float64("q", q)
    shape = (plan.rows, plan.heads_q, pages.head_dim)
    checks.tensor("q", q, shape=shape, dtypes=checks.FLOATS, unit_last_stride=True)
    if q.device != pages.device:
        raise ValueError(f"q must be on {pages.device} like the cache, got {q.device}")
    options: DecodeOptions = {"scale": scale, "softcap": softcap, "sinks": sinks}
    scores = arguments.check_scores(q, 1, causal=True, window=plan.window, **options)  # a chunk is in the lists
    checks.flag("return_lse", return_lse)
    arguments.check_out(out, q, pages.value_dim)
    where = arguments.check_backend(backend, q, (sinks,))
    o = q.new_empty((*q.shape[:2], pages.value_dim)) if out is None or checks.place(out, q) is None else out
    lse = q.new_empty((q.shape[1], len(q)), dtype=torch.float32) if return_lse else None
    if isinstance(plan, StandingStep):
        if where == "cpu":
            _standing_on_cpu(Asked(q, cache, pages, layer, plan.now, scores, options, o, lse, backend), plan)
        else:
            standing_step.attend_by_kernels(q, cache, layer, plan, scores, options, o, lse, backend)
        return _given(o, lse, out)
    asked = Asked(q, cache, pages, layer, plan, scores, options, o, lse, backend)
    if where == "cpu":
        _on_cpu(asked)
    else:
        _by_kernels(asked)
    return _given(o, lse, out)


def _given(o: torch.Tensor, lse: torch.Tensor | None, out: torch.Tensor | None) -> Result:
    if out is not None and out is not o:
        o = out.copy_(o)
    return o if lse is None else (o, lse)


class Asked(NamedTuple):
    """A checked call of `attend`, whose parts fill their rows of o (rows, Hq, Dv), and of lse (Hq, rows) if given.

    Both are the first stream's: memory that the second one would give out might be taken again while others read it.
    """

    q: torch.Tensor
    cache: PagedKVCache | PrefixCache
    pages: PagedKVCache
    layer: int
    plan: StepPlan
    scores: Scores
    options: DecodeOptions
    o: torch.Tensor
    lse: torch.Tensor | None
    backend: str


def _on_cpu(asked: Asked) -> None:
    if asked.plan.prefill is not None:
        _chunks_on_cpu(asked, asked.plan.prefill)
    if asked.plan.decode is not None:
        _decodes(asked, asked.plan.decode)


def _standing_on_cpu(asked: Asked, step: StandingStep) -> None:
    """asked.plan: the chunks as they are now."""
    first, stop = step.first_row, step.first_row + step.chunk_rows
    asked.o.zero_()
    if asked.lse is not None:
        sinks = asked.scores.sinks
        asked.lse[:] = -torch.inf if sinks is None else sinks[:, None].float()
    for rows, of in ((slice(first), step.decode.now if first else None), (slice(first, stop), asked.plan.prefill)):
        lse = None if asked.lse is None else asked.lse[:, rows]
        part = asked._replace(q=asked.q[rows], o=asked.o[rows], lse=lse)
        if isinstance(of, ChunkPlan):
            _chunks_on_cpu(part, of)
        elif of is not None:
            decodes = StepPlan(None, of, step.heads_q, step.window, step.chunk, None, step.cache_serial)
            _decodes(part._replace(plan=decodes), of)


def _chunks_on_cpu(asked: Asked, plan: ChunkPlan) -> None:
    order = torch.from_numpy(plan.row_order()).long() if plan.shared_nodes else None
    q = asked.q[: plan.rows]
    with full_precision():
        queries = q if order is None else q.index_select(0, order)
        o, lse = cpu.run_paged(plan, queries, asked.pages, asked.layer, Scoring.of(asked.scores))
    if order is not None:
        o, lse = (torch.empty_like(x).index_copy_(0, order, x) for x in (o, lse))
    lse = lse.transpose(0, 1)
    if asked.scores.sinks is not None:
        o, lse = add_sinks(o, lse, asked.scores.sinks)
    asked.o[: plan.rows].copy_(o)
    if asked.lse is not None:
        asked.lse[:, : plan.rows].copy_(lse)


def _decodes(asked: Asked, plan: DecodePlan | StandingPlan) -> None:
    first, each = asked.plan.prefill_rows, (-1, plan.tokens_per_seq)
    q, o = (x[first:].unflatten(0, each) for x in (asked.q, asked.o))
    options: StepOptions = {**asked.options, "out": o, "backend": asked.backend}
    got = decode(q, asked.cache, asked.layer, plan, return_lse=asked.lse is not None, **options)
    if asked.lse is not None:
        asked.lse[:, first:].unflatten(1, each).copy_(got[1].transpose(0, 1))


def _by_kernels(asked: Asked) -> None:
    """Chunks through the forward, decodes through their kernel: on a card on two streams, which share it."""
    plan = asked.plan
    if plan.decode is not None and not _served(asked, plan.decode):
        _all_as_chunks(asked, plan.decode)
    elif plan.decode is None or plan.prefill is None or not beside.side_by_side(asked.q.device):
        if plan.prefill is not None:
            _chunks(asked, plan.prefill)
        if plan.decode is not None:
            _decodes(asked, plan.decode)
    else:
        branch = beside.Beside(asked.q.device)
        if beside.ORDER == "chunks first":
            _chunks(asked, plan.prefill)
        with branch:
            _decodes(asked, plan.decode)
        if beside.ORDER == "decodes first":
            _chunks(asked, plan.prefill)
        branch.join()


def _chunks(asked: Asked, plan: ChunkPlan) -> None:
    rows = slice(plan.rows)
    lse = None if asked.lse is None else asked.lse[:, rows]
    attend_chunks(
        asked.q[rows], asked.pages, asked.layer, plan, asked.options, asked.o[rows], lse, backend=asked.backend
    )


def _served(asked: Asked, plan: DecodePlan | StandingPlan) -> bool:
    """Does a decode kernel serve the decodes? Where none does, the forward may: it takes any head_dim and dtype."""
    if asked.pages.shared_kv:
        return True  # by the kernel over rows, which says itself what it does not take
    serial = asked.plan.serial
    kind, served = _kinds.get(serial, (None, False))
    if kind == asked.q.dtype:
        return served
    if kind is None:
        weakref.finalize(asked.plan, _kinds.pop, serial, None)
    try:
        codes = [parts[0] for parts in asked.pages.parts(asked.layer) if parts is not None]
        check_served(asked.q, asked.pages.format.beside(asked.pages.value_format), plan, codes)
        served = True
    except NotImplementedError:
        served = False
    _kinds[serial] = (asked.q.dtype, served)
    return served


# By a step's number, for as long as it lives: the dtype of its queries last time, and are decodes of it served.
_kinds: dict[int, tuple[torch.dtype | None, bool]] = {}


def _all_as_chunks(asked: Asked, decodes: DecodePlan | StandingPlan) -> None:
    plan = asked.plan
    chunks = [] if plan.prefill is None else list(zip(plan.prefill.seqs, plan.prefill.tokens, strict=True))
    chunks += [(seq, decodes.tokens_per_seq) for seq in decodes.seqs]
    if chunks:
        lengths = tuple(asked.pages.lengths_of([seq for seq, _ in chunks]).tolist())
        found = _whole.get(plan.serial)
        if found is None:
            weakref.finalize(plan, _whole.pop, plan.serial, None)
        if found is None or found.seqs != tuple(seq for seq, _ in chunks) or found.lengths != lengths:
            found = plan_prefill(asked.pages, chunks, plan.heads_q, plan.window, plan.chunk, plan.share_prefix)
            _whole[plan.serial] = found
        _chunks(asked, found)
    idle = sum(tokens for _, tokens in chunks)
    asked.o[idle:].zero_()
    if asked.lse is not None and idle < len(asked.o):
        sinks = asked.scores.sinks
        asked.lse[:, idle:] = -torch.inf if sinks is None else sinks[:, None].float()


# By a step's number, for as long as it lives: the whole of it as chunks.
_whole: dict[int, ChunkPlan] = {}


def check_chunks(prefill: Any, pages: PagedKVCache) -> list[tuple[int, int]]:
    if isinstance(prefill, str) or not isinstance(prefill, (Sequence, np.ndarray, torch.Tensor)):
        raise TypeError(f"prefill must be a list of (seq, tokens), got {type(prefill).__name__}")
    chunks = []
    for n, chunk in enumerate(prefill):
        if isinstance(chunk, str) or not isinstance(chunk, (Sequence, np.ndarray, torch.Tensor)) or len(chunk) != 2:
            raise TypeError(f"prefill[{n}] must be (seq, tokens), got {chunk!r}")
        seq = checks.integer(f"prefill[{n}][0]", chunk[0])
        tokens = checks.integer(f"prefill[{n}][1]", chunk[1], 1)
        if tokens > (length := pages.length(seq)):
            raise ValueError(f"prefill[{n}][1] must be at most the {length} tokens of sequence {seq}, got {tokens}")
        chunks.append((seq, tokens))
    return chunks


def _check_decode_plan(plan: DecodePlan | StandingPlan, pages: PagedKVCache, num_heads: int, reach: Reach) -> None:
    if plan.cache_serial != pages.serial:
        raise ValueError("decode is a plan for another cache; call plan_decode with this one")
    if (plan.heads_q, plan.reach) != (num_heads, reach):
        raise ValueError(
            f"decode must be a plan with num_heads {num_heads}, window {reach.window} and chunk {reach.chunk or None}, "
            f"got one with {plan.heads_q}, {plan.window} and {plan.chunk or None}"
        )
    if plan.pages_per_seq:
        raise NotImplementedError("decode is a plan for selected pages, which goes with decode() alone; leave it out")


def _check_lengths(plan: StepPlan, pages: PagedKVCache) -> None:
    for part in (plan.prefill, plan.decode):
        if part is None:
            continue
        # A list is for the decodes, whose call asks again.
        seqs = part.seqs if part is plan.prefill else list(part.seqs)
        check_current(seqs, part.lengths, pages, "plan_step again after extending")


def renew_step(
    plan: StandingStep,
    cache: PagedKVCache | PrefixCache,
    prefill: Sequence[tuple[int, int]] = _NOTHING,
    decode: Sequence[int] | None = None,
) -> StandingStep:
    """Make a standing step the step of these chunks and decodes, as they are now: after sequences came, went or grew.

    plan: of plan_step(..., rows=, max_chunks=); the same object is returned. prefill: (seq, tokens) for each chunk.
    decode: sequences whose query is their last token, in the order of the first rows of q; None: plan.decode, which may
    serve several steps, was renewed by renew_plan, or nothing became of its sequences.

    On a GPU the host sends what changed in a copy each for chunks and decodes, neither of which it waits for, so that a
    captured attend() replays over chunks and sequences that come and go. A chunk sees its sequence's tokens as they are
    now, of which up to plan.decode.max_length are taken.
    """
    pages = arguments.check_cache(cache)
    if not isinstance(plan, StandingStep):
        raise TypeError(
            f"plan must come from tilewise.plan_step(..., rows=, max_chunks=), got {type(plan).__name__}; other plans "
            "are made anew"
        )
    arguments.check_step(plan, pages)
    chunks = check_chunks(prefill, pages)
    standing_step.hold(plan, pages, chunks, decode)
    return plan
