"""The command `tilewise sweep`: lists of options, every combination of them measured into a CSV."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import BOTH, Device, Loops, SheetOptions
from .show import draw_csv

if TYPE_CHECKING:
    from .measure import Result
    from .sweep import Sheet
    from .workloads import Point

# Options that take a list: `--seq 1024 2048`, `--seq=1024 2048`, `--seq 1024,2048` or `--seq 1024 --seq 2048`.
LISTS: dict[str, tuple[str, Any]] = {
    "--seq": ("seq", int),
    "--heads": ("heads", int),
    "--kv-heads": ("kv_heads", int),
    "--hdim": ("hdim", int),
    "--batch": ("batch", int),
    "--dtype": ("dtype", str),
    "--causal": ("causal", "flag"),
    "--window": ("window", int),
    "--lengths": ("lengths", str),
    "--sparsity": ("sparsity", float),
    "--block": ("block", int),
    "--prefix": ("prefix", int),
    "--kv-format": ("kv_format", str),
    "--page-size": ("page_size", int),
    "--backend": ("backend", str),
}
_TRUTH = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def spread_lists(argv: Sequence[str]) -> list[str]:
    """`--seq 1024 2048` as `--seq 1024 --seq 2048`, the form that the parser knows; `--causal` alone is yes."""
    spread: list[str] = []
    option = ""
    waiting = False  # the option has had no value yet
    for word in [*argv, "--end"]:
        if word.startswith("--"):
            if waiting and option == "--causal":
                spread += [option, "yes"]
            elif waiting:
                spread.append(option)  # the parser says that it needs a value
            name, equals, _ = word.partition("=")
            option = name if name in LISTS else ""
            waiting = bool(option) and not equals
            if not waiting:
                spread.append(word)
        elif option:
            spread += [option, word]
            waiting = False
        else:
            spread.append(word)
    return spread[:-1]


def _values(option: str, words: Sequence[str]) -> list[Any]:
    kind = LISTS[option][1]
    values = []
    for word in ",".join(words).split(","):
        try:
            values.append(_TRUTH[word.lower()] if kind == "flag" else kind(word))
        except (ValueError, KeyError) as error:
            wanted = "yes or no" if kind == "flag" else "a whole number" if kind is int else "a number"
            raise typer.BadParameter(f"{word!r} is not {wanted}", param_hint=option) from error
    return values


def _list(text: str) -> Any:
    return typer.Option(help=text, metavar="LIST", show_default=False)


Words = list[str] | None


def sweep(
    seq: Annotated[Words, _list("Tokens of a sequence; with a prefix those after it (1024).")] = None,
    heads: Annotated[Words, _list("Query heads (8).")] = None,
    kv_heads: Annotated[Words, _list("KV heads, 0 for as many as heads (0).")] = None,
    hdim: Annotated[Words, _list("Head dimension (128).")] = None,
    batch: Annotated[Words, _list("Sequences (1).")] = None,
    dtype: Annotated[Words, _list("float32, float16, bfloat16, or float8 for dense attention (float32).")] = None,
    causal: Annotated[Words, _list("yes, no (no); --causal alone is yes.")] = None,
    window: Annotated[Words, _list("Keys seen before a query's own, 0 for no window (0).")] = None,
    lengths: Annotated[Words, _list("Ragged batches: 100-4096 spaces --batch lengths between the two.")] = None,
    sparsity: Annotated[Words, _list("Share of blocks left out, 0 is dense attention (0).")] = None,
    block: Annotated[Words, _list("Block size of sparse patterns (64).")] = None,
    prefix: Annotated[Words, _list("Tokens that all sequences share, 0 for none (0).")] = None,
    kv_format: Annotated[Words, _list("Decode over a paged cache: fp32, fp16, bf16, fp8, int8, int4.")] = None,
    page_size: Annotated[Words, _list("Tokens of a page (16).")] = None,
    backend: Annotated[Words, _list("auto, cpu, cuda, emulator (auto).")] = None,
    csv: Annotated[Path, typer.Option(help="Where the rows go, one per measurement.")] = Path("sweep.csv"),
    plot: Annotated[bool, typer.Option("--plot", help="Draw PNGs beside the CSV at the end.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the CSV: skip the points it has.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the CSV.")] = False,
    loops: Loops = None,
    device: Device = None,
) -> None:
    """Measure every combination of lists into a CSV: --seq 1024 2048 --hdim 64 128 --sparsity 0 0.5 0.9 --plot

    A list's values are separated by spaces or commas. Ctrl-C keeps what is done, and --resume goes on from there.
    """
    if resume and force:
        raise typer.BadParameter(BOTH)
    words = {
        "--seq": seq, "--heads": heads, "--kv-heads": kv_heads, "--hdim": hdim, "--batch": batch, "--dtype": dtype,
        "--causal": causal, "--window": window, "--lengths": lengths, "--sparsity": sparsity, "--block": block,
        "--prefix": prefix, "--kv-format": kv_format, "--page-size": page_size, "--backend": backend,
    }  # fmt: skip
    lists = {LISTS[option][0]: _values(option, given) for option, given in words.items() if given}
    _run_sweep(lists, SheetOptions(csv, plot, resume, force), loops, device or "cpu")


def _run_sweep(lists: dict[str, list[Any]], options: SheetOptions, loops: int | None, device: str) -> None:
    """Measure every combination that can be, tell about the others, draw; the exit code is 1 if a result is wrong."""
    from . import plots, tables
    from .measure import OK
    from .sweep import Sheet, combinations
    from .workloads import Point

    points, left_out = combinations(lists, Point(device=device))
    if not points:
        raise typer.BadParameter(left_out[0])
    errors = tables.console(stderr=True)
    if left_out:
        errors.print(
            f"{len(left_out)} combinations left out, the first because {left_out[0]}", style="dim", markup=False
        )
    assert options.csv is not None
    with Sheet(options.csv, resume=options.resume, force=options.force) as sheet:
        todo = [point for point in points if not sheet.has(point)]
        results = _measure(todo, len(points), sheet, options.csv, loops)
    bad = [result for result in results if result.ours and result.status != OK]
    typer.echo(f"{len(todo)} points measured, {len(points) - len(todo)} were there already: {options.csv}")
    if options.plot:
        draw_csv(options.csv, plots.draw)
    for line in tables.notes(bad):
        errors.print(line, style="bold red", soft_wrap=True, markup=False)
    if bad:
        raise typer.Exit(1)


def _measure(todo: list[Point], total: int, sheet: Sheet, csv: Path, loops: int | None) -> list[Result]:
    """Measure the points with a progress bar on stderr. Ctrl-C says how to go on."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from . import tables
    from .sweep import run

    errors = tables.console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors) as progress:
        if sheet.foreign_rows:
            errors.print(
                f"{sheet.foreign_rows} rows in {csv} are of another version of tilewise or torch or another number of "
                "threads: they stay, and their points are measured again",
                style="dim",
                soft_wrap=True,
                markup=False,
            )
        task = progress.add_task("starting", total=total, completed=total - len(todo))
        try:
            return run(
                todo,
                sheet,
                loops=loops,
                before=lambda point: progress.update(task, description=point.title),
                after=lambda point, found: progress.advance(task),
            )
        except KeyboardInterrupt:
            done = int(progress.tasks[0].completed)
            progress.stop()
            again = shlex.join([word for word in sys.argv[1:] if word not in ("--resume", "--force")])
            errors.print(
                f"stopped: {done} of {total} points are in {csv}; go on with: tilewise {again} --resume",
                soft_wrap=True,
                markup=False,
            )
            raise typer.Exit(130) from None
