"""Every command of `tilewise` with its arguments and options, as Markdown, out of the command line itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer.main


def tree() -> Iterator[tuple[str, Any]]:
    """("tilewise bench prefix", its command) for every command and group, a group before what is in it."""
    from tilewise import cli

    return _walk("tilewise", typer.main.get_command(cli.app))


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    if hasattr(command, "list_commands"):
        context = typer.Context(command, info_name=name)
        for word in command.list_commands(context):
            yield from _walk(f"{name} {word}", command.get_command(context, word))


def markdown() -> str:
    return "\n\n".join(section for name, command in tree() for section in _sections(name, command))


def _sections(name: str, command: Any) -> Iterator[str]:
    yield f"{'##' if name.count(' ') < 2 else '###'} `{name}`"
    yield _plain(command.help)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    if arguments:
        words = " ".join(_metavar(p) for p in arguments)
        yield f"```text\n{name} {words}{' [options]' if options else ''}\n```"
        rows = [f"| `{_metavar(p)}` | {_plain(getattr(p, 'help', None))} |" for p in arguments]
        yield "\n".join(["| argument | what it is |", "|---|---|", *rows])
    if options:
        rows = [f"| {spelled(p)} | {_default(p)} | {_plain(p.help)} |" for p in options]
        yield "\n".join(["| option | default | what it does |", "|---|---|---|", *rows])


def spelled(option: Any) -> str:
    """How an option is written: `-o`, `--output`; a switch with its opposite."""
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def _metavar(argument: Any) -> str:
    name = argument.name.upper()
    return f"{name}…" if argument.nargs == -1 else name


def _default(option: Any) -> str:
    told = option.show_default
    if isinstance(told, str):
        return _plain(told)
    value = option.default
    if value is None or value == () or value == "" or (isinstance(value, bool) and not value):
        return "required" if option.required else "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _plain(text: str | None) -> str:
    """Help as it is shown in a terminal, its paragraphs in one line each, with nothing that Markdown would read."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(re.sub(r"([|<*_])", r"\\\1", " ".join(p.split())) for p in paragraphs)
