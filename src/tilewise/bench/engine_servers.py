"""Servers under load: Tilewise's engine, transformers' continuous batching, vLLM and SGLang where they are installed.

`drive` gives each of them the same requests at the same times, and notes when their tokens come.
"""

from __future__ import annotations

import importlib
import inspect
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from ..serving import Engine
from .engine_traffic import Request

OURS, TRANSFORMERS, VLLM, SGLANG = "tilewise.Engine", "transformers", "vLLM", "SGLang"
POLL = 0.02  # seconds that a server of its own threads is waited for at a time
SHARE_OF_CARD = 0.5  # of a card's memory, for servers that load the model once more
STOP = 10.0  # seconds that a server has to stop


class Server(Protocol):
    """Something that answers requests, which are known by their numbers."""

    name: str

    @property
    def kv_bytes(self) -> int | None:
        """The most bytes of keys and values so far, if it tells."""

    def submit(self, number: int, request: Request) -> None: ...

    def poll(self, wait: float) -> list[int]:
        """The requests that got a token since, one entry per token; it may take `wait` seconds if there is none."""

    def close(self) -> None: ...


class Drive(NamedTuple):
    """When the tokens of each request came, in seconds from the start, and when the last of all did."""

    requests: Sequence[Request]
    stamps: list[list[float]]
    seconds: float


class TooSlow(RuntimeError):
    """A server whose time was over before all requests were answered."""


def drive(server: Server, requests: Sequence[Request], limit: float | None = None) -> Drive:
    """Submit the requests as they arrive, and read until all are answered. limit: seconds after which TooSlow is
    raised, which tells how far the server had come."""
    stamps: list[list[float]] = [[] for _ in requests]
    left = [request.new_tokens for request in requests]
    coming, under_way = 0, 0
    started = time.perf_counter()
    while coming < len(requests) or under_way:
        now = time.perf_counter() - started
        if limit is not None and now > limit:
            done, tokens = left.count(0), sum(map(len, stamps))
            raise TooSlow(f"{limit:.0f} s over, {done} of {len(requests)} requests done, {tokens / now:.0f} tokens/s")
        while coming < len(requests) and requests[coming].arrival <= now:
            server.submit(coming, requests[coming])
            coming, under_way = coming + 1, under_way + 1
        wait = requests[coming].arrival - now if coming < len(requests) else POLL
        if not under_way:
            time.sleep(max(wait, 0.0))
            continue
        found = server.poll(min(max(wait, 0.0), POLL))
        now = time.perf_counter() - started
        for number in found:
            stamps[number].append(now)
            left[number] -= 1
            under_way -= left[number] == 0
    return Drive(requests, stamps, time.perf_counter() - started)


class Ours:
    """Tilewise's engine, stepped by whoever polls."""

    name = OURS

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers: dict[int, int] = {}

    @property
    def kv_bytes(self) -> int:
        return self.engine.stats().peak_bytes

    def submit(self, number: int, request: Request) -> None:
        mine = self.engine.submit(request.prompt, max_new_tokens=request.new_tokens, eos_token_id=())
        self._numbers[mine] = number

    def poll(self, wait: float) -> list[int]:
        found = []
        for token in self.engine.step():
            found.append(self._numbers[token.request])
            if token.finish_reason is not None:
                del self._numbers[token.request]
                self.engine.result(token.request)
        return found

    def close(self) -> None:
        self.engine.prefix.clear()


