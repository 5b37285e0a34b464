"""What is asked of the engine, and what it gives back: prompts with their samples, ends, results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .. import checks
from .sampling import Sampling, check_sampling

Tokens = npt.NDArray[np.int64]
FinishReason = Literal["eos", "stop", "length", "cancelled", "timeout", "error"]
Rank = tuple[int, int, int]  # the smaller, the earlier one's turn
Decode = Callable[[list[int]], str]  # token ids as text
# Of a stop string: tokens beyond its bytes that are looked at, for tokens that are no text of their own.
EXTRA_TOKENS = 8
GREEDY = Sampling()


class EngineFull(RuntimeError):
    """As many requests wait as the engine lets wait (`max_waiting`); this one was not taken. Try again later."""


class Token(NamedTuple):
    """A token of a sample of a request (of `generate`: of a prompt), with the reason if it is the last one."""

    request: int
    sample: int
    token: int
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Completion:
    """One sample: its new tokens, a token that ended it included; text if there is a tokenizer."""

    tokens: list[int]
    finish_reason: FinishReason
    text: str | None = None


@dataclass(frozen=True)
class Generation:
    """A prompt with its samples. reused: tokens of the prompt that were cached already and not computed."""

    prompt: list[int]
    samples: list[Completion]
    reused: int

    @property
    def tokens(self) -> list[int]:
        """Of the first sample."""
        return self.samples[0].tokens

    @property
    def text(self) -> str | None:
        """Of the first sample."""
        return self.samples[0].text


@dataclass(eq=False)
class Sample:
    """A sample under way. row: its place among the running ones (rows.py), -1 while it does not run."""

    request: Request
    number: int
    tokens: list[int] = field(default_factory=list)
    row: int = -1
    finish_reason: FinishReason | None = None

    @property
    def age(self) -> tuple[int, int]:
        """The smaller, the earlier it came."""
        return self.request.number, self.number

    @property
    def rank(self) -> Rank:
        """Its turn: higher priorities first, among equals whoever came first."""
        return -self.request.priority, *self.age

    @property
    def draw(self) -> tuple[int, int, int, int]:
        """What its next token is drawn with."""
        return self.request.sampling.seed, *self.age, len(self.tokens)


@dataclass(frozen=True)
class Ends:
    """When a sample ends: at one of `end_tokens`, when its tokens end with one of `stop_tokens` or its text contains
    one of `stop_texts`, or after `max_new_tokens`."""

    max_new_tokens: int
    end_tokens: frozenset[int]
    stop_tokens: tuple[tuple[int, ...], ...] = ()
    stop_texts: tuple[str, ...] = ()
    decode: Decode | None = None

    def reason(self, tokens: list[int]) -> FinishReason | None:
        """Why these tokens, of which all but the last were looked at before, are all; None if they are not."""
        if tokens[-1] in self.end_tokens:
            return "eos"
        if any(tuple(tokens[-len(stop) :]) == stop for stop in self.stop_tokens):
            return "stop"
        for text in self.stop_texts:
            assert self.decode is not None
            if text in self.decode(tokens[-len(text.encode()) - EXTRA_TOKENS :]):
                return "stop"
        return "length" if len(tokens) >= self.max_new_tokens else None


@dataclass(eq=False)
class Request:
    """A prompt and how to go on from it. deadline: of time.monotonic(), None for none."""

    number: int
    prompt: Tokens
    ends: Ends
    sampling: Sampling
    samples: list[Sample] = field(default_factory=list)
    reused: int | None = None
    priority: int = 0
    deadline: float | None = None

    @property
    def left(self) -> int:
        """How many of its samples are not done."""
        return sum(sample.finish_reason is None for sample in self.samples)

    def result(self) -> Generation:
        completions = []
        for sample in self.samples:
            assert sample.finish_reason is not None
            text = self.ends.decode(sample.tokens) if self.ends.decode else None
            completions.append(Completion(sample.tokens, sample.finish_reason, text))
        return Generation(self.prompt.tolist(), completions, self.reused or 0)


@dataclass(eq=False)
class Job:
    """Tokens to be prefilled, from which `samples`, all of which have got just that far, go on.

    done: how many are in the cache or under way; seq: where, once it has begun.
    """

    samples: list[Sample]
    tokens: Tokens
    seq: int = -1
    done: int = 0

    @classmethod
    def of(cls, samples: list[Sample]) -> Job:
        first = samples[0]
        return cls(samples, np.concatenate([first.request.prompt, np.array(first.tokens, np.int64)]))

    @property
    def age(self) -> tuple[int, int]:
        return self.samples[0].age

    @property
    def rank(self) -> Rank:
        return self.samples[0].rank

    @property
    def request(self) -> Request:
        return self.samples[0].request

    @property
    def priority(self) -> int:
        return self.samples[0].request.priority

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


def check_tokens(name: str, tokens: Any) -> Tokens:
    """A prompt as an array of its own: a list of ints or a 1-D tensor of ints, not empty."""
    if isinstance(tokens, torch.Tensor):
        # Of another dtype, which NumPy may not know, as a list: below it is told what it is.
        tokens = tokens.cpu().numpy() if tokens.dtype in checks.INTEGERS else tokens.tolist()
    if isinstance(tokens, np.ndarray) and tokens.ndim == 0:
        tokens = tokens.item()
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be a list of token ids or a 1-D tensor of them, got {type(tokens).__name__}")
    if not len(tokens):
        raise ValueError(f"{name} must hold at least one token, got none")
    try:
        ids = np.array(tokens)
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must have one dimension, got lists of different lengths") from None
    if ids.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {ids.dtype}")
    return ids.astype(np.int64)


def check_ends(
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    stop: Sequence[str | Sequence[int]],
    default_ends: Sequence[int],
    decode: Decode | None,
) -> Ends:
    """The arguments of submit() that say when a sample ends, checked."""
    if isinstance(stop, str) or not isinstance(stop, Sequence):
        raise TypeError(f"stop must be a list of strings or of lists of token ids, got {type(stop).__name__}")
    for one in stop:
        if not isinstance(one, (Sequence, np.ndarray, torch.Tensor)):
            raise TypeError(f"stop must be a list of strings or of lists of token ids, got {one!r} in it")
    texts = tuple(one for one in stop if isinstance(one, str))
    if texts and decode is None:
        raise ValueError("stop holds strings, for which a tokenizer is needed; give tokenizer=, or lists of token ids")
    lists = tuple(tuple(checks.integer("stop", t, 0) for t in one) for one in stop if not isinstance(one, str))
    if not all(texts) or not all(lists):
        raise ValueError("stop must hold strings and lists that are not empty")
    if eos_token_id is None:
        ends = list(default_ends)
    elif isinstance(eos_token_id, Sequence) and not isinstance(eos_token_id, str):
        ends = [checks.integer("eos_token_id", t, 0) for t in eos_token_id]
    else:
        ends = [checks.integer("eos_token_id", eos_token_id, 0)]
    return Ends(checks.integer("max_new_tokens", max_new_tokens, 1), frozenset(ends), lists, texts, decode)


def make_request(
    tokens: Any,
    *,
    vocab: int,
    ends: Sequence[int],
    decode: Decode | None,
    max_new_tokens: int,
    num_samples: int = 1,
    sampling: Sampling = GREEDY,
    eos_token_id: int | Sequence[int] | None = None,
    stop: Sequence[str | Sequence[int]] = (),
    priority: int = 0,
    timeout: float | None = None,
) -> Request:
    """The arguments of submit(), checked, as a request without a number. ends: the model's own end tokens."""
    prompt = check_tokens("tokens", tokens)
    if prompt.min() < 0 or prompt.max() >= vocab:
        raise ValueError(
            f"tokens must be from 0 to {vocab - 1}, the model's vocabulary, got {prompt.min()} to {prompt.max()}"
        )
    check_sampling(sampling)
    request = Request(-1, prompt, check_ends(max_new_tokens, eos_token_id, stop, ends, decode), sampling)
    request.priority = checks.integer("priority", priority, -(2**31), 2**31)
    request.samples = [Sample(request, n) for n in range(checks.integer("num_samples", num_samples, 1))]
    if timeout is not None:
        request.deadline = time.monotonic() + checks.number("timeout", timeout, 0.0)
    return request
