"""The tree of shared pages as flat arrays, against page lists compared pair by pair."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from tree_cases import first_seen, random_lists, tree_lists

from tilewise.plan.cost import CPU_COST, GPU_COST, MMA_COST, CostModel
from tilewise.plan.flat import (
    FEW,
    Judge,
    PageTable,
    choose_nodes,
    cut_nodes_at_breaks,
    find_spans,
    of_deepest,
    stored_tokens,
    tree_order,
)
from tilewise.plan.tiles import Ints
from tilewise.scores import Reach

Group = tuple[tuple[int, ...], int]  # members, and how many leading pages all of them have


def groups_of(lists: list[Ints]) -> list[Group]:
    """Every prefix at which two lists part, and all lists that begin with it; larger groups first."""
    tuples = [tuple(x.tolist()) for x in lists]
    prefixes = set()
    for a, b in combinations(tuples, 2):
        same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        prefixes.add(a[:same])
    groups = [(tuple(n for n, x in enumerate(tuples) if x[: len(p)] == p), len(p)) for p in prefixes if p]
    return sorted(groups, key=lambda group: group[1])


def chosen_of(
    groups: list[Group], lengths: list[int], page_size: int, tokens: int, reach: Reach, judge: Judge | None
) -> set[tuple[tuple[int, ...], int, int]]:
    """What choose_nodes says of itself, in plain words: members, start and stop."""
    shared: dict[tuple[int, ...], tuple[int, int]] = {}
    alone_us = saved_us = 0.0
    for members, depth in groups:
        above = max((stop for other, (_, stop) in shared.items() if set(members) <= set(other)), default=0)
        start = max(above, first_seen(max(lengths[m] for m in members) - 1, *reach))
        stop = min(depth * page_size, min(lengths[m] for m in members) - tokens + 1)
        if stop <= start:
            continue
        asked = (len(members), stop - start)
        if judge is None or judge.node_us(*asked)[1] > 0:
            shared[members] = start, stop
            if judge is not None:
                alone_us, saved_us = (x + y for x, y in zip((alone_us, saved_us), judge.node_us(*asked), strict=True))
    if judge is not None and shared:
        own = sum(n - first_seen(n - tokens, *reach) for n in lengths)
        own -= sum(len(members) * (stop - start) for members, (start, stop) in shared.items())
        widest = max(len(members) for members in shared) * judge.rows_each // judge.heads_kv
        if not judge.cost.pays(alone_us, saved_us, own * judge.kv_bytes, widest):
            return set()
    return {(members, start, stop) for members, (start, stop) in shared.items()}


def random_batch(seed: int) -> tuple[list[Ints], list[int], int, int, Reach]:
    rng = np.random.default_rng(seed)
    page_size, long = int(rng.choice([1, 4, 16])), int(rng.choice([1, 25]))
    lists, lengths = random_lists(rng, page_size)
    lists = [(x[:, None] * long + np.arange(long)).astype(np.int32).ravel() for x in lists]
    left = None if rng.random() < 0.5 else int(rng.choice([0, 3, 20, 500]))
    tokens, chunk = int(rng.choice([1, 1, 2, 5])), int(rng.choice([0, 0, 0, 17, 64, 300]))
    return lists, [n * long for n in lengths], page_size, tokens, Reach(left, chunk)


def test_the_order_puts_lists_with_a_common_prefix_side_by_side() -> None:
    for seed in range(60):
        lists = random_batch(seed)[0]
        order, common = tree_order(*PageTable.of(lists))
        assert order.tolist() == sorted(range(len(lists)), key=lambda n: lists[n].tobytes())
        assert order.dtype == np.int32
        spans = find_spans(common)
        found = {tuple(sorted(order[a:b].tolist())): d for a, b, d in zip(*spans[:3], strict=True)}
        assert found == dict(groups_of(lists))


def test_of_a_list_and_its_continuation_by_page_0_the_shorter_comes_first() -> None:
    lists = [np.array(x, np.int32) for x in ([3, 0, 0], [3], [3, 0], [], [3, 0])]
    order, common = tree_order(*PageTable.of(lists))
    assert order.tolist() == [3, 1, 2, 4, 0]
    assert common.tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize("prefix", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("pages", [2, 300])  # that a list may go on with: all differ there, or some do not
def test_lists_behind_one_prefix(prefix: int, pages: int) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        begin = rng.integers(0, 1000, prefix)
        own = [rng.integers(0, pages, rng.integers(0 if seed % 4 == 0 else 1, 12)) for _ in range(rng.integers(2, 9))]
        lists = [np.concatenate([begin, x]).astype(np.int32) for x in own]
        order, common = tree_order(*PageTable.of(lists))
        assert order.tolist() == sorted(range(len(lists)), key=lambda n: lists[n].tobytes())
        for a, b, found in zip(order[:-1].tolist(), order[1:].tolist(), common.tolist(), strict=True):
            assert np.array_equal(lists[a][:found], lists[b][:found])
            assert found == min(len(lists[a]), len(lists[b])) or lists[a][found] != lists[b][found]


def test_what_the_deepest_node_says() -> None:
    met = 0
    for seed in range(100):
        lists, lengths, page_size, tokens, _ = random_batch(seed)
        order, common = tree_order(*PageTable.of(lists))
        nodes = choose_nodes(common, np.array(lengths, np.int64)[order], page_size, tokens, Reach(), None)
        values = np.random.default_rng(seed).integers(1, 100, len(nodes))
        expected = np.zeros(len(lists), np.int64)
        for (first, count, *_), value in zip(nodes.tolist(), values.tolist(), strict=True):
            expected[first : first + count] = value
        assert of_deepest(nodes, values, len(lists)).tolist() == expected.tolist()
        met += len(nodes) > FEW
    assert met > 5


@pytest.mark.parametrize("count", [0, 1])
def test_no_or_one_list_has_no_neighbours(count: int) -> None:
    order, common = tree_order(*PageTable.of([np.arange(3, dtype=np.int32)] * count))
    assert (order.tolist(), common.tolist()) == (list(range(count)), [])
    assert choose_nodes(common, np.full(count, 40), 16, 1, Reach(), None).shape == (0, 5)


def test_a_node_knows_the_depth_of_the_one_around_it() -> None:
    spans = find_spans(np.array([2, 5, 5, 3, 2, 0, 4]))
    assert [*zip(*spans, strict=True)] == [(0, 6, 2, 0), (1, 5, 3, 2), (1, 4, 5, 3), (6, 8, 4, 0)]


@pytest.mark.parametrize("cost", [None, CPU_COST, GPU_COST, MMA_COST])
def test_the_nodes_that_are_shared(cost: CostModel | None) -> None:
    met = 0
    for seed in range(250):
        lists, lengths, page_size, tokens, reach = random_batch(seed)
        judge = None if cost is None else Judge(cost, 32 * tokens, 8, 128, 4096.0)
        order, common = tree_order(*PageTable.of(lists))
        length = np.array(lengths, np.int64)[order]
        nodes = choose_nodes(common, length, page_size, tokens, reach, judge)
        found = {(tuple(sorted(order[a : a + n].tolist())), start, stop) for a, n, start, stop, _ in nodes.tolist()}
        assert found == chosen_of(groups_of(lists), lengths, page_size, tokens, reach, judge)
        for n, (first, size, start, _, above) in enumerate(nodes.tolist()):
            assert above < n
            around = [m for m, (a, k, *_) in enumerate(nodes[:n].tolist()) if a <= first and first + size <= a + k]
            assert above == max(around, default=-1)
            assert start >= (nodes[above, 3] if above >= 0 else 0)
        met += len(nodes)
    assert met > 20


@dataclass(frozen=True)
class Willing(CostModel):
    """Takes whatever nodes are worth sharing by themselves."""

    def pays(self, *args: Any) -> bool:
        return True


@dataclass(frozen=True)
class Pairs(Willing):
    """Shares pairs alone."""

    def saving_us(self, sequences: int, *args: Any) -> float:
        return float(sequences == 2)


def test_a_cost_model_of_one_s_own_is_asked() -> None:
    lists = tree_lists([1, 3, 2], [4, 4, 1])
    _, common = tree_order(*PageTable.of(lists))
    lengths = np.full(6, 144)
    assert len(choose_nodes(common, lengths, 16, 1, Reach(), Judge(CostModel(0.0, 1.0, 1e12, 0.0), 1, 1, 8, 1.0))) == 4
    nodes = choose_nodes(common, lengths, 16, 1, Reach(), Judge(Pairs(0.0, 1.0, 1e12, 0.0), 1, 1, 8, 1.0))
    assert nodes.tolist() == [[2 * n, 2, 0, 128, -1] for n in range(3)]


@pytest.mark.parametrize("flops_per_us", [2e3, 1e5, 1e9])
def test_a_node_is_judged_to_the_bit_as_the_model_says(flops_per_us: float) -> None:
    """At a margin at which a node saves nothing it is not shared, at the next smaller one it is."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        size, pages, rows = (int(rng.integers(*span)) for span in ((2, 60), (1, 300), (1, 40)))
        cost = Willing(float(rng.uniform(0.1, 10)), float(rng.uniform(1e3, 1e5)), flops_per_us, 0.01)
        asked = (size, 16 * pages, rows, 96, 700.5)
        margin = cost.alone_us(*asked) / (cost.alone_us(*asked) - replace(cost, margin=1.0).saving_us(*asked))
        common, lengths = np.full(size - 1, pages), np.full(size, 16 * pages + 5000)
        for near in (np.nextafter(margin, 0), margin, np.nextafter(margin, np.inf)):
            model = replace(cost, margin=float(near))
            nodes = choose_nodes(common, lengths, 16, 1, Reach(), Judge(model, rows, 1, 96, 700.5))
            assert (len(nodes) > 0) == model.shares(*asked)


