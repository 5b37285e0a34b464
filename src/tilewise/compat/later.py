"""A tensor that is computed when somebody reads it, for results that other packages return and that few look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

# What is known before. Tensor.shape and the like are properties: what torch passes on is their getters.
_KNOWN = {
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__),
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")),
}


class Later(torch.Tensor):
    """A tensor of this shape, dtype and device; `make` is called once, by whatever first needs more of it than that.

    What `make` holds on to lives as long as the tensor, or until it is read.
    """

    _make: Callable[[], torch.Tensor] | None
    _made: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type[Later],
        make: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Later:
        self: Later = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self._make, self._made = make, None
        return self

    def _now(self) -> torch.Tensor:
        if self._made is None:
            assert self._make is not None
            self._made, self._make = self._make(), None
        return self._made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, cls._now, (args, kwargs or {}))
        return func(*args, **kwargs)
