"""A model that is little more than its attention, as the engine runs models; and traffic with answers to be checked."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from tilewise.scores import Reach
from tilewise.serving import Engine, Sampling, engine
from tilewise.serving.hf import ModelShape
from tilewise.serving.sampling import choose, parameters, uniforms

VOCAB, POSITIONS, LAYERS = 31, 160, 2


class Stub:
    """Two layers of projections around attention, random and float32; what it says depends on every token before.

    fail: raised within the next pass, after its first layer, if there is any. most: tokens of the longest pass.
    """

    def __init__(self, device="cpu", heads=4, kv_heads=2, head_dim=8, positions=POSITIONS):
        self.shape = ModelShape(
            LAYERS, heads, kv_heads, head_dim, VOCAB, positions, (), torch.float32, torch.device(device)
        )
        generator = torch.Generator().manual_seed(7)

        def random_matrix(*shape, scale=1.0):
            return (torch.randn(*shape, generator=generator) * scale).to(device)

        width = heads * head_dim
        self.embedding, self.places = random_matrix(VOCAB, width), random_matrix(positions, width, scale=0.3)
        self.inwards = [random_matrix(width, width + 2 * kv_heads * head_dim, scale=width**-0.5) for _ in range(LAYERS)]
        self.outwards = [random_matrix(width, width, scale=width**-0.5) for _ in range(LAYERS)]
        self.head = random_matrix(width, VOCAB)
        self.fail: Exception | None = None
        self.model = self
        self.most = 0

    def forward(self, tokens, positions, step, keep=None):
        self.most = max(self.most, len(tokens))

        def attend(layer, q, k, v):
            o = step.attend(layer, q, k, v, reach=Reach(), scale=None, softcap=0.0, sinks=None)
            if self.fail is not None:
                raise self.fail
            return o

        x = self.layers(tokens, positions, attend)
        return (x if keep is None else x[keep]) @ self.head

    def layers(self, tokens, positions, attend):
        shape, x = self.shape, self.embedding[tokens] + self.places[positions]
        for layer in range(LAYERS):
            rows = (x @ self.inwards[layer].to(x.dtype)).unflatten(-1, (-1, shape.head_dim))
            q, k, v = rows.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
            x = torch.tanh(x + attend(layer, q, k, v).flatten(1) @ self.outwards[layer].to(x.dtype))
        return x

    def logits(self, tokens):
        """(T, vocab) after each token of one sequence, by float64 and no cache."""
        shape = self.shape

        def attend(_, q, k, v):
            k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * shape.head_dim**-0.5
            seen = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
            return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

        given = torch.tensor(tokens, device=shape.device)
        wide = Stub.__new__(Stub)
        wide.__dict__.update(self.__dict__)
        for name in ("embedding", "places", "head"):
            setattr(wide, name, getattr(self, name).double())
        return wide.layers(given, torch.arange(len(given), device=shape.device), attend) @ wide.head


def engine_of(stub, monkeypatch, **options):
    """An Engine that runs the stub in a transformers model's place."""
    monkeypatch.setattr(engine, "served_model", lambda model, **_: model)
    return Engine(stub, **options)


@dataclass
class Asked:
    """A request, and what has come of it."""

    prompt: list[int]
    max_new_tokens: int
    num_samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    found: dict[int, list[int]] = field(default_factory=dict)


def check(stub, number, asked, result, exact=True):
    """Each sample is what the model says after the prompt and what came before; to its end, unless it was ended.

    exact: tokens are those of float64; else those that lie as near to them as float32 can tell.
    """
    assert result.prompt == asked.prompt
    assert len(result.samples) == asked.num_samples
    for n, sample in enumerate(result.samples):
        tokens, count = sample.tokens, len(sample.tokens)
        assert asked.found.get(n, []) == tokens, "what step() gave is what result() has"
        assert sample.finish_reason in ("length", "cancelled", "timeout", "error")
        assert (count == asked.max_new_tokens) == (sample.finish_reason == "length")
        if not count:
            continue
        logits = stub.logits(asked.prompt + tokens)[len(asked.prompt) - 1 : -1]
        keys = [(asked.sampling.seed, number, n, place) for place in range(count)]
        numbers = torch.from_numpy(uniforms(keys)).to(logits.device)
        rows = [asked.sampling] * count
        right = choose(asked.sampling.kind, logits, numbers, torch.from_numpy(parameters(rows)).to(logits.device))
        if exact:
            assert right.tolist() == tokens, f"sample {n} of request {number}"
        else:
            given = torch.tensor(tokens, device=logits.device)
            short = logits.gather(-1, right[:, None]) - logits.gather(-1, given[:, None])
            assert short.max() < 1e-2, f"sample {n} of request {number}"


class Traffic:
    """Random requests: prompts that begin alike, forks, priorities, all seeded."""

    def __init__(self, seed, longest=60, most=12):
        self.random = random.Random(seed)
        self.longest, self.most = longest, most
        self.roots = [[self.random.randrange(VOCAB) for _ in range(longest)] for _ in range(4)]

    def request(self, *, greedy=False):
        rng = self.random
        shared = rng.choice(self.roots)[: rng.randint(0, self.longest - 8)]
        prompt = shared + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
        sampling = Sampling()
        if not greedy and rng.random() < 0.3:
            sampling = rng.choice([Sampling(0.8, seed=3), Sampling(1.1, top_k=7), Sampling(0.9, top_p=0.8, seed=5)])
        return Asked(prompt, rng.randint(1, self.most), rng.choice([1, 1, 1, 2, 3]), sampling)
