"""What nvidia-smi tells of a card: clocks, power, temperature, driver. Nothing where there is no nvidia-smi."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

import torch

from .records import machine


def ask(device: torch.device, names: Sequence[str]) -> dict[str, str]:
    """Its answers by the names it has for them; those that it does not know are left out.

    {} where there is no nvidia-smi, or where it speaks of another card than torch: the two may count differently.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    card = visible[index] if index < len(visible) else str(index)
    query = f"--query-gpu={','.join(['name', *names])}"
    command = ["nvidia-smi", f"--id={card}", query, "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    name, *values = [word.strip() for word in told.strip().split(",")]
    if name != machine(str(device)) or len(values) != len(names):
        return {}
    return {key: text for key, text in zip(names, values, strict=True) if not text.startswith("[")}  # [N/A]
