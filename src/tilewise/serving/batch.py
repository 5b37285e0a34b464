"""The rows that are decoded together: their buffers, and on a card the graphs that replay their step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..kvcache import PrefixCache
from ..kvcache.slots import upload
from .rows import Rows
from .sampling import Kind, choose
from .steps import DecodeStep

if TYPE_CHECKING:
    from .hf import ServedModel


class DecodeBatch:
    """Decodes the next token of rows. away: seconds in the model's forward pass and waiting for its tokens."""

    def __init__(self, model: ServedModel, prefix: PrefixCache, *, backend: str) -> None:
        self.step = DecodeStep(prefix, num_heads=model.shape.heads, backend=backend)
        self.away = 0.0
        self._model, self._device = model, prefix.cache.device

    def renew(self, rows: Rows) -> None:
        """Reserve a place for the latest token of each row. Raises OutOfPages with nothing changed."""
        self.step.renew(rows.seqs, rows.latest[: len(rows)].tolist())

    def run(self, rows: Rows) -> list[int]:
        """The next tokens; those before them, for which renew() has made room, enter the cache by this."""
        count, kind = len(rows), rows.kind
        values = np.empty((1 if kind == Kind.GREEDY else 6, count), np.int64)
        values[0] = rows.latest[:count]
        if kind != Kind.GREEDY:
            values[1] = rows.uniforms().view(np.int64)
            values[2:] = rows.params[:, :count].view(np.int64)
        given = upload(values, self._device)
        started = time.perf_counter()
        logits = self._model.forward(given[0], self.step.slots.positions, self.step)
        numbers = given[1:].view(torch.float64)
        chosen = choose(kind, logits, None if kind == Kind.GREEDY else numbers[0], numbers[1:]).tolist()
        self.away += time.perf_counter() - started
        return chosen
