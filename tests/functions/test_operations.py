"""Each operation as torch computes it, at edge values, on the host and in the emulator; of ints bit for bit."""

from __future__ import annotations

import torch
from function_cases import probed

from tilewise import functions

_EDGES = (2**31 - 2, 2**31 - 1, 65536, 100, 40, 32, 31, 7, 3, 2, 1)
INTS = torch.tensor([-(2**31), *(-x for x in _EDGES), 0, *_EDGES[1:-1]]).int()
_EDGES = (torch.inf, 3e38, 1e10, 7.5, 2.5, 1.5, 1.0, 0.5, 0.4, 1e-42, 0.0)
FLOATS = torch.tensor([torch.nan, 3.7, *_EDGES, *(-x for x in _EDGES)])
N = max(len(INTS), len(FLOATS))
SIZES = (1, 1, N, N)
Q, K = torch.meshgrid(torch.arange(N), torch.arange(N), indexing="ij")
GRID = torch.stack([torch.zeros_like(Q), torch.zeros_like(Q), Q, K], 2).reshape(-1, 4)
INDICES = GRID.unbind(1)


def meanings(text: str) -> dict[str, str]:
    """As a function has it -> as torch has it, by 64-bit integers and float32; written once where both are equal."""
    entries = [entry.strip() for line in text.strip().splitlines() for entry in line.split(";")]
    return {entry.split(" => ")[0].strip(): entry.split(" => ")[-1].strip() for entry in entries}


# x and y: ints, f and g: floats, c and d: bools
INTEGER = meanings("""
    x + y; x - y; x * y; -x; abs(x) => x.abs(); +x => x; ~x; x & y; x | y; x ^ y; x ** 2 => x * x; 3 - x; 7 * x
    x ** 3 => (x * x).int() * x; torch.minimum(x, y); torch.max(x, y) => torch.maximum(x, y); x.clamp(-7, 100)
    torch.clamp(x, min=y) => torch.maximum(x, y); x.clamp_max(3) => x.clamp(max=3); x // 7; x % 7; x // -3; x % -3
    x // 1; x % 2; x // 2; x // -1; x // 2147483647; x % 2147483647; x // torch.where(y == 0, 1, y); 100 // (y | 1)
    x % torch.where(y == 0, 1, y); divmod(x, 7)[1] => x % 7; torch.remainder(x, 7) => x % 7; x << 3; x >> 3
    torch.div(x, 7, rounding_mode='floor') => x // 7; x << (k % 32); x >> (k % 32); torch.where(c, x, y)
    x.where(c, 5) => torch.where(c, x, 5); c.int() + d; x * c; torch.sign(x); x.new_full((), 9) => x * 0 + 9
    torch.zeros_like(x) => x * 0; torch.ones_like(x) + x => x + 1; torch.full_like(x, 4) => x * 0 + 4; x.long()
    x.to(torch.int64) => x; torch.square(x) => x * x; x.type_as(y) => x; torch.sub(x, y) => x - y; x.neg() => -x
    torch.relu(x) => x.clamp(min=0); torch.rsub(x, 3) => 3 - x; x.clone().detach() => x; c + 2 * d => c.long() + 2 * d
    (x & 3) ** (y & 15) => (x & 3) ** (y & 15); (x | 1) ** (-(y & 1)) => torch.where(y & 1 == 0, 1, unit(x | 1))
""")
FLOATING = meanings("""
    f + g; f - g; f * g; f / g; -f; abs(f) => f.abs(); x + f => x.float() + f; f / 3.0; f ** 2 => f * f; f - 0.1
    3.0 / f => torch.full_like(f, 3.0) / f; x / 7 => x.float() / 7; x / y => x.float() / y.float(); x.float()
    f.sqrt() => root(f)
    torch.minimum(f, g); torch.maximum(f, g); f.clamp(-2.5, 3.7); torch.where(c, f, g); f * c => f * c.float()
    f.floor(); f.ceil(); torch.trunc(f) => f.trunc(); torch.round(f) => f.round(); f.clamp(-99, 99) // g.clamp(0.3, 9)
    f.clamp(-99, 99) % g.clamp(-9, -0.3); f.clamp(-99, 99) % 7; f.clamp(-99, 99) // 2.5; f ** 3 => f * f * f
    f ** 0.5 => root(f); torch.reciprocal(f) => 1 / f; c.float(); f.to(torch.float16) => f; torch.relu(f)
    torch.sign(f) => torch.where(f > 0, 1.0, torch.where(f < 0, -1.0, 0.0)); f // (c * 0.0) => f / (c * 0.0)
""")
# With another last bit on each backend
NEARLY = meanings("""
    torch.exp(f); torch.exp2(f); torch.log(f); torch.log2(f); torch.tanh(f); torch.sigmoid(f); torch.rsqrt(f)
    f.clamp(-90, 90).sin(); f.clamp(-90, 90).cos(); f ** 1.7; f.abs() ** g.clamp(-2, 2); 2.0 ** g.clamp(-9, 9)
    1.5 ** g.clamp(-9, 9); f ** -0.5 => f.rsqrt(); torch.special.expit(f) => f.sigmoid(); -torch.log(f) * 2.0
    torch.exp(f.clamp(-20, 20) / 7.0) * 3.0; f.clamp(-9, 9) * 1.3 * g.clamp(-9, 9) * x.float() / 5.0
""")
TRUTH = meanings("""
    x < y; x <= y; x > y; x >= y; x == y; x != y; f < g; f <= g; f > g; f >= g; f == g; f != g; c == d; c != d; c < d
    torch.lt(f, 0.3) => f < 0.3; f.ge(g); torch.not_equal(x, 7) => x != 7; x < f => x.float() < f; 3 >= x; c & d; c | d
    c ^ d; ~c; torch.logical_and(x, f) => (x != 0) & (f != 0); x.logical_or(c) => (x != 0) | c; c + d => c | d
    torch.logical_xor(c, d) => c ^ d; torch.logical_not(f) => f == 0; x.bool() => x != 0; f.to(torch.bool) => f != 0
    c * d => c & d; torch.maximum(c, d) => c | d; f.isnan(); torch.isinf(f) => f.isinf(); True => x == x
    False => x != x; q.new_ones((), dtype=torch.bool) => x == x; torch.zeros((), dtype=torch.bool) => x != x
    torch.where(c, d, True)
    f.int() == x => whole(f) == x; f.int() == 0 => whole(f) == 0; (f * 2.0).long() > 5 => whole(f * 2) > 5
    f * f + g >= 0.5; f * 0.1 + g * 0.7 == g * 0.7 + f * 0.1
""")


