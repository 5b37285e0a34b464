"""Calls that are kept for calls like them: everything that a bound call depends on is in its key."""

from __future__ import annotations

import threading

import pytest
import torch

from tilewise.gpu import calls
from tilewise.gpu.calls import known_call
from tilewise.scores import Scores

BF16 = torch.bfloat16
FLAGS = (True, False, False, None, 0.125, 0.0)
NONE = (None,) * 6


def tensors(dtype=BF16) -> list[torch.Tensor]:
    """q, k and v (2, 8, 4, 64)."""
    return [torch.zeros(2, 8, 4, 64, dtype=dtype) for _ in range(3)]


def key_of(q, k, v, others=NONE, flags=FLAGS):
    return known_call(q, k, v, others, flags)[0]


def off_16_bytes(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.numel() + 8, dtype=x.dtype)[1 : x.numel() + 1].view(x.shape)


CHANGES = {
    "length": lambda x: x[:, :7].contiguous(),
    "heads": lambda x: x[:, :, :2].contiguous(),
    "head_dim": lambda x: x[..., :32].contiguous(),
    "batch": lambda x: x[:1],
    "strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dtype": lambda x: x.half(),
    "alignment": off_16_bytes,
    "gradient": lambda x: x.clone().requires_grad_(),
}


def test_the_same_kind_of_tensors_has_the_same_key():
    assert key_of(*tensors()) == key_of(*tensors()) is not None
    with torch.no_grad():
        q, k, v = tensors()
        assert key_of(q.requires_grad_(), k, v) == key_of(*tensors()), "no gradient is wanted"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_thing_about_each_tensor_is_in_the_key(which, change):
    given = tensors()
    before = key_of(*given)
    given[which] = CHANGES[change](given[which])
    assert key_of(*given) != before


@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_tensor_s_card_is_in_the_key(which, monkeypatch):
    given = tensors()
    before = key_of(*given)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 1 if x is given[which] else -1)
    assert key_of(*given) != before


@pytest.mark.parametrize("place", range(len(FLAGS)))
def test_each_flag_is_in_the_key(place):
    other = [False, True, True, (3, 0), 0.25, 9.0][place]
    flags = (*FLAGS[:place], other, *FLAGS[place + 1 :])
    assert key_of(*tensors(), flags=flags) != key_of(*tensors())


@pytest.mark.parametrize("place", range(6), ids=["sinks", "slopes", "out", "descale_q", "descale_k", "descale_v"])
def test_each_thing_about_each_other_tensor_is_in_the_key(place):
    def of(x):
        return key_of(*tensors(), others=(*NONE[:place], x, *NONE[place + 1 :]))

    x = torch.zeros(4, 8)
    keys = [
        of(None),
        of(x),
        of(torch.zeros(8, 4)),
        of(x.T.contiguous().T),
        of(x.to(BF16)),
        of(off_16_bytes(x)),
        of(x.clone().requires_grad_()),
        of(x.to("meta")),
    ]
    assert len(set(keys)) == len(keys)
    assert of(torch.ones(4, 8)) == of(x), "what is in them does not matter"
    assert of([0.0] * 4) is None, "not a tensor: the checks will say so"


def test_which_of_the_others_it_is_is_in_the_key():
    x = torch.zeros(4)
    keys = {key_of(*tensors(), others=(*NONE[:n], x, *NONE[n + 1 :])) for n in range(6)}
    assert len(keys) == 6


def test_what_the_checks_refuse_has_no_key():
    q, k, v = tensors()
    for flags in ((1, False, False), (True, 0, False), (True, False, None)):
        assert key_of(q, k, v, flags=(*flags, *FLAGS[3:])) is None
    assert key_of(q, [1], v) is None
    assert key_of(q, k, torch.nn.Parameter(v)) is None
    assert known_call(q, k, v, NONE, (*FLAGS[:3], [3, 0])) == (None, None)


def test_a_call_that_was_kept_is_found_in_its_own_thread_alone():
    q, k, v = tensors()
    flags = (*FLAGS, "kept")
    key, found = known_call(q, k, v, NONE, flags)
    assert found is None
    kept = calls.calls()[key] = calls.GpuCall(Scores(), False)
    assert known_call(*tensors(), NONE, flags)[1] is kept
    assert known_call(q, k, v, NONE, FLAGS)[1] is None
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(known_call(q, k, v, NONE, flags)[1]))
    thread.start()
    thread.join()
    assert elsewhere == [None]
    del calls.calls()[key]
