"""Problems of training with their data: kernels that compute gradients, and the peers beside them.

A kernel's answer is the gradients of q, k and v. Of a backward pass the forward has been made before the clock starts;
a whole step is both. Peers get copies in their own layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise import arch
from tilewise.cpu.dropout import Dropout
from tilewise.plan.schedule import BlockSchedule
from tilewise.trees import TokenTree

from .. import api
from ..plan import plan_dense, plan_varlen
from ..plan.branches import plan_branches
from . import flex, peers
from .measure import Check, Kernel
from .train_judge import Factors, Seen, banded, gradient_check
from .workloads import DTYPES, Point, backends, lengths_of, random_like

BACKWARD, STEP = 2.5, 3.5  # times the forward's FLOPs: five products, and seven
CUDNN_ROWS = "cuDNN, rows first"
BESIDE = "beside"
PEERS_LEEWAY = 2.0
Call = Callable[..., Any]  # of q, k and v -> o


@dataclass(frozen=True)
class Problem:
    """Kernels with the judge of their gradients; shape: of q."""

    kernels: list[Kernel]
    check: Callable[[Any], Check]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Data:
    """q, k, v and the gradient of o, (B, N, H, D) or packed; flops: of the forward."""

    point: Point
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_o: torch.Tensor
    flops: int

    @classmethod
    def of(cls, point: Point, lead: tuple[int, ...], flops: int) -> Data:
        """lead: what comes before heads and head_dim."""
        generator = torch.Generator(point.device).manual_seed(0)
        heads = (point.heads, point.kv_heads, point.kv_heads, point.heads)
        q, k, v, d_o = (random_like(point, generator, *lead, h, point.hdim) for h in heads)
        return cls(point, q, k, v, d_o, flops)

    def each(self, of: Callable[[torch.Tensor], torch.Tensor], flops: int) -> Data:
        """The same with each of the tensors turned into something else."""
        return Data(self.point, of(self.q), of(self.k), of(self.v), of(self.d_o), flops)

    @property
    def ours(self) -> str:
        """The name of Tilewise's kernel."""
        return next(iter(backends(self.point)))

    @property
    def nbytes(self) -> int:
        """q, k, v, o and their gradients, once."""
        return 2 * (2 * self.q.numel() + 2 * self.k.numel()) * self.q.element_size()

    def kernel(
        self, name: str, call: Call, *, ours: bool = True, step: bool = False, heads_first: bool = False,
        same: bool = True, card: str | None = None, work: float | None = None,
    ) -> Kernel:  # fmt: skip
        """A kernel by its forward call. step: forward and backward; heads_first: q, k, v and d_o lie as (B, H, N, D).
        card: whose kernels it takes. work: FLOPs of its forward, if not the problem's."""

        def laid(x: torch.Tensor) -> torch.Tensor:
            return x.transpose(-2, -3).contiguous().transpose(-2, -3) if heads_first else x.clone()

        leaves = [laid(x).requires_grad_() for x in (self.q, self.k, self.v)]
        d_o, made = laid(self.d_o), list[torch.Tensor]()

        def run(_: torch.Tensor | None) -> Any:
            with torch.enable_grad(), nullcontext() if card is None else arch.as_card(card):
                if step:
                    return torch.autograd.grad(call(*leaves), leaves, d_o)
                if not made:
                    made.append(call(*leaves))
                return torch.autograd.grad(made[0], leaves, d_o, retain_graph=True)

        flops = int((self.flops if work is None else work) * (STEP if step else BACKWARD))
        return Kernel(name, run, ours, flops, self.nbytes, same_answer=same)

    def problem(
        self,
        kernels: Sequence[Kernel],
        seen: Seen,
        starts: Sequence[int] | None = None,
        factors: Factors | None = None,
    ) -> Problem:
        """The kernels with their judge. starts: of packed sequences, those of a batch if None. factors: of dropout."""
        if starts is None:
            starts = [n * self.q.shape[1] for n in range(self.q.shape[0] + 1)]
        q, k, v, d_o = (x.flatten(0, -3) for x in (self.q, self.k, self.v, self.d_o))
        check = gradient_check(q, k, v, d_o, starts, seen, factors)
        peers_check = partial(check, leeway=PEERS_LEEWAY)
        judged = [kernel if kernel.ours else replace(kernel, check=peers_check) for kernel in kernels]
        return Problem(judged, check, tuple(self.q.shape))


