"""What the calls over a split sequence are asked for: checked here, and compared over the ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise import arguments, checks
from tilewise.gpu import calls
from tilewise.plan import Window

from .peers import Peers
from .pieces import check_seqlen
from .shards import LAYOUTS, check_sizes


class Asked(NamedTuple):
    """The arguments that have to be the same on every rank, in `attention`'s meaning."""

    layout: str
    causal: bool
    window: Window | None
    scale: float
    softcap: float
    sinks: bool  # whether there are any
    return_lse: bool


def check_asked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str,
    causal: bool,
    window: Window | None,
    scale: float | None,
    softcap: float,
    sinks: torch.Tensor | None,
    return_lse: bool,
    backend: str,
) -> Asked:
    """The checks of `attention`, made before anything travels: a rank that raises later leaves others waiting."""
    heads_q = arguments.check_qkv(q, k, v)[3]
    checks.choice("layout", layout, LAYOUTS)
    window = arguments.check_window(window)
    scoring = arguments.scoring(q, scale, softcap)
    arguments.check_sinks(sinks, heads_q, q.device)
    causal, return_lse = checks.flag("causal", causal), checks.flag("return_lse", return_lse)
    where = arguments.check_backend(backend, q, (k, v, sinks))
    if where == "cuda":
        calls.check_served(q, None, where)
    return Asked(layout, causal, window, scoring.scale, scoring.softcap, sinks is not None, return_lse)


def sequence_lengths(
    peers: Peers,
    q: torch.Tensor,
    k: torch.Tensor,
    seqlen: int | tuple[int, int] | None,
    asked: Asked,
    method: str | None = None,
) -> tuple[int, int]:
    """Positions of the whole q and of the whole k; from all ranks, which then compare, if `seqlen` does not tell."""
    mine = {"q": q.shape[1], "k": k.shape[1]}
    if seqlen is not None:
        both = check_seqlen(seqlen)
        for (name, size), total in zip(mine.items(), both, strict=True):
            check_sizes(name, asked.layout, total, [size if r == peers.rank else None for r in range(peers.world)])
        return both
    shapes = {"batch": q.shape[0], "heads of q": q.shape[2], "heads of k": k.shape[2], "head_dim": q.shape[3]}
    told = peers.agree({**shapes, "dtype": str(q.dtype), "method": method, **asked._asdict()}, mine)
    totals = {name: sum(one[name] for one in told) for name in mine}
    for name, total in totals.items():
        check_sizes(name, asked.layout, total, [one[name] for one in told])
    return totals["q"], totals["k"]
