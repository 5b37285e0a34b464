"""What four ranks do in test_distributed.py: `python distributed_cases.py FOLDER` forks them and waits for them.

Importing torch costs seconds and a case milliseconds, so the ranks are forked from one process that has imported it,
each runs tables of cases, and writes what went wrong with which to FOLDER/equal-RANK.json and
FOLDER/failures-RANK.json. The calls are collective: all ranks go through the tables in the same order.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from oracle import assert_gradients, assert_state, gradient_floors, gradients, qkv, randn

from tilewise import PagedKVCache, plan_decode, reference
from tilewise import distributed as tw
from tilewise.distributed import TilewiseDistributedError, context

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# (batch, Nq, Nk, Hq, Hkv, D), dtype, options of attention
PROBLEMS = {
    "causal": ((2, 64, 64, 4, 2, 16), F32, {"causal": True}),
    "causal bf16": ((1, 65, 65, 4, 2, 40), BF16, {"causal": True}),
    "causal fp16": ((1, 63, 63, 4, 4, 96), F16, {"causal": True}),
    "full bf16": ((2, 63, 63, 4, 1, 64), BF16, {}),
    "more keys": ((1, 37, 101, 4, 2, 16), F32, {"causal": True}),
    "rows without keys": ((2, 101, 37, 4, 2, 16), F32, {"causal": True}),
    "rows without keys, sinks": ((1, 90, 37, 4, 2, 16), F32, {"causal": True, "sinks": True}),
    "window": ((2, 101, 101, 4, 2, 16), F32, {"window": (7, 3)}),
    "window causal bf16": ((1, 130, 130, 4, 2, 32), BF16, {"window": (20, 0), "causal": True}),
    "window of one key": ((1, 33, 33, 4, 2, 16), F32, {"window": (0, 0)}),
    "left alone": ((1, 66, 66, 4, 2, 16), F32, {"window": (9, None)}),
    "right alone": ((1, 66, 50, 4, 2, 16), F32, {"window": (None, 9)}),
    "softcap and sinks": ((1, 65, 65, 4, 2, 16), F32, {"causal": True, "softcap": 5.0, "sinks": True, "scale": 0.4}),
    "sinks bf16": ((1, 65, 65, 4, 2, 16), BF16, {"causal": True, "sinks": True}),
    "one position": ((1, 1, 1, 4, 2, 16), F32, {"causal": True}),
    "fewer than ranks": ((2, 3, 3, 4, 2, 16), F32, {"causal": True, "sinks": True}),
    "no queries": ((1, 0, 5, 4, 2, 16), F32, {"causal": True}),
    "no keys": ((1, 5, 0, 4, 2, 16), F32, {"sinks": True}),
    "no sequences": ((0, 9, 9, 4, 2, 16), F32, {"causal": True}),
}
# heads of q and k that 4, 3 and 2 ranks share, once with a KV head on several ranks
HEADS = {4: ((8, 8), (8, 4), (8, 2), (4, 1)), 3: ((6, 3), (3, 1)), 2: ((4, 2), (6, 1))}
HEAD_PROBLEMS = (
    "causal bf16",
    "rows without keys, sinks",
    "window",
    "fewer than ranks",
    "no keys",
    "softcap and sinks",
)


class Ranks:
    """The cases that this process runs, and what became of them."""

    def __init__(self, rank: int, folder: Path) -> None:
        store = dist.FileStore(str(folder / "store"), 4)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
        self.rank, self.folder, self.results = rank, folder, {}
        self.groups = {4: None, 3: dist.new_group([0, 1, 2]), 2: dist.new_group([1, 3])}

    def case(self, name, run, *arguments, **options) -> None:
        try:
            run(*arguments, **options)
        except Exception:
            self.results[name] = traceback.format_exc()
        else:
            self.results[name] = ""

    def write(self, part) -> None:
        (self.folder / f"{part}-{self.rank}.json").write_text(json.dumps(self.results))
        self.results = {}

    def raises(self, kind, *words) -> Raises:
        return Raises(kind, words)


class Raises:
    """As pytest.raises, with all of the words in the message."""

    def __init__(self, kind, words) -> None:
        self.kind, self.words = kind, words

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, _) -> bool:
        assert kind is self.kind, f"{self.kind.__name__} expected, got {kind}: {error}"
        missing = [word for word in self.words if word not in str(error)]
        assert not missing, f"{missing} not in {error}"
        return True


def split(x, layout, group, dim=1):
    if layout == "zigzag":
        return tw.zigzag_split(x, group=group, dim=dim)
    return x.tensor_split(dist.get_world_size(group), dim)[dist.get_rank(group)]


def gather(x, layout, group, dim=1):
    if layout == "zigzag":
        return tw.zigzag_gather(x, group=group, dim=dim, timeout=30)
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, x, group=group)
    return torch.cat(parts, dim)


_oracles: dict[tuple[object, ...], tuple[tuple[torch.Tensor, ...], ...]] = {}


def oracle(seed, q, k, v, **options):
    """The exact and the honest (o, lse) of inputs made from `seed`, once for all layouts and methods."""
    key = (seed, q.shape, k.shape, q.dtype, *((name, str(value)) for name, value in options.items()))
    if key not in _oracles:
        _oracles[key] = reference.attention(q, k, v, **options), reference.baseline(q, k, v, **options)
    return _oracles[key]


def sequence_case(call, problem, group, layout, heads=None, with_seqlen=False, device="cpu", **more) -> None:
    """A call over a split sequence is the single-process call over the whole one."""
    sizes, dtype, options = problem
    heads = heads or sizes[3:5]
    q, k, v = qkv(*sizes[:3], *heads, sizes[5], dtype=dtype, seed=sum(sizes))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # strides of (batch, heads, seqlen, head_dim)
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = randn(heads[0], seed=7)
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    there |= {"group": group, "layout": layout, "seqlen": sizes[1:3] if with_seqlen else None, "timeout": 30, **more}
    parts = [split(x.to(device), layout, group) for x in (q, k, v)]
    o, lse = call(*parts, return_lse=True, **there)
    assert o.shape == parts[0].shape
    assert o.dtype == dtype
    assert torch.equal(call(*parts, **there), o)
    whole = gather(o, layout, group).cpu(), gather(lse, layout, group, dim=2).cpu()
    assert_state(whole, *oracle(sum(sizes), q, k, v, **options))


# What training asks for: a small table, for each of its problems is a backward pass too.
TRAINED = (
    "causal",
    "full bf16",
    "more keys",
    "rows without keys",
    "rows without keys, sinks",
    "window causal bf16",
    "window of one key",
    "softcap and sinks",
    "fewer than ranks",
    "no queries",
    "no keys",
    "no sequences",
)


def gradient_case(call, problem, group, layout, heads=None, **more) -> None:
    """Gradients of a call over a split sequence are those of the whole one, dsinks when all ranks' are added up."""
    sizes, dtype, options = problem
    heads = heads or sizes[3:5]
    tensors = qkv(*sizes[:3], *heads, sizes[5], dtype=dtype, seed=sum(sizes))
    options = dict(options)
    names = ("q", "k", "v", "sinks") if options.pop("sinks", False) else ("q", "k", "v")
    if "sinks" in names:
        tensors = (*tensors, randn(heads[0], seed=7))
    d_o = randn(*tensors[0].shape, dtype=dtype, seed=8)
    d_lse = randn(d_o.shape[0], d_o.shape[2], d_o.shape[1], seed=9)

    def ours(*given):
        return call(*given[:3], **dict(zip(names[3:], given[3:], strict=True)), **there, return_lse=True)

    def oracle(*given, **kind):
        return reference.attention(*given[:3], **dict(zip(names[3:], given[3:], strict=True)), **options, **kind)

    there = {**options, "group": group, "layout": layout, "timeout": 30, **more}
    parts = [*(split(x, layout, group) for x in tensors[:3]), *tensors[3:]]
    mine = split(d_o, layout, group), split(d_lse, layout, group, dim=2)
    got = list(gradients(ours, parts, *mine))
    assert [x.dtype for x in got] == [x.dtype for x in parts]
    whole = [gather(x, layout, group) for x in got[:3]]
    for x in got[3:]:
        dist.all_reduce(x, group=group)
        whole.append(x)
    if not d_o.numel() or not tensors[1].numel():
        assert not any(x.any() for x in whole[:3])
        return
    exact = gradients(oracle, tensors, d_o, d_lse, dtype=torch.float64)
    honest = gradients(lambda *x: oracle(*x, dtype=dtype), tensors, d_o, d_lse)
    lse = oracle(*(x.double() for x in tensors))[1]
    assert_gradients(whole, exact, honest, gradient_floors(oracle, tensors, d_o, options.get("scale")), lse)