def whole(x: torch.Tensor) -> torch.Tensor:
    """Towards 0, as a card converts: NaN is 0, what is too large the largest."""
    return x.double().nan_to_num(0.0).clamp(-(2.0**31), 2.0**31 - 1).trunc().long()


def root(x: torch.Tensor) -> torch.Tensor:
    """The square root rounded to nearest: in float32 torch's own is off by a bit on CPUs of some makers."""
    return x.double().sqrt().float()


def unit(x: torch.Tensor) -> torch.Tensor:
    """1 / x of integers: 0 unless x is 1 or -1."""
    return torch.where(x.abs() == 1, x, 0)


FLAGS = torch.arange(N) % 3 == 0
CAPTURED = {"ints": INTS, "floats": FLOATS, "flags": FLAGS, "torch": torch}
READ = {"x": "ints[q]", "y": "ints[k]", "f": "floats[q]", "g": "floats[k]", "c": "flags[q]", "d": "flags[k]"}
_q, _k = INDICES[2], INDICES[3]
EAGER = {
    "x": INTS[_q.clamp(max=len(INTS) - 1)].long(),
    "y": INTS[_k.clamp(max=len(INTS) - 1)].long(),
    "f": FLOATS[_q.clamp(max=len(FLOATS) - 1)],
    "g": FLOATS[_k.clamp(max=len(FLOATS) - 1)],
    "c": FLAGS[_q],
    "d": FLAGS[_k],
    "k": _k,
    "torch": torch,
    "whole": whole,
    "root": root,
    "unit": unit,
}


def function_of(source: str, score: bool = False) -> functions.Function:
    """The source as a mask, or as a score that does not depend on s."""
    body = f"(lambda x, y, f, g, c, d: {source})({', '.join(READ.values())})"
    code = eval(f"lambda {'s, ' if score else ''}b, h, q, k: {body}", CAPTURED)
    return functions.of(None, code) if score else functions.of(code, None)


