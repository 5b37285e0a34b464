"""`tilewise doctor`: it looks at everything there is to look at, tries what it says that runs, and never dies of it."""

from __future__ import annotations

import importlib.metadata
import re
import sys

import pytest
import torch

import tilewise
from tilewise import api, arch, doctor
from tilewise.bench import peers
from tilewise.compiler import cache, driver, nvrtc
from tilewise.doctor import GOOD, MISSING, NOTE
from tilewise.emulator import builder

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(autouse=True)
def _nothing_remembered():
    """What loads a compiler once for a process must ask again here."""
    kept = (nvrtc._load_nvrtc, nvrtc.include_folders, driver.missing, driver._bindings, builder.compiler)
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(driver, "missing", lru(lambda: "the NVIDIA driver is not installed (none here)"))


def lru(function):
    function.cache_clear = lambda: None
    return function


def found(section, name):
    """The only finding of that name."""
    (one,) = [finding for finding in doctor.examine() if (finding.section, finding.name) == (section, name)]
    return one


def test_doctor_looks_at_everything(run):
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    sections = ["installed", "compilers", "devices", "tables", "what runs", "peers"]
    assert [line for line in out.splitlines() if not line.startswith(" ")] == sections
    names = ("python", "system", "tilewise", "torch", "numpy", "matplotlib", "transformers", "lightning-thunder")
    names += ("numba", "NVRTC", "CUDA's headers", "C++ compiler", "cache", "cpu", "driver", *peers.CUDA_PEERS)
    for name in names:
        assert re.search(rf"^  . {re.escape(name)} ", out, re.MULTILINE), name
    assert torch.__version__ in out
    assert "could not be looked at" not in out


# ---- installed --------------------------------------------------------------------------------------------------


def test_versions_are_those_of_the_packages():
    for name in ("torch", "transformers", "lightning-thunder"):
        one = found("installed", name)
        assert (one.state, one.text) == (GOOD, importlib.metadata.version(name))


def test_packages_that_are_missing(monkeypatch):
    real = doctor.package_version
    gone = ("matplotlib", "transformers", "lightning-thunder", "numba")
    monkeypatch.setattr(doctor, "package_version", lambda name: "" if name in gone else real(name))
    one = found("installed", "matplotlib")
    assert (one.state, one.remedy) == (MISSING, "pip install matplotlib")
    for name, extra in (("transformers", "transformers"), ("lightning-thunder", "thunder"), ("numba", "numba")):
        one = found("installed", name)
        assert (one.state, one.remedy) == (NOTE, f"pip install 'tilewise[{extra}]'")  # nothing else needs it


@pytest.mark.parametrize(
    ("version", "state"), [("5.16.2", MISSING), ("5.17.0", GOOD), ("5.17.0.dev3", GOOD), ("6.1", GOOD)]
)
def test_a_package_that_is_too_old(monkeypatch, version, state):
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=2.9", 'transformers>=5.17; extra == "transformers"'])
    real = doctor.package_version
    monkeypatch.setattr(doctor, "package_version", lambda name: version if name == "transformers" else real(name))
    one = found("installed", "transformers")
    assert one.state == state
    assert version in one.text
    if state == MISSING:
        assert "5.17 or later is needed" in one.text
        assert one.remedy == "pip install -U 'tilewise[transformers]'"


# ---- compilers --------------------------------------------------------------------------------------------------


def test_nvrtc_and_its_headers():
    _, major, minor = nvrtc._load_nvrtc().nvrtcVersion()
    assert found("compilers", "NVRTC").state == GOOD
    assert found("compilers", "NVRTC").text.startswith(f"{major}.{minor}")
    headers = found("compilers", "CUDA's headers")
    assert (headers.state, headers.text) == (GOOD, ", ".join(map(str, nvrtc.include_folders())))


