"""The masks of transformers, read instead of formed.

transformers describes a mask by functions of (batch, head, query, key) indices and asks the attention implementation to
make of them what it likes. Here that is a `Mask`: causal, window, and the rows of each sequence, found once a forward
pass for all layers that share it. What cannot be told in these words is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from tilewise.plan.tiles import window_band
from tilewise.scores import Window

from .. import checks
from .extras import extra

with extra("transformers"):
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

INSTEAD = 'use attn_implementation="sdpa" or "eager"'

Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences among the rows of a batch.

    rows_q, rows_k: (batch index, position) of every row that belongs to a sequence, in order; None where all do.
    starts_q, starts_k: (sequences + 1,), where each sequence starts when those rows are packed.
    """

    rows_q: Rows | None
    rows_k: Rows | None
    starts_q: torch.Tensor
    starts_k: torch.Tensor

    def to(self, *args: Any, **kwargs: Any) -> Ragged:
        def moved(rows: Rows | None) -> Rows | None:
            return None if rows is None else (rows[0].to(*args, **kwargs), rows[1].to(*args, **kwargs))

        starts = self.starts_q.to(*args, **kwargs), self.starts_k.to(*args, **kwargs)
        return Ragged(moved(self.rows_q), moved(self.rows_k), *starts)


@dataclass(frozen=True, eq=False)
class Mask:
    """What the queries of a forward pass see, as models carry it from `make_mask` to `attention_forward`.

    batch, queries, kv_length: the sizes of q, and of k as the cache hands it over; keys: how many of these are filled.
    causal, window, chunk: as in `tilewise.attention`, bottom-right over the keys of each sequence. ragged: the
    sequences, None for one in each batch row, without padding.

    It passes for a tensor as far as moving and indexing it goes. A model that computes with it is told that it cannot.
    """

    batch: int
    queries: int
    keys: int
    kv_length: int
    causal: bool
    window: Window | None
    ragged: Ragged | None = None
    chunk: int = 0
    device: torch.device | str = "cpu"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, 1, self.queries, self.kv_length

    @property
    def ndim(self) -> int:
        return 4

    def to(self, *args: Any, **kwargs: Any) -> Mask:
        device = torch.empty(0, device=self.device).to(*args, **kwargs).device
        return replace(self, ragged=None if self.ragged is None else self.ragged.to(*args, **kwargs), device=device)

    def contiguous(self) -> Mask:
        return self

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the attention mask of Tilewise is no tensor and has no {name!r}; {INSTEAD}")

    def __getitem__(self, index: Any) -> torch.Tensor | Mask:
        """The mask of the last queries, where the index cuts off the others and nothing else. Otherwise of the mask as
        a tensor, bool (batch, 1, queries, kv_length), which is formed here: for models that choose keys by it."""
        rows = index[2] if isinstance(index, tuple) and len(index) == 4 else None
        if isinstance(rows, slice) and all(index[n] == slice(None) for n in (0, 1, 3)):
            first, stop, step = rows.indices(self.queries)
            if first < stop == self.queries and step == 1:
                return self if first == 0 else self.from_query(first)
        return self.formed()[index]

    def from_query(self, first: int) -> Mask:
        """Of the queries from `first` on: what they see is counted from where they end, which is where they did."""
        mask = replace(self, queries=self.queries - first)
        if self.ragged is None:
            return mask
        owner = self._places("q", self.queries)[0][:, first:]
        there = owner >= 0
        rows = None if bool(there.all()) else _rows(there)
        starts = _starts(owner, rows, len(self.ragged.starts_q) - 1)
        return replace(mask, ragged=replace(self.ragged, rows_q=rows, starts_q=starts))

    def formed(self) -> torch.Tensor:
        """What each query sees, bool (batch, 1, queries, kv_length)."""
        owner_q, place_q = self._places("q", self.queries)
        owner_k, place_k = self._places("k", self.keys)
        if self.ragged is None:
            at = place_q + self.keys - self.queries
        else:
            ahead = F.pad(
                self.ragged.starts_k.diff() - self.ragged.starts_q.diff(), (0, 1)
            )  # the last for rows of none
            at = place_q + ahead[owner_q]
        at, key = at[..., None], place_k[:, None, :]
        seen = (owner_q[..., None] == owner_k[:, None, :]) & (owner_q >= 0)[..., None]
        seen &= window_band(self.window, self.causal).allows(key - at)
        if self.chunk:
            seen &= key // self.chunk == at // self.chunk
        return F.pad(seen, (0, self.kv_length - self.keys))[:, None]

    def _places(self, side: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row of (batch, length) its sequence, −1 for none, and its place in it."""
        if self.ragged is None:
            owner = torch.arange(self.batch, device=self.device)[:, None].expand(self.batch, length)
            return owner, torch.arange(length, device=self.device).expand(self.batch, length)
        rows, starts = (getattr(self.ragged, f"{name}_{side}") for name in ("rows", "starts"))
        packed = torch.arange(self.batch * length if rows is None else len(rows[0]), device=starts.device)
        owner = torch.bucketize(packed, starts[1:], right=True)
        place = packed - starts[owner]
        if rows is None:
            return owner.view(self.batch, length), place.view(self.batch, length)
        full = packed.new_full((2, self.batch, length), -1)
        full[0][rows], full[1][rows] = owner, place
        return full[0], full[1]

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> NoReturn:
        name = getattr(function, "__name__", function)
        raise NotImplementedError(
            f"this model computes ({name}) with its attention mask, which Tilewise does not form; {INSTEAD}"
        )


@dataclass(frozen=True, eq=False)
class Pattern:
    """A mask function as it was read: causal, window as in `tilewise.attention`; for packed sequences the number of the
    sequence that each token belongs to, documents (B, N); for blocks of positions their size, chunk, and where those of
    each batch row begin, begins (B,), or of packed sequences the tokens' positions in these, positions (B, N)."""

    causal: bool = False
    window: Window | None = None
    documents: torch.Tensor | None = None
    chunk: int = 0
    begins: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def narrowed(self, other: Pattern) -> Pattern:
        """What is seen by both."""
        if self.documents is not None and other.documents is not None:
            raise NotImplementedError(f"mask_function packs sequences twice; {INSTEAD}")
        if self.chunk and other.chunk:
            raise NotImplementedError(f"mask_function cuts positions into chunks twice; {INSTEAD}")
        chunked = other if other.chunk else self
        windows = [p.window for p in (self, other) if p.window is not None]
        sides = [[side for side in sides if side is not None] for sides in zip(*windows, strict=True)]
        return Pattern(
            self.causal or other.causal,
            (min(sides[0], default=None), min(sides[1], default=None)) if windows else None,
            other.documents if self.documents is None else self.documents,
            chunked.chunk,
            chunked.begins,
            chunked.positions,
        )


def read_pattern(mask_function: Callable[..., Any], end: int) -> Pattern:
    """What transformers' `mask_function` means, `end` being the position after the last key.

    transformers hands over a composition of functions; each is known by its name and tells its sizes by its closure.
    Whatever is not known is refused: nothing may be lost between the model and the kernel.
    """
    if mask_function is causal_mask_function:
        return Pattern(causal=True)
    if mask_function is bidirectional_mask_function:
        return Pattern()
    match _maker(mask_function):
        case "and_masks", {"mask_functions": parts}:
            pattern = Pattern()
            for part in parts:
                pattern = pattern.narrowed(read_pattern(part, end))
            return pattern
        case "or_masks", {"mask_functions": parts}:
            return _read_union(parts, end)
        case "sliding_window_overlay", {"sliding_window": int(size)}:
            return Pattern(window=(size - 1, None))
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(size)}:
            return Pattern(window=(size, size))
        case "packed_sequence_mask_function", {"packed_sequence_mask": torch.Tensor() as documents}:
            return Pattern(documents=documents)
        case "remap_positions_for_packed_sequence", {"mask_function": inner, "position_ids": torch.Tensor() as its}:
            # Packed sequences are found by positions that go on by one: tokens are as far apart there as they lie.
            return replace(read_pattern(inner, int(its.max()) + 1), positions=its)
        case "chunked_overlay", {"chunk_size": int(size), "left_padding": torch.Tensor() as begins}:
            return Pattern() if end <= size else Pattern(chunk=size, begins=begins)  # else all in the first chunk
    raise NotImplementedError(
        f"mask_function {_name(mask_function)} (an or_mask_function or and_mask_function of the model) is not served: "
        f"masks are causal, windowed, chunked, padded or packed; {INSTEAD}"
    )


