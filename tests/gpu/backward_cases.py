"""Calls of the backward kernels, on a device or in the emulator, judged by the float64 oracle's gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from oracle import assert_gradients, gradient_floors, gradients, randn

from tilewise import BlockSchedule, arguments, functions, reference
from tilewise.gpu import backward
from tilewise.gpu.backward import GradientCall

DOUBLE = torch.float64
# Copies that land late or at once, threads in turn or in any order: how the emulator may run a kernel.
MODES = ({}, {"late": False}, {"seed": 3}, {"late": False, "seed": 5})


def judged(oracle, tensors, scores, *, scale=None, with_lse=False, device="cpu", mode=None, spoil=None, **call):
    """Our gradients, checked. oracle: of the tensors q, k, v and sinks, to (o, lse); spoil: done to the call's tensors.

    o and the LSE are the exact ones, rounded.
    """
    d_o = randn(*tensors[0].shape[:-1], tensors[2].shape[-1], dtype=tensors[0].dtype, seed=97)
    o, lse = oracle(*(x.double() for x in tensors))
    d_lse = randn(*lse.shape, seed=98) if with_lse else None
    exact = gradients(oracle, tensors, d_o, d_lse, dtype=DOUBLE)
    honest = gradients(partial(oracle, dtype=tensors[0].dtype), tensors, d_o, d_lse)
    floors = gradient_floors(oracle, tensors, d_o, scale)
    state = o.to(tensors[0].dtype), lse.float()
    q, k, v = tensors[:3]
    given = [x if x is None else x.to(device) for x in (q, k, v, *state, d_o, d_lse)]
    at = {name: x.to(device) if isinstance(x, torch.Tensor | BlockSchedule) else x for name, x in call.items()}
    scores = replace(
        scores, **{n: getattr(scores, n).to(device) for n in ("sinks", "slopes") if getattr(scores, n) is not None}
    )
    asked = GradientCall(*given[:6], scores, given[6], **at)
    kept = spoil(asked) if spoil else slice(None)
    got = backward.gradients(asked, **(mode or {}))
    assert [x.dtype for x in got[:3]] == [q.dtype] * 3
    found = [x.cpu() for x in got if x is not None]
    assert_gradients([x[kept] for x in found[:3]] + found[3:], [x[kept] for x in exact[:3]] + exact[3:],
                     [x[kept] for x in honest[:3]] + honest[3:], floors, lse)  # fmt: skip
    return got


def dense(q, k, v, sinks=None, *, scale=None, with_lse=False, device="cpu", mode=None, deterministic=False,
          mask=None, schedule=None, **options):  # fmt: skip
    """`attention`'s gradients. options: of the scores, by their public names."""
    pattern = {"mask": mask, "schedule": schedule}
    tensors = (q, k, v) if sinks is None else (q, k, v, sinks)

    def oracle(q, k, v, s=None, **more):
        return reference.attention(q, k, v, sinks=s, scale=scale, **pattern, **options, **more)

    scores = arguments.check_scores(q, len(q), sinks=sinks, scale=scale, **options)
    rest = {"with_lse": with_lse, "device": device, "mode": mode, "deterministic": deterministic}
    function = None if mask is None else functions.of(mask, None)
    return judged(oracle, tensors, scores, scale=scale, function=function, schedule=schedule, **rest)


def starts_of(lengths, index=torch.int32):
    return torch.tensor([0, *accumulate(lengths)], dtype=index)


def packed(lengths_q, lengths_k, heads_q, heads_kv, head_dim, *, dtype=torch.bfloat16, index=torch.int32, device="cpu",
           mode=None, with_lse=False, deterministic=False, spoil=None, value_dim=None, **options):  # fmt: skip
    """`attention_varlen`'s gradients. value_dim: of v, by default as head_dim."""
    q = randn(sum(lengths_q), heads_q, head_dim, dtype=dtype)
    k, v = (
        randn(sum(lengths_k), heads_kv, dim, dtype=dtype, seed=seed)
        for seed, dim in ((1, head_dim), (2, value_dim or head_dim))
    )
    starts = starts_of(lengths_q, index), starts_of(lengths_k, index)
    oracle = lambda q, k, v, **more: reference.attention_varlen(q, k, v, *starts, **options, **more)  # noqa: E731
    scores = arguments.check_scores(q, len(lengths_q), **options)
    rest = {"with_lse": with_lse, "device": device, "mode": mode, "deterministic": deterministic, "spoil": spoil}
    longest = max(lengths_q), max(lengths_k)
    return judged(oracle, (q, k, v), scores, starts_q=starts[0], starts_k=starts[1], max_seqlens=longest, **rest)


