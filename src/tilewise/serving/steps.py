"""What attention does in one forward pass of a model: write the new tokens of a layer into pages, then read them.

A step is made once for all layers. Within a layer all tokens are written before any is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from .. import api
from ..kvcache import PagedKVCache, PrefixCache, Rotary, Slots
from ..kvcache.slots import gather, room_for
from ..plan import DecodePlan, StepPlan
from ..plan.standing import StandingPlan
from ..plan.standing_step import StandingStep
from ..scores import DecodeOptions, Reach, Window

if TYPE_CHECKING:
    from typing_extensions import Unpack

Longs = npt.NDArray[np.int64]


class Seen(TypedDict):
    """How far back rows see, as plan_decode and plan_step take it."""

    window: Window | None
    chunk: int | None


def seen(reach: Reach) -> Seen:
    return {"window": reach.window, "chunk": reach.chunk or None}


class Step(Protocol):
    """Attention of one forward pass, called layer by layer."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        reach: Reach,
        rotary: Rotary | None = None,
        **options: Unpack[DecodeOptions],
    ) -> torch.Tensor:
        """q (T, Hq, D), k (T, Hkv, D) and v (T, Hkv, Dv) of the step's tokens -> (T, Hq, Dv); where a row of the cache
        is both, v is the first channels of k.

        reach: how far back the layer's tokens see. rotary: turn k by its tokens' positions as it is written, and q with
        it, in place.
        """


def check_layer(cache: PagedKVCache, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """NotImplementedError for keys or values that are not as the model's configuration says all of them are."""
    taken, values = (cache.num_kv_heads, cache.head_dim), (cache.num_kv_heads, cache.value_dim)
    if k.shape[1:] != taken or v.shape[1:] != values or layer >= cache.num_layers:
        raise NotImplementedError(
            f"layer {layer} has keys of {tuple(k.shape[1:])} and values of {tuple(v.shape[1:])} heads and channels; "
            f"models whose {cache.num_layers} layers all have {taken} are served; use model.generate"
        )


def stored(cache: PagedKVCache, v: torch.Tensor) -> torch.Tensor | None:
    """The values that write() takes: none where a row is key and value at once."""
    return None if cache.shared_kv else v


class DecodeStep:
    """The next token of each of `seqs`, whose places are `slots`. Layers that see as far back share a plan."""

    def __init__(self, prefix: PrefixCache, *, num_heads: int, backend: str = "auto") -> None:
        self.prefix, self.cache, self.num_heads, self.backend = prefix, prefix.cache, num_heads, backend
        self.seqs: list[int] = []
        self.plans: dict[Reach, DecodePlan] = {}
        self._slots: Slots | None = None

    @property
    def slots(self) -> Slots:
        """The current step's places."""
        assert self._slots is not None, "take() comes first"
        return self._slots

    def take(self, seqs: list[int], slots: Slots) -> None:
        """Begin the step whose tokens have these places."""
        self.seqs, self._slots = seqs, slots
        for reach in self.plans:
            self.plans[reach] = self._plan(reach)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        reach: Reach,
        rotary: Rotary | None = None,
        **options: Unpack[DecodeOptions],
    ) -> torch.Tensor:
        self.write(layer, q, k, v, rotary)
        o = api.decode(q[:, None], self.cache, layer, self.plan(reach), backend=self.backend, **options)
        assert isinstance(o, torch.Tensor)
        return o[:, 0]

    def write(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary | None) -> None:
        """The new keys and values of a layer, turned by rotary, and q with them."""
        check_layer(self.cache, layer, k, v)
        its = (k, stored(self.cache, v))
        self.cache.write(layer, self.slots, *its, rotary=rotary, q=None if rotary is None else q)

    def plan(self, reach: Reach) -> DecodePlan:
        """Of the current step."""
        if reach not in self.plans:
            self.plans[reach] = self._plan(reach)
        return self.plans[reach]

    def _plan(self, reach: Reach) -> DecodePlan:
        return api.plan_decode(self.prefix, self.seqs, num_heads=self.num_heads, **seen(reach))


class Decodes:
    """Standing plans of up to `rows` sequences of up to max_length tokens, one for each reach that asked."""

    def __init__(self, prefix: PrefixCache, rows: int, *, num_heads: int, max_length: int) -> None:
        self.prefix, self.rows, self.num_heads, self.max_length = prefix, rows, num_heads, max_length
        self.seqs: list[int] = []
        self.plans: dict[Reach, StandingPlan] = {}

    def renew(self, seqs: list[int]) -> None:
        """The sequences as they are now."""
        self.seqs = seqs
        for plan in self.plans.values():
            api.renew_plan(plan, self.prefix, seqs)

    def plan(self, reach: Reach) -> StandingPlan:
        if reach not in self.plans:
            self.plans[reach] = api.plan_decode(
                self.prefix,
                self.seqs,
                num_heads=self.num_heads,
                **seen(reach),
                rows=self.rows,
                max_length=self.max_length,
            )
        return self.plans[reach]


