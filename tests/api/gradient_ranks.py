"""Two ranks that train a layer of attention by DDP and by FSDP2: `python gradient_ranks.py FOLDER`.

Each compares the gradients that it is left with to those of the whole batch in one process, and leaves a file "right".
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tilewise import attention


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(16, 64), nn.Linear(32, 16)
        self.sinks = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split((32, 16, 16), dim=-1)
        heads = [t.unflatten(-1, (-1, 8)) for t in (q, k, v)]
        return self.out(attention(*heads, causal=True, sinks=self.sinks).flatten(2))


def train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    x = torch.randn(4, 20, 16, generator=torch.Generator().manual_seed(1))
    alone = Layer()
    alone(x).square().mean().backward()
    want = {name: p.grad for name, p in alone.named_parameters()}
    for split in (DistributedDataParallel, lambda layer: fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))):
        layer = split(Layer())
        layer(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        for name, p in layer.named_parameters():
            got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(got, want[name.removeprefix("module.")], rtol=1e-4, atol=1e-6)
    Path(folder, f"right-{rank}").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = [multiprocessing.get_context("fork").Process(target=train, args=(n, sys.argv[1])) for n in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
