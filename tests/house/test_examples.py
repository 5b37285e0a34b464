"""Every file in examples/ runs on a CPU, by the command that its docstring gives, in seconds."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from script_cases import run_script

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SECONDS = 300  # a script that hangs is stopped then; the machine may be busy
TOLD = {  # what some of them have to have found
    "shared_prefix": "computed 894 tokens of prompts, reused 6600",
    "best_of_n": "the prompt's 300 tokens were computed once: 300 in all",
    "quantised_cache": "int4                288      0.18 MB       14%",
    "decode_graph": "3 plans, 0 captures, 0 replays, 40 steps call by call",
    "train_tree": "the same loss and gradients",
    "model_from_disk": "What is a plan?  (200 of 208 tokens reused)",
}
PROGRAMS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}


def command(example: Path) -> list[str] | None:
    """The first line of an example's docstring that runs it by python or torchrun, in the tests' own environment."""
    for line in (ast.get_docstring(ast.parse(example.read_text())) or "").splitlines():
        words = line.partition("#")[0].split()
        if words and words[0] in PROGRAMS and f"examples/{example.name}" in words:
            return [*PROGRAMS[words[0]], *words[1:]]
    return None


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example, tmp_path):
    given = command(example)  # none: what several examples share
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = given or [sys.executable, str(example)]
    if words[0] == sys.executable and words[1].endswith(".py"):
        done = run_script(
            ROOT / words[1],
            arguments=words[2:],
            folder=ROOT,
            environment=environment,
            logs=tmp_path,
            seconds=SECONDS,
        )
    else:
        environment = os.environ | environment
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert bool(done.stdout) == bool(given), "an example prints what it found"
    assert TOLD.get(example.stem, "") in done.stdout
    if example.stem == "quantised_cache":  # its model knows what it says: of 216 words, nearly all are right
        right = {
            line.split()[0]: int(line.split()[5].rstrip("%")) for line in done.stdout.splitlines() if " MB " in line
        }
        assert len(right) == 5
        assert min(right.values()) >= 80, right


@pytest.mark.parametrize("example", [path for path in EXAMPLES if command(path)], ids=lambda path: path.stem)
def test_help(example, tmp_path):
    done = told(example, tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {example.name}")
    assert ast.get_docstring(ast.parse(example.read_text())).splitlines()[0] in done.stdout
    assert done.stdout.count("\n  --") >= 1, "it says what can be chosen"


def test_a_folder_without_a_model_is_refused(tmp_path):
    done = told(ROOT / "examples" / "model_from_disk.py", tmp_path, "--model", str(tmp_path))
    assert done.returncode == 2
    assert f"--model must be a folder with a config.json, got {tmp_path}" in done.stderr


def told(example, folder, *arguments):
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return run_script(
        example, arguments=list(arguments), folder=ROOT, environment=environment, logs=folder, seconds=SECONDS
    )


@pytest.mark.parametrize(
    ("docstring", "words"),
    [
        ("Shows.\n\n    torchrun --nproc-per-node 2 examples/x.py  # two", ["--nproc-per-node", "2", "examples/x.py"]),
        ("Shows.\n\npython examples/x.py --small\n", ["examples/x.py", "--small"]),
        ("python examples/x.py", ["examples/x.py"]),
        ("Shared by others.\n\n    python examples/y.py", None),
        ("python's own attention like this.", None),
        ("", None),
    ],
)
def test_command(docstring, words, tmp_path):
    example = tmp_path / "x.py"
    example.write_text(f'"""{docstring}"""')
    found = command(example)
    if words is None:
        assert found is None
    else:
        assert found == [*PROGRAMS["torchrun" if "torchrun" in docstring else "python"], *words]
