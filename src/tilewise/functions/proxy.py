"""What a function is called with to be traced: a stand-in for one number, whose operations write nodes down.

It answers to operators, to torch's functions and to a tensor's methods. What cannot be written down raises
`Untraceable`, a TypeError that names the line of the user's function and what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from tilewise.functions.expression import COMPARISONS, DTYPES, FUNCTIONS, Node
from tilewise.functions.graph import Graph
from tilewise.functions.places import NoAttribute, refuse
from tilewise.functions.slots import Slot, Steered, Value

_AT_ONCE = "the function runs for all queries and keys at once, so "
_NO_TRUTH = (
    _AT_ONCE
    + "none of its values is true or false by itself: write & | ~ for `and`, `or` and `not`, torch.where(c, x, y) "
    "for `if`, torch.minimum and torch.maximum for min() and max(), (0 <= k) & (k < q) for 0 <= k < q"
)
_NO_NUMBER = (
    _AT_ONCE + "its values are no Python numbers: write x.int() for int(x), x.float() for float(x), torch.exp(x) for "
    "math.exp(x), no range() of a value; and look things up in tensors, not in lists or arrays"
)
_NO_SEQUENCE = _AT_ONCE + "each of its values is one number, which has no parts to iterate over or to index"
_NO_CHANGE = "a function must not change a tensor; compute a new value instead"
_RANDOM = ("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "dropout")


class Proxy(Value):
    """One number of the function, not known yet."""

    __slots__ = ("_graph", "_node")
    __array_ufunc__ = None  # numpy's numbers leave operators to us
    __hash__ = object.__hash__

    def __init__(self, graph: Graph, node: Node) -> None:
        self._graph, self._node = graph, node

    def __bool__(self) -> NoReturn:
        raise refuse(_NO_TRUTH)

    def _no_number(self, *_: Any) -> NoReturn:
        raise refuse(_NO_NUMBER)

    __index__ = __int__ = __float__ = __complex__ = __round__ = __array__ = __dlpack__ = _no_number

    def _no_sequence(self, *_: Any) -> NoReturn:
        raise refuse(_NO_SEQUENCE)

    __iter__ = __len__ = __getitem__ = __contains__ = _no_sequence

    def __setitem__(self, *_: Any) -> NoReturn:
        raise refuse(_NO_CHANGE)

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return lambda *args, **kwargs: _applied(METHODS[name], self._graph, (self, *args), kwargs)
        if _changes(name, None):
            raise refuse(_NO_CHANGE)
        raise NoAttribute(str(refuse(f".{name} is not known; {_known()}")))

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    @property
    def dtype(self) -> torch.dtype:
        return {"bool": torch.bool, "int": torch.int32, "float": torch.float32}[self._node.kind]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")  # where a number lies that is made beside it

    shape = torch.Size(())
    ndim = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        graph = next(x._graph for x in _flat((args, kwargs or {})) if isinstance(x, (Proxy, Row)))
        name = getattr(function, "__name__", str(function))
        if name == "__getitem__":
            return _lookup(graph, *args)
        if _changes(name, kwargs):
            raise refuse(_NO_CHANGE)
        method = METHODS.get(name.strip("_"))
        if function is torch.where:
            method = _torch_where
        if method is None:
            raise refuse(f"torch's {name} is not known; {_known()}")
        return _applied(method, graph, args, kwargs or {})


class Row:
    """A captured tensor with its first indices given: t[h] of t[h][k]."""

    def __init__(self, graph: Graph, tensor: torch.Tensor, index: tuple[Any, ...]) -> None:
        self._graph, self._tensor, self._index = graph, tensor, index

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        with torch._C.DisableTorchFunction():  # it is no look into the tensor
            return _lookup(self._graph, self._tensor, (*self._index, *more))

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape[len(self._index) :]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> NoReturn:
        raise refuse(_NO_SEQUENCE)

    __torch_function__ = Proxy.__torch_function__


def _lookup(graph: Graph, tensor: Any, index: Any) -> Any:
    if isinstance(tensor, Row):
        return tensor[index]
    index = index if isinstance(index, tuple) else (index,)
    if any(type(i) is Slot for i in index):  # a negative one counts from the end
        raise Steered
    if any(i is None or i is Ellipsis or isinstance(i, (slice, list, Row)) for i in index) or len(index) > tensor.dim():
        raise refuse(f"a tensor of shape {tuple(tensor.shape)} is indexed with one number per dimension")
    if len(index) < tensor.dim():
        return Row(graph, tensor, index)
    if any(isinstance(i, int) and i < 0 for i in index):  # as Python has it: from the end
        graph.looked = True
        index = tuple(i + n if isinstance(i, int) and i < 0 else i for i, n in zip(index, tensor.shape, strict=True))
    return Proxy(graph, graph.lookup(tensor, tuple(node_of(graph, i) for i in index)))


def node_of(graph: Graph, x: Any) -> Node:
    """x, which the function has computed or captured, as a node."""
    if isinstance(x, Row):
        raise refuse("a captured tensor lacks some of its indices here: index it down to one number")
    return x._node if isinstance(x, Proxy) else graph.of(x)


def _applied(method: Callable[..., Node], graph: Graph, args: Any, kwargs: Any) -> Any:
    try:
        made = method(graph, *args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # the call itself: wrong arguments
            raise refuse(f"{error}; only the forms that give one number for each query and key are known") from None
        raise
    return Proxy(graph, made) if isinstance(made, Node) else made


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, (tuple, list)):
        for y in x:
            yield from _flat(y)
    else:
        yield x


def _changes(name: str, kwargs: Any) -> bool:
    """Does this function of torch change a tensor?"""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__set__") or (kwargs or {}).get("out") is not None


class Watch(TorchFunctionMode):
    """Sees what the function does with tensors beside lookups: changes and random numbers are refused."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = list(_flat((args, kwargs or {})))
        if not any(isinstance(x, (Proxy, Row)) for x in inputs):
            name = getattr(function, "__name__", str(function))
            if _changes(name, kwargs):
                raise refuse(_NO_CHANGE)
            if name.startswith(_RANDOM):
                raise refuse("a function must give the same each time; draw random numbers once, before")
            self.graph.looked |= any(isinstance(x, torch.Tensor) for x in inputs)
        return function(*args, **(kwargs or {}))


