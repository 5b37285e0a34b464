"""The commands `tilewise bench …` and `tilewise sweep`. What is slow to import is imported when a command runs."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    AnyDevice,
    AnyDtype,
    Backend,
    Batch,
    Block,
    Causal,
    Device,
    Dtype,
    Force,
    Hdim,
    Heads,
    Json,
    KvFormat,
    KvHeads,
    Lengths,
    Loops,
    Only,
    OwnSeq,
    PageSize,
    Plot,
    Prefix,
    Resume,
    Sched,
    Seq,
    SheetOptions,
    Sparsity,
    TableCsv,
    TableDevice,
    Tokens,
    Window,
    instead_of_none,
    usage,
)
from .show import show_bars, show_point, show_rows
from .sweep_command import spread_lists, sweep

if TYPE_CHECKING:
    from .prefill import Outcome
    from .workloads import Point

__all__ = ["bench", "spread_lists", "sweep", "usage"]

AFTER_SUBCOMMAND = "the other options belong after the subcommand: tilewise bench prefix --heads 32"

bench = typer.Typer(
    help="Measure one problem, or without options the bars: Tilewise beside torch in under two minutes.",
    invoke_without_command=True,
    no_args_is_help=False,
)


@bench.callback()
@instead_of_none(seq="1024", heads="8", kv_heads="as many as heads", hdim="128", batch="1", dtype="float32")
def bench_point(
    ctx: typer.Context,
    seq: OwnSeq = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    hdim: Hdim = None,
    batch: Batch = None,
    dtype: AnyDtype = None,
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
        show_bars(loops, json)
        return
    show_point(_point(given), loops, json)


@bench.command("prefix")
@instead_of_none(kv_format="as --dtype")
def bench_prefix(
    batch: Batch = 16,
    prefix: Prefix = 2048,
    seq: OwnSeq = 128,
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
    show_point(_point(given, "prefix"), loops, json)


@bench.command("decode")
@instead_of_none(kv_format="as --dtype")
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
    show_point(_point(given, "decode"), loops, json)


@bench.command("sparse")
@instead_of_none(
    seq="4096", sparsity="0.9", heads="8", kv_heads="as many as heads", hdim="128", batch="1", dtype="float32"
)
def bench_sparse(
    seq: Seq = None,
    sparsity: Sparsity = None,
    block: Block = None,
    sched: Sched = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    hdim: Hdim = None,
    batch: Batch = None,
    dtype: Dtype = None,
    causal: Causal = None,
    backend: Backend = None,
    only: Only = "",
    csv: TableCsv = None,
    resume: Resume = False,
    force: Force = False,
    device: AnyDevice = None,
    loops: Loops = None,
    json: Json = False,
) -> None:
    """Block-sparse attention: on a GPU a table beside dense and FlexAttention, or the problem that is asked for.

    The table takes under two minutes on an H200; --only, --csv, --resume and --force are about it. Everywhere else,
    and with options of a problem: 4096 tokens at 90% sparsity, or what is asked for, or a schedule file.
    """
    given = _given(
        seq=seq, sparsity=sparsity, block=block, sched=sched, heads=heads, kv_heads=kv_heads, hdim=hdim, batch=batch,
        dtype=dtype, causal=causal, backend=backend,
    )  # fmt: skip
    sheet = SheetOptions(csv, False, resume, force)
    where = _device(device)
    if not given and (where != "cpu" or only or any(sheet)):
        from . import plots, sparse

        title = (
            "Block-sparse attention on {machine}: TFLOP/s over what is kept, warmed up, kernels alternated, bfloat16"
        )
        show_rows(sparse, title, sparse.notes, plots.draw, only, sheet, where, loops, json)
        return
    if only or any(sheet):
        raise typer.BadParameter(
            "--only, --csv, --resume and --force are about the table: leave out the problem's options"
        )
    if not sched:
        given = {"seq": 4096, "sparsity": 0.9, **given}
    given = {"heads": 8, **given, "device": device or "cpu"}
    show_point(_point(given, "sparse"), loops, json)


@bench.command("variants")
def bench_variants(
    only: Only = "",
    csv: TableCsv = None,
    resume: Resume = False,
    force: Force = False,
    device: AnyDevice = None,
    loops: Loops = None,
    json: Json = False,
) -> None:
    """Masks and scores as functions: beside the same built in, and beside FlexAttention, row by row with the bars.

    Under two minutes on an H200, most of which FlexAttention takes to compile; on a CPU smaller problems without bars.
    """
    from . import plots, variants

    where = _device(device)
    size = "bfloat16" if where != "cpu" else "float32"
    title = f"Functions on {{machine}}: TFLOP/s over what is seen, warmed up, kernels alternated, {size}"
    sheet = SheetOptions(csv, False, resume, force)
    show_rows(variants, title, variants.notes, plots.draw, only, sheet, where, loops, json)


@bench.command("train")
def bench_train(
    only: Only = "",
    csv: TableCsv = None,
    resume: Resume = False,
    force: Force = False,
    device: AnyDevice = None,
    loops: Loops = None,
    json: Json = False,
) -> None:
    """Backward passes beside cuDNN and FlashAttention, steps over trees of tokens beside the same unshared, with bars.

    Under three minutes on an H200; on a CPU smaller problems beside torch's own backward, with bars of their own.
    """
    from . import plots, train

    title = "Training on {machine}: TFLOP/s over what is seen, warmed up, kernels alternated, bfloat16 unless said"
    sheet = SheetOptions(csv, False, resume, force)
    show_rows(train, title, train.notes, plots.draw, only, sheet, _device(device), loops, json)


@bench.command("cards")
def bench_cards(
    only: Only = "",
    csv: TableCsv = None,
    resume: Resume = False,
    force: Force = False,
    device: AnyDevice = None,
    loops: Loops = None,
    json: Json = False,
) -> None:
    """The kernels of older cards on the GPU at hand, beside torch's FlashAttention-2, row by row with the bars.

    Also float32 beside torch's kernels for it. Under two minutes on an H200; on a CPU smaller problems without bars.
    """
    from . import cards, plots

    title = "As older cards on {machine}: TFLOP/s, warmed up, kernels alternated, bfloat16 unless said"
    sheet = SheetOptions(csv, False, resume, force)
    show_rows(cards, title, cards.notes, plots.draw, only, sheet, _device(device), loops, json)


@bench.command("prefill")
def bench_prefill(
    only: Only = "",
    csv: TableCsv = None,
    plot: Plot = False,
    resume: Resume = False,
    force: Force = False,
    device: TableDevice = None,
    loops: Loops = None,
    json: Json = False,
) -> None:
    """Prefill on a GPU: Tilewise, cuDNN and FlashAttention-3, warmed up and alternated, row by row with the bars.

    Under four minutes on an H200. Ctrl-C keeps what is done in the CSV.
    """
    from . import peers, plots, prefill

    def notes(outcomes: Sequence[Outcome]) -> list[str]:
        missing = peers.find(peers.FA3)
        against = "bars against the better of cuDNN and it are not judged"
        return [f"{peers.FA3}: {missing}; {against}"] if isinstance(missing, str) else []

    title = "Prefill on {machine}: TFLOP/s, warmed up, kernels alternated, bfloat16"
    sheet = SheetOptions(csv, plot, resume, force)
    show_rows(prefill, title, notes, plots.draw, only, sheet, _gpu("prefill", device), loops, json)


@bench.command("serve")
def bench_serve(
    only: Only = "",
    csv: TableCsv = None,
    plot: Plot = False,
    resume: Resume = False,
    force: Force = False,
    device: TableDevice = None,
    loops: Loops = None,
    json: Json = False,
) -> None:
    """Decode and shared prefixes on a GPU: Tilewise, cuDNN and FlashInfer from graphs, row by row with the bars.

    Under two minutes on an H200, of which it takes 20 GB of memory. Ctrl-C keeps what is done in the CSV.
    """
    from . import serve, serve_plots

    title = "Decode on {machine}: µs, graph replay, L2 flushed, kernels alternated, bfloat16"
    sheet = SheetOptions(csv, plot, resume, force)
    show_rows(serve, title, serve.notes, serve_plots.draw, only, sheet, _gpu("serve", device), loops, json)


@bench.command("mla")
def bench_mla(
    only: Only = "",
    csv: TableCsv = None,
    resume: Resume = False,
    force: Force = False,
    device: TableDevice = None,
    loops: Loops = None,
    json: Json = False,
) -> None:
    """Decode over rows that are keys and values at once (MLA) on a GPU, row by row with the bars and the floor.

    A minute on an H200, of which it takes 4 GB of memory. Ctrl-C keeps what is done in the CSV.
    """
    from . import mla, plots

    title = "MLA decode on {machine}: µs, graph replay, L2 flushed, kernels alternated, bfloat16"
    sheet = SheetOptions(csv, False, resume, force)
    show_rows(mla, title, mla.notes, plots.draw, only, sheet, _gpu("mla", device), loops, json)


@bench.command("churn")
def bench_churn(
    only: Only = "",
    csv: TableCsv = None,
    resume: Resume = False,
    force: Force = False,
    device: AnyDevice = None,
    loops: Loops = None,
    json: Json = False,
) -> None:
    """What a decode step costs the host while sequences come and go, and the planner on a GPU, with the bars.

    Seconds. On a CPU, where plans are made anew in each step, only the first plan has a bar.
    """
    from . import churn, plots

    title = "A step's host time on {machine}: µs, medians"
    sheet = SheetOptions(csv, False, resume, force)
    show_rows(churn, title, churn.notes, plots.draw, only, sheet, _device(device), loops, json)


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
    generate.require_transformers()
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


@bench.command("engine")
def bench_engine(
    device: AnyDevice = None,
    config: Annotated[str | None, typer.Option(help="small or 8b.", show_default="small; on cuda 8b")] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests of each run.", show_default="24; on cuda 256", min=2)
    ] = None,
    loads: Annotated[str, typer.Option(help="Shares of the capacity at which requests arrive.")] = "0.3,0.5,0.7,0.9",
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Engine(compile=True).", show_default="on cuda")
    ] = None,
    token_budget: Annotated[
        int | None, typer.Option(help="Tokens of a step under load.", show_default="64; on cuda 512", min=1)
    ] = None,
    only: Annotated[
        str, typer.Option(help="Only step, churn or load, or several of them: step,load.", metavar="TEXT")
    ] = "",
    peers: Annotated[bool, typer.Option(help="Measure other servers that are installed, too.")] = True,
    peer_seconds: Annotated[
        float, typer.Option(help="Of each run of another server; one that takes longer is a note.", min=1)
    ] = 120.0,
    out: Annotated[Path | None, typer.Option(help="Write a CSV, the table and the plot into this folder.")] = None,
    json: Json = False,
) -> None:
    """Serve as an engine does: a decode step, a batch that comes and goes, and latencies under Poisson arrivals.

    Beside transformers' continuous batching, and vLLM and SGLang where they are installed.
    """
    from . import engine, engine_tables, generate, tables

    with usage():
        shares = [float(load) for load in loads.split(",")]
        problem = engine.case(
            _device(device), config, requests=requests, loads=shares, compile=compile, token_budget=token_budget,
            only=only, peer_seconds=peer_seconds,
        )  # fmt: skip
    generate.require_transformers()
    busy = tables.busy_note()
    with tables.console(stderr=True).status(problem.title) as status:
        outcome = engine.run(problem, status.update, **({} if peers else {"peers": ()}))
    if json:
        typer.echo(jsonlib.dumps(engine_tables.records(outcome), indent=1))
    else:
        typer.echo(engine_tables.text(outcome))
        if busy:
            typer.echo(busy)
    for path in engine_tables.save(outcome, out) if out else ():
        typer.echo(f"wrote {path}", err=True)


def _device(asked: str | None) -> str:
    """The device asked for, or the GPU where there is one."""
    if asked is not None:
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _gpu(command: str, asked: str | None) -> str:
    """The device asked for, or the GPU that a table of GPU kernels is about."""
    if asked is None and _device(None) != "cuda":
        raise NotImplementedError(
            f"bench {command} needs a GPU, and torch sees none here; `tilewise bench` measures on this CPU"
        )
    return asked or "cuda"


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


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
