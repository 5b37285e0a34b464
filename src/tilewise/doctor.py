"""`tilewise doctor`: what is installed, which device is here, what runs on it, what is missing and how to get it.

It looks at one thing after the other. Whatever one of them raises becomes a line of the report, and the next is looked
at. What it says to run it has tried, and it says on which tensors.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import torch

from . import __version__, api, arch
from .bench import tune_findings as tables
from .bench.peers import CUDA_PEERS, find
from .bench.records import machine, package_version
from .compiler import cache, driver, nvrtc
from .emulator import builder
from .kvcache import PagedKVCache

GOOD, NOTE, MISSING = "ok", "note", "missing"
NEEDED = ("torch", "numpy", "typer", "rich", "matplotlib")
EXTRAS = {"transformers": "transformers", "lightning-thunder": "thunder", "numba": "numba"}  # package: extra
HOW_TO_GET = {
    "FlashAttention-2": "pip install flash-attn --no-build-isolation",
    "FlashAttention-3": "build the hopper/ folder of the flash-attention repository",
    "FlashInfer": "pip install flashinfer-python",
}
NVRTC_WHEELS = "pip install cuda-bindings nvidia-cuda-nvrtc"
# Of the calls that are tried.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
FORMATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
TOKENS, HEADS, HEAD_DIM = 16, 2, 64


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, how it stands, and what to do about it if anything."""

    section: str
    name: str
    state: str
    text: str
    remedy: str = ""


