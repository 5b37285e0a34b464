"""tilewise.serving on the CPU: the tokens of model.generate, whatever the batch, the pages and the interruptions."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
import transformers
from tiny_models import (
    FAMILIES,
    NEW,
    PROMPTS,
    SHARED,
    VOCAB,
    WARM,
    WINDOW,
    assert_likeliest,
    drawn,
    expected,
    run,
    tiny_model,
    tokens,
)
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from tilewise import OutOfPages, PagedKVCache, PrefixCache, api, cli
from tilewise.bench import generate as bench
from tilewise.bench.generate import share_of_equal
from tilewise.scores import Reach
from tilewise.serving import Engine, Sampling, generate, hf, steps, stream
from tilewise.serving.requests import check_tokens
from tilewise.serving.sampling import uniforms
from tilewise.serving.sizing import pages_needed

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the same tokens as transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 17, "page_size": 5}], ids=["whole", "chunks"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family, options):
    model = tiny_model(family)
    before = model.config._attn_implementation
    found = generate(model, PROMPTS, max_new_tokens=NEW, **options)
    assert model.config._attn_implementation == before
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert one.tokens == expected(model, prompt, NEW)
        assert one.prompt == prompt
        assert [s.finish_reason for s in one.samples] == ["length"]


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_what_is_special_about_a_family_reaches_the_kernels(family, monkeypatch):
    """The families' tests would notice if a window, a soft cap or sinks were left out."""
    model = tiny_model(family)
    plain = [one.tokens for one in generate(model, PROMPTS, max_new_tokens=NEW)]
    dropped = {"mistral": {"reach": Reach()}, "gemma2": {"softcap": 0.0}, "gpt_oss": {"sinks": None}}[family]
    for step in (steps.MixedStep, steps.DecodeStep):
        attend = step.attend

        def without(self, *args, attend=attend, **kwargs):
            return attend(self, *args, **(kwargs | dropped))

        monkeypatch.setattr(step, "attend", without)
    assert [one.tokens for one in generate(model, PROMPTS, max_new_tokens=NEW)] != plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_low_precision_models(family, dtype):
    model = tiny_model(family, dtype=dtype)
    found = generate(model, PROMPTS, max_new_tokens=NEW)
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert_likeliest(model, prompt, one.tokens)


