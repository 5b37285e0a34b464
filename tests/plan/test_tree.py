"""plan_tree: which tokens are shared and which are a sequence's own, counted pair by pair; and how long it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cpu_seconds import cpu_seconds
from tree_cases import first_seen, make_plan, random_lists, tree_lists

from tilewise import CostModel, PagedKVCache, plan_decode
from tilewise.plan import OPEN, DecodePlan, PagedTiles
from tilewise.plan.tiles import Ints


def tiles(plan: DecodePlan) -> list[PagedTiles]:
    return [tile for tile in plan.work if isinstance(tile, PagedTiles)]


def shared_ranges(plan: DecodePlan) -> list[tuple[int, int, int]]:
    """Sequences, start and stop of each shared item."""
    each = plan.tokens_per_seq
    return [(tile.rows // each, tile.start, tile.stop) for tile in tiles(plan) if tile.rows > each]


def own_ranges(plan: DecodePlan) -> dict[int, list[tuple[int, int]]]:
    """Of each sequence, in the caller's order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for tile in tiles(plan):
        for n in range(len(tile.pages) if tile.rows == plan.tokens_per_seq else 0):
            member = int(plan.order[tile.row // plan.tokens_per_seq + n])
            found.setdefault(member, []).append((tile.start, tile.stop))
    return {member: sorted(ranges) for member, ranges in sorted(found.items())}


def check(plan: DecodePlan, lists: list[Ints], lengths: list[int], page_size: int) -> None:
    """Every row meets each token that it sees once, in its own pages; no sequence reads what none of its rows sees."""
    tokens = plan.tokens_per_seq
    met = np.zeros((len(lists), tokens, max(lengths, default=0) + 1), np.int64)
    read, places = 0, []
    for tile in tiles(plan):
        for n, pages in enumerate(tile.pages):
            places += range(int(tile.keys_at[n]), int(tile.keys_at[n]) + tile.stop - tile.start)
            read += tile.stop - tile.start
            for i in range(tile.rows):
                row = tile.row + n * tile.rows + i
                member = int(plan.order[row // tokens])
                assert (pages == lists[member][tile.start // page_size : -(-tile.stop // page_size)]).all()
                for j in range(tile.stop - tile.start):
                    low, high = tile.band
                    if (low is None or j - i >= low) and (high is None or j - i <= high):
                        met[member, row % tokens, tile.start + j] += 1
    assert sorted(places) == list(range(read)), "the picture has a place for every token read"
    assert plan.keys == (read,)
    for member, length in enumerate(lengths):
        seen = np.zeros_like(met[member])
        for t in range(tokens):
            position = length - tokens + t
            seen[t, first_seen(position, *plan.reach) : max(0, position + 1)] = 1
        assert (met[member] == seen).all(), member
        for start, stop in own_ranges(plan).get(member, []):
            assert seen[:, start:stop].any(0).all()
    rows = [
        tile.row + n * tile.rows + i for tile in tiles(plan) for n in range(len(tile.pages)) for i in range(tile.rows)
    ]
    once = len(rows) == len(set(rows))
    assert plan.exclusive == once or (once and plan.chunk)  # two ranges of a sequence may be of rows in two blocks


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_any_tree_covers_every_pair_once(seed: int, share: bool) -> None:
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 4, 16]))
    lists, lengths = random_lists(rng, page_size)
    window = None if rng.random() < 0.5 else (int(rng.choice([0, 3, 20])), 0)
    chunk = int(rng.choice([0, 0, 1, 7, 16, 40]))
    options: dict[str, Any] = {"tokens_per_seq": int(rng.choice([1, 2, 5])), "window": window, "chunk": chunk}
    plan = make_plan(lists, lengths, page_size, share=share, shortest_run=int(rng.choice([0, 4])), **options)
    check(plan, lists, lengths, page_size)
    assert (plan.shared_nodes > 0) <= share


# ---- what is shared --------------------------------------------------------------------------------------------------
def test_a_node_below_the_root_begins_where_the_root_ends() -> None:
    """Three levels: the root is node 0 of the tree, and its children know what it shares."""
    lists = tree_lists([1, 2, 2], [3, 2, 1])
    plan = make_plan(lists, [24] * 4, 4)
    assert shared_ranges(plan) == [(4, 0, 12), (2, 12, 20), (2, 12, 20)]
    assert own_ranges(plan) == {n: [(20, 24)] for n in range(4)}
    assert plan.stored_tokens == 12 + 2 * 8 + 4 * 4
    assert plan.keys == (12 + 2 * 8 + 4 * 4,)


def test_forks_store_their_common_tokens_once() -> None:
    lists = [np.array([7, 8, 9], np.int32)] * 3
    assert make_plan(lists, [9, 9, 9], 4).stored_tokens == 9
    assert make_plan(lists, [12, 12, 12], 4, share=False).stored_tokens == 12


def test_a_root_without_pages_shares_nothing() -> None:
    lists = [*tree_lists([1, 2], [3, 1]), *(x + 50 for x in tree_lists([1, 2], [2, 1]))]
    plan = make_plan(lists, [16, 16, 12, 12], 4)
    assert shared_ranges(plan) == [(2, 0, 12), (2, 0, 8)]
    assert plan.stored_tokens == 12 + 8 + 4 * 4


def test_what_an_unshared_parent_has_belongs_to_its_children() -> None:
    # An item costs 100 µs, reading a token 1 µs: sharing the root's 4 tokens would save 6 · 4 - 4.
    lists = tree_lists([1, 2, 3], [1, 20, 1])
    cost = CostModel(item_us=100.0, kv_bytes_per_us=1.0, flops_per_us=1e12, row_state_us=0.0)
    plan = make_plan(lists, [88] * 6, 4, heads=(1, 1), kv_row_bytes=1.0, share=None, cost=cost)
    assert shared_ranges(plan) == [(3, 0, 84), (3, 0, 84)]
    assert own_ranges(plan) == {n: [(84, 88)] for n in range(6)}


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_node_is_shared_as_far_as_the_first_row_of_the_shortest_sequence_sees(tokens: int) -> None:
    lists = [np.array([7, 8, 9], np.int32)] * 2
    plan = make_plan(lists, [9, 12], 4, tokens_per_seq=tokens)
    stop = 9 - tokens + 1
    assert shared_ranges(plan) == [(2, 0, stop)]
    assert own_ranges(plan) == {n: [(stop, length)] for n, length in enumerate((9, 12)) if length > stop}
    check(plan, lists, [9, 12], 4)


@pytest.mark.parametrize("left", [0, 5, 20, 100])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_window_shares_from_where_the_last_row_of_the_longest_sequence_sees(left: int, tokens: int) -> None:
    lists = tree_lists([1, 2], [5, 3])
    lengths = [24, 29]
    plan = make_plan(lists, lengths, 4, tokens_per_seq=tokens, window=(left, 0))
    start = max(0, 29 - 1 - left)
    assert shared_ranges(plan) == ([(2, start, 20)] if start < 20 else [])
    for member, length in enumerate(lengths):
        first = max(0, length - tokens - left)  # what its first row sees
        expected = [(first, start), (20, length)] if start < 20 else [(first, length)]
        assert own_ranges(plan)[member] == [(a, b) for a, b in expected if b > a]
    check(plan, lists, lengths, 4)


def test_equal_tails_of_neighbours_are_one_item() -> None:
    lists = [*tree_lists([1, 3], [4, 1]), np.arange(90, 95, dtype=np.int32)]
    plan = make_plan(lists, [20, 20, 19, 20], 4)
    tails = [(tile.row, len(tile.pages), tile.start, tile.stop) for tile in tiles(plan) if tile.rows == 1]
    assert tails == [(0, 2, 16, 20), (2, 1, 16, 19), (3, 1, 0, 20)]
    assert [tile.band for tile in tiles(plan)] == [OPEN] * 4


@pytest.mark.parametrize(("shortest", "parts"), [(0, 1), (5, 3), (6, 3), (7, 1), (100, 1)])
def test_ranges_are_cut_where_pages_are_not_consecutive(shortest: int, parts: int) -> None:
    """18 tokens in pages 4 | 9, 10 | 2, 3: six per part."""
    lists = [np.array([4, 9, 10, 2, 3], np.int32)]
    plan = make_plan(lists, [18], 4, shortest_run=shortest)
    cuts = [(0, 4), (4, 12), (12, 18)] if parts == 3 else [(0, 18)]
    assert [(tile.start, tile.stop) for tile in tiles(plan)] == cuts
    assert plan.exclusive == (parts == 1)
    check(plan, lists, [18], 4)


def test_no_sequences_are_an_empty_plan() -> None:
    plan = make_plan([], [])
    assert (plan.work, plan.rows, plan.keys, plan.stored_tokens, plan.exclusive) == ((), 0, (0,), 0, True)


# ---- time ------------------------------------------------------------------------------------------------------------
def cache_of(lists: list[list[int]]) -> PagedKVCache:
    """Sequences of one token per page."""
    table = torch.full((len(lists), max(map(len, lists))), -1, dtype=torch.int32)
    for n, pages in enumerate(lists):
        table[n, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    storage = torch.zeros(1 + max(map(max, lists)), 1, 1, 8)
    return PagedKVCache.from_pages(storage, storage.clone(), table, torch.tensor([len(x) for x in lists]))


def test_a_comb_is_planned_as_quickly_as_a_star() -> None:
    """In the comb every sequence leaves the others 16 pages later, which makes 256 levels of the tree; in the star all
    of them leave at the first level. The lists are as long in both."""
    count, step = 256, 16
    pages = list(range(count * step))
    comb = cache_of([[*pages[: (n + 1) * step - 1], count * step + n] for n in range(count)])
    ends = np.cumsum([n * step + 1 for n in range(count)]).tolist()
    star = cache_of(
        [[*range(step - 1), *range(step - 1 + end - n * step - 1, step - 1 + end)] for n, end in enumerate(ends)]
    )

    def plan_of(cache: PagedKVCache) -> Callable[[], DecodePlan]:
        return lambda: plan_decode(cache, range(count), num_heads=1, share_prefix=True)

    plan = plan_of(comb)()
    assert plan.shared_nodes >= count - 2
    assert plan.stored == count * step - 1 + count
    assert plan_of(star)().shared_nodes == 1
    star_seconds, comb_seconds = cpu_seconds(plan_of(star), plan_of(comb))
    assert comb_seconds < 0.02 * 5  # about 11 ms: the lists have a million pages
    assert comb_seconds < 5 * star_seconds, "as long. Levels × lists would be 100 times as long"


def test_a_large_plan_is_quick() -> None:
    """Four times the sequences take about four times as long, in quadratic time 16 times."""

    def plan_of(count: int) -> Callable[[], DecodePlan]:
        cache = PagedKVCache(4200, 16, 8, 128, kv_format="int4")
        root = cache.allocate()
        cache.extend([root], [32768])
        seqs = [cache.fork(root) for _ in range(count)]
        cache.extend(seqs, [128] * count)
        return lambda: plan_decode(cache, seqs, num_heads=32)

    quarter, whole = plan_of(64), plan_of(256)
    assert whole().shared_nodes == 1
    quarter_seconds, whole_seconds = cpu_seconds(quarter, whole)
    assert whole_seconds < 0.002 * 5  # about 1 ms
    assert whole_seconds < 9 * quarter_seconds
