"""tilewise.sdpa beside torch's function and the float64 oracle; explain; what takes torch's place and gives it back."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oracle import DTYPES, randn
from test_torch_ops import Graphs, compiled
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise import reference
from tilewise.integrations import replace
from tilewise.integrations import sdpa as module
from tilewise.integrations.replace import FlashKernel, install, replace_sdpa, uninstall
from tilewise.integrations.sdpa import Explanation, Facts, decide, explain, sdpa, torch_sdpa

HOPPER = Facts((2, 4, 8, 64), (2, 4, 8, 64), (2, 4, 8, 64), torch.bfloat16, "cuda", hopper=True)


@pytest.fixture(autouse=True)
def _torch_as_it_was():
    yield
    uninstall()
    assert F.scaled_dot_product_attention is torch_sdpa


def make(query, key=None, value=None, *, dtype=torch.float32, device="cpu"):
    """Tensors of these shapes; key like query, value like key if None."""
    key = query if key is None else key
    shapes = (query, key, key if value is None else value)
    return [randn(*shape, dtype=dtype, seed=n).to(device) for n, shape in enumerate(shapes)]


def check(query, key, value, attn_mask=None, *, is_causal=False, scale=None, enable_gqa=False, by="tilewise"):
    """sdpa, judged by the tolerance rule; its shape and dtype are torch's, and `by` serves it, as explain says."""
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    told = explain(query, key, value, attn_mask, **options)
    assert told.backend == by, str(told)
    got = sdpa(query, key, value, attn_mask, **options)
    if not got.numel():  # torch 2.11 gives None for some of these on a GPU
        assert got.shape == (*query.shape[:-1], value.shape[-1])
        return got
    like = torch_sdpa(query, key, value, attn_mask, **options)
    assert got.shape == like.shape
    assert (got.dtype, got.device) == (like.dtype, like.device)

    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value)]
    if not enable_gqa:
        heads = [max(heads)] * 3
    q, k, v = (
        x.expand(*lead, n, *x.shape[-2:]).reshape(math.prod(lead), n, *x.shape[-2:]).transpose(1, 2).cpu()
        for x, n in zip((query, key, value), heads, strict=True)
    )
    rows, keys = query.shape[-2], key.shape[-2]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    if attn_mask is not None:
        shape = (*lead, heads[0], rows, keys)
        seen = seen & attn_mask.cpu().expand(shape).reshape(-1, *shape[-3:])
    exact, lse = reference.attention(q, k, v, mask=seen, scale=scale)
    honest = reference.baseline(q, k, v, mask=seen, scale=scale)[0]
    by_rows = got.cpu().reshape(-1, heads[0], rows, value.shape[-1]).transpose(1, 2)
    verdict = reference.judge(by_rows, exact, honest, lse=lse)
    assert verdict.ok, verdict.reason
    return got


# The same numbers.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 96])
def test_dtypes_and_head_dims(head_dim, dtype):
    check(*make((2, 3, 63, head_dim), (2, 3, 65, head_dim), dtype=dtype))


@pytest.mark.parametrize("seqlen_k", [1, 2, 63, 65])
@pytest.mark.parametrize("seqlen_q", [1, 2, 63, 65])
def test_is_causal_aligns_top_left(seqlen_q, seqlen_k):
    check(*make((2, 3, seqlen_q, 8), (2, 3, seqlen_k, 8)), is_causal=True)


SHAPES = [
    ((5, 8), (6, 8), (6, 8)),
    ((3, 5, 8), (3, 6, 8), (3, 6, 8)),
    ((3, 5, 8), (1, 6, 8), (1, 6, 8)),
    ((2, 3, 5, 8), (3, 6, 8), (3, 6, 8)),
    ((3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    ((2, 3, 5, 8), (2, 1, 6, 8), (2, 1, 6, 8)),
    ((2, 1, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    ((2, 3, 5, 8), (2, 1, 6, 8), (2, 3, 6, 8)),
    ((1, 3, 5, 8), (4, 3, 6, 8), (1, 3, 6, 8)),
    ((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 8)),
    ((2, 1, 4, 5, 8), (3, 1, 6, 8), (1, 1, 3, 4, 6, 8)),
    ((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 4)),
    ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 8)),
    ((2, 3, 5, 1), (2, 3, 6, 1), (2, 3, 6, 1)),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES)
def test_shapes_broadcast(shapes, is_causal):
    check(*make(*shapes), is_causal=is_causal)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 8, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
        ((8, 5, 8), (1, 6, 8), (1, 6, 8)),
        ((2, 8, 5, 8), (1, 4, 6, 8), (1, 4, 6, 8)),
        ((2, 2, 8, 5, 8), (2, 2, 2, 6, 8), (2, 2, 2, 6, 4)),
    ],
)
def test_grouped_heads(shapes):
    check(*make(*shapes), enable_gqa=True, is_causal=True)


