"""The state of tiles by float32 products, with all that may be done to scores: what torch's flash kernel does not know.

A tile's scores are made, changed, exponentiated and multiplied in one piece of memory that stays in the caches of the
cores; each operation of torch's goes over all of it. What that costs beside the two products is in docs/lab-notes.md.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import torch

from tilewise.cpu.scoring import ALL, Scoring, View

KV = tuple[torch.Tensor, torch.Tensor]

SCORES_PER_CORE = 1 << 18  # float32 scores held at once for each thread: 1 MiB, which about stay in its own cache
SCORES_PER_TILE = 1 << 22  # and for all of them together
PRODUCT_ROWS = 256  # of a tile, those of all query heads of a KV head together
SCORED_ROWS, SCORED_KEYS = 128, 256  # the same, and keys, where a function makes scores
LEAST_ROWS = 64  # of a tile, of one head
# Weights below e^−80 of a row's largest are 0. exp takes 100 times as long from e^−87 on, where float32 has too few
# bits, and 15 times as long for e^−∞; products of such weights take 20 times as long.
LEAST_EXPONENT = -80.0
LEAST_WEIGHT = 1.01 * math.exp(LEAST_EXPONENT)


def product_state(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, view: View | None) -> KV:
    """The state of n tiles: q (n, rows, Hq, D) over k, v (n, keys, Hkv, D or Dv) -> o (n, rows, Hq, Dv), lse (n, rows,
    Hq)."""
    n, rows, heads_q, _ = q.shape
    heads_kv = k.shape[2]
    group = heads_q // heads_kv
    space = Space.of(rows, group, k if k.shape[-1] > v.shape[-1] else v, scoring.scored)
    o, lse = q.new_empty(*q.shape[:3], v.shape[-1]), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for b, head in product(range(n), range(0, heads_kv, space.heads)):
        kv = slice(head, min(head + space.heads, heads_kv))
        heads = slice(kv.start * group, kv.stop * group)
        these_k, these_v = (x[b, :, kv].transpose(0, 1) for x in (k, v))
        if rows > space.rows:  # they are read more than once: with the keys of a head side by side
            these_k, these_v = space.load(0, these_k), space.load(1, these_v)
        for row in range(0, rows, space.rows):
            strip = slice(row, min(row + space.rows, rows))
            here = None if view is None else view.part(slice(b, b + 1), strip, ALL, heads)
            state = _strip_state(q[b, strip, heads], these_k, these_v, scoring, here, space)
            o[b, strip, heads], lse[b, strip, heads] = state
    return o, lse


class Space(NamedTuple):
    """How much is done at once, `heads` KV heads of rows × keys, and the memory that every tile of a call reuses.

    scores: float32, flat. loaded: (2, …) float32, for the K and V of these heads or of a tile.
    """

    rows: int
    keys: int
    heads: int
    scores: torch.Tensor
    loaded: torch.Tensor

    @classmethod
    def of(cls, all_rows: int, group: int, k: torch.Tensor, scored: bool, kept: bool = True) -> Space:
        """For all_rows rows of `group` query heads per KV head over k (n, keys, Hkv, D), or v if its D is larger. kept:
        with the memory.

        scored: by a function. What that computes from row and key alone serves all heads of a tile, so a tile has many
        heads then, of fewer rows and keys.
        """
        _, all_keys, heads_kv, head_dim = k.shape
        at_once = min(SCORES_PER_CORE * torch.get_num_threads(), SCORES_PER_TILE)
        most_rows, most_keys = (SCORED_ROWS, SCORED_KEYS) if scored else (PRODUCT_ROWS, SCORES_PER_CORE)
        rows = max(1, min(all_rows, SCORES_PER_TILE // group, max(LEAST_ROWS, most_rows // group)))
        longest = max(512, SCORES_PER_CORE // head_dim)  # so that a tile's K and V stay in the caches, too
        keys = max(1, min(all_keys, longest, most_keys, min(SCORES_PER_CORE, SCORES_PER_TILE) // (group * rows)))
        heads = max(1, min(heads_kv, at_once // (group * rows * keys)))
        loaded = all_keys if all_rows > rows else 0 if k.dtype == torch.float32 else keys
        return cls(
            rows,
            keys,
            heads,
            _floats(heads * group * rows * keys if kept else 0, device=k.device),
            _floats(2, heads * loaded * head_dim if kept else 0, device=k.device),
        )

    def scores_of(self, *shape: int) -> torch.Tensor:
        """Room for scores of this shape."""
        return self.scores[: math.prod(shape)].view(shape)

    def load(self, which: int, x: torch.Tensor) -> torch.Tensor:
        """K (which = 0) or V (1), (heads, keys, D), as float32, each head's together."""
        return self.loaded[which, : x.numel()].view(x.shape).copy_(x)


def _floats(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


def _strip_state(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, view: View | None, space: Space
) -> KV:
    """q (rows, Hq, D) over k, v (Hkv, keys, D or Dv), space.keys of them after the other -> o (rows, Hq, Dv), lse
    (rows, Hq).

    The online softmax: o and total are relative to e^reference, which grows to the largest score yet.
    """
    rows, heads, _ = q.shape
    kv_heads, count = k.shape[:2]
    # (rows, heads, D) -> (KV heads, group · rows, D): one product per KV head
    queries = q.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    o = queries.new_zeros(*queries.shape[:2], v.shape[-1])
    total = torch.zeros_like(o[..., 0]).view(heads, rows, 1)
    top, reference = torch.full_like(total, -math.inf), torch.zeros_like(total)
    keys = slice(0, count) if view is None else view.span()
    for j in range(keys.start, keys.stop, space.keys):
        those = slice(j, min(j + space.keys, keys.stop))
        here = None if view is None else view.part(ALL, keys=those).cut()
        if view is not None and here is None:  # the band hides all of it
            continue
        k_j, v_j = k[:, those], v[:, those]
        if k.dtype != torch.float32:
            k_j, v_j = space.load(0, k_j), space.load(1, v_j)
        products = space.scores_of(kv_heads, queries.shape[1], those.stop - j)
        products.baddbmm_(queries, k_j.mT, beta=0, alpha=scoring.alpha)
        s, factor = scoring.apply(products.view(heads, rows, -1), here)
        hidden = here if here is not None and here.hides else None
        # A score of 0 in place of a hidden one moves the reference of narrow scores no further than they bear.
        easy = scoring.narrow and (hidden is None or hidden.banded)
        if hidden is not None:
            (hidden.clear if easy else hidden.hide)(s)
        old, top = top, torch.maximum(top, s.amax(-1, keepdim=True) * factor)
        reference = torch.where(top == -math.inf, 0.0, top)
        torch.add(-reference, s, alpha=factor, out=s)
        if not easy:
            torch.threshold_(s.clamp_(min=LEAST_EXPONENT).exp_(), LEAST_WEIGHT, 0.0)
        elif hidden is None:
            s.exp_()
        else:
            hidden.clear(s.exp_())
        correction = torch.exp(old - reference)
        total = total * correction + s.sum(-1, keepdim=True)
        if scoring.dropout is not None and here is not None:
            s.mul_(scoring.dropout.factors(*here.indices()))
        o.mul_(correction.view(kv_heads, -1, 1)).baddbmm_(s.view(products.shape), v_j)
    o = o.view(heads, rows, -1) / torch.where(total == 0, 1.0, total)
    return o.transpose(0, 1), (reference + total.log())[..., 0].transpose(0, 1)
