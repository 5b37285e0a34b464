"""The emulator: a kernel's source, built with a C++ compiler and run on CPU memory.

What it promises and how it works stands in runtime.h. builder.py compiles kernels and the runtime they share,
launcher.py runs them and reads their reports.
"""

from tilewise.emulator.builder import EmulatorError, build, compiler
from tilewise.emulator.launcher import Counters, TensorMap, launch, tensor_map, watching_races

__all__ = ["Counters", "EmulatorError", "TensorMap", "build", "compiler", "launch", "tensor_map", "watching_races"]
