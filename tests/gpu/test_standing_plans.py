"""Standing plans in the emulator: the planner makes the list, the decode kernels walk it, step after step."""

from __future__ import annotations

import pytest
import torch
from standing_cases import Churn

import tilewise as tw
from tilewise import reference
from tilewise.gpu import planner
from tilewise.gpu.decode import kept
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
    ],
)
def test_every_step_is_that_of_a_fresh_plan(kv_format, dtype, heads, group, page_size, options):
    of = Churn(7, kv_format, dtype, heads, page_size)
    rows, tokens = 6, options.get("tokens_per_seq", 1)
    plan = tw.plan_decode(of.cache, [], num_heads=heads * group, rows=rows, max_length=400, **options)
    for _ in range(3):
        of.step(rows)
        tw.renew_plan(plan, of.cache, of.seqs)
        q = torch.randn(rows, tokens, heads * group, 64).to(dtype)
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


def test_steps_of_growth_send_what_changed(monkeypatch):
    """Every length, and each page once, also when others came and went between, or a step was not planned."""
    of = Churn(3, "bf16", torch.bfloat16, 1, 4)
    while len(of.seqs) < 5:
        of.step(6)
    plan = tw.plan_decode(of.cache, of.seqs, num_heads=2, rows=6, max_length=400, share_prefix=True)
    listed = planner.PlannedList(plan, Shape(4, 4, 4, tiles=False), Splitting(), torch.device("cpu"))
    sent = []

    def launch(spec, grid, args, known, **options):  # what the kernel does with the pages of a step
        step = known["step"].numpy()
        count, nodes, updates = step[:3].tolist()
        at = 4 + -(-(4 * count + 5 * nodes) // 4) * 4
        changes = step[at : at + 4 * updates].reshape(-1, 4).tolist()
        for place, first, pages, begin in changes:
            from_ = at + 4 * updates + begin
            known["pages"].numpy()[place, first : first + pages] = step[from_ : from_ + pages]
        sent.append((updates, step[4 : 4 + 4 * count].reshape(-1, 4).copy(), step[4 + 4 * count :][: 5 * nodes].copy()))

    monkeypatch.setattr(planner.emulator, "launch", launch)
    kept(plan).lists["one"] = listed
    grown = []
    for step in range(90):
        if step in (30, 60):
            of.step(6)
        of.grow(of.seqs, 1)
        if step == 20:
            continue
        tw.renew_plan(plan, of.cache, of.seqs)
        updates, sequences, nodes = sent[-1]
        order, place, lengths, _ = sequences.T
        seqs = [of.seqs[n] for n in order]
        assert sorted(seqs) == sorted(of.seqs)
        assert lengths.tolist() == [of.cache.length(seq) for seq in seqs]
        assert nodes.tolist() == plan.arrange().nodes.ravel().tolist()
        for row, seq in zip(place.tolist(), seqs, strict=True):
            pages = of.cache.page_list(seq)
            assert listed.pages[row, : len(pages)].tolist() == pages.tolist()
        if step not in (0, 21, 30, 60):
            assert updates == sum(of.cache.length(seq) % 4 == 1 for seq in seqs), "pages that were there already"
        grown.append(listed._grown)
    assert sum(number > 0 for number in grown) > 80, "runs were not seen as such"
