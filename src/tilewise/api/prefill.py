"""Attention over tensors, dense and packed; and the plan of a dense call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from tilewise import arguments, checks, functions, traced
from tilewise.api import gradients, gradients_on_gpu, rewritten
from tilewise.api.on_cpu import dense_on_cpu, packed_on_cpu, plan_on_cpu
from tilewise.api.options import (
    AttentionOptions,
    Mask,
    Result,
    Score,
    State,
    VarlenOptions,
)
from tilewise.cpu import dropout
from tilewise.gpu import calls, named, prefill
from tilewise.gpu.abi import FP8
from tilewise.plan import Plan, Window
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
# More than 80 lines: its arguments and what they mean take that many.
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    qv: torch.Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    chunk: int | None = None,
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
    chunk: blocks of so many positions, None for none; query i sees keys of the block of position i + Nk − Nq alone.
    qv: (B, Nq, Hq, Dv), a second query, for the values: scores are (q · k + qv · v) · scale. D + Dv is at most 576
    then, and K and V are copied side by side.
    scale: of the scores, `D ** -0.5` if None, with qv `(D + Dv) ** -0.5`.
    softcap c > 0: scores become c · tanh(scores / c).
    sinks: (Hq,), a logit that joins the softmax denominator only; it counts in the LSE.
    alibi_slopes: (Hq,) or (B, Hq), adds −slope · |i + Nk − Nq − j| after soft-capping.
    schedule: a BlockSchedule; keys outside its blocks are not seen. out: (B, Nq, Hq, Dv), written and returned.
    mask: a function (b, h, q, k) -> bool, whether query q of head h of sequence b sees key k, counted from 0 (no
    bottom-right shift). score: a function (s, b, h, q, k) -> the score to take for s, the scaled product of q and k.
    Both are traced: docs/guides/masks.md says what they may do. causal, window, chunk, schedule and mask must all allow
    a key.
    exact: the standard softmax where a GPU kernel would use the lazy one, whose weights may be 2^8 times larger before
    they are divided by their sum; both hold to the same tolerance, as long as |q · k · scale| · log2 e is below 2^24.
    q_descale, k_descale, v_descale: of FP8 inputs, (Hkv,) or (B, Hkv) float32: what the stored values stand for is
    values · descale, for q by the KV head that it reads. None is 1. The output is bfloat16. The weights of the softmax
    are rounded to FP8 on a GPU that multiplies FP8, and to float16 on others.
    deterministic: gradients have the same bits in every run, on a GPU for a little of the speed; on the CPU they always
    do. torch.use_deterministic_algorithms(True) asks for it, too.
    dropout_p: the share of the softmax's weights that is dropped, below 1, the others being divided by 1 − dropout_p.
    dropout_seed: () int64; which weights are dropped follows from it and from where they stand, and None draws one from
    torch's generator. The LSE stays as it is. On a GPU kernels by mma.sync do it; FP8, head_dim above 256, and dropout
    beside a schedule, a mask or a score function, go by torch's products, which are slow and wait.
    backend: "auto" (a GPU kernel for CUDA tensors, the CPU backend for CPU tensors), "cuda", "cpu", or "emulator": the
    GPU kernel's source run on CPU tensors, slow; "emulator:NAME" for a rung of the ladder by name.

    CUDA tensors: these dtypes, head_dim up to 576 (FP8: 256), compute capability 8.x, 9.0, 10.x or 12.x
    (docs/guides/cards.md); a schedule and what functions capture are on their device. The call goes on the current
    stream and does not wait.

    Gradients go to q, k, v and sinks, from o and from the LSE. There are none of alibi_slopes, of what functions
    capture and of FP8 inputs: a call that is asked for them raises. There are no second derivatives.

    Returns o (B, Nq, Hq, Dv), with return_lse also the LSE (B, Hq, Nq) float32. A NaN or infinity in a key or
    value that `causal`, a window or a mask hides may still reach the rows of its tile, as in other fused kernels.
    """
    if qv is not None:
        q, k = rewritten.with_qv(q, k, v, qv)
    if chunk is not None and not torch.compiler.is_compiling():
        others = (schedule, mask, score, dropout_p or None)
        if rewritten.packs(q, k, v, backend, others, (out, alibi_slopes, q_descale, k_descale, v_descale)):
            return _in_chunks(
                q, k, v, arguments.check_chunk(chunk), out, return_lse, causal=causal, window=window, scale=scale,
                softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, exact=exact, deterministic=deterministic,
                q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, backend=backend, dropout_p=dropout_p,
                dropout_seed=dropout_seed,
            )  # fmt: skip
        chunk, mask = rewritten.chunked(q, k, chunk, mask, schedule, backend)
    descales = (q_descale, k_descale, v_descale)
    key = None
    if isinstance(q, torch.Tensor) and q.is_cuda and not torch.compiler.is_compiling():
        flags: tuple[Any, ...] = (causal, exact, return_lse, deterministic, window, scale, softcap, backend, dropout_p)
        function = None if mask is None and score is None else functions.of(mask, score)
        if schedule is not None or function is not None:
            flags += calls.pattern_key(q, k, schedule, function)
        key, known = calls.known_call(q, k, v, (sinks, alibi_slopes, out, *descales, dropout_seed), flags)
        if known is not None and known.plain:
            return known.again(q, k, v, schedule, function)
        if known is not None:
            seed = dropout.drawn(dropout_p, dropout_seed, q)
            return known(q, k, v, sinks, alibi_slopes, out, descales, schedule=schedule, function=function, seed=seed)
    options: ScoreOptions = {
        "causal": causal, "window": window, "chunk": chunk, "scale": scale, "softcap": softcap, "sinks": sinks,
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
    elif call.dropout is not None and not gradients_on_gpu.kernels_drop(call, q):
        o, lse = gradients_on_gpu.dropped(call, q, k, v)
    else:
        return _bound(q, v, call, return_lse, key)(
            q, k, v, sinks, slopes, out, call.descales, schedule=pattern["schedule"], function=call.function,
            seed=_seed(call),
        )  # fmt: skip
    return result(o, lse, sinks, out, return_lse)


def _bound(q: torch.Tensor, v: torch.Tensor, call: arguments.Call, return_lse: bool, key: Any) -> calls.GpuCall:
    """The call bound to its kernel."""
    rule = call.scores.rule
    if call.dropout is not None:
        rule = replace(rule, dropout=call.dropout.p)
    return calls.bind(q, call.where, rule, return_lse, key, v)


def _seed(call: arguments.Call) -> torch.Tensor | None:
    return None if call.dropout is None else torch.as_tensor(call.dropout.seed)


def _in_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chunk: int,
    out: torch.Tensor | None,
    return_lse: bool,
    **options: Any,
) -> Result:
    """A call of `attention` for kernels, each of its blocks of positions being a packed sequence."""
    sizes = arguments.check_qkv(q, k, v, fp8=True)
    arguments.check_out(out, q, sizes.value_dim)
    starts = rewritten.packed_starts(*sizes[:3], chunk, q.device)
    into = None if out is None else out.flatten(0, 1)
    made = attention_varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *starts, out=into, return_lse=return_lse, **options
    )
    o, lse = made if isinstance(made, tuple) else (made, None)
    o = o.unflatten(0, q.shape[:2]) if out is None else out
    return o if lse is None else (o, lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous())


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
    qv: torch.Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    chunk: int | None = None,
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
    `attention`; qv (total_q, Hq, Dv), alibi_slopes (Hq,) or (B, Hq).

    page_table: (B, pages per sequence) int32; then k, v are (pages, page_size, Hkv, D or Dv), and token t of sequence b
    is row t % page_size of page `page_table[b, t // page_size]`; cu_seqlens_k tells the lengths alone, and entries
    beyond them may be anything. With queries that are a sequence's last tokens and causal=True this is chunked prefill.

    On a GPU cu_seqlens may be there or on the CPU. There, their values are not looked at, which would make the CPU
    wait; whatever they say, nothing outside of the tensors is touched.

    Returns o (total_q, Hq, Dv), with return_lse also the LSE (Hq, total_q) float32.
    """
    options: ScoreOptions = {
        "causal": causal, "window": window, "chunk": chunk, "scale": scale, "softcap": softcap, "sinks": sinks,
        "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    if qv is not None:
        q, k, v, page_table = _with_qv(q, k, v, qv, (cu_seqlens_q, cu_seqlens_k), page_table, backend)
    if chunk is not None and not torch.compiler.is_compiling():
        chunk, mask = rewritten.chunked(q, k, chunk, mask, schedule, backend, (cu_seqlens_q, cu_seqlens_k))
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
        others = (sinks, alibi_slopes, out, *descales, cu_seqlens_q, cu_seqlens_k, page_table, dropout_seed)
        key, known = calls.known_call(q, k, v, others, flags)
        if known is not None:
            starts = arguments.starts_like(q, cu_seqlens_q, cu_seqlens_k)
            return known(q, k, v, sinks, alibi_slopes, out, descales, starts, page_table, seed=rest["dropout_seed"])
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
    if call.where != "cpu" and call.dropout is not None and not gradients_on_gpu.kernels_drop(call, q):
        return _dropped(q, k, v, call, cu_seqlens, page_table, out, return_lse)
    if call.where != "cpu":
        starts = arguments.starts_like(q, *cu_seqlens)
        return _bound(q, v, call, return_lse, key)(
            q, k, v, sinks, slopes, out, call.descales, starts, page_table, schedule=schedule, function=call.function,
            seed=_seed(call),
        )  # fmt: skip
    assert starts_q is not None  # on the CPU, as everything is here
    assert starts_k is not None
    if page_table is not None:
        k, v = (arguments.gather(x, page_table, starts_k) for x in (k, v))
    o, lse = packed_on_cpu(q, k, v, call, starts_q, starts_k, out)
    return result(o, lse, sinks, out, return_lse)


def _with_qv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q and k with qv and v behind them; v; the page table: on the CPU None, for only the tokens there are, are copied.

    A kernel does not know here how many those are: of its pages all are copied.
    """
    if page_table is None:
        return *rewritten.with_qv(q, k, v, qv, packed=True), v, None
    if torch.compiler.is_compiling() or not (isinstance(q, torch.Tensor) and rewritten.on_cpu(q, backend)):
        return *rewritten.with_qv(q, k, v, qv, packed=True, paged=True), v, page_table
    sizes = arguments.check_qkv(q, k, v, packed=True, paged=True)
    arguments.check_sequences(*cu_seqlens)
    _, starts_k = _checked_starts(*cu_seqlens, k, page_table, sizes)
    if starts_k is not None:
        k, v = rewritten.out_of_pages(k, v, page_table, starts_k)
        page_table = None
    return *rewritten.with_qv(q, k, v, qv, packed=True, paged=page_table is not None), v, page_table


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
    """`attention_varlen` with dropout where kernels run that do not have it."""
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


