"""What is done to the scores, as one value that travels from the call to the kernel.

    s = q · k · scale        softcap: s = c · tanh(s / c)        ALiBi: s −= slope · |row + Nk − Nq − key|
    window: −inf outside of it        sinks: a logit per head that joins the softmax's denominator only
    chunk: −inf outside of the row's own block of positions
    mask and score functions of the user's own (functions/) travel beside it; a score function stands where softcap does

A new option is declared here (its field, its public name, its place in an operator's schema), checked in arguments.py,
documented in api/, told in reference.py, and done in cpu/scoring.py, gpu/abi.py and kernels/common/scores.cuh.
Everything between passes a `Scores`, or the public names as `ScoreOptions`, along as it came.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch

Window = tuple[int | None, int | None]


class Reach(NamedTuple):
    """How far back the rows of causal attention see: `left` keys before their own position, None for all of them, and
    no key before the block of `chunk` positions that they stand in, 0 for no blocks."""

    left: int | None = None
    chunk: int = 0

    @classmethod
    def of(cls, window: Window | None, chunk: int = 0) -> Reach:
        """Of a window, whose right side says nothing to a causal row."""
        return cls(None if window is None else window[0], chunk)

    @property
    def window(self) -> Window | None:
        """What `of` takes."""
        return None if self.left is None else (self.left, 0)

    @property
    def whole(self) -> bool:
        """Does every row see back to the first key?"""
        return self.left is None and not self.chunk

    def first(self, position: Any) -> Any:
        """The first key that the row at `position` sees, or those of an array of positions. It never moves back while
        positions go on; a row before key 0 sees none, and its first is 0."""
        left = 0 if self.left is None else position - self.left
        block = position // self.chunk * self.chunk if self.chunk else 0
        return np.maximum(np.maximum(left, block), 0)


class DecodeOptions(TypedDict, total=False):
    """decode()'s keyword arguments that concern the scores; api/ says what they mean. What rows see is the plan's."""

    scale: float | None
    softcap: float
    sinks: torch.Tensor | None


class ScoreOptions(DecodeOptions, total=False):
    """The same of attention()."""

    causal: bool
    window: Window | None
    chunk: int | None
    alibi_slopes: torch.Tensor | None


# The same names in a PyTorch operator's schema, where tensors stand before the star; decode's window and chunk are its
# plan's.
SCHEMA_TENSORS = "Tensor? sinks=None, Tensor? alibi_slopes=None"
SCHEMA_SCALING = "float? scale=None, float softcap=0.0"
SCHEMA_SEEN = "bool causal=False, SymInt? window_left=None, SymInt? window_right=None, SymInt? chunk=None"
SCHEMA_OPTIONS = f"{SCHEMA_SEEN}, {SCHEMA_SCALING}"


DROPOUT_LEVELS = 1 << 16  # of a weight's 16 bits: it is kept if they are not below p of these


def dropped_below(p: float) -> int:
    """A weight is dropped if its bits are below this."""
    return min(round(p * DROPOUT_LEVELS), DROPOUT_LEVELS - 1)


@dataclass(frozen=True)
class Scores:
    """Checked options. Equality and hash are those of the rule; the tensors only come along.

    window: (left, right) keys seen to either side, None for no limit; causal is right = 0. exact: the standard softmax
    where a kernel would use the lazy one. chunk: positions of a block that no row sees out of, 0 for none, as
    kernels other than decode's always have it (api/rewritten.py). sinks: (Hq,). slopes: (B, Hq) float32; alibi: whether
    there are any. dropout: the share of the weights that a kernel drops, and seed, () int64 on its device, says which;
    on the CPU cpu/dropout.py has both.
    """

    window: Window = (None, None)
    scale: float = 1.0
    softcap: float = 0.0
    alibi: bool = False
    exact: bool = False
    chunk: int = 0
    sinks: torch.Tensor | None = field(default=None, compare=False, repr=False)
    slopes: torch.Tensor | None = field(default=None, compare=False, repr=False)
    dropout: float = 0.0
    seed: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def rule(self) -> Scores:
        """Without the tensors, to be kept."""
        return replace(self, sinks=None, slopes=None, seed=None)

    @property
    def changed(self) -> bool:
        """Is more done to a score than a multiplication with a positive scale?"""
        return self.softcap > 0 or self.alibi or self.scale <= 0

    @property
    def linear(self) -> bool:
        """Does a score follow its product in a straight line?"""
        return not self.softcap

    @property
    def unmasked(self) -> Scores:
        """The same with every key in view."""
        return replace(self, window=(None, None), chunk=0)
