"""The Numba rung in numba's simulator, against the oracle. The simulator is chosen before numba's first import, hence a
process of its own, which computes all cases at once: starting it costs more than most of them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from tilewise import reference

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None or importlib.util.find_spec("numba_cuda") is None,
    reason="numba and numba-cuda are not installed: pip install 'tilewise[numba]'",
)

# batch, heads, KV heads, Nq, Nk, D, causal, factor of q
CASES = {
    "one token": (1, 1, 1, 1, 1, 32, False, 1),
    "ragged tiles": (1, 1, 1, 9, 17, 64, False, 1),
    "whole tiles": (1, 1, 1, 8, 32, 32, True, 1),
    "causal, more keys": (2, 2, 1, 3, 18, 32, True, 1),
    "causal, more queries": (1, 1, 1, 17, 5, 32, True, 1),  # the first 12 rows see no key
    "grouped heads": (1, 4, 2, 2, 7, 64, False, 1),
    "large logits": (1, 1, 1, 5, 20, 32, True, 60),
    "very negative logits": (1, 1, 1, 3, 18, 32, False, -1000),
    "wide head": (1, 1, 1, 3, 5, 128, False, 1),
    "strides": (1, 2, 2, 3, 5, 32, True, 1),
}

IN_SIMULATOR = """
import sys, torch
from tilewise.learn import ladder_numba
cases = torch.load(sys.argv[1])
torch.save({n: ladder_numba.attention(*c["qkv"], causal=c["causal"]) for n, c in cases.items()}, sys.argv[2])
"""


def make(name, device="cpu"):
    batch, heads, kv_heads, nq, nk, d, causal, factor = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    q = torch.randn(batch, nq, heads, d, generator=generator) * factor
    k, v = (torch.randn(batch, nk, kv_heads, d, generator=generator) for _ in range(2))
    if name == "very negative logits":
        q, k = -q.abs(), k.abs()
    if name == "strides":  # heads before rows, as a model's projection may leave them
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return [x.to(device) for x in (q, k, v)], causal


def assert_right(name, o, lse):
    (q, k, v), causal = make(name)
    exact, exact_lse = reference.attention(q, k, v, causal=causal)
    honest, honest_lse = reference.baseline(q, k, v, causal=causal)
    for got, want, base in ((o, exact, honest), (lse, exact_lse, honest_lse)):
        verdict = reference.judge(got.cpu(), want, base, lse=exact_lse)
        assert verdict.ok, verdict.reason


def in_process(code, *words, simulator):
    env = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1" if simulator else "0"}
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numba")
    cases = {name: dict(zip(("qkv", "causal"), make(name), strict=True)) for name in CASES}
    torch.save(cases, folder / "cases.pt")
    done = in_process(IN_SIMULATOR, folder / "cases.pt", folder / "out.pt", simulator=True)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize("name", CASES)
def test_simulator_agrees_with_the_oracle(simulated, name):
    assert_right(name, *simulated[name])


def test_without_the_simulator():
    """It compiles for a card, and says what CPU tensors need. No doubles: one careless constant away, and slow."""
    code = """
import torch
from numba import cuda, types
from tilewise.learn.ladder_numba import attention, kernel
for x in (torch.zeros(1, 1, 1, 32), torch.zeros(1, 1, 1, 32, dtype=torch.float16)):
    try:
        attention(x, x, x)
    except NotImplementedError as error:
        print(error)
arrays = [types.Array(types.float32, n, "C") for n in (4, 4, 4, 4, 3)]
print(cuda.compile_ptx(kernel(64).py_func, (*arrays, types.float32, types.boolean), cc=(8, 0))[0])
"""
    done = in_process(code, simulator=False)
    simulator, dtype, *ptx = done.stdout.splitlines()
    assert "set NUMBA_ENABLE_CUDASIM=1" in simulator
    assert "float32" in dtype
    if "libnvvm" in done.stderr.lower():
        pytest.skip("no libnvvm, which numba compiles with: pip install 'numba-cuda[cu13]'")
    assert done.returncode == 0, done.stderr
    text = "\n".join(ptx)
    assert text.count(".entry") == 1
    assert "bar.sync" in text
    assert "f64" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_card_agrees_with_the_oracle(name):
    from tilewise.learn import ladder_numba

    (q, k, v), causal = make(name, "cuda")
    assert_right(name, *ladder_numba.attention(q, k, v, causal=causal))
