"""Attention over tensors: dense, packed, over shared prefixes; and the plan of a dense call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from tilewise import arguments, checks, cpu, functions, traced
from tilewise.api import gradients, gradients_on_gpu
from tilewise.api.on_cpu import dense_on_cpu, full_precision, packed_on_cpu, plan_on_cpu
from tilewise.api.options import (
    AttentionOptions,
    Level,
    Mask,
    Result,
    Score,
    SharedPrefixOptions,
    State,
    VarlenOptions,
)
from tilewise.cpu import dropout
from tilewise.cpu.scoring import Scoring
from tilewise.gpu import calls, named, prefill
from tilewise.gpu.abi import FP8
from tilewise.plan import Plan, Window, plan_shared_prefix
from tilewise.plan.schedule import BlockSchedule
from tilewise.scores import ScoreOptions
from tilewise.state import add_sinks

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> State: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Result: ...
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
    mask: Mask | None = None,
    score: Score | None = None,
    exact: bool = False,
    deterministic: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attention over a batch of equally long sequences: softmax(q kᵀ · scale) v.

    q: (B, Nq, Hq, D) float32, float16, bfloat16 or float8_e4m3fn; k: (B, Nk, Hkv, D), v: (B, Nk, Hkv, Dv) of the same
    dtype; Hq a multiple of Hkv; D and Dv up to 576.
    causal: query i sees keys up to i + Nk − Nq. window: (left, right) keys seen to either side, None for no limit.
    scale: of the scores, `D ** -0.5` if None. softcap c > 0: scores become c · tanh(scores / c).
    sinks: (Hq,), a logit that joins the softmax denominator only; it counts in the LSE.
    alibi_slopes: (Hq,) or (B, Hq), adds −slope · |i + Nk − Nq − j| after soft-capping.
    schedule: a BlockSchedule; keys outside its blocks are not seen. out: (B, Nq, Hq, Dv), written and returned.
    mask: a function (b, h, q, k) -> bool, whether query q of head h of sequence b sees key k, counted from 0 (no
    bottom-right shift). score: a function (s, b, h, q, k) -> the score to take for s, the scaled product of q and k.
    Both are traced: docs/guides/masks.md says what they may do. causal, window, schedule and mask must all allow a key.
    exact: the standard softmax where a GPU kernel would use the lazy one, whose weights may be 2^8 times larger before
    they are divided by their sum; both hold to the same tolerance, as long as |q · k · scale| · log2 e is below 2^24.
    q_descale, k_descale, v_descale: of FP8 inputs, (Hkv,) or (B, Hkv) float32: what the stored values stand for is
    values · descale, for q by the KV head that it reads. None is 1. The output is bfloat16. The weights of the softmax
    are rounded to FP8 on a GPU that multiplies FP8, and to float16 on others.
    deterministic: gradients have the same bits in every run, on a GPU for a little of the speed; on the CPU they always
    do. torch.use_deterministic_algorithms(True) asks for it, too.
    dropout_p: the share of the softmax's weights that is dropped, below 1, the others being divided by 1 − dropout_p.
    dropout_seed: () int64; which weights are dropped follows from it and from where they stand, and None draws one from
    torch's generator. The LSE stays as it is. On a GPU a call with dropout is made of torch's products, and waits.
    backend: "auto" (a GPU kernel for CUDA tensors, the CPU backend for CPU tensors), "cuda", "cpu", or "emulator": the
    GPU kernel's source run on CPU tensors, slow; "emulator:NAME" for a rung of the ladder by name.

    CUDA tensors: these dtypes, head_dim up to 256, compute capability 8.x, 9.0, 10.x or 12.x (docs/guides/cards.md); a
    schedule and what functions capture are on their device. The call goes on the current stream and does not wait.

    Gradients go to q, k, v and sinks, from o and from the LSE. There are none of alibi_slopes, of what functions
    capture and of FP8 inputs: a call that is asked for them raises. There are no second derivatives.

    Returns o (B, Nq, Hq, Dv), with return_lse also the LSE (B, Hq, Nq) float32. A NaN or infinity in a key that a
    window or a mask (on a GPU also `causal`) hides may still reach the rows of its tile, as in other fused kernels.
    """
    descales = (q_descale, k_descale, v_descale)
    key = None
    if isinstance(q, torch.Tensor) and q.is_cuda and not torch.compiler.is_compiling():
        flags: tuple[Any, ...] = (causal, exact, return_lse, deterministic, window, scale, softcap, backend, dropout_p)
        function = None if mask is None and score is None else functions.of(mask, score)
        if schedule is not None or function is not None:
            flags += calls.pattern_key(q, k, schedule, function)
        key, known = calls.known_call(q, k, v, (sinks, alibi_slopes, out, *descales), flags)
        if known is not None and known.plain:
            return known.again(q, k, v, schedule, function)
        if known is not None:
            return known(q, k, v, sinks, alibi_slopes, out, descales, schedule=schedule, function=function)
    options: ScoreOptions = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "sinks": sinks,
        "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    rest: dict[str, Any] = {
        "exact": exact, "deterministic": deterministic, "return_lse": return_lse, "out": out, "backend": backend,
        "dropout_p": dropout_p, "dropout_seed": dropout.drawn(dropout_p, dropout_seed, q),
    }  # fmt: skip
    return _dense(q, k, v, descales, key, options, {"schedule": schedule, "mask": mask, "score": score}, rest)


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: arguments.Descales,
    key: Any,
    options: ScoreOptions,
    pattern: dict[str, Any],
    rest: dict[str, Any],
) -> Result:
    """A call of `attention` as it is made the first time. key: what it is kept under; options: of the scores."""
    if torch.compiler.is_compiling():
        if all(x is None for x in pattern.values()):
            return traced.attention(q, k, v, descales, **options, **rest)
        return traced.outside(attention, (q, k, v), descales, **pattern, **options, **rest)
    sinks, slopes, out, backend, return_lse = options["sinks"], options["alibi_slopes"], *_of(rest)
    if arguments.wants_gradients(q, k, v, sinks, slopes):
        function = gradients.check(q, out, backend, slopes, pattern["mask"], pattern["score"], descales)
        node = gradients.Dense(attention, options, {**pattern, **gradients.kept(rest)}, function)
        return gradients.asked(gradients.apply(node, q, k, v, sinks, rest["dropout_seed"]), return_lse)
    call = arguments.check_call(q, k, v, options, descales=descales, rungs=True, **pattern, **rest)
    if call.where == arguments.EMULATOR and (kernel := named.find(backend)):
        o, lse = named.run(kernel, q, k, v, {**options, **pattern}, call.scores.scale)
    elif call.where == "cpu":
        o, lse = dense_on_cpu(q, k, v, call, out)
    elif call.dropout is not None:
        o, lse = gradients_on_gpu.dropped(call, q, k, v)
    else:
        bound = calls.bind(q, call.where, call.scores.rule, return_lse, key, v)
        return bound(q, k, v, sinks, slopes, out, call.descales, schedule=pattern["schedule"], function=call.function)
    return result(o, lse, sinks, out, return_lse)


