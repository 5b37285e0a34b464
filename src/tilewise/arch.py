"""What a card can do: the one place that asks, and the architectures' limits as plain facts.

Everything that depends on the card (which kernel serves, how many blocks run at once, what `sdpa` and Thunder may take
over) goes through `capability`, `arch_of_device`, `multiprocessors` and `serves_prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Limits:
    """What one SM of an architecture holds, and what one block of it may ask for."""

    warps: int
    blocks: int
    shared_sm: int
    shared_block: int


LIMITS = {
    "sm_80": Limits(warps=64, blocks=32, shared_sm=164 << 10, shared_block=163 << 10),
    "sm_86": Limits(warps=48, blocks=16, shared_sm=100 << 10, shared_block=99 << 10),
    "sm_89": Limits(warps=48, blocks=24, shared_sm=100 << 10, shared_block=99 << 10),
    "sm_90a": Limits(warps=64, blocks=32, shared_sm=228 << 10, shared_block=227 << 10),
}
ARCHS = tuple(LIMITS)


def arch_of(major: int, minor: int) -> str:
    """The architecture to compile for on a device of this compute capability: the newest that runs there."""
    # A cubin runs on later minors of its own major. sm_90a code runs on 9.0 alone.
    if major == 8:
        return "sm_89" if minor >= 9 else "sm_86" if minor >= 6 else "sm_80"
    if (major, minor) == (9, 0):
        return "sm_90a"
    raise NotImplementedError(
        f"no kernels for compute capability {major}.{minor}: there are kernels for 8.0 to 8.9 and 9.0; "
        "backend='emulator' runs them on CPU tensors"
    )


EMULATED_ARCH, EMULATED_BLOCKS = (
    "sm_90a",
    3,
)  # of CPU tensors: the emulator runs Hopper's kernels


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    # Every layer of a model asks. The compiler, which traces this too, does not follow a cache.
    return _capability(device) if torch.compiler.is_compiling() else _known_capability(device)


def _capability(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


_known_capability = lru_cache(_capability)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many blocks of one per multiprocessor run at once."""
    return EMULATED_BLOCKS if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def arch_of_device(device: torch.device) -> str:
    """The architecture that kernels for a device are made for."""
    return arch_of(*capability(device)) if device.type == "cuda" else EMULATED_ARCH


def serves_prefill(device: torch.device) -> bool:
    """Does the prefill kernel run there? It is written for Hopper's wgmma and TMA."""
    return device.type == "cpu" or capability(device) == (9, 0)


def occupancy(arch: str, registers: int, threads: int, shared: int) -> int:
    """Blocks per SM, of `registers` per thread and `shared` bytes per block (static and dynamic); 0 if none fits."""
    limits = limits_of(arch)
    warps = -(-threads // 32)
    if threads > 1024 or registers > 255 or shared > limits.shared_block:
        return 0
    # Registers are given to warps in units of 256, and each quarter of the SM has its own 16K of them.
    per_warp = max(1, -(-registers * 32 // 256)) * 256
    by_registers = 4 * ((64 << 10) // 4 // per_warp) // warps
    if 4 * -(-warps // 4) * per_warp > 64 << 10:
        by_registers = 0  # one block must fit with its warps dealt out evenly to the quarters
    by_shared = limits.shared_sm // (-(-shared // 128) * 128 + 1024)  # 1 KB of each block is the system's
    return min(limits.warps // warps, by_registers, by_shared, limits.blocks)


def limits_of(arch: str) -> Limits:
    """The limits of an architecture that there are kernels for."""
    if arch not in LIMITS:
        raise ValueError(f"arch must be one of {', '.join(ARCHS)}, got {arch!r}")
    return LIMITS[arch]
