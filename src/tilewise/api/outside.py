"""Calls that run between two graphs of torch.compile: none holds a schedule, a function or an output of the caller's.

It stands alone because importing it imports torch's compiler: whoever is being traced has it already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _run(call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    return call(*args, **kwargs)


run: Callable[..., Result] = torch.compiler.disable(
    _run, reason="out, schedule, mask and score cannot be part of a compiled graph"
)