class StandingRows:
    """A step of `rows` rows for a graph, which is replayed while sequences come and go: first those of `decodes`, then
    chunks of prompts, up to max_chunks of them, then idle ones. Places and plans stay where they are.

    max_chunks 0: for decodes alone, which have as many rows. layers: those that came by. binds_by_thread: what a call
    binds is kept by the thread that made it, and not for ever, so that a capture has to come right after a call.
    """

    binds_by_thread = False

    def __init__(self, decodes: Decodes, rows: int, max_chunks: int, *, backend: str = "auto") -> None:
        self.prefix, self.cache, self.decodes = decodes.prefix, decodes.prefix.cache, decodes
        self.rows, self.max_chunks, self.backend = rows, max_chunks, backend
        self.chunks: list[tuple[int, int]] = []
        self.plans: dict[Reach, StandingStep] = {}
        self.layers: set[int] = set()
        self.slots = room_for(self.cache, rows, planned=not max_chunks)

    def renew(self, seqs: list[int], chunks: list[tuple[int, int]], positions: Longs, index: Longs) -> None:
        """Begin the step of the last token of `seqs`, and (seq, tokens) of chunks, all of whose tokens have these
        positions in their sequences and these places in the cache, (tokens,) each, in the order of the rows."""
        named, counts = [*seqs, *(seq for seq, _ in chunks)], [1] * len(seqs) + [tokens for _, tokens in chunks]
        self.slots = gather(self.slots, named, counts, positions, index)
        self.chunks = chunks
        self.decodes.renew(seqs)
        for plan in self.plans.values():
            api.renew_step(plan, self.prefix, chunks)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        reach: Reach,
        rotary: Rotary | None = None,
        **options: Unpack[DecodeOptions],
    ) -> torch.Tensor:
        self.write(layer, q, k, v, rotary)
        o: torch.Tensor
        if self.max_chunks:
            o = api.attend(q, self.cache, layer, self._plan(reach), backend=self.backend, **options)
        else:
            plan = self.decodes.plan(reach)
            o = api.decode(q[:, None], self.cache, layer, plan, backend=self.backend, **options)[:, 0]
        return o

    def write(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary | None) -> None:
        """The new keys and values of a layer, turned by rotary, and q with them."""
        check_layer(self.cache, layer, k, v)
        self.layers.add(layer)
        count = self._taken(k)
        turned = None if rotary is None else q[:count]
        its = (k[:count], stored(self.cache, v[:count]))
        self.cache.write(layer, self.slots, *its, rotary=rotary, q=turned)

    def _taken(self, x: torch.Tensor) -> int:
        """How many of x's rows are written: places on a card have room for idle ones."""
        return len(x) if self.slots.room else len(self.slots)

    def _plan(self, reach: Reach) -> StandingStep:
        if reach not in self.plans:
            self.plans[reach] = api.plan_step(
                self.prefix,
                self.chunks,
                self.decodes.plan(reach),
                num_heads=self.decodes.num_heads,
                **seen(reach),
                rows=self.rows,
                max_chunks=self.max_chunks,
            )
        return self.plans[reach]


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
        self.last_rows: Longs = np.cumsum(self.counts, dtype=np.int64) - 1
        self._plans: dict[Reach, StepPlan] = {}

    @property
    def host_positions(self) -> Longs:
        """(T,) of the packed tokens in their sequences."""
        decode = [] if self.decode is None else [self.decode.slots]
        return np.concatenate([slots.host_positions for slots in (*self.parts, *decode)])

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        reach: Reach,
        rotary: Rotary | None = None,
        **options: Unpack[DecodeOptions],
    ) -> torch.Tensor:
        self.write(layer, q, k, v, rotary)
        plan = self._plans.get(reach)
        if plan is None:
            chunks = list(zip(self.seqs, self.counts, strict=True))
            plan = self._plans[reach] = self._planned(chunks, self.decode, reach)
        o = api.attend(q, self.cache, layer, plan, backend=self.backend, **options)
        assert isinstance(o, torch.Tensor)
        return o

    def write(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary | None) -> None:
        """The new keys and values of a layer, turned by rotary, and q with them."""
        check_layer(self.cache, layer, k, v)
        self.layers.add(layer)
        row = 0
        for slots in self.parts:
            rows = slice(row, row + len(slots))
            turned = None if rotary is None else q[rows]
            self.cache.write(layer, slots, k[rows], stored(self.cache, v[rows]), rotary=rotary, q=turned)
            row = rows.stop
        if self.decode is not None:
            self.decode.write(layer, q[row:], k[row:], v[row:], rotary)

    def _planned(self, chunks: list[tuple[int, int]], decode: DecodeStep | None, reach: Reach) -> StepPlan:
        """The plan of (seq, tokens) of chunks beside a decode step."""
        beside = () if decode is None else decode.plan(reach)
        return api.plan_step(self.prefix, chunks, beside, num_heads=self.num_heads, **seen(reach))
