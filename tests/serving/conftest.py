"""Fixtures of the tests of serving: one tiny model and its own answers, made once."""

from __future__ import annotations

import pytest
from tiny_models import NEW, PROMPTS, expected, tiny_model


@pytest.fixture(scope="session")
def llama():
    return tiny_model()


@pytest.fixture(scope="session")
def answers(llama):
    """What model.generate makes of PROMPTS."""
    return [expected(llama, prompt, NEW) for prompt in PROMPTS]