def examine(say: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Everything doctor knows, in the order it is shown. Looks only; changes nothing, but that what it tries on a GPU
    is compiled. say: told what is being done."""
    looks: list[tuple[str, str, Callable[[], Iterable[Finding]]]] = [
        ("installed", "packages", _packages),
        ("compilers", "NVRTC", _nvrtc),
        ("compilers", "CUDA's headers", _headers),
        ("compilers", "C++ compiler", _cpp),
        ("compilers", "cache", _cache),
        ("devices", "TILEWISE_CARD", _imitated),
        ("devices", "cpu", _cpu),
        ("devices", "driver", _driver),
        ("devices", "gpu", _gpus),
        ("tables", "tables", _tables),
        ("what runs", "calls", lambda: _runs(say)),
        ("peers", "peers", _peers),
    ]
    return [finding for look in looks for finding in _looked(*look)]


def _looked(section: str, name: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What `look` finds; one finding more if it raises."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(section, name, MISSING, f"could not be looked at: {_words(error)}")


def _words(error: Exception) -> str:
    """An exception in one line."""
    return ": ".join(word for word in (type(error).__name__, " ".join(str(error).split())) if word)


def _gpu_here() -> bool:
    """Does torch see a GPU? Where it cannot even tell, `_gpus` says why."""
    try:
        return torch.cuda.is_available()
    except Exception:
        return False


# ---- installed --------------------------------------------------------------------------------------------------


def _packages() -> Iterator[Finding]:
    yield Finding("installed", "python", GOOD, platform.python_version())
    yield Finding("installed", "system", GOOD, f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("installed", "tilewise", GOOD, __version__)
    least = _least()
    for name in (*NEEDED, *EXTRAS):
        wanted = f"'tilewise[{EXTRAS[name]}]'" if name in EXTRAS else name
        version = package_version(name)
        if not version:
            said = "not installed; nothing else needs it" if name in EXTRAS else "not installed"
            yield Finding("installed", name, NOTE if name in EXTRAS else MISSING, said, f"pip install {wanted}")
        elif _numbers(version) < _numbers(least.get(name, "0")):
            said = f"{version}, but {least[name]} or later is needed"
            yield Finding("installed", name, MISSING, said, f"pip install -U {wanted}")
        else:
            yield Finding("installed", name, GOOD, version)


def _least() -> dict[str, str]:
    """The least version of each package that Tilewise asks for, by name; {} where Tilewise itself is not installed."""
    try:
        asked = requires("tilewise") or []
    except PackageNotFoundError:
        return {}
    found = (re.match(r"([\w.-]+)[^;]*>=([\d.]+)", one) for one in asked)
    return {one[1]: one[2] for one in found if one}


def _numbers(version: str) -> list[int]:
    """5.17.0.dev3 as [5, 17, 0]."""
    leading = re.match(r"[\d.]*", version)
    return [int(word) for word in (leading[0] if leading else "").split(".") if word]


# ---- compilers --------------------------------------------------------------------------------------------------


def _nvrtc() -> Iterator[Finding]:
    try:
        major, minor = nvrtc.version()
    except (ImportError, RuntimeError) as error:
        state = MISSING if _gpu_here() else NOTE  # only kernels on a GPU need it
        yield Finding("compilers", "NVRTC", state, f"cannot be used: {_words(error)}", NVRTC_WHEELS)
    else:
        bindings = package_version("cuda-bindings")
        yield Finding("compilers", "NVRTC", GOOD, f"{major}.{minor}, cuda-bindings {bindings or 'version unknown'}")


def _headers() -> Iterator[Finding]:
    try:
        folders = nvrtc.include_folders()
    except RuntimeError as error:
        state = MISSING if _gpu_here() else NOTE
        yield Finding("compilers", "CUDA's headers", state, " ".join(str(error).split()))
    else:
        yield Finding("compilers", "CUDA's headers", GOOD, ", ".join(map(str, folders)))


def _cpp() -> Iterator[Finding]:
    """Of the emulator."""
    try:
        command = builder.compiler()
    except RuntimeError as error:  # it says what to install; only the emulator needs it
        yield Finding("compilers", "C++ compiler", NOTE, str(error))
        return
    done = subprocess.run([*command.split(), "--version"], capture_output=True, text=True, timeout=60)
    said = (done.stdout.strip() or done.stderr.strip() or "says nothing of its version").splitlines()[0]
    if done.returncode:
        said = f"fails with {done.returncode}: {said}; the emulator needs one that runs, CXX names another"
    yield Finding("compilers", "C++ compiler", MISSING if done.returncode else GOOD, f"{command}: {said}")


def _cache() -> Iterator[Finding]:
    """The folder of compiled kernels."""
    state = cache.show()
    elsewhere = "set TILEWISE_CACHE to a folder that can be written"
    if state.root is None:
        yield Finding("compilers", "cache", MISSING, "no folder, because you have no home", elsewhere)
        return
    most = f" of {state.limit / 2**20:.0f}" if math.isfinite(state.limit) else ""
    entries = f"{state.entries} {'kernel' if state.entries == 1 else 'kernels'}"
    held = f"{state.root}: {entries}, {state.bytes / 2**20:.1f}{most} MiB"
    if _can_be_written(state.root):
        yield Finding("compilers", "cache", GOOD, held)
    else:
        said = f"{held}; it cannot be written, so every process compiles again"
        yield Finding("compilers", "cache", MISSING, said, elsewhere)


def _can_be_written(folder: Path) -> bool:
    """The folder, or where it is not there yet the nearest above it that is."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


# ---- devices ----------------------------------------------------------------------------------------------------


def _imitated() -> list[Finding]:
    """TILEWISE_CARD, if it is set."""
    if arch.chosen is None:
        return []
    try:
        arch.limits_of(arch.chosen)
    except ValueError:
        said = f"{arch.chosen} is none of {', '.join(arch.ARCHS)}: no kernel runs until it is, or is unset"
        return [Finding("devices", "TILEWISE_CARD", MISSING, said)]
    said = f"{arch.chosen}: GPUs and the emulator behave as that card, with its kernels within its limits"
    return [Finding("devices", "TILEWISE_CARD", NOTE, said)]


def _cpu() -> Iterator[Finding]:
    threads, level = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    yield Finding("devices", "cpu", GOOD, f"{machine()}, {threads} threads, torch uses {level}")


def _driver() -> Iterator[Finding]:
    if why := driver.missing():
        yield Finding("devices", "driver", NOTE, why)
    else:
        major, minor = driver.version()
        yield Finding("devices", "driver", GOOD, f"serves CUDA {major}.{minor}")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip
        why = "torch sees none" if build else "this torch is a CPU build"
        remedy = "" if build else "install torch from https://pytorch.org/get-started for CUDA, where there is a GPU"
        yield Finding("devices", "gpu", NOTE, why, remedy)
        return
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        memory = properties.total_memory / 2**30
        capability = f"sm_{properties.major}{properties.minor}"
        yield Finding("devices", f"cuda:{i}", GOOD, f"{properties.name}, {memory:.0f} GiB, {capability}")
        yield _kernels(torch.device("cuda", i))


def _kernels(device: torch.device) -> Finding:
    """Which kernels serve a device."""
    name = f"{device} kernels"
    try:
        card = arch.card_of(device)
    except (NotImplementedError, ValueError) as error:
        return Finding("devices", name, MISSING, " ".join(str(error).split()))
    as_what = card if card == arch.arch_of_device(device) else f"{card}, as TILEWISE_CARD asks"
    if arch.hopper(card):
        return Finding("devices", name, GOOD, f"those of {as_what}: wgmma and TMA")
    shared = arch.shared_block(card) >> 10
    text = f"those of {as_what}: mma.sync and cp.async, within {shared} KB of shared memory per block"
    if card in ("sm_100", "sm_103"):
        text += "; Blackwell's data-centre cards have no kernel of their own yet"
    return Finding("devices", name, GOOD, text)


def _tables() -> list[Finding]:
    """What was measured on this card, and whether calls use it."""
    return [Finding("tables", found.name, found.state, found.text, found.remedy) for found in tables.findings()]


# ---- what runs --------------------------------------------------------------------------------------------------


def _runs(say: Callable[[str], None]) -> Iterator[Finding]:
    """What runs for which tensors, asked of the calls themselves. On a GPU a first time compiles them."""
    yield from _tried(torch.device("cpu"), say)
    if _gpu_here():
        yield from _tried(torch.device("cuda", torch.cuda.current_device()), say)
        return
    said = 'no GPU here, so nothing was tried on one; backend="emulator" runs its kernels on CPU tensors'
    yield Finding("what runs", "cuda", NOTE, f"{said}, and needs the C++ compiler")


def _tried(device: torch.device, say: Callable[[str], None]) -> Iterator[Finding]:
    """A finding for each dtype that names the calls that ran, and one for each call that did not."""
    for dtype in DTYPES:
        name = f"{device} {str(dtype).removeprefix('torch.')}"
        right, wrong = [], []
        for call, shape in _calls(device, dtype).items():
            say(f"trying {call.__name__.strip('_')} on {name}")
            what = f"{call.__name__.strip('_')} {shape}"
            try:
                off = (call(device, dtype).float() - 1).abs().max().item()
            except NotImplementedError as error:
                wrong.append(f"{what} is not served: {' '.join(str(error).split())}")
            except Exception as error:
                wrong.append(f"{what} fails: {_words(error)}")
            else:
                if off < 0.02:
                    right.append(what)
                else:
                    wrong.append(f"{what} gives a wrong answer: off by {off:.2g}")
        if right:
            yield Finding("what runs", name, GOOD, f"tried and right, by the {device.type} backend: {', '.join(right)}")
        for text in wrong:
            yield Finding("what runs", name, MISSING, text)


Call = Callable[[torch.device, torch.dtype], torch.Tensor]


def _calls(device: torch.device, dtype: torch.dtype) -> dict[Call, tuple[int, ...]]:
    """The calls to try, with the shape of their queries. On a GPU, where each compiles, those that share most of
    attention's source are tried in bfloat16 alone."""
    calls: dict[Call, tuple[int, ...]] = {_attention: (1, TOKENS, HEADS, HEAD_DIM)}
    if dtype == torch.bfloat16 or (device.type == "cpu" and dtype in FORMATS):
        calls |= {_attention_varlen: (TOKENS, HEADS, HEAD_DIM), _decode: (2, 1, HEADS, HEAD_DIM)}
    return calls


# Each answers ones: whatever the weights of the softmax are, they sum up to 1, and all values are 1.


def _attention(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    q, k = (_random(1, TOKENS, HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    return _output(api.attention(q, k, torch.ones_like(k, dtype=torch.float32).to(dtype), causal=True))


def _attention_varlen(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    q, k = (_random(TOKENS, HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    starts = torch.tensor([0, 5, TOKENS], dtype=torch.int32, device=device)
    return _output(api.attention_varlen(q, k, torch.ones_like(k), starts, starts, causal=True))


def _decode(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Over pages that two sequences share."""
    store = PagedKVCache(4, TOKENS, HEADS, HEAD_DIM, kv_format=FORMATS[dtype], device=device)
    first = store.allocate()
    k = _random(TOKENS, HEADS, HEAD_DIM, device=device, dtype=dtype)
    store.write(0, store.extend([first], [TOKENS]), k, torch.ones_like(k))
    plan = api.plan_decode(store, [first, store.fork(first)], num_heads=HEADS)
    return _output(api.decode(_random(2, 1, HEADS, HEAD_DIM, device=device, dtype=dtype), store, 0, plan))


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def _output(result: api.Result) -> torch.Tensor:
    """Without return_lse there is nothing else."""
    assert isinstance(result, torch.Tensor)
    return result


# ---- peers ------------------------------------------------------------------------------------------------------


def _peers() -> Iterator[Finding]:
    yield Finding("peers", "torch SDPA", GOOD, "always measured beside Tilewise")
    for name, modules in CUDA_PEERS.items():
        module = find(name)
        if isinstance(module, str):
            # Only worth getting where it could run.
            remedy = HOW_TO_GET[name] if _gpu_here() else ""
            yield Finding("peers", name, NOTE, f"{module} ({' or '.join(modules)}); not needed", remedy)
        else:
            version = getattr(module, "__version__", "version unknown")
            used = "measured in `tilewise bench`" if _gpu_here() else "needs a GPU to be measured"
            yield Finding("peers", name, GOOD, f"{version}, {used}")
