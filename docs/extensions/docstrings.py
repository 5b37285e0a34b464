"""Docstrings for the site: ours are plain text with `names` in backticks and `argument: what it is` in running lines.

Here they become reStructuredText: names that the API page has are linked, others are set as code, arguments are listed
one by one, and indented passages are code blocks.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.pycode import ModuleAnalyzer

SPAN = re.compile(r"`([^`\n]+)`")
PAGE = re.compile(r"docs/(\w+/[\w-]+)\.md")
SPECIAL = re.compile(r"[\\*|]|_(?!\w)")  # what reStructuredText would take for markup
Link = Callable[[str], str | None]


def restructured(lines: Iterable[str], parameters: Iterable[str], link: Link) -> list[str]:
    """A docstring's lines as reStructuredText. link: the full name of a thing that has an entry, None for others."""
    found: list[str] = []
    for passage in _passages(list(lines)):
        if passage[0].startswith("    "):
            found += _code(passage)
        elif passage[0].startswith("- "):
            found += [_inline(line, link) for line in passage]
        else:
            found += _text("\n".join(line.strip() for line in passage), list(parameters), link)
        found.append("")
    return found


def _passages(lines: list[str]) -> list[list[str]]:
    """Lines between empty ones; indented ones that follow each other are one passage, and so are a list's."""
    passages: list[list[str]] = [[]]
    for line in [*lines, ""]:
        line = line.rstrip()
        last = passages[-1]
        if not line:
            if last and last[0].startswith("    "):
                last.append("")
            elif last:
                passages.append([])
        elif last and last[0].startswith("    ") != line.startswith("    "):
            passages.append([line])
        else:
            last.append(line)
    return [passage for passage in passages if passage]


def _code(passage: list[str]) -> list[str]:
    text = textwrap.dedent("\n".join(passage))
    try:
        ast.parse(text)
        language = "python"
    except SyntaxError:
        language = "text"
    return [f".. code-block:: {language}", "", *textwrap.indent(text, "    ").splitlines()]


def _text(text: str, parameters: list[str], link: Link) -> list[str]:
    """A paragraph; from the first `argument: …` that begins a sentence or a line on, a list of arguments."""
    names = "|".join(map(re.escape, parameters)) or "(?!)"
    begins = re.finditer(
        rf"(?:^|(?<=[.;:]\s))((?:{names})(?:,\s(?:{names}))*)((?: [^.:;,`\n]{{1,20}})?):\s", text, re.M
    )
    begins, text = list(begins), text.replace("\n", " ")
    if not begins:
        return [_inline(text, link)]
    before, ends = text[: begins[0].start()].strip(), [*(m.start() for m in begins[1:]), len(text)]
    found = [_inline(before, link), ""] if before else []
    for match, end in zip(begins, ends, strict=True):
        said = ", ".join(f"**{name}**" for name in re.split(r",\s", match[1])) + _inline(match[2], link)
        found.append(f"- {said}: {_inline(text[match.end() : end].strip().rstrip(';'), link)}")
    return found


def _inline(text: str, link: Link) -> str:
    """Spans in backticks as links or code, the rest as it stands."""
    parts = SPAN.split(text)
    for n, part in enumerate(parts):
        if n % 2 == 0:
            escaped = SPECIAL.sub(lambda m: "\\" + m.group(), part)
            parts[n] = PAGE.sub(r":doc:`/\1`", escaped)
            continue
        target = link(part.removesuffix("()"))
        parts[n] = f"\\ :py:obj:`{part} <{target}>`\\ " if target else f"\\ ``{part}``\\ "
    return "".join(parts)


def public_names() -> dict[str, str]:
    """What may be said in backticks -> the full name under which the API page has it."""
    import tilewise
    import tilewise.compat.flash_attn
    import tilewise.distributed

    oracle = (name for name, thing in vars(tilewise.reference).items() if inspect.isfunction(thing) and name[0] != "_")
    names = {f"tilewise.reference.{name}": f"tilewise.reference.{name}" for name in oracle}
    for module in (tilewise.plan, tilewise.kvcache, tilewise.distributed, tilewise.compat.flash_attn):
        said = [name for name in module.__all__ if name not in tilewise.__all__]
        names |= {f"{module.__name__}.{name}": f"{module.__name__}.{name}" for name in said}
        names |= {name: f"{module.__name__}.{name}" for name in said if not name.islower() or "_" in name}
    for name in tilewise.__all__:
        thing = getattr(tilewise, name)
        if inspect.ismodule(thing):
            continue
        names[name] = names[f"tilewise.{name}"] = f"tilewise.{name}"
        if inspect.isclass(thing):
            methods = (m for m in vars(thing) if not m.startswith("_"))
            names |= {f"{name}.{m}": f"tilewise.{name}.{m}" for m in methods if callable(getattr(thing, m))}
    return names


def parameters_of(what: str, thing: Any) -> list[str]:
    """The names of a function's arguments, or of a class's."""
    if what not in ("function", "method", "class"):
        return []
    try:
        return [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]
    except (TypeError, ValueError):
        return []


def show_one_signature() -> None:
    """Leave overloads out, which are for type checkers: the call itself has every argument by name."""
    analyze = ModuleAnalyzer.analyze

    def analyzed(self: ModuleAnalyzer) -> None:
        analyze(self)
        self.overloads = {}

    ModuleAnalyzer.analyze = analyzed


def setup(app: Any) -> dict[str, int]:
    names = public_names()

    def process(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
        lines[:] = restructured(lines, parameters_of(what, thing), names.get)

    def resolve(app: Any, env: Any, node: Any, content: Any) -> Any:
        """Types are called by where they are defined, tilewise.kvcache.slots.Slots: the entry is tilewise.Slots."""
        target = names.get(str(node.get("reftarget")).rpartition(".")[2])
        if node.get("refdomain") != "py" or target is None or not node["reftarget"].startswith("tilewise."):
            return None
        python = env.get_domain("py")
        return python.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, content)

    def link_names(app: Any, doctree: nodes.document) -> None:
        """In pages: `plan_decode` in backticks leads to its entry."""
        for literal in list(doctree.findall(nodes.literal)):
            target = names.get(literal.astext().partition("(")[0])
            inside = literal.parent
            while target and inside is not None:
                target = None if isinstance(inside, (nodes.title, nodes.reference, pending_xref)) else target
                inside = inside.parent
            if target:
                said = {"refdomain": "py", "reftype": "obj", "reftarget": target, "refexplicit": True}
                literal.replace_self(
                    pending_xref("", literal.deepcopy(), refdoc=app.env.docname, refwarn=False, **said)
                )

    def skip(app: Any, what: str, name: str, thing: Any, skipped: bool, options: Any) -> bool | None:
        """A NamedTuple's fields: the signature has them, and Python's own text says nothing more."""
        return True if (getattr(thing, "__doc__", None) or "").startswith("Alias for field number") else None

    show_one_signature()
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", process)
    app.connect("doctree-read", link_names)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "env_version": crc32(Path(__file__).read_bytes())}  # changed, all is read again
