"""Work lists, item by item, as the kernel reads them: every row meets every token that it sees once, in the states that
are merged, through the right pages, now and after its sequences have grown."""

from __future__ import annotations

from itertools import count, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from cpu_seconds import cpu_seconds
from tree_cases import first_seen, make_plan, random_lists, tree_lists

from tilewise import PagedKVCache, plan_decode
from tilewise.arguments import PageListsOf
from tilewise.plan import DecodePlan, PagedTiles, PageTable
from tilewise.plan.items import ALL_SEE, GOES_ON, OWN, Word
from tilewise.plan.tiles import Ints
from tilewise.plan.worklist import FAR, Shape, Splitting, WorkList, _uploaded, uses_tiles, work_list

SMALL = Splitting(pieces=((FAR, 32),), shared=64, tile_rows=16)


def words(items: Ints) -> list[dict[Word, int]]:
    """The items that are not empty, by the names of their words."""
    return [dict(zip(Word, item, strict=True)) for item in items.reshape(-1, 16).tolist() if item[Word.ROWS]]


def page_at(listed: WorkList, sequence: int, number: int) -> int:
    """As decode/work.cuh: PageTable looks it up."""
    at = int(listed.tail_from[sequence])
    return int(listed.pages[sequence, number] if number < at else listed.tails[sequence, number - at])


