"""The problems that are measured: random data, the kernels and peers that serve them, and the oracle that checks them.

A `Point` is one problem's dimensions, plain values that a CSV row can hold. `build` makes a `Problem` with data of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch

from tilewise.arguments import BACKENDS, EMULATOR
from tilewise.gpu import named
from tilewise.gpu.tilings import out_dtype
from tilewise.plan.schedule import BlockSchedule

from .. import api, checks, reference
from ..kvcache import PagedKVCache
from ..plan import Window, band_of, plan_dense, plan_varlen, visible_pairs
from . import ceilings, peers
from .judge import in_blocks, row_check
from .measure import Check, Kernel, Problem

FLOAT8 = "float8"  # e4m3; what comes out is bfloat16
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    FLOAT8: torch.float8_e4m3fn,
}
KV_FORMATS = ("fp32", "fp16", "bf16", "fp8", "int8", "int4")
FORMAT_OF = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
WORKLOADS = ("dense", "sparse", "varlen", "decode", "prefix")
FUNCTION = "function: "  # what the workloads of bench variants start with
TRAIN = "train: "  # and those of bench train
VALUES = "values: "  # and a number: dense, V having this head dimension and Q and K another
LOSSLESS = {"fp32": ("float32", "float16", "bfloat16"), "fp16": ("float16",), "bf16": ("bfloat16",)}


@dataclass(frozen=True)
class Point:
    """One problem. `seq` is the tokens of each sequence: all of them, or those after the `prefix` that all share.

    dense: q, k and v of `seq` tokens; sparse: the same under a block schedule, `sched` or random `sparsity`; varlen:
    `batch` packed sequences, `lengths` "100-4096" spaced geometrically between the two, in no order; decode: `tokens`
    queries over a paged cache; prefix: the same where the first `prefix` tokens are shared. With a `window` a query
    sees so many keys before its own and none after it. FUNCTION and a name: what `variants` measures; TRAIN
    and a name: what `train` does; VALUES and a number: dense, with V of that head dimension.
    """

    workload: str = "dense"
    batch: int = 1
    seq: int = 1024
    heads: int = 8
    kv_heads: int = 8
    hdim: int = 128
    dtype: str = "float32"
    causal: bool = False
    window: int = 0
    lengths: str = ""
    sparsity: float = 0.0
    block: int = 64
    sched: str = ""
    prefix: int = 0
    kv_format: str = ""
    page_size: int = 16
    tokens: int = 1
    backend: str = "auto"
    device: str = "cpu"

    def validate(self) -> Point:
        """The point itself, or ValueError on the first dimension that no problem can have."""
        if not self.workload.startswith((FUNCTION, TRAIN, VALUES)):
            checks.choice("workload", self.workload, WORKLOADS)
        for name in ("batch", "seq", "heads", "kv_heads", "hdim", "tokens"):
            checks.integer(name, getattr(self, name), 1)
        checks.integer("hdim", self.hdim, 1, checks.MAX_HEAD_DIM)
        checks.integer("head dimension of the values", self.vdim, 1, checks.MAX_HEAD_DIM)
        checks.integer("page_size", self.page_size, 1, 256)
        checks.integer("prefix", self.prefix, 0)
        checks.integer("window", self.window, 0)
        checks.choice("dtype", self.dtype, tuple(DTYPES))
        if self.dtype == FLOAT8 and self.workload != "dense":
            raise ValueError(f"dtype {FLOAT8} is measured in the dense workload, got {self.workload}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads={self.heads}, got {self.kv_heads}")
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must be at least 0 and below 1, got {self.sparsity}")
        if self.kv_format:
            checks.choice("kv_format", self.kv_format, KV_FORMATS)
        if self.tokens > self.seq:
            raise ValueError(
                f"tokens must be at most seq={self.seq} (the queries' own are in the cache), got {self.tokens}"
            )
        if self.workload == "prefix" and not self.prefix:
            raise ValueError("prefix must be at least 1 token for the prefix workload, got 0")
        if self.workload in ("decode", "prefix") and (self.sparsity or self.sched):
            raise ValueError("sparsity and sched are for attention without a cache: leave out kv_format and prefix")
        if self.workload in ("decode", "prefix") and self.window:
            raise ValueError("window is measured without a cache: leave out kv_format and prefix")
        if (self.workload == "varlen") != bool(self.lengths) and not self.workload.startswith(TRAIN):
            raise ValueError(
                "lengths are for the varlen workload alone: leave out sparsity, sched, kv_format and prefix"
            )
        self._check_backend(check_device(self.device).type)
        return self

    def _check_backend(self, device: str) -> None:
        """ValueError on a backend that no call knows, or that does not take tensors of that kind of device."""
        kind, _, rung = self.backend.partition(":")
        if kind != EMULATOR or not rung:
            checks.choice("backend", self.backend, BACKENDS)
        elif self.workload != "dense":
            raise ValueError(f"backend {self.backend!r} runs dense attention alone, got {self.workload}")
        else:
            named.find(self.backend)
        wanted = "cuda" if self.backend == "cuda" else "cpu"
        if self.backend != "auto" and device != wanted:
            raise ValueError(f"backend {self.backend!r} takes tensors on device {wanted}, got device {self.device}")

    @property
    def vdim(self) -> int:
        """The head dimension of V."""
        return int(self.workload.removeprefix(VALUES)) if self.workload.startswith(VALUES) else self.hdim

    @property
    def band(self) -> Window | None:
        """The window as the library takes it."""
        return (self.window, 0) if self.window else None

    @property
    def title(self) -> str:
        """The dimensions in one line, those that say nothing left out."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        parts = [f"{self.batch} × " if self.batch > 1 else ""]
        parts[0] += (
            f"{self.prefix} shared + {self.seq} own tokens" if self.prefix else f"{self.lengths or self.seq} tokens"
        )
        parts += [f"{heads} heads", f"D {self.hdim}", *([f"{self.vdim} of V"] if self.vdim != self.hdim else [])]
        parts += [self.dtype]
        parts += ["causal"] if self.causal and self.workload not in ("decode", "prefix") else []
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"schedule {self.sched}"] if self.sched else []
        if self.workload == "sparse" and not self.sched:
            parts += [f"{self.sparsity:.0%} sparse", f"blocks {self.block}"]
        if self.workload in ("decode", "prefix"):
            parts += [f"{self.kv_format} KV", f"pages of {self.page_size}"]
            parts += [f"{self.tokens} tokens a step"] if self.tokens > 1 else []
        return f"{'dense' if self.workload.startswith(VALUES) else self.workload}: " + ", ".join(parts)


