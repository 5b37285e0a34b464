"""The commands `tilewise bench …` and `tilewise sweep`. What is slow to import is imported when a command runs."""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from .measure import Result
    from .prefill import Outcome
    from .workloads import Point

bench = typer.Typer(
    help="Measure one problem, or without options the bars: Tilewise beside torch in under two minutes.",
    invoke_without_command=True,
    no_args_is_help=False,
)

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
Json = Annotated[bool, typer.Option("--json", help="Print the records as JSON instead of a table.")]

BOTH = "--resume keeps the CSV and --force overwrites it: give one of them"
AFTER_SUBCOMMAND = "the other options belong after the subcommand: tilewise bench prefix --heads 32"


@bench.callback()
def bench_point(
    ctx: typer.Context,
    seq: Seq = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    hdim: Hdim = None,
    batch: Batch = None,
    dtype: Dtype = None,
    causal: Causal = None,
    window: Window = None,
    lengths: Lengths = None,
    sparsity: Sparsity = None,
    block: Block = None,
    sched: Sched = None,
    kv_format: KvFormat = None,
    prefix: Prefix = None,
    page_size: PageSize = None,
    backend: Backend = None,
    device: Device = None,
    loops: Loops = None,
    json: Json = False,
) -> None:
    """Measure one problem. Without options: the bars, Tilewise beside torch in one table."""
    given = _given(
        seq=seq, heads=heads, kv_heads=kv_heads, hdim=hdim, batch=batch, dtype=dtype, causal=causal,
        window=window, lengths=lengths, sparsity=sparsity, block=block, sched=sched, kv_format=kv_format,
        prefix=prefix, page_size=page_size, backend=backend, device=device,
    )  # fmt: skip
    if ctx.invoked_subcommand:
        if given or loops or json:
            raise typer.BadParameter(AFTER_SUBCOMMAND)
        return
    if not given:
        _show_bars(loops, json)
        return
    _show_point(_point(given), loops, json)


@bench.command("prefix")
def bench_prefix(
    batch: Batch = 16,
    prefix: Prefix = 2048,
    seq: Seq = 128,
    heads: Heads = 32,
    kv_heads: KvHeads = 8,
    hdim: Hdim = 128,
    dtype: Dtype = "float32",
    kv_format: KvFormat = None,
    page_size: PageSize = None,
    tokens: Tokens = None,
    backend: Backend = None,
    device: Device = None,
    loops: Loops = None,
    json: Json = False,
) -> None:
    """Decode one step of sequences that share their first tokens."""
    given = _given(
        batch=batch, prefix=prefix, seq=seq, heads=heads, kv_heads=kv_heads, hdim=hdim, dtype=dtype,
        kv_format=kv_format, page_size=page_size, tokens=tokens, backend=backend, device=device,
    )  # fmt: skip
    _show_point(_point(given, "prefix"), loops, json)


@bench.command("decode")
def bench_decode(
    batch: Batch = 16,
    seq: Seq = 2048,
    heads: Heads = 32,
    kv_heads: KvHeads = 8,
    hdim: Hdim = 128,
    dtype: Dtype = "float32",
    kv_format: KvFormat = None,
    page_size: PageSize = None,
    tokens: Tokens = None,
    backend: Backend = None,
    device: Device = None,
    loops: Loops = None,
    json: Json = False,
) -> None:
    """Decode one step over a paged cache whose sequences share nothing."""
    given = _given(
        batch=batch, seq=seq, heads=heads, kv_heads=kv_heads, hdim=hdim, dtype=dtype, kv_format=kv_format,
        page_size=page_size, tokens=tokens, backend=backend, device=device,
    )  # fmt: skip
    _show_point(_point(given, "decode"), loops, json)


@bench.command("sparse")
def bench_sparse(
    seq: Seq = None,
    sparsity: Sparsity = None,
    block: Block = None,
    sched: Sched = None,
    heads: Heads = 8,
    kv_heads: KvHeads = None,
    hdim: Hdim = 128,
    batch: Batch = 1,
    dtype: Dtype = "float32",
    causal: Causal = None,
    backend: Backend = None,
    device: Device = None,
    loops: Loops = None,
    json: Json = False,
) -> None:
    """Block-sparse attention: 4096 tokens at 90% sparsity, or what is asked for, or a schedule file."""
    if not sched:
        seq, sparsity = 4096 if seq is None else seq, 0.9 if sparsity is None else sparsity
    given = _given(
        seq=seq, sparsity=sparsity, block=block, sched=sched, heads=heads, kv_heads=kv_heads, hdim=hdim, batch=batch,
        dtype=dtype, causal=causal, backend=backend, device=device,
    )  # fmt: skip
    _show_point(_point(given, "sparse"), loops, json)


