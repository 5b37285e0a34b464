"""What cards can do: the one place that asks, and the architectures' limits and rates as plain facts.

Two questions are kept apart. `arch_of_device`: the architecture that code for a device is compiled for. `card_of`: the
card that the device behaves as, whose kernels and limits are used. They differ where TILEWISE_CARD names a card that
the device can imitate: TILEWISE_CARD=sm_80 makes an H200 run the kernels of an A100 within an A100's shared memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Limits:
    """What one SM of an architecture holds, what one block of it may ask for, and what an SM does in a clock.

    products, products_tf32: floating-point operations per clock of its tensor cores under mma.sync with float32 sums,
    of 16-bit and of TF32 operands, as the fastest cards of the architecture have them (GeForce cards do half); None
    where it is not known. ffma: those of the CUDA cores in float32.
    """

    warps: int
    blocks: int
    shared_sm: int
    shared_block: int
    products: int | None
    products_tf32: int | None
    ffma: int


LIMITS = {
    "sm_80": Limits(64, 32, 164 << 10, 163 << 10, products=2048, products_tf32=1024, ffma=128),  # A100, A30
    "sm_86": Limits(48, 16, 100 << 10, 99 << 10, products=1024, products_tf32=512, ffma=256),  # 3090, A6000, A10
    "sm_87": Limits(48, 16, 164 << 10, 163 << 10, products=2048, products_tf32=1024, ffma=256),  # Orin
    "sm_89": Limits(48, 24, 100 << 10, 99 << 10, products=1024, products_tf32=512, ffma=256),  # 4090, L40S, L4
    "sm_90a": Limits(64, 32, 228 << 10, 227 << 10, products=4096, products_tf32=2048, ffma=256),  # H100, H200
    "sm_100": Limits(64, 32, 228 << 10, 227 << 10, products=None, products_tf32=None, ffma=256),  # B200, GB200
    "sm_103": Limits(64, 32, 228 << 10, 227 << 10, products=None, products_tf32=None, ffma=256),  # B300, GB300
    "sm_120": Limits(48, 24, 100 << 10, 99 << 10, products=1024, products_tf32=512, ffma=256),  # 5090, RTX PRO 6000
    "sm_121": Limits(48, 24, 100 << 10, 99 << 10, products=1024, products_tf32=512, ffma=256),  # GB10
}
ARCHS = tuple(LIMITS)
# major -> (minor, architecture), the newest first. A cubin runs on later minors of its own major, sm_90a code on 9.0
# alone.
_SERVED = {
    8: ((9, "sm_89"), (7, "sm_87"), (6, "sm_86"), (0, "sm_80")),
    9: ((0, "sm_90a"),),
    10: ((3, "sm_103"), (0, "sm_100")),
    12: ((1, "sm_121"), (0, "sm_120")),
}
EMULATED_ARCH, EMULATED_BLOCKS = "sm_90a", 3  # of CPU tensors: the emulator runs Hopper's kernels

# What TILEWISE_CARD said when this was imported, or `as_card` since. Whatever keeps a choice that depends on `card_of`
# keeps it beside this.
chosen: str | None = os.environ.get("TILEWISE_CARD") or None


def _serving(major: int, minor: int) -> str | None:
    """The newest architecture whose code runs on a device of this compute capability; None if there is none."""
    if major == 9 and minor > 0:
        return None
    for least, arch in _SERVED.get(major, ()):
        if minor >= least:
            return arch
    return None


def arch_of(major: int, minor: int) -> str:
    """The architecture to compile for on a device of this compute capability: the newest that runs there."""
    arch = _serving(major, minor)
    if arch is None:
        thor = " (Jetson Thor)" if major == 11 else ""
        raise NotImplementedError(
            f"no kernels for compute capability {major}.{minor}{thor}: there are kernels for 8.0 to 8.9, 9.0, 10.x and "
            "12.x; backend='emulator' runs them on CPU tensors"
        )
    return arch


def card_of(device: torch.device) -> str:
    """The card that a device behaves as: which kernels it runs, within which limits.

    Its own architecture, or what TILEWISE_CARD says: ValueError if that is none of ARCHS, or if the device cannot
    imitate it. The emulator imitates all of them.
    """
    # As in `capability`: the compiler does not follow a cache.
    return _found_card(device, chosen) if torch.compiler.is_compiling() else _card(device, chosen)


def _found_card(device: torch.device, chosen: str | None) -> str:
    arch = arch_of_device(device)
    if chosen is None:
        return arch
    _check_card(chosen)
    if device.type == "cuda" and (why := cannot_imitate(arch, chosen)):
        raise ValueError(f"TILEWISE_CARD={chosen}: {device} is {arch} and cannot behave as that card: {why}")
    return chosen


_card = lru_cache(_found_card)


def _check_card(name: str) -> None:
    if name not in LIMITS:
        raise ValueError(f"TILEWISE_CARD must be one of {', '.join(ARCHS)}, or unset, got {name!r}")


def cannot_imitate(arch: str, card: str) -> str:
    """Why a device of architecture `arch` cannot run the kernels of `card` within its limits; "" if it can."""
    has, needs = LIMITS[arch], LIMITS[card]
    if hopper(card) and not hopper(arch):
        return "it has no wgmma"
    if fp8_products(card) and ARCHS.index(arch) < ARCHS.index("sm_89"):  # ptxas takes mma.sync of FP8 since then
        return "it has no products of FP8"
    if needs.shared_block > has.shared_block:
        return f"a block has {has.shared_block >> 10} KB of shared memory, and {card} has {needs.shared_block >> 10}"
    if needs.warps > has.warps or needs.blocks > has.blocks:
        return (
            f"a multiprocessor holds {has.warps} warps and {has.blocks} blocks, and {card} holds {needs.warps} and "
            f"{needs.blocks}"
        )
    return ""


@contextlib.contextmanager
def as_card(name: str | None) -> Iterator[None]:
    """Behave as this card, as TILEWISE_CARD would have it, in all threads until the end; None: as what is there."""
    global chosen
    if name is not None:
        _check_card(name)
    before, chosen = chosen, name
    try:
        yield
    finally:
        chosen = before


def hopper(card: str) -> bool:
    """Does the card run the kernels that are written for wgmma and TMA?"""
    # Cards since have TMA too, but no wgmma; their kernels load by cp.async, as those of earlier cards do.
    return card == "sm_90a"


def fp8_products(card: str) -> bool:
    """Do the tensor cores multiply FP8, by wgmma on Hopper and by mma.sync elsewhere? If not, FP8 is widened first."""
    # mma.sync of FP8 compiles for 9.0 and 10.x too, but to conversions and products of fp16.
    return card in ("sm_89", "sm_90a", "sm_120", "sm_121")


def tf32_products(card: str) -> bool:
    """Are float32 products faster as three TF32 products of tensor cores than on CUDA cores?"""
    limits = limits_of(card)
    # Where the rate is not known, it is at least that of sm_80, which the same instructions had.
    return (limits.products_tf32 or 1024) > 3 * limits.ffma


def shared_block(card: str) -> int:
    """Bytes of shared memory that a block may have, static and dynamic."""
    return limits_of(card).shared_block


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
    """Is there a prefill kernel that runs on the device?"""
    return device.type == "cpu" or _serving(*capability(device)) is not None


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