def check_device(device: str) -> torch.device:
    """The device of that name; ValueError if nothing is measured on such a one, or it is not here."""
    try:
        found = torch.device(device)
    except RuntimeError:  # a name that torch does not know
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu, because torch sees no GPU here, got {device!r}")
    if found.type == "cuda" and found.index is not None and found.index >= torch.cuda.device_count():
        raise ValueError(f"device must be one of the {torch.cuda.device_count()} GPUs here, got {device!r}")
    return found


def infer(**options: object) -> Point:
    """The Point that these dimensions speak of: a prefix, a KV format, lengths, a sparsity or schedule say which."""
    point = Point(**options)  # type: ignore[arg-type]
    if point.prefix:
        workload = "prefix"
    elif point.kv_format:
        workload = "decode"
    elif point.lengths and not (point.sparsity or point.sched):
        workload = "varlen"
    else:
        workload = "sparse" if point.sparsity or point.sched else "dense"
    return complete(replace(point, workload=workload))


def complete(point: Point) -> Point:
    """The validated point with what its workload leaves open filled in, so that equal problems are equal points."""
    if point.workload in ("decode", "prefix"):
        point = replace(point, kv_format=point.kv_format or FORMAT_OF.get(point.dtype, ""), causal=True)
    else:
        point = replace(point, page_size=Point.page_size, tokens=1, causal=point.causal or point.window > 0)
    point.validate()
    return replace(point, seq=max(lengths_of(point))) if point.lengths else point


def lengths_of(point: Point) -> list[int]:
    """The tokens of each packed sequence. A batch arrives in no order, and the longest last would be a special case."""
    try:
        shortest, longest = (int(word) for word in point.lengths.split("-"))
    except ValueError:
        raise ValueError(
            f"lengths must be like 100-4096, the shortest and the longest, got {point.lengths!r}"
        ) from None
    if not 1 <= shortest <= longest:
        raise ValueError(f"lengths must rise from at least 1, got {point.lengths!r}")
    steps = max(1, point.batch - 1)
    lengths = [round(longest * (shortest / longest) ** (i / steps)) for i in range(point.batch)]
    random.Random(0).shuffle(lengths)
    return lengths


