"""The command line: `tilewise …`. Commands import what they need when they run, so that help comes at once.

Errors are one line and a hint on stderr: exit code 2 for a command line that makes no sense, 1 for work that failed,
130 for Ctrl-C. TILEWISE_DEBUG=1 shows the traceback.
"""

from __future__ import annotations

import json as jsonlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .bench import commands, ladder_commands, terminal, tune_command, warm_command
from .bench.options import written
from .bench.report import command as report_command

OVERVIEW = """\
Tilewise: attention kernels for LLM inference, planned once as a list of tiles.

  tilewise bench      the bars: Tilewise beside torch in one table, under two minutes
                      with options one point: --seq --heads --kv-heads --hdim --batch --dtype --causal
                      --window --lengths --sparsity --sched --kv-format --prefix --loops --backend --json
  tilewise bench prefix | decode | sparse
                      sequences that share a prefix; a paged cache; block-sparse attention, on a GPU the
                      whole table beside dense, FlexAttention and FlashInfer; --only --csv
  tilewise bench variants | cards | train
                      functions as masks and scores; older cards' kernels; training; --only --csv
  tilewise bench prefill | serve
                      on a GPU, alternated: beside cuDNN and FlashAttention-3; decode and shared prefixes
                      beside cuDNN and FlashInfer; --only --csv --plot
  tilewise bench generate | engine | churn
                      text end to end; a server's latencies under load, beside transformers, vLLM and
                      SGLang; what a step costs the host while sequences come and go; --out, --csv
  tilewise sweep      lists for every dimension into a CSV, with plots; Ctrl-C and --resume
  tilewise report     this machine measured, as a page to look at and send; -o --quick --against OLD.json
  tilewise schedule make | show | check
                      block-sparse patterns as files
  tilewise testdata make | check
                      cases with the float64 oracle's output as files, for kernels written anywhere
  tilewise ladder     the teaching ladder: kernels one idea apart, timed on a GPU; --emulate counts
                      what they cost on any machine; --rung NAME --plot PATH --profile --json
  tilewise kernels    registers, spills, shared memory and occupancy of every kernel; needs no GPU
  tilewise tune       what is fastest on this card, measured into a table that later calls look up;
                      prefill | decode | sparse | mla | all, --budget --shapes --dtype
  tilewise warm       compile ahead on all cores what a model or shapes need; without a GPU with --arch;
                      --model CONFIG | --shapes B,N,Hq,Hkv,D
  tilewise cache show | clear | export | import
                      the folder of compiled kernels: what it holds, emptying it, taking it along
  tilewise doctor     what is installed, what will run, what is missing and how to get it

Try:
  tilewise bench --seq 2048 --heads 8 --hdim 128 --causal
  tilewise sweep --seq 1024 2048 --hdim 64 128 --sparsity 0 0.5 0.9 --csv sweep.csv --plot
  tilewise schedule make random --seq 4096 --sparsity 0.9 -o my.npz && tilewise bench --sched my.npz

Every command has --help. In Python: import tilewise; help(tilewise.attention)
"""

app = typer.Typer(
    help="Attention kernels for LLM inference.",
    add_completion=False,
    invoke_without_command=True,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
)
schedule_app = typer.Typer(help="Block-sparse patterns as files.", no_args_is_help=False)
testdata_app = typer.Typer(help="Cases with the oracle's output as files.", no_args_is_help=False)
cache_app = typer.Typer(help="The folder of compiled kernels.", no_args_is_help=False)
app.add_typer(commands.bench, name="bench")
app.command("sweep")(commands.sweep)
app.command("report")(report_command.report)
app.command("ladder")(ladder_commands.ladder)
app.command("kernels")(ladder_commands.kernels)
app.command("tune")(tune_command.tune)
app.command("warm")(warm_command.warm)
app.add_typer(schedule_app, name="schedule")
app.add_typer(testdata_app, name="testdata")
app.add_typer(cache_app, name="cache")

Head = Annotated[int, typer.Option(help="Which head, for a schedule that has one pattern for each.", min=0)]


