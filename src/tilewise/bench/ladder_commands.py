"""The commands `tilewise ladder` and `tilewise kernels`. What is slow to import is imported when a command runs."""

from __future__ import annotations

import json as jsonlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .ladder_tables import counters_table, draw, times_table, used_share
from .options import usage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from tilewise.compiler import ResourceRow
    from tilewise.compiler.spec import KernelSpec

    from .rungs import Row, Shape, Step

# What is run if nothing else is asked for: what shows a card at work, and what the emulator does in seconds per rung.
ON_CARD = {"batch": 4, "seq": 4096, "heads": 16, "hdim": 128}
EMULATED = {"batch": 1, "seq": 128, "heads": 2, "hdim": 64}

Rungs = Annotated[list[str] | None, typer.Option("--rung", help="Only this rung; may be given again.")]


def _size(text: str, name: str) -> Any:
    default = f"{ON_CARD[name]}, emulated {EMULATED[name]}"
    return typer.Option(help=text, min=1, show_default=default)


def ladder(
    rung: Rungs = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Count in the emulator instead of timing; so without a GPU.")
    ] = False,
    seq: Annotated[int | None, _size("Tokens.", "seq")] = None,
    heads: Annotated[int | None, _size("Heads.", "heads")] = None,
    batch: Annotated[int | None, _size("Sequences.", "batch")] = None,
    hdim: Annotated[int | None, _size("Head dimension.", "hdim")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "bfloat16",
    causal: Annotated[bool, typer.Option(help="Query i sees keys up to i.")] = False,
    loops: Annotated[int | None, typer.Option(help="Times to run each.", show_default="as time allows", min=1)] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it there as well: .png or .svg.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Run the rung under ncu instead.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of a table.")] = False,
) -> None:
    """The teaching ladder: kernels that differ by one idea each, side by side and beside torch.

    On a GPU the times; with --emulate, or without a GPU, what each rung costs: memory sectors, bank conflicts, tensor
    and scalar operations. A rung that is not written for the dtype or head dimension runs in the nearest it is.
    """
    import torch

    from tilewise.plan import pictures

    from . import rungs, tables
    from .measure import FAILED, WRONG

    counted = emulate or not torch.cuda.is_available()
    given = {"batch": batch, "seq": seq, "heads": heads, "hdim": hdim}
    sizes = {**(EMULATED if counted else ON_CARD), **{name: n for name, n in given.items() if n is not None}}
    with usage():
        shape = rungs.Shape(**sizes, dtype=dtype, causal=causal)
        chosen = rungs.choose(rung or [])
        if plot is not None:
            pictures.picture_path(plot)
    if profile:
        _profile(chosen, shape)
        return
    notes = []
    if counted:
        left_out = [step.name for step in chosen if step.rung is None]
        chosen = [step for step in chosen if step.rung is not None]
        if not chosen:
            raise typer.BadParameter(
                f"{', '.join(left_out)}: no CUDA C++, so there is nothing to count; a GPU times it",
                param_hint="--rung",
            )
        if left_out:
            notes.append(f"{', '.join(left_out)}: no CUDA C++, so there is nothing to count; a GPU times them")
        if not emulate:
            notes.append("no GPU here: counted in the emulator, as --emulate does; a GPU gives times")
    with tables.console(stderr=True).status("starting") as status:

        def before(name: str) -> None:
            status.update(f"{name}, {shape.title}")

        if counted:
            rows = _count(chosen, shape, before)
        else:
            device = torch.device("cuda", torch.cuda.current_device())
            rows = rungs.measure(chosen, shape, device, loops, before)
            notes.append(f"host cost of a planned launch: {rungs.launch_cost(device):.1f} µs")
    if plot is not None:
        from .options import written

        written(plot, lambda path: draw(rows, shape, path))
        notes.append(f"drew {plot}")
    if json:
        typer.echo(jsonlib.dumps([_record(row, shape) for row in rows], indent=1))
    else:
        out = tables.console()
        out.print(counters_table(rows, shape) if counted else times_table(rows, shape, torch.cuda.get_device_name()))
        for line in [*_notes(rows, rungs.INT8_ROWS), *(_ideas(rows) if rung else []), *notes]:
            out.print(line, style="dim", soft_wrap=True, markup=False)
    if any(row.status in (WRONG, FAILED) for row in rows):
        raise typer.Exit(1)


