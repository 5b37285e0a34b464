"""What the suites of decode over selected pages share: selections, calls that are judged, random problems."""

from __future__ import annotations

import random
from typing import Any

import torch
from decode_cases import BF16, FOLDED, FP16, SMALL, UNCUT, assert_decoded, decode, make_cache, queries

from tilewise import PagedKVCache, plan_decode
from tilewise.plan.schedule_bits import pack
from tilewise.plan.worklist import FAR, Splitting

PAIRS = Splitting(((FAR, 32),), whole=False)  # pieces of two pages of 16: some lists have many of them, some none


def chosen(count: int, heads: int, pages: int, share: float = 0.5, seed: int = 0) -> torch.Tensor:
    """bool (count, heads, pages): each page with probability `share`."""
    return torch.rand(count, heads, pages, generator=torch.Generator().manual_seed(seed)) < share


def bits_of(selected: torch.Tensor, beyond: int = 0) -> torch.Tensor:
    """int32 (count, heads, words), with the bits of `beyond` in every word past the last page."""
    words = torch.from_numpy(pack(selected.flatten(0, 1).numpy())).view(*selected.shape[:2], -1).clone()
    return torch.cat([words, torch.full((*words.shape[:2], 2), beyond, dtype=torch.int32)], -1) if beyond else words


def pages_of(cache: PagedKVCache, seqs: list[int]) -> int:
    return max(1, max(-(-cache.length(s) // cache.page_size) for s in seqs))


def run(
    cache: PagedKVCache,
    seqs: list[int],
    q: torch.Tensor,
    bits: torch.Tensor,
    *,
    most: int = 1000,
    room: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) by the kernel over the pages that the bits select; `plan` in options is used again."""
    plan = options.pop("plan", None) or plan_decode(
        cache, seqs, num_heads=q.shape[2], tokens_per_seq=q.shape[1], pages_per_seq=most, room=room
    )
    return decode(cache, seqs, q, plan=plan, selected=bits, room=room, **options)


def check(
    cache: PagedKVCache,
    seqs: list[int],
    selected: torch.Tensor | None = None,
    *,
    heads: int | None = None,
    share: float = 0.5,
    tokens: int = 1,
    group: int = 4,
    seed: int = 0,
    beyond: int = 0,
    most: int = 1000,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, judged. selected: chosen with `share` for each of `heads` KV heads, all of them by default."""
    if selected is None:
        selected = chosen(len(seqs), heads or cache.num_kv_heads, pages_of(cache, seqs), share, seed)
    dtype = FP16 if cache.format.name == "fp16" else BF16
    q = queries(cache, seqs, group=group, tokens=tokens, dtype=dtype)
    got = run(cache, seqs, q, bits_of(selected, beyond), most=most, **options)
    scoring = {name: options[name] for name in ("scale", "softcap", "sinks") if name in options}
    assert_decoded(got, q, cache, seqs, selected=selected & (selected.cumsum(-1) <= most), **scoring)
    return got


# What costs a compilation: (format, head_dim, page_size)
KINDS = (("bf16", 64, 16), ("int8", 64, 16), ("bf16", 64, 64))


def chance(seed: int, kinds: tuple[tuple[str, int, int], ...] = KINDS, device: str = "cpu") -> None:
    """Random lengths, selections, heads, tokens and cuts, judged. The same for the same seed."""
    rng = random.Random(seed)
    kv_format, head_dim, page_size = rng.choice(kinds)
    kv_heads = rng.choice((1, 2, 3, 8))
    lengths = [rng.choice((0, 1, rng.randint(1, 40), rng.randint(1, 400))) for _ in range(rng.randint(1, 7))]
    sizes: dict[str, Any] = {"page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
    cache, seqs = make_cache(lengths, kv_format=kv_format, seed=seed, **sizes)
    options = {
        "heads": rng.choice((1, kv_heads)),
        "share": rng.random(),
        "group": rng.choice((1, 2, 4)),
        "tokens": rng.choice((1, 1, 2, 5)),
        "beyond": rng.choice((0, -1)),
        "most": rng.choice((1, 2, 5, 100)),
        "room": rng.choice((0, 0, 33)),
        "splitting": rng.choice((SMALL, None, UNCUT, FOLDED, PAIRS)),
        "mode": (rng.random() < 0.5, rng.randint(0, 9)),
        "runs": kv_format not in ("bf16", "fp16") and rng.random() < 0.5,
    }
    try:
        check(cache, seqs, seed=seed, device=device, **options)
    except AssertionError as error:
        raise AssertionError(f"{seed=}, {kv_format}, {sizes}, {lengths=}, {options}: {error}") from None
