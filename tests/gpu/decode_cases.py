"""What the suites of the GPU decode kernel share: caches with poison in them, trees, calls that are judged.

A call on CPU tensors runs in the emulator, one on CUDA tensors on the card: the same cases serve both.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from oracle import assert_elements, assert_state, logit_error, poison, randn

from tilewise import PagedKVCache, plan_decode, reference
from tilewise.gpu import decode as decoding
from tilewise.plan.worklist import FAR, Splitting, WorkList
from tilewise.scores import Scores

BF16, FP16 = torch.bfloat16, torch.float16
FORMATS = ("bf16", "fp16", "fp8", "int8", "int4")
# (late, seed) of the emulator: asynchronous work lands late or at once, threads run in this order or that
MODES = ((True, 0), (False, 0), (True, 1), (False, 7))
# Every way of cutting within few tokens: a warp's own, a block's whole, a block's pieces
UNCUT = Splitting(pieces=((FAR, 1 << 19),))
FOLDED = Splitting(pieces=((FAR, 32),), whole=True)
SMALL = Splitting(pieces=((150, 1024), (FAR, 64)), shared=64, tile_rows=16, whole=False)


def grow(cache: PagedKVCache, seqs: Sequence[int], counts: Any, seed: int = 0, size: float = 1.0) -> None:
    """Extend and write normal values; `size` scales the keys, and so the logits."""
    slots = cache.extend(seqs, counts)
    for layer in range(cache.num_layers):
        dims = (cache.head_dim, cache.value_dim)
        k, v = (randn(len(slots), cache.num_kv_heads, d, seed=1000 * seed + 2 * layer + i) for i, d in enumerate(dims))
        cache.write(layer, slots, k * size, v)


def empty_cache(
    pages: int, *, page_size: int = 16, kv_heads: int = 2, head_dim: int = 64, **options: Any
) -> PagedKVCache:
    return PagedKVCache(pages, page_size, kv_heads, head_dim, **options)


def make_cache(
    lengths: Sequence[int], *, page_size: int = 16, seed: int = 0, size: float = 1.0, spare: int = 5, **options: Any
) -> tuple[PagedKVCache, list[int]]:
    """Unshared sequences of these lengths, in pages that stand in no order; `spare` pages are left for them to grow."""
    pages = sum(-(-n // page_size) + 1 for n in lengths) + spare
    cache = empty_cache(pages, page_size=page_size, **options)
    seqs = [cache.allocate() for _ in lengths]
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):  # page by page in turns: neighbours are apart
        counts = [min(page_size, n - d) for d, n in zip(done, lengths, strict=True)]
        grow(cache, seqs, counts, seed=seed + sum(done), size=size)
        done = [d + c for d, c in zip(done, counts, strict=True)]
    return cache, seqs


def make_tree(
    fanouts: Sequence[int], tokens: Sequence[int], *, page_size: int = 16, seed: int = 0, **options: Any
) -> tuple[PagedKVCache, list[int]]:
    """Sequences of a tree: `tokens[level]` tokens a node, `fanouts[level]` children a node, by fork."""
    nodes = accumulate(fanouts, lambda a, b: a * b)
    pages = sum(n * (t // page_size + 2) for n, t in zip(nodes, tokens, strict=True)) + 40
    cache = empty_cache(pages, page_size=page_size, **options)
    level = [cache.allocate()]
    for depth, (fanout, count) in enumerate(zip(fanouts, tokens, strict=True)):
        level = [s if n == 0 else cache.fork(s) for s in level for n in range(fanout)]
        grow(cache, level, [count] * len(level), seed=seed + depth)
    return cache, level


def stored(cache: PagedKVCache, layer: int = 0, *, runs: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copies of a layer's components with poison wherever no sequence has a token: NaN, or codes for it.

    runs: scales lie as on a card, those of a page and head one after another.
    """
    held = np.zeros((cache.num_pages, cache.page_size), np.bool_)
    for seq, length in cache.lengths.items():
        for n, page in enumerate(cache.page_list(seq).tolist()):
            held[page, : max(0, length - n * cache.page_size)] = True
    free = torch.from_numpy(~held)
    found = []
    for components in (cache._k, cache._v):
        parts = []
        for n, component in enumerate(components):
            x = component[layer].clone()
            if x.dtype.is_floating_point and x.element_size() > 1:
                x[free] = math.nan
            else:
                x.view(torch.uint8)[free] = 0x7F
            if runs and n > 0:
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            parts.append(x)
        found.append(parts)
    return found[0], found[1]


def garbage_pages(pages: np.ndarray, seed: int = 0) -> np.ndarray:
    """A page list with any numbers after its end."""
    beyond = np.random.default_rng(seed).integers(-(2**31), 2**31, 3)
    return np.concatenate([pages, beyond]).astype(np.int32)


