"""The engine measured as a server: one decode step, a batch that comes and goes, and latencies under load.

All with one model of random weights. The step and the batch are stepped by hand; the load is requests that arrive by
chance (engine_traffic.py), given to every server that there is (engine_servers.py), first all at once, which tells
what it can do at most, then at shares of what Tilewise can. `tilewise bench engine` shows it.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..serving import Engine
from . import engine_servers as servers
from . import engine_traffic as traffic
from .engine_traffic import Lengths, Mix
from .generate import CONFIGS
from .workloads import check_device

PARTS = ("step", "churn", "load")
PAGE = 16
STEPS, WARM_STEPS = 24, 6  # timed steps, and those before them
JUDGED = 0.7  # the load whose latencies are judged
FIRST_SEED = 2  # of the requests that come all at once; those of each load have the next one
Percentiles = tuple[float, float, float]  # p50, p95, p99


@dataclass(frozen=True)
class Still:
    """`rows` sequences of `prefix` shared and `own` tokens; `leave` of them come and go in each step of a churn."""

    rows: int
    prefix: int
    own: int
    leave: int = 0

    def __str__(self) -> str:
        return f"{self.rows} × ({self.prefix} + {self.own})"


@dataclass(frozen=True)
class Case:
    """What is measured, where. loads: shares of the capacity. judged: whether bars are set on it. peer_seconds: that
    each run of another server may take."""

    device: str
    config: str
    dtype: str
    compile: bool
    parts: tuple[str, ...]
    step: Still
    churn: Still
    mix: Mix
    requests: int
    loads: tuple[float, ...]
    max_sequences: int
    token_budget: int
    judged: bool
    peer_seconds: float

    @property
    def title(self) -> str:
        how = "compiled layers" if self.compile else "layers as they are"
        return f"{self.config} Llama, random {self.dtype} weights, {how}"


@dataclass(frozen=True)
class Figure:
    """A figure with its bar, of which `most` says whether it is the most or the least that is taken."""

    row: str
    value: float
    unit: str
    detail: str
    bar: float | None = None
    most: bool = True

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value <= self.bar if self.most else self.value >= self.bar


@dataclass(frozen=True)
class Load:
    """A server under `share` of Tilewise's capacity (None: all requests at once), in seconds, requests and tokens."""

    server: str
    share: float | None
    rate: float
    requests: int
    seconds: float
    tokens: int
    first: Percentiles
    between: Percentiles
    kv_bytes: int | None
    host_seconds: float | None  # of a step

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds


@dataclass(frozen=True)
class Outcome:
    """What was measured. missing: servers that were not, each with the reason; drawn: the lengths of the requests."""

    case: Case
    figures: list[Figure]
    loads: list[Load]
    missing: dict[str, str]
    drawn: str

    @property
    def capacity(self) -> float | None:
        """Tilewise's requests per second, all at once."""
        found = (one.requests_per_s for one in self.loads if one.server == servers.OURS and one.share is None)
        return next(found, None)


def case(
    device: str,
    config: str | None = None,
    *,
    requests: int | None = None,
    loads: Sequence[float] = (0.3, 0.5, 0.7, 0.9),
    compile: bool | None = None,
    token_budget: int | None = None,
    only: str = "",
    peer_seconds: float = 120.0,
) -> Case:
    """The problem with what was not given filled in for the device. only: parts of it, with commas between them."""
    card = check_device(device).type == "cuda"
    config = config or ("8b" if card else "small")
    if config not in CONFIGS:
        raise ValueError(f"config must be one of {', '.join(CONFIGS)}, got {config!r}")
    words = [word.strip() for word in only.split(",")]
    for word in words:
        if not any(word in part for part in PARTS):
            raise ValueError(f"only must be in one of {', '.join(PARTS)}, got {word!r}")
    parts = tuple(part for part in PARTS if any(word in part for word in words))
    if any(not 0 < load < 1.5 for load in loads):
        raise ValueError(f"loads must be above 0 and below 1.5, got {', '.join(map(str, loads))}")
    if card:
        mix = Mix(4, 2048, Lengths(128, 0.7, 8, 1024), Lengths(128, 0.6, 8, 512))
    else:
        mix = Mix(3, 512, Lengths(16, 0.5, 4, 48), Lengths(12, 0.5, 4, 32))
    return Case(
        device=device,
        config=config,
        dtype="bfloat16" if card else "float32",
        compile=card if compile is None else compile,
        parts=parts,
        step=Still(64, 8192, 32) if card else Still(8, 512, 16),
        churn=Still(256, 2048, 64, 16) if card else Still(16, 128, 16, 4),
        mix=mix,
        requests=requests or (256 if card else 24),
        loads=tuple(loads),
        max_sequences=256 if card else 16,
        token_budget=token_budget or (512 if card else 64),
        judged=card and config == "8b",
        peer_seconds=peer_seconds,
    )