# ---- torch's functions and a tensor's methods, by name: (graph, arguments …) -> node --------------------------------


def _kind(dtype: torch.dtype) -> str:
    if dtype in (torch.int8, torch.uint8, torch.int16) or dtype not in DTYPES:
        raise refuse(f"a conversion to {dtype} is not known; bool, int32, int64 and the floats are")
    return DTYPES[dtype]


def _unary(op: str) -> Callable[..., Node]:
    return lambda graph, x: graph.unary(op, node_of(graph, x))


def _binary(op: str) -> Callable[..., Node]:
    return lambda graph, x, other: graph.binary(op, node_of(graph, x), node_of(graph, other))


def _logical(op: str) -> Callable[..., Node]:
    return lambda graph, x, other: graph.binary(op, *(graph.to(node_of(graph, y), "bool") for y in (x, other)))


def _converted(kind: str) -> Callable[..., Node]:
    return lambda graph, x: graph.to(node_of(graph, x), kind)


def _itself(graph: Graph, x: Any, **_: Any) -> Node:
    return node_of(graph, x)


def _to(graph: Graph, x: Any, *args: Any, dtype: Any = None, **_: Any) -> Node:
    dtypes = [
        a if isinstance(a, torch.dtype) else a.dtype
        for a in (*args, dtype)
        if hasattr(a, "dtype") or isinstance(a, torch.dtype)
    ]
    return graph.to(node_of(graph, x), _kind(dtypes[0])) if dtypes else node_of(graph, x)


def _divided(graph: Graph, x: Any, other: Any, *, rounding_mode: str | None = None) -> Node:
    if rounding_mode not in (None, "floor"):
        raise refuse(f"a division with rounding_mode {rounding_mode!r}; None and 'floor' are known")
    return graph.binary("floordiv" if rounding_mode else "div", node_of(graph, x), node_of(graph, other))


def _torch_where(graph: Graph, condition: Any, x: Any, y: Any) -> Node:
    return graph.where(*(node_of(graph, a) for a in (condition, x, y)))


def _where(graph: Graph, x: Any, condition: Any, other: Any) -> Node:
    return _torch_where(graph, condition, x, other)


def _clamp(graph: Graph, x: Any, min: Any = None, max: Any = None) -> Node:
    out = node_of(graph, x)
    out = out if min is None else graph.binary("max", out, node_of(graph, min))
    return out if max is None else graph.binary("min", out, node_of(graph, max))


def _filled(value: Any = None, sized: bool = False) -> Callable[..., Node]:
    """new_ones(size), ones_like() and the like; without a value it comes after the size."""

    def made(
        graph: Graph, x: Any, *args: Any, size: Any = None, fill_value: Any = None, dtype: Any = None, **_: Any
    ) -> Node:
        given = list(args)
        if sized:
            size = size if size is not None else given.pop(0) if given else ()
            if any(n != 1 for n in _flat(tuple(size) if isinstance(size, torch.Size) else size)):
                raise refuse(f"a tensor of size {size} is made; each value of a function is one number, of size ()")
        filling = value if value is not None else fill_value if fill_value is not None else given.pop(0)
        return graph.to(graph.of(filling), _kind(dtype) if dtype is not None else node_of(graph, x).kind)

    return made


