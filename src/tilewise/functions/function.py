"""`Function`: a traced mask and score with what they capture, and all that is done with them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch

from tilewise.functions import blocks, layout, printing
from tilewise.functions.evaluation import evaluate
from tilewise.functions.expression import INDICES, Node, Number, in_order
from tilewise.functions.facts import Facts, flags_of

Sizes = tuple[int, int, int, int]  # how many there are of b, h, q and k
Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The last `limit` values that were asked for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable) -> Value | None:
        value = self._values.get(key)
        if value is not None:
            with contextlib.suppress(KeyError):  # another thread has just dropped it
                self._values.move_to_end(key)
        return value

    def keep(self, key: Hashable, value: Value) -> None:
        self._values[key] = value
        while len(self._values) > self._limit:
            self._values.popitem(last=False)


_texts: Recent[str] = Recent(1024)
_lives: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
_new_life = itertools.count()


def _life(x: torch.Tensor) -> int:
    """A number that this tensor has and no other one ever, not even one that is given its address."""
    place = id(x)
    known = _lives.get(place)
    if known is not None and known[0]() is x:
        return known[1]

    def forget(dead: weakref.ref[torch.Tensor]) -> None:
        if place in _lives and _lives[place][0] is dead:
            del _lives[place]

    life = next(_new_life)
    _lives[place] = weakref.ref(x, forget), life
    return life


def version(x: torch.Tensor) -> Hashable:
    """Changes when the tensor's content does; where that is not counted, as of inference tensors, at every call."""
    try:
        return x._version
    except RuntimeError:
        return object()


@dataclass(frozen=True, eq=False)
class Expressions:
    """What was traced. numbers: the parameters, with their values. structure: all but these, equal for equal code."""

    mask: Node | None
    score: Node | None
    nodes: tuple[Node, ...]
    numbers: tuple[Node, ...]
    values: tuple[Number, ...]
    structure: str
    uses: str

    @classmethod
    def of(cls, mask: Node | None, score: Node | None) -> Expressions:
        nodes = tuple(in_order(*(root for root in (mask, score) if root is not None)))
        numbers = tuple(node for node in nodes if node.op == "number")
        place = {node: str(n) for n, node in enumerate(nodes)}
        lines = [
            " ".join([n.kind, n.op, "" if n.op == "number" else str(n.value), n.role, *(place[a] for a in n.args)])
            for n in nodes
        ]
        lines += ["none" if root is None else place[root] for root in (mask, score)]
        uses = "".join(name for name in INDICES if mask is not None and name in mask.uses)
        return cls(mask, score, nodes, numbers, tuple(n.value for n in numbers), "\n".join(lines), uses)

    def with_values(self, values: Sequence[Number]) -> Expressions:
        """The same over other numbers."""
        made: dict[Node, Node] = {}
        given = dict(zip(self.numbers, values, strict=True))
        for node in self.nodes:
            args = tuple(made[a] for a in node.args)
            value = given.get(node, node.value)
            made[node] = node if node.op != "number" and args == node.args else replace(node, args=args, value=value)
        mask, score = (None if root is None else made[root] for root in (self.mask, self.score))
        nodes, numbers = tuple(made.values()), tuple(made[n] for n in self.numbers)
        return replace(self, mask=mask, score=score, nodes=nodes, numbers=numbers, values=tuple(values))


