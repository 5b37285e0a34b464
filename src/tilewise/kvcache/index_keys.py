"""Keys of an indexer, which chooses what attention reads: one vector per token, in the pages of its sequence.

They are further layers of the cache: a page holds its tokens' rows and index keys, so that forks, copies on write,
shared prefixes and freed pages are those of the rows, and a token counts as written when it has all of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilewise import checks
from tilewise.formats import PLAIN, KVFormat
from tilewise.kvcache.pool import Ints
from tilewise.kvcache.slots import Slots, check_slots, upload
from tilewise.kvcache.storage import copy_pages

if TYPE_CHECKING:
    from tilewise.kvcache.paged import PagedKVCache


class IndexKeys:
    """One key of `dim` channels per token in each of `layers`, the layers of `cache` that have an indexer.

    dtype: that of the cache's rows, bfloat16 where they are quantised.
    """

    def __init__(self, cache: PagedKVCache, dim: int, layers: Sequence[int] | None) -> None:
        named = range(cache.num_layers) if layers is None else layers
        self.layers = tuple(checks.integer("index_layers", layer, 0, cache.num_layers - 1) for layer in named)
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"index_layers must name layers, each once, got {self.layers}")
        self.dim = checks.head_dim("index_dim", dim)
        self.dtype = index_dtype(cache.format)
        self._cache = cache
        lead = (len(self.layers), cache.num_pages, cache.page_size, 1)
        with torch.inference_mode(False):  # or only code under inference_mode could write to it
            self._stored = torch.empty((*lead, self.dim), dtype=self.dtype, device=cache.device)

    @property
    def bytes_per_token(self) -> int:
        """In all layers."""
        return index_bytes(len(self.layers), self.dim, self._cache.format)

    def write(self, layer: int, slots: Slots, keys: torch.Tensor, first: int = 0) -> None:
        """Keys (n, dim) of the tokens [first, first + n) of the slots. Whoever writes a step in parts does so in order:
        with the last of them the layer's keys count as written. On a card keys may have as many rows as the slots have
        room for there, of which those past len(slots) are idle."""
        number = self._number(layer)
        plane = self._cache.num_layers + number
        check_slots(slots, self._cache, plane)
        whole = (
            slots.room > 0 and first == 0 and keys.shape[:1] == (slots.room,)
        )  # a graph that holds it may see idle ones later
        stop = checks.integer("first", first, 0, len(slots)) + (len(slots) if whole else len(keys))
        shape = (slots.room if whole else min(len(keys), len(slots) - first), self.dim)
        checks.tensor("keys", keys, shape=shape, dtypes=checks.FLOATS, device=self._cache.device)
        if whole:
            self._append(number, keys.detach(), slots)
        else:
            self._rows(number).index_copy_(0, slots.index[first:stop], keys.detach().to(self.dtype))
        self._cache._written.mark(slots.host_index[first:stop], plane)
        if stop == len(slots) and plane not in slots._layers:
            slots.note_written([plane])

    def _append(self, number: int, keys: torch.Tensor, slots: Slots) -> None:
        """By a kernel, which skips places that are idle."""
        from tilewise.gpu import append  # it needs the compiler and the driver, which a cache on the CPU does not

        form = KVFormat(index_dtype_name(self._cache.format), self.dim)
        places = slots.all_positions, slots.all_index
        append.append(form, keys[:, None].contiguous(), None, [self._stored[number]], None, *places)

    def places(self, seqs: Sequence[int]) -> torch.Tensor:
        """(len(seqs), tokens of the longest) int64 on the cache's device: page · page_size + offset of each token, past
        a sequence's end that of its last one. A sequence has one token at least."""
        cache = self._cache
        lengths = cache.lengths_of(seqs)
        if not lengths.all():
            raise ValueError(f"seqs must have a token each, sequence {seqs[int(lengths.argmin())]} has none")
        last = upload(lengths - 1, cache.device)
        at = torch.arange(int(lengths.max(initial=0)), device=cache.device).minimum(last[:, None])
        return cache.page_table(seqs).long().gather(1, at // cache.page_size) * cache.page_size + at % cache.page_size

    def read(self, layer: int, places: torch.Tensor) -> torch.Tensor:
        """The keys at `places` (…) int64, (…, dim): a copy. On a card nobody looks whether they were written."""
        checks.tensor("places", places, dtypes=checks.INTEGERS, device=self._cache.device)
        if places.device.type == "cpu":
            self._check_written(layer, places)
        return self.stored(layer)[places]

    def stored(self, layer: int) -> torch.Tensor:
        """(pages · page_size, dim): the keys of a layer as they are stored; where none was written, anything."""
        return self._rows(self._number(layer))

    def check_written(self, layer: int, seqs: Sequence[int]) -> None:
        """ValueError unless all tokens of these sequences, of a cache on a CPU, have a key in `layer`."""
        if len(seqs):
            self._check_written(layer, self.places(seqs))

    def _check_written(self, layer: int, places: torch.Tensor) -> None:
        plane, slots = self._cache.num_layers + self._number(layer), self._cache.num_pages * self._cache.page_size
        if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < slots:
            raise ValueError(
                f"places must be from 0 to {slots - 1}, as places() gives them, got {int(places.min())} to "
                f"{int(places.max())}"
            )
        if not self._cache._written.are(plane, places.flatten().numpy()):
            raise ValueError(f"index keys are not all written in layer {layer}: write() them before reading")

    def copy_pages(self, old: Ints, new: Ints) -> None:
        """Pages `old` to `new` in every layer, for copy on write."""
        copy_pages([self._stored], old, new, by_kernel=self._cache._by_kernel)

    def _number(self, layer: int) -> int:
        if layer not in self.layers:
            raise ValueError(f"layer must be one that has index keys, {self.layers}, got {layer}")
        return self.layers.index(layer)

    def _rows(self, number: int) -> torch.Tensor:
        return self._stored[number].view(-1, self.dim)

    def __repr__(self) -> str:
        return f"IndexKeys(dim={self.dim}, layers={self.layers}, dtype={self.dtype})"


def index_dtype(form: KVFormat) -> torch.dtype:
    """Of index keys beside rows of this format."""
    return PLAIN[index_dtype_name(form)]


def index_dtype_name(form: KVFormat) -> str:
    """The same as a format."""
    return form.name if form.plain else "bf16"


def index_bytes(layers: int, dim: int, form: KVFormat) -> int:
    """Bytes that index keys of so many layers take per token."""
    return layers * dim * index_dtype(form).itemsize


def index_keys_of(cache: PagedKVCache, dim: Any, layers: Any) -> IndexKeys | None:
    """Those that PagedKVCache was asked for."""
    if dim is None:
        if layers is not None:
            raise ValueError("index_layers goes with index_dim, which is None; give both or leave index_layers out")
        return None
    return IndexKeys(cache, dim, layers)