def _count(chosen: Sequence[Step], shape: Shape, before: Any) -> list[Row]:
    from . import rungs

    try:
        return rungs.count(chosen, shape, before)
    except RuntimeError as error:  # no C++ compiler
        raise NotImplementedError(str(error)) from error


def _record(row: Row, shape: Shape) -> dict[str, Any]:
    """A row as plain values: the problem, the verdict, and the times or the counters."""
    made: dict[str, Any] = {
        "rung": row.name, "idea": row.idea, "batch": shape.batch, "seq": shape.seq, "heads": shape.heads,
        "hdim": row.hdim, "dtype": row.dtype, "causal": shape.causal, "status": row.status, "reason": row.reason,
        "error": row.error, "allowed": row.allowed,
    }  # fmt: skip
    if row.timing is not None:
        made |= {
            "median_ms": row.timing.median * 1e3, "p20_ms": row.timing.p20 * 1e3, "p80_ms": row.timing.p80 * 1e3,
            "loops": row.timing.loops, "tflops": row.tflops, "over_previous": row.over_previous,
            "over_sdpa": row.over_sdpa, "over_fa2": row.over_fa2,
        }  # fmt: skip
    if (counted := row.counters) is not None:
        made |= {
            **asdict(counted),
            "sectors_per_request": counted.sectors_per_request,
            "sectors_used": used_share(counted),
            "bank_conflicts": counted.bank_conflicts,
            "matrix_conflicts": counted.matrix_conflicts,
        }
    return made


def _notes(rows: Sequence[Row], int8_rows: Sequence[str]) -> list[str]:
    lines = [f"{row.name}: {row.status}, {row.reason}" for row in rows if row.status != "ok"]
    rounded = [row.name for row in rows if row.name in int8_rows]
    if rounded:
        lines.append(f"{', '.join(rounded)}: judged as exact attention over rows rounded to int8")
    return lines


def _ideas(rows: Sequence[Row]) -> list[str]:
    return [f"{row.name}: {row.idea}" for row in rows if row.idea]


# ---- ncu --------------------------------------------------------------------------------------------------------

SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "Occupancy", "LaunchStats",
            "WarpStateStats")  # fmt: skip


def _profile(chosen: Sequence[Step], shape: Shape) -> None:
    """Run each rung alone under Nsight Compute, whose report goes to the terminal."""
    import torch

    ncu = shutil.which("ncu")
    if ncu is None:
        raise NotImplementedError(
            "--profile needs Nsight Compute, and there is no ncu here; --emulate counts without it"
        )
    if not torch.cuda.is_available():
        raise NotImplementedError("--profile needs a GPU, and there is none here; --emulate counts without one")
    options = [f"--{name}={getattr(shape, name)}" for name in ("batch", "seq", "heads", "hdim", "dtype")]
    options += ["--causal"] if shape.causal else []
    for step in chosen:
        if step.rung is None and len(chosen) > 1:
            continue
        if step.name == "torch_tiled":
            raise typer.BadParameter("torch_tiled is many kernels of torch's, none of them ours", param_hint="--rung")
        # numba's kernels have a mangled name; a rung's is its own.
        kernel = f"regex:^{step.name}$" if step.rung is not None else "regex:attention"
        command = [ncu, "--kernel-name", kernel, "--launch-count", "1"]
        command += [word for section in SECTIONS for word in ("--section", section)]
        command += [sys.executable, "-m", "tilewise.cli", "ladder", "--rung", step.name, "--loops", "1", *options]
        done = subprocess.run(command)
        if done.returncode:
            raise typer.Exit(done.returncode)


# ---- kernels ----------------------------------------------------------------------------------------------------


