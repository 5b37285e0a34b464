"""Forwards whose V has another head dimension than Q and K, or wide ones: calls of the gpu layer, judged.

On CPU tensors they run in the emulator, on CUDA tensors on the card.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from forward_cases import (
    BF16,
    FP16,
    MODES,
    assert_close,
    emulated,
    gathered,
    nan_in_new_memory,
    normal,
    oracle_on,
    paged,
    starts_of,
)

from tilewise import BlockSchedule, reference
from tilewise.gpu.calls import GpuCall
from tilewise.scores import Scores

FP32 = torch.float32
# Each costs a compilation: (head_dim of q and k, of v)
NARROW_PAIRS = ((192, 128), (64, 128), (128, 64), (64, 256), (256, 96), (96, 192), (40, 72), (33, 50), (1, 256))
WIDE_PAIRS = ((512, 512), (576, 512), (64, 512), (300, 320), (257, 300), (512, 40), (200, 576), (385, 384), (576, 576))


def scores_of(q, causal=False, window=None, softcap=0.0, alibi_slopes=None, exact=False, **_) -> Scores:
    """What api/ makes of these options."""
    left, right = window or (None, None)
    if causal:
        right = 0 if right is None else min(0, right)
    return Scores((left, right), q.shape[-1] ** -0.5, softcap, alibi_slopes is not None, exact)


def check_pair(
    q, k, v, *, mode=MODES[0], starts=None, page_table=None, out=None, exact=False, schedule=None, **options
):
    """(o, lse) by the kernel, judged; starts: of packed sequences, k and v in pages if there is a page table."""
    call = GpuCall(scores_of(q, exact=exact, **options), True)
    sinks, slopes = options.get("sinks"), options.get("alibi_slopes")
    with emulated(*mode) as launches, nan_in_new_memory():
        got = call(q, k, v, sinks, slopes, out, starts=starts, page_table=page_table, schedule=schedule)
    assert got[0].shape == (*q.shape[:-1], v.shape[-1])
    if page_table is not None:
        k, v = (gathered(x, page_table, starts[1]) for x in (k, v))
    with oracle_on(q.device):
        if starts is None:
            options["schedule"] = schedule
            (exact_o, exact_lse), (magnitude, _) = (reference.attention(q, k, x, **options) for x in (v, v.abs()))
            honest = reference.baseline(q, k, v, **options)
        else:
            (exact_o, exact_lse), (magnitude, _) = (each_alone(q, k, x, starts, **options) for x in (v, v.abs()))
            honest = each_alone(q, k, v, starts, dtype=q.dtype, **options)
        assert_close(got, (exact_o, exact_lse), honest, magnitude, v)
    return got, launches


def each_alone(q, k, v, starts, **options):
    """The oracle's state of packed sequences."""
    spans = [list(pairwise(x.tolist())) for x in starts]
    found = [
        reference.attention(q[None, a:b], k[None, c:d], v[None, c:d], **options)
        for (a, b), (c, d) in zip(*spans, strict=True)
    ]
    return torch.cat([o[0] for o, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


def tensors(lead_q, lead_k, heads, dims, *, dtype=BF16, seed=0, size=1.0, device="cpu", layouts=("dense",) * 3):
    """q, k and v of (heads of q, of k and v) and (head_dim of q and k, of v)."""
    of: dict[str, Any] = {"dtype": dtype, "device": device}
    q = normal(*lead_q, heads[0], dims[0], seed=3 * seed, size=size, layout=layouts[0], **of)
    k = normal(*lead_k, heads[1], dims[0], seed=3 * seed + 1, layout=layouts[1], **of)
    return q, k, normal(*lead_k, heads[1], dims[1], seed=3 * seed + 2, layout=layouts[2], **of)


@dataclass(frozen=True)
class PairKind:
    """What costs a compilation."""

    dims: tuple[int, int]
    dtype: torch.dtype = BF16
    heads: tuple[int, int] = (2, 2)
    page_size: int = 0
    softcap: float = 0.0
    alibi: bool = False
    exact: bool = False
    blocks: int = 0  # of a schedule


class PairChance:
    """One random problem of a kind; the same for the same seed."""

    def __init__(self, seed: int, kind: PairKind, longest: int = 300) -> None:
        rng = random.Random(seed)
        self.seed, self.kind = seed, kind
        length = lambda: rng.choice((1, 63, 65, 127, 129, rng.randint(1, longest)))  # noqa: E731
        self.packed = kind.page_size > 0 or (not kind.blocks and rng.random() < 0.4)
        count = rng.randint(1, 4)
        self.lengths = [(length(), length()) for _ in range(count)]
        if self.packed:
            self.lengths += [(rng.choice((0, 5)), rng.choice((0, 9))) for _ in range(rng.randint(0, 2))]
            rng.shuffle(self.lengths)
        self.layouts = tuple(rng.choice(("dense", "heads", "wide")) for _ in range(3))
        self.out = rng.choice((None, "heads", "wide"))
        self.options: dict[str, Any] = {"causal": rng.random() < 0.4, "softcap": kind.softcap, "exact": kind.exact}
        if rng.random() < 0.4:
            self.options["window"] = (rng.choice((None, 0, 70)), rng.choice((None, 3, 130)))
        self.sinks = rng.random() < 0.3
        self.size = rng.choice((1.0, 1.0, 30.0))
        self.options["mode"] = rng.choice(MODES)

    def check(self, device: str = "cpu") -> None:
        kind, options = self.kind, dict(self.options)
        generator = torch.Generator().manual_seed(self.seed)
        if self.sinks:
            options["sinks"] = (3 * torch.randn(kind.heads[0], generator=generator)).to(device)
        if kind.alibi:
            options["alibi_slopes"] = torch.rand(kind.heads[0], generator=generator).to(device)
        nq, nk = ([n[i] for n in self.lengths] for i in (0, 1))
        leads = [(sum(n),) if self.packed else (len(n), n[0]) for n in (nq, nk)]
        made: dict[str, Any] = {"dtype": kind.dtype, "seed": self.seed, "size": self.size, "device": device}
        q, k, v = tensors(*leads, kind.heads, kind.dims, layouts=self.layouts, **made)
        if self.out is not None:
            options["out"] = normal(*q.shape[:-1], kind.dims[1], dtype=q.dtype, device=device, layout=self.out)
        if kind.blocks:
            of = {"block_q": kind.blocks, "block_k": kind.blocks, "sparsity": 0.5, "seed": self.seed}
            options["schedule"] = BlockSchedule.random(nq[0], nk[0], **of).to(device)
        if self.packed:
            options["starts"] = tuple(starts_of(n).to(device) for n in (nq, nk))
        if kind.page_size:
            k, v, options["page_table"] = paged(k, v, options["starts"][1], kind.page_size, seed=self.seed)
        try:
            check_pair(q, k, v, **options)
        except AssertionError as error:
            raise AssertionError(f"PairChance({self.seed}, {kind}): {error}") from None


EVERY_KIND = (
    *(PairKind(dims) for dims in (*NARROW_PAIRS, *WIDE_PAIRS)),
    PairKind((192, 128), FP16, heads=(4, 1)),
    PairKind((192, 128), exact=True),
    PairKind((192, 128), page_size=16),
    PairKind((192, 128), softcap=20.0, alibi=True),
    PairKind((192, 128), blocks=64),
    PairKind((512, 512), FP16, heads=(8, 1)),
    PairKind((512, 512), page_size=64),
    PairKind((512, 512), softcap=20.0),
    PairKind((512, 512), blocks=128),
    PairKind((576, 512), heads=(16, 1), page_size=64),
    PairKind((192, 128), FP32),
    PairKind((512, 512), FP32),
)
