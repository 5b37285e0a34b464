"""Mask and score functions that users write: traced once into a small expression, which is printed as CUDA C++, evaluated
by torch and told block by block by interval arithmetic.

expression.py the form; proxy.py and graph.py write it down; tracing.py decides when; function.py has what is done with
it, by printing.py, layout.py, evaluation.py and intervals.py. places.py: lines of the user's code, for errors.
"""

from tilewise.functions.function import Function
from tilewise.functions.places import Untraceable
from tilewise.functions.tracing import of

__all__ = ["Function", "Untraceable", "of"]
