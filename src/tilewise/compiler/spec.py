"""Where the kernels live, and `KernelSpec`: one kernel with its compile-time constants.

A spec is at once the cache key, the constants and the display name. The same translation unit goes to NVRTC for a card
(nvrtc.py) and to a C++ compiler for the emulator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
KERNELS_ROOT = PACKAGE / "kernels"
# Where quoted includes and a spec's source are looked for: the product's kernels, then the package, in which learn/ and
# emulator/ have sources of their own.
INCLUDE_ROOTS = (KERNELS_ROOT, PACKAGE)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)

Constant = int | bool | float | str


@dataclass(frozen=True)
class KernelSpec:
    """A kernel to be: a source file, its entry, its constants, and what a launch of it needs.

    source: path under one of INCLUDE_ROOTS. entry: the extern "C" symbol. constants: by name, a str being a C++ type
    (("Element", "bf16") becomes `using Element = bf16;`). threads and shared_bytes: of one block. product: held to no
    spills and no serialised wgmma. text: C++ that stands before the constants, whose types may be declared there.
    """

    name: str
    source: str
    entry: str
    constants: tuple[tuple[str, Constant], ...]
    threads: int
    shared_bytes: int
    product: bool = False
    text: str = ""

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.name} [{values}]" if values else self.name

    def translation_unit(self) -> str:
        """The whole source: the types, the text, the constants by name, the kernel."""
        lines = [
            '#include "tile/types.cuh"',
            *([self.text] if self.text else []),
            *(_declaration(name, value) for name, value in self.constants),
        ]
        return "\n".join([*lines, f'#include "{self.source}"', ""])


def _declaration(name: str, value: Constant) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    if isinstance(value, float):
        return f"constexpr float {name} = {value!r}f;"
    return f"using {name} = {value};"


def locate(path: str) -> Path:
    """The file that a quoted include or a spec's source names; FileNotFoundError if no root has it."""
    for root in INCLUDE_ROOTS:
        if (root / path).is_file():
            return root / path
    raise FileNotFoundError(f"{path} is in none of {', '.join(map(str, INCLUDE_ROOTS))}")


def headers(unit: str, *, emulator: bool = True) -> dict[str, str]:
    """Every file that a translation unit includes by quotes, directly or not: path under its root -> text.

    emulator: with the emulator's own. They stand under #ifdef TILEWISE_EMULATOR, so NVRTC never asks for them.
    """
    found: dict[str, str] = {}
    waiting = _INCLUDE.findall(unit)
    while waiting:
        path = waiting.pop()
        if path not in found and (emulator or not path.startswith("emulator/")):
            found[path] = locate(path).read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(found[path])
    return found
