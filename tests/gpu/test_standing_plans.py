"""Standing plans in the emulator: the planner makes the list, the decode kernels walk it, step after step."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from standing_cases import Churn

import tilewise as tw
from tilewise import reference
from tilewise.gpu import planner
from tilewise.gpu.decode import kept
from tilewise.kvcache.slots import room_for
from tilewise.plan.tree import plan_tree
from tilewise.plan.worklist import Shape, Splitting


def exact(cache: tw.PagedKVCache, seq: int, q: torch.Tensor, window: tuple[int, int] | None) -> torch.Tensor:
    """(tokens, Hq, D): attention in float64 over the sequence's tokens."""
    k, v = (x[None].double() for x in cache.gather(0, seq))
    return reference.attention(q[None].double(), k, v, causal=True, window=window)[0][0]


def plan_as_on_a_card(cache: tw.PagedKVCache, seqs: list[int], heads: int, **options) -> tw.DecodePlan:
    """plan_decode of sequences that share nothing, without the CPU's cuts where pages are not consecutive."""
    return plan_tree(
        seqs, [cache.page_list(s) for s in seqs], cache.lengths_of(seqs), cache.page_size, heads_q=heads,
        heads_kv=cache.num_kv_heads, head_dim=cache.head_dim, kv_row_bytes=1.0, io_bytes=2, share=False,
        cache_serial=cache.serial, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kv_format", "dtype", "heads", "group", "page_size", "options"),
    [
        ("bf16", torch.bfloat16, 4, 2, 16, {"share_prefix": False}),
        ("bf16", torch.bfloat16, 1, 8, 16, {"share_prefix": True}),
        ("fp16", torch.float16, 1, 16, 64, {"share_prefix": True, "window": (70, 0), "tokens_per_seq": 2}),
        ("int8", torch.bfloat16, 2, 4, 16, {"share_prefix": True}),
        ("int4", torch.float16, 1, 4, 24, {"share_prefix": False, "window": (50, 0)}),
        ("fp32", torch.float32, 1, 2, 16, {"share_prefix": True, "tokens_per_seq": 3}),
        ("bf16", torch.bfloat16, 1, 8, 16, {"share_prefix": False, "value_dim": 128}),
        ("fp16", torch.float16, 1, 8, 24, {"share_prefix": True, "window": (50, 0), "value_dim": 128}),
    ],
)
def test_every_step_is_that_of_a_fresh_plan(kv_format, dtype, heads, group, page_size, options):
    """value_dim: of latent rows."""
    value_dim = options.get("value_dim")
    options = {name: x for name, x in options.items() if name != "value_dim"}
    of = Churn(7, kv_format, dtype, heads, page_size, dim=192 if value_dim else 64, value_dim=value_dim)
    rows, tokens = 6, options.get("tokens_per_seq", 1)
    plan = tw.plan_decode(of.cache, [], num_heads=heads * group, rows=rows, max_length=400, **options)
    for _ in range(3):
        of.step(rows)
        tw.renew_plan(plan, of.cache, of.seqs)
        q = torch.randn(rows, tokens, heads * group, of.dim).to(dtype)
        o, lse = tw.decode(q, of.cache, 0, plan, return_lse=True, backend="emulator")
        n = len(of.seqs)
        assert not o[n:].any()
        assert (lse[n:] == -torch.inf).all()
        if not n:
            continue
        if not options["share_prefix"]:
            fresh = plan_as_on_a_card(of.cache, of.seqs, heads * group, window=options.get("window"))
            expected, expected_lse = tw.decode(q[:n], of.cache, 0, fresh, return_lse=True, backend="emulator")
            assert torch.equal(o[:n], expected)
            assert torch.equal(lse[:n], expected_lse)
            continue
        for one, row, seq in zip(o, q, of.seqs, strict=False):
            found = exact(of.cache, seq, row, options.get("window"))
            assert (one.double() - found).abs().max() < {torch.float32: 1e-5}.get(dtype, 2e-2)


def test_steps_of_growth_send_what_changed():
    """Every length, and each page once, also when others came and went between, or a step was not planned; and where
    the new tokens are."""
    of = Churn(3, "bf16", torch.bfloat16, 1, 4)
    while len(of.seqs) < 5:
        of.step(6)
    of.cache._by_kernel = True
    slots = room_for(of.cache, 6, planned=True)
    plan = tw.plan_decode(of.cache, of.seqs, num_heads=2, rows=6, max_length=400, share_prefix=True)
    listed = planner.PlannedList(plan, Shape(4, 4, 4, tiles=False), Splitting(), torch.device("cpu"))
    kept(plan).lists["one"] = listed
    grown = []
    for step in range(60):
        if step in (20, 40):
            of.step(6)
        slots = of.cache.extend(of.seqs, 1, into=slots)
        of.cache.mark_written(slots)
        if step == 10:
            assert slots.index.tolist() == slots.host_index.tolist(), "asked for before any plan"
            continue
        tw.renew_plan(plan, of.cache, of.seqs)
        (count, nodes, *_), rest = listed._step[:4].tolist(), listed._step[4:]
        order, place, lengths, _ = rest[: 4 * count].view(-1, 4).T.tolist()
        seqs = [of.seqs[n] for n in order]
        assert sorted(seqs) == sorted(of.seqs)
        assert lengths == [of.cache.length(seq) for seq in seqs]
        assert rest[4 * count :][: 5 * nodes].tolist() == plan.arrange().nodes.ravel().tolist()
        for row, seq in zip(place, seqs, strict=True):
            pages = of.cache.page_list(seq)
            assert listed.pages[row, : len(pages)].tolist() == pages.tolist()
        idle = 6 - count
        assert slots._places.late is None
        assert slots.all_positions.tolist() == slots.host_positions.tolist() + [0] * idle
        assert slots.all_index.tolist() == slots.host_index.tolist() + [-1] * idle
        if step not in (0, 11, 20, 40):
            updates = listed.stage._args.updates
            assert updates == sum(of.cache.length(seq) % 4 == 1 for seq in seqs), "pages that were there already"
        grown.append(listed.stage.grown)
    assert sum(number > 0 for number in grown) > 50, "runs were not seen as such"


