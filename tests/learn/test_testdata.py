"""Test cases as files: the patterns, the three forms, and that a wrong kernel or a wrong file is found."""

from __future__ import annotations

import json
import math
import re
import zipfile

import numpy as np
import pytest
import torch

from tilewise import api, reference
from tilewise.learn import testdata
from tilewise.learn.testdata import PATTERNS, check, load, make, save


def saved(tmp_path, case, form, **options):
    path = tmp_path / testdata.file_name(case, form, **options)
    save(case, path, form, **options)
    return path


def same(a, b):
    names = ("q", "k", "v", "o", "lse", "prefix_k", "prefix_v")
    for name in names:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        assert x is None or torch.equal(x, y), name
    return True


# ---- patterns ---------------------------------------------------------------------------------------------------


def test_patterns_are_what_their_names_say():
    cases = {name: make(name, seq=64, hdim=16, heads=2) for name in PATTERNS}
    assert 0.9 < cases["randn"].q.std() < 1.1
    assert torch.allclose(cases["small"].k, cases["randn"].k * 0.1)
    assert torch.allclose(cases["large"].v, cases["randn"].v * 2)
    assert torch.equal(cases["positive"].v, cases["randn"].v.abs())
    assert cases["uniform"].q.min() < -0.9 < 0.9 < cases["uniform"].q.max() < 1
    assert (cases["ones"].v == 1).all()


def test_qk_test_weights_are_known():
    """Row i meets keys i, i + D, …: with 10 · 10 / √D as score they take almost all the weight."""
    case = make("qk_test", seq=40, hdim=16)
    assert case.q[0, 37, 0].tolist() == [10.0 if d == 37 % 16 else 0.0 for d in range(16)]
    assert torch.allclose(case.o, case.q, atol=1e-4)


def test_v_orientation_output_is_the_column_index():
    case = make("v_orientation", seq=20, hdim=8, causal=True)
    assert torch.allclose(case.o[0, :, 0], (torch.arange(8) / 8).expand(20, 8))


def test_seed_makes_the_case():
    assert same(make("randn", seed=5), make("randn", seed=5))
    assert not torch.equal(make("randn", seed=5).q, make("randn", seed=6).q)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_inputs_are_exact_in_the_dtype_and_output_is_not_rounded_to_it(dtype):
    case = make("randn", dtype=dtype)
    exact = testdata.DTYPES[dtype]
    for x in (case.q, case.k, case.v):
        assert torch.equal(x.to(exact).float(), x)
    assert not torch.equal(case.o.to(exact).float(), case.o)


def test_expected_output_is_the_oracles():
    case = make("randn", batch=2, seq=30, queries=7, heads=4, kv_heads=2, hdim=16, causal=True)
    o, lse = reference.attention(case.q, case.k, case.v, causal=True)
    assert torch.equal(case.o, o.float())
    assert torch.equal(case.lse, lse.float())


def test_prefix_case_is_attention_over_prefix_and_own_keys():
    case = make("randn", batch=3, seq=10, prefix=20, heads=2, hdim=8, causal=True)
    k, v = (
        torch.cat((p.expand(3, -1, -1, -1), x), dim=1) for p, x in ((case.prefix_k, case.k), (case.prefix_v, case.v))
    )
    assert torch.equal(case.o, reference.attention(case.q, k, v, causal=True)[0].float())


# ---- forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("causal", [False, True])
def test_flat_text_round_trip(tmp_path, pattern, causal):
    case = make(pattern, seq=24, hdim=16, causal=causal)
    path = saved(tmp_path, case, "flat")
    assert path.name == f"{pattern}_24_16_causal_{causal}.txt"
    (back,) = load(path)
    for name in ("q", "k", "v", "o"):
        assert torch.equal(getattr(back, name), getattr(case, name))
    assert (back.pattern, back.causal) == (pattern, causal)
    assert check(back).ok


