"""Which kernels a model or a shape needs, and compiling them ahead. `tilewise warm` shows it.

The kernels are found by binding calls as users make them, over CPU tensors without contents, as the card that is asked
for: what is found is what a first call asks the compiler for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product

import torch

from tilewise import api, arch, arguments, compiler
from tilewise.checks import FLOATS
from tilewise.compiler.spec import KernelSpec
from tilewise.formats import LATENT_FORMATS, PLAIN, KVFormat
from tilewise.gpu import (
    append,
    calls,
    choice,
    decode,
    decode_small,
    merge_rows,
    mla,
    plan_step,
    planner,
    prefill,
    widen,
)
from tilewise.gpu.abi import decode_score_rule
from tilewise.gpu.decode_kernels import DTYPES as DECODE_DTYPES
from tilewise.gpu.decode_kernels import HEAD_DIMS as DECODE_HEAD_DIMS
from tilewise.gpu.decode_kernels import Parts
from tilewise.gpu.decode_shapes import slice_of_values, value_slices
from tilewise.gpu.mla_kernels import CLASSES
from tilewise.gpu.mla_rows import ONE_PAGE
from tilewise.gpu.tilings import out_dtype
from tilewise.kvcache import PagedKVCache, storage
from tilewise.kvcache.index_keys import index_dtype_name
from tilewise.scores import Scores

from ..integrations.transformers_config import AttentionShape
from ..serving.latent import KERNEL
from ..serving.sizing import LATENT_ROWS
from .tune_prefill import Shape

# Query rows of a sequence. A kernel is one for short or long sequences, with grouped heads together or apart.
LENGTHS = tuple(sorted(n * 2**power for power in range(14) for n in (1, 3)))
PREFIX = 128  # tokens that sequences share at least
PROCESSORS = 128  # of a card that is not at hand; only how sequences fill it counts, and every way is bound
CPU = torch.device("cpu")
INDEX = (torch.int32, torch.int64)  # of cumulative lengths


@dataclass(frozen=True)
class Need:
    """Calls to be compiled for: heads, and what is done to scores; lengths: query rows of a sequence; page_size and
    kv_format: of the cache; value_dim: of V, if it has another head dimension than Q and K; shared_kv: V is the first
    channels of K; chosen: query tokens read rows that an indexer of so many heads and channels chooses."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scores: tuple[Scores, ...]
    lengths: tuple[int, ...] = LENGTHS
    page_size: int = 16
    kv_format: str | None = None
    value_dim: int | None = None
    shared_kv: bool = False
    chosen: tuple[int, int] | None = None

    @classmethod
    def of_model(cls, model: AttentionShape) -> Need:
        """Its own heads."""
        sizes = model.heads, model.kv_heads, model.head_dim
        return cls(*sizes, model.dtype, model.scores, value_dim=model.value_dim or None)

    @classmethod
    def of_latent(cls, model: AttentionShape) -> Need | None:
        """All of its heads over latent rows, as the engine serves it; None where that has heads of its own."""
        if model.latent != KERNEL or model.dtype not in LATENT_ROWS:
            return None
        width, values = KERNEL
        found = cls(model.heads, 1, width, model.dtype, model.scores, value_dim=values, shared_kv=True)
        return replace(found, chosen=model.indexed)

    @classmethod
    def of_shape(cls, shape: Shape, dtype: torch.dtype) -> Need:
        scores = Scores((None, 0 if shape.causal else None), scale=shape.hdim**-0.5)
        return cls(shape.heads, shape.kv_heads, shape.hdim, dtype, (scores,), (shape.seq,), value_dim=shape.values)

    @property
    def values(self) -> int:
        """The head_dim of V."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def of_forward(self) -> list[Scores]:
        """What the forward does to scores: blocks of positions are sequences of their own there."""
        return list(dict.fromkeys(replace(scores, chunk=0) for scores in self.scores))

    @property
    def form(self) -> KVFormat:
        """How K is stored: as asked, or in the dtype of the queries."""
        plain = next((name for name, dtype in PLAIN.items() if dtype == self.dtype), "bf16")
        name = self.kv_format or plain
        return KVFormat(name, self.head_dim, latent=self.values if self.shared_kv and name in LATENT_FORMATS else 0)


def specs(need: Need, card: str) -> list[KernelSpec]:
    """Every kernel that these calls take on such a card, each once: prefill (dense, packed and paged), decode, both in
    one step, and writing and copying pages. NotImplementedError where no kernel serves them."""
    q, _, v, _ = _like(need, 1)
    with arch.as_card(card):
        calls.check_served(q[None], "emulator", v[None])
        # The width of V counts where it is stored apart.
        widest = 0 if need.shared_kv else need.values
        writing = [append.append_spec(need.dtype, need.form, value_dim=widest), append.COPY_SPEC]
        decoding = _latent(need) if need.shared_kv else _decode(need, card)
        found = [*_prefill(need), *decoding, *_step(need), *_planner(need), *writing]
    return list(dict.fromkeys(found))


def _prefill(need: Need) -> Iterator[KernelSpec]:
    for scores in need.of_forward:
        for rows in need.lengths:
            q, k, v, o = (x[None] for x in _like(need, rows))
            yield from _bound(q, k, v, o, scores)
            for index in INDEX:
                yield from _bound(q[0], k[0], v[0], o[0], scores, sequences=1, index=index)
            yield from _bound_to_pages(need, rows, scores)


def _step(need: Need) -> Iterator[KernelSpec]:
    """What chunks take besides: prefixes in full view of all rows, merging, and plain pages where others are stored."""
    if need.dtype not in FLOATS:
        return
    if need.form.dtype != need.dtype:
        yield widen.widen_spec(need.dtype, need.form, need.values)
    yield merge_rows.merge_spec(need.dtype, need.values)
    for scores in need.of_forward:
        if scores.window[0] is not None:
            continue
        for rows in need.lengths:
            yield from _bound_to_pages(need, rows, scores.unmasked)


def _bound_to_pages(need: Need, rows: int, scores: Scores) -> Iterator[KernelSpec]:
    """The forward over K and V of (pages, page size, heads, D)."""
    q, k, v, o = _like(need, rows)
    pages = 1 + rows // need.page_size
    k, v = (x[:1].expand(pages, need.page_size, *x.shape[1:]) for x in (k, v))
    yield from _bound(q, k, v, o, scores, sequences=1, paged=True, table_pages=pages)


def _like(need: Need, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and o of (rows, heads, D) that take no memory."""
    one, out = torch.empty(1, dtype=need.dtype), torch.empty(1, dtype=out_dtype(need.dtype))
    dims = (need.head_dim, need.values)
    q, o = one.expand(rows, need.heads, dims[0]), out.expand(rows, need.heads, dims[1])
    k, v = (one.expand(rows, need.kv_heads, dim) for dim in dims)
    return q, k, v, o


