"""What a type checker knows of the public calls, from a user's file: with return_lse two tensors, without it one."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import tilewise
import tilewise.distributed
from tilewise.compat import flex_attention

ROOT = Path(__file__).parents[2]
DENSE = "q, q, q"
PAGED = "q, cache, 0, plan"
CALLS = {  # by name, as a user's file below has it: what it must be given
    "tilewise.attention": DENSE,
    "tilewise.attention_varlen": "q, q, q, starts, starts",
    "tilewise.attention_tree": "q, q, q, tree",
    "tilewise.shared_prefix_attention": "q, [(q, q)], q, q",
    "tilewise.decode": PAGED,
    "tilewise.attend": "q, cache, 0, step",
    "tilewise.distributed.context_attention": DENSE,
    "tilewise.distributed.head_attention": DENSE,
    "tilewise.distributed.decode_split": PAGED,
    "tilewise.compat.flex_attention.flex_attention": DENSE,
}
START = """
import torch
import torch.distributed as dist
from typing_extensions import assert_type

import tilewise
import tilewise.compat.flex_attention
import tilewise.distributed

Pair = tuple[torch.Tensor, torch.Tensor]


def calls(
    q: torch.Tensor,
    starts: torch.Tensor,
    tree: tilewise.TokenTree,
    cache: tilewise.PagedKVCache,
    plan: tilewise.DecodePlan,
    step: tilewise.StepPlan,
    group: dist.ProcessGroup,
    flag: bool,
) -> None:
"""
EACH = """
    assert_type({name}({given}), torch.Tensor)
    {name}({given}).shape
    assert_type({name}({given}, return_lse=False), torch.Tensor)
    assert_type({name}({given}, return_lse=True), Pair)
    o, lse = {name}({given}, return_lse=True)
    assert_type({name}({given}, {options}), torch.Tensor)
    assert_type({name}({given}, {options}, return_lse=True), Pair)
    {name}({given}, no_such_option=1)  # type: ignore[call-overload]
    {name}({given}, scale="much")  # type: ignore[call-overload]
"""
FLEX = """
    asked = tilewise.compat.flex_attention.AuxRequest(lse=True)
    out, aux = tilewise.compat.flex_attention.flex_attention(q, q, q, return_aux=asked)
    assert_type(out, torch.Tensor)
    assert_type(aux, tilewise.compat.flex_attention.AuxOutput)
    tilewise.compat.flex_attention.flex_attention(q, q, q, None, None, None, False, True)
"""


def test_no_public_call_is_forgotten():
    found = {
        f"{place.__name__}.{name}"
        for place in (tilewise, tilewise.distributed, flex_attention)
        for name in place.__all__
        if callable(call := getattr(place, name)) and "return_lse" in parameters(call)
    }
    assert found == set(CALLS)


def parameters(call: object) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(call).parameters)
    except ValueError:  # what is written in C tells none
        return {}


def test_a_users_file_passes_mypy_strict(tmp_path):
    """Every option of a call beside return_lse is known to its overloads, others are not."""
    text = START
    for name, given in CALLS.items():
        call = {"tilewise": tilewise, "distributed": tilewise.distributed, "flex_attention": flex_attention}[
            name.split(".")[-2]
        ]
        taken = parameters(getattr(call, name.split(".")[-1]))
        optional = {p.name: p.default for p in taken.values() if p.default is not p.empty and p.name != "return_lse"}
        text += EACH.format(name=name, given=given, options=", ".join(f"{n}={x!r}" for n, x in optional.items()))
        if "return_aux" not in optional:  # where it is there, it decides, too
            text += f"    assert_type({name}({given}, return_lse=flag), torch.Tensor | Pair)\n"
        if name.startswith("tilewise.distributed"):
            text += f"    assert_type({name}({given}, softcap=1.0, group=group), torch.Tensor)\n"
    file = tmp_path / "user.py"
    file.write_text(text + FLEX)
    settings = ROOT / "pyproject.toml"  # strict; and with the linters' cache, in which torch is read already
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", ROOT / ".mypy_cache", file],
        env=os.environ | {"MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("Success")


def test_strict_is_what_the_settings_say():
    assert "\nstrict = true\n" in (ROOT / "pyproject.toml").read_text()
    assert (ROOT / "src" / "tilewise" / "py.typed").exists()
