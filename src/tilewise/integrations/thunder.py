"""Tilewise as an executor of lightning-thunder, for its scaled_dot_product_attention.

    import thunder
    from tilewise.integrations.thunder import executor, register

    jitted = thunder.jit(model, executors=[executor, *thunder.get_default_executors()])
    register()  # or once for all: every later thunder.jit(model) asks Tilewise first

Thunder asks the executor about each call by its meta data, and the executor answers as `tilewise.explain` does; what it
refuses, and dropout, the next executor serves. In a trace its operator is called `tilewise_sdpa`; where gradients are
recorded, there are `tilewise_sdpa_forward`, which keeps the LSE, and `tilewise_sdpa_backward`.

This module alone imports thunder. Import it before thunder itself on a torch that thunder does not know yet, see
`_torch_as_thunder_knows_it`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NoReturn

import torch

from tilewise import arch
from tilewise.integrations.extras import extra
from tilewise.integrations.sdpa import Facts, decide, sdpa, torch_sdpa, trains
from tilewise.integrations.sdpa_backward import sdpa_backward, sdpa_forward

# Methods of named tensors that lightning-thunder 0.2.6 looks up as it is imported, and that torch has dropped.
NAMED_TENSOR_METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")


def _stub(name: str) -> Any:
    def missing(self: torch.Tensor, *args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"torch {torch.__version__} has no Tensor.{name}: named tensors are gone from it")

    missing.__name__, missing.__qualname__ = name, f"Tensor.{name}"
    return missing


@contextmanager
def _torch_as_thunder_knows_it() -> Iterator[None]:
    """torch with what thunder looks up as it is imported: its own attention function, and stubs that raise.

    The stubs are gone again afterwards, and a `tilewise.install` is back.
    """
    missing = [name for name in NAMED_TENSOR_METHODS if not hasattr(torch.Tensor, name)]
    functional: Any = torch.nn.functional
    present = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = torch_sdpa
    for name in missing:
        setattr(torch.Tensor, name, _stub(name))
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = present
        for name in missing:
            delattr(torch.Tensor, name)


with _torch_as_thunder_knows_it(), extra("thunder"):
    import thunder
    import thunder.torch
    from thunder.core import dtypes, prims
    from thunder.core.dtypes import to_torch_dtype
    from thunder.core.proxies import TensorProxy, pyval
    from thunder.extend import OperatorExecutor, add_default_executor, register_executor, remove_default_executor

executor = OperatorExecutor("tilewise", version=version("tilewise"))
register_executor(executor)


def register() -> OperatorExecutor:
    """Let every later `thunder.jit` ask Tilewise first; returns the executor. `unregister` undoes it."""
    unregister()  # twice is once
    add_default_executor(executor)
    return executor


def unregister() -> None:
    """Take Tilewise from thunder's default executors; without `register`, nothing happens."""
    remove_default_executor(executor)


def _shape_of_result(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> TensorProxy:
    """(..., L, E), (..., S, E), (..., S, Ev) -> (..., L, Ev), leading dimensions broadcast."""
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    return TensorProxy(like=query, shape=(*lead, query.shape[-2], value.shape[-1]))


def _shapes_of_state(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[TensorProxy, TensorProxy]:
    """The result (..., heads, L, Ev), and the LSE (all that leads, heads, L) float32."""
    out = _shape_of_result(query, key, value, attn_mask, scale=scale)
    shape: tuple[int, ...] = (1, 1, *out.shape)
    return out, TensorProxy(like=query, shape=(math.prod(shape[:-3]), *shape[-3:-1]), dtype=dtypes.float32)


def _shapes_of_gradients(
    d_out: TensorProxy, query: TensorProxy, key: TensorProxy, value: TensorProxy, *others: Any, **options: Any
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    return TensorProxy(like=query), TensorProxy(like=key), TensorProxy(like=value)


tilewise_sdpa = executor.register_operator("tilewise_sdpa", meta=_shape_of_result, fn=sdpa)
tilewise_sdpa_forward = executor.register_operator("tilewise_sdpa_forward", meta=_shapes_of_state, fn=sdpa_forward)
tilewise_sdpa_backward = executor.register_operator(
    "tilewise_sdpa_backward", meta=_shapes_of_gradients, fn=sdpa_backward
)


def _with_gradients(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """The call in a trace that is split into a forward and a backward pass."""
    out, lse = tilewise_sdpa_forward(query, key, value, attn_mask, is_causal, scale=scale)
    found = tilewise_sdpa_backward(prims.get_grad(out), query, key, value, attn_mask, out, lse, is_causal, scale=scale)
    for x, d_x in zip((query, key, value), found, strict=True):
        prims.put_grad(x, d_x)
    return out


def _served(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    scale: Any = None,
) -> bool:
    """Does Tilewise serve the call?"""
    tensors = [x for x in (query, key, value, attn_mask) if x is not None]
    if not all(isinstance(x, TensorProxy) for x in tensors) or bool(pyval(dropout_p)):
        return False  # a trace would have to hand the seed on to its backward pass
    device, *others = {torch.device(x.device.device_str()) for x in tensors}
    dtypes = {to_torch_dtype(x.dtype) for x in (query, key, value)}
    kernels = device.type == "cuda" and arch.serves_prefill(device)
    grad = any(x.requires_grad for x in tensors)
    facts = Facts(
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        dtype=None if len(dtypes) > 1 else dtypes.pop(),
        device="" if others else device.type,
        kernels=kernels,
        mask=None if attn_mask is None else tuple(attn_mask.shape),
        mask_is_bool=attn_mask is not None and to_torch_dtype(attn_mask.dtype) == torch.bool,
        causal=bool(pyval(is_causal)),
        grad=grad,
        trains=not (grad and kernels) or trains(device, to_torch_dtype(query.dtype), query, value),
        fused=torch.backends.cuda.flash_sdp_enabled(),
    )
    return decide(facts).path != "torch"


executor.register_implementation(
    thunder.torch.scaled_dot_product_attention,
    checker=_served,
    execution_transform=tilewise_sdpa,
    grad_transform=_with_gradients,
)
