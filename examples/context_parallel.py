"""Causal attention over a sequence that two processes hold in halves, equal to one process that holds it all.

    python examples/context_parallel.py                              # starts its two processes itself
    torchrun --nproc-per-node 2 examples/context_parallel.py         # or as many as you like

Each rank holds an early and a late chunk of the sequence (zig-zag), which makes causal work even. Keys and values go
round a ring; each rank attends to one block of them while it passes that on and receives the next, and the states
`(o, lse)` of the blocks merge exactly. In the backward pass the keys go round once more, and their gradients home. With
a GPU for each process the same calls run there, over nccl.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tilewise
from tilewise.distributed import context_attention, plan_context, zigzag_gather, zigzag_split

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def run_rank(seqlen: int) -> None:
    """One rank's part; the process group is there."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    # A model would compute its own part of q, k and v only; here all ranks make the whole to compare with.
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, seqlen, heads, HEAD_DIM, generator=generator).to(device, dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    mine = [zigzag_split(x).requires_grad_() for x in (q, k, v)]
    o, lse = context_attention(*mine, causal=True, return_lse=True, timeout=60)

    # What that did, from the plan it followed.
    plan = plan_context(seqlen, rank=rank, world=world, causal=True)
    spans = " and ".join(f"{start}–{stop - 1}" for start, stop in plan.chunks)
    row_bytes = 2 * KV_HEADS * HEAD_DIM * dtype.itemsize
    lines = [f"rank {rank} of {world} holds positions {spans}"]
    for n, step in enumerate(plan.steps):
        pairs = sum(piece.pairs for piece in step.pieces)
        sent = f"passes them on, {step.keys * row_bytes / 1024:.0f} KiB" if step.sends else "sends nothing"
        calls = f"{len(step.pieces)} call" + "s" * (len(step.pieces) != 1)
        lines.append(f"  step {n + 1}: keys of rank {step.source}, {calls}, {pairs:,} visible pairs; {sent}")
    lines.append(f"  in all {plan.pairs:,} of {seqlen * (seqlen + 1) // 2:,} pairs, {plan.keys_sent} tokens sent")
    reports: list[list[str] | None] = [None] * world
    dist.all_gather_object(reports, lines)

    # Training: each rank's loss is that of its own positions, and keys get the gradients of all ranks' rows.
    o.float().square().sum().backward()
    whole = [zigzag_gather(x.grad) for x in mine if x.grad is not None]

    # The whole result, beside that of one process.
    whole_o, whole_lse = zigzag_gather(o.detach()), zigzag_gather(lse.detach(), dim=2)
    if rank == 0:
        print("\n".join(line for report in reports if report for line in report))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        one_o, one_lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
        one = torch.autograd.grad(one_o.float().square().sum(), leaves)
        pairs = zip((whole_o, whole_lse, *whole), (one_o, one_lse, *one), strict=True)
        apart = [f"{(a.float() - b.float()).abs().max().item():.1e}" for a, b in pairs]
        named = ", ".join(f"{name} {x}" for name, x in zip(("o", "lse", "dq", "dk", "dv"), apart, strict=True))
        print(f"largest difference from one process: {named}")
        q, k, v = (x.detach().cpu() for x in (q, k, v))
        exact = tilewise.reference.attention(q, k, v, causal=True)
        honest = tilewise.reference.baseline(q, k, v, causal=True)
        verdict = tilewise.reference.judge(whole_o.cpu(), exact[0], honest[0], lse=exact[1])
        print(f"error against float64: {verdict.error:.1e}, allowed {verdict.allowed:.1e}")
        if not verdict.ok:
            raise SystemExit(f"context_attention is wrong: {verdict.reason}")


def start(rank: int | None, seqlen: int, world: int | None = None, store: str | None = None) -> None:
    """Join the process group that torchrun describes, or one of `world` processes that meet in the file `store`."""
    world_size = int(os.environ["WORLD_SIZE"]) if world is None else world
    local = int(os.environ["LOCAL_RANK"]) if rank is None else rank
    options = {} if store is None else {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    if torch.cuda.device_count() >= world_size:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local), **options)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **options)
    run_rank(seqlen)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=1001, help="tokens, which ranks need not divide (%(default)s)")
    seqlen = parser.parse_args().seqlen
    if "RANK" in os.environ:  # torchrun's doing
        start(None, seqlen)
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(start, args=(seqlen, 2, os.path.join(folder, "store")), nprocs=2)


if __name__ == "__main__":
    main()
