"""What the suites of flash_mla_sparse_fwd share: rows with poison between them, and each query token by the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from oracle import assert_state, logit_error, randn

from tilewise import reference
from tilewise.compat import flash_mla

BF16 = torch.bfloat16
SMALL, DEEPSEEK = (192, 128), (576, 512)  # (d_qk, d_v)
NONE = torch.tensor([-1, -7, -(2**31), 0, 1, 2**31 - 1])  # the fourth and fifth, from s_kv on, name none either


@dataclass
class Sparse:
    """The tensors of a call. Rows that nobody names are NaN, and so is what lies between rows and heads."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    d_v: int
    counts: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    scale: float | None = None

    @classmethod
    def of(cls, s_q: int, s_kv: int, topk: int, heads: int = 8, sizes=SMALL, dtype=BF16, seed=0, **more: Any) -> Sparse:
        rng = torch.Generator().manual_seed(seed)
        d_qk, d_v = sizes
        q = torch.full((s_q, heads + 1, d_qk + 8), math.nan, dtype=dtype)[:, 1:, 8:]
        q.copy_(randn(s_q, heads, d_qk, dtype=dtype, seed=seed))
        named = torch.randperm(s_kv, generator=rng)[: -(-s_kv // 2)]
        kv = torch.full((s_kv, 2, d_qk + 8), math.nan, dtype=dtype)[:, :1, :d_qk]
        kv[named] = randn(len(named), 1, d_qk, dtype=dtype, seed=seed + 1)
        indices = named[torch.randint(max(1, len(named)), (s_q, 1, topk), generator=rng)] if s_kv else NONE[:1]
        none = NONE[torch.randint(len(NONE), (s_q, 1, topk), generator=rng)]
        none = torch.where((none == 0) | (none == 1), none + s_kv, none)
        drawn = torch.rand(s_q, 1, topk, generator=rng) < 0.2
        return cls(q, kv, torch.where(drawn, none, indices).int(), d_v, **more)

    def run(self, device: str = "cpu") -> list[torch.Tensor]:
        """What the call gives, on the CPU."""
        scale = self.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        given = [self._to(x, device) for x in (self.q, self.kv, self.indices)]
        more = [x if x is None else x.to(device) for x in (self.sink, self.counts)]
        return [x.cpu() for x in flash_mla.flash_mla_sparse_fwd(*given, scale, self.d_v, *more)]

    @staticmethod
    def _to(x: torch.Tensor, device: str) -> torch.Tensor:
        """With its strides, and with what lies between."""
        if device == "cpu":
            return x
        there = torch.empty(0, dtype=x.dtype, device=device)
        return there.set_(x.untyped_storage().cuda(), x.storage_offset(), x.shape, x.stride())

    def rows_of(self, token: int) -> torch.Tensor:
        """(n, d_qk): the rows that a query token sees, as often as it names them."""
        its = self.indices[token, 0]
        if self.counts is not None:
            its = its[: max(0, int(self.counts[token]))]
        return self.kv[its[(its >= 0) & (its < len(self.kv))].long(), 0]

    def check(self, device: str = "cpu", *, kernel: bool = False, step: int = 1) -> list[torch.Tensor]:
        """Every step-th query token by the oracle. kernel: its LSE is float32 whatever the inputs are."""
        found = out, largest, lse = self.run(device)
        heads, d_qk = self.q.shape[1:]
        scale = d_qk**-0.5 if self.scale is None else self.scale
        assert out.shape == (len(self.q), heads, self.d_v)
        assert largest.shape == lse.shape == (len(self.q), heads)
        assert not out.isnan().any()
        assert not (lse == -math.inf).any()
        for n in range(0, len(self.q), step):
            q, k = self.q[n][None, None], self.rows_of(n)[None, :, None]
            states = []
            for dtype in (torch.float64, self.q.dtype):
                o, its = reference.attention(q, k, k[..., : self.d_v], scale=scale, dtype=dtype)
                if self.sink is not None:
                    beside = torch.where(its == -math.inf, 0.0, torch.sigmoid(its - self.sink[:, None]))
                    o = o * beside.transpose(1, 2)[..., None].to(o.dtype)
                states.append((o, its))
            products = q[0, 0].double().abs() @ k[0, :, 0].double().abs().T * abs(scale)
            error = logit_error(states[0][1], products.amax().item() if products.numel() else 0.0)
            mine = lse[n].masked_fill(lse[n] == math.inf, -math.inf)
            try:
                assert_state((out[n][None, None], mine[None, :, None]), *states, error if kernel else None)
                scores = q[0, 0].double() @ k[0, :, 0].double().T * scale
                exact = scores.amax(-1) if scores.shape[1] else torch.full((heads,), -math.inf)
                torch.testing.assert_close(largest[n].double(), exact.double(), rtol=0, atol=error)
            except AssertionError as wrong:
                raise AssertionError(f"query token {n} of {len(self.q)}: {wrong}") from None
        return found
