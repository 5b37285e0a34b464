"""Decode and append as other cards run them: copies in place of TMA, shapes within their limits, in the emulator."""

from __future__ import annotations

import pytest
import torch
from decode_cases import BF16, MODES, SMALL, UNCUT, check, decode, make_cache, make_tree, queries
from decode_page_cases import check as check_pages

import tilewise
from tilewise import arch, compiler, plan_decode
from tilewise.formats import KVFormat
from tilewise.gpu import append, decode_kernels
from tilewise.gpu import decode as decoding
from tilewise.gpu.decode_kernels import BLOCK_OVERHEAD, HEAD_DIMS, choose_tiling, decode_spec, shared_bytes, stage_bytes

LENGTHS = (1, 63, 0, 65, 129, 300)


@pytest.mark.parametrize(
    ("card", "kv_format", "page_size", "head_dim"),
    [("sm_80", "bf16", 16, 64), ("sm_89", "fp8", 16, 128), ("sm_89", "bf16", 24, 64), ("sm_89", "int4", 16, 96)],
)
def test_a_card_decodes_to_the_bits_of_another(card, kv_format, page_size, head_dim):
    """Judged by the oracle, under causal tokens and a window too; and with the bits of Hopper's kernel by TMA."""
    cache, seqs = make_cache(LENGTHS, kv_format=kv_format, page_size=page_size, head_dim=head_dim)
    for n, options in enumerate(({}, {"tokens": 3, "window": (70, 0)}, {"splitting": UNCUT})):
        runs = kv_format == "fp8"
        with arch.as_card(card):
            got = check(cache, seqs, mode=MODES[n], runs=runs, **options)
        q = queries(cache, seqs, tokens=options.get("tokens", 1))
        options.pop("tokens", None)
        hopper = decode(cache, seqs, q, runs=runs, **options)
        assert torch.equal(got[0], hopper[0])
        assert torch.equal(got[1], hopper[1])


@pytest.mark.parametrize("card", ["sm_80", "sm_89"])
def test_shared_nodes_and_selected_pages(card):
    """Streaming warps take the nodes of a quantised cache, 16 rows at a time; by the public functions too."""
    cache, seqs = make_tree([1, 8], [90, 20], kv_format="fp8")
    q, plan = queries(cache, seqs), plan_decode(cache, seqs, num_heads=8, share_prefix=True)
    with arch.as_card(card):
        check(cache, seqs, share=True, sinks=torch.linspace(-2, 3, 8), splitting=SMALL)
        told = tilewise.decode(q, cache, 0, plan, return_lse=True, backend="emulator")
        check_pages(*make_cache((300, 64, 1)), heads=1, seed=3)
    for got, exact in zip(told, tilewise.decode(q, cache, 0, plan, return_lse=True, backend="cpu"), strict=True):
        assert (got.float() - exact.float()).abs().max() < 0.02
    assert [dict(bound.spec.constants)["kRows"] for bound in decoding.kept(plan).bound.values()] == [16]


@pytest.mark.parametrize("card", ["sm_80", "sm_89"])
def test_what_a_card_writes_it_reads(card):
    """Tokens that the append kernel writes, decoded by the decode kernel."""
    cache, (seq,) = make_cache((40,), kv_format="int8")
    slots = cache.extend([seq], [3])
    cache.write(0, slots, torch.zeros(3, 2, 64), torch.zeros(3, 2, 64))
    k, v = (torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (0, 1))
    parts = [[x[0] for x in components] for components in (cache._k, cache._v)]
    positions = torch.arange(40, 43)
    with arch.as_card(card):
        append.append(cache.format, k, v, *parts, positions, slots.index)
        check(cache, [seq])
    assert (cache.gather(0, seq)[0][-3:].float() - k.float()).abs().max() < 0.05


# ---- shapes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("card", arch.ARCHS)
@pytest.mark.parametrize("kv_format", decode_kernels.FORMATS)
def test_shapes_follow_the_limits_of_a_card(kv_format, card):
    limits = arch.LIMITS[card]
    for head_dim in HEAD_DIMS:
        fmt = KVFormat(kv_format, head_dim)
        for rows in (1, 8, 9, 64):
            tiling = choose_tiling(fmt, rows, tma=False, arch=card)
            shared = shared_bytes(fmt, tiling)
            assert shared <= limits.shared_block
            assert tiling.blocks * (shared + BLOCK_OVERHEAD) <= limits.shared_sm
            assert tiling.rows == (16 if rows > 8 and head_dim <= (96 if kv_format == "fp32" else 128) else 8)
            held = tiling.blocks * tiling.warps
            assert held * tiling.stages * stage_bytes(fmt) >= 40 << 10, "bytes in flight"
            # No block more fits beside these: neither of registers nor of shared memory.
            assert held == 8 or (tiling.blocks + 1) * (shared + BLOCK_OVERHEAD) > limits.shared_sm
            assert choose_tiling(fmt, rows, tma=False, arch=card) is tiling


FITTING = (("fp16", 128, 16), ("bf16", 256, 4), ("fp8", 128, 4), ("int4", 128, 16))


@pytest.mark.parametrize(("kv_format", "head_dim", "rows"), FITTING)
def test_kernels_of_other_cards_do_not_spill(kv_format, head_dim, rows):
    """One of each kind on one card each; `tilewise kernels --all` compiles every one for every card."""
    fmt, card = KVFormat(kv_format, head_dim), ("sm_80", "sm_86", "sm_89", "sm_120")[(head_dim // 32 + rows) % 4]
    tiling = choose_tiling(fmt, rows, tma=False, arch=card)
    spec = decode_spec(torch.float16 if kv_format == "fp16" else BF16, fmt, 16, tiling, tma=False)
    report = compiler.compile(spec, card).report
    assert not report.spills
    assert arch.occupancy(card, report.registers, spec.threads, spec.shared_bytes) >= tiling.blocks


def test_listed_kernels_are_those_of_the_card():
    """Hopper's by TMA for Hopper alone, others in the shape of each card."""
    for card in arch.ARCHS:
        listed = [dict(spec.constants) for spec in decode_kernels.specs(card) if spec.name != "select_pages"]
        assert len(listed) >= 4
        assert {constants["kTma"] for constants in listed} == {arch.hopper(card)}
    assert decode_kernels.specs("sm_80") != decode_kernels.specs("sm_86")
    assert decode_kernels.specs("sm_86") == decode_kernels.specs("sm_120")
