"""Each operation, as torch computes it: at edge values, on the host and in the emulator, bit for bit where it is of ints."""

from __future__ import annotations

import torch
from function_cases import probed

from tilewise import functions

INTS = torch.tensor(
    [-(2**31), -(2**31) + 1, -65537, -40, -7, -2, -1, 0, 1, 2, 3, 7, 31, 32, 100, 65536, 2**31 - 1]
).int()
FLOATS = torch.tensor(
    [
        -torch.inf,
        -3e38,
        -1e10,
        -7.5,
        -2.5,
        -1.0,
        -0.4,
        -1e-42,
        -0.0,
        0.0,
        1e-42,
        0.3,
        0.5,
        1.0,
        1.5,
        2.0,
        3.7,
        9.0,
        1e10,
    ]
    + [3e38, torch.inf, torch.nan]
)
N = len(FLOATS)
SIZES = (1, 1, N, N)
Q, K = torch.meshgrid(torch.arange(N), torch.arange(N), indexing="ij")
GRID = torch.stack([torch.zeros_like(Q), torch.zeros_like(Q), Q, K], 2).reshape(-1, 4)
INDICES = GRID.unbind(1)
# x and y: ints, f and g: floats, c and d: bools. On the left as a function has it, on the right as 64-bit integers or
# torch's own float32 have it.
INTEGER = {
    "x + y": "x + y", "x - y": "x - y", "x * y": "x * y", "-x": "-x", "abs(x)": "x.abs()", "+x": "x", "~x": "~x",
    "x & y": "x & y", "x | y": "x | y", "x ^ y": "x ^ y", "x ** 2": "x * x", "x ** 3": "(x * x).int() * x",
    "torch.minimum(x, y)": "torch.minimum(x, y)", "torch.max(x, y)": "torch.maximum(x, y)",
    "x.clamp(-7, 100)": "x.clamp(-7, 100)", "torch.clamp(x, min=y)": "torch.maximum(x, y)", "x.clamp_max(3)": "x.clamp(max=3)",
    "x // 7": "x // 7", "x % 7": "x % 7", "x // -3": "x // -3", "x % -3": "x % -3", "x // 1": "x", "x % 2": "x % 2",
    "x // 2147483647": "x // 2147483647", "x % 2147483647": "x % 2147483647", "x // -1": "-x", "x // 2": "x // 2",
    "x // torch.where(y == 0, 1, y)": "x // torch.where(y == 0, 1, y)", "100 // (y | 1)": "100 // (y | 1)",
    "x % torch.where(y == 0, 1, y)": "x % torch.where(y == 0, 1, y)", "divmod(x, 7)[1]": "x % 7",
    "torch.remainder(x, 7)": "x % 7", "torch.div(x, 7, rounding_mode='floor')": "x // 7",
    "x << 3": "x << 3", "x >> 3": "x >> 3", "x << (k % 32)": "x << (k % 32)", "x >> (k % 32)": "x >> (k % 32)",
    "torch.where(c, x, y)": "torch.where(c, x, y)", "x.where(c, 5)": "torch.where(c, x, 5)", "c.int() + d": "c.long() + d",
    "x * c": "x * c", "torch.sign(x)": "x.sign()", "x.new_full((), 9)": "x * 0 + 9", "torch.zeros_like(x)": "x * 0",
    "torch.ones_like(x) + x": "x + 1", "torch.full_like(x, 4)": "x * 0 + 4", "x.to(torch.int64)": "x", "x.long()": "x",
    "torch.square(x)": "x * x", "x.type_as(y)": "x", "torch.sub(x, y)": "x - y", "torch.relu(x)": "x.clamp(min=0)",
    "torch.rsub(x, 3)": "3 - x", "x.clone().detach()": "x", "3 - x": "3 - x", "7 * x": "7 * x", "x.neg()": "-x",
}  # fmt: skip
FLOATING = {
    "f + g": "f + g", "f - g": "f - g", "f * g": "f * g", "f / g": "f / g", "-f": "-f", "abs(f)": "f.abs()",
    "x + f": "x.float() + f", "f / 3.0": "f / 3.0", "3.0 / f": "torch.full_like(f, 3.0) / f", "x / 7": "x.float() / 7", "x / y": "x.float() / y.float()",
    "torch.minimum(f, g)": "torch.minimum(f, g)", "torch.maximum(f, g)": "torch.maximum(f, g)", "f.clamp(-2.5, 3.7)": "f.clamp(-2.5, 3.7)",
    "torch.where(c, f, g)": "torch.where(c, f, g)", "f * c": "f * c.float()", "f.sqrt()": "f.sqrt()", "f.floor()": "f.floor()",
    "f.ceil()": "f.ceil()", "torch.trunc(f)": "f.trunc()", "torch.round(f)": "f.round()", "f.clamp(-99, 99) // g.clamp(0.3, 9)": "f.clamp(-99, 99) // g.clamp(0.3, 9)",
    "f.clamp(-99, 99) % g.clamp(-9, -0.3)": "f.clamp(-99, 99) % g.clamp(-9, -0.3)", "f.clamp(-99, 99) % 7": "f.clamp(-99, 99) % 7",
    "f.clamp(-99, 99) // 2.5": "f.clamp(-99, 99) // 2.5", "x.float()": "x.float()", "f ** 2": "f * f", "f ** 3": "f * f * f",
    "f ** 0.5": "f.sqrt()", "torch.reciprocal(f)": "1 / f", "c.float()": "c.float()", "f.to(torch.float16)": "f",
    "torch.sign(f)": "torch.where(f > 0, 1.0, torch.where(f < 0, -1.0, 0.0))", "torch.relu(f)": "torch.relu(f)", "f - 0.1": "f - 0.1",
}  # fmt: skip
# With another last bit on each backend
NEARLY = {
    **{f"torch.{name}(f)": f"f.{name}()" for name in ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "rsqrt")},
    **{f"(f.clamp(-90, 90)).{name}()": f"f.clamp(-90, 90).{name}()" for name in ("sin", "cos")},
    "f ** 1.7": "f ** 1.7", "f.abs() ** g.clamp(-2, 2)": "f.abs() ** g.clamp(-2, 2)", "2.0 ** g.clamp(-9, 9)": "2 ** g.clamp(-9, 9)",
    "1.5 ** g.clamp(-9, 9)": "1.5 ** g.clamp(-9, 9)", "f ** -0.5": "f.rsqrt()", "torch.special.expit(f)": "f.sigmoid()",
    "torch.exp(f.clamp(-20, 20) / 7.0) * 3.0": "torch.exp(f.clamp(-20, 20) / 7.0) * 3.0",
}  # fmt: skip
TRUTH = {
    **{f"{a} {op} {b}": f"{a} {op} {b}" for op in ("<", "<=", ">", ">=", "==", "!=") for a, b in ("xy", "fg", "cd")},
    "torch.lt(f, 0.3)": "f < 0.3", "f.ge(g)": "f >= g", "torch.not_equal(x, 7)": "x != 7", "x < f": "x.float() < f", "3 >= x": "3 >= x",
    "c & d": "c & d", "c | d": "c | d", "c ^ d": "c ^ d", "~c": "~c", "torch.logical_and(x, f)": "(x != 0) & (f != 0)",
    "x.logical_or(c)": "(x != 0) | c", "torch.logical_xor(c, d)": "c ^ d", "torch.logical_not(f)": "f == 0", "x.bool()": "x != 0",
    "f.to(torch.bool)": "f != 0", "c + d": "c | d", "c * d": "c & d", "torch.maximum(c, d)": "c | d", "f.isnan()": "f.isnan()",
    "torch.isinf(f)": "f.isinf()", "q.new_ones((), dtype=torch.bool)": "x == x", "True": "x == x", "False": "x != x",
    "torch.zeros((), dtype=torch.bool)": "x != x", "f.int() == x": "whole(f) == x", "torch.where(c, d, True)": "torch.where(c, d, True)",
    "f.int() == 0": "whole(f) == 0", "(f * 2.0).long() > 5": "whole(f * 2) > 5", "f * f + g >= 0.5": "f * f + g >= 0.5",
}  # fmt: skip