def ends_of(*trees):
    """Per token of packed trees, the first one after its subtree. A tree is (tokens, its branches …)."""
    ends: list[int] = []

    def walk(tokens, *branches):
        first = len(ends)
        ends.extend([0] * tokens)
        for branch in branches:
            walk(*branch)
        ends[first : first + tokens] = [len(ends)] * tokens

    for tree in trees:
        walk(*tree)
    return torch.tensor(ends, dtype=torch.int32)


def tree(ends, heads_q, heads_kv, head_dim, *, left=None, dtype=torch.bfloat16, device="cpu", mode=None,
         deterministic=False, value_dim=None):  # fmt: skip
    """Gradients where query i sees the keys j ≤ i < ends[j], with a window of those `left` before it on its path."""
    tokens = len(ends)
    places = torch.arange(tokens)
    visible = (places[None] <= places[:, None]) & (places[:, None] < ends[None])
    positions = None
    if left is not None:
        positions = visible.sum(1, dtype=torch.int32) - 1
        visible &= positions[:, None] - positions[None] <= left

    def oracle(q, k, v, **more):
        o, lse = reference.attention(q[None], k[None], v[None], mask=visible, **more)
        return o[0], lse[0]

    sizes = (heads_q, head_dim), (heads_kv, head_dim), (heads_kv, value_dim or head_dim)
    q, k, v = (randn(tokens, *size, dtype=dtype, seed=n) for n, size in enumerate(sizes))
    scores = arguments.check_scores(q, 1, causal=True, window=(left, 0))
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    rest = {"device": device, "mode": mode, "deterministic": deterministic, "max_seqlens": (tokens, tokens)}
    return judged(oracle, (q, k, v), scores, starts_q=starts, starts_k=starts, ends=ends, positions=positions, **rest)


def spoil_second(call):
    """NaN in everything of the second sequence. Returns the rows of the first and of none else."""
    for x, starts in (
        (call.q, call.starts_q),
        (call.o, call.starts_q),
        (call.d_o, call.starts_q),
        (call.k, call.starts_k),
        (call.v, call.starts_k),
    ):
        x[starts[1] : starts[2]] = math.nan
    call.lse[:, call.starts_q[1] : call.starts_q[2]] = math.nan
    return slice(0, int(min(call.starts_q[1], call.starts_k[1])))


def between_others(monkeypatch, head_dim, *, mode=None, value_dim=None, **options):
    """Packed sequences with tokens before the first start and behind the last one, which hold NaN, as all memory that
    is asked for does: their gradients are 0, those of the sequences what they are without them."""
    empty = torch.empty_like

    def spoilt(*given, **more):
        return empty(*given, **more).fill_(math.nan)

    lengths, (before, behind) = ([70, 5, 63], [90, 0, 129]), ([30, 65], [140, 1])
    starts = [starts_of(x) for x in lengths]
    dims = head_dim, head_dim, value_dim or head_dim
    tensors = [randn(sum(lengths[n > 0]), 2 - (n > 0), dims[n], dtype=torch.bfloat16, seed=n) for n in range(3)]
    d_o, sinks = randn(*tensors[0].shape[:-1], dims[2], dtype=torch.bfloat16, seed=5), randn(2, seed=6)
    o, lse = reference.attention_varlen(*tensors, *starts, sinks=sinks, **options)
    scores = arguments.check_scores(tensors[0], 3, sinks=sinks, **options)

    def found(q, k, v, o, lse, d_o, starts):
        given = {"starts_q": starts[0], "starts_k": starts[1], "max_seqlens": (70, 129), "deterministic": True}
        return backward.gradients(GradientCall(q, k, v, o, lse, d_o, scores, **given), **(mode or {}))

    o, lse = o.to(torch.bfloat16), lse.float()
    want = found(*tensors, o, lse, d_o, starts)
    monkeypatch.setattr(torch, "empty_like", spoilt)
    wide = lambda x, n: torch.nn.functional.pad(x, (0, 0, 0, 0, before[n], behind[n]), value=math.nan)  # noqa: E731
    places = [wide(x, n) for x, n in zip((*tensors, o, d_o), (0, 1, 1, 0, 0), strict=True)]
    lse = torch.nn.functional.pad(lse, (before[0], behind[0]), value=math.nan)
    got = found(*places[:4], lse, places[4], [x + before[n] for n, x in enumerate(starts)])
    for n, (ours, theirs) in enumerate(zip(got[:3], want[:3], strict=True)):
        side = int(n > 0)
        torch.testing.assert_close(ours, wide(theirs, side).nan_to_num(0.0), rtol=0, atol=0)
    torch.testing.assert_close(got.d_sinks, want.d_sinks)