def kernels(
    kernel: Annotated[list[str] | None, typer.Option("--kernel", help="Only this one; may be given again.")] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", help="Only this one; may be given again.", show_default="sm_80 to sm_121"),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="In every dtype and head dimension, not only bfloat16 and 128 or the nearest.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of a table.")] = False,
) -> None:
    """Compile every kernel for every architecture that it is for and say what it costs. Needs no GPU.

    Kernels by TMA and wgmma are for sm_90a alone; others have a shape on each card that fits its shared memory.
    Registers, spills, stack and shared memory are what ptxas says; occupancy is the share of a multiprocessor's warps
    that can be there at once.
    """
    from tilewise import compiler

    from . import tables

    for name in arch or []:
        if name not in compiler.ARCHS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(compiler.ARCHS)}", param_hint="--arch")
    archs = [name for name in compiler.ARCHS if not arch or name in arch]
    with usage():
        pairs = specs(kernel or [], archs, every=every)
    if not pairs:
        raise typer.BadParameter(
            f"{', '.join(kernel or [])}: there is nothing to compile for {', '.join(archs)}", param_hint="--arch"
        )
    rows = _resources(pairs, tables.console(stderr=True))
    if json:
        typer.echo(jsonlib.dumps([_resource_record(spec, row) for (spec, _), row in zip(pairs, rows, strict=True)],
                                 indent=1))  # fmt: skip
    else:
        out = tables.console()
        for text in _resource_lines([spec for spec, _ in pairs], rows):
            out.print(text, soft_wrap=True)
        lines = [f"{row.kernel}, {row.arch}: {_first_line(row.error)}" for row in rows if row.error]
        lines += [f"{row.kernel}, {row.arch}: {warning}" for row in rows for warning in row.serialised]
        if not every:
            lines.append("one dtype and head dimension of each; --all compiles every one that there is")
        for line in lines:
            out.print(line, style="dim", soft_wrap=True, markup=False)
    if any(row.error or (row.product and _faults(row)) for row in rows):
        raise typer.Exit(1)


def specs(names: Sequence[str], archs: Sequence[str], *, every: bool = False) -> list[tuple[KernelSpec, str]]:
    """The kernels of these names, all if none is named, each with every architecture of `archs` that it is for.

    In bfloat16 and head dimension 128 or the nearest, or in `every` dtype and head dimension it is written for. The
    product's come last, as each card gets them.
    """
    from tilewise.arch import ARCHS, hopper
    from tilewise.gpu import (
        append,
        backward,
        choice,
        decode_kernels,
        decode_small,
        merge_rows,
        mla_kernels,
        mla_mma,
        planner,
        schedules,
        tilings,
        widen,
    )

    from .rungs import Shape, apart, steps
    from .workloads import DTYPES

    rungs = [*(step for step in steps() if step.rung is not None), apart()]
    product: dict[KernelSpec, list[str]] = {}
    for card in ARCHS:
        rooms = (tilings, backward, decode_kernels, decode_small, mla_kernels, mla_mma)
        of_card = [spec for room in rooms for spec in room.specs(card, every=every)]
        others = [spec for room in (append, widen, merge_rows, schedules, choice) for spec in room.specs(every=every)]
        for spec in (*of_card, *others, *planner.specs()):
            product.setdefault(spec, []).append(card)
    known = [*(step.name for step in rungs), *dict.fromkeys(spec.name for spec in product)]
    for name in names:
        if name not in known:
            raise ValueError(f"there is no kernel {name!r}; the kernels are {', '.join(known)}")
    usual = Shape(1, 1, 1, 128, "bfloat16", False)
    found: list[tuple[KernelSpec, Sequence[str]]] = []
    for step in rungs:
        if step.rung is not None:
            served = [(dtype, hdim) for dtype in step.dtypes for hdim in step.head_dims]
            its = [arch for arch in ARCHS if hopper(arch) or not step.rung.hopper]
            for dtype, hdim in served if every else [step.nearest(usual)]:
                found.append((step.rung.spec(DTYPES[dtype], hdim), its))
    found += product.items()
    return [(spec, arch) for spec, its in found if not names or spec.name in names for arch in its if arch in archs]


