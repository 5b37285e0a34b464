"""What a report was measured on: the device with its clocks and power, and the versions of all that took part."""

from __future__ import annotations

import os
import platform
import subprocess

import torch

from ... import arch
from ...plan.show import CARDS
from .. import ceilings, flex, peers
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
CARD = "TILEWISE_CARD"  # an older card that this one is to behave as


def describe(device: torch.device) -> dict[str, str]:
    """The machine in words, what is not known left out."""
    facts = {"device": str(device), "name": machine(str(device))}
    if device.type == "cuda":
        major, minor = arch.capability(device)
        total = torch.cuda.mem_get_info(device)[1]
        facts |= {
            "compute capability": f"{major}.{minor}",
            "behaves as": os.environ.get(CARD, ""),
            "multiprocessors": f"{arch.multiprocessors(device)}",
            "memory": f"{total / 2**30:.0f} GiB",
            **{name: f"{text} {STANDING[name][0]}".strip() for name, text in _ask_card(device, STANDING).items()},
            "host": machine(),
        }
    else:
        facts |= {
            "behaves as": os.environ.get(CARD, ""),
            "cores": f"{os.cpu_count() or ''}",
            "threads": f"{here('cpu')['threads']}",
            "vector instructions": torch.backends.cpu.get_cpu_capability(),
            "memory": _host_memory(),
            "power": "this machine does not tell",
        }
    facts["system"] = platform.platform(terse=True)
    return {name: text for name, text in facts.items() if text}


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
        return {name: float(text) for name, text in _ask_card(device, SAMPLED).items()}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            clocks = [float(line.partition(":")[2]) for line in file if line.startswith("cpu MHz")]
    except (OSError, ValueError):  # not Linux, or not as we know it
        clocks = []
    return {CPU_CLOCK: sum(clocks) / len(clocks)} if clocks else {}


def _ask_card(device: torch.device, asked: dict[str, tuple[str, str]]) -> dict[str, str]:
    """nvidia-smi's answers by our names; {} where there is no nvidia-smi or it speaks of another card than torch."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    card = visible[index] if index < len(visible) else str(index)
    query = ",".join(["name", *(name for _, name in asked.values())])
    command = ["nvidia-smi", f"--id={card}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    name, *values = [word.strip() for word in told.strip().split(",")]
    if name != machine(str(device)) or len(values) != len(asked):
        return {}
    answers = dict(zip(asked, values, strict=True))
    return {key: text for key, text in answers.items() if not asked[key][0] or _is_number(text)}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:  # [N/A]
        return False
    return True


def _host_memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (AttributeError, ValueError, OSError):
        return ""