def test_tensors_and_strings_are_prompts(llama, answers):
    class Letters:
        """A letter a token."""

        def __call__(self, text):
            return {"input_ids": [ord(c) - 32 for c in text]}

        def decode(self, ids):
            return "".join(chr(32 + t) for t in ids)

    text = "".join(chr(32 + t) for t in PROMPTS[0])
    found = generate(llama, [text], max_new_tokens=NEW, tokenizer=Letters())[0]
    assert found.tokens == answers[0]
    assert found.text == "".join(chr(32 + t) for t in answers[0])
    assert generate(llama, [torch.tensor(PROMPTS[0], dtype=torch.int32)], max_new_tokens=NEW)[0].tokens == answers[0]
    stop = found.text[3:6]
    stopped = generate(llama, [text], max_new_tokens=NEW, tokenizer=Letters(), stop=[stop])[0].samples[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == found.text[: found.text.index(stop) + len(stop)]


def test_no_prompts(llama):
    assert generate(llama, [], max_new_tokens=3) == []
    assert list(stream(llama, [], max_new_tokens=3)) == []


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_the_card_s_kernels_give_the_same_tokens(family):
    """In the emulator: prefill over pages and decode with windows, soft caps and sinks, as a card runs them."""
    model = tiny_model(family, dtype=torch.bfloat16, head_dim=64)
    prompts = [SHARED[:33] + tokens(n, seed=n) for n in (3, 5)]
    for prompt, one in zip(prompts, generate(model, prompts, max_new_tokens=3, backend="emulator"), strict=True):
        assert_likeliest(model, prompt, one.tokens)


# ---- sharing --------------------------------------------------------------------------------------------------------


def test_a_shared_prefix_is_computed_once(llama):
    served = Engine(llama, num_pages=200)
    for prompt in PROMPTS:
        served.submit(prompt, max_new_tokens=2)
    run(served)
    distinct = 71 + 5 + 30 + 1 + 1 + 63 + 65 + 1  # of each prompt what no other begins with; the last token always
    stats = served.stats()
    assert stats.prefill_tokens == distinct
    assert stats.reused_tokens == sum(map(len, PROMPTS)) - distinct
    # The prompts that share nothing go with the first of those that do, all others after it.
    assert stats.prefill_steps == 2


def test_match_tells_what_insert_reuses():
    cache = PagedKVCache(50, 8, 1, 4, kv_format="fp32")
    prefix = PrefixCache(cache)
    for n, prompt in enumerate([SHARED[:30], SHARED[:16], [*SHARED[:13], 1], SHARED[:41], [9], SHARED[:30]]):
        known = prefix.match(prompt)
        seq, reused, slots = prefix.insert(prompt)
        assert known == reused
        assert known > 0 or n in (0, 4)
        cache.write(0, slots, *torch.zeros(2, len(slots), 1, 4))
        if n % 2:
            prefix.release(seq)


def test_a_step_makes_one_plan_for_each_window(monkeypatch):
    model = tiny_model("gemma3", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    made = []
    plan_decode = api.plan_decode
    monkeypatch.setattr(
        api, "plan_decode", lambda *a, window=None, **k: made.append(window) or plan_decode(*a, window=window, **k)
    )
    generate(model, PROMPTS[:3], max_new_tokens=4)
    # The first of the four tokens comes from the prefill. The second and third prompt are prefilled, from what the
    # first left, in the step in which that decodes already.
    assert made == [(WINDOW - 1, 0), None] * 4


def test_samples_share_their_prompt(llama, answers):
    served = Engine(llama, num_pages=100)
    served.submit(PROMPTS[2], max_new_tokens=NEW, num_samples=5)
    assert run(served) == {(0, n): answers[2] for n in range(5)}
    assert served.stats().prefill_tokens == len(PROMPTS[2])


def test_pages_of_generate_suffice(llama):
    for samples in (1, 3):
        ids = [check_tokens("p", prompt) for prompt in PROMPTS]
        served = Engine(llama, num_pages=pages_needed(ids, 16, 40, samples))
        for prompt in PROMPTS:
            served.submit(prompt, max_new_tokens=40, num_samples=samples)
        run(served)
        assert served.stats().preemptions == 0
        assert served.prefix.stats().evictions == 0
        assert served.stats().peak_pages > 0.5 * served.cache.num_pages


# ---- formats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", ["fp16", "bf16", "fp8", "int8", "int4"])
def test_formats(llama, answers, kv_format):
    found = generate(llama, PROMPTS, max_new_tokens=NEW, kv_format=kv_format)
    same = share_of_equal([one.tokens for one in found], answers)
    assert same > {"fp16": 0.9, "bf16": 0.7, "int8": 0.7, "fp8": 0.4, "int4": 0.15}[kv_format]
    # Chunks read what the chunks before them left in the pages, and so must a prompt in one piece: the same bits.
    chunked = generate(llama, PROMPTS, max_new_tokens=NEW, kv_format=kv_format, prefill_chunk=9, max_sequences=2)
    assert [one.tokens for one in chunked] == [one.tokens for one in found]


def test_peak_memory_follows_the_format(llama):
    def peak(kv_format):
        served = Engine(llama, num_pages=50, kv_format=kv_format)
        served.submit(PROMPTS[2], max_new_tokens=4)
        run(served)
        assert served.stats().peak_bytes == served.cache.stats().bytes_used
        return served.stats().peak_bytes

    assert peak("fp32") == 2 * peak("bf16") > 3.5 * peak("int8")


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_ends(llama, answers):
    right = answers[0]

    def one(**options):
        return generate(llama, [PROMPTS[0]], max_new_tokens=NEW, **options)[0].samples[0]

    end = right[4]
    upto = right[: right.index(end) + 1]
    assert (one(eos_token_id=end).tokens, one(eos_token_id=end).finish_reason) == (upto, "eos")
    assert one(eos_token_id=[VOCAB - 1, end]).tokens[-1] in (VOCAB - 1, end)
    stopped = one(stop=[right[3:5], [VOCAB - 1] * 3])
    assert (stopped.tokens[-2:], stopped.finish_reason) == (right[3:5], "stop")
    llama.generation_config.eos_token_id = [end]
    try:
        assert one().tokens == upto
        assert one(eos_token_id=()).tokens == right
    finally:
        llama.generation_config.eos_token_id = None
    assert generate(llama, [PROMPTS[0]], max_new_tokens=1)[0].tokens == right[:1]


# ---- sampling -------------------------------------------------------------------------------------------------------


def test_samples_do_not_depend_on_the_batch(llama):
    found = generate(llama, PROMPTS, max_new_tokens=NEW, num_samples=3, **WARM)
    again = generate(llama, PROMPTS, max_new_tokens=NEW, num_samples=3, max_sequences=4, prefill_chunk=31, **WARM)
    assert [one.samples for one in found] == [one.samples for one in again]
    different = {tuple(sample.tokens) for one in found for sample in one.samples}
    assert len(different) > 2 * len(PROMPTS)
    other = generate(llama, PROMPTS[:1], max_new_tokens=NEW, **{**WARM, "seed": 6})
    assert other[0].tokens != found[0].tokens


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.6), (7, 0.8), (1, 1.0), (0, 1e-9)])
def test_draws_follow_the_probabilities(top_k, top_p):
    temperature, count = 0.7, 40_000
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(3)) * 2
    scores = logits / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    right = torch.softmax(scores, -1)[0]
    rows = [Sampling(temperature, top_k, top_p)] * count
    found = drawn(rows, logits.expand(count, -1), torch.from_numpy(uniforms([(1, 2, 3, n) for n in range(count)])))
    share = torch.bincount(found, minlength=30) / count
    assert set(found.unique().tolist()) <= set(right.nonzero()[:, 0].tolist())
    assert (share - right).abs().max() < 0.01


