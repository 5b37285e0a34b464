"""Calls that run between two graphs of torch.compile: no graph holds a schedule or a function of the user's.

It stands alone because importing it imports torch's compiler: whoever is being traced has it already.
"""

from __future__ import annotations

from typing import Any

import torch


def _run(call: Any, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


run = torch.compiler.disable(_run, reason="schedule, mask and score cannot be part of a compiled graph")
