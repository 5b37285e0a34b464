"""What the suites of the MLA decode kernel share: pages of rows with poison between them, calls that are judged.

A call on CPU tensors runs in the emulator, one on CUDA tensors on the card: the same cases serve both.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
from oracle import assert_elements, assert_state, logit_error, poison, randn

from tilewise import reference, tuned
from tilewise.bench.tune import entry_of
from tilewise.formats import KVFormat
from tilewise.gpu import mla, mla_kernels
from tilewise.gpu.decode import kept
from tilewise.gpu.mla_kernels import MlaTiling
from tilewise.plan.tree import plan_tree
from tilewise.plan.worklist import FAR, Splitting
from tilewise.scores import Scores
from tilewise.tuned import Section, Tuned

BF16, FP16 = torch.bfloat16, torch.float16
NAMES = {BF16: "bf16", FP16: "fp16"}
SIZES, DEEPSEEK = (192, 128), (576, 512)  # (head_dim, value_dim)
LONG = Splitting(pieces=((FAR, 1 << 16),))  # short ranges in one piece, over which references stay or move
FOLDED = Splitting(pieces=((FAR, 128),), whole=True, group=4)
CUT = Splitting(pieces=((FAR, 128),), whole=False, shared=64, group=4, groups=False)
GROUPED = Splitting(pieces=((FAR, 128),), whole=False, shared=64, group=4, groups=True)


@contextmanager
def shaped(sizes: tuple[int, int], rows: Sequence[int], *, raw: bool = True, **fields: Any) -> Iterator[None]:
    """Within it kernels for items of so many rows of these sizes have these fields of their tiling."""
    entries = {}
    for name, way, width in product(("bf16", "fp16", "fp8", "int8"), tuned.MLA_WAYS, rows):
        codes, boxes = name.endswith("8"), way == "boxes"
        tiling = mla_kernels.choose_tiling(*sizes, width, codes=codes, boxes=boxes, raw=raw)
        entries[tuned.mla_key(name, *sizes, width, way)] = entry_of("mla", replace(tiling, **fields))
    with tuned.trying(Tuned({"mla": Section("", "", entries)})):
        yield


@contextmanager
def widened() -> Iterator[None]:
    """Within it codes of few rows are widened in the ring, where no table says otherwise."""
    with mock.patch.object(mla, "choose_tiling", partial(mla_kernels.choose_tiling, raw=False)):
        yield


class Problem:
    """Sequences over pages (num_pages, page_size, 1, head_dim), with NaN wherever no sequence has a token.

    prefixes: per sequence the number of a prefix and how many of its pages it has, or None. stored: "fp8" or "int8" for
    rows of codes; `rows` is then what they are rounded to where a kernel widens them, and `unrounded` what they are.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        heads: int = 8,
        tokens: int = 1,
        sizes: tuple[int, int] = SIZES,
        page_size: int = 16,
        dtype: torch.dtype = BF16,
        prefixes: Sequence[tuple[int, int] | None] = (),
        stored: str = "",
        size: float = 1.0,
        seed: int = 0,
    ) -> None:
        (self.head_dim, self.value_dim), self.page_size, self.dtype = sizes, page_size, dtype
        self.lengths, self.tokens, self.heads = list(lengths), tokens, heads
        rng = np.random.default_rng(seed)
        counts = [-(-n // page_size) for n in lengths]
        prefixes = list(prefixes) or [None] * len(counts)
        shared = {number: 0 for number, _ in filter(None, prefixes)}
        for number, pages in filter(None, prefixes):
            shared[number] = max(shared[number], pages)
        total = sum(counts) + sum(shared.values()) + 3
        free = iter(rng.permutation(total).astype(np.int32).tolist())
        stems = {number: [next(free) for _ in range(pages)] for number, pages in shared.items()}
        self.lists = []
        for count, prefix in zip(counts, prefixes, strict=True):
            stem = stems[prefix[0]][: prefix[1]] if prefix else []
            self.lists.append(np.array([*stem, *(next(free) for _ in range(count - len(stem)))], np.int32))
        self.rows = torch.full((total, page_size, 1, self.head_dim), math.nan, dtype=dtype)
        held = torch.zeros(total, page_size, dtype=torch.bool)
        for pages, length in zip(self.lists, lengths, strict=True):
            for n, page in enumerate(pages.tolist()):
                held[page, : length - n * page_size] = True
        self.rows[held] = randn(int(held.sum()), 1, self.head_dim, dtype=dtype, seed=seed + 1) * size
        self.format = KVFormat(NAMES[dtype], self.head_dim)
        self.parts: Sequence[torch.Tensor] | None = None
        if stored:
            self.format = KVFormat(stored, self.head_dim, latent=self.value_dim)
            self.parts = self.format.encode(self.rows)
            self.rows = self.format.decode(self.parts, dtype)
            self.unrounded = self.format.decode(self.parts, torch.float32)
        self.raw = False  # did the last kernel multiply codes as they are?
        self.q = randn(len(lengths), tokens, heads, self.head_dim, dtype=dtype, seed=seed + 2)

    def gathered(self, n: int) -> torch.Tensor:
        """(length, head_dim): the rows of a sequence."""
        pages = torch.from_numpy(self.lists[n].astype(np.int64))
        return (self.unrounded if self.raw else self.rows)[pages].flatten(0, 1)[: self.lengths[n], 0]

    def plan(self, share: bool | None = None, window: int | None = None, chunk: int = 0) -> Any:
        return plan_tree(
            range(len(self.lengths)), self.lists, self.lengths, self.page_size, heads_q=self.heads, heads_kv=1,
            head_dim=self.head_dim, kv_row_bytes=2 * self.head_dim, io_bytes=2, tokens_per_seq=self.tokens,
            share=share, window=None if window is None else (window, 0), chunk=chunk,
        )  # fmt: skip

    def run(
        self,
        *,
        share: bool | None = False,
        window: int | None = None,
        chunk: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        device: str = "cpu",
        plan: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, lse) by the kernel, into memory that was NaN; what comes out is on the CPU."""
        q = self.q.to(device)
        o = poison(self.q[..., : self.value_dim].contiguous()).to(device)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, device=device)
        scores = Scores(
            (window, 0),
            self.head_dim**-0.5 if scale is None else scale,
            softcap,
            chunk=chunk,
            sinks=None if sinks is None else sinks.to(device),
        )
        beyond = np.array([-7, 2**31 - 1], np.int32)  # page lists may have anything after their end
        plan = plan or self.plan(share, window, chunk)
        mla.run(
            plan, q, self.format, [x.to(device) for x in self.parts or (self.rows,)],
            [np.concatenate([pages, beyond]) for pages in self.lists], self.lengths, o, lse, scores,
            value_dim=self.value_dim, indices=None if indices is None else indices.to(device), **options,
        )  # fmt: skip
        tilings = [bound.asked.tiling for bound in kept(plan).bound.values()]
        self.raw = any(isinstance(tiling, MlaTiling) and tiling.raw for tiling in tilings)
        return o.cpu(), lse.cpu()

    def judge(
        self, got: tuple[torch.Tensor, torch.Tensor], n: int, t: slice, keys: torch.Tensor, **options: Any
    ) -> None:
        """What the kernel gave for query tokens `t` of sequence n, over these rows, by the oracle."""
        q, k = self.q[n : n + 1, t], keys[None, :, None]
        v = k[..., : self.value_dim]
        exact, honest = reference.attention(q, k, v, **options), reference.baseline(q, k, v, **options)
        magnitude = reference.attention(q, k, v.abs(), **options)[0]
        scale = options.get("scale")
        largest = (q[0].double().abs() @ keys.double().abs().T).amax().item() if keys.numel() else 0.0
        in_logits = logit_error(exact[1], largest * abs(self.head_dim**-0.5 if scale is None else scale))
        found = got[0][n : n + 1, t], got[1][n : n + 1, :, t]
        assert_state(found, exact, honest, in_logits)
        operand = FP16 if self.raw else self.dtype
        assert_elements(found, exact, honest[0], magnitude, len(keys), operand, in_logits)

    def check(
        self, *, window: int | None = None, chunk: int = 0, sinks: torch.Tensor | None = None, **options: Any
    ) -> Any:
        """(o, lse) by the kernel, judged sequence by sequence."""
        got = self.run(window=window, chunk=chunk, sinks=sinks, **options)
        scoring = {name: options[name] for name in ("scale", "softcap") if name in options}
        seen = {"window": None if window is None else (window, 0), "chunk": chunk or None}
        for n in range(len(self.lengths)):
            try:
                self.judge(got, n, slice(None), self.gathered(n), causal=True, sinks=sinks, **seen, **scoring)
            except AssertionError as error:
                raise AssertionError(f"sequence {n} of {self.lengths[n]} tokens, {options}: {error}") from None
        return got

    def chosen(self, count: int, seed: int = 0) -> torch.Tensor:
        """(num_seqs, tokens, count): positions of the sequence in no order, and −1 or far positions between."""
        rng = np.random.default_rng(seed)
        found = np.full((len(self.lengths), self.tokens, count), -1, np.int32)
        for n, length in enumerate(self.lengths):
            for t in range(self.tokens):
                some = rng.permutation(length)[: max(0, count - (n + t) % 4)]
                found[n, t, rng.permutation(count)[: len(some)]] = some
                none = found[n, t] < 0
                found[n, t, none] = np.where(rng.random(int(none.sum())) < 0.5, -1, length + 1000)
        return torch.from_numpy(found)

    def check_chosen(self, count: int, **options: Any) -> None:
        """Each query token judged over the rows that it has chosen."""
        indices = self.chosen(count)
        got = self.run(indices=indices, **options)
        for n, length in enumerate(self.lengths):
            for t in range(self.tokens):
                mine = indices[n, t]
                keys = self.gathered(n)[mine[(mine >= 0) & (mine < length)].long()]
                self.judge(got, n, slice(t, t + 1), keys)


def chance(seed: int, sizes: tuple[int, int] = SIZES, device: str = "cpu") -> None:
    """One random problem with random options. The same for the same seed."""
    rng = random.Random(seed)
    page_size = rng.choice((16, 64, 16, 24))
    stems = [rng.randint(1, 200) // page_size for _ in range(2)]
    lengths, prefixes = [], []
    for _ in range(rng.randint(1, 9)):
        stem = rng.choice((None, 0, 1))
        own = rng.choice((0, 1, rng.randint(1, 70), rng.randint(1, 400)))
        prefixes.append(None if stem is None else (stem, stems[stem]))
        lengths.append(own + (0 if stem is None else stems[stem] * page_size))
    tokens = rng.choice((1, 1, 2, 5))
    lengths = [max(n, tokens) if rng.random() < 0.8 else n for n in lengths]
    heads = rng.choice((1, 8, 16)) if rng.random() < 0.7 else rng.choice((40, 128)) // tokens
    dtype = rng.choice((BF16, BF16, FP16))
    codes = sizes == DEEPSEEK and dtype == BF16 and seed % 2 == 0
    problem = Problem(
        lengths, heads=heads, tokens=tokens, sizes=sizes, page_size=page_size, prefixes=prefixes, seed=seed,
        dtype=dtype, stored=("fp8", "int8")[seed // 2 % 2] if codes else "",
    )  # fmt: skip
    if rng.random() < 0.2:
        problem.check_chosen(rng.randint(1, 150), device=device)
        return
    problem.check(
        share=rng.choice((True, False, None)),
        window=rng.choice((None, None, rng.randint(0, 150))),
        scale=rng.choice((None, None, 0.3, -0.1, 0.0)),
        sinks=rng.choice((None, randn(heads, seed=seed))),
        splitting=rng.choice((None, LONG, FOLDED, CUT)),
        device=device,
    )
