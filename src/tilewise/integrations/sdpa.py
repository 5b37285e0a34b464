"""`torch.nn.functional.scaled_dot_product_attention` by Tilewise: the same arguments, the same meaning.

`sdpa` serves a call by Tilewise's kernels where they give what torch would give, and by torch's own function where not;
`explain` says which it is and why. Both ask `decide`, which looks at a call's `Facts` and at nothing else. What torch
refuses goes to torch, which then says so in its own words.

Meaning, as torch has it: layout (..., heads, L, E), leading dimensions broadcast, `is_causal` aligns top-left (query i
sees keys 0 to i). A row whose mask hides every key gives 0, in torch's kernels and in ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tilewise import api, arch, arguments, checks
from tilewise.gpu import backward, tilings
from tilewise.gpu.abi import FP8
from tilewise.integrations import seen_keys as _seen_keys  # noqa: F401, registers an operator

torch_sdpa = torch._C._nn.scaled_dot_product_attention  # F.scaled_dot_product_attention, whoever replaces that

Shape = tuple[int, ...]
Path = Literal["torch", "dense", "seen keys"]

PLAIN = (torch.Tensor, torch.nn.Parameter)
KERNELS = {"cpu": "the CPU backend", "cuda": "the GPU kernel"}


class Facts(NamedTuple):
    """All that a decision depends on. Shapes are the caller's; dtype and device are "" or None where tensors differ."""

    query: Shape = ()
    key: Shape = ()
    value: Shape = ()
    dtype: torch.dtype | None = None  # as autocast makes it
    device: str = ""
    kernels: bool = False  # of a CUDA device: there are kernels for its compute capability
    mask: Shape | None = None
    mask_is_bool: bool = False
    dropout: bool = False  # weights are dropped, not all of them
    causal: bool = False
    gqa: bool = False
    grad: bool = False  # gradients are recorded, and something requires them
    trains: bool = True  # with grad, of a CUDA device: it has a backward kernel for these head dimensions and dtype
    plain: bool = True  # tensors, of no subclass, in no torch.func transform, and no torch.jit trace
    usual: bool = True  # the other arguments are of the kinds that torch declares, and scale is finite
    fused: bool = True  # torch is free to use flash kernels; in compiled code, which cannot ask, taken as true


