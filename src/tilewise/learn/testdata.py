"""Test cases as files: q, k, v with the output that the float64 oracle gives, for checking a kernel written anywhere.

Patterns (`PATTERNS`): `randn`, `small` (a tenth of it), `large` (twice), `positive` (its absolute value), `uniform` in
[-1, 1), `ones`; `qk_test`, where row i of q, k and v is 10 times the unit vector of i modulo D, so that every weight is
known; and `v_orientation`, where all weights are equal and column d of v is d / D, so that a transposed V shows.

Three forms:

`.npz`    any case: float32 arrays q (B, N, H, D), k and v (B, Nk, Hkv, D), o (B, N, H, D), lse (B, H, N), for a shared
          prefix also prefix_k and prefix_v (1, P, Hkv, D) that every sequence sees before its own keys, and `meta`, a
          JSON string with pattern, causal, dtype and seed.
flat      `PATTERN_N_D_causal_True.txt` (or False): one sequence and one head; the floats of q, k, v and o, each (N, D)
          row by row, separated by spaces. The name carries the sizes.
chunks    `PATTERN_sS_hH_cC.txt`: S sequences of one query each over C chunks of keys that all of them share. A header
          line `n_seqs chunk d heads chunks`, then a line for each array: q (n_seqs, heads, d); k of each chunk in turn
          (heads, chunk, d); v of each likewise; and for each chunk what its keys alone give: the sums of exp(s - max) v
          (heads, n_seqs, d), then of each chunk the row maxima of the scaled scores s (heads, n_seqs), then of each
          the sums of exp(s - max) (heads, n_seqs). So a chunk's output is sums / sum and its LSE is max + log(sum).
"""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewise import api, checks, reference

PATTERNS = ("randn", "small", "ones", "uniform", "large", "positive", "qk_test", "v_orientation")
FORMS = ("npz", "flat", "chunks")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Floats = npt.NDArray[np.float32]
_FLAT_NAME = re.compile(r"(?P<pattern>\w+?)_(?P<n>\d+)_(?P<d>\d+)_causal_(?P<causal>True|False)(_partial_False)?\.txt")
_ARRAYS = ("q", "k", "v", "o", "lse")


@dataclass(frozen=True)
class Case:
    """One case, all float32: shapes as in the module's docstring. `dtype` is what the inputs are exact in, if known."""

    pattern: str
    causal: bool
    dtype: str | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor | None = None
    prefix_k: torch.Tensor | None = None
    prefix_v: torch.Tensor | None = None
    name: str = ""
    seed: int = 0

    @property
    def prefix(self) -> int:
        """Tokens of the shared prefix."""
        return 0 if self.prefix_k is None else self.prefix_k.shape[1]


@dataclass(frozen=True)
class Report:
    """What checking a case found: Tilewise's error against the file's o over all elements, and the two judgements."""

    case: Case
    dtype: str  # that it was computed in
    max_error: float
    relative_error: float  # to the largest value of o
    allowed: float
    kernel: reference.Verdict  # Tilewise against the oracle
    file: reference.Verdict  # the file's own o and lse against the oracle

    @property
    def ok(self) -> bool:
        """Are both right?"""
        return self.kernel.ok and self.file.ok


