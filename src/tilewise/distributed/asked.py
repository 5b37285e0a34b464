"""What the calls over a split sequence are asked for: checked here, and compared over the ranks."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tilewise import arguments, checks
from tilewise.api import gradients
from tilewise.gpu import calls
from tilewise.scores import ScoreOptions, Scores

from .peers import Peers
from .pieces import check_seqlen
from .shards import LAYOUTS, Layout, check_sizes


class SplitOptions(ScoreOptions, total=False):
    """Keyword arguments of `head_attention` beside return_lse, which decides what it returns; for type checkers."""

    group: dist.ProcessGroup | None
    layout: Layout
    seqlen: int | tuple[int, int] | None
    timeout: float | None
    deterministic: bool
    backend: str


class Asked(NamedTuple):
    """The arguments that have to be the same on every rank, in `attention`'s meaning."""

    layout: str
    causal: bool
    scores: Scores
    return_lse: bool
    gradients: bool

    @property
    def told(self) -> dict[str, Any]:
        """What ranks tell each other of it; of a tensor, whether there is one."""
        scores = {f.name: getattr(self.scores, f.name) for f in fields(Scores)}
        scores = {n: True if isinstance(x, torch.Tensor) else x for n, x in scores.items()}
        flags = {"return_lse": self.return_lse, "gradients": self.gradients}
        return {"layout": self.layout, "causal": self.causal, **scores, **flags}


def check_asked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str,
    return_lse: bool,
    backend: str,
    options: ScoreOptions,
) -> Asked:
    """The checks of `attention`, made before anything travels: a rank that raises later leaves others waiting."""
    sizes = arguments.check_qkv(q, k, v)
    checks.choice("layout", layout, LAYOUTS)
    if sizes.value_dim != sizes.head_dim:
        raise NotImplementedError(
            f"v has head_dim {sizes.value_dim} and k {sizes.head_dim}, which travel as one here; use "
            "torch.nn.functional.pad for the smaller, with scale, and o[..., :n]"
        )
    refuse_slopes(options)
    if options.get("chunk") is not None:
        raise NotImplementedError("chunk over a sequence that is split across ranks is not served; use window")
    scores = arguments.check_scores(q, sizes.batch, **options)
    with torch.no_grad():  # which refuses gradients, and here there are
        where = arguments.check_backend(backend, q, (k, v, scores.sinks))
    if where == "cuda":
        calls.check_served(q, where)
    wanted = arguments.wants_gradients(q, k, v, scores.sinks)
    if wanted:
        gradients.check(q, None, backend)
    return Asked(layout, options.get("causal", False), scores, checks.flag("return_lse", return_lse), wanted)


def without_mask(options: ScoreOptions) -> dict[str, Any]:
    """What is left to do over a piece of keys: the plan says which of them a row sees, and sinks join at the end."""
    return {name: value for name, value in options.items() if name not in ("causal", "window", "sinks")}


def refuse_slopes(options: ScoreOptions) -> None:
    """ALiBi counts distances in the whole sequence, which a piece of it does not know."""
    if options.get("alibi_slopes") is not None:
        raise NotImplementedError("alibi_slopes over a sequence that is split across ranks are not served")


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
    told = peers.agree({**shapes, "dtype": str(q.dtype), "method": method, **asked.told}, mine)
    totals = {name: sum(one[name] for one in told) for name in mine}
    for name, total in totals.items():
        check_sizes(name, asked.layout, total, [one[name] for one in told])
    return totals["q"], totals["k"]
