"""What the calls ask backward kernels for, with a kernel in plain float64 in their place: layouts, starts, levels."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from oracle import assert_gradients, gradient_floors, gradients, qkv, randn

from tilewise import (
    BlockSchedule,
    TokenTree,
    attention,
    attention_tree,
    attention_varlen,
    reference,
    shared_prefix_attention,
)
from tilewise.api import gradients as nodes
from tilewise.gpu import backward
from tilewise.gpu import calls as calls_of_kernels
from tilewise.gpu.backward_call import GradientCall, Gradients
from tilewise.scores import Scores

PATTERN = {"schedule": None, "mask": None, "score": None}
REST = {**PATTERN, "exact": False, "deterministic": False, "dropout_p": 0.0, "backend": "emulator"}


@pytest.fixture
def calls(monkeypatch):
    """The GradientCalls that were made, answered by `kernel`."""
    made = []
    monkeypatch.setattr(backward, "gradients", lambda call: made.append(call) or kernel(call))
    return made


def kernel(call: GradientCall) -> Gradients:
    """The gradients by their formulas, sequence by sequence."""
    d_q, d_k, d_v = (torch.zeros(x.shape, dtype=torch.float64) for x in (call.q, call.k, call.v))
    d_sinks = None if call.scores.sinks is None else torch.zeros(call.q.shape[-2], dtype=torch.float64)
    d_lse = torch.zeros_like(call.lse) if call.d_lse is None else call.d_lse
    for b in range(len(call.starts_q) - 1 if call.packed else len(call.q)):
        rows, keys = b, b
        if call.packed:
            assert max(x.diff().max() for x in (call.starts_q, call.starts_k)) <= max(call.max_seqlens)
            rows, keys = (slice(int(x[b]), int(x[b + 1])) for x in (call.starts_q, call.starts_k))
        q, o, d_o = (x[rows].double() for x in (call.q, call.o, call.d_o))
        k, v = (x[keys].double() for x in (call.k, call.v))
        lse, its_d_lse = (x[:, rows].double() if call.packed else x[b].double() for x in (call.lse, d_lse))
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        s = torch.einsum("ihd,jhd->hij", q, k) * call.scores.scale
        chain = torch.ones_like(s)
        if call.scores.softcap:
            chain = 1 - torch.tanh(s / call.scores.softcap) ** 2
            s = call.scores.softcap * torch.tanh(s / call.scores.softcap)
        s = s.masked_fill(~reference.visible(len(q), len(k), causal=False, window=call.scores.window), -torch.inf)
        p = torch.exp(s - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None])
        delta = torch.einsum("ihd,ihd->hi", d_o, o) - its_d_lse
        d_s = p * (torch.einsum("ihd,jhd->hij", d_o, v) - delta[..., None]) * chain * call.scores.scale
        d_q[rows] = torch.einsum("hij,jhd->ihd", d_s, k)
        d_k[keys] += torch.einsum("hij,ihd->jhd", d_s, q).unflatten(1, (-1, group)).sum(2)
        d_v[keys] += torch.einsum("hij,ihd->jhd", p, d_o).unflatten(1, (-1, group)).sum(2)
        if d_sinks is not None:
            d_sinks -= (torch.exp(call.scores.sinks[:, None] - lse) * delta).sum(1)
    return Gradients(*(x.to(call.q.dtype) for x in (d_q, d_k, d_v)), None if d_sinks is None else d_sinks.float())


def check(node, tensors, among, oracle, d_o, d_lse):
    """The node's gradients of those tensors that the oracle, a call of them, has leaves for."""
    leaves = [tensors[n] for n in among]
    state = [x.float() for x in oracle(*leaves)]
    got = nodes.found(node, tensors, state, (d_o, d_lse))
    want = gradients(oracle, leaves, torch.zeros_like(state[0]) if d_o is None else d_o, d_lse, dtype=torch.float64)
    for n, expected in zip(among, want, strict=True):
        torch.testing.assert_close(got[n].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("through", ["o", "lse", "both"])
def test_dense(calls, through):
    q, k, v, sinks = *qkv(2, 9, 12, 4, 2, 16), randn(4, seed=5)
    node = nodes.Dense(None, {"causal": True, "softcap": 3.0}, REST)
    d_o = None if through == "lse" else randn(1, 1, 1, 1, seed=6).expand(q.shape)  # as sums hand it down
    d_lse = None if through == "o" else randn(2, 4, 9, seed=7)
    oracle = lambda q, k, v, s, **more: reference.attention(q, k, v, sinks=s, causal=True, softcap=3.0, **more)  # noqa: E731
    check(node, (q, k, v, sinks, None), range(4), oracle, d_o, d_lse)
    assert calls[0].d_o.stride(-1) == 1
    assert (calls[0].d_lse is None) == (through == "o")
    assert not calls[0].deterministic


@pytest.mark.parametrize("paged", [False, True])
def test_packed(calls, paged):
    """Pages that sequences share get the gradients of both."""
    starts = torch.tensor([0, 5, 5, 9]), torch.tensor([0, 7, 9, 21])
    q, k, v = (x[0] for x in qkv(1, 9, 24, 4, 2, 16))
    table = torch.tensor([[4, 1, 0], [2, 0, 0], [4, 3, 5]], dtype=torch.int32) if paged else None
    index = torch.arange(21)
    if paged:
        k, v = (x.view(6, 4, 2, 16) for x in (k, v))
        tokens = [table[b].long()[torch.arange(n) // 4] * 4 + torch.arange(n) % 4 for b, n in enumerate((7, 2, 12))]
        index = torch.cat(tokens)
    else:
        k, v = k[:21], v[:21]

    def oracle(q, k, v, **more):
        k, v = (x.flatten(0, -3)[index] for x in (k, v))
        return reference.attention_varlen(q, k, v, *starts, causal=True, **more)

    tensors = (q, k, v, *starts, table, None, None)
    check(nodes.Packed(None, {"causal": True}, REST), tensors, range(3), oracle, randn(9, 4, 16, seed=3), None)
    assert calls[0].max_seqlens == (5, 12)


def test_levels(calls):
    q, k, v, sinks = *qkv(4, 3, 6, 4, 2, 16), randn(4, seed=5)
    levels = [randn(n, size, 2, 16, seed=seed) for n, size, seed in ((1, 9, 1), (1, 9, 2), (2, 8, 3), (2, 8, 4))]
    lengths = [None, [8, 2], [6, 4, 1, 3]]

    def oracle(q, k, v, sinks, ka, va, kb, vb, **more):
        prefixes = [(ka, va), (kb, vb, lengths[1])]
        return reference.shared_prefix_attention(q, prefixes, k, v, lengths=lengths[2], sinks=sinks, **more)

    rest = {"deterministic": True, "backend": "emulator"}
    node = nodes.SharedPrefix(None, {"causal": True, "scale": None, "softcap": 0.0}, rest, lengths)
    check(node, (q, k, v, sinks, *levels), range(8), oracle, randn(*q.shape, seed=8), randn(4, 4, 3, seed=9))
    assert [call.deterministic for call in calls] == [True] * 3


def test_nothing_reaches_no_kernel(calls):
    """No keys: a sink alone makes an LSE, and has its gradient."""
    q, k, v, sinks = *qkv(2, 3, 0, 4, 2, 16), randn(4, seed=5)
    node = nodes.Dense(None, {}, REST)
    oracle = lambda q, k, v, s, **more: reference.attention(q, k, v, sinks=s, **more)  # noqa: E731
    check(node, (q, k, v, sinks, None), range(4), oracle, randn(*q.shape, seed=6), randn(2, 4, 3, seed=7))
    packed = nodes.Packed(None, {}, REST)
    starts = torch.tensor([0, 3]), torch.tensor([0, 0])
    oracle = lambda q, k, v, s, **more: reference.attention_varlen(q, k, v, *starts, sinks=s, **more)  # noqa: E731
    tensors = (q[0], k[0], v[0], *starts, None, sinks, None)
    check(packed, tensors, (0, 1, 2, 6), oracle, randn(3, 4, 16, seed=6), randn(4, 3, seed=7))
    assert calls == []


def test_torch_may_ask_for_the_same_bits(calls):
    state = [x.float() for x in reference.attention(*qkv(1, 3, 4, 2, 2, 8))]
    torch.use_deterministic_algorithms(True)
    try:
        nodes.Dense(None, {}, REST).backward((*qkv(1, 3, 4, 2, 2, 8), None, None), state, (state[0], None))
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls[0].deterministic


SCHEDULES = {
    "one": BlockSchedule.random(70, 90, block_q=16, block_k=32, sparsity=0.5, seed=1),
    "by head": BlockSchedule.from_blocks(
        torch.rand(4, 5, 3, generator=torch.Generator().manual_seed(0)) < 0.6,
        seqlen_q=70, seqlen_k=90, block_q=16, block_k=32,
        lengths_q=torch.tensor([16, 9, 16, 0, 6]), lengths_k=torch.tensor([32, 20, 26]),
    ),
}  # fmt: skip
BEYOND = {
    "mask": {"mask": lambda b, h, q, k: (q + k + h + b) % 3 != 0, "causal": True},
    "score": {"score": lambda s, b, h, q, k: torch.tanh(s) * 3 - 0.01 * (q - k) * h, "window": (50, 3)},
    "schedule": {"schedule": SCHEDULES["one"], "causal": True, "softcap": 2.0},
    "schedule by head": {"schedule": SCHEDULES["by head"]},
    "slopes": {"mask": lambda b, h, q, k: (q + k) % 5 != 0, "alibi_slopes": randn(2, 4, seed=3).abs()},
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_kernels_do_not_do(monkeypatch, name):
    """Functions and schedules beside dropout go by torch's products on the device of the tensors."""
    monkeypatch.setattr(backward, "gradients", None)
    asked = {**BEYOND[name], "dropout_p": 0.2, "dropout_seed": torch.tensor(5)}
    options = dict(asked)
    rest = {**REST, **{n: options.pop(n) for n in list(options) if n in REST}}
    function = nodes.check(*qkv(1, 1, 1, 1, 1, 8)[:1], None, "emulator", mask=rest["mask"], score=rest["score"])
    seed = options.pop("dropout_seed", None)
    q, k, v, sinks = *qkv(2, 70, 90, 4, 2, 16), randn(4, seed=5)
    if name == "schedule by head":
        k[:, 52:64], v[:, 52:64] = torch.nan, torch.nan  # past a block's length
    oracle = lambda q, k, v, s, **more: reference.attention(  # noqa: E731
        q, k.nan_to_num(0.0), v.nan_to_num(0.0), sinks=s, **asked, **more
    )
    node = nodes.Dense(None, options, rest, function)
    check(node, (q, k, v, sinks, seed), range(4), oracle, randn(*q.shape, seed=8), randn(2, 4, 70, seed=9))


@pytest.mark.usefixtures("own_card")
def test_dropout_where_kernels_run():
    """Forward and backward, dense, packed and paged, are those of the CPU; also beside a mask, by torch's products."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 20, 24, 4, 2, 16))
    given = {"dropout_p": 0.3, "dropout_seed": torch.tensor(9), "causal": True, "return_lse": True}
    starts, table = (torch.tensor([0, 8, 20]), torch.tensor([0, 10, 24])), torch.tensor([[0, 1, 2, 0], [3, 4, 5, 1]])
    for call in (
        partial(attention, q, k, v, sinks=randn(4, seed=2)),
        partial(attention, q, k, v, mask=lambda b, h, q, k: (q + k) % 5 != 0),
        partial(attention_varlen, q[0], k[0], v[0], *starts),
        partial(attention_varlen, q[0], *(x[0].view(6, 4, 2, 16) for x in (k, v)), *starts, page_table=table.int()),
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16):  # which is switched off inside
            states = [call(**given, backend=backend) for backend in ("emulator", "cpu")]
        found = [torch.autograd.grad(o.square().sum() + lse.sum(), (q, k, v)) for o, lse in states]
        for a, b in zip((*states[0], *found[0]), (*states[1], *found[1]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_no_backward_serves_is_refused_by_the_forward(monkeypatch):
    """Before anything runs; without gradients, and with dropout, which then goes by torch's products, it is served."""
    q, k, v = (x.to(torch.bfloat16) for x in qkv(1, 5, 9, 2, 1, 16))
    starts = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0, 9], dtype=torch.int32)
    tree = TokenTree.from_sequences([[1, 2, 3, 4, 5]])
    ran = []
    monkeypatch.setattr(backward, "kernel_of", lambda *_, **__: None)
    monkeypatch.setattr(calls_of_kernels, "bind", lambda *_, **__: ran.append(1))
    monkeypatch.setattr(calls_of_kernels, "shared_prefix", lambda *_, **__: ran.append(1))
    q.requires_grad_()
    at = {"backend": "emulator"}
    for call in (
        lambda: attention(q, k, v, **at),
        lambda: attention(q, k, v, mask=lambda b, h, q, k: q != k, **at),
        lambda: attention_varlen(q[0], k[0], v[0], *starts, **at),
        lambda: shared_prefix_attention(q, [(k, v)], k, v, **at),
        lambda: attention_tree(q[0], k[0, :5], v[0, :5], tree, **at),
    ):
        with pytest.raises(
            NotImplementedError, match=r'backward kernels take .* got torch.bfloat16, 16 .*backend="cpu"'
        ):
            call()
    assert not ran
    compiled = torch.compile(lambda q: attention(q, k, v, **at), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="backward kernels take"):  # when it is compiled
        compiled(q)
    monkeypatch.undo()
    monkeypatch.setattr(backward, "kernel_of", lambda *_, **__: None)
    attention(q, k, v, dropout_p=0.5, **at).float().sum().backward()
    assert attention(q.detach(), k, v, **at).shape == q.shape


@pytest.mark.usefixtures("own_card")
def test_values_of_another_head_dim():
    """Wider or narrower than q and k: the gradients are those of zeros beside them."""
    for dims in ((40, 64), (64, 24)):
        q, k, v = randn(1, 30, 2, dims[0]), randn(1, 20, 1, dims[0], seed=1), randn(1, 20, 1, dims[1], seed=2)
        d_o, scale = randn(1, 30, 2, dims[1], seed=3), 0.2
        wide = lambda x: torch.nn.functional.pad(x, (0, 64 - x.shape[-1]))  # noqa: E731
        o, lse = reference.attention(*(wide(x) for x in (q, k, v)), scale=scale)
        o, lse = o.float(), lse.float()
        given = (*(x.to(torch.bfloat16) for x in (q, k, v, o[..., : dims[1]])), lse, d_o.to(torch.bfloat16))
        scores = Scores(scale=scale)
        got = backward.gradients(GradientCall(*given, scores))
        want = backward.gradients(GradientCall(*(x if x is lse else wide(x) for x in given), scores))
        for ours, theirs, dim in zip(got[:3], want[:3], (dims[0], *dims), strict=True):
            assert ours.is_contiguous()
            torch.testing.assert_close(ours, theirs[..., :dim])


@pytest.mark.usefixtures("own_card")
def test_the_emulated_kernels_give_the_gradients_of_the_oracle():
    q, k, v, sinks = *qkv(1, 64, 100, 2, 1, 64, dtype=torch.bfloat16), randn(2, seed=5)
    ours = lambda q, k, v, s: attention(q, k, v, sinks=s, return_lse=True, backend="emulator")  # noqa: E731
    oracle = lambda q, k, v, s, **more: reference.attention(q, k, v, sinks=s, **more)  # noqa: E731
    d_o = randn(*q.shape, seed=6)
    given = (q, k, v, sinks), d_o, randn(1, 2, 64, seed=7)
    got, exact = gradients(ours, *given), gradients(oracle, *given, dtype=torch.float64)
    honest = gradients(partial(oracle, dtype=torch.bfloat16), *given)
    assert_gradients(got, exact, honest, gradient_floors(oracle, (q, k, v, sinks), d_o), oracle(q, k, v, sinks)[1])
