"""Engines over models whose layers attend to the keys that an indexer chooses: DeepSeek-V3.2, GLM-5 and their kin."""

from __future__ import annotations

import copy
import inspect
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from weakref import WeakSet

import pytest
import torch
import transformers
import wide_models as wide
from card_like import all_like_cards, all_taped
from indexed_cases import MAKES, NEW, TOPK, alike, model_of, own_answers
from latent_cases import EVERY_EXPERT, expected, served_late
from tiny_models import pages_are_back, run, tokens

import tilewise
from tilewise import api, reference
from tilewise.bench.generate import share_of_equal
from tilewise.gpu import mla_rows
from tilewise.kvcache import storage
from tilewise.kvcache.index_keys import IndexKeys
from tilewise.serving import Engine, Sampling, batch, compiled, indexed
from tilewise.serving.batch import Pass
from tilewise.serving.sizing import affordable_pages

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = pytest.mark.parametrize("name", MAKES)
TWO = pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])


@pytest.fixture(params=["torch", "choose_keys"])
def way(request, monkeypatch):
    """Scores are computed by torch, as on a CPU, or by choose_keys, as on a card, and not by the other one."""
    of_torch = request.param == "torch"
    monkeypatch.setattr(indexed, "have_kernels", lambda cache, backend: not of_torch)
    monkeypatch.setattr(*((api, "choose_keys") if of_torch else (IndexKeys, "read")), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # of who goes back to torch
        yield request.param


def engine_of(model, **options):
    """With NaN wherever nothing was written."""
    served = Engine(model, **{"num_pages": 60, "max_sequences": 8, **options})
    for stored in (*served.cache._k, served.cache.index_keys._stored):
        storage.as_bytes(stored).fill_(255 if stored.element_size() == 1 else torch.nan)
    return served


def spied(monkeypatch, of, name):
    """Arguments of the calls of a function that a module or class knows by this name."""
    calls, before = [], getattr(of, name)

    def noted(*args, **options):
        calls.append(args)
        return before(*args, **options)

    monkeypatch.setattr(of, name, noted)
    return calls


@ALL
@pytest.mark.parametrize("length", [1, TOPK, TOPK + 1, 63, 65])
def test_logits_are_the_model_s_own(name, length, way, monkeypatch):
    """As near to the model in float64 as transformers' own in float32; the prompt in chunks of 20."""
    model = model_of(name)
    (prompt,), (answer,) = own_answers(model, lambda seed: [tokens(length, seed)])
    drawn = spied(monkeypatch, batch, "choose")
    served = engine_of(model, prefill_chunk=20)
    number = served.submit(prompt, max_new_tokens=NEW)
    run(served)
    assert served.result(number).tokens == answer
    logits = torch.cat([args[1] for args in drawn if len(args[1])])
    given = torch.tensor([prompt + answer[:-1]])
    wide_model = copy.deepcopy(model).double()
    wide_model.set_experts_implementation("eager")  # no other multiplies float64
    with torch.no_grad():
        honest, exact = (x(given).logits[0, length - 1 :] for x in (model, wide_model))
    verdict = reference.judge(logits, exact, honest)
    assert verdict.ok, verdict.reason


@ALL
def test_those_who_come_and_go(name, way):
    """Prompts that begin alike, short ones that see all keys beside long ones, chunks beside decodes."""
    model = model_of(name)
    prompts, right = own_answers(model, alike)
    served = engine_of(model, token_budget=24, page_size=4)
    assert served_late(served, prompts, shortest=NEW) == right
    assert served.stats().reused_tokens >= 2 * 28  # whole pages of what three of them share
    assert served.stats().mixed_steps
    assert pages_are_back(served)
    assert not any(name in vars(module) for module in model.modules() for name in ("forward", "expand_kv"))


@TWO
def test_all_keys_would_give_other_tokens(name):
    """What was chosen is read: the same weights that see all keys answer otherwise, in both programs."""
    prompts, right = own_answers(model := model_of(name), lambda seed: [tokens(50, seed)])
    dense = model_of(name, index_topk=200)
    dense.load_state_dict(model.state_dict())
    others = expected(dense, prompts[0], NEW)
    assert others != right[0]
    for one, answer in ((model, right[0]), (dense, others)):
        assert [x.tokens for x in tilewise.generate(one, prompts, max_new_tokens=NEW)] == [answer]


@TWO
def test_samples_of_a_prompt(name, way):
    """Forks share rows and index keys, and go their own ways: as each would alone, in a cache of its own."""
    model = model_of(name)
    (prompt,), (answer,) = own_answers(model, lambda seed: [tokens(41, seed)])
    (found,) = tilewise.generate(model, [prompt], max_new_tokens=NEW, num_samples=3)
    assert [sample.tokens for sample in found.samples] == [answer] * 3
    warm = Sampling(temperature=1.5, seed=4)
    drawn = []
    for most in (4, 1):
        served = engine_of(model, max_sequences=most, page_size=4)
        number = served.submit(prompt, max_new_tokens=8, num_samples=4, sampling=warm)
        run(served)
        drawn.append([sample.tokens for sample in served.result(number).samples])
        assert pages_are_back(served)
    assert drawn[0] == drawn[1]
    assert len({tuple(x) for x in drawn[0]}) == 4


@TWO
def test_who_has_to_wait_for_pages(name, way):
    """A cache that is too small for all: some are sent out, and computed again later."""
    model = model_of(name)
    prompts, right = own_answers(model, lambda seed: [tokens(21 + n, 10 * seed + n) for n in range(4)], count=12)
    served = engine_of(model, num_pages=16, page_size=4)
    numbers = [served.submit(prompt, max_new_tokens=12 + n) for n, prompt in enumerate(prompts)]
    run(served)
    assert [served.result(number).tokens for number in numbers] == right
    assert served.stats().preemptions
    assert pages_are_back(served)


def test_many_at_once_in_calls_that_fit(way, monkeypatch):
    """65 sequences of nine lengths. With room for few scores, torch takes chunks and decodes in several calls;
    choose_keys sees to that itself."""
    model, calls = model_of("glm_moe_dsa"), []
    nine = [own_answers(model, lambda seed, n=n: [tokens(n, 100 * n + seed)], 4) for n in range(1, 27, 3)]
    prompts, right = ([one[which][0] for one in nine] * 8 for which in range(2))
    for at_once in (indexed.AT_ONCE, 8 * 60):
        monkeypatch.setattr(indexed, "AT_ONCE", at_once)
        called = spied(monkeypatch, indexed._Keys, "update_indexer")
        served = engine_of(model, num_pages=200, max_sequences=65)
        numbers = [served.submit(prompt, max_new_tokens=4) for prompt in prompts[:65]]
        run(served)
        assert [served.result(number).tokens for number in numbers] == right[:65]
        calls.append(len(called))
    assert calls[1] == calls[0] if way == "choose_keys" else calls[1] > 2 * calls[0]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Of classes of indexers, which tests change."""
    monkeypatch.setattr(indexed, "_known", WeakSet())


@pytest.mark.parametrize("way", ["choose_keys"], indirect=True)
def test_layers_share_what_was_planned(way, monkeypatch):
    """A step plans once what all its tokens choose among, and every layer's indexer is called once."""
    model = model_of("axk2")
    planned, chosen = spied(monkeypatch, api, "plan_choice"), spied(monkeypatch, api, "choose_keys")
    served = engine_of(model, token_budget=64)
    for seed in range(3):
        served.submit(tokens(20, seed), max_new_tokens=4)
    served.step()
    run(served)
    layers = len(served.cache.index_keys.layers)
    assert layers > 1
    assert [len(args[1]) for args in planned] == [3] * 4  # three chunks in the first step, then three decodes
    assert len(chosen) == layers * len(planned)
    assert {args[0].dtype for args in chosen} == {torch.float32}


def test_lists_are_read_from_where_they_have_to_be(monkeypatch):
    """While all keys are chosen, sequences are decoded as those of other models, and no score is asked for."""
    model = model_of("deepseek_v32")
    listed, keys = spied(monkeypatch, indexed, "attend_rows"), spied(monkeypatch, indexed._Keys, "update_indexer")
    served = engine_of(model)
    served.submit(tokens(3, 1), max_new_tokens=TOPK - 2)
    run(served)
    assert not listed
    assert {args[0].group.places for args in keys} == {None}
    served.submit(tokens(3, 1), max_new_tokens=TOPK - 1)  # the last of which is chosen by what one more token sees
    run(served)
    assert [len(args[0]) for args in listed] == [1] * 2  # a token, in two layers
    assert sum(args[0].group.places is not None for args in keys) == 2


RELU, TIMES = "F.relu(scores)", "* self.softmax_scale"
OTHER_FORMULAS = {
    "gelu": (RELU, "F.gelu(scores)", "gelu of the products"),
    "no relu": (RELU, "scores", "without relu"),
    "a negative scale": (TIMES, "* -self.softmax_scale", "times the products"),
    "half of each key": ("k.transpose", "(0.5 * k).transpose", "unsupported operand"),
    "keys counted": (TIMES, "* (1.0 / k.shape[1])", "depends on how many keys there are"),
    "mask": ("+ attention_mask", "+ (attention_mask + 0)", "values of the mask"),
}


def of_other_formula(model, old, new, monkeypatch):
    """Its indexers compute the same with `new` where their source has `old`."""
    kind = type(model.model.layers[0].self_attn.indexer)
    source = textwrap.dedent(inspect.getsource(kind.forward))
    assert old in source
    made = {}
    exec(source.replace(old, new), vars(inspect.getmodule(kind)), made)
    monkeypatch.setattr(kind, "forward", made["forward"])


@pytest.mark.parametrize(("old", "new", "why"), OTHER_FORMULAS.values(), ids=OTHER_FORMULAS)
def test_other_formulas_are_computed_by_torch(old, new, why, monkeypatch):
    """With one warning, whatever layers and steps follow; also where some groups need no scores."""
    model = model_of("deepseek_v32")
    of_other_formula(model, old, new, monkeypatch)
    prompts, right = own_answers(model, alike)
    monkeypatch.setattr(indexed, "have_kernels", lambda cache, backend: True)
    chosen = spied(monkeypatch, api, "choose_keys")
    served = engine_of(model, token_budget=24, page_size=4)
    with pytest.warns(RuntimeWarning) as told:
        assert served_late(served, prompts, shortest=NEW) == right
    (said,) = {str(one.message) for one in told}
    assert len(told) == 1
    assert said.startswith("DeepseekV32Indexer: ")
    assert why in said
    assert "torch computes its scores" in said
    assert not chosen
    assert pages_are_back(served)


def test_what_no_kernel_serves_is_computed_by_torch(monkeypatch):
    def refuse(*args, **options):
        raise NotImplementedError("heads of 129 channels are not served")

    model = model_of("deepseek_v32")
    prompts, right = own_answers(model, lambda seed: [tokens(20, seed)])
    monkeypatch.setattr(indexed, "have_kernels", lambda cache, backend: True)
    monkeypatch.setattr(api, "choose_keys", refuse)
    with pytest.warns(RuntimeWarning, match="DeepseekV32Indexer: heads of 129 channels are not served; torch") as told:
        assert served_late(engine_of(model), prompts, shortest=NEW) == right
    assert len(told) == 1


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("kv_format", "rank"), [("bf16", 128), ("fp8", 512)])
def test_by_kernels(kv_format, rank, monkeypatch):
    """Rows written, chosen, read and listed by the kernels of a card, in the emulator: what the same engine gives on a
    CPU."""
    model = model_of(
        "glm_moe_dsa", torch.bfloat16, kv_lora_rank=rank, qk_rope_head_dim=64, index_head_dim=80, num_hidden_layers=2,
        indexer_types=["full", "shared"], num_experts_per_tok=8,
    )  # fmt: skip
    prompts = [tokens(20, 1), tokens(4, 2), tokens(20, 1) + tokens(3, 4)]
    found = []
    for backend in ("cpu", "emulator"):
        listed, chosen = spied(monkeypatch, indexed, "attend_rows"), spied(monkeypatch, api, "choose_keys")
        monkeypatch.setattr(storage, "uses_kernels", lambda device, by=backend == "emulator": by)
        served = engine_of(model, kv_format=kv_format, backend=backend)
        found.append(served_late(served, prompts))
        assert listed
        assert bool(chosen) == (backend == "emulator")
    assert share_of_equal(*found) > 0.8
    assert served.cache.bytes_per_token == 2 * served.cache.format.bytes_per_token_head + 80 * 2


