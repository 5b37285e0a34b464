"""Steps of a forward pass without a model: plans that follow their sequences, packed prompts, enough pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import assert_state, randn

from tilewise import PagedKVCache, PrefixCache, reference
from tilewise.scores import Reach
from tilewise.serving.sizing import pages_needed
from tilewise.serving.steps import DecodeStep, MixedStep

OPTIONS = {"scale": None, "softcap": 0.0, "sinks": None}
REACHES = (Reach(), Reach(3), Reach(chunk=4))


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (T, 4, 8), k and v (T, 2, 8) of new tokens, float32."""
    return tuple(randn(count, heads, 8, seed=3 * seed + i) for i, heads in enumerate((4, 2, 2)))


def prompts(*lengths: int) -> tuple[PrefixCache, list[int]]:
    """Sequences of their own in a cache of float32."""
    prefix = PrefixCache(PagedKVCache(100, 4, 2, 8, kv_format="fp32"))
    seqs = []
    for n, length in enumerate(lengths):
        seq, _, slots = prefix.insert([10 * n + i for i in range(length)])
        prefix.cache.write(0, slots, *tokens(len(slots), seed=n)[1:])
        seqs.append(seq)
    return prefix, seqs


def judge(o: torch.Tensor, q: torch.Tensor, prefix: PrefixCache, seqs: list[int], reach: Reach) -> None:
    asked = {"window": reach.window, "chunk": reach.chunk or None}
    states = [reference.decode(q[:, None], prefix, 0, seqs, dtype=d, **asked) for d in (torch.float64, torch.float32)]
    assert_state((o[:, None], states[1][1]), *states)


def test_plans_are_those_of_the_step():
    """One for each reach that asked, and after sequences came, went and grew the next step's."""
    prefix, seqs = prompts(5, 9, 2)
    step = DecodeStep(prefix, num_heads=4)
    for number, chosen in enumerate(([0, 1, 2], [2, 0], [2, 0], [0, 1])):
        members = [seqs[n] for n in chosen]
        step.take(members, prefix.extend(members, [number] * len(members)))
        for reach in REACHES:
            q, k, v = tokens(len(members), seed=50 + number)
            judge(step.attend(0, q, k, v, reach=reach, **OPTIONS), q, prefix, members, reach)
        assert set(step.plans) == set(REACHES)
        assert all(plan.reach == reach for reach, plan in step.plans.items())
        assert all(tuple(plan.lengths) == tuple(prefix.cache.lengths_of(members)) for plan in step.plans.values())


def test_prompts_and_decoded_rows_stand_in_one_pass():
    """The rows of each are what a step of their own gives, to the bit."""
    prefix, seqs = prompts(6, 3, 9, 2)
    again, _ = prompts(6, 3, 9, 2)
    q, k, v = tokens(7 + 2, seed=11)
    found = []
    for cache, together in ((prefix, True), (again, False)):
        slots = cache.extend(seqs[:2], [[1, 2, 3], [4, 5, 6, 7]])
        decode = DecodeStep(cache, num_heads=4)
        decode.take(seqs[2:], cache.extend(seqs[2:], [8, 9]))
        if together:
            step = MixedStep(cache, [slots], decode, num_heads=4)
            assert step.host_positions.tolist() == [6, 7, 8, 3, 4, 5, 6, 9, 2]
            found.append(step.attend(0, q, k, v, reach=Reach(), **OPTIONS))
        else:
            parts = [(MixedStep(cache, [slots], num_heads=4), slice(0, 7)), (decode, slice(7, 9))]
            found.append(torch.cat([one.attend(0, q[r], k[r], v[r], reach=Reach(), **OPTIONS) for one, r in parts]))
    assert torch.equal(*found)
    judge(found[0][7:], q[7:], prefix, seqs[2:], Reach())


@pytest.mark.parametrize("reach", REACHES)
def test_a_prompt_in_parts_is_the_prompt_at_once(reach):
    """Parts of several sequences side by side, each after what was there before; the last row of each is told."""
    prefix, seqs = prompts(6, 3)
    q, k, v = tokens(9, seed=9)
    slots = [prefix.extend([seqs[0]], [list(range(5))]), prefix.extend([seqs[1]], [list(range(4))])]
    step = MixedStep(prefix, slots, num_heads=4)
    assert step.counts == [5, 4]
    assert step.last_rows.tolist() == [4, 8]
    assert step.host_positions.tolist() == [6, 7, 8, 9, 10, 3, 4, 5, 6]
    o = step.attend(0, q, k, v, reach=reach, **OPTIONS)
    for rows, seq in ((slice(0, 5), seqs[0]), (slice(5, 9), seqs[1])):
        exact, honest = (
            reference.decode(q[None, rows], prefix, 0, [seq], window=reach.window, chunk=reach.chunk or None, dtype=d)
            for d in (torch.float64, torch.float32)
        )
        assert_state((o[None, rows], honest[1]), exact, honest)


def test_layers_that_are_not_as_the_cache_says_are_refused():
    prefix, seqs = prompts(5)
    step = DecodeStep(prefix, num_heads=4)
    step.take(seqs, prefix.extend(seqs, [1]))
    q, k, v = tokens(1, seed=0)
    for layer, keys, values in ((1, k, v), (0, k[:, :1], v), (0, k, v[..., :4])):
        with pytest.raises(NotImplementedError, match="keys of"):
            step.attend(layer, q, keys, values, reach=Reach(), **OPTIONS)


@pytest.mark.parametrize(("length", "new", "samples"), [(7, 5, 1), (8, 4, 1), (8, 4, 3), (9, 7, 2), (1, 1, 1)])
def test_as_many_pages_as_are_needed_are_counted(length, new, samples):
    """Prompt and new tokens of every sample at once fit; common pages are counted once."""
    prompt = np.arange(length)
    count = pages_needed([prompt, prompt], 4, new, samples)
    prefix = PrefixCache(PagedKVCache(count, 4, 1, 8))
    for _ in range(2):
        seq, _, slots = prefix.insert(prompt.tolist())
        prefix.cache.write(0, slots, *(torch.zeros(len(slots), 1, 8) for _ in range(2)))
        for one in (seq, *(prefix.fork(seq, samples - 1) if samples > 1 else ())):
            for token in range(new):
                slots = prefix.extend([one], [100 + token])
                prefix.cache.write(0, slots, *(torch.zeros(1, 1, 8) for _ in range(2)))
    assert count <= 2 * (samples * (-(-new // 4) + 2) + -(-length // 4)) + 1