def _sign(graph: Graph, x: Any) -> Node:
    node, zero = node_of(graph, x), graph.constant(0)
    below = graph.where(graph.binary("lt", node, zero), graph.constant(-1), zero)
    return graph.to(graph.where(graph.binary("gt", node, zero), graph.constant(1), below), node.kind)


def _is_infinite(graph: Graph, x: Any) -> Node:
    return graph.binary("eq", graph.unary("abs", graph.to(node_of(graph, x), "float")), graph.constant(float("inf")))


def _methods() -> dict[str, Callable[..., Any]]:
    binary = {name: name for name in (*COMPARISONS, "add", "sub", "mul", "floordiv", "mod", "pow", "min", "max")}
    binary |= {"truediv": "div", "true_divide": "div", "and": "and", "or": "or", "xor": "xor", "remainder": "mod"}
    binary |= {"lshift": "lshift", "rshift": "rshift", "floor_divide": "floordiv", "minimum": "min", "maximum": "max"}
    binary |= {"greater_equal": "ge", "less_equal": "le", "greater": "gt", "less": "lt", "not_equal": "ne"}
    binary |= {"multiply": "mul", "subtract": "sub"}
    binary |= {"bitwise_left_shift": "lshift", "bitwise_right_shift": "rshift"}
    binary |= {f"bitwise_{op}": op for op in ("and", "or", "xor")}
    unary = {op: op for op in FUNCTIONS} | {
        "neg": "neg",
        "negative": "neg",
        "abs": "abs",
        "absolute": "abs",
        "fix": "trunc",
    }
    unary |= {"invert": "not", "bitwise_not": "not", "special_expit": "sigmoid"}
    names: dict[str, Callable[..., Any]] = {name: _binary(op) for name, op in binary.items()}
    names |= {name: _unary(op) for name, op in unary.items()}
    names |= {f"logical_{op}": _logical(op) for op in ("and", "or", "xor")}
    names |= {name: _converted("int") for name in ("int", "long")} | {"bool": _converted("bool")}
    names |= {name: _converted("float") for name in ("float", "double", "half", "bfloat16")}
    names |= dict.fromkeys(("clone", "detach", "contiguous", "cpu", "cuda", "pos", "positive"), _itself)
    names |= {"new_ones": _filled(1, True), "new_zeros": _filled(0, True), "new_full": _filled(None, True)}
    names |= {"ones_like": _filled(1), "zeros_like": _filled(0), "full_like": _filled()}
    names |= {"clamp": _clamp, "clip": _clamp, "clamp_min": lambda g, x, min: _clamp(g, x, min)}
    names |= {
        "clamp_max": lambda g, x, max: _clamp(g, x, None, max),
        "where": _where,
        "div": _divided,
        "divide": _divided,
    }
    names |= {"to": _to, "type": _to, "type_as": _to, "sign": _sign, "isinf": _is_infinite}
    names |= {"logical_not": lambda g, x: g.unary("not", g.to(node_of(g, x), "bool"))}
    names |= {"square": lambda g, x: g.binary("mul", node_of(g, x), node_of(g, x))}
    names |= {"reciprocal": lambda g, x: g.binary("div", g.constant(1.0), node_of(g, x))}
    names |= {"relu": lambda g, x, inplace=False: g.binary("max", node_of(g, x), g.constant(0))}
    names |= {"isnan": lambda g, x: g.binary("ne", node_of(g, x), node_of(g, x))}
    names |= {"rsub": lambda g, x, other: g.binary("sub", node_of(g, other), node_of(g, x))}
    names |= {"dim": lambda g, x: 0, "numel": lambda g, x: 1, "size": lambda g, x: torch.Size(())}
    return names


METHODS = _methods()


def _known() -> str:
    return "known are " + ", ".join(sorted(METHODS))


def _operator(name: str, reflected: bool = False) -> Callable[[Proxy, Any], Any]:
    method = METHODS[name]

    def apply(x: Proxy, y: Any) -> Any:
        return Proxy(x._graph, method(x._graph, *((y, x) if reflected else (x, y))))

    return apply


for _name in (
    *COMPARISONS,
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
):
    setattr(Proxy, f"__{_name}__", _operator(_name))
    if _name not in COMPARISONS:
        setattr(Proxy, f"__r{_name}__", _operator(_name, reflected=True))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Proxy, f"__{_name}__", lambda x, _method=METHODS[_name]: Proxy(x._graph, _method(x._graph, x)))