def test_compiled_layers(way, monkeypatch):
    """The graph breaks at the indexer and at attention, which are not compiled."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")  # what dynamo makes of it is what may go wrong
    model = model_of("deepseek_v32", num_hidden_layers=1)
    prompts, right = own_answers(model, lambda seed: [tokens(33, seed)])
    found = tilewise.generate(model, prompts, max_new_tokens=NEW, prefill_chunk=20, compile=True)
    assert [one.tokens for one in found] == right


def test_what_the_cache_takes():
    """The layers that have an indexer keep its keys; memory is counted with them."""
    model = model_of("glm_moe_dsa")
    served = Engine(model, num_pages=10)
    assert served.cache.index_keys.layers == (0, 2)
    assert served.cache.bytes_per_token == 4 * 40 * 4 + 2 * 16 * 4
    assert served.stats().page_bytes == 16 * served.cache.bytes_per_token
    assert affordable_pages(served.shape, None, 16, 7 * served.cache.bytes_per_token * 16 + 5) == 7
    codes = Engine(model, num_pages=10, kv_format="fp8")
    assert affordable_pages(codes.shape, "fp8", 16, 7 * codes.cache.bytes_per_token * 16) == 7


def test_graphs_of_decodes(monkeypatch):
    """As on a card: decodes of sequences that come and go are replayed, also while they are short; prompts go call by
    call. Every layer's choice is of the sequences as they are."""
    monkeypatch.setattr(indexed, "have_kernels", lambda cache, backend: True)
    replays = all_like_cards(monkeypatch)
    model = model_of("glm_moe_dsa")
    prompts, right = own_answers(model, alike)
    served = engine_of(model, token_budget=24, page_size=4)
    assert served_late(served, prompts, shortest=NEW) == right
    assert replays
    assert not any(chunks for *_, chunks in replays)
    assert len({decodes for _, decodes, _ in replays}) > 2
    assert any(decodes < rows for rows, decodes, _ in replays)
    assert pages_are_back(served)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("kv_format", "rank"), [("bf16", 128), ("fp8", 512)])
