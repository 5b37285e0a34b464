"""The parameters of a printed function: one list of fields, from which the C++ structure and its ctypes mirror come."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewise.functions.expression import Node, Number

# The C++ type of an entry; tile/types.cuh
ELEMENTS = {
    torch.bool: "uint8_t",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "int64_t",
    torch.float16: "half",
    torch.bfloat16: "bf16",
    torch.float32: "float",
    torch.float64: "double",
}


class Divisor(ctypes.Structure):
    """common/args.cuh: Divisor."""

    _fields_ = [("divisor", ctypes.c_uint32), ("multiplier", ctypes.c_uint32), ("shift", ctypes.c_uint32)]

    @classmethod
    def by(cls, divisor: int) -> Divisor:
        """What n // divisor takes for 0 <= n < 2^31: n · multiplier >> 32 + shift."""
        log = (divisor - 1).bit_length()
        return cls(divisor, -(-(1 << (31 + log)) // divisor) if divisor > 1 else 0, max(0, log - 1))


class Table(NamedTuple):
    """What the text must know of a captured tensor. dense: the dimensions of stride 1. wide: offsets take 64 bits."""

    element: str
    shape: tuple[int, ...]
    dense: tuple[bool, ...]
    wide: bool


def table_of(x: torch.Tensor) -> Table:
    shape, strides = tuple(x.shape), x.stride()
    reach = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return Table(ELEMENTS[x.dtype], shape, tuple(s == 1 for s in strides), reach * x.element_size() >= 2**31)


class Field(NamedTuple):
    name: str
    type: str
    ctype: Any


def fields(tables: Sequence[Table], numbers: Sequence[Node]) -> list[Field]:
    """Tensor n: its address t{n}, then sizes and strides. Number n: n{n}, divisor d{n}, for floats 1 / n{n} as r{n}."""
    found = [Field(f"t{n}", f"const {table.element}*", ctypes.c_void_p) for n, table in enumerate(tables)]
    for n, table in enumerate(tables):
        stride = ("int64_t", ctypes.c_int64) if table.wide else ("int", ctypes.c_int)
        found += [Field(f"t{n}_stride{d}", *stride) for d in range(len(table.shape))]
        found += [Field(f"t{n}_size{d}", "int", ctypes.c_int) for d in range(len(table.shape))]
    for n, number in enumerate(numbers):
        if number.role == "divisor":
            found.append(Field(f"d{n}", "Divisor", Divisor))
        else:
            found.append(Field(f"n{n}", number.kind, ctypes.c_float if number.kind == "float" else ctypes.c_int))
        if number.role == "factor":
            found.append(Field(f"r{n}", "float", ctypes.c_float))
    return found or [Field("unused", "int", ctypes.c_int)]


@functools.lru_cache(maxsize=256)
def _structure(layout: tuple[Field, ...]) -> type[ctypes.Structure]:
    return type("UserFunction", (ctypes.Structure,), {"_fields_": [(f.name, f.ctype) for f in layout]})


def arguments(tensors: Sequence[torch.Tensor], numbers: Sequence[Node], given: Sequence[Number]) -> ctypes.Structure:
    """The structure with its values. given: those of the numbers."""
    tables = [table_of(x) for x in tensors]
    values: list[Any] = [x.data_ptr() for x in tensors]
    for x in tensors:
        values += [*x.stride(), *x.shape]
    for number, value in zip(numbers, given, strict=True):
        values.append(Divisor.by(int(value)) if number.role == "divisor" else value)
        if number.role == "factor":
            values.append(_reciprocal(float(value)))
    return _structure(tuple(fields(tables, numbers)))(*(values or [0]))


def _reciprocal(x: float) -> float:
    return 1.0 / x if x else float("inf") if str(x) == "0.0" else float("-inf")
