"""The problems that cards are tried with: each body is a kernel of its own, and random ones reach all kinds."""

from __future__ import annotations

from card_cases import BODIES, CARDS, FP32, body, check_bodies, kernels_of, recording
from forward_cases import BF16, FP16

from tilewise import arch
from tilewise.gpu.abi import ELEMENTS, FP8


def test_every_body_is_a_kernel_of_its_own():
    specs = {}
    for name in BODIES:
        card, problem = body(name)
        with recording() as found, arch.as_card(card):
            problem.check()
        specs[name] = found[-1]
        assert found[-1].name == "forward_mma", name
    assert len(set(specs.values())) == len(specs) >= 16
    assert {card for card, _ in BODIES.values()} == set(CARDS)
    told = [dict(spec.constants) for spec in specs.values()]
    assert {(c["Element"], c["Operand"]) for c in told} == {
        *((ELEMENTS[dtype], ELEMENTS[dtype]) for dtype in (BF16, FP16, FP32, FP8)),
        (ELEMENTS[FP8], ELEMENTS[FP16]),
    }
    for name, values in {
        "kVectors": {True, False},
        "kExact": {True, False},
        "kCudaCores": {True, False},
        "kQInRegisters": {True, False},
        "kSlabs": {True, False},
        "kLengths": {True, False},
        "kStages": {1, 2},
        "kWarpRows": {16, 32},
        "kPageSize": {0, 5, 16},
        "Function": {"UserFunction", "NoFunction"},
    }.items():
        assert {c[name] for c in told} == values, name


def test_random_problems_reach_every_kind_of_kernel():
    found = [*kernels_of("sm_86", (40, 16, 6))]
    forwards = [dict(spec.constants) for spec in found if spec.name == "forward_mma"]
    assert {c["Element"] for c in forwards} == {ELEMENTS[dtype] for dtype in (BF16, FP16, FP32, FP8)}
    assert {c["kHeadDim"] for c in forwards} == {64, 96, 128, 192, 256}
    assert {1, 4} <= {c["kPack"] for c in forwards}
    assert {"ragged", "fold", "decode"} <= {spec.name for spec in found}
    assert not any(spec.name == "forward" for spec in found)  # Hopper's


def test_bodies_are_judged():
    """In the emulator, two of them; on a card all are run."""
    assert check_bodies("cpu", ("Q in registers, two places", "float32 within 99 KB, pages")) == 2
