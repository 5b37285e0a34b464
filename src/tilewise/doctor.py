"""`tilewise doctor`: what is installed, which device is here, what runs on it, what is missing and how to get it."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from . import __version__, api, arch
from .bench import tune_findings as tables
from .bench.peers import CUDA_PEERS, find
from .bench.records import machine, package_version

GOOD, NOTE, MISSING = "ok", "note", "missing"
HOW_TO_GET = {
    "FlashAttention-2": "pip install flash-attn --no-build-isolation",
    "FlashAttention-3": "build the hopper/ folder of the flash-attention repository",
    "FlashInfer": "pip install flashinfer-python",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, how it stands, and what to do about it if anything."""

    section: str
    name: str
    state: str
    text: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Everything doctor knows, in the order it is shown. Looks only; changes nothing."""
    return [*_packages(), *_imitated(), *_devices(), *_tables(), *_backends(), *_peers()]


def _packages() -> list[Finding]:
    found = [Finding("installed", "python", GOOD, platform.python_version())]
    found.append(Finding("installed", "tilewise", GOOD, __version__))
    for name in ("torch", "numpy", "typer", "rich", "matplotlib"):
        version = package_version(name)
        if version:
            found.append(Finding("installed", name, GOOD, version))
        else:
            found.append(Finding("installed", name, MISSING, "not installed", f"pip install {name}"))
    return found


def _tables() -> list[Finding]:
    """What was measured on this card, and whether calls use it."""
    return [Finding("tables", found.name, found.state, found.text, found.remedy) for found in tables.findings()]


def _devices() -> list[Finding]:
    threads, level = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    found = [Finding("devices", "cpu", GOOD, f"{machine()}, {threads} threads, torch uses {level}")]
    if not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip
        why = "torch sees none" if build else "this torch is a CPU build"
        remedy = "" if build else "install torch from https://pytorch.org/get-started for CUDA, where there is a GPU"
        return [*found, Finding("devices", "gpu", NOTE, why, remedy)]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        memory = properties.total_memory / 2**30
        capability = f"sm_{properties.major}{properties.minor}"
        found.append(Finding("devices", f"cuda:{i}", GOOD, f"{properties.name}, {memory:.0f} GiB, {capability}"))
        found.append(_kernels(torch.device("cuda", i)))
    return found


def _imitated() -> list[Finding]:
    """TILEWISE_CARD, if it is set."""
    if arch.chosen is None:
        return []
    try:
        arch.limits_of(arch.chosen)
    except ValueError:
        said = f"{arch.chosen} is none of {', '.join(arch.ARCHS)}: no kernel runs until it is, or is unset"
        return [Finding("devices", "TILEWISE_CARD", MISSING, said)]
    said = f"{arch.chosen}: GPUs and the emulator behave as that card, with its kernels within its limits"
    return [Finding("devices", "TILEWISE_CARD", NOTE, said)]


def _kernels(device: torch.device) -> Finding:
    """Which kernels serve a device."""
    name = f"{device} kernels"
    try:
        card = arch.card_of(device)
    except (NotImplementedError, ValueError) as error:
        return Finding("devices", name, MISSING, " ".join(str(error).split()))
    as_what = card if card == arch.arch_of_device(device) else f"{card}, as TILEWISE_CARD asks"
    if arch.hopper(card):
        return Finding("devices", name, GOOD, f"those of {as_what}: wgmma and TMA")
    shared = arch.shared_block(card) >> 10
    text = f"those of {as_what}: mma.sync and cp.async, within {shared} KB of shared memory per block"
    if card in ("sm_100", "sm_103"):
        text += "; Blackwell's data-centre cards have no kernel of their own yet"
    return Finding("devices", name, GOOD, text)


def _backends() -> list[Finding]:
    """What runs for which tensors, asked of the calls themselves, so that this cannot fall behind them."""
    found = []
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        x = torch.ones(1, 16, 1, 64, device=device)
        for dtype in ("float32", "float16", "bfloat16"):
            name = f"{device} {dtype}"
            y = x.to(getattr(torch, dtype))
            try:
                api.attention(y, y, y)
            except (NotImplementedError, ValueError) as error:  # ValueError: of TILEWISE_CARD
                found.append(Finding("what runs", name, MISSING, " ".join(str(error).split())))
            else:
                found.append(Finding("what runs", name, GOOD, f"every call, on the {device} backend"))
    if "cuda" not in devices:
        found.append(Finding("what runs", "cuda", NOTE, "no GPU here; the emulator runs the kernels on CPU tensors"))
    return found


def _peers() -> list[Finding]:
    found = [Finding("peers", "torch SDPA", GOOD, "always measured beside Tilewise")]
    for name, modules in CUDA_PEERS.items():
        module = find(name)
        if isinstance(module, str):
            # Only worth getting where it could run.
            remedy = HOW_TO_GET[name] if torch.cuda.is_available() else ""
            found.append(Finding("peers", name, NOTE, f"{module} ({' or '.join(modules)}); not needed", remedy))
        else:
            version = getattr(module, "__version__", "version unknown")
            used = "measured in `tilewise bench`" if torch.cuda.is_available() else "needs a GPU to be measured"
            found.append(Finding("peers", name, GOOD, f"{version}, {used}"))
    return found