def decode(
    cache: PagedKVCache,
    seqs: Sequence[int],
    q: torch.Tensor,
    *,
    share: bool = False,
    mode: tuple[bool, int] = MODES[0],
    window: tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    splitting: Splitting | None = SMALL,
    scale: float | None = None,
    runs: bool = False,
    parts: Any = None,
    plan: Any = None,
    device: str = "cpu",
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by the kernel, into memory that was NaN, out of pages with poison between the tokens.

    device: where it runs; what goes in and comes out is on the CPU.
    """
    if plan is None:
        asked = {"window": window, "chunk": chunk, "share_prefix": share}
        plan = plan_decode(cache, seqs, num_heads=q.shape[2], tokens_per_seq=q.shape[1], **asked)
    k_parts, v_parts = parts or stored(cache, runs=runs)
    k_parts, v_parts = ([_moved(x, device) for x in of] for of in (k_parts, v_parts))
    like = q if cache.value_dim == q.shape[-1] else q.new_empty((*q.shape[:3], cache.value_dim))
    q, o = q.to(device), poison(like).to(device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, device=device)
    for name in ("sinks", "tree", "selected"):
        if options.get(name) is not None:
            options[name] = options[name].to(device)
    if device == "cpu":
        options |= {"late": mode[0], "seed": mode[1]}
    decoding.run(
        plan,
        q,
        cache.format.beside(cache.value_format),
        k_parts,
        v_parts,
        [garbage_pages(cache.page_list(s)) for s in seqs],
        [cache.length(s) for s in seqs],
        o,
        lse,
        Scores(
            (None if window is None else window[0], 0),
            q.shape[-1] ** -0.5 if scale is None else scale,
            options.pop("softcap", 0.0),
            chunk=chunk or 0,
            sinks=options.pop("sinks", None),
        ),
        splitting=splitting,
        **options,
    )
    return o.cpu(), lse.cpu()


def _moved(x: torch.Tensor, device: str) -> torch.Tensor:
    """x on the device, in the same strides."""
    if device == "cpu":
        return x
    order = sorted(range(x.dim()), key=lambda d: -x.stride(d))
    back = [order.index(d) for d in range(x.dim())]
    return x.permute(order).contiguous().to(device).permute(back)


def queries(cache: PagedKVCache, seqs: Sequence[int], *, group: int = 4, tokens: int = 1, dtype=BF16, seed=7, size=1.0):
    return randn(len(seqs), tokens, group * cache.num_kv_heads, cache.head_dim, dtype=dtype, seed=seed, size=size)


@dataclass(frozen=True)
class Gathered:
    """One sequence's keys and values in place of a cache, for the oracle."""

    k: torch.Tensor
    v: torch.Tensor
    page_size: int

    def gather(self, layer: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k, self.v


def weighed(cache: PagedKVCache, seq: int, v: torch.Tensor) -> torch.Tensor:
    """(length, KV heads, D): the size of what rounded weights multiply: |v|; of int4 what stands above the zero point,
    which is added in float32."""
    if cache.format.name != "int4":
        return v.abs()
    pages = torch.from_numpy(cache.page_list(seq).astype(np.int64))
    zero = cache._v[2][0].cpu()[pages].flatten(0, 1)[: len(v)].float()
    return (v - zero.repeat_interleave(cache.format.group_size, dim=-1)[..., : v.shape[-1]]).abs()


def largest_product(q: torch.Tensor, k: torch.Tensor) -> float:
    """The largest Σ |q k| over channels of any query (1, T, Hq, D) and key (N, Hkv, D) of its KV head."""
    grouped = q[0].double().abs().unflatten(1, (k.shape[1], -1))
    products = torch.einsum("thgd,nhd->thgn", grouped, k.double().abs().nan_to_num(nan=0.0))
    return products.max().item() if products.numel() else 0.0


def assert_decoded(
    got: tuple[torch.Tensor, torch.Tensor | None],
    q: torch.Tensor,
    cache: PagedKVCache,
    seqs: Sequence[int],
    *,
    tree_mask: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    only: Sequence[int] | None = None,
    **scoring: Any,
) -> None:
    """(o, lse), or (o, None), of a decode over these sequences, each judged alone, over what its pages decode to.

    selected: bool (num_seqs, KV heads or 1, pages), which pages each of them reads. only: the places of those that are
    looked at. What is on a card is judged on the CPU.
    """
    for n in range(len(seqs)) if only is None else only:
        k, v = (x.cpu() for x in cache.gather(0, seqs[n]))
        o, one = (x[n : n + 1].cpu() for x in (got[0], q))
        mask, pages = (None if x is None else x[n : n + 1] for x in (tree_mask, selected))
        of = lambda values, one=one, k=k, mask=mask, pages=pages, **more: reference.decode(  # noqa: E731
            one, Gathered(k, values, cache.page_size), 0, [0], tree_mask=mask, selected=pages, **scoring, **more
        )
        exact, honest, magnitude = of(v), of(v, dtype=q.dtype), of(weighed(cache, seqs[n], v))[0]
        lse = exact[1].float() if got[1] is None else got[1][n : n + 1].cpu()
        try:
            scale = scoring.get("scale")
            in_logits = logit_error(
                exact[1], largest_product(one, k) * abs(k.shape[-1] ** -0.5 if scale is None else scale)
            )
            assert_state((o, lse), exact, honest, in_logits)
            operand = {"bf16": BF16, "fp32": torch.float32}.get(cache.format.name, FP16)
            assert_elements((o, lse), exact, honest[0], magnitude, len(k), operand, in_logits)
        except AssertionError as error:
            raise AssertionError(f"sequence {n} of {len(k)} tokens: {error}") from None


def check(
    cache: PagedKVCache,
    seqs: Sequence[int],
    *,
    group: int = 4,
    tokens: int = 1,
    dtype: torch.dtype = BF16,
    seed: int = 7,
    size: float = 1.0,
    window: tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by the kernel, judged by the oracle over what the pages decode to."""
    q = queries(cache, seqs, group=group, tokens=tokens, dtype=dtype, seed=seed, size=size)
    scoring: dict[str, Any] = {"window": window, "chunk": chunk, "scale": scale, "softcap": softcap, "sinks": sinks}
    got = decode(cache, seqs, q, tree=tree, **scoring, **options)
    try:
        assert_decoded(got, q, cache, seqs, tree_mask=tree, **scoring)
    except AssertionError as error:
        told = {"format": cache.format, "page_size": cache.page_size, "lengths": [cache.length(s) for s in seqs][:9]}
        raise AssertionError(f"{told}, {group=}, {tokens=}, {dtype}, {scoring}, {options}: {error}") from None
    return got


def kept(plan: Any, kind: Any) -> list[Any]:
    """What of this kind is kept on a plan."""
    kept = decoding.kept(plan)
    return [x for x in (*kept.bound.values(), *kept.lists.values()) if isinstance(x, kind)]


def check_growth(
    cache, seqs, steps, *, window=None, chunk=None, share=False, group=4, tokens=1, room=60, grown=None, **options
):
    """Decode, grow by the steps under the same list, judge every time; the last (o, lse). grown: who, all if None."""
    q, seen = queries(cache, seqs, group=group, tokens=tokens), {"window": window, "chunk": chunk}
    plan = plan_decode(cache, seqs, num_heads=q.shape[2], tokens_per_seq=tokens, share_prefix=share, **seen)
    for number, step in enumerate((0, *steps)):
        if step:
            grow(cache, seqs if grown is None else grown, step, seed=70 + number)
            (listed,) = kept(plan, WorkList)
            listed.grow([cache.length(s) for s in seqs], [cache.page_list(s) for s in seqs])
        got = decode(cache, seqs, q, plan=plan, room=room, mode=MODES[number % 4], **seen, **options)
        assert_decoded(got, q, cache, seqs, **seen)
    return got


# ---- random problems -------------------------------------------------------------------------------------------------
# What costs a compilation: (format, head_dim or that of K and that of V, page_size), as few as will do, each with many
# problems.
Kind = tuple[str, int | tuple[int, int], int]
KINDS: tuple[Kind, ...] = (("bf16", 64, 16), ("bf16", 128, 64), ("int8", 64, 16), ("int4", 64, 16), ("bf16", 64, 3))


def chance(seed: int, kinds: Sequence[Kind] = KINDS, device: str = "cpu") -> None:
    """One random forest of sequences, decoded with random options and judged. The same for the same seed."""
    rng = random.Random(seed)
    kv_format, dims, page_size = rng.choice(kinds)
    head_dim, value_dim = (dims, dims) if isinstance(dims, int) else dims
    cache = empty_cache(
        4000 // page_size + 60,
        page_size=page_size,
        kv_heads=rng.choice((1, 2, 3)),
        head_dim=head_dim,
        value_dim=value_dim,
        kv_format=kv_format,
    )
    seqs: list[int] = []
    for tree in range(rng.randint(1, 3)):
        level = [cache.allocate()]
        for depth in range(rng.randint(1, 3)):
            level = [s if n == 0 else cache.fork(s) for s in level for n in range(rng.randint(1, 3))]
            grow(
                cache,
                level,
                [rng.choice((0, 1, rng.randint(1, 40), rng.randint(1, 120)))] * len(level),
                seed=seed + 7 * depth,
            )
            uneven = [rng.randint(0, 9) for _ in level]
            grow(cache, level, uneven, seed=seed + 100 + tree)
        seqs += level
    rng.shuffle(seqs)
    group = rng.choice((1, 2, 3, 4, 8))
    check(
        cache,
        seqs,
        group=group,
        tokens=rng.choice((1, 1, 2, 5)),
        size=rng.choice((1.0, 1.0, 10.0)),
        seed=seed,
        window=rng.choice((None, None, (rng.randint(0, 150), 0))),
        sinks=rng.choice((None, torch.linspace(-2, 3, group * cache.num_kv_heads))),
        share=rng.random() < 0.7,
        mode=(rng.random() < 0.5, rng.randint(0, 9)),
        runs=kv_format.startswith("int") and rng.random() < 0.5,
        tiles=rng.choice((None, None, False)),
        room=rng.choice((0, 0, 0, 33)),
        splitting=rng.choice((SMALL, None, UNCUT, Splitting(((FAR, 32),), 64, 1), FOLDED)),
        device=device,
    )
