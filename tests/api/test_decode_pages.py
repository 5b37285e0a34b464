"""decode() with a schedule over pages: the CPU and the kernels in the emulator, both against the oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decode_tree_cases import grow, make_cache, tree
from oracle import assert_state, poison, randn

from tilewise import BlockSchedule, PagedKVCache, decode, grow_plan, plan_decode, reference

BF16 = torch.bfloat16
BACKENDS = ("cpu", "emulator")
LENGTHS = (1, 15, 16, 17, 63, 65, 0, 200)


def pages_schedule(selected: torch.Tensor, page_size: int = 16, tokens: int = 1) -> BlockSchedule:
    """selected: bool (num_seqs or 1, heads or 1, pages)."""
    sizes = {"seqlen_q": tokens, "seqlen_k": selected.shape[2] * page_size, "block_q": 16, "block_k": page_size}
    return BlockSchedule.from_blocks(selected[:, :, None], **sizes)


def filled(lengths=LENGTHS, **options: Any) -> tuple[PagedKVCache, list[int]]:
    page_size = options.setdefault("page_size", 16)
    options = {"kv_format": "bf16", "head_dim": 64, **options}
    cache = make_cache(pages=sum(-(-n // page_size) + 4 for n in lengths), **options)
    seqs = [cache.allocate() for _ in lengths]
    grow(cache, seqs, list(lengths))
    return cache, seqs


def chosen(*shape: int, share: float = 0.5, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


def assert_selected(
    cache: PagedKVCache,
    seqs: list[int],
    selected: torch.Tensor,
    *,
    tokens: int = 1,
    heads: int = 4,
    most: int = 100,
    dtype: torch.dtype = BF16,
    backends: tuple[str, ...] = BACKENDS,
    **options: Any,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    q = randn(len(seqs), tokens, heads, cache.head_dim, dtype=dtype, seed=7)
    schedule = pages_schedule(selected, cache.page_size, tokens)
    plan = plan_decode(cache, seqs, num_heads=heads, tokens_per_seq=tokens, pages_per_seq=most)
    read = selected & (selected.cumsum(-1) <= most)
    exact = reference.decode(q, cache, 0, seqs, selected=read, **options)
    honest = reference.decode(q, cache, 0, seqs, selected=read, dtype=dtype, **options)
    found = []
    for backend in backends:
        got = decode(q, cache, 0, plan, schedule=schedule, return_lse=True, out=poison(q), backend=backend, **options)
        assert_state(got, exact, honest)
        found.append(got)
    return found


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 3])
def test_hostile_lengths(heads, tokens):
    cache, seqs = filled()
    assert_selected(cache, seqs, chosen(len(seqs), heads, 13), tokens=tokens)
    assert_selected(cache, seqs, chosen(1, heads, 13), tokens=tokens)


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "fp8", "int8", "int4"])
def test_formats_and_page_sizes_on_the_cpu(kv_format, page_size):
    cache, seqs = filled(kv_format=kv_format, page_size=page_size)
    pages = -(-200 // page_size)
    dtype = torch.float32 if kv_format == "fp32" else BF16
    for heads in (1, 2):
        assert_selected(cache, seqs, chosen(len(seqs), heads, pages), dtype=dtype, tokens=2, backends=("cpu",))


def test_scores():
    cache, seqs = filled()
    sinks = torch.linspace(-2, 3, 4)
    for options in ({"softcap": 2.0}, {"sinks": sinks}, {"scale": -0.2, "softcap": 30.0, "sinks": sinks}):
        assert_selected(cache, seqs, chosen(len(seqs), 2, 13), tokens=2, **options)


def test_sixty_five_sequences_in_any_order():
    cache, seqs = filled([5 * n % 70 for n in range(65)])
    order = torch.randperm(65, generator=torch.Generator().manual_seed(1)).tolist()
    assert_selected(cache, [seqs[n] for n in order], chosen(65, 2, 5))


def test_shared_prefixes_are_read_by_each_sequence_for_itself():
    cache = make_cache(page_size=16, head_dim=64, kv_format="bf16")
    seqs = tree(cache, [1, 3, 2], [40, 20, 9])
    plan = plan_decode(cache, seqs, num_heads=4, pages_per_seq=3)
    assert plan.shared_nodes == 0
    assert plan.summary.keys_read == 6 * 3 * 16
    assert_selected(cache, seqs, chosen(6, 2, 5), most=3)


def test_nothing_selected_is_nothing_seen():
    cache, seqs = filled((40, 70))
    selected = chosen(2, 2, 5, share=0.8)
    selected[0] = False
    for o, lse in assert_selected(cache, seqs, selected):
        assert not o[0].any()
        assert (lse[0] == -math.inf).all()
    sinks = torch.linspace(-2, 3, 4)
    for _, lse in assert_selected(cache, seqs, selected, sinks=sinks):
        assert torch.allclose(lse[0, :, 0], sinks)


def test_everything_selected_is_plain_decode():
    cache, seqs = filled()
    q = randn(len(seqs), 2, 4, 64, dtype=BF16)
    every = pages_schedule(torch.ones(1, 1, 13, dtype=torch.bool), tokens=2)
    plain = plan_decode(cache, seqs, num_heads=4, tokens_per_seq=2)
    plan = plan_decode(cache, seqs, num_heads=4, tokens_per_seq=2, pages_per_seq=13)
    exact = reference.decode(q, cache, 0, seqs)
    for backend in BACKENDS:
        got = decode(q, cache, 0, plan, schedule=every, return_lse=True, backend=backend)
        assert_state(got, exact, decode(q, cache, 0, plain, return_lse=True, backend=backend))


def test_more_pages_than_the_plan_has_room_for():
    """The first of them are read, and bits past a sequence's end take nobody's place."""
    cache, seqs = filled()
    for most in (1, 4):
        assert_selected(cache, seqs, chosen(len(seqs), 2, 60, share=0.8), most=most, tokens=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_pages_that_are_left_out(backend):
    cache, (seq,) = filled((100,))
    selected = chosen(1, 2, 7)
    q = randn(1, 1, 4, 64, dtype=BF16)
    plan = plan_decode(cache, [seq], num_heads=4, pages_per_seq=7)
    clean = decode(q, cache, 0, plan, schedule=pages_schedule(selected), backend=backend)
    for head in range(2):
        for page in cache.page_list(seq)[~selected[0, head].numpy()].tolist():
            for part in (cache._k[0], cache._v[0]):
                part[0, page, :, head] = math.nan
    assert torch.equal(decode(q, cache, 0, plan, schedule=pages_schedule(selected), backend=backend), clean)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_plan_for_all_steps_and_layers(backend):
    """Another selection with every call; grown, the sequences have pages that the next schedule may select."""
    cache, seqs = filled((20, 31), num_layers=2)
    plan = plan_decode(cache, seqs, num_heads=4, pages_per_seq=4, room=40)
    for step in range(3):
        for layer in range(2):
            q = randn(2, 1, 4, 64, dtype=BF16, seed=step)
            selected = chosen(2, 2, 5, share=0.7, seed=2 * step + layer)
            got = decode(q, cache, layer, plan, schedule=pages_schedule(selected), return_lse=True, backend=backend)
            read = selected & (selected.cumsum(-1) <= 4)
            exact, honest = (
                reference.decode(q, cache, layer, seqs, selected=read, dtype=d) for d in (torch.float64, BF16)
            )
            assert_state(got, exact, honest)
        grow(cache, seqs, [17, 9], seed=step)
        plan = grow_plan(plan, cache)
        assert plan.pages_per_seq == 4


def test_pages_by_their_scores():
    """The largest scores for each sequence and KV head: what Quest does with bounds of its pages' keys."""
    cache, seqs = filled((200, 130))
    scores = randn(2, 2, 1, 13)
    schedule = BlockSchedule.from_scores(scores, top_k=5, seqlen_q=1, seqlen_k=208, block_q=16, block_k=16)
    plan = plan_decode(cache, seqs, num_heads=4, pages_per_seq=5)
    q = randn(2, 1, 4, 64, dtype=BF16)
    selected = torch.zeros(2, 2, 13, dtype=torch.bool).scatter_(2, scores[:, :, 0].topk(5).indices, True)
    exact = reference.decode(q, cache, 0, seqs, selected=selected)
    honest = reference.decode(q, cache, 0, seqs, selected=selected, dtype=BF16)
    for backend in BACKENDS:
        assert_state(decode(q, cache, 0, plan, schedule=schedule, return_lse=True, backend=backend), exact, honest)


