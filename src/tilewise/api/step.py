"""Prefill beside decode: one step of chunked prefills and decodes over one cache, planned once, run layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch

from tilewise import arguments, checks, cpu, tuned
from tilewise.api.decoding import DEQUANTISE, decode, plan_decode
from tilewise.api.options import Result, State, StepOptions
from tilewise.api.prefill import full_precision
from tilewise.cpu.scoring import Scoring
from tilewise.kvcache import PagedKVCache, PrefixCache
from tilewise.plan import DecodePlan
from tilewise.plan.cost import CostModel
from tilewise.plan.step import ChunkPlan, CostJudge, StepPlan, plan_chunks
from tilewise.scores import DecodeOptions, Scores, Window
from tilewise.state import add_sinks

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NOTHING: Any = ()


def plan_step(
    cache: PagedKVCache | PrefixCache,
    prefill: Sequence[tuple[int, int]] = _NOTHING,
    decode: Sequence[int] | DecodePlan = _NOTHING,
    *,
    num_heads: int,
    window: Window | None = None,
    share_prefix: Literal["auto"] | bool = "auto",
    cost: CostModel | None = None,
) -> StepPlan:
    """Plan a step that prefills and decodes, for all layers: `attend` runs it.

    prefill: (seq, tokens) for each chunk, whose queries are the last `tokens` cached tokens of `seq`, each of which
    sees the sequence up to itself. decode: sequences whose query is their last token, or a plan of theirs by
    plan_decode, of this cache, these heads and this window. Either may be empty; a sequence is named once.
    num_heads, window, cost: as in plan_decode. share_prefix: whether prefixes that several sequences have in common are
    computed once for the rows of all of them, chunks among themselves and decodes among themselves: True, False, or
    "auto" where it pays. Chunks share whole pages, and nothing under a window that ends to the left.

    The plan holds until one of its sequences changes.
    """
    pages = arguments.check_cache(cache)
    checks.integer("num_heads", num_heads, 1)
    if num_heads % pages.num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of the cache's {pages.num_kv_heads} KV heads, got {num_heads}")
    if not isinstance(share_prefix, bool) and not (isinstance(share_prefix, str) and share_prefix == "auto"):
        raise ValueError(f'share_prefix must be "auto", True or False, got {share_prefix!r}')
    if cost is not None and not isinstance(cost, CostModel):
        raise TypeError(f"cost must be a tilewise.CostModel, got {type(cost).__name__}")
    window = arguments.check_window(window)
    chunks = _check_chunks(prefill, pages)
    share = None if share_prefix == "auto" else share_prefix
    known = decode if isinstance(decode, DecodePlan) else None
    if known is not None:
        _check_decode_plan(known, pages, num_heads, window)
        seqs = list(known.seqs)
    else:
        if isinstance(decode, str) or not isinstance(decode, (Sequence, torch.Tensor, np.ndarray)):
            raise TypeError(f"decode must be a list of sequences or a DecodePlan, got {type(decode).__name__}")
        seqs = [checks.integer("decode", s) for s in decode]
    named = [seq for seq, _ in chunks] + seqs
    if len(set(named)) < len(named):
        twice = next(seq for seq in named if named.count(seq) > 1)
        raise ValueError(f"prefill and decode must name each sequence once, got sequence {twice} twice")
    planned = known
    if known is None and seqs:
        planned = plan_decode(cache, seqs, num_heads=num_heads, window=window, share_prefix=share_prefix, cost=cost)
    chunked = plan_prefill(pages, chunks, num_heads, window, share, cost) if chunks else None
    return StepPlan(chunked, planned, num_heads, window, share, pages.serial)


def plan_prefill(
    pages: PagedKVCache,
    chunks: Sequence[tuple[int, int]],
    num_heads: int,
    window: Window | None,
    share: bool | None,
    cost: CostModel | None = None,
) -> ChunkPlan:
    """The plan of checked chunks alone. share: None where it pays."""
    seqs = [seq for seq, _ in chunks]
    row_bytes = 4 * pages.head_dim * (1 if pages.format.dtype is not None else DEQUANTISE)  # as in plan_decode
    judge = None
    if share is None:
        used = cost or tuned.cost(pages.device, pages.format)
        judge = CostJudge(used, num_heads, pages.head_dim, 2 * pages.num_kv_heads * row_bytes)
    return plan_chunks(
        seqs,
        [tokens for _, tokens in chunks],
        [pages.page_list(seq) for seq in seqs],
        pages.lengths_of(seqs).tolist(),
        pages.page_size,
        heads_q=num_heads,
        heads_kv=pages.num_kv_heads,
        head_dim=pages.head_dim,
        kv_row_bytes=2 * pages.format.bytes_per_token_head,
        io_bytes=pages.format.dtype.itemsize if pages.format.dtype is not None else 2,
        window=window,
        judge=judge,
        share=share is not False,
    )


@overload
def attend(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: StepPlan,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[StepOptions],
) -> torch.Tensor: ...
@overload
def attend(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: StepPlan,
    *,
    return_lse: Literal[True],
    **options: Unpack[StepOptions],
) -> State: ...
@overload
def attend(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: StepPlan,
    *,
    return_lse: bool,
    **options: Unpack[StepOptions],
) -> Result: ...
def attend(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: StepPlan,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attention of a step's rows over the cached keys of one layer.

    q: (rows, Hq, D), the tokens of the plan's chunks one chunk after another, then those of its decodes; float32,
    float16 or bfloat16, whatever the cache's format. Their own keys and values are already written. Other arguments as
    in `attention`; what comes out of a decode's row is what `decode` gives for it.

    Returns o (rows, Hq, D), with return_lse also the LSE (Hq, rows) float32.
    """
    pages = arguments.check_cache(cache)
    _check_plan(plan, pages)
    checks.integer("layer", layer, 0, pages.num_layers - 1)
    checks.not_float64("q", q)
    shape = (plan.rows, plan.heads_q, pages.head_dim)
    checks.tensor("q", q, shape=shape, dtypes=checks.FLOATS, unit_last_stride=True)
    if q.device != pages.device:
        raise ValueError(f"q must be on {pages.device} like the cache, got {q.device}")
    options: DecodeOptions = {"scale": scale, "softcap": softcap, "sinks": sinks}
    scores = arguments.check_scores(q, 1, causal=True, window=plan.window, **options)
    checks.flag("return_lse", return_lse)
    arguments.check_out(out, q)
    arguments.check_backend(backend, q, (sinks,))
    o = q.new_empty(q.shape) if out is None or checks.place(out, q) is None else out
    lse = q.new_empty((q.shape[1], len(q)), dtype=torch.float32) if return_lse else None
    rows = plan.prefill_rows
    if plan.prefill is not None:
        _prefill_on_cpu(q[:rows], pages, layer, plan.prefill, scores, o[:rows], None if lse is None else lse[:, :rows])
    if plan.decode is not None:
        _decode_rows(q, cache, layer, plan, o, lse, options, backend)
    if out is not None and out is not o:
        o = out.copy_(o)
    return o if lse is None else (o, lse)