@pytest.mark.parametrize("shapes", [((2, 3, 0, 8), (2, 3, 5, 8)), ((2, 3, 5, 8), (2, 3, 0, 8)), ((0, 3, 5, 8),)])
def test_nothing_to_see(shapes):
    assert not check(*make(*shapes), is_causal=True).any()


@pytest.mark.parametrize("scale", [0.0, 1, -0.3])
def test_scale(scale):
    check(*make((2, 3, 5, 8)), scale=scale, is_causal=True)


def test_strides():
    query, key, value = make((2, 65, 3, 8), (2, 63, 3, 8))
    check(*(x.transpose(1, 2) for x in (query, key, value)))
    check(*(x.transpose(1, 2).mT.contiguous().mT for x in (query, key, value)))  # last stride is not 1
    check(*(x.transpose(1, 2)[:, ::2] for x in (query, key, value)))
    query, key, value = make((1, 2, 3, 16), (1, 2, 0, 16))
    check(*(x[..., ::2] for x in (query, key, value)))  # an empty tensor is contiguous, whatever its strides are


@pytest.mark.parametrize(
    "shapes", [((1, 2, 3, 8), (3, 2, 0, 8)), ((2, 0, 8), (3, 2, 5, 8)), ((3, 1, 4, 8), (3, 2, 0, 8)), ((0, 8), (5, 8))]
)
def test_an_empty_call_that_broadcasts_has_torchs_shape(shapes):
    query, key, value = make(*shapes)
    assert sdpa(query, key, value).shape == torch_sdpa(query, key, value).shape


def padding(*lengths, left=False):
    seen = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return (seen.flip(1) if left else seen)[:, None, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", [False, True])
def test_padding(left, dtype):
    tensors = make((4, 4, 9, 16), (4, 2, 65, 16), dtype=dtype)
    check(*tensors, padding(65, 1, 0, 63, left=left), enable_gqa=True)


def test_hidden_keys_of_any_pattern():
    tensors = make((2, 3, 5, 8), (2, 3, 33, 8), (2, 3, 33, 4))
    check(*tensors, randn(2, 1, 1, 33) > 0)
    for one_for_all in (randn(1, 33) > 0, randn(1, 1, 33) > 0, randn(1, 1, 1, 33) > 0):
        check(*tensors, one_for_all)
    check(*make((2, 3, 4, 5, 8), (3, 4, 6, 8)), randn(2, 1, 1, 1, 6) > 0)
    check(*make((3, 5, 8), (3, 6, 8)), randn(1, 1, 6) > 0)
    check(*make((5, 8), (6, 8)), randn(1, 6) > 0)
    check(*tensors, torch.zeros(1, 33, dtype=torch.bool))


def test_hidden_keys_are_not_touched():
    query, key, value = make((2, 3, 5, 8), (2, 3, 9, 8))
    mask = padding(4, 9)
    expected = sdpa(query, key, value, mask)
    key[0, :, 4:], value[0, :, 4:] = float("nan"), float("nan")
    assert torch.equal(sdpa(query, key, value, mask), expected)


def test_masks_that_go_to_torch():
    tensors = make((2, 3, 5, 8), (2, 3, 6, 8))
    whole = randn(5, 6) > 0
    whole[2] = False
    assert not check(*tensors, whole, by="torch")[:, :, 2].any()  # as in torch: a row that sees nothing is 0
    check(*tensors, randn(2, 3, 1, 6) > 0, by="torch")
    bias = randn(2, 1, 1, 6)
    assert torch.equal(sdpa(*tensors, bias), torch_sdpa(*tensors, bias))
    mask = randn(1, 6) > 0
    assert torch.equal(sdpa(*tensors, mask, is_causal=True), torch_sdpa(*tensors, mask, is_causal=True))


@given(data=st.data())
def test_chance(data):
    """Any shapes, options and masks: torch's answer, or torch's error."""
    size = st.sampled_from([1, 2, 3, 4])
    draw = data.draw
    rank, rows, keys = draw(st.integers(2, 5)), draw(st.integers(0, 9)), draw(st.integers(0, 9))
    dims, value_dim = draw(st.sampled_from([1, 8])), draw(st.sampled_from([1, 8]))
    full = [draw(size) for _ in range(rank - 2)]

    def lead():
        cut = full[draw(st.integers(0, len(full))) :]
        return [draw(st.sampled_from([n, n, n, 1, 2])) for n in cut]

    tensors = make((*lead(), rows, dims), (*lead(), keys, dims), (*lead(), keys, value_dim))
    options = {"is_causal": draw(st.booleans()), "enable_gqa": draw(st.booleans())}
    if draw(st.booleans()):
        shape = [*lead(), draw(st.sampled_from([1, 1, rows])), keys]
        options["attn_mask"] = randn(*shape) > -0.5
    try:
        expected = torch_sdpa(*tensors, **options)
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)):
            sdpa(*tensors, **options)
        return
    got = sdpa(*tensors, **options)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected)


