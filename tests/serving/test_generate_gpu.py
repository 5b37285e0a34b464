"""tilewise.serving on a card: graphs, growing batches, formats, few pages."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from tiny_models import FAMILIES, WINDOW, assert_likeliest, run, tiny_model, tokens

from tilewise.bench import generate as bench
from tilewise.serving import Engine, Sampling, generate

pytestmark = pytest.mark.gpu

SHARED = tokens(200, seed=1)
PROMPTS = [SHARED + tokens(n, seed=n) for n in (1, 5, 30)] + [[3], SHARED, tokens(63, 2), tokens(65, 3), SHARED]
NEW = 24


def on_card(family="llama", dtype=torch.bfloat16, **options):
    return tiny_model(family, dtype=dtype, **{"head_dim": 64, **options}).cuda()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "calls"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, graphs):
    model = on_card(family)
    before = model.config._attn_implementation
    found = generate(model, PROMPTS, max_new_tokens=NEW, cuda_graphs=graphs, prefill_chunk=150)
    assert model.config._attn_implementation == before
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert len(one.tokens) == NEW
        assert_likeliest(model, prompt, one.tokens)


@pytest.mark.parametrize(("head_dim", "dtype"), [(96, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)])
def test_head_dims(head_dim, dtype):
    model = on_card(dtype=dtype, head_dim=head_dim)
    for prompt, one in zip(PROMPTS, generate(model, PROMPTS, max_new_tokens=NEW), strict=True):
        assert_likeliest(model, prompt, one.tokens)


@torch.no_grad()
def test_float32():
    """Over a float32 cache: float64 tells the likeliest tokens, and those that float32 cannot tell from them."""
    model = on_card(dtype=torch.float32)
    exact = copy.deepcopy(model).double()
    for prompt, one in zip(PROMPTS[:4], generate(model, PROMPTS[:4], max_new_tokens=6), strict=True):
        given = torch.tensor([prompt + one.tokens[:-1]], device=model.device)
        logits = exact(given).logits[0, len(prompt) - 1 :]
        below = logits.max(-1).values - logits[range(6), one.tokens]
        assert below.max() <= 1e-5 * (logits.max() - logits.min())


def test_one_graph_for_each_size_whoever_comes_and_goes():
    """Prompts that join every other step and end at different times: a size is captured once."""
    model = on_card("mistral")
    served = Engine(model, num_pages=400, max_sequences=8, token_budget=300)
    for n, prompt in enumerate(PROMPTS):
        served.submit(prompt, max_new_tokens=NEW if n % 3 else 5 + n)
        served.step()
        served.step()
    run(served)
    for n, prompt in enumerate(PROMPTS):
        assert_likeliest(model, prompt, served.result(n).tokens)
    first = served.stats().graph_captures
    most = 4 + 6  # of 1, 2, 4 and 8 rows, and with prompts of 16 to 300
    assert 1 <= first <= most
    for n, prompt in enumerate(PROMPTS):
        served.submit(prompt, max_new_tokens=NEW - n)
        served.step()
    run(served)
    for n, prompt in enumerate(PROMPTS):
        assert_likeliest(model, prompt, served.result(len(PROMPTS) + n).tokens)
    assert first <= served.stats().graph_captures <= most
    assert served.prefix.stats().sequences == 0


def test_graphs_made_before_anybody_comes():
    model = on_card()
    served = Engine(model, num_pages=400, max_sequences=8, token_budget=300)
    served.prepare()
    assert served.stats().graph_captures == 4 + 9
    for prompt in PROMPTS:
        served.submit(prompt, max_new_tokens=NEW)
    found = run(served)
    for n, prompt in enumerate(PROMPTS):
        assert_likeliest(model, prompt, found[n, 0])
    assert served.stats().graph_captures == 4 + 9


def test_a_budget_mixes_prompts_and_rows():
    model = on_card("gemma2")
    served = Engine(model, num_pages=400, token_budget=40)
    for prompt in PROMPTS:
        served.submit(prompt, max_new_tokens=NEW)
        served.step()
    run(served)
    for n, prompt in enumerate(PROMPTS):
        assert_likeliest(model, prompt, served.result(n).tokens)
    assert served.stats().mixed_steps > 3


def test_two_engines_on_one_card():
    """On a thread each, over one model and over two."""
    models = [on_card(), on_card("mistral")]
    found = {}

    def serve(name, model):
        served = Engine(model, num_pages=100, max_sequences=4)
        for n, prompt in enumerate(PROMPTS):
            served.submit(prompt, max_new_tokens=NEW - n)
        found[name] = run(served)

    given = [("a", models[0]), ("b", models[0]), ("c", models[1])]
    threads = [threading.Thread(target=serve, args=one) for one in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, model in given:
        for n, prompt in enumerate(PROMPTS):
            assert_likeliest(model, prompt, found[name][n, 0])


def test_a_long_answer_crosses_pages_and_windows():
    model = on_card("gemma2")
    prompts = [SHARED[:10], SHARED[:40], tokens(3, seed=9)]
    for prompt, one in zip(prompts, generate(model, prompts, max_new_tokens=3 * WINDOW + 50), strict=True):
        assert_likeliest(model, prompt, one.tokens)


def test_sequences_join_leave_and_are_sent_out():
    """With so few pages that sequences lose theirs; each token must be as good as with many."""
    model = on_card()
    served = Engine(model, num_pages=24, prefill_chunk=64, max_sequences=4)
    for n, prompt in enumerate(PROMPTS):
        served.submit(prompt, max_new_tokens=30 + n, num_samples=1 + n % 2)
        served.step()
    while served.busy:
        served.step()
    assert served.stats().preemptions > 0
    for n, prompt in enumerate(PROMPTS):
        for sample in served.result(n).samples:
            assert len(sample.tokens) == 30 + n
            assert_likeliest(model, prompt, sample.tokens)


def test_draws_are_the_same_from_graphs_and_calls():
    """Drawn tokens differ only where logits that were summed in another order lie on two sides of a number.

    In float32 that is rare. In 16 bits chunks of prompts, whose prefixes calls share and graphs do not, differ enough.
    """
    model = on_card(dtype=torch.float32)
    options = {"max_new_tokens": NEW, "num_samples": 4, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 3}
    runs = [generate(model, PROMPTS, cuda_graphs=graphs, **options) for graphs in (True, False, True)]
    graphs, calls, again = ([s.tokens for one in found for s in one.samples] for found in runs)
    assert graphs == again
    assert bench.share_of_equal(graphs, calls) > 0.95
    assert len({tuple(sample) for sample in graphs}) > len(graphs) // 2


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4"])
def test_formats(kv_format):
    model = on_card()
    exact = [one.tokens for one in generate(model, PROMPTS, max_new_tokens=4)]
    found = [one.tokens for one in generate(model, PROMPTS, max_new_tokens=4, kv_format=kv_format)]
    assert bench.share_of_equal(found, exact) > {"fp8": 0.4, "int8": 0.6, "int4": 0.15}[kv_format]


def test_memory_and_refusals():
    model = on_card()
    served = Engine(model, memory=64 << 20)
    assert 60 << 20 < served.cache.nbytes <= 64 << 20
    with pytest.raises(NotImplementedError, match="on a card models in bfloat16"):
        generate(on_card(dtype=torch.float32), [[1]], max_new_tokens=1, kv_format="bf16")
    with pytest.raises(NotImplementedError, match="on a card head_dim"):
        generate(on_card(head_dim=40), [[1]], max_new_tokens=1)
    with pytest.raises(NotImplementedError, match="multiple of 16 tokens"):
        generate(model, [[1]], max_new_tokens=1, page_size=8)


def test_a_pass_that_cannot_be_captured_says_so():
    model = on_card()
    hook = model.model.norm.register_forward_hook(lambda _, __, out: out * float(out.isfinite().all()))  # waits
    try:
        with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph; pass cuda_graphs=False"):
            generate(model, PROMPTS[:2], max_new_tokens=4)
        torch.cuda.synchronize()
        found = generate(model, PROMPTS[:2], max_new_tokens=4, cuda_graphs=False)
    finally:
        hook.remove()
    for prompt, one in zip(PROMPTS, found, strict=False):
        assert_likeliest(model, prompt, one.tokens)


def test_nothing_is_left_on_the_card():
    model = on_card()
    generate(model, PROMPTS, max_new_tokens=4)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        generate(model, PROMPTS, max_new_tokens=4)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_bench_on_a_card():
    outcome = bench.run(bench.case("cuda", "small", 8, 512, 12))
    assert 1 <= outcome.graph_captures <= 3
    assert outcome.ours.kv_bytes < outcome.theirs.kv_bytes
    assert outcome.same > 0.3


def test_samplings_stand_side_by_side():
    model = on_card()
    served = Engine(model, num_pages=400)
    served.submit(PROMPTS[0], max_new_tokens=NEW)
    served.submit(PROMPTS[1], max_new_tokens=NEW, sampling=Sampling(temperature=1.0, top_p=0.9))
    found = run(served)
    assert_likeliest(model, PROMPTS[0], found[0, 0])
    assert len(found[1, 0]) == NEW
