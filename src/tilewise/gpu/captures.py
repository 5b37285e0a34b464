"""Tensors that CUDA graphs have to do with. A replay writes to them without a new version, so that nothing that was
made from one may be kept.

What a kernel of ours made or read during a capture is noted here, for as long as it lives. A tensor that others write
in a graph, and that no captured call of ours reads, cannot be told.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

_noted: dict[int, weakref.ref[torch.Tensor]] = {}


def capturing() -> bool:
    """Is a graph being captured on the current stream?"""
    return torch.cuda.is_current_stream_capturing()


def note(tensors: Iterable[torch.Tensor | None]) -> None:
    """These were made or read in a capture."""
    for x in tensors:
        if x is None or noted((x,)):
            continue
        place = id(x)

        def forget(dead: weakref.ref[torch.Tensor], place: int = place) -> None:
            if _noted.get(place) is dead:
                del _noted[place]

        _noted[place] = weakref.ref(x, forget)


def noted(tensors: Iterable[torch.Tensor]) -> bool:
    """Was one of them?"""
    if not _noted:
        return False
    return any((known := _noted.get(id(x))) is not None and known() is x for x in tensors)