def make(
    pattern: str,
    *,
    batch: int = 1,
    seq: int = 256,
    heads: int = 1,
    kv_heads: int | None = None,
    hdim: int = 64,
    causal: bool = False,
    dtype: str = "float32",
    prefix: int = 0,
    queries: int | None = None,
    seed: int = 42,
) -> Case:
    """A case of `batch` sequences with `queries` rows (None: seq) over `seq` keys each, after a `prefix` all share."""
    checks.choice("pattern", pattern, PATTERNS)
    checks.choice("dtype", dtype, tuple(DTYPES))
    kv_heads = heads if kv_heads is None else kv_heads
    queries = seq if queries is None else queries
    for name, value in (("batch", batch), ("seq", seq), ("heads", heads), ("kv_heads", kv_heads), ("queries", queries)):
        checks.integer(name, value, 1)
    checks.integer("hdim", hdim, 1, 512)
    checks.integer("prefix", prefix, 0)
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads={heads}, got {kv_heads}")
    rng = np.random.default_rng(checks.integer("seed", seed, 0))
    exact = DTYPES[dtype]
    q = _pattern(pattern, "q", (batch, queries, heads, hdim), rng, exact)
    k, v = (_pattern(pattern, role, (batch, seq, kv_heads, hdim), rng, exact) for role in "kv")
    pk = pv = None
    if prefix:
        pk, pv = (_pattern(pattern, role, (1, prefix, kv_heads, hdim), rng, exact) for role in "kv")
    o, lse = _states(q, k, v, pk, pv, causal, torch.float64)
    return Case(pattern, causal, dtype, q, k, v, o.float(), lse.float(), pk, pv, seed=seed)


def _pattern(
    pattern: str, role: str, shape: tuple[int, int, int, int], rng: np.random.Generator, dtype: torch.dtype
) -> torch.Tensor:
    """One of q, k, v (B, N, H, D), float32 with values that `dtype` holds exactly."""
    _, n, _, d = shape
    if pattern == "ones" or (pattern == "v_orientation" and role != "v"):
        x: npt.NDArray[Any] = np.ones(shape)
    elif pattern == "v_orientation":
        x = np.broadcast_to(np.arange(d) / d, shape)
    elif pattern == "qk_test":
        unit = 10.0 * (np.arange(n)[:, None] % d == np.arange(d)[None, :])
        x = np.broadcast_to(unit[None, :, None, :], shape)
    elif pattern == "uniform":
        x = rng.uniform(-1.0, 1.0, shape)
    else:
        x = rng.standard_normal(shape) * {"randn": 1.0, "small": 0.1, "large": 2.0, "positive": 1.0}[pattern]
        x = np.abs(x) if pattern == "positive" else x
    return torch.from_numpy(np.array(x, np.float32)).to(dtype).float()


def _states(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix_k: torch.Tensor | None,
    prefix_v: torch.Tensor | None,
    causal: bool,
    dtype: torch.dtype,
) -> reference.State:
    """The oracle in `dtype`: (o, lse)."""
    if prefix_k is None or prefix_v is None:
        return reference.attention(q, k, v, causal=causal, dtype=dtype)
    return reference.shared_prefix_attention(q, [(prefix_k, prefix_v)], k, v, causal=causal, dtype=dtype)


def check(case: Case, *, dtype: str | None = None) -> Report:
    """Compute the case with Tilewise on the CPU in `dtype` (None: the case's) and judge it by the tolerance rule.

    The file's own o is judged too: a file whose o is not what its inputs give would otherwise pass or fail anything.
    A text file does not say its dtype. It is float32, unless its o is too coarse for that and all its numbers are
    bfloat16 ones: then it was computed in bfloat16.
    """
    dtype = case.dtype if dtype is None else dtype
    if dtype is None:
        report = check(case, dtype="float32")
        coarse = all(torch.equal(x.bfloat16().float(), x) for x in (case.q, case.k, case.v, case.o))
        return check(case, dtype="bfloat16") if coarse and not report.file.ok else report
    chosen = DTYPES[checks.choice("dtype", dtype, tuple(DTYPES))]
    tensors = [None if x is None else x.to(chosen) for x in (case.q, case.k, case.v, case.prefix_k, case.prefix_v)]
    q, k, v, pk, pv = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    poisoned = torch.full(q.shape, torch.nan, dtype=chosen)
    got: api.Result
    if pk is None or pv is None:
        got = api.attention(q, k, v, causal=case.causal, return_lse=True, out=poisoned)
    else:
        got = api.shared_prefix_attention(q, [(pk, pv)], k, v, causal=case.causal, return_lse=True, out=poisoned)
    assert isinstance(got, tuple)  # (o, lse)
    exact = _states(q, k, v, pk, pv, case.causal, torch.float64)
    honest = _states(q, k, v, pk, pv, case.causal, chosen)
    kernel = _judge(got, exact, honest)
    file = _judge((case.o.to(chosen), case.lse), exact, honest)
    max_error = (got[0].double() - case.o.double()).abs().max().item()
    relative = max_error / max(case.o.abs().max().item(), 1e-30)
    return Report(case, dtype, max_error, relative, kernel.allowed, kernel, file)


