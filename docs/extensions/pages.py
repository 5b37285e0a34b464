"""Parts of pages that are made while the site is built, where their Markdown has a line of its own like

<!-- commands -->                            every command of the command line with its options (commands.py)
<!-- results: NAME -->                       the table of docs/results/NAME (results.py); others: of every file that
                                             no page names
<!-- contents: CAPTION: one two folder/* --> these pages in the navigation, those of them that there are
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import commands
import results

DOCS = Path(__file__).parents[1]
MARK = re.compile(r"^<!-- (commands|results|contents)(?:: (.+))? -->$", re.M)


def filled(text: str) -> tuple[str, list[Path]]:
    """A page's text with its marks replaced, and the files of docs/results that it shows."""
    shown: list[Path] = []

    def tables(name: str) -> str:
        paths = others() if name == "others" else [DOCS / "results" / name]
        shown.extend(paths)
        heads = [f"## {path.stem}\n\n" if name == "others" else "" for path in paths]
        return "\n\n".join(head + results.markdown(path) for head, path in zip(heads, paths, strict=True))

    made = {"commands": lambda _: commands.markdown(), "results": tables, "contents": contents}
    return MARK.sub(lambda match: made[match[1]](match[2]), text), shown


def marked() -> set[str]:
    """The pages with marks, which are made anew in every build."""
    pages = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts and MARK.search(page.read_text())]
    return {page.relative_to(DOCS).with_suffix("").as_posix() for page in pages}


def others() -> list[Path]:
    """The files of docs/results that no page has a mark for."""
    marks = {name for page in DOCS.glob("*/*.md") for kind, name in MARK.findall(page.read_text()) if kind == "results"}
    return [path for path in sorted((DOCS / "results").glob("*.txt")) if path.name not in marks]


def contents(told: str) -> str:
    """A hidden toctree of the pages that exist, in the order told; nothing if there are none."""
    caption, _, patterns = told.partition(": ")
    found = [path for pattern in patterns.split() for path in sorted(DOCS.glob(f"{pattern}.md"))]
    names = list(dict.fromkeys(path.relative_to(DOCS).with_suffix("").as_posix() for path in found))
    return "\n".join(["```{toctree}", f":caption: {caption}", ":hidden:", *names, "```"]) if names else ""


def setup(app: Any) -> dict[str, bool]:
    def fill(app: Any, name: str, source: list[str]) -> None:
        source[0], shown = filled(source[0])
        for path in shown:
            app.env.note_dependency(str(path), docname=name)

    app.connect("source-read", fill)
    app.connect("env-get-outdated", lambda app, env, added, changed, removed: sorted(marked()))
    return {"parallel_read_safe": True}