# ---- bad input -------------------------------------------------------------------------------------------------------
def test_schedules_that_do_not_fit():
    cache, seqs = filled((40, 70))
    q = randn(2, 1, 4, 64, dtype=BF16)
    plan = plan_decode(cache, seqs, num_heads=4, pages_per_seq=3)
    every = torch.ones(2, 2, 5, dtype=torch.bool)

    def call(schedule: Any, **options: Any) -> Any:
        return decode(q, cache, 0, options.pop("plan", plan), schedule=schedule, **options)

    with pytest.raises(TypeError, match=r"schedule must be a tilewise\.BlockSchedule or None, got Tensor"):
        call(every)
    with pytest.raises(ValueError, match=r"block_k 16 for this plan, got 32"):
        call(pages_schedule(every, page_size=32))
    with pytest.raises(ValueError, match=r"num_q_blocks 1 for this plan, got 2"):
        call(BlockSchedule.full(17, 80, block_q=16, block_k=16))
    with pytest.raises(ValueError, match=r"batch None or 1 or 2 for this plan, got 3"):
        call(pages_schedule(every.new_ones(3, 2, 5)))
    with pytest.raises(ValueError, match=r"heads None or 1 or 2 for this plan, got 4"):
        call(pages_schedule(every.new_ones(2, 4, 5)))
    with pytest.raises(ValueError, match=r"longest sequence, of 70 tokens, got seqlen_k 64"):
        call(pages_schedule(every[..., :4]))
    with pytest.raises(ValueError, match="pages_per_seq"):
        call(pages_schedule(every), plan=plan_decode(cache, seqs, num_heads=4))
    with pytest.raises(ValueError, match="schedule must be given"):
        call(None)
    with pytest.raises(NotImplementedError, match="tree_mask"):
        call(pages_schedule(every), tree_mask=torch.ones(1, 1, dtype=torch.bool))
    lengths = torch.full((5,), 7, dtype=torch.int32)
    short = BlockSchedule.from_blocks(
        every[:, :, None], seqlen_q=1, seqlen_k=80, block_q=16, block_k=16, lengths_k=lengths
    )
    with pytest.raises(NotImplementedError, match="lengths of blocks"):
        call(short)


def test_plans_that_are_refused():
    cache, seqs = filled((40, 70))
    with pytest.raises(ValueError, match="pages_per_seq must be at least 1"):
        plan_decode(cache, seqs, num_heads=4, pages_per_seq=0)
    with pytest.raises(TypeError, match="pages_per_seq"):
        plan_decode(cache, seqs, num_heads=4, pages_per_seq=1.5)
    with pytest.raises(ValueError, match="share_prefix"):
        plan_decode(cache, seqs, num_heads=4, pages_per_seq=2, share_prefix=True)
    with pytest.raises(NotImplementedError, match="window"):
        plan_decode(cache, seqs, num_heads=4, pages_per_seq=2, window=(5, 0))


def test_compiled_graphs_take_no_schedule():
    cache, seqs = filled((40, 70))
    plan = plan_decode(cache, seqs, num_heads=4, pages_per_seq=2, window=(None, 0))
    q, schedule = randn(2, 1, 4, 64, dtype=BF16), pages_schedule(torch.ones(1, 1, 5, dtype=torch.bool))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="schedule cannot be part of a compiled graph"):
        torch.compile(lambda q: decode(q, cache, 0, plan, schedule=schedule), backend="eager", fullgraph=True)(q)
