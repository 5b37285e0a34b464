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
from typing import cast

import numpy as np
import torch

from tilewise import checks
from tilewise.kvcache.extending import ExtendPlan
from tilewise.kvcache.paged import OutOfPages, PagedKVCache
from tilewise.kvcache.pool import Pages
from tilewise.kvcache.progress import Progress, Tokens
from tilewise.kvcache.sequences import check_seqs, several
from tilewise.kvcache.slots import Slots
from tilewise.kvcache.tree import (
    Live,
    Match,
    Node,
    PrefixStats,
    check_new_tokens,
    check_prompt,
    common_prefix,
    common_tokens,
    key_of,
    path_of,
    token_array,
)

GROWING_PAGES = 64  # a node longer than this is followed by another: growing means copying its tokens
SHOWN_SEQUENCES = 8  # show() names so many sequences under one node and counts the others


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
        self._by_row: dict[int, Live] = {}
        self._progress = Progress(cache)
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
        (seq,), (reused,), slots = self._insert([check_prompt("tokens", tokens)])
        return seq, reused, slots

    def insert_many(
        self, prompts: Sequence[Sequence[int] | Tokens | torch.Tensor]
    ) -> tuple[list[int], list[int], Slots]:
        """insert() of several prompts, all or none -> (seqs, reused, slots), one of the first two for each.

        The slots are for the tokens of all that are not reused, one prompt after another. What prompts have in common
        that nobody has written yet is computed for each.
        """
        if isinstance(prompts, (str, torch.Tensor, np.ndarray)) or not isinstance(prompts, Sequence):
            raise TypeError(f"prompts must be a list of prompts, got {type(prompts).__name__}")
        return self._insert([check_prompt(f"prompts[{n}]", tokens) for n, tokens in enumerate(prompts)])

    def extend(
        self,
        seqs: Sequence[int],
        tokens: Sequence[int] | Sequence[Sequence[int]] | Tokens | torch.Tensor | None,
        *,
        into: Slots | None = None,
    ) -> Slots:
        """Append generated tokens: one for each of `seqs`, or a list for each. They can be shared once written.
        None: one each, of which tell() says later what they are.

        All sequences or none; evicts and raises OutOfPages as insert() does. into: as PagedKVCache.extend() takes it.
        The tree needs the tokens on the host: a tensor on a card is read, which waits for it.
        """
        seqs = seqs if type(seqs) is list else check_seqs(seqs)  # whose numbers plan_extend() looks at
        ids, counts = (np.full(len(seqs), -1), None) if tokens is None else check_new_tokens(tokens)
        given = len(ids) if counts is None else len(counts)
        if len(seqs) != given:
            raise ValueError(f"tokens must hold one entry for each of the {len(seqs)} seqs, got {given}")
        plan = self.cache.plan_extend(seqs, 1 if counts is None else counts, into=into)
        if not self._progress.all_of_the_tree(plan):
            for seq in plan.seqs:
                self._living(seq, "seqs")
        evictions = self._find_room(plan.pages)
        if evictions is None:
            what = f"extending {len(plan.seqs)} sequences by {sum(plan.counts)} tokens"
            raise OutOfPages(self._out_of_pages(what, plan.pages))
        self._evict(evictions)
        slots = self._commit(plan, ids, into)
        if tokens is None:
            self._progress.untold.add(slots)
        return slots

    def tell(self, slots: Slots, tokens: Sequence[int] | Tokens | torch.Tensor) -> None:
        """What the tokens are for which extend(seqs, None) made `slots`; of sequences that were released: anything."""
        self._progress.tell(slots, token_array("tokens", tokens))
        self._advance()

    def fork(self, seq: int, n: int) -> list[int]:
        """`n` new sequences with the tokens of `seq`, sharing all its pages, as PagedKVCache.fork does."""
        live = self._living(seq)
        count = checks.integer("n", n, 1)
        self._progress.check_told(live.row)
        children = self.cache.copy_rows(np.array([live.row]), count, managed=True)
        rows = [self.cache.sequences.rows[child] for child in children]
        for child, row in zip(children, rows, strict=True):
            self._live[child] = self._by_row[row] = Live(child, row, live.anchor, self._progress)
        for step in self._progress.fork(live.row, np.array(rows)):
            step.slots._when_complete.append(self._advance)
        return children

    def release(self, seq: int | Sequence[int]) -> None:
        """End a sequence, or a list of them, all or none. What they wrote stays cached until evicted; what they
        reserved and never wrote is dropped."""
        living = [self._living(one) for one in (check_seqs(seq, "seq") if several(seq) else [cast("int", seq)])]
        if len(set(living)) < len(living):
            raise ValueError("seq must name each sequence once, got one twice")
        rows = np.array([live.row for live in living], np.int64)
        given_up: dict[int, int] = {}  # last pages of those that are done, and how many held them
        facts = (self._progress.complete, self.cache.sequences.lengths, self.cache.sequences.last)
        for live, complete, length, last in zip(living, *(x[rows].tolist() for x in facts), strict=True):
            self._leave_tail(live, complete, complete == length, last, given_up.get(last, 0))
            given_up[last] = given_up.get(last, 0) + 1
            live.anchor.live.remove(live)
            del self._live[live.seq], self._by_row[live.row]
        self._progress.end(rows)
        self.cache.drop([live.seq for live in living])

    def clear(self) -> None:
        """Forget all cached tokens that no living sequence stands on. Living sequences stay as they are."""
        for node, count in self._plan_evictions(self.cache.num_pages)[0]:
            self._drop_last_pages(node, count)

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of every living sequence."""
        return {seq: self._progress.length(live.row) for seq, live in self._live.items()}

    def tokens(self, seq: int) -> list[int]:
        """The token ids of one living sequence."""
        ids: list[int] = self._living(seq).tokens.tolist()
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
                length = self._progress.length(live.row)
                own = self._progress.tokens(live.row, item.end, length)
                unwritten = length - live.complete
                below.append(
                    f"sequence {live.seq}: {_count(length, 'token')}"
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
        tail, common = self._nearest_tail(node, rest)
        if common > extra:
            child, extra, page = None, common, tail
        return Match(node, len(node.pages), np.concatenate(pages), extra, page, child)

    def _nearest(self, node: Node, tokens: Tokens) -> tuple[Node | None, int]:
        """The child whose first page has the longest prefix in common with `tokens`, and its length."""
        asked = key_of(tokens, self.cache.page_size)
        at = bisect_left(node.keys, asked)
        best: tuple[Node | None, int] = (None, 0)
        for key in node.keys[max(at - 1, 0) : at + 1]:
            common = common_tokens(key, asked)
            if common > best[1]:
                best = node.children[key], common
        return best

    def _nearest_tail(self, node: Node, tokens: Tokens) -> tuple[int, int]:
        """Of the sequences that stand on the node, the page after it of the one whose written tokens there begin most
        like `tokens`, and how many do."""
        progress = self._progress
        rows = np.fromiter((live.row for live in node.live), np.int64, len(node.live))
        rows = rows[progress.complete[rows] > node.end]
        if not len(rows) or not len(tokens):
            return -1, 0
        pages = self.cache.sequences.table[rows, node.end // self.cache.page_size]
        width = min(self.cache.page_size, len(tokens))
        differs = np.ones((len(rows), width + 1), bool)
        np.not_equal(progress.ids[pages, :width], tokens[:width], out=differs[:, :-1])
        common = np.minimum(differs.argmax(1), progress.complete[rows] - node.end)
        best = int(common.argmax())
        return int(pages[best]), int(common[best])

    # Growing.

    def _insert(self, prompts: list[Tokens]) -> tuple[list[int], list[int], Slots]:
        self.cache.check_writable()
        size, pool = self.cache.page_size, self.cache.pool
        matches = [self._match(prompt[:-1]) for prompt in prompts]
        needed = sum(-(-len(prompt) // size) - len(match.pages) for prompt, match in zip(prompts, matches, strict=True))
        # Where nothing else is left, the pages that extra tokens would be copied from are themselves worth evicting.
        for extras in (True, False) if any(match.extra for match in matches) else (False,):
            shared = [
                np.append(match.pages, np.int32(match.extra_page)) if extras and match.extra else match.pages
                for match in matches
            ]
            for pages in shared:
                pool.share(pages)  # what is held by more than the tree is not evicted
            evictions = self._find_room(needed)
            if evictions is not None:
                break
            for pages in shared:
                pool.release(pages)
        else:
            tokens = sum(map(len, prompts))
            raise OutOfPages(self._out_of_pages(f"inserting {tokens} tokens", needed))

        self._evict(evictions)
        seqs, reused = [], []
        for prompt, match, pages in zip(prompts, matches, shared, strict=True):
            extra = match.extra if extras else 0
            reused.append(len(match.pages) * size + extra)
            anchor = self._standing(match.node, len(match.pages) * size)
            self._clock += 1
            if extra and match.extra_node:
                match.extra_node.last_used = self._clock
            self._touch(anchor)
            seq = self.cache.adopt(pages, reused[-1], managed=True)
            row = self.cache.sequences.rows[seq]
            self._live[seq] = self._by_row[row] = Live(seq, row, anchor, self._progress)
            self._progress.begin(np.array([row]), reused[-1], anchor.end + size)
            seqs.append(seq)
            self._inserts += 1
            self._hits += reused[-1] > 0
            self._tokens_inserted += len(prompt)
            self._tokens_reused += reused[-1]
        # Copies the extra pages, because others hold them too.
        plan = self.cache.plan_extend(seqs, [len(prompt) - n for prompt, n in zip(prompts, reused, strict=True)])
        new = [prompt[n:] for prompt, n in zip(prompts, reused, strict=True)]
        return seqs, reused, self._commit(plan, np.concatenate(new) if new else np.empty(0, np.int64), None)

    def _commit(self, plan: ExtendPlan, ids: Tokens, into: Slots | None) -> Slots:
        """Extend sequences by tokens for which there is room."""
        last = None if plan.copies is None else self.cache.sequences.last[plan.rows]
        slots = self.cache.commit_extend(plan, into=into)
        if last is not None:
            self._progress.copy_ids(plan, last)
        self._progress.ids.reshape(-1)[slots.host_index] = ids
        if self._progress.add(slots, plan) is not None:
            slots._when_complete.append(self._advance)
        return slots

    def _advance(self) -> None:
        """Slots are complete now: note which tokens are written, and take full pages into the tree."""
        for row, tokens, pages in self._progress.full_pages(self._progress.advance()):
            self._take_in(self._by_row[row], tokens, pages)

    def _take_in(self, live: Live, tokens: Tokens, pages: Pages) -> None:
        """Take tokens of `live` that are written in every layer, and fill these pages, into the tree."""
        size, node = self.cache.page_size, live.anchor
        base = node.end
        full = base + len(tokens)
        while node.end < full:
            start = node.end - base
            child = node.children.get(key_of(tokens[start:], size))
            if child is None:
                new_tokens, new_pages = tokens[start:], pages[start // size :]
                alone = node is not self._root and not node.children and len(node.live) == 1 and live in node.live
                if alone and len(node.pages) < GROWING_PAGES:
                    # Nobody else stands here: one growing node is easier to read than a chain of single pages.
                    self.cache.pool.share(new_pages)
                    node.tokens = np.concatenate([node.tokens, new_tokens])
                    node.pages = np.concatenate([node.pages, new_pages])
                else:
                    node = self._add_child(node, new_tokens.copy(), new_pages.copy())
            else:
                taken = common_prefix(child.tokens, tokens[start:]) // size
                node = child if taken == len(child.pages) else self._split(child, taken)
        if node is not live.anchor:
            live.anchor.live.remove(live)
            live.anchor = node
            node.live.add(live)
        self._progress.limit[live.row] = node.end + size

    def _leave_tail(self, live: Live, complete: int, whole: bool, last: int, given_up: int) -> None:
        """What a sequence that ends leaves to the tree. complete: its tokens that are written; whole: if all are. last:
        its last page. given_up: how many that shared this end with it."""
        anchor = live.anchor
        self._clock += 1
        self._touch(anchor)
        # The partly filled last page stays too, unless tokens in it are still to come, a fork goes on in it (and will
        # leave it here in its turn), or the tree has its tokens already.
        if whole and complete > anchor.end and self.cache.pool.refs[last] - given_up == 1:
            tail = self._progress.ids[last, : complete - anchor.end].copy()
            if self._nearest(anchor, tail)[1] < len(tail):
                self._add_child(anchor, tail, np.array([last], np.int32))

    def _standing(self, node: Node, end: int) -> Node:
        """The node on the path to `node` that ends after `end` tokens; made if there is none."""
        while node.start >= end and node.parent is not None:
            node = node.parent
        return node if node.end == end else self._split(node, (end - node.start) // self.cache.page_size)

    def _add_child(self, node: Node, tokens: Tokens, pages: Pages) -> Node:
        self.cache.pool.share(pages)
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