# Who serves, and why.


def serves(monkeypatch) -> list[str]:
    """Who has served since: a list that grows."""
    served: list[str] = []
    attention = module.api.attention
    monkeypatch.setattr(module, "torch_sdpa", lambda *a, **k: (served.append("torch"), torch_sdpa(*a, **k))[1])
    monkeypatch.setattr(module.api, "attention", lambda *a, **k: (served.append("tilewise"), attention(*a, **k))[1])
    return served


REFUSED = {
    "an input requires gradients": lambda q, k, v: ((q.requires_grad_(), k, v), {}),
    "dropout_p is not 0": lambda q, k, v: ((q, k, v), {"dropout_p": 0.5}),
    "no kernels take torch.float64": lambda q, k, v: ((q.double(), k.double(), v.double()), {}),
    "attn_mask differs from query to query": lambda q, k, v: ((q, k, v, torch.ones(5, 5, dtype=torch.bool)), {}),
    "attn_mask is added to the scores": lambda q, k, v: ((q, k, v, torch.zeros(1, 5)), {}),
    "attn_mask and is_causal": lambda q, k, v: ((q, k, v, torch.ones(1, 5, dtype=torch.bool)), {"is_causal": True}),
    "only torch judges": lambda q, k, v: ((q, k, v), {"scale": float("inf")}),
    "head dimensions are served from 1 to 512": lambda q, k, v: (make((1, 1, 2, 513)), {}),
    "key and value differ in heads": lambda q, k, v: ((q, k[:, :2], v), {"enable_gqa": True}),
    "plain tensors": lambda q, k, v: ((q.as_subclass(Sub), k, v), {}),
}


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize("reason", REFUSED)
def test_explain_says_why_torch_serves(reason, monkeypatch):
    args, options = REFUSED[reason](*make((2, 4, 5, 8)))
    told = explain(*args, **options)
    assert told.backend == "torch"
    assert reason in "; ".join(told.reasons)
    assert str(told).startswith("torch, by torch's own scaled_dot_product_attention: ")
    served = serves(monkeypatch)
    sdpa(*args, **options)
    assert served == ["torch"]


@pytest.mark.parametrize(
    ("shapes", "options", "reason"),
    [
        (((2, 4, 5, 8),), {}, "float32 on cpu is served"),
        (((2, 4, 5, 8), (2, 4, 9, 8)), {"is_causal": True}, "keys after the last query's are left out"),
        (((2, 4, 9, 8), (2, 4, 5, 8)), {"is_causal": True}, "a window that ends L − S after"),
        (((2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 16)), {}, "filled up with zeros"),
        (((2, 4, 9, 8),), {"attn_mask": torch.ones(2, 1, 1, 9, dtype=torch.bool)}, "hides keys from all queries"),
    ],
)
def test_explain_says_why_tilewise_serves(shapes, options, reason, monkeypatch):
    tensors = make(*shapes)
    told = explain(*tensors, **options)
    assert told == Explanation("tilewise", "the CPU backend", told.reasons)
    assert reason in str(told)
    served = serves(monkeypatch)
    sdpa(*tensors, **options)
    assert set(served) == {"tilewise"}


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"causal": True, "key": (2, 4, 100, 64), "value": (2, 4, 100, 64)}, True),
        ({"gqa": True, "key": (2, 2, 8, 64), "value": (2, 2, 8, 64)}, True),
        ({"value": (2, 4, 8, 128)}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float8_e4m3fn}, False),
        ({"hopper": False}, False),
        ({"mask": (2, 1, 1, 8), "mask_is_bool": True}, False),
        ({"value": (2, 4, 8, 257)}, False),
        ({"dropout": True}, False),
        ({"grad": True}, False),
        ({"fused": False}, False),
        ({"device": "xpu"}, False),
        ({"device": ""}, False),
        ({"dtype": None}, False),
    ],
)
def test_decisions_for_a_card(change, served):
    path, reasons = decide(HOPPER._replace(**change))
    assert (path != "torch") == served
    assert reasons


