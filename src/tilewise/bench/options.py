"""Options that several commands take, and mistakes on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import typer

Command = TypeVar("Command", bound=Callable[..., Any])
Written = TypeVar("Written")

# Help shows the default of a command's own signature; where that is None, what `instead_of_none` says.
Batch = Annotated[int | None, typer.Option(help="Sequences.")]
Seq = Annotated[int | None, typer.Option(help="Tokens of a sequence.")]
OwnSeq = Annotated[int | None, typer.Option(help="Tokens of a sequence; with --prefix those after it.")]
Heads = Annotated[int | None, typer.Option(help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(help="KV heads.")]
Hdim = Annotated[int | None, typer.Option(help="Head dimension, 1 to 512.")]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")]
AnyDtype = Annotated[str | None, typer.Option(help="float32, float16, bfloat16, or float8 for dense attention.")]
Causal = Annotated[bool | None, typer.Option(help="Query i sees keys up to i.", show_default="no-causal")]
Window = Annotated[int | None, typer.Option(help="Keys seen before a query's own; implies --causal.")]
Lengths = Annotated[
    str | None, typer.Option(help="A ragged batch: 100-4096 spaces --batch lengths geometrically between the two.")
]
Sparsity = Annotated[float | None, typer.Option(help="Share of blocks left out at random, 0 to below 1.")]
Block = Annotated[
    int | None, typer.Option(help="Block size of a sparse pattern.", show_default="64, or the schedule file's")
]
Sched = Annotated[str | None, typer.Option(help="A schedule file, .npz or .npy (see `tilewise schedule`).")]
KvFormat = Annotated[str | None, typer.Option(help="Decode over a paged cache: fp32, fp16, bf16, fp8, int8 or int4.")]
Prefix = Annotated[int | None, typer.Option(help="Decode with this many tokens shared by all sequences.")]
PageSize = Annotated[int | None, typer.Option(help="Tokens of a page, 1 to 256.", show_default="16")]
Tokens = Annotated[int | None, typer.Option(help="Query tokens of a sequence in a decode step.", show_default="1")]
Loops = Annotated[int | None, typer.Option(help="Times to run each kernel.", show_default="as time allows", min=1)]
Backend = Annotated[str | None, typer.Option(help="auto, cpu, cuda or emulator.", show_default="auto")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cpu")]
AnyDevice = Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda where there is a GPU")]
Json = Annotated[bool, typer.Option("--json", help="Print the records as JSON instead of a table.")]

Only = Annotated[str, typer.Option(help="Rows whose name has this in it.", metavar="TEXT")]
TableCsv = Annotated[Path | None, typer.Option("--csv", help="Where the measurements go as well.", show_default=False)]
Plot = Annotated[bool, typer.Option("--plot", help="Draw PNGs beside the CSV at the end.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the CSV: skip the rows it has.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the CSV.")]
TableDevice = Annotated[str | None, typer.Option(help="Where the rows are measured.", show_default="cuda")]

BOTH = "--resume keeps the CSV and --force overwrites it: give one of them"


class SheetOptions(NamedTuple):
    """What to do with a CSV."""

    csv: Path | None
    plot: bool
    resume: bool
    force: bool


def instead_of_none(**texts: str) -> Callable[[Command], Command]:
    """Have a command's help show, for options whose default is None, what is taken for it."""

    def tell(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        for name, text in texts.items():
            kind, option = get_args(hints[name])
            option = copy(option)
            option.show_default = text
            hints[name] = Annotated[kind, option]
        command.__annotations__ = hints
        return command

    return tell


def written(path: Path, write: Callable[[Path], Written]) -> Written:
    """What `write` gives, which writes the file of a command. Its folder is made if that is all that is missing."""
    try:
        return write(path)
    except FileNotFoundError:
        if path.parent.is_dir():
            raise
        path.parent.mkdir(parents=True)
        return write(path)


@contextmanager
def usage() -> Iterator[None]:
    """A ValueError about what was asked for is a mistake on the command line, not a failure."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
