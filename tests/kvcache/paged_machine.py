"""Random calls of the paged cache against a model of it, for the CPU's test and the card's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paged_cases import check_pages, snapshot

from tilewise.kvcache import FORMATS, OutOfPages, PagedKVCache, Slots


class PagedCacheMachine(RuleBasedStateMachine):
    """Sequences are modelled as lists of rows; whatever the order of calls, the cache holds just those."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 5]),
        num_pages=st.integers(3, 14),
        name=st.sampled_from(FORMATS),
        shared=st.booleans(),  # rows that are keys and, but for their last channel, values
    )
    def start(self, page_size: int, num_pages: int, name: str, shared: bool) -> None:
        more = {"value_dim": 2, "shared_kv": True} if shared and name != "int4" else {}
        self.cache = PagedKVCache(num_pages, page_size, 1, 3, num_layers=2, kv_format=name, **more)
        self.model: dict[int, list[int]] = {}  # the number of each token's row
        self.rows = 0
        # Per layer, (2, rows, 1, 3): the keys and values of every row as the format gives them back, made once.
        self.right = [torch.empty(2, 0, 1, 3, dtype=self.cache.format.decoded_dtype) for _ in range(2)]
        self.slots: list[tuple[Slots, list[int]]] = []
        self.written: set[tuple[int, int]] = set()  # (row, layer)

    def row_values(self, numbers: list[int], layer: int) -> torch.Tensor:
        """(2, tokens, 1, 3): the keys and values that go with row numbers."""
        n = torch.tensor(numbers, dtype=torch.float32)
        return torch.stack([n + 0.25 * layer, -n - 0.5 * layer])[:, :, None, None] * torch.tensor([1.0, 0.5, -0.25])

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)))

    @rule()
    def allocate(self) -> None:
        self.model[self.cache.allocate()] = []

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, max_size=4))
        counts = data.draw(st.lists(st.integers(0, 7), min_size=len(seqs), max_size=len(seqs)))
        before = snapshot(self.cache)
        try:
            slots = self.cache.extend(seqs, counts)
        except (OutOfPages, ValueError) as error:
            assert snapshot(self.cache) == before
            if isinstance(error, OutOfPages):
                size = self.cache.page_size
                most = sum(-(-(len(self.model[s]) + n) // size) - len(self.model[s]) // size
                           for s, n in zip(seqs, counts, strict=True))  # fmt: skip
                assert most > self.cache.pool.free_pages, "there was room"
            else:
                assert any((n, each) not in self.written for s in seqs for n in self.model[s] for each in range(2))
            return
        numbers = list(range(self.rows, self.rows + sum(counts)))
        self.rows += sum(counts)
        form = self.cache.format
        for layer in range(2):
            new = [form.decode(form.encode(x)) for x in self.row_values(numbers, layer)]
            self.right[layer] = torch.cat([self.right[layer], torch.stack(new)], 1)
        assert slots.positions.tolist() == [
            len(self.model[s]) + i for s, n in zip(seqs, counts, strict=True) for i in range(n)
        ]
        at = 0
        for s, n in zip(seqs, counts, strict=True):
            self.model[s] += numbers[at : at + n]
            at += n
        self.slots.append((slots, numbers))

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), layer=st.integers(0, 1))
    def write(self, data: st.DataObject, layer: int) -> None:
        slots, numbers = data.draw(st.sampled_from(self.slots))
        values = self.row_values(numbers, layer)
        try:
            self.cache.write(layer, slots, *values[: 1 if self.cache.shared_kv else 2])
        except ValueError as error:
            if "stale" not in str(error):
                raise
            assert any(s not in self.model for s in slots.seqs) or slots.complete
            self.slots = [entry for entry in self.slots if entry[0] is not slots]
            return
        self.written |= {(n, layer) for n in numbers}
        assert slots.complete == all((n, each) in self.written for n in numbers for each in range(2))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.model[self.cache.fork(seq)] = list(self.model[seq])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.cache.free(seq)
        del self.model[seq]

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if hasattr(self, "cache"):
            check_pages(self.cache)
            assert self.cache.lengths == {s: len(rows) for s, rows in self.model.items()}

    @invariant()
    def contents_are_the_model(self) -> None:
        if not hasattr(self, "cache"):
            return
        for seq, rows in self.model.items():
            for layer in range(2):
                if all((n, layer) in self.written for n in rows):
                    want = list(self.right[layer][:, rows])
                    if self.cache.shared_kv:
                        want[1] = want[0][..., :2]
                    for got, x in zip(self.cache.gather(layer, seq), want, strict=True):
                        assert torch.equal(got, x)
                else:
                    with pytest.raises(ValueError, match="write"):
                        self.cache.gather(layer, seq)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for seq in list(self.model):
                self.cache.free(seq)
            assert self.cache.pool.free_pages == self.cache.num_pages
