"""flash_mla_sparse_fwd of tilewise.compat.flash_mla on the CPU and in the emulator, and flash_mla_with_kvcache over
listed rows there: by the oracle, what is kept between calls, and what is refused."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections import OrderedDict

import pytest
import torch
from flash_mla_cases import BF16, DEEPSEEK, SMALL, Sparse
from oracle import randn

from tilewise import reference
from tilewise.api import rows
from tilewise.compat import flash_mla
from tilewise.compat.flash_mla import flash_mla_sparse_fwd
from tilewise.gpu import mla, mla_rows
from tilewise.kvcache import KVFormat
from tilewise.plan.items import Word
from tilewise.plan.worklist import FAR, Splitting

INF, NAN = math.inf, math.nan
EMULATED = functools.partial(rows.attend_rows, backend="emulator")


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(flash_mla, "attend_rows", EMULATED)
    monkeypatch.setattr(mla_rows._local, "kept", OrderedDict(), raising=False)


def lists():
    """The lists that this thread has kept, the last one used at the end."""
    return [bound.listed for bound in mla_rows._local.kept.values()]


def test_arguments_are_those_of_flash_mla():
    found = inspect.signature(flash_mla_sparse_fwd).parameters
    assert list(found) == ["q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length"]
    assert [x.default for x in found.values()][3:] == [inspect.Parameter.empty, 512, None, None]


# ---- the CPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(("s_q", "s_kv", "topk"), [(1, 1, 1), (5, 65, 7), (3, 40, 129)])
def test_rows_that_tokens_name(s_q, s_kv, topk, dtype):
    Sparse.of(s_q, s_kv, topk, 4, (80, 64), dtype).check()


def test_the_sizes_of_deepseek():
    Sparse.of(3, 100, 70, 16, DEEPSEEK, scale=192**-0.5).check()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_sinks_and_lengths_of_lists(dtype):
    problem = Sparse.of(6, 30, 20, 4, (80, 64), dtype, sink=torch.tensor([0.5, -INF, 3.0, INF]))
    problem.counts = torch.tensor([20, 0, -3, 5, 99, 19])
    problem.indices[5] = -1
    out, largest, lse = problem.check()
    for nothing in (1, 2, 5):
        assert (out[nothing] == 0).all()
        assert (largest[nothing] == -INF).all()
        assert (lse[nothing] == INF).all()
    assert (out[:, 3] == 0).all()


def test_a_row_that_is_named_twice_counts_twice():
    problem = Sparse.of(1, 8, 3, 2, (80, 64), torch.float32)
    twice, once = (torch.tensor([[[x, y, z]]]).int() for x, y, z in ((2, 2, 5), (2, 5, -1)))
    problem.kv.copy_(randn(8, 1, 80))
    problem.indices = twice
    _, _, lse = problem.check()
    problem.indices = once
    assert (problem.check()[2] < lse).all()


@pytest.mark.parametrize(("s_q", "s_kv", "topk"), [(0, 9, 4), (2, 0, 4), (2, 9, 0)])
@pytest.mark.parametrize("backend", ["cpu", "emulator"])
def test_nothing_to_see(s_q, s_kv, topk, backend, monkeypatch):
    monkeypatch.setattr(flash_mla, "attend_rows", functools.partial(rows.attend_rows, backend=backend))
    problem = Sparse.of(s_q, s_kv, topk, 4)
    if not s_kv:
        problem.indices = torch.zeros(s_q, 1, topk, dtype=torch.int32)
    out, largest, lse = problem.check()
    assert (out == 0).all()
    assert (largest == -INF).all()
    assert (lse == INF).all()


@pytest.mark.parametrize("backend", ["cpu", "emulator"])
def test_sinks_and_caps_of_rows(backend):
    """attend_rows itself, as servers call it: by the oracle, with a token that reads nothing, and none to be read."""
    q, kv = randn(5, 16, 192, dtype=BF16), randn(40, 192, dtype=BF16)
    its = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(n))[:7] for n in range(5)]).int()
    its[1, 3:], its[4] = -1, -1
    chosen = torch.zeros(5, 41, dtype=torch.bool).scatter_(1, its.long() % 41, value=True)[:, :40]
    sinks = torch.linspace(-2, 4, 16)
    options = {"scale": 0.2, "softcap": 3.0, "sinks": sinks}
    form = KVFormat("bf16", 192)
    o, lse = rows.attend_rows(q, kv, form, its, value_dim=128, backend=backend, **options)
    given = (q[None], kv[None, :, None], kv[None, :, None, :128])
    exact, honest = (f(*given, mask=chosen[None, None], **options) for f in (reference.attention, reference.baseline))
    verdict = reference.judge(o, exact[0][0], honest[0][0])
    assert verdict.ok, verdict.reason
    torch.testing.assert_close(lse, exact[1][0].T.float(), rtol=1e-5, atol=1e-5)
    _, lse = rows.attend_rows(q, kv, form, its[:, :0], value_dim=128, backend=backend, **options)
    assert torch.equal(lse, sinks.expand(5, 16))


# ---- max_logits ------------------------------------------------------------------------------------------------------


def test_max_logits_are_computed_when_they_are_read(monkeypatch):
    made = []
    compute = flash_mla.largest_logits
    monkeypatch.setattr(flash_mla, "largest_logits", lambda *given: made.append(1) or compute(*given))
    problem = Sparse.of(5, 20, 9, 4, (80, 64), torch.float32)
    given = (problem.q, problem.kv, problem.indices, 0.1, 64)
    _, largest, _ = flash_mla_sparse_fwd(*given)
    assert isinstance(largest, torch.Tensor)
    assert (largest.shape, largest.dtype, largest.device) == ((5, 4), torch.float32, problem.q.device)
    assert (largest.dim(), len(largest), largest.size(1)) == (2, 5, 4)
    assert not made
    read = largest + 0
    assert type(read) is torch.Tensor
    assert read.tolist() == largest.tolist()
    assert largest.data_ptr() == largest.data_ptr() != 0
    assert torch.equal(torch.stack([largest]), read[None])
    assert made == [1]


def test_max_logits_of_tensors_that_were_written():
    problem = Sparse.of(5, 20, 9, 4, (80, 64), torch.float32)
    _, largest, _ = flash_mla_sparse_fwd(problem.q, problem.kv, problem.indices, 0.1, 64)
    problem.q.zero_()
    with pytest.raises(RuntimeError, match="max_logits must be read before q, kv"):
        largest.sum()


def test_max_logits_some_tokens_at_a_time(monkeypatch):
    problem = Sparse.of(7, 20, 9, 4, (80, 64), torch.float32, counts=torch.tensor([9, 0, 1, 2, 3, 4, 5]))
    whole = problem.run()[1]
    monkeypatch.setattr(rows, "AT_ONCE", 3 * 9 * 80)
    assert torch.equal(problem.check()[1], whole)


def test_in_a_compiled_graph():
    problem = Sparse.of(5, 20, 9, 4, (80, 64), torch.float32)

    @torch.compile(backend="eager")
    def layer(q, kv, indices):
        out, largest, lse = flash_mla_sparse_fwd(q * 1, kv, indices, 0.1, 64)
        return 2 * out, 2 * largest, lse

    found = layer(problem.q, problem.kv, problem.indices)
    problem.scale = 0.1
    out, largest, lse = problem.run()
    torch.testing.assert_close(found, (2 * out, 2 * largest, lse), rtol=0, atol=0)


# ---- the emulator ----------------------------------------------------------------------------------------------------


def test_many_tokens(emulated):
    """Lists that one block takes whole are computed at once."""
    Sparse.of(300, 65, 70, heads=8).check(kernel=True, step=23)
    (listed,) = lists()
    assert listed.total_states == 0
    assert not (listed.items[..., Word.STATE_FOLD] & 0xFFFF).any()


def test_a_list_of_work_serves_any_number_of_rows(emulated):
    problem = Sparse.of(20, 65, 70, heads=8)
    problem.check(kernel=True)
    (listed,) = lists()
    problem.kv = problem.kv[:60]
    problem.check(kernel=True)
    Sparse.of(20, 1, 70, heads=8).check(kernel=True)
    assert lists() == [listed]


def test_the_list_of_one_token_is_cut(emulated, monkeypatch):
    monkeypatch.setattr(mla, "NARROW", Splitting(pieces=((FAR, 128),), whole=False))
    problem = Sparse.of(1, 300, 259, heads=8)
    found = problem.check(kernel=True)
    (listed,) = lists()
    assert listed.total_states == 3
    for count in (0, 1, 127, 128, 129, 258, 259):  # pieces that begin after it are none
        problem.counts = torch.tensor([count], dtype=torch.int32)
        same = problem.check(kernel=True)
    assert torch.equal(found[0], same[0])
    assert lists() == [listed]


@pytest.mark.parametrize("groups", [True, False])
def test_items_that_a_list_does_not_reach(emulated, monkeypatch, groups):
    """They come after its first one, which writes the result if it is the only one that is reached."""
    monkeypatch.setattr(mla, "NARROW", Splitting(pieces=((FAR, 64),), whole=False, group=4, groups=groups))
    Sparse.of(7, 300, 520, heads=8, counts=torch.tensor([520, 30, 256, 0, 64, 257, 1])).check(kernel=True)


def test_lengths_of_lists_and_sinks_in_the_emulator(emulated):
    """What is named after a list's length is a row of NaN, and is not read."""
    problem = Sparse.of(9, 41, 130, heads=4, sink=torch.tensor([0.5, -INF, 3.0, INF]))
    problem.counts = torch.tensor([130, 0, 1, 63, 64, 65, 129, 1 << 40, -5])
    for n, count in enumerate(problem.counts.clamp(0, 130).tolist()):
        problem.indices[n, 0, count:] = int(problem.kv[:, 0, 0].isnan().nonzero()[0])
    out, _, lse = problem.check(kernel=True)
    assert (out[:, 3] == 0).all()
    assert (lse[1] == INF).all()