def test_graphs_by_kernels(kv_format, rank, monkeypatch):
    """Every launch and operator of a captured pass again, over memory that stays: keys are written where the step says,
    scored and chosen over as many as there are then. What the same engine gives call by call on a CPU."""
    model = model_of(
        "glm_moe_dsa", torch.bfloat16, kv_lora_rank=rank, qk_rope_head_dim=64, index_head_dim=80, num_hidden_layers=2,
        indexer_types=["full", "shared"], **EVERY_EXPERT,
    )  # fmt: skip
    prompts = [tokens(20, 1), tokens(4, 2), tokens(20, 1) + tokens(3, 4)]
    wanted = served_late(engine_of(model, kv_format=kv_format), prompts, shortest=NEW)
    replays = all_taped(monkeypatch)
    served = engine_of(model, kv_format=kv_format, backend="emulator")
    found = served_late(served, prompts, shortest=NEW)
    assert any(decodes < rows for rows, decodes, _ in replays)
    assert share_of_equal(found, wanted) > 0.8
    assert pages_are_back(served)


@pytest.mark.parametrize("between", ["another thread", "other sizes"])
def test_captures_come_right_after_calls(between, monkeypatch):
    """What a call over listed rows binds is kept by its thread, for some sizes: a pass that ran once, long ago or in
    another thread, is captured all the same."""
    all_taped(monkeypatch)
    captured, bound, capturing = Pass.capture, mla_rows._bound, [False]

    def capture(one, kind):
        capturing[0] = True
        try:
            return captured(one, kind)
        finally:
            capturing[0] = False

    def kept(key, parts):
        assert not capturing[0] or key in mla_rows._local.kept, "as a card would say"
        return bound(key, parts)

    monkeypatch.setattr(Pass, "capture", capture)
    monkeypatch.setattr(mla_rows, "_bound", kept)
    monkeypatch.setattr(mla_rows, "KEPT", 3)
    model = model_of(
        "glm_moe_dsa", torch.bfloat16, kv_lora_rank=128, qk_rope_head_dim=64, index_head_dim=80, num_hidden_layers=1,
        indexer_types=["full"], **EVERY_EXPERT,
    )  # fmt: skip
    served = Engine(model, num_pages=60, max_sequences=2, backend="emulator")

    def once(count, prompt=9):
        served.submit(tokens(prompt, prompt), max_new_tokens=count, eos_token_id=())
        run(served)

    if between == "another thread":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(once, 2).result()
    else:
        once(2)
        for prompt in range(10, 15):
            once(1, prompt)
    once(4)
    assert served.stats().graph_captures == 1