def _prefill_on_cpu(
    q: torch.Tensor,
    pages: PagedKVCache,
    layer: int,
    plan: ChunkPlan,
    scores: Scores,
    o: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """The chunks' rows: fills o like q (rows, Hq, D), and lse (Hq, rows)."""
    order = None if plan.in_order else torch.from_numpy(plan.row_order()).long()
    with full_precision():
        queries = q if order is None else q.index_select(0, order)
        found, logs = cpu.run_paged(plan, queries, pages, layer, Scoring.of(scores))
    if order is not None:
        found, logs = (torch.empty_like(x).index_copy_(0, order, x) for x in (found, logs))
    logs = logs.transpose(0, 1)
    if scores.sinks is not None:
        found, logs = add_sinks(found, logs, scores.sinks)
    o.copy_(found)
    if lse is not None:
        lse.copy_(logs)


def _decode_rows(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: StepPlan,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    options: DecodeOptions,
    backend: str,
) -> None:
    """The decodes' rows of a whole step: fills the rest of o and of lse."""
    assert plan.decode is not None
    first = plan.prefill_rows
    each = (len(plan.decode.seqs), plan.decode.tokens_per_seq)
    rows, into = (x[first:].unflatten(0, each) for x in (q, o))
    got = decode(rows, cache, layer, plan.decode, return_lse=lse is not None, out=into, backend=backend, **options)
    if lse is not None:
        lse[:, first:].unflatten(1, each).copy_(got[1].transpose(0, 1))


def _check_chunks(prefill: Any, pages: PagedKVCache) -> list[tuple[int, int]]:
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


def _check_decode_plan(plan: DecodePlan, pages: PagedKVCache, num_heads: int, window: Window | None) -> None:
    if plan.cache_serial != pages.serial:
        raise ValueError("decode is a plan for another cache; call plan_decode with this one")
    if plan.heads_q != num_heads or (plan.window or (None, None))[0] != (window or (None, None))[0]:
        raise ValueError(
            f"decode must be a plan with num_heads {num_heads} and window {window}, got one with {plan.heads_q} and "
            f"{plan.window}"
        )
    if plan.pages_per_seq:
        raise NotImplementedError("decode is a plan for selected pages, which goes with decode() alone; leave it out")


def _check_plan(plan: Any, pages: PagedKVCache) -> None:
    if not isinstance(plan, StepPlan):
        raise TypeError(f"plan must come from tilewise.plan_step, got {type(plan).__name__}")
    if plan.cache_serial != pages.serial:
        raise ValueError("plan was made for another cache; call plan_step with this one")
    for part in (plan.prefill, plan.decode):
        if part is None:
            continue
        changed = np.flatnonzero(pages.lengths_of(list(part.seqs)) != part.lengths)
        if len(changed):
            seq, length = part.seqs[changed[0]], part.lengths[changed[0]]
            raise ValueError(
                f"plan is out of date: sequence {seq} had {length} tokens and now has {pages.length(seq)}; "
                "call plan_step again after extending"
            )