def _judge(
    got: tuple[torch.Tensor, torch.Tensor | None], exact: reference.State, honest: reference.State
) -> reference.Verdict:
    o = reference.judge(got[0], exact[0], honest[0], lse=exact[1])
    if not o.ok or got[1] is None:
        return o
    lse = reference.judge(got[1], exact[1], honest[1])
    return o if lse.ok else reference.Verdict(False, lse.error, lse.allowed, f"lse: {lse.reason}")


# ---- files ----------------------------------------------------------------------------------------------------------


def file_name(case: Case, form: str, chunk: int = 64) -> str:
    """The name a case's file has in this form."""
    batch, n, heads, d = case.q.shape
    if form == "flat":
        return f"{case.pattern}_{n}_{d}_causal_{case.causal}.txt"
    if form == "chunks":
        return f"{case.pattern}_s{batch * n}_h{heads}_c{case.k.shape[1] // chunk}.txt"
    prefix = f"_p{case.prefix}" if case.prefix else ""
    return f"{case.pattern}_b{batch}_n{case.k.shape[1]}_h{heads}_d{d}{prefix}_causal_{case.causal}.npz"


def save(case: Case, path: Path, form: str, *, chunk: int = 64) -> None:
    """Write the case in one of FORMS. ValueError when the form cannot hold it."""
    checks.choice("form", form, FORMS)
    if form == "flat":
        path.write_text(_flat_text(case, path), encoding="ascii")
    elif form == "chunks":
        text = _chunks_text(case, chunk)
        if _FLAT_NAME.fullmatch(path.name):
            raise ValueError(f"that is a flat file's name: use {file_name(case, 'chunks', chunk)}, got {path.name}")
        path.write_text(text, encoding="ascii")
    else:
        _save_npz(case, path)


def load(path: Path) -> list[Case]:
    """The cases in a file of any form: one, or for chunks the whole and each chunk alone. ValueError if malformed."""
    if path.suffix == ".npz":
        return [_load_npz(path)]
    try:
        text = path.read_text(encoding="ascii")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file of numbers") from error
    name = _FLAT_NAME.fullmatch(path.name)
    if name:
        return [_load_flat(path, text, name)]
    head, _, body = text.partition("\n")
    sizes = head.split()
    if len(sizes) == 5 and all(size.isdigit() and 0 < int(size) < 2**31 for size in sizes):
        return _load_chunks(path, [int(size) for size in sizes], body)
    raise ValueError(
        f"{path} has no form that is known here: neither a name like randn_256_64_causal_True.txt, "
        "nor a first line `n_seqs chunk d heads chunks`, nor the ending .npz"
    )


def _text(x: torch.Tensor) -> str:
    # str() of a numpy float32 is its shortest exact decimal; repr() says np.float32(…) since NumPy 2.
    return " ".join(str(value) for value in x.float().contiguous().flatten().numpy())


def _numbers(path: Path, text: str, count: int, what: str) -> torch.Tensor:
    try:
        numbers = np.array(text.split(), dtype=np.float32)
    except ValueError as error:
        raise ValueError(f"{path} holds something that is not a number: {str(error)[:80]}") from error
    if len(numbers) != count:
        raise ValueError(f"{path} must hold {count} numbers for {what}, it has {len(numbers)}")
    if not np.isfinite(numbers).all():
        raise ValueError(f"{path} holds NaN or infinite numbers")
    return torch.from_numpy(numbers)


