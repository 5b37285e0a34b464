"""Plans: every visible pair is in exactly one tile, none else; the numbers they show are the problem's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import qkv

from tilewise import BlockSchedule, Plan, plan_attention, plan_decode, reference
from tilewise.plan import Band, Tiles, band_of, cut, plan_dense, plan_varlen, visible_pairs
from tilewise.plan.pictures import seen_part
from tilewise.plan.show import CARDS, Card
from tilewise.plan.tiles import OPEN

windows = st.one_of(st.none(), st.tuples(*[st.one_of(st.none(), st.integers(0, 80))] * 2))


def covered(tiles, seqlen_q, seqlen_k):
    """How many tiles show key j to row i."""
    count = np.zeros((seqlen_q, seqlen_k), int)
    for t in tiles:
        for n in range(t.count):
            row, key = t.row + n * t.row_step, t.key + n * t.key_step
            offset = np.arange(t.keys)[None, :] - np.arange(t.rows)[:, None]
            low = -(10**9) if t.band.low is None else t.band.low
            high = 10**9 if t.band.high is None else t.band.high
            assert row + t.rows <= seqlen_q
            assert key + t.keys <= seqlen_k
            count[row : row + t.rows, key : key + t.keys] += (offset >= low) & (offset <= high)
    return count


@given(st.integers(0, 300), st.integers(0, 300), st.booleans(), windows)
def test_tiles_cover_the_visible_pairs_once(seqlen_q, seqlen_k, causal, window):
    tiles = cut(seqlen_q, seqlen_k, band_of(seqlen_q, seqlen_k, causal, window))
    expected = reference.visible(seqlen_q, seqlen_k, causal=causal, window=window).numpy().astype(int)
    assert np.array_equal(covered(tiles, seqlen_q, seqlen_k), expected)


@given(st.integers(1, 60), st.integers(1, 60), st.booleans(), windows)
def test_visible_pairs_are_counted(seqlen_q, seqlen_k, causal, window):
    band = band_of(seqlen_q, seqlen_k, causal, window)
    expected = int(reference.visible(seqlen_q, seqlen_k, causal=causal, window=window).sum())
    assert visible_pairs(seqlen_q, seqlen_k, band) == expected
    plan = plan_dense(3, seqlen_q, seqlen_k, 4, 2, 8, causal=causal, window=window)
    assert plan.flops == 4 * 8 * 4 * 3 * expected


def test_causal_counts_only_what_it_computes():
    """Not the full square: half of it, and the diagonal."""
    assert plan_dense(1, 1024, 1024, 1, 1, 64, causal=True).flops == 4 * 64 * 1024 * 1025 // 2


def test_a_regular_list_is_a_formula():
    assert len(plan_dense(64, 4096, 4096, 8, 8, 128).work) == 1
    assert len(plan_dense(64, 4096, 4096, 8, 8, 128, causal=True).work) == 1
    window = plan_dense(1, 65536, 65536, 8, 8, 128, causal=True, window=(1023, 0))
    assert len(window.work) < 10
    assert sum(isinstance(t, Tiles) and t.count > 200 for t in window.work) == 1


def test_window_work_grows_with_the_window_not_with_the_square():
    short, long = (plan_dense(1, n, n, 1, 1, 64, window=(255, 0)).summary for n in (8192, 16384))
    assert long.keys_read == pytest.approx(2 * short.keys_read, rel=0.05)


def test_schedule_work_is_what_the_schedule_keeps():
    schedule = BlockSchedule.random(200, 330, block_q=32, block_k=64, sparsity=0.5, seed=0, heads=4)
    q, k, _ = qkv(2, 200, 330, 4, 2, 16)
    plan = plan_attention(q, k, schedule=schedule)
    assert plan.flops == 4 * 16 * 2 * int(schedule.to_mask().sum())
    causal = plan_attention(q, k, schedule=schedule, causal=True)
    seen = schedule.to_mask() & reference.visible(200, 330, causal=True)
    assert causal.flops == 4 * 16 * 2 * int(seen.sum())
    assert causal.summary.tiles < plan.summary.tiles  # blocks above the diagonal are not in the list


def test_bytes_and_floor():
    plan = plan_dense(2, 100, 300, 8, 2, 64, io_bytes=2)
    kv, q_and_o = 2 * 300 * 2 * 2 * 64 * 2, 2 * 2 * 100 * 8 * 64 * 2
    assert plan.bytes == kv + q_and_o
    card = Card("mine", bytes_per_s=1e9, flops_per_s=1e12, fp8_rate=2.0)
    assert plan.floor_us(card) == pytest.approx(max(plan.bytes / 1e9, plan.flops / 1e12) * 1e6)
    assert plan.floor_us("h200") == plan.floor_us("H200") < plan.floor_us("RTX 4090")
    fast = Card("fast", bytes_per_s=1e15, flops_per_s=1e12, fp8_rate=2.0)
    halved = plan_dense(2, 100, 300, 8, 2, 64, io_bytes=1)
    assert halved.floor_us(fast) == pytest.approx(plan.floor_us(fast) / 2)


def test_the_floor_is_under_what_was_measured():
    """TFLOP/s and µs of our own runs on an H200 (docs/results): no plan's floor may be above them."""
    for head_dim, window, tflops in ((256, (None, None), 816), (128, (None, None), 796), (64, (None, None), 601)):
        plan = plan_dense(1, 16384, 16384, 2048 // head_dim, 2048 // head_dim, head_dim, window=window, io_bytes=2)
        assert plan.floor_us("H200") < plan.flops / tflops * 1e-6
    # 64 × 16384 tokens of a cache in 963 µs, by cuDNN: 4.46 TB/s
    assert plan_dense(64, 1, 16384, 32, 8, 128, io_bytes=2).floor_us("H200") < 963


def test_the_floor_reads_a_key_once_whoever_sees_it():
    tiled = plan_dense(1, 4096, 4096, 8, 8, 64, window=(255, 0))  # a key stands in several rows' tiles
    s = tiled.summary
    assert s.keys_read > 4096
    assert s.least_bytes == 8 * 4096 * 64 * 2 * 4 < s.bytes
    few = plan_dense(1, 16, 4096, 8, 8, 64, window=(99, 0)).summary  # the last 16 rows see 115 keys
    assert few.least_bytes == 8 * 64 * 2 * (2 * 16 + 2 * 115)
    mask = torch.zeros(4, 128, 256, dtype=torch.bool)
    for head in range(4):  # each head has a block of keys of its own
        mask[head, :, 64 * head : 64 * head + 64] = True
    heads = BlockSchedule.from_mask(mask)
    q, k, _ = qkv(1, 128, 256, 4, 4, 16)
    assert plan_attention(q, k, schedule=heads).summary.least_bytes == 4 * 16 * 4 * (2 * 128 + 2 * 64)


def test_show_tells_the_numbers(capsys):
    text = plan_dense(1, 4096, 4096, 16, 4, 128, causal=True).show("H100")
    for word in ("work items", "query rows", "4,096 × 16 heads", "key rows", "bytes to move", "FLOP", "µs on H100"):
        assert word in text
    assert "at its peaks" in text
    assert "GEMM" not in text
    assert "at the 756 TFLOP/s of a GEMM" in plan_dense(1, 64, 64, 1, 1, 64).show()
    assert capsys.readouterr().out == "", "it is text, to be printed"


def test_show_refuses_an_unknown_card():
    with pytest.raises(ValueError, match="card must be one of H200"):
        plan_dense(1, 4, 4, 1, 1, 8).show("Voodoo 2")
    assert {c.name for c in CARDS} >= {"H200", "H100", "A100"}


def picture(plan: Plan, path) -> np.ndarray:
    from matplotlib.image import imread

    plan.draw(str(path))
    return imread(path)[..., :3]


def test_draw_shows_the_triangle(tmp_path):
    image = picture(plan_dense(1, 64, 256, 1, 1, 64, causal=True), tmp_path / "plan.png")
    blue = (image[..., 2] > image[..., 0] + 0.1).mean()
    full = (lambda x: (x[..., 2] > x[..., 0] + 0.1).mean())(
        picture(plan_dense(1, 64, 256, 1, 1, 64), tmp_path / "full.png")
    )
    assert 0 < blue <= full
    assert image.std() > 0.05


@pytest.mark.parametrize("kind", ["varlen", "sparse", "window", "empty"])
def test_every_kind_draws(kind, tmp_path):
    schedule = BlockSchedule.random(128, 128, block_q=16, block_k=16, sparsity=0.5, seed=0, heads=2)
    plans = {
        "varlen": plan_varlen([0, 5, 5, 90], [0, 7, 9, 200], 2, 2, 8, causal=True),
        "sparse": plan_dense(1, 128, 128, 2, 2, 8, schedule=schedule),
        "window": plan_dense(2, 500, 500, 2, 2, 8, window=(30, 0)),
        "empty": plan_dense(0, 5, 0, 1, 1, 8),
    }
    plans[kind].draw(str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "plan.jpg"])
