"""Tables as tests of tuning need them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilewise import tuned
from tilewise.formats import KVFormat
from tilewise.gpu.decode_kernels import choose_tiling
from tilewise.plan.cost import GPU_COST, Weights
from tilewise.tuned import COSTS, WEIGHTS, Section, Tuned


def tables(count: int, head_dim: int = 64) -> list[Tuned]:
    """Every constant eight times as large, then random ones; and rings of any depth."""
    random = np.random.default_rng(7)
    found = []
    for number in range(count):
        powers = iter([1.0] * 99 if number == 0 else random.uniform(-1, 1, 99))
        values = {n: float(getattr(GPU_COST, n) * 8 ** next(powers)) for n in COSTS}
        values |= {n: float(getattr(Weights(), n) * 8 ** next(powers)) for n in WEIGHTS}
        rings = {}
        for blocks in (1, 2):
            form = KVFormat("bf16", head_dim)
            for deep in (False, True):
                tiling = replace(choose_tiling(form, 2, deep=deep), blocks=blocks)
                rings[tuned.decode_key(form, tiling)] = {"stages": int(random.integers(2, 5))}
        found.append(Tuned({"decode": Section("", "", rings, values)}))
    return found
