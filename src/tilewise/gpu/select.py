"""Which pages sequences read, kernels/decode/select.cu: from bits to the lists that decode walks, before each launch."""

from __future__ import annotations

from typing import Any

import torch

from tilewise import compiler, emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu.abi import DecodeArgs, SelectArgs
from tilewise.plan.worklist import WorkList

SPEC = KernelSpec("select_pages", "decode/select.cu", "select_pages", (), 512, 0, product=True)


class Select:
    """The kernel and its arguments for one work list. selections: of a sequence, one per KV head or one for all."""

    def __init__(self, listed: WorkList, decode: DecodeArgs, device: torch.device, selections: int) -> None:
        self.fixed = listed.tensors(device)
        self.grid = (listed.sequences, selections, 1)
        self.most = listed.selected_pages
        self.args = SelectArgs(
            most=self.most, page_size=listed.page_size, queries=decode.tokens, tail_from=self.fixed["tail_from"].data_ptr()
        )
        for name in ("order", "lengths", "tails", "pages", "table_pages", "tail_pages"):
            setattr(self.args, name, getattr(decode, name))
        if device.type == "cuda":
            self.kernel = compiler.load(SPEC, device)
            self.launch_args = compiler.Args(self.args)

    @property
    def scratch(self) -> int:
        """Words of the lists: for each its tokens, its queries, and its pages."""
        return self.grid[0] * self.grid[1] * (2 + self.most)

    def __call__(self, bits: torch.Tensor, lists: torch.Tensor, decode: DecodeArgs, stream: int, **emulated: Any) -> None:
        """Fill `lists`, int32 (scratch,), by the bits and point the arguments of the decode kernel at them.

        bits: int32 (num_seqs or 1, Hkv or 1, words), in the caller's order: bit j % 32 of word j // 32 is page j's.
        """
        a, count = self.args, self.grid[0] * self.grid[1]
        bits = bits.contiguous()
        a.bits, a.num_pages = bits.data_ptr(), 32 * bits.shape[2]
        a.batch, a.head = (s if n > 1 else 0 for s, n in zip(bits.stride()[:2], bits.shape[:2], strict=True))
        a.tokens = lists.data_ptr()
        a.own, a.selected = a.tokens + 4 * count, a.tokens + 8 * count
        decode.lengths, decode.own, decode.pages = a.tokens, a.own, a.selected
        if bits.device.type == "cuda":
            self.kernel.launch(self.grid, self.launch_args, stream=stream)
        else:
            emulator.launch(SPEC, self.grid, [a], {"bits": bits, "lists": lists, **self.fixed}, **emulated)
