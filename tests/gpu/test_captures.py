"""What is kept from call to call, and what a CUDA graph forbids to keep: with launches that only count, on a CPU."""

from __future__ import annotations

import gc

import pytest
import torch

from tilewise import BlockSchedule, functions
from tilewise.gpu import captures
from tilewise.gpu.abi import ForwardArgs
from tilewise.gpu.pattern import Lists, Pattern

SIZES = {"seqlen_q": 256, "seqlen_k": 256, "block_q": 64, "block_k": 64}


class Counted:
    """A kernel that counts its launches."""

    def __init__(self) -> None:
        self.launches = 0

    def launch(self, *_, **__) -> None:
        self.launches += 1


@pytest.fixture
def capture(monkeypatch):
    """capture(True): from now on a graph is being captured."""
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    return lambda on: state.__setitem__(0, on)


def lists_of(schedule=None, function=None) -> Lists:
    pattern = Pattern.of(schedule, function, (1, 2, 256, 256))
    sizes = {"batch": 1, "tile_heads": 2, "pack": 1, "tile_q": 128, "unit": 64, "rows_each": 2, "keys": 256}
    made = Lists(pattern, device=torch.device("cpu"), packed=False, **sizes)
    made.kernel = Counted()
    return made


def schedule_of(seed: int = 0) -> BlockSchedule:
    kept = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed)) < 0.5
    return BlockSchedule.from_blocks(kept, **SIZES)


def launches(lists: Lists, schedule=None, function=None, times: int = 3) -> int:
    before = lists.kernel.launches
    for _ in range(times):
        lists.make(ForwardArgs(), schedule, function, 0)
    return lists.kernel.launches - before


def test_lists_are_made_once(capture):
    schedule = schedule_of()
    lists = lists_of(schedule)
    assert launches(lists, schedule) == 1
    schedule.bits.add_(0)  # written to
    assert launches(lists, schedule) == 1
    assert launches(lists, schedule_of(1)) == 1


def test_a_schedule_that_a_graph_reads_is_listed_at_every_call(capture):
    schedule, other = schedule_of(), schedule_of()
    lists = lists_of(schedule)
    assert launches(lists, schedule) == 1
    capture(True)
    assert launches(lists, schedule) == 3
    capture(False)
    assert launches(lists, schedule) == 3, "a replay may have written to it"
    assert launches(lists, other) == 1, "no graph has to do with this one"


def test_a_tensor_that_a_graph_looks_things_up_in(capture):
    ids, others = torch.arange(256) // 50, torch.arange(256) // 60

    def function(x):
        return functions.of(lambda b, h, q, k: x[q] == x[k], None)

    lists = lists_of(function=function(ids))
    capture(True)
    launches(lists, function=function(ids))
    capture(False)
    assert launches(lists, function=function(ids)) == 3
    assert launches(lists, function=function(others)) == 1


def test_what_is_made_in_a_capture(capture):
    capture(True)
    made = torch.zeros(3)
    captures.note((made, None, made))
    capture(False)
    assert captures.noted((torch.zeros(3), made))
    assert not captures.noted((torch.zeros(3),))


def test_nothing_is_held():
    x = torch.zeros(3)
    captures.note((x,))
    place = id(x)
    del x
    gc.collect()
    assert place not in captures._noted


def test_kernels_of_schedules_note_what_they_make(capture, monkeypatch):
    from tilewise.gpu import schedules

    bound = schedules._Bound(schedules._spec("pack"), torch.device("cpu"), schedules.PackArgs())
    bound.kernel, bound.launch_args = Counted(), None
    eager, captured = torch.zeros(1), torch.zeros(1)
    bound.launch(1, {"bits": eager}, {})
    capture(True)
    bound.launch(1, {"bits": captured, "whole": None}, {})
    assert captures.noted((captured,))
    assert not captures.noted((eager,))
