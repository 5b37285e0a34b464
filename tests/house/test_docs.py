"""The documentation: every block of Python in it runs, or compiles if it needs a GPU; the site builds without a
warning, its links lead somewhere, and the reference has everything that is public."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from script_cases import run_script

from tilewise import arch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
SOURCES = sorted((ROOT / "src" / "tilewise").rglob("*.py"))
NEEDS_GPU = "# needs a GPU\n"
PUBLIC = [
    *("tilewise", "tilewise.kvcache", "tilewise.plan", "tilewise.serving", "tilewise.distributed"),
    *("tilewise.reference", "tilewise.compat.flash_attn", "tilewise.compat.flex_attention"),
    *("tilewise.compat.bert_padding", "tilewise.compat.flash_attn_3", "tilewise.compat.flash_mla"),
]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


# Code.

# One process per page, in which a block finds nothing of the one before it but imported modules.
RUNNER = """
import json
for block in json.loads({blocks!r}):
    exec(compile(block, "a block of {page}", "exec"), {{"__name__": "__main__"}})
"""


def run_blocks(page: Path, chosen: list[str], folder: Path) -> str:
    script = RUNNER.format(blocks=json.dumps(chosen), page=name_of(page))
    done = run_script(script, folder=folder, environment={}, logs=folder, seconds=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text()], ids=name_of)
def test_code_runs(page, tmp_path):
    here = [block for block in blocks(page) if not block.startswith(NEEDS_GPU)]
    assert page.read_text().count("```python") == len(blocks(page)), "a fence begins its line"
    for block in blocks(page):
        compile(block, name_of(page), "exec")
        assert block in here or "cuda" in block, "what runs on a CPU must run here"
    printed = run_blocks(page, here, tmp_path)
    for drawn in re.findall(r'draw\("(.+?)"\)', "".join(here)):
        assert (tmp_path / drawn).stat().st_size > 1000
    for shown in re.findall(r"^prints\n\n```\n(.*?)```", page.read_text(), re.S | re.M):
        assert shown in printed
    if "except TypeError" in "".join(here):
        assert "write & | ~ for `and`" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("page", [page for page in PAGES if NEEDS_GPU in page.read_text()], ids=name_of)
def test_code_for_gpus_runs(page, tmp_path):
    run_blocks(page, [block for block in blocks(page) if block.startswith(NEEDS_GPU)], tmp_path)


# The site.


class Html(HTMLParser):
    """What a page leads to, what can be led to in it, and its words."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.words: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def built(out: Path) -> dict[Path, Html]:
    """The site, built into a folder as `make docs` builds it."""
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", str(DOCS), str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {path: Html(path) for path in out.rglob("*.html")}


def test_site(tmp_path):
    """One test, because the site is built for it: that takes some ten seconds."""
    root = tmp_path.resolve()
    site = built(root)
    for page in PAGES:
        assert (root / name_of(page)).with_suffix(".html") in site, "every page is in the site"
    assert not list(broken_links(site))
    reference = site[root / "reference" / "api.html"]
    assert not sorted(missing_names(reference))
    assert "return_lse: Literal" not in "".join(reference.words), (
        "calls are shown with every argument, not as overloads"
    )
    commands = " ".join("".join(site[root / "reference" / "commands.html"].words).split())
    assert not [word for word in words_of_commands() if word not in commands]
    for results in (DOCS / "results").iterdir():
        assert any(results.name in link for html in site.values() for link in html.links), results.name


def broken_links(site: dict[Path, Html]) -> Iterator[tuple[str, str]]:
    for path, html in site.items():
        for link in html.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = site[target].ids if target in site and parts.fragment else {unquote(parts.fragment)}
            if not target.exists() or unquote(parts.fragment) not in anchors:
                yield path.name, link


def missing_names(reference: Html) -> Iterator[str]:
    """Names that public modules export, or guides and examples import, which have no entry under any name."""
    words = " ".join(reference.words)
    for module, name in dict.fromkeys([*exported(), *imported()]):
        full = f"{module}.{name}"
        if {full, f"module-{full}"} & reference.ids:
            continue
        thing = getattr(importlib.import_module(module), name)
        if getattr(thing, "__module__", "").startswith("torch.") and re.search(rf"\b{name}\b", words):
            continue
        if not any(resolved(other) is thing for other in reference.ids if other.rpartition(".")[2] == name):
            yield full


def exported() -> Iterator[tuple[str, str]]:
    for name in PUBLIC:
        module = importlib.import_module(name)
        own = [n for n, x in vars(module).items() if n[0] != "_" and getattr(x, "__module__", "") == name]
        yield from ((name, n) for n in getattr(module, "__all__", own))


def imported() -> Iterator[tuple[str, str]]:
    """By what is written for users; pages about the inside import that."""
    pages = [ROOT / "README.md", DOCS / "index.md", DOCS / "start.md", *(DOCS / "guides").glob("*.md")]
    code = [block for page in pages for block in blocks(page)]
    code += [example.read_text() for example in (ROOT / "examples").glob("*.py")]
    for node in (node for text in code for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tilewise."):
            yield from ((node.module, name.name) for name in node.names)


def resolved(name: str) -> Any:
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last, None)
    except (ImportError, ValueError):  # a method, or no name of ours at all
        return None


def words_of_commands() -> Iterator[str]:
    """Every command by its full name, and every option."""
    import typer.main

    from tilewise import cli

    def walk(name: str, command: Any) -> Iterator[str]:
        yield name
        yield from (word for option in command.params if option.param_type_name == "option" for word in option.opts)
        if hasattr(command, "list_commands"):
            context = typer.Context(command)
            for word in command.list_commands(context):
                yield from walk(f"{name} {word}", command.get_command(context, word))

    return walk("tilewise", typer.main.get_command(cli.app))


# Environment variables.


def test_environment_variables_are_those_that_are_read():
    page = (DOCS / "reference" / "environment.md").read_text()
    documented = {name for row in re.findall(r"^\| (`[A-Z].*?) \|", page, re.M) for name in re.findall(r"\w+", row)}
    source = "".join(path.read_text() for path in SOURCES)
    native = "".join(path.read_text() for end in ("h", "cpp", "cu*") for path in (ROOT / "src").rglob(f"*.{end}"))
    read = set(re.findall(r'environ(?:\.get\(|\[)\s*"(\w+)"', source)) | set(re.findall(r'getenv\("(\w+)"', native))
    assert read <= documented
    assert {name for name in documented if name.startswith("TILEWISE_")} == set(re.findall(r'"(TILEWISE_\w+)"', source))


def test_environment_page_names_every_card():
    (row,) = re.findall(r"^\| `TILEWISE_CARD` \| (.*) \|$", (DOCS / "reference" / "environment.md").read_text(), re.M)
    assert re.findall(r"`(sm_\w+)`", row) == list(arch.ARCHS)
