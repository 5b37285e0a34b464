"""Scripts run as `python script` runs them, but in processes forked from one that has imported torch and transformers.

Importing those two takes seconds, and most examples nothing else. A script still finds a process of its own, in which
Tilewise is not imported yet.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

IMPORTED = ["torch", "transformers.models.llama.modeling_llama"]


class Done(NamedTuple):
    returncode: int | None
    stdout: str
    stderr: str


def run_script(
    script: Path | str,
    *,
    arguments: list[str] = (),
    folder: Path,
    environment: dict[str, str],
    logs: Path,
    seconds: float,
) -> Done:
    """Run a file, or source text, in `folder` with more in its environment; it has ended after `seconds` at most."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    out, err = logs / "stdout", logs / "stderr"
    process = context.Process(target=_run, args=(script, arguments, folder, environment, out, err))
    process.start()
    process.join(seconds)
    late = process.exitcode is None
    process.kill()
    process.join()
    return Done(None if late else process.exitcode, out.read_text(), err.read_text())


def _run(
    script: Path | str, arguments: list[str], folder: Path, environment: dict[str, str], out: Path, err: Path
) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    assert not any(name.split(".")[0] == "tilewise" for name in sys.modules), "it must be imported by the script"
    os.chdir(folder)
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # torch has read it already
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = [str(script) if isinstance(script, Path) else "-c", *arguments]
    sys.path[0] = str(script.parent) if isinstance(script, Path) else ""
    if isinstance(script, Path):
        runpy.run_path(str(script), run_name="__main__")
    else:
        exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