def test_large_logits_and_two_tiles_of_heads(emulated):
    Sparse.of(3, 200, 150, heads=70, scale=30.0).check(kernel=True)


def test_more_tokens_than_one_launch_has_room_for(emulated, monkeypatch):
    problem = Sparse.of(13, 30, 20, heads=8, counts=torch.arange(13))
    whole = problem.run()
    monkeypatch.setattr(mla_rows, "MAX_LISTS", 7)
    found = problem.check(kernel=True)
    assert [x.sequences for x in lists()] == [13, 6, 1]
    assert torch.equal(found[0], whole[0])


def test_few_lists_are_kept(emulated, monkeypatch):
    monkeypatch.setattr(mla_rows, "KEPT", 2)
    for tokens in (3, 4, 3, 5):
        Sparse.of(tokens, 20, 9).run()
    assert [x.sequences for x in lists()] == [3, 5]
    other = threading.Thread(target=Sparse.of(6, 20, 9).run)  # has arguments of its own
    other.start()
    other.join()
    assert [x.sequences for x in lists()] == [3, 5]


@pytest.mark.parametrize("fp8", [False, True])
def test_listed_rows_of_a_cache(emulated, fp8):
    """As the CPU has them, and without a table: a list of work for all sequences, whatever the pages are."""
    form = KVFormat("fp8", 576, latent=512)
    cache = randn(5, 7, 1, 576, dtype=BF16, seed=1)
    sizes = DEEPSEEK if fp8 else SMALL
    if fp8:
        cache = torch.cat([x.contiguous().view(torch.uint8) for x in form.encode(cache.float())], -1)
    else:
        cache = cache[..., : sizes[0]].contiguous()
    q = randn(3, 2, 8, sizes[0], dtype=BF16)
    indices = torch.randint(-1, 35, (3, 2, 70), generator=torch.Generator().manual_seed(0)).int()
    counts = torch.tensor([70, 5, 0], dtype=torch.int32)

    def call(q):
        meta, _ = flash_mla.get_mla_metadata()
        return flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, sizes[1], meta, is_fp8_kvcache=fp8, indices=indices, topk_length=counts
        )

    out, lse = call(q)
    assert len(lists()) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_mla, "attend_rows", rows.attend_rows)
        cache = cache if fp8 else cache.float()
        exact = call(q.float())
    torch.testing.assert_close(lse, exact[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.float(), exact[0], rtol=1e-2, atol=1e-2)


# ---- refusals --------------------------------------------------------------------------------------------------------

GIVEN = Sparse.of(5, 20, 9, 4, (80, 64), torch.float32)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"q": GIVEN.q[0]}, ValueError, "q must have 3 dimensions"),
        ({"q": GIVEN.q.double()}, ValueError, "q must be one of float32"),
        ({"q": GIVEN.q.mT}, ValueError, "q must have stride 1 in its last dimension"),
        ({"q": GIVEN.q.clone().requires_grad_()}, NotImplementedError, "no backward pass"),
        ({"q": torch.zeros(5, 4, 577)}, NotImplementedError, "d_qk is 577"),
        ({"kv": GIVEN.kv.clone().requires_grad_()}, NotImplementedError, "no backward pass"),
        ({"kv": GIVEN.kv[..., :79]}, ValueError, "kv must have shape .s_kv, 1, 80., got .20, 1, 79."),
        ({"kv": GIVEN.kv.expand(-1, 2, -1)}, ValueError, "kv must have shape"),
        ({"kv": GIVEN.kv.half()}, ValueError, "kv must have q's dtype float32"),
        ({"indices": GIVEN.indices[:, 0]}, ValueError, "indices must have 3 dimensions"),
        ({"indices": GIVEN.indices[:4]}, ValueError, "indices must have shape .5, 1, topk."),
        ({"indices": GIVEN.indices.long()}, ValueError, "indices must be one of int32"),
        ({"sm_scale": None}, TypeError, "sm_scale must be a float"),
        ({"sm_scale": NAN}, ValueError, "sm_scale must be finite"),
        ({"d_v": 512}, ValueError, "d_v must be at least 1 and at most 80, got 512"),
        ({"attn_sink": torch.zeros(3)}, ValueError, "attn_sink must have shape"),
        ({"attn_sink": torch.zeros(4).half()}, ValueError, "attn_sink must be one of float32"),
        ({"topk_length": torch.zeros(4).int()}, ValueError, "topk_length must have shape"),
        ({"topk_length": torch.zeros(5)}, ValueError, "topk_length must be one of int32"),
    ],
)
def test_refusals(changes, error, match):
    given = {"q": GIVEN.q, "kv": GIVEN.kv, "indices": GIVEN.indices, "sm_scale": 0.1, "d_v": 64, **changes}
    with pytest.raises(error, match=match):
        flash_mla_sparse_fwd(**given)


