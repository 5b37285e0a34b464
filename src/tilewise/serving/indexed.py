"""Models whose layers attend to the keys that an indexer chooses for each query (docs/guides/mla.md).

The indexer is the model's own module, and so is what it computes: its queries, its keys, its formula. While the engine
runs the model, its forward is called for groups of the step's tokens, and where it would ask transformers' cache for
the keys of a sequence it is given those of the paged cache, in the pages of the latent rows. Layers without an indexer
are handed by the model what the layer before them chose.

Where there are kernels for it, the indexer is given no keys but a stand-in (indexer_formula.py), which learns from what
is done with it whether the formula is that of choose_keys, and of which queries and weights: then nobody gathers keys,
and scores are not kept by heads. Otherwise, and on a CPU, torch computes what the module says, over gathered keys.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import numpy as np
import torch

from .. import api
from ..api.rows import attend_rows
from ..kvcache import PagedKVCache, PrefixCache, Rotary, Slots
from ..kvcache.slots import upload
from ..plan import StepPlan
from ..plan.choice import ChoicePlan, StandingChoice
from ..scores import DecodeOptions, Reach
from . import indexer_formula as formula
from .steps import Decodes, DecodeStep, Longs, MixedStep, StandingRows

if TYPE_CHECKING:
    from typing_extensions import Unpack

LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")  # two names of one kind, of different releases
AT_ONCE = 1 << 26  # scores of an indexer's heads, in one call of it: 256 MiB
# What an indexer's forward must take, and what it may: tensors with a row for each token, (1, tokens, …).
NEEDED = {"hidden_states", "position_embeddings", "attention_mask", "past_key_values"}
KNOWN = NEEDED | {"q_resid", "position_ids"}
SIZES = ("n_heads", "head_dim", "index_topk")


@dataclass(frozen=True)
class Indexers:
    """What the engine has to know of them: the layers that have one, the channels of a key, how many keys are chosen
    for a query, and heads of which each scores every key."""

    layers: tuple[int, ...]
    dim: int
    topk: int
    heads: int


def modules_of(model: Any, latent_layers: Sequence[Any]) -> dict[int, Any]:
    """The indexers by their layers; none where no layer has one. NotImplementedError for what is not understood.

    latent_layers: those of latent.layers_of().
    """
    name, instead = type(model).__name__, "use model.generate"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) & set(LAYER_TYPES)
    if not kinds and not any(isinstance(getattr(m, "indexer", None), torch.nn.Module) for m in model.modules()):
        return {}
    if not latent_layers:
        raise NotImplementedError(
            f"{name} has layers whose keys an indexer chooses; they are served over latent rows, on a CPU or, in "
            f"bfloat16 or float16, rows of 576 channels with values of 512 on a card; {instead}"
        )
    found = {layer.layer_idx: layer.indexer for layer in latent_layers if getattr(layer, "indexer", None) is not None}
    for indexer in found.values():
        taken = set(inspect.signature(type(indexer).forward).parameters) - {"self"}
        unknown = sorted((taken ^ NEEDED) - (KNOWN - NEEDED)) + [x for x in SIZES if not hasattr(indexer, x)]
        if unknown:
            raise NotImplementedError(
                f"{name} has an indexer, {type(indexer).__name__}, that is not of the kind that is served: "
                f"{', '.join(unknown)}; {instead}"
            )
    sizes = {tuple(getattr(indexer, size) for size in SIZES) for indexer in found.values()}
    if len(sizes) != 1:
        raise NotImplementedError(
            f"{name} has indexers of {len(sizes)} kinds {sorted(sizes)}; one is served; {instead}"
        )
    return found


def sizes_of(modules: dict[int, Any]) -> Indexers | None:
    """Of modules_of(), which are all alike."""
    if not modules:
        return None
    one = next(iter(modules.values()))
    return Indexers(tuple(sorted(modules)), dim=one.head_dim, topk=one.index_topk, heads=one.n_heads)


def swapped(modules: dict[int, Any]) -> list[tuple[Any, str, Any]]:
    """(owner, attribute, value) for the time of a forward pass."""
    return [
        (module, "forward", torch.compiler.disable(_forward_of(module, layer))) for layer, module in modules.items()
    ]


def _forward_of(module: Any, layer: int) -> Callable[..., torch.Tensor]:
    """In the place of an indexer's forward, which the class still has: what the step makes of it."""
    forward = type(module).forward
    return partial(_forward, layer, module, forward, inspect.signature(forward))