def plan_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    schedule: BlockSchedule | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    value_dim: int | None = None,
    exact: bool = False,
    backend: str = "auto",
    **options: Unpack[ScoreOptions],
) -> Plan:
    """The plan that `attention` makes for q (B, Nq, Hq, D), k (B, Nk, Hkv, D), to look at: `.show()`, `.draw(path)`.

    value_dim: the head_dim of v, k's if None. The other arguments as in `attention`. For CUDA tensors, and with
    backend="emulator" for CPU tensors, these are the tiles of the GPU kernel: which one it is and why, their sizes, the
    heads packed into one, the order in which thread blocks take them.
    """
    rest: dict[str, Any] = {
        "descales": (None, None, None), "deterministic": False, "return_lse": False, "out": None, "backend": backend,
        "dropout_p": 0.0, "dropout_seed": None,
    }  # fmt: skip
    if (chunk := options.get("chunk")) is not None:
        chunk, mask = rewritten.chunked(q, k, chunk, mask, schedule, backend)
        options = {**options, "chunk": chunk}
    pattern: dict[str, Any] = {"schedule": schedule, "mask": mask, "score": score}
    call = arguments.check_call(q, k, k, options, exact=exact, **pattern, **rest)
    if value_dim is not None:
        call = call._replace(sizes=call.sizes._replace(value_dim=checks.head_dim("value_dim", value_dim)))
    if call.where != "cpu":
        calls.check_served(q, call.where, k.new_empty(0, call.sizes.value_dim))
        return prefill.plan_of(q, k, call.scores, call.sizes.value_dim)
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
