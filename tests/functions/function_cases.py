"""What the tests of functions share: well-known functions, and a kernel that evaluates printed ones in the emulator."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilewise import emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.functions import Function

SIZES = (2, 3, 40, 56)  # of b, h, q and k
SCALE = 0.375


class ProbeArgs(ctypes.Structure):
    """probe.cuh: ProbeArgs."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("indices", "scores", "boxes", "mask", "score", "sided", "seen")),
        *((n, ctypes.c_int) for n in ("count", "num_boxes")),
        ("scale", ctypes.c_float),
    )


class Probed(NamedTuple):
    """mask, score, sided: (functions, count). seen: (functions, boxes, 2).

    sided: the score as it is computed in blocks whose keys all lie on that side of the rows.
    """

    mask: torch.Tensor
    score: torch.Tensor
    sided: torch.Tensor
    seen: torch.Tensor


def probe_spec(texts: Sequence[str]) -> KernelSpec:
    """A kernel that evaluates each of some printed functions."""
    structures = "".join(text.replace("UserFunction", f"UserFunction{n}") for n, text in enumerate(texts))
    parameters = "".join(f", const UserFunction{n} f{n}" for n in range(len(texts)))
    calls = "".join(f"    probe(args, f{n}, {n});\n" for n in range(len(texts)))
    entry = f'extern "C" __global__ void probe_all(const ProbeArgs args{parameters}) {{\n{calls}}}\n'
    unit = f'#include "{Path(__file__).parent}/probe.cuh"\n{entry}'
    folder = Path(tempfile.gettempdir()) / "tilewise-test-functions"
    folder.mkdir(exist_ok=True)
    file = folder / f"{hashlib.sha256(unit.encode()).hexdigest()[:16]}.cu"
    if not file.exists():  # at once, since other workers may want it
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(unit)
        aside.rename(file)
    return KernelSpec("probe", str(file), "probe_all", (), 64, 0, text=structures)


def probed(
    functions: Sequence[Function], indices: torch.Tensor, scores: torch.Tensor, boxes: torch.Tensor, sizes: Any = SIZES
) -> Probed:
    """Printed functions at indices (count, 4), and their intervals over boxes (boxes, 4, 2), in the emulator."""
    spec = probe_spec([f.text(sizes) for f in functions])
    indices, boxes, count = indices.int().contiguous(), boxes.int().contiguous(), len(indices)
    mask = torch.full((len(functions), count), -1, dtype=torch.int32)
    score, sided = (torch.full((len(functions), count), torch.nan) for _ in range(2))
    seen = torch.full((len(functions), len(boxes), 2), torch.nan, dtype=torch.float64)
    memory = {"indices": indices, "scores": scores, "boxes": boxes, "mask": mask}
    memory |= {"score": score, "sided": sided, "seen": seen}
    args = ProbeArgs(*(x.data_ptr() for x in memory.values()), count, len(boxes), SCALE)
    tensors = {f"t{n}_{m}": t for n, f in enumerate(functions) for m, t in enumerate(f.tensors)}
    emulator.launch(spec, (1, 1, 1), [args, *(f.arguments() for f in functions)], memory | tensors)
    return Probed(mask.bool(), score, sided, seen)


def grid(sizes: Sequence[int] = SIZES) -> torch.Tensor:
    """Every (b, h, q, k): (count, 4)."""
    return torch.cartesian_prod(*(torch.arange(n, dtype=torch.int32) for n in sizes))


def boxes_of(sizes: Sequence[int], block_q: int, block_k: int) -> torch.Tensor:
    """The blocks that `Function.blocks` tells of, in its order: (boxes, 4, 2), first and last of each index."""
    steps = (1, 1, block_q, block_k)
    firsts = torch.cartesian_prod(*(torch.arange(0, n, step) for n, step in zip(sizes, steps, strict=True)))
    lasts = torch.minimum(firsts + torch.tensor(steps), torch.tensor(sizes)) - 1
    return torch.stack([firsts, lasts], 2)


def true_kinds(seen: torch.Tensor, sizes: Sequence[int], block_q: int, block_k: int) -> torch.Tensor:
    """What `Function.blocks` would ideally say of a mask given element by element, (B, H, Nq, Nk)."""
    rows, columns = -(-sizes[2] // block_q), -(-sizes[3] // block_k)

    def blocks(filling: bool) -> torch.Tensor:
        whole = torch.full((*sizes[:2], rows * block_q, columns * block_k), filling)
        whole[:, :, : sizes[2], : sizes[3]] = seen.reshape(*sizes)
        return whole.reshape(*sizes[:2], rows, block_q, columns, block_k)

    return blocks(False).any(5).any(3).to(torch.int8) + blocks(True).all(5).all(3).to(torch.int8)


def check_never_wrong(kinds: torch.Tensor, truth: torch.Tensor, what: Any = "") -> None:
    """A block may be called partial that is not, and no other mistake."""
    wrong = (kinds != truth) & (kinds != 1)
    assert not wrong.any(), (what, kinds[wrong].tolist(), truth[wrong].tolist())


def well_known(sizes: Sequence[int] = SIZES) -> dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]]:
    """name -> (mask, score): variants that people use, over indices below `sizes`."""
    batch, heads, nq, nk = sizes
    draw = torch.Generator().manual_seed(7)
    most = max(nq, nk)
    documents = torch.sort(torch.randint(0, 5, (most,), generator=draw)).values
    prefix = torch.randint(1, nk, (batch,), generator=draw)
    slopes = 2.0 ** -torch.arange(1, heads + 1, dtype=torch.float32)
    bias = torch.randn(heads, 2 * most - 1, generator=draw)
    opened, closed = torch.arange(most), torch.arange(most) + torch.randint(1, 9, (most,), generator=draw)
    window, cap, width, radius = 9, 5.0, 8, 2

    def neighbourhood(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q // width - k // width).abs() <= radius) & ((q % width - k % width).abs() <= radius)

    return {
        "causal": (lambda b, h, q, k: k <= q, None),
        "window": (lambda b, h, q, k: (k <= q) & (q - k < window), None),
        "prefix": (lambda b, h, q, k: (k <= q) | (k < prefix[b]), None),
        "documents": (lambda b, h, q, k: documents[q] == documents[k], None),
        "documents causal": (lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k), None),
        "dilated": (lambda b, h, q, k: (k <= q) & (q - k < 4 * window) & ((q - k) % 4 == 0), None),
        "tree": (lambda b, h, q, k: (opened[k] <= opened[q]) & (opened[q] < closed[k]), None),
        "neighbourhood": (neighbourhood, None),
        "alibi": (lambda b, h, q, k: k <= q, lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()),
        "softcap": (None, lambda s, b, h, q, k: cap * torch.tanh(s / cap)),
        "bias": (None, lambda s, b, h, q, k: s + bias[h, q - k + most - 1]),
        "nothing": (lambda b, h, q, k: True, lambda s, b, h, q, k: s),
    }