# ---- what follows from the nodes -------------------------------------------------------------------------------------
def test_tokens_in_full_pages_are_stored_once_per_prefix() -> None:
    """A page that stands after different ones is another page to a tree of prefixes."""
    for seed in range(20):
        lists, *_ = random_batch(seed)
        order, common = tree_order(*PageTable.of(lists))
        lengths = np.array([4 * len(lists[n]) for n in order], np.int64)
        prefixes = {tuple(x[: n + 1].tolist()) for x in lists for n in range(len(x))}
        assert stored_tokens(common, lengths, 4, find_spans(common)) == 4 * len(prefixes)


def test_parts_of_a_node_stand_one_above_the_other() -> None:
    """Node 0 in pages 0 | 5, 6 | 9, its children in pages 10, 11 and in 20 | 30."""
    pages = np.array([[0, 5, 6, 9, 10, 11], [0, 5, 6, 9, 10, 11], [0, 5, 6, 9, 20, 30], [0, 5, 6, 9, 20, 30]], np.int32)
    nodes = np.array([[0, 4, 0, 16, -1], [0, 2, 16, 24, 0], [2, 2, 16, 24, 0]])
    assert cut_nodes_at_breaks(nodes, pages, 4, 5).tolist() == [
        [0, 4, 0, 4, -1],
        [0, 4, 4, 12, 0],
        [0, 4, 12, 16, 1],
        [0, 2, 16, 24, 2],
        [2, 2, 16, 24, 2],
    ], "8 tokens in two parts are fewer than 5 each"
    assert cut_nodes_at_breaks(nodes, pages, 4, 4)[-2:].tolist() == [[2, 2, 16, 20, 2], [2, 2, 20, 24, 4]]
    assert cut_nodes_at_breaks(nodes, pages, 4, 6) is nodes
