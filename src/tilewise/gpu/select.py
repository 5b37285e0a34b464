"""Which pages sequences read, kernels/decode/select.cu: from bits to the lists that the decode kernel walks."""

from __future__ import annotations

from typing import Any

import torch

from tilewise import compiler, emulator
from tilewise.gpu.abi import DecodeArgs, SelectArgs
from tilewise.gpu.decode_kernels import SELECT_SPEC
from tilewise.plan.worklist import WorkList


class Select:
    """The kernel that makes the lists of one work list, and its arguments.

    decode: the arguments of the decode kernel over all pages, which become those over selected ones. selections: lists
    of each sequence, one per KV head or one for all of them.
    """

    def __init__(self, listed: WorkList, decode: DecodeArgs, device: torch.device, selections: int) -> None:
        self.decode, self.fixed = decode, listed.tensors(device)
        self.lists, self.most = listed.sequences * selections, listed.selected_pages
        self.grid = (listed.sequences, selections, 1)
        a = self.args = SelectArgs(most=self.most, page_size=listed.page_size, queries=decode.tokens)
        a.tail_from = self.fixed["tail_from"].data_ptr()
        for name in ("order", "lengths", "tails", "pages", "table_pages", "tail_pages"):
            setattr(a, name, getattr(decode, name))
        decode.selections, decode.table_pages = selections, self.most
        if device.type == "cuda":
            self.kernel = compiler.load(SELECT_SPEC, device)
            self.launch_args = compiler.Args(a)

    @property
    def words(self) -> int:
        """Of all lists: of each its tokens, its query tokens and its pages."""
        return self.lists * (2 + self.most)

    def __call__(self, bits: torch.Tensor, lists: torch.Tensor, stream: int, **emulated: Any) -> None:
        """Fill `lists`, int32 (words,), with what the bits select, for the launch of the decode kernel that follows.

        bits: int32 (num_seqs or 1, Hkv or 1, words), as gpu/decode.py's `run` takes them. emulated: options of
        emulator.launch.
        """
        a, bits = self.args, bits.contiguous()
        a.bits, a.num_pages = bits.data_ptr(), 32 * bits.shape[2]
        a.batch, a.head = (s if n > 1 else 0 for s, n in zip(bits.stride()[:2], bits.shape[:2], strict=True))
        a.tokens = lists.data_ptr()
        a.own, a.selected = a.tokens + 4 * self.lists, a.tokens + 8 * self.lists
        self.decode.lengths, self.decode.own, self.decode.pages = a.tokens, a.own, a.selected
        if bits.device.type == "cuda":
            self.kernel.launch(self.grid, self.launch_args, stream=stream)
        else:
            emulator.launch(SELECT_SPEC, self.grid, [a], {"bits": bits, "lists": lists, **self.fixed}, **emulated)
