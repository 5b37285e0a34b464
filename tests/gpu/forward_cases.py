"""What the suites of the Hopper forward share: calls that are judged, layouts, pages, random problems.

A call on CPU tensors runs in the emulator, one on CUDA tensors on the card: the same cases serve both.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from oracle import assert_state

from tilewise import attention, attention_varlen, emulator, reference
from tilewise.compiler.spec import KernelSpec

BF16, FP16 = torch.bfloat16, torch.float16
NAN = math.nan
# (late, seed) of the emulator: asynchronous work lands late or at once, threads run in this order or that
MODES = ((True, 0), (False, 0), (True, 1), (False, 7))


@dataclass
class Launch:
    """One launch in the emulator, after it ran."""

    spec: KernelSpec
    args: Any
    tensors: dict[str, torch.Tensor]
    counters: emulator.Counters | None


@contextmanager
def emulated(
    late: bool = True, seed: int = 0, count: bool = False, source: str | Path | None = None
) -> Iterator[list[Launch]]:
    """Launches in the emulator are made with these options, `source` in place of the forward's own. Yields them."""
    launches: list[Launch] = []
    run = emulator.launch

    def launch(spec, grid, args, tensors, **options):
        if source is not None and spec.entry == "forward":
            spec = replace(spec, source=str(source))
        counters = run(spec, grid, args, tensors, late=late, seed=seed, count=count, **options)
        launches.append(Launch(spec, args, dict(tensors), counters))
        if "counter" in tensors:
            assert tensors["counter"].tolist() == [0, 0], "the tile counter is not left at 0 for the next launch"
        return counters

    with mock.patch.object(emulator, "launch", launch):
        yield launches


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Whatever the call allocates begins as NaN (ints: the largest), so that an element nobody writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def oracle_on(device: torch.device) -> Iterator[None]:
    """The oracle's own tensors are made on `device`; on a CPU in one thread, since small ones cost more in several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_num_threads(threads)


def backend_of(x: torch.Tensor) -> str:
    return "cuda" if x.is_cuda else "emulator"


def assert_close(got, exact, honest, magnitude: torch.Tensor, v: torch.Tensor) -> None:
    """DESIGN's rule; and on top of it each element by its own measure, which no large value elsewhere excuses.

    magnitude: Σ w |v| of each output element. A weight and the output are rounded to the dtype once each, what else is
    float32. The LSE has not seen the dtype.
    """
    assert_state(got, exact, honest)
    (o, lse), (exact_o, exact_lse) = got, exact
    finite = exact_lse.isfinite()
    most = exact_lse[finite].abs().max().item() if finite.any() else 0.0
    in_logits = 4e-6 * (1 + most)
    # Weights below 2^−126 of a row's sum count for nothing; in fp16 those below 2^−14 have fewer digits.
    vanishing = 2.0**-24 * (1 + 2 * v.shape[-3]) if o.dtype == FP16 else 2.0**-120
    largest = v.abs().nan_to_num(nan=0.0).max().item() if v.numel() else 0.0
    error = (o.double() - exact_o).abs()
    over = error > (1.1 * torch.finfo(o.dtype).eps + in_logits) * magnitude + vanishing * max(1.0, largest)
    assert not over.any(), f"o: error {error[over].max():.3g}, at {over.nonzero()[0].tolist()} of {over.sum()} places"
    error = (lse.double() - exact_lse)[finite].abs()
    assert error.numel() == 0 or error.max() <= 2 * in_logits, f"lse: error {error.max():.3g}, LSE up to {most:.3g}"


def check(q, k, v, *, mode=MODES[0], exact=False, out=None, **options):
    """(o, lse) of `attention` by the kernel, judged."""
    with emulated(*mode), nan_in_new_memory():
        got = attention(q, k, v, exact=exact, return_lse=True, out=out, backend=backend_of(q), **options)
    assert got[0].shape == q.shape
    assert got[1].shape == (q.shape[0], q.shape[2], q.shape[1])
    assert got[1].is_contiguous()
    try:
        with oracle_on(q.device):
            exact_state = reference.attention(q, k, v, **options)
            honest = reference.baseline(q, k, v, **options)
            magnitude = reference.attention(q, k, v.abs(), **options)[0]
            assert_close(got, exact_state, honest, magnitude, v)
    except AssertionError as error:
        raise AssertionError(f"{_told(q, k, options)}, exact={exact}, {mode=}: {error}") from None
    return got


def check_varlen(
    q, k, v, starts_q, starts_k, *, mode=MODES[0], page_table=None, exact=False, out=None, backend=None, **options
):
    """(o, lse) of `attention_varlen` by the kernel, judged; k and v in pages if there is a page table."""
    with emulated(*mode), nan_in_new_memory():
        got = attention_varlen(
            q,
            k,
            v,
            starts_q,
            starts_k,
            page_table=page_table,
            exact=exact,
            return_lse=True,
            out=out,
            backend=backend or backend_of(q),
            **options,
        )
    assert got[0].shape == q.shape
    assert got[1].shape == (q.shape[1], q.shape[0])
    if page_table is not None:
        k, v = (gathered(x, page_table, starts_k) for x in (k, v))
    try:
        with oracle_on(q.device):
            args = (starts_q, starts_k)
            exact_state = reference.attention_varlen(q, k, v, *args, **options)
            honest = reference.attention_varlen(q, k, v, *args, dtype=q.dtype, **options)
            magnitude = reference.attention_varlen(q, k, v.abs(), *args, **options)[0]
            assert_close(got, exact_state, honest, magnitude, v)
    except AssertionError as error:
        told = f"{_told(q, k, options)}, starts {starts_q.tolist()[:9]} {starts_k.tolist()[:9]}, exact={exact}, {mode=}"
        raise AssertionError(f"{told}: {error}") from None
    return got


def _told(q, k, options) -> str:
    short = {name: value for name, value in options.items() if not isinstance(value, torch.Tensor)}
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, {q.dtype}, {short}"


def starts_of(lengths, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def normal(*shape: int, dtype=BF16, seed=0, size=1.0, device="cpu", layout="dense") -> torch.Tensor:
    """Normal values times `size` in a layout with the last stride 1; around them, where there is room, stands NaN.

    layout: dense; heads (the heads before the sequence in memory); wide (rows and heads with room between them); odd
    (off 16 bytes); few: the same values for all of the first dimension, stride 0.
    """
    values = (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype).to(device)
    *lead, n, heads, width = shape
    if layout == "dense":
        return values
    if layout == "few":
        return values[:1].expand(shape)
    if layout == "heads":
        room = values.new_full((*lead, heads, n, width), NAN).transpose(-3, -2)
    elif layout == "wide":
        room = values.new_full((*lead, n + 3, heads + 1, width + 8), NAN)[..., 1 : n + 1, :heads, :width]
    else:
        room = values.new_full((values.numel() + 1,), NAN)[1:].view(shape)
    return room.copy_(values)


def spec_of(q, k, v, **options) -> KernelSpec:
    """The kernel that serves such a call of `attention` on CPU tensors; it is not run."""
    specs = []
    with mock.patch.object(emulator, "launch", lambda spec, *_, **__: specs.append(spec)):
        attention(q, k, v, backend="emulator", **options)
    return specs[-1]


def tile_of(*shape: int, **options) -> tuple[int, int]:
    """(query rows, keys) of the tiles that serve such a `problem`."""
    constants = dict(spec_of(*problem(*shape), **options).constants)
    return constants["kTileQ"], constants["kTileKv"]


def problem(batch, nq, nk, hq, hkv, head_dim, *, seed=0, size=1.0, **options):
    """q, k and v; `size` scales q, and so the logits."""
    q = normal(batch, nq, hq, head_dim, seed=3 * seed, size=size, **options)
    return q, *(normal(batch, nk, hkv, head_dim, seed=3 * seed + i, **options) for i in (1, 2))


def packed(lengths_q, lengths_k, hq, hkv, head_dim, *, seed=0, index=torch.int32, device="cpu", **options):
    """q, k, v and the two starts of packed sequences."""
    q = normal(sum(lengths_q), hq, head_dim, seed=3 * seed, device=device, **options)
    k, v = (normal(sum(lengths_k), hkv, head_dim, seed=3 * seed + i, device=device, **options) for i in (1, 2))
    return q, k, v, *(starts_of(x, index).to(device) for x in (lengths_q, lengths_k))


def paged(k, v, starts_k, page_size: int, *, seed=0, heads_first=False):
    """k and v (total, H, D) dealt out into pages in no order, and the table.

    NaN stands in rows that no token has and in pages that nobody has; in the table, beyond a sequence's end, anything.
    """
    rng = torch.Generator().manual_seed(seed)
    lengths = [b - a for a, b in pairwise(starts_k.tolist())]
    used = [-(-n // page_size) for n in lengths]
    pages = sum(used) + 3
    order = torch.randperm(pages, generator=rng).tolist()
    table = torch.randint(-(2**31), 2**31, (len(lengths), max(used, default=0) + 2), generator=rng).to(torch.int32)
    stores = []
    for x in (k, v):
        heads, width = x.shape[1:]
        shape = (pages, heads, page_size, width) if heads_first else (pages, page_size, heads, width)
        store = torch.full(shape, NAN, dtype=x.dtype, device=x.device)
        stores.append(store.transpose(1, 2) if heads_first else store)
    taken = iter(order)
    for b, start in enumerate(starts_k.tolist()[:-1]):
        for p in range(used[b]):
            table[b, p] = page = next(taken)
            rows = min(page_size, lengths[b] - p * page_size)
            for store, x in zip(stores, (k, v), strict=True):
                store[page, :rows] = x[start + p * page_size : start + p * page_size + rows]
    return *stores, table.to(k.device)


def gathered(x, page_table, starts_k):
    """The tokens back out of their pages."""
    size, table = x.shape[1], page_table.tolist()
    places = [
        (table[b][t // size], t % size)
        for b, (start, end) in enumerate(pairwise(starts_k.tolist()))
        for t in range(end - start)
    ]
    pages, rows = torch.tensor(places, device=x.device, dtype=torch.int64).view(-1, 2).T
    return x[pages, rows]


# ---- random problems -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Kind:
    """What costs a compilation: as few kinds as will do, each with many problems."""

    head_dim: int
    dtype: torch.dtype = BF16
    heads: tuple[int, int] = (2, 2)
    exact: bool = False
    softcap: float = 0.0
    alibi: bool = False
    page_size: int = 0
    scale: float | None = None


KINDS = (
    Kind(64),
    Kind(64, heads=(4, 1)),
    Kind(64, exact=True),
    Kind(64, page_size=16),
    Kind(64, softcap=20.0, alibi=True),
    Kind(128),
    Kind(128, FP16, heads=(6, 2)),
    Kind(128, exact=True),
    Kind(256),
    Kind(33),
)
MORE_KINDS = (
    *KINDS,
    Kind(64, FP16, scale=-0.1),
    Kind(72),
    Kind(96, exact=True),
    Kind(128, heads=(8, 2)),
    Kind(128, page_size=64),
    Kind(128, FP16, softcap=50.0),
    Kind(192),
    Kind(256, exact=True),
    Kind(256, page_size=16),
    Kind(8, FP16),
    Kind(64, FP16),
    Kind(40, heads=(3, 1)),
    Kind(128, alibi=True),
    Kind(192, page_size=16),
)


class Chance:
    """One random problem of some kind: lengths, masks, layouts, sinks, packed or not. The same for the same seed."""

    def __init__(self, seed: int, kinds=KINDS, longest: int = 300) -> None:
        rng = random.Random(seed)
        self.seed, self.kind = seed, rng.choice(kinds)
        length = lambda: rng.choice((1, rng.randint(1, 70), rng.randint(1, longest), rng.randint(1, longest)))  # noqa: E731
        window = lambda: rng.choice((None, 0, rng.randint(1, 40), rng.randint(1, longest)))  # noqa: E731
        self.packed = self.kind.page_size > 0 or rng.random() < 0.4
        self.lengths = [(length(), length()) for _ in range(rng.randint(1, 4))]
        if self.packed:  # with empty ones, but not all empty
            self.lengths += [(rng.choice((0, 5)), rng.choice((0, 9))) for _ in range(rng.randint(0, 3))]
            rng.shuffle(self.lengths)
        self.layouts = [rng.choice(("dense", "heads", "wide")) for _ in range(3)]
        self.out = rng.choice((None, "dense", "heads", "wide"))
        self.index = rng.choice((torch.int32, torch.int64))
        self.causal, self.window = rng.random() < 0.4, (window(), window()) if rng.random() < 0.4 else None
        self.sinks, self.slopes_dim = rng.random() < 0.3, rng.choice((1, 2))
        self.size = rng.choice((1.0, 1.0, 1.0, 30.0))
        self.mode = rng.choice(MODES)
        self.stream = rng.random() < 0.3  # a stream of its own, on a card

    def __str__(self) -> str:
        return f"Chance({self.seed}): {vars(self)}"

    def check(self, device: str = "cpu") -> None:
        kind, (hq, hkv) = self.kind, self.kind.heads
        options: dict[str, Any] = {"causal": self.causal, "window": self.window, "scale": kind.scale}
        options |= {"softcap": kind.softcap, "exact": kind.exact, "mode": self.mode}
        sequences = len(self.lengths)
        generator = torch.Generator().manual_seed(self.seed)
        if self.sinks:
            options["sinks"] = (3 * torch.randn(hq, generator=generator)).to(device)
        if kind.alibi:
            shape = (hq,) if self.slopes_dim == 1 else (sequences, hq)
            options["alibi_slopes"] = torch.rand(shape, generator=generator).to(device)
        nq, nk = ([n[i] for n in self.lengths] for i in (0, 1))
        lead = [(sum(n),) if self.packed else (sequences, n[0]) for n in (nq, nk, nk)]
        q, k, v = (
            normal(
                *lead[i],
                hkv if i else hq,
                kind.head_dim,
                dtype=kind.dtype,
                seed=self.seed + i,
                size=1.0 if i else self.size,
                device=device,
                layout=layout,
            )
            for i, layout in enumerate(self.layouts)
        )
        if self.out is not None:
            options["out"] = normal(*q.shape, dtype=q.dtype, device=device, layout=self.out)
        if not self.packed:
            check(q, k, v, **options)
            return
        starts = [starts_of(n, self.index).to(device) for n in (nq, nk)]
        if kind.page_size:
            k, v, options["page_table"] = paged(k, v, starts[1], kind.page_size, seed=self.seed)
        check_varlen(q, k, v, *starts, **options)


# Whatever the starts say when they are on a GPU, where nobody looks at them, nothing outside of the tensors is touched:
# the emulator would say so.
GARBAGE = {
    "falling": [1000, 700, 300, 0],
    "negative": [-5, 100, -(2**31), 1000],
    "huge": [0, 2**31 - 1, 2**31 - 1, 2**31 - 1],
    "to and fro": [0, 1000] * 30,
    "past the end": [500, 2000, 10**6, 10**9],
}
