"""Calls that are kept for calls like them: everything that a bound call depends on is in its key."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tilewise import BlockSchedule, functions
from tilewise.gpu import calls
from tilewise.gpu.calls import known_call
from tilewise.scores import Scores

BF16 = torch.bfloat16
FLAGS = (True, False, False, False, None, 0.125, 0.0)
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


def test_starts_and_page_tables_are_in_the_key():
    """Of packed sequences; their values are not."""
    q, k, v = (torch.zeros(16, 4, 64, dtype=BF16) for _ in range(3))
    starts, table = torch.tensor([0, 5, 16], dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    known = [key_of(q, k, v, (*NONE, starts, starts, table)), key_of(q, k, v, (*NONE, starts, starts, None))]
    assert known[0] == key_of(q, k, v, (*NONE, starts + 1, starts.clone(), table + 1))
    others = (
        (starts.long(), starts, table), (starts, starts.long(), table), (starts[:2], starts[:2], table),
        (starts, starts, table[:, :2]), (starts, starts, table.long()),
    )  # fmt: skip
    keys = {*known, key_of(q, k, v), *(key_of(q, k, v, (*NONE, *other)) for other in others)}
    assert len(keys) == 3 + len(others)


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
    other = [False, True, True, True, (3, 0), 0.25, 9.0][place]
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
    assert of(np.zeros(4)) is None, "nor one that compares element by element"


def test_which_of_the_others_it_is_is_in_the_key():
    x = torch.zeros(4)
    keys = {key_of(*tensors(), others=(*NONE[:n], x, *NONE[n + 1 :])) for n in range(6)}
    assert len(keys) == 6


def test_what_a_kernel_depends_on_of_a_schedule_is_in_the_key():
    """Sizes, patterns per sequence and head, lengths and whole blocks; not which blocks are kept."""

    def of(kept=True, *, lead=(), block=16, **options):
        blocks = torch.full((*lead, 128 // block, 128 // block), kept)
        sizes = {"seqlen_q": 128, "seqlen_k": 128, "block_q": block, "block_k": block}
        q, k, _ = tensors()
        return calls.pattern_key(q, k, BlockSchedule.from_blocks(blocks, **sizes, **options), None)

    whole, lengths = torch.ones(8, 8, dtype=torch.bool), torch.full((8,), 7)
    keys = [
        of(),
        of(lead=(4,)),
        of(lead=(2, 1)),
        of(block=32),
        of(whole=whole),
        of(lengths_q=lengths),
        of(lengths_k=lengths),
        of(lengths_k=lengths.expand(2, 8), lead=(2, 1)),
    ]
    assert len(set(keys)) == len(keys)
    assert of() == of(False)
    assert of(lengths_q=lengths) == of(lengths_q=lengths - 3)


def test_what_a_kernel_depends_on_of_functions_is_in_the_key():
    """Their text; not the values that they capture."""
    q, k, _ = tensors()

    def of(mask=None, score=None):
        return calls.pattern_key(q, k, None, functions.of(mask, score))

    def window(size):
        return of(lambda b, h, q, k: q - k < size)

    def documents(ids):
        return of(lambda b, h, q, k: ids[q] == ids[k])

    ids = torch.arange(8)
    keys = [
        window(3),
        documents(ids),
        documents(ids.int()),
        of(None, lambda s, b, h, q, k: s - k),
        of(lambda b, h, q, k: q - k < 3, lambda s, b, h, q, k: s - k),
        calls.pattern_key(q, k, None, None),
    ]
    assert len(set(keys)) == len(keys)
    assert window(3) == window(5)
    assert documents(ids) == documents(ids + 1)
    with pytest.raises(ValueError, match="must be on cpu like q, got meta"):
        documents(ids.to("meta"))


def test_what_the_checks_refuse_has_no_key():
    q, k, v = tensors()
    good = (True, False, False, False)
    for place, bad in enumerate((1, 0, None, 0)):
        flags = (*good[:place], bad, *good[place + 1 :])
        assert key_of(q, k, v, flags=(*flags, *FLAGS[4:])) is None
    assert key_of(q, [1], v) is None
    assert key_of(q, k, torch.nn.Parameter(v)) is None
    assert known_call(q, k, v, NONE, (*FLAGS[:4], [3, 0])) == (None, None)


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
