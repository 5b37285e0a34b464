"""The engine: prompts in, tokens out, over one cache.

A step is one forward pass: the next token of every running sequence, and chunks of the prompts that wait, as many
tokens of them as the step's budget leaves. Who has his turn, schedule.py says.

On a card a pass is in flight when step() returns: the host prepares the next one meanwhile, and only then looks at what
this one has chosen, which the card has fed to the next by then. So tokens come a step late, and whoever turns out to be
done has got one token too many, which is dropped.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import checks
from ..kvcache import OutOfPages, PagedKVCache, PrefixCache, Slots
from ..kvcache.slots import room_for
from .batch import Batches, InFlight, Work, with_graphs
from .requests import GREEDY, EngineFull, Generation, Job, Request, Sample, Token, Tokens, make_request
from .sampling import Kind, Sampling, check_sampling, parameters, uniforms
from .schedule import Schedule
from .sizing import affordable_pages, check_served, format_of
from .stats import EngineStats
from .streams import Streams

if TYPE_CHECKING:
    from .hf import ServedModel


class Engine:
    """Continuous batching of a transformers causal language model over a prefix-sharing paged cache.

    kv_format: "fp32", "fp16", "bf16", "fp8", "int8" or "int4"; the model's dtype if None. page_size: tokens of a page,
    1 to 256, on a card a multiple of 16. num_pages: of the cache; if None, what `memory` bytes hold (by default half of
    the free memory, on a card four fifths), but no more than max_sequences of the longest sequences need.
    max_sequences: how many are decoded together; others wait. prefill_chunk: the most tokens of prompts in one step.
    token_budget: the most tokens of a step in all: each running sequence takes one, prompts take what is left. A small
    one keeps the time between tokens short while prompts arrive, a large one computes prompts faster; None: as many as
    run and prefill_chunk more. max_waiting: how many requests may wait before submit() raises EngineFull; None: any
    number. tokenizer: of transformers, for stop strings and text in results. cuda_graphs: whether a card replays
    steps from graphs; None: unless an indexer chooses the model's keys; False for models whose forward pass cannot be
    captured. compile: fuse what lies between attention by torch.compile, which takes its time in the first steps of
    each size; the weights of a layer's q, k and v, and of its gate and up, then lie side by side in memory. backend: as
    `decode` takes it.

        engine = Engine(model)
        number = engine.submit(tokens, max_new_tokens=100)
        while engine.busy:
            for token in engine.step(): ...
        print(engine.result(number).tokens)

    Or, in asyncio, where a thread of the engine's own takes the steps:

        async for token in engine.stream(tokens, max_new_tokens=100): ...

    submit(), cancel() and stream() may be called from any thread. The model stays as it is: its attention is replaced
    only within step(). `prefix` and `cache` are there to be looked at, as in `print(engine.prefix.show())`.
    """

    def __init__(
        self,
        model: Any,
        *,
        kv_format: str | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        memory: int | None = None,
        max_sequences: int = 256,
        prefill_chunk: int = 4096,
        token_budget: int | None = None,
        max_waiting: int | None = None,
        tokenizer: Any = None,
        cuda_graphs: bool | None = None,
        compile: bool = False,
        backend: str = "auto",
    ) -> None:
        self._model = served_model(model, compile=checks.flag("compile", compile))
        shape = self.shape = self._model.shape
        self.max_sequences = checks.integer("max_sequences", max_sequences, 1)
        self.prefill_chunk = checks.integer("prefill_chunk", prefill_chunk, 1)
        self.token_budget = None if token_budget is None else checks.integer("token_budget", token_budget, 1)
        self.max_waiting = None if max_waiting is None else checks.integer("max_waiting", max_waiting, 1)
        self._graphs = with_graphs(shape, cuda_graphs)
        self._backend, self._decode = backend, None if tokenizer is None else tokenizer.decode
        kv_format = format_of(shape, kv_format)
        check_served(shape, kv_format, page_size)
        if num_pages is None:
            num_pages = min(
                affordable_pages(shape, kv_format, page_size, memory),
                self.max_sequences * (-(-shape.positions // page_size) + 1),
            )
        self.cache = PagedKVCache(
            num_pages,
            page_size,
            shape.kv_heads,
            shape.head_dim,
            num_layers=shape.layers,
            kv_format=kv_format,
            device=shape.device,
            value_dim=shape.value_dim or None,
            shared_kv=shape.shared_kv,
            index_dim=None if shape.indexers is None else shape.indexers.dim,
            index_layers=None if shape.indexers is None else shape.indexers.layers,
        )
        self.prefix = PrefixCache(self.cache)
        # Whoever runs takes a token of the budget, so no more run than it has.
        most = min(self.max_sequences, self.token_budget or self.max_sequences)
        self._schedule = Schedule(self.prefix, most)
        self._batches = self._make_batches()
        self.cache.lazy_places = self._graphs  # a pass with a graph has places of its own
        self._places = self._make_places()  # of the newest tokens
        self._late = shape.device.type == "cuda"  # whether a pass may be in flight while nobody steps
        self._flight: InFlight | None = None
        self._chosen: Tokens = np.zeros(0, np.int64)  # what the last pass chose, if none is in flight
        self._landed = 0.0  # when, of time.perf_counter(), the last pass had been computed and its tokens given out
        self._found: list[Token] = []  # that this step brings
        self._kept: list[Token] = []  # that a step had found which then raised
        self._requests: dict[int, Request] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap, with the numbers of the requests
        self._arrived: deque[Request] = deque()  # since the last step; all else belongs to whoever holds _lock
        self._next_request = 0
        self._lock, self._next_turn = threading.Lock(), threading.Lock()  # held during a step; by who waits for it
        self._door = threading.Lock()  # of _arrived; never held for long
        self._failed: BaseException | None = None
        self._away = 0.0  # seconds in forward passes and waiting for tokens
        self._streams = Streams()
        self._stats = EngineStats(page_bytes=page_size * self.cache.bytes_per_token)

    # What a caller does.

    def submit(
        self,
        tokens: Sequence[int] | Tokens | torch.Tensor,
        *,
        max_new_tokens: int,
        num_samples: int = 1,
        sampling: Sampling = GREEDY,
        eos_token_id: int | Sequence[int] | None = None,
        stop: Sequence[str | Sequence[int]] = (),
        priority: int = 0,
        timeout: float | None = None,
    ) -> int:
        """Queue a prompt (token ids, at least one) for `num_samples` continuations; its number.

        eos_token_id: tokens that end a sample; None for the model's own, () for none. stop: strings or token lists that
        end it too. priority: higher ones have their turn first, and where rows or pages are short take those of lower
        ones, who go on later; among equals whoever came first. timeout: seconds after which what is not done ends, with
        finish_reason "timeout", at the end of the step that is under way. Raises EngineFull if max_waiting wait
        already, ValueError for a prompt that the cache or the model could not take even alone.
        """
        request = self._make_request(
            tokens,
            max_new_tokens=max_new_tokens,
            num_samples=num_samples,
            sampling=sampling,
            eos_token_id=eos_token_id,
            stop=stop,
            priority=priority,
            timeout=timeout,
        )
        with self._door:
            return self._enter(request)

    def stream(
        self, tokens: Sequence[int] | Tokens | torch.Tensor, *, max_new_tokens: int, **options: Any
    ) -> AsyncIterator[Token]:
        """The tokens of a prompt as they come, for `async for`; options as submit() takes them.

        A thread of the engine's own takes the steps while there is anything to do. The request is submitted when the
        first token is asked for; what submit() raises is raised there, as is what the model raises, and TimeoutError
        when its `timeout` is over. It is cancelled, and its pages are free for others, when the task that reads is
        cancelled or the iterator is closed. One who reads slowly, or not at all, keeps nobody from going on.
        """
        return self._streams.stream(self, tokens, {"max_new_tokens": max_new_tokens, **options})

    def step(self) -> list[Token]:
        """One forward pass: a token of each running sequence, and a chunk of prompts; the new tokens, in any order.

        On a card they are those of the pass before, which was computed meanwhile. An empty list says that the step
        brought none, not that all is done: see `busy`, and done() of a request, which may also have ended for want of
        time. What it raises comes from the model or the card: whatever was under way or waited has ended then, with
        finish_reason "error". The engine can be used again, unless the card itself failed; tokens that had come before
        the error are what the next step() returns first, for which the engine is `busy`.
        """
        with self._turn():
            self._check_usable()
            started, self._found = time.perf_counter(), []
            try:
                with self._on_device():
                    self._step(started)
            except BaseException as error:
                self._streams.tell(self._found)
                self._kept += self._found
                self._fail(error)
                raise
            self._streams.tell(self._found)
            kept, self._kept = self._kept, []
            return kept + self._found

    def prepare(self, *sampling: Sampling) -> None:
        """On a card, compile and capture the graphs of all numbers of rows now, not when each is needed first: those of
        greedy choices, and of what requests with these `sampling` take."""
        kinds = {Kind.GREEDY, *(check_sampling(one).kind for one in sampling)}
        with self._turn(), self._on_device():
            self._batches.prepare(sorted(kinds))

    def cancel(self, number: int) -> None:
        """End what is left of a request; result() then gives what there is of it."""
        with self._turn():
            self._let_in()
            self._schedule.end(self._request(number), "cancelled")
            self._streams.ended(number)

    @property
    def busy(self) -> bool:
        """Is anything still to be done?"""
        left = self._arrived or self._schedule.busy or self._flight is not None or self._kept
        return self._failed is None and bool(left)

    def done(self, number: int) -> bool:
        """Has every sample of a request ended, so that result() can be asked for?"""
        return not self._request(number).left

    def result(self, number: int) -> Generation:
        """The samples of a request that is done, which the engine then forgets; ValueError for any other."""
        request = self._request(number)
        if request.left:
            raise ValueError(f"request {number} has {request.left} unfinished samples; call step() on, or cancel() it")
        del self._requests[number]
        return request.result()

    def stats(self) -> EngineStats:
        """What was done so far (a copy)."""
        schedule = self._schedule
        return replace(
            self._stats,
            reused_tokens=schedule.reused,
            preemptions=schedule.preemptions,
            graph_captures=self._stats.graph_captures + self._batches.captures,
        )

    # Coming in.

    def _make_request(self, tokens: Any, **options: Any) -> Request:
        """What submit() was given, checked; without a number."""
        shape, cache = self.shape, self.cache
        request = make_request(tokens, vocab=shape.vocab, ends=shape.end_tokens, decode=self._decode, **options)
        total, ends = len(request.prompt) + request.ends.max_new_tokens, request.ends
        if total > shape.positions:
            raise ValueError(
                f"tokens and max_new_tokens must be at most {shape.positions} together, the positions that the model "
                f"has, got {len(request.prompt)} and {ends.max_new_tokens}"
            )
        # One more: a last page that is shared is copied before the sequence grows in it.
        needed = -(-total // cache.page_size) + 1
        if needed > cache.num_pages:
            raise ValueError(
                f"tokens and max_new_tokens take {needed} pages ({len(request.prompt)} and {ends.max_new_tokens} "
                f"tokens), the cache has {cache.num_pages}; give it more num_pages or memory"
            )
        return request

    def _enter(self, request: Request) -> int:
        """Take a request into the queue, behind the door; its number."""
        self._check_usable()
        waiting = len(self._arrived) + len(self._schedule.waiting)
        if self.max_waiting is not None and waiting >= self.max_waiting:
            raise EngineFull(f"{waiting} requests wait, max_waiting is {self.max_waiting}; submit this one later")
        request.number = self._next_request
        self._next_request += 1
        self._requests[request.number] = request
        self._arrived.append(request)
        return request.number

    def _let_in(self) -> None:
        """Whoever arrived waits for his turn from now on."""
        while self._arrived:
            request = self._arrived[0]
            self._schedule.add(Job.of(list(request.samples)))
            self._arrived.popleft()  # last: there is no moment at which nobody seems to be here
            if request.deadline is not None:
                heapq.heappush(self._deadlines, (request.deadline, request.number))

    # A step.

    def _step(self, started: float) -> None:
        self._let_in()
        for number in self._streams.forget_left():
            request = self._requests.pop(number, None)
            if request is not None and request.left:
                self._schedule.end(request, "cancelled")
        self._end_overdue()
        stats = self._stats
        away = self._away + self._batches.away
        launched = self._launch(started)
        if launched is None:  # nothing is left to do, or everybody waits for pages that were given up just now
            self._settle()
            return
        last, self._flight = self._flight, launched
        if last is not None:
            self._land(last, launched)
        if not self._late:
            self._settle()
        stats.peak_pages = max(stats.peak_pages, self._used)
        stats.host_seconds += time.perf_counter() - started - (self._away + self._batches.away - away)

    def _launch(self, started: float) -> InFlight | None:
        """Compute the next token of everybody who runs, and chunks of prompts; None if there is nothing to compute."""
        schedule, stats = self._schedule, self._stats
        if not schedule.busy:
            return None
        if schedule.crowded:
            self._settle()
            schedule.make_way()
        slots, rows = self._reserve(), schedule.rows
        untold = slots is not None and self._flight is not None
        budget, decoding = self.prefill_chunk, len(rows)
        if self.token_budget is not None:
            budget = min(budget, self.token_budget - decoding)
        if self._graphs:
            budget = schedule.even_budget(budget)
        parts, jobs = schedule.prefill(budget)
        if not parts and not decoding:
            return None
        counts = [count for one in parts for count in one.counts]
        prompts = [(job.seq, job.tokens[job.done - n : job.done]) for job, n in zip(jobs, counts, strict=True)]
        complete = [n for n, job in enumerate(jobs) if not job.left]
        finished = [jobs[n] for n in complete]
        starting = schedule.room(finished)
        wanted = np.repeat(complete, starting).tolist()
        new = [sample for job, count in zip(finished, starting, strict=True) for sample in job.samples[:count]]
        kind = max([rows.kind, *(sample.request.sampling.kind for sample in new)])
        numbers = None
        if kind != Kind.GREEDY:
            drawn = np.concatenate([rows.uniforms(), uniforms([sample.draw for sample in new])])
            params = parameters([sample.request.sampling for sample in new])
            numbers = np.concatenate([drawn[None], np.concatenate([rows.params[:, :decoding], params], 1)])
        work = Work(list(rows.seqs), slots, rows.sources[:decoding].copy(), prompts, parts, wanted, kind, numbers)
        chosen = self._batches.run(work)
        stats.decode_tokens += decoding
        stats.prefill_tokens += sum(counts)
        stats.decode_steps += not parts
        stats.prefill_steps += bool(parts)
        stats.mixed_steps += bool(parts) and decoding > 0
        schedule.start(finished, starting)
        flight, last = rows.fly()
        schedule.leave_late(last)
        return InFlight(flight, work, untold, chosen, started)

    def _reserve(self) -> Slots | None:
        """Room for the newest token of everybody who runs. Who cannot have it, for want of pages, waits."""
        schedule, rows = self._schedule, self._schedule.rows
        while rows.samples:
            known = None if self._flight is not None else self._chosen[rows.sources[: len(rows)]]
            try:
                slots = self.prefix.extend(rows.seqs, known, into=self._places)
            except OutOfPages:
                if self._flight is not None:
                    self._settle()
                else:
                    schedule.send_out()
                continue
            if self._places is not None:
                self._places = slots
            return slots
        return None

    def _settle(self) -> None:
        """Wait for a pass that is in flight."""
        if self._flight is not None:
            last, self._flight = self._flight, None
            self._land(last)

    def _land(self, one: InFlight, then: InFlight | None = None) -> None:
        """Give everybody his token; those who are done leave. then: the pass after it, if there is one, which was fed
        these tokens."""
        waited = time.perf_counter()
        tokens = one.chosen.read()
        self._away += time.perf_counter() - waited
        self._chosen = np.array(tokens, np.int64)
        if then is not None and then.untold and then.work.slots is not None:
            self.prefix.tell(then.work.slots, self._chosen[then.work.sources])
        found, done = one.flight.land(tokens)
        self._found += found
        self._schedule.leave([sample for sample in done if sample.row >= 0])
        self._schedule.leave_now([sample for sample in one.flight.samples if sample.finish_reason is not None])
        begun, self._landed = max(one.started, self._landed), time.perf_counter()
        if one.work.parts:
            self._stats.prefill_seconds += self._landed - begun
        else:
            self._stats.decode_seconds += self._landed - begun

    # Ending.

    def _end_overdue(self) -> None:
        """End requests that are past their deadlines."""
        if len(self._deadlines) > 2 * len(self._requests) + 64:  # mostly of requests that are done long before
            self._deadlines = [one for one in self._deadlines if one[1] in self._requests]
            heapq.heapify(self._deadlines)
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._requests.get(heapq.heappop(self._deadlines)[1])
            if request is not None and request.left:
                self._stats.timeouts += 1
                self._schedule.end(request, "timeout")
                late = TimeoutError(f"request {request.number} was not done when its timeout was over")
                self._streams.ended(request.number, late)

    def _fail(self, error: BaseException) -> None:
        """A step has raised: end everything, so that the next request finds an engine that is idle."""
        self._let_in()
        try:
            if self.cache.device.type == "cuda":
                torch.cuda.synchronize(self.cache.device)
            self._flight = None
            for request in list(self._requests.values()):
                if request.left:
                    self._schedule.end(request, "error")
            self._schedule.leave_now(list(self._schedule.leaving))
            self._deadlines.clear()
            self._stats.graph_captures += self._batches.captures
            self._batches = self._make_batches()
            self._places = self._make_places()
        except Exception as why:  # of the card: nothing can be computed there any more
            self._failed = why
            for request in self._requests.values():
                for sample in request.samples:
                    sample.finish_reason = sample.finish_reason or "error"
        self._streams.fail(error)

    # Inside.

    def _make_batches(self) -> Batches:
        rows = self._schedule.max_rows
        most = self.token_budget or rows + self.prefill_chunk
        return Batches(self._model, self.prefix, rows, most, static=self._graphs, backend=self._backend)

    def _make_places(self) -> Slots | None:
        return room_for(self.cache, self._schedule.max_rows, lazy=True) if self._graphs else None

    @property
    def _running(self) -> list[Sample]:
        return self._schedule.rows.samples

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The engine to oneself. Who waits for it goes before a thread that takes one step after the other."""
        with self._next_turn:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def _on_device(self) -> AbstractContextManager[object]:
        """Graphs are captured and replayed on the current device, which is each thread's own."""
        device = self.cache.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    @property
    def _used(self) -> int:
        return self.cache.num_pages - self.cache.pool.free_pages

    def _check_usable(self) -> None:
        if self._failed is not None:
            raise RuntimeError(
                f"the engine cannot be used any more: its device failed in an earlier step ({self._failed}); make a "
                "new one, on a card in a new process"
            )

    def _request(self, number: int) -> Request:
        request = self._requests.get(checks.integer("number", number))
        if request is None:
            raise ValueError(f"number must be that of a request, but {number} was never submitted or is forgotten")
        return request


def served_model(model: Any, *, compile: bool = False) -> ServedModel:
    """The model as the engine runs it, its layers compiled or as they are; transformers is imported only here."""
    try:
        from .hf import ServedModel
    except ImportError as error:
        raise ImportError(
            "generation needs transformers 5.17 or later: pip install 'tilewise[transformers]'"
        ) from error
    return ServedModel(model, compile=compile)
