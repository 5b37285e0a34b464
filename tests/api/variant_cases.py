"""Ten well-known kinds of attention, each one line of mask or score: what tests, benchmarks and pictures share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Variant(NamedTuple):
    """mask, score: what `attention` is given. built_in: the options that do the same without a function, if any."""

    mask: Callable[..., Any] | None = None
    score: Callable[..., Any] | None = None
    built_in: dict[str, Any] | None = None


def variants(
    heads: int, seqlen_q: int, seqlen_k: int, *, batch: int = 1, device: torch.device | str = "cpu"
) -> dict[str, Variant]:
    """The ten by name, with tables for sequences up to these lengths; what they capture is on `device`.

    Queries are the last of the keys where the two are counted together, as causal=True has it: query q stands at key
    q + shift. A mask as wide as the sequence hides nothing, so windows get narrower with it.
    """
    random = torch.Generator().manual_seed(7)
    shift, longest = seqlen_k - seqlen_q, max(seqlen_q, seqlen_k)
    left, cap, reach = max(1, seqlen_k // 3), 5.0, 16
    prefix = torch.tensor([3 + b + seqlen_k // 5 for b in range(batch)]).to(device)
    document = _documents(longest, random).to(device)
    slopes = (2.0 ** -torch.arange(1, heads + 1)).to(device)
    table = torch.randn(heads, 2 * reach + 1, generator=random).to(device)
    ancestors = _ancestors(seqlen_q, random).to(device)
    width, radius = max(2, int(longest**0.5)), 2
    last = max(radius, (longest - 1) // width - radius)

    def near(x: Any, y: Any, end: int) -> Any:  # the window moves inwards at the borders, as NATTEN's does
        return (x.clamp(radius, end) - y).abs() <= radius

    return {
        "causal": Variant(lambda b, h, q, k: q + shift >= k, None, {"causal": True}),
        "window": Variant(
            lambda b, h, q, k: (q + shift >= k) & (q + shift - k <= left), None, {"causal": True, "window": (left, 0)}
        ),
        "prefix-LM": Variant(lambda b, h, q, k: (k < prefix[b]) | (q + shift >= k)),
        "documents": Variant(lambda b, h, q, k: (document[q] == document[k]) & (q >= k)),
        "ALiBi": Variant(
            None, lambda s, b, h, q, k: s - slopes[h] * (q + shift - k).abs(), {"alibi_slopes": slopes}
        ),
        "softcap": Variant(None, lambda s, b, h, q, k: cap * torch.tanh(s / cap), {"softcap": cap}),
        "dilated window": Variant(lambda b, h, q, k: (q >= k) & (q - k <= left) & ((q - k) % 4 == 0)),
        "tree of drafts": Variant(lambda b, h, q, k: (k < shift) | ancestors[q][(k - shift).clamp(0)]),
        "relative bias table": Variant(
            None, lambda s, b, h, q, k: s + table[h, (q - k).clamp(-reach, reach) + reach]
        ),
        "2-D neighbourhood": Variant(
            lambda b, h, q, k: near(q // width, k // width, last) & near(q % width, k % width, width - 1 - radius)
        ),
    }  # fmt: skip


def _documents(length: int, random: torch.Generator) -> torch.Tensor:
    """Ids of documents of about a sixth of the length, ascending, int32 (length,)."""
    ends = torch.rand(max(1, length), generator=random) < 6.0 / max(6, length)
    return ends.cumsum(0).int()


def _ancestors(tokens: int, random: torch.Generator) -> torch.Tensor:
    """Which token of a random tree is another one's ancestor or itself, bool (tokens, tokens); token 0 is the root."""
    seen = torch.eye(max(1, tokens), dtype=torch.bool)
    for token in range(1, tokens):
        seen[token] |= seen[int(torch.randint(max(0, token - 4), token, (), generator=random))]
    return seen