def _read_union(parts: Sequence[Callable[..., Any]], end: int) -> Pattern:
    """A mask widened by blocks of tokens that see each other, as those of an image, where there is no such block."""
    base, *overlays = parts
    for overlay in overlays:
        match _maker(overlay):
            case "blockwise_overlay", {"block_sequence_ids": torch.Tensor() as blocks}:
                if bool((blocks >= 0).any()):
                    raise NotImplementedError(
                        "block_sequence_ids, or token types, name blocks of tokens that see each other (images, a "
                        f"prefix), which is not served; {INSTEAD}"
                    )
            case _:
                raise NotImplementedError(
                    f"or_mask_function {_name(overlay)}, which widens the mask, is not served; {INSTEAD}"
                )
    return read_pattern(base, end)


def _maker(mask_function: Any) -> tuple[str, dict[str, Any]]:
    """Which function of transformers' masking_utils made this one, and of what; ("", {}) if none did."""
    if not inspect.isfunction(mask_function) or mask_function.__module__ != causal_mask_function.__module__:
        return "", {}
    return mask_function.__qualname__.partition(".")[0], dict(inspect.getclosurevars(mask_function).nonlocals)


def _name(mask_function: Any) -> str:
    if not inspect.isfunction(mask_function):
        return repr(mask_function)
    return f"{mask_function.__module__}.{mask_function.__qualname__}"


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | Mask | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Mask:
    """The mask of a forward pass, for transformers' AttentionMaskInterface; its arguments are those of `sdpa_mask`.

    Query i stands at position q_offset + i, key j at kv_offset + j. attention_mask: (batch_size, positions) bool, False
    for padding; positions that it does not reach are padding. Reads values of tensors, so on a GPU the CPU waits, once
    for all layers that share the mask.
    """
    if isinstance(attention_mask, Mask):  # made ahead: `generate` does that for static caches
        return attention_mask
    end = int(q_offset) + q_length
    pattern = read_pattern(mask_function, end)
    # A static cache hands over all of its room; causal queries see nothing beyond the last of them.
    keys = end - kv_offset if pattern.causal else kv_length
    if not 0 <= keys <= kv_length:
        raise ValueError(
            f"the keys must reach to position {end} like the queries, got {kv_length} of them from {kv_offset}"
        )
    if (pattern.window is not None or pattern.chunk) and kv_offset + keys != end:
        raise NotImplementedError(
            f"a window or a chunk needs the last query at the last key's position, got queries to {end} and keys to "
            f"{kv_offset + keys}; {INSTEAD}"
        )
    there = None
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size:
            raise ValueError(
                f"attention_mask must be ({batch_size}, positions) for padding, got shape {tuple(attention_mask.shape)}"
            )
        there = attention_mask[:, kv_offset : kv_offset + keys].to(device=device, dtype=torch.bool)
        there = F.pad(there, (0, keys - there.shape[1]))
    if pattern.chunk:
        there = _in_chunks(pattern, there, int(q_offset), kv_offset + torch.arange(keys, device=device))
    mask = Mask(batch_size, q_length, keys, kv_length, pattern.causal, pattern.window, None, pattern.chunk, device)
    return with_sequences(mask, there, pattern.documents)


