"""The package as people get it: the wheel, what it says of itself, its README elsewhere, its command's start."""

from __future__ import annotations

import email
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tilewise
from tilewise.emulator import builder

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
HOOK = runpy.run_path(str(ROOT / "setup.py"))
REPOSITORY = "https://github.com/tilewise/tilewise"
CUDA = {"cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-crt"}


def python(code: str, *words: str, executable: Path | str = sys.executable, **environment: str) -> str:
    """What a program prints that runs in a process of its own, without pytest's modules."""
    told = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([executable, "-c", code, *words], env=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- the wheel ------------------------------------------------------------------------------------------------------

TRY = """
import sys, torch, torch.nn.functional as F, tilewise
from pathlib import Path
from tilewise import compiler
from tilewise.compiler.spec import INCLUDE_ROOTS
home = Path(tilewise.__file__).parent
assert home.is_relative_to(sys.prefix), home
assert (home / "py.typed").exists()
assert all(root.is_relative_to(sys.prefix) and root.is_dir() for root in INCLUDE_ROOTS), INCLUDE_ROOTS
q, k, v = (torch.randn(2, 32, 4, 16) for _ in range(3))
o, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
theirs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
torch.testing.assert_close(o.transpose(1, 2), theirs)
torch.testing.assert_close(torch.ops.tilewise.attention(q, k, v, causal=True)[0], o)
constants = (("Element", "bf16"), ("kHeadDim", 64), ("kTile", 64))
rung = compiler.KernelSpec("rung", "learn/kernels/04_flash_naive.cu", "flash_naive", constants, 64, 0)
assert len(compiler.compile(rung, "sm_90a").cubin) > 1000
"""


def test_wheel_is_built_installed_and_tried(tmp_path):
    wheel = built(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        about = email.message_from_bytes(archive.read(f"tilewise-{tilewise.__version__}.dist-info/METADATA"))
        assert archive.read(f"tilewise-{tilewise.__version__}.dist-info/licenses/LICENSE")
    source = ROOT / "src"
    files = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    assert packed == {f.as_posix() for f in files if not re.search(r"__pycache__|egg-info", str(f))}
    check_what_it_says(about)

    bin_folder = installed(wheel, tmp_path / "venv")
    told = {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    asked = subprocess.run([bin_folder / "tilewise", "--version"], env=told, capture_output=True, text=True)
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, f"tilewise {tilewise.__version__}\n", "")
    python(TRY, executable=bin_folder / "python", PYTHONPATH="", TILEWISE_CACHE=str(tmp_path / "cache"))


def built(folder: Path) -> Path:
    """The wheel of the source tree, which stays as it is: a build leaves folders behind."""
    tree = folder / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(folder))
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(tree)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def installed(wheel: Path, home: Path) -> Path:
    """Where an empty environment has its programs, with the wheel in it and what it needs in sight."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    options = ("--quiet", "--no-index", "--no-deps", "--no-compile")
    to = ("--python", str(home / "bin" / "python"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", *to, "install", *options, str(wheel)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # A .pth adds torch's folder to the path, but reads none of the .pth in there, such as an editable install of ours.
    places = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (site,) = home.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text("\n".join(places))
    (site / "nvidia").symlink_to(Path(places[0]) / "nvidia")  # NVRTC is looked for where an environment has it
    return home / "bin"


def check_what_it_says(about: email.message.Message) -> None:
    assert about["Version"] == tilewise.__version__
    assert about["License-Expression"] == "MIT"
    assert about["Description-Content-Type"].startswith("text/markdown")
    urls = dict(line.split(", ") for line in about.get_all("Project-URL"))
    assert set(urls) >= {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(url.startswith(REPOSITORY) for url in urls.values())
    text = about.get_payload(decode=True).decode()
    assert text.startswith("# Tilewise")
    assert links(text)
    assert [target for target in links(text) if not target.startswith("https://")] == []

    needed = [Requirement(line) for line in about.get_all("Requires-Dist")]
    for system, with_cuda in (("linux", True), ("win32", True), ("darwin", False)):
        there = {"sys_platform": system, "extra": ""}
        names = {r.name for r in needed if r.marker is None or r.marker.evaluate(there)}
        assert "torch" in names
        assert names & CUDA == (CUDA if with_cuda else set()), system


def test_pages_of_the_package():
    license = (ROOT / "LICENSE").read_text()
    assert license.startswith("MIT License\n\nCopyright (c) 2026 The Tilewise authors\n")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == tilewise.__version__
    assert "/security/advisories/new" in (ROOT / "SECURITY.md").read_text()
    for target in re.findall(r"^make (\w+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


# ---- links ----------------------------------------------------------------------------------------------------------


def links(markdown: str) -> list[str]:
    """Targets of links and pictures, those in code left out."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", markdown, flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)


