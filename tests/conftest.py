"""Settings for the whole suite: the same examples on every machine, no time limit a slow one would trip over."""

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tilewise", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tilewise")
torch.manual_seed(0)