def test_the_largest_number_draws_a_token_that_has_weight():
    logits = torch.tensor([[0.0, 3.0, -torch.inf], [1.0, 0.0, -torch.inf]])
    top = torch.full((2,), 1 - 2.0**-53, dtype=torch.float64)
    assert drawn([Sampling(1.0)] * 2, logits, top).tolist() == [1, 1]
    assert drawn([Sampling(1.0, 1), Sampling()], logits, top).tolist() == [1, 0]


def test_the_coldest_draw_is_the_likeliest():
    logits = torch.tensor([[80.0, 90.0, -1e30]] * 2)
    rows = [Sampling(1e-300), Sampling(1e-30, top_k=2, top_p=0.5)]
    assert drawn(rows, logits, torch.tensor([0.999, 0.0], dtype=torch.float64)).tolist() == [1, 1]


def test_uniforms_differ_in_every_part_of_their_key():
    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1)]
    found = uniforms(keys)
    assert len(set(found.tolist())) == len(keys)
    assert found.min() >= 0
    assert found.max() < 1
    assert uniforms(keys[3:4])[0] == found[3]


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_the_model_stays_as_it_was_when_something_fails(llama):
    class Broken(Exception):
        pass

    def fail(*_):
        raise Broken

    hook = llama.model.layers[1].register_forward_hook(fail)
    try:
        with pytest.raises(Broken):
            generate(llama, PROMPTS, max_new_tokens=2)
    finally:
        hook.remove()
    assert llama.config._attn_implementation == "sdpa"
    assert llama(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, VOCAB)


def test_passes_on_several_threads_leave_the_model_as_it_was(llama):
    """One begins before the other ends, and ends before it."""
    first, second = (hf.ServedModel(llama)._own_attention() for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert llama.config._attn_implementation == hf.NAME  # the second one's layers are still to come
    second.__exit__(None, None, None)
    assert llama.config._attn_implementation == "sdpa"


def test_engines_on_several_threads_share_a_model(llama, answers):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(generate(llama, PROMPTS, max_new_tokens=NEW))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[one.tokens for one in results] for results in found] == [answers] * 3
    assert llama.config._attn_implementation == "sdpa"