class Decision(NamedTuple):
    path: Path
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Who serves a call of `sdpa`, by which kernel, and why. `str()` is for people."""

    backend: Literal["tilewise", "torch"]
    kernel: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.backend}, by {self.kernel}: " + "; ".join(self.reasons)


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, by Tilewise where it can: `explain` tells.

    query: (..., Hq, L, E), key: (..., H, S, E), value: (..., H, S, Ev), also without Hq and H; leading dimensions
    broadcast. attn_mask: bool, True where a key is seen, or added to the scores; broadcast to (..., Hq, L, S).
    is_causal: query i sees keys 0 to i. scale: `E ** -0.5` if None. enable_gqa: Hq may be a multiple of H.

    Tilewise serves, on the CPU: float32, float16 and bfloat16, no mask or a boolean one that hides keys from all
    queries and heads alike (padding); on a GPU: the same dtypes without a mask. torch's own function serves the rest:
    other masks, dropout beside a mask, tensor subclasses, calls that torch refuses. Gradients come from the
    one that serves. Which weights are dropped follows from a seed that torch's generator gives.

    Returns (..., Hq, L, Ev). A row that sees no key is 0.
    """
    path = _path(facts_of(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    if path == "torch":
        more = {"enable_gqa": enable_gqa} if enable_gqa else {}  # tracers of other makes do not know it
        result: torch.Tensor = torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)
        return result
    return _run(query, key, value, attn_mask, dropout_p, is_causal, scale)


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Explanation:
    """Who serves `sdpa` with these arguments, under the present settings, by which kernel and why.

    Nothing is computed.
    """
    facts = facts_of(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    path, reasons = decide(facts)
    if path == "torch":
        return Explanation("torch", "torch's own scaled_dot_product_attention", reasons)
    return _explained(facts, query.device, reasons)


def _explained(facts: Facts, device: torch.device, reasons: tuple[str, ...]) -> Explanation:
    """Of a call that Tilewise serves: the kernel that a card runs, and why that one."""
    if facts.device == "cpu":
        return Explanation("tilewise", KERNELS["cpu"], reasons)
    assert facts.dtype is not None
    kernel, why = tilings.kernel_of(device, facts.dtype, facts.dropout)
    if facts.grad:
        widest = max(facts.query[-1], facts.value[-1])
        kernel += f", then {backward.kernel_of(device, facts.dtype, widest, dropout=facts.dropout)}"
    return Explanation("tilewise", f"{KERNELS['cuda']} {kernel}", (*reasons, why))


def decide(facts: Facts) -> Decision:
    """Who serves a call, by its facts alone: the one place that knows."""
    refused = _refusals(facts)
    if refused:
        return Decision("torch", tuple(refused))
    seqlen_q, seqlen_k = facts.query[-2], facts.key[-2]
    notes = [f"{facts.dtype} on {facts.device} is served".replace("torch.", "")]
    if facts.grad:
        notes.append("its gradients are Tilewise's, too")
    if facts.causal and seqlen_q < seqlen_k:
        notes.append("is_causal aligns top-left, so the keys after the last query's are left out")
    elif facts.causal and seqlen_q > seqlen_k:
        notes.append("is_causal aligns top-left, which is a window that ends L − S after the bottom-right diagonal")
    if facts.mask is not None:
        notes.append("attn_mask hides keys from all queries and heads alike, so they are left out")
        return Decision("seen keys", tuple(notes))
    return Decision("dense", tuple(notes))


def _refusals(facts: Facts) -> list[str]:
    """Why Tilewise does not serve a call; empty if it does."""
    if not facts.plain:
        return ["not all of query, key, value and attn_mask are plain tensors in plain code"]
    refused = []
    if not facts.usual:
        refused.append("an argument is of a kind or value that only torch judges")
    if facts.grad and facts.device == "cuda" and not facts.trains:
        refused.append("an input requires gradients, and the card has no backward kernel for this")
    if facts.dropout and facts.mask is not None:
        refused.append("attn_mask and dropout_p are both given")
    if not facts.fused:
        refused.append("sdpa_kernel() or torch.backends.cuda.enable_flash_sdp() has switched flash kernels off")
    if facts.device not in KERNELS:
        refused.append(f"no kernels for {facts.device} tensors" if facts.device else "the tensors' devices differ")
    taken = tilings.DTYPES if facts.device == "cuda" else checks.FLOATS
    if facts.dtype not in taken or facts.dtype == FP8:
        refused.append(
            "query, key and value differ in dtype" if facts.dtype is None else f"no kernels take {facts.dtype} here"
        )
    if facts.device == "cuda" and not facts.kernels:
        refused.append("the GPU kernels are for compute capabilities 8.0 to 9.0, 10.x and 12.x")
    refused += _shape_refusals(facts)
    if facts.mask is not None:
        if facts.device == "cuda":
            refused.append("no GPU kernel takes an attn_mask")
        elif facts.causal:
            refused.append("attn_mask and is_causal are both given")
        elif not facts.mask_is_bool:
            refused.append("attn_mask is added to the scores, which no kernel here does")
    return refused


def _shape_refusals(facts: Facts) -> list[str]:
    query, key, value = facts.query, facts.key, facts.value
    if min(len(query), len(key), len(value)) < 2 or key[-1] != query[-1] or value[-2] != key[-2]:
        return ["the shapes of query, key and value do not go together"]
    most = tilings.MAX_HEAD_DIM if facts.device == "cuda" else arguments.MAX_HEAD_DIM
    if not (1 <= query[-1] <= most and 1 <= value[-1] <= most):
        return [f"head dimensions are served from 1 to {most}"]
    if facts.dropout and facts.device == "cuda" and max(query[-1], value[-1]) > backward.WIDEST:
        return [f"no GPU kernel has dropout of head dimensions above {backward.WIDEST}"]
    lead = _broadcast(query[:-3], key[:-3], value[:-3])
    heads = _heads(query, key, value, facts.gqa)
    if lead is None or heads is None or heads == 0:
        return ["the leading dimensions or heads do not go together, or key and value differ in heads"]
    if query[:-2] != (*lead, heads) and 0 in (query[-2], key[-2], *lead):
        return ["of an empty call that broadcasts, torch's result has a shape of its own"]
    if facts.mask is not None:
        scores = (*lead, heads, query[-2], key[-2])
        if len(facts.mask) < 2 or _broadcast(facts.mask, scores) != scores:
            return ["attn_mask does not broadcast to the scores"]
        if facts.mask[-2] != 1 or (len(facts.mask) > 2 and facts.mask[-3] != 1):
            return ["attn_mask differs from query to query or head to head"]
    return []


def _heads(query: Shape, key: Shape, value: Shape, gqa: bool) -> int | None:
    """Query heads, those that broadcasting makes included; None if the tensors' heads do not go together."""
    q, k, v = (shape[-3] if len(shape) > 2 else 1 for shape in (query, key, value))
    if gqa:
        return q if k == v and k > 0 and q % k == 0 and len(query) > 2 else None
    heads = _broadcast((q,), (k,), (v,))
    return None if heads is None else heads[0]


def _broadcast(*shapes: Sequence[int]) -> Shape | None:
    """The shape that these broadcast to, or None."""
    found = []
    for at in range(-max(len(shape) for shape in shapes), 0):
        size = 1
        for shape in shapes:
            if len(shape) >= -at and shape[at] != 1:
                if size != 1 and size != shape[at]:
                    return None
                size = shape[at]
        found.append(size)
    return tuple(found)


def facts_of(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> Facts:
    """The facts of a call with these arguments, under the present settings."""
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    if not _plain(tensors):
        return Facts(plain=False)
    device = query.device
    same_device = all(x.device == device for x in tensors)
    dtypes = [_dtype(x) for x in (query, key, value)]
    kernels = device.type == "cuda" and arch.serves_prefill(device)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return Facts(
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        dtype=dtypes[0] if dtypes[0] == dtypes[1] == dtypes[2] else None,
        device=device.type if same_device else "",
        kernels=kernels,
        mask=None if mask is None else tuple(mask.shape),
        mask_is_bool=mask is not None and mask.dtype == torch.bool,
        dropout=dropout_p != 0,
        causal=bool(is_causal),
        gqa=bool(enable_gqa),
        grad=grad,
        trains=not (grad and kernels) or trains(device, dtypes[0], query, value),
        usual=(
            isinstance(is_causal, bool)
            and isinstance(enable_gqa, bool)
            and (dropout_p == 0 or (isinstance(dropout_p, (int, float)) and 0 < dropout_p < 1))
            and (scale is None or (isinstance(scale, (int, float)) and -math.inf < scale < math.inf))
        ),
        fused=torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled(),
    )


def trains(device: torch.device, dtype: torch.dtype | None, query: Any, value: Any) -> bool:
    """Has a CUDA device that runs our kernels one for gradients of this?"""
    head_dim = max(0, *query.shape[-1:], *value.shape[-1:])
    return dtype is not None and backward.kernel_of(device, dtype, head_dim) is not None


def _plain(tensors: Sequence[Any]) -> bool:
    if torch.compiler.is_compiling():  # torch.export traces fakes, and the operators take them
        return all(type(x) in (*PLAIN, FakeTensor) for x in tensors)
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return all(type(x) in PLAIN and not wrapped(x) for x in tensors) and not torch._C._is_tracing()


def _dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that a tensor takes part with: autocast gives SDPA's inputs its own, float64 excepted."""
    kind = x.device.type
    if kind in KERNELS and torch.is_autocast_enabled(kind) and x.dtype in checks.FLOATS:
        return torch.get_autocast_dtype(kind)
    return x.dtype


# Every layer of a model asks the same. While code is traced, sizes are symbols, which are not to be remembered.
_decided = lru_cache(maxsize=4096)(decide)


def _path(facts: Facts) -> Path:
    return (decide(facts) if torch.compiler.is_compiling() else _decided(facts)).path


class Laid(NamedTuple):
    """A call that `decide` has given to Tilewise, as `attention` takes it; enable_gqa has said all it has to say there.

    q (B, L, Hq, D), k, v (B, keys, H, D or Dv), on a GPU filled up with zeros where no kernel has both; seen: bool (B
    or 1, keys) of a padding mask.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seen: torch.Tensor | None
    options: dict[str, Any]  # of `attention`; with `seen`, scale alone


def laid(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Laid:
    """The call as `attention` takes it: views where that is possible."""
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    lead = _broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3]) or ()
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value)]
    if heads[1] != heads[2] or heads[0] % heads[1]:  # not what grouped heads are: broadcast
        heads = [max(heads)] * 3
    q, k, v = (_laid_out(x, lead, n) for x, n in zip((query, key, value), heads, strict=True))
    options: dict[str, Any] = {"scale": scale}
    if mask is not None:
        every = all(n == 1 for n in mask.shape[:-1])  # the same for every sequence
        seen = mask if every else mask.expand(*lead, 1, 1, seqlen_k)
        return Laid(q, k, v, seen.reshape(1 if every else math.prod(lead), seqlen_k), options)
    if is_causal and seqlen_q > seqlen_k:
        options["window"] = (None, seqlen_q - seqlen_k)
    elif is_causal:
        options["causal"] = True
        if seqlen_q < seqlen_k:
            k, v = k[:, :seqlen_q], v[:, :seqlen_q]
    return Laid(q, k, v, None, options)


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """A call that `decide` has given to Tilewise."""
    q, k, v, seen, options = laid(query, key, value, mask, is_causal, scale)
    if seen is None:
        o = api.attention(q, k, v, dropout_p=dropout_p, **options)
    else:
        o = torch.ops.tilewise.attention_seen_keys(q, k, v, seen, **options)[0]
    return as_torch(o, query, key, value)


def as_torch(o: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """o (B, L, Hq, Dv) of these tensors as torch returns it, (..., Hq, L, Ev)."""
    by_heads: torch.Tensor = o.transpose(1, 2)
    rank = max(query.dim(), key.dim(), value.dim())
    if rank == 4:
        return by_heads
    lead = _broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3]) or ()
    return by_heads.reshape(*lead, *by_heads.shape[1:]) if rank > 2 else by_heads[0, 0]


def _laid_out(x: torch.Tensor, lead: Shape, heads: int) -> torch.Tensor:
    """x (..., heads, N, D), autocast and broadcast, as (batch, N, heads, D) with a unit last stride."""
    x = x.to(_dtype(x))
    if x.dim() != 4 or tuple(x.shape[:2]) != (*lead, heads):
        x = x.expand(*lead, heads, *x.shape[-2:]).reshape(math.prod(lead), heads, *x.shape[-2:])
    x = x.transpose(1, 2)
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() leaves an empty tensor its strides