Only = Annotated[str, typer.Option(help="Rows whose name has this in it.", metavar="TEXT")]
TableCsv = Annotated[Path | None, typer.Option("--csv", help="Where the measurements go as well.", show_default=False)]
Plot = Annotated[bool, typer.Option("--plot", help="Draw PNGs beside the CSV at the end.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the CSV: skip the rows it has.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the CSV.")]
TableDevice = Annotated[str, typer.Option(help="Where the rows are measured.")]


@bench.command("prefill")
def bench_prefill(
    only: Only = "",
    csv: TableCsv = None,
    plot: Plot = False,
    resume: Resume = False,
    force: Force = False,
    device: TableDevice = "cuda",
    loops: Loops = None,
    json: Json = False,
) -> None:
    """Prefill on a GPU: Tilewise, cuDNN and FlashAttention-3 hot and in turns, row by row with the bars.

    Under four minutes on an H200. Ctrl-C keeps what is done in the CSV.
    """
    from . import peers, plots, prefill

    def notes(outcomes: Sequence[Outcome]) -> list[str]:
        missing = peers.find(peers.FA3)
        against = "bars against the better of cuDNN and it are not judged"
        return [f"{peers.FA3}: {missing}; {against}"] if isinstance(missing, str) else []

    title = "Prefill on {machine}: TFLOP/s, hot and in turns, bfloat16"
    sheet = SheetOptions(csv, plot, resume, force)
    _show_rows(prefill, title, notes, plots.draw, only, sheet, device, loops, json)


@bench.command("serve")
def bench_serve(
    only: Only = "",
    csv: TableCsv = None,
    plot: Plot = False,
    resume: Resume = False,
    force: Force = False,
    device: TableDevice = "cuda",
    loops: Loops = None,
    json: Json = False,
) -> None:
    """Decode and shared prefixes on a GPU: Tilewise, cuDNN and FlashInfer from graphs, row by row with the bars.

    Under two minutes on an H200, of which it takes 20 GB of memory. Ctrl-C keeps what is done in the CSV.
    """
    from . import serve, serve_plots

    title = "Decode on {machine}: µs, graph replay, L2 flushed, in turns, bfloat16"
    sheet = SheetOptions(csv, plot, resume, force)
    _show_rows(serve, title, serve.notes, serve_plots.draw, only, sheet, device, loops, json)


@bench.command("generate")
def bench_generate(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    config: Annotated[str | None, typer.Option(help="small or 8b.", show_default="small; on cuda 8b")] = None,
    sequences: Annotated[int | None, typer.Option(help="Questions.", show_default="32; on cuda 64", min=1)] = None,
    prefix: Annotated[
        int | None, typer.Option(help="Tokens of the system prompt.", show_default="2048; on cuda 8192", min=1)
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate for each.", show_default="32; on cuda 256", min=2)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a CSV and the table into this folder.")] = None,
    json: Json = False,
) -> None:
    """Generate text end to end: tilewise.generate beside transformers, many questions behind one system prompt.

    Under a minute on one core. On a card transformers' side takes some 110 GB of memory, with fewer --sequences less.
    """
    from . import generate, tables

    with usage():
        problem = generate.case(device, config, sequences, prefix, new_tokens)
    busy = tables.busy_note()
    with tables.console(stderr=True).status(problem.title) as status:
        outcome = generate.run(problem, status.update)
    if json:
        typer.echo(jsonlib.dumps(generate.records(outcome), indent=1))
    else:
        typer.echo(generate.text(outcome))
        if busy:
            typer.echo(busy)
    for path in generate.save(outcome, out) if out else ():
        typer.echo(f"wrote {path}", err=True)
    if not outcome.ok:
        raise typer.Exit(1)


Draw = Callable[[Path, Callable[[str], None]], list[Path]]  # of a CSV; the second is told what cannot be drawn


class SheetOptions(NamedTuple):
    """What to do with a CSV."""

    csv: Path | None
    plot: bool
    resume: bool
    force: bool