def _of(rest: dict[str, Any]) -> tuple[torch.Tensor | None, str, bool]:
    return rest["out"], rest["backend"], rest["return_lse"]


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> torch.Tensor: ...
@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> State: ...
@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    return_lse: bool,
    **options: Unpack[VarlenOptions],
) -> Result: ...
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
    mask: Mask | None = None,
    score: Score | None = None,
    page_table: torch.Tensor | None = None,
    exact: bool = False,
    deterministic: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attention over sequences of different lengths, packed end to end; empty ones are allowed.

    q: (total_q, Hq, D); k, v: (total_k, Hkv, D or Dv). cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 or int64, where each
    sequence starts, beginning with 0 and ending with the total. schedule: one BlockSchedule that fits every sequence,
    or one (or None) for each. mask, score: b is the sequence, q and k count within it. Everything else as in
    `attention`; alibi_slopes (Hq,) or (B, Hq).

    page_table: (B, pages per sequence) int32; then k, v are (pages, page_size, Hkv, D or Dv), and token t of sequence b
    is row t % page_size of page `page_table[b, t // page_size]`; cu_seqlens_k tells the lengths alone, and entries
    beyond them may be anything. With queries that are a sequence's last tokens and causal=True this is chunked prefill.

    On a GPU cu_seqlens may be there or on the CPU. There, their values are not looked at, which would make the CPU
    wait; whatever they say, nothing outside of the tensors is touched.

    Returns o (total_q, Hq, Dv), with return_lse also the LSE (Hq, total_q) float32.
    """
    options: ScoreOptions = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "sinks": sinks,
        "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    descales = (q_descale, k_descale, v_descale)
    rest: dict[str, Any] = {
        "exact": exact, "deterministic": deterministic, "return_lse": return_lse, "out": out, "backend": backend,
        "dropout_p": dropout_p, "dropout_seed": dropout.drawn(dropout_p, dropout_seed, q),
    }  # fmt: skip
    pattern: dict[str, Any] = {"schedule": schedule, "mask": mask, "score": score}
    compiling, regular = torch.compiler.is_compiling(), schedule is None and mask is None and score is None
    if compiling:
        packed = (q, k, v, cu_seqlens_q, cu_seqlens_k)
        if regular:
            return traced.attention_varlen(*packed, page_table, descales, **options, **rest)
        return traced.outside(attention_varlen, packed, descales, page_table=page_table, **pattern, **options, **rest)
    key = None
    if regular and _on_device(q, cu_seqlens_q, cu_seqlens_k):  # then nothing that is checked is a value
        flags: tuple[Any, ...] = (causal, exact, return_lse, deterministic, window, scale, softcap, backend, dropout_p)
        others = (sinks, alibi_slopes, out, *descales, cu_seqlens_q, cu_seqlens_k, page_table)
        key, known = calls.known_call(q, k, v, others, flags)
        if known is not None:
            starts = arguments.starts_like(q, cu_seqlens_q, cu_seqlens_k)
            return known(q, k, v, sinks, alibi_slopes, out, descales, starts, page_table)
    return _packed(q, k, v, (cu_seqlens_q, cu_seqlens_k), page_table, descales, key, options, pattern, rest)


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor | None,
    descales: arguments.Descales,
    key: Any,
    options: ScoreOptions,
    pattern: dict[str, Any],
    rest: dict[str, Any],
) -> Result:
    """A call of `attention_varlen` as it is made the first time; arguments as of `_dense`."""
    sinks, slopes, out, backend, return_lse = options["sinks"], options["alibi_slopes"], *_of(rest)
    if arguments.wants_gradients(q, k, v, sinks, slopes):
        function = gradients.check(q, out, backend, slopes, pattern["mask"], pattern["score"], descales)
        node = gradients.Packed(attention_varlen, options, {**pattern, **gradients.kept(rest)}, function)
        given = (q, k, v, *cu_seqlens, page_table, sinks, rest["dropout_seed"])
        return gradients.asked(gradients.apply(node, *given), return_lse)
    batch, schedule = arguments.check_sequences(*cu_seqlens), pattern["schedule"]
    paged = page_table is not None
    call = arguments.check_call(q, k, v, options, descales=descales, batch=batch, paged=paged, **pattern, **rest)
    starts_q, starts_k = _checked_starts(*cu_seqlens, k, page_table, call.sizes)
    if schedule is not None:
        arguments.check_schedules(schedule, starts_q, starts_k, call.sizes, q.device)
    if call.where != "cpu" and call.dropout is not None:
        return _dropped(q, k, v, call, cu_seqlens, page_table, out, return_lse)
    if call.where != "cpu":
        bound = calls.bind(q, call.where, call.scores.rule, return_lse, key, v)
        starts = arguments.starts_like(q, *cu_seqlens)
        return bound(
            q, k, v, sinks, slopes, out, call.descales, starts, page_table, schedule=schedule, function=call.function
        )
    assert starts_q is not None  # on the CPU, as everything is here
    assert starts_k is not None
    if page_table is not None:
        k, v = (arguments.gather(x, page_table, starts_k) for x in (k, v))
    o, lse = packed_on_cpu(q, k, v, call, starts_q, starts_k, out)
    return result(o, lse, sinks, out, return_lse)


def _dropped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: arguments.Call,
    starts: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor | None,
    out: torch.Tensor | None,
    return_lse: bool,
) -> Result:
    """`attention_varlen` with dropout where kernels run: those have none."""
    if page_table is not None:
        k, v = (arguments.gather(x, page_table, starts[1].tolist()) for x in (k, v))
    o, lse = gradients_on_gpu.dropped(call, q, k, v, starts)
    return result(o, lse, call.scores.sinks, out, return_lse)


def _on_device(*tensors: object) -> bool:
    return all(isinstance(x, torch.Tensor) and x.is_cuda for x in tensors)


def _checked_starts(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    k: torch.Tensor,
    page_table: torch.Tensor | None,
    sizes: arguments.Sizes,
) -> tuple[list[int] | None, list[int] | None]:
    """Their values, None on a GPU, where they stay unread: looking at them would make the CPU wait."""
    paged = page_table is not None
    if page_table is not None:
        arguments.check_page_table(page_table, k, cu_seqlens_q.shape[0] - 1)
    starts_q = arguments.check_starts("cu_seqlens_q", cu_seqlens_q, sizes.seqlen_q, "q")
    starts_k = arguments.check_starts("cu_seqlens_k", cu_seqlens_k, None if paged else sizes.seqlen_k, "k")
    if page_table is not None and starts_k is not None:
        arguments.check_pages(page_table, k, starts_k)
    return starts_q, starts_k


@overload
def shared_prefix_attention(
    q: torch.Tensor,
    levels: Sequence[Level],
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[SharedPrefixOptions],
) -> torch.Tensor: ...
@overload
def shared_prefix_attention(
    q: torch.Tensor,
    levels: Sequence[Level],
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[SharedPrefixOptions],
) -> State: ...
@overload
def shared_prefix_attention(
    q: torch.Tensor,
    levels: Sequence[Level],
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    **options: Unpack[SharedPrefixOptions],
) -> Result: ...
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
    deterministic: bool = False,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attention of sequences that share prefixes, each prefix read once for all of them.

    q: (B, Nq, Hq, D); k, v: (B, Nk, Hkv, D or Dv), each sequence's own keys; lengths: (B,), how many of them are valid,
    all if None. levels: from the root down, each (k, v) or (k, v, lengths) with k, v (B_level, N_level, Hkv, D or Dv).
    Each batch size divides the next and the last divides B; sequence b belongs to member `b // (B // B_level)` of a
    level. Prefixes are in full view of every query; `causal` lies over the own keys alone, bottom-right. Gradients go
    to q, to every k and v, to sinks, and come from the LSE as well; deterministic as in `attention`.

    Returns o (B, Nq, Hq, Dv), with return_lse also the LSE (B, Hq, Nq) float32.
    """
    scoring: dict[str, Any] = {"causal": causal, "scale": scale, "softcap": softcap}
    rest: dict[str, Any] = {"deterministic": deterministic, "backend": backend}
    if torch.compiler.is_compiling():
        given = {"sinks": sinks, "out": out, "return_lse": return_lse, **scoring, **rest}
        return traced.shared_prefix_attention(q, levels, k, v, lengths, **given)
    batch, seqlen_q, _, heads_q, heads_kv, *dims = arguments.check_qkv(q, k, v)
    scores = arguments.check_scores(q, batch, sinks=sinks, **scoring)
    checks.flag("return_lse", return_lse)
    checks.flag("deterministic", deterministic)
    arguments.check_out(out, q, v.shape[-1])
    sources, shapes = arguments.check_levels(levels, q, heads_kv, v.shape[-1])
    of_levels = [x for source in sources for x in source]
    own = None if lengths is None else arguments.check_lengths("lengths", lengths, *k.shape[:2])
    valid = [*(shape[2] for shape in shapes), own]
    if arguments.wants_gradients(q, k, v, sinks, *of_levels):
        gradients.check(q, out, backend)
        node = gradients.SharedPrefix(shared_prefix_attention, scoring, rest, valid)
        return gradients.asked(gradients.apply(node, q, k, v, sinks, *of_levels), return_lse)
    sources.append((k, v))
    shapes.append((batch, k.shape[1], own))
    where = arguments.check_backend(backend, q, [x for source in sources for x in source] + [sinks])
    if where != "cpu":
        calls.check_served(q, where, v)
        o, lse = calls.shared_prefix(q, sources, valid, scores)
        return result(o, lse, sinks, out, return_lse)

    sizes = (heads_q, heads_kv, *dims)
    plan = plan_shared_prefix(batch, seqlen_q, shapes, *sizes, causal=causal, io_bytes=q.element_size())
    with full_precision():
        place = checks.place(out, q, *(x for source in sources for x in source))
        o, lse = cpu.run(plan, q, sources, Scoring.of(scores), place)
    return result(o, lse.view(batch, seqlen_q, heads_q).transpose(1, 2), sinks, out, return_lse)


