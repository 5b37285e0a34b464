"""The state of one tile, or of a batch of equal ones: torch's flash kernel where it can, float32 products where not."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tilewise.cpu.products import product_state
from tilewise.cpu.scoring import ALL, Scoring, View, counted
from tilewise.plan.tiles import OPEN, Band

MASK_VALUES = 1 << 22  # of a mask that are held at once: 16 MiB
FOLDED_ROWS = 256  # up to this many rows an item's query heads are folded into rows

KV = tuple[torch.Tensor, torch.Tensor]


def repeated(x: torch.Tensor, begin: int, rows: int, count: int, step: int) -> torch.Tensor:
    """`count` runs of `rows` packed rows, each `step` after the last, as a view (count, rows, heads, D).

    x (B, N, heads, D) with any strides, whose packed row is b · N + i, or (rows, heads, D). A run stays inside one
    sequence of a 4-D x, and a step either stays inside it too or is a whole number of sequences.
    """
    if x.dim() == 3:
        row_stride, head_stride, unit = x.stride()
        offset, step_stride = begin * row_stride, step * row_stride
    else:
        batch_stride, row_stride, head_stride, unit = x.stride()
        length = max(1, x.shape[1])
        offset = begin // length * batch_stride + begin % length * row_stride
        step_stride = step // length * batch_stride if step % length == 0 else step * row_stride
    size, stride = (count, rows, *x.shape[-2:]), (step_stride, row_stride, head_stride, unit)
    return x.as_strided(size, stride, x.storage_offset() + offset)


def tile_state(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scoring: Scoring,
    band: Band = OPEN,
    view: View | None = None,
) -> KV:
    """The state of n tiles: q (n, rows, Hq, D) over k, v (n, keys, Hkv, D) -> o (n, rows, Hq, D), lse (n, rows, Hq).

    Rows and keys count from 0 under the band, or stand where `view` says and see what it shows. v and o may have
    another head dimension.
    """
    n, rows, heads_q, head_dim = q.shape
    keys, heads_kv, value_dim = v.shape[1:]
    by_products = scoring.needs_products or far_apart(head_dim, value_dim)
    if value_dim != head_dim and not by_products:
        wide_q, wide_k, wide_v = evened(q, k, k if _leads(v, k) else v)
        o, lse = tile_state(wide_q, wide_k, wide_v, scoring, band, view)
        return o[..., :value_dim], lse
    # The kernel hides before it scales, so only a positive scale leaves its triangle hidden.
    triangle = band == (None, 0) and scoring.scale > 0 and not by_products
    if view is None and band != OPEN and not triangle:
        view = counted(rows, keys, band)
    if by_products:
        return product_state(q, k, v, scoring, view)
    group = heads_q // heads_kv
    # A triangle lets no NaN of a hidden key through; a mask would.
    fold = group > 1 and rows <= FOLDED_ROWS and not triangle
    hidden = None
    if view is not None and view.hides:
        tiles = MASK_VALUES // (view.pairs * (group if fold else 1))
        if n > max(1, tiles):  # too many mask values: some tiles at a time
            some = (slice(start, start + max(1, tiles)) for start in range(0, n, max(1, tiles)))
            return _joined(0, [tile_state(q[t], k[t], v[t], scoring, view=view.part(t)) for t in some])
        if not tiles and rows > 1:  # even of one: some rows at a time
            at_once = max(1, MASK_VALUES * rows // (view.pairs * (group if fold else 1)))
            some = (slice(start, start + at_once) for start in range(0, rows, at_once))
            return _joined(1, [tile_state(q[:, r], k, v, scoring, view=view.part(ALL, r)) for r in some])
        hidden = Hidden(view.bias, view.blind)

    if fold:
        # Rows (i, g) of a KV head: its K and V are read once for the whole group.
        folded = q.unflatten(2, (heads_kv, group)).transpose(1, 2).reshape(n, heads_kv, rows * group, -1)
        if hidden is not None:
            hidden = Hidden(*(_folded(x, heads_kv, group) for x in hidden))
        o, lse = flash(folded, k, v, scoring, False, hidden)
        o = o.unflatten(2, (rows, group)).transpose(1, 2).flatten(2, 3)
        return o, lse.unflatten(2, (rows, group)).transpose(1, 2).flatten(2, 3)
    if group == 1:
        o, lse = flash(q.transpose(1, 2), k, v, scoring, triangle, hidden)
        return o.transpose(1, 2), lse.transpose(1, 2)
    o_all, lse_all = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device="cpu")
    for g in range(group):  # a mask that tells heads apart is asked in blocks of a schedule: those are folded
        these = slice(g, None, group)
        o, lse = flash(q[:, :, these].transpose(1, 2), k, v, scoring, triangle, hidden)
        o_all[:, :, these], lse_all[:, :, these] = o.transpose(1, 2), lse.transpose(1, 2)
    return o_all, lse_all


def _leads(v: torch.Tensor, k: torch.Tensor) -> bool:
    """Is v the first channels of k, in the same memory? Then k is v with something after it, and nothing is copied."""
    return v.shape[-1] < k.shape[-1] and v.data_ptr() == k.data_ptr() and v.stride() == k.stride()


def far_apart(head_dim: int, value_dim: int) -> bool:
    """Are there so many zeros in `evened` tensors that products by hand take less time? docs/lab-notes.md has both."""
    return max(head_dim, value_dim) > 3 * min(head_dim, value_dim)


def evened(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors (…, D) with zeros up to the largest D: torch's flash kernel knows one head dimension only."""
    widest = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in tensors]


