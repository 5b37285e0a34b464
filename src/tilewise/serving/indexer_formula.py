"""What an indexer makes of a cache's keys, written down in place of being computed.

The indexer is the model's own module. It is called with stand-ins for the keys of the cache and for the mask, which
answer to what its formula is made of, in the orders in which transformers writes it:

    scores = relu(q.float() @ keys.transpose(-1, -2).float().unsqueeze(1) * scale)  (batch, tokens, heads, keys)
    chosen = ((weights.unsqueeze(-2) @ scores).squeeze(-2) + mask).topk(k).indices  (batch, tokens, k)

and comes back with a `Choice`, which holds what tilewise.choose_keys takes. Shapes are compared axis by axis, and what
else is done with a stand-in raises `NotFollowed`: no other formula is taken for this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch

AS_MULTIPLIED = ("batch", "one", "dim", "keys")  # keys under queries (batch, tokens, heads, dim)


class NotFollowed(Exception):
    """Why torch has to compute an indexer's scores."""


def choice_of(forward: Callable[[], Any]) -> Choice:
    """What an indexer's forward gives when it is called with stand-ins."""
    try:
        choice = forward()
    except (NotFollowed, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Code that takes no stand-in may raise anything. What is wrong beside that, torch's way raises again.
        raise NotFollowed(f"without tensors of keys and mask its forward raises {error!r}") from error
    if not isinstance(choice, Choice):
        raise NotFollowed(f"a forward that returns a {type(choice).__name__} is not understood")
    return choice


@dataclass(frozen=True, eq=False)
class StandIn:
    """No tensor, but asked as one is. what: it stands for."""

    what: ClassVar[str]
    shape: torch.Size
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A function of torch: a product asks its right factor, others their first argument."""
        name = function.__name__
        product = name == "matmul" and len(args) == 2
        one = args[-1 if product else 0] if args else None
        if not isinstance(one, StandIn):
            raise NotFollowed(f"{name} with {cls.what} is not understood")
        if product:
            return one.multiplied_by(args[0])
        return getattr(one, name)(*args[1:], **(kwargs or {}))

    def multiplied_by(self, left: Any) -> StandIn:
        """left @ self."""
        raise NotFollowed(f"a product with {self.what} is not understood")

    def float(self) -> StandIn:
        return replace(self, dtype=torch.float32)

    def to(self, dtype: Any) -> StandIn:
        if dtype is not torch.float32:
            raise NotFollowed(f"{dtype} of {self.what} is not understood")
        return self.float()

    def __getattr__(self, name: str) -> NoReturn:
        raise NotFollowed(f"{name} of {self.what} is not understood")

    def _no_value(self, *_: Any) -> NoReturn:
        raise NotFollowed(f"asking for values of {self.what}, or changing them in place, is not understood")

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __contains__ = _no_value
    __getitem__ = __setitem__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _no_value
    __iadd__ = __isub__ = __imul__ = __itruediv__ = _no_value  # another name of it would be changed, too
    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class Keys(StandIn):
    """Of all tokens of some sequences. axes: what the shape counts. kept: their dtype in the cache. look: at values of
    the queries, for which a card has to be waited for."""

    what = "the keys"
    axes: tuple[str, ...]
    kept: torch.dtype
    look: bool

    @classmethod
    def of(cls, batch: int, keys: int, dim: int, dtype: torch.dtype, device: torch.device, look: bool = True) -> Keys:
        return cls(torch.Size((batch, keys, dim)), device, dtype, ("batch", "keys", "dim"), dtype, look)

    def transpose(self, dim0: int, dim1: int) -> Keys:
        order = list(range(len(self.axes)))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self._with([(self.axes[n], self.shape[n]) for n in order])

    def unsqueeze(self, dim: int) -> Keys:
        sized = list(zip(self.axes, self.shape, strict=True))
        sized.insert(dim % (len(sized) + 1), ("one", 1))
        return self._with(sized)

    def _with(self, sized: Sequence[tuple[str, int]]) -> Keys:
        return replace(self, axes=tuple(axis for axis, _ in sized), shape=torch.Size(size for _, size in sized))

    def multiplied_by(self, left: Any) -> Products:
        """By queries (batch, tokens, heads, dim), in float32 that the keys' own dtype holds."""
        if self.axes != AS_MULTIPLIED:
            raise NotFollowed(f"a product with keys ({', '.join(self.axes)}) is not understood")
        q = _factor(left, self)
        if q.ndim != 4 or q.shape[0] != self.shape[0] or q.shape[-1] != self.shape[2]:
            raise NotFollowed(f"multiplying keys {tuple(self.shape)} by {tuple(q.shape)} is not understood")
        exact = q.to(self.kept)
        if self.kept != torch.float32 and self.look and not torch.equal(exact.float(), q):
            raise NotFollowed(f"multiplying the keys, in {self.kept}, by queries of more bits is not understood")
        return Products(torch.Size((*q.shape[:-1], self.shape[-1])), self.device, torch.float32, exact)


@dataclass(frozen=True, eq=False)
class Products(StandIn):
    """q · keys · scale, (batch, tokens, heads, keys); positive: what is left of them after relu."""

    what = "the products of queries and keys"
    q: torch.Tensor
    scale: float = 1.0
    positive: bool = False

    def __mul__(self, scale: Any) -> Products:
        if not isinstance(scale, (int, float)):
            raise NotFollowed(f"a {type(scale).__name__} times {self.what} is not understood")
        if not 0 <= scale < math.inf:  # relu(s x) = s relu(x) for these alone
            raise NotFollowed(f"{scale} times {self.what} is not understood")
        return replace(self, scale=self.scale * scale)

    mul = __rmul__ = __mul__

    def relu(self, inplace: bool = False) -> Products:
        if inplace:
            self._no_value()
        return replace(self, positive=True)

    def multiplied_by(self, left: Any) -> Scores:
        """By weights (batch, tokens, 1, heads)."""
        weights, (batch, tokens, heads, keys) = _factor(left, self), self.shape
        if not self.positive:
            raise NotFollowed(f"weighing {self.what} without relu is not understood")
        if weights.shape != (batch, tokens, 1, heads):
            raise NotFollowed(f"weighing products {tuple(self.shape)} by {tuple(weights.shape)} is not understood")
        weights = weights.squeeze(-2)
        scaled = weights if self.scale == 1 else weights * self.scale
        return Scores(torch.Size((batch, tokens, 1, keys)), self.device, torch.float32, self.q, scaled)


@dataclass(frozen=True, eq=False)
class Mask(StandIn):
    """(batch, tokens, keys) float32: −inf where a token does not see a key, 0 elsewhere."""

    what = "the mask"

    @classmethod
    def of(cls, batch: int, tokens: int, keys: int, device: torch.device) -> Mask:
        return cls(torch.Size((batch, tokens, keys)), device, torch.float32)

    def __add__(self, other: Any) -> Scores:
        if not isinstance(other, Scores):
            self._no_value()
        return other + self

    add = __add__


@dataclass(frozen=True, eq=False)
class Scores(StandIn):
    """The weighted sums of the heads' products, (batch, tokens, 1, keys), then (batch, tokens, keys). weights: (batch,
    tokens, heads), with the scale. masked: by the mask."""

    what = "the scores"
    q: torch.Tensor
    weights: torch.Tensor
    masked: bool = False

    def squeeze(self, dim: int) -> Scores:
        if len(self.shape) != 4 or dim not in (-2, 2):
            raise NotFollowed(f"squeeze({dim}) of scores {tuple(self.shape)} is not understood")
        return replace(self, shape=torch.Size((*self.shape[:2], self.shape[-1])))

    def __add__(self, mask: Any) -> Scores:
        if not isinstance(mask, Mask) or self.masked or mask.shape != self.shape:
            raise NotFollowed(f"adding something else than the mask to scores {tuple(self.shape)} is not understood")
        return replace(self, masked=True)

    add = __add__

    def topk(self, k: int, dim: int = -1) -> Best:
        if not self.masked or dim not in (-1, 2) or not 0 < k <= self.shape[-1]:
            seen = "with" if self.masked else "without"
            raise NotFollowed(f"topk({k}, dim={dim}) of scores {tuple(self.shape)} {seen} the mask is not understood")
        shape = torch.Size((*self.shape[:2], k))
        choice = Choice(shape, self.device, torch.int64, self.q.flatten(0, 1), self.weights.flatten(0, 1))
        return Best(shape, self.device, torch.float32, choice)


@dataclass(frozen=True, eq=False)
class Best(StandIn):
    """What topk gives."""

    what = "the best scores"
    indices: Choice


@dataclass(frozen=True, eq=False)
class Choice(StandIn):
    """The keys that are chosen, (batch, tokens, k). q: (batch · tokens, heads, dim) in the keys' dtype in the cache;
    weights: (batch · tokens, heads) float32."""

    what = "the chosen keys"
    q: torch.Tensor
    weights: torch.Tensor

    def to(self, dtype: Any) -> Choice:
        if dtype not in (torch.int32, torch.int64):
            raise NotFollowed(f"{dtype} of {self.what} is not understood")
        return replace(self, dtype=dtype)

    def int(self) -> Choice:
        return self.to(torch.int32)

    def float(self) -> NoReturn:
        self._no_value()


def _factor(left: Any, right: StandIn) -> torch.Tensor:
    """The left factor of a product, which has to be one of float32."""
    if not isinstance(left, torch.Tensor) or {left.dtype, right.dtype} != {torch.float32}:
        kinds = " and ".join(str(getattr(x, "dtype", type(x).__name__)) for x in (left, right))
        raise NotFollowed(f"a product of {kinds} with {right.what} is not understood")
    return left
