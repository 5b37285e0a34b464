"""Tokens of which the prefix tree learns later what they are: the tree is the same in the end, and nobody else's."""

from __future__ import annotations

import random

import pytest
import torch
from prefix_cases import add, check_contents, check_tree, empty_out, make, write

from tilewise.kvcache import OutOfPages, PrefixCache


def cached(prefix: PrefixCache) -> list[list[int]]:
    """The tokens from the root to each leaf."""
    found = []
    stack = [(prefix._root, [])]
    while stack:
        node, before = stack.pop()
        tokens = before + node.tokens.tolist()
        stack += [(child, tokens) for child in node.children.values()]
        if not node.children:
            found.append(tokens)
    return sorted(found)


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_told_a_step_late_is_told_at_once(page_size: int) -> None:
    """Sequences grow, come and go, and whenever all is told the tree has what it would have."""
    rng = random.Random(page_size)
    late, once = make(200, page_size), make(200, page_size)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(1, 9))] for _ in range(4)]
    seqs = [add(late, prompt)[0] for prompt in prompts]
    assert [add(once, prompt)[0] for prompt in prompts] == seqs
    waiting = None
    for step in range(29):
        tokens = [rng.randrange(3) for _ in seqs]
        slots = late.extend(seqs, None)
        if waiting is not None:
            late.tell(*waiting)
        waiting = slots, tokens
        late.cache.mark_written(slots)
        write(once, once.extend(seqs, tokens))
        if step % 5 == 3:
            late.tell(*waiting)
            waiting = None
            assert [late.tokens(seq) for seq in seqs] == [once.tokens(seq) for seq in seqs]
            assert cached(late) == cached(once)
            gone = seqs.pop(rng.randrange(len(seqs)))
            late.release(gone)
            once.release(gone)
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
            assert late.match(prompt) == once.match(prompt)
            found = add(late, prompt)
            assert found == add(once, prompt)
            seqs.append(found[0])
    assert waiting is None
    check_tree(late)
    assert cached(late) == cached(once)
    for prefix in (late, once):
        empty_out(prefix)


def test_pages_of_one_who_is_gone_are_not_written_over() -> None:
    """Its page is another's before its token is told."""
    prefix = make(3, 4)
    first, _ = add(prefix, [1, 2])
    slots = prefix.extend([first], None)
    prefix.cache.mark_written(slots)
    place = int(slots.host_index[0])
    prefix.release(first)
    other, reused, _ = prefix.insert([5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7])
    assert reused == 0
    assert place // 4 in prefix.cache.page_list(other)
    prefix.tell(slots, [9])
    assert prefix.tokens(other) == [5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]
    with pytest.raises(OutOfPages):
        prefix.insert([1])


def test_nothing_is_shared_before_it_is_told() -> None:
    prefix = make(20, 2)
    seq, _ = add(prefix, [1, 2, 3])
    slots = prefix.extend([seq], None)
    prefix.cache.mark_written(slots)
    assert prefix.match([1, 2, 3, 4, 5]) == 3
    with pytest.raises(ValueError, match=r"call tell\(\) before it is forked"):
        prefix.fork(seq, 2)
    assert prefix.stats().sequences == 1
    prefix.tell(slots, torch.tensor([4]))
    assert prefix.match([1, 2, 3, 4, 5]) == 4
    assert prefix.tokens(seq) == [1, 2, 3, 4]
    prefix.fork(seq, 2)


def test_written_after_it_is_told() -> None:
    prefix = make(20, 2)
    seq, _ = add(prefix, [1, 2, 3])
    slots = prefix.extend([seq], None)
    prefix.tell(slots, [4])
    assert prefix.match([1, 2, 3, 4, 5]) == 3
    write(prefix, slots)
    assert prefix.match([1, 2, 3, 4, 5]) == 4
    check_contents(prefix, seq)
