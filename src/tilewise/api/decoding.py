"""Decode over a paged cache: plan a step, grow the plan, run it layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from tilewise import arguments, checks, cpu, traced, tuned
from tilewise.api import decode_checks, standing
from tilewise.api.on_cpu import full_precision
from tilewise.api.options import PagedOptions, Result, State
from tilewise.api.prefill import result
from tilewise.cpu.listed import run_listed
from tilewise.cpu.scoring import Scoring
from tilewise.gpu import decode as kernel
from tilewise.kvcache import PagedKVCache, PrefixCache
from tilewise.kvcache.sequences import check_seqs
from tilewise.plan import BlockSchedule, DecodePlan
from tilewise.plan.cost import CostModel
from tilewise.plan.flat import Judge, PageTable
from tilewise.plan.standing import StandingPlan
from tilewise.plan.tree import plan_tree
from tilewise.scores import DecodeOptions, Reach, Scores, Window

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEQUANTISE = 4  # reading a quantised token on the CPU, in readings of a float32 one


@overload
def plan_decode(
    cache: PagedKVCache | PrefixCache,
    seqs: Sequence[int],
    *,
    num_heads: int,
    tokens_per_seq: int = 1,
    share_prefix: Literal["auto"] | bool = "auto",
    window: Window | None = None,
    chunk: int | None = None,
    cost: CostModel | None = None,
    room: int = 0,
    pages_per_seq: int | None = None,
    rows: None = None,
    max_length: None = None,
) -> DecodePlan: ...
@overload
def plan_decode(
    cache: PagedKVCache | PrefixCache,
    seqs: Sequence[int],
    *,
    num_heads: int,
    tokens_per_seq: int = 1,
    share_prefix: Literal["auto"] | bool = "auto",
    window: Window | None = None,
    chunk: int | None = None,
    cost: CostModel | None = None,
    rows: int,
    max_length: int,
) -> StandingPlan: ...
def plan_decode(
    cache: PagedKVCache | PrefixCache,
    seqs: Sequence[int],
    *,
    num_heads: int,
    tokens_per_seq: int = 1,
    share_prefix: Literal["auto"] | bool = "auto",
    window: Window | None = None,
    chunk: int | None = None,
    cost: CostModel | None = None,
    room: int = 0,
    pages_per_seq: int | None = None,
    rows: int | None = None,
    max_length: int | None = None,
) -> DecodePlan | StandingPlan:
    """Plan one decode step of `seqs` for all layers.

    num_heads: query heads. tokens_per_seq: query tokens a sequence has, which are its last cached ones; each sees the
    tokens up to itself (of a sequence with fewer tokens the first rows see nothing). window, chunk: as in `attention`;
    positions count from the sequence's first token. share_prefix: True puts the rows of all sequences under a node of
    the page tree over its tokens once, False never, "auto" where `cost` (a CostModel, the device's by default) says
    that it pays. The plan holds until one of its sequences changes. room: on a GPU, tokens that each sequence may grow
    by under `grow_plan`; with much of it one is cut, and so rounded, as what it may become. pages_per_seq: for `decode`
    with a schedule, the most pages that a sequence reads under a KV head; no prefix is shared then.

    rows, max_length: make a StandingPlan instead, for up to `rows` sequences (1 to 1024) of up to `max_length` tokens,
    which `renew_plan` brings up to date after sequences came, went or grew. q then has `rows` rows; those past
    len(seqs) are idle: they are not read, their o is 0 and their LSE −inf (a sink's, where there are sinks).

        plan = plan_decode(cache, seqs, num_heads=32, rows=256, max_length=8192)
        decode(q, cache, 0, plan, out=out)            # once, before the capture: it compiles
        with torch.cuda.graph(graph):
            decode(q, cache, 0, plan, out=out)
        ...                                           # each step: free, fork, extend, then
        renew_plan(plan, cache, seqs); graph.replay()
    """
    pages = arguments.check_cache(cache)
    decode_checks.check_sizes(pages, seqs, num_heads, tokens_per_seq, share_prefix, cost, room)
    members, at = pages.sequences.batch(check_seqs(seqs))
    window, block = arguments.check_window(window), arguments.check_chunk(chunk)
    most = decode_checks.check_pages_per_seq(pages_per_seq, share_prefix, Reach.of(window, block))
    row_bytes = stream_row_bytes(pages)
    share = None if share_prefix == "auto" else bool(share_prefix)
    form = pages.format.beside(pages.value_format)
    model = cost or tuned.cost(pages.device, form, shared_kv=pages.shared_kv)
    if rows is not None or max_length is not None:
        if given := f"room {room}" if room else f"pages_per_seq {most}" if most else "":
            raise ValueError(f"rows goes without room and pages_per_seq, got {given}: renew_plan takes any growth")
        once = partial(plan_decode, num_heads=num_heads, tokens_per_seq=tokens_per_seq, share_prefix=share_prefix)
        rows_each, row = tokens_per_seq * num_heads, pages.num_kv_heads * row_bytes
        judge = Judge(model, rows_each, pages.num_kv_heads, product_dim(pages), row)
        return standing.make(
            pages, members, partial(once, window=window, chunk=chunk, cost=cost), rows=rows, max_length=max_length,
            judge=judge, heads_q=num_heads, tokens_per_seq=tokens_per_seq, window=window, chunk=block, share=share,
        )  # fmt: skip
    counts = pages.sequences.counts[at]
    plan = plan_tree(
        members,
        PageTable(pages.sequences.table[:, : counts.max(initial=0)][at], counts),
        pages.sequences.lengths[at],
        pages.page_size,
        heads_q=num_heads,
        heads_kv=pages.num_kv_heads,
        head_dim=pages.head_dim,
        value_dim=pages.value_dim,
        kv_row_bytes=pages.kv_row_bytes,
        io_bytes=pages.format.dtype.itemsize if pages.format.dtype is not None else 2,
        stream_row_bytes=row_bytes,
        # On a CPU, below it copying pages together costs less than another item; selected pages are copied anyway.
        shortest_run=0 if pages.device.type == "cuda" or most else 64,
        cache_serial=pages.serial,
        tokens_per_seq=tokens_per_seq,
        window=window,
        chunk=block,
        share=False if most else share,
        cost=model,
        room=room,
        pages_per_seq=most,
    )
    return traced.remember(plan, pages)


def stream_row_bytes(pages: PagedKVCache) -> int:
    """What the inner loop reads of a token in one KV head, for the cost model."""
    if pages.device.type == "cuda":
        return pages.kv_row_bytes
    # On a CPU every format runs at float32's pace, and a quantised one is turned into it first. A row that is K and V
    # is read once: its values come from the cores' caches.
    channels = pages.head_dim + (0 if pages.shared_kv else pages.value_dim)
    return 4 * channels * (1 if pages.format.dtype is not None else DEQUANTISE)


def product_dim(pages: PagedKVCache) -> int:
    """The head_dim at which two products of one width take as many FLOPs as q·k and p·v do."""
    return -(-(pages.head_dim + pages.value_dim) // 2)


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
    if isinstance(plan, StandingPlan):
        raise TypeError("plan must be one of plan_decode without rows, got a StandingPlan; renew_plan takes that")
    lengths = pages.lengths_of(list(plan.seqs))
    if pages.device.type != "cuda":
        return plan_decode(
            cache,
            plan.seqs,
            num_heads=plan.heads_q,
            tokens_per_seq=plan.tokens_per_seq,
            share_prefix=plan.shared_nodes > 0,
            window=plan.window,
            chunk=plan.chunk or None,
            room=plan.room,
            pages_per_seq=plan.pages_per_seq or None,
        )
    kernel.grow(plan, lengths, arguments.PageListsOf(pages, plan.seqs))
    return plan


@overload
def decode(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: DecodePlan | StandingPlan,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PagedOptions],
) -> torch.Tensor: ...
@overload
def decode(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: DecodePlan | StandingPlan,
    *,
    return_lse: Literal[True],
    **options: Unpack[PagedOptions],
) -> State: ...
@overload
def decode(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: DecodePlan | StandingPlan,
    *,
    return_lse: bool,
    **options: Unpack[PagedOptions],
) -> Result: ...
def decode(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    plan: DecodePlan | StandingPlan,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    schedule: BlockSchedule | None = None,
    indices: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attention of the plan's sequences over their cached keys in one layer.

    q: (num_seqs, tokens_per_seq, Hq, D) in the order of the plan's `seqs`, float32, float16 or bfloat16, whatever the
    cache's format; the queries' own tokens are already written. On a GPU head_dim is 64, 96, 128, 192 or 256, value_dim
    any of these, or up to 512 one that is 256 more than one of them; float32 queries read fp32 caches alone, and a bf16
    cache takes bfloat16 queries alone. Over a shared_kv cache, MLA's absorbed form, q is as wide as its rows. Other
    arguments as in `attention`; scale is D ** -0.5 if None.
    tree_mask: bool (T, T) or (num_seqs, T, T), T = tokens_per_seq: query t sees the sequence's query token j where it
    is True, in place of causality, for trees of speculated tokens. All see the first one, the tree's root.
    schedule: which pages each sequence and KV head reads, for a plan with `pages_per_seq`. Key block j, of page_size
    keys, is page j of the sequence's list; there is one query block; batch is num_seqs or None, heads Hkv or None. A
    page that is left out hides its tokens from every query, the query's own token too. Of more than `pages_per_seq`
    pages (`schedule.counts` tells) the first ones are read; what is selected past a sequence's end is ignored. On a GPU
    only kernels look at the contents, which may change between replays of a captured call.
    indices: int32 (num_seqs, tokens_per_seq, k), the tokens that each query reads instead, by their positions in its
    sequence, −1 for none; one that is named twice counts twice. The list alone says what is seen: nothing is shared,
    and there is no causal order. On a GPU, where nobody waits for the contents, positions that a sequence does not
    have are hidden; on a CPU they raise.

    Returns o (num_seqs, tokens_per_seq, Hq, value_dim), with return_lse also the LSE (num_seqs, Hq, tokens_per_seq),
    float32.
    """
    if torch.compiler.is_compiling():
        return traced.decode(
            q, cache, layer, plan, scale=scale, softcap=softcap, sinks=sinks, tree_mask=tree_mask, schedule=schedule,
            indices=indices, return_lse=return_lse, out=out, backend=backend,
        )  # fmt: skip
    pages = arguments.check_cache(cache)
    arguments.check_plan(plan, pages)
    checks.integer("layer", layer, 0, pages.num_layers - 1)
    count, tokens = arguments.places(plan), plan.tokens_per_seq
    shape = (count, tokens, plan.heads_q, pages.head_dim)
    checks.not_float64("q", q)
    checks.tensor("q", q, shape=shape, dtypes=checks.FLOATS, unit_last_stride=True)
    if q.device != pages.device:
        raise ValueError(f"q must be on {pages.device} like the cache, got {q.device}")
    decode_checks.check_current(list(plan.seqs), plan.lengths, pages, "plan_decode again after extending, or grow_plan")
    options: DecodeOptions = {"scale": scale, "softcap": softcap, "sinks": sinks}
    scores = arguments.check_scores(q, count, causal=True, window=plan.window, chunk=plan.chunk or None, **options)
    checks.flag("return_lse", return_lse)
    arguments.check_out(out, q, pages.value_dim)
    tree = arguments.check_tree_mask(tree_mask, plan, q.device)
    selected = decode_checks.check_schedule(schedule, plan, pages, tree)
    decode_checks.check_indices(indices, plan, pages, tree)
    where = arguments.check_backend(backend, q, (sinks,))
    if where != "cpu":
        return _run_kernel(q, pages, layer, plan, scores, tree, selected, indices, return_lse, out)
    if isinstance(plan, StandingPlan):
        o, lse = _decode_now(q, pages, layer, plan, tree, indices, options)
        return result(o, lse, None, out, return_lse)
    with full_precision():
        if indices is not None:
            o, lse = _decode_listed(q, pages, layer, plan, Scoring.of(scores), indices)
        elif tree is not None:
            o, lse = cpu.run_tree(q, pages, layer, plan.seqs, Scoring.of(scores), tree)
        elif selected is not None:
            o, lse = cpu.run_selected(q, pages, layer, plan, Scoring.of(scores), selected)
        else:
            order = torch.from_numpy(plan.order).long()  # plan's rows -> the caller's
            o, lse = cpu.run_paged(plan, q.index_select(0, order).flatten(0, 1), pages, layer, Scoring.of(scores))
            o, lse = o.view(*q.shape[:3], pages.value_dim), lse.view(count, tokens, plan.heads_q)
            o = torch.empty_like(o).index_copy_(0, order, o)
            lse = torch.empty_like(lse).index_copy_(0, order, lse).transpose(1, 2)
    return result(o, lse, sinks, out, return_lse)


def _decode_now(
    q: torch.Tensor,
    pages: PagedKVCache,
    layer: int,
    plan: StandingPlan,
    tree: torch.Tensor | None,
    indices: torch.Tensor | None,
    options: DecodeOptions,
) -> State:
    """decode() of a standing plan on a CPU: the rows of its sequences by the plan as it is now, and the idle ones."""
    count, sinks = len(plan.seqs), options.get("sinks")
    o = q.new_zeros((*q.shape[:3], pages.value_dim))
    lse = q.new_full((len(q), q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
    if sinks is not None:
        lse[:] = sinks[:, None]
    if count:
        mask, its = (None if x is None else x[:count] for x in (tree, indices))
        o[:count], lse[:count] = decode(
            q[:count], pages, layer, plan.now, tree_mask=mask, indices=its, return_lse=True, backend="cpu", **options
        )
    return o, lse


def _decode_listed(
    q: torch.Tensor, pages: PagedKVCache, layer: int, plan: DecodePlan, scoring: Scoring, indices: torch.Tensor
) -> State:
    """decode() over lists of tokens on a CPU. Tokens are decoded if need be."""
    compute = q.dtype if pages.format.dtype == q.dtype else torch.float32

    def load(n: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pages.load_tokens(layer, plan.seqs[n], positions, compute)

    return run_listed(q, load, scoring, indices, value_dim=pages.value_dim, compute=compute)


def _run_kernel(
    q: torch.Tensor,
    pages: PagedKVCache,
    layer: int,
    plan: DecodePlan | StandingPlan,
    scores: Scores,
    tree: torch.Tensor | None,
    selected: torch.Tensor | None,
    indices: torch.Tensor | None,
    return_lse: bool,
    out: torch.Tensor | None,
) -> Result:
    """decode() on a GPU or in the emulator."""
    k_parts, v_parts = pages.parts(layer)
    shape = (*q.shape[:3], pages.value_dim)
    o = out if out is not None and checks.place(out, q) is not None else q.new_empty(shape)
    lse = q.new_empty((len(q), q.shape[2], q.shape[1]), dtype=torch.float32) if return_lse else None
    page_lists: Any = arguments.PageListsOf(pages, plan.seqs)
    if isinstance(plan, StandingPlan):
        page_lists = partial(standing.batch_of, plan, pages)
    if v_parts is None:
        run = _latent_kernel(tree, selected)
        given = (plan, q, pages.format, k_parts, page_lists, plan.lengths, o, lse, scores)
        run(*given, value_dim=pages.value_dim, indices=indices, room=plan.room)
    else:
        _check_apart(indices)
        form = pages.format.beside(pages.value_format)
        both = (plan, q, form, k_parts, v_parts, page_lists, plan.lengths, o, lse, scores)
        kernel.run(*both, tree=tree, selected=selected, room=plan.room)
    if out is not None and out is not o:
        o = out.copy_(o)
    return o if lse is None else (o, lse)


def _latent_kernel(tree: torch.Tensor | None, selected: torch.Tensor | None) -> Any:
    """The kernel over rows that are K and V."""
    for name, given in (("tree_mask", tree), ("schedule", selected)):
        if given is not None:
            raise NotImplementedError(f"{name} has no kernel over a shared_kv cache; use CPU tensors and backend='cpu'")
    from tilewise.gpu import mla

    return mla.run


def _check_apart(indices: torch.Tensor | None) -> None:
    """NotImplementedError for what no kernel over K and V, stored apart, serves."""
    if indices is not None:
        raise NotImplementedError(
            "indices have a kernel over shared_kv caches alone; use a schedule of pages, or CPU tensors, backend='cpu'"
        )