def _joined(dim: int, states: list[KV]) -> KV:
    return torch.cat([o for o, _ in states], dim), torch.cat([lse for _, lse in states], dim)


class Hidden(NamedTuple):
    """bias: (n or 1, heads or 1, rows, keys) float32, −inf for a pair that is not seen; blind: (…, rows) sees none."""

    bias: torch.Tensor
    blind: torch.Tensor


def _folded(x: torch.Tensor, heads_kv: int, group: int) -> torch.Tensor:
    """(n, heads or 1, rows, …) -> (n, KV heads or 1, rows · group, …)."""
    each = x.unflatten(1, (heads_kv, group)).transpose(2, 3) if x.shape[1] > 1 else x[:, :, :, None]
    return each.expand(-1, -1, -1, group, *(-1,) * (x.dim() - 3)).flatten(2, 3)


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, triangle: bool, hidden: Hidden | None
) -> KV:
    """torch's CPU flash kernel: q (n, heads, rows, D), k and v (n, keys, heads, D) -> o (n, heads, rows, D), lse."""
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q,
        k.transpose(1, 2),
        v.transpose(1, 2),
        0.0,
        triangle,
        attn_mask=None if hidden is None else hidden.bias,
        scale=scoring.scale,
    )
    if hidden is not None:  # the kernel leaves 0 as the LSE of a row with no visible key
        lse = lse.masked_fill(hidden.blind, -math.inf)
    if (lse == 0).any():  # rare: the same where every score has overflowed to −inf
        lse = _empty_rows(q, k, o, lse, scoring, triangle, hidden)
    return o, lse


def _empty_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    scoring: Scoring,
    triangle: bool,
    hidden: Hidden | None,
) -> torch.Tensor:
    """lse with −inf where a row's visible scores are all −inf, which the kernel reports as o = 0, LSE = 0."""
    lse = lse.clone()
    for n, head, row in ((lse == 0) & (o == 0).all(-1)).nonzero().tolist():
        scores = k[n, :, head].float() @ q[n, head, row].float() * scoring.scale
        if hidden is not None:
            scores = scores + hidden.bias[n % hidden.bias.shape[0], head % hidden.bias.shape[1], row]
        visible = scores[: row + 1] if triangle else scores
        if (visible == -math.inf).all():
            lse[n, head, row] = -math.inf
    return lse
