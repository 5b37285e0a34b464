"""Pictures of schedules that know which blocks are seen whole."""

from __future__ import annotations

import matplotlib.image
import torch

from tilewise import BlockSchedule, schedule_of


def causal(block=16, tokens=64, **options):
    return schedule_of(lambda b, h, q, k: q >= k, 1, 1, tokens, tokens, block_q=block, block_k=block, **options)


def rows_of(text):
    return [line.split("│")[1] for line in text.splitlines() if "│" in line]


def test_blocks_seen_in_part_have_half_the_shade():
    shown = causal().show()
    assert rows_of(shown) == ["▒   ", "█▒  ", "██▒ ", "███▒"]
    assert "10 of 16 blocks kept (62.5%), 6 of them whole" in shown
    assert rows_of(BlockSchedule.causal(64, 64, block_q=16, block_k=16).show()) == ["█   ", "██  ", "███ ", "████"]


def test_whole_blocks_are_those_of_the_head_and_sequence():
    kept = torch.ones(2, 3, 2, 2, dtype=torch.bool)
    whole = torch.zeros_like(kept)
    whole[1, 2, 0, 1] = True
    schedule = BlockSchedule.from_blocks(kept, whole=whole, seqlen_q=32, seqlen_k=32, block_q=16, block_k=16)
    assert rows_of(schedule.show(head=2, batch=1)) == ["▒█", "▒▒"]
    assert rows_of(schedule.show(head=1, batch=1)) == ["▒▒", "▒▒"]
    assert "4 of 4 blocks kept (100.0%), 1 of them whole" in schedule.show(head=2, batch=1)


def test_drawing_has_a_shade_for_each_kind(tmp_path):
    causal().draw(tmp_path / "whole.png")
    BlockSchedule.causal(64, 64, block_q=16, block_k=16).draw(tmp_path / "plain.png")
    dark, light = (8, 48, 107), (106, 174, 214)  # the ends and the middle of the colour map
    for name, shades in (("whole", {dark, light}), ("plain", {dark})):
        pixels = (matplotlib.image.imread(tmp_path / f"{name}.png")[..., :3] * 255).round().astype(int).reshape(-1, 3)
        large = {shade for shade in (dark, light) if (abs(pixels - shade).max(1) <= 2).mean() > 0.05}
        assert large == shades


def test_picture_that_has_to_shrink_counts_them_half():
    """A quarter of 32 × 32 blocks on the diagonal: those below it whole, those on it in part."""
    shades = causal(tokens=1024)._picture(0, 0).shades(2, 2)
    half = (32 * 31 / 2 + 32 / 2) / 32**2
    assert shades.tolist() == [[half, 0.0], [1.0, half]]
