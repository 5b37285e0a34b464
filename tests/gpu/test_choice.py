"""An indexer's choice by kernels, in the emulator: scores against float64, and lists that any scores may have."""

from __future__ import annotations

import pytest
import torch
from choice_cases import CASES, Problem, check
from oracle import randn

import tilewise
from tilewise import arch
from tilewise.gpu import choice
from tilewise.gpu.abi import Divisor
from tilewise.kvcache.slots import upload

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("lengths", "counts", "topk", "sizes"), CASES)
def test_the_best_are_chosen(lengths, counts, topk, sizes):
    problem = Problem(lengths, counts, topk, **sizes)
    found = problem.choose("emulator")
    check(problem, found)
    stored = problem.choose("emulator", rows=True)
    its = problem.cache.page_table(problem.seqs)[problem.members]
    size = problem.cache.page_size
    where = its.gather(1, (found.clamp(0) // size).long()) * size + found.clamp(0) % size
    assert torch.equal(stored, where.masked_fill(found < 0, -1))


def test_a_token_whose_own_key_begins_a_block():
    """And those around it: each likes its own key best."""
    problem = Problem([262], 10, 1)
    problem.weights = problem.weights.abs()
    index = problem.cache.index_keys
    own = 20 * problem.q.float().sum(1).sign()
    index.stored(2)[index.places(problem.seqs)[0, 252:]] = own.to(torch.bfloat16)
    problem.keys[0][252:] = own
    found = problem.choose("emulator")
    check(problem, found)
    assert 256 in found
    problem.q[:] = own.sign()[:, None].to(torch.bfloat16)
    assert problem.choose("emulator").flatten().tolist() == list(range(252, 262))


def run(problem, **emulated):
    stored = problem.cache.index_keys.stored(2)
    return choice.run_choice(problem.q, problem.weights, stored, problem.plan, rows=False, send=upload, **emulated)


@pytest.mark.parametrize("late", [True, False])
def test_in_any_order_and_without_races(late):
    problem = Problem([300, 70, 257], [5, 3, 2], 20, heads=40, dim=48, seed=3)
    found = run(problem, races=True, late=late, seed=11)
    check(problem, found)
    assert torch.equal(found, run(problem))


@pytest.mark.parametrize("card", ["sm_80", "sm_89"])
def test_other_cards(card):
    with arch.as_card(card):
        problem = Problem([300, 70], [2, 3], 20, heads=64, dim=128)
        check(problem, problem.choose("emulator"))


def test_few_scores_at_a_time(monkeypatch):
    """Groups of rows, tiles of a few of them: the same lists; and sequences that take all they see keep no scores."""
    problem = Problem([300, 5, 20, 257, 64], [9, 5, 1, 7, 64], 20)
    wanted = problem.choose("emulator")
    check(problem, wanted)
    monkeypatch.setattr(choice, "ROWS", 4)
    monkeypatch.setattr(choice, "AT_ONCE", 1000)
    choice._sent.clear()
    assert torch.equal(problem.choose("emulator"), wanted)
    assert len(choice._sent[problem.plan][problem.q.device].groups) > 3


def test_batches_and_chunks_change_no_bit():
    """A token's scores have the same bits alone, in a chunk and beside others; two layers share a plan's lists."""
    problem = Problem([400, 300], [70, 1], 33, heads=20, dim=64, seed=5)
    wanted = problem.choose("emulator")
    stored = problem.cache.index_keys.stored(2)
    alone = Problem([400, 300], 1, 33, heads=20, dim=64, seed=5)
    alone.q, alone.weights = problem.q[[69, 70]], problem.weights[[69, 70]]
    assert torch.equal(run(alone), wanted[[69, 70]])
    assert choice._sent[problem.plan][problem.q.device].groups
    assert torch.equal(
        choice.run_choice(problem.q, problem.weights, stored, problem.plan, rows=False, send=upload), wanted
    )


# ---- standing plans --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["emulator", "cpu"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_sequences_that_come_go_and_grow(backend, tokens):
    """A standing plan gives what a plan of the moment gives; idle rows are not read, and choose nothing."""
    dtype = torch.bfloat16 if backend == "emulator" else torch.float32
    problem = Problem([300, 7, 130, 65], tokens, 16, heads=5, dim=40, dtype=dtype, seed=2, spare=30)
    cache, index = problem.cache, problem.cache.index_keys
    standing = tilewise.plan_choice(cache, [], tokens, topk=16, rows=5, max_length=700)
    a, b, c, d = problem.seqs
    for step, seqs in enumerate(([a, b, c], [c, a], [], [d, a, b, c], [b, d], [d])):
        if step:
            slots = cache.extend([a, d], [1, 40])
            index.write(2, slots, randn(len(slots), 40, seed=step).to(dtype))
        assert tilewise.renew_plan(standing, cache, seqs) is standing
        live = tokens * len(seqs)
        q, weights = randn(5 * tokens, 5, 40, dtype=dtype, seed=step), randn(5 * tokens, 5, seed=step)
        q[live:], weights[live:] = torch.nan, torch.nan
        found = tilewise.choose_keys(q, weights, cache, 2, standing, backend=backend.replace("cpu", "auto"))
        assert (found[live:] == -1).all()
        now = tilewise.plan_choice(cache, seqs, tokens, topk=16)
        wanted = tilewise.choose_keys(q[:live], weights[:live], cache, 2, now, backend=backend.replace("cpu", "auto"))
        assert torch.equal(found[:live], wanted)


def test_what_was_chosen_is_read():
    """A server's step: standing plans of the choice and of the decode, renewed together; the same as on a CPU."""
    cache = tilewise.PagedKVCache(24, 16, 1, head_dim=576, value_dim=512, shared_kv=True, index_dim=32)
    seqs = cache.allocate(3)
    slots = cache.extend(seqs, [150, 40, 90])
    cache.write(0, slots, randn(280, 1, 576, dtype=torch.bfloat16, seed=1))
    cache.index_keys.write(0, slots, randn(280, 32, seed=2))
    choosing = tilewise.plan_choice(cache, [], topk=24, rows=4, max_length=300)
    reading = tilewise.plan_decode(cache, [], num_heads=8, rows=4, max_length=300)
    q, weights = randn(4, 4, 32, dtype=torch.bfloat16, seed=3), randn(4, 4, seed=4)
    rows = randn(4, 1, 8, 576, dtype=torch.bfloat16, seed=5)
    for live in (seqs[:2], [seqs[2], *seqs[:2]], [], seqs[1:2]):
        for plan in (choosing, reading):
            tilewise.renew_plan(plan, cache, live)
        found = []
        for backend in ("emulator", "auto"):
            lists = tilewise.choose_keys(q, weights, cache, 0, choosing, backend=backend)
            found.append((lists, tilewise.decode(rows, cache, 0, reading, indices=lists[:, None], backend=backend)))
        assert torch.equal(found[0][0], found[1][0])
        torch.testing.assert_close(found[0][1], found[1][1], rtol=2**-7, atol=2**-7)
        assert not found[0][1][len(live) :].any()


def test_what_a_standing_plan_says_stays_in_its_place():
    problem = Problem([300, 65], 1, 16)
    standing = tilewise.plan_choice(problem.cache, problem.seqs, topk=16, rows=3, max_length=400)
    q, weights = randn(3, 8, 32, dtype=torch.bfloat16), randn(3, 8)

    def run():
        found = tilewise.choose_keys(q, weights, problem.cache, 2, standing, backend="emulator")
        (sent,) = choice._sent[standing].values()
        (group,) = sent.groups
        return found, [x.data_ptr() for x in (sent.pages, sent.lists, group.tiles, group.rows)]

    before = run()
    tilewise.renew_plan(standing, problem.cache, problem.seqs[::-1])
    after = run()
    assert before[1] == after[1]
    assert (after[0][0] != before[0][0]).any()


def test_many_tiles():
    """More of them than a block has threads to look at once."""
    problem = Problem([70] * 9 + [600], [70] * 9 + [1], 16)
    choice._sent.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "ROWS", 2)
        check(problem, problem.choose("emulator"))
    (sent,) = choice._sent[problem.plan].values()
    assert [len(group.tiles) for group in sent.groups] == [9 * 35 + 1]


# ---- lists by given scores -------------------------------------------------------------------------------------------
def selected(rows, topk, counts=None, **emulated):
    """Lists of keys by these scores, (rows, keys); counts: of keys that a row sees, all if None."""
    kept, keys = rows.shape
    width = -(-keys // 4) * 4
    scores = torch.full((kept, width), torch.nan)
    scores[:, :keys] = rows
    counts = [keys] * kept if counts is None else counts
    listed = torch.tensor([[n, 0, count - 1, n] for n, count in enumerate(counts)], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    chosen = torch.full((kept, topk), -7, dtype=torch.int32)
    its = choice.IndexTable(table.data_ptr(), 1, Divisor.by(256))
    choice.select(scores, listed, its, chosen, False, {"pages": table}, **emulated)
    return chosen


def expected(rows, topk, counts=None):
    """The first of equal scores; NaN after all others."""
    lists = []
    for n, row in enumerate(rows.double().tolist()):
        seen = row if counts is None else row[: counts[n]]
        order = sorted(range(len(seen)), key=lambda i: (seen[i] != seen[i], -seen[i] if seen[i] == seen[i] else 0.0, i))
        its = sorted(order[:topk])
        lists.append(its + [-1] * (topk - len(its)))
    return torch.tensor(lists, dtype=torch.int32)


def hostile(keys):
    """Scores of all kinds: equal ones, few values, zeros of both signs, huge, tiny, infinite and NaN."""
    given = randn(12, keys, seed=keys)
    given[1] = 0.0
    given[2] = given[2].round()
    given[3] *= 1e-42
    given[4] *= 1e38
    given[5].relu_()
    given[6] = given[6].sign() * 0.0
    given[7, ::3] = torch.nan
    given[7, 1::5] = torch.inf
    given[8] = torch.nan
    given[9, ::2] = -torch.inf
    given[10] = torch.linspace(1, 1 + 2.0**-20, keys)  # that differ in the last digit alone
    given[11] = -given[11].abs()
    return given


@pytest.mark.parametrize(
    ("keys", "topk"), [(1, 1), (5, 4), (63, 8), (4096, 2048), (4097, 64), (9000, 2048), (130, 130)]
)
def test_scores_of_all_kinds(keys, topk):
    given = hostile(keys)
    assert torch.equal(selected(given, topk), expected(given, topk))


def test_keys_that_a_row_does_not_see():
    given = hostile(300)
    given[:, 200:] = torch.inf
    counts = [200, 1, 3, 4, 5, 6, 7, 150, 199, 198, 197, 64]
    assert torch.equal(selected(given, 5, counts, races=True), expected(given, 5, counts))


# ---- what no kernel serves -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dtype": torch.float32}, 'bfloat16 and float16, got torch.float32; use backend="cpu"'),
        ({"heads": 129}, "up to 128 heads of up to 128 channels, a multiple of 8, got 129 of 32"),
        ({"dim": 36}, "got 8 of 36"),
        ({"dim": 136}, "got 8 of 136"),
    ],
)
def test_what_is_not_served(sizes, message):
    with pytest.raises(NotImplementedError, match=message):
        Problem([9], 1, 4, **sizes).choose("emulator")


def test_q_of_another_dtype():
    problem = Problem([9], 1, 4)
    problem.q = problem.q.half()
    with pytest.raises(NotImplementedError, match=r"the dtype of the cache's index keys, torch\.bfloat16, got"):
        problem.choose("emulator")


def test_strides_and_addresses():
    """Queries and weights that are parts of larger tensors, and at odd addresses."""
    problem = Problem([300, 65], [2, 1], 20, heads=16, dim=32)
    wanted = problem.choose("emulator")
    wide = torch.full((3, 16, 80), torch.nan, dtype=torch.bfloat16)
    wide[..., 33:65] = problem.q
    problem.q = wide[..., 33:65]
    weights = torch.full((16, 5), torch.nan)
    weights[:, 1:4] = problem.weights.T
    problem.weights = weights[:, 1:4].T
    assert torch.equal(problem.choose("emulator"), wanted)