class Function:
    """A mask, a score or both, traced, with the tensors they look things up in.

    mask, score: the expressions; None for one that is not given. values: of the expressions' numbers, if not those that
    they were traced with.
    """

    __slots__ = ("_bound", "_expressions", "_values", "tensors")

    def __init__(
        self,
        expressions: Expressions,
        tensors: tuple[torch.Tensor, ...],
        values: tuple[Number, ...] | None = None,
    ) -> None:
        self._expressions, self.tensors = expressions, tensors
        self._values = expressions.values if values is None else values
        self._bound: Expressions | None = expressions if values is None else None  # with these values, once asked for

    @property
    def _here(self) -> Expressions:
        if self._bound is None:
            self._bound = self._expressions.with_values(self._values)
        return self._bound

    @property
    def mask(self) -> Node | None:
        return self._here.mask

    @property
    def score(self) -> Node | None:
        return self._here.score

    @property
    def masks(self) -> bool:
        """Is there a mask?"""
        return self._expressions.mask is not None

    @property
    def scores(self) -> bool:
        """Is there a score?"""
        return self._expressions.score is not None

    @property
    def uses(self) -> str:
        """Which of "bhqk" the mask depends on."""
        return self._expressions.uses

    @property
    def key(self) -> Hashable:
        """Equal for the same expressions over the same numbers and the same tensors, not written to in between."""
        tensors = tuple(
            (_life(x), version(x), x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in self.tensors
        )
        return self._expressions.structure, self._values, tensors

    def check(self, device: torch.device) -> None:
        """ValueError if a captured tensor cannot be read by a kernel on `device`, NotImplementedError if it wants
        gradients."""
        for slot, x in enumerate(self.tensors):
            error: type[Exception] = ValueError
            if x.device != device:
                wrong = f"a captured tensor must be on {device} like q, got {x.device}; move it there before the call"
            elif not x.numel():
                wrong = f"a captured tensor must have entries, got shape {tuple(x.shape)}"
            elif x.requires_grad and torch.is_grad_enabled():
                wrong = "a captured tensor requires grad, and functions give none: use x.detach() or torch.no_grad()"
                error = NotImplementedError
            else:
                continue
            place = next(n.place for n in self._expressions.nodes if n.op == "lookup" and n.value == slot)
            raise error(f"a mask or score function, {place}: {wrong}")

    def text(self, sizes: Sizes) -> str:
        """UserFunction as C++ (kernels/common/functions.cuh), for indices below `sizes`, (B, H, Nq, Nk)."""
        expressions, tables = self._expressions, tuple(layout.table_of(x) for x in self.tensors)
        key = expressions.structure, self._values, sizes, tables
        found = _texts.get(key)
        if found is None:
            found = self._text_by_facts(sizes, tables)
            _texts.keep(key, found)
        return found

    def _text_by_facts(self, sizes: Sizes, tables: tuple[layout.Table, ...]) -> str:
        """The text for all sizes and values of which the same is known."""
        expressions = self._expressions
        values = dict(zip(expressions.numbers, self._values, strict=True))
        dtypes = [x.dtype for x in self.tensors]
        flags = flags_of(expressions.nodes, values, sizes, [table.shape for table in tables], dtypes)
        key = expressions.structure, flags, tuple((x.element, x.dense, x.wide) for x in tables)
        found = _texts.get(key)
        if found is None:
            facts = Facts(expressions.nodes, flags)
            found = printing.text(expressions.mask, expressions.score, expressions.numbers, tables, facts)
            _texts.keep(key, found)
        return found

    def arguments(self) -> ctypes.Structure:
        """The kernel's parameter of type UserFunction, with the addresses and numbers of now."""
        return layout.arguments(self.tensors, self._expressions.numbers, self._values)

    def seen(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The mask at indices that broadcast: bools of their common shape."""
        shape = np.broadcast_shapes(b.shape, h.shape, q.shape, k.shape)
        if self.mask is None:
            return torch.ones((), dtype=torch.bool, device=q.device).expand(shape)
        return evaluate(self.mask, {"b": b, "h": h, "q": q, "k": k}, self.tensors).expand(shape)

    def scored(
        self, s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        """The score of `s`, natural logits, at indices that broadcast with it: of s's dtype, by float32 or better."""
        if self.score is None:
            return s
        inputs = {"s": s, "b": b, "h": h, "q": q, "k": k}
        dtype = torch.promote_types(s.dtype, torch.float32)
        shape = np.broadcast_shapes(*(x.shape for x in inputs.values()))
        return evaluate(self.score, inputs, self.tensors, dtype).to(s.dtype).expand(shape)

    def blocks(self, B: int, H: int, Nq: int, Nk: int, block_q: int, block_k: int) -> torch.Tensor:
        """(B, H, blocks of q, blocks of k) int8, on the CPU: 0 the mask sees nothing of a block, 1 a part, 2 all of it.

        Never 0 or 2 wrongly; 1 also where interval arithmetic cannot tell. It waits for captured tensors on a card.
        """
        if self.mask is None:
            shape = B, H, -(-Nq // block_q), -(-Nk // block_k)
            return torch.full((), 2, dtype=torch.int8).expand(shape)
        return blocks.classify(self.mask, self.tensors, (B, H, Nq, Nk), block_q, block_k)