def build(point: Point, *, seed: int = 0) -> Problem:
    """The problem at `point`, with random data: nothing here is ever zeros, which run faster than what people have."""
    generator = torch.Generator(point.device).manual_seed(seed)
    makers = {"dense": _dense, "sparse": _dense, "varlen": _varlen, "decode": _decode, "prefix": _decode}
    return makers["dense" if point.workload.startswith(VALUES) else point.workload](point, generator)


def random_like(point: Point, generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random data of the point's dtype on its device."""
    return torch.randn(*shape, generator=generator, device=point.device).to(DTYPES[point.dtype])


def backends(point: Point) -> dict[str, str]:
    """The backends that serve the point, the one asked for or all on its device, by the name they are shown under."""
    name = torch.device(point.device).type if point.backend == "auto" else point.backend
    return {f"tilewise {name}": point.backend}


def variants(point: Point) -> dict[str, dict[str, Any]]:
    """The ways to call attention that are measured, by name: on a GPU the standard softmax beside the lazy one."""
    calls: dict[str, dict[str, Any]] = {name: {"backend": backend} for name, backend in backends(point).items()}
    if torch.device(point.device).type == "cuda":
        calls |= {f"{name}, exact": {**options, "exact": True} for name, options in calls.items()}
    return calls


def _dense(point: Point, generator: torch.Generator) -> Problem:
    batch, n, heads, kv_heads, hdim = point.batch, point.seq, point.heads, point.kv_heads, point.hdim
    causal, window = point.causal, point.band
    q = random_like(point, generator, batch, n, heads, hdim)
    k, v = (random_like(point, generator, batch, n, kv_heads, dim) for dim in (hdim, point.vdim))
    schedule = _schedule(point)
    size, out_size = q.element_size(), out_dtype(q.dtype).itemsize
    each = size * (hdim * (heads + kv_heads) + point.vdim * kv_heads) + out_size * point.vdim * heads
    nbytes = batch * n * each
    sizes = (batch, n, n, heads, kv_heads, hdim, point.vdim)
    flops = plan_dense(*sizes, causal=causal, window=window, schedule=schedule, io_bytes=size).flops
    dense_flops = plan_dense(*sizes, causal=causal, io_bytes=size).flops

    given, there = (q, k, v), schedule if schedule is None else schedule.to(q.device)

    def ours(options: dict[str, Any]) -> peers.Run:
        return lambda out: tensor_of(
            api.attention(*given, causal=causal, window=window, schedule=there, out=out, **options)
        )

    kernels = [Kernel(name, ours(options), True, flops, nbytes) for name, options in variants(point).items()]
    hide = None if schedule is None else in_blocks(schedule, q.device)
    check = row_check(q, k, v, [(n, n)] * batch, causal=causal, window=window, more=hide)
    if point.dtype == FLOAT8:  # torch's kernels take none: they get the same values
        q, k, v = (x.bfloat16() for x in (q, k, v))
    # Dense SDPA stands beside a sparse or windowed problem too: what a user without such kernels pays.
    hidden = schedule is not None or window is not None
    dense = peers.torch_sdpa(q, k, v, mask=None, causal=causal)
    kernels.append(Kernel(peers.SDPA, dense, False, dense_flops, nbytes, same_answer=not hidden))
    if hidden:
        with torch.device(point.device):
            seen = reference.visible(n, n, causal=causal, window=window)
        seen = seen if schedule is None else seen & schedule.to_mask().to(point.device)
        run = peers.torch_sdpa(q, k, v, mask=seen, causal=False)
        kernels.append(Kernel(peers.SDPA_MASK, run, False, flops, nbytes + seen.numel()))
    else:
        runs = peers.torch_backends(q, k, v, causal=causal)
        kernels += [Kernel(name, run, False, flops, nbytes) for name, run in runs.items()]
    if schedule is None:
        runs, absent = peers.cuda_peers(q, k, v, causal=causal, window=point.window)
        kernels += [Kernel(name, run, False, flops, nbytes) for name, run in runs.items()]
    else:
        absent = f"not measured: {', '.join(peers.CUDA_PEERS)} (no block-sparse form of theirs is called here)"
    return problem_of(point, kernels, check, (batch, n, heads, point.vdim), absent)


def _varlen(point: Point, generator: torch.Generator) -> Problem:
    """Packed sequences. Everybody's FLOPs are the useful ones, so rates compare with each other and with dense ones."""
    lengths, heads, kv_heads, hdim, causal = lengths_of(point), point.heads, point.kv_heads, point.hdim, point.causal
    total, longest, window = sum(lengths), max(lengths), point.band
    q = random_like(point, generator, total, heads, hdim)
    k, v = (random_like(point, generator, total, kv_heads, hdim) for _ in range(2))
    starts = [0, *accumulate(lengths)]
    cu_seqlens = peers.starts_of(lengths, q.device)
    size = q.element_size()
    nbytes = 2 * size * hdim * total * (heads + kv_heads)
    flops = plan_varlen(starts, starts, heads, kv_heads, hdim, causal=causal, window=window, io_bytes=size).flops

    def ours(options: dict[str, Any]) -> peers.Run:
        return lambda out: tensor_of(
            api.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=causal, window=window, out=out, **options)
        )

    kernels = [Kernel(name, ours(options), True, flops, nbytes) for name, options in variants(point).items()]
    name, run = peers.padded_sdpa(q, k, v, causal=causal, lengths=lengths)
    padded_bytes = nbytes * len(lengths) * longest // total
    same = (causal and not window) or min(lengths) == longest
    kernels.append(Kernel(name, run, False, flops, padded_bytes, same_answer=same))
    runs, absent = peers.cuda_peers(q, k, v, causal=causal, window=point.window, lengths=lengths)
    kernels += [Kernel(name, run, False, flops, nbytes) for name, run in runs.items()]
    judge = row_check(q, k, v, [(n, n) for n in lengths], causal=causal, window=window)

    def check(answer: torch.Tensor) -> Check:
        if answer.dim() == 4:  # padded: its rows are picked out here, where it is not timed
            answer = torch.cat([rows[:n] for rows, n in zip(answer, lengths, strict=True)])
        return judge(answer)

    return problem_of(point, kernels, check, (total, heads, hdim), absent)