def gathered_case(group) -> None:
    """The gradient of what every rank gathers is the sum of what all ranks say of it."""
    whole = randn(2, 13, 3)
    x = tw.zigzag_split(whole, group=group).requires_grad_()
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    got = tw.zigzag_gather(x, group=group, timeout=30)
    assert torch.equal(got.detach(), whole)
    (got * whole * (rank + 1)).sum().backward()
    torch.testing.assert_close(x.grad, x.detach() * (world * (world + 1) // 2))


def by_ranks(q, k, v, world, *, layout, method="ring", scale, softcap=0.0, sinks=None, backend="auto", **mask):
    """What all ranks of a context_attention compute, one after the other in one process: the whole (o, lse)."""
    share = lambda x, r: tw.zigzag_split(x, rank=r, world=world) if layout == "zigzag" else x.tensor_split(world, 1)[r]  # noqa: E731
    states = []
    for rank in range(world):
        plan = tw.plan_context((q.shape[1], k.shape[1]), rank=rank, world=world, method=method, layout=layout, **mask)
        options = {"scale": scale, "softcap": softcap}
        pieces = context.Pieces(share(q, rank), options, backend, exclusive=plan.exclusive)
        for step in plan.steps:
            block = (k, v) if step.source is None else (share(k, step.source), share(v, step.source))
            pieces.add(*block, step.pieces)
        states.append(pieces.result(sinks))
    if layout == "zigzag":
        return tw.zigzag_merge([o for o, _ in states]), tw.zigzag_merge([lse for _, lse in states], dim=2)
    return torch.cat([o for o, _ in states], 1), torch.cat([lse for _, lse in states], 2)


def placed(lengths, rule, rank, world):
    """Which tokens of sequences of these lengths a rank holds."""
    if rule == "in turns":
        return [list(range(rank, n, world)) for n in lengths]
    if rule == "all on one":
        return [list(range(n)) if rank == world - 1 else [] for n in lengths]
    return [torch.arange(n).tensor_split(world)[rank].tolist() for n in lengths]


def cache_of(lengths, tokens, heads_kv, head_dim, kv_format, device="cpu"):
    """A cache with some tokens of each sequence; what a token holds depends on nothing but itself."""
    cache = PagedKVCache(64, 16, heads_kv, head_dim, num_layers=2, kv_format=kv_format, device=device)
    seqs = [cache.allocate() for _ in lengths]
    slots = cache.extend(seqs, [len(x) for x in tokens])
    for layer in range(2):
        whole = [
            [randn(n, heads_kv, head_dim, seed=100 * s + 10 * layer + part) for part in (0, 1)]
            for s, n in enumerate(lengths)
        ]
        k, v = (torch.cat([x[part][held] for x, held in zip(whole, tokens, strict=True)]) for part in (0, 1))
        cache.write(layer, slots, k.to(device), v.to(device))
    return cache, seqs


def decode_case(group, rule, kv_format, dtype, tokens_per_seq=1, device="cpu", **options) -> None:
    lengths, (heads_q, heads_kv, head_dim) = [130, 1, 63, 0, 65], (4, 2, 64)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    everything = cache_of(lengths, [list(range(n)) for n in lengths], heads_kv, head_dim, kv_format)
    tokens = placed(lengths, rule, rank, world)
    tails = None
    if tokens_per_seq > 1:  # the queries' own tokens go together, to one rank, another one for each sequence
        tails = [s % world == rank for s in range(len(lengths))]
        ends = [max(0, n - tokens_per_seq) for n in lengths]
        tokens = [
            [t for t in x if t < end] + list(range(end, n)) * tail
            for x, end, n, tail in zip(tokens, ends, lengths, tails, strict=True)
        ]
    cache, seqs = cache_of(lengths, tokens, heads_kv, head_dim, kv_format, device)
    plan = plan_decode(cache, seqs, num_heads=heads_q, tokens_per_seq=tokens_per_seq)
    q = randn(len(lengths), tokens_per_seq, heads_q, head_dim, dtype=dtype, seed=5)
    if options.get("sinks"):
        options["sinks"] = randn(heads_q, seed=7)
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    there |= {"group": group, "tails": tails, "timeout": 30}
    state = tw.decode_split(q.to(device), cache, 1, plan, return_lse=True, check=True, **there)
    again = tw.decode_split(q.to(device), cache, 1, plan, **there)
    assert torch.equal(again, state[0])
    state = tuple(x.cpu() for x in state)
    exact = reference.decode(q, everything[0], 1, everything[1], **options)
    assert_state(state, exact, reference.decode(q, everything[0], 1, everything[1], dtype=dtype, **options))
    others = [None] * world
    dist.all_gather_object(others, state, group=group)
    assert all(torch.equal(a, b) for other in others for a, b in zip(other, state, strict=True)), "bits differ by rank"


def disagreement_cases(ranks: Ranks) -> None:
    """All ranks are told, none hangs, and the group can be used afterwards."""
    q, k, v = qkv(1, 16, 16, 4, 2, 16)
    parts = [tw.zigzag_split(x) for x in (q, k, v)]
    odd = ranks.rank == 2

    def run(words, kind=ValueError, **options):
        with ranks.raises(kind, *words):
            tw.context_attention(*options.pop("parts", parts), **{"timeout": 30, **options})

    ranks.case("causal differs", run, ("causal must be", "False on rank 0", "True on rank 2"), causal=odd)
    window = (3, 4) if odd else None
    ranks.case("window differs", run, ("window must be", "[3, 4] on rank 2"), window=window)
    halves = [x.bfloat16() for x in parts] if odd else parts
    ranks.case("dtype differs", run, ("dtype must be", "'torch.bfloat16' on rank 2"), parts=halves)
    longer = [torch.cat((x, x), 1) for x in parts] if odd else parts
    ranks.case("length differs", run, ("q must hold", "got 4; split with"), parts=longer)
    ranks.case("method differs", run, ("method must be", "'all_gather'"), method="all_gather" if odd else "ring")
    leaf = [x.clone().requires_grad_() for x in parts] if odd else parts
    ranks.case("gradients differ", run, ("gradients must be", "True on rank 2"), parts=leaf)
    ranks.case("seqlen is wrong", run, ("q must hold 5 of the 20 positions", "zigzag_split"), seqlen=20)
    other = tw.head_attention if odd else tw.context_attention

    def call_differs():
        with ranks.raises(ValueError, "call must be", "'head_attention' on rank 2"):
            other(*parts, layout="zigzag", timeout=30)

    ranks.case("call differs", call_differs)

    def too_few_heads():
        with ranks.raises(NotImplementedError, "4 ranks", "got 6 and 3", "context_attention"):
            tw.head_attention(*qkv(1, 4, 4, 6, 3, 16), timeout=30)

    ranks.case("heads that ranks cannot share", too_few_heads)
    not_mine = dist.new_group([0, 1])  # on ranks 2 and 3 what torch gives to those that are not in it

    def not_in_group():
        if ranks.rank > 1:
            with ranks.raises(ValueError, "group must be one that this process is a rank of"):
                tw.context_attention(*parts, group=not_mine)

    ranks.case("not in the group", not_in_group)

    def tails_differ():
        cache, seqs = cache_of([9, 9], [list(range(9))] * 2, 2, 32, "fp32")
        plan = plan_decode(cache, seqs, num_heads=4, tokens_per_seq=2)
        with ranks.raises(ValueError, "tails must be True on one rank for sequence 1", "got 0"):
            tw.decode_split(randn(2, 2, 4, 32), cache, 0, plan, tails=[ranks.rank == 0, False], check=True, timeout=30)

    ranks.case("tails differ", tails_differ)
    ranks.case("afterwards", sequence_case, tw.context_attention, PROBLEMS["causal"], None, "zigzag")


def equal(ranks: Ranks) -> None:
    """Every call over ranks is the call of one process."""
    for world, group in ranks.groups.items():
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        problems = list(PROBLEMS.items()) if world == 4 else list(PROBLEMS.items())[world % 2 :: 2]
        for n, (name, problem) in enumerate(problems):
            for layout in ("zigzag", "contiguous"):
                for method in ("ring", "all_gather"):
                    title = f"context, {world} ranks, {name}, {layout}, {method}"
                    run = (tw.context_attention, problem, group, layout)
                    ranks.case(title, sequence_case, *run, with_seqlen=n % 2 == 0, method=method)
        for n, heads in enumerate(HEADS[world]):
            for name in HEAD_PROBLEMS:
                layout = ("contiguous", "zigzag")[n % 2]
                title = f"heads, {world} ranks, {name}, {layout}, {heads}"
                run = (tw.head_attention, PROBLEMS[name], group, layout, heads)
                ranks.case(title, sequence_case, *run, with_seqlen=n % 2 == 0)
        for rule in ("in order", "in turns", "all on one"):
            for kv_format, dtype in (("fp32", F32), ("bf16", BF16), ("int8", F16)):
                for tokens in (1, 3):
                    title = f"decode, {world} ranks, {rule}, {kv_format}, {tokens} tokens"
                    more = {"sinks": True} if rule != "in turns" else {"softcap": 4.0, "scale": 0.5}
                    ranks.case(title, decode_case, group, rule, kv_format, dtype, tokens, **more)
        gradient_cases(ranks, world, group)
    disagreement_cases(ranks)


def gradient_cases(ranks: Ranks, world, group) -> None:
    """Every problem in one way of four, in another one for each number of ranks; two problems in all of them."""
    ways = [(layout, method) for layout in ("zigzag", "contiguous") for method in ("ring", "all_gather")]
    for n, name in enumerate(TRAINED):
        every = world == 4 and name in ("causal", "window causal bf16")
        for layout, method in ways if every else [ways[(n + world) % 4]]:
            title = f"gradients, context, {world} ranks, {name}, {layout}, {method}"
            ranks.case(title, gradient_case, tw.context_attention, PROBLEMS[name], group, layout, method=method)
    for n, heads in enumerate(HEADS[world]):
        name = HEAD_PROBLEMS[(n + world) % len(HEAD_PROBLEMS)]
        title = f"gradients, heads, {world} ranks, {name}, {heads}"
        ranks.case(
            title, gradient_case, tw.head_attention, PROBLEMS[name], group, ("contiguous", "zigzag")[n % 2], heads
        )
    ranks.case(f"gradients of what is gathered, {world} ranks", gathered_case, group)


def failures(ranks: Ranks) -> None:
    """Of ranks 0 to 2 the last never comes, then dies within a ring: the others say so in time, and can go on."""
    q, k, v = qkv(1, 24, 24, 6, 3, 16)
    parts = [tw.zigzag_split(x, rank=min(ranks.rank, 2), world=3) for x in (q, k, v)]
    cache, seqs = cache_of([9], [list(range(9))], 2, 32, "fp32")
    plan = plan_decode(cache, seqs, num_heads=4)
    one, on = 0.6, {"timeout": 0.6, "layout": "zigzag"}
    calls = {
        "comparing": lambda group: tw.context_attention(*parts, group=group, **on),
        "ring": lambda group: tw.context_attention(*parts, group=group, seqlen=24, **on),
        "gathering keys": lambda group: tw.context_attention(*parts, group=group, seqlen=24, method="all_gather", **on),
        "dealing out heads": lambda group: tw.head_attention(*parts, group=group, seqlen=24, **on),
        "gathering the states": lambda group: tw.decode_split(
            randn(1, 1, 4, 32), cache, 0, plan, group=group, timeout=one
        ),
    }
    groups = {what: dist.new_group([0, 1, 2]) for what in calls}
    impatient = dist.new_group([0, 1, 2], timeout=timedelta(seconds=one))
    last = dist.new_group([0, 1, 2])

    def late(what):
        started, group = time.monotonic(), groups.pop(what)
        with ranks.raises(TilewiseDistributedError, what, f"on rank {ranks.rank} of 3", "timeout=0.6 s", "died"):
            calls[what](group)
        waited = time.monotonic() - started
        assert waited < one + 5, f"{waited:.1f} s"
        started = time.monotonic()
        dist.destroy_process_group(group)
        del group  # now its threads are waited for
        assert time.monotonic() - started < 5, "the group cannot be destroyed"

    def late_by_group():
        with ranks.raises(TilewiseDistributedError, "ring", "the group's own timeout"):
            tw.context_attention(*parts, group=impatient, seqlen=24)

    if ranks.rank < 2:
        for what in calls:
            ranks.case(f"late: {what}", late, what)
        ranks.case("late by the group's timeout", late_by_group)
    elif ranks.rank == 2:
        time.sleep((len(calls) + 1) * one + 1)

    dist.barrier()  # on the default group, which nothing has happened to
    if ranks.rank == 3:
        return

    def dying():
        started = time.monotonic()
        neighbour = "from rank 2 failed" if ranks.rank == 0 else "of the ring"  # rank 1 may hear of it from either
        with ranks.raises(TilewiseDistributedError, neighbour, f"on rank {ranks.rank} of 3", "died, raised"):
            tw.context_attention(*parts, group=last, seqlen=24, causal=True, timeout=10)
        waited = time.monotonic() - started
        assert waited < 15, f"{waited:.1f} s"
        if ranks.rank == 0:  # it waits for rank 2 itself, and learns of its end at once
            assert waited < 5, f"{waited:.1f} s"

    if ranks.rank == 2:
        computing, calls_made = context.attention, []

        def killed(*arguments, **options):
            calls_made.append(1)
            if len(calls_made) == 2:  # within its first step, the second of which others wait for
                os.kill(os.getpid(), signal.SIGKILL)
            return computing(*arguments, **options)

        context.attention = killed
    ranks.case("a rank dies", dying)


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(rank, folder)
    equal(ranks)
    ranks.write("equal")
    failures(ranks)
    ranks.write("failures")


def main(folder: Path) -> None:
    """Fork before anything has run: a fork takes along one thread, and torch has no other yet."""
    ranks = [multiprocessing.get_context("fork").Process(target=run_rank, args=(rank, folder)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
