"""Random calls of the prefix tree against the naive longest common prefix, for the CPU's test and the card's."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefix_cases import LAYERS, check_tree, empty_out, longest_common, make, rows, snapshot, write

from tilewise.kvcache import OutOfPages, Slots
from tilewise.kvcache.tree import Node


class PrefixCacheMachine(RuleBasedStateMachine):
    """Against the naive longest common prefix over all that is complete. `roomy`: nothing is ever evicted."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]), num_pages=st.sampled_from([5, 8, 12, 2000, 2000]))
    def start(self, page_size: int, num_pages: int) -> None:
        self.prefix = make(num_pages, page_size)
        self.roomy = num_pages == 2000
        self.complete: dict[int, list[int]] = {}  # living sequences: their tokens that are written everywhere
        self.cached: list[list[int]] = []  # what released sequences left
        self.slots: list[Slots] = []
        self.seen: list[list[int]] = [[]]

    def done(self, seq: int) -> None:
        """Recompute what is complete from the slots, as the tree must have noticed by itself."""
        tokens = self.prefix.tokens(seq)
        cache = self.prefix.cache
        written = (cache._written.bits == cache._written.every_layer).all(-1)  # (pages, page_size), over the layers
        pages, size = self.prefix.cache.page_list(seq), self.prefix.cache.page_size
        n = 0
        while n < len(tokens) and written[pages[n // size], n % size]:
            n += 1
        self.complete[seq] = tokens[:n]

    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=9), finish=st.booleans())
    def insert(self, data: st.DataObject, more: list[int], finish: bool) -> None:
        base = data.draw(st.sampled_from(self.seen))
        prompt = base[: data.draw(st.integers(0, len(base)))] + more
        before = snapshot(self.prefix)
        matched = self.prefix._match(np.array(prompt[:-1], dtype=np.int64)).pages
        try:
            seq, reused, slots = self.prefix.insert(prompt)
        except OutOfPages:
            assert snapshot(self.prefix) == before
            needed = -(-len(prompt) // self.prefix.cache.page_size) - len(matched)
            assert needed > self.prefix.cache.pool.free_pages + len(self.evictable() - set(matched.tolist()))
            return
        living = longest_common(prompt[:-1], list(self.complete.values()))
        best = longest_common(prompt[:-1], [*self.complete.values(), *self.cached])
        if self.roomy:
            assert reused == best
        else:
            assert living // self.prefix.cache.page_size * self.prefix.cache.page_size <= reused <= best
        assert len(slots) == len(prompt) - reused
        self.seen.append(prompt)
        if finish:
            write(self.prefix, slots)
        else:
            self.slots.append(slots)
        self.done(seq)

    def evictable(self) -> set[int]:
        """Pages of nodes with nothing alive at or below them."""
        pages: set[int] = set()

        def visit(node: Node) -> bool:
            below = [visit(child) for child in node.children.values()]
            idle = not node.live and all(below)
            if idle:
                pages.update(node.pages.tolist())
            return idle

        visit(self.prefix._root)
        return pages

    @precondition(lambda self: self.complete)
    @rule(data=st.data(), finish=st.booleans())
    def extend(self, data: st.DataObject, finish: bool) -> None:
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.complete)), unique=True, min_size=1, max_size=3))
        some = st.lists(st.integers(0, 2), max_size=6)
        tokens = data.draw(st.lists(some, min_size=len(seqs), max_size=len(seqs)))
        before = snapshot(self.prefix)
        try:
            slots = self.prefix.extend(seqs, tokens)
        except (OutOfPages, ValueError) as error:
            assert snapshot(self.prefix) == before
            if not isinstance(error, OutOfPages) and "write them" not in str(error):
                raise
            return
        self.seen += [self.prefix.tokens(seq) for seq in seqs]
        if finish:
            write(self.prefix, slots)
        else:
            self.slots.append(slots)
        for seq in self.complete:
            self.done(seq)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1))
    def write_later(self, data: st.DataObject, layer: int) -> None:
        slots = data.draw(st.sampled_from(self.slots))
        if slots.complete or any(seq not in self.complete for seq in slots.seqs):
            self.slots = [s for s in self.slots if s is not slots]
            return
        write(self.prefix, slots, [layer])
        for seq in self.complete:
            self.done(seq)

    @precondition(lambda self: self.complete)
    @rule(data=st.data(), n=st.integers(1, 2))
    def fork(self, data: st.DataObject, n: int) -> None:
        seq = data.draw(st.sampled_from(sorted(self.complete)))
        for child in self.prefix.fork(seq, n):
            self.complete[child] = list(self.complete[seq])
            assert self.prefix.tokens(child) == self.prefix.tokens(seq)

    @precondition(lambda self: self.complete)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.complete)))
        tokens = self.complete.pop(seq)
        size = self.prefix.cache.page_size
        last = self.prefix.cache.page_list(seq)[-1]
        in_use = any(last in self.prefix.cache.page_list(other) for other in self.complete)
        if in_use or len(tokens) < self.prefix.lengths[seq]:
            tokens = tokens[: len(tokens) // size * size]  # its last page goes on with a fork, or is dropped
        self.cached.append(tokens)
        self.prefix.release(seq)

    @rule()
    def clear(self) -> None:
        self.prefix.clear()
        assert not self.evictable()
        self.cached = []
        # Nodes on the path of the living stay, and living ones hold their tokens themselves.

    @invariant()
    def everything_is_in_order(self) -> None:
        if not hasattr(self, "prefix"):
            return
        check_tree(self.prefix)
        assert set(self.prefix.lengths) == set(self.complete)
        for seq, tokens in self.complete.items():
            pages = self.prefix.cache.page_list(seq)
            for layer in range(LAYERS):
                got = self.prefix.cache.load(layer, pages, 0, len(tokens), torch.float32)[0]
                assert torch.equal(got, rows(tokens, layer))

    def teardown(self) -> None:
        if hasattr(self, "prefix"):
            self.prefix.show()
            empty_out(self.prefix)
