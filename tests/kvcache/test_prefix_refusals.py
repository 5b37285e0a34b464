"""What the prefix tree refuses, changing nothing, and which kinds of tokens it takes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from prefix_cases import add, check_contents, check_tree, empty_out, make, snapshot, write

from tilewise.kvcache import PrefixCache


def test_bad_calls_change_nothing() -> None:
    prefix = make(16, 4)
    a, _ = add(prefix, range(6))
    gone, _ = add(prefix, range(3))
    prefix.release(gone)
    foreign = prefix.cache.allocate()
    bad: list[tuple[Any, type[Exception], str]] = [
        (lambda: prefix.insert([]), ValueError, "tokens"),
        (lambda: prefix.insert("hello"), TypeError, "tokens"),
        (lambda: prefix.insert(5), TypeError, "tokens"),
        (lambda: prefix.insert([1.5, 2.0]), TypeError, "tokens"),
        (lambda: prefix.insert([True, False]), TypeError, "tokens"),
        (lambda: prefix.insert(["a", "b"]), TypeError, "tokens"),
        (lambda: prefix.insert([1 << 70]), TypeError, "tokens"),
        (lambda: prefix.insert([(1 << 64) - 1]), TypeError, "tokens"),
        (lambda: prefix.insert([[1, 2]]), ValueError, "tokens"),
        (lambda: prefix.insert([[1, 2], [3]]), ValueError, "tokens"),
        (lambda: prefix.insert(torch.zeros(2, 2).long()), ValueError, "tokens"),
        (lambda: prefix.insert(torch.zeros(2)), TypeError, "tokens"),
        (lambda: prefix.insert(torch.tensor(3)), ValueError, "tokens"),
        (lambda: prefix.insert(torch.ones(2).bfloat16()), TypeError, "^tokens must be integers .* got torch.bfloat16"),
        (lambda: prefix.insert([torch.ones(()).bfloat16()]), TypeError, "^tokens must be integers"),
        (lambda: prefix.extend([a], [torch.tensor(1.0)]), TypeError, "^tokens must be integers"),
        (lambda: prefix.extend(torch.tensor([a]), [5, 6]), ValueError, "^tokens must"),
        (lambda: prefix.extend(np.array([a]), [5, 6]), ValueError, "^tokens must"),
        (lambda: prefix.extend([a], 5), TypeError, "tokens"),
        (lambda: prefix.extend([a], [5, 6]), ValueError, "tokens"),
        (lambda: prefix.extend([a], [1.5]), TypeError, "tokens"),
        (lambda: prefix.extend([a, a], [5, 6]), ValueError, "once"),
        (lambda: prefix.extend(a, [5]), TypeError, "seqs"),
        (lambda: prefix.extend([gone], [5]), ValueError, f"^seqs must .* sequence {gone} was freed"),
        (lambda: prefix.extend([a, foreign], [5, 5]), ValueError, f"^seqs must .* sequence {foreign}"),
        (lambda: prefix.fork(gone, 1), ValueError, f"^seq must .* sequence {gone} was released"),
        (lambda: prefix.fork(a, 0), ValueError, "n must"),
        (lambda: prefix.fork(a, 1.0), TypeError, "n must"),
        (lambda: prefix.release(gone), ValueError, f"sequence {gone} was released"),
        (lambda: prefix.release("a"), TypeError, "seq"),
        (lambda: prefix.tokens(99), ValueError, "sequence 99"),
        (lambda: prefix.show(max_tokens=-1), ValueError, "max_tokens"),
    ]
    before = snapshot(prefix)
    for number, (call, error, says) in enumerate(bad):
        with pytest.raises(error, match=says):
            call()
        assert snapshot(prefix) == before, f"case {number} changed something"
    with pytest.raises(TypeError, match="cache"):
        PrefixCache(prefix)  # type: ignore[arg-type]


def test_the_cache_refuses_sequences_of_the_tree() -> None:
    """Grown, ended or forked behind the tree's back, they would leave it with pages and tokens that do not match."""
    prefix = make(16, 4)
    cache = prefix.cache
    a, _ = add(prefix, range(6))
    (b,) = prefix.fork(a, 1)
    own = cache.allocate()
    before = snapshot(prefix)
    for seq in (a, b):
        says = f"sequence {seq} belongs to a PrefixCache: use its "
        for call, use in (
            (lambda seq=seq: cache.extend([own, seq], 1), "extend"),
            (lambda seq=seq: cache.free(seq), "release"),
            (lambda seq=seq: cache.free(torch.tensor(seq)), "release"),
            (lambda seq=seq: cache.fork(seq), "fork"),
        ):
            with pytest.raises(ValueError, match=re.escape(f"{says}{use}()")):
                call()
    assert snapshot(prefix) == before
    cache.extend([own], 3)
    cache.free(cache.fork(own))
    cache.free(own)
    write(prefix, prefix.extend([a, b], [6, 7]))
    check_contents(prefix, b)
    check_tree(prefix)
    empty_out(prefix)
    assert not cache._managed


def test_sampled_tokens_may_be_single_tensors() -> None:
    prefix = make(16, 4)
    a, _ = add(prefix, [torch.tensor(1), torch.tensor(2)])
    b, _ = add(prefix, [1, 3])
    write(prefix, prefix.extend([a, b], [torch.tensor(3), np.array(4)]))
    write(prefix, prefix.extend(torch.tensor([a, b]), [torch.tensor([5, 6]), torch.tensor([])]))
    assert prefix.tokens(a) == [1, 2, 3, 5, 6]
    assert prefix.tokens(b) == [1, 3, 4]
