"""An expression over index tensors, by torch: what a kernel computes, on any device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import torch

from tilewise.functions.expression import (
    COMPARISONS,
    FUNCTIONS,
    INPUTS,
    INT_MAX,
    INT_MIN,
    Node,
    in_context,
    needs_smooth,
)


def evaluate(
    root: Node, inputs: Mapping[str, torch.Tensor], tensors: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The value over inputs that broadcast, shape of what it depends on. dtype: of floats that only the score sees."""
    device = next(iter(inputs.values())).device
    values: dict[tuple[Node, bool], torch.Tensor] = {}
    for node, smooth in in_context(root, root.kind == "float"):
        args = [values[a, needs_smooth(node, smooth, a)] for a in node.args]
        wanted = {"bool": torch.bool, "int": torch.int32, "float": dtype if smooth else torch.float32}[node.kind]
        if node.op == "s":
            value = inputs["s"].to(dtype)
        elif node.op in INPUTS:
            value = inputs[node.op].to(torch.int32)
        elif node.op in ("literal", "number"):
            value = torch.full((), node.value, dtype=wanted, device=device)
        elif node.op == "lookup":
            value = _looked_up(node, tensors[int(node.value)].detach().to(device), args).to(wanted)
        else:
            value = _applied(node, args, wanted)
        values[node, smooth] = value
    return values[root, root.kind == "float"]


def _applied(node: Node, args: list[torch.Tensor], wanted: torch.dtype) -> torch.Tensor:
    if node.op in _WHOLE and node.kind == "int":
        if node.op in ("floordiv", "mod") and _debugging() and bool((args[1] == 0).any()):
            raise ZeroDivisionError(f"a mask or score function, {node.place}: // or % by 0")
        if node.op in _BY_NUMBER and node.args[1].op in ("literal", "number") and node.args[1].value > 0:
            return _BY_NUMBER[node.op](args[0], int(node.args[1].value))  # which neither traps nor asks for 64 bits
        # By 64 bits: the division of the least number by -1 must not trap.
        return _WHOLE[node.op](*(a.long() for a in args)).to(torch.int32)
    if node.op == "int" and args[0].is_floating_point():
        return _to_int(args[0])
    if node.op in ("bool", "int", "float"):
        return args[0].to(wanted)
    return _OPERATIONS[node.op](*args)


def _to_int(x: torch.Tensor) -> torch.Tensor:
    """As a card does: what is too large becomes the largest, NaN becomes 0."""
    return x.double().nan_to_num(0.0, INT_MAX, INT_MIN).clamp(INT_MIN, INT_MAX).trunc().to(torch.int32)


def _floordiv(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    zero = y == 0
    return torch.where(zero, 0, torch.div(x, torch.where(zero, 1, y), rounding_mode="floor"))


def _mod(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x - _floordiv(x, y) * y


def _lshift(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where((y >= 0) & (y < 32), x << y.clamp(0, 31), 0)


def _rshift(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x >> torch.where((y >= 0) & (y < 32), y, 31)


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """Rounded to nearest, as a card's is: torch's own, on CPUs of some makers, is off by a bit in a fifth of cases."""
    return x.double().sqrt().to(x.dtype)


_WHOLE: dict[str, Callable[..., torch.Tensor]] = {
    "floordiv": _floordiv,
    "mod": _mod,
    "pow": torch.pow,
    "lshift": _lshift,
    "rshift": _rshift,
}
_BY_NUMBER: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "floordiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "mod": torch.remainder,
}
_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in (*COMPARISONS, *FUNCTIONS)},
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "pow", "neg", "abs", "where")},
    **{name: getattr(torch, f"bitwise_{name}") for name in ("and", "or", "xor", "not")},
    "div": torch.true_divide,
    "sqrt": _sqrt,
    "min": torch.minimum,
    "max": torch.maximum,
    "floordiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "mod": torch.remainder,
}


def _looked_up(node: Node, tensor: torch.Tensor, index: list[torch.Tensor]) -> torch.Tensor:
    if _debugging():
        _check(node, tensor, index)
    return tensor[tuple(i.clamp(0, n - 1).long() for i, n in zip(index, tensor.shape, strict=True))]


def _debugging() -> bool:
    return bool(os.environ.get("TILEWISE_DEBUG"))


def _check(node: Node, tensor: torch.Tensor, index: list[torch.Tensor]) -> None:
    """In debug mode what is otherwise clamped or wrapped raises, with the line."""
    for dim, (i, n) in enumerate(zip(index, tensor.shape, strict=True)):
        first, last = (int(i.min()), int(i.max())) if i.numel() else (0, 0)
        if first < 0 or last >= n:
            reached = f"{first} … {last} in dimension {dim} of a tensor of shape {tuple(tensor.shape)}"
            raise IndexError(f"a mask or score function, {node.place}: indices {reached}")
    if tensor.dtype == torch.int64 and bool(((tensor < INT_MIN) | (tensor > INT_MAX)).any()):
        raise OverflowError(f"a mask or score function, {node.place}: integers are 32 bits, a tensor holds larger ones")
