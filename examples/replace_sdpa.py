"""A transformer block that calls torch's attention function, by Tilewise instead: one line swaps it.

    python examples/replace_sdpa.py

`explain` says who serves which call, and why.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import tilewise

DIM, HEADS, KV_HEADS = 256, 8, 2


class Block(nn.Module):
    """Attention with grouped heads, and a small MLP."""

    def __init__(self) -> None:
        super().__init__()
        width = DIM // HEADS
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.query, self.key, self.value = (nn.Linear(DIM, n * width) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.norms[0](x)
        heads = [(self.query, HEADS), (self.key, KV_HEADS), (self.value, KV_HEADS)]
        q, k, v = (layer(normed).unflatten(-1, (n, -1)).transpose(1, 2) for layer, n in heads)
        o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=300, help="tokens of both sequences (%(default)s)")
    seqlen = parser.parse_args().seqlen
    if seqlen < 2:
        parser.error("--seqlen must be at least 2")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    block, x = Block().to(device, dtype), torch.randn(2, seqlen, DIM, device=device, dtype=dtype)
    lengths = torch.tensor([[seqlen], [3 * seqlen // 5]], device=device)
    padding = (torch.arange(seqlen, device=device) < lengths)[:, None, None]

    q = torch.randn(2, HEADS, seqlen, DIM // HEADS, device=device, dtype=dtype)
    k = q[:, :KV_HEADS]
    bias = torch.randn(seqlen, seqlen, device=device, dtype=dtype)
    print("causal:   ", tilewise.explain(q, k, k, is_causal=True, enable_gqa=True))
    print("padding:  ", tilewise.explain(q, k, k, padding, enable_gqa=True))
    print("bias:     ", tilewise.explain(q, k, k, bias, enable_gqa=True))
    print("training: ", tilewise.explain(q.requires_grad_(), k, k, is_causal=True, enable_gqa=True))

    for name, mask in (("causal", None), ("padding", padding)):
        with torch.no_grad():
            expected = block(x, mask)
            with tilewise.replace_sdpa():  # the one line; tilewise.install() does it for good
                got = block(x, mask)
        difference = (got - expected).abs().max().item()
        print(f"{name}: largest difference {difference:.2g}, values up to {expected.abs().max().item():.2g}")
        assert difference <= (1e-4 if dtype == torch.float32 else 0.1)


if __name__ == "__main__":
    main()