def _show_rows(
    table: ModuleType,
    title: str,
    notes: Callable[[Sequence[Any]], list[str]],
    draw: Draw,
    only: str,
    options: SheetOptions,
    device: str,
    loops: int | None,
    json: bool,
) -> None:
    """Measure and show the rows of a table, `prefill` or `serve`; notes: lines below it; draw: its CSV."""
    from . import tables
    from .records import machine
    from .sweep import Sheet

    csv, plot, resume, force = options
    if csv is None and (plot or resume or force):
        raise typer.BadParameter("--plot, --resume and --force are about the CSV: say where it is with --csv")
    if resume and force:
        raise typer.BadParameter(BOTH)
    with usage():
        rows = table.rows(device)
    chosen = [row for row in rows if only.lower() in row.name.lower()]
    if not chosen:
        raise typer.BadParameter(f"{only!r} is in none of: {'; '.join(row.name for row in rows)}", param_hint="--only")
    errors = tables.console(stderr=True)
    outcomes: list[Outcome] = []
    stopped = False
    with Sheet(csv, resume=resume, force=force) if csv else nullcontext() as sheet:
        try:
            for outcome in table.run(chosen, sheet, loops):
                outcomes.append(outcome)
                errors.print(tables.row_line(outcome, table.COLUMNS), style="dim", soft_wrap=True, markup=False)
        except KeyboardInterrupt:
            stopped = True
    results = [result for outcome in outcomes for result in outcome.results]
    if json:
        typer.echo(jsonlib.dumps([_outcome(outcome) for outcome in outcomes], indent=1))
    else:
        lines = [f"{outcome.row.name}: {note}" for outcome in outcomes for note in tables.notes(outcome.results)]
        shown = tables.rows_table(title.format(machine=machine(device)), outcomes, table.COLUMNS)
        _print(shown, [*lines, *notes(outcomes)])
    if stopped:
        kept = f" and in {csv}: go on with --resume" if csv else ""
        errors.print(f"stopped: {len(outcomes)} of {len(chosen)} rows are measured{kept}", soft_wrap=True, markup=False)
        raise typer.Exit(130)
    if plot and csv:
        _draw(csv, draw)
    _fail_if_wrong(results)


def _outcome(outcome: Outcome) -> dict[str, Any]:
    from .records import records
    from .serve import Outcome as Served

    bars = [
        {"bar": goal.text, "reached": goal.measure(outcome), "of": goal.what, "met": goal.met_by(outcome)}
        for goal in outcome.row.goals
    ]
    by_point = outcome.by_point if isinstance(outcome, Served) else {}
    found = [records(*one) for one in (by_point or {outcome.row.point: outcome.results}).items()]
    return {"row": outcome.row.name, "bars": bars, "results": [record for one in found for record in one]}