@pytest.mark.parametrize("gpu", [False, True])
def test_nvrtc_that_does_not_import(monkeypatch, gpu):
    """Where there is a GPU, nothing runs on it without; elsewhere it is not needed."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(doctor, "_gpu_here", lambda: gpu)
    one = found("compilers", "NVRTC")
    assert one.state == (MISSING if gpu else NOTE)
    assert "ModuleNotFoundError" in one.text or "ImportError" in one.text
    assert "pip install cuda-bindings nvidia-cuda-nvrtc" in one.text + one.remedy


def test_cpp_compiler(monkeypatch, tmp_path):
    one = found("compilers", "C++ compiler")
    assert one.state == GOOD
    assert re.match(rf"{re.escape(builder.compiler())}: .*\d+\.\d+", one.text)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no license >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    builder.compiler.cache_clear()
    one = found("compilers", "C++ compiler")
    assert one.state == MISSING
    assert str(broken) in one.text
    assert "no license" in one.text


def test_no_cpp_compiler(monkeypatch, without_gpu):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)
    one = found("compilers", "C++ compiler")
    assert one.state == NOTE
    assert "the emulator needs a C++ compiler: install g++ or clang++, or `pip install ziglang`" in one.text
    assert "emulator" in found("what runs", "cuda").text


def test_cache_folder_and_its_size(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "kept"))
    monkeypatch.setenv("TILEWISE_CACHE_LIMIT", "64")
    one = found("compilers", "cache")
    assert (one.state, one.text) == (GOOD, f"{tmp_path}/kept: 0 kernels, 0.0 of 64 MiB")
    cache.put("cubin", "0" * 64, {"kernel.cubin": b"\0" * 2**21})
    assert found("compilers", "cache").text == f"{tmp_path}/kept: 1 kernel, 2.0 of 64 MiB"


def test_cache_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "file" / "kept"))
    one = found("compilers", "cache")
    assert one.state == MISSING
    assert "cannot be written" in one.text
    assert "TILEWISE_CACHE" in one.remedy
    monkeypatch.setattr(cache, "root", lambda: None)
    assert "TILEWISE_CACHE" in found("compilers", "cache").remedy


# ---- devices ----------------------------------------------------------------------------------------------------


def test_driver(monkeypatch, without_gpu):
    one = found("devices", "driver")
    assert (one.state, one.text) == (NOTE, "the NVIDIA driver is not installed (none here)")
    monkeypatch.setattr(driver, "missing", lru(lambda: None))
    monkeypatch.setattr(driver, "version", lambda: (13, 1))
    one = found("devices", "driver")
    assert (one.state, one.text) == (GOOD, "serves CUDA 13.1")


@pytest.mark.parametrize(
    ("capability", "card", "state", "said"),
    [
        ((9, 0), None, GOOD, "sm_90a: wgmma and TMA"),
        ((9, 0), "sm_80", GOOD, "sm_80, as TILEWISE_CARD asks: mma.sync and cp.async, within 163 KB"),
        ((12, 0), None, GOOD, "sm_120: mma.sync and cp.async, within 99 KB"),
        ((10, 3), None, GOOD, "no kernel of their own yet"),
        ((12, 0), "sm_80", MISSING, "TILEWISE_CARD=sm_80: cuda:0 is sm_120 and cannot behave as that card"),
        ((11, 0), None, MISSING, "Jetson Thor"),
    ],
)
def test_which_kernels_serve_a_card(capability, card, state, said, monkeypatch):
    monkeypatch.setattr(arch, "capability", lambda device: capability)
    monkeypatch.setattr(arch, "chosen", card)
    arch._card.cache_clear()
    one = doctor._kernels(torch.device("cuda", 0))
    assert (one.name, one.state) == ("cuda:0 kernels", state)
    assert said in one.text


def test_a_card_that_is_imitated(monkeypatch):
    for card, state, said in (("sm_89", NOTE, "sm_89: GPUs"), ("a100", MISSING, "a100 is none of")):
        monkeypatch.setattr(arch, "chosen", card)
        (one,) = doctor._imitated()
        assert (one.name, one.state) == ("TILEWISE_CARD", state)
        assert one.text.startswith(said)
    monkeypatch.setattr(arch, "chosen", None)
    assert list(doctor._imitated()) == []


# ---- what runs --------------------------------------------------------------------------------------------------


def runs():
    return {one.name: (one.state, one.text) for one in doctor.examine() if one.section == "what runs"}


def test_what_is_said_to_run_was_tried(monkeypatch):
    tried = []
    for name in ("attention", "attention_varlen", "decode"):
        real = getattr(api, name)

        def spy(q, *rest, real=real, name=name, **options):
            tried.append((name, str(q.dtype).removeprefix("torch."), tuple(q.shape)))
            return real(q, *rest, **options)

        monkeypatch.setattr(doctor.api, name, spy)
    said = runs()
    assert {name for name in said if name.startswith("cpu")} == {
        "cpu float32", "cpu float16", "cpu bfloat16", "cpu float8_e4m3fn"
    }  # fmt: skip
    for name, (state, text) in said.items():
        if not name.startswith("cpu"):
            continue
        assert state == GOOD
        dtype = name.removeprefix("cpu ")
        calls = [f"{call} {shape}" for call, of, shape in tried if of == dtype]
        assert text == f"tried and right, by the cpu backend: {', '.join(calls)}"
        assert len(calls) == (1 if dtype.startswith("float8") else 3)
        assert "every" not in text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotImplementedError("no float16 here"), "attention (1, 16, 2, 64) is not served: no float16 here"),
        (ValueError("bad\nvalue"), "attention (1, 16, 2, 64) fails: ValueError: bad value"),
        (
            RuntimeError("CUDA error: device-side"),
            "attention (1, 16, 2, 64) fails: RuntimeError: CUDA error: device-side",
        ),
        (KeyError("x"), "attention (1, 16, 2, 64) fails: KeyError: 'x'"),
        (MemoryError(), "attention (1, 16, 2, 64) fails: MemoryError"),
    ],
)
def test_a_call_that_fails(run, monkeypatch, error, said):
    real = api.attention

    def fails(q, *rest, **options):
        if q.dtype == torch.float16:
            raise error
        return real(q, *rest, **options)

    monkeypatch.setattr(doctor.api, "attention", fails)
    found = [one for one in doctor.examine() if one.name == "cpu float16"]
    assert [one.state for one in found] == [GOOD, MISSING]  # the others ran
    assert "attention (" not in found[0].text
    assert found[1].text == said
    assert runs()["cpu float32"][0] == GOOD
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert said in out


def test_a_wrong_answer(monkeypatch):
    real = api.decode
    monkeypatch.setattr(doctor.api, "decode", lambda *args, **options: real(*args, **options) * 1.1)
    (one,) = [one for one in doctor.examine() if one.name == "cpu float32" and one.state == MISSING]
    assert one.text == "decode (2, 1, 2, 64) gives a wrong answer: off by 0.1"


def test_without_a_gpu(run, without_gpu):
    code, out, _ = run("doctor")
    assert code == 0
    assert "not served by this version" not in out
    one = found("what runs", "cuda")
    assert one.state == NOTE
    assert one.text.startswith("no GPU here, so nothing was tried on one")
    assert 'backend="emulator"' in one.text


@pytest.mark.gpu
def test_on_a_gpu(run):
    name = f"cuda:{torch.cuda.current_device()}"
    of_gpu = [one for one in doctor.examine() if one.section == "what runs" and one.name.startswith(name)]
    assert [one.state for one in of_gpu] == [GOOD] * 4
    assert (
        "attention_varlen (16, 2, 64), decode (2, 1, 2, 64)"
        in {one.name: one.text for one in of_gpu}[f"{name} bfloat16"]
    )
    assert found("devices", "driver").text.startswith("serves CUDA ")
    assert found("compilers", "NVRTC").state == GOOD


# ---- what goes wrong --------------------------------------------------------------------------------------------

PARTS = [
    (doctor, "package_version"),
    (doctor, "machine"),
    (doctor.tables, "findings"),
    (doctor, "find"),
    (torch.cuda, "is_available"),
    (torch.cuda, "device_count"),
    (cache, "show"),
    (builder, "compiler"),
    (nvrtc, "include_folders"),
    (nvrtc, "version"),
    (driver, "missing"),
    (doctor, "PagedKVCache"),
]


@pytest.mark.parametrize(("where", "name"), PARTS, ids=[name for _, name in PARTS])
def test_nothing_that_it_looks_at_kills_it(run, monkeypatch, where, name):
    class Strange(Exception):
        """None that anybody expects."""

    def fails(*args, **options):
        raise Strange("out of\nthe blue")

    monkeypatch.setattr(where, name, lru(fails))
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert "Strange: out of the blue" in out
    # The other parts are still there.
    assert f"tilewise          {tilewise.__version__}" in out or name == "package_version"
    assert "cpu float32" in out
    assert "torch SDPA" in out
