"""The mergeable attention state `(o, lse)`: the one place that knows what an empty state is and how states merge.

Attention over a set of keys leaves, per query row, the normalised output `o` and `lse`, the natural log of the
softmax denominator. States over disjoint key sets merge exactly into the state over their union:

    lse = log(exp(lse_a) + exp(lse_b))          o = o_a · exp(lse_a − lse) + o_b · exp(lse_b − lse)

The empty state (no visible key) is `o = 0, lse = −inf`. It is the neutral element: merging it changes nothing, and
merging two of them gives it again. So whatever stands in `o` where `lse` is −inf is ignored, even NaN.

Shapes: `o (..., rows, heads, head_dim)` goes with `lse (..., heads, rows)`, the layout of every public call.
"""

from __future__ import annotations

import math

import torch

from . import checks

STATE_DTYPES = (*checks.FLOATS, torch.float64)
LSE_DTYPES = (torch.float32, torch.float64)


def merge_states(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge n states over disjoint keys, stacked on the first axis.

    o:   (n, ..., rows, heads, head_dim), float32, float16, bfloat16 or float64
    lse: (n, ..., heads, rows), float32 or float64, natural log

    Returns the merged `o (..., rows, heads, head_dim)` in o's dtype and `lse (..., heads, rows)` in lse's. Sums run
    in float32 (float64 if either is). n = 0 is refused: there would be nothing to take the shape's meaning from.
    """
    _check_state("o", o, "lse", lse, min_dim=4)
    if o.shape[0] == 0:
        raise ValueError("o must stack at least one state on its first axis, got 0")
    work = torch.float64 if torch.float64 in (o.dtype, lse.dtype) else torch.float32
    logs = lse.to(work)
    top = logs.detach().amax(0)
    # Where every state is empty, top is −inf and (−inf) − (−inf) would be NaN: shift by 0 there instead.
    shift = torch.where(top == -math.inf, 0.0, top)
    weight = torch.exp(logs - shift)
    total = weight.sum(0)
    none = total == 0
    total = torch.where(none, 1.0, total)  # before it is divided by and its log taken: both would give NaN gradients
    merged_lse = torch.where(none, -math.inf, shift + torch.log(total))
    weight = weight / total
    per_row = weight.transpose(-1, -2).unsqueeze(-1)
    empty = (logs == -math.inf).transpose(-1, -2).unsqueeze(-1)
    merged = (torch.where(empty, 0.0, o.to(work)) * per_row).sum(0)
    return merged.to(o.dtype), merged_lse.to(lse.dtype)


def merge(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states over disjoint keys: `o (..., rows, heads, head_dim)`, `lse (..., heads, rows)`.

    Returns (o, lse) of the same shapes, o in o_a's dtype, lse in lse_a's.
    """
    _check_state("o_a", o_a, "lse_a", lse_a, min_dim=3)
    _check_state("o_b", o_b, "lse_b", lse_b, min_dim=3)
    checks.tensor("o_b", o_b, shape=tuple(o_a.shape), dtypes=(o_a.dtype,), device=o_a.device)
    checks.tensor("lse_b", lse_b, shape=tuple(lse_a.shape), dtypes=(lse_a.dtype,), device=lse_a.device)
    return merge_states(torch.stack((o_a, o_b)), torch.stack((lse_a, lse_b)))


def add_sinks(o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a logit per head join the denominator only: merge with the state `(o = 0, lse = sink)` of a valueless key.

    o (..., rows, heads, head_dim), lse (..., heads, rows), sinks (heads,). A row with no visible key keeps o = 0 and
    gets lse = sink, the log of its denominator.
    """
    sink = sinks.to(lse.dtype)[:, None]
    keep = beside_sinks(lse, sink)
    return (o * keep.transpose(-1, -2).unsqueeze(-1)).to(o.dtype), torch.logaddexp(lse, sink.expand_as(lse))


def beside_sinks(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """What is left of rows beside their sinks: exp(lse) / (exp(lse) + exp(sink)), and 0 for an empty row even when its
    sink is −inf too. Both have the same shape, or one that can be expanded to it."""
    return torch.where(lse == -math.inf, 0.0, torch.sigmoid(lse - sinks))


class Accumulator:
    """Query rows' states while work items land in them: o (rows, heads, head_dim), lse (rows, heads), starts empty.

    With `exclusive` every row gets at most one state, which is stored as it comes, in the output's dtype; otherwise
    states meet, and they meet in float32 whatever the output is.
    """

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, *, exclusive: bool, o: torch.Tensor | None = None
    ) -> None:
        self.exclusive = exclusive
        # A row's o counts only once its lse does, so with one state a row nothing needs clearing beforehand.
        fresh = torch.empty if exclusive else torch.zeros
        self.o = fresh(shape, dtype=dtype, device="cpu") if o is None else o
        self.lse = torch.full(shape[:2], -math.inf, dtype=torch.float32, device=self.o.device)

    def finish(self) -> torch.Tensor:
        """o, with 0 in every row that no state with a visible key came to."""
        if self.exclusive:
            empty = self.lse == -math.inf
            if empty.any():
                self.o[empty] = 0
        return self.o

    def put(self, into_o: torch.Tensor, into_lse: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Add the state o (..., head_dim), lse (...) to views of this accumulator's o and lse of the same shapes."""
        if self.exclusive:
            into_o.copy_(o)
            into_lse.copy_(lse)
            return
        joined = torch.logaddexp(into_lse, lse)
        old = torch.exp(into_lse - joined).nan_to_num_(nan=0.0)  # NaN only where both were empty
        new = torch.exp(lse - joined).nan_to_num_(nan=0.0)
        into_o.mul_(old.unsqueeze(-1)).addcmul_(o.float(), new.unsqueeze(-1))
        into_lse.copy_(joined)


def _check_state(o_name: str, o: torch.Tensor, lse_name: str, lse: torch.Tensor, *, min_dim: int) -> None:
    checks.tensor(o_name, o, dtypes=STATE_DTYPES)
    checks.tensor(lse_name, lse, dtypes=LSE_DTYPES, device=o.device)
    if o.dim() < min_dim:
        stack = "n, " if min_dim == 4 else ""
        raise ValueError(f"{o_name} must have shape ({stack}..., rows, heads, head_dim), got {tuple(o.shape)}")
    *lead, rows, heads, _ = o.shape
    checks.tensor(lse_name, lse, shape=(*lead, heads, rows))