def sdpa(point: Point, backend: SDPBackend | None, dropout_p: float = 0.0) -> Call:
    """torch's, called on (B, N, H, D)."""
    grouped = point.heads != point.kv_heads

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with nullcontext() if backend is None else sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(q, k, v, None, dropout_p, point.causal, enable_gqa=grouped)
        return o.transpose(1, 2)

    return call


def torch_kernels(data: Data, step: bool = False) -> list[Kernel]:
    """torch's kernels on the problem: cuDNN in both layouts and FlashAttention-2, or what a CPU has."""
    point = data.point
    if not data.q.is_cuda:
        return [data.kernel(peers.SDPA, sdpa(point, None), ours=False, step=step, heads_first=True)]
    cudnn, flash = (sdpa(point, b) for b in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION))
    return [
        data.kernel(peers.CUDNN, cudnn, ours=False, step=step, heads_first=True),
        data.kernel(CUDNN_ROWS, cudnn, ours=False, step=step),
        data.kernel(peers.FA2, flash, ours=False, step=step),
    ]


def flash3_kernels(data: Data) -> list[Kernel]:
    """FlashAttention-3, where it is installed."""
    module = peers.find(peers.FA3)
    if isinstance(module, str) or not data.q.is_cuda:
        return []

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        o = module.flash_attn_func(q, k, v, causal=data.point.causal)
        return o[0] if isinstance(o, tuple) else o

    return [data.kernel(peers.FA3, call, ours=False)]


def _dense_data(point: Point) -> Data:
    sizes = (point.batch, point.seq, point.seq, point.heads, point.kv_heads, point.hdim)
    plan = plan_dense(*sizes, causal=point.causal, window=point.band, io_bytes=DTYPES[point.dtype].itemsize)
    return Data.of(point, (point.batch, point.seq), plan.flops)


def _attention(point: Point, **options: Any) -> Call:
    given = {"causal": point.causal, "window": point.band, "backend": point.backend, **options}
    return lambda q, k, v: api.attention(q, k, v, **given)


def dense(point: Point) -> Problem:
    """A batch of equal sequences beside the peers."""
    data = _dense_data(point)
    kernels = [data.kernel(data.ours, _attention(point)), *torch_kernels(data), *flash3_kernels(data)]
    return data.problem(kernels, banded(point.causal, None))


def as_older_card(point: Point, card: str = "sm_80") -> Problem:
    """The kernels of a card without wgmma beside FlashAttention-2."""
    data = _dense_data(point)
    flash = sdpa(point, SDPBackend.FLASH_ATTENTION)
    kernels = [
        data.kernel(data.ours, _attention(point), card=card),
        data.kernel(peers.FA2, flash, ours=False),
    ]
    return data.problem(kernels, banded(point.causal, None))


def beside_itself(point: Point, ours: dict[str, Any], beside: dict[str, Any]) -> Problem:
    """Tilewise by two sets of options, of which the second computes something else or does it another way."""
    data = _dense_data(point)
    whole = _dense_data(replace(point, window=0)).flops
    kernels = [
        data.kernel(data.ours, _attention(point, **ours)),
        data.kernel(f"{data.ours}, {BESIDE}", _attention(point, **beside), same=False, work=whole),
    ]
    return data.problem(kernels, banded(point.causal, point.band))