def test_bad_input(llama):
    def refused(error, match, prompts=([1, 2],), model=llama, **options):
        with pytest.raises(error, match=match):
            generate(model, prompts, **{"max_new_tokens": 2, **options})

    refused(TypeError, "prompts must be a list of prompts, got str", "abc")
    refused(ValueError, r"prompts\[1\] is a string, for which a tokenizer is needed", [[1], "abc"])
    refused(ValueError, r"prompts\[1\] must hold at least one token", [[1], []])
    refused(TypeError, r"prompts\[0\] must be integers, got float64", [[1.5]])
    refused(TypeError, r"prompts\[0\] must be integers, got bool", [[True]])
    refused(ValueError, r"prompts\[0\] must have one dimension, got shape \(1, 2\)", [torch.tensor([[1, 2]])])
    refused(TypeError, r"prompts\[0\] must be a list of token ids or a 1-D tensor of them, got int", [3])
    refused(TypeError, r"prompts\[0\] must be a list of token ids .* got int", [torch.tensor(3)])
    refused(TypeError, r"prompts\[0\] must be a list of token ids .* got int", [torch.tensor(3).numpy()])
    refused(TypeError, r"prompts\[0\] must be integers, got float64", [torch.ones(2, dtype=torch.bfloat16)])
    refused(ValueError, rf"prompts\[1\]: tokens must be from 0 to {VOCAB - 1}, .* got 97 to 97", [[1], [VOCAB]])
    refused(ValueError, "must be from 0 to", [[-1]])
    refused(ValueError, "max_new_tokens must be at least 1, got 0", max_new_tokens=0)
    refused(ValueError, "num_samples must be at least 1, got 0", num_samples=0)
    refused(ValueError, "at most 1024 together, the positions that the model has, got 2 and 1023", max_new_tokens=1023)
    refused(ValueError, "take 3 pages .* the cache has 2; give it more num_pages", [[1] * 17], num_pages=2)
    refused(ValueError, "memory must hold at least one page of", memory=100)
    refused(ValueError, "temperature must be finite and at least 0.0, got -1", temperature=-1.0)
    refused(ValueError, "top_p must be above 0 and at most 1, got 0", top_p=0.0)
    refused(ValueError, "top_k must be at least 0, got -1", top_k=-1)
    refused(ValueError, "kv_format must be one of", kv_format="int2")
    refused(ValueError, "stop holds strings, for which a tokenizer is needed", stop=["x"])
    refused(ValueError, "stop must hold strings and lists that are not empty", stop=[[]])
    refused(TypeError, "stop must be a list", stop="x")
    refused(TypeError, "stop must be a list of strings or of lists of token ids, got 5 in it", stop=[5])
    refused(TypeError, "eos_token_id must be an int, got str", eos_token_id="x")
    refused(TypeError, "progress must be True or False", progress=1)
    refused(TypeError, "unexpected keyword argument 'pages'", pages=3)
    refused(TypeError, "model must be a causal language model of transformers, got int", model=3)
    with pytest.raises(TypeError, match=r"sampling must be a tilewise\.Sampling, got float"):
        Engine(llama, num_pages=9).submit([1], max_new_tokens=1, sampling=0.5)


def test_models_that_are_not_served():
    def refused(model, match, error=NotImplementedError):
        with pytest.raises(error, match=match):
            generate(model, [[1, 2]], max_new_tokens=2)

    small = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    refused(transformers.T5ForConditionalGeneration(transformers.T5Config(**small)).eval(), "no decoder-only language")
    refused(tiny_model().train(), "training mode", ValueError)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    refused(tiny_model(rope_parameters=rope), "rotary embeddings of type dynamic, which change with the longest")
    odd = tiny_model()
    odd.config.layer_types = ["full_attention", "linear_attention"]
    refused(odd, "has layers of linear_attention; full_attention, sliding_attention, chunked_attention, .* are served")
    odd.config.layer_types = ["full_attention", "indexed_attention"]
    refused(odd, "LlamaForCausalLM has layers whose keys an indexer chooses; they are served over latent rows")
    bare = tiny_model()
    bare.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    refused(bare, r"layers \[1\] of the model called no attention")
    narrow = tiny_model()
    narrow.config.num_key_value_heads = 1
    refused(narrow, r"layer 0 has keys of \(2, 40\) .* all have \(1, 40\) are served")