def whole(x: torch.Tensor) -> torch.Tensor:
    """Towards 0, as a card converts: NaN is 0, what is too large the largest."""
    return x.double().nan_to_num(0.0).clamp(-(2.0**31), 2.0**31 - 1).trunc().long()


FLAGS = torch.arange(N) % 3 == 0
CAPTURED = {"ints": INTS, "floats": FLOATS, "flags": FLAGS, "torch": torch}
READ = {
    "x": "ints[q.clamp(0, 16)]",
    "y": "ints[k.clamp(0, 16)]",
    "f": "floats[q]",
    "g": "floats[k]",
    "c": "flags[q]",
    "d": "flags[k]",
}
_q, _k = INDICES[2], INDICES[3]
EAGER = {
    "x": INTS[_q.clamp(0, 16)].long(), "y": INTS[_k.clamp(0, 16)].long(), "f": FLOATS[_q], "g": FLOATS[_k], "c": FLAGS[_q],
    "d": FLAGS[_k], "k": _k, "torch": torch, "whole": whole,
}  # fmt: skip


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
    forms = [
        form.format(f"({source})") for source in INTEGER for form in ("({} & 65535).float()", "({} >> 16).float()")
    ]
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
    quotient, rest = function_of("x // (y * 0) == 0"), function_of("x % (y * 0) == x")
    emulated, _ = run([quotient, rest])
    assert quotient.seen(*INDICES).all() and rest.seen(*INDICES).all() and emulated.all()


def test_shifts_past_the_word():
    made = [
        function_of("x << (y & 0 | 40) == 0"),
        function_of("x >> (y & 0 | 40) == torch.where(x < 0, -1, 0)"),
        function_of("x << -1 - (y & 0) == 0"),
    ]
    emulated, _ = run(made)
    assert all(f.seen(*INDICES).all() for f in made) and emulated.all()


def test_the_score_of_other_dtypes():
    """It is computed in float32 at least, and comes back as it went in."""
    f = functions.of(None, lambda s, b, h, q, k: s * 1.1 + q)
    zero = torch.zeros(())
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        s = torch.tensor([1.0, 2.0]).to(dtype)
        got = f.scored(s, zero, zero, torch.tensor(3), zero)
        wide = s.to(torch.promote_types(dtype, torch.float32))
        assert got.dtype == dtype and torch.equal(got, (wide * 1.1 + 3).to(dtype))