def test_flat_text_is_plain_numbers_in_order(tmp_path):
    """np.float32(1.5) is what repr() writes since NumPy 2, and no reader of such files takes it."""
    case = make("randn", seq=4, hdim=2)
    words = saved(tmp_path, case, "flat").read_text().split()
    assert all(re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", word) for word in words)
    expected = torch.cat([x.flatten() for x in (case.q, case.k, case.v, case.o)])
    assert np.array_equal(np.array(words, np.float32), expected.numpy())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_chunks_text_round_trip(tmp_path, pattern):
    case = make(pattern, batch=1, queries=5, seq=48, heads=3, hdim=8)
    path = saved(tmp_path, case, "chunks", chunk=16)
    assert path.name == f"{pattern}_s5_h3_c3.txt"
    whole, *chunks = load(path)
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(whole, name), getattr(case, name))
    assert torch.allclose(whole.o, case.o, rtol=1e-5, atol=1e-6)
    assert torch.allclose(whole.lse, case.lse, rtol=1e-6)
    assert len(chunks) == 3
    for c, chunk in enumerate(chunks):
        assert torch.equal(chunk.k, case.k[:, 16 * c : 16 * c + 16])
    assert all(check(one).ok for one in (whole, *chunks))


def test_chunks_text_layout(tmp_path):
    """The documented order: header, q, k and v of each chunk with heads first, then unnormalised sums, maxima, sums."""
    case = make("randn", queries=2, seq=6, heads=2, hdim=4)
    header, *lines = saved(tmp_path, case, "chunks", chunk=3).read_text().splitlines()
    assert header == "2 3 4 2 2"
    arrays = [np.array(line.split(), np.float32) for line in lines]
    assert [len(a) for a in arrays] == [16, 24, 24, 24, 24, 16, 16, 4, 4, 4, 4]
    assert np.array_equal(arrays[0].reshape(2, 2, 4), case.q[0].numpy())
    assert np.array_equal(arrays[2].reshape(2, 3, 4), case.k[0, 3:6].transpose(0, 1).numpy())  # the second chunk
    assert np.array_equal(arrays[3].reshape(2, 3, 4), case.v[0, 0:3].transpose(0, 1).numpy())
    head, seq, chunk = 1, 0, 1
    scores = case.k[0, 3:6, head].double() @ case.q[0, seq, head].double() / math.sqrt(4)
    weights = torch.exp(scores - scores.max())
    assert arrays[7 + chunk].reshape(2, 2)[head, seq] == pytest.approx(scores.max().item(), rel=1e-6)
    assert arrays[9 + chunk].reshape(2, 2)[head, seq] == pytest.approx(weights.sum().item(), rel=1e-6)
    sums = (weights[:, None] * case.v[0, 3:6, head].double()).sum(0)
    assert arrays[5 + chunk].reshape(2, 2, 4)[head, seq] == pytest.approx(sums.numpy(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 2, "heads": 4, "kv_heads": 2, "causal": True},
        {"batch": 3, "prefix": 33, "causal": True},
        {"batch": 2, "prefix": 5, "queries": 1, "dtype": "bfloat16"},
    ],
)
def test_npz_round_trip(tmp_path, options):
    case = make("randn", seq=17, hdim=8, **options)
    (back,) = load(saved(tmp_path, case, "npz"))
    assert same(back, case)
    assert (back.pattern, back.causal, back.dtype) == (case.pattern, case.causal, case.dtype)
    report = check(back)
    assert report.ok
    assert report.dtype == (options.get("dtype") or "float32")


def test_file_computed_in_bfloat16_is_judged_in_bfloat16(tmp_path):
    """Foreign text files hold a bfloat16 kernel's output; one that is sharper than that is judged in float32."""
    case = make("randn", seq=32, hdim=16, dtype="bfloat16")
    coarse = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).bfloat16() for x in (case.q, case.k, case.v))
    )
    path = tmp_path / testdata.file_name(case, "flat")
    save(testdata.Case("randn", False, None, case.q, case.k, case.v, coarse.transpose(1, 2).float()), path, "flat")
    report = check(load(path)[0])
    assert report.ok
    assert report.dtype == "bfloat16"
    assert not check(load(path)[0], dtype="float32").ok
    assert check(load(saved(tmp_path, case, "flat"))[0]).dtype == "float32"


