"""The prefix tree: sequences that begin with the same tokens share the pages of those tokens, found at run time.

A radix tree of token ids over the pages of a PagedKVCache. A node is a run of full pages, and holds them itself, so
they outlive the sequences that computed them and can be reused until they are evicted. The part of a prompt that
matches only the beginning of a page is copied into a page of the new sequence's own.

Tokens enter the tree when they have been written for every layer. Sequences that computed the same tokens side by side
keep their own copies; the tree holds the first, and the others go back to the pool with their sequence.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tilewise import checks
from tilewise.kvcache.paged import OutOfPages, PagedKVCache
from tilewise.kvcache.pool import Pages
from tilewise.kvcache.sequences import check_seqs
from tilewise.kvcache.slots import Slots
from tilewise.kvcache.tree import Live, Match, Node, Tokens, common_prefix, is_single, key_of, path_of, token_array

GROWING_PAGES = 64  # a node longer than this is followed by another: growing means copying its tokens
SHOWN_SEQUENCES = 8  # show() names so many sequences under one node and counts the others


@dataclass(frozen=True)
class PrefixStats:
    """What PrefixCache.stats() counts since the cache was made; the last three are what it holds now."""

    inserts: int
    hits: int  # inserts that reused anything
    tokens_inserted: int
    tokens_reused: int
    evictions: int  # pages taken from the tree to make room
    sequences: int
    nodes: int
    cached_tokens: int

    @property
    def hit_rate(self) -> float:
        """The share of the inserted tokens that did not have to be computed."""
        return self.tokens_reused / self.tokens_inserted if self.tokens_inserted else 0.0

    def __str__(self) -> str:
        return (
            f"{self.sequences} sequences, {self.nodes} nodes, {self.cached_tokens} tokens cached; {self.hits} hits in "
            f"{self.inserts} inserts, {self.tokens_reused} of {self.tokens_inserted} tokens reused "
            f"({self.hit_rate:.0%}), {self.evictions} pages evicted"
        )


class PrefixCache:
    """Prefix sharing over `cache`: the sequences made here are also grown, forked and ended here, not by `cache`.

    A step: `insert` each new prompt and `extend` each running sequence, write the slots for every layer through
    `.cache.write`, run attention over `.cache`.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        if not isinstance(cache, PagedKVCache):
            raise TypeError(f"cache must be a PagedKVCache, got {type(cache).__name__}")
        self.cache = cache
        self._root = Node(np.empty(0, np.int64), np.empty(0, np.int32), None, 0, 0)
        self._live: dict[int, Live] = {}
        self._clock = 0  # counts inserts and releases: the time of least-recently-used
        self._inserts = self._hits = self._tokens_inserted = self._tokens_reused = self._evictions = 0

    def match(self, tokens: Sequence[int] | Tokens | torch.Tensor) -> int:
        """How many of the first `tokens` an insert() of them would reuse now; nothing changes."""
        prompt = token_array("tokens", tokens)
        found = self._match(prompt[:-1])
        return len(found.pages) * self.cache.page_size + found.extra

    def insert(self, tokens: Sequence[int] | Tokens | torch.Tensor) -> tuple[int, int, Slots]:
        """A new sequence of `tokens` (at least one) -> (seq, reused, slots).

        The first `reused` tokens are cached already; `slots` are for tokens[reused:], which the caller computes and
        writes. The last token is never reused, since its output is what the caller wants. Evicts what was used least
        recently if pages run out; raises OutOfPages, with nothing changed, if that does not suffice.
        """
        prompt = token_array("tokens", tokens)
        if not len(prompt):
            raise ValueError("tokens must hold at least one token, got none")
        self.cache.check_writable()
        match = self._match(prompt[:-1])
        size, pool = self.cache.page_size, self.cache.pool
        needed = -(-len(prompt) // size) - len(match.pages)
        # Where nothing else is left, the page that the extra tokens would be copied from is itself worth evicting.
        for extra in (match.extra, 0) if match.extra else (0,):
            pages = np.append(match.pages, np.int32(match.extra_page)) if extra else match.pages
            pool.retain(pages)  # what is held by more than the tree is not evicted
            evictions = self._find_room(needed)
            if evictions is not None:
                break
            pool.release(pages)
        else:
            raise OutOfPages(self._out_of_pages(f"inserting {len(prompt)} tokens", needed))

        self._evict(evictions)
        reused = len(match.pages) * size + extra
        anchor = match.node
        if match.taken < len(anchor.pages):
            anchor = self._split(anchor, match.taken)
        self._clock += 1
        if extra and match.extra_node:
            match.extra_node.last_used = self._clock
        self._touch(anchor)
        seq = self.cache.adopt(pages, reused, managed=True)
        # Copies the extra page, because others hold it too.
        slots = self.cache.commit_extend(self.cache.plan_extend([seq], [len(prompt) - reused]))
        live = self._live[seq] = Live(seq, prompt, reused, anchor, size)
        live.waiting.append((slots, len(prompt)))
        slots._when_complete.append(partial(self._advance, [live]))
        self._inserts += 1
        self._hits += reused > 0
        self._tokens_inserted += len(prompt)
        self._tokens_reused += reused
        return seq, reused, slots

    def extend(
        self,
        seqs: Sequence[int],
        tokens: Sequence[int] | Sequence[Sequence[int]] | torch.Tensor,
        *,
        into: Slots | None = None,
    ) -> Slots:
        """Append generated tokens: one for each of `seqs`, or a list for each. They can be shared once written.

        All sequences or none; evicts and raises OutOfPages as insert() does. into: as PagedKVCache.extend() takes it.
        The tree needs the tokens on the host: a tensor on a card is read, which waits for it.
        """
        if isinstance(tokens, (torch.Tensor, np.ndarray)):
            tokens = tokens.tolist()
        if isinstance(tokens, str) or not isinstance(tokens, Sequence):
            raise TypeError(f"tokens must be a list of ints or of lists of ints, got {type(tokens).__name__}")
        singles = token_array("tokens", tokens).tolist() if set(map(type, tokens)) == {int} else None
        new = [] if singles else [token_array("tokens", [t] if is_single(t) else t) for t in tokens]
        seqs = check_seqs(seqs)
        if len(seqs) != len(tokens):
            raise ValueError(f"tokens must hold one entry for each of the {len(seqs)} seqs, got {len(tokens)}")
        plan = self.cache.plan_extend(seqs, 1 if singles else [len(t) for t in new], into=into)
        living = [live for seq in seqs if (live := self._live.get(seq))]
        if len(living) < len(seqs):
            living = [self._living(seq, "seqs") for seq in plan.seqs]
        evictions = self._find_room(plan.pages)
        if evictions is None:
            what = f"extending {len(plan.seqs)} sequences by {sum(plan.counts)} tokens"
            raise OutOfPages(self._out_of_pages(what, plan.pages))
        self._evict(evictions)
        slots = self.cache.commit_extend(plan, into=into)
        if singles:
            for live, token in zip(living, singles, strict=True):
                live.tokens.push(token)
                live.waiting.append((slots, live.tokens.size))
        else:
            for live, more in zip(living, new, strict=True):
                live.tokens.append(more)
                if len(more):
                    live.waiting.append((slots, live.tokens.size))
            living = [live for live, more in zip(living, new, strict=True) if len(more)]
        slots._when_complete.append(partial(self._advance, living))
        return slots

    def fork(self, seq: int, n: int) -> list[int]:
        """`n` new sequences with the tokens of `seq`, sharing all its pages, as PagedKVCache.fork does."""
        live = self._living(seq)
        children = []
        pages = self.cache.page_list(live.seq)
        for _ in range(checks.integer("n", n, 1)):
            self.cache.pool.retain(pages)
            child_seq = self.cache.adopt(pages, live.tokens.size, managed=True)
            child = Live(child_seq, live.tokens.view(), live.complete, live.anchor, self.cache.page_size)
            for slots, end in live.waiting:
                child.waiting.append((slots, end))
                slots._when_complete.append(partial(self._advance, [child]))
            self._live[child.seq] = child
            children.append(child.seq)
        return children

    def release(self, seq: int) -> None:
        """End a sequence. What it wrote stays cached until evicted; what it reserved and never wrote is dropped."""
        live = self._living(seq)
        anchor = live.anchor
        self._clock += 1
        self._touch(anchor)
        tail = live.tokens.view()[anchor.end : live.complete]
        page = self.cache.page_list(seq)[anchor.end // self.cache.page_size :][:1]
        # The partly filled last page stays too, unless tokens in it are still to come, a fork goes on in it (and will
        # leave it here in its turn), or the tree has its tokens already.
        if (
            len(tail)
            and live.complete == live.tokens.size
            and self.cache.pool.refs[page[0]] == 1
            and self._nearest(anchor, tail)[1] < len(tail)
        ):
            self._add_child(anchor, tail.copy(), page.copy())
        anchor.live.remove(live)
        live.released = True
        del self._live[live.seq]
        self.cache.drop([live.seq])

    def clear(self) -> None:
        """Forget all cached tokens that no living sequence stands on. Living sequences stay as they are."""
        for node, count in self._plan_evictions(self.cache.num_pages)[0]:
            self._drop_last_pages(node, count)

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of every living sequence."""
        return {seq: live.tokens.size for seq, live in self._live.items()}

    def tokens(self, seq: int) -> list[int]:
        """The token ids of one living sequence."""
        ids: list[int] = self._living(seq).tokens.view().tolist()
        return ids

    def stats(self) -> PrefixStats:
        """What was inserted, reused and evicted so far, and what is held now."""
        nodes = list(self._nodes())
        return PrefixStats(
            inserts=self._inserts,
            hits=self._hits,
            tokens_inserted=self._tokens_inserted,
            tokens_reused=self._tokens_reused,
            evictions=self._evictions,
            sequences=len(self._live),
            nodes=len(nodes),
            cached_tokens=sum(len(node.tokens) for node in nodes),
        )

    def show(self, max_tokens: int = 8, decode: Callable[[list[int]], str] | None = None) -> str:
        """The tree as text: the first `max_tokens` ids of every node and sequence, or what `decode` makes of them.

        "sequences" counts those alive under a node, "refs" who holds its pages, the tree included.
        """
        checks.integer("max_tokens", max_tokens, 0)

        def spell(tokens: Tokens) -> str:
            ids = tokens[:max_tokens].tolist()
            more = "…" if len(tokens) > len(ids) else ""
            if decode is not None:
                return repr(decode(ids) + more)
            return "[" + " ".join([*map(str, ids), *([more] if more else [])]) + "]"

        under: dict[Node, int] = {}
        for live in self._live.values():
            for node in path_of(live.anchor):
                under[node] = under.get(node, 0) + 1
        lines = [str(self.stats())]
        # Depth first with a stack: a tree may be deeper than Python's recursion goes.
        stack: list[tuple[Node | str, str, bool]] = [(self._root, "", True)]
        while stack:
            item, indent, is_last = stack.pop()
            is_root = item is self._root
            branch = "" if is_root else indent + ("└─ " if is_last else "├─ ")
            if isinstance(item, str):
                lines.append(branch + item)
                continue
            if not is_root:
                refs, alive = int(self.cache.pool.refs[item.pages].max()), under.get(item, 0)
                lines.append(
                    f"{branch}{_count(len(item.tokens), 'token')} {spell(item.tokens)} · "
                    f"{_count(len(item.pages), 'page')} · {_count(alive, 'sequence')} · refs {refs}"
                )
                indent += "   " if is_last else "│  "
            below: list[Node | str] = [item.children[key] for key in item.keys]
            here = sorted(item.live, key=lambda live: live.seq)
            for live in here[:SHOWN_SEQUENCES]:
                own = live.tokens.view()[item.end :]
                unwritten = live.tokens.size - live.complete
                below.append(
                    f"sequence {live.seq}: {_count(live.tokens.size, 'token')}"
                    + (f", the last {len(own)} its own {spell(own)}" if len(own) else "")
                    + (f", {unwritten} not written yet" if unwritten else "")
                )
            if len(here) > SHOWN_SEQUENCES:
                below.append(f"and {len(here) - SHOWN_SEQUENCES} more sequences")
            stack += [(b, indent, i == 0) for i, b in enumerate(reversed(below))]
        return "\n".join(lines)

    # Finding.

    def _living(self, seq: int, name: str = "seq") -> Live:
        live = self._live.get(checks.integer(name, seq))
        if live is None:
            raise ValueError(f"{name} must be alive, but sequence {seq} was released or never inserted")
        return live

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _match(self, tokens: Tokens) -> Match:
        """The longest prefix of `tokens` that the tree or the written tail of a living sequence holds."""
        size = self.cache.page_size
        node = self._root
        pages = [node.pages]
        while (child := node.children.get(key_of(tokens[node.end :], size))) and len(child.tokens) >= size:
            common = common_prefix(child.tokens, tokens[child.start :])
            taken = common // size
            pages.append(child.pages[:taken])
            if taken < len(child.pages):
                extra = common % size
                return Match(child, taken, np.concatenate(pages), extra, int(child.pages[taken]), child)
            node = child
        rest = tokens[node.end :]
        child, extra = self._nearest(node, rest)
        page = int(child.pages[0]) if child else -1
        for live in node.live:
            common = common_prefix(live.tokens.view()[node.end : live.complete], rest)
            if common > extra:
                child, extra = None, common
                page = int(self.cache.page_list(live.seq)[node.end // size])
        return Match(node, len(node.pages), np.concatenate(pages), extra, page, child)

    def _nearest(self, node: Node, tokens: Tokens) -> tuple[Node | None, int]:
        """The child whose first page has the longest prefix in common with `tokens`, and its length."""
        size = self.cache.page_size
        at = bisect_left(node.keys, key_of(tokens, size))
        best: tuple[Node | None, int] = (None, 0)
        for key in node.keys[max(at - 1, 0) : at + 1]:
            child = node.children[key]
            common = common_prefix(child.tokens[:size], tokens)
            if common > best[1]:
                best = child, common
        return best

    # Growing.

    def _advance(self, living: list[Live]) -> None:
        """Slots of these are complete now: note which tokens are written, and take full pages into the tree."""
        for live in living:
            waiting = live.waiting
            while waiting and waiting[0][0].complete:
                live.complete = waiting.popleft()[1]
            if live.complete >= live.limit and not live.released:
                self._take_in(live)

    def _take_in(self, live: Live) -> None:
        """Take the tokens of `live` that are written in every layer into the tree, as far as they fill pages."""
        size = self.cache.page_size
        full = live.complete // size * size
        node = live.anchor
        tokens, pages = live.tokens.view(), self.cache.page_list(live.seq)
        while node.end < full:
            start = node.end
            child = node.children.get(key_of(tokens[start:], size))
            if child is None:
                new_tokens, new_pages = tokens[start:full].copy(), pages[start // size : full // size].copy()
                alone = node is not self._root and not node.children and node.live == {live}
                if alone and len(node.pages) < GROWING_PAGES:
                    # Nobody else stands here: one growing node is easier to read than a chain of single pages.
                    self.cache.pool.retain(new_pages)
                    node.tokens = np.concatenate([node.tokens, new_tokens])
                    node.pages = np.concatenate([node.pages, new_pages])
                else:
                    node = self._add_child(node, new_tokens, new_pages)
            else:
                taken = common_prefix(child.tokens, tokens[start:full]) // size
                node = child if taken == len(child.pages) else self._split(child, taken)
        live.anchor.live.remove(live)
        live.anchor, live.limit = node, node.end + size
        node.live.add(live)

    def _add_child(self, node: Node, tokens: Tokens, pages: Pages) -> Node:
        self.cache.pool.retain(pages)
        key = key_of(tokens, self.cache.page_size)
        at = bisect_left(node.keys, key)
        if at and key.startswith(node.keys[at - 1]):
            # A partly filled page whose tokens the new child holds too, and more.
            self._drop_last_pages(node.children[node.keys[at - 1]], 1)
        child = Node(tokens, pages, node, node.end, node.last_used)
        node.children[key] = child
        insort(node.keys, key)
        return child

    def _split(self, node: Node, count: int) -> Node:
        """Cut the first `count` pages off into a new parent of `node`. What stands on the end of `node` stays there."""
        size = self.cache.page_size
        assert node.parent is not None
        cut = count * size
        upper = Node(node.tokens[:cut], node.pages[:count], node.parent, node.start, node.last_used)
        node.parent.children[key_of(upper.tokens, size)] = upper
        node.tokens, node.pages, node.start, node.parent = node.tokens[cut:], node.pages[count:], upper.end, upper
        key = key_of(node.tokens, size)
        upper.children, upper.keys = {key: node}, [key]
        return upper

    # Shrinking.

    def _touch(self, node: Node) -> None:
        for used in path_of(node):
            used.last_used = self._clock

    def _find_room(self, pages: int) -> list[tuple[Node, int]] | None:
        """What to evict so that `pages` are free: nodes, and how many of their last pages. None: not possible."""
        short = pages - self.cache.pool.free_pages
        if short <= 0:
            return []
        evictions, found = self._plan_evictions(short)
        return evictions if found == short else None

    def _plan_evictions(self, wanted: int) -> tuple[list[tuple[Node, int]], int]:
        """Up to `wanted` pages at the ends of nodes that no living sequence stands on, least recently used first."""
        plan: list[tuple[Node, int]] = []
        found = 0
        heap = [(n.last_used, i, n) for i, n in enumerate(self._nodes()) if not n.children and not n.live]
        heapq.heapify(heap)
        serial = len(heap) + self.cache.num_pages  # never that of a leaf: every node has a page
        left: dict[Node, int] = {}
        while heap and found < wanted:
            _, _, node = heapq.heappop(heap)
            held = np.flatnonzero(self.cache.pool.refs[node.pages] > 1)  # by more than the tree
            count = min(len(node.pages) - (int(held[-1]) + 1 if len(held) else 0), wanted - found)
            if count:
                plan.append((node, count))
                found += count
            parent = node.parent
            if count == len(node.pages) and parent is not None and parent is not self._root:
                left[parent] = left.get(parent, len(parent.children)) - 1
                if not left[parent] and not parent.live:
                    heapq.heappush(heap, (parent.last_used, serial, parent))
                    serial += 1
        return plan, found

    def _evict(self, evictions: list[tuple[Node, int]]) -> None:
        for node, count in evictions:
            self._drop_last_pages(node, count)
            self._evictions += count

    def _drop_last_pages(self, node: Node, count: int) -> None:
        keep = len(node.pages) - count
        self.cache.pool.release(node.pages[keep:])
        if keep:
            node.tokens, node.pages = node.tokens[: keep * self.cache.page_size], node.pages[:keep]
        else:
            assert node.parent is not None
            key = key_of(node.tokens, self.cache.page_size)
            del node.parent.children[key]
            del node.parent.keys[bisect_left(node.parent.keys, key)]

    def _out_of_pages(self, what: str, needed: int) -> str:
        evictable = self._plan_evictions(self.cache.num_pages)[1]
        return (
            f"{what} takes {needed} new pages; {self.cache.pool.free_pages} of {self.cache.num_pages} are free and "
            f"{evictable} can be evicted; release sequences or make the cache larger"
        )


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" + ("" if n == 1 else "s")
