"""Cards: what they can do, which code runs where, and TILEWISE_CARD, by which one card behaves as another."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tilewise import arch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_card() -> Iterator[None]:
    """Whatever TILEWISE_CARD the suite runs under."""
    with arch.as_card(None):
        yield


def as_device(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> torch.device:
    """A CUDA device that says it has this compute capability."""
    monkeypatch.setattr(arch, "capability", lambda device: (major, minor))
    arch._card.cache_clear()
    return torch.device("cuda", 0)


def test_every_capability_since_ampere_has_an_architecture() -> None:
    expected = {
        (8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_87", (8, 8): "sm_87", (8, 9): "sm_89", (9, 0): "sm_90a",
        (10, 0): "sm_100", (10, 1): "sm_100", (10, 3): "sm_103", (12, 0): "sm_120", (12, 1): "sm_121",
    }  # fmt: skip
    assert {capability: arch.arch_of(*capability) for capability in expected} == expected
    assert set(expected.values()) == set(arch.ARCHS)
    for capability in ((7, 5), (9, 1), (13, 0)):
        with pytest.raises(NotImplementedError, match=f"compute capability {capability[0]}.{capability[1]}:.*emulator"):
            arch.arch_of(*capability)
    with pytest.raises(NotImplementedError, match=r"11\.0 \(Jetson Thor\)"):
        arch.arch_of(11, 0)


def test_what_cards_have() -> None:
    assert [card for card in arch.ARCHS if arch.hopper(card)] == ["sm_90a"]
    assert [card for card in arch.ARCHS if arch.fp8_products(card)] == ["sm_89", "sm_90a", "sm_120", "sm_121"]
    assert [card for card in arch.ARCHS if not arch.tf32_products(card)] == ["sm_86", "sm_89", "sm_120", "sm_121"]
    shared = {card: arch.shared_block(card) >> 10 for card in arch.ARCHS}
    assert shared == {"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90a": 227, "sm_100": 227,
                      "sm_103": 227, "sm_120": 99, "sm_121": 99}  # fmt: skip
    for limits in arch.LIMITS.values():
        assert limits.shared_sm == limits.shared_block + 1024  # what the system keeps of one block


@pytest.mark.parametrize("card", arch.ARCHS)
def test_the_emulator_is_any_card(card: str) -> None:
    assert arch.card_of(CPU) == "sm_90a"
    with arch.as_card(card):
        assert (arch.chosen, arch.card_of(CPU)) == (card, card)
        with arch.as_card(None):
            assert arch.card_of(CPU) == "sm_90a"
        assert arch.card_of(CPU) == card
    assert arch.chosen is None


def test_hopper_imitates_every_card(monkeypatch: pytest.MonkeyPatch) -> None:
    device = as_device(monkeypatch, 9, 0)
    for card in arch.ARCHS:
        with arch.as_card(card):
            assert arch.card_of(device) == card
            assert arch.arch_of_device(device) == "sm_90a", "what code is compiled for stays"


@pytest.mark.parametrize(
    ("capability", "card", "why"),
    [
        ((8, 0), "sm_90a", "no wgmma"),
        ((10, 0), "sm_90a", "no wgmma"),
        ((12, 0), "sm_80", "99 KB of shared memory, and sm_80 has 163"),
        ((8, 9), "sm_87", "99 KB of shared memory, and sm_87 has 163"),
        ((8, 6), "sm_89", "no products of FP8"),
        ((8, 7), "sm_86", ""),
        ((8, 7), "sm_80", "48 warps and 16 blocks, and sm_80 holds 64 and 32"),
        ((8, 9), "sm_120", ""),
        ((10, 0), "sm_89", ""),
        ((12, 1), "sm_86", ""),
    ],
)
def test_what_other_cards_imitate(
    capability: tuple[int, int], card: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = as_device(monkeypatch, *capability)
    with arch.as_card(card):
        if why:
            with pytest.raises(ValueError, match=f"TILEWISE_CARD={card}: cuda:0 is sm_.*{why}"):
                arch.card_of(device)
        else:
            assert arch.card_of(device) == card


def test_devices_without_kernels_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arch.serves_prefill(as_device(monkeypatch, 12, 0))
    assert not arch.serves_prefill(as_device(monkeypatch, 7, 5))
    assert arch.serves_prefill(CPU)


def test_an_unknown_card_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"TILEWISE_CARD must be one of sm_80, .*, sm_121, or unset, got 'sm_75'"),
        arch.as_card("sm_75"),
    ):
        pass
    assert arch.chosen is None


def test_the_environment_names_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh(value: str) -> ModuleType:
        """The module as a process with this environment imports it."""
        monkeypatch.setenv("TILEWISE_CARD", value)
        found = importlib.util.find_spec("tilewise.arch")
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        monkeypatch.setitem(sys.modules, "tilewise.arch", module)  # dataclasses look for it there
        found.loader.exec_module(module)
        return module

    assert fresh("sm_89").card_of(CPU) == "sm_89"
    assert fresh("").card_of(CPU) == "sm_90a"
    wrong = fresh("a100")
    with pytest.raises(ValueError, match=r"TILEWISE_CARD must be one of sm_80.*got 'a100'"):
        wrong.card_of(CPU)
