"""What attention does in one forward pass of a model: write the new tokens of a layer into pages, then read them.

A step is made once for all layers. Within a layer all tokens are written before any is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .. import api
from ..kvcache import PagedKVCache, PrefixCache, Rotary, Slots
from ..kvcache.slots import room_for
from ..plan import DecodePlan, StepPlan
from ..plan.standing import StandingPlan
from ..scores import DecodeOptions, Window

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Step(Protocol):
    """Attention of one forward pass, called layer by layer."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: Window | None,
        rotary: Rotary | None = None,
        **options: Unpack[DecodeOptions],
    ) -> torch.Tensor:
        """q (T, Hq, D), k and v (T, Hkv, D) of the step's tokens -> (T, Hq, D).

        rotary: turn k by its tokens' positions as it is written, and q with it, in place.
        """


def check_layer(cache: PagedKVCache, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """NotImplementedError for keys or values that are not as the model's configuration says all of them are."""
    taken = (cache.num_kv_heads, cache.head_dim)
    if k.shape[1:] != taken or v.shape[1:] != taken or layer >= cache.num_layers:
        raise NotImplementedError(
            f"layer {layer} has keys of {tuple(k.shape[1:])} and values of {tuple(v.shape[1:])} heads and channels; "
            f"models whose {cache.num_layers} layers all have {taken} are served; use model.generate"
        )


class DecodeStep:
    """The next token of each of `seqs`. Layers with the same window share a plan.

    rows: for a graph that is replayed while sequences come and go. q, k and v then have just so many rows, of which the
    first are those of `seqs` and the others idle, and places and plans stay where they are, for sequences of up to
    max_length tokens. None: as many rows as sequences, and plans made anew each step.
    """

    def __init__(
        self,
        prefix: PrefixCache,
        *,
        num_heads: int,
        rows: int | None = None,
        max_length: int = 0,
        backend: str = "auto",
    ) -> None:
        self.prefix, self.cache = prefix, prefix.cache
        self.num_heads, self.rows, self.max_length, self.backend = num_heads, rows, max_length, backend
        self.seqs: list[int] = []
        self.plans: dict[Window | None, DecodePlan | StandingPlan] = {}
        self._slots: Slots | None = None if rows is None else room_for(self.cache, rows)

    @property
    def slots(self) -> Slots:
        """The current step's places; of a step with `rows`, on a card, in the same memory each time."""
        assert self._slots is not None, "renew() comes first"
        return self._slots

    @property
    def positions(self) -> torch.Tensor:
        """(rows,) of the tokens in their sequences, on the cache's device; 0 where a row is idle."""
        if self.rows is None:
            return self.slots.positions
        return self.slots.all_positions if self.slots.room else torch.from_numpy(self.host_positions)

    @property
    def host_positions(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        positions = self.slots.host_positions
        if self.rows is None or len(positions) == self.rows:
            return positions
        return np.concatenate([positions, np.zeros(self.rows - len(positions), np.int64)])

    def renew(self, seqs: list[int], tokens: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Begin the step that feeds `tokens`, one per sequence. Raises OutOfPages with nothing changed."""
        self._slots = self.prefix.extend(seqs, tokens, into=self._slots if self.rows is not None else None)
        self.seqs = seqs
        for window, plan in self.plans.items():
            if isinstance(plan, StandingPlan):
                api.renew_plan(plan, self.prefix, seqs)
            else:
                self.plans[window] = self._plan(window)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: Window | None,
        rotary: Rotary | None = None,
        **options: Unpack[DecodeOptions],
    ) -> torch.Tensor:
        self.write(layer, q, k, v, rotary)
        o = api.decode(q[:, None], self.cache, layer, self.plan(window), backend=self.backend, **options)
        assert isinstance(o, torch.Tensor)
        return o[:, 0]

    def write(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary | None) -> None:
        """The new keys and values of a layer, turned by rotary, and q with them; of idle rows none."""
        check_layer(self.cache, layer, k, v)
        count = len(k) if self.slots.room else len(self.slots)  # places on a card have room for idle rows
        turned = None if rotary is None else q[:count]
        self.cache.write(layer, self.slots, k[:count], v[:count], rotary=rotary, q=turned)

    def plan(self, window: Window | None) -> DecodePlan | StandingPlan:
        """Of the current step."""
        if window not in self.plans:
            self.plans[window] = self._plan(window)
        return self.plans[window]

    def _plan(self, window: Window | None) -> DecodePlan | StandingPlan:
        if self.rows is None:
            return api.plan_decode(self.prefix, self.seqs, num_heads=self.num_heads, window=window)
        return api.plan_decode(
            self.prefix,
            self.seqs,
            num_heads=self.num_heads,
            window=window,
            rows=self.rows,
            max_length=self.max_length,
        )


class MixedStep:
    """New tokens of prompts, packed in the order of `parts`, each the slots of some; then the rows of a decode step.

    last_rows: (prompts,) int64, the row of each prompt's last new token. layers: those that came by.
    """

    def __init__(
        self,
        prefix: PrefixCache,
        parts: Sequence[Slots],
        decode: DecodeStep | None = None,
        *,
        num_heads: int,
        backend: str = "auto",
    ) -> None:
        self.prefix, self.cache, self.parts, self.decode = prefix, prefix.cache, parts, decode
        self.num_heads, self.backend = num_heads, backend
        self.layers: set[int] = set()
        self.seqs = [seq for slots in parts for seq in slots.seqs]
        self.counts = [count for slots in parts for count in slots.counts]
        self.last_rows = np.cumsum(self.counts) - 1
        self._plans: dict[Window | None, StepPlan] = {}

    @property
    def host_positions(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """(T,) of the packed tokens in their sequences; 0 where a row is idle."""
        decode = [] if self.decode is None else [self.decode.host_positions]
        return np.concatenate([*(slots.host_positions for slots in self.parts), *decode])

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: Window | None,
        rotary: Rotary | None = None,
        **options: Unpack[DecodeOptions],
    ) -> torch.Tensor:
        check_layer(self.cache, layer, k, v)
        self.layers.add(layer)
        row = 0
        for slots in self.parts:
            rows = slice(row, row + len(slots))
            turned = None if rotary is None else q[rows]
            self.cache.write(layer, slots, k[rows], v[rows], rotary=rotary, q=turned)
            row = rows.stop
        if self.decode is not None:
            self.decode.write(layer, q[row:], k[row:], v[row:], rotary)
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = api.plan_step(
                self.prefix,
                list(zip(self.seqs, self.counts, strict=True)),
                () if self.decode is None else self.decode.plan(window),
                num_heads=self.num_heads,
                window=window,
            )
        o = api.attend(q, self.cache, layer, plan, backend=self.backend, **options)
        assert isinstance(o, torch.Tensor)
        return o