def _forward(
    layer: int, module: Any, forward: Callable[..., Any], signature: inspect.Signature, *args: Any, **kwargs: Any
) -> torch.Tensor:
    given = signature.bind(module, *args, **kwargs).arguments
    del given["self"]
    step: Indexed = given["past_key_values"].step

    def call(group: Group | None, **replaced: Any) -> Any:
        its = {name: x for name, x in given.items() if name not in replaced}
        if group is not None:
            its = {name: x if x is None else group.cut(x) for name, x in its.items()}
        return forward(module, **its, **replaced)

    return step.choose(layer, call, type(module))


def have_kernels(cache: PagedKVCache, backend: str) -> bool:
    """Whether choose_keys, where this cache is, is what saves torch's scores. Over CPU tensors it is torch, too."""
    return cache.device.type == "cuda" or backend == "emulator"


class Past:
    """In the place of past_key_values during a pass: layers get their own rows back from it, and indexers the step."""

    def __init__(self, step: Indexed) -> None:
        self.step = step

    def update(self, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return k, v


@dataclass(frozen=True, eq=False)
class Group:
    """Tokens whose keys torch chooses in one call of an indexer: `batch` sequences with equally many of them.

    rows: where they stand among the step's. slots, first: they are tokens of these slots, from `first` on. places:
    (batch, keys) int64, where the tokens that they may see are stored; None if they see all that there are.
    """

    rows: slice
    slots: Slots
    first: int
    batch: int = 1
    places: torch.Tensor | None = None

    def cut(self, x: Any) -> Any:
        """(1, tokens, …) -> (batch, tokens of each, …), also of a tuple."""
        if isinstance(x, tuple):
            return tuple(self.cut(one) for one in x)
        x = x[0, self.rows]
        return x.view(self.batch, -1, *x.shape[1:])


class _StandInKeys:
    """In the place of past_key_values in an indexer's call for all tokens of a step, of which none gets keys."""

    def __init__(self, step: Indexed, layer: int, longest: int, look: bool) -> None:
        self.step, self.layer, self.longest, self.look, self.asked = step, layer, longest, look, 0

    def update_indexer(self, keys: torch.Tensor, *_: Any) -> formula.Keys:
        """The new keys (1, tokens, dim), which are written -> a stand-in for those of all tokens."""
        its = self.step.cache.index_keys
        assert its is not None
        self.asked += 1
        if keys.dtype != its.dtype:
            raise formula.NotFollowed(f"the model makes keys in {keys.dtype}, and the cache keeps {its.dtype}")
        self.step.write_keys(self.layer, keys[0])
        return formula.Keys.of(1, self.longest, its.dim, its.dtype, keys.device, look=self.look)


class Indexed(Protocol):
    """A step of a model with indexers. longest: keys of which stand-ins speak, as many as a sequence has or more."""

    cache: PagedKVCache
    indexers: Indexers
    longest: int
    backend: str

    def choose(self, layer: int, indexer: Callable[..., Any], kind: type) -> torch.Tensor:
        """(1, tokens, topk) int32: the rows of the cache's storage that each reads, −1 for none; of tokens that see all
        keys, anything.

        indexer: its forward, of a group or of all tokens, and with what is replaced; `kind` is its class.
        """

    def write_keys(self, layer: int, keys: torch.Tensor) -> None:
        """Those of the step's tokens, (tokens, dim)."""


# Classes whose formula was found to be one of the dtype of the keys, and not to depend on how many there are
_known: WeakSet[type] = WeakSet()


def by_stand_ins(
    step: Indexed,
    layer: int,
    indexer: Callable[..., Any],
    kind: type,
    tokens: int,
    plan: ChoicePlan | StandingChoice | None,
) -> torch.Tensor:
    """What choose() gives, by choose_keys, of what the indexer makes of stand-ins in one call for all tokens.

    plan: None if all tokens see all keys. The first call of a class waits for values, to see that nothing is lost.
    """
    topk, known = step.indexers.topk, kind in _known

    def follow(longest: int) -> formula.Choice:
        keys = _StandInKeys(step, layer, longest, look=not known or step.cache.device.type == "cpu")
        mask = formula.Mask.of(1, tokens, longest, step.cache.device)
        found = formula.choice_of(lambda: indexer(None, attention_mask=mask, past_key_values=keys))
        if keys.asked != 1 or found.shape != (1, tokens, topk):
            raise formula.NotFollowed(f"it asked for keys {keys.asked} times and chose {tuple(found.shape)}")
        return found

    choice = follow(step.longest)
    if not known:
        other = follow(topk + 2 if step.longest == topk + 1 else topk + 1)
        if not torch.equal(choice.q, other.q) or not torch.equal(choice.weights, other.weights):
            raise formula.NotFollowed("a formula that depends on how many keys there are is not understood")
        _known.add(kind)
    if plan is None:
        return torch.empty((1, tokens, topk), dtype=torch.int32, device=step.cache.device)
    try:
        return api.choose_keys(
            choice.q.contiguous(), choice.weights, step.cache, layer, plan, rows=True, backend=step.backend
        )[None]  # fmt: skip
    except NotImplementedError as error:
        raise formula.NotFollowed(str(error)) from error


def check_listed(layer: int, q: torch.Tensor, indices: torch.Tensor | None, topk: int, reach: Reach) -> torch.Tensor:
    """The lists of a layer's queries, (tokens, topk). NotImplementedError for a layer without."""
    if indices is None or indices.shape != (1, len(q), topk) or not reach.whole:
        given = None if indices is None else tuple(indices.shape)
        raise NotImplementedError(
            f"layer {layer} came with indices {given} and {reach}; layers that read the keys that an indexer chose, "
            "without a window or chunks, are served; use model.generate"
        )
    return indices[0]


def stored_rows(cache: PagedKVCache, layer: int) -> torch.Tensor:
    """(pages · page_size, width): a layer's rows as they are stored."""
    pages = cache.rows(layer) if cache.format.latent else cache.parts(layer)[0][0]
    return pages.flatten(0, 2)


class IndexedRows(StandingRows):
    """StandingRows of a model with indexers, of decodes alone: all of them read lists, those of short sequences with −1
    in them, so that a graph serves any lengths."""

    binds_by_thread = True  # gpu/mla_rows.py

    def __init__(self, decodes: Decodes, rows: int, *, indexers: Indexers, backend: str = "auto") -> None:
        super().__init__(decodes, rows, 0, backend=backend)
        self.indexers, self.longest = indexers, max(indexers.topk, decodes.max_length)
        self._choice: StandingChoice | None = None

    def renew(self, seqs: list[int], chunks: list[tuple[int, int]], positions: Longs, index: Longs) -> None:
        super().renew(seqs, chunks, positions, index)
        if self._choice is None:
            self._choice = api.plan_choice(
                self.prefix, seqs, topk=self.indexers.topk, rows=self.rows, max_length=self.decodes.max_length
            )
        else:
            api.renew_plan(self._choice, self.prefix, seqs)

    def choose(self, layer: int, indexer: Callable[..., Any], kind: type) -> torch.Tensor:
        try:
            return by_stand_ins(self, layer, indexer, kind, self.rows, self._choice)
        except formula.NotFollowed as why:
            raise NotImplementedError(
                f"cuda_graphs=True is not served for {kind.__name__}: {why}; leave cuda_graphs out, and torch computes "
                "its scores call by call"
            ) from why

    def write_keys(self, layer: int, keys: torch.Tensor) -> None:
        assert self.cache.index_keys is not None
        self.cache.index_keys.write(layer, self.slots, keys[: self._taken(keys)])

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        reach: Reach,
        rotary: Rotary | None = None,
        indices: torch.Tensor | None = None,
        **options: Unpack[DecodeOptions],
    ) -> torch.Tensor:
        """indices: (1, tokens, topk), what choose() gave this layer's indexer, or that of a layer before."""
        its = check_listed(layer, q, indices, self.indexers.topk, reach)
        self.write(layer, q, k, v, rotary)
        rows, form = stored_rows(self.cache, layer), self.cache.format
        return attend_rows(q, rows, form, its, value_dim=self.cache.value_dim, backend=self.backend, **options)[0]