def _check_packed_chunks(pattern: Pattern) -> None:
    """NotImplementedError unless the chunks of each packed sequence are counted from its first token, as a kernel does,
    or from one that is whole chunks before it."""
    assert pattern.documents is not None
    assert pattern.begins is not None
    if pattern.positions is not None and not bool(pattern.begins.any()):
        first = F.pad(pattern.documents.diff(dim=-1) > 0, (1, 0), value=True)
        if not bool((pattern.positions.expand_as(first)[first] % pattern.chunk).any()):
            return
    raise NotImplementedError(
        f"chunked attention over packed sequences is served where their chunks begin with them; {INSTEAD}"
    )


def _in_chunks(
    pattern: Pattern, there: torch.Tensor | None, first: int, positions: torch.Tensor
) -> torch.Tensor | None:
    """`there` without keys before the chunk of the first query, at position `first`: what is left begins with a chunk,
    as a kernel counts them. positions: of the keys."""
    assert pattern.begins is not None
    if pattern.documents is not None:
        _check_packed_chunks(pattern)
        return there
    begins = pattern.begins.to(positions.device)[:, None]
    chunk = begins + (first - begins).clamp_min(0) // pattern.chunk * pattern.chunk
    near = positions >= chunk
    return near if there is None else there & near


def with_sequences(mask: Mask, there: torch.Tensor | None, documents: torch.Tensor | None) -> Mask:
    """`mask` with its sequences found. there: bool (batch, keys), False for padding. documents: (batch, keys), the
    number of the sequence that each token belongs to; sequences of a batch row lie one after the other."""
    if there is not None and bool(there.all()):
        there = None
    if there is None and documents is None:
        return mask
    batch, keys, queries = mask.batch, mask.keys, mask.queries
    if documents is None:
        assert there is not None
        owner = torch.arange(batch, device=there.device)[:, None].expand(batch, keys)
        sequences = batch
    else:
        if tuple(documents.shape) != (batch, keys) or queries != keys:
            raise ValueError(
                f"packed sequences need a number for each of the {keys} keys and as many queries, got "
                f"{tuple(documents.shape)} for {queries} queries of {batch} batch rows"
            )
        step = documents.diff(dim=-1)
        if bool((step < 0).any()):
            raise NotImplementedError(f"packed sequences must lie one after the other in a batch row; {INSTEAD}")
        first = torch.ones_like(documents, dtype=torch.bool)
        first[:, 1:] = step > 0
        owner = first.flatten().cumsum(0).view(batch, keys) - 1
        sequences = int(first.sum())
    rows_k = _rows(there)
    if rows_k is not None and (mask.window is not None or mask.chunk):
        same = owner[rows_k].diff() == 0
        if bool((same & (rows_k[1].diff() != 1)).any()):
            raise NotImplementedError(
                f"attention_mask has padding between the tokens of a sequence, where no window and no chunk can "
                f"be told; {INSTEAD}"
            )
    starts_k = _starts(owner, rows_k, sequences)
    if documents is None and not (
        mask.causal or mask.window or mask.chunk
    ):  # it may be a cross-attention: all queries count
        starts_q = torch.arange(batch + 1, device=owner.device, dtype=torch.int32) * queries
        return replace(mask, ragged=Ragged(None, rows_k, starts_q, starts_k))
    if queries > keys:
        raise ValueError(f"padded queries must be among the keys, got {queries} queries for {keys} keys")
    owner = owner[:, keys - queries :]
    rows_q = _rows(None if there is None else there[:, keys - queries :])
    return replace(mask, ragged=Ragged(rows_q, rows_k, _starts(owner, rows_q, sequences), starts_k))


