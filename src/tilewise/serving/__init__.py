"""Serving: text generation with transformers models over Tilewise's prefix-sharing cache, with continuous batching."""

from tilewise.serving.engine import Engine, EngineStats
from tilewise.serving.generate import generate, stream
from tilewise.serving.requests import Completion, Generation, Token
from tilewise.serving.sampling import Sampling

__all__ = ["Completion", "Engine", "EngineStats", "Generation", "Sampling", "Token", "generate", "stream"]
