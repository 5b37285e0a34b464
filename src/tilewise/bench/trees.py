"""One decode step over a tree of pages: the data, Tilewise with each of its plans, the peers and the oracle.

All pages of plain formats lie in one pool of random K and V, filled once: filling takes longer than measuring. `serve`
has the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import SDPBackend

from tilewise.plan.cost import CostModel

from .. import api, reference
from ..kvcache import PagedKVCache
from ..plan import DecodePlan, PagedTiles
from . import ceilings, peers
from .measure import Check, Kernel, Problem
from .workloads import DTYPES, Point, backends

Ints = npt.NDArray[np.int32]
Levels = tuple[tuple[int, int], ...]  # from the root down: (nodes, tokens of each); the last are the sequences' own
KV = tuple[torch.Tensor, torch.Tensor]

POOL_BYTES = 20 << 30  # of K, and as many of V: a peer that would need more is left out of its row
CHECKED = 4  # sequences that the oracle sees
CHUNK = 1 << 16  # tokens written at a time
# Names of Tilewise's other kernels: plans beside the one that people get, a cache of plain pages, and heads of 128
# channels.
UNSHARED, SHARED, TWO_LEVELS, BF16, NARROW = "unshared", "shared", "two levels", "bf16", "head_dim 128"


@dataclass(frozen=True)
class Tree:
    """A point, and the levels of its pages."""

    point: Point
    levels: Levels

    @classmethod
    def of(cls, point: Point) -> Tree:
        """The prefix that all share, if there is one, and what each sequence has of its own."""
        own = (point.batch, point.seq)
        return cls(point, ((1, point.prefix), own) if point.prefix else (own,))

    @property
    def tokens(self) -> int:
        """Of a sequence."""
        return sum(tokens for _, tokens in self.levels)

    @property
    def pages(self) -> int:
        """That all nodes have together."""
        return sum(nodes * -(-tokens // self.point.page_size) for nodes, tokens in self.levels)

    @property
    def whole(self) -> tuple[int, int, int, int]:
        """The shape (B, Hkv, N, D) of each sequence's whole keys, one sequence after another."""
        return self.point.batch, self.point.kv_heads, self.tokens, self.point.hdim


