"""What attention does in one forward pass of a model: write the new tokens of a layer into pages, then read them.

A step is made once for all layers. Within a layer all tokens are written before any is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from .. import api
from ..kvcache import PagedKVCache, PrefixCache, Rotary, Slots
from ..kvcache.slots import upload
from ..plan import DecodePlan
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


class PrefillStep:
    """New tokens of sequences, packed in the order of `parts`: the slots of one sequence, or of several, each."""

    def __init__(self, cache: PagedKVCache, parts: Sequence[Slots], backend: str = "auto") -> None:
        self.cache, self.parts, self.backend = cache, parts, backend
        self.layers: set[int] = set()  # those that came by
        self.seqs = [seq for slots in parts for seq in slots.seqs]
        self.counts = [count for slots in parts for count in slots.counts]
        ends = np.cumsum(self.counts)
        self.last_rows = ends - 1  # of each sequence's last new token
        lengths = cache.lengths_of(self.seqs)
        self.starts_q, self.starts_k = (
            upload(np.concatenate([[0], x]).astype(np.int32), cache.device) for x in (ends, np.cumsum(lengths))
        )
        self.page_table = cache.page_table(self.seqs)

    @property
    def host_positions(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """(T,) of the packed tokens."""
        return np.concatenate([slots.host_positions for slots in self.parts])

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
        cache, row = self.cache, 0
        for slots in self.parts:
            rows = slice(row, row + len(slots))
            cache.write(layer, slots, k[rows], v[rows], rotary=rotary, q=None if rotary is None else q[rows])
            row = rows.stop
        table = None
        if cache.format.dtype == q.dtype:  # read in place
            (k_from, *_), (v_from, *_) = cache.parts(layer)
            table = self.page_table
        else:
            read = [cache.load(layer, cache.page_list(seq), 0, cache.length(seq), q.dtype) for seq in self.seqs]
            k_from, v_from = (torch.cat(keys_or_values) for keys_or_values in zip(*read, strict=True))
        o = api.attention_varlen(
            q,
            k_from,
            v_from,
            self.starts_q,
            self.starts_k,
            causal=True,
            window=window,
            page_table=table,
            backend=self.backend,
            **options,
        )
        assert isinstance(o, torch.Tensor)
        return o


class DecodeStep:
    """The next token of each of `seqs`. Layers with the same window share a plan."""

    def __init__(self, prefix: PrefixCache, *, num_heads: int, backend: str = "auto") -> None:
        self.prefix, self.cache = prefix, prefix.cache
        self.num_heads, self.backend = num_heads, backend
        self.seqs: list[int] = []
        self.plans: dict[Window | None, DecodePlan] = {}
        self._slots: Slots | None = None

    @property
    def slots(self) -> Slots:
        """The current step's places."""
        assert self._slots is not None, "renew() comes first"
        return self._slots

    def renew(self, seqs: list[int], tokens: Sequence[int]) -> None:
        """Begin the step that feeds `tokens`, one per sequence. Raises OutOfPages with nothing changed."""
        self._slots = self.prefix.extend(seqs, tokens)
        self.seqs = seqs
        self.plans = {window: self._plan(window) for window in self.plans}

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
        self.cache.write(layer, self.slots, k, v, rotary=rotary, q=None if rotary is None else q)
        plan = self.plans.get(window)
        if plan is None:
            plan = self.plans[window] = self._plan(window)
        o = api.decode(q[:, None], self.cache, layer, plan, backend=self.backend, **options)
        assert isinstance(o, torch.Tensor)
        return o[:, 0]

    def _plan(self, window: Window | None) -> DecodePlan:
        return api.plan_decode(self.prefix, self.seqs, num_heads=self.num_heads, window=window)


class MixedStep:
    """New tokens of prompts, then one row of each sequence that is decoded, packed."""

    def __init__(self, prompts: PrefillStep, decode: DecodeStep | None) -> None:
        self.prompts, self.decode = prompts, decode

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
        if self.decode is None:
            return self.prompts.attend(layer, q, k, v, window=window, rotary=rotary, **options)
        cut = sum(self.prompts.counts)
        first = self.prompts.attend(layer, q[:cut], k[:cut], v[:cut], window=window, rotary=rotary, **options)
        last = self.decode.attend(layer, q[cut:], k[cut:], v[cut:], window=window, rotary=rotary, **options)
        return torch.cat([first, last])
