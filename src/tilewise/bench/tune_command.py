"""The command `tilewise tune`. What is slow to import is imported when it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import usage

if TYPE_CHECKING:
    import torch

    from .tune import Book, Machine, Outcome
    from .tune_prefill import Shape

FAMILIES = ("prefill", "decode", "sparse", "mla")  # tuned.FAMILIES
BUDGET = 300.0  # seconds
CONSTANTS = 4  # problems whose share of the time decode's constants get

Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shapes",
        help="B,N,Hq,Hkv,D[:Dv][,causal][,paged], several with ; between; may be given again. Of mla only if it is "
        "named: B,N,Hq,1,D:Dv.",
        metavar="TEXT",
    ),
]


def tune(
    family: Annotated[str, typer.Argument(help="prefill, decode, sparse, mla or all.")] = "all",
    budget: Annotated[float, typer.Option(help="Seconds that measuring may take, about.", min=1.0)] = BUDGET,
    shapes: Shapes = None,
    dtype: Annotated[
        str, typer.Option(help="Of prefill, sparse and mla: bfloat16, float16; not of mla: float32, float8.")
    ] = "bfloat16",
) -> None:
    """Measure which tilings are fastest on this card, and what decode's work costs here, into a table for later calls.

    Nothing is measured inside a call: what this command has written is looked up when a call is first made. Ctrl-C
    keeps what is done; problems that were measured before are measured again and replaced.
    """
    import torch

    from tilewise import arch, tuned

    from . import tables, tune_prefill
    from .tune import Book, Card, Outcome

    if family not in (*FAMILIES, "all"):
        raise typer.BadParameter(f"{family!r} is not one of {', '.join(FAMILIES)} and all", param_hint="FAMILY")
    if dtype not in tune_prefill.DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(tune_prefill.DTYPES)}", param_hint="--dtype")
    families = families_of(family, given=bool(shapes), dtype=dtype)
    with usage():
        asked = tune_prefill.parse(shapes) if shapes else None
        check(families, asked, tune_prefill.DTYPES[dtype])
    if not torch.cuda.is_available():
        raise NotImplementedError("there is nothing to tune on a CPU: tables are of cards, and torch sees no GPU here")
    folder = tuned.folder()
    if folder is None:
        raise NotADirectoryError("you have no home folder for the table: set TILEWISE_CACHE to a folder")
    device = torch.device("cuda", torch.cuda.current_device())
    if not arch.hopper(arch.card_of(device)):
        if family == "mla":
            raise NotImplementedError(
                "MLA decode has one shape for each width on this card, so there is nothing to tune"
            )
        families = without_mla(families)
    machine = Card(device)
    book, outcome = Book(machine, folder), Outcome(0)
    out = tables.console()
    out.print(f"tuning {', '.join(families)} on {machine.card} as {arch.card_of(device)}", highlight=False)
    with Bar() as bar:
        try:
            run(families, asked, tune_prefill.DTYPES[dtype], device, machine, book, outcome, budget, bar)
        except KeyboardInterrupt:
            pass_on = True
        else:
            pass_on = False
    for line in summary(outcome, book.path, interrupted=pass_on):
        out.print(line, soft_wrap=True, markup=False)
    if pass_on:
        raise typer.Exit(130)


def families_of(family: str, *, given: bool, dtype: str) -> tuple[str, ...]:
    """What is measured; given: with shapes of the user's. No other family serves the shapes and few the dtypes of MLA:
    of "all" it is left out where these are not its own."""
    if family != "all":
        return (family,)
    return without_mla(FAMILIES) if given or dtype not in ("bfloat16", "float16") else FAMILIES


def without_mla(families: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in families if name != "mla")


def check(families: Sequence[str], shapes: Sequence[Shape] | None, dtype: torch.dtype) -> None:
    """ValueError for shapes that a family's kernels do not serve."""
    from tilewise.gpu.decode_kernels import HEAD_DIMS

    from . import tune_mla, tune_prefill

    if "mla" in families:
        tune_mla.check(shapes or [], dtype)
    if "prefill" in families or "sparse" in families:
        tune_prefill.check(shapes or [])
    for shape in shapes or [] if "decode" in families else []:
        if shape.hdim not in HEAD_DIMS:
            raise ValueError(f"D must be one of {', '.join(map(str, HEAD_DIMS))} for decode, got {shape.hdim}")


def run(
    families: Sequence[str],
    shapes: Sequence[Shape] | None,
    dtype: torch.dtype,
    device: torch.device,
    machine: Machine,
    book: Book,
    outcome: Outcome,
    budget: float,
    bar: Any,
) -> None:
    """Measure the families, each with these shapes or its own, within about `budget` seconds."""
    from . import tune as tuning
    from . import tune_decode, tune_mla, tune_prefill

    makers: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
        "prefill": (tune_prefill.problems, shapes or tune_prefill.defaults()),
        "decode": (tune_decode.problems, shapes or tune_decode.defaults()),
        "sparse": (tune_prefill.sparse_problems, shapes or tune_prefill.sparse_defaults()),
        "mla": (tune_mla.problems, shapes or tune_mla.defaults(dtype)),
    }
    counts = {name: len(makers[name][1]) * (len(tune_prefill.KINDS) if name == "sparse" else 1) for name in families}
    shares = {name: count + (CONSTANTS if name == "decode" else 0) for name, count in counts.items()}
    outcome.asked = sum(counts.values()) + ("decode" in families)
    bar.total(outcome.asked)
    for name in families:
        make, asked = makers[name]
        seconds = budget * shares[name] / sum(shares.values())
        if name == "decode":
            part = seconds * CONSTANTS / shares[name]
            bar.next("decode, what its work costs")
            steps = (*tune_decode.STEPS, *tune_decode.GRID)
            bench = tune_decode.Bench(device, tune_decode.Model(), steps)
            found, records = tune_decode.measure_constants(machine, bench, part)
            book.add(name, records, constants=found)
            outcome.solved += 1
            seconds, problems = seconds - part, make(asked, device)
            del bench
        else:
            problems = make(asked, dtype, device)
        tuning.tune(
            problems, machine, book, outcome, count=counts[name], budget=seconds,
            before=lambda problem: bar.next(f"{problem.family}, {problem.name}"),
        )  # fmt: skip


def summary(outcome: Outcome, path: Path, *, interrupted: bool) -> list[str]:
    """What was done, for people."""
    lines = [f"{outcome.solved} of {outcome.asked} problems measured, for {outcome.taken} another tiling is faster"]
    if interrupted:
        lines.append("interrupted: what is done is kept")
    elif outcome.out_of_time:
        lines.append("the time was too short for the others: --budget gives more, --shapes asks for less")
    return [*lines, f"table: {path}"] if outcome.solved else [*lines, "no table was written"]


class Bar:
    """The progress bar, on stderr."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from . import tables

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self.progress = Progress(*columns, console=tables.console(stderr=True), transient=True)
        self.task = self.progress.add_task("starting")
        self.begun = 0

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def total(self, count: int) -> None:
        """How many there are."""
        self.progress.update(self.task, total=count)

    def next(self, name: str) -> None:
        """The one before it is done, and this one begins."""
        self.progress.update(self.task, completed=self.begun, description=name)
        self.begun += 1