def _rows(there: torch.Tensor | None) -> Rows | None:
    """(batch index, position) of what is there, in order; None if all is."""
    if there is None:
        return None
    batch, position = there.nonzero(as_tuple=True)
    return batch, position


def _starts(owner: torch.Tensor, rows: Rows | None, sequences: int) -> torch.Tensor:
    """Where each sequence starts among the packed rows, (sequences + 1,) int32. owner: (batch, N), not decreasing."""
    packed = (owner.flatten() if rows is None else owner[rows]).contiguous()
    return torch.searchsorted(packed, torch.arange(sequences + 1, device=owner.device), out_int32=True)


def mask_of_flags(
    query: torch.Tensor, key: torch.Tensor, causal: bool, sliding_window: int | None, padding: Any
) -> Mask:
    """The Mask of a call that has none: by the layer's own flags, and a (B, Nk) padding mask if there is one."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    window = None
    if sliding_window is not None:
        reach = checks.integer("sliding_window", sliding_window, 1) - 1
        window = (reach, None if causal else reach)
    mask = Mask(batch, queries, keys, keys, causal, window, device=query.device)
    if padding is None:
        return mask
    if not isinstance(padding, torch.Tensor):
        raise TypeError(f"attention_mask must be a padding mask or None, got {type(padding).__name__}")
    if padding.dim() != 2:
        raise NotImplementedError(
            f"attention_mask must be a padding mask ({batch}, {keys}) or None, got shape {tuple(padding.shape)}: a "
            f"mask of one's own is not served; {INSTEAD}"
        )
    checks.tensor("attention_mask", padding, shape=(batch, keys))
    return with_sequences(mask, padding.to(device=query.device, dtype=torch.bool), None)


def with_given_sequences(mask: Mask, starts_q: torch.Tensor | None, starts_k: torch.Tensor | None) -> Mask:
    """`mask` over the sequences that cu_seq_lens_q and cu_seq_lens_k tell, where they are given."""
    if starts_q is None and starts_k is None:
        return mask
    if starts_q is None or starts_k is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k go together, got one of them")
    if mask.batch != 1 or (mask.ragged is not None and mask.ragged.rows_k is not None):
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k go with one batch row without padding, got {mask.batch} rows"
            + (" and padding" if mask.ragged is not None else "")
        )
    return replace(mask, ragged=Ragged(None, None, starts_q, starts_k))


def chosen_keys(indices: torch.Tensor, mask: Mask) -> torch.Tensor:
    """`indices` (batch, queries, n), the keys that each query may see, −1 for none, as bools over the rows of each
    sequence: (sequences, queries of the longest, keys of the longest) or more."""
    shape = (mask.batch, mask.queries, "keys")
    checks.tensor("indices", indices, shape=shape, dtypes=checks.INTEGERS)
    places = torch.where(indices < 0, mask.kv_length, indices).long()  # one place more, for none
    chosen = places.new_zeros((mask.batch, mask.queries, mask.kv_length + 1), dtype=torch.bool)
    chosen = chosen.scatter_(-1, places, True)[..., : mask.keys]
    if mask.ragged is None:
        return chosen
    if len(mask.ragged.starts_q) - 1 != mask.batch:
        raise NotImplementedError(f"indices over packed sequences are not served; {INSTEAD}")
    for dim, rows in ((1, mask.ragged.rows_q), (2, mask.ragged.rows_k)):
        if rows is not None:  # a sequence's rows first, in their order
            none = torch.ones((mask.batch, chosen.shape[dim]), dtype=torch.uint8, device=chosen.device)
            none[rows] = 0
            order = none.argsort(dim=-1, stable=True)
            chosen = chosen.gather(dim, (order[:, :, None] if dim == 1 else order[:, None]).expand_as(chosen))
    return chosen
