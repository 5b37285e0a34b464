"""Bad input for every public call: the right exception, naming the argument, and nothing changed."""

from __future__ import annotations

import pytest
import torch
from decode_tree_cases import make_cache, tree
from oracle import poison, qkv, randn

import tilewise
from tilewise import (
    BlockSchedule,
    CostModel,
    attention,
    attention_varlen,
    decode,
    merge,
    merge_states,
    plan_attention,
    plan_decode,
    shared_prefix_attention,
)

META = torch.device("meta")  # a device that is not the CPU, on any machine


def schedule(nq=6, nk=9, heads=None):
    return BlockSchedule.random(nq, nk, block_q=16, block_k=16, sparsity=0.0, seed=0, heads=heads)


def swap(**changes):
    """q, k, v of a good call with some replaced."""
    q, k, v = qkv(2, 6, 9, 4, 2, 8)
    return {"q": q, "k": k, "v": v, **changes}


Q, K, V = qkv(2, 6, 9, 4, 2, 8)
NAN = float("nan")
ATTENTION = [
    ("q", TypeError, {"q": [1.0]}),
    ("q", TypeError, {"q": None}),
    ("q", ValueError, {"q": Q[0]}),
    ("k", ValueError, {"k": K[0]}),
    ("v", ValueError, {"v": V[None]}),
    ("q", NotImplementedError, {"q": Q.double()}),
    ("q", ValueError, {"q": Q.int()}),
    ("k", ValueError, {"k": K.half()}),
    ("v", ValueError, {"v": V.bfloat16()}),
    ("k", ValueError, {"k": K.to(META)}),
    ("v", ValueError, {"v": V.to(META)}),
    ("k", ValueError, {"k": K[:1], "v": V[:1]}),
    ("v", ValueError, {"v": V[:, :8]}),
    ("v", ValueError, {"v": V[:, :, :1]}),
    ("k", ValueError, {"k": K[..., :4], "v": V[..., :4]}),
    ("head_dim of v", ValueError, {"v": V[..., :0]}),
    ("head_dim of v", NotImplementedError, {"v": randn(2, 9, 2, 577)}),
    ("q", ValueError, {"q": Q[:, :, :3]}),  # 3 heads over 2 KV heads
    ("q", ValueError, {"q": Q[:, :, :0]}),
    ("k", ValueError, {"k": K[:, :, :0], "v": V[:, :, :0]}),
    ("head_dim", ValueError, {"q": Q[..., :0], "k": K[..., :0], "v": V[..., :0]}),
    ("head_dim", NotImplementedError, dict(zip("qkv", qkv(1, 1, 1, 1, 1, 577), strict=True))),
    ("q", ValueError, {"q": Q.transpose(1, 3).contiguous().transpose(1, 3)}),  # last stride is not 1
    ("k", ValueError, {"k": K.transpose(1, 3).contiguous().transpose(1, 3)}),
    ("causal", TypeError, {"causal": 1}),
    ("window", TypeError, {"window": 5}),
    ("window", TypeError, {"window": (1, 2, 3)}),
    ("window", TypeError, {"window": (1.5, 0)}),
    ("window", ValueError, {"window": (-1, 0)}),
    ("window", ValueError, {"window": (0, -2)}),
    ("scale", ValueError, {"scale": NAN}),
    ("scale", ValueError, {"scale": float("inf")}),
    ("scale", TypeError, {"scale": "1"}),
    ("softcap", ValueError, {"softcap": -1.0}),
    ("softcap", ValueError, {"softcap": NAN}),
    ("softcap", TypeError, {"softcap": None}),
    ("sinks", TypeError, {"sinks": [0.0] * 4}),
    ("sinks", ValueError, {"sinks": torch.zeros(3)}),
    ("sinks", ValueError, {"sinks": torch.zeros(4, dtype=torch.int32)}),
    ("sinks", ValueError, {"sinks": torch.zeros(4, device=META)}),
    ("alibi_slopes", TypeError, {"alibi_slopes": 0.5}),
    ("alibi_slopes", ValueError, {"alibi_slopes": torch.zeros(2)}),
    ("alibi_slopes", ValueError, {"alibi_slopes": torch.zeros(3, 4)}),
    ("schedule", TypeError, {"schedule": torch.ones(6, 9, dtype=torch.bool)}),
    ("schedule", ValueError, {"schedule": schedule(6, 8)}),
    ("schedule", ValueError, {"schedule": schedule(5, 9)}),
    ("schedule", ValueError, {"schedule": schedule(heads=3)}),  # neither KV heads nor query heads
    ("return_lse", TypeError, {"return_lse": "yes"}),
    ("out", TypeError, {"out": "o"}),
    ("out", ValueError, {"out": torch.empty(2, 6, 4, 7)}),
    ("out", ValueError, {"out": torch.empty(2, 6, 4, 8, dtype=torch.float16)}),
    ("out", ValueError, {"out": torch.empty(2, 6, 4, 8, device=META)}),
    ("out", ValueError, {"out": torch.empty(2, 6, 1, 8).expand(2, 6, 4, 8)}),
    ("out", ValueError, {"out": torch.empty(2, 6, 4, 8, requires_grad=True)}),
    ("window", TypeError, {"window": (torch.tensor(True), 0)}),
    ("softcap", ValueError, {"softcap": 10**400}),
    ("backend", ValueError, {"backend": "tpu"}),
]


