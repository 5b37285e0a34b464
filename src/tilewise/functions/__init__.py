"""Mask and score functions that users write, traced into one small form of expression.

expression.py: the form. proxy.py and graph.py write it down, tracing.py and reached.py say when, slots.py for which
numbers at once; places.py knows the lines of the user's code for errors. function.py: what is done with it: printed as
CUDA C++ (printing.py, sides.py, layout.py; facts.py says what of), evaluated by torch (evaluation.py), told block by
block (intervals.py, blocks.py), and the derivative of a score as an expression of the same form (derivative.py).
"""

from tilewise.functions.function import Function
from tilewise.functions.places import Untraceable
from tilewise.functions.tracing import of

__all__ = ["Function", "Untraceable", "of"]
