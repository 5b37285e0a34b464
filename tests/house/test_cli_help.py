"""What help says is what happens: defaults, names that are taken, and where the hint under an error leads."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from cli_cases import assert_one_line_and_hint

from tilewise import cli
from tilewise.bench import commands, generate, rungs, show, tune_prefill, workloads
from tilewise.gpu import decode_kernels
from tilewise.integrations import transformers_config
from tilewise.learn import testdata

pytestmark = pytest.mark.usefixtures("quick")
HALVES_AND_WHOLE = [name for name in workloads.DTYPES if name != workloads.FLOAT8]


@pytest.fixture
def help_of(run, monkeypatch):
    """A command's help in one line, or what it says of an option: (text, what is taken without it)."""
    monkeypatch.setenv("NO_COLOR", "1")  # no boxes

    def read(command, option=None):
        code, out, _ = run(*command.split(), "--help")
        assert code == 0
        if option is None:
            return " ".join(out.split())
        (text,) = re.findall(rf"^  {option}\b.*(?:\n   .*)*", out, re.MULTILINE)
        text = " ".join(text.split())
        default = re.search(r"\[default: \(?(.*?)\)?(?:;[^\]]*)?\]", text)
        return text, default and default[1]

    return read


SIZES = ("batch", "seq", "heads", "hdim", "dtype", "page_size", "backend", "device")
MORE = {
    "bench": ("kv_heads", "block", "causal"),
    "bench prefix": ("kv_heads", "prefix", "tokens"),
    "bench decode": ("kv_heads", "tokens"),
    "bench sparse": ("kv_heads", "sparsity", "block", "causal"),
}


@pytest.mark.parametrize("command", MORE)
def test_the_defaults_that_help_shows_are_those_that_are_taken(help_of, monkeypatch, command):
    points = []
    for module in (commands, show):
        monkeypatch.setattr(module, "show_point", lambda point, loops, json: points.append(point))
    # `bench` alone shows the bars, and `bench sparse` on a GPU a table: these options make points of them.
    more = {"bench": ["--backend", "auto"], "bench sparse": ["--device", "cpu"]}
    assert cli.main([*command.split(), *more.get(command, [])]) == 0
    (point,) = points
    for name in (*SIZES, *MORE[command]):
        if command == "bench sparse" and name == "page_size":
            continue
        _, shown = help_of(command, "--" + name.replace("_", "-"))
        value = getattr(point, name)
        if name == "kv_heads" and value == point.heads:
            assert shown == "as many as heads"
        elif name == "causal":
            assert shown == ("causal" if value else "no-causal")
        elif name == "device":
            assert (shown or "").partition(" ")[0] == ("cuda" if command == "bench sparse" else value)
        elif name == "block":
            assert shown == f"{value}, or the schedule file's"
        else:
            assert shown == str(value), name


def test_options_are_explained_by_options_that_are_there(help_of):
    for command in ("bench decode", "bench sparse"):
        assert "--prefix" not in help_of(command)
    assert "--prefix" in help_of("bench", "--seq")[0]


@pytest.mark.parametrize(
    ("command", "taken"),
    [
        ("bench", list(workloads.DTYPES)),
        ("bench prefix", HALVES_AND_WHOLE),
        ("bench decode", HALVES_AND_WHOLE),
        ("bench sparse", HALVES_AND_WHOLE),
        ("sweep", list(workloads.DTYPES)),
        ("ladder", list(rungs.DTYPES)),
        ("tune", list(tune_prefill.DTYPES)),
        ("warm", list(transformers_config.DTYPES)),
        ("testdata make", list(testdata.DTYPES)),
    ],
)
def test_help_names_the_dtypes_that_are_taken(help_of, command, taken):
    text, _ = help_of(command, "--dtype")
    said = re.findall(r"\bb?float\d+\b", text.partition("[default")[0].replace("(float32)", ""))
    assert sorted(said) == sorted(taken)


def test_float8_is_measured_and_refused_as_help_says(run, help_of, monkeypatch):
    assert "float8 for dense attention" in help_of("bench", "--dtype")[0]
    assert run("bench", "--dtype", "float8", "--seq", "32", "--heads", "2", "--hdim", "16", "--loops", "1")[0] == 0
    code, _, err = run("bench", "decode", "--dtype", "float8")
    assert code == 2
    assert "dense" in err


