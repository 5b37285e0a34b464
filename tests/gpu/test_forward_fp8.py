"""FP8 inputs: the Hopper forward with weights in e4m3 and V transposed on its way, in the emulator and on a card.

The honest measure is PyTorch's mathematics with the softmax's weights rounded to e4m3, 256 standing for 1.
"""

from __future__ import annotations

import math

import pytest
import torch
from forward_cases import MODES, emulated, gathered, nan_in_new_memory, packed, paged, starts_of
from oracle import logit_error

from tilewise import attention, attention_varlen, reference

FP8 = torch.float8_e4m3fn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = ((1, 1), (63, 65), (129, 127), (200, 300), (65, 513))


def values(*shape: int, seed: int = 0, size: float = 1.0, device: str = "cpu") -> torch.Tensor:
    return (size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(FP8).to(device)


def problem(batch, nq, nk, hq, hkv, head_dim, *, seed=0, size=1.0, device="cpu"):
    q = values(batch, nq, hq, head_dim, seed=3 * seed, size=size, device=device)
    return q, *(values(batch, nk, hkv, head_dim, seed=3 * seed + i, device=device) for i in (1, 2))


def widened(x: torch.Tensor, descale: torch.Tensor | None, heads_kv: int) -> torch.Tensor:
    """(B, N, H, D) as float64, times (Hkv,) or (B, Hkv)."""
    if descale is None:
        return x.double().cpu()
    by_head = descale.cpu().double().expand(x.shape[0], -1).repeat_interleave(x.shape[2] // heads_kv, 1)
    return x.double().cpu() * by_head[:, None, :, None]


def judge(got, q, k, v, **options) -> None:
    """`got` (o, lse) of float64 inputs: at most twice the honest error, everywhere it can be told."""
    o, lse = (x.cpu().double() for x in got)
    exact_o, exact_lse = reference.attention(q, k, v, **options)
    expected = reference.attention(q, k, v, fp8_weights=True, **options)[0].bfloat16().double()
    assert not o.isnan().any()
    blind = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, blind)
    assert not o.transpose(1, 2)[blind].any()
    # A card adds up FP8 products with some 14 bits: scores are off by that much of the largest, and weights by e to it.
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)).abs().amax().item()
    in_scores = (2.0**-12 if got[0].is_cuda else 2.0**-20) * scores * abs(options.get("scale", q.shape[-1] ** -0.5))
    error, allowed = (o - exact_o).abs(), (expected - exact_o).abs()
    largest = v.abs().amax()
    slack = 2.0**-8 * exact_o.abs().amax() + 2 * in_scores * largest  # and bfloat16, for problems of one key
    assert error.amax() <= 2 * allowed.amax() + slack, f"error {error.amax():.3g}, honest {allowed.amax():.3g}"
    mean = [x.square().mean().sqrt() for x in (error, allowed)]
    assert mean[0] <= 2 * mean[1] + slack / 4, f"mean error {mean[0]:.3g}, honest {mean[1]:.3g}"
    error = (lse - exact_lse)[~blind].abs()
    in_lse = (1e-3 if got[0].is_cuda else 2 * logit_error(exact_lse)) + 2 * in_scores
    assert error.le(in_lse).all(), f"LSE off by {error.max():.3g}"


def check(q, k, v, *, mode=MODES[0], exact=False, descales=(None, None, None), **options):
    names = ("q_descale", "k_descale", "v_descale")
    with emulated(*mode), nan_in_new_memory():
        got = attention(
            q,
            k,
            v,
            exact=exact,
            return_lse=True,
            backend="cuda" if q.is_cuda else "emulator",
            **dict(zip(names, descales, strict=True)),
            **options,
        )
    assert got[0].dtype == torch.bfloat16
    wide = [widened(x, descale, k.shape[2]) for x, descale in zip((q, k, v), descales, strict=True)]
    moved = {name: x.cpu().double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    judge(got, *wide, **moved)
    return got


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(head_dim, device):
    for number, (nq, nk) in enumerate(LENGTHS):
        for causal in (False, True):
            q, k, v = problem(1, nq, nk, 2, 2, head_dim, seed=number, device=device)
            check(q, k, v, causal=causal, mode=MODES[number % 4])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [1, 8, 33, 40, 96, 112, 192, 256])