def test_gradients_are_torchs():
    tensors = [x.requires_grad_() for x in make((2, 3, 5, 8))]
    ours = torch.autograd.grad(sdpa(*tensors, is_causal=True).sum(), tensors)
    assert all(map(torch.equal, ours, torch.autograd.grad(torch_sdpa(*tensors, is_causal=True).sum(), tensors)))
    with torch.no_grad():
        check(*tensors)
    with torch.inference_mode():
        check(*tensors)


def test_autocast():
    tensors = make((2, 3, 5, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "bfloat16 on cpu" in str(explain(*tensors))
        got = sdpa(*tensors)
        assert got.dtype == torch.bfloat16
        assert sdpa(tensors[0], tensors[1].half(), tensors[2]).dtype == torch.bfloat16
        assert sdpa(*(x.double() for x in tensors)).dtype == torch.float64
    assert torch.equal(got, sdpa(*(x.bfloat16() for x in tensors)))


def test_switches_of_torch_are_obeyed():
    tensors = make((2, 3, 5, 8))
    with sdpa_kernel(SDPBackend.MATH):
        assert "switched flash kernels off" in str(explain(*tensors))
    assert explain(*tensors).backend == "tilewise"


def test_transforms_and_traces():
    tensors = make((2, 3, 5, 8))
    torch.testing.assert_close(torch.func.vmap(sdpa)(*tensors), torch_sdpa(*tensors))
    torch.testing.assert_close(torch.jit.trace(sdpa, tensors)(*tensors), torch_sdpa(*tensors))


def test_what_torch_refuses_it_refuses_here():
    query, key, value = make((2, 3, 5, 8))
    for args, options in (
        ((query, key[..., :4], value), {}),
        ((query, key[:, :2], value[:, :2]), {}),
        ((query, key, value), {"dropout_p": 2.0}),
        ((query, key.double(), value), {}),
        ((query[0, 0, 0], key, value), {}),
        ((query, key, value, torch.ones(4, 4, dtype=torch.bool)), {}),
    ):
        assert explain(*args, **options).backend == "torch"
        with pytest.raises(RuntimeError):
            sdpa(*args, **options)
    for options in ({"is_causal": 1}, {"scale": "1"}, {"dropout_p": None}):
        with pytest.raises(TypeError):
            sdpa(query, key, value, **options)
    with pytest.raises(TypeError):
        sdpa(query, key, [1.0])
    with pytest.raises(TypeError):
        sdpa(query, key, value, None, 0.0, False, 1.0)  # scale goes by name alone, as in torch


# Compiled.


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((2, 3, 5, 8), (2, 3, 9, 8)), {"is_causal": True}),
        (((2, 3, 9, 8), (2, 3, 5, 8)), {"is_causal": True}),
        (((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 4)), {"enable_gqa": True, "scale": 0.3}),
        (((7, 2, 3, 5, 8), (2, 1, 6, 8)), {}),
        (((2, 3, 5, 8),), {"attn_mask": padding(5, 2)}),
    ],
)
def test_compiles_to_an_operator(shapes, options):
    torch._dynamo.reset()
    tensors, graphs = make(*shapes), Graphs()
    fast = compiled(lambda *x: F.scaled_dot_product_attention(*x, **options), graphs)
    with replace_sdpa():
        got = fast(*tensors)
    torch.testing.assert_close(got, torch_sdpa(*tensors, **options))
    assert graphs.operators() == [["attention_seen_keys" if "attn_mask" in options else "attention"]]


def test_compiles_what_torch_serves():
    torch._dynamo.reset()
    tensors = [x.requires_grad_() for x in make((2, 3, 5, 8))]
    fast = torch.compile(sdpa, fullgraph=True, backend="aot_eager")
    torch.autograd.grad(fast(*tensors).sum(), tensors)
    torch.testing.assert_close(fast(*tensors, randn(5, 5)), torch_sdpa(*tensors, randn(5, 5)))


