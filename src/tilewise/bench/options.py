"""Options that several commands take, and mistakes on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

Batch = Annotated[int | None, typer.Option(help="Sequences.", show_default="1")]
Seq = Annotated[
    int | None, typer.Option(help="Tokens of a sequence; with --prefix those after it.", show_default="1024")
]
Heads = Annotated[int | None, typer.Option(help="Query heads.", show_default="8")]
KvHeads = Annotated[int | None, typer.Option(help="KV heads.", show_default="as many as heads")]
Hdim = Annotated[int | None, typer.Option(help="Head dimension, 1 to 512.", show_default="128")]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.", show_default="float32")]
Causal = Annotated[bool | None, typer.Option(help="Query i sees keys up to i.", show_default="no-causal")]
Window = Annotated[int | None, typer.Option(help="Keys seen before a query's own; implies --causal.")]
Lengths = Annotated[
    str | None, typer.Option(help="A ragged batch: 100-4096 spaces --batch lengths geometrically between the two.")
]
Sparsity = Annotated[float | None, typer.Option(help="Share of blocks left out at random, 0 to below 1.")]
Block = Annotated[int | None, typer.Option(help="Block size of a sparse pattern.", show_default="64; 16 for a .npy")]
Sched = Annotated[str | None, typer.Option(help="A schedule file, .npz or .npy (see `tilewise schedule`).")]
KvFormat = Annotated[str | None, typer.Option(help="Decode over a paged cache: fp32, fp16, bf16, fp8, int8 or int4.")]
Prefix = Annotated[int | None, typer.Option(help="Decode with this many tokens shared by all sequences.")]
PageSize = Annotated[int | None, typer.Option(help="Tokens of a page, 1 to 256.", show_default="16")]
Tokens = Annotated[int | None, typer.Option(help="Query tokens of a sequence in a decode step.", show_default="1")]
Loops = Annotated[int | None, typer.Option(help="Times to run each kernel.", show_default="as time allows", min=1)]
Backend = Annotated[str | None, typer.Option(help="One backend instead of all that serve.", show_default="auto")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cpu")]
AnyDevice = Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda where there is a GPU")]
Json = Annotated[bool, typer.Option("--json", help="Print the records as JSON instead of a table.")]

Only = Annotated[str, typer.Option(help="Rows whose name has this in it.", metavar="TEXT")]
TableCsv = Annotated[Path | None, typer.Option("--csv", help="Where the measurements go as well.", show_default=False)]
Plot = Annotated[bool, typer.Option("--plot", help="Draw PNGs beside the CSV at the end.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the CSV: skip the rows it has.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the CSV.")]
TableDevice = Annotated[str, typer.Option(help="Where the rows are measured.")]

BOTH = "--resume keeps the CSV and --force overwrites it: give one of them"


class SheetOptions(NamedTuple):
    """What to do with a CSV."""

    csv: Path | None
    plot: bool
    resume: bool
    force: bool


@contextmanager
def usage() -> Iterator[None]:
    """A ValueError about what was asked for is a mistake on the command line, not a failure."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