@app.callback()
def overview(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """What Tilewise can do."""
    if version:
        from importlib.metadata import version as of  # the package itself would import torch to tell

        typer.echo(f"tilewise {of('tilewise')}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(OVERVIEW, nl=False)


@app.command("doctor")
def doctor() -> None:
    """What is installed, which device is here, what will run on it, what is missing and how to get it."""
    from rich.markup import escape

    from .bench.tables import console
    from .doctor import GOOD, MISSING, NOTE, examine

    with console(stderr=True).status("looking") as status:
        found = examine(lambda what: status.update(escape(what)))
    out = console()
    marks = {GOOD: "[green]✓[/]", NOTE: "[dim]·[/]", MISSING: "[yellow]![/]"}
    section = ""
    for finding in found:
        if finding.section != section:
            section = finding.section
            out.print(f"[bold]{section}[/]")
        remedy = f"  [dim]get it: {escape(finding.remedy)}[/]" if finding.remedy else ""
        out.print(f"  {marks[finding.state]} {finding.name:<17} {escape(finding.text)}{remedy}", soft_wrap=True)


# ---- schedules --------------------------------------------------------------------------------------------------


@schedule_app.command("make")
def make_schedule(
    kind: Annotated[str, typer.Argument(help="random, banded, causal, strided or full.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to: .npz, or .npy for one run a row.")],
    seq: Annotated[int, typer.Option(help="Query tokens, and key tokens unless --seq-k is given.", min=1)],
    seq_k: Annotated[int | None, typer.Option(help="Key tokens.", min=1)] = None,
    block: Annotated[int, typer.Option(help="Block size, 16 to 128.")] = 64,
    block_k: Annotated[int | None, typer.Option(help="Block size along the keys.", show_default="as --block")] = None,
    sparsity: Annotated[float, typer.Option(help="random: share of blocks left out.")] = 0.9,
    seed: Annotated[int, typer.Option(help="random: the same seed gives the same pattern.")] = 0,
    heads: Annotated[int | None, typer.Option(help="random, full: a pattern for each of so many heads.")] = None,
    left: Annotated[int | None, typer.Option(help="banded: tokens seen to the left.")] = None,
    right: Annotated[int | None, typer.Option(help="banded: tokens seen to the right.")] = None,
    stride: Annotated[int, typer.Option(help="strided: every so many block columns.")] = 8,
    local: Annotated[int, typer.Option(help="strided: blocks to each side of the diagonal.")] = 1,
) -> None:
    """Make a schedule file: tilewise schedule make random --seq 4096 --sparsity 0.9 -o my.npz"""
    from tilewise.plan.schedule import BlockSchedule

    options: dict[str, dict[str, Any]] = {
        "random": {"sparsity": sparsity, "seed": seed, "heads": heads},
        "banded": {"left": left, "right": right},
        "causal": {},
        "strided": {"stride": stride, "local": local},
        "full": {"heads": heads},
    }
    if kind not in options:
        raise typer.BadParameter(f"{kind!r} is not one of {', '.join(options)}", param_hint="KIND")
    if kind == "banded" and left is None and right is None:
        raise typer.BadParameter("a banded schedule needs --left, --right or both, in tokens")
    with commands.usage():
        maker = getattr(BlockSchedule, kind)
        schedule = maker(seq, seq if seq_k is None else seq_k, block_q=block, block_k=block_k or block, **options[kind])
        written(output, schedule.save)
    typer.echo(f"{output}: {schedule!r}")


SeqOfFile = Annotated[int | None, typer.Option(help="Tokens, where a .npy does not say them.", min=1)]
BlockOfFile = Annotated[
    int | None, typer.Option(help="Block size, where a .npy does not say it.", show_default="the file's, or 16")
]


@schedule_app.command("show")
def show_schedule(
    file: Path,
    head: Head = 0,
    width: Annotated[int, typer.Option(help="Characters for the keys.", min=1)] = 64,
    png: Annotated[Path | None, typer.Option(help="Draw it there instead: .png or .svg.")] = None,
    seq: SeqOfFile = None,
    block: BlockOfFile = None,
) -> None:
    """Show a schedule file as text, or draw it."""
    schedule = _load_schedule(file, seq, block)
    if png is None:
        typer.echo(schedule.show(head, width))
    else:
        written(png, lambda path: schedule.draw(path, head))
        typer.echo(f"drew {png}")


@schedule_app.command("check")
def check_schedule(
    file: Path,
    seq: SeqOfFile = None,
    heads: Annotated[int | None, typer.Option(help="Must fit so many query heads.", min=1)] = None,
    block: BlockOfFile = None,
) -> None:
    """Check that a file is a sound schedule, and fits --seq tokens and --heads heads if given."""
    schedule = _load_schedule(file, seq, block)
    schedule.check(
        schedule.seqlen_q if seq is None else seq,
        schedule.seqlen_k if seq is None else seq,
        (schedule.heads or 1) if heads is None else heads,
    )
    typer.echo(f"{file} is sound: {schedule!r}")


def _load_schedule(file: Path, seq: int | None, block: int | None) -> Any:
    from tilewise.plan.schedule import BlockSchedule

    return BlockSchedule.load(file, seqlen_q=seq, seqlen_k=seq, block_q=block, block_k=block)


# ---- test data --------------------------------------------------------------------------------------------------


@testdata_app.command("make")
def make_testdata(
    pattern: Annotated[
        str, typer.Argument(help="randn, small, ones, uniform, large, positive, qk_test or v_orientation.")
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A file or a folder.", show_default=".")] = None,
    form: Annotated[str, typer.Option(help="npz; text: flat (q k v o of one head) or chunks (shared keys).")] = "npz",
    seq: Annotated[int, typer.Option(help="Key tokens of each sequence.")] = 256,
    hdim: Annotated[int, typer.Option(help="Head dimension.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 1,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.", show_default="as many as heads")] = None,
    queries: Annotated[int | None, typer.Option(help="Query tokens of a sequence.", show_default="seq")] = None,
    causal: Annotated[bool, typer.Option(help="Query i sees keys up to i.")] = False,
    prefix: Annotated[int, typer.Option(help="Tokens before them that all sequences share.")] = 0,
    chunk: Annotated[int, typer.Option(help="chunks: tokens of a chunk.")] = 64,
    dtype: Annotated[str, typer.Option(help="What the inputs are exact in: float32, float16 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="The same seed gives the same case.")] = 42,
) -> None:
    """Write a case with the float64 oracle's output: tilewise testdata make randn --seq 2048 --hdim 128 --causal

    In the chunks form every one of the --batch sequences has one query, and all see all --seq keys.
    """
    from tilewise import checks
    from tilewise.learn import testdata

    with commands.usage():
        if form == "chunks":  # its sequences are rows over the same keys
            queries, batch = batch, 1
        case = testdata.make(
            pattern, batch=batch, seq=seq, heads=heads, kv_heads=kv_heads, hdim=hdim, causal=causal, dtype=dtype,
            prefix=prefix, queries=queries, seed=seed,
        )  # fmt: skip
        checks.choice("form", form, testdata.FORMS)
        path = output or Path()
        if path.is_dir():
            path /= testdata.file_name(case, form, chunk)
        written(path, lambda path: testdata.save(case, path, form, chunk=chunk))
    typer.echo(str(path))


@testdata_app.command("check")
def check_testdata(
    files: list[Path],
    dtype: Annotated[str | None, typer.Option(help="Compute in this dtype.", show_default="the file's")] = None,
) -> None:
    """Compute the cases in files with Tilewise on the CPU and compare every element with the files' o."""
    from tilewise.learn import testdata

    from .bench.tables import console

    out = console()
    good = True
    for file in files:
        for case in testdata.load(file):
            with commands.usage():
                report = testdata.check(case, dtype=dtype)
            good &= report.ok
            style, word = ("green", "ok   ") if report.ok else ("bold red", "WRONG")
            out.print(word, style=style, end=" ")
            out.print(
                f"{case.name or file.name}: max error {report.max_error:.3g}, relative {report.relative_error:.3g}, "
                f"allowed {report.allowed:.3g} in {report.dtype}",
                soft_wrap=True,
                markup=False,
            )
            if not report.file.ok:
                out.print(
                    f"      the file's own output is not what its inputs give: {report.file.reason}", markup=False
                )
            if not report.kernel.ok:
                out.print(f"      Tilewise differs from the oracle: {report.kernel.reason}", markup=False)
    if not good:
        raise typer.Exit(1)


# ---- the cache --------------------------------------------------------------------------------------------------


@cache_app.command("show")
def show_cache(
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, in bytes.")] = False,
) -> None:
    """Where compiled kernels are kept, how many of each kind, what they take and how much they may."""
    from tilewise.compiler import cache

    state = cache.show()
    if json:
        record = {
            "root": str(state.root) if state.root else None,
            "kinds": {kind: {"entries": held.entries, "bytes": held.bytes} for kind, held in state.kinds.items()},
            "entries": state.entries,
            "bytes": state.bytes,
            "limit": int(state.limit) if math.isfinite(state.limit) else None,
        }
        typer.echo(jsonlib.dumps(record, indent=1))
        return
    from rich.table import Table

    from .bench.tables import console

    out = console()
    table = Table(box=None, pad_edge=False)
    for name in ("kind", "entries", "MiB"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for kind, held in state.kinds.items():
        table.add_row(kind, str(held.entries), _mib(held.bytes))
    table.add_row("all", str(state.entries), _mib(state.bytes), style="bold")
    where = state.root or "no folder, because you have no home: set TILEWISE_CACHE to one"
    out.print(f"{where}", soft_wrap=True, markup=False)
    out.print(table)
    most = f"{_mib(state.limit)} MiB" if math.isfinite(state.limit) else "none"
    out.print(f"limit {most} (TILEWISE_CACHE_LIMIT); unused ones go first", style="dim", soft_wrap=True)


@cache_app.command("clear")
def clear_cache(
    kind: Annotated[str | None, typer.Option(help="Only these: cubin or emulator.", show_default="all")] = None,
) -> None:
    """Remove compiled kernels; the next use compiles them again."""
    from tilewise.compiler import cache

    if kind is not None and kind not in cache.KINDS:
        raise typer.BadParameter(f"{kind!r} is not one of {', '.join(cache.KINDS)}", param_hint="--kind")
    entries, freed = cache.clear(kind)
    typer.echo(f"removed {entries} {'entry' if entries == 1 else 'entries'}, {_mib(freed)} MiB")


@cache_app.command("export")
def export_cache(
    file: Annotated[Path, typer.Argument(help="Where to, a .tar.gz.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write the compiled kernels into a file, for machines with the same cards and versions: tilewise cache import."""
    from tilewise.compiler import archive

    entries, size = written(file, lambda path: archive.write(path, force=force))
    typer.echo(f"{file}: {entries} {'kernel' if entries == 1 else 'kernels'}, {_mib(size)} MiB before compression")


@cache_app.command("import")
def import_cache(
    file: Annotated[Path, typer.Argument(help="What tilewise cache export wrote.")],
) -> None:
    """Take compiled kernels from a file. Each is checked; what is there already stays."""
    from tilewise.compiler import archive

    done = archive.read(file)
    typer.echo(f"{done.added} added, {done.there} were there, {len(done.refused)} refused")
    for line in done.refused:
        typer.echo(f"refused {line}")
    if done.refused:
        raise typer.Exit(1)


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f}"


# ---- the door ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code. Whatever goes wrong is one line and a hint on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["sweep"]:
        words = commands.spread_lists(words)
    terminal.take_any_letter()
    app.rich_markup_mode = None if terminal.plain() else "rich"  # of help
    command = typer.main.get_command(app)
    try:
        code = command.main(args=words, prog_name="tilewise", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Abort:  # what some versions of the parser make of Ctrl-C; the others return 130 themselves
        return 130
    except Exception as error:
        if os.environ.get("TILEWISE_DEBUG"):
            raise
        return _explain(error, words)


COMMANDS = (
    *("bench", "sweep", "report", "ladder", "kernels", "schedule", "testdata", "cache", "doctor", "tune", "warm"),
    *(
        "prefix",
        "decode",
        "sparse",
        "variants",
        "cards",
        "train",
        "prefill",
        "serve",
        "generate",
        "engine",
        "churn",
        "mla",
        "make",
        "show",
        "check",
        "clear",
        "export",
        "import",
    ),
)


def _explain(error: Exception, words: list[str]) -> int:
    """One line and a hint for an error; its exit code. What is none of the expected kinds is a bug and says so."""
    known = [word for word in words[:2] if word in COMMANDS]
    if hasattr(error, "format_message"):  # the parser's own, and BadParameter
        return _say(error.format_message(), f"tilewise {' '.join([*known, '--help'])}", 2)
    if isinstance(error, FileExistsError):
        return _say(str(error), "or give another path", 1)
    if isinstance(error, OSError):
        what = f"{error.strerror}: {error.filename}" if error.filename and error.strerror else str(error)
        return _say(what, "check the path, its folder and your rights there", 1)
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return _say(f"out of memory: {error}", "make the problem smaller: --seq, --batch or --heads", 1)
    if isinstance(error, ImportError):
        return _say(str(error), "tilewise doctor says what is missing and how to get it", 1)
    if isinstance(error, NotImplementedError):
        return _say(str(error), "tilewise doctor says what runs here", 1)
    from .kvcache import OutOfPages

    if isinstance(error, (ValueError, TypeError, OutOfPages)):
        return _say(str(error), f"tilewise {' '.join([*known, '--help'])}", 1)
    kind = type(error).__name__
    return _say(f"{kind}: {error}", "this is a bug in Tilewise: TILEWISE_DEBUG=1 shows where", 1)


def _say(what: str, hint: str, code: int) -> int:
    print(f"error: {' '.join(what.split())}", file=sys.stderr)
    print(f"hint: {hint}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
