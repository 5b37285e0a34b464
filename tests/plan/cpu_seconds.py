"""Times that a busy machine does not change much: CPU time instead of wall time, and the best of several rounds."""

from __future__ import annotations

import time
from collections.abc import Callable


def cpu_seconds(*calls: Callable[[], object], rounds: int = 5) -> list[float]:
    """The least CPU time of each call. The calls take turns, so that a slow moment of the machine hits all of them."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for n, call in enumerate(calls):
            start = time.process_time()
            call()
            best[n] = min(best[n], time.process_time() - start)
    return best