def _bound(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, scores: Scores, **options: object
) -> Iterator[KernelSpec]:
    forward = prefill.Forward(q, k, v, o, scores, tma=prefill.tma_can(q, k, v, o), **options)  # type: ignore[arg-type]
    yield forward.spec
    if forward.packed:
        yield forward.ragged_spec


def _decode(need: Need, card: str) -> Iterator[KernelSpec]:
    """Few sequences, as many as fill the card, and more; behind a prefix, shared or not, and with nothing in common."""
    slices = value_slices(need.values)
    widths = (need.head_dim, *(stop - start for start, stop in slices))
    if any(width not in DECODE_HEAD_DIMS for width in widths) or need.dtype not in DECODE_DTYPES:
        return
    pair = need.form.beside(KVFormat(need.form.name, need.values))
    rules = [decode_score_rule(x) for x in need.scores if x.window[0] is None and not x.chunk]
    filling = max(2, 4 * PROCESSORS // need.kv_heads)
    lead = (need.page_size, need.kv_heads, need.head_dim)
    stored = [storage.allocate(form, (1, 1, *lead[:2]), CPU, for_kernels=True) for form in (need.form, pair.values)]
    sliced = [slice_of_values(pair, stored[1], *of) if len(slices) > 1 else (pair, stored[1]) for of in slices]
    for cut, _ in sliced:
        group = need.heads // need.kv_heads
        yield from decode_small.likely_specs(
            group, need.kv_heads, need.dtype, cut, need.page_size, rules, PROCESSORS, card
        )
    for sequences in dict.fromkeys((1, 2, filling, 4 * filling)):
        prefix = PREFIX // need.page_size + 1
        cache = PagedKVCache(prefix + 2 * sequences, *lead, kv_format=need.form.name, value_dim=need.values)
        first = cache.allocate()
        cache.extend([first], prefix * need.page_size)
        shared = [cache.fork(first) for _ in range(sequences)]
        apart = [cache.allocate() for _ in range(sequences)]
        cache.extend([*shared, *apart], 1)
        for cut, values in sliced:
            k, v = ([x[0].expand(cache.num_pages, *x.shape[2:]) for x in parts] for parts in (stored[0], values))
            for seqs, share in ((shared, True), (shared, False), (apart, False)):
                for scores in need.scores:
                    yield _decode_spec(cache, cut, (k, v), seqs, need, scores, share)


def _latent(need: Need) -> Iterator[KernelSpec]:
    """Decode over rows that are keys and values at once: of one sequence, and of few or many that share a node."""
    mla.check_served(_like(need, 1)[0], need.form, (), need.values)
    for scores, more in product(need.scores, (0, *CLASSES)):
        rule, rows, form = decode_score_rule(scores), max(need.heads, more), (need.dtype, need.form, need.values)
        yield mla.spec_of(*form, rows, need.page_size, CPU, rule)
        if need.chosen and not more:
            yield mla.spec_of(*form, rows, ONE_PAGE, CPU, rule, chosen=True)
    if need.chosen:
        yield append.append_spec(need.dtype, KVFormat(index_dtype_name(need.form), need.chosen[1]))
    if need.chosen and not choice.why_not(need.dtype, *need.chosen):
        yield from (choice.scores_spec(need.dtype, *need.chosen), choice.SELECT_SPEC)


def _planner(need: Need) -> Iterator[KernelSpec]:
    """What makes the lists of standing plans; its shared memory changes nothing of the code."""
    yield plan_step.SPEC
    for rows, scores in product(planner.THREADS, need.scores):
        yield planner.planner_spec(rows, 0, scores.chunk)


def _decode_spec(
    cache: PagedKVCache,
    form: KVFormat,
    pages: tuple[Parts, Parts],
    seqs: list[int],
    need: Need,
    scores: Scores,
    share: bool,
) -> KernelSpec:
    window = None if scores.window[0] is None else scores.window
    chunk = scores.chunk or None
    plan = api.plan_decode(cache, seqs, num_heads=need.heads, share_prefix=share, window=window, chunk=chunk)
    q = torch.empty(1, dtype=need.dtype).expand(len(seqs), 1, need.heads, need.head_dim)
    lists = arguments.PageListsOf(cache, plan.seqs)
    bound = decode.bind(plan, q, form, *pages, lists, plan.lengths, scores, processors=PROCESSORS)[1]
    assert bound is not None
    return bound.spec


# ---- compiling --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Warmed:
    """How many kernels were compiled, how many were there, and what did not compile, with why."""

    compiled: int
    there: int
    failed: tuple[str, ...]


def compile_all(
    asked: Iterable[tuple[KernelSpec, str]],
    done: Callable[[KernelSpec], None] = lambda spec: None,
    *,
    compile: Callable[[KernelSpec, str], compiler.Binary] = compiler.compile,
) -> Warmed:
    """Kernels for architectures into the cache, on all cores; NVRTC compiles outside the GIL. Ctrl-C leaves what is
    under way to finish, and begins no more."""
    compiled, there, failed = 0, 0, []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        under_way = {pool.submit(compile, spec, target): (spec, target) for spec, target in dict.fromkeys(asked)}
        try:
            for future in as_completed(under_way):
                spec, target = under_way[future]
                done(spec)
                try:
                    found = future.result().from_cache
                except compiler.KernelCompileError as error:
                    failed.append(f"{spec} ({target}): {str(error).strip().splitlines()[0]}")
                    continue
                compiled, there = compiled + (not found), there + found
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return Warmed(compiled, there, tuple(failed))
