"""An indexer's choice with PyTorch ops: scores of every key in float32, and the best of them."""

from __future__ import annotations

import torch

from tilewise.plan.choice import ChoicePlan

AT_ONCE = 1 << 24  # scores of heads that are held: 64 MiB


def run_choice(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, plan: ChoicePlan, *, rows: bool
) -> torch.Tensor:
    """(tokens, topk) int32, as api.choice.choose_keys() says. keys: (pages · page_size, dim), a layer's storage."""
    found = torch.full((plan.tokens, plan.topk), -1, dtype=torch.int32, device=q.device)
    for n, (start, end) in enumerate(zip(plan.starts[:-1].tolist(), plan.starts[1:].tolist(), strict=True)):
        at = torch.arange(int(plan.lengths[n]), device=q.device)
        pages = torch.from_numpy(plan.pages[n]).to(q.device)
        stored = pages.long()[at // plan.page_size] * plan.page_size + at % plan.page_size
        its, first = keys[stored].float(), len(at) - (end - start)
        step = max(1, AT_ONCE // (q.shape[1] * len(at)))
        for row in range(start, end, step):
            some = slice(row, min(row + step, end))
            place = torch.arange(some.start, some.stop, device=q.device) - start + first
            scores = torch.einsum("thd,kd->thk", q[some].float(), its)
            scores = torch.fmax(scores, scores.new_zeros(()))  # which takes NaN as 0
            scores = torch.einsum("th,thk->tk", weights[some], scores)
            hidden = at > place[:, None]
            # A stable sort takes the first of equal scores; NaN is the least that is seen.
            order = scores.nan_to_num_(-torch.inf, torch.inf, -torch.inf).masked_fill_(hidden, -torch.inf)
            best = (order + 0.0).sort(stable=True, dim=-1, descending=True).indices[:, : plan.topk]
            best = best.masked_fill(best > place[:, None], len(at)).sort(-1).values
            named = torch.cat([stored if rows else at, at.new_full((1,), -1)])[best]
            found[some, : best.shape[1]] = named.int()
    return found
