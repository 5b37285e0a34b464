"""Generation end to end: Tilewise beside transformers' own `model.generate`, on one model with random weights.

Many questions behind one system prompt. Transformers gets the whole batch at once, with its default cache and torch's
SDPA. Both run on a short problem first, which warms up and checks the tokens; then each is timed once over the same
number of new tokens. `tilewise bench generate` shows it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..integrations.extras import extra
from ..serving import Engine
from ..serving.requests import check_tokens
from ..serving.sizing import pages_needed
from .records import Record, here, machine, package_version
from .records import save as save_rows
from .workloads import check_device

OURS, THEIRS = "tilewise.generate", "transformers"
QUESTION = 32  # tokens behind the system prompt
WARM_PREFIX, WARM_TOKENS = 64, 6  # of the short problem
CONFIGS: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}


@dataclass(frozen=True)
class Case:
    """What is generated: `sequences` questions behind a system prompt of `prefix` tokens, `new_tokens` each.

    prefill_chunk: tokens of each sequence that transformers prefills at a time, 0 for all at once. bar: how many
    times transformers' tokens per second Tilewise must reach.
    """

    device: str
    config: str
    dtype: str
    sequences: int
    prefix: int
    new_tokens: int
    prefill_chunk: int
    bar: float

    @property
    def title(self) -> str:
        """The problem in words."""
        return (
            f"{self.sequences} × ({self.prefix} shared + {QUESTION}) tokens, {self.new_tokens} new each: "
            f"{self.config} Llama, random {self.dtype} weights"
        )


@dataclass(frozen=True)
class Run:
    """One side's run: tokens (sequences, new_tokens), seconds of its phases, the most bytes of keys and values."""

    name: str
    tokens: list[list[int]]
    prefill_seconds: float
    decode_seconds: float
    seconds: float
    kv_bytes: int

    @property
    def rate(self) -> float:
        """New tokens per second, end to end."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def decode_rate(self) -> float:
        """New tokens per second of the decode phase, the first of each sequence, which prefill gives, left out."""
        return sum(len(one) - 1 for one in self.tokens) / self.decode_seconds


@dataclass(frozen=True)
class Outcome:
    """Both runs; `checked`: the share of equal tokens on the short problem, before anything was timed."""

    case: Case
    ours: Run
    theirs: Run
    checked: float
    graph_captures: int

    @property
    def speedup(self) -> float:
        return self.ours.rate / self.theirs.rate

    @property
    def decode_speedup(self) -> float:
        return self.ours.decode_rate / self.theirs.decode_rate

    @property
    def same(self) -> float:
        """The share of equal tokens of the timed runs. In low precision one close call changes all that follow."""
        return share_of_equal(self.ours.tokens, self.theirs.tokens)

    @property
    def ok(self) -> bool:
        """Are the tokens right? In float32 all must be equal; low precision is not judged."""
        return self.case.dtype != "float32" or self.checked == self.same == 1.0

    @property
    def met(self) -> bool:
        return self.ok and self.speedup >= self.case.bar


def case(
    device: str,
    config: str | None = None,
    sequences: int | None = None,
    prefix: int | None = None,
    new_tokens: int | None = None,
) -> Case:
    """The problem with what was not given filled in for the device: what a bar is set on."""
    card = check_device(device).type == "cuda"
    config = config or ("8b" if card else "small")
    if config not in CONFIGS:
        raise ValueError(f"config must be one of {', '.join(CONFIGS)}, got {config!r}")
    return Case(
        device=device,
        config=config,
        dtype="bfloat16" if card else "float32",
        sequences=sequences or (64 if card else 32),
        prefix=prefix or (8192 if card else 2048),
        new_tokens=new_tokens or (256 if card else 32),
        prefill_chunk=1024 if card else 0,
        bar=4.0 if card else 2.0,
    )


def require_transformers() -> None:
    """ImportError where it is not here, with what to install."""
    with extra("transformers"):
        pass


def make_model(problem: Case) -> Any:
    """A Llama of the problem's configuration with random weights, made where it runs."""
    import transformers

    config = transformers.LlamaConfig(
        **CONFIGS[problem.config],
        max_position_embeddings=max(problem.prefix, WARM_PREFIX) + QUESTION + max(problem.new_tokens, WARM_TOKENS),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device(problem.device):
        return auto.from_config(config, dtype=getattr(torch, problem.dtype)).eval()


def make_prompts(problem: Case, prefix: int, sequences: int) -> list[list[int]]:
    """Random questions behind one random system prompt."""
    generator = torch.Generator().manual_seed(1)
    vocab = CONFIGS[problem.config]["vocab_size"]
    system = torch.randint(vocab, (prefix,), generator=generator).tolist()
    return [system + torch.randint(vocab, (QUESTION,), generator=generator).tolist() for _ in range(sequences)]


def run(problem: Case, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Check on a short problem, then time both sides once. say: told what is being done."""
    say(f"making the {problem.config} model")
    model = make_model(problem)
    say("checking and warming up on a short problem")
    short = make_prompts(problem, min(WARM_PREFIX, problem.prefix), problem.sequences)
    checked = share_of_equal(
        run_ours(model, short, WARM_TOKENS)[0].tokens, run_theirs(model, short, WARM_TOKENS, 0).tokens
    )
    prompts = make_prompts(problem, problem.prefix, problem.sequences)
    say(f"timing {OURS}")
    run_ours(model, prompts, WARM_TOKENS)  # a long prefix is served by other kernels, which are to be compiled by now
    ours, captures = run_ours(model, prompts, problem.new_tokens)
    say(f"timing {THEIRS}")
    theirs = run_theirs(model, prompts, problem.new_tokens, problem.prefill_chunk)
    return Outcome(problem, ours, theirs, checked, captures)


def run_ours(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[Run, int]:
    """Tilewise, from an empty cache, and the graphs it captured."""
    _settle(model.device)
    started = time.perf_counter()
    pages = pages_needed([check_tokens("prompts", prompt) for prompt in prompts], 16, new_tokens, 1)
    engine = Engine(model, num_pages=pages, max_sequences=len(prompts))
    numbers = [engine.submit(prompt, max_new_tokens=new_tokens) for prompt in prompts]
    while engine.busy:
        engine.step()
    seconds, stats = time.perf_counter() - started, engine.stats()
    tokens = [engine.result(number).tokens for number in numbers]
    took = Run(OURS, tokens, stats.prefill_seconds, stats.decode_seconds, seconds, stats.peak_bytes)
    return took, stats.graph_captures


def run_theirs(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, prefill_chunk: int) -> Run:
    """Transformers: the whole batch at once."""
    from transformers import StoppingCriteria

    stamps: list[float] = []

    class Clock(StoppingCriteria):  # type: ignore[misc]
        """Asked after every token whether to stop: never, but it looks at the clock."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            _wait(input_ids.device)
            stamps.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    _settle(model.device)
    given = torch.tensor(prompts, device=model.device)
    chunk = {"prefill_chunk_size": prefill_chunk} if prefill_chunk else {}
    started = time.perf_counter()
    out = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        stopping_criteria=[Clock()],
        **chunk,
    )
    _wait(model.device)
    seconds = time.perf_counter() - started
    layers = out.past_key_values.layers
    kv_bytes = sum(x.numel() * x.element_size() for layer in layers for x in (layer.keys, layer.values))
    prefill = stamps[0] - started
    tokens = out.sequences[:, given.shape[1] :].tolist()
    return Run(THEIRS, tokens, prefill, stamps[-1] - stamps[0], seconds, kv_bytes)


def share_of_equal(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> float:
    """Of the tokens of a, (sequences, tokens) like b, the share that b has in the same place."""
    pairs = [(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)]
    return sum(x == y for x, y in pairs) / len(pairs)


def records(outcome: Outcome) -> list[Record]:
    """Both runs as flat rows, for the CSV and for --json."""
    problem = outcome.case
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    rows = []
    for one in (outcome.ours, outcome.theirs):
        ours = one is outcome.ours
        row: Record = {
            "date": date,
            **here(problem.device),
            "transformers": package_version("transformers"),
            "config": problem.config,
            "dtype": problem.dtype,
            "sequences": problem.sequences,
            "prefix": problem.prefix,
            "question": QUESTION,
            "new_tokens": problem.new_tokens,
            "kernel": one.name,
            "seconds": round(one.seconds, 4),
            "prefill_seconds": round(one.prefill_seconds, 4),
            "decode_seconds": round(one.decode_seconds, 4),
            "tokens_per_s": round(one.rate, 2),
            "decode_tokens_per_s": round(one.decode_rate, 2),
            "kv_bytes": one.kv_bytes,
            "same_tokens": round(outcome.same, 4),
            "same_tokens_checked": round(outcome.checked, 4),
            "speedup": round(outcome.speedup, 3) if ours else 1.0,
            "decode_speedup": round(outcome.decode_speedup, 3) if ours else 1.0,
        }
        rows.append(row)
    return rows


def text(outcome: Outcome) -> str:
    """The table, for a terminal and for the results' folder."""
    problem = outcome.case
    head = ("", "s", "prefill s", "decode s", "tokens/s", "decode tokens/s", "KV memory")
    rows = [
        (
            one.name,
            f"{one.seconds:.2f}",
            f"{one.prefill_seconds:.2f}",
            f"{one.decode_seconds:.2f}",
            f"{one.rate:.0f}",
            f"{one.decode_rate:.0f}",
            f"{one.kv_bytes / 1e6:.0f} MB",
        )
        for one in (outcome.ours, outcome.theirs)
    ]
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    lines = [f"{problem.title}, {machine(problem.device)}"]
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    memory = outcome.theirs.kv_bytes / outcome.ours.kv_bytes
    lines += [
        f"{outcome.speedup:.2f}× transformers end to end (bar ≥ {problem.bar:g}×: {'met' if outcome.met else 'no'}), "
        f"{outcome.decode_speedup:.2f}× in decode alone, 1/{memory:.1f} of the KV memory",
        f"equal tokens: {outcome.checked:.1%} on the short problem before, {outcome.same:.1%} of the timed runs"
        + ("" if problem.dtype == "float32" else f" ({problem.dtype}: one close call changes all that follow)"),
        f"torch {torch.__version__}, transformers {package_version('transformers')}, "
        f"{torch.get_num_threads()} threads, {outcome.graph_captures} graphs captured",
    ]
    return "\n".join(lines)


def save(outcome: Outcome, folder: Path) -> list[Path]:
    """The CSV and the table, into `folder`; what was there under these names is replaced."""
    name = f"generate-{outcome.case.config}"
    return save_rows(name, outcome.case.device, records(outcome), text(outcome), folder)


def _settle(device: torch.device) -> None:
    """Give back what an earlier run left: the two sides need the card's memory one after the other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