def test_head_dims(head_dim, device):
    """Those that TMA brings and those that it cannot, padded or not."""
    q, k, v = problem(1, 150, 290, 2, 1, head_dim, seed=head_dim, device=device)
    check(q, k, v, causal=True)
    check(q, k, v, exact=True, mode=MODES[1])


@pytest.mark.parametrize("device", DEVICES)
def test_every_key_comes_with_its_own_value(device):
    """One key a row outweighs all others: the output is that key's V to the bit, whatever places keys trade."""
    head_dim, count = 128, 128
    keys = torch.eye(count, head_dim) * 256
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    q, k = keys[order], torch.cat([keys.roll(3, 0), torch.zeros(77, head_dim)])
    v = values(1, 205, 1, head_dim, seed=2, device=device)
    o = attention(
        *(x.to(FP8).to(device)[None, :, None] for x in (q, k)), v, backend="cuda" if device == "cuda" else "emulator"
    )
    assert torch.equal(o[0, :, 0].cpu().float(), v[0, (order + 3) % count, 0].cpu().float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [0.0, 0.1, 8.0, 60.0])
def test_flat_and_peaky_rows(size, exact, device):
    """The lazy softmax lets weights grow to 448, where e4m3 ends; beyond that the reference has to move."""
    q, k, v = problem(1, 140, 700, 2, 2, 128, size=size, device=device)
    check(q, k, v, exact=exact)
    check(q, k, v, exact=exact, causal=True, mode=MODES[1])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_rise_and_fall(device):
    """Scores that climb by 2^1 … 2^12 from block to block, up and down: no weight saturates."""
    for jump in (1.0, 3.0, 9.0, 60.0, 4000.0):
        for falling in (False, True):
            k = values(1, 700, 1, 64, seed=5, device=device)
            steps = torch.arange(700, device=device).div(100, rounding_mode="floor").float()
            k = k.float()
            k[..., 0] = 16 * (steps.flip(0) if falling else steps)[None, :, None]
            q = values(1, 70, 1, 64, seed=6, device=device).float()
            q[..., 0] = min(448.0, jump * 0.5 * math.log(2))
            scale = max(1.0, jump * 0.5 * math.log(2) / 448) / 8
            check(q.to(FP8), k.to(FP8), values(1, 700, 1, 64, seed=7, device=device), scale=scale)


@pytest.mark.parametrize("device", DEVICES)
def test_descales_by_head_and_sequence(device):
    q, k, v = problem(2, 70, 200, 4, 2, 128, device=device)
    make = lambda *shape: (0.5 + torch.rand(*shape, generator=torch.Generator().manual_seed(9))).to(device)  # noqa: E731
    check(q, k, v, descales=(make(2), make(2, 2), make(2)), causal=True)
    check(q, k, v, descales=(None, make(2, 2)[:, ::2].expand(2, 2), make(2, 2) * 30))
    check(q, k, v, descales=(make(2), None, None), softcap=5.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_features(head_dim, device):
    q, k, v = problem(2, 90, 260, 4, 1, head_dim, device=device)
    sinks, slopes = torch.tensor([0.5, -3.0, 4.0, 0.0], device=device), torch.rand(2, 4).to(device)
    check(q, k, v, window=(70, 5), sinks=sinks, mode=MODES[1])
    check(q, k, v, causal=True, softcap=3.0, mode=MODES[2])
    check(q, k, v, causal=True, alibi_slopes=slopes, mode=MODES[3])
    check(q, k, v, scale=-0.05)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [0, 16, 48])