def plan_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    schedule: BlockSchedule | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    exact: bool = False,
    backend: str = "auto",
    **options: Unpack[ScoreOptions],
) -> Plan:
    """The plan that `attention` makes for q (B, Nq, Hq, D), k (B, Nk, Hkv, D), to look at: `.show()`, `.draw(path)`.

    The other arguments as in `attention`. For CUDA tensors, and with backend="emulator" for CPU tensors, these are the
    tiles of the GPU kernel: which one it is and why, their sizes, the heads packed into one, the order in which thread
    blocks take them.
    """
    rest: dict[str, Any] = {
        "descales": (None, None, None), "deterministic": False, "return_lse": False, "out": None, "backend": backend,
        "dropout_p": 0.0, "dropout_seed": None,
    }  # fmt: skip
    pattern: dict[str, Any] = {"schedule": schedule, "mask": mask, "score": score}
    call = arguments.check_call(q, k, k, options, exact=exact, **pattern, **rest)
    if call.where != "cpu":
        calls.check_served(q, call.where)
        return prefill.plan_of(q, k, call.scores)
    io_bytes = 4 if q.dtype == FP8 else q.element_size()  # FP8 is widened first
    return plan_on_cpu(call, io_bytes)


def result(
    o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor | None, return_lse: bool
) -> Result:
    """What the caller gets: sinks joined, `out` filled, the LSE contiguous."""
    if sinks is not None:
        o, lse = add_sinks(o, lse, sinks)
    if out is not None and out is not o:
        out.copy_(o)
        o = out
    return (o, lse.contiguous()) if return_lse else o