def _schedule(point: Point) -> BlockSchedule | None:
    if point.workload != "sparse":
        return None
    n = point.seq
    if not point.sched:
        return BlockSchedule.random(n, n, block_q=point.block, block_k=point.block, sparsity=point.sparsity, seed=0)
    schedule = load_schedule(point.sched, n, point.block)
    schedule.check(n, n, point.heads)
    return schedule


def load_schedule(path: str, seq: int | None, block: int | None) -> BlockSchedule:
    """The schedule in a file; `seq` and `block` are for a foreign .npy, which does not say them."""
    if not path.endswith(".npy"):
        return BlockSchedule.load(path)
    return BlockSchedule.load(path, seqlen_q=seq, seqlen_k=seq, block_q=block, block_k=block)


def _decode(point: Point, generator: torch.Generator) -> Problem:
    """A paged cache of `batch` sequences, forked from one that holds the prefix when there is one."""
    batch, tokens, heads, kv_heads, hdim = point.batch, point.tokens, point.heads, point.kv_heads, point.hdim
    own, prefix = point.seq, point.prefix
    q = random_like(point, generator, batch, tokens, heads, hdim)
    shared_k, shared_v = (random_like(point, generator, 1, prefix, kv_heads, hdim) for _ in range(2))
    own_k, own_v = (random_like(point, generator, batch, own, kv_heads, hdim) for _ in range(2))
    cache, seqs = _filled_cache(point, (shared_k, shared_v), (own_k, own_v))
    # What the peers and the oracle see is what the cache holds: its own values where the format rounds them.
    if point.dtype in LOSSLESS.get(point.kv_format, ()):
        k, v = (torch.cat((s.expand(batch, -1, -1, -1), o), dim=1) for s, o in ((shared_k, own_k), (shared_v, own_v)))
    else:
        pairs = [cache.gather(0, seq) for seq in seqs]
        k, v = torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])
        shared_k, shared_v = (x[:1, :prefix].to(q.dtype).contiguous() for x in (k, v))
        own_k, own_v = (x[:, prefix:].to(q.dtype).contiguous() for x in (k, v))

    stored = prefix + batch * own
    pairs_seen = batch * visible_pairs(tokens, prefix + own, band_of(tokens, prefix + own, True, None))
    flops = 4 * hdim * heads * pairs_seen
    q_and_o = 2 * q.numel() * q.element_size()
    # A token's bytes in the cache's own format, scales included, and in the peers' plain tensors.
    token_bytes = cache.nbytes // (cache.num_pages * cache.page_size)
    plain_bytes = 2 * kv_heads * hdim * q.element_size()

    def decode(backend: str, share: Literal["auto"] | bool) -> peers.Run:
        plan = api.plan_decode(cache, seqs, num_heads=heads, tokens_per_seq=tokens, share_prefix=share)
        return lambda out: tensor_of(api.decode(q, cache, 0, plan, out=out, backend=backend))

    def levels(backend: str) -> peers.Run:
        prefixes = [(shared_k, shared_v)]
        return lambda out: tensor_of(api.shared_prefix_attention(q, prefixes, own_k, own_v, out=out, backend=backend))

    kernels = []
    for name, backend in backends(point).items():
        kernels.append(Kernel(name, decode(backend, "auto"), True, flops, stored * token_bytes + q_and_o))
        if prefix:
            unshared = batch * (prefix + own) * token_bytes + q_and_o
            kernels.append(Kernel(f"{name}, unshared", decode(backend, False), True, flops, unshared))
            nbytes = stored * plain_bytes + q_and_o
            kernels.append(Kernel(f"{name}, no cache", levels(backend), True, flops, nbytes))
    plain_k, plain_v = k.to(q.dtype), v.to(q.dtype)
    nbytes = batch * (prefix + own) * plain_bytes + q_and_o
    mask = reference.visible(tokens, prefix + own, causal=True).to(q.device) if tokens > 1 else None
    sdpa = peers.torch_sdpa(q, plain_k, plain_v, mask=mask, causal=False)
    kernels.append(Kernel(peers.SDPA, sdpa, False, flops, nbytes))
    if tokens == 1 and heads != kv_heads:
        kernels.append(Kernel(peers.SDPA_ROWS, peers.torch_sdpa_rows(q, plain_k, plain_v), False, flops, nbytes))
    runs, absent = peers.cuda_peers(q, plain_k, plain_v, causal=True)
    kernels += [Kernel(name, run, False, flops, nbytes) for name, run in runs.items()]
    check = row_check(q, k, v, [(tokens, prefix + own)] * batch, causal=True, window=None)
    return problem_of(point, kernels, check, (batch, tokens, heads, hdim), absent)


