"""The kernel that joins states in place, in the emulator: what merge_states makes of the same states."""

from __future__ import annotations

import pytest
import torch
from oracle import randn

from tilewise import merge_states, reference
from tilewise.gpu.merge_rows import merge_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(("dtype", "head_dim", "tolerance"), [(BF16, 128, 2e-2), (FP16, 72, 2e-3), (FP32, 45, 1e-6)])
def test_as_merge_states(dtype, head_dim, tolerance):
    """Rows in any order with any number of states, some of them empty; other rows stay as they are."""
    wide, lse = randn(7, 3, head_dim + 3, dtype=dtype), randn(3, 7, seed=1, size=3.0)
    o = wide[..., :head_dim]
    states, logs = randn(9, 3, head_dim, dtype=dtype, seed=2), randn(3, 9, seed=3, size=3.0)
    logs[:, 4], states[4] = -torch.inf, float("nan")  # empty: its o does not matter
    lse[:, 5], o[5] = -torch.inf, float("nan")
    logs[0, 8], states[8, 0] = 40.0, 1.0  # outweighs all others
    rows = torch.tensor([6, 0, 2, 5, 3], dtype=torch.int32)
    table = torch.tensor([[0, -1, 7], [4, 8, 1], [-1, 3, 2], [5, -1, 4], [-1, -1, -1]], dtype=torch.int32)
    expected_o, expected_lse = o.clone(), lse.clone()
    for row, joined in zip(rows.tolist(), table.tolist(), strict=True):
        parts = [(o[None, row], lse[:, row, None])]
        parts += [(states[None, n], logs[:, n, None]) for n in joined if n >= 0]
        merged = merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))
        expected_o[row], expected_lse[:, row] = merged[0][0], merged[1][:, 0]
    beyond = wide[..., head_dim:].clone()
    merge_rows(o, lse, states, logs, rows, table)
    assert torch.allclose(o.float(), expected_o.float(), atol=tolerance, rtol=tolerance)
    assert torch.allclose(lse, expected_lse, atol=1e-5)
    assert torch.equal(wide[..., head_dim:], beyond)
    assert torch.equal(o[[1, 4]], expected_o[[1, 4]])
    assert torch.equal(o[3].float(), expected_o[3].float())  # joined with nothing


def test_rows_that_see_nothing_and_rows_that_are_broken():
    o, lse = randn(3, 1, 8), torch.full((1, 3), -torch.inf)
    states, logs = randn(2, 1, 8), torch.tensor([[-torch.inf, float("nan")]])
    merge_rows(
        o, lse, states, logs, torch.arange(3, dtype=torch.int32), torch.tensor([[0], [-1], [1]], dtype=torch.int32)
    )
    assert (o[:2] == 0).all()
    assert (lse[:, :2] == -torch.inf).all()
    assert o[2].isnan().all()
    assert lse[0, 2].isnan()
    exact = reference.merge_states(states[:1, None], logs[None, :, :1])
    assert exact[1].item() == -torch.inf
    merge_rows(o, lse, states, logs, torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.int32))