def _resources(pairs: Sequence[tuple[KernelSpec, str]], errors: Console) -> list[ResourceRow]:
    """A row for each pair, in their order, under a bar where there is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tilewise import compiler

    columns = (TextColumn("compiling; what was compiled before is kept"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), console=errors, disable=not errors.is_terminal) as progress:
            task = progress.add_task("", total=len(pairs))
            return compiler.resource_rows(pairs, lambda: progress.advance(task))
    except RuntimeError as error:  # no NVRTC, no headers of CUDA's
        raise NotImplementedError(str(error)) from error


def _resource_record(spec: KernelSpec, row: ResourceRow) -> dict[str, Any]:
    constants = dict(spec.constants)
    return {"name": spec.name, "element": constants.get("Element"), "hdim": constants.get("kHeadDim"), **asdict(row)}


def _faults(row: ResourceRow) -> list[str]:
    """What is wrong with a kernel, a word each."""
    if row.error:
        return ["does not compile"]
    faults = []
    if row.spill_stores or row.spill_loads:
        faults.append("spills")
    if row.shared_bytes > row.shared_limit:
        faults.append(f"over the {row.shared_limit >> 10} KB of shared memory")
    elif not row.blocks_per_sm:
        faults.append("does not fit")
    if row.serialised:
        faults.append(f"wgmma serialised ({len(row.serialised)})")
    return faults


# Heading, width (negative: to the left): 79 characters, so that a terminal of 80 shows a row in one line.
COLUMNS = (("arch", -9), ("threads", 8), ("regs", 6), ("spill B", 10), ("stack B", 8), ("shared KB", 10),
           ("blocks/SM", 10), ("occupancy", 10), ("compile", 8))  # fmt: skip


def _resource_lines(wanted: Sequence[KernelSpec], rows: Sequence[ResourceRow]) -> Iterator[Text]:
    """The table: a line that names a kernel, then one for each architecture, and beneath it what is wrong there."""
    from rich.text import Text

    yield Text("Kernels, as ptxas sees them", style="bold")
    yield Text(_in_columns([name for name, _ in COLUMNS]), style="bold")
    yield Text("─" * sum(abs(width) for _, width in COLUMNS))
    before = None
    for spec, row in zip(wanted, rows, strict=True):
        if spec != before:
            yield Text(_kernel_line(spec), style="cyan")
        before = spec
        faults = Text(f"    {', '.join(_faults(row))}", style="bold red" if row.error or row.product else "yellow")
        cells = [f"  {row.arch}"]
        if not row.error:
            cells += [
                str(row.threads), str(row.registers), f"{row.spill_stores}/{row.spill_loads}", str(row.stack_bytes),
                f"{row.shared_bytes / 1024:.1f}", str(row.blocks_per_sm), f"{row.occupancy:.0%}",
                f"{row.compile_seconds:.1f} s",
            ]  # fmt: skip
        yield Text(_in_columns(cells))
        if faults.plain.strip():
            yield faults


def _in_columns(cells: Sequence[str]) -> str:
    aligned = (
        f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}"
        for cell, (_, width) in zip(cells, COLUMNS, strict=False)
    )
    return "".join(aligned).rstrip()


def _kernel_line(spec: KernelSpec) -> str:
    """A kernel's name, and of its constants those that people know it by."""
    constants = dict(spec.constants)
    words = [spec.name, str(constants.get("Element", ""))]
    words += [f"D {constants['kHeadDim']}"] if "kHeadDim" in constants else []
    words += [f"{constants['kHeads']} heads", f"D {constants['kChannels']}"] if "kChannels" in constants else []
    if constants.get("kValueColumns", constants.get("kColumns")) != constants.get("kColumns"):
        words.append(f"{constants['kValueColumns']} of V")
    if "kTileQ" in constants and "kTileKv" in constants:
        words.append(f"tiles {constants['kTileQ']} × {constants['kTileKv']}")
    known = (("kExact", "exact"), ("kTree", "tree mask"), ("kUnit", "block lists"), ("kSelected", "selected pages"))
    words += [word for name, word in known if constants.get(name)]
    words += ["user's function"] if spec.text else []
    return ", ".join(word for word in words if word)


def _first_line(text: str | None) -> str:
    """What did not compile and the first reason: the whole story is long."""
    lines = [line.strip() for line in (text or "").splitlines()]
    return " ".join(lines[1:2] or lines[:1])