def _filled_cache(
    point: Point, shared: tuple[torch.Tensor, torch.Tensor], own: tuple[torch.Tensor, torch.Tensor]
) -> tuple[PagedKVCache, list[int]]:
    pages = math.ceil(point.prefix / point.page_size) + point.batch * (math.ceil(point.seq / point.page_size) + 1)
    cache = PagedKVCache(
        pages, point.page_size, point.kv_heads, point.hdim, kv_format=point.kv_format, device=point.device
    )
    if point.prefix:
        first = cache.allocate()
        slots = cache.extend([first], [point.prefix])
        cache.write(0, slots, *(x.flatten(0, 1) for x in shared))
        seqs = [first, *(cache.fork(first) for _ in range(point.batch - 1))]
    else:
        seqs = [cache.allocate() for _ in range(point.batch)]
    slots = cache.extend(seqs, [point.seq] * point.batch)
    cache.write(0, slots, *(x.flatten(0, 1) for x in own))
    return cache, seqs


def tensor_of(o: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The output alone: without `return_lse` a call returns nothing else."""
    assert isinstance(o, torch.Tensor)
    return o


def problem_of(
    point: Point,
    kernels: list[Kernel],
    check: Callable[[torch.Tensor], Check],
    shape: tuple[int, ...],
    absent: str = "",
) -> Problem:
    """The problem of a point, whose output has this shape."""
    device, dtype = torch.device(point.device), DTYPES[point.dtype]
    ceiling = ceilings.of(device, dtype)
    return Problem(point.title, device, out_dtype(dtype), kernels, check, shape, math.prod(shape[:-1]), ceiling, absent)


def dimensions(point: Point) -> dict[str, str | int | float | bool]:
    """The point as plain values by name, in the order of its fields: what a CSV row or a JSON object holds."""
    return asdict(point)
