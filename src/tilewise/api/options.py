"""Keyword arguments of the public calls beside `return_lse`, which decides what a call returns, for type checkers.

With `return_lse=True` a call returns (o, lse), without it o alone. A checker learns that from three overloads, and here
stands once what all three of them take. The calls themselves tell what each argument means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.plan.schedule import BlockSchedule
from tilewise.scores import DecodeOptions, ScoreOptions, Window

State = tuple[torch.Tensor, torch.Tensor]  # o and lse
Result = torch.Tensor | State
Mask = Callable[[Any, Any, Any, Any], Any]  # (b, h, q, k) -> is key k seen by query q
Score = Callable[[Any, Any, Any, Any, Any], Any]  # (s, b, h, q, k) -> the score instead of s
Level = State | tuple[torch.Tensor, torch.Tensor, Sequence[int] | torch.Tensor]


class TensorOptions(ScoreOptions, total=False):
    """What `attention` and `attention_varlen` take alike."""

    qv: torch.Tensor | None
    mask: Mask | None
    score: Score | None
    exact: bool
    deterministic: bool
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    dropout_p: float
    dropout_seed: torch.Tensor | None
    out: torch.Tensor | None
    backend: str


class AttentionOptions(TensorOptions, total=False):
    """Of `attention`."""

    schedule: BlockSchedule | None


class VarlenOptions(TensorOptions, total=False):
    """Of `attention_varlen`."""

    schedule: BlockSchedule | Sequence[BlockSchedule | None] | None
    page_table: torch.Tensor | None


class SharedPrefixOptions(DecodeOptions, total=False):
    """Of `shared_prefix_attention`."""

    causal: bool
    deterministic: bool
    lengths: Sequence[int] | torch.Tensor | None
    out: torch.Tensor | None
    backend: str


class TreeOptions(DecodeOptions, total=False):
    """Of `attention_tree`."""

    window: Window | None
    deterministic: bool
    backend: str


class PagedOptions(DecodeOptions, total=False):
    """Of `decode`."""

    tree_mask: torch.Tensor | None
    schedule: BlockSchedule | None
    indices: torch.Tensor | None
    out: torch.Tensor | None
    backend: str


class StepOptions(DecodeOptions, total=False):
    """Of `attend`."""

    out: torch.Tensor | None
    backend: str