def _flat_text(case: Case, path: Path) -> str:
    if case.q.shape != case.k.shape or case.q.shape[0] != 1 or case.q.shape[2] != 1 or case.prefix:
        raise ValueError("the flat form holds one sequence and one head without a prefix: use batch 1 and heads 1")
    name = file_name(case, "flat")
    if path.name not in (name, name.replace(".txt", "_partial_False.txt")):
        raise ValueError(f"a flat file's name tells what it holds: use {name}, got {path.name}")
    return " ".join(_text(x) for x in (case.q, case.k, case.v, case.o)) + "\n"


def _load_flat(path: Path, text: str, name: re.Match[str]) -> Case:
    n, d = int(name["n"]), int(name["d"])
    if not n or not 1 <= d <= 512:
        raise ValueError(f"{path}: its name says N {n} and D {d}; N must be at least 1, D between 1 and 512")
    numbers = _numbers(path, text, 4 * n * d, f"q, k, v and o of N {n} and D {d}")
    q, k, v, o = numbers.view(4, 1, n, 1, d)
    return Case(name["pattern"], name["causal"] == "True", None, q, k, v, o, name=path.name)


def _chunks_text(case: Case, chunk: int) -> str:
    batch, queries, heads, d = case.q.shape
    keys = case.k.shape[1]
    if batch != 1 or case.causal or case.prefix or case.k.shape[2] != heads:
        raise ValueError("the chunks form holds rows that all see all keys, with as many KV heads as heads, no prefix")
    if keys % checks.integer("chunk", chunk, 1):
        raise ValueError(f"chunk must divide the {keys} keys, got {chunk}")
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("k", "v", "sums", "max", "sum")}
    for start in range(0, keys, chunk):
        k, v = (x[:, start : start + chunk] for x in (case.k, case.v))
        o, lse = reference.attention(case.q, k, v)
        scores = torch.einsum("bihd,bjhd->bhij", case.q.double(), k.double()) * d**-0.5
        top = scores.amax(-1)
        weight = torch.exp(lse - top)
        parts["k"].append(k[0].transpose(0, 1))
        parts["v"].append(v[0].transpose(0, 1))
        parts["sums"].append(o[0].transpose(0, 1) * weight[0, :, :, None])
        parts["max"].append(top[0])
        parts["sum"].append(weight[0])
    lines = [f"{queries} {chunk} {d} {heads} {keys // chunk}", _text(case.q[0])]
    lines += [_text(x) for column in parts.values() for x in column]
    return "\n".join(lines) + "\n"


def _load_chunks(path: Path, sizes: list[int], body: str) -> list[Case]:
    n_seqs, chunk, d, heads, chunks = sizes
    if d > 512:
        raise ValueError(f"{path}: its header says d {d}, at most 512 is taken")
    rows, keys = heads * n_seqs, chunks * heads * chunk * d
    counts = [rows * d, keys, keys, chunks * rows * d, chunks * rows, chunks * rows]
    what = f"n_seqs {n_seqs}, chunk {chunk}, d {d}, heads {heads}, chunks {chunks}"
    numbers = torch.split(_numbers(path, body, sum(counts), what), counts)
    q = numbers[0].view(1, n_seqs, heads, d)
    k, v = (x.view(chunks, 1, heads, chunk, d).transpose(2, 3) for x in numbers[1:3])
    sums = numbers[3].view(chunks, 1, heads, n_seqs, d).transpose(2, 3).double()
    top, total = (x.view(chunks, 1, heads, n_seqs).double() for x in numbers[4:])
    if (total <= 0).any():
        raise ValueError(f"{path}: a sum of exponentials must be positive")
    o = sums / total.transpose(2, 3)[..., None]
    lse = top + torch.log(total)
    pattern = path.name.partition("_")[0]
    merged_o, merged_lse = reference.merge_states(o, lse)
    all_k, all_v = (x.transpose(0, 1).flatten(1, 2) for x in (k, v))
    cases = [
        Case(
            pattern,
            False,
            None,
            q,
            all_k,
            all_v,
            merged_o.float(),
            merged_lse.float(),
            name=f"{path.name}, all chunks",
        )
    ]
    for c in range(chunks):
        name = f"{path.name}, chunk {c}"
        cases.append(Case(pattern, False, None, q, k[c], v[c], o[c].float(), lse[c].float(), name=name))
    return cases