def test_places_wait_for_the_plan_of_their_sequences():
    """Of another plan, or after another step, they are filled in as they were asked for."""
    of = Churn(3, "bf16", torch.bfloat16, 1, 4)
    while len(of.seqs) < 3:
        of.step(4)
    of.cache._by_kernel = True
    slots = of.cache.extend(of.seqs, 1, into=room_for(of.cache, 6, planned=True))
    of.cache.mark_written(slots)
    assert slots._places.late is not None
    plan = tw.plan_decode(of.cache, of.seqs[:2], num_heads=2, rows=6, max_length=400)
    assert slots._places.late is None
    assert slots.index.tolist() == slots.host_index.tolist()
    slots = of.cache.extend(of.seqs, 1, into=slots)
    of.cache.mark_written(slots)
    first = slots.host_index.tolist()
    of.cache.extend(of.seqs, 1)
    kept(plan).lists["one"] = planner.PlannedList(plan, Shape(4, 4, 4, tiles=False), Splitting(), torch.device("cpu"))
    tw.renew_plan(plan, of.cache, of.seqs)
    assert slots._places.tensor[1, : len(first)].tolist() == first


def test_the_list_is_made_by_the_first_layer_that_asks():
    of = Churn(5, "bf16", torch.bfloat16, 1, 16)
    seq = of.new(20)
    plan = tw.plan_decode(of.cache, [seq], num_heads=2, rows=2, max_length=100)
    q = torch.randn(2, 1, 2, 64).bfloat16()
    tw.decode(q, of.cache, 0, plan, backend="emulator")
    (listed,) = kept(plan).lists.values()
    listed.made.zero_()
    tw.decode(q, of.cache, 0, plan, backend="emulator")
    assert not listed.made.any(), "made again for another layer"
    of.grow([seq], 1)
    tw.renew_plan(plan, of.cache, [seq])
    assert not listed.made.any()
    assert listed.live[0] == 20
    tw.decode(q, of.cache, 0, plan, backend="emulator")
    assert listed.made.any()
    assert listed.live[0] == 21


def test_every_capture_makes_the_list_once(monkeypatch):
    of = Churn(5, "bf16", torch.bfloat16, 1, 16)
    plan = tw.plan_decode(of.cache, [of.new(20)], num_heads=2, rows=2, max_length=100)
    listed = planner.PlannedList(plan, Shape(4, 4, 4, tiles=False), Splitting(), torch.device("cpu"))
    launches: list[int | None] = []
    monkeypatch.setattr(listed, "launch", launches.append)
    for capture in (7, 7, 8):
        monkeypatch.setattr(planner.compiler, "capture_of", lambda stream, number=capture: number)
        listed.make(100 + capture, capturing=True)
    assert launches == [107, 108]
    listed.make(3)  # what was captured has not run
    listed.make(3)
    assert launches == [107, 108, 3]


def test_a_sequence_that_was_allocated_steps_before_it_joins_has_all_its_pages_sent():
    """Its row was stamped when the plan last looked, and it takes the place of one that left."""
    cache = tw.PagedKVCache(32, 16, 1, 64, kv_format="bf16")
    stays, leaves = cache.allocate(), cache.allocate()

    def fill(seqs: list[int], tokens: int) -> None:
        slots = cache.extend(seqs, tokens)
        k, v = (torch.randn(len(slots), 1, 64).bfloat16() for _ in range(2))
        cache.write(0, slots, k, v)

    fill([stays, leaves], 40)
    plan = tw.plan_decode(cache, [stays, leaves], num_heads=4, rows=2, max_length=100, share_prefix=False)
    q = torch.randn(2, 1, 4, 64).bfloat16()
    tw.decode(q, cache, 0, plan, backend="emulator")
    joins = cache.allocate()
    fill([joins], 40)
    tw.renew_plan(plan, cache, [stays])  # without it: the plan sees its stamp and not its pages
    cache.free(leaves)
    tw.renew_plan(plan, cache, [stays, joins])
    o = tw.decode(q, cache, 0, plan, backend="emulator")
    assert torch.equal(o, tw.decode(q, cache, 0, plan_as_on_a_card(cache, [stays, joins], 4), backend="emulator"))


def test_a_plan_takes_its_list_along_when_it_goes():
    cache = tw.PagedKVCache(8, 16, 1, 64, kv_format="bf16")
    seqs = [cache.allocate()]
    slots = cache.extend(seqs, 5)
    cache.write(0, slots, *(torch.randn(5, 1, 64).bfloat16() for _ in range(2)))
    plan = tw.plan_decode(cache, seqs, num_heads=4, rows=2, max_length=100)
    tw.decode(torch.randn(2, 1, 4, 64).bfloat16(), cache, 0, plan, backend="emulator")
    (listed,) = (weakref.ref(x) for x in kept(plan).lists.values())
    del plan
    gc.collect()
    assert listed() is None