@pytest.mark.parametrize(
    ("command", "option", "taken"),
    [("bench", "--kv-format", workloads.KV_FORMATS), ("warm", "--kv-format", decode_kernels.FORMATS)],
)
def test_help_names_the_formats_that_are_taken(help_of, command, option, taken):
    said = re.findall(r"\b(?:b?f[lp]?\d+|int\d)\b", help_of(command, option)[0])
    assert sorted(said) == sorted(taken)


# ---- what is refused before anything is measured ----------------------------------------------------------------


@pytest.fixture
def measures_nothing(monkeypatch):
    def measured(*args, **options):
        raise AssertionError("this was to be refused before")

    monkeypatch.setattr(workloads, "build", measured)
    monkeypatch.setattr(generate, "make_model", measured)


@pytest.mark.usefixtures("measures_nothing")
@pytest.mark.parametrize("command", ["bench", "bench prefix", "bench decode", "bench sparse", "sweep"])
@pytest.mark.parametrize("backend", ["foo", "emulator:nothing", "emulator2", "cuda"])
def test_a_backend_that_is_none_is_refused(run, tmp_path, command, backend):
    code, out, err = run(*command.split(), "--backend", backend)
    assert (code, out) == (2, "")
    assert_one_line_and_hint(err)
    assert "backend" in err
    assert f"{backend.rpartition(':')[2]}'" in err
    assert err.splitlines()[1] == f"hint: tilewise {command} --help"
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_backends(help_of):
    assert "auto, cpu, cuda or emulator" in help_of("bench", "--backend")[0]


@pytest.mark.usefixtures("measures_nothing")
@pytest.mark.parametrize("command", ["bench", "bench prefix", "bench cards", "bench variants", "bench serve", "sweep"])
def test_a_device_that_is_none_is_refused(run, command):
    code, out, err = run(*command.split(), "--device", "gpu")
    assert (code, out) == (2, "")
    assert_one_line_and_hint(err)
    assert "device must be cpu or cuda, got 'gpu'" in err
    assert err.splitlines()[1] == f"hint: tilewise {command} --help"


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
@pytest.mark.usefixtures("measures_nothing")
class TestWithoutAGPU:
    @pytest.mark.parametrize("command", ["prefill", "serve"])
    def test_tables_of_a_gpu_say_what_is_missing_and_what_runs_here(self, run, command):
        code, out, err = run("bench", command)
        assert (code, out) == (1, "")
        assert_one_line_and_hint(err)
        assert f"bench {command} needs a GPU, and torch sees none here" in err
        assert "`tilewise bench` measures on this CPU" in err
        assert "got cuda" not in err  # nobody gave it
        assert "tilewise doctor" in err

    @pytest.mark.parametrize("command", ["bench", "bench cards", "bench prefill", "bench generate", "sweep"])
    def test_a_gpu_that_was_asked_for(self, run, command):
        code, out, err = run(*command.split(), "--device", "cuda")
        assert (code, out) == (2, "")
        assert_one_line_and_hint(err)
        assert "device" in err
        assert "torch sees no GPU here" in err
        assert "cuda" in err


@pytest.mark.usefixtures("measures_nothing")
def test_generate_without_transformers_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out, err = run("bench", "generate")
    assert (code, out) == (1, "")
    assert_one_line_and_hint(err)
    assert "pip install 'tilewise[transformers]'" in err


def test_the_hint_of_every_command_is_its_own_help(run):
    """Each names itself, so the list of names that hints know is whole."""
    import typer

    def leaves(command, words=()):
        found = getattr(command, "commands", {})
        return [words] if not found else [leaf for name, c in found.items() for leaf in leaves(c, (*words, name))]

    everything = leaves(typer.main.get_command(cli.app))
    assert len(everything) > 15
    for words in everything:
        code, _, err = run(*words, "--no-such-option")
        assert code == 2
        assert err.splitlines()[1] == f"hint: tilewise {' '.join(words)} --help"