@pytest.mark.parametrize(("name", "error", "changes"), ATTENTION)
def test_attention(name, error, changes):
    out = poison(Q)
    arguments = swap(out=out, **changes) if "out" not in changes else swap(**changes)
    with pytest.raises(error, match=name):
        attention(**arguments)
    assert torch.isnan(out).all()  # nothing was written


BFLOAT16 = {"q": Q.bfloat16(), "k": K, "v": V}
WIDE = dict(zip("qkv", qkv(1, 3, 3, 2, 2, 577), strict=True))
WAYS_OUT = [
    (BFLOAT16, ValueError, r"k must have q's dtype bfloat16, got float32; use k\.to\(q\.dtype\)"),
    ({"k": K.to(META)}, ValueError, r"k must be on cpu like q, got meta; use k\.to\(q\.device\)"),
    ({"sinks": torch.zeros(4, device=META)}, ValueError, r'sinks must be on cpu .*; use sinks\.to\("cpu"\)'),
    ({"q": Q.numpy()}, TypeError, "q must be a torch.Tensor, got ndarray; use torch.from_numpy"),
    ({"window": (-1, 0)}, ValueError, "window must be at least 0, got -1; None means no limit"),
    ({"window": ("all", 0)}, TypeError, "window must be an int, got str; None means no limit"),
    (
        {"window": 5},
        TypeError,
        r"window must be \(left, right\), how many keys are seen to either side, or None, got 5",
    ),
    ({"softcap": None}, TypeError, "softcap must be a float, got NoneType; 0.0 means no capping"),
    ({"softcap": -1.0}, ValueError, "softcap must be finite and at least 0.0, got -1.0; 0.0 means no capping"),
    ({"scale": NAN}, ValueError, r"scale must be finite, got nan; None means head_dim \*\* -0.5"),
    ({"q": Q[:, :, :3]}, ValueError, r"multiple of k's 2 heads, got 3; tensors are \(batch, seqlen, heads, head_dim\)"),
    (
        {"out": torch.empty(2, 6, 4, 8, requires_grad=True)},
        ValueError,
        r"out must be writable .*; use q.new_empty\(\(2, 6, 4, 8\)\)",
    ),
    ({"q": Q.double()}, NotImplementedError, r"q is float64, .*; use q\.float\(\), or tilewise\.reference"),
    (WIDE, NotImplementedError, "head_dim of q is 577, .* at most 576; use torch.nn.functional.scaled_dot_product"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WAYS_OUT)
def test_messages_tell_the_way_out(changes, error, message):
    with pytest.raises(error, match=message):
        attention(**swap(**changes))


CU = torch.tensor([0, 2, 6], dtype=torch.int32)
VARLEN = [
    ("q", ValueError, {"q": Q}),
    ("k", ValueError, {"k": K}),
    ("cu_seqlens_q", TypeError, {"cu_seqlens_q": [0, 2, 6]}),
    ("cu_seqlens_q", ValueError, {"cu_seqlens_q": CU.float()}),
    ("cu_seqlens_q", ValueError, {"cu_seqlens_q": CU[None]}),
    ("cu_seqlens_q", ValueError, {"cu_seqlens_q": CU[:0]}),
    ("cu_seqlens_q", ValueError, {"cu_seqlens_q": torch.tensor([1, 2, 6])}),
    ("cu_seqlens_q", ValueError, {"cu_seqlens_q": torch.tensor([0, 7, 6])}),
    ("cu_seqlens_k", ValueError, {"cu_seqlens_k": torch.tensor([0, -1, 9])}),
    ("cu_seqlens_k", ValueError, {"cu_seqlens_k": torch.tensor([0, 2, 8])}),
    ("cu_seqlens_k", ValueError, {"cu_seqlens_k": torch.tensor([0, 2, 10])}),
    ("cu_seqlens_k", ValueError, {"cu_seqlens_k": torch.tensor([0, 9])}),
    ("alibi_slopes", ValueError, {"alibi_slopes": torch.zeros(3, 4)}),
    ("sequence 0", ValueError, {"schedule": schedule(6, 9)}),
    ("sequence 1", ValueError, {"schedule": [None, schedule(6, 9)]}),
    ("schedule", ValueError, {"schedule": [None]}),
    ("schedule", TypeError, {"schedule": [None, "x"]}),
    ("schedule", TypeError, {"schedule": 3}),
    ("window", ValueError, {"window": (-1, None)}),
    ("scale", ValueError, {"scale": NAN}),
    ("out", ValueError, {"out": torch.empty(6, 4, 9)}),
    ("backend", ValueError, {"backend": ""}),
]


@pytest.mark.parametrize(("name", "error", "changes"), VARLEN)
def test_varlen(name, error, changes):
    arguments = {"q": Q[0], "k": K[0], "v": V[0], "cu_seqlens_q": CU, "cu_seqlens_k": torch.tensor([0, 4, 9])}
    with pytest.raises(error, match=name):
        attention_varlen(**{**arguments, **changes})


LEVEL = (randn(1, 5, 2, 8), randn(1, 5, 2, 8))
PREFIX = [
    ("levels", TypeError, {"levels": LEVEL[0]}),
    ("levels", TypeError, {"levels": None}),
    (r"levels\[0\]", TypeError, {"levels": [LEVEL[0]]}),
    (r"levels\[0\]", TypeError, {"levels": [(LEVEL[0],)]}),
    (r"levels\[0\]\[0\]", TypeError, {"levels": [(1, 2)]}),
    (r"levels\[0\]\[0\]", ValueError, {"levels": [(LEVEL[0][0], LEVEL[1][0])]}),
    (r"levels\[0\]\[0\]", ValueError, {"levels": [tuple(x[:, :, :1] for x in LEVEL)]}),
    (r"levels\[0\]\[0\]", ValueError, {"levels": [tuple(x.half() for x in LEVEL)]}),
    (r"levels\[0\]\[1\]", ValueError, {"levels": [(LEVEL[0], LEVEL[1][:, :4])]}),
    (r"levels\[0\]\[0\]", ValueError, {"levels": [(randn(3, 5, 2, 8), randn(3, 5, 2, 8))]}),
    (r"levels\[0\]\[0\]", ValueError, {"levels": [(randn(0, 5, 2, 8), randn(0, 5, 2, 8))]}),
    (r"levels\[0\]\[0\]", ValueError, {"levels": [(randn(2, 5, 2, 8), randn(2, 5, 2, 8)), LEVEL]}),
    (r"levels\[1\]\[0\]", TypeError, {"levels": [LEVEL, (None, None)]}),
    (r"levels\[1\]", TypeError, {"levels": [LEVEL, 5]}),
    (r"levels\[0\]\[2\]", ValueError, {"levels": [(*LEVEL, [6])]}),
    (r"levels\[0\]\[2\]", ValueError, {"levels": [(*LEVEL, [-1])]}),
    (r"levels\[0\]\[2\]", ValueError, {"levels": [(*LEVEL, [1, 2])]}),
    (r"levels\[0\]\[2\]", TypeError, {"levels": [(*LEVEL, 3)]}),
    ("lengths", ValueError, {"lengths": torch.tensor([10, 3])}),
    ("lengths", ValueError, {"lengths": torch.tensor([1.0, 3.0])}),
    ("k", ValueError, {"k": K[:1], "v": V[:1]}),
    ("causal", TypeError, {"causal": None}),
    ("sinks", ValueError, {"sinks": torch.zeros(5)}),
    ("out", ValueError, {"out": torch.empty(1)}),
]


@pytest.mark.parametrize(("name", "error", "changes"), PREFIX)
def test_shared_prefix(name, error, changes):
    arguments = {"q": Q, "levels": [LEVEL], "k": K, "v": V}
    with pytest.raises(error, match=name):
        shared_prefix_attention(**{**arguments, **changes})


def decode_arguments():
    cache = make_cache(num_layers=2)
    seqs = tree(cache, [1, 3], [9, 2])
    return cache, seqs, plan_decode(cache, seqs, num_heads=4)


PLAN_DECODE = [
    ("cache", TypeError, {"cache": {}}),
    ("num_heads", ValueError, {"num_heads": 3}),
    ("num_heads", ValueError, {"num_heads": 0}),
    ("num_heads", TypeError, {"num_heads": 4.0}),
    ("tokens_per_seq", ValueError, {"tokens_per_seq": 0}),
    ("share_prefix", ValueError, {"share_prefix": "always"}),
    ("share_prefix", ValueError, {"share_prefix": 1}),
    ("share_prefix", ValueError, {"share_prefix": torch.tensor([True, False])}),
    ("window", ValueError, {"window": (-1, 0)}),
    ("cost", TypeError, {"cost": 5}),
    ("seqs", TypeError, {"seqs": [0.5]}),
    ("seqs", TypeError, {"seqs": 0}),
    ("sequence 77", ValueError, {"seqs": [77]}),
]


@pytest.mark.parametrize(("name", "error", "changes"), PLAN_DECODE)
def test_plan_decode(name, error, changes):
    cache, seqs, _ = decode_arguments()
    with pytest.raises(error, match=name):
        plan_decode(**{"cache": cache, "seqs": seqs, "num_heads": 4, **changes})


def test_plan_decode_of_a_freed_sequence():
    cache, seqs, _ = decode_arguments()
    cache.free(seqs[1])
    with pytest.raises(ValueError, match="freed"):
        plan_decode(cache, seqs, num_heads=4)


DECODE = [
    ("q", TypeError, {"q": 1}),
    ("q", ValueError, {"q": randn(3, 1, 8, 16)}),
    ("q", ValueError, {"q": randn(2, 1, 4, 16)}),
    ("q", ValueError, {"q": randn(3, 2, 4, 16)}),
    ("q", ValueError, {"q": randn(3, 1, 4, 15)}),
    ("q", NotImplementedError, {"q": randn(3, 1, 4, 16).double()}),
    ("cache", TypeError, {"cache": None}),
    ("cache", ValueError, {"cache": make_cache(kv_heads=4)}),
    ("layer", ValueError, {"layer": 2}),
    ("layer", ValueError, {"layer": -1}),
    ("plan", TypeError, {"plan": "plan"}),
    ("plan", TypeError, {"plan": plan_attention(Q, K)}),
    ("scale", ValueError, {"scale": NAN}),
    ("softcap", ValueError, {"softcap": -1.0}),
    ("sinks", ValueError, {"sinks": torch.zeros(2)}),
    ("out", ValueError, {"out": torch.empty(3, 4, 16)}),
    ("backend", ValueError, {"backend": "gpu"}),
]


@pytest.mark.parametrize(("name", "error", "changes"), DECODE)
def test_decode(name, error, changes):
    cache, _, plan = decode_arguments()
    arguments = {"q": randn(3, 1, 4, 16), "cache": cache, "layer": 0, "plan": plan}
    with pytest.raises(error, match=name if name != "cache" or error is TypeError else "cache|plan"):
        decode(**{**arguments, **changes})


MERGE = [
    ("o", TypeError, merge_states, ([1], torch.zeros(1, 4, 5))),
    ("o", ValueError, merge_states, (torch.zeros(5, 4, 8), torch.zeros(4, 5))),
    ("o", ValueError, merge_states, (torch.zeros(0, 5, 4, 8), torch.zeros(0, 4, 5))),
    ("o", ValueError, merge_states, (torch.zeros(2, 5, 4, 8).int(), torch.zeros(2, 4, 5))),
    ("lse", ValueError, merge_states, (torch.zeros(2, 5, 4, 8), torch.zeros(2, 5, 4))),
    ("lse", ValueError, merge_states, (torch.zeros(2, 5, 4, 8), torch.zeros(2, 4, 5).half())),
    ("lse", TypeError, merge_states, (torch.zeros(2, 5, 4, 8), None)),
    ("lse_a", ValueError, merge, (torch.zeros(5, 4, 8), torch.zeros(5, 4)) * 2),
    ("o_b", ValueError, merge, (torch.zeros(5, 4, 8), torch.zeros(4, 5), torch.zeros(6, 4, 8), torch.zeros(4, 6))),
    (
        "o_b",
        ValueError,
        merge,
        (torch.zeros(5, 4, 8), torch.zeros(4, 5), torch.zeros(5, 4, 8).half(), torch.zeros(4, 5)),
    ),
]


@pytest.mark.parametrize(("name", "error", "call", "arguments"), MERGE)
def test_merge(name, error, call, arguments):
    with pytest.raises(error, match=name):
        call(*arguments)


def test_other_devices_say_what_to_use():
    q, k, v = (x.to(META) for x in (Q, K, V))
    for call in (
        lambda: attention(q, k, v),
        lambda: attention_varlen(q[0], k[0], v[0], CU, torch.tensor([0, 4, 9])),
        lambda: shared_prefix_attention(q, [], k, v),
    ):
        with pytest.raises(NotImplementedError, match=r"no kernels for this call on meta tensors yet; use .*cpu"):
            call()


def test_gradients_are_refused_not_lost():
    cache = tilewise.PagedKVCache(8, 4, 2, 16)
    seq = cache.allocate()
    cache.write(0, cache.extend([seq], [5]), torch.randn(5, 2, 16), torch.randn(5, 2, 16))
    plan = tilewise.plan_decode(cache, [seq], num_heads=4)
    with pytest.raises(NotImplementedError, match="no backward"):
        tilewise.decode(torch.randn(1, 1, 4, 16, requires_grad=True), cache, 0, plan)
    with pytest.raises(NotImplementedError, match="no backward"):
        tilewise.decode(torch.randn(1, 1, 4, 16), cache, 0, plan, sinks=torch.zeros(4, requires_grad=True))
    q = Q.clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(attention(q, K, V), attention(Q, K, V))


def test_cost_models_are_public():
    assert tilewise.CostModel is CostModel