class _Keys:
    """In the place of past_key_values in one call of an indexer for torch: the cache's keys for its own."""

    def __init__(self, cache: PagedKVCache, layer: int, group: Group) -> None:
        self.cache, self.layer, self.group, self.asked = cache, layer, group, 0

    def update_indexer(self, keys: torch.Tensor, *_: Any) -> torch.Tensor:
        """The new keys (batch, n, dim) -> those of all tokens of each sequence, (batch, keys, dim)."""
        its, group = self.cache.index_keys, self.group
        assert its is not None
        self.asked += 1
        its.write(self.layer, group.slots, keys.flatten(0, 1), group.first)
        # Who sees all keys needs no score; one key is enough to be asked about.
        return keys[:, :1] if group.places is None else its.read(self.layer, group.places)


class IndexedStep(MixedStep):
    """MixedStep of a model with indexers. Tokens of sequences that are no longer than what an indexer chooses see all
    keys, by the plan that other models have; the others name the rows that they read.

    by_torch: the classes of indexers whose scores torch has to compute, to which those are added that turn out to be.
    """

    def __init__(
        self,
        prefix: PrefixCache,
        parts: Sequence[Slots],
        decode: DecodeStep | None = None,
        *,
        num_heads: int,
        indexers: Indexers,
        by_torch: set[type],
        backend: str = "auto",
    ) -> None:
        super().__init__(prefix, parts, decode, num_heads=num_heads, backend=backend)
        self.indexers, self._by_torch = indexers, by_torch
        self._positions = upload(self.host_positions, self.cache.device)
        lengths = self.cache.lengths_of(self.seqs)
        chunks = list(zip(self.seqs, self.counts, strict=True))
        self._short = [its for its, length in zip(chunks, lengths, strict=True) if length <= indexers.topk]
        decoded = self.cache.lengths_of([] if decode is None else decode.seqs)
        self._longest = int(decoded.max(initial=0))  # of those that are decoded
        self.longest = max(indexers.topk, self._longest, int(lengths.max(initial=0)))  # keys that stand-ins speak of
        listed = np.repeat(lengths > indexers.topk, np.array(self.counts, np.int64))
        # With folds a token's bits are the same in any batch of decodes; lists of prompts are computed faster without.
        self._folds = not listed.any()
        self._seeing_decode = decode if self._longest <= indexers.topk else None
        decodes = np.full(len(self._positions) - len(listed), self._longest > indexers.topk)
        listed = np.concatenate([listed, decodes])
        self._listed, self._seeing = (upload(np.flatnonzero(x), self.cache.device) for x in (listed, ~listed))
        self._groups: list[Group] = []  # of torch's way, and
        self._choice: ChoicePlan | None = None  # of the other, when one is asked for
        self._plan: StepPlan | None = None

    def _chunk_groups(self) -> Iterator[Group]:
        """Chunks of prompts: neighbours that see all keys together, others alone, in pieces that fit."""
        row = 0
        for slots in self.parts:
            first = seen = 0  # tokens of the slots that have a group, and after them those that wait for theirs
            for seq, count, length in zip(slots.seqs, slots.counts, self.cache.lengths_of(slots.seqs), strict=True):
                if length <= self.indexers.topk:
                    seen += count
                    continue
                if seen:
                    yield Group(slice(row + first, row + first + seen), slots, first)
                    first, seen = first + seen, 0
                yield from self._pieces(row, slots, first, seq, count)
                first += count
            if seen:
                yield Group(slice(row + first, row + first + seen), slots, first)
            row += len(slots)

    def _pieces(self, row: int, slots: Slots, first: int, seq: int, count: int) -> Iterator[Group]:
        """`count` tokens, the last ones of `seq`, which are those of the slots from `first` on."""
        assert self.cache.index_keys is not None
        places = self.cache.index_keys.places([seq])
        before = places.shape[1] - count
        most = max(1, AT_ONCE // (self.indexers.heads * places.shape[1]))
        for done in range(0, count, most):
            stop = min(done + most, count)
            rows = slice(row + first + done, row + first + stop)
            yield Group(rows, slots, first + done, places=places[:, : before + stop])

    def _decode_groups(self) -> Iterator[Group]:
        """Decodes: all of them see all keys, or all have lists, those of short sequences with −1 in them."""
        if self.decode is None:
            return
        assert self.cache.index_keys is not None
        row, slots, seqs = sum(self.counts), self.decode.slots, self.decode.seqs
        if self._longest <= self.indexers.topk:
            yield Group(slice(row, row + len(seqs)), slots, 0)
            return
        most = max(1, AT_ONCE // (self.indexers.heads * self._longest))
        for first in range(0, len(seqs), most):
            some = seqs[first : first + most]
            places = self.cache.index_keys.places(some)
            yield Group(slice(row + first, row + first + len(some)), slots, first, len(some), places)

    def choose(self, layer: int, indexer: Callable[..., Any], kind: type) -> torch.Tensor:
        if have_kernels(self.cache, self.backend) and kind not in self._by_torch:
            try:
                return by_stand_ins(self, layer, indexer, kind, len(self._positions), self._planned_choice())
            except formula.NotFollowed as why:
                self._by_torch.add(kind)
                said = f"{kind.__name__}: {why}; torch computes its scores, over copies of the keys"
                warnings.warn(said, RuntimeWarning, stacklevel=2)
        self._groups = self._groups or [*self._chunk_groups(), *self._decode_groups()]
        found = self._positions.new_empty((len(self._positions), self.indexers.topk), dtype=torch.int32)
        for group in self._groups:
            chosen = self._positions_of(layer, indexer, kind, group)
            if group.places is not None:
                at, count = self._positions[group.rows].view(group.batch, -1, 1), chosen.shape[-1]
                its = group.places.gather(1, chosen.flatten(1).long()).view(chosen.shape)
                found[group.rows, :count] = its.masked_fill(chosen > at, -1).flatten(0, 1)  # taken for want of keys
                found[group.rows, count:] = -1
        return found[None]

    def _planned_choice(self) -> ChoicePlan | None:
        """Of all tokens, made once; None if all of them see all keys."""
        if self._choice is None and len(self._listed):
            decoded = [] if self.decode is None else self.decode.seqs
            counts = [*self.counts, *[1] * len(decoded)]
            self._choice = api.plan_choice(self.cache, [*self.seqs, *decoded], counts, topk=self.indexers.topk)
        return self._choice

    def write_keys(self, layer: int, keys: torch.Tensor) -> None:
        assert self.cache.index_keys is not None
        row = 0
        for slots in (*self.parts, *([] if self.decode is None else [self.decode.slots])):
            self.cache.index_keys.write(layer, slots, keys[row : row + len(slots)])
            row += len(slots)

    def _positions_of(self, layer: int, indexer: Callable[..., Any], kind: type, group: Group) -> torch.Tensor:
        """(batch, tokens, keys chosen): positions in the sequences, by torch."""
        at = self._positions[group.rows].view(group.batch, -1, 1)
        keys = _Keys(self.cache, layer, group)
        length = 1 if group.places is None else group.places.shape[1]
        hidden = torch.arange(length, device=at.device) > at
        # Added to scores, as every release takes it
        mask = torch.zeros(hidden.shape, device=at.device).masked_fill_(hidden, -torch.inf)
        chosen: torch.Tensor = indexer(group, attention_mask=mask, past_key_values=keys)
        shape = (*hidden.shape[:2], min(self.indexers.topk, length))
        if keys.asked != 1 or chosen.shape != shape or chosen.is_floating_point():
            raise NotImplementedError(
                f"{kind.__name__} is served if it asks for keys once and gives the positions {shape} of those that it "
                f"chose, got {keys.asked} and {chosen.dtype} {tuple(chosen.shape)}; use model.generate"
            )
        return chosen

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        reach: Reach,
        rotary: Rotary | None = None,
        indices: torch.Tensor | None = None,
        **options: Unpack[DecodeOptions],
    ) -> torch.Tensor:
        """indices: (1, tokens, topk), what choose() gave this layer's indexer, or that of a layer before."""
        lists = check_listed(layer, q, indices, self.indexers.topk, reach)
        if not len(self._listed):
            return super().attend(layer, q, k, v, reach=reach, rotary=rotary, **options)
        self.write(layer, q, k, v, rotary)
        everybody = not len(self._seeing)
        its = (q, lists) if everybody else (q[self._listed], lists[self._listed])
        o, _ = attend_rows(
            its[0], stored_rows(self.cache, layer), self.cache.format, its[1], value_dim=self.cache.value_dim,
            folds=self._folds, backend=self.backend, **options,
        )  # fmt: skip
        if everybody:
            return o
        if self._plan is None:
            self._plan = self._planned(self._short, self._seeing_decode, reach)
        seen = api.attend(q[self._seeing], self.cache, layer, self._plan, backend=self.backend, **options)
        assert isinstance(seen, torch.Tensor)
        both = q.new_empty((*q.shape[:2], self.cache.value_dim))
        both[self._listed], both[self._seeing] = o, seen
        return both


STEPS = (IndexedStep, IndexedRows)