def eager(source: str) -> torch.Tensor:
    return eval(source, EAGER)


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves of an int32, as floats: a score holds these exactly."""
    x = x.int()
    return (x & 0xFFFF).float(), (x >> 16).float()


def run(made: list[functions.Function]) -> tuple[torch.Tensor, torch.Tensor]:
    found = probed(made, GRID, torch.zeros(len(GRID)), torch.zeros(0, 4, 2), SIZES)
    return found.mask, found.score


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float, source: str) -> None:
    torch.testing.assert_close(
        got, expected, rtol=tolerance, atol=tolerance / 10, equal_nan=True, msg=lambda m: f"{source}: {m}"
    )


def compare(sources: dict[str, str], same: str) -> None:
    """In the emulator each value compared, by an expression that is true if it is the same, with torch's own."""
    CAPTURED["tables"] = torch.stack([eager(meaning).float().reshape(N, N) for meaning in sources.values()])
    emulated, _ = run([function_of(f"{same}({source}, tables[{n}, q, k])") for n, source in enumerate(sources)])
    for source, got in zip(sources, emulated, strict=True):
        assert got.all(), (source, GRID[~got][:5].tolist())


def test_integers():
    """In the emulator through the two halves of the result; they wrap at 32 bits."""
    both = ("({} & 65535).float()", "({} >> 16).float()")
    forms = [form.format(f"({source})") for source in INTEGER for form in both]
    made = [function_of(form, score=True) for form in forms]
    _, emulated = run(made)
    for n, (source, meaning) in enumerate(INTEGER.items()):
        for half, expected in enumerate(halves(eager(meaning))):
            f = made[2 * n + half]
            assert torch.equal(f.scored(torch.zeros(len(GRID)), *INDICES), expected), source
            assert torch.equal(emulated[2 * n + half], expected), source


def test_truth():
    made = [function_of(source) for source in TRUTH]
    emulated, _ = run(made)
    for f, got, (source, meaning) in zip(made, emulated, TRUTH.items(), strict=True):
        expected = eager(meaning)
        assert torch.equal(f.seen(*INDICES), expected), source
        assert torch.equal(got, expected), source


def test_floats():
    """Equal in float32 where a comparison sees them; as scores they may be fused and reordered."""
    scores = [function_of(source, score=True) for source in FLOATING]
    for f, (source, meaning) in zip(scores, FLOATING.items(), strict=True):
        close(f.scored(torch.zeros(len(GRID)), *INDICES), eager(meaning).float(), 0, source)
    _, emulated = run(scores)
    ordinary = torch.ones(len(GRID), dtype=torch.bool)
    for x in (EAGER["f"], EAGER["g"]):  # a score divides by way of reciprocals, which subnormals have none of
        ordinary &= ~(x.abs() < 2.0**-100) & ~(x.abs() > 2.0**100)
    for got, (source, meaning) in zip(emulated, FLOATING.items(), strict=True):
        close(got[ordinary], eager(meaning).float()[ordinary], 1e-6, source)
    compare(FLOATING, "(lambda v, t: (v == t) | (v.isnan() & t.isnan()))")


def test_functions_of_floats():
    """exp and its like to a few units in the last place, in a score and where a comparison sees them."""
    made = [function_of(source, score=True) for source in NEARLY]
    _, emulated = run(made)
    for f, got, (source, meaning) in zip(made, emulated, NEARLY.items(), strict=True):
        close(f.scored(torch.zeros(len(GRID)), *INDICES), eager(meaning).float(), 1e-5, source)
        close(got, eager(meaning).float(), 1e-4, source)
    compare(NEARLY, "(lambda v, t: ((v - t).abs() <= 1e-5 * t.abs() + 1e-6) | (v == t) | (v.isnan() & t.isnan()))")


def test_division_by_zero_gives_zero_and_the_dividend():
    holds(["x // (y * 0) == 0", "x % (y * 0) == x"])


def test_shifts_past_the_word():
    past = "(y & 0 | 40)"
    holds([f"x << {past} == 0", f"x >> {past} == torch.where(x < 0, -1, 0)", "x << -1 - (y & 0) == 0"])


def holds(sources: list[str]) -> None:
    made = [function_of(source) for source in sources]
    emulated, _ = run(made)
    assert all(f.seen(*INDICES).all() for f in made)
    assert emulated.all()


def test_the_score_of_other_dtypes():
    """It is computed in float32 at least, and comes back as it went in."""
    f = functions.of(None, lambda s, b, h, q, k: s * 1.1 + q)
    zero = torch.zeros(())
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        s = torch.tensor([1.0, 2.0]).to(dtype)
        got = f.scored(s, zero, zero, torch.tensor(3), zero)
        wide = s.to(torch.promote_types(dtype, torch.float32))
        assert got.dtype == dtype
        assert torch.equal(got, (wide * 1.1 + 3).to(dtype))