def test_a_mask_of_the_models_own_is_refused(llama):
    from tilewise.serving.hf import attention

    with pytest.raises(NotImplementedError, match="brings an attention mask of its own"):
        attention(llama, *[torch.zeros(1, 2, 3, 4)] * 3, torch.ones(3, 3), tilewise_step=object())
    with pytest.raises(RuntimeError, match=r"serves tilewise\.Engine alone"):
        attention(llama, *[torch.zeros(1, 2, 3, 4)] * 3, None)


def test_transformers_is_imported_only_when_a_model_is_served():
    code = "import sys, tilewise.serving; assert 'transformers' not in sys.modules, 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_transformers(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "tilewise.serving.hf", None)
    with pytest.raises(ImportError, match=r"needs transformers 5.17 or later: pip install 'tilewise\[transformers\]'"):
        generate(llama, [[1]], max_new_tokens=1)


def test_out_of_pages_is_not_swallowed(llama, monkeypatch):
    """One that could never fit is refused by submit(); if it is there all the same, the engine does not spin."""
    served = Engine(llama, num_pages=2)
    monkeypatch.setattr(served.cache, "num_pages", 100)
    served.submit([1] * 64, max_new_tokens=2)
    with pytest.raises(OutOfPages):
        run(served)


# ---- the benchmark --------------------------------------------------------------------------------------------------


def test_bench_generate(tmp_path, capsys):
    words = ["bench", "generate", "--sequences", "3", "--prefix", "40", "--new-tokens", "5"]
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "equal tokens: 100.0% on the short problem before, 100.0% of the timed runs" in shown
    assert shown.startswith((tmp_path / "generate-small-cpu.txt").read_text())
    ours, theirs = csv.DictReader((tmp_path / "generate-small-cpu.csv").open())
    assert (ours["kernel"], theirs["kernel"]) == ("tilewise.generate", "transformers")
    assert float(ours["speedup"]) == pytest.approx(
        float(ours["tokens_per_s"]) / float(theirs["tokens_per_s"]), rel=0.01
    )
    # Transformers keeps every sequence's tokens but the last one, in 4 layers of 2 heads of 64; we keep pages of 16.
    token = 4 * 2 * 2 * 64 * 4
    assert int(theirs["kv_bytes"]) == 3 * (40 + bench.QUESTION + 4) * token
    assert int(ours["kv_bytes"]) == (2 + 3 * 3) * 16 * token
    assert cli.main([*words, "--json"]) == 0
    assert [row["sequences"] for row in json.loads(capsys.readouterr().out)] == [3, 3]


def test_bench_generate_fails_on_wrong_tokens(monkeypatch, capsys):
    theirs = bench.run_theirs
    monkeypatch.setattr(
        bench, "run_theirs", lambda *a: (one := theirs(*a)) and replace(one, tokens=[[0] * len(t) for t in one.tokens])
    )
    words = ["bench", "generate", "--sequences", "2", "--prefix", "20", "--new-tokens", "3"]
    assert cli.main(words) == 1
    assert "(bar ≥ 2×: no)" in capsys.readouterr().out


def test_bench_generate_refuses(capsys):
    assert cli.main(["bench", "generate", "--config", "9b"]) == 2
    assert "config must be one of small, 8b, got '9b'" in capsys.readouterr().err
    for device in ("tpu", "meta"):
        assert cli.main(["bench", "generate", "--device", device]) == 2
        assert f"device must be cpu or cuda, got '{device}'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert cli.main(["bench", "generate", "--device", "cuda"]) == 2