def test_lists_that_grow_with_the_keys_are_refused(monkeypatch):
    """The longest sequence of a step is no business of the others."""
    monkeypatch.setattr(indexed, "have_kernels", lambda cache, backend: True)
    model = model_of("deepseek_v32")
    of_other_formula(model, "index_scores.shape[-1])", "index_scores.shape[-1] // 2)", monkeypatch)
    served = engine_of(model)
    served.submit(tokens(12, 1), max_new_tokens=2)
    with (
        pytest.warns(RuntimeWarning, match="asked for keys 1 times and chose"),
        pytest.raises(NotImplementedError, match="is served if it asks for keys once"),
    ):
        run(served)


def test_graphs_of_another_formula_are_refused(monkeypatch):
    """Torch's way has other sizes with every step, and who asks for graphs is told."""
    monkeypatch.setattr(indexed, "have_kernels", lambda cache, backend: True)
    all_like_cards(monkeypatch)
    model = model_of("deepseek_v32")
    monkeypatch.setattr(torch.nn.functional, "relu", torch.nn.functional.gelu)
    served = engine_of(model)
    served.submit(tokens(3, 1), max_new_tokens=3)
    with (
        pytest.warns(RuntimeWarning, match="torch computes its scores"),
        pytest.raises(
            NotImplementedError, match=r"cuda_graphs=True is not served for DeepseekV32Indexer: gelu .*; leave"
        ),
    ):
        run(served)


