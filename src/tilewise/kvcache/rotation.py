"""Rotary position embedding, applied to the keys as they are written into the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tilewise import checks

if TYPE_CHECKING:
    from tilewise.kvcache.paged import PagedKVCache
    from tilewise.kvcache.slots import Slots


@dataclass(frozen=True, eq=False)
class Rotary:
    """Tables of cosines and sines, each (max_positions, rot_dim / 2), float32, float16 or bfloat16.

    Channel pairs turn by the angle of the token's position. Half-split (Llama, NeoX) pairs channel i with
    i + rot_dim / 2; `interleaved` (GPT-J) pairs 2i with 2i + 1. Channels from rot_dim on are left as they are.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        checks.tensor("cos", self.cos, shape=("max_positions", "rot_dim / 2"), dtypes=checks.FLOATS)
        checks.tensor("sin", self.sin, shape=tuple(self.cos.shape), dtypes=checks.FLOATS, device=self.cos.device)
        checks.flag("interleaved", self.interleaved)

    @classmethod
    def of(cls, rotary: Any) -> Rotary | None:
        """A Rotary or None as it is, and a (cos, sin) tuple as a half-split Rotary."""
        if rotary is None or isinstance(rotary, Rotary):
            return rotary
        if isinstance(rotary, tuple) and len(rotary) == 2:
            return cls(*rotary)
        raise TypeError(f"rotary must be a Rotary, a (cos, sin) tuple or None, got {type(rotary).__name__}")

    @property
    def rot_dim(self) -> int:
        """How many channels turn."""
        return 2 * self.cos.shape[1]

    def check(self, head_dim: int, positions: torch.Tensor | npt.NDArray[np.int64]) -> None:
        """Raise ValueError unless the tables cover `positions` and no more channels than `head_dim`."""
        if self.rot_dim > head_dim:
            raise ValueError(f"rotary turns {self.rot_dim} channels but head_dim is {head_dim}; cos must be narrower")
        if len(positions) and (int(positions.min()) < 0 or int(positions.max()) >= len(self.cos)):
            raise ValueError(
                f"rotary covers positions 0 to {len(self.cos) - 1}, got {int(positions.min())} to "
                f"{int(positions.max())}; give longer cos and sin tables"
            )

    def apply(self, x: torch.Tensor, positions: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Turn x (tokens, heads, head_dim) by positions (tokens,): float32 inside, x's own dtype out.

        first: where the channels that turn begin. Positions on a card are read to be checked, which waits for them;
        PagedKVCache.write() turns q without that.
        """
        checks.tensor("x", x, shape=("tokens", "heads", "head_dim"), dtypes=checks.FLOATS, device=self.cos.device)
        checks.tensor("positions", positions, shape=(len(x),), dtypes=checks.INTEGERS, device=x.device)
        self.check(x.shape[-1] - checks.integer("first", first, 0, x.shape[-1]), positions)
        last = first + self.rot_dim
        if self.interleaved:
            one, other = slice(first, last, 2), slice(first + 1, last, 2)
        else:
            one, other = slice(first, first + self.rot_dim // 2), slice(first + self.rot_dim // 2, last)
        cos, sin = (table[positions].float().unsqueeze(1) for table in (self.cos, self.sin))
        a, b = x[..., one].float(), x[..., other].float()
        out = x.clone()
        out[..., one] = (a * cos - b * sin).to(x.dtype)
        out[..., other] = (a * sin + b * cos).to(x.dtype)
        return out


def checked_rotary(rotary: Any, slots: Slots, cache: PagedKVCache) -> Rotary | None:
    """What PagedKVCache.write() was given, for these slots."""
    turn = Rotary.of(rotary)
    if turn is None:
        return None
    checks.tensor("cos", turn.cos, device=cache.device)
    if cache.shared_kv and turn.rot_dim > cache.head_dim - cache.value_dim:
        raise ValueError(
            f"rotary turns {turn.rot_dim} channels but only {cache.head_dim - cache.value_dim} come after the "
            f"{cache.value_dim} that are values; cos must be narrower"
        )
    if turn.rot_dim > cache.head_dim or slots.reach >= len(turn.cos):
        turn.check(cache.head_dim, slots.host_positions)
    if cache._by_kernel and turn.cos.dtype != turn.sin.dtype:  # the kernel knows one dtype of tables
        return Rotary(turn.cos.float(), turn.sin.float(), turn.interleaved)
    return turn