def test_what_the_kernel_does_not_serve(emulated):
    with pytest.raises(NotImplementedError, match="bfloat16 queries over bf16"):
        Sparse.of(2, 9, 4, 4, SMALL, torch.float32).run()
    with pytest.raises(NotImplementedError, match="multiple of 128"):
        Sparse.of(2, 9, 4, 4, (192, 64)).run()
    with pytest.raises(NotImplementedError, match="up to 2048 query heads, got 2049"):
        Sparse.of(2, 9, 4, 2049).run()
    problem = Sparse.of(2, 9, 4)
    problem.kv = torch.zeros(9, 1, 195, dtype=BF16)[..., 3:]
    with pytest.raises(NotImplementedError, match="multiples of 16 bytes"):
        problem.run()


@pytest.mark.parametrize(
    ("cache", "fp8", "match"),
    [
        (torch.zeros(4, 9, 1, 80)[:, :8], False, "k_cache must have its tokens one after another in memory"),
        (
            torch.zeros(4, 8, 1, 656, dtype=torch.uint8),
            True,
            "q must have the 576 channels that the rows of k_cache have",
        ),
    ],
)
def test_caches_whose_rows_cannot_be_listed(cache, fp8, match):
    meta, _ = flash_mla.get_mla_metadata()
    indices, q = torch.zeros(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 4, 80)
    options = {"is_fp8_kvcache": fp8, "indices": indices}
    with pytest.raises(ValueError, match=match):
        flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512 if fp8 else 64, meta, **options)
