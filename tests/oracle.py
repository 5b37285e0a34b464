"""The one place where tests make inputs and judge results: DESIGN's tolerance rule against the float64 oracle."""

from __future__ import annotations

import math

import torch

from tilewise import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# What float32 arithmetic makes of a logit, and so of an LSE and, relatively, of a weight: per unit of the largest LSE.
LOGIT_ERROR = 4e-6


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    """Normal values times `size`, the same for the same seed."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size
    return values.to(dtype)


def qkv(batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, *, dtype=torch.float32, seed=0, size=1.0):
    """q (B, Nq, Hq, D), k and v (B, Nk, Hkv, D); `size` scales q, and so the logits."""
    q = randn(batch, seqlen_q, heads_q, head_dim, dtype=dtype, seed=3 * seed, size=size)
    k = randn(batch, seqlen_k, heads_kv, head_dim, dtype=dtype, seed=3 * seed + 1)
    v = randn(batch, seqlen_k, heads_kv, head_dim, dtype=dtype, seed=3 * seed + 2)
    return q, k, v


def poison(like: torch.Tensor) -> torch.Tensor:
    """NaN everywhere: an output element that nobody writes shows."""
    return torch.full_like(like, float("nan"))


def gradients(call, tensors, d_o, d_lse=None, *, dtype=None):
    """Gradients of call(*tensors) -> (o, lse), one per tensor: in `dtype`, or of the tensors as they are if None.

    d_o, d_lse: of o and of the LSE. A row that sees no key has none, whatever stands in its d_lse.
    """
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
    with torch.enable_grad():
        o, lse = call(*leaves)
        outputs, given = [o], [d_o.to(o.dtype)]
        if d_lse is not None:
            outputs, given = [o, lse], [*given, d_lse.to(lse.dtype).masked_fill(lse == -math.inf, 0.0)]
        found = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def gradient_floors(call, tensors, d_o, scale: float | None = None) -> list[float]:
    """What float32 pays in each of dq, dk, dv (and dsinks) where dP − delta cancels, which no size of theirs tells.

    dP = dO Vᵀ and delta = dO · O are sums of products that may be much larger than their difference. call: the oracle.
    """
    q, k, v, *sinks = (x.detach().double() for x in tensors)
    if not k.numel():
        return [0.0] * len(tensors)
    group = q.shape[-2] // k.shape[-2]
    flat = [x.reshape(-1, *x.shape[-2:]).abs() for x in (d_o.double(), v.repeat_interleave(group, -2))]
    larger = torch.einsum("ihd,jhd->hij", *flat).amax().item()  # than every |dP| and |delta|
    ones = torch.ones_like(d_o, dtype=torch.float64)
    by_key = gradients(call, (q, k, v, *sinks), ones)[2].amax().item()  # the largest sum of a key's weights
    unit = 8 * torch.finfo(torch.float32).eps * larger
    unit_qk = unit * abs(q.shape[-1] ** -0.5 if scale is None else scale)
    rows = q.numel() // q.shape[-1]
    found = [unit_qk * k.abs().amax().item(), unit_qk * by_key * q.abs().amax().item(), 0.0]
    return found + [unit * rows / q.shape[-2]] * len(sinks)


def assert_gradients(got, exact, honest, floors, lse, names=("dq", "dk", "dv", "dsinks")) -> None:
    """Each gradient by the tolerance rule, or within what float32 pays for cancelling sums; lse: the exact one."""
    for name, floor, *of in zip(names, floors, got, exact, honest, strict=False):
        verdict = reference.judge(*of, lse=lse)
        assert verdict.ok or verdict.error <= floor, f"{name}: {verdict.reason}; floor {floor:.3g}"


def logit_error(lse: torch.Tensor, products: float = 0.0) -> float:
    """What float32 makes of the logits of rows with these LSEs, −inf where a row sees no key.

    products: the largest Σ |q k| · scale, of which a sum that cancels has the rounding but not the size.
    """
    finite = lse[lse.isfinite()]
    return LOGIT_ERROR * (1 + (finite.abs().max().item() if finite.numel() else 0.0)) + 2.0**-22 * products


def assert_state(got, exact, honest, in_logits: float | None = None) -> None:
    """(o, lse) within the tolerance rule of the oracle's (o, lse); in 16 bits each sequence by its own yardstick.

    A long sequence's output is small and a short one's large, which must not excuse the other. The floor is what
    rounding a weight and the output costs at the sequence's largest value. in_logits: where the LSE is a kernel's own,
    float32 whatever the inputs are, the rounding of 16-bit inputs is no excuse for it: twice this is the most.
    """
    verdict = reference.judge(got[0], exact[0], honest[0], lse=exact[1])
    assert verdict.ok, f"o: {verdict.reason}"
    verdict = reference.judge(got[1], exact[1], honest[1])
    assert verdict.ok, f"lse: {verdict.reason}"
    if in_logits is not None:
        assert verdict.error <= 2 * in_logits, f"lse: error {verdict.error:.3g} is over {2 * in_logits:.3g}"
    if honest[0].dtype not in (torch.float16, torch.bfloat16):
        return
    for n in range(len(exact[0]) if exact[0].dim() == 4 else 0):
        verdict = reference.judge(got[0][n], exact[0][n], honest[0][n], lse=exact[1][n])
        floor = torch.finfo(got[0].dtype).eps * exact[0][n].nan_to_num(nan=0.0).abs().amax().item()
        assert verdict.ok or verdict.error <= floor, f"o of sequence {n}: {verdict.reason}"


def assert_elements(
    got, exact, honest, magnitude: torch.Tensor, keys: int, operand: torch.dtype, in_logits: float
) -> None:
    """(o, lse) of one sequence: every element by its own measure, which no large value elsewhere excuses.

    o: (..., D). magnitude: Σ w |v| of each output element, to which `keys` contribute. A kernel rounds weights to
    `operand`, adds products in float32 and rounds the sum to its dtype. The root of the mean square is judged too,
    against that of `honest`: the rounding errors of many keys cancel, wrong weights do not.
    """
    (o, lse), (exact_o, exact_lse) = got, exact
    finite = exact_lse.isfinite()
    error = (lse.double() - exact_lse)[finite].abs()
    assert error.numel() == 0 or error.max() <= 2 * in_logits, f"lse: error {error.max():.3g} over {2 * in_logits:.3g}"
    finite = exact_o.isfinite()
    out = torch.finfo(o.dtype)
    in_weights = 0.55 * torch.finfo(operand).eps + in_logits + keys / 16 * 2.0**-24
    allowed = 0.501 * out.eps * exact_o.abs() + in_weights * magnitude + out.tiny * out.eps
    if operand == torch.float16:  # has fewer digits below 2^−14 of a row's largest product
        allowed = allowed + keys * 2.0**-23 * magnitude.amax(-1, keepdim=True)
    error = torch.where(finite, (o.double() - exact_o).abs(), 0.0)
    over = error > allowed
    assert not over.any(), f"o: error {error[over].max():.3g}, at {over.nonzero()[0].tolist()} of {over.sum()} places"
    if finite.all() and o.numel():
        rms = lambda x: x.square().mean().sqrt().item()  # noqa: E731
        baseline = rms((honest.double() - exact_o).nan_to_num(nan=math.inf))
        most = 2 * baseline + (0.5 * out.eps + in_logits) * rms(exact_o) + out.tiny
        assert rms(error) <= most, f"o: error {rms(error):.3g} on average is over {most:.3g}"


def assert_attention(got, q, k, v, **options) -> None:
    """(o, lse) of an `attention` call with these options."""
    assert_state(got, reference.attention(q, k, v, **options), reference.baseline(q, k, v, **options))
