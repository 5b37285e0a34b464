"""Decode over rows that are keys and values at once by mma.sync, kernels/mla/mla_decode_mma.cu, in the emulator: as
cards without wgmma run it.

TILEWISE_CARD=sm_80 runs all of test_mla.py so, and on a card test_mla_gpu.py; here stands what is its own, and most of
those cases, each as one card.
"""

from __future__ import annotations

from functools import partial

import pytest
import test_mla
import torch
from mla_cases import CUT, DEEPSEEK, FOLDED, LONG, Problem, chance

from tilewise import arch, compiler, emulator
from tilewise.gpu import mla_kernels, mla_mma

OTHERS = [card for card in arch.ARCHS if not arch.hopper(card)]
CASES = {
    "late copies": ("sm_80", partial(test_mla.test_lengths_at_edges_whatever_the_order_of_events, True, 3)),
    "copies at once": ("sm_89", partial(test_mla.test_lengths_at_edges_whatever_the_order_of_events, False, 7)),
    "several tokens": ("sm_89", test_mla.test_deepseek_sizes_with_several_tokens),
    "128 heads": ("sm_80", test_mla.test_128_heads_are_two_tiles_of_rows),
    "no rotary channels": ("sm_89", test_mla.test_every_panel_holds_values),
    "whole or cut": ("sm_89", test_mla.test_whole_or_cut_the_same_bits),
    "groups of pieces": ("sm_80", test_mla.test_groups_of_pieces_have_the_same_bits),
    "many groups": ("sm_89", test_mla.test_groups_of_pieces_where_merging_shares_them_out),
    "any batch": ("sm_80", test_mla.test_the_same_bits_whatever_the_batch),
    "shared prefixes": ("sm_89", test_mla.test_a_shared_prefix_has_the_rows_of_all_its_sequences),
    "a window": ("sm_80", test_mla.test_a_window_over_a_shared_prefix),
    "softcap, sinks": ("sm_89", test_mla.test_softcap_sinks_and_float16),
    "a large scale": ("sm_80", partial(test_mla.test_scales, 1e3)),
    "a scale below 0": ("sm_89", partial(test_mla.test_scales, -0.5)),
    "a scale of 0": ("sm_80", partial(test_mla.test_scales, 0.0)),
    "scores that rise": ("sm_80", test_mla.test_references_move_when_scores_rise),
    "one warp's scores rise": ("sm_89", partial(test_mla.test_one_warp_alone_finds_that_references_must_move, 3)),
    "pages of 1": ("sm_80", partial(test_mla.test_pages_of_any_size_are_gathered, 1)),
    "pages of 24": ("sm_89", partial(test_mla.test_pages_of_any_size_are_gathered, 24)),
    "chosen positions": ("sm_80", test_mla.test_chosen_positions),
    "fp8 codes": ("sm_80", partial(test_mla.test_codes_are_widened, "fp8", True, 0)),
    "int8 codes": ("sm_89", partial(test_mla.test_codes_are_widened, "int8", False, 5)),
    "codes, shared and chosen": ("sm_89", test_mla.test_codes_of_a_shared_prefix_and_of_chosen_positions),
    "growth": ("sm_80", test_mla.test_a_list_grows),
    "standing plans": ("sm_89", test_mla.test_standing_plans_and_the_public_call),
    "strides": ("sm_80", test_mla.test_strides_of_queries_and_output),
    "batch of 65": ("sm_89", test_mla.test_batch_of_65),
    "not served": ("sm_80", test_mla.test_what_is_not_served_says_so),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    card, case = CASES[name]
    with arch.as_card(card):
        case()


@pytest.mark.parametrize("card", OTHERS)
def test_which_kernel(card, monkeypatch):
    found = []
    monkeypatch.setattr(emulator, "launch", lambda spec, *_, **__: found.append(spec))
    with arch.as_card(card):
        Problem((20,), heads=8).run()
        Problem((20,), heads=128, sizes=DEEPSEEK).run()
    assert [spec.name for spec in found] == 2 * ["mla_decode_mma"]
    most = 64 if arch.LIMITS[card].shared_block >= 163 << 10 else 32
    assert [dict(spec.constants)["kRows"] for spec in found] == [16, most]


@pytest.mark.parametrize(("card", "heads"), [("sm_89", 20), ("sm_80", 33), ("sm_80", 17)])
def test_deepseek_sizes_in_every_shape(card, heads):
    """32 rows in slices of 16 keys beside 99 KB, of 32 keys beside 163 KB, and 64 rows there; pieces have the same bits
    wherever they are computed. The window begins within a block of 64 keys."""
    problem = Problem((200, 130), heads=heads, sizes=DEEPSEEK, page_size=64)
    with arch.as_card(card):
        cut, whole = problem.check(splitting=CUT), problem.run(splitting=FOLDED, late=False, seed=3)
        problem.check(splitting=CUT, window=110)
    assert torch.equal(cut[0], whole[0])
    assert torch.equal(cut[1], whole[1])


@pytest.mark.parametrize(("card", "stored"), [("sm_80", "fp8"), ("sm_89", "int8")])
def test_codes_of_many_rows(card, stored):
    problem = Problem((200, 70), heads=33, sizes=DEEPSEEK, page_size=24, stored=stored)
    with arch.as_card(card):
        problem.check(splitting=CUT, seed=1)


@pytest.mark.parametrize("keys", [slice(0, 1), slice(30, 31)])
def test_one_key_group_alone_finds_that_references_must_move(keys):
    """All warps have to hear of it, those that have other keys of its rows and those that multiply."""
    problem = Problem((448,), heads=24)  # two groups of rows, four of keys
    page = problem.lists[0][12 + keys.start // 16]  # of a slice after some in which no reference moved
    problem.rows[page, keys.start % 16] *= 40
    with arch.as_card("sm_80"):
        problem.check(splitting=LONG)


def test_a_row_that_sees_its_first_key_late():
    """Tokens of a node that a window hides from one sequence and not from another: slices without a key of a row."""
    problem = Problem((160, 600), heads=8, prefixes=[(0, 9)] * 2)
    with arch.as_card("sm_89"):
        problem.check(share=True, window=520)
        problem.check(share=True, window=90)


def test_chance():
    for seed in range(4):
        with arch.as_card(OTHERS[seed % len(OTHERS)]):
            chance(50_000 + seed)


def test_tilings_fit_the_card():
    for card in OTHERS:
        for sizes in (DEEPSEEK, (512, 512), (192, 128), (128, 128), (64, 64)):
            for rows in (1, 16, 17, 64, 1000):
                for codes in (False, True):
                    tiling = mla_mma.choose_tiling(*sizes, rows, card, codes=codes)
                    shared = mla_mma.shared_bytes(*sizes, tiling, codes=codes)
                    assert shared <= arch.LIMITS[card].shared_block
                    assert tiling.stages >= 2
                    assert tiling.rows >= min(rows, 32)
    assert mla_mma.choose_tiling(*DEEPSEEK, 64, "sm_80") == mla_mma.MmaTiling(64, 32, 8, 2)
    assert mla_mma.choose_tiling(*DEEPSEEK, 64, "sm_89") == mla_mma.MmaTiling(32, 16, 4, 3)


@pytest.mark.parametrize("card", ["sm_80", "sm_89", "sm_120"])
def test_no_kernel_spills(card):
    """As users get them; `tilewise kernels --kernel mla_decode_mma --all` looks at every variant."""
    assert not mla_mma.specs("sm_90a")
    assert not mla_kernels.specs(card)
    spec = mla_mma.specs(card)[-1]  # codes under as many rows as there may be
    (row,) = compiler.resource_rows([(spec, card)])
    assert row.error is None
    assert (row.spill_stores, row.spill_loads) == (0, 0)