class Pool:
    """Random K and V, bfloat16, made when they are first asked for: large enough for each of the trees in turn."""

    def __init__(self, trees: Iterable[Tree], device: torch.device) -> None:
        self.device, self.elements = device, 0
        for tree in trees:
            point = tree.point
            paged, whole = tree.pages * point.page_size * point.kv_heads * point.hdim, math.prod(tree.whole)
            self.elements = max(self.elements, paged, whole if 2 * whole <= POOL_BYTES else 0)

    @cached_property
    def kv(self) -> KV:
        generator = torch.Generator(self.device).manual_seed(0)
        k, v = (torch.empty(self.elements, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        return k.normal_(generator=generator), v.normal_(generator=generator)

    def take(self, *shape: int, start: int = 0) -> KV:
        """K and V of this shape, views, from element `start` on."""
        k, v = (x[start : start + math.prod(shape)].view(shape) for x in self.kv)
        return k, v


def lay_out(levels: Levels, page_size: int) -> list[Ints]:
    """The pages of each level's nodes, (nodes, pages of each): those of the pool in random order."""
    counts = [nodes * -(-tokens // page_size) for nodes, tokens in levels]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    parts = np.split(order, np.cumsum(counts)[:-1])
    return [part.reshape(nodes, -1) for part, (nodes, _) in zip(parts, levels, strict=True)]


def build(tree: Tree, pool: Pool, *, with_peers: bool = True) -> Problem:
    """The problem: Tilewise with each of its plans, and the peers."""
    point, device = tree.point, pool.device
    if any(tokens % point.page_size for _, tokens in tree.levels[:-1]):
        raise ValueError(f"shared levels must be whole pages of {point.page_size} tokens, got {tree.levels}")
    dtype, shape = DTYPES[point.dtype], (point.batch, 1, point.heads, point.hdim)
    q = torch.randn(shape, generator=torch.Generator(device).manual_seed(1), device=device).to(dtype)
    nodes = lay_out(tree.levels, point.page_size)
    table = np.concatenate([x.repeat(point.batch // len(x), axis=0) for x in nodes], axis=1)
    flops = 4 * point.hdim * point.heads * point.batch * tree.tokens
    kernel = partial(Kernel, flops=flops)
    q_and_o = 2 * q.numel() * q.element_size()
    ((ours, backend),) = backends(point).items()

    def decode(name: str, cache: PagedKVCache, plan: DecodePlan, check: Callable[[torch.Tensor], Check]) -> Kernel:
        nbytes = plan.keys[0] * cache.bytes_per_token + q_and_o  # what the plan reads
        return kernel(name, lambda out: _decode(q, cache, plan, out, backend), True, bytes=nbytes, check=check)

    cache, seqs = _cache(point, pool, table, tree.tokens)
    check = checker(q, lambda n: cache.gather(0, seqs[n]))
    plans = _plans(tree, cache, seqs)
    kernels = [decode(f"{ours}, {name}" if name else ours, cache, plan, check) for name, plan in plans.items()]
    if point.kv_format != "bf16":
        other, others = _cache(replace(point, kv_format="bf16"), pool, table, tree.tokens)
        plan = api.plan_decode(other, others, num_heads=point.heads)
        kernels.append(decode(f"{ours}, {BF16}", other, plan, checker(q, lambda n: other.gather(0, others[n]))))
    if point.hdim > 128:
        kernels.append(_narrow(tree, pool, table, f"{ours}, {NARROW}"))
    if point.kv_format == "bf16" and with_peers:
        kernels += _peers(tree, pool, q, nodes, table, check, partial(kernel, ours=False))
    ceiling = ceilings.of(device, dtype)
    return Problem(point.title, device, dtype, kernels, check, shape, point.batch * point.heads, ceiling)


def _narrow(tree: Tree, pool: Pool, table: Ints, name: str) -> Kernel:
    """The same sequences with heads of 128 channels, as many rows × channels in all."""
    point = tree.point
    point = replace(point, heads=point.heads * point.hdim // 128, hdim=128)
    cache, seqs = _cache(point, pool, table, tree.tokens)
    shape = (point.batch, 1, point.heads, point.hdim)
    q = torch.randn(shape, generator=torch.Generator(pool.device).manual_seed(2), device=pool.device)
    q = q.to(DTYPES[point.dtype])
    plan = api.plan_decode(cache, seqs, num_heads=point.heads)
    ((_, backend),) = backends(point).items()
    flops = 4 * point.hdim * point.heads * point.batch * tree.tokens
    nbytes = plan.keys[0] * cache.bytes_per_token + 2 * q.numel() * q.element_size()
    check = checker(q, lambda n: cache.gather(0, seqs[n]))

    def run(out: torch.Tensor | None) -> torch.Tensor:
        return _decode(q, cache, plan, None if out is None else out.view(shape), backend)

    return Kernel(name, run, True, flops, nbytes, check=check)


def _decode(
    q: torch.Tensor, cache: PagedKVCache, plan: DecodePlan, out: torch.Tensor | None, backend: str
) -> torch.Tensor:
    o = api.decode(q, cache, 0, plan, out=out, backend=backend)
    assert isinstance(o, torch.Tensor)
    return o


def _cache(point: Point, pool: Pool, table: Ints, length: int) -> tuple[PagedKVCache, list[int]]:
    """A cache with a sequence of `length` tokens for each row of the table, and the sequences."""
    size, heads, hdim, count = point.page_size, point.kv_heads, point.hdim, int(table.max()) + 1
    if point.kv_format == "bf16":
        rows, lengths = (torch.from_numpy(x).to(pool.device) for x in (table, np.full(len(table), length)))
        return PagedKVCache.from_pages(*pool.take(count, size, heads, hdim), rows, lengths), list(range(len(table)))
    cache = PagedKVCache(count, size, heads, hdim, kv_format=point.kv_format, device=pool.device)
    writer = cache.allocate()  # one sequence writes all pages; those that are measured then hold them as the table says
    for start in range(0, count * size, CHUNK):
        tokens = min(CHUNK, count * size - start)
        k, v = pool.take(tokens, heads, hdim, start=start * heads * hdim)
        cache.write(0, cache.extend([writer], tokens), k, v)
    written = cache.page_list(writer)
    seqs = []
    for pages in table:
        cache.pool.retain(written[pages])
        seqs.append(cache.adopt(written[pages], length))
    cache.free(writer)
    return cache, seqs


@dataclass(frozen=True)
class OneLevel(CostModel):
    """Shares the nodes of just so many sequences: with what stands above them, that is a plan of two levels."""

    sequences: int = 0

    def saving_us(self, sequences: int, *args: Any, **options: Any) -> float:
        """Something for a node of that level, nothing for others."""
        return float(sequences == self.sequences)

    def pays(self, *args: Any, **options: Any) -> bool:
        """It is asked for, whatever it costs."""
        return True


def _plans(tree: Tree, cache: PagedKVCache, seqs: list[int]) -> dict[str, DecodePlan]:
    """The plans that are measured by name, "" being the one people get; a way to share that is the same is left out.

    All are over the same pages. The plans of two levels are those of cascades and of Hydragen without a hierarchy: they
    share the root alone, or all that a group has in common, or all that a question's samples have.
    """
    plan = partial(api.plan_decode, cache, seqs, num_heads=tree.point.heads)
    ways: dict[str, Literal["auto"] | bool] = {"": "auto", UNSHARED: False, SHARED: True}
    plans: dict[str, DecodePlan] = {}
    works = []
    for name, share in ways.items():
        made = plan(share_prefix=share)
        tiles = [tile for tile in made.work if isinstance(tile, PagedTiles)]
        work = [(tile.row, tile.rows, tile.start, tile.stop, len(tile.pages)) for tile in tiles]
        if work not in works:
            works.append(work)
            plans[name] = made
    if len(tree.levels) > 2:
        for nodes, _ in tree.levels[:-1]:
            cost = OneLevel(0.0, 1.0, 1.0, 0.0, sequences=tree.point.batch // nodes)
            plans[f"{TWO_LEVELS}, {nodes} nodes"] = plan(cost=cost)
    return plans


def _peers(
    tree: Tree,
    pool: Pool,
    q: torch.Tensor,
    nodes: Sequence[Ints],
    table: Ints,
    check: Callable[[torch.Tensor], Check],
    kernel: Callable[..., Kernel],
) -> list[Kernel]:
    """cuDNN over each sequence's whole keys where there is memory for them, and FlashInfer over our pages."""
    point, made = tree.point, []
    cuda = q.device.type == "cuda"
    token_bytes, shape = 2 * 2 * point.kv_heads * point.hdim, tree.whole
    if math.prod(shape) <= pool.elements:
        k, v = (x.transpose(1, 2) for x in pool.take(*shape))
        run = peers.torch_sdpa(q, k, v, mask=None, causal=False, backend=SDPBackend.CUDNN_ATTENTION if cuda else None)
        own_check = checker(q, lambda n: (k[n], v[n]))  # its sequences are others out of the same pool
        nbytes = point.batch * tree.tokens * token_bytes
        made.append(kernel(peers.CUDNN if cuda else peers.SDPA, run, bytes=nbytes, check=own_check))
    module = peers.find(peers.FLASHINFER)
    if cuda and not isinstance(module, str):
        pages = pool.take(int(table.max()) + 1, point.page_size, point.kv_heads, point.hdim)
        last = [(tokens - 1) % point.page_size + 1 for _, tokens in tree.levels]
        run = peers.flashinfer_decode(module, q, *pages, table, last[-1])
        made.append(kernel(peers.FLASHINFER, run, bytes=point.batch * tree.tokens * token_bytes, check=check))
        if len(nodes) > 1:
            run = peers.flashinfer_cascade(module, q, *pages, nodes, last)
            once = sum(count * tokens for count, tokens in tree.levels)
            made.append(kernel(peers.FLASHINFER_CASCADE, run, bytes=once * token_bytes, check=check))
    return made


def checker(q: torch.Tensor, keys: Callable[[int], KV]) -> Callable[[torch.Tensor], Check]:
    """Judges answers (B, 1, H, D) by the tolerance rule on a few sequences, `keys` being k and v of one, (N, Hkv, D).

    What the oracle says is kept: a row's kernels are judged by the same answers.
    """
    chosen = sorted({round(n * (len(q) - 1) / (CHECKED - 1)) for n in range(CHECKED)})
    expected: list[list[torch.Tensor]] = []

    def expect(n: int) -> tuple[torch.Tensor, ...]:
        k, v = (x[None] for x in keys(n))
        with torch.device(q.device):  # for the masks that the oracle makes
            exact, lse = reference.attention(q[n : n + 1], k, v)
            honest, _ = reference.baseline(q[n : n + 1], k.to(q.dtype), v.to(q.dtype))
        return exact, honest, lse

    def check(answer: torch.Tensor) -> Check:
        answer = answer.reshape(q.shape)
        if not torch.isfinite(answer).all():
            return Check(False, math.inf, 0.0, "NaN or infinity in the output")
        if not expected:
            expected.append([torch.cat(x) for x in zip(*map(expect, chosen), strict=True)])
        exact, honest, lse = expected[0]
        verdict = reference.judge(answer[chosen], exact, honest, lse=lse)
        baseline = (honest.double() - exact).abs().max().item()
        return Check(verdict.ok, verdict.error, baseline, verdict.reason, verdict.allowed)

    return check