def with_dropout(point: Point, p: float) -> Problem:
    """A step with dropout beside the same without it, and beside FlashAttention-2 or torch, whose mask is another."""
    data, seed = _dense_data(point), torch.tensor(7, device=point.device)
    dropout = Dropout(p, seed)

    def factors(b: int, h: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        sequence, head = (torch.tensor(x, device=rows.device) for x in (b, h))
        return dropout.factors(sequence, head.view(1, 1, 1), rows, keys)[0]

    backend, peer = (SDPBackend.FLASH_ATTENTION, peers.FA2) if data.q.is_cuda else (None, peers.SDPA)
    kernels = [
        data.kernel(data.ours, _attention(point, dropout_p=p, dropout_seed=seed), step=True),
        data.kernel(f"{data.ours}, {BESIDE}", _attention(point), step=True, same=False),
        data.kernel(peer, sdpa(point, backend, p), ours=False, step=True, same=False),
    ]
    return data.problem(kernels, banded(point.causal, None), factors=factors)


def two_head_dims(point: Point, value_dim: int) -> Problem:
    """V with fewer values than Q and K."""
    data = _dense_data(point)
    v, d_o = (x[..., :value_dim].contiguous() for x in (data.v, data.d_o))
    narrow = replace(data, v=v, d_o=d_o, flops=data.flops * (point.hdim + value_dim) // (2 * point.hdim))
    kernels = [narrow.kernel(data.ours, _attention(point)), *torch_kernels(narrow)[:2]]
    return narrow.problem(kernels, banded(point.causal, None))


def ragged(point: Point) -> Problem:
    """Packed sequences beside one sequence of as many tokens as the longest has."""
    lengths = lengths_of(point)
    starts = [0, *accumulate(lengths)]
    data = Data.of(point, (starts[-1],), _unshared_flops(point, lengths))
    at = peers.starts_of(lengths, data.q.device)
    one = _dense_data(replace(point, batch=1, lengths=""))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return api.attention_varlen(q, k, v, at, at, causal=point.causal)

    kernels = [
        data.kernel(data.ours, call),
        one.kernel(f"{data.ours}, {BESIDE}", _attention(point), same=False),
    ]
    return data.problem(kernels, banded(point.causal, None), starts)


def in_blocks(point: Point) -> Problem:
    """A random block schedule beside the dense backward."""
    data = _dense_data(point)
    sizes = {"seqlen_q": point.seq, "seqlen_k": point.seq, "block_q": point.block, "block_k": point.block}
    schedule = BlockSchedule.random(**sizes, sparsity=point.sparsity, seed=0)
    kept, block = schedule.to_mask().to(data.q.device), point.block
    blocks = kept[::block, ::block]
    kernels = [
        data.kernel(
            data.ours, _attention(point, schedule=schedule.to(point.device)), work=data.flops * schedule.density
        ),
        data.kernel(f"{data.ours}, {BESIDE}", _attention(point), same=False),
    ]
    return data.problem(kernels, lambda q, k: blocks[q // block, k // block])


# ---- trees -------------------------------------------------------------------------------------------------------


def answers(prompt: int, count: int, tokens: int, drafts: int = 1, draft: int = 0) -> TokenTree:
    """`count` answers below a prompt, or below each of `drafts` ways to go on from it."""
    sequences = []
    for n in range(drafts):
        begun = [0] * prompt + [n + 1] * draft
        sequences += [begun + [drafts + 1 + m] * tokens for m in range(count)]
    return TokenTree.from_sequences(sequences)


def tree(point: Point, made: TokenTree) -> Problem:
    """Forward and backward over a tree: beside the unshared sequences, a dense problem of as many tokens, and
    FlexAttention under the same mask."""
    sizes, io_bytes = (point.heads, point.kv_heads, point.hdim), DTYPES[point.dtype].itemsize
    total, ends = made.num_tokens, made.host_ends
    data = Data.of(point, (total,), plan_branches(ends, *sizes, io_bytes=io_bytes).flops)
    there = made.to(data.q.device)
    index, starts = there.index, there.starts
    lengths = made.lengths
    apart = data.each(lambda x: x[index], _unshared_flops(replace(point, causal=True), lengths))

    def unshared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return api.attention_varlen(q, k, v, starts, starts, causal=True)

    def shared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return api.attention_tree(q, k, v, there)

    kernels = [
        data.kernel(data.ours, shared, step=True),
        apart.kernel(f"{data.ours}, {BESIDE}", unshared, step=True, same=False),
    ]
    if data.q.is_cuda:
        one = _dense_data(replace(point, batch=1, seq=total, causal=True, prefix=0))
        kernels.append(one.kernel(f"{data.ours}, dense", _attention(one.point), step=True, same=False))
        kernels.append(_flex(data, there))
    elif len(set(lengths)) == 1:
        rows = apart.each(lambda x: x.unflatten(0, (len(lengths), lengths[0])), apart.flops)
        rows = replace(rows, point=replace(point, causal=True))
        kernels += [replace(kernel, same_answer=False) for kernel in torch_kernels(rows, step=True)]
    seen = there.ends
    return data.problem(kernels, lambda q, k: (k <= q) & (q < seen[k]), [0, total])


def _unshared_flops(point: Point, lengths: Sequence[int]) -> int:
    starts = [0, *accumulate(lengths)]
    sizes = (point.heads, point.kv_heads, point.hdim)
    return plan_varlen(starts, starts, *sizes, causal=point.causal, io_bytes=DTYPES[point.dtype].itemsize).flops


def _flex(data: Data, made: TokenTree) -> Kernel:
    """FlexAttention on copies in its own layout, whose mask is made once."""
    ends, masks = made.ends, list[Any]()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if not masks:
            sizes = (None, None, len(q), len(q))
            masks.append(create_block_mask(lambda b, h, q, k: (q >= k) & (q < ends[k]), *sizes, device=q.device))
        rows = (x.transpose(0, 1)[None] for x in (q, k, v))
        o = flex.compiled(flex_attention)(*rows, block_mask=masks[0], enable_gqa=True)
        return o[0].transpose(0, 1)

    return data.kernel(flex.FLEX, call, ours=False, step=True, heads_first=True)


# ---- a model's step ----------------------------------------------------------------------------------------------


def model_step(point: Point) -> Problem:
    """A training step of a small Llama over a tree of `batch` answers of `seq` tokens below a prompt of `prefix`,
    beside the batch that repeats the prompt. Their answers are compared with each other: the gradients of the head."""
    import transformers

    from tilewise.integrations import transformers as integration

    integration.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=point.heads,
        num_key_value_heads=point.kv_heads, head_dim=point.hdim, attn_implementation="tilewise",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(point.device, DTYPES[point.dtype])
    made = answers(point.prefix, point.batch, point.seq).to(point.device)
    batch = made.tokens[made.index].view(point.batch, -1)
    parameters = list(model.parameters())

    def over_tree(_: torch.Tensor | None) -> Any:
        with integration.training_tree(made):
            logits = model(made.tokens[None], position_ids=made.positions[None], use_cache=False).logits
        return torch.autograd.grad(made.pack_loss(logits), parameters)

    def over_batch(_: torch.Tensor | None) -> Any:
        logits = model(batch, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        return torch.autograd.grad(loss, parameters)

    def check(answer: Any) -> Check:
        pairs = zip(answer, over_batch(None), strict=True)
        off = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        return Check(off < 1e-3, off, 0.0, f"gradients differ by {off:.1e} of their largest value", 1e-3)

    (ours,) = backends(point)
    flops = 6 * sum(x.numel() for x in parameters)  # per token, but for attention
    kernels = [
        Kernel(ours, over_tree, True, flops * made.num_tokens, 0),
        Kernel(f"{ours}, {BESIDE}", over_batch, True, flops * batch.numel(), 0, same_answer=False),
    ]
    return Problem(kernels, check, (made.num_tokens, point.heads, point.hdim))
