"""Fixtures of the integrations' tests."""

from __future__ import annotations

import pytest
import torch.nn.functional as F


@pytest.fixture
def torch_as_it_was():
    """Torch's own function is in its place again when the test is over."""
    from tilewise.integrations.replace import uninstall
    from tilewise.integrations.sdpa import torch_sdpa

    yield
    uninstall()
    assert F.scaled_dot_product_attention is torch_sdpa


@pytest.fixture
def registered():
    """Tilewise is an attention implementation of transformers."""
    import tilewise.integrations.transformers as integration

    integration.register()
