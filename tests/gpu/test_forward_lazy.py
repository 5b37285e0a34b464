"""The lazy softmax attacked: scores that jump where and as far as its reasoning has an edge, with every score known.

Row i's query is the i-th unit vector times a factor, so that column i of K is what its scores are, exactly: bf16 and
fp16 hold every value used here. A jump of x multiplies a weight by e^x; the edges are at 2^8 (the witness), 2^100 (what
can be recovered) and 2^126 … 2^149 (what underflows, what overflows).
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from forward_cases import MODES, check, emulated, paged, problem, starts_of, tile_of
from lazy_cases import KINDS, in_heads, jumps_at, known_scores, shapes
from oracle import assert_attention

from tilewise import attention, attention_varlen, reference
from tilewise.compiler.spec import KERNELS_ROOT
from tilewise.gpu import tilings

pytestmark = pytest.mark.usefixtures("own_card")

kinds = pytest.mark.parametrize("kind", KINDS)


def keys_of(kind: str) -> int:
    """Keys of a block, for the kind's short problems."""
    head_dim, _, options = KINDS[kind]
    return tile_of(1, 60, 60, 2, 2, head_dim, **options)[1]


@kinds
def test_a_jump_anywhere(kind):
    """Up from zeros at the first, a middle and the last key, at blocks' edges; and, negated, down."""
    block = keys_of(kind)
    keys = 4 * block + 5
    positions = (0, 1, block - 1, block, 2 * block + 7, 4 * block - 1, 4 * block, keys - 1)
    patterns = jumps_at(positions, keys, 60)
    for number, factor in enumerate((1.0, -1.0)):
        q, k, v, options = known_scores(kind, patterns, factor=factor)
        check(q, k, v, mode=MODES[number], **options)


@kinds
def test_at_every_position(kind):
    block = keys_of(kind)
    keys = 2 * block + 9
    for number, jump in enumerate((6.25, 69.5, 89.0)):
        q, k, v, options = known_scores(kind, jumps_at(range(keys), keys, 60, (jump,)))
        check(q, k, v, mode=MODES[number], **options)


@kinds
def test_rising_falling_sawtooth_random_and_stairs(kind):
    block = keys_of(kind)
    keys = 5 * block + 3
    patterns = in_heads(shapes(keys, block))
    for number, (factor, offset) in enumerate(((1.0, 0.0), (-1.0, 64.0), (2.0, -128.0), (1.0, 9984.0), (1.0, -9984.0))):
        q, k, v, options = known_scores(kind, patterns, factor=factor, offset=offset)
        check(q, k, v, mode=MODES[number % 4], **options)


@kinds
def test_one_row_jumps_and_its_neighbours_do_not(kind):
    """The lanes of a warp decide together; the rows that were quiet must come out as if alone."""
    block = keys_of(kind)
    keys = 4 * block
    for number, jump in enumerate((6.25, 69.5, 110.0)):
        quiet = torch.randint(-8, 9, (keys, 60), generator=torch.Generator().manual_seed(number)) / 8
        patterns = quiet[None].repeat(4, 1, 1)
        for head, (row, position) in enumerate(((0, 3), (17, block), (40, 2 * block + 1), (59, 0))):
            patterns[head, position, row] = jump
        q, k, v, options = known_scores(kind, patterns)
        check(q, k, v, mode=MODES[number], **options)


@kinds
def test_rows_whose_first_block_is_hidden(kind):
    """Row 0 sees nothing of the last block and all of the one before, to which it comes with no reference yet."""
    head_dim, dtype, options = KINDS[kind]
    if options.get("causal"):
        options = {}
    block = keys_of(kind)
    rows, hidden = 100, 99
    for number, blocks in enumerate((1, 2, 4)):
        keys = blocks * block + hidden
        q, k, v = problem(1, rows, keys, 2, 2, head_dim, dtype=dtype, size=1.0 + 40 * (number == 2))
        check(q, k, v, causal=True, mode=MODES[number], **options)
        check(q, k, v, window=(block + 50, 0), mode=MODES[number], **options)


@kinds
def test_large_random_logits(kind):
    head_dim, dtype, options = KINDS[kind]
    block = keys_of(kind)
    for number, size in enumerate((10.0, 60.0, 1000.0)):
        q, k, v = problem(1, 150, 3 * block + 20, 2, 2, head_dim, dtype=dtype, size=size, seed=number)
        check(q, k, v, mode=MODES[number], **options)
    q, k, v = problem(1, 150, 3 * block + 20, 2, 2, head_dim, dtype=dtype)
    for sign in (1, -1):  # all logits near ±1e4
        q[..., 0], k[..., 0] = 100.0 * sign, 100.0
        check(q, k, v, mode=MODES[3], **{"scale": 1.0, **options})


def test_on_the_tiles_of_long_queries(monkeypatch):
    monkeypatch.setattr(tilings, "SHORT", 0)
    for kind in ("64 causal", "64 exact", "256"):
        block = keys_of(kind)
        keys = 4 * block + 5
        patterns = jumps_at((0, block, 2 * block + 7, keys - 70), keys, 60)
        q, k, v, options = known_scores(kind, patterns)
        check(q, k, v, mode=MODES[2], **options)


