"""Attention of sequences that share prefixes, given as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from tilewise import arguments, checks, cpu, traced
from tilewise.api import gradients
from tilewise.api.on_cpu import full_precision
from tilewise.api.options import Level, Result, SharedPrefixOptions, State
from tilewise.api.prefill import result
from tilewise.cpu.scoring import Scoring
from tilewise.gpu import calls
from tilewise.plan import plan_shared_prefix

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