@pytest.mark.parametrize(
    ("form", "options", "match"),
    [
        ("flat", {"heads": 2}, "one head"),
        ("flat", {"batch": 2}, "one sequence"),
        ("flat", {"prefix": 4}, "prefix"),
        ("chunks", {"causal": True}, "all see all keys"),
        ("chunks", {"batch": 2}, "chunks form"),
        ("chunks", {"seq": 65}, "chunk must divide"),
    ],
)
def test_form_that_cannot_hold_the_case_says_so(tmp_path, form, options, match):
    case = make("randn", **{"seq": 64, "hdim": 8, **options})
    path = tmp_path / testdata.file_name(case, form)
    with pytest.raises(ValueError, match=match):
        save(case, path, form)
    assert not path.exists()


@pytest.mark.parametrize(
    "name",
    [
        "randn_16_4_causal_True.txt",
        "randn_8_4_causal_False.txt",
        "randn_16_8_causal_False.txt",
        "ones_16_4_causal_False.txt",
    ],
)
def test_flat_file_must_have_the_name_of_its_case(tmp_path, name):
    with pytest.raises(ValueError, match=r"use randn_16_4_causal_False\.txt, got"):
        save(make("randn", seq=16, hdim=4), tmp_path / name, "flat")
    assert list(tmp_path.iterdir()) == []


def test_flat_name_of_other_generators_is_taken(tmp_path):
    path = tmp_path / "randn_16_4_causal_False_partial_False.txt"
    save(make("randn", seq=16, hdim=4), path, "flat")
    assert check(load(path)[0]).ok


def test_chunks_file_must_not_have_a_flat_name(tmp_path):
    with pytest.raises(ValueError, match=r"use randn_s1_h1_c1\.txt, got"):
        save(make("randn", seq=64, hdim=4, queries=1), tmp_path / "randn_16_4_causal_True.txt", "chunks")


def test_flat_file_needs_the_name_that_carries_its_sizes(tmp_path):
    with pytest.raises(ValueError, match="randn_256_64_causal_False"):
        save(make("randn"), tmp_path / "my.txt", "flat")


@pytest.mark.parametrize(
    "options",
    [{"pattern": "zeros"}, {"hdim": 0}, {"heads": 3, "kv_heads": 2}, {"seq": 0}, {"dtype": "fp8"}, {"seed": -1}],
)
def test_impossible_case_is_refused(options):
    with pytest.raises(ValueError, match=list(options)[-1]):
        make(**{"pattern": "randn", **options})


# ---- judging ----------------------------------------------------------------------------------------------------


def test_one_wrong_element_of_the_kernel_is_found(monkeypatch):
    """A mean over all elements would let it pass."""
    real = api.attention

    def off(*args, **options):
        o, lse = real(*args, **options)
        o[0, 50, 0, 3] += 0.01
        return o, lse

    monkeypatch.setattr(api, "attention", off)
    report = check(make("randn", seq=128))
    assert not report.ok
    assert not report.kernel.ok
    assert report.file.ok
    assert report.max_error == pytest.approx(0.01, rel=0.01)


def test_wrong_lse_and_unwritten_rows_of_the_kernel_are_found(monkeypatch):
    real = api.attention
    monkeypatch.setattr(api, "attention", lambda *a, **o: (real(*a, **o)[0], real(*a, **o)[1] * math.sqrt(64)))
    assert "lse" in check(make("randn")).kernel.reason
    monkeypatch.setattr(api, "attention", lambda *a, out, **o: (out, real(*a, **o)[1]))
    assert not check(make("randn")).kernel.ok


def test_wrong_output_in_the_file_is_found_and_not_blamed_on_the_kernel(tmp_path):
    case = make("randn", seq=16, hdim=8)
    case.o[0, 3, 0, 2] += 0.01
    report = check(load(saved(tmp_path, case, "flat"))[0])
    assert report.kernel.ok
    assert not report.file.ok


def test_wrong_prefix_kernel_is_found(monkeypatch):
    real = api.shared_prefix_attention
    monkeypatch.setattr(api, "shared_prefix_attention", lambda q, levels, *a, **o: real(q, [], *a, **o))
    assert not check(make("randn", batch=2, prefix=8, causal=True)).kernel.ok