def anchor(heading: str) -> str:
    """What GitHub calls a heading in an address."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Those into the repository, and those that name it by its address."""
    text = (ROOT / page).read_text()
    anchors = {anchor(heading) for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)}
    for target in links(text):
        inside = re.sub(rf"^{REPOSITORY}/(?:blob|tree)/main/|^{HOOK['PICTURES']}/", "", target)
        if inside.startswith("#"):
            assert inside[1:] in anchors, target
        elif not inside.startswith(("https://", "http://", "mailto:")):
            assert (ROOT / inside.partition("#")[0]).exists(), target


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("[a](docs/a.md)", f"[a]({REPOSITORY}/blob/main/docs/a.md)"),
        ("[a](docs/a.md#b) and [c](#cards)", f"[a]({REPOSITORY}/blob/main/docs/a.md#b) and [c]({REPOSITORY}#cards)"),
        ("![a](docs/a.png)", f"![a]({HOOK['PICTURES']}/docs/a.png)"),
        ("[![a](a.png)](a.md)", f"[![a]({HOOK['PICTURES']}/a.png)]({REPOSITORY}/blob/main/a.md)"),
        ("[![a](https://b/a.png)](a.md)", f"[![a](https://b/a.png)]({REPOSITORY}/blob/main/a.md)"),
        ("[a](https://b/c) [d](mailto:e@f)", "[a](https://b/c) [d](mailto:e@f)"),
        ("`x[0](y)` and\n```python\nf[a](b)\n```\n", "`x[0](y)` and\n```python\nf[a](b)\n```\n"),
        ("see [the\nguide](a.md)", f"see [the\nguide]({REPOSITORY}/blob/main/a.md)"),
        ("[`code`](a.md)", f"[`code`]({REPOSITORY}/blob/main/a.md)"),
        ('<img src="a.png" width="9">', f'<img src="{HOOK["PICTURES"]}/a.png" width="9">'),
        ('<a href="b.md">', f'<a href="{REPOSITORY}/blob/main/b.md">'),
    ],
)  # fmt: skip
def test_links_are_absolute_on_pypi(given, expected):
    assert HOOK["absolute"](given) == expected


# ---- the command's start --------------------------------------------------------------------------------------------

HELP = """
import contextlib, io, sys, tilewise_start
tilewise_start.defer()
from tilewise.cli import app, main
import typer
def every(command, words):
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from every(below, [*words, name])
asked = list(every(typer.main.get_command(app), []))
for words in asked:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*words, "--help"]) == 0
    assert "Usage: tilewise " + " ".join(words) in " ".join(out.getvalue().split()), words
for words in ([], ["--version"]):
    assert main(words) == 0
assert main(["bench", "--no-such-option"]) == 2
slow = [m for m in ("torch", "numpy", "matplotlib", "transformers", "tilewise.api") if m in sys.modules]
print(len(asked), slow)
"""


def test_help_comes_without_torch():
    """For every command, and so does what a wrong command line is told."""
    out = python(HELP)
    assert f"tilewise {tilewise.__version__}" in out
    count, slow = out.splitlines()[-1].split(" ", 1)
    assert int(count) > 20
    assert slow == "[]"


def test_modules_that_only_one_system_has_are_not_imported():
    """So that the package can be imported on Windows."""
    unix = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty", "posix"}
    for path in (ROOT / "src").rglob("*.py"):
        imported = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not unix & set(imported), path


# ---- without CUDA's packages ----------------------------------------------------------------------------------------

MISSING = """
import sys, warnings

class Missing:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in sys.argv[2].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
warnings.filterwarnings("error", category=EncodingWarning, module="tilewise")  # Windows reads files in another one
import tilewise_start
tilewise_start.defer()
from tilewise.cli import main
assert "torch" not in sys.modules
file = sys.argv[1] + "/a.npz"
assert main(["schedule", "make", "banded", "--left", "9", "--seq", "64", "--block", "16", "-o", file]) == 0
import torch
assert torch.ops.tilewise.attention  # the command imported the whole package, as `import tilewise` does
assert main(["schedule", "show", file]) == 0
assert main(["bench", "--seq", "32", "--heads", "2", "--hdim", "16", "--loops", "1", "--json"]) == 0
assert main(["doctor"]) == 0
assert main(["kernels"]) == 1

import tilewise
from tilewise import compiler
from tilewise.compiler import driver
q, k, v = (torch.randn(1, 64, 4, 16) for _ in range(3))
schedule = tilewise.BlockSchedule.load(file)
o = tilewise.attention(q, k, v, schedule=schedule, mask=lambda b, h, q, k: q >= k)
exact = tilewise.reference.attention(q, k, v, schedule=schedule, causal=True)[0]
torch.testing.assert_close(o.double(), exact, atol=1e-5, rtol=1e-5)
cache = tilewise.PagedKVCache(num_pages=8, page_size=16, num_kv_heads=4, head_dim=16, kv_format="fp32")
seq = cache.allocate()
cache.write(0, cache.extend([seq], [64]), k[0], v[0])
plan = tilewise.plan_decode(cache, [seq], num_heads=4)
o = tilewise.decode(q[:, -1:], cache, 0, plan)
torch.testing.assert_close(o.double(), tilewise.reference.attention(q[:, -1:], k, v)[0], atol=1e-5, rtol=1e-5)
spec = compiler.KernelSpec("fold", "prefill/fold.cu", "fold", (), 128, 0)
for call in (lambda: driver._bindings(), lambda: compiler.compile(spec, "sm_80")):
    try:
        call()
    except ImportError as error:
        print("said:", error)
"""


def test_everything_but_the_gpu_works_without_cudas_packages(tmp_path):
    """As on macOS, where there are none: calls, schedules, caches, commands; what needs them says what to install."""
    blocked = "cuda,nvidia,numba,numba_cuda,triton,transformers,thunder"
    told = {"TILEWISE_CACHE": str(tmp_path), "TILEWISE_DEBUG": ""}
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-c", MISSING, str(tmp_path), blocked],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | told,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    advice = "pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt"
    assert [advice in line for line in done.stdout.splitlines() if line.startswith("said:")] == [True, True]
    assert advice in next(line for line in done.stderr.splitlines() if line.startswith("error:"))


def test_emulator_says_where_it_runs(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match=r"runs on Linux, not on darwin; backend='cpu'"):
        builder.compiler.__wrapped__()
