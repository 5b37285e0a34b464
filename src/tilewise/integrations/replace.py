"""Tilewise in the place of what torch has: of its attention function, and of the kernel behind its flash attention.

`install`, `uninstall` and `replace_sdpa` swap `torch.nn.functional.scaled_dot_product_attention` for `tilewise.sdpa`.
`install(flash=True)`, or `torch.nn.attention.activate_flash_attention_impl("tilewise")` where torch has that, put
Tilewise's kernel under `aten::_scaled_dot_product_flash_attention` on CUDA tensors, to which torch's function comes
when it picks flash attention, and its backward kernel under the operator that gives the gradients. So it reaches code
that holds torch's own function, C++ code, compiled code and training. What Tilewise does not serve goes to the kernels
that were there; the log-sum-exp that both hand on is the same, so one may do the forward and the other the backward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from tilewise import api, checks
from tilewise.api.backward import attention_backward
from tilewise.integrations.sdpa import decide, facts_of, sdpa, torch_sdpa, trains

FLASH = "tilewise"  # the implementation's name in torch.nn.attention
OPERATOR = "_scaled_dot_product_flash_attention"

_lock = threading.Lock()
_installed = False
_inside = 0  # replace_sdpa() blocks that are entered and not left
_before: Any = torch_sdpa  # what was there when `sdpa` took its place


def install(*, flash: bool = False) -> None:
    """Make `torch.nn.functional.scaled_dot_product_attention` be `tilewise.sdpa`, for all threads of the process.

    Code that looks the function up when it calls it, as `F.scaled_dot_product_attention(...)` does, gets it at once;
    what was imported by `from torch.nn.functional import scaled_dot_product_attention` before stays torch's own.
    Installing twice is installing once.

    flash: also make Tilewise the kernel behind torch's own flash attention on CUDA tensors, see this module. torch says
    once that a kernel of its is replaced.
    """
    global _installed
    if checks.flag("flash", flash):
        if not offers_flash():
            raise NotImplementedError(
                f"flash: torch {torch.__version__} takes no other flash kernel, torch 2.11 does; use install()"
            )
        torch.nn.attention.activate_flash_attention_impl(FLASH)
    with _lock:
        _installed = True
        _place()


def uninstall() -> None:
    """Undo `install`, with flash or without; if there was none, nothing happens. Open `replace_sdpa` blocks stay."""
    global _installed
    if offers_flash() and torch.nn.attention.current_flash_attention_impl() == FLASH:
        torch.nn.attention.restore_flash_attention_impl()
    with _lock:
        _installed = False
        _place()


@contextmanager
def replace_sdpa() -> Iterator[None]:
    """`with tilewise.replace_sdpa():` is `install` for a block; an exception leaves it like any other end.

    Blocks nest, and may overlap in time on several threads: the function is the process's, so while any block is open
    every thread gets `tilewise.sdpa`, and what was there before is back when the last one is left.
    """
    global _inside
    with _lock:
        _inside += 1
        _place()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            _place()


def _place() -> None:
    """Put the function there that is wanted; a third one, of somebody else, is put back, and not touched if it came
    later."""
    global _before
    functional: Any = torch.nn.functional
    present = functional.scaled_dot_product_attention
    if (_installed or _inside) and present is not sdpa:
        functional.scaled_dot_product_attention, _before = sdpa, present
    elif not (_installed or _inside) and present is sdpa:
        functional.scaled_dot_product_attention, _before = _before, torch_sdpa


# The kernel behind torch's flash attention.


def offers_flash() -> bool:
    """Does this torch take other implementations of flash attention, and give them up again?"""
    named = ("register", "activate", "restore", "current")
    return hasattr(torch.library, "get_kernel") and all(
        hasattr(torch.nn.attention, f"{verb}_flash_attention_impl") for verb in named
    )


class FlashKernel:
    """Tilewise's kernels in their places, until `remove` puts those back that were there. device: a dispatch key."""

    def __init__(self, device: str = "CUDA") -> None:
        self._before: dict[str, Any] = {}
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for name, kernel in ((OPERATOR, self), (f"{OPERATOR}_backward", self.backward)):
            with suppress(RuntimeError):  # a torch without CUDA has none
                self._before[name] = torch.library.get_kernel(f"aten::{name}", device)
            self._library.impl(name, kernel, device, with_keyset=True)

    def remove(self) -> None:
        """Put back what was there."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def __call__(
        self,
        keys: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        """The operator: query (B, Hq, L, D), key, value (B, H, S, D). is_causal aligns bottom-right here.

        Returns the output, laid out as query is, the LSE (B, Hq, L) float32, L and S, and what dropout would leave.
        """
        why = _refused((query, key, value), dropout_p, is_causal, scale, grad=False)
        if return_debug_mask:
            why = why or "a debug mask"
        if why:
            given = (query, key, value, dropout_p, is_causal, return_debug_mask)
            return self._by_torch(OPERATOR, why, keys, *given, scale=scale)
        out = torch.empty_like(query)
        q, k, v, o = (x.transpose(1, 2) for x in (query, key, value, out))
        with torch.no_grad():  # gradients are recorded above this
            _, lse = api.attention(q, k, v, causal=is_causal, scale=scale, out=o, return_lse=True)
        state = query.new_empty((2,), dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
        return out, lse, None, None, query.shape[2], key.shape[2], *state, query.new_empty((0,))

    def backward(
        self,
        keys: Any,
        d_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *dropped: torch.Tensor,
        scale: float | None = None,
    ) -> Any:
        """Gradients of query, key and value, of what `__call__` or torch's own kernel returned."""
        why = _refused((query, key, value), dropout_p, is_causal, scale, grad=True)
        if lse.shape != query.shape[:3]:
            why = why or "an LSE of another shape"
        if why:
            given = (d_out, query, key, value, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)
            return self._by_torch(f"{OPERATOR}_backward", why, keys, *given, *dropped, scale=scale)
        d_o, q, k, v, o = (x.transpose(1, 2) for x in (d_out, query, key, value, out))
        found = attention_backward(d_o, q, k, v, o, lse, causal=is_causal, scale=scale)
        return tuple(x.to(query.dtype).transpose(1, 2) for x in found)

    def _by_torch(self, name: str, why: str, keys: Any, *given: Any, **options: Any) -> Any:
        before = self._before.get(name)
        if before is None:
            raise NotImplementedError(f"{name}: Tilewise does not serve this ({why}), and torch has no kernel")
        return before.call_boxed(keys, *given, **options)


def _refused(tensors: Sequence[torch.Tensor], dropout_p: float, is_causal: bool, scale: Any, *, grad: bool) -> str:
    """Why Tilewise does not serve an operator of torch's flash attention; "" if it does."""
    if dropout_p != 0:
        return "dropout_p is not 0"
    query, key, value = tensors
    facts = facts_of(query, key, value, None, 0.0, is_causal, scale, query.shape[1] != key.shape[1])
    able = not grad or not facts.kernels or trains(query.device, facts.dtype, query, value)
    path, reasons = decide(facts._replace(grad=grad, trains=able, fused=True))  # torch has chosen
    if path == "torch":
        return "; ".join(reasons)
    same = query.shape[-1] == value.shape[-1] and query.shape[0] == key.shape[0] == value.shape[0]
    dense = all(x.dim() == 4 and x.stride(-1) == 1 for x in tensors)
    return "" if same and dense else "tensors that flash attention refuses"


if offers_flash():
    torch.nn.attention.register_flash_attention_impl(FLASH, register_fn=FlashKernel)