def test_packed_and_paged(page_size, device):
    """NaN stands where no token is: past the end of a sequence's last page, and in pages that nobody has."""
    lengths_q, lengths_k = [5, 0, 130, 64], [200, 7, 130, 300]
    q, k, v, starts_q, starts_k = packed(lengths_q, lengths_k, 4, 2, 128, device=device)
    q, k, v = (x.to(FP8) for x in (q, k, v))
    descale = (0.5 + torch.rand(4, 2)).to(device)
    kw: dict = {}
    keys, vals = k, v
    if page_size:
        keys, vals, kw["page_table"] = (x for x in paged(k.float(), v.float(), starts_k, page_size))
        keys, vals = keys.to(FP8), vals.to(FP8)
        assert keys.float().isnan().any()
        assert torch.equal(gathered(keys, kw["page_table"], starts_k).float(), k.float())
    with emulated(*MODES[2]), nan_in_new_memory():
        o, lse = attention_varlen(
            q,
            keys,
            vals,
            starts_q,
            starts_k,
            causal=True,
            k_descale=descale,
            return_lse=True,
            backend="cuda" if device == "cuda" else "emulator",
            **kw,
        )
    for b in range(4):
        rows, cols = (slice(*starts_of(n).tolist()[b : b + 2]) for n in (lengths_q, lengths_k))
        if lengths_q[b]:
            wide = [widened(x[None], d, 2) for x, d in ((q[rows], None), (k[cols], descale[b]), (v[cols], None))]
            judge((o[None, rows], lse[None, :, rows]), *wide, causal=True)


def test_what_follows_a_sequence_of_odd_length_is_not_seen():
    """V is turned two keys at a time: of the last pair one may be another's, and NaN."""
    for length in (31, 32, 33, 63):
        q, k, v = (values(n, 2, 64, seed=i) for i, n in enumerate((14, length + 40, length + 40)))
        starts = starts_of([5, 9]), starts_of([length, 40])
        clean = attention_varlen(q, k, v, *starts, backend="emulator")
        for x in (k, v):
            x.view(torch.uint8)[length:] = 0x7F
        got = attention_varlen(q, k, v, *starts, backend="emulator")
        assert torch.equal(got[:5], clean[:5])
        assert got[5:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_many_tiles_for_few_blocks_give_the_same_bits(device):
    """O has one place for all tiles of a block: nobody writes the next before the last one has left."""
    q, k, v = problem(2, 400, 500, 4, 4, 128, device=device)
    first = check(q, k, v, causal=True)[0]
    for late, seed in ((True, 3), (False, 4), (True, 5)):
        with emulated(late, seed):
            backend = "cuda" if device == "cuda" else "emulator"
            assert torch.equal(first, attention(q, k, v, causal=True, backend=backend))


def test_on_the_cpu_it_is_the_widened_problem():
    q, k, v = problem(2, 30, 40, 4, 2, 64)
    descale = torch.rand(2, 2) + 0.5
    o, lse = attention(q, k, v, causal=True, v_descale=descale, return_lse=True)
    wide = attention(q.float(), k.float(), widened(v, descale, 2).float(), causal=True, return_lse=True)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, wide[0].bfloat16())
    assert torch.equal(lse, wide[1])
    out = torch.empty(q.shape, dtype=torch.bfloat16)
    assert attention(q, k, v, causal=True, v_descale=descale, out=out) is out
    assert torch.equal(out, o)
    starts = starts_of([30, 30]), starts_of([40, 40])
    packed_o = attention_varlen(*(x.flatten(0, 1) for x in (q, k, v)), *starts, causal=True, v_descale=descale)
    assert torch.equal(packed_o.view(q.shape), o)


def test_wrong_descales_and_outputs_are_refused():
    q, k, v = problem(2, 30, 40, 4, 2, 64)
    with pytest.raises(ValueError, match=r"q_descale goes with float8_e4m3fn inputs, got torch\.bfloat16"):
        attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), q_descale=torch.ones(2))
    with pytest.raises(ValueError, match=r"k_descale must be \(2,\) or \(2, 2\), got \(4,\)"):
        attention(q, k, v, k_descale=torch.ones(4))
    with pytest.raises(ValueError, match="v_descale must be one of float32, got float64"):
        attention(q, k, v, v_descale=torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="k must have q's dtype float8_e4m3fn, got bfloat16"):
        attention(q, k.bfloat16(), v)
    with pytest.raises(ValueError, match="out must be one of bfloat16, got float8_e4m3fn"):
        attention(q, k, v, out=torch.empty_like(q))