def test_jumps_through_softcap_alibi_sinks_groups_and_pages():
    """What makes S again has to do to it what was done the first time."""
    block = tile_of(1, 60, 60, 2, 2, 64, softcap=100.0)[1]
    keys = 4 * block + 5
    q, k, v, _ = known_scores("64", jumps_at((0, block, 3 * block, keys - 1), keys, 60))
    heads = q.shape[2]
    check(q, k, v, scale=1.0, softcap=100.0, mode=MODES[1])
    check(2 * q, k, v, scale=1.0, softcap=1000.0)
    check(q, k, v, scale=1.0, sinks=torch.linspace(-100, 100, heads), mode=MODES[2])
    check(q, k, v, scale=1.0, alibi_slopes=torch.full((heads,), 0.25), mode=MODES[3])
    check(q, k, v, scale=1.0, alibi_slopes=torch.full((heads,), -0.125))
    shared = q[:, :25].repeat(1, 1, 4, 1)  # heads of a group as neighbouring rows
    order = torch.arange(4 * heads).view(4, heads).T.flatten()
    check(shared[:, :, order], k, v, scale=1.0, mode=MODES[1])
    *pages, table = paged(k[0], v[0], starts_of([keys]), 16)
    state = attention_varlen(
        q[0],
        *pages,
        starts_of([q.shape[1]]),
        starts_of([keys]),
        page_table=table,
        scale=1.0,
        return_lse=True,
        backend="emulator",
    )
    assert_attention((state[0][None], state[1][None]), q, k, v, scale=1.0)


# ---- which way it went -----------------------------------------------------------------------------------------------
def counted(q, k, v, **options):
    with emulated(count=True) as launches:
        got = attention(q, k, v, return_lse=True, backend="emulator", **options)
    assert_attention(got, q, k, v, **options)
    return launches[-1].counters


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_are_made_again_when_they_must_be_and_only_then(head_dim):
    tile_q, block = tile_of(1, 60, 60, 1, 1, head_dim)
    keys = 4 * block
    products = 2 * 2 * tile_q * keys * head_dim
    again = 2 * 16 * block * head_dim  # by one warp
    plain = counted(*problem(1, tile_q, keys, 1, 1, head_dim))
    assert plain.tensor_flops == products
    kind = str(head_dim)

    def of(jump: float, position: int, row: int = 5):
        patterns = torch.zeros(1, keys, 60)
        patterns[0, position, row] = jump
        q, k, v, options = known_scores(kind, patterns)
        return counted(q, k, v, **options)

    quiet = of(0.0, 0)
    products = quiet.tensor_flops  # fewer where warps without rows have nothing to do
    assert products <= plain.tensor_flops
    for jump, position, moved, made_again in (
        (3.0, 0, False, False),
        (5.25, 0, False, False),  # the lane's sum is just below the witness, 2^8
        (5.75, 0, True, False),
        (9.0, 0, True, False),
        (60.0, 2 * block, True, False),
        (71.0, 0, True, True),
        (139.0, 2 * block, True, True),
        (139.0, keys - 1, False, False),  # in the first block, which is taken as it comes
    ):
        found = of(jump, position)
        assert found.tensor_flops == products + again * made_again, (jump, position)
        assert (found.exponentials > quiet.exponentials) == moved, (jump, position)


def test_random_data_does_not_move_the_reference():
    """Random rows of the usual size stay far from the witness: else it would be no help."""
    for head_dim in (64, 128):
        shape = (1, *tile_of(1, 60, 60, 1, 1, head_dim)[:1])
        few, many = (counted(*problem(*shape, n, 2, 2, head_dim)) for n in (1024, 2048))
        _, block = tile_of(1, 60, 60, 1, 1, head_dim)
        rows = shape[1] * 2
        assert many.exponentials - few.exponentials == rows * 1024, block  # the weights, and not one correction


# ---- the standard softmax --------------------------------------------------------------------------------------------
def test_a_maximum_that_stands_is_as_good_as_one_found_again(tmp_path):
    """exact=True leaves O alone where no row's maximum grew: to the bit what it is when every block asks."""
    header = (KERNELS_ROOT / "tile/lazy.cuh").read_text()
    asks = "const bool grew = ptx::any("
    assert header.count(asks) == 1, "tile/lazy.cuh has changed: mend this test"
    (tmp_path / "lazy.cuh").write_text(header.replace(asks, "const bool grew = true || ptx::any("))
    source = (KERNELS_ROOT / "prefill/forward.cu").read_text()
    for name in ("prefill/closing.cuh", "prefill/scoring.cuh"):  # on the way to the header
        assert f'#include "{name}"' in source
        own = (KERNELS_ROOT / name).read_text().replace("#pragma once", "")
        source = source.replace(f'#include "{name}"', own)
    assert '"tile/lazy.cuh"' in source
    changed = tmp_path / "forward.cu"
    changed.write_text(source.replace('"tile/lazy.cuh"', f'"{tmp_path / "lazy.cuh"}"'))
    for head_dim, size in product((64, 192), (1.0, 30.0)):
        q, k, v = problem(1, 200, 900, 2, 2, head_dim, size=size)
        states = []
        for other in (None, changed):
            with emulated(source=other):
                states.append(attention(q, k, v, exact=True, return_lse=True, backend="emulator"))
        assert torch.equal(states[0][0], states[1][0])
        assert torch.equal(states[0][1], states[1][1])


@pytest.mark.parametrize("size", [1.0, 60.0])
def test_the_two_agree(size):
    q, k, v = problem(1, 200, 1000, 2, 2, 64, size=size)
    lazy, standard = (attention(q, k, v, exact=x, return_lse=True, backend="emulator") for x in (False, True))
    exact, honest = reference.attention(q, k, v), reference.baseline(q, k, v)
    errors = [(state[0].double() - exact[0]).abs().max() for state in (lazy, standard)]
    assert errors[0] <= 2 * errors[1] + 1e-3
    torch.testing.assert_close(lazy[1], standard[1], rtol=1e-6, atol=1e-5)
    for state in (lazy, standard):
        assert reference.judge(state[0], exact[0], honest[0], lse=exact[1]).ok
