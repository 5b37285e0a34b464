"""Problems for an indexer's choice, an oracle in float64, and what a right list of keys is."""

from __future__ import annotations

import torch
from oracle import randn

import tilewise
from tilewise.kvcache import PagedKVCache
from tilewise.plan.choice import ChoicePlan

FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Problem:
    """Sequences of `lengths`, whose last `counts` tokens choose `topk` keys. What was not written is NaN.

    keys: those of each sequence, (length, dim). Everything stays on `device`.
    """

    def __init__(self, lengths, counts, topk, *, heads=8, dim=32, dtype=torch.bfloat16, page=16, seed=0, size=1.0,
                 spare=3, device="cpu"):  # fmt: skip
        pages = sum(-(-n // page) for n in lengths)
        self.cache = PagedKVCache(
            pages + spare, page, 1, head_dim=24, value_dim=16, shared_kv=True, num_layers=3, kv_format=FORMATS[dtype],
            index_dim=dim, index_layers=[2, 0], device=device,
        )  # fmt: skip
        index = self.cache.index_keys
        assert index is not None
        for layer in (0, 2):
            index.stored(layer).fill_(torch.nan)
        self.seqs, self.keys = self.cache.allocate(len(lengths)), [randn(0, dim)] * len(lengths)
        # In two rounds, the second backwards, so that no sequence's pages are neighbours
        for part, order in ((2, list(range(len(lengths)))), (1, list(range(len(lengths)))[::-1])):
            its = [n for n in order if (lengths[n] // 2 if part == 2 else lengths[n] - lengths[n] // 2)]
            some = [lengths[n] // 2 if part == 2 else lengths[n] - lengths[n] // 2 for n in its]
            slots = self.cache.extend([self.seqs[n] for n in its], some)
            new = randn(sum(some), dim, dtype=dtype, seed=7 * seed + part, size=size)
            index.write(2, slots, new.to(device))
            for n, x in zip(its, new.split(some), strict=True):
                self.keys[n] = torch.cat([self.keys[n].to(dtype), x])
        self.plan: ChoicePlan = tilewise.plan_choice(self.cache, self.seqs, counts, topk=topk)
        counts = self.plan.counts.tolist()
        self.members = [n for n, count in enumerate(counts) for _ in range(count)]  # of each row its sequence
        self.places = [lengths[n] - count + i for n, count in enumerate(counts) for i in range(count)]
        self.q = randn(self.plan.tokens, heads, dim, dtype=dtype, seed=7 * seed + 3, size=size).to(device)
        self.weights = randn(self.plan.tokens, heads, seed=7 * seed + 4).to(device)

    def choose(self, backend="auto", **options):
        return tilewise.choose_keys(self.q, self.weights, self.cache, 2, self.plan, backend=backend, **options)

    def scores(self, row):
        """The exact scores of the keys that a row sees, (keys,) float64, and how far float32 may be off."""
        keys = self.keys[self.members[row]][: self.places[row] + 1].double()
        products = self.q[row].cpu().double() @ keys.T
        weights = self.weights[row].cpu().double()
        magnitude = self.q[row].cpu().double().abs() @ keys.abs().T
        return weights @ products.relu(), (weights.abs() @ magnitude) * 2.0**-19


def check(problem, chosen):
    """Sorted positions, as many as there have to be, and none left out that scores more than float32 can be off."""
    assert chosen.shape == (problem.plan.tokens, problem.plan.topk)
    for row, positions in enumerate(chosen.cpu().tolist()):
        exact, error = problem.scores(row)
        most = min(problem.plan.topk, len(exact))
        assert positions[most:] == [-1] * (problem.plan.topk - most)
        taken = positions[:most]
        assert taken == sorted(set(taken))
        assert 0 <= taken[0] <= taken[-1] < len(exact)
        left = torch.ones(len(exact), dtype=torch.bool)
        left[taken] = False
        if left.any():
            assert (exact - error)[left].max() <= (exact + error)[taken].min(), (row, positions)


# lengths, counts, topk and sizes: around the blocks of 256 keys and tiles of 64 rows, sequences that take all they see,
# heads and channels that fill no product, pages of all sizes
CASES = [
    ([1], 1, 1, {}),
    ([63, 65, 127, 129], 1, 8, {}),
    ([255, 256, 257, 513], [1, 2, 3, 1], 40, {"heads": 64, "dim": 128}),
    ([300, 20, 65], [5, 20, 1], 24, {"heads": 4}),
    ([330, 130], [66, 9], 64, {"dim": 64, "dtype": torch.float16}),
    ([600, 40], [3, 40], 7, {"heads": 17, "dim": 40, "page": 3, "dtype": torch.float16}),
    ([129, 129], [129, 1], 128, {"heads": 1, "dim": 8, "page": 1}),
    ([90] * 65, 1, 16, {"heads": 3, "dim": 96, "page": 5}),
    ([30, 20], [30, 2], 2048, {}),
    ([400], 2, 16, {"heads": 128, "dim": 128, "page": 256}),
    ([200, 300], 1, 10, {"size": 1e2}),
]