def _draw(csv: Path, draw: Draw) -> None:
    """Draw the CSV and say what was drawn."""
    skipped: list[str] = []
    drawn = draw(csv, skipped.append)
    for path in drawn:
        typer.echo(f"drew {path}")
    for line in skipped:
        typer.echo(line)
    if not drawn and not skipped:
        typer.echo("nothing to draw: a plot needs two values or more of --seq or of --sparsity")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def usage() -> Iterator[None]:
    """A ValueError about what was asked for is a mistake on the command line, not a failure."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _point(given: dict[str, Any], workload: str | None = None) -> Point:
    """The point asked for; `workload` None says that the options tell which one it is."""
    from .workloads import Point, complete, infer, load_schedule

    sched = given.get("sched")
    with usage():
        if sched:
            if "sparsity" in given:
                raise ValueError("--sparsity and --sched both say which blocks are left out: give one of them")
            schedule = load_schedule(sched, given.get("seq"), given.get("block"))
            if given.get("block", schedule.block_q) != schedule.block_q:
                raise ValueError(f"{sched} has blocks of {schedule.block_q}: leave out --block {given['block']}")
            given = {"seq": schedule.seqlen_q, **given, "block": schedule.block_q}
            schedule.check(given["seq"], given["seq"], given.get("heads", Point.heads))
        if "heads" in given or "kv_heads" not in given:
            given = {"kv_heads": given.get("heads", Point.heads), **given}
        return infer(**given) if workload is None else complete(Point(**given, workload=workload))


def _show_point(point: Point, loops: int | None, json: bool) -> None:
    from . import tables
    from .measure import measure
    from .records import records
    from .workloads import build

    busy = tables.busy_note()
    with tables.console(stderr=True).status(f"measuring {point.title}"):
        problem = build(point)
        results = measure(problem, loops=loops)
    if json:
        typer.echo(jsonlib.dumps(records(point, results), indent=1))
    else:
        table = tables.point_table(point.title, results, tables.console().width)
        _print(table, [*tables.notes(results), tables.peers_note(problem.absent), busy])
    _fail_if_wrong(results)


def _show_bars(loops: int | None, json: bool) -> None:
    from . import bars, tables
    from .records import here, records

    found: list[Result] = []
    rows: list[dict[str, Any]] = []
    footnotes: list[str] = []
    table = tables.BarsTable(tables.console().width)
    busy = tables.busy_note()
    with tables.console(stderr=True).status("measuring what this machine can do at best") as status:
        for bar, problem, results in bars.run_bars(loops):
            status.update(f"measured {problem.title}")
            found += results
            table.add(bar, results)
            for record, result in zip(records(bar.point, results), results, strict=True):
                met = bar.met_by(result)
                rows.append({**record, "bar": None if met is None else bar.text, "met": met})
            best, where = problem.ceiling, here(bar.point.device)
            footnotes = footnotes or [
                f"{where['machine']}, {where['threads']} threads, torch {where['torch']}; "
                f"ceiling {best.flops / 1e12:.3f} TFLOP/s, {best.bandwidth / 1e9:.1f} GB/s, measured",
                tables.peers_note(problem.absent),
            ]
        bar_of_plan, planned = bars.PLAN_BAR, bars.run_plan_bar(loops)
    table.add_plan(bar_of_plan, planned)
    assert planned.timing is not None
    median = planned.timing.median * 1e3
    met = bar_of_plan.met_by(planned)
    rows.append({"kernel": planned.kernel, "median_ms": median, "bar": bar_of_plan.text, "met": met})
    if json:
        typer.echo(jsonlib.dumps(rows, indent=1))
    else:
        _print(table.table, [*tables.notes(found), *footnotes, busy])
    _fail_if_wrong(found)


def _print(table: Table, lines: Sequence[str]) -> None:
    from . import tables

    out = tables.console()
    out.print(table)
    for line in lines:
        if line:
            out.print(line, style="dim", soft_wrap=True, markup=False)


def _fail_if_wrong(results: Sequence[Result]) -> None:
    from .measure import OK

    if any(result.ours and result.status != OK for result in results):
        raise typer.Exit(1)


# ---- sweep ----------------------------------------------------------------------------------------------------

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
    dtype: Annotated[Words, _list("float32, float16, bfloat16 (float32).")] = None,
    causal: Annotated[Words, _list("yes, no (no); --causal alone is yes.")] = None,
    window: Annotated[Words, _list("Keys seen before a query's own, 0 for no window (0).")] = None,
    lengths: Annotated[Words, _list("Ragged batches: 100-4096 spaces --batch lengths between the two.")] = None,
    sparsity: Annotated[Words, _list("Share of blocks left out, 0 is dense attention (0).")] = None,
    block: Annotated[Words, _list("Block size of sparse patterns (64).")] = None,
    prefix: Annotated[Words, _list("Tokens that all sequences share, 0 for none (0).")] = None,
    kv_format: Annotated[Words, _list("Decode over a paged cache: fp32, fp16, bf16, fp8, int8, int4.")] = None,
    page_size: Annotated[Words, _list("Tokens of a page (16).")] = None,
    backend: Annotated[Words, _list("Backends (auto).")] = None,
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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from . import plots, tables
    from .measure import OK
    from .sweep import Sheet, combinations, run
    from .workloads import Point

    if resume and force:
        raise typer.BadParameter(BOTH)
    words = {
        "--seq": seq, "--heads": heads, "--kv-heads": kv_heads, "--hdim": hdim, "--batch": batch, "--dtype": dtype,
        "--causal": causal, "--window": window, "--lengths": lengths, "--sparsity": sparsity, "--block": block,
        "--prefix": prefix, "--kv-format": kv_format, "--page-size": page_size, "--backend": backend,
    }  # fmt: skip
    lists = {LISTS[option][0]: _values(option, given) for option, given in words.items() if given}
    points, left_out = combinations(lists, Point(device=device or "cpu"))
    if not points:
        raise typer.BadParameter(left_out[0])
    errors = tables.console(stderr=True)
    if left_out:
        errors.print(
            f"{len(left_out)} combinations left out, the first because {left_out[0]}", style="dim", markup=False
        )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Sheet(csv, resume=resume, force=force) as sheet, Progress(*columns, console=errors) as progress:
        todo = [point for point in points if not sheet.has(point)]
        if sheet.foreign_rows:
            errors.print(
                f"{sheet.foreign_rows} rows in {csv} are of another version of tilewise or torch or another number of "
                "threads: they stay, and their points are measured again",
                style="dim",
                soft_wrap=True,
                markup=False,
            )
        task = progress.add_task("starting", total=len(points), completed=len(points) - len(todo))
        try:
            results = run(
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
            errors.print(f"stopped: {done} of {len(points)} points are in {csv}; go on with: tilewise {again} --resume",
                         soft_wrap=True, markup=False)  # fmt: skip
            raise typer.Exit(130) from None
    bad = [result for result in results if result.ours and result.status != OK]
    typer.echo(f"{len(todo)} points measured, {len(points) - len(todo)} were there already: {csv}")
    if plot:
        _draw(csv, plots.draw)
    for line in tables.notes(bad):
        errors.print(line, style="bold red", soft_wrap=True, markup=False)
    if bad:
        raise typer.Exit(1)
