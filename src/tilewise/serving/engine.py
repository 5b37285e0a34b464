"""The engine: prompts in, tokens out, over one cache. Who is prefilled, who is decoded, who has to wait.

A step either prefills a chunk of tokens, packed over the prompts that wait, or decodes one token of every running
sequence. Prompts that begin alike are prefilled one after the other, so that what they share is computed once. When
pages run out, what nobody uses is evicted; if that does not suffice, the youngest sequence gives up its pages and is
prefilled again later, from whatever of it is still cached then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import checks
from ..kvcache import OutOfPages, PagedKVCache, PrefixCache, Slots
from ..kvcache.slots import upload
from .batch import DecodeBatch
from .requests import Generation, Job, Request, Sample, Token, Tokens, check_ends, check_tokens
from .sampling import Chooser, Sampling, uniforms
from .sizing import affordable_pages, check_served, format_of
from .steps import DecodeStep, PrefillStep

if TYPE_CHECKING:
    from .hf import ServedModel

# A graph is bound to its sequences. Up to this share of them may be idle, done and decoded on for nobody, before the
# others are captured anew: one more row costs a step little, a capture costs several steps.
IDLE_SHARE = 0.25
ROOM = 512  # tokens that a decode plan on a card has room for before it is made anew, and its graph captured again
GREEDY = Sampling()


@dataclass
class EngineStats:
    """What an engine did since it was made. The seconds of a phase end when its tokens are on the host."""

    prefill_tokens: int = 0  # computed
    reused_tokens: int = 0  # of prompts, found in the cache instead
    prefill_steps: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    preemptions: int = 0
    graph_captures: int = 0
    peak_pages: int = 0
    page_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes of keys and values that were in use, cached prefixes included."""
        return self.peak_pages * self.page_bytes


