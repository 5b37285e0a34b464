"""`of`: a user's mask and score as a `Function`, traced when their code or what they capture is new.

What a function does is told by its code and by what it reaches: closure, defaults, globals by name (reached.py). A
tensor counts by its dtype and number of dimensions only, since a lookup is written down without what it finds; but a
function that looked into a tensor otherwise, at its shape or at what it holds, is traced again for another tensor. One
that reaches anything whose value cannot be told, as an object, is traced at every call. A number in a function's own
closure counts by its type only, where a trace with it left open shows that its value does not matter (slots.py).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewise.functions.expression import INDICES, INPUTS, Node, Number
from tilewise.functions.function import Expressions, Function, Recent, version
from tilewise.functions.graph import Graph
from tilewise.functions.places import NOWHERE, Place, Untraceable, raised_at
from tilewise.functions.proxy import Proxy, Watch, node_of
from tilewise.functions.reached import Reached, Unknown, code_of, side_effect
from tilewise.functions.slots import Recipe, Special, alike, can_open, opened, value_of

UserCode = Callable[..., Any]
_NO_SIDE_EFFECTS = "it is called when it is traced only, so it must do nothing but compute"


@dataclass(frozen=True, eq=False)
class Trace:
    """What a pair of functions became. tensors: by number, one that the functions made or a place among those reached.

    looked: into tensors, otherwise than by lookups.
    """

    expressions: Expressions
    tensors: tuple[int | torch.Tensor, ...]
    looked: bool

    def bound(self, reached: Sequence[torch.Tensor], values: tuple[Number, ...] | None = None) -> Function:
        """values: of other numbers than it was traced with."""
        tensors = tuple(reached[x] if isinstance(x, int) else x for x in self.tensors)
        return Function(self.expressions, tensors, values)


@dataclass(frozen=True, eq=False)
class Looked:
    """A trace that holds for these tensors alone."""

    trace: Trace
    tensors: tuple[weakref.ref[torch.Tensor], ...]


@dataclass(frozen=True, eq=False)
class Open:
    """A trace that holds for other numbers too, or None if there is no such trace.

    recipes: how its numbers come from those in the closures; None for one of the code's own.
    """

    trace: Trace | None
    recipes: tuple[Recipe | None, ...] = ()

    def bound(self, reached: Reached) -> Function | None:
        """With other numbers; None if the trace does not hold for these."""
        if self.trace is None:
            return None
        values: list[Number] = []
        for recipe, before in zip(self.recipes, self.trace.expressions.values, strict=True):
            if recipe is None:
                values.append(before)
                continue
            try:
                value = value_of(recipe, reached.numbers)
            except ArithmeticError:
                return None
            if not alike(value, before):
                return None
            values.append(value)
        return self.trace.bound(reached.tensors, tuple(values))


_traces: Recent[Trace] = Recent(256)
_opens: Recent[Open] = Recent(256)
_looked: Recent[Looked] = Recent(16)
_sound: Recent[bool] = Recent(1024)  # code that was found to give the same twice


def of(mask: UserCode | None, score: UserCode | None) -> Function:
    """mask(b, h, q, k) -> bool and score(s, b, h, q, k) -> s, either of them None, as one value."""
    try:
        reached = Reached(mask, score)
    except Unknown:
        return _traced(mask, score, ()).bound(())
    trace = _traces.get(reached.key)
    if trace is not None and trace.looked:
        trace = _found(reached)
    if trace is None:
        known = _opens.get(reached.form) if reached.numbers else None
        if known is not None and (function := known.bound(reached)) is not None:
            return function
        trace = _traced(mask, score, reached.tensors)
        _check_repeatable(mask, score, reached, trace)
        if reached.numbers and known is None:
            _open(mask, score, reached, trace)
        # What is kept for any tensors holds none that were made from those of now.
        _traces.keep(reached.key, replace(trace, tensors=()) if trace.looked else trace)
        if trace.looked:
            _looked.keep(_looked_key(reached), Looked(trace, tuple(weakref.ref(x) for x in reached.tensors)))
    return trace.bound(reached.tensors)


def _open(mask: UserCode | None, score: UserCode | None, reached: Reached, trace: Trace) -> None:
    """Tries the functions with their numbers left open, and keeps what comes of it."""
    made = Open(None)
    if not (trace.looked or reached.again) and can_open(reached.functions, reached.named):
        graph = Graph()
        try:
            expressions = _expressions(graph, *opened(mask, score))
        except Untraceable as error:
            if isinstance(error.__cause__, Special):  # another number may do
                return
        else:
            found = expressions.structure, repr(expressions.values)
            if not graph.looked and found == (trace.expressions.structure, repr(trace.expressions.values)):
                made = Open(trace, tuple(graph.recipes.get(n) for n in expressions.numbers))
    _opens.keep(reached.form, made)


def _looked_key(reached: Reached) -> Hashable:
    return reached.key, tuple((id(x), version(x)) for x in reached.tensors)


def _found(reached: Reached) -> Trace | None:
    """The trace made for these very tensors."""
    known = _looked.get(_looked_key(reached))
    if known is None or any(ref() is not x for ref, x in zip(known.tensors, reached.tensors, strict=True)):
        return None
    return known.trace


def _check_repeatable(mask: UserCode | None, score: UserCode | None, reached: Reached, trace: Trace) -> None:
    """The first time a code is seen, it must give the same again and leave what it reaches as it was."""
    functions = [f for f in (mask, score) if f is not None]
    code = tuple(code_of(f) for f in functions)
    if _sound.get(code):
        return
    before, again = trace.expressions, _traced(mask, score, reached.tensors).expressions
    place = _defined_at(functions[0])
    if Reached(mask, score).key != reached.key:
        raise Untraceable(f"a mask or score function, {place}: it changes what it captures; {_NO_SIDE_EFFECTS}")
    if (again.structure, repr(again.values)) != (before.structure, repr(before.values)):
        changed = (x.place for x, y in zip(before.nodes, again.nodes, strict=False) if repr(x.value) != repr(y.value))
        raise Untraceable(
            f"a mask or score function, {next(changed, place)}: it does something else each time; {_NO_SIDE_EFFECTS}"
        )
    _sound.keep(code, True)


def _traced(mask: UserCode | None, score: UserCode | None, reached: Sequence[torch.Tensor]) -> Trace:
    graph = Graph()
    expressions = _expressions(graph, mask, score)
    places = {id(x): n for n, x in enumerate(reached)}
    return Trace(expressions, tuple(places.get(id(x), x) for x in graph.tensors), graph.looked)


def _expressions(graph: Graph, mask: UserCode | None, score: UserCode | None) -> Expressions:
    return Expressions.of(
        None if mask is None else _run("mask", mask, graph, INDICES, "bool"),
        None if score is None else _run("score", score, graph, INPUTS, "float"),
    )


def _run(name: str, function: UserCode, graph: Graph, inputs: tuple[str, ...], kind: str) -> Node:
    """Call the function once on proxies."""
    if not callable(function):
        raise TypeError(f"{name} must be a function of ({', '.join(inputs)}), got {type(function).__name__}")
    place = _defined_at(function)
    _check_parameters(name, function, inputs, place)
    code = code_of(function)
    if code is not None and (changed := side_effect(code)) is not None:
        raise Untraceable(f"a {name} function, {changed}: it changes what is outside of it; {_NO_SIDE_EFFECTS}")
    try:
        with Watch(graph):
            result = function(*(Proxy(graph, graph.input(x)) for x in inputs))
    except Untraceable:
        raise
    except Exception as error:
        at = raised_at(error.__traceback__)
        raise Untraceable(f"a {name} function, {at}: to trace it raised {type(error).__name__}: {error}") from error
    return _checked(name, result, graph, kind, place)


def _check_parameters(name: str, function: UserCode, inputs: tuple[str, ...], place: Place) -> None:
    try:
        inspect.signature(function).bind(*inputs)
    except TypeError as error:
        raise TypeError(f"{name} must take {len(inputs)} arguments ({', '.join(inputs)}), {place}: {error}") from None
    except ValueError:  # a function in C that does not tell
        return


def _checked(name: str, result: Any, graph: Graph, kind: str, place: Place) -> Node:
    try:
        node = node_of(graph, result)
    except Untraceable:
        wrong = f"one {kind} for each query and key, got {result!r}"
        raise Untraceable(f"a {name} function, {place}: it must return {wrong}") from None
    if kind == "bool" and node.kind != "bool":
        wrong = f"a bool, got {node.kind}; compare it, as with != 0"
        raise Untraceable(f"a {name} function, {place}: it must return {wrong}")
    if kind == "float" and node.kind == "bool":
        wrong = "a float, got a bool; write torch.where(condition, s, float('-inf')), or give it as mask"
        raise Untraceable(f"a {name} function, {place}: it must return {wrong}")
    return graph.to(node, kind)


def _defined_at(function: UserCode) -> Place:
    code = code_of(function)
    return NOWHERE if code is None else Place(code.co_filename, code.co_firstlineno)