def test_who_is_replayed():
    """Graphs of models with an indexer are for those who ask."""
    model = model_of("deepseek_v32")
    assert not Engine(model, num_pages=10)._graphs
    on_a_card = replace(Engine(model, num_pages=10).shape, device=torch.device("cuda", 0))
    assert [batch.with_graphs(on_a_card, asked) for asked in (None, False, True)] == [False, False, True]
    assert batch.with_graphs(replace(on_a_card, indexers=None), None)
    with pytest.raises(TypeError, match="cuda_graphs must be"):
        Engine(wide.deepseek_v3().eval(), num_pages=10, cuda_graphs="yes")


def test_indexers_of_other_kinds_are_refused(monkeypatch):
    model = model_of("deepseek_v32")
    indexer = model.model.layers[0].self_attn.indexer
    own = type(indexer).forward

    def other(self, hidden_states, attention_mask, past_key_values, pools):
        raise AssertionError

    monkeypatch.setattr(type(indexer), "forward", other)
    with pytest.raises(NotImplementedError, match="not of the kind that is served: pools, position_embeddings"):
        Engine(model, num_pages=10)

    def rounded(self, hidden_states, q_resid, position_embeddings, attention_mask, position_ids, past_key_values=None):
        return own(
            self, hidden_states, q_resid, position_embeddings, attention_mask, position_ids, past_key_values
        ).float()

    monkeypatch.setattr(type(indexer), "forward", rounded)
    with pytest.raises(NotImplementedError, match=r"gives the positions \(1, 12, 8\).*got 1 and torch.float32"):
        tilewise.generate(model, [tokens(12, 1)], max_new_tokens=1)
    monkeypatch.setattr(type(indexer), "forward", own)
    indexer.index_topk = 3
    with pytest.raises(NotImplementedError, match=r"indexers of 2 kinds \[\(8, 16, 3\), \(8, 16, 8\)\]"):
        Engine(model, num_pages=10)
    indexer.index_topk = TOPK
    model.model.layers[1].self_attn.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(4 * 28))
    with pytest.raises(NotImplementedError, match="they are served over latent rows"):
        Engine(model, num_pages=10)


def test_another_design_is_refused_by_name():
    """DeepSeek-V4 attends to compressed keys, whatever chooses them."""
    config = getattr(transformers, "DeepseekV4Config", None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no DeepSeek-V4")
    with torch.device("meta"):
        model = transformers.DeepseekV4ForCausalLM(config(**wide.COMMON, **wide.EXPERTS)).eval()
    with pytest.raises(NotImplementedError, match=r"DeepseekV4ForCausalLM has layers of .*compressed.*; use model"):
        Engine(model, num_pages=10)