class Transformers:
    """Continuous batching of transformers, which runs in a thread of its own."""

    name = TRANSFORMERS

    def __init__(self, model: Any, longest: int, max_sequences: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        options: dict[str, Any] = {}
        if model.device.type == "cpu":  # it sizes its cache by a card's memory
            options = {"num_blocks": max_sequences * -(-longest // 32), "page_size": 32, "max_batch_tokens": 512}
        settings = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = model.init_continuous_batching(
            generation_config=settings, continuous_batching_config=ContinuousBatchingConfig(**options)
        )
        # A thread of a daemon is one: a run that is cut off ends without it.
        starter = threading.Thread(target=self._manager.start, daemon=True)
        starter.start()
        starter.join()
        self._given: dict[str, int] = {}  # tokens of each request so far

    @property
    def kv_bytes(self) -> None:
        return None

    def submit(self, number: int, request: Request) -> None:
        self._given[str(number)] = 0
        self._manager.add_request(
            request.prompt, request_id=str(number), max_new_tokens=request.new_tokens, streaming=True, eos_token_id=-1
        )

    def poll(self, wait: float) -> list[int]:
        result = self._manager.get_result(timeout=max(wait, 1e-4))
        if result is None:
            if not self._manager.is_running():
                raise RuntimeError(f"{self.name} stopped: {self._manager.background_thread_status.fatal_error}")
            return []
        if result.error:
            raise RuntimeError(f"{self.name} failed: {result.error}")
        return _new(self._given, result.request_id, len(result.generated_tokens))

    def close(self) -> None:
        stop = self._manager.stop
        # Otherwise it answers first what it was given, which may be why it is stopped.
        at_once = {"hard_stop": True} if "hard_stop" in inspect.signature(stop).parameters else {}
        stop(block=True, timeout=STOP, **at_once)


class Vllm:
    """vLLM's engine, stepped by whoever polls, with random weights of its own of the same configuration."""

    name = VLLM

    def __init__(self, model: Any, longest: int, max_sequences: int) -> None:
        vllm = importlib.import_module("vllm")
        self._params, self._folder = vllm.SamplingParams, _config_folder(model)
        options = vllm.EngineArgs(
            model=self._folder.name,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=str(model.dtype).removeprefix("torch."),
            enable_prefix_caching=True,
            max_model_len=longest,
            max_num_seqs=max_sequences,
            gpu_memory_utilization=SHARE_OF_CARD,
        )
        self._engine = vllm.LLMEngine.from_engine_args(options)
        self._given: dict[str, int] = {}

    @property
    def kv_bytes(self) -> None:
        return None

    def submit(self, number: int, request: Request) -> None:
        self._given[str(number)] = 0
        params = self._params(temperature=0.0, max_tokens=request.new_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(number), {"prompt_token_ids": request.prompt}, params)

    def poll(self, wait: float) -> list[int]:
        return [
            number
            for output in self._engine.step()
            for number in _new(self._given, output.request_id, len(output.outputs[0].token_ids))
        ]

    def close(self) -> None:
        self._folder.cleanup()


class Sglang:
    """SGLang's engine, which runs in processes of its own, with random weights of the same configuration."""

    name = SGLANG

    def __init__(self, model: Any, longest: int, max_sequences: int) -> None:
        import asyncio

        sglang = importlib.import_module("sglang")
        self._folder = _config_folder(model)
        self._engine = sglang.Engine(
            model_path=self._folder.name,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=str(model.dtype).removeprefix("torch."),
            context_length=longest,
            max_running_requests=max_sequences,
            mem_fraction_static=SHARE_OF_CARD,
        )
        self._queue: queue.Queue[tuple[str, int] | BaseException] = queue.Queue()
        self._given: dict[str, int] = {}
        self._run = asyncio.run_coroutine_threadsafe
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    @property
    def kv_bytes(self) -> None:
        return None

    def submit(self, number: int, request: Request) -> None:
        self._given[str(number)] = 0
        self._run(self._answer(str(number), request), self._loop)

    async def _answer(self, name: str, request: Request) -> None:
        params = {"temperature": 0.0, "max_new_tokens": request.new_tokens, "ignore_eos": True}
        try:
            stream = await self._engine.async_generate(input_ids=request.prompt, sampling_params=params, stream=True)
            async for chunk in stream:
                self._queue.put((name, chunk["meta_info"]["completion_tokens"]))
        except BaseException as error:  # of another thread: told to the one that polls
            self._queue.put(error)

    def poll(self, wait: float) -> list[int]:
        try:
            found = self._queue.get(timeout=max(wait, 1e-4))
        except queue.Empty:
            return []
        if isinstance(found, BaseException):
            raise RuntimeError(f"{self.name} failed: {found}") from found
        return _new(self._given, *found)

    def close(self) -> None:
        self._engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._folder.cleanup()


Maker = Callable[[Any, int, int], Server]  # of the model, the longest request's tokens and the most sequences at once
PEERS: dict[str, tuple[str, Maker]] = {  # name -> the package that it needs, and how it is made
    TRANSFORMERS: ("transformers", Transformers),
    VLLM: ("vllm", Vllm),
    SGLANG: ("sglang", Sglang),
}


def find_peer(name: str) -> Maker | str:
    """How a peer is made, or why it cannot be."""
    package, maker = PEERS[name]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        return "not installed" if error.name == package else f"does not import: {error}"
    except Exception as error:  # a broken build can raise anything at import; it is the peer's problem
        return f"does not import: {error}"
    return maker


def _new(given: dict[str, int], name: str, count: int) -> list[int]:
    """The request's number for each token beyond those that it had before."""
    fresh = count - given[name]
    given[name] = count
    return [int(name)] * fresh


def _config_folder(model: Any) -> TemporaryDirectory[str]:
    """A folder with the model's configuration and no weights."""
    folder = TemporaryDirectory(prefix="tilewise-bench-")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (Path(folder.name) / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    return folder
