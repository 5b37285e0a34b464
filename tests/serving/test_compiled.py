"""Engine(compile=True): the same tokens from fewer products, and no more memory for the weights."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import wide_models as latent_models
from tiny_models import FAMILIES, NEW, SHARED, WINDOW, expected, tiny_model, tokens
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tilewise.serving import Engine, compiled, generate
from tilewise.serving.compiled import Heads, added, fits, rotary_table, side_by_side

PROMPTS = [SHARED, tokens(63, 2)]  # nothing in common: both are computed in one step
HEADS = Heads(4, 2, 40)


@pytest.fixture
def graphs(monkeypatch):
    """The graphs as torch.compile hands them to its backend, which here runs them as they are."""
    seen = []

    def backend(graph, _):
        seen.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", backend)
    return seen


def products(graph):
    return sum("linear" in str(node.target) for node in graph.graph.nodes if node.op == "call_function")


def assert_same_tokens(model, prompts=PROMPTS, **options):
    found = generate(model, prompts, max_new_tokens=NEW, compile=True, **options)
    assert [one.tokens for one in found] == [expected(model, prompt, NEW) for prompt in prompts]


def test_inductor_gives_the_same_tokens():
    """As users have it: torch.compile's own backend."""
    assert_same_tokens(tiny_model())


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("mistral", {}), ("qwen2", {}), ("qwen3", {})],
    ids=["biases", "mistral", "qwen2", "qwen3"],
)
def test_segments(family, options, graphs, monkeypatch):
    """q, k, v are one product, gate and up another; one compilation serves all layers and any number of tokens."""
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}  # in all layers but one
    monkeypatch.setitem(FAMILIES, "qwen2", ("Qwen2", windows))
    model = tiny_model(family, num_hidden_layers=3, **options)
    assert_same_tokens(model)
    assert [products(graph) for graph in graphs] == [1, 4, 4]
    with torch.no_grad():
        for parameter in model.parameters():  # weights are read where the model has them
            parameter.mul_(1.25)
    assert_same_tokens(model, [PROMPTS[1][:30], PROMPTS[0][:20]])  # by another engine
    assert len(graphs) == 3


def test_one_token_alone_has_a_compilation_of_its_own(graphs):
    assert_same_tokens(tiny_model(), [[3]])
    assert len(graphs) == 3  # the last rows are computed twice rather than alone
    assert_same_tokens(tiny_model(), PROMPTS)
    sizes = [next(n for n in graph.graph.nodes if n.op == "placeholder").meta["example_value"] for graph in graphs]
    assert [isinstance(size, torch.SymInt) for size in sizes[3:]] == [True] * 3


def test_other_models_are_compiled_layer_by_layer(graphs):
    model = tiny_model("gemma2", num_hidden_layers=1)
    assert_same_tokens(model)
    assert sum(map(products, graphs)) >= 7  # of one layer; the graph breaks at attention
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)
    assert model.config._attn_implementation != "tilewise_serving"


def test_layers_of_latent_attention(graphs):
    """Compiled with rows in place of keys and values: no graph has the product that would expand them."""
    model = latent_models.deepseek_v3(num_hidden_layers=1, first_k_dense_replace=0).eval()
    prompts = [list(range(3, 28)), list(range(3, 9))]
    found = generate(model, prompts, max_new_tokens=3, compile=True)
    assert [one.tokens for one in found] == [expected(model, prompt, 3) for prompt in prompts]
    given = [n.meta["example_value"] for graph in graphs for n in graph.graph.nodes if n.op == "placeholder"]
    weights = [x.shape for x in given if isinstance(x, torch.nn.Parameter)]
    attention = model.model.layers[0].self_attn
    assert attention.kv_a_proj_with_mqa.weight.shape in weights
    assert attention.kv_b_proj.weight.shape not in weights
    assert not any("expand_kv" in vars(module) for module in model.modules())


def test_weights_lie_side_by_side_and_are_the_same(graphs):
    model = tiny_model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    Engine(model, num_pages=9, compile=True)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    places = [x.weight.data_ptr() for x in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert [b - a for a, b in pairwise(places)] == [4 * 40 * 64 * 4, 2 * 40 * 64 * 4]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in parameters.values()}
    held = sum(storage.nbytes() for storage in storages.values())
    assert held == sum(x.numel() * x.element_size() for x in before.values())
    assert all(x is parameters[name] for name, x in model.named_parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    Engine(model, num_pages=9, compile=True)
    assert mlp.up_proj.weight.data_ptr() - mlp.gate_proj.weight.data_ptr() == 96 * 64 * 4
    assert places[0] == attention.q_proj.weight.data_ptr()


@pytest.mark.parametrize("kind", ["default", "llama3", "yarn", "linear"])
def test_the_rotary_table_turns_as_the_model_does(kind):
    """Also where frequencies are stretched and cosines scaled."""
    stretched = {
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope = {"rope_type": kind, "rope_theta": 10000.0, **(stretched if kind != "default" else {})}
    model = tiny_model(rope_parameters=rope)
    k, positions = torch.randn(3, 2, 40), torch.tensor([0, 77, 900])
    cos, sin = model.model.rotary_emb(k, positions[None])
    want, _ = apply_rotary_pos_emb(k.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    table = rotary_table(model.model, torch.float32, k.device, 1024)
    torch.testing.assert_close(table.apply(k, positions), want[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_side_by_side():
    whole = torch.arange(24.0).view(6, 4)
    rows = [torch.nn.Parameter(x.clone()) for x in whole.split([3, 1, 2])]
    packed = side_by_side(rows)
    assert torch.equal(packed, whole)
    assert side_by_side(rows).data_ptr() == packed.data_ptr() == rows[0].data_ptr()
    swapped = side_by_side([rows[1], rows[0]])  # of one storage, but in another order
    assert torch.equal(swapped, torch.cat([whole[3:4], whole[:3]]))
    assert torch.equal(rows[0], whole[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_those_of_torch(dtype):
    x, y = (torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(0)).to(dtype)).unbind()
    assert torch.equal(added(x, y), x + y)
    assert torch.equal(added(x.float(), y), x.float() + y)


def test_what_fits():
    """A model that somebody has changed runs by its own code."""
    assert fits(tiny_model(), HEADS)
    assert not fits(tiny_model("gemma2"), HEADS)
    assert not fits(tiny_model(), Heads(4, 4, 40))
    hooked = tiny_model()
    hooked.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert not fits(hooked, HEADS)
    replaced = tiny_model()
    replaced.model.norm.forward = lambda x: x
    assert not fits(replaced, HEADS)

    class Adapted(torch.nn.Linear):
        pass

    adapted = tiny_model()
    adapted.model.layers[0].self_attn.v_proj = Adapted(64, 80, bias=False)
    assert not fits(adapted, HEADS)


def test_refusals(llama):
    with pytest.raises(TypeError, match="compile must be True or False, got 1"):
        Engine(llama, num_pages=9, compile=1)
    odd = tiny_model("gemma2")
    odd.model.layers = torch.nn.Sequential(*odd.model.layers)
    with pytest.raises(NotImplementedError, match="has no list of its 2 layers, which compile=True compiles"):
        Engine(odd, num_pages=9, compile=True)
