"""Serving: text generation with transformers models over Tilewise's prefix-sharing cache, with continuous batching."""

from tilewise.serving.engine import Engine
from tilewise.serving.generate import generate, stream
from tilewise.serving.requests import Completion, EngineFull, Generation, Token
from tilewise.serving.sampling import Sampling
from tilewise.serving.stats import EngineStats

__all__ = ["Completion", "Engine", "EngineFull", "EngineStats", "Generation", "Sampling", "Token", "generate", "stream"]
