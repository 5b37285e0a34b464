"""`generate` and `stream`: a list of prompts through an Engine of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import checks
from .engine import Engine, served_model
from .requests import Generation, Tokens, check_tokens
from .sampling import Sampling
from .sizing import affordable_pages, pages_needed

Prompt = str | Sequence[int] | torch.Tensor
OnToken = Callable[[int, int, int], object]


def generate(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_token_id: int | Sequence[int] | None = None,
    stop: Sequence[str | Sequence[int]] = (),
    tokenizer: Any = None,
    on_token: OnToken | None = None,
    progress: bool = False,
    **engine: Any,
) -> list[Generation]:
    """Continue prompts with a transformers causal language model; what they share is computed, kept and read once.

    prompts: lists of token ids or 1-D int tensors, or strings if a tokenizer is given. num_samples: continuations of
    each. temperature 0 takes the likeliest token, as `model.generate(do_sample=False)` does; else tokens are drawn, by
    top_k (0: all) and top_p, with numbers that depend on `seed` and the sample's place alone. eos_token_id: tokens that
    end a sample, the model's own if None, () for none; stop: strings or token lists that do, too. on_token: called with
    (prompt, sample, token) as they come. progress: show a bar on stderr.

    engine: options of `Engine`, among them kv_format, page_size, num_pages, memory, max_sequences, prefill_chunk and
    cuda_graphs. Without num_pages the cache is as large as the prompts need, if the memory allows; with less some wait.

    Returns a Generation for each prompt, in their order. The model stays as it was, whatever happens.
    """
    options = {"max_new_tokens": max_new_tokens, "num_samples": num_samples, "eos_token_id": eos_token_id, "stop": stop}
    run, numbers = _submit(
        model, prompts, Sampling(temperature, top_k, top_p, seed), options, {"tokenizer": tokenizer, **engine}
    )
    with _progress(checks.flag("progress", progress), len(prompts) * num_samples) as advance:
        while run.busy:
            for token in run.step():
                if on_token is not None:
                    on_token(token.request, token.sample, token.token)
                if token.finish_reason is not None:
                    advance()
    return [run.result(number) for number in numbers]


def stream(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_token_id: int | Sequence[int] | None = None,
    stop: Sequence[str | Sequence[int]] = (),
    tokenizer: Any = None,
    **engine: Any,
) -> Iterator[tuple[int, int, int]]:
    """The tokens of `generate` as they come: (prompt, sample, token), prompts and samples counted from 0."""
    options = {"max_new_tokens": max_new_tokens, "num_samples": num_samples, "eos_token_id": eos_token_id, "stop": stop}
    run, _ = _submit(
        model, prompts, Sampling(temperature, top_k, top_p, seed), options, {"tokenizer": tokenizer, **engine}
    )

    def tokens() -> Iterator[tuple[int, int, int]]:
        while run.busy:
            for token in run.step():
                yield token.request, token.sample, token.token

    return tokens()


def _submit(
    model: Any, prompts: Sequence[Prompt], sampling: Sampling, options: dict[str, Any], engine: dict[str, Any]
) -> tuple[Engine, list[int]]:
    """An engine of the right size with all prompts in its queue, whose numbers are theirs, counted from 0."""
    if isinstance(prompts, (str, torch.Tensor)) or not isinstance(prompts, Sequence):
        raise TypeError(f"prompts must be a list of prompts, got {type(prompts).__name__}; put a single one in a list")
    ids = [_token_ids(n, prompt, engine["tokenizer"]) for n, prompt in enumerate(prompts)]
    if engine.get("num_pages") is None:
        engine = dict(engine)
        shape = served_model(model).shape
        page_size = checks.integer("page_size", engine.get("page_size", 16), 1, 256)
        afforded = affordable_pages(shape, engine.get("kv_format"), page_size, engine.pop("memory", None))
        needed = pages_needed(ids, page_size, options["max_new_tokens"], options["num_samples"])
        engine["num_pages"] = min(afforded, needed)
    run = Engine(model, **engine)
    numbers = []
    for n, prompt in enumerate(ids):
        try:
            numbers.append(run.submit(prompt, sampling=sampling, **options))
        except (TypeError, ValueError) as error:
            raise type(error)(f"prompts[{n}]: {error}") from None
    return run, numbers


def _token_ids(number: int, prompt: Prompt, tokenizer: Any) -> Tokens:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"prompts[{number}] is a string, for which a tokenizer is needed; give tokenizer=")
        prompt = tokenizer(prompt)["input_ids"]
    return check_tokens(f"prompts[{number}]", prompt)


@contextmanager
def _progress(shown: bool, total: int) -> Iterator[Callable[[], None]]:
    """A bar of finished samples; what it gives is called for each."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("generate"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    plain = bool(os.environ.get("NO_COLOR"))  # then no control codes: the bar is written once, at the end
    with Progress(*columns, console=Console(stderr=True, force_terminal=False if plain else None)) as bar:
        task = bar.add_task("generate", total=total)
        yield lambda: bar.advance(task)
