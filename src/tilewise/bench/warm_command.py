"""The command `tilewise warm`. What is slow to import is imported when it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .options import usage
from .tune_command import Bar, Shapes

if TYPE_CHECKING:
    from tilewise.compiler.spec import KernelSpec

    from .warm import Need


def warm(
    model: Annotated[
        str | None, typer.Option(help="A model's config.json, its folder, or its name where transformers is there.")
    ] = None,
    shapes: Shapes = None,
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", help="Compile for it, with or without such a card: sm_90a; may be given again."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32.", show_default="the model's; of shapes bfloat16")
    ] = None,
    kv_format: Annotated[
        str | None, typer.Option(help="Of the cache: bf16, fp16, fp32, fp8, int8 or int4.", show_default="as dtype")
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.", min=1, max=256)] = 16,
) -> None:
    """Compile ahead, on all cores, what a model or shapes need, so that a first call compiles nothing.

    Prefill (dense, packed and paged), decode, and writing pages. Masks, scores and schedules of one's own are compiled
    when they are first used. What is compiled can be taken along: tilewise cache export.
    """
    from tilewise.compiler import cache

    from . import tables
    from . import warm as warming

    if (model is None) == (not shapes):
        raise typer.BadParameter("say what for: --model CONFIG, or --shapes B,N,Hq,Hkv,D, one of them")
    with usage():
        needs = _needs(model, shapes or [], dtype, kv_format, page_size)
    targets = _targets(arch or [])
    asked = [(spec, target) for target in targets for need in needs for spec in _specs(need, target, not arch)]
    asked = list(dict.fromkeys(asked))
    start, out = time.perf_counter(), tables.console()
    with Bar() as bar:
        bar.total(len(asked))
        warmed = warming.compile_all(asked, lambda spec: bar.next(str(spec.name)))
    seconds = time.perf_counter() - start
    kernels = "kernel" if len(asked) == 1 else "kernels"
    out.print(
        f"{len(asked)} {kernels} for {', '.join(targets)}: {warmed.compiled} compiled, {warmed.there} were there, "
        f"{seconds:.1f} s; in {cache.root() or 'no folder: you have no home, and the next process compiles again'}",
        soft_wrap=True, markup=False,
    )  # fmt: skip
    for line in warmed.failed:
        out.print(f"did not compile: {line}", soft_wrap=True, markup=False)
    if warmed.failed:
        raise typer.Exit(1)


def _needs(
    model: str | None, shapes: Sequence[str], dtype: str | None, kv_format: str | None, page_size: int
) -> list[Need]:
    from dataclasses import replace

    from tilewise import checks
    from tilewise.gpu.decode_kernels import FORMATS

    from ..integrations.transformers_config import DTYPES, read_config
    from . import tune_prefill
    from .warm import Need

    if dtype is not None:
        checks.choice("dtype", dtype, tuple(DTYPES))
    if kv_format is not None:
        checks.choice("kv_format", kv_format, tuple(FORMATS))
    if model is not None:
        shape = read_config(model)
        shape = replace(shape, dtype=DTYPES[dtype]) if dtype else shape
        needs = [need for need in (Need.of_model(shape), Need.of_latent(shape)) if need is not None]
    else:
        needs = [Need.of_shape(shape, DTYPES[dtype or "bfloat16"]) for shape in tune_prefill.parse(shapes)]
    return [replace(need, kv_format=kv_format, page_size=page_size) for need in needs]


def _targets(asked: Sequence[str]) -> list[str]:
    """The architectures asked for, or that of the card at hand."""
    import torch

    from tilewise.arch import ARCHS, arch_of_device

    for name in asked:
        if name not in ARCHS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(ARCHS)}", param_hint="--arch")
    if asked:
        return list(dict.fromkeys(asked))
    if not torch.cuda.is_available():
        said = f"torch sees no GPU here: say which one to compile for, {', '.join(ARCHS)}"
        raise typer.BadParameter(said, param_hint="--arch")
    return [arch_of_device(torch.device("cuda", torch.cuda.current_device()))]


def _specs(need: Need, target: str, at_hand: bool) -> list[KernelSpec]:
    """at_hand: as the card at hand behaves, and by what was measured on it; else as `target`, by no table."""
    import torch

    from tilewise import arch, tuned

    from . import warm as warming

    if not at_hand:
        return warming.specs(need, target)
    device = torch.device("cuda", torch.cuda.current_device())
    with tuned.trying(tuned.of(device)):
        return warming.specs(need, arch.card_of(device))