def _save_npz(case: Case, path: Path) -> None:
    if path.suffix != ".npz":
        raise ValueError(f"the file's name must end in .npz, got {path.name}")
    meta = {"pattern": case.pattern, "causal": case.causal, "dtype": case.dtype, "seed": case.seed}
    tensors = {name: getattr(case, name) for name in (*_ARRAYS, "prefix_k", "prefix_v")}
    arrays = {name: x.numpy() for name, x in tensors.items() if x is not None}
    np.savez(path, **arrays, meta=np.array(json.dumps(meta)))


def _load_npz(path: Path) -> Case:
    size = path.stat().st_size  # a missing file says so itself, not "malformed"
    try:
        return _case_of(_read_npz(path, size), path)
    # numpy, zipfile and json meet damaged bytes with a dozen kinds of exceptions: all mean the same to the caller.
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} is not a test case that can be loaded: {why}") from error


def _read_npz(path: Path, size: int) -> dict[str, npt.NDArray[Any]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            # Cases are stored plain, so nothing in them can be larger than the file: no room for a zip bomb.
            if member.compress_type != zipfile.ZIP_STORED or member.file_size > size:
                raise ValueError(f"{member.filename} is compressed; cases are stored uncompressed")
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _case_of(arrays: dict[str, npt.NDArray[Any]], path: Path) -> Case:
    missing = [name for name in (*_ARRAYS, "meta") if name not in arrays]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    meta = json.loads(str(arrays.pop("meta")))
    if not isinstance(meta, dict) or not isinstance(meta.get("causal"), bool):
        raise ValueError("meta must be a JSON object with pattern, causal (true or false) and dtype")
    dtype = checks.choice("dtype", meta.get("dtype"), tuple(DTYPES))
    for name, array in arrays.items():
        if array.dtype != np.float32:
            raise ValueError(f"{name} must be float32, got {array.dtype}")
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    q = checks.tensor("q", tensors["q"], shape=("B", "N", "H", "D"))
    batch, n, heads, d = q.shape
    k = checks.tensor("k", tensors["k"], shape=(batch, "Nk", "Hkv", d))
    checks.tensor("v", tensors["v"], shape=tuple(k.shape))
    checks.tensor("o", tensors["o"], shape=tuple(q.shape))
    checks.tensor("lse", tensors["lse"], shape=(batch, heads, n))
    if min(*q.shape, *k.shape) < 1 or d > 512 or heads % k.shape[2]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} do not go together")
    prefix_k = tensors.get("prefix_k")
    if (prefix_k is None) != ("prefix_v" not in tensors):
        raise ValueError("prefix_k and prefix_v come together")
    if prefix_k is not None:
        checks.tensor("prefix_k", prefix_k, shape=(1, "P", k.shape[2], d))
        checks.tensor("prefix_v", tensors["prefix_v"], shape=tuple(prefix_k.shape))
    names = (*_ARRAYS, "prefix_k", "prefix_v")
    chosen = {name: tensors.get(name) for name in names}
    for name, tensor in chosen.items():
        if name != "lse" and tensor is not None and not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds NaN or infinite numbers")
    return Case(str(meta.get("pattern")), meta["causal"], dtype, name=path.name, **chosen)  # type: ignore[arg-type]