# In torch's place.


def test_install_and_uninstall():
    from torch.nn.functional import scaled_dot_product_attention as held

    install()
    install()
    assert F.scaled_dot_product_attention is sdpa
    assert held is torch_sdpa
    uninstall()
    assert F.scaled_dot_product_attention is torch_sdpa
    uninstall()
    with pytest.raises(TypeError, match="flash must be True or False, got 1"):
        install(flash=1)


def test_blocks_nest_and_end_by_exceptions():
    @replace_sdpa()
    def failing():
        assert F.scaled_dot_product_attention is sdpa
        raise KeyError

    with replace_sdpa():
        with pytest.raises(KeyError):
            failing()
        assert F.scaled_dot_product_attention is sdpa
        install()
    assert F.scaled_dot_product_attention is sdpa
    with replace_sdpa():
        uninstall()
        assert F.scaled_dot_product_attention is sdpa
    assert F.scaled_dot_product_attention is torch_sdpa


def test_blocks_of_threads_may_overlap():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with replace_sdpa():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with replace_sdpa():
        thread.start()
        assert entered.wait(10)
    assert F.scaled_dot_product_attention is sdpa  # the other thread's block is still open
    leave.set()
    thread.join()
    assert F.scaled_dot_product_attention is torch_sdpa


def test_somebody_elses_function_is_left_alone(monkeypatch):
    theirs = lambda *a, **k: None  # noqa: E731
    install()
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    uninstall()
    assert F.scaled_dot_product_attention is theirs
    monkeypatch.undo()
    F.scaled_dot_product_attention = torch_sdpa


def test_somebody_elses_function_is_put_back(monkeypatch):
    theirs = lambda *a, **k: None  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with replace_sdpa():
        install()
        assert F.scaled_dot_product_attention is sdpa
    uninstall()
    assert F.scaled_dot_product_attention is theirs
    monkeypatch.undo()
    with replace_sdpa():
        pass
    assert F.scaled_dot_product_attention is torch_sdpa


def test_a_model_that_calls_torchs_function(monkeypatch):
    model = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = randn(2, 9, 32)
    with torch.no_grad():
        expected = model(x, x, x, need_weights=False)[0]
        served = serves(monkeypatch)
        model.train()  # the fused path of eval() asks nobody
        with replace_sdpa():
            got = model(x, x, x, need_weights=False)[0]
    assert served == ["tilewise"]
    torch.testing.assert_close(got, expected)


# Behind torch's own flash attention.

flash = pytest.mark.skipif(not replace.offers_flash(), reason="this torch takes no other flash attention")


@flash
def test_flash_is_listed_and_activated_on_demand():
    attention = torch.nn.attention
    assert "tilewise" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    install(flash=True)
    assert attention.current_flash_attention_impl() == "tilewise"
    install(flash=True)
    uninstall()
    assert attention.current_flash_attention_impl() is None


def test_a_torch_that_takes_no_flash(monkeypatch):
    monkeypatch.setattr(replace, "offers_flash", lambda: False)
    with pytest.raises(NotImplementedError, match="takes no other flash kernel"):
        install(flash=True)
    assert F.scaled_dot_product_attention is torch_sdpa


@flash
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_flash_operator(is_causal):
    """On CPU tensors, for which torch has no such kernel: ours is put there to be tried."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    query, key, value = make((2, 4, 9, 8), (2, 2, 9, 8))
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    kernel = FlashKernel("CPU")
    try:
        out, lse, *_, rows, keys, _, _, _ = operator(query, key, value, 0.0, is_causal, scale=0.3)
        recorded = operator(query.requires_grad_(), key, value)[0]
        with pytest.raises(NotImplementedError, match="dropout_p is not 0"):
            operator(query, key, value, 0.5)
        with pytest.raises(NotImplementedError, match="a debug mask"):
            operator(query, key, value, 0.0, False, True)
    finally:
        kernel.remove()
        kernel.remove()
    assert recorded.requires_grad  # torch's own backward pass
    assert (rows, keys) == (9, 9)
    assert out.stride() == query.stride()
    q, k, v = (x.detach().transpose(1, 2) for x in (query, key, value))
    exact, exact_lse = reference.attention(q, k, v, causal=is_causal, scale=0.3)
    torch.testing.assert_close(out.transpose(1, 2).double(), exact, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-6, rtol=1e-6)
    with pytest.raises(NotImplementedError, match="Could not run"):
        operator(query, key, value)
