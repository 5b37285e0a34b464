"""Three plans to look at: a causal problem, a window, and a decode step over a tree of shared pages."""

from __future__ import annotations

from functools import partial

import torch

from ... import api
from ...kvcache import PagedKVCache
from ...plan import Plan
from ...plan.show import Card
from .model import Ceiling, Picture

TOKENS, WINDOW, DIM, PAGE = 2048, 511, 128, 16
TREE = (96, 48, 32)  # tokens of the system prompt, of each question, of each answer


def pictures(device: torch.device, ceiling: Ceiling | None) -> list[Picture]:
    """The plans as the GPU's kernels take them, with what they take at least under the ceiling.

    On a CPU these are the emulator's. A problem that no kernel takes here is planned for the CPU.
    """
    made = []
    for title, note, options in (
        ("Causal", f"{TOKENS} tokens: the tiles above the diagonal are not in the list.", {}),
        (
            "Window",
            f"The last {WINDOW + 1} keys of each query: two edges cut tiles, the rest is left out.",
            {"window": (WINDOW, 0)},
        ),
    ):
        plan = _dense(device, options)
        made.append(_picture(plan, title, note, ceiling))
    note = "A system prompt, two questions, three answers to each: the rows of all that share a page meet it once."
    made.append(_picture(_tree(device), "Decode over a tree", note, ceiling))
    return made


def _dense(device: torch.device, options: dict[str, tuple[int, int]]) -> Plan:
    q = torch.empty(1, TOKENS, 8, DIM, dtype=torch.bfloat16, device=device)
    plan = partial(api.plan_attention, causal=True, window=options.get("window"))
    try:
        return plan(q, q, backend="auto" if q.is_cuda else "emulator")
    except NotImplementedError:
        return plan(q.cpu(), q.cpu())


def _tree(device: torch.device) -> Plan:
    cache = PagedKVCache(64, PAGE, 8, DIM, kv_format="bf16", device=device)
    system = cache.allocate()
    cache.extend([system], [TREE[0]])
    questions = [system, cache.fork(system)]
    cache.extend(questions, [TREE[1]] * len(questions))
    seqs = [seq for question in questions for seq in (question, cache.fork(question), cache.fork(question))]
    cache.extend(seqs, [TREE[2]] * len(seqs))
    return api.plan_decode(cache, seqs, num_heads=32, share_prefix=True)


def _picture(plan: Plan, title: str, note: str, ceiling: Ceiling | None) -> Picture:
    """The tiles of the first head, keys of several sources one after another."""
    offsets = [sum(plan.keys[:source]) for source in range(len(plan.keys))]
    seen: dict[tuple[int, int, int], list[float]] = {}
    for r in plan.rectangles():
        share = round(r.pairs / (r.rows * r.keys), 3)
        seen.setdefault((r.row, r.source, r.key), [offsets[r.source] + r.key, r.row, r.keys, r.rows, share])
    best = (1.0, 1.0) if ceiling is None else (ceiling.bandwidth, ceiling.flops)
    text = plan.summary.text(Card("this machine", *best), plan.launch)
    if ceiling is None:  # nothing to say of a floor
        text = text[: text.rindex("\n")]
    return Picture(title, note, text, plan.rows, sum(plan.keys), list(seen.values()))
