"""`Function`: a traced mask and score with what they capture, and all that is done with them."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from tilewise.functions import intervals, layout, printing
from tilewise.functions.evaluation import evaluate
from tilewise.functions.expression import INDICES, Node, in_order

Sizes = tuple[int, int, int, int]  # of b, h, q and k
Value = TypeVar("Value")


class Recent(Generic[Value]):
    """A dictionary of the last `limit` values that were asked for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable) -> Value | None:
        value = self._values.get(key)
        if value is not None:
            try:
                self._values.move_to_end(key)
            except KeyError:  # another thread has just dropped it
                pass
        return value

    def keep(self, key: Hashable, value: Value) -> None:
        self._values[key] = value
        while len(self._values) > self._limit:
            self._values.popitem(last=False)

    def forget(self, key: Hashable) -> None:
        self._values.pop(key, None)


_texts: Recent[str] = Recent(1024)
_lives: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
_next_life = itertools.count()


def _life(x: torch.Tensor) -> int:
    """A number that this tensor has and no other one ever, not even one that is given its address."""
    at = id(x)
    known = _lives.get(at)
    if known is not None and known[0]() is x:
        return known[1]

    def forget(dead: weakref.ref[torch.Tensor]) -> None:
        if at in _lives and _lives[at][0] is dead:
            del _lives[at]

    life = next(_next_life)
    _lives[at] = weakref.ref(x, forget), life
    return life


def version(x: torch.Tensor) -> Hashable:
    """Changes when the tensor's content does; one that is not counted, as inference tensors' is not, never stays."""
    try:
        return x._version
    except RuntimeError:
        return object()


@dataclass(frozen=True, eq=False)
class Expressions:
    """What was traced. structure: the text of both expressions without the numbers, equal for equal code."""

    mask: Node | None
    score: Node | None
    numbers: tuple[Node, ...]
    values: tuple[Any, ...]
    structure: str
    uses: str

    @classmethod
    def of(cls, mask: Node | None, score: Node | None) -> Expressions:
        nodes = in_order(*(root for root in (mask, score) if root is not None))
        numbers = tuple(node for node in nodes if node.op == "number")
        at = {node: n for n, node in enumerate(nodes)}
        lines = []
        for node in nodes:
            value = node.value if node.op in ("literal", "lookup") else ""
            lines.append(f"{node.kind} {node.op}{value} {node.role} {' '.join(str(at[a]) for a in node.args)}")
        results = [str(at.get(root)) if root else "none" for root in (mask, score)]  # type: ignore[arg-type]
        uses = "".join(name for name in INDICES if mask is not None and name in mask.uses)
        return cls(mask, score, numbers, tuple(n.value for n in numbers), "\n".join([*lines, *results]), uses)


class Function:
    """A mask, a score or both: traced once, with the tensors and numbers of now.

    mask, score: the expressions, None if there is none. tensors: what they look up. uses: which of "bhqk" the mask depends on.
    """

    __slots__ = ("_expressions", "tensors")

    def __init__(self, expressions: Expressions, tensors: tuple[torch.Tensor, ...]) -> None:
        self._expressions, self.tensors = expressions, tensors

    @property
    def mask(self) -> Node | None:
        return self._expressions.mask

    @property
    def score(self) -> Node | None:
        return self._expressions.score

    @property
    def uses(self) -> str:
        return self._expressions.uses

    @property
    def key(self) -> Hashable:
        """Equal only for the same expressions over the same numbers and tensors, none of which has been written to since."""
        tensors = tuple(
            (_life(x), version(x), x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in self.tensors
        )
        return self._expressions.structure, self._expressions.values, tensors

    def check(self, device: torch.device) -> None:
        """ValueError if a captured tensor cannot be read by a kernel on `device`."""
        for slot, x in enumerate(self.tensors):
            if x.device != device:
                wrong = (
                    f"a captured tensor must be on {device} like q, got {x.device}; move it there once, before the call"
                )
            elif not x.numel():
                wrong = f"a captured tensor must have entries, got shape {tuple(x.shape)}"
            elif x.requires_grad and torch.is_grad_enabled():
                wrong = "a captured tensor requires grad, and functions have no gradients; give x.detach(), or run under torch.no_grad()"
            else:
                continue
            roots = [root for root in (self.mask, self.score) if root is not None]
            place = next(n.place for n in in_order(*roots) if n.op == "lookup" and n.value == slot)
            raise ValueError(f"a mask or score function, {place}: {wrong}")

    def text(self, sizes: Sizes) -> str:
        """UserFunction as C++, right for indices below `sizes`, (B, H, Nq, Nk)."""
        tables = tuple(layout.table_of(x) for x in self.tensors)
        key = self._expressions.structure, self._expressions.values, sizes, tables
        found = _texts.get(key)
        if found is None:
            e = self._expressions
            found = printing.text(e.mask, e.score, e.numbers, tables, self._ranges(sizes))
            _texts.keep(key, found)
        return found

    def _ranges(self, sizes: Sizes) -> dict[Node, tuple[float, float]]:
        """Of every node, whatever the tensors hold."""
        inputs = {
            name: (np.float64(0), np.float64(max(size, 1) - 1)) for name, size in zip(INDICES, sizes, strict=True)
        }
        found: dict[Node, tuple[float, float]] = {}
        for root in (self.mask, self.score):
            if root is not None:
                read = lambda slot, _: intervals.any_of(self.tensors[slot].dtype)  # noqa: E731
                found |= {n: (float(r[0]), float(r[1])) for n, r in intervals.ranges(root, inputs, read).items()}
        return found

    def arguments(self) -> ctypes.Structure:
        """The kernel's parameter UserFunction, with the addresses and numbers of now."""
        return layout.arguments(self.tensors, self._expressions.numbers)

    def seen(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The mask at indices that broadcast, as bools of their common shape."""
        shape = torch.broadcast_shapes(b.shape, h.shape, q.shape, k.shape)
        if self.mask is None:
            return torch.ones((), dtype=torch.bool, device=q.device).expand(shape)
        return evaluate(self.mask, {"b": b, "h": h, "q": q, "k": k}, self.tensors).expand(shape)

    def scored(
        self, s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        """The score of `s`, natural logits, at indices that broadcast with it; of s's dtype, and computed in it or float32."""
        if self.score is None:
            return s
        inputs = {"s": s, "b": b, "h": h, "q": q, "k": k}
        dtype = torch.promote_types(s.dtype, torch.float32)
        shape = torch.broadcast_shapes(*(x.shape for x in inputs.values()))
        return evaluate(self.score, inputs, self.tensors, dtype).to(s.dtype).expand(shape)