def make_model(problem: Case) -> Any:
    """A Llama of the problem's configuration with random weights, made where it runs."""
    import transformers

    longest = max(problem.mix.longest, *(one.prefix + one.own + 4 * STEPS for one in (problem.step, problem.churn)))
    config = transformers.LlamaConfig(
        **CONFIGS[problem.config], max_position_embeddings=longest, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device(problem.device):
        return auto.from_config(config, dtype=getattr(torch, problem.dtype)).eval()


def run(
    problem: Case, say: Callable[[str], None] = lambda _: None, peers: Sequence[str] = tuple(servers.PEERS)
) -> Outcome:
    """Measure the parts that are asked for. say: told what is being done; peers: those to measure beside."""
    say(f"making the {problem.config} model")
    model = make_model(problem)
    outcome = Outcome(problem, [], [], {}, "")
    if "step" in problem.parts:
        say(f"decode steps of {problem.step}")
        outcome.figures.append(decode_step(model, problem))
    if "churn" in problem.parts:
        say(f"{problem.churn}, {problem.churn.leave} of which come and go in each step")
        outcome.figures.append(churn(model, problem))
    if "load" in problem.parts:
        outcome = under_load(model, outcome, say, peers)
    return outcome


def decode_step(model: Any, problem: Case) -> Figure:
    """The time of a step in which every sequence gets a token; their own lengths are around what is asked for."""
    still = problem.step
    engine = _engine(model, problem, still, 1)
    engine.submit(_tokens(model, still.prefix), max_new_tokens=4 * STEPS, num_samples=still.rows, eos_token_id=())
    _warm(engine, still.rows, max(WARM_STEPS, still.own - STEPS // 2))
    before, times = engine.stats(), []
    for _ in range(STEPS):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    middle, host = statistics.median(times), _host(engine, before)
    detail = f"host {_ms(host)} ms of each, {still.rows / middle:.0f} tokens/s"
    bar = 6.6 if problem.judged and problem.compile else None
    _settle(model)
    return Figure(f"decode step {still}", middle * 1e3, "ms", detail, bar)


def churn(model: Any, problem: Case) -> Figure:
    """Tokens per second while some leave and as many join in each step, over those of the same batch standing still.

    Questions behind one system prompt with `leave` samples each. While it stands still, all of them go on; then each
    has as many tokens as there are questions, and in each step the one whose samples are done is asked again.
    """
    still = problem.churn
    groups = still.rows // still.leave
    engine = _engine(model, problem, still, groups)
    system = _tokens(model, still.prefix)
    prompts = [system + _tokens(model, still.own, seed=1 + n) for n in range(groups)]

    def ask(step: int, new_tokens: int) -> int:
        return engine.submit(
            prompts[step % groups], max_new_tokens=new_tokens, num_samples=still.leave, eos_token_id=()
        )

    def timed(change: Callable[[int], object]) -> tuple[float, float]:
        """Tokens per second, and the host's share of a step."""
        before, tokens, started = engine.stats(), 0, time.perf_counter()
        for step in range(STEPS):
            change(step)
            tokens += len(engine.step())
        return tokens / (time.perf_counter() - started), _host(engine, before)

    numbers = [ask(n, 4 * STEPS) for n in range(groups)]
    _warm(engine, still.rows, WARM_STEPS)
    standing, host_standing = timed(lambda _: None)
    for number in numbers:
        engine.cancel(number)
        engine.result(number)
    for step in range(3 * groups):  # till as many leave as join, and all that this takes is compiled and captured
        ask(step, groups)
        engine.step()
    churning, host = timed(lambda step: ask(step, groups))
    detail = (
        f"{churning:.0f} tokens/s of {standing:.0f} standing still; host {_ms(host)} ms a step, {_ms(host_standing)} "
        "standing still"
    )
    _settle(model)
    name = f"{still}, {still.leave} leave and join in each step"
    return Figure(name, churning / standing, "×", detail, 0.9 if problem.judged else None, most=False)


def under_load(model: Any, outcome: Outcome, say: Callable[[str], None], peers: Sequence[str]) -> Outcome:
    """Every server's latencies, all requests at once and at each share of what Tilewise can take."""
    problem, loads, missing = outcome.case, list(outcome.loads), dict(outcome.missing)
    server: servers.Server = servers.Ours(_serving_engine(model, problem))
    say(f"{server.name}: warming up")
    loads += _measure(server, problem, None, say)
    capacity = loads[-1].requests_per_s
    for share in problem.loads:
        loads += _measure(server, problem, (share, share * capacity), say)
    server.close()
    del server
    _settle(model)
    for name in peers:
        maker = servers.find_peer(name)
        if isinstance(maker, str):
            missing[name] = maker
            continue
        say(f"{name}: warming up")
        try:
            peer = maker(model, problem.mix.longest, problem.max_sequences)
            try:
                loads += _measure(peer, problem, None, say)
                for share in problem.loads:
                    loads += _measure(peer, problem, (share, share * capacity), say)
            finally:
                peer.close()
        except Exception as error:  # a peer that does not run here is a note, not the end of the measurement
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        _settle(model)
    figures = [*outcome.figures, *_judged(problem, loads)]
    drawn = traffic.spread(_requests(problem, math.inf, FIRST_SEED), problem.mix)
    return replace(outcome, figures=figures, loads=loads, missing=missing, drawn=drawn)


def _measure(
    server: servers.Server, problem: Case, load: tuple[float, float] | None, say: Callable[[str], None]
) -> list[Load]:
    """One run, which without a load comes after one that is not counted."""
    share, rate = load if load is not None else (None, math.inf)
    limit = None if isinstance(server, servers.Ours) else problem.peer_seconds
    if share is None:
        servers.drive(server, _requests(problem, math.inf, FIRST_SEED - 1), limit)
    say(f"{server.name}: " + ("all at once" if share is None else f"{rate:.3g} requests/s, {share:.0%}"))
    engine = server.engine if isinstance(server, servers.Ours) else None
    before = engine.stats() if engine is not None else None
    seed = FIRST_SEED + (0 if share is None else 1 + problem.loads.index(share))
    requests = _requests(problem, rate, seed)
    drive = servers.drive(server, requests, limit)
    first = [stamps[0] - one.arrival for one, stamps in zip(requests, drive.stamps, strict=True)]
    between = np.concatenate([np.diff(stamps) for stamps in drive.stamps])
    host = _host(engine, before) if engine is not None else None
    tokens = sum(map(len, drive.stamps))
    return [
        Load(
            server.name, share, rate, len(requests), drive.seconds, tokens, _percentiles(first), _percentiles(between),
            server.kv_bytes, host,
        )
    ]  # fmt: skip


def _judged(problem: Case, loads: Sequence[Load]) -> list[Figure]:
    """How even the time between tokens is under the load that is judged, if it was measured."""
    for one in loads:
        if one.server == servers.OURS and one.share == JUDGED:
            p50, _, p99 = one.between
            detail = f"p99 {_ms(p99)} ms, p50 {_ms(p50)} ms"
            name = f"arrivals at {JUDGED:.0%} of capacity: p99 over p50 between tokens"
            return [Figure(name, p99 / p50, "×", detail, 2.0 if problem.judged else None)]
    return []


def _requests(problem: Case, rate: float, seed: int) -> list[traffic.Request]:
    return traffic.draw(problem.mix, problem.requests, rate, CONFIGS[problem.config]["vocab_size"], seed)


def _engine(model: Any, problem: Case, still: Still, prompts: int) -> Engine:
    """An engine with room for the sequences, all of which are forks of `prompts` prompts."""
    own = -(-(still.own + 4 * STEPS) // PAGE) + 2
    pages = -(-still.prefix // PAGE) + (prompts + still.rows) * own
    return Engine(model, num_pages=pages, page_size=PAGE, max_sequences=still.rows, compile=problem.compile)


def _serving_engine(model: Any, problem: Case) -> Engine:
    """An engine whose cache holds half of what the longest requests would need, all graphs captured."""
    mix = problem.mix
    own = -(-(mix.questions.most + mix.answers.most) // PAGE) + 2
    pages = mix.systems * -(-mix.system_tokens // PAGE) + problem.max_sequences * own // 2
    engine = Engine(
        model,
        num_pages=pages,
        page_size=PAGE,
        max_sequences=problem.max_sequences,
        token_budget=problem.token_budget,
        compile=problem.compile,
    )
    engine.prepare()
    return engine


def _tokens(model: Any, count: int, seed: int = 0) -> list[int]:
    vocab: int = model.config.vocab_size
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _warm(engine: Engine, rows: int, steps: int) -> None:
    """Until every row has got that many tokens after the first."""
    while steps:
        steps -= len(engine.step()) >= rows


def _host(engine: Engine, before: Any) -> float:
    """Seconds of host time in each step since then."""
    now = engine.stats()
    return float((now.host_seconds - before.host_seconds) / max(now.steps - before.steps, 1))


def _percentiles(values: Any) -> Percentiles:
    p50, p95, p99 = np.percentile(np.asarray(values), (50, 95, 99)).tolist()
    return p50, p95, p99


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def _settle(model: Any) -> None:
    """Give back what was let go of: the next one needs the card's memory."""
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
