"""`tilewise warm`: what it compiles is what calls ask for, and after it a first call compiles nothing."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cli_cases import assert_one_line_and_hint

import tilewise
from tilewise import arch, compiler, emulator, tuned
from tilewise.api.rows import attend_rows
from tilewise.bench import warm
from tilewise.bench.tune_prefill import Shape
from tilewise.bench.warm import Need
from tilewise.compiler import cache, nvrtc
from tilewise.compiler.spec import KernelSpec
from tilewise.formats import KVFormat
from tilewise.gpu import append
from tilewise.integrations.transformers_config import attention_shape, read_config
from tilewise.kvcache import storage
from tilewise.scores import Scores
from tilewise.tuned import Section, Tuned

LLAMA = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "torch_dtype": "bfloat16",
    "model_type": "llama",
}  # fmt: skip
GEMMA = {
    **LLAMA, "head_dim": 128, "sliding_window": 100, "attn_logit_softcapping": 50.0,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "num_key_value_heads": 8,
}  # fmt: skip
CHUNKED = {**LLAMA, "attention_chunk_size": 64, "layer_types": ["chunked_attention", "full_attention"]}
REPORT = compiler.ResourceReport(1, 0, 0, 0, 0, 0, (), 0.1)


# ---- configurations ----------------------------------------------------------------------------------------------
def test_a_configuration_says_what_attention_is() -> None:
    shape = attention_shape(LLAMA, "llama")
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.dtype) == (8, 2, 64, torch.bfloat16)
    assert shape.scores == (Scores((None, 0), 64**-0.5),)
    shape = attention_shape(GEMMA, "gemma")
    assert shape.head_dim == 128
    assert [rule.window for rule in shape.scores] == [(None, 0), (99, 0)]
    assert {rule.softcap for rule in shape.scores} == {50.0}


def test_latent_rows_and_chunks() -> None:
    shape = attention_shape(DEEPSEEK, "deepseek")
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim, shape.latent) == (8, 8, 192, 128, (576, 512))
    for config in (CHUNKED, {**CHUNKED, "layer_types": None}):
        assert [rule.chunk for rule in attention_shape(config, "llama4").scores] == [0, 64]
    assert [rule.chunk for rule in attention_shape({**LLAMA, "attention_chunk_size": None}, "x").scores] == [0]
    for config in (LLAMA, {**DEEPSEEK, "kv_lora_rank": 256}, {**DEEPSEEK, "torch_dtype": "float32"}):
        assert Need.of_latent(attention_shape(config, "heads of its own")) is None


def test_other_names_and_parts_of_models() -> None:
    gpt = attention_shape({"n_head": 12, "n_embd": 768, "dtype": "float16"}, "gpt2")
    assert (gpt.heads, gpt.kv_heads, gpt.head_dim, gpt.dtype) == (12, 12, 64, torch.float16)
    image = attention_shape({"text_config": LLAMA, "vision_config": {}, "dtype": "float32"}, "image")
    assert (image.heads, image.kv_heads) == (8, 2)
    assert attention_shape({**LLAMA, "alibi": True}, "mpt").scores[0].alibi
    assert attention_shape({**LLAMA, "sliding_window": 9, "use_sliding_window": False}, "x").scores[0].window == (
        None,
        0,
    )
    assert attention_shape({**LLAMA, "sliding_window": 9}, "mistral").scores[0].window == (8, 0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "x is no model's configuration"),
        ({}, "x has no num_attention_heads or n_head or num_heads"),
        ({"num_attention_heads": 8}, "x has no hidden_size or n_embd or d_model"),
        ({**LLAMA, "num_attention_heads": "8"}, "num_attention_heads must be a whole number, 1 or more, got '8'"),
        ({**LLAMA, "num_key_value_heads": 3}, "8 query heads are no multiple of 3 KV heads"),
        ({**LLAMA, "torch_dtype": "int8"}, "dtype must be one of bfloat16, float16, float32, got 'int8'"),
    ],
)
def test_what_is_no_configuration_is_refused(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attention_shape(config, "x")


def test_configurations_are_files_folders_or_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(str(tmp_path)) == read_config(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        read_config(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        read_config(str(tmp_path / "other.json"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"some/model is no file; .*, pip install 'tilewise\[transformers\]'"):
        read_config("some/model")


def test_names_are_asked_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = types.SimpleNamespace(to_dict=lambda: LLAMA)
    auto = types.SimpleNamespace(from_pretrained={"some/model": config}.__getitem__)
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoConfig=auto))
    shape = read_config("some/model")
    assert (shape.name, shape.heads, shape.kv_heads, shape.head_dim) == ("some/model", 8, 2, 64)


# ---- what calls ask for ------------------------------------------------------------------------------------------
@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """The kernels that calls in the emulator launch, which do not run."""
    found: list[KernelSpec] = []
    monkeypatch.setattr(emulator, "launch", lambda spec, *args, **options: found.append(spec))
    return found


def attend(need: Need, rows: int) -> None:
    """Dense, packed and paged calls as users make them."""
    q, k = (torch.zeros(1, rows, heads, need.head_dim, dtype=need.dtype) for heads in (need.heads, need.kv_heads))
    v = torch.zeros(1, rows, need.kv_heads, need.values, dtype=need.dtype)
    starts = torch.tensor([0, rows], dtype=torch.int32)
    count = 1 + rows // 16
    pages = [torch.zeros(count, 16, need.kv_heads, d, dtype=need.dtype) for d in (need.head_dim, need.values)]
    table = torch.arange(count, dtype=torch.int32)[None]
    for rule in need.scores:
        options: Any = {"causal": True, "softcap": rule.softcap, "backend": "emulator"}
        options["window"] = None if rule.window[0] is None else rule.window
        if rule.chunk:
            continue  # of the forward's own mask; steps have no need of it
        tilewise.attention(q, k, v, **options)
        for index in (starts, starts.long()):
            tilewise.attention_varlen(q[0], k[0], v[0], index, index, **options)
        tilewise.attention_varlen(q[0], *pages, starts, starts, page_table=table, **options)


def decode(need: Need, sequences: int) -> None:
    """A step over pages that are laid out as on a card, shared and not, and writing its tokens."""
    form, values = need.form, need.values
    sizes = (8 + 2 * sequences, 16, need.kv_heads, need.head_dim)
    pages = tilewise.PagedKVCache(*sizes, kv_format=form.name, value_dim=values, shared_kv=need.shared_kv)
    lead = (1, pages.num_pages, 16, need.kv_heads)
    forms = (form,) if need.shared_kv else (form, pages.value_format)
    stored = [storage.allocate(form, lead, pages.device, for_kernels=True) for form in forms]
    parts = [[part[0] for part in one] for one in stored]
    pages.parts = lambda layer: (parts[0], None if need.shared_kv else parts[1])  # type: ignore[assignment]
    first = pages.allocate()
    pages.extend([first], 112)
    seqs = [pages.fork(first) for _ in range(sequences)]
    slots = pages.extend(seqs, 1)
    for rule in need.scores:
        window = None if rule.window[0] is None else rule.window
        for share in (False, True):
            given = {"num_heads": need.heads, "share_prefix": share, "window": window, "chunk": rule.chunk or None}
            for plan in (
                tilewise.plan_decode(pages, seqs, **given),
                tilewise.plan_decode(pages, seqs, **given, rows=sequences + 4, max_length=400),
            ):
                q = torch.zeros(plan.rows, 1, need.heads, need.head_dim, dtype=need.dtype)
                tilewise.decode(q, pages, 0, plan, softcap=rule.softcap, backend="emulator")
    if need.chosen:
        indices = torch.zeros(sequences, 32, dtype=torch.int32)
        attend_rows(q[:sequences, 0], parts[0][0].flatten(0, 2), form, indices, value_dim=values, backend="emulator")
        choose(need)
    k, v = (torch.zeros(sequences, need.kv_heads, d, dtype=need.dtype) for d in (need.head_dim, values))
    positions = torch.arange(sequences)
    append.append(form, k, None if need.shared_kv else v, *pages.parts(0), positions, positions)
    assert len(slots)


class Placed(NamedTuple):
    """Slots, as far as a kernel asks."""

    all_positions: torch.Tensor
    all_index: torch.Tensor


def choose(need: Need) -> None:
    """The keys of the indexer that a query token reads."""
    assert need.chosen is not None
    heads, dim = need.chosen
    pages = tilewise.PagedKVCache(8, 16, 1, 24, value_dim=16, shared_kv=True, index_dim=dim)
    seq = pages.allocate()
    slots = pages.extend([seq], 100)
    pages.index_keys.write(0, slots, torch.zeros(100, dim))
    pages.index_keys._append(0, torch.zeros(100, dim, dtype=need.dtype), Placed(slots.positions, slots.index))
    q, weights = torch.zeros(2, heads, dim, dtype=need.dtype), torch.zeros(2, heads)
    tilewise.choose_keys(q, weights, pages, 0, tilewise.plan_choice(pages, [seq], 2, topk=32), backend="emulator")


def step(need: Need, tokens: int) -> None:
    """Chunks of prompts, sharing a prefix and not."""
    sizes = (tokens // 4 + 40, 16, need.kv_heads, need.head_dim)
    pages = tilewise.PagedKVCache(*sizes, kv_format=need.form.name, value_dim=need.values, shared_kv=need.shared_kv)
    first = pages.allocate()
    pages.extend([first], 64)
    seqs = [pages.fork(first) for _ in range(2)]
    pages.extend(seqs, tokens)
    prefill = [(seq, tokens) for seq in seqs]
    for rule in need.scores:
        window = None if rule.window[0] is None else rule.window
        for share in (False, True):
            given = {"num_heads": need.heads, "share_prefix": share, "window": window, "chunk": rule.chunk or None}
            plan = tilewise.plan_step(pages, prefill, **given)
            q = torch.zeros(plan.rows, need.heads, need.head_dim, dtype=need.dtype)
            tilewise.attend(q, pages, 0, plan, softcap=rule.softcap, backend="emulator")


INDEXER = {"index_topk": 32, "index_n_heads": 24, "index_head_dim": 128}
NEEDS = {
    "llama": Need.of_model(attention_shape(LLAMA, "llama")),
    "gemma": Need.of_model(attention_shape(GEMMA, "gemma")),
    "int4": Need(8, 2, 64, torch.bfloat16, (Scores((None, 0)),), kv_format="int4"),
    "fp16": Need(4, 4, 80, torch.float16, (Scores((None, 0)),)),
    "pair": Need(8, 2, 64, torch.bfloat16, (Scores((None, 0)),), value_dim=320),
    "chunked": Need.of_model(attention_shape(CHUNKED, "llama4")),
    "latent": Need.of_latent(attention_shape(DEEPSEEK, "deepseek")),
    "latent fp8": replace(Need.of_latent(attention_shape(DEEPSEEK, "deepseek")), kv_format="fp8"),
    "chosen": Need.of_latent(attention_shape({**DEEPSEEK, **INDEXER}, "deepseek")),
}


@pytest.mark.parametrize("card", ["sm_90a", "sm_80", "sm_89"])
@pytest.mark.parametrize("name", NEEDS)
def test_every_kernel_that_a_call_asks_for_is_warm(card: str, name: str, asked: list[KernelSpec]) -> None:
    need = NEEDS[name]
    warmed = set(warm.specs(need, card))
    with arch.as_card(card):
        for rows in (1, 5, 40, 128, 200, 700, 1024, 1025, 3000):
            attend(need, rows)
        for tokens in (1, 40, 700):
            step(need, tokens)
        if need.head_dim != 80:  # not a head dimension of decode
            for sequences in (1, 3, 33):
                decode(need, sequences)
    decoding = "decode" if not need.shared_kv else "mla_decode" if card == "sm_90a" else "mla_decode_mma"
    assert {decoding, "decode_plan", "append"} <= {spec.name for spec in asked} or need.head_dim == 80
    assert {spec.translation_unit() for spec in asked} <= {spec.translation_unit() for spec in warmed}
    assert {spec.name for spec in warmed} >= {spec.name for spec in asked} | {"ragged", "copy_pages"}


def test_kernels_of_grouped_heads_come_together_and_apart() -> None:
    packs = {dict(s.constants)["kPack"] for s in warm.specs(NEEDS["llama"], "sm_90a") if s.name == "forward"}
    assert packs == {1, 4}


def test_decode_is_warm_for_all_ways_to_fill_a_card() -> None:
    found = warm.specs(NEEDS["llama"], "sm_90a")
    constants = [dict(s.constants) for s in found if s.name in ("decode", "decode_tree")]
    assert {c["kBlocksPerSm"] for c in constants if not c["kTileStages"]} == {1, 2}
    assert any(c["kTileStages"] for c in constants)
    assert {c["kValueDim"] for c in constants} == {64}
    few = [dict(s.constants) for s in found if s.name == "decode_small"]
    assert {c["kCluster"] for c in few} == {1, 8, 16}


def test_a_shape_is_compiled_for_its_length_and_mask() -> None:
    found = warm.specs(Need.of_shape(Shape(1, 512, 4, 4, 64, causal=True), torch.bfloat16), "sm_90a")
    short = {dict(s.constants)["kTileKv"] for s in found if s.name == "forward" and not dict(s.constants)["kPageSize"]}
    assert short == {64}  # short causal sequences of head dimension 64 have tiles of their own
    found = warm.specs(Need.of_shape(Shape(1, 512, 4, 4, 64), torch.bfloat16), "sm_90a")
    assert {
        dict(s.constants)["kTileQ"] for s in found if s.name == "forward" and not dict(s.constants)["kPageSize"]
    } == {192}


def test_a_table_of_the_card_is_followed() -> None:
    table = Tuned({"prefill": Section("", "", {"bfloat16/64/causal/plain/long": {"stages_v": 2}})})
    with tuned.trying(table):
        found = warm.specs(NEEDS["llama"], "sm_90a")
    assert {dict(s.constants)["kStagesV"] for s in found if s.name == "forward"} > {2}
    assert set(found) != set(warm.specs(NEEDS["llama"], "sm_90a"))


def test_what_no_kernel_serves_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="head_dim up to 576"):
        warm.specs(Need(1, 1, 600, torch.bfloat16, (Scores(),)), "sm_90a")


def test_latent_rows_that_no_kernel_reads_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="over int4"):
        warm.specs(replace(NEEDS["latent"], kv_format="int4"), "sm_90a")


def test_the_form_is_that_of_the_dtype() -> None:
    assert NEEDS["fp16"].form == KVFormat("fp16", 80)
    assert NEEDS["int4"].form == KVFormat("int4", 64)


# ---- compiling ---------------------------------------------------------------------------------------------------
def test_kernels_are_compiled_once_and_counted() -> None:
    specs = [append.append_spec(torch.bfloat16, KVFormat(name, 64)) for name in ("bf16", "fp8", "int8")]
    done: list[KernelSpec] = []

    def compile(spec: KernelSpec, target: str) -> compiler.Binary:
        if spec is specs[2]:
            raise compiler.KernelCompileError("line one\nline two")
        return compiler.Binary(spec, target, b"", REPORT, from_cache=spec is specs[0])

    pairs = [(spec, "sm_80") for spec in (*specs, specs[0])]
    warmed = warm.compile_all(pairs, done.append, compile=compile)
    assert (warmed.compiled, warmed.there) == (1, 1)
    assert warmed.failed == (f"{specs[2]} (sm_80): line one",)
    assert sorted(map(str, done)) == sorted(map(str, specs))


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache, and NVRTC in place of which something notes what it is asked for."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_memory", {})
    found: list[str] = []
    monkeypatch.setattr(
        nvrtc, "_build", lambda spec, target, *rest: (found.append(f"{spec} {target}"), (b"cubin", REPORT))[1]
    )
    return found


def test_after_warm_a_first_call_compiles_nothing(
    builds: list[str], run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[KernelSpec]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code, out, _ = run("warm", "--model", tmp_path / "config.json", "--arch", "sm_90a")
    assert code == 0
    count = len(builds)
    assert f"{count} kernels for sm_90a: {count} compiled, 0 were there" in out
    assert cache.show().kinds["cubin"].entries == count
    monkeypatch.setattr(nvrtc, "_memory", {})  # another process
    monkeypatch.setattr(nvrtc, "_build", lambda *given: pytest.fail("compiled again"))
    attend(NEEDS["llama"], 300)
    decode(NEEDS["llama"], 3)
    assert len(asked) >= 8
    for spec in asked:
        assert compiler.compile(spec, "sm_90a").from_cache
    code, out, _ = run("warm", "--model", tmp_path, "--arch", "sm_90a")
    assert (code, f"{count} kernels for sm_90a: 0 compiled, {count} were there" in out) == (0, True)


def test_several_architectures_and_shapes(builds: list[str], run: Any) -> None:
    code, out, _ = run("warm", "--shapes", "1,512,4,4,64;1,512,4,4,64,causal", "--arch", "sm_80", "--arch", "sm_90a")
    assert code == 0
    assert "kernels for sm_80, sm_90a" in out
    assert {build.split()[-1] for build in builds} == {"sm_80", "sm_90a"}
    assert not any("forward_mma" in build for build in builds if build.endswith("sm_90a"))


def test_what_does_not_compile_is_said(run: Any, builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def build(spec: KernelSpec, *rest: Any) -> Any:
        raise compiler.KernelCompileError("no such thing")

    monkeypatch.setattr(nvrtc, "_build", build)
    code, out, _ = run("warm", "--shapes", "1,64,1,1,64", "--arch", "sm_90a")
    assert code == 1
    assert "0 compiled, 0 were there" in out
    assert "did not compile: append" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "say what for: --model CONFIG, or --shapes"),
        (("--shapes", "1,2,3"), 2, "a shape must be B,N,Hq,Hkv,D"),
        (("--shapes", "1,64,1,1,64", "--arch", "sm_10"), 2, "'sm_10' is not one of sm_80"),
        (("--shapes", "1,64,1,1,64", "--dtype", "int8"), 2, "dtype must be"),
        (("--shapes", "1,64,1,1,64", "--kv-format", "x", "--arch", "sm_80"), 2, "kv_format must be"),
        (("--model", "no.json", "--arch", "sm_80"), 1, "No such file or directory: no.json"),
        (("--shapes", "1,64,1,1,600", "--arch", "sm_80"), 1, "head_dim up to 576"),
    ],
)
def test_mistakes(run: Any, words: tuple[str, ...], code: int, said: str) -> None:
    got, out, err = run("warm", *words)
    assert (got, out) == (code, "")
    assert_one_line_and_hint(err)
    assert said in err


def test_without_a_card_an_architecture_is_needed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run("warm", "--shapes", "1,64,1,1,64")
    assert code == 2
    assert "torch sees no GPU here: say which one to compile for" in err