# ---- malformed files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("randn_2_2_causal_True.txt", "1 2 3", "16 numbers"),
        ("randn_2_2_causal_True.txt", "1 " * 15 + "x", "not a number"),
        ("randn_2_2_causal_True.txt", "1 " * 15 + "nan", "NaN"),
        ("randn_2_2_causal_True.txt", "1 " * 15 + "np.float32(1.0)", "not a number"),
        ("randn_0_2_causal_True.txt", "", "N 0"),
        ("randn_2_999999_causal_True.txt", "", "D 999999"),
        ("other.txt", "1 2 3", "no form"),
        ("other.txt", "", "no form"),
        ("chunks.txt", "2 2 2 2 2\n1 2 3\n", "numbers for n_seqs 2"),
        ("chunks.txt", "2 2 0 2 2\n1 2 3\n", "no form"),
        ("chunks.txt", "99999999 9999999 128 9999999 9999999\n1\n", "numbers for"),
        ("chunks.txt", "1 1 1 1 1\n" + "1 " * 5 + "0\n", "must be positive"),
        ("case.npz", "not a zip", "not a test case"),
        ("case.npz", "", "not a test case"),
    ],
)
def test_malformed_file_is_one_value_error(tmp_path, name, text, match):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=match) as error:
        load(path)
    assert name in str(error.value)


def test_binary_text_file_is_refused(tmp_path):
    path = tmp_path / "randn_2_2_causal_True.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        load(path)


def test_missing_file_says_so(tmp_path):
    for name in ("a.npz", "a.txt"):
        with pytest.raises(FileNotFoundError):
            load(tmp_path / name)


def rewritten(tmp_path, compressed=False, **changes):
    case = make("randn", seq=8, hdim=4, batch=2, prefix=3)
    with np.load(saved(tmp_path, case, "npz")) as arrays:
        content = {name: arrays[name] for name in arrays.files}
    content.update(changes)
    content = {name: x for name, x in content.items() if x is not None}
    path = tmp_path / "changed.npz"
    (np.savez_compressed if compressed else np.savez)(path, **content)
    return path


META = np.array(json.dumps({"pattern": "randn", "causal": False, "dtype": "float32"}))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"o": None}, "no o"),
        ({"meta": None}, "no meta"),
        ({"meta": np.array("[1]")}, "meta"),
        ({"meta": np.array("{")}, "not a test case"),
        ({"meta": np.array(json.dumps({"causal": True, "dtype": "int8"}))}, "dtype"),
        ({"q": np.zeros((2, 8, 1, 4))}, "q must be float32"),
        ({"k": np.zeros((2, 8, 1, 5), np.float32)}, "k must have shape"),
        ({"v": np.zeros((2, 9, 1, 4), np.float32)}, "v must have shape"),
        ({"lse": np.zeros((2, 8), np.float32)}, "lse"),
        ({"prefix_v": None}, "come together"),
        ({"prefix_k": np.zeros((2, 3, 1, 4), np.float32)}, "prefix_k"),
        ({"v": np.full((2, 8, 1, 4), np.nan, np.float32)}, "NaN"),
        ({"q": np.array([{"a": 1}], dtype=object)}, "not a test case"),  # would have to be unpickled
    ],
)
def test_malformed_npz_is_one_value_error(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        load(rewritten(tmp_path, **changes))


def test_compressed_npz_is_refused(tmp_path):
    """A few bytes could inflate to any size."""
    with pytest.raises(ValueError, match="compressed"):
        load(rewritten(tmp_path, compressed=True, meta=META))


def test_truncated_npz_is_refused(tmp_path):
    path = rewritten(tmp_path, meta=META)
    assert zipfile.is_zipfile(path)
    for size in (100, path.stat().st_size // 2, path.stat().st_size - 3):
        short = tmp_path / "short.npz"
        short.write_bytes(path.read_bytes()[:size])
        with pytest.raises(ValueError, match="not a test case"):
            load(short)
