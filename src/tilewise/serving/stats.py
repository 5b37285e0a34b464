"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineStats:
    """What an engine did since it was made. The seconds of a step end when its tokens are on the host.

    A step that prefills and decodes counts as a prefill step and as a mixed one.
    """

    prefill_tokens: int = 0  # computed
    reused_tokens: int = 0  # of prompts, found in the cache instead
    prefill_steps: int = 0
    mixed_steps: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0  # of all steps: what is neither the model's forward pass nor waiting for its tokens
    preemptions: int = 0
    timeouts: int = 0
    graph_captures: int = 0
    peak_pages: int = 0
    page_bytes: int = 0

    @property
    def steps(self) -> int:
        """All of them."""
        return self.prefill_steps + self.decode_steps

    @property
    def host_seconds_per_step(self) -> float:
        """On average: choosing who has his turn, reserving pages, planning, uploading, taking tokens."""
        return self.host_seconds / max(self.steps, 1)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of keys and values that were in use, cached prefixes included."""
        return self.peak_pages * self.page_bytes
