"""What a report was measured on: the device with its clocks and power, and the versions of all that took part."""

from __future__ import annotations

import os
import platform

import torch

from ... import arch, tuned
from ...plan.show import CARDS
from .. import ceilings, flex, peers, smi
from ..records import here, machine, package_version
from ..workloads import DTYPES
from .model import Ceiling

PACKAGES = ("numpy", "triton", "nvidia-cuda-nvrtc", "transformers")
# What nvidia-smi is asked for after each row: name in a report, unit, its own name.
SAMPLED = {
    "SM clock": ("MHz", "clocks.sm"),
    "memory clock": ("MHz", "clocks.mem"),
    "power": ("W", "power.draw"),
    "temperature": ("°C", "temperature.gpu"),
}
STANDING = {
    "driver": ("", "driver_version"),
    "top SM clock": ("MHz", "clocks.max.sm"),
    "power limit": ("W", "power.limit"),
}
CPU_CLOCK = "clock"


def describe(device: torch.device) -> dict[str, str]:
    """The machine in words, what is not known left out."""
    facts = {"device": str(device), "name": machine(str(device))}
    if device.type == "cuda":
        major, minor = arch.capability(device)
        total = torch.cuda.mem_get_info(device)[1]
        facts |= {
            "compute capability": f"{major}.{minor}",
            "behaves as": _imitated(device),
            "tables in use": _tables(device),
            "multiprocessors": f"{arch.multiprocessors(device)}",
            "memory": f"{total / 2**30:.0f} GiB",
            **{name: f"{text} {STANDING[name][0]}".strip() for name, text in _told(device, STANDING).items()},
            "host": machine(),
        }
    else:
        facts |= {
            "cores": f"{os.cpu_count() or ''}",
            "threads": f"{here('cpu')['threads']}",
            "vector instructions": torch.backends.cpu.get_cpu_capability(),
            "memory": _host_memory(),
            "power": "this machine does not tell",
        }
    facts["system"] = platform.platform(terse=True)
    return {name: text for name, text in facts.items() if text}


def _imitated(device: torch.device) -> str:
    """The card that TILEWISE_CARD makes of this one, "" if it is what it is."""
    return arch.chosen or "" if arch.chosen != arch.arch_of_device(device) else ""


def _tables(device: torch.device) -> str:
    """The families of kernels whose tilings were measured on such a card."""
    try:
        found = tuned.of(device)
    except (NotImplementedError, ValueError):  # no kernels for this card; the rows say why
        found = None
    return ", ".join(found.sections) if found else "none"


def versions() -> dict[str, str]:
    """The versions of what ran, what is not installed left out."""
    where = here("cpu")
    found = {name: str(where[name]) for name in ("tilewise", "torch", "python")}
    found |= {"CUDA of torch": torch.version.cuda or "", **{name: package_version(name) for name in PACKAGES}}
    return {name: text for name, text in found.items() if text}


def peer_versions(device: torch.device) -> dict[str, str]:
    """Each peer's version, or why it is not measured."""
    triton = package_version("triton")
    compiled = f", triton {triton}" if triton else ""
    found = {
        peers.SDPA: f"torch {torch.__version__}",
        flex.FLEX: f"torch {torch.__version__}, {flex.how(device)}{compiled}",
        peers.CUDNN: _cudnn(device),
    }
    for name in peers.CUDA_PEERS:
        module = peers.find(name)
        if isinstance(module, str):
            found[name] = module
        else:
            version = str(getattr(module, "__version__", "version unknown"))
            found[name] = version if device.type == "cuda" else f"{version}, not measured: it takes CUDA tensors"
    return found


def _cudnn(device: torch.device) -> str:
    version = torch.backends.cudnn.version() if device.type == "cuda" else None
    if version is None:
        return "not measured: it takes CUDA tensors" if device.type != "cuda" else "this torch has none"
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}, in torch"


def ceilings_of(device: torch.device, dtypes: list[str]) -> list[Ceiling]:
    """The measured ceiling of each dtype, and the peaks of the card where they are known."""
    found = []
    for dtype in dtypes:
        try:
            best = ceilings.of(device, DTYPES[dtype])
        except RuntimeError:  # no such product on this card: its rows say so
            continue
        found.append(Ceiling("measured", dtype, best.flops, best.bandwidth))
    name = machine(str(device)).lower()
    for card in CARDS:
        if device.type == "cuda" and card.name.lower() in name:
            found.append(
                Ceiling(f"{card.name}'s peaks", "bfloat16", card.flops_per_s, card.bytes_per_s, measured=False)
            )
    return found


def sample(device: torch.device) -> dict[str, float]:
    """Clocks, power and temperature now, as far as the machine tells; the keys of a card are SAMPLED's."""
    if device.type == "cuda":
        return {name: float(text) for name, text in _told(device, SAMPLED).items()}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            clocks = [float(line.partition(":")[2]) for line in file if line.startswith("cpu MHz")]
    except (OSError, ValueError):  # not Linux, or not as we know it
        clocks = []
    return {CPU_CLOCK: sum(clocks) / len(clocks)} if clocks else {}


def _told(device: torch.device, asked: dict[str, tuple[str, str]]) -> dict[str, str]:
    """What nvidia-smi tells, by our names."""
    found = smi.ask(device, [name for _, name in asked.values()])
    return {ours: found[name] for ours, (_, name) in asked.items() if name in found}


def _host_memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (AttributeError, ValueError, OSError):
        return ""