class Engine:
    """Continuous batching of a transformers causal language model over a prefix-sharing paged cache.

    kv_format: "fp32", "fp16", "bf16", "fp8", "int8" or "int4"; the model's dtype if None. page_size: tokens of a page,
    1 to 256, on a card a multiple of 16. num_pages: of the cache; if None, what `memory` bytes hold (by default half of
    the free memory, on a card four fifths), but no more than max_sequences of the longest sequences need.
    max_sequences: how many are decoded together; others wait. prefill_chunk: tokens computed in one prefill step.
    tokenizer: of transformers, for stop strings and text in results. cuda_graphs: whether a card replays decode steps
    from a graph; for models whose forward pass cannot be captured, False. compile: fuse what lies between attention by
    torch.compile, which takes its time in the first steps of each size; the weights of a layer's q, k and v, and of its
    gate and up, then lie side by side in memory. backend: as `decode` takes it.

        engine = Engine(model)
        number = engine.submit(tokens, max_new_tokens=100)
        while engine.busy:
            for token in engine.step(): ...
        print(engine.result(number).tokens)

    The model stays as it is: its attention is replaced only within step(). `prefix` and `cache` are there to be looked
    at, as in `print(engine.prefix.show())`.
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
        tokenizer: Any = None,
        cuda_graphs: bool = True,
        compile: bool = False,
        backend: str = "auto",
    ) -> None:
        self._model = served_model(model, compile=checks.flag("compile", compile))
        shape = self.shape = self._model.shape
        self.max_sequences = checks.integer("max_sequences", max_sequences, 1)
        self.prefill_chunk = checks.integer("prefill_chunk", prefill_chunk, 1)
        self._graphs = checks.flag("cuda_graphs", cuda_graphs) and shape.device.type == "cuda"
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
        )
        self.prefix = PrefixCache(self.cache)
        self._requests: dict[int, Request] = {}
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._running: list[Sample] = []
        self._batch: DecodeBatch | None = None
        self._rows: list[Sample] = []  # of the batch: those that run, and
        self._idle: list[Sample] = []  # those that are done, whose rows the graph still computes
        self._held = False  # nobody is let in: pages ran out, and nobody has left since
        self._next_request = 0
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
    ) -> int:
        """Queue a prompt (token ids, at least one) for `num_samples` continuations; its number.

        eos_token_id: tokens that end a sample; None for the model's own, () for none. stop: strings or token lists that
        end it too. Raises ValueError for a prompt that the cache or the model could not take even alone.
        """
        prompt = check_tokens("tokens", tokens)
        if prompt.min() < 0 or prompt.max() >= self.shape.vocab:
            raise ValueError(
                f"tokens must be from 0 to {self.shape.vocab - 1}, the model's vocabulary, got {prompt.min()} to "
                f"{prompt.max()}"
            )
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a tilewise.Sampling, got {type(sampling).__name__}")
        ends = check_ends(max_new_tokens, eos_token_id, stop, self.shape.end_tokens, self._decode)
        total = len(prompt) + ends.max_new_tokens
        if total > self.shape.positions:
            raise ValueError(
                f"tokens and max_new_tokens must be at most {self.shape.positions} together, the positions that the "
                f"model has, got {len(prompt)} and {ends.max_new_tokens}"
            )
        # One more: a last page that is shared is copied before the sequence grows in it.
        needed = -(-total // self.cache.page_size) + 1
        if needed > self.cache.num_pages:
            raise ValueError(
                f"tokens and max_new_tokens take {needed} pages ({len(prompt)} and {ends.max_new_tokens} tokens), the "
                f"cache has {self.cache.num_pages}; give it more num_pages or memory"
            )
        request = Request(self._next_request, prompt, ends, sampling)
        request.samples = [Sample(request, n) for n in range(checks.integer("num_samples", num_samples, 1))]
        self._requests[request.number] = request
        self._waiting.append(Job.of(list(request.samples)))
        self._next_request += 1
        return request.number

    def step(self) -> list[Token]:
        """Prefill a chunk or decode a token of each running sequence; the new tokens, in no particular order.

        An empty list says that the step brought none, not that all is done: see `busy`. What it raises comes from the
        model or the card; the engine is of no use after that.
        """
        if not self.busy:
            return []
        started = time.perf_counter()
        found = self._prefill()
        decoding = found is None
        if found is None:
            found = self._decode_step()
        used = self.cache.num_pages - self.cache.pool.free_pages
        if not self._running:
            self._disband()
        seconds, stats = time.perf_counter() - started, self._stats
        stats.peak_pages = max(stats.peak_pages, used)
        if decoding:
            stats.decode_tokens += len(found)
            stats.decode_steps += 1
            stats.decode_seconds += seconds
        else:
            stats.prefill_steps += 1
            stats.prefill_seconds += seconds
        return found

    def cancel(self, number: int) -> None:
        """End what is left of a request; result() then gives what there is of it."""
        request = self._request(number)
        for sample in [s for s in self._running if s.request is request]:
            sample.finish_reason = "cancelled"
            self._leave(sample)
        for job in [j for j in self._prefilling if j.samples[0].request is request]:
            self._prefilling.remove(job)
            self.prefix.release(job.seq)
            self._held = False
        self._waiting = deque(job for job in self._waiting if job.samples[0].request is not request)
        for sample in request.samples:
            sample.finish_reason = sample.finish_reason or "cancelled"
        if not self._running:
            self._disband()

    @property
    def busy(self) -> bool:
        """Is anything still to be done?"""
        return bool(self._waiting or self._prefilling or self._running)

    def result(self, number: int) -> Generation:
        """The samples of a request that is done, which the engine then forgets; ValueError for any other."""
        request = self._request(number)
        left = sum(sample.finish_reason is None for sample in request.samples)
        if left:
            raise ValueError(f"request {number} has {left} unfinished samples; call step() on, or cancel() it")
        del self._requests[number]
        return request.result()

    def stats(self) -> EngineStats:
        """What was done so far (a copy)."""
        return replace(self._stats)

    # Prefill.

    def _prefill(self) -> list[Token] | None:
        """Compute a chunk; the first tokens of those whose prompt is complete. None: there is nothing to compute."""
        budget = self.prefill_chunk
        parts, jobs = self._continue_jobs(budget)
        budget -= sum(len(slots) for slots in parts)
        admitted = self._admit(budget)
        parts += [slots for _, slots in admitted]
        jobs += [job for job, _ in admitted]
        if not parts:
            return None
        step = PrefillStep(self.cache, parts, self._backend)
        fed = [job.tokens[job.done - count : job.done] for job, count in zip(jobs, step.counts, strict=True)]
        tokens, positions = upload(np.stack([np.concatenate(fed), step.host_positions]), self.cache.device).unbind()
        complete = [n for n, job in enumerate(jobs) if not job.left]
        keep = upload(step.last_rows[complete], self.cache.device)
        logits = self._model.forward(tokens, positions, step, keep)
        missing = sorted(set(range(self.shape.layers)) - step.layers)
        if missing:
            raise NotImplementedError(
                f"layers {missing} of the model called no attention; models of attention layers alone are served; "
                "use model.generate"
            )
        self._stats.prefill_tokens += len(tokens)
        return self._start([jobs[n] for n in complete], logits) if complete else []

    def _continue_jobs(self, budget: int) -> tuple[list[Slots], list[Job]]:
        """Reserve room for the next tokens of prompts that are partly done, in one go."""
        while self._prefilling:
            counts: list[int] = []
            for job in self._prefilling:
                counts.append(min(job.left, budget - sum(counts)))
            chosen = [(job, count) for job, count in zip(self._prefilling, counts, strict=True) if count]
            more = [job.tokens[job.done : job.done + count].tolist() for job, count in chosen]
            try:
                slots = self.prefix.extend([job.seq for job, _ in chosen], more)
            except OutOfPages:
                self._send_out_youngest()
                continue
            for job, count in chosen:
                job.done += count
            return [slots], [job for job, _ in chosen]
        return [], []

    def _admit(self, budget: int) -> list[tuple[Job, Slots]]:
        """Begin with prompts that wait, in the order in which they came, while there is room for them.

        One that would share a page more with a prompt that is just being computed waits for that.
        """
        if not (self._running or self._prefilling):
            self._held = False
        admitted: list[tuple[Job, Slots]] = []
        if self._held:
            return admitted
        size = self.cache.page_size
        if self._idle and self._waiting:
            self._disband()  # whoever joins makes it anew anyway, and may need the pages
        for job in list(self._waiting):
            if budget <= 0 or len(self._running) + len(self._prefilling) >= self.max_sequences:
                break
            known = self.prefix.match(job.tokens)
            page_end = (known // size + 1) * size
            if page_end < len(job.tokens) and any(_begin_alike(job, other, page_end) for other in self._prefilling):
                continue
            try:
                job.seq, reused, slots = self.prefix.insert(job.tokens[: known + budget])
            except OutOfPages:
                if not (self._running or self._prefilling):
                    raise  # submit() has made sure that one fits alone
                self._held = True
                break
            job.done = reused + len(slots)
            request = job.samples[0].request
            if request.reused is None:
                request.reused = reused
            self._stats.reused_tokens += reused
            budget -= len(slots)
            self._waiting.remove(job)
            self._prefilling.append(job)
            admitted.append((job, slots))
        return admitted

    def _start(self, jobs: list[Job], logits: torch.Tensor) -> list[Token]:
        """Prompts are computed: choose the first tokens of their samples from logits (len(jobs), vocab), run them."""
        samples: list[Sample] = []
        rows: list[int] = []
        started: list[int] = []
        for row, job in enumerate(jobs):
            self._prefilling.remove(job)
            room = self.max_sequences - len(self._running) - len(self._prefilling) - len(samples)
            count = min(len(job.samples), max(1, room))
            if count < len(job.samples):  # the others begin when there is room, from the cached prompt
                self._waiting.appendleft(Job.of(job.samples[count:]))
            samples += job.samples[:count]
            rows += [row] * count
            started.append(count)
        chooser = Chooser([s.request.sampling for s in samples], self.shape.vocab, self.cache.device)
        device = self.cache.device
        uniform = torch.from_numpy(uniforms([s.draw for s in samples])).to(device) if chooser.draws else None
        chosen = chooser(logits[upload(np.array(rows), device)], uniform).tolist()
        seqs = [
            seq
            for job, count in zip(jobs, started, strict=True)
            for seq in (job.seq, *(self.prefix.fork(job.seq, count - 1) if count > 1 else ()))
        ]
        for sample, seq in zip(samples, seqs, strict=True):
            sample.seq = seq
            self._running.append(sample)
        self._disband()
        return self._take(samples, chosen)

    # Decode.

    def _decode_step(self) -> list[Token]:
        """The next token of every running sequence."""
        while self._running:
            if len(self._idle) > IDLE_SHARE * len(self._rows) or any(self._at_end(s) for s in self._idle):
                self._disband()
            if self._batch is None:
                self._batch = self._make_batch()
            before = self._batch.captures
            try:
                chosen = self._batch([sample.draw for sample in self._rows])
            except OutOfPages:
                self._send_out_youngest()
                continue
            self._stats.graph_captures += self._batch.captures - before
            return self._take(self._rows, chosen)
        return []

    def _make_batch(self) -> DecodeBatch:
        rows = self._rows = list(self._running)
        left = max(s.request.ends.max_new_tokens - len(s.tokens) for s in rows)
        step = DecodeStep(
            self.prefix,
            [s.seq for s in rows if s.seq is not None],
            num_heads=self.shape.heads,
            room=min(ROOM, left),
            backend=self._backend,
        )
        latest, samplings = [s.tokens[-1] for s in rows], [s.request.sampling for s in rows]
        return DecodeBatch(self._model, step, latest, samplings, cuda_graphs=self._graphs)

    def _disband(self) -> None:
        """Let the batch go, and the pages of those in it that are done."""
        for sample in self._idle:
            self._release(sample)
        self._batch, self._rows, self._idle = None, [], []

    def _at_end(self, sample: Sample) -> bool:
        """Has it no position left to be decoded on at?"""
        assert sample.seq is not None
        return self.cache.length(sample.seq) >= self.shape.positions

    def _take(self, samples: list[Sample], chosen: list[int]) -> list[Token]:
        """Give each sample its token, but for idle ones; those that are done leave."""
        found = []
        for sample, token in zip(list(samples), chosen, strict=True):
            if sample.finish_reason is not None:
                continue
            reason = sample.add(token)
            found.append(Token(*sample.age, token, reason))
            if reason is not None:
                self._leave(sample)
        return found

    def _leave(self, sample: Sample) -> None:
        """It runs no more. Where a graph computes it, it stays in the batch as an idle row."""
        self._running.remove(sample)
        self._held = False
        if self._graphs and self._batch is not None and sample.finish_reason is not None:
            self._idle.append(sample)
        else:
            self._release(sample)
            self._disband()

    def _release(self, sample: Sample) -> None:
        assert sample.seq is not None
        self.prefix.release(sample.seq)
        sample.seq = None

    def _send_out_youngest(self) -> None:
        """Take the pages of idle rows, else of whoever came last; it waits in front, to be prefilled again."""
        if self._idle:
            self._disband()
            return
        everybody: list[Sample | Job] = [*self._running, *self._prefilling]
        youngest = max(everybody, key=lambda one: one.age)
        if isinstance(youngest, Sample):
            self._leave(youngest)
            job = Job.of([youngest])
        else:
            job = youngest
            self._prefilling.remove(job)
            self.prefix.release(job.seq)
            job.done = 0
        self._waiting.appendleft(job)
        self._held = True
        self._stats.preemptions += 1

    # Inside.

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


def _begin_alike(job: Job, other: Job, count: int) -> bool:
    return (
        len(other.tokens) >= count
        and job.tokens[count - 1] == other.tokens[count - 1]  # mostly enough to tell that they do not
        and np.array_equal(job.tokens[:count], other.tokens[:count])
    )