def test_draw_says_what_it_takes(name, tmp_path):
    plan = plan_dense(1, 64, 64, 1, 1, 8)
    with pytest.raises(ValueError, match=r"path must end in \.png or \.svg, got .*plan"):
        plan.draw(tmp_path / name)
    with pytest.raises(TypeError, match="path must be a str"):
        plan.draw(5)
    assert not list(tmp_path.iterdir())


def test_draw_gives_the_same_svg_twice(tmp_path):
    plan = plan_dense(1, 64, 64, 1, 1, 8, causal=True)
    for name in ("a.svg", "b.svg"):
        plan.draw(tmp_path / name)
    first, second = ((tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    assert first.startswith("<?xml")
    assert first == second


def drawn(plan: Plan, monkeypatch, path) -> tuple[list[str], set[str]]:
    """What a picture's legend says, and the colours of its tiles and of the parts of them that are seen."""
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    plan.draw(path)
    (figure,) = figures
    words = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    parts = [part for part in figure.axes[0].collections if part.get_paths()]
    colors = {to_hex(color) for part in parts for color in part.get_facecolor()}
    return words, colors


def test_legend_tells_masked_tiles_from_whole_ones(monkeypatch, tmp_path):
    lists = BlockSchedule.causal(256, 256, block_q=64, block_k=64)
    both = plan_dense(1, 256, 256, 1, 1, 8, causal=True, schedule=lists)
    whole, masked = plan_dense(1, 64, 256, 1, 1, 8), plan_dense(1, 64, 64, 1, 1, 8, causal=True)
    names = ("every row sees every key", "pairs that are seen", "computed and hidden", "not visited")
    for plan, told in ((both, names), (whole, names[::3]), (masked, names[1:])):
        words, colors = drawn(plan, monkeypatch, tmp_path / "a.png")
        assert len(words) == len(told)
        assert all(name in word for name, word in zip(told, words, strict=True))
        assert len(colors) == len(told) - 1, "a legend for each colour, and for what is left white"
    function = plan_attention(*qkv(1, 256, 256, 1, 1, 16)[:2], mask=lambda b, h, q, k: (q - k) % 3 == 0)
    assert any("the mask function decides" in word for word in drawn(function, monkeypatch, tmp_path / "a.png")[0])


def test_seen_part_of_a_tile_is_as_large_as_its_pairs():
    for rows, keys, band in ((64, 64, Band(None, 0)), (40, 100, Band(-3, 5)), (10, 90, Band(70, None)), (8, 8, OPEN)):
        tile = next(Tiles(0, rows, 0, keys, band).rectangles(1))
        x, y = seen_part(tile).T
        area = abs((x * np.roll(y, -1) - y * np.roll(x, -1)).sum()) / 2
        assert area == pytest.approx(tile.pairs, abs=rows)  # half a pair for each row that an edge cuts


def test_band_shift_and_open():
    band = Band(-3, 5)
    assert band.shifted(2) == (-1, 7)
    assert Band(None, 5).shifted(-5) == (None, 0)
    assert band.opened(rows=4, keys=6) == (None, None)
    assert band.opened(rows=5, keys=7) == (-3, 5)


def test_decode_plans_show_and_draw(tmp_path):
    from decode_tree_cases import make_cache, tree

    cache = make_cache()
    plan = plan_decode(cache, tree(cache, [1, 4], [40, 8]), num_heads=4, share_prefix=True)
    text = plan.show()
    assert "decode plan" in text
    assert f"{40 + 4 * 8:,} read, {40 + 4 * 8:,} stored" in text
    unshared = plan_decode(cache, plan.seqs, num_heads=4, share_prefix=False)
    assert f"{4 * 48:,} read, {40 + 4 * 8:,} stored" in unshared.show()
    assert "states merged" in text
    plan.draw(str(tmp_path / "tree.png"))
    assert (tmp_path / "tree.png").stat().st_size > 1000


def test_decode_tiles_do_not_overlap_in_the_picture():
    from decode_tree_cases import make_cache, tree

    cache = make_cache(pages=600)
    plan = plan_decode(cache, tree(cache, [1, 3, 4], [40, 16, 8]), num_heads=4, share_prefix=True)
    seen = np.zeros((plan.rows, plan.keys[0]), int)
    for r in plan.rectangles():
        seen[r.row : r.row + r.rows, r.key : r.key + r.keys] += 1
    assert seen.max() == 1
    assert (seen.sum(1) == 64).all()  # each sequence's 40 + 16 + 8 tokens
    assert (seen.sum(0) > 0).all()  # every token read has its place


def test_plan_attention_takes_the_tensors():
    q, k, _ = qkv(2, 10, 20, 4, 2, 8, dtype=torch.float16)
    plan = plan_attention(q, k, causal=True)
    assert (plan.rows, plan.keys, plan.heads_q, plan.heads_kv, plan.head_dim) == (20, (40,), 4, 2, 8)
    assert plan.io_bytes == 2