def states_now(row: np.ndarray, length: int) -> int:
    """As decode/work.cuh: States counts them."""
    _, before, grows_from, piece = row.tolist()
    return max(1, before + (-(-(length - grows_from) // piece) if length > grows_from else 0))


def check_items(listed: WorkList, plan: DecodePlan, lists: list[Ints], lengths: list[int], chunk: int) -> None:
    """All items of a list against what its sequences see now; lists and lengths in the caller's order."""
    tokens, group, heads = plan.tokens_per_seq, plan.heads_q // plan.heads_kv, plan.heads_kv
    each, first = tokens * group, lambda position: first_seen(position, *plan.reach)
    length = [lengths[n] for n in plan.order]
    size, most = listed.page_size, max(length, default=0) + 1
    met = np.zeros((len(length), heads, each, most), np.int64)
    written: dict[tuple[int, ...], int] = {}
    starts = {tile.start for tile in plan.work if isinstance(tile, PagedTiles)} | {*plan.lengths}
    streamed = [(item, False) for item in words(listed.items)]
    for item, tile in streamed + [(item, True) for item in words(listed.tile_items)]:
        table, own, kind = item[Word.TABLE], item[Word.KIND] & OWN, item[Word.KIND]
        head, caller = item[Word.CALLER_HEAD] & 0xFFF, item[Word.CALLER_HEAD] >> 12
        assert caller == plan.order[item[Word.SEQUENCE]]
        assert item[Word.START] in starts or item[Word.START] % (64 if tile else chunk) == 0
        start, stop = item[Word.START], item[Word.STOP]
        if own:
            start = max(start, first(length[table] - tokens))
            stop = max(start, min(stop, length[table]))
        for number in range(start // size, -(-stop // size) if stop > start else 0):
            assert page_at(listed, table, number) == lists[plan.order[table]][number]
        all_see = True
        for flat in range(item[Word.ROW], item[Word.ROW] + item[Word.ROWS]):
            sequence, row = item[Word.SEQUENCE] + flat // each, flat % each
            position = length[sequence] - tokens + row // group
            met[sequence, head, row, max(start, first(position)) : max(start, min(stop, position + 1))] += 1
            all_see = all_see and position + 1 >= stop
            state, now = item[Word.STATE_FOLD] >> 16, states_now(listed.states[sequence], length[sequence])
            assert state < now or (own and stop == start)
            if state < now and not kind & GOES_ON:
                written[sequence, head, row, state] = written.get((sequence, head, row, state), 0) + 1
        assert own or bool(kind & ALL_SEE) == all_see
    for sequence, end in enumerate(length):
        for row in range(each):
            position = end - tokens + row // group
            seen = np.zeros(most, np.int64)
            seen[first(position) : max(0, position + 1)] = 1
            assert (met[sequence, :, row] == seen).all(), (sequence, row)
            for head in range(heads):
                for state in range(states_now(listed.states[sequence], end)):
                    assert written.pop((sequence, head, row, state)) == 1
    assert not written
    check_copies(listed, chunk)


def check_copies(listed: WorkList, chunk: int) -> None:
    """What items repeat of their sequences' tables, and the chains of tile items."""
    size = listed.page_size
    box = next((n for n in (64, 32, 16) if size % n == 0), 16)
    for item in words(listed.items):
        at = int(listed.tail_from[item[Word.TABLE]])
        assert item[Word.TAIL_FROM] == at
        begin = item[Word.START] // chunk * chunk
        pages = [n // size for n in (begin, begin + chunk - 16)]
        expected = [int(listed.pages[item[Word.TABLE], n]) if max(pages) < at else -1 for n in pages]
        assert [item[Word.PAGE], item[Word.SECOND_PAGE]] == expected
        state_words = [item[w] for w in (Word.FIRST_STATE, Word.STATES_BEFORE, Word.GROWS_FROM, Word.PIECE)]
        assert state_words == listed.states[item[Word.SEQUENCE]].tolist()
    for block in np.swapaxes(listed.tile_items, 0, 1):
        items = words(block)
        for item, after in zip_longest(items, items[1:]):
            numbers = [(item[Word.START] // 64 * 64 + box * n) // size for n in range(4)]
            at, row = item[Word.TAIL_FROM], listed.pages[item[Word.TABLE]]
            first_pages = [item[w] for w in (Word.FIRST_STATE, Word.STATES_BEFORE, Word.GROWS_FROM, Word.PIECE)]
            assert first_pages == [int(row[n]) if n < at else -1 for n in numbers]
            if item[Word.KIND] & GOES_ON:
                assert after is not None
                same = (Word.ROWS, Word.CALLER_HEAD, Word.SEQUENCE, Word.ROW)
                assert [after[w] for w in same] == [item[w] for w in same]
                assert after[Word.START] == item[Word.STOP]
                assert after[Word.KIND] & ALL_SEE
                assert after[Word.STATE_FOLD] == item[Word.STATE_FOLD]


def check_scratch(listed: WorkList) -> None:
    """States of different sequences do not overlap, however long the sequences become."""
    taken = np.zeros(listed.total_states, np.int64)
    for row, length, capacity in zip(listed.states, listed.lengths.tolist(), listed.capacity.tolist(), strict=True):
        states = states_now(row, capacity)
        assert states >= states_now(row, length)
        if states > 1:
            assert row[0] + states <= listed.total_states
            taken[row[0] : row[0] + states] += 1
    assert (taken == 1).all()


@pytest.mark.parametrize("seed", range(40))
def test_any_list_before_and_after_growing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_size, room = int(rng.choice([4, 16, 16, 32, 48])), int(rng.choice([0, 1, 40, 100]))
    lists, lengths = random_lists(rng, page_size)
    window = None if rng.random() < 0.6 else (int(rng.choice([0, 20, 70])), 0)
    options: dict[str, Any] = {"tokens_per_seq": int(rng.choice([1, 1, 3])), "window": window, "room": room}
    options["chunk"] = int(rng.choice([0, 0, 1, 17, 64]))
    options["shortest_run"] = int(rng.choice([0, 0, page_size]))  # plans for a CPU have several ranges per sequence
    plan = make_plan(lists, lengths, page_size, heads=(int(rng.choice([4, 8])), 2), **options)
    shape = Shape(8, 2, int(rng.choice([3, 9])), bool(rng.random() < 0.6), joiners=2, chunk=int(rng.choice([16, 32])))
    splitting = [SMALL, None, Splitting(pieces=((40, 16), (FAR, 64)), whole=False, tile_rows=24)][seed % 3]
    listed = work_list(plan, lists, lengths, page_size, shape, splitting=splitting, room=room)
    assert (listed.capacity == listed.lengths + room).all()
    check_scratch(listed)
    check_items(listed, plan, lists, lengths, shape.chunk)
    fresh = count(100_000)
    for _ in range(3 if room else 0):
        lengths = [int(rng.integers(n, cap + 1)) for n, cap in zip(lengths, in_callers_order(listed), strict=True)]
        pages = [-(-n // page_size) for n in lengths]
        lists = [
            np.append(x, [next(fresh) for _ in range(n - len(x))]).astype(np.int32)
            for x, n in zip(lists, pages, strict=True)
        ]
        listed.grow(lengths, lists)
        check_items(listed, plan, lists, lengths, shape.chunk)


@pytest.mark.parametrize(
    ("fanouts", "pages", "heads"),
    [([1, 2, 32], [8, 4, 1], (8, 2)), ([1, 3, 16], [8, 4, 1], (8, 1)), ([1, 2, 2, 20], [6, 4, 4, 2], (16, 1))],
)
def test_chains_of_tile_items_are_one_state(fanouts: list[int], pages: list[int], heads: tuple[int, int]) -> None:
    lists = tree_lists(fanouts, pages)
    lengths = [len(x) * 16 for x in lists]
    plan = make_plan(lists, lengths, heads=heads, room=20)
    listed = work_list(plan, lists, lengths, 16, Shape(8, 4, 9, True, joiners=2), room=20)
    assert (listed.tile_items[..., Word.KIND] & GOES_ON).any()
    check_scratch(listed)
    check_items(listed, plan, lists, lengths, 16)


@pytest.mark.parametrize("tiles", [False, True])
def test_pieces_of_a_node_that_begins_between_two_tiles(tiles: bool) -> None:
    """The nodes of the second level begin at token 48. Their first piece ends at a multiple of 64."""
    lists = tree_lists([1, 2, 8], [3, 20, 1])
    lengths = [len(x) * 16 for x in lists]
    plan = make_plan(lists, lengths)
    splitting = Splitting(shared=64)
    listed = work_list(plan, lists, lengths, 16, Shape(8, 2, 99, tiles, chunk=32), splitting=splitting)
    found = words(listed.tile_items if tiles else listed.items)
    begins = {item[Word.START] for item in found if not item[Word.KIND] & OWN}
    assert begins == {0, 48, *range(64 if tiles else 96, 368, 64)}
    check_items(listed, plan, lists, lengths, 32)


def in_callers_order(listed: WorkList) -> list[int]:
    capacity = np.zeros_like(listed.capacity)
    capacity[listed.order] = listed.capacity
    return capacity.tolist()


# ---- growing ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [31, 32, 33])
def test_the_tail_begins_with_the_last_page(length: int) -> None:
    """A page that is just full is the last page too: the next token begins another one."""
    lists = [np.array([7, 8, 9, 5], np.int32)]
    listed = work_list(make_plan(lists, [length]), lists, [length], 16, Shape(8, 4, 4, False), room=33)
    last = (length - 1) // 16
    assert listed.tail_from.tolist() == [last]
    assert listed.pages[0, :last].tolist() == [7, 8, 9][:last]
    assert listed.tail_pages == 2 + 3
    assert listed.tails[0, : 4 - last].tolist() == [7, 8, 9, 5][last:]
    assert listed.lengths.tolist() == [length]
    assert listed.capacity.tolist() == [length + 33]


@pytest.mark.parametrize("room", [1, 15, 16, 17, 32])
@pytest.mark.parametrize("length", [0, 1, 16, 17, 47, 48])
def test_a_sequence_may_grow_token_by_token_up_to_its_room(length: int, room: int) -> None:
    pages = np.arange(50, 60, dtype=np.int32)
    first = [pages[: -(-length // 16)]]
    plan = make_plan(first, [length], heads=(4, 1), room=room)
    listed = work_list(plan, first, [length], 16, Shape(8, 4, 4, False), splitting=SMALL, room=room)
    check_scratch(listed)
    for now in range(length, length + room + 1):
        lists = [pages[: -(-now // 16)]]
        listed.grow([now], lists)
        check_items(listed, plan, lists, [now], 16)
    for refused in (length + room + 1, length + room - 1):
        with pytest.raises(ValueError, match=r"lengths must be from .* make a new plan"):
            listed.grow([refused], [pages])
    assert listed.lengths.tolist() == [length + room], "a refused length changes nothing"


class Counted(dict[int, Ints]):
    """Page lists of some sequences, in which so many pages were copied."""

    copies = 0


def test_only_the_lists_of_sequences_with_new_pages_are_read() -> None:
    lists = Counted(enumerate((np.array([1, 2], np.int32), np.array([3, 4], np.int32))))
    plan = make_plan([*lists.values()], [32, 20])
    listed = work_list(plan, lists, [32, 20], 16, Shape(8, 4, 4, False), room=20)
    listed.grow([33, 32], Counted({0: np.array([1, 2, 6], np.int32)}))
    assert listed.tails[listed.order.tolist().index(0), :2].tolist() == [2, 6]
    listed.grow([33, 32])
    with pytest.raises(KeyError):
        listed.grow([33, 33], Counted({0: lists[0]}))


def test_a_copied_page_is_read_though_no_page_is_new() -> None:
    lists = Counted(enumerate((np.array([1, 2], np.int32), np.array([3, 2], np.int32))))
    plan = make_plan([*lists.values()], [20, 20])
    listed = work_list(plan, lists, [20, 20], 16, Shape(8, 4, 4, False), room=20)
    copied = Counted({0: np.array([1, 7], np.int32), 1: lists[1]})
    copied.copies = 1
    listed.grow([21, 20], copied)
    assert listed.tails[listed.order.tolist().index(0), 0] == 7
    assert listed.tails[listed.order.tolist().index(1), 0] == 2


@pytest.mark.parametrize("chunk", [16, 32])
@pytest.mark.parametrize("whole", [False, True])
def test_room_changes_neither_pieces_nor_what_is_computed_now(whole: bool, chunk: int) -> None:
    lists = [np.arange(16, dtype=np.int32), np.arange(20, 37, dtype=np.int32)]
    lengths = [256, 257]  # one piece of 256; five pieces of 64
    plan = make_plan(lists, lengths)
    splitting = Splitting(whole=whole)
    tight, roomy = (
        work_list(plan, lists, lengths, 16, Shape(8, 4, 4, False, chunk=chunk), splitting=splitting, room=room)
        for room in (0, 700)
    )
    assert tight.states[:, 1:].tolist() == roomy.states[:, 1:].tolist()
    assert tight.states[:, 3].tolist() == ([FAR, FAR] if whole else [256, 64])
    folds = {item[Word.STATE_FOLD] & 0xFFFF for item in words(roomy.items)}
    assert folds == ({256 // chunk, 64 // chunk} if whole else {0})
    for listed in (tight, roomy):
        check_items(listed, plan, lists, lengths, chunk)


@pytest.mark.parametrize("options", [{"window": (300, 0)}, {"shortest_run": 16}])
def test_only_the_last_of_a_sequence_s_ranges_grows(options: dict[str, Any]) -> None:
    """With a window, the shorter sequence has tokens of its own before and after the node; with pages in three runs, it
    has three ranges after it."""
    lists = tree_lists([1, 2], [20, 10])
    lists = [np.append(x[:23], x[23:] + 7 * (np.arange(7) // 3 + 1)).astype(np.int32) for x in lists]
    lengths = [420, 480]
    plan = make_plan(lists, lengths, **options, room=40)
    splitting = Splitting(pieces=((FAR, 16),), whole=False)
    listed = work_list(plan, lists, lengths, 16, Shape(8, 2, 5, False), splitting=splitting, room=40)
    own = {item[Word.START] for item in words(listed.items) if item[Word.KIND] & OWN and item[Word.TABLE] == 0}
    assert len(own) > 2
    check_scratch(listed)
    for grown in (0, 1, 40):
        now = [n + grown for n in lengths]
        more = [
            np.append(x, np.arange(900, 905, dtype=np.int32))[: -(-n // 16)] for x, n in zip(lists, now, strict=True)
        ]
        listed.grow(now, more)
        check_items(listed, plan, more, now, 16)


def test_a_sequence_that_ends_with_a_node_gets_an_item_that_grows() -> None:
    """Forks that share everything: with one query token no sequence has a range of its own."""
    lists = [np.array([0, 1, 2], np.int32)] * 3
    plan = make_plan(lists, [48] * 3)
    assert len(plan.work) == 1
    for room, own in ((0, 0), (5, 3)):
        listed = work_list(plan, lists, [48] * 3, 16, Shape(8, 4, 4, False), room=room)
        found = [item for item in words(listed.items) if item[Word.KIND] & OWN]
        assert len(found) == 2 * own
        assert all((item[Word.START], item[Word.STOP]) == (48, 53) for item in found)
        check_items(listed, plan, lists, [48] * 3, 16)


def test_an_empty_sequence_has_one_item_per_head() -> None:
    lists = [np.zeros(0, np.int32)]
    listed = work_list(make_plan(lists, [0]), lists, [0], 16, Shape(8, 4, 4, False))
    assert [item[Word.STOP] - item[Word.START] for item in words(listed.items)] == [0, 0]


# ---- memory ----------------------------------------------------------------------------------------------------------
def test_the_words_of_an_item_stand_where_the_kernel_reads_them() -> None:
    """decode/work.cuh: DecodeItem. One sequence, number 1 of the caller's, with 40 tokens in pages 5, 3, 4."""
    lists = [np.array([8, 9], np.int32), np.array([5, 3, 4], np.int32)]
    plan = make_plan(lists, [20, 40], heads=(8, 2))
    splitting = Splitting(pieces=((FAR, 32),), whole=False)
    listed = work_list(plan, lists, [20, 40], 16, Shape(8, 1, 8, False), splitting=splitting)
    assert listed.items.dtype == np.int32
    assert plan.order.tolist() == [1, 0]
    #        sequence row rows caller·4096+head table start stop state·65536+fold page tail_from states… kind second
    first = [0, 0, 4, 4096, 0, 0, 32, 0, 5, 2, 0, 0, 0, 32, OWN, 5]
    second = [0, 0, 4, 4097, 0, 32, 40, 1 << 16, -1, 2, 0, 0, 0, 32, OWN, -1]
    found = [item for item in listed.items.reshape(-1, 16).tolist() if item[Word.ROWS]]
    assert first in found
    assert second in found
    assert len(found) == 2 * 2 + 2
    assert listed.total_states == 2


def test_tiles_are_used_from_so_many_rows_on() -> None:
    lists = tree_lists([1, 4], [4, 1])
    lengths = [80] * 4
    for group, tokens, used in ((8, 1, True), (7, 1, False), (4, 2, True), (4, 1, False)):
        plan = make_plan(lists, lengths, heads=(2 * group, 2), tokens_per_seq=tokens)
        assert uses_tiles(plan) == used
        listed = work_list(plan, lists, lengths, 16, Shape(8, 4, 8, True))
        assert (len(words(listed.tile_items)) > 0) == used
    alone = make_plan(lists[:1], lengths[:1], heads=(128, 2))
    assert not uses_tiles(alone), "rows of one sequence stream, however many they are"


# ---- page tables -----------------------------------------------------------------------------------------------------
def test_a_cache_s_lists_read_at_once_are_its_lists_read_one_by_one() -> None:
    cache = PagedKVCache(num_pages=64, page_size=16, num_kv_heads=1, head_dim=8, num_layers=1)
    root = cache.allocate()
    cache.mark_written(cache.extend([root], [100]))
    seqs = [cache.fork(root), cache.allocate(), cache.fork(root), cache.allocate()]
    cache.mark_written(cache.extend(seqs[:2], [28, 16]))  # 128 tokens: as many pages as the table is wide
    plan = plan_decode(cache, seqs, num_heads=2, share_prefix=True, room=300)
    at_once, one_by_one = (
        work_list(plan, lists, plan.lengths, 16, Shape(8, 4, 4, False), room=300)
        for lists in (PageListsOf(cache, plan.seqs), [cache.page_list(seq) for seq in seqs])
    )
    assert not at_once.pages[np.arange(at_once.pages.shape[1]) >= at_once.tail_from[:, None]].any()
    for grown in range(3):
        for name in ("items", "pages", "live", "tail_from", "states"):
            assert (getattr(at_once, name) == getattr(one_by_one, name)).all(), (grown, name)
        cache.mark_written(cache.extend(seqs, [5, 1, 16, 0]))  # copies the shared last page first
        lengths = cache.lengths_of(seqs)
        at_once.grow(lengths, PageListsOf(cache, plan.seqs))
        one_by_one.grow(lengths, [cache.page_list(seq) for seq in seqs])


def test_arrays_that_go_to_a_device_together_are_each_themselves() -> None:
    shapes = {"items": (3, 5, 16), "tile_items": (0, 3, 16), "order": (7,), "states": (7, 4)}
    arrays = {name: torch.randint(0, 99, shape, dtype=torch.int32) for name, shape in shapes.items()}
    there = _uploaded(arrays, torch.device("cpu"))
    assert list(there) == list(arrays)
    for name, x in there.items():
        assert torch.equal(x, arrays[name])
        assert x.is_contiguous()
        assert x.storage_offset() % 32 == 0
    assert len({x.untyped_storage().data_ptr() for x in there.values()}) == 1


@pytest.mark.parametrize("room", [0, 30])
@pytest.mark.parametrize("grown", [[0, 0, 1, 0, 0], [20, 0, 3, 7, 17]])
def test_what_came_between_plan_and_list_is_each_sequence_s_own(room: int, grown: list[int]) -> None:
    """Two forks that share all they have, two sequences under a node, one by itself."""
    fork = np.arange(40, 43, dtype=np.int32)
    lists = [fork, fork, *tree_lists([1, 2], [3, 1]), np.arange(60, 65, dtype=np.int32)]
    plan = make_plan(lists, [48, 48, 60, 64, 70], room=room)
    assert plan.shared_nodes == 2
    lengths = [n + more for n, more in zip([48, 48, 60, 64, 70], grown, strict=True)]
    lists = [np.append(x, 100 * n + np.arange(3)).astype(np.int32) for n, x in enumerate(lists)]
    listed = work_list(plan, lists, lengths, 16, Shape(8, 4, 4, False), splitting=SMALL, room=room)
    check_scratch(listed)
    check_items(listed, plan, lists, lengths, 16)


# ---- time ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fanouts", [[256], [1, 256], [1, 8, 8, 4]])
def test_hundreds_of_sequences_are_planned_and_listed_quickly(fanouts: list[int]) -> None:
    """256 sequences of unequal lengths: by themselves, under one prefix, in a tree of three levels."""
    lists = tree_lists(fanouts, [512, 64, 32, 32][-len(fanouts) :])
    lengths = [16 * len(x) - 13 * n % 500 for n, x in enumerate(lists)]
    table = PageTable.of(lists)

    def plan_and_list() -> WorkList:
        plan = make_plan(table, lengths, heads=(32, 8), room=64)
        return work_list(plan, Table(table), lengths, 16, Shape(8, 4, 132, len(fanouts) > 1, joiners=2), room=64)

    assert len(plan_and_list().order) == 256
    (seconds,) = cpu_seconds(plan_and_list)
    assert seconds < 0.002 * 5  # under 2 ms on a quiet machine


class Table:
    """Page lists that are read at once."""

    def __init__(self, pages: PageTable) -> None:
        self.pages = np.pad(pages.table, ((0, 0), (0, 10)))

    def __getitem__(self, n: int) -> Ints:
        raise AssertionError("one by one")

    def block(self, numbers: np.ndarray, first: np.ndarray, width: int) -> Ints:
        return self.pages[numbers[:, None], first[..., None] + np.arange(width)]
